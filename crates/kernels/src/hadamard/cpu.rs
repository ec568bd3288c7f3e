//! `hadamard` at the speed of the CPU: sums and differences of halves, on all threads.

use super::{Call, Direction};
use crate::floats::by_rows;
use crate::host::HostMemory;

/// Turns every row block by block.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let signs: Option<Vec<f32>> =
        call.signs.map(|signs| memory.read(&signs).into_iter().map(|sign| sign as f32).collect());
    let sign = |row: &mut [f32]| {
        if let Some(signs) = &signs {
            row.iter_mut().zip(signs).for_each(|(x, sign)| *x *= sign);
        }
    };
    let factor = 1.0 / (call.block as f32).sqrt();
    by_rows(memory, &call.y, |memory, i, out| {
        memory.float_row(&call.x, i, out);
        if call.direction == Direction::Turn {
            sign(out);
        }
        for block in out.chunks_exact_mut(call.block) {
            turn(block);
            block.iter_mut().for_each(|x| *x *= factor);
        }
        if call.direction == Direction::Back {
            sign(out);
        }
    });
}

/// The product with the matrix of 1 and -1.
fn turn(block: &mut [f32]) {
    let mut half = 1;
    while half < block.len() {
        for pair in block.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}
