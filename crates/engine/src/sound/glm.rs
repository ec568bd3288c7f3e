//! GLM-ASR: rows normed, joined, and set between two vectors of the file.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::SoundKeys;

use super::Family;
use super::whisper::{End, Whisper, stack_factor, stacked};
use crate::Error;
use crate::model::Loader;
use crate::plan::Norm;
use crate::vision::parts::Projector;
use crate::vision::sheet::Sheet;
use crate::vision::vit::{NormKind, norm, width_of};

struct Enclosed {
    factor: usize,
    norm: Norm,
    projector: Projector,
    begin: Tensor,
    end: Tensor,
}

pub(super) fn load(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    Whisper::load(l, keys, false, |l, sizes| {
        let factor = stack_factor(l)?;
        let out = width_of(l, "mm.a.mlp.2")?;
        let names = ["mm.a.mlp.1", "mm.a.mlp.2"];
        Ok(Box::new(Enclosed {
            factor,
            norm: norm(l, "mm.a.norm_pre", sizes.width, NormKind::Layer, sizes.eps)?,
            projector: Projector::load(l, names, factor * sizes.width, Function::GeluErf)?,
            begin: l.vector("v.boi", &[out])?,
            end: l.vector("v.eoi", &[out])?,
        }))
    })
}

impl End for Enclosed {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let x = s.b.norm("norm", x, &self.norm);
        let x = stacked(s, x, self.factor);
        let x = self.projector.build(s, x);
        let one = |t: Tensor| t.reshape([t.shape[0], 1, 1, 1]);
        let x = s.below("begin", one(self.begin), x);
        s.below("end", x, one(self.end))
    }

    fn rows(&self, rows: usize) -> usize {
        rows.div_ceil(self.factor) + 2
    }
}
