//! Whisper's encoder: two convolutions over time, learnt positions, and the layers that pictures have. What comes behind differs by family.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::{SoundKeys, Spectrogram};

use super::Family;
use super::unfold::{length, through_time};
use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;
use crate::vision::sheet::Sheet;
use crate::vision::vit::{Coordinates, NormKind, Sizes, Spec, Vit};

/// Frames of an input: half a minute.
const FRAMES: usize = 3000;
/// Frames that a convolution sees at once.
const TAPS: usize = 3;

/// What a family has behind the encoder.
pub(super) trait End: Send + Sync {
    /// Adds its steps, from rows of the encoder's width to rows of the model's.
    fn build(&self, s: &mut Sheet, x: Tensor) -> Tensor;

    /// Rows of the result for so many rows of the encoder.
    fn rows(&self, rows: usize) -> usize;
}

/// The encoder of a file.
pub(super) struct Whisper {
    convolutions: [Linear; 2],
    bins: usize,
    positions: Tensor,
    vit: Vit,
    /// Whether neighbours are averaged behind the last layer.
    halved: bool,
    end: Box<dyn End>,
}

impl Whisper {
    /// Reads the encoder; `end` reads what comes behind, and learns the sizes.
    pub(super) fn load(
        l: &mut Loader<'_>,
        keys: &SoundKeys,
        halved: bool,
        end: impl FnOnce(&mut Loader<'_>, &Sizes) -> Result<Box<dyn End>, Error>,
    ) -> Result<Box<dyn Family>, Error> {
        let sizes = Sizes { activation: Function::GeluErf, ..Sizes::of(l, "audio")? };
        let width = sizes.width;
        let mut convolution = |name: &str, channels: usize| -> Result<Linear, Error> {
            let kernel = l.tensor(&format!("{name}.weight"), &[TAPS, channels, width])?;
            let bias = l.vector_opt(&format!("{name}.bias"), &[width])?;
            Ok(Linear { bias, ..Linear::plain(kernel.reshape([TAPS * channels, width, 1, 1])) })
        };
        let convolutions = [convolution("a.conv1d.1", keys.bins)?, convolution("a.conv1d.2", width)?];
        let positions = positions(l, width, FRAMES / 2)?;
        let vit = Vit::load_of(l, "a", sizes, Spec::plain(&sizes, NormKind::Layer))?;
        let end = end(l, &sizes)?;
        Ok(Box::new(Whisper { convolutions, bins: keys.bins, positions, vit, halved, end }))
    }
}

/// The table of learnt positions, which has so many rows at least.
pub(super) fn positions(l: &mut Loader<'_>, width: usize, least: usize) -> Result<Tensor, Error> {
    let name = "a.position_embd.weight";
    let rows = l.shape(name).map_or(0, |shape| shape[1]);
    if l.has(name) && rows < least {
        return Err(Error::TensorShape { name: name.to_owned(), got: vec![width, rows], want: vec![width, least] });
    }
    Ok(l.vector(name, &[width, rows])?.narrow(1, 0, least))
}

/// How many rows are joined to one in a family that joins some.
pub(super) fn stack_factor(l: &Loader<'_>) -> Result<usize, Error> {
    l.keys.count("audio.projector.stack_factor", 64)
}

/// Every `count` rows joined to one; rows of zeros fill up the last one.
pub(super) fn stacked(s: &mut Sheet, x: Tensor, count: usize) -> Tensor {
    let [width, rows, ..] = x.shape;
    let full = rows.next_multiple_of(count);
    let x = if full == rows { x } else { s.gather("stack", x, (0..full).map(|row| (row < rows).then_some(row))) };
    x.reshape([count * width, full / count, 1, 1])
}

impl Family for Whisper {
    fn unfolded(&self, heard: &Spectrogram) -> Vec<f32> {
        // Bands slowest, as kernels have them.
        let taps = |frame: usize, bin: usize| (0..TAPS).map(move |tap| [frame + tap, bin]);
        let frames = 0..heard.frames();
        let all = frames.flat_map(|frame| (0..self.bins).flat_map(move |bin| taps(frame, bin)));
        all.map(|[at, bin]| heard.at(at as isize - 1, bin as isize)).collect()
    }

    fn build(&self, s: &mut Sheet, frames: usize) -> Tensor {
        let width = self.vit.sizes.width;
        let x = s.input(TAPS * self.bins, frames);
        s.b.at("stem");
        let x = s.b.linear("first", x, &self.convolutions[0]);
        let x = s.b.function("first.activation", x, Function::GeluErf);
        let x = through_time(s, "second", x, TAPS);
        let x = s.by_channel(x, width);
        let x = s.b.linear("second", x, &self.convolutions[1]);
        let x = s.b.function("second.activation", x, Function::GeluErf);
        let x = s.b.add("positions", x, self.positions.narrow(1, 0, x.shape[1]));
        let mut x = self.vit.before_end(s, x, &Coordinates::Still);
        if self.halved {
            s.b.at("halved");
            let sums = s.sums(x.narrow(1, 0, x.shape[1] / 2 * 2), 2, width);
            x = s.b.scale("mean", sums, 0.5);
        }
        let x = self.vit.end(s, x);
        s.b.at("projector");
        self.end.build(s, x)
    }

    fn rows(&self, frames: usize) -> usize {
        let rows = length(frames);
        self.end.rows(if self.halved { rows / 2 } else { rows })
    }
}
