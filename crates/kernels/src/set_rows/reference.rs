//! The definition of `set_rows`, and of the blocks that shaders write.

use half::f16;
use kiln_gguf::TensorType;
use kiln_gguf::quant::codebook::IQ4;

use super::Call;
use crate::elementwise::row;
use crate::host::HostMemory;
use crate::operation::rows_apart;
use crate::tensor::Tensor;

/// dst(.., ids(i)) = src(.., i); a row whose id names no row of dst is dropped. Rows of F16 saturate; a NaN stays one.
pub(super) fn reference(call: &Call, memory: &mut HostMemory) {
    let Call { src, ids, dst } = call;
    for i in rows_apart(src.shape) {
        let place = ids.narrow(0, i[0], 1).narrow(1, i[1] % ids.shape[1], 1).narrow(2, i[2] % ids.shape[2], 1);
        let id = memory.read(&place)[0];
        if id >= 0.0 && id < dst.shape[1] as f64 {
            let mut values = memory.read(&row(*src, i));
            if dst.ty == TensorType::F16 {
                values.iter_mut().for_each(|x| *x = x.clamp(-65504.0, 65504.0));
            }
            write_row(memory, &row(*dst, [id as usize, i[1], i[2]]), &values);
        }
    }
}

/// Writes one row as shaders do: by the host's quantisers, except IQ4_NL, where the host searches much longer.
pub(crate) fn write_row(memory: &mut HostMemory, row: &Tensor, values: &[f64]) {
    if row.ty != TensorType::IQ4_NL {
        return memory.write(row, values);
    }
    let bytes = &mut memory.bytes_mut(row.slot)[row.offset..][..row.row_bytes()];
    for (block, x) in bytes.chunks_exact_mut(18).zip(values.chunks_exact(32)) {
        encode_iq4_nl(x, block);
    }
}

/// The value of largest magnitude becomes -127; the scale is then fitted to those codes, each weighted by the square of
/// its value, and the codes to the rounded scale.
fn encode_iq4_nl(x: &[f64], block: &mut [u8]) {
    let extreme = x.iter().fold(0.0f64, |most, v| if v.abs() > most.abs() { *v } else { most });
    let nearest = |level: f64| {
        let below = |k: &usize| level > (f64::from(IQ4[*k]) + f64::from(IQ4[k + 1])) / 2.0;
        (0..15).filter(below).count()
    };
    let (mut wxq, mut wqq) = (0.0, 0.0);
    for v in x.iter().filter(|_| extreme != 0.0) {
        let q = f64::from(IQ4[nearest(v / extreme * -127.0)]);
        wxq += v * v * q * v;
        wqq += v * v * q * q;
    }
    let d = f16::from_f64(if wqq > 0.0 { (wxq / wqq).clamp(-65504.0, 65504.0) } else { 0.0 });
    block[..2].copy_from_slice(&d.to_le_bytes());
    let code = |v: f64| nearest(if d == f16::ZERO { 0.0 } else { v / d.to_f64() }) as u8;
    for l in 0..16 {
        block[2 + l] = code(x[l]) | code(x[l + 16]) << 4;
    }
}
