//! The definition of `xielu`.

use super::{Call, Curve};
use crate::host::HostMemory;

/// dst = f(x), element by element.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let mut values = memory.read(&call.x);
    values.iter_mut().for_each(|v| *v = value(call.curve, *v));
    memory.write(&call.dst, &values);
}

fn value(curve: Curve, x: f64) -> f64 {
    let [positive, negative, beta, eps] = [curve.positive, curve.negative, curve.beta, curve.eps].map(f64::from);
    match x > 0.0 {
        true => positive * x * x + beta * x,
        false => negative * (x.min(eps).exp_m1() - x) + beta * x,
    }
}
