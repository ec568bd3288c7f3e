//! MERaLiON: several rows joined and normed, a matrix, and a gated pair behind it.

use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::SoundKeys;

use super::Family;
use super::whisper::{End, Whisper, stack_factor, stacked};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Linear, Norm};
use crate::vision::sheet::Sheet;
use crate::vision::vit::{NormKind, norm, width_of};

struct Pair {
    factor: usize,
    norm: Norm,
    first: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

pub(super) fn load(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    Whisper::load(l, keys, false, |l, sizes| {
        let factor = stack_factor(l)?;
        let joined = factor * sizes.width;
        let [first, gate, down] = [width_of(l, "mm.a.mlp.0")?, width_of(l, "mm.a.mlp.1")?, width_of(l, "mm.a.mlp.3")?];
        Ok(Box::new(Pair {
            factor,
            norm: norm(l, "mm.a.norm_pre", joined, NormKind::Layer, sizes.eps)?,
            first: l.linear("mm.a.mlp.0", &[joined, first])?,
            gate: l.linear("mm.a.mlp.1", &[first, gate])?,
            up: l.linear("mm.a.mlp.2", &[first, gate])?,
            down: l.linear("mm.a.mlp.3", &[gate, down])?,
        }))
    })
}

impl End for Pair {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let x = stacked(s, x, self.factor);
        let x = s.b.norm("norm", x, &self.norm);
        let x = s.b.linear("first", x, &self.first);
        let x = s.b.function("first.activation", x, Function::Silu);
        let (gate, up) = (s.b.linear("gate", x, &self.gate), s.b.linear("up", x, &self.up));
        let x = s.b.gated("gated", Gate::Swiglu, gate, up);
        s.b.linear("down", x, &self.down)
    }

    fn rows(&self, rows: usize) -> usize {
        rows.div_ceil(self.factor)
    }
}
