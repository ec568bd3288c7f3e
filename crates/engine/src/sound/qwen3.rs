//! Qwen 3's encoder of sounds: three convolutions over each second by itself, then layers that see a window of up to eight seconds.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_media::{SoundKeys, Spectrogram};

use super::Family;
use super::unfold::{FIRST, PLACES, channels, first_kernel, kernel, places, plane, sources};
use super::whisper::positions;
use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;
use crate::vision::Grid;
use crate::vision::parts::Projector;
use crate::vision::sheet::Sheet;
use crate::vision::vit::{Coordinates, NormKind, Sizes, Spec, Vit};

/// Frames of a piece, which convolutions do not look beyond.
const PIECE: usize = 100;

struct Qwen3 {
    bins: usize,
    convolutions: [Linear; 3],
    out: Linear,
    positions: Tensor,
    vit: Vit,
    projector: Projector,
}

/// The planes before and behind the convolutions: bands are rows, moments columns.
fn planes(bins: usize) -> [Grid; 4] {
    let whole = Grid { rows: bins, columns: PIECE };
    [whole, plane(whole), plane(plane(whole)), plane(plane(plane(whole)))]
}

pub(super) fn load(l: &mut Loader<'_>, keys: &SoundKeys) -> Result<Box<dyn Family>, Error> {
    let sizes = Sizes { activation: Function::GeluErf, ..Sizes::of(l, "audio")? };
    let names = ["a.conv2d.1", "a.conv2d.2", "a.conv2d.3"];
    let [first, second, third] = [channels(l, names[0])?, channels(l, names[1])?, channels(l, names[2])?];
    let [.., last] = planes(keys.bins);
    Ok(Box::new(Qwen3 {
        bins: keys.bins,
        convolutions: [
            first_kernel(l, names[0], first)?,
            kernel(l, names[1], [first, second])?,
            kernel(l, names[2], [second, third])?,
        ],
        out: l.linear("a.conv_out", &[third * last.rows, sizes.width])?,
        positions: positions(l, sizes.width, last.columns)?,
        vit: Vit::load_of(l, "a", sizes, Spec::plain(&sizes, NormKind::Layer))?,
        projector: Projector::load(l, ["mm.a.mlp.1", "mm.a.mlp.2"], sizes.width, Function::GeluErf)?,
    }))
}

impl Qwen3 {
    /// A convolution over every piece; `order` lists the places of a piece's result.
    fn convolved(&self, s: &mut Sheet, nth: usize, x: Tensor, before: Grid, order: &[[usize; 2]]) -> Tensor {
        let (width, pieces, name) = (x.shape[0], x.shape[1] / before.patches(), format!("convolution.{nth}"));
        let read = (0..pieces).flat_map(|piece| {
            let moved = move |at: Option<usize>| at.map(|at| piece * before.patches() + at);
            order.iter().flat_map(move |place| sources(before, *place)).map(moved)
        });
        let x = s.gather(&name, x, read).reshape([PLACES * width, pieces * order.len(), 1, 1]);
        let x = s.by_channel(x, width);
        let x = s.b.linear(&name, x, &self.convolutions[nth]);
        s.b.function(&format!("{name}.activation"), x, Function::GeluErf)
    }
}

impl Family for Qwen3 {
    fn unfolded(&self, heard: &Spectrogram) -> Vec<f32> {
        let [whole, first, ..] = planes(self.bins);
        let mut values = Vec::with_capacity(heard.frames() / PIECE * first.patches() * FIRST);
        for piece in 0..heard.frames() / PIECE {
            for place in places(first) {
                let of =
                    |at: usize| heard.at((piece * PIECE + at % whole.columns) as isize, (at / whole.columns) as isize);
                values.extend(sources(whole, place).map(|at| at.map_or(0.0, of)));
                values.extend([0.0; FIRST - PLACES]);
            }
        }
        values
    }

    fn build(&self, s: &mut Sheet, frames: usize) -> Tensor {
        let [_, first, second, last] = planes(self.bins);
        let pieces = frames / PIECE;
        let x = s.input(FIRST, pieces * first.patches());
        s.b.at("stem");
        let x = s.b.linear("convolution.0", x, &self.convolutions[0]);
        let x = s.b.function("convolution.0.activation", x, Function::GeluErf);
        let x = self.convolved(s, 1, x, first, &places(second).collect::<Vec<_>>());
        // The bands of a moment side by side.
        let by_moment = (0..last.columns).flat_map(|column| (0..last.rows).map(move |row| [row, column]));
        let x = self.convolved(s, 2, x, second, &by_moment.collect::<Vec<_>>());
        let channels = x.shape[0];
        let x = s.by_channel(x.reshape([channels * last.rows, pieces * last.columns, 1, 1]), channels);
        let x = s.b.linear("out", x, &self.out);
        let width = self.vit.sizes.width;
        let shaped = x.reshape([width, last.columns, pieces, 1]);
        let x = s.b.add("positions", shaped, self.positions).reshape(x.shape);
        let x = self.vit.before_end(s, x, &Coordinates::Still);
        let x = self.vit.end(s, x);
        self.projector.build(s, x)
    }

    fn rows(&self, frames: usize) -> usize {
        let [.., last] = planes(self.bins);
        frames / PIECE * last.columns
    }
}
