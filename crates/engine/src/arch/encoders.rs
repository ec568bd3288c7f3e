//! Encoders that norm the stream before each half of a layer, as decoders do: every token sees the whole text, and there is no
//! vocabulary to write in.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, Period, window_base, windows_opt};

type Loaded = Result<Box<dyn Architecture>, Error>;

fn plain(l: &mut Loader<'_>, norm: NormKind, style: RopeStyle) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, norm, style, Factors::Unused)?;
    spec.head = Head::Nothing;
    Ok(spec)
}

/// So many positions, half of them on each side of a token: its own and those on one side.
pub(super) fn half(window: usize) -> usize {
    window / 2 + 1
}

/// ModernBERT: most layers see a window around each token, and turn heads by a base of their own.
pub(super) fn modern(l: &mut Loader<'_>) -> Loaded {
    let spec = plain(l, NormKind::LayerWeight, RopeStyle::Neox)?;
    let windows = windows_opt(l, spec.sizes.layers, Period::First(3))?;
    let windows: Vec<Option<usize>> = windows.into_iter().map(|window| window.map(half)).collect();
    let base = window_base(l, 10000.0)?;
    let mut spec = spec.with_windows(&windows, |rope| rope.with_base(base));
    (spec.embedding_norm, spec.maybe_attention_norm) = (true, true);
    spec.activation = Activation::GatedFused(match l.keys.text("hidden_activation")? {
        Some("silu" | "swish" | "swiglu") => Gate::Swiglu,
        Some("reglu") => Gate::Reglu,
        _ => Gate::Geglu,
    });
    Decoder::load(l, spec)
}

/// NeoBERT: gate and up are one matrix.
pub(super) fn neo(l: &mut Loader<'_>) -> Loaded {
    let mut spec = plain(l, NormKind::Rms, RopeStyle::Normal)?;
    spec.activation = Activation::GatedFused(Gate::Swiglu);
    spec.output_norm = "enc.output_norm";
    Decoder::load(l, spec)
}

/// EuroBERT: Llama whose pairs lie half a head apart.
pub(super) fn eurobert(l: &mut Loader<'_>) -> Loaded {
    let spec = plain(l, NormKind::Rms, RopeStyle::Neox)?;
    Decoder::load(l, spec)
}

/// Llama without a vocabulary to write in; the file says whether tokens see the whole text.
pub(super) fn llama(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Normal, Factors::Usual)?;
    spec.head = Head::Nothing;
    Decoder::load(l, spec)
}
