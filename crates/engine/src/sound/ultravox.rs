//! Ultravox: several rows joined, gated between two norms.

use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_media::SoundKeys;

use super::Family;
use super::whisper::{End, Whisper, stack_factor, stacked};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};
use crate::vision::sheet::Sheet;
use crate::vision::vit::{NormKind, norm, width_of};

/// What norms add.
const EPS: f32 = 1e-6;

struct Gated {
    factor: usize,
    norms: [Norm; 2],
    first: Linear,
    second: Linear,
}

pub(super) fn load(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    Whisper::load(l, keys, false, |l, sizes| {
        let factor = stack_factor(l)?;
        let joined = factor * sizes.width;
        let both = width_of(l, "mm.a.mlp.1")?;
        let out = width_of(l, "mm.a.mlp.2")?;
        Ok(Box::new(Gated {
            factor,
            norms: [
                norm(l, "mm.a.norm_pre", joined, NormKind::Rms, EPS)?,
                norm(l, "mm.a.norm_mid", both / 2, NormKind::Rms, EPS)?,
            ],
            first: l.linear("mm.a.mlp.1", &[joined, both])?,
            second: l.linear("mm.a.mlp.2", &[both / 2, out])?,
        }))
    })
}

impl End for Gated {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let x = stacked(s, x, self.factor);
        let x = s.b.norm("norm", x, &self.norms[0]);
        let x = s.b.linear("first", x, &self.first);
        let half = x.shape[0] / 2;
        // The second half is the gate.
        let x = s.b.gated("gated", Gate::Swiglu, x.narrow(0, half, half), x.narrow(0, 0, half));
        let x = s.b.norm("middle", x, &self.norms[1]);
        s.b.linear("second", x, &self.second)
    }

    fn rows(&self, rows: usize) -> usize {
        rows.div_ceil(self.factor)
    }
}
