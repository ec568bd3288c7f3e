//! `rope` at the speed of the CPU: the angles of a token are found once, in f64, for all of its heads.

use rayon::prelude::*;

use super::Call;
use super::reference::angle;
use crate::floats::by_rows;
use crate::host::HostMemory;

/// Tokens whose angles one task finds.
const TASK_TOKENS: usize = 16;

/// Turns the pairs of every head, and copies what is in no pair.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let (tokens, pairs) = (call.x.shape[2], call.pairs());
    let positions = memory.read(&call.positions);
    let turns = memory.read(&call.turns);
    // Sine and cosine, with everything they are multiplied by.
    let mut factors = vec![[0.0f32; 2]; tokens * pairs];
    factors.par_chunks_mut(pairs).with_min_len(TASK_TOKENS).enumerate().for_each(|(token, factors)| {
        for (p, factor) in factors.iter_mut().enumerate() {
            let position = positions[call.style.position_row(p, call.sections) * tokens + token];
            let (sin, cos) = angle(position as i64, turns[2 * p] as i32, turns[2 * p + 1] as i32).sin_cos();
            let sin = if call.backward { -sin } else { sin };
            *factor = [sin, cos].map(|x| (x * f64::from(call.magnitude)) as f32);
        }
    });
    by_rows(memory, &call.y, |memory, i, head| {
        memory.float_row(&call.x, i, head);
        for (p, [sin, cos]) in factors[i[1] * pairs..][..pairs].iter().enumerate() {
            let (a, b) = call.pair(p);
            let (xa, xb) = (head[a], head[b]);
            head[a] = xa * cos - xb * sin;
            head[b] = xa * sin + xb * cos;
        }
    });
}
