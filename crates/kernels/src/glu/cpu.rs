//! `glu` at the speed of the CPU: rows on all threads, exponentials in vectors of f32.

use fearless_simd::prelude::*;
use fearless_simd::{Simd, dispatch, f32x16};

use super::reference::gated;
use super::{Call, Gate};
use crate::floats::by_rows;
use crate::host::HostMemory;
use crate::simd::{combine, level, sigmoid};

/// dst = f(gate) * up.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    by_rows(memory, &call.dst, |memory, i, out| {
        let mut up = vec![0.0; out.len()];
        memory.float_row(&call.up, i, &mut up);
        memory.float_row(&call.gate, i, out);
        gate_row(call.kind, out, &up);
    });
}

/// gate = f(gate) * up, element by element.
pub(crate) fn gate_row(kind: Gate, gate: &mut [f32], up: &[f32]) {
    match kind {
        Gate::Swiglu => {
            dispatch!(level(), simd => combine(simd, gate, up, #[inline(always)] |g, u| g * sigmoid(simd, g) * u))
        }
        Gate::GegluQuick => {
            dispatch!(level(), simd => combine(simd, gate, up, #[inline(always)] |g, u| g * sigmoid(simd, g * splat(simd, 1.702)) * u))
        }
        Gate::Geglu => dispatch!(level(), simd => combine(simd, gate, up, #[inline(always)] |g, u| {
            let inner = (g * g * splat(simd, 0.044_715)).mul_add(g, g) * splat(simd, 1.595_769);
            g * sigmoid(simd, inner) * u
        })),
        Gate::SwigluOai { alpha, limit } => {
            dispatch!(level(), simd => combine(simd, gate, up, #[inline(always)] |g, u| {
                let (most, least) = (splat(simd, limit), splat(simd, -limit));
                let g = g.min(most);
                g * sigmoid(simd, g * splat(simd, alpha)) * (u.max(least).min(most) + splat(simd, 1.0))
            }))
        }
        Gate::SwigluLimited { limit } => {
            dispatch!(level(), simd => combine(simd, gate, up, #[inline(always)] |g, u| {
                let (most, least) = (splat(simd, limit), splat(simd, -limit));
                (g * sigmoid(simd, g)).min(most) * u.max(least).min(most)
            }))
        }
        Gate::SwigluBounded { limit } => {
            dispatch!(level(), simd => combine(simd, gate, up, #[inline(always)] |g, u| {
                let (most, least) = (splat(simd, limit), splat(simd, -limit));
                let g = g.min(most);
                g * sigmoid(simd, g) * u.max(least).min(most)
            }))
        }
        Gate::Reglu => gate.iter_mut().zip(up).for_each(|(g, u)| *g = g.max(0.0) * u),
        // No kernel of the CPU has a tangent; the model that has this gate is far too large for that to matter.
        Gate::GegluErf | Gate::Situ { .. } => gate.iter_mut().zip(up).for_each(|(g, u)| {
            *g = gated(kind, f64::from(*g), f64::from(*u)) as f32;
        }),
    }
}

#[inline(always)]
fn splat<S: Simd>(simd: S, value: f32) -> f32x16<S> {
    f32x16::splat(simd, value)
}
