//! Voxtral, Music Flamingo and Qwen 2 Audio: one matrix or two behind rows that are joined, or averaged with their neighbours.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::SoundKeys;

use super::Family;
use super::whisper::{End, Whisper, stack_factor, stacked};
use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;
use crate::vision::parts::Projector;
use crate::vision::sheet::Sheet;
use crate::vision::vit::width_of;

/// One matrix.
struct Single(Linear);

/// Two matrices over so many rows at once.
struct Two {
    factor: usize,
    projector: Projector,
}

/// Qwen 2 Audio.
pub(super) fn load_single(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    Whisper::load(l, keys, true, |l, sizes| {
        let out = width_of(l, "mm.a.fc")?;
        Ok(Box::new(Single(l.linear("mm.a.fc", &[sizes.width, out])?)))
    })
}

/// Music Flamingo.
pub(super) fn load_halved(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    Whisper::load(l, keys, true, |l, sizes| two(l, 1, sizes.width))
}

/// Voxtral, whose rows are joined and not averaged.
pub(super) fn load(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    Whisper::load(l, keys, false, |l, sizes| {
        let factor = stack_factor(l)?;
        two(l, factor, sizes.width)
    })
}

fn two(l: &mut Loader<'_>, factor: usize, width: usize) -> Result<Box<dyn End>, Error> {
    let projector = Projector::load(l, ["mm.a.mlp.1", "mm.a.mlp.2"], factor * width, Function::GeluErf)?;
    Ok(Box::new(Two { factor, projector }))
}

impl End for Single {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        s.b.linear("matrix", x, &self.0)
    }

    fn rows(&self, rows: usize) -> usize {
        rows
    }
}

impl End for Two {
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor {
        let x = stacked(s, x, self.factor);
        self.projector.build(s, x)
    }

    fn rows(&self, rows: usize) -> usize {
        rows.div_ceil(self.factor)
    }
}
