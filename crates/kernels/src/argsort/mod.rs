//! `argsort`: the indices that put each row in order, equal elements by index. Rows of up to a tile are sorted in
//! shared memory; longer ones tile by tile, then merged in scratch memory.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{row, rows_addressable, strides};
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Launch, Operation, Path, Unsupported, Work, grid, only_scalar, require, rows_apart, word,
};
use crate::tensor::Tensor;

pub(crate) use reference::sorted;

const NAME: &str = "argsort";

/// One line for the registry.
pub const SUMMARY: &str = "dst = indices that sort each row, ascending or descending, stable";

/// Most elements that one workgroup sorts: 16 KiB of pairs, the shared memory every device has.
pub(crate) const TILE: usize = 2048;

/// Which end comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Smallest first. NaN is smaller than everything else.
    Ascending,
    /// Largest first.
    Descending,
}

/// Operands of `argsort`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32, any strides.
    pub x: Tensor,
    /// Result `[keep, ..]`, I32: the first `keep` indices of the order, up to all `cols` of them.
    pub dst: Tensor,
    /// Memory between passes, I32, dense, of at least [`scratch_bytes`]; may be absent where that is 0.
    pub scratch: Option<Tensor>,
    /// Which end comes first.
    pub order: Order,
}

/// Bytes of scratch memory for this many rows of this many columns.
pub fn scratch_bytes(cols: usize, rows: usize) -> usize {
    // Two copies of all pairs: each pass reads one and writes the other.
    if cols <= TILE { 0 } else { 2 * 8 * cols * rows }
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
        cols: u32,
        keep: u32,
        groups: u32,
        groups_per_row: u32,
        run: u32,
        flip: u32,
        last: u32,
    }
}

/// The power of two of elements that one workgroup sorts where there are `n` in all; few sizes, few pipelines.
pub(crate) fn tile_of(n: usize) -> usize {
    n.next_power_of_two().clamp(64, TILE)
}

/// Threads of a workgroup that sorts `tile` elements.
pub(crate) fn sort_threads(tile: usize, caps: &Caps) -> usize {
    let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]) as usize;
    (tile / 2).min(limit).min(if caps.is_cpu { 64 } else { 512 })
}

/// Refuses what the sorting kernels cannot do, for `argsort` and `top_k`.
pub(crate) fn sortable(operation: &'static str, x: &Tensor, dst: &Tensor) -> Result<(), Unsupported> {
    rows_addressable(operation, &[*x, *dst])?;
    if x.ty != TensorType::F32 || dst.ty != TensorType::I32 {
        return Err(Unsupported { operation, reason: format!("{x} to {dst} (F32 to I32 only)") });
    }
    // Pairs of a row are numbered in bytes with 32 bits.
    if x.shape[0] > 1 << 28 {
        return Err(Unsupported { operation, reason: format!("rows of {} elements (up to 2^28)", x.shape[0]) });
    }
    Ok(())
}

/// The shape rules of `argsort` and `top_k`.
pub(crate) fn check(operation: &'static str, call: &Call, bytes: usize) -> Result<(), Invalid> {
    let Call { x, dst, scratch, .. } = call;
    let fits = dst.shape[0] <= x.shape[0] && dst.shape[1..] == x.shape[1..];
    require(fits, operation, || format!("x is {x} but dst is {dst}, want at most as many indices for each row"))?;
    let has = scratch.map_or(0, |s| if s.is_dense() && s.offset.is_multiple_of(8) { s.span().1 } else { 0 });
    require(has >= bytes, operation, || format!("{has} bytes of dense scratch memory at a multiple of 8, want {bytes}"))
}

impl Call {
    fn merges(&self) -> usize {
        self.x.shape[0].div_ceil(TILE).next_power_of_two().ilog2() as usize
    }

    fn groups_per_row(&self, launch: &Launch, is_merge: bool) -> usize {
        let define = if is_merge { "WG" } else { "TILE" };
        let value = launch.shader.defines.iter().find(|(name, _)| name == define).map(|(_, value)| value.parse());
        self.x.shape[0].div_ceil(value.and_then(Result::ok).expect("`pick` should have defined its sizes"))
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
        check(NAME, self, scratch_bytes(self.x.shape[0], self.x.rows()))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        sortable(NAME, &self.x, &self.dst)?;
        let (cols, rows) = (self.x.shape[0], self.x.rows());
        let tile = tile_of(cols);
        let shader = Shader::new(format!("{NAME}.f32"), "argsort/argsort.comp", Params::glsl())
            .define("TILE", tile)
            .define("WG", sort_threads(tile, caps));
        let mut launches = vec![Launch::new(shader, grid(cols.div_ceil(tile) * rows, caps))];
        let threads = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]).min(256) as usize;
        let merge = Shader::new(format!("{NAME}.merge"), "argsort/merge.comp", Params::glsl()).define("WG", threads);
        let merge = Launch::new(merge, grid(cols.div_ceil(threads) * rows, caps));
        launches.extend(std::iter::repeat_n(merge, self.merges()));
        Ok(Choice { path: Path::Scalar, launches })
    }

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let [cols, n1, n2, n3] = self.x.extents();
        let copies = self.scratch.as_ref().map_or([Address::default(); 2], |s| {
            let first = at(s);
            [first, first.offset((scratch_bytes(self.x.shape[0], self.x.rows()) / 2) as u64)]
        });
        let per_row = self.groups_per_row(&choice.launches[launch], launch > 0);
        Params {
            x: at(&self.x),
            dst: at(&self.dst),
            from: copies[(launch + 1) % 2],
            to: copies[launch % 2],
            outer: [n1, n2, n3],
            x_stride: strides(&self.x),
            dst_stride: strides(&self.dst),
            cols,
            keep: self.dst.extents()[0],
            groups: word(per_row * self.x.rows()),
            groups_per_row: word(per_row),
            run: word(TILE << launch.saturating_sub(1)),
            flip: if self.order == Order::Descending { u32::MAX } else { 0 },
            last: u32::from(launch + 1 == choice.launches.len()),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        let n = self.x.len() as f64;
        let passes = 1.0 + 4.0 * self.merges() as f64;
        Work { bytes: passes * 4.0 * n, flops: n * (self.x.shape[0].max(2) as f64).log2() }
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

    fn call(cols: usize, rows: usize) -> Call {
        let t = |slot, ty, shape| Tensor::dense(Slot(slot), ty, shape);
        let scratch = t(2, TensorType::I32, [scratch_bytes(cols, rows) / 4, 1, 1, 1]);
        Call {
            x: t(0, TensorType::F32, [cols, rows, 1, 1]),
            dst: t(1, TensorType::I32, [cols, rows, 1, 1]),
            scratch: Some(scratch),
            order: Order::Ascending,
        }
    }

    #[test]
    fn passes_and_scratch_grow_with_the_row() {
        for (cols, launches) in [(0, 1), (1, 1), (2048, 1), (2049, 2), (4096, 2), (4097, 3), (1 << 20, 10)] {
            let call = call(cols, 3);
            assert_eq!(call.check(), Ok(()));
            let choice = call.pick(&Caps::least(), None).unwrap();
            assert_eq!(choice.launches.len(), launches, "{cols} columns");
        }
        assert!(Call { scratch: None, ..call(2048, 3) }.check().is_ok());
        assert!(Call { scratch: None, ..call(2049, 3) }.check().is_err());
        assert!(Call { scratch: call(2049, 2).scratch, ..call(2049, 3) }.check().is_err());
    }
}
