//! LFM 2: short convolutions, or attention where the file counts heads of keys and values. The norm before the output matrix has the name of
//! one of the embeddings.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::Gate;

use super::{Architecture, experts};
use crate::Error;
use crate::blocks::attention::{Attention, HeadNorm};
use crate::blocks::decoder::{Decoder, Spec};
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::short_conv::ShortConv;
use crate::model::Loader;
use crate::model::parts::Factors;

fn plain(l: &mut Loader<'_>) -> Result<Spec, Error> {
    if !l.keys.flag("attention.causal", true)? {
        return Err(Error::NotSupported {
            what: "an LFM2 whose tokens see later ones (attention.causal is false)".into(),
        });
    }
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.output_norm = "token_embd_norm";
    spec.each_attention(|_, attention| attention.output_bias = false);
    spec.ffn_bias = false;
    Ok(spec)
}

fn finish(l: &mut Loader<'_>, spec: Spec) -> Result<Box<dyn Architecture>, Error> {
    Decoder::load_with(l, spec, |l, spec, i| match spec.sizes.kv_heads[i] {
        0 => Ok(Box::new(ShortConv::load(l, spec.sizes.hidden, i)?)),
        _ => Ok(Box::new(Attention::load(l, &spec.attention[i], i)?)),
    })
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    let window = l.keys.count_opt("attention.sliding_window", 1 << 24)?;
    spec.each_attention(|_, attention| attention.window = window);
    finish(l, spec)
}

pub(super) fn load_moe(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let mut spec = plain(l)?;
    let moe = experts::keyed(l, &mut spec, Gate::Sigmoid)?;
    spec.moe = Some(MoeSpec { shares: MoeSpec::of_sum(), scale: 1.0, shared: None, ..moe });
    finish(l, spec)
}
