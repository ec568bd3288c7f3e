//! The parameter blocks of the kernels.

use kiln_gpu::Address;

use super::memory::{Layout, padded, prepared_columns};
use super::{Call, Kernel, Prologue, fragment};
use crate::formats::row_strides;
use crate::mul_mat::{Epilogue, Product};
use crate::operation::Path;
use crate::packed_b::PackedB;
use crate::tensor::Tensor;

kiln_gpu::params! {
    pub(super) struct Params {
        a: Address,
        b: Address,
        factors: Address,
        d: Address,
        bias: Address,
        residual: Address,
        a_stride: [u32; 3],
        b_stride: [u32; 3],
        d_stride: [u32; 3],
        residual_stride: [u32; 3],
        batches: [u32; 2],
        share: [u32; 2],
        k: u32,
        m: u32,
        n: u32,
        scale: f32,
    }
}

kiln_gpu::params! {
    pub(super) struct LaneParams {
        a: Address,
        up: Address,
        b: Address,
        factors: Address,
        d: Address,
        bias: Address,
        residual: Address,
        halves: Address,
        emit_factors: Address,
        scale_hint: Address,
        magnitude_probe: Address,
        squares: Address,
        overflow: Address,
        a_stride: [u32; 1],
        d_stride: [u32; 1],
        residual_stride: [u32; 1],
        k: u32,
        m: u32,
        n: u32,
        scale: f32,
    }
}

kiln_gpu::params! {
    pub(super) struct ColumnParams {
        b: Address,
        factors: Address,
        halves: Address,
        stride: [u32; 3],
        shape: [u32; 3],
        pairs: Address,
        counters: Address,
        other: Address,
        other_stride: [u32; 3],
        n_counters: u32,
        used: u32,
        columns: u32,
        k: u32,
        padded_k: u32,
        eps: f32,
    }
}

kiln_gpu::params! {
    pub(super) struct SplitParams {
        a: Address,
        b: Address,
        factors: Address,
        d: Address,
        bias: Address,
        residual: Address,
        partials: Address,
        counters: Address,
        a_stride: [u32; 1],
        b_stride: [u32; 1],
        d_stride: [u32; 1],
        residual_stride: [u32; 1],
        k: u32,
        m: u32,
        n: u32,
        scale: f32,
        chunk: u32,
        splits: u32,
    }
}

kiln_gpu::params! {
    pub(super) struct ListParams {
        ids: Address,
        tiles: Address,
        pairs: Address,
        slots: Address,
        ids_stride: u32,
        used: u32,
        pairs_in_all: u32,
    }
}

kiln_gpu::params! {
    pub(super) struct ExpertParams {
        a: Address,
        b: Address,
        factors: Address,
        d: Address,
        bias: Address,
        residual: Address,
        tiles: Address,
        pairs: Address,
        a_stride: [u32; 2],
        b_stride: [u32; 2],
        d_stride: [u32; 2],
        residual_stride: [u32; 2],
        k: u32,
        m: u32,
        used: u32,
        b_slots: u32,
        pairs_in_all: u32,
        scale: f32,
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("`pick` should have refused larger numbers")
}

impl Call {
    /// The block of a launch that works on the only matrix of this call; it is number `matrix` of the call with this layout.
    pub(super) fn block(
        &self,
        kernel: Kernel,
        (layout, matrix): (&Layout, usize),
        at: &dyn Fn(&Tensor) -> Address,
    ) -> Vec<u8> {
        let Product { a, b, d } = self.product;
        let Epilogue { bias, residual, scale } = self.epilogue;
        let places = layout.matrices[matrix];
        let place = |offset: usize| self.scratch.map_or(Address::default(), |s| at(&s).offset(offset as u64));
        let optional = |t: &Option<Tensor>| t.as_ref().map_or(Address::default(), at);
        let two = |s: [u32; 3]| [s[0], s[1]];
        let padded_bytes = 2 * padded(&self.product);
        // Prepared activations lie one after the other in the order of b's rows.
        let (b_at, b_stride) = if matches!(kernel, Kernel::Matrix | Kernel::Fragment | Kernel::Tail | Kernel::Split) {
            let [_, n, n2, _] = b.shape;
            (place(layout.halves), [1, n, n * n2].map(|rows| count(rows * padded_bytes)))
        } else {
            (at(&b), row_strides(&b))
        };
        let residual_stride = residual.as_ref().map_or([0; 3], row_strides);
        match (kernel, &self.ids) {
            (Kernel::List, ids) => ListParams {
                ids: optional(ids),
                tiles: place(layout.tiles),
                pairs: place(layout.pairs),
                slots: place(layout.slots),
                ids_stride: ids.as_ref().map_or(0, |ids| row_strides(ids)[0]),
                used: ids.map_or(1, |ids| count(ids.shape[0])),
                pairs_in_all: ids.map_or(0, |ids| count(ids.len())),
            }
            .bytes(),
            (Kernel::PackActivations | Kernel::PackSorted | Kernel::PackFragments, _) => ColumnParams {
                other: optional(&self.prologue.and_then(|prologue| prologue.operand())),
                other_stride: self
                    .prologue
                    .and_then(|prologue| prologue.operand())
                    .as_ref()
                    .map_or([0; 3], row_strides),
                eps: if let Some(Prologue::Norm(norm)) = self.prologue { norm.eps } else { 0.0 },
                b: at(&b),
                factors: place(layout.factors),
                halves: place(layout.halves),
                stride: row_strides(&b),
                shape: [1, 2, 3].map(|d| count(b.shape[d])),
                pairs: place(if kernel == Kernel::PackFragments { layout.slots } else { layout.pairs }),
                used: self.ids.map_or(1, |ids| count(ids.shape[0])),
                counters: place(layout.counters),
                n_counters: count(layout.n_counters),
                columns: count(prepared_columns(
                    &self.product,
                    self.ids.as_ref().filter(|_| kernel != Kernel::PackActivations),
                )),
                k: count(b.shape[0]),
                padded_k: count(if kernel == Kernel::PackFragments { fragment::padded } else { padded }(&self.product)),
            }
            .bytes(),
            (_, Some(ids)) => ExpertParams {
                a: at(&a),
                b: b_at,
                factors: place(layout.factors),
                d: at(&d),
                bias: optional(&bias),
                residual: optional(&residual),
                tiles: place(layout.tiles),
                pairs: place(layout.pairs),
                a_stride: two(row_strides(&a)),
                b_stride: two(b_stride),
                d_stride: two(row_strides(&d)),
                residual_stride: two(residual_stride),
                k: count(a.shape[0]),
                m: count(a.shape[1]),
                used: count(ids.shape[0]),
                b_slots: count(b.shape[1]),
                pairs_in_all: count(ids.len()),
                scale,
            }
            .bytes(),
            (Kernel::Split | Kernel::PlainSplit | Kernel::Sums, None) => {
                let (path, partials) = match kernel {
                    Kernel::Split => (Path::Coopmat, places.partials),
                    _ => (Path::Scalar, places.plain_sums),
                };
                let split = self.split(path).expect("only split products have this kernel");
                SplitParams {
                    a: at(&a),
                    b: b_at,
                    factors: place(layout.factors),
                    d: at(&d),
                    bias: optional(&bias),
                    residual: optional(&residual),
                    partials: place(partials),
                    counters: place(places.counters),
                    a_stride: [row_strides(&a)[0]],
                    b_stride: [b_stride[0]],
                    d_stride: [row_strides(&d)[0]],
                    residual_stride: [residual_stride[0]],
                    k: count(a.shape[0]),
                    m: count(a.shape[1]),
                    n: count(b.shape[1]),
                    scale,
                    chunk: count(split.chunk),
                    splits: count(split.count),
                }
                .bytes()
            }
            (Kernel::Fragment, None) => {
                let factors = |packed_b: &Option<PackedB>, own| match packed_b {
                    Some(packed_b) => optional(&packed_b.factors),
                    None => own,
                };
                LaneParams {
                    a: at(&a),
                    // A gate is followed by no norm.
                    up: optional(&self.gate.map(|gate| gate.up).or(self.emit_weight)),
                    b: self.packed_b.as_ref().map_or(b_at, |packed_b| at(&packed_b.halves)),
                    factors: factors(&self.packed_b, place(layout.factors)),
                    d: at(&d),
                    bias: optional(&bias),
                    residual: optional(&residual),
                    halves: optional(&self.emit_packed_b.map(|packed_b| packed_b.halves)),
                    emit_factors: factors(&self.emit_packed_b, Address::default()),
                    scale_hint: optional(&self.scale_hint.map(|magnitude_probe| magnitude_probe.sums)),
                    magnitude_probe: optional(&self.magnitude_probe.map(|magnitude_probe| magnitude_probe.sums)),
                    // Activations that a norm precedes are followed by none.
                    squares: optional(&self.sums.or(self.packed_b.and_then(|packed_b| packed_b.squares))),
                    overflow: optional(&self.overflow),
                    a_stride: [row_strides(&a)[0]],
                    d_stride: [row_strides(&d)[0]],
                    residual_stride: [residual_stride[0]],
                    k: count(a.shape[0]),
                    m: count(a.shape[1]),
                    n: count(b.shape[1]),
                    scale,
                }
                .bytes()
            }
            (_, None) => Params {
                a: at(&a),
                b: b_at,
                factors: place(layout.factors),
                d: at(&d),
                bias: optional(&bias),
                residual: optional(&residual),
                a_stride: row_strides(&a),
                b_stride,
                d_stride: row_strides(&d),
                residual_stride,
                batches: [count(b.shape[2]), count(b.shape[3])],
                share: [count(b.shape[2] / a.shape[2]), count(b.shape[3] / a.shape[3])],
                k: count(a.shape[0]),
                m: count(a.shape[1]),
                n: count(b.shape[1]),
                scale,
            }
            .bytes(),
        }
    }
}
