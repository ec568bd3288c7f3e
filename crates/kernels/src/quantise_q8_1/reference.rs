//! The definition of `quantise_q8_1`.

use half::f16;

use super::{BLOCK, BLOCK_BYTES, Call};
use crate::elementwise::row;
use crate::host::HostMemory;
use crate::operation::rows_apart;

/// Per 32 values: d = max|x| / 127 as f16, q = x / d rounded with halves away from zero, s = d * sum(q) as f16.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    for i in rows_apart(call.x.shape) {
        let mut values = memory.read(&row(call.x, i));
        values.resize(values.len().next_multiple_of(BLOCK), 0.0);
        let start = call.y.row_offset(i);
        let out = &mut memory.bytes_mut(call.y.slot)[start..];
        for (x, block) in values.chunks_exact(BLOCK).zip(out.chunks_exact_mut(BLOCK_BYTES)) {
            for (g, x) in x.chunks_exact(32).enumerate() {
                let largest = x.iter().fold(0.0f64, |most, v| most.max(v.abs()));
                let d = half(largest / 127.0);
                let code = |v: f64| if d == f16::ZERO { 0.0 } else { (v / d.to_f64()).round().clamp(-127.0, 127.0) };
                let sum: f64 = x.iter().map(|v| code(*v)).sum();
                block[4 * g..4 * g + 2].copy_from_slice(&d.to_le_bytes());
                block[4 * g + 2..4 * g + 4].copy_from_slice(&half(d.to_f64() * sum).to_le_bytes());
                for (byte, v) in block[16 + 32 * g..].iter_mut().zip(x) {
                    *byte = code(*v) as i8 as u8;
                }
            }
        }
    }
}

fn half(v: f64) -> f16 {
    f16::from_f64(v.clamp(-65504.0, 65504.0))
}
