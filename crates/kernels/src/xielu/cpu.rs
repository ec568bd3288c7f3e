//! `xielu` at the speed of the CPU: rows of f32 on all threads.

use super::{Call, Curve};
use crate::floats::{by_rows, is_float};
use crate::host::HostMemory;

/// dst = f(x), element by element.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    if !is_float(&call.x) || !is_float(&call.dst) {
        return super::reference::reference(call, memory);
    }
    let Curve { positive, negative, beta, eps } = call.curve;
    by_rows(memory, &call.dst, |memory, i, out| {
        memory.float_row(&call.x, i, out);
        for x in out {
            let bend = if *x > 0.0 { positive * *x * *x } else { negative * (x.min(eps).exp_m1() - *x) };
            *x = beta * *x + bend;
        }
    });
}
