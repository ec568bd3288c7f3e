//! The tensors and keys of Gemma 4, whose layers differ in more than their number.

use kiln_gguf::Metadata;

use super::presets::Preset;
use super::tensors::Builder;
use super::values::Fill;

/// What only Gemma 4 has. The heads of a preset are those of layers that see everything.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gemma4 {
    /// Tokens of the window.
    pub window: usize,
    /// Period of the layers that see everything: the last of each.
    pub interval: usize,
    /// Key-value heads of layers with a window.
    pub kv_heads: usize,
    /// Width of their heads.
    pub head_dim: usize,
    /// Width of the vectors that each layer gets for each token; 0 for none.
    pub per_layer: usize,
    /// Layers at the end that read the caches of earlier ones.
    pub shared: usize,
    /// Factor of the width of their feed-forward part.
    pub wider: usize,
    /// Whether layers that see everything take their keys for values.
    pub keys_as_values: bool,
}

impl Gemma4 {
    fn has_window(&self, layer: usize) -> bool {
        !(layer + 1).is_multiple_of(self.interval)
    }

    fn shares(&self, p: &Preset, layer: usize) -> bool {
        layer >= p.layers - self.shared
    }

    fn width(&self, p: &Preset, layer: usize) -> usize {
        if self.shares(p, layer) { p.ff * self.wider } else { p.ff }
    }

    /// Key-value heads and the width of a head.
    fn heads(&self, p: &Preset, layer: usize) -> [usize; 2] {
        if self.has_window(layer) { [self.kv_heads, self.head_dim] } else { [p.kv_heads, p.head_dim] }
    }

    /// What stands before the layers.
    pub(super) fn ends(&self, b: &mut Builder, p: &Preset, vocab: usize) {
        // Three quarters of the pairs of layers that see everything are not turned.
        let pairs = p.head_dim / 2;
        let factor = |pair: usize| if pair < pairs / 4 { 1.0 } else { 1e30 };
        b.add("rope_freqs.weight", &[pairs], Fill::Listed((0..pairs).map(factor).collect()));
        if self.per_layer > 0 {
            let all = self.per_layer * p.layers;
            b.add(
                "per_layer_token_embd.weight",
                &[all, vocab],
                Fill::Normal(0.0, 1.0 / (self.per_layer as f32).sqrt()),
            );
            b.matrix("per_layer_model_proj", &[p.hidden, all]);
            b.norm("per_layer_proj_norm", self.per_layer);
        }
    }

    /// A layer.
    pub(super) fn layer(&self, b: &mut Builder, p: &Preset, layer: usize) {
        let (hidden, [kv_heads, width], ff) = (p.hidden, self.heads(p, layer), self.width(p, layer));
        for name in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            b.norm(name, hidden);
        }
        b.matrix("attn_q", &[hidden, p.heads * width]);
        // Scores have no factor, so that heads of queries are short.
        b.add("attn_q_norm.weight", &[width], Fill::Normal(1.0 / (width as f32).sqrt(), 0.005));
        b.matrix("attn_output", &[p.heads * width, hidden]);
        if !self.shares(p, layer) {
            b.matrix("attn_k", &[hidden, kv_heads * width]);
            b.norm("attn_k_norm", width);
            if self.has_window(layer) || !self.keys_as_values {
                b.matrix("attn_v", &[hidden, kv_heads * width]);
            }
        }
        for (name, dims) in [("ffn_gate", [hidden, ff]), ("ffn_up", [hidden, ff]), ("ffn_down", [ff, hidden])] {
            b.matrix(name, &dims);
        }
        b.add("layer_output_scale.weight", &[1], Fill::Even(0.8, 1.0));
        if self.per_layer > 0 {
            b.matrix("inp_gate", &[hidden, self.per_layer]);
            b.matrix("proj", &[self.per_layer, hidden]);
            b.norm("post_norm", hidden);
        }
        if let Some(e) = p.experts {
            // The router divides by the root of the width.
            b.scaled("ffn_gate_inp", &[hidden, e.count], (hidden as f32).sqrt());
            b.add("ffn_gate_inp.scale", &[hidden], Fill::Normal(1.0, 0.05));
            for name in ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] {
                b.norm(name, hidden);
            }
            b.matrix("ffn_gate_up_exps", &[hidden, 2 * e.ff, e.count]);
            b.matrix("ffn_down_exps", &[e.ff, hidden, e.count]);
            b.add("ffn_down_exps.scale", &[e.count], Fill::Normal(1.0, 0.05));
        }
    }

    /// The keys that other families do not have, and those that differ by layer.
    pub(super) fn describe(&self, p: &Preset, m: &mut Metadata) {
        let number = |n: usize| u32::try_from(n).expect("the numbers of presets should be small");
        let layers = || 0..p.layers;
        let by_layer = |f: &dyn Fn(usize) -> usize| layers().map(|i| number(f(i))).collect::<Vec<u32>>();
        m.set("gemma4.feed_forward_length", by_layer(&|i| self.width(p, i)));
        m.set("gemma4.attention.head_count_kv", by_layer(&|i| self.heads(p, i)[0]));
        m.set("gemma4.attention.sliding_window_pattern", layers().map(|i| self.has_window(i)).collect::<Vec<bool>>());
        for (key, n) in [
            ("attention.sliding_window", self.window),
            ("attention.key_length_swa", self.head_dim),
            ("attention.value_length_swa", self.head_dim),
            ("rope.dimension_count_swa", self.head_dim),
            ("attention.shared_kv_layers", self.shared),
            ("embedding_length_per_layer_input", self.per_layer),
        ] {
            m.set(format!("gemma4.{key}"), number(n));
        }
        m.set("gemma4.rope.freq_base_swa", 10_000f32);
        m.set("gemma4.final_logit_softcapping", 30f32);
    }
}
