//! A head that drafts (MTP, `nextn` in files): one block behind the layers of a model, with a cache of its own, that reads each token with
//! the state that the model had for the token before, and guesses the one behind. Nothing that it computes can change what the model generates.
//!
//! Every step of the model also writes the head's keys and values for its tokens ([`DraftHead::catch_up`]), which takes two products and no
//! more. Drafting runs the whole block for one token at a time ([`DraftHead::build`]), each with the state that the head itself handed on.

use kiln_kernels::tensor::Tensor;

use super::decoder::{Entering, Layer, Spec};
use super::latent::Sees;
use super::output::{Embedding, Output};
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::model::parts::DraftBlock;
use crate::plan::{Builder, Linear, Norm};

/// Which state of a token a head takes, and hands on to its next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handed {
    /// What the output matrix is multiplied with: behind the last norm.
    Normed,
    /// The stream before that norm.
    Stream,
}

/// The head of a file.
pub struct DraftHead {
    spec: Spec,
    handed: Handed,
    /// What stands before the names of its steps.
    name: String,
    /// `[hidden, vocab]`.
    embedding: Tensor,
    embedding_norm: Norm,
    state_norm: Norm,
    /// `[2 * hidden, hidden]`: of the embedding and the state behind it.
    fuse: Linear,
    layer: Layer,
    output: Output,
    /// `[hidden, rows]`: states of the last tokens of each sequence.
    states: Tensor,
}

impl DraftHead {
    /// Reads the head of a file, where it has one and it is asked for.
    pub fn load(
        l: &mut Loader<'_>,
        spec: &Spec,
        embedding: &Embedding,
        output: &Output,
    ) -> Result<Option<DraftHead>, Error> {
        let (Some(handed), Some(draft), true) = (spec.drafts, spec.sizes.draft, l.wants_head) else { return Ok(None) };
        l.layer(draft.block);
        if draft.blocks > 1 || !l.has("nextn.eh_proj.weight") {
            return Ok(None);
        }
        l.reads_layer(draft.block);
        let head = DraftHead::read(l, spec, draft, handed, (embedding, output));
        head.map(Some).map_err(|error| Error::Head { why: error.to_string() })
    }

    fn read(
        l: &mut Loader<'_>,
        spec: &Spec,
        draft: DraftBlock,
        handed: Handed,
        (embedding, output): (&Embedding, &Output),
    ) -> Result<DraftHead, Error> {
        let spec = spec.of_draft_block(l, draft);
        let (hidden, vocab, block) = (spec.sizes.hidden, spec.sizes.vocab, draft.block);
        let layer = Layer::load(l, &spec, block, block)?;
        l.layer(block);
        let mut norm = |name: &str| spec.norm.load(l, name, hidden, spec.eps);
        let (embedding_norm, state_norm) = (norm("nextn.enorm")?, norm("nextn.hnorm")?);
        let fuse = l.linear("nextn.eh_proj", &[2 * hidden, hidden])?;
        let own_embedding = l.tensor_opt("nextn.embed_tokens.weight", &[hidden, vocab])?;
        let matrix = l.linear_opt("nextn.shared_head_head", &[hidden, vocab])?;
        let last = last_norm(l, &spec)?;
        Ok(DraftHead {
            handed,
            name: format!("{block}.head"),
            embedding: own_embedding.unwrap_or(embedding.weight),
            embedding_norm,
            state_norm,
            fuse,
            layer,
            output: output.clone().with(last, matrix),
            states: l.carried(&format!("{block}.states"), hidden),
            spec,
        })
    }

    /// Adds the steps behind a step of the model: the head's keys and values for every token of the batch, and what is kept of the states
    /// of the last ones. The states are those before and behind the last norm.
    pub fn catch_up(&self, b: &mut Builder, batch: &Batch, [stream, normed]: [Tensor; 2]) {
        let Some(carried) = batch.ports.carried else { return };
        let states = match self.handed {
            Handed::Normed => normed,
            Handed::Stream => stream,
        };
        b.at(format!("{}.before", self.name));
        let kept = b.rows("kept", self.states, carried.before);
        let inside = b.rows("inside", states, carried.inside);
        let before = b.add("", kept, inside);
        b.store("keep", states, carried.keep, self.states);
        let x = self.entered(b, batch, before);
        self.layer.keep(b, batch, &self.name, x);
    }

    /// Adds the steps that guess: the logits of the token behind each one. Its state comes from where it was kept, and is kept likewise.
    pub fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let carried = batch.ports.carried.expect("a model with a head should have its ports");
        b.at(format!("{}.before", self.name));
        let before = b.rows("", self.states, carried.before);
        let x = self.entered(b, batch, before);
        let x = self.layer.build(b, batch, (&self.spec, &self.name), Entering { x, first: x, own: None });
        b.at(format!("{}.output", self.name));
        let normed = self.output.normed(b, x);
        let state = match self.handed {
            Handed::Normed => normed,
            Handed::Stream => x,
        };
        b.store("keep", state, carried.keep, self.states);
        self.output.build_normed(b, batch, normed)
    }

    /// What enters the block.
    fn entered(&self, b: &mut Builder, batch: &Batch, states: Tensor) -> Tensor {
        b.at(format!("{}.enter", self.name));
        let token = b.rows("embedding", self.embedding, batch.ports.tokens);
        let token = b.norm("embedding.norm", token, &self.embedding_norm);
        let state = b.norm("state.norm", states, &self.state_norm);
        let both = b.concat("both", token, state);
        b.linear("fuse", both, &self.fuse)
    }
}

/// The norm before the output matrix: one of the head's own, or that of the model.
fn last_norm(l: &mut Loader<'_>, spec: &Spec) -> Result<Norm, Error> {
    let own = ["nextn.shared_head_norm", "layer_output_norm"];
    let own = own.into_iter().find(|name| l.has(&format!("{name}.weight")));
    if own.is_none() {
        l.whole();
    }
    let name = own.unwrap_or(spec.output_norm);
    spec.norm.load(l, name, spec.sizes.hidden, spec.eps)
}

impl Spec {
    /// The same for the block of a draft head. Where the architecture has nothing else to say behind its layers, it is like the last one, but
    /// chooses no keys.
    fn of_draft_block(&self, l: &Loader<'_>, draft: DraftBlock) -> Spec {
        let DraftBlock { block, heads, kv_heads, feed_forward, .. } = draft;
        let mut spec = self.clone();
        spec.sizes.feed_forward.resize(block, 0);
        spec.sizes.feed_forward.push(feed_forward);
        if let Some(mut attention) = spec.attention.last().cloned().filter(|_| spec.attention.len() <= block) {
            (attention.attended.heads, attention.attended.kv_heads) = (heads, kv_heads);
            spec.attention.push(attention);
        }
        if let Some(mut latent) = spec.latent.last().cloned().filter(|_| spec.latent.len() <= block) {
            latent.sees = Sees::All;
            spec.latent.push(latent);
        }
        let experts = spec.moe_by_layer.iter().rev().flatten().next().copied().or(spec.moe);
        spec.moe_by_layer.resize(block, None);
        spec.moe_by_layer.push(experts.filter(|_| l.has("ffn_gate_inp.weight")));
        spec
    }
}
