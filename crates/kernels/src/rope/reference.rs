//! The definition of `rope`.

use std::f64::consts::TAU;

use super::Call;
use crate::host::HostMemory;

/// Turns the pairs of every head, and copies what is in no pair.
pub(crate) fn reference(call: &Call, memory: &mut HostMemory) {
    let [head_dim, heads, tokens, _] = call.x.shape;
    let positions = memory.read(&call.positions);
    let freqs = memory.read(&call.freqs);
    let mut y = memory.read(&call.x);
    for (row, head) in y.chunks_exact_mut(head_dim).enumerate() {
        let token = row / heads % tokens;
        for p in 0..call.pairs() {
            let position = positions[call.style.position_row(p, call.sections) * tokens + token];
            let (sin, cos) = angle(position as i64, freqs[2 * p] as i32, freqs[2 * p + 1] as i32).sin_cos();
            let sin = if call.backward { -sin } else { sin };
            let magnitude = f64::from(call.magnitude);
            let (a, b) = call.pair(p);
            let (xa, xb) = (head[a], head[b]);
            head[a] = (xa * cos - xb * sin) * magnitude;
            head[b] = (xa * sin + xb * cos) * magnitude;
        }
    }
    memory.write(&call.y, &y);
}

/// Radians at a position of a pair that turns by `high * 2^-32 + low * 2^-64` of a full turn per position.
pub(super) fn angle(position: i64, high: i32, low: i32) -> f64 {
    let turn = (u64::from(high as u32) << 32) | u64::from(low as u32);
    // The product wraps at a full turn, which is where it should.
    let phase = (position as u64).wrapping_mul(turn) as i64;
    phase as f64 / 2f64.powi(64) * TAU
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn angles_wrap_at_a_full_turn() {
        let quarter = 1 << 30;
        assert!((angle(1, quarter, 0) - TAU / 4.0).abs() < 1e-15);
        assert!((angle(5, quarter, 0) - TAU / 4.0).abs() < 1e-15);
        assert!((angle(-1, quarter, 0) + TAU / 4.0).abs() < 1e-15);
        assert!((angle(1 << 16, 0, 1 << 16) - TAU / 2f64.powi(32)).abs() < 1e-24);
    }
}
