//! The definition of `glu`.

use super::{Call, Gate};
use crate::host::HostMemory;
use crate::unary::reference::sigmoid;

pub(crate) fn gated(kind: Gate, gate: f64, up: f64) -> f64 {
    match (kind, kind.function()) {
        (Gate::SwigluOai { alpha, limit }, _) => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let gate = gate.min(limit);
            gate * sigmoid(alpha * gate) * (1.0 + up.clamp(-limit, limit))
        }
        (Gate::SwigluLimited { limit }, _) => {
            let limit = f64::from(limit);
            (gate * sigmoid(gate)).min(limit) * up.clamp(-limit, limit)
        }
        (Gate::SwigluBounded { limit }, _) => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            gate * sigmoid(gate) * up.clamp(-limit, limit)
        }
        (Gate::Situ { beta, linear }, _) => {
            let bounded = |x: f64, most: f64| most * (x / most).tanh();
            let up = if linear > 0.0 { bounded(up, f64::from(linear)) } else { up };
            bounded(gate, f64::from(beta)) * sigmoid(gate) * up
        }
        (_, Some(function)) => function.of(gate) * up,
        (_, None) => unreachable!("every other gate has an activation"),
    }
}

/// dst = f(gate) * up, element by element.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    if call.dst.is_empty() {
        return;
    }
    let up = memory.read(&call.up);
    let mut values = memory.read(&call.gate);
    for (v, up) in values.iter_mut().zip(up) {
        *v = gated(call.kind, *v, up);
    }
    memory.write(&call.dst, &values);
}
