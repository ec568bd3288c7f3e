//! Mamba 1 and 2: state-space mixers and nothing else. A model has no positions and no context that ends.

use super::Architecture;
use crate::Error;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::mamba::{Mamba1, Mamba2, MambaSizes, Norms};
use crate::blocks::norms::NormKind;
use crate::model::Loader;

fn plain(l: &mut Loader<'_>) -> Result<(Spec, MambaSizes), Error> {
    let mut spec = Spec::plain(l, NormKind::Rms)?;
    spec.layout = Layout::Single;
    let sizes = MambaSizes::read(l, spec.sizes.hidden, spec.eps)?;
    Ok((spec, sizes))
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let (spec, sizes) = plain(l)?;
    let norms = if l.keys.flag("ssm.dt_b_c_rms", false)? { Norms::Bare } else { Norms::Weighted };
    Decoder::load_with(l, spec, |l, _, i| Ok(Box::new(Mamba1::load(l, sizes, norms, i)?)))
}

pub(super) fn load2(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let (spec, sizes) = plain(l)?;
    Decoder::load_with(l, spec, |l, _, i| Ok(Box::new(Mamba2::load(l, sizes, i)?)))
}
