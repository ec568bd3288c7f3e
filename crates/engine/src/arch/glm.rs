//! GLM: ChatGLM 3 and 4 are Llama with fused matrices and partly turned heads; GLM 4 (0414) norms before and after each half
//! of a layer.

use kiln_kernels::glu::Gate;
use kiln_kernels::rope::RopeStyle;

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mlp::Activation;
use crate::blocks::norms::NormKind;
use crate::model::Loader;
use crate::model::parts::{Factors, sections};

fn plain(l: &mut Loader<'_>, style: RopeStyle) -> Result<Spec, Error> {
    let mut spec = Spec::rotary(l, NormKind::Rms, style, Factors::Unused)?;
    spec.activation = Activation::GatedFused(Gate::Swiglu);
    Ok(spec)
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let spec = plain(l, RopeStyle::Normal)?;
    Decoder::load(l, spec)
}

pub(super) fn load4(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    // With sections pairs lie half a head apart.
    let style = if sections(l)?.is_some() { RopeStyle::Neox } else { RopeStyle::Normal };
    let mut spec = plain(l, style)?.with_sections(l, RopeStyle::Mrope)?;
    spec.layout = Layout::Sandwich;
    Decoder::load(l, spec)
}
