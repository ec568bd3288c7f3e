//! Norms of tokens.

use crate::Error;
use crate::model::Loader;
use crate::plan::Norm;

/// Which norm a model has, and which tensors belong to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// By the mean square, with a weight.
    Rms,
    /// By the mean square, nothing else.
    BareRms,
    /// By the mean square, with a weight and a bias.
    RmsBias,
    /// By the mean square of each of so many slices, with a weight for all.
    RmsSlices(usize),
    /// To mean 0 and variance 1, with a weight and a bias.
    Layer,
    /// The same; the bias may be missing.
    LayerMaybeBias,
    /// The same with a weight alone.
    LayerWeight,
    /// The same with nothing else.
    BareLayer,
}

impl NormKind {
    /// The key of the small number that this norm adds.
    pub fn eps_key(self) -> &'static str {
        match self {
            NormKind::Rms | NormKind::BareRms | NormKind::RmsBias | NormKind::RmsSlices(_) => {
                "attention.layer_norm_rms_epsilon"
            }
            _ => "attention.layer_norm_epsilon",
        }
    }

    /// Reads the norm `NAME` of columns of this width.
    pub fn load(self, l: &mut Loader<'_>, name: &str, width: usize, eps: f32) -> Result<Norm, Error> {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        // Some files leave out the ending.
        let weight = if l.has(&weight) || !l.has(name) { weight } else { name.to_owned() };
        Ok(match self {
            NormKind::Rms => Norm::Rms { weight: Some(l.vector(&weight, &[width])?), eps },
            NormKind::BareRms => Norm::Rms { weight: None, eps },
            NormKind::RmsBias => {
                let weight = l.vector(&weight, &[width])?;
                Norm::RmsBias { weight, bias: l.vector(&bias, &[width])?, eps }
            }
            NormKind::RmsSlices(slices) => Norm::RmsSlices { slices, weight: l.vector(&weight, &[width])?, eps },
            NormKind::Layer => {
                let weight = Some(l.vector(&weight, &[width])?);
                Norm::Layer { weight, bias: Some(l.vector(&bias, &[width])?), eps }
            }
            NormKind::LayerMaybeBias => {
                let weight = Some(l.vector(&weight, &[width])?);
                Norm::Layer { weight, bias: l.vector_opt(&bias, &[width])?, eps }
            }
            NormKind::LayerWeight => Norm::Layer { weight: Some(l.vector(&weight, &[width])?), bias: None, eps },
            NormKind::BareLayer => Norm::Layer { weight: None, bias: None, eps },
        })
    }
}
