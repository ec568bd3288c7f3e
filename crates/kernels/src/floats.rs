//! Rows of host memory as f32, for the operations' fast code on the CPU: borrowed where they lie as floats already, and
//! results computed by rows on all threads.

use std::borrow::Cow;

use fearless_simd::dispatch;
use fearless_simd::prelude::*;
use half::{bf16, f16};
use kiln_gguf::{TensorType, quant};
use rayon::prelude::*;

use crate::host::HostMemory;
use crate::operation::rows_apart;
use crate::simd;
use crate::tensor::Tensor;

/// Elements that a task should at least have.
const TASK_ELEMENTS: usize = 1 << 13;

/// Whether rows of this tensor are read and written here without loss: floats, and blocks of them.
pub(crate) fn is_float(t: &Tensor) -> bool {
    use TensorType::{F64, I8, I16, I32, I64};
    !matches!(t.ty, F64 | I8 | I16 | I32 | I64)
}

impl HostMemory {
    /// Every element in index order.
    pub(crate) fn floats(&self, t: &Tensor) -> Cow<'_, [f32]> {
        if t.is_empty() {
            return Cow::Borrowed(&[]);
        }
        if t.is_dense() && t.ty == TensorType::F32 {
            let (first, len) = t.span();
            if let Ok(floats) = bytemuck::try_cast_slice(&self.bytes(t.slot)[first..first + len]) {
                return Cow::Borrowed(floats);
            }
        }
        let mut out = vec![0.0; t.len()];
        for (i, row) in rows_apart(t.shape).zip(out.chunks_exact_mut(t.shape[0])) {
            self.float_row(t, i, row);
        }
        Cow::Owned(out)
    }

    /// Row (i1, i2, i3) of a tensor.
    pub(crate) fn float_row(&self, t: &Tensor, i: [usize; 3], out: &mut [f32]) {
        if !t.has_dense_rows() {
            let row = self.read(&crate::elementwise::row(*t, i));
            return out.iter_mut().zip(row).for_each(|(out, x)| *out = x as f32);
        }
        // What was interleaved is not read where it came from: the system would have both in memory.
        if let Some(interleaved) = self.interleaved(t) {
            return read_dense(t.ty, &interleaved.row(t.row_offset(i) / t.row_bytes()), out);
        }
        read_dense(t.ty, &self.bytes(t.slot)[t.row_offset(i)..][..t.row_bytes()], out);
    }

    /// Writes every element in index order.
    pub(crate) fn write_floats(&mut self, t: &Tensor, values: &[f32]) {
        assert_eq!(values.len(), t.len(), "write: values for every element of {t}");
        if t.ty == TensorType::F32 && t.is_dense() && values.len() > 4 * TASK_ELEMENTS {
            let (first, len) = t.span();
            let to = self.bytes_mut(t.slot)[first..first + len].par_chunks_mut(4 * TASK_ELEMENTS);
            let copy = |(to, values): (&mut [u8], &[f32])| to.copy_from_slice(bytemuck::cast_slice(values));
            return to.zip(values.par_chunks(TASK_ELEMENTS)).for_each(copy);
        }
        for (i, row) in rows_apart(t.shape).zip(values.chunks_exact(t.shape[0].max(1))) {
            self.write_float_row(t, i, row);
        }
    }

    /// Writes row (i1, i2, i3) of a cache. What F16 cannot hold becomes its largest number.
    pub(crate) fn write_cache_row(&mut self, t: &Tensor, i: [usize; 3], values: &mut [f32]) {
        if t.ty == TensorType::F16 {
            values.iter_mut().for_each(|x| *x = x.clamp(-65504.0, 65504.0));
        }
        self.write_float_row(t, i, values);
    }

    /// Writes row (i1, i2, i3).
    pub(crate) fn write_float_row(&mut self, t: &Tensor, i: [usize; 3], values: &[f32]) {
        if !t.has_dense_rows() {
            let values: Vec<f64> = values.iter().map(|x| f64::from(*x)).collect();
            return self.write(&crate::elementwise::row(*t, i), &values);
        }
        let bytes = &mut self.bytes_mut(t.slot)[t.row_offset(i)..][..t.row_bytes()];
        match t.ty {
            TensorType::F32 => bytes.copy_from_slice(bytemuck::cast_slice(values)),
            TensorType::F16 => {
                for (to, x) in bytes.chunks_mut(2 * HALVES).zip(values.chunks(HALVES)) {
                    let mut halves = [f16::ZERO; HALVES];
                    half::slice::HalfFloatSliceExt::convert_from_f32_slice(&mut halves[..x.len()], x);
                    for (to, half) in to.as_chunks_mut::<2>().0.iter_mut().zip(halves) {
                        *to = half.to_le_bytes();
                    }
                }
            }
            TensorType::BF16 => {
                for (to, x) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    *to = bf16::from_f32(*x).to_le_bytes();
                }
            }
            ty => quant::quantise(ty, values, values.len(), None, bytes).expect("a type with a quantiser"),
        }
    }
}

/// Half floats converted at once.
const HALVES: usize = 64;

/// Elements of a type that lie side by side.
pub(crate) fn read_dense(ty: TensorType, bytes: &[u8], out: &mut [f32]) {
    match ty {
        TensorType::F32 => {
            for (out, x) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*x);
            }
        }
        TensorType::F16 => dispatch!(simd::level(), simd => {
            let mut done = 0;
            for (out, halves) in out.as_chunks_mut::<16>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
                let Some(floats) = simd::native_halves(simd, halves) else { break };
                floats.store_array(out);
                done += 16;
            }
            for (out, x) in out.iter_mut().zip(bytes.as_chunks::<2>().0).skip(done) {
                *out = simd::half(u16::from_le_bytes(*x));
            }
        }),
        _ => quant::dequantise(ty, bytes, out).expect("rows are whole blocks"),
    }
}

/// Writes `y`, whose rows `each(memory, indices, row)` computes, on all threads. Nothing is written before everything is
/// computed: `y` may be an operand.
pub(crate) fn by_rows(memory: &mut HostMemory, y: &Tensor, each: impl Fn(&HostMemory, [usize; 3], &mut [f32]) + Sync) {
    let [cols, n1, n2, _] = y.shape;
    if y.is_empty() {
        return;
    }
    let mut values = vec![0.0; y.len()];
    let rows = TASK_ELEMENTS.div_ceil(cols);
    let from = &*memory;
    let work = |(task, chunk): (usize, &mut [f32])| {
        for (i, row) in chunk.chunks_exact_mut(cols).enumerate() {
            let i = task * rows + i;
            each(from, [i % n1, i / n1 % n2, i / n1 / n2], row);
        }
    };
    if values.len() <= rows * cols {
        work((0, &mut values));
    } else {
        values.par_chunks_mut(rows * cols).enumerate().for_each(work);
    }
    memory.write_floats(y, &values);
}
