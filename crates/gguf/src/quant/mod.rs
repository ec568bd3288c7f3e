//! What the bits of every tensor type mean: dequantise for all of them, quantise where a good search exists.
//! A format is one file here and one row of the table `FORMATS`; threads, files and devices live elsewhere.

mod blocks;
pub mod codebook;
mod eight;
mod finite;
mod grid;
mod search;
mod superblock;
mod ternary_grid;

mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod nvfp4;
mod packed;
mod plain;
mod q1_0;
mod q2_0;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod q8_1;
mod q8_k;
mod tq1_0;
mod tq2_0;

use rayon::prelude::*;

use crate::TensorType;

pub use finite::first_not_finite;
pub use packed::{pack, packed_type, unpack};

use finite::{FloatKind, Scales, float_first, large_power_first, scattered_half};

/// Values that one task of [`quantise_rows_parallel`] should at least have, so that handing it out costs nothing.
const TASK_VALUES: usize = 1 << 15;

/// Reads whole blocks.
type Dequantise = fn(bytes: &[u8], out: &mut [f32]);
/// Writes one row (whole blocks); `importance` has one weight per column of that row.
type Quantise = fn(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]);

/// One row of the table of formats.
struct Format {
    ty: TensorType,
    dequantise: Dequantise,
    quantise: Option<Quantise>,
    /// Where NaN and infinity can hide.
    scales: Scales,
}

const fn both(ty: TensorType, scales: Scales, dequantise: Dequantise, quantise: Quantise) -> Format {
    Format { ty, dequantise, quantise: Some(quantise), scales }
}

const fn read_only(ty: TensorType, scales: Scales, dequantise: Dequantise) -> Format {
    Format { ty, dequantise, quantise: None, scales }
}

/// Half floats at these bytes of a block.
const fn halves(at: &'static [usize]) -> Scales {
    Scales::Halves(at)
}

/// Every format of files Kiln knows; the order is that of the ids. Packed types are those of their base.
static FORMATS: &[Format] = &[
    both(TensorType::F32, Scales::Values(FloatKind::F32), plain::dequantise_f32, plain::quantise_f32),
    both(TensorType::F16, Scales::Values(FloatKind::F16), plain::dequantise_f16, plain::quantise_f16),
    both(TensorType::Q4_0, halves(&[0]), q4_0::dequantise, q4_0::quantise),
    both(TensorType::Q4_1, halves(&[0, 2]), q4_1::dequantise, q4_1::quantise),
    both(TensorType::Q5_0, halves(&[0]), q5_0::dequantise, q5_0::quantise),
    both(TensorType::Q5_1, halves(&[0, 2]), q5_1::dequantise, q5_1::quantise),
    both(TensorType::Q8_0, halves(&[0]), q8_0::dequantise, q8_0::quantise),
    both(TensorType::Q8_1, halves(&[0]), q8_1::dequantise, q8_1::quantise),
    both(TensorType::Q2_K, halves(&[80, 82]), q2_k::dequantise, q2_k::quantise),
    both(TensorType::Q3_K, halves(&[108]), q3_k::dequantise, q3_k::quantise),
    both(TensorType::Q4_K, halves(&[0, 2]), q4_k::dequantise, q4_k::quantise),
    both(TensorType::Q5_K, halves(&[0, 2]), q5_k::dequantise, q5_k::quantise),
    both(TensorType::Q6_K, halves(&[208]), q6_k::dequantise, q6_k::quantise),
    both(TensorType::Q8_K, Scales::Look(float_first), q8_k::dequantise, q8_k::quantise),
    both(TensorType::IQ2_XXS, halves(&[0]), iq2_xxs::dequantise, iq2_xxs::quantise),
    both(TensorType::IQ2_XS, halves(&[0]), iq2_xs::dequantise, iq2_xs::quantise),
    both(TensorType::IQ3_XXS, halves(&[0]), iq3_xxs::dequantise, iq3_xxs::quantise),
    both(TensorType::IQ1_S, halves(&[0]), iq1_s::dequantise, iq1_s::quantise),
    both(TensorType::IQ4_NL, halves(&[0]), iq4_nl::dequantise, iq4_nl::quantise),
    both(TensorType::IQ3_S, halves(&[0]), iq3_s::dequantise, iq3_s::quantise),
    both(TensorType::IQ2_S, halves(&[0]), iq2_s::dequantise, iq2_s::quantise),
    both(TensorType::IQ4_XS, halves(&[0]), iq4_xs::dequantise, iq4_xs::quantise),
    read_only(TensorType::I8, Scales::Never, plain::dequantise_i8),
    read_only(TensorType::I16, Scales::Never, plain::dequantise_i16),
    read_only(TensorType::I32, Scales::Never, plain::dequantise_i32),
    read_only(TensorType::I64, Scales::Never, plain::dequantise_i64),
    both(TensorType::F64, Scales::Values(FloatKind::F64), plain::dequantise_f64, plain::quantise_f64),
    both(TensorType::IQ1_M, Scales::Look(scattered_half), iq1_m::dequantise, iq1_m::quantise),
    both(TensorType::BF16, Scales::Values(FloatKind::Bf16), plain::dequantise_bf16, plain::quantise_bf16),
    both(TensorType::TQ1_0, halves(&[52]), tq1_0::dequantise, tq1_0::quantise),
    both(TensorType::TQ2_0, halves(&[64]), tq2_0::dequantise, tq2_0::quantise),
    both(TensorType::MXFP4, Scales::Look(large_power_first), mxfp4::dequantise, mxfp4::quantise),
    both(TensorType::NVFP4, Scales::Never, nvfp4::dequantise, nvfp4::quantise),
    both(TensorType::Q1_0, halves(&[0]), q1_0::dequantise, q1_0::quantise),
    both(TensorType::Q2_0, halves(&[0]), q2_0::dequantise, q2_0::quantise),
];

fn format(ty: TensorType) -> &'static Format {
    FORMATS
        .iter()
        .find(|format| format.ty == ty.base())
        .expect("every tensor type should have its row: a test checks it")
}

/// Why tensor data could not be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QuantError {
    /// There is no quantiser for this type.
    #[error("{ty} can be read but not written; choose another target type, such as Q4_K or IQ4_XS")]
    NoQuantiser {
        /// The type that was asked for.
        ty: TensorType,
    },
    /// A row (or a run to dequantise) is no whole number of blocks.
    #[error("{len} values are no whole number of {ty} blocks of {block_len}; choose a type with smaller blocks")]
    PartialBlock {
        /// The type of the tensor.
        ty: TensorType,
        /// Values in the row.
        len: usize,
        /// Values in a block of this type.
        block_len: usize,
    },
    /// The values are no whole number of rows.
    #[error("{values} values are no whole number of rows of {row_len}; pass whole rows")]
    PartialRow {
        /// Values passed.
        values: usize,
        /// Values in a row.
        row_len: usize,
    },
    /// The buffer of packed bytes has the wrong size.
    #[error("{values} values of {ty} take {expected} bytes, but the buffer has {got}")]
    ByteCount {
        /// The type of the tensor.
        ty: TensorType,
        /// Values passed.
        values: usize,
        /// Bytes that they take.
        expected: usize,
        /// Bytes in the buffer.
        got: usize,
    },
    /// The importance has another length than a row.
    #[error("the importance has {got} weights, but a row has {row_len} columns; pass one weight per column")]
    ImportanceLength {
        /// Values in a row.
        row_len: usize,
        /// Weights passed.
        got: usize,
    },
}

/// Turns the packed `bytes` of a tensor, or of any whole number of its blocks, into `out.len()` floats.
///
/// ```
/// use kiln_gguf::{TensorType, quant};
///
/// let values: Vec<f32> = (0..64).map(|i| (i as f32 / 9.0).sin()).collect();
/// let mut packed = vec![0; TensorType::Q8_0.row_bytes(64).unwrap()];
/// quant::quantise(TensorType::Q8_0, &values, 64, None, &mut packed)?;
/// let mut back = vec![0.0; 64];
/// quant::dequantise(TensorType::Q8_0, &packed, &mut back)?;
/// assert!(values.iter().zip(&back).all(|(a, b)| (a - b).abs() < 0.01));
/// # Ok::<(), quant::QuantError>(())
/// ```
pub fn dequantise(ty: TensorType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    check_bytes(ty, out.len(), out.len(), bytes.len())?;
    if !ty.is_packed() {
        (format(ty).dequantise)(bytes, out);
        return Ok(());
    }
    let mut blocks = vec![0; base_bytes(ty, out.len())];
    unpack(ty, bytes, &mut blocks)?;
    dequantise(ty.base(), &blocks, out)
}

/// Bytes of this many values in the type of the file.
fn base_bytes(ty: TensorType, values: usize) -> usize {
    values / ty.base().block_len() * ty.base().block_bytes()
}

/// Packs whole rows of `values`. `importance` says how much an error in each column of a row matters (None: all the same).
/// Finite values never become infinite or NaN: what is too large for the format saturates.
pub fn quantise(
    ty: TensorType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), QuantError> {
    let (quantise, row_bytes) = prepare(ty, values, row_len, importance, out)?;
    if ty.is_packed() {
        let mut blocks = vec![0; base_bytes(ty, values.len())];
        self::quantise(ty.base(), values, row_len, importance, &mut blocks)?;
        return pack(ty, &blocks, out);
    }
    for (row, packed) in values.chunks_exact(row_len).zip(out.chunks_exact_mut(row_bytes)) {
        quantise(row, importance, packed);
    }
    Ok(())
}

/// [`quantise`] on all threads of the current rayon pool. The result is the same to the bit.
pub fn quantise_rows_parallel(
    ty: TensorType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), QuantError> {
    let (quantise, row_bytes) = prepare(ty, values, row_len, importance, out)?;
    if ty.is_packed() {
        let mut blocks = vec![0; base_bytes(ty, values.len())];
        quantise_rows_parallel(ty.base(), values, row_len, importance, &mut blocks)?;
        return pack(ty, &blocks, out);
    }
    let rows = TASK_VALUES.div_ceil(row_len);
    values.par_chunks(rows * row_len).zip(out.par_chunks_mut(rows * row_bytes)).for_each(|(values, out)| {
        for (row, packed) in values.chunks_exact(row_len).zip(out.chunks_exact_mut(row_bytes)) {
            quantise(row, importance, packed);
        }
    });
    Ok(())
}

/// Whether [`quantise`] can write this type.
pub fn can_quantise(ty: TensorType) -> bool {
    format(ty).quantise.is_some()
}

/// Whether writing this type is a long search over a grid. Data for tests is quicker, and uses more of the grid, as random blocks.
pub fn searches_a_grid(ty: TensorType) -> bool {
    use TensorType::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};
    matches!(ty, IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S)
}

/// The checks before quantising; gives the quantiser of a row and the bytes of a row.
fn prepare(
    ty: TensorType,
    values: &[f32],
    row_len: usize,
    importance: Option<&[f32]>,
    out: &[u8],
) -> Result<(Quantise, usize), QuantError> {
    let quantise = format(ty).quantise.ok_or(QuantError::NoQuantiser { ty })?;
    if row_len == 0 || !values.len().is_multiple_of(row_len) {
        return Err(QuantError::PartialRow { values: values.len(), row_len });
    }
    if let Some(weights) = importance
        && weights.len() != row_len
    {
        return Err(QuantError::ImportanceLength { row_len, got: weights.len() });
    }
    let row_bytes = check_bytes(ty, row_len, values.len(), out.len())?;
    Ok((quantise, row_bytes))
}

/// Checks that rows of `row_len` are whole blocks and that all `values` take `got` bytes; gives the bytes of a row.
fn check_bytes(ty: TensorType, row_len: usize, values: usize, got: usize) -> Result<usize, QuantError> {
    let partial = QuantError::PartialBlock { ty, len: row_len, block_len: ty.block_len() };
    let row_bytes = ty.row_bytes(row_len).ok_or(partial)?;
    let expected = values / ty.block_len() * ty.block_bytes();
    if expected != got {
        return Err(QuantError::ByteCount { ty, values, expected, got });
    }
    Ok(row_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_type_has_exactly_one_format() {
        for &ty in TensorType::ALL {
            assert_eq!(FORMATS.iter().filter(|format| format.ty == ty).count(), 1, "{ty}");
        }
        assert_eq!(FORMATS.len(), TensorType::ALL.len());
    }

    #[test]
    fn wrong_sizes_are_errors_with_the_numbers() {
        let error = dequantise(TensorType::Q4_0, &[0; 18], &mut [0.0; 31]).unwrap_err();
        assert_eq!(error, QuantError::PartialBlock { ty: TensorType::Q4_0, len: 31, block_len: 32 });
        let error = dequantise(TensorType::Q4_0, &[0; 17], &mut [0.0; 32]).unwrap_err();
        assert_eq!(error, QuantError::ByteCount { ty: TensorType::Q4_0, values: 32, expected: 18, got: 17 });
        let error = quantise(TensorType::Q8_0, &[0.0; 48], 32, None, &mut [0; 34]).unwrap_err();
        assert_eq!(error, QuantError::PartialRow { values: 48, row_len: 32 });
        let error = quantise(TensorType::Q8_0, &[], 0, None, &mut []).unwrap_err();
        assert_eq!(error, QuantError::PartialRow { values: 0, row_len: 0 });
        let error = quantise(TensorType::Q8_0, &[0.0; 32], 32, Some(&[1.0; 16]), &mut [0; 34]).unwrap_err();
        assert_eq!(error, QuantError::ImportanceLength { row_len: 32, got: 16 });
        let error = quantise(TensorType::I8, &[0.0; 256], 256, None, &mut [0; 256]).unwrap_err();
        assert_eq!(error, QuantError::NoQuantiser { ty: TensorType::I8 });
    }
}
