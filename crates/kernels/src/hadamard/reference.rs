//! The definition of `hadamard`.

use super::{Call, Direction};
use crate::host::HostMemory;

/// Every element of a block is the sum of all of them with the signs of its row of the matrix.
pub(crate) fn reference(call: &Call, memory: &mut HostMemory) {
    let (cols, block) = (call.x.shape[0], call.block);
    let signs = call.signs.map_or_else(|| vec![1.0; cols], |signs| memory.read(&signs));
    let (x, back) = (memory.read(&call.x), call.direction == Direction::Back);
    let mut y = Vec::with_capacity(x.len());
    for at in 0..x.len() {
        let (start, i) = (at - at % block, at % block);
        let sum: f64 = (0..block)
            .map(|j| {
                let from = start + j;
                let value = if back { x[from] } else { x[from] * signs[from % cols] };
                if (i & j).count_ones() % 2 == 0 { value } else { -value }
            })
            .sum();
        let turned = sum / (block as f64).sqrt();
        y.push(if back { turned * signs[at % cols] } else { turned });
    }
    memory.write(&call.y, &y);
}
