//! `top_k`: the indices of the k largest elements of each row, largest first. Small k by a tournament of tiles, larger
//! k by sorting the row with the kernels of `argsort`.

pub mod cases;
mod reference;

use kiln_gpu::{Address, Caps, Shader};

use crate::argsort::{self, Order, TILE, sort_threads, sortable, tile_of};
use crate::elementwise::{row, strides};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Launch, Operation, Path, Unsupported, grid, only_scalar, rows_apart, word};
use crate::tensor::Tensor;

const NAME: &str = "top_k";

/// Largest k of the tournament: with half a tile or less, the number of candidates falls in every round.
const MOST_KEPT: usize = TILE / 2;

/// One line for the registry.
pub const SUMMARY: &str = "dst = indices of the k largest elements of each row, largest first";

/// Operands of `top_k`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32, any strides.
    pub x: Tensor,
    /// Result `[k, ..]`, I32, k up to cols. Equal elements are ordered by index; NaN is smaller than everything else.
    pub dst: Tensor,
    /// Memory between passes, I32, dense, of at least [`scratch_bytes`]; may be absent where that is 0.
    pub scratch: Option<Tensor>,
}

/// Bytes of scratch memory for the k largest of this many rows of this many columns.
pub fn scratch_bytes(cols: usize, k: usize, rows: usize) -> usize {
    if k > MOST_KEPT {
        return argsort::scratch_bytes(cols, rows);
    }
    // The pairs of the first round and those of the second, between which the rounds alternate.
    let kept = |n: usize| if n > TILE { n.div_ceil(TILE) * k } else { 0 };
    8 * rows * (kept(cols) + kept(kept(cols)))
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        dst: Address,
        from: Address,
        to: Address,
        outer: [u32; 3],
        x_stride: [u32; 4],
        dst_stride: [u32; 4],
        count: u32,
        k: u32,
        tiles: u32,
        groups: u32,
    }
}

impl Call {
    fn k(&self) -> usize {
        self.dst.shape[0]
    }

    /// The call of `argsort` that does the same for large k.
    fn as_argsort(&self) -> Option<argsort::Call> {
        let Call { x, dst, scratch } = *self;
        (self.k() > MOST_KEPT).then_some(argsort::Call { x, dst, scratch, order: Order::Descending })
    }

    /// The number of candidates of each row at the beginning of every round.
    fn rounds(&self) -> Vec<usize> {
        let smaller = |n: &usize| (*n > TILE).then(|| n.div_ceil(TILE) * self.k());
        std::iter::successors(Some(self.x.shape[0]), smaller).collect()
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.x]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn scratch(&self) -> Vec<Tensor> {
        self.scratch.into_iter().collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, dst, scratch } = *self;
        let sort = argsort::Call { x, dst, scratch, order: Order::Descending };
        argsort::check(NAME, &sort, scratch_bytes(x.shape[0], self.k(), x.rows()))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        sortable(NAME, &self.x, &self.dst)?;
        if let Some(sort) = self.as_argsort() {
            return sort.pick(caps, want);
        }
        let rounds = self.rounds().into_iter().enumerate().map(|(round, count)| {
            let tile = tile_of(count);
            let shader = Shader::new(format!("{NAME}.f32"), "top_k/top_k.comp", Params::glsl())
                .define("TILE", tile)
                .define("WG", sort_threads(tile, caps))
                .define("PAIRS", u32::from(round > 0));
            Launch::new(shader, grid(count.div_ceil(tile) * self.x.rows(), caps))
        });
        Ok(Choice { path: Path::Scalar, launches: rounds.collect() })
    }

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        if let Some(sort) = self.as_argsort() {
            return sort.params(choice, launch, at);
        }
        let [_, n1, n2, n3] = self.x.extents();
        let rounds = self.rounds();
        let pairs = self.scratch.as_ref().map_or([Address::default(); 2], |s| {
            let first_round = rounds.get(1).map_or(0, |count| 8 * count * self.x.rows());
            [at(s), at(s).offset(first_round as u64)]
        });
        let tiles = rounds[launch].div_ceil(TILE);
        Params {
            x: at(&self.x),
            dst: at(&self.dst),
            from: pairs[(launch + 1) % 2],
            to: pairs[launch % 2],
            outer: [n1, n2, n3],
            x_stride: strides(&self.x),
            dst_stride: strides(&self.dst),
            count: word(rounds[launch]),
            k: word(self.k()),
            tiles: word(tiles),
            groups: word(tiles * self.x.rows()),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i| Call { x: row(self.x, i), dst: row(self.dst, i), ..*self }.into();
        rows_apart(self.x.shape).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;
    use kiln_gguf::TensorType::{F32, I32};

    fn call(cols: usize, k: usize) -> Call {
        let x = Tensor::dense(Slot(0), F32, [cols, 1, 1, 1]);
        Call { x, dst: Tensor::dense(Slot(1), I32, [k, 1, 1, 1]), scratch: None }
    }

    #[test]
    fn rounds_shrink_to_one_tile_within_scratch() {
        assert_eq!(call(262_144, 40).rounds(), [262_144, 5120, 120]);
        assert_eq!(call(4096, 1024).rounds(), [4096, 2048]);
        for k in [1, 2, 40, 1023, 1024] {
            for cols in [2048, 2049, 4097, 50_257, 262_144, 1 << 20] {
                let rounds = call(cols, k).rounds();
                assert!(rounds.windows(2).all(|pair| pair[1] < pair[0]), "{rounds:?}");
                assert!(rounds.last().is_some_and(|&last| last <= TILE && last >= k.min(cols)));
                // Rounds write to the two halves of scratch in turn, and none outgrows its half.
                let half = [rounds.get(1), rounds.get(2)].map(|n| n.copied().unwrap_or(0));
                assert_eq!(scratch_bytes(cols, k, 3), 24 * (half[0] + half[1]), "{cols} {k}");
            }
        }
    }

    #[test]
    fn more_than_there_are_is_invalid() {
        assert!(call(10, 10).check().is_ok());
        assert!(call(10, 11).check().is_err());
        assert!(call(5000, 3).check().is_err());
    }
}
