//! `unary` at the speed of the CPU: rows on all threads, the commonest functions in vectors of f32.

use fearless_simd::dispatch;

use super::{Call, Function};
use crate::floats::{by_rows, is_float};
use crate::host::HostMemory;
use crate::simd::{combine, level, sigmoid};

/// dst = f(x), element by element.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    if !is_float(&call.x) || !is_float(&call.dst) {
        return super::reference::reference(call, memory);
    }
    by_rows(memory, &call.dst, |memory, i, out| {
        memory.float_row(&call.x, i, out);
        match call.function {
            Function::Silu => {
                let x = out.to_vec();
                dispatch!(level(), simd => combine(simd, out, &x, #[inline(always)] |x, _| x * sigmoid(simd, x)));
            }
            Function::Sigmoid => {
                let x = out.to_vec();
                dispatch!(level(), simd => combine(simd, out, &x, #[inline(always)] |x, _| sigmoid(simd, x)));
            }
            Function::Relu2 => out.iter_mut().for_each(|x| *x = x.max(0.0) * x.max(0.0)),
            function => out.iter_mut().for_each(|x| *x = function.of(f64::from(*x)) as f32),
        }
    });
}
