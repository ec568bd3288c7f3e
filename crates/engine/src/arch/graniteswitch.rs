//! Granite with adapters that tokens of the text switch: every matrix has small changes, and each token has one of them.

use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;

use super::{Architecture, Batch, granite};
use crate::Error;
use crate::blocks::attend::{Attended, Extras, Turned, flat, turned};
use crate::blocks::attention::AttentionSpec;
use crate::blocks::decoder::Spec;
use crate::blocks::output::{Embedding, Output};
use crate::blocks::switched::{Switch, Switched};
use crate::model::{Cached, Loader};
use crate::plan::{Builder, Norm};

struct GraniteSwitch {
    spec: Spec,
    switch: Switch,
    embedding: Embedding,
    layers: Vec<Layer>,
    output: Output,
}

struct Layer {
    attention_norm: Norm,
    /// Queries, keys and values.
    parts: [Switched; 3],
    attention_output: Switched,
    freqs: Option<Tensor>,
    caches: [Tensor; 2],
    ffn_norm: Norm,
    gate: Switched,
    up: Switched,
    down: Switched,
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let spec = granite::spec(l)?;
    let (count, rank) = (keys.count("adapters.count", 4096)?, keys.count("adapters.lora_rank", 4096)?);
    let gain = keys.float("adapters.router_gain", 15.0, [0.0, 40.0])?;
    let [activate, substitute] = ["activate", "substitute"].map(|end| {
        let key = format!("adapters.token_ids_{end}");
        let tokens = keys.tokens(&key, spec.sizes.vocab)?;
        keys.require(tokens.len() == count, &key, tokens.len(), &format!("{count} tokens, one for each adapter"))?;
        Ok::<_, Error>(tokens)
    });
    let switch = Switch::load(l, [&activate?, &substitute?], gain, spec.sizes.vocab)?;
    let embedding = spec.embedding(l)?;
    let layers =
        (0..spec.sizes.layers).map(|i| Layer::load(l, &spec, [rank, count + 1], i)).collect::<Result<_, _>>()?;
    let mut output = Output::load(l, (spec.norm, spec.eps), spec.head, &embedding)?;
    output.scale = spec.logit_scale;
    Ok(Box::new(GraniteSwitch { spec, switch, embedding, layers, output }))
}

impl Layer {
    fn load(l: &mut Loader<'_>, spec: &Spec, sizes: [usize; 2], i: usize) -> Result<Layer, Error> {
        l.layer(i);
        let AttentionSpec { attended: Attended { heads, kv_heads, head_dim, value_dim, .. }, .. } = spec.attention[i];
        let (hidden, width) = (spec.sizes.hidden, spec.sizes.feed_forward[i]);
        l.keys.require(heads > 0 && kv_heads > 0, "attention.head_count", 0, "1 to 4096")?;
        l.keys.require(width > 0, "feed_forward_length", width, "1 or more")?;
        let widths = [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim];
        let all = l.linear("attn_qkv", &[hidden, widths.iter().sum()])?;
        let [q, k, v] = widths;
        let mut part = |name: &str, first: usize, width: usize| Switched::load(l, name, all.rows(first, width), sizes);
        let parts = [part("attn_q", 0, q)?, part("attn_k", q, k)?, part("attn_v", q + k, v)?];
        let switched = |l: &mut Loader<'_>, name: &str, shape: [usize; 2]| {
            let linear = l.linear(name, &shape)?;
            Switched::load(l, name, linear, sizes)
        };
        Ok(Layer {
            attention_norm: spec.norm.load(l, "attn_norm", hidden, spec.eps)?,
            parts,
            attention_output: switched(l, "attn_output", [heads * value_dim, hidden])?,
            freqs: match &spec.attention[i].rope {
                Some(rope) => Some(l.freqs(&rope.params, rope.factors.as_deref())?),
                None => None,
            },
            caches: [
                l.heads_cache(&format!("{i}.k_cache"), Cached::Keys, [head_dim, kv_heads], None)?,
                l.heads_cache(&format!("{i}.v_cache"), Cached::Values, [value_dim, kv_heads], None)?,
            ],
            ffn_norm: spec.norm.load(l, "ffn_norm", hidden, spec.eps)?,
            gate: switched(l, "ffn_gate", [hidden, width])?,
            up: switched(l, "ffn_up", [hidden, width])?,
            down: switched(l, "ffn_down", [width, hidden])?,
        })
    }

    fn build(&self, b: &mut Builder, batch: &Batch, (spec, i): (&Spec, usize), [x, change]: [Tensor; 2]) -> Tensor {
        let AttentionSpec { attended, rope, .. } = &spec.attention[i];
        let Attended { heads, kv_heads, head_dim, .. } = *attended;
        b.at(format!("{i}.attention"));
        let read = b.norm("norm", x, &self.attention_norm);
        let [q, k, v] = [("q", 0), ("k", 1), ("v", 2)].map(|(name, at)| self.parts[at].build(b, name, read, change));
        let rows = x.shape[1];
        let [q, k] = [("q_rope", q, heads), ("k_rope", k, kv_heads)].map(|(name, t, heads)| {
            let x = t.reshape([head_dim, heads, rows, 1]);
            let (Some(rope), Some(freqs)) = (rope, self.freqs) else { return x };
            let y = b.like(name, x);
            turned(b, batch, name, Turned { x, y, freqs, offset: 0 }, rope);
            y
        });
        let ids = batch.places(None).rows;
        b.store("k_write", flat(k), ids, self.caches[0]);
        b.store("v_write", v, ids, self.caches[1]);
        let y = attended.build(b, batch, q, self.caches, Extras::default());
        let y = self.attention_output.build(b, "output", y, change);
        let y = b.scale("scaled", y, spec.residual_scale);
        let x = b.add("residual", x, y);
        b.at(format!("{i}.feed_forward"));
        let read = b.norm("norm", x, &self.ffn_norm);
        let gate = self.gate.build(b, "gate", read, change);
        let up = self.up.build(b, "up", read, change);
        let gated = b.gated("gated", Gate::Swiglu, gate, up);
        let y = self.down.build(b, "down", gated, change);
        let y = b.scale("scaled", y, spec.residual_scale);
        b.add("residual", x, y)
    }
}

impl Architecture for GraniteSwitch {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let mut of = *batch;
        of.ports.tokens = self.switch.tokens(b, batch);
        let change = self.switch.build(b, batch);
        let mut x = self.embedding.build(b, &of);
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.build(b, batch, (&self.spec, i), [x, change]);
        }
        self.output.build(b, batch, x)
    }
}
