//! Gemma 4: layers with a window have heads of another width than those that see everything, and those may take their keys for values. The small
//! models have vectors for each layer, and their last layers read the caches of earlier ones; the large ones may have experts beside the
//! feed-forward layer.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::{RopeParams, RopeStyle};

use super::Architecture;
use crate::Error;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Place, Spec};
use crate::blocks::mlp::{Activation, Scaled};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::per_layer::PerLayerSpec;
use crate::model::Loader;
use crate::model::names::ROPE_FACTORS;
use crate::model::parts::{Factors, Rope, expert_width, window_base, windows};

/// Most that a cap may be.
const MOST_CAP: f32 = 1e6;

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    l.whole();
    if !l.has(ROPE_FACTORS) {
        return Err(Error::MissingTensor { name: ROPE_FACTORS.to_owned() });
    }
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Usual)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    (spec.layout, spec.activation, spec.scaled) = (Layout::Sandwich, Activation::Gated(Gate::Geglu), Scaled::All);
    let (hidden, layers, eps) = (spec.sizes.hidden, spec.sizes.layers, spec.eps);
    spec.embedding_scale = (hidden as f32).sqrt();
    spec.logit_softcap = keys.float("final_logit_softcapping", 30.0, [0.0, MOST_CAP])?;
    spec.output_scale = true;
    // Tokens of the vocabulary that stand for images and sound alone.
    spec.hidden_tokens = keys.of("tokenizer.ggml").tokens("suppress_tokens", spec.sizes.vocab)?;
    heads(l, &mut spec)?;
    share_caches(l, &mut spec)?;
    let width = keys.count_opt("embedding_length_per_layer_input", 1 << 16)?;
    spec.per_layer = width.map(|width| PerLayerSpec { width, layers, hidden, eps, table: true });
    if let Some(counts) = MoeSpec::counts(l)? {
        let width = expert_width(l, &spec.sizes, counts)?;
        let usual = MoeSpec::usual(hidden, width, counts);
        spec.moe = Some(MoeSpec { activation: Gate::Geglu, scaled: true, router_norm: Some(eps), ..usual });
        (spec.experts, spec.maybe_dense) = (Place::BesideNormed, true);
    }
    Decoder::load(l, spec)
}

/// Layers with a window have heads of a width of their own, turned as theirs; scores have no factor.
fn heads(l: &mut Loader<'_>, spec: &mut Spec) -> Result<(), Error> {
    let keys = l.keys;
    let pattern = "attention.sliding_window_pattern";
    keys.require(keys.is_array(pattern), pattern, 0, "an array with a flag for each layer")?;
    let window = keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, spec.sizes.layers, window, 1)?;
    let width = keys.count("attention.key_length_swa", 4096)?;
    for (end, keys_of, values_of) in [
        ("", spec.sizes.head_dim, spec.sizes.value_dim),
        ("_swa", width, keys.count("attention.value_length_swa", 4096)?),
    ] {
        let want = format!("{keys_of}, the width of a head of keys");
        keys.require(keys_of == values_of, &format!("attention.value_length{end}"), values_of, &want)?;
    }
    let turned = keys.count_opt("rope.dimension_count", spec.sizes.head_dim)?.unwrap_or(spec.sizes.head_dim);
    let turned = keys.count_opt("rope.dimension_count_swa", 4096)?.unwrap_or(turned);
    let fits = turned <= width && turned.is_multiple_of(2);
    keys.require(fits, "rope.dimension_count_swa", turned, &format!("even, and at most {width}, the width of a head"))?;
    let near = Rope::plain(RopeParams::plain(RopeStyle::Neox, turned, window_base(l, 10000.0)?));
    spec.each_attention(|i, attention| {
        (attention.scale, attention.value_norm, attention.keys_as_values) = (1.0, true, true);
        attention.window = windows[i];
        if windows[i].is_some() {
            (attention.head_dim, attention.value_dim) = (width, width);
            attention.rope = Some(near.clone());
        }
    });
    Ok(())
}

/// The last layers have no keys of their own: those with a window read the caches of the last layer with one that has, the others those of the last
/// layer that sees everything.
fn share_caches(l: &Loader<'_>, spec: &mut Spec) -> Result<(), Error> {
    let (key, layers) = ("attention.shared_kv_layers", spec.sizes.layers);
    let Some(shared) = l.keys.count_opt(key, layers)? else { return Ok(()) };
    let own = layers - shared;
    let fits = own >= 2 && spec.attention[own - 2].window.is_some() && spec.attention[own - 1].window.is_none();
    l.keys.require(fits, key, shared, "layers behind one with a window and one without")?;
    spec.each_attention(|i, attention| {
        let owner = if attention.window.is_some() { own - 2 } else { own - 1 };
        attention.caches_of = (i >= own).then_some(owner);
    });
    let heads = |i: usize| spec.sizes.kv_heads[i];
    for i in own..layers {
        let owner = spec.attention[i].caches_of.unwrap_or(i);
        let want = format!("{}, as in layer {owner}, whose keys layer {i} reads", heads(owner));
        l.keys.require(heads(i) == heads(owner), "attention.head_count_kv", heads(i), &want)?;
    }
    Ok(())
}
