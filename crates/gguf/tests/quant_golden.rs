//! The tensor formats against outsiders: files that `scripts/goldens/quant` made with the Python package `gguf`, and
//! for the types which that package does not know, the formula of a single element, written down a second time.

use std::path::PathBuf;

use kiln_gguf::TensorType;
use kiln_gguf::quant::{dequantise, quantise};

fn golden(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn read(ty: TensorType, packed: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; packed.len() / ty.block_bytes() * ty.block_len()];
    dequantise(ty, packed, &mut out).unwrap_or_else(|error| panic!("{ty}: {error}"));
    out
}

fn assert_same(ty: TensorType, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{ty}");
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{ty}: element {i} is {a}, should be {b}");
    }
}

#[test]
fn dequantising_equals_the_outsider_to_the_bit() {
    use TensorType::*;
    let types = [
        F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0, MXFP4, NVFP4, IQ2_XXS,
        IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, IQ4_NL, IQ4_XS,
    ];
    for ty in types {
        let file = golden(&format!("{}.bin", ty.name().to_lowercase()));
        let blocks = file.len() / (ty.block_bytes() + 4 * ty.block_len());
        let (packed, values) = file.split_at(blocks * ty.block_bytes());
        assert!(blocks >= 12, "{ty}: {blocks} blocks are too few to mean anything");
        assert_same(ty, &read(ty, packed), &floats(values));
    }
}

#[test]
fn formats_with_one_fixed_rule_are_written_as_the_outsider_writes_them() {
    use TensorType::*;
    let values = floats(&golden("values.f32"));
    for ty in [BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, TQ1_0, TQ2_0] {
        let theirs = golden(&format!("{}.packed", ty.name().to_lowercase()));
        let mut ours = vec![0; theirs.len()];
        quantise(ty, &values, 256, None, &mut ours).unwrap();
        let differs = ours.iter().zip(&theirs).position(|(a, b)| a != b);
        assert_eq!(differs, None, "{ty}: first byte that differs");
    }
}

/// Bytes that look random and are the same in every run.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn half(low: u8, high: u8) -> f32 {
    half::f16::from_le_bytes([low, high]).to_f32()
}

/// Checks a type against `element(block, e)`.
fn check(ty: TensorType, element: impl Fn(&[u8], usize) -> f32) {
    let packed = noise(40 * ty.block_bytes());
    let expected: Vec<f32> = packed
        .chunks_exact(ty.block_bytes())
        .flat_map(|block| (0..ty.block_len()).map(|e| element(block, e)).collect::<Vec<_>>())
        .collect();
    assert_same(ty, &read(ty, &packed), &expected);
}

#[test]
fn types_unknown_to_the_outsider_follow_their_formulas() {
    check(TensorType::Q8_1, |b, e| f32::from(b[4 + e] as i8) * half(b[0], b[1]));
    check(TensorType::Q8_K, |b, e| f32::from_le_bytes([b[0], b[1], b[2], b[3]]) * f32::from(b[4 + e] as i8));
    check(TensorType::Q1_0, |b, e| {
        let d = half(b[0], b[1]);
        if b[2 + e / 8] & (1 << (e % 8)) != 0 { d } else { -d }
    });
    check(TensorType::Q2_0, |b, e| (i32::from((b[2 + e / 4] >> (2 * (e % 4))) & 3) - 1) as f32 * half(b[0], b[1]));
    check(TensorType::F32, |b, _| f32::from_le_bytes(b.try_into().unwrap()));
    check(TensorType::F64, |b, _| f64::from_le_bytes(b.try_into().unwrap()) as f32);
    check(TensorType::I8, |b, _| b[0] as i8 as f32);
    check(TensorType::I16, |b, _| i16::from_le_bytes(b.try_into().unwrap()) as f32);
    check(TensorType::I32, |b, _| i32::from_le_bytes(b.try_into().unwrap()) as f32);
    check(TensorType::I64, |b, _| i64::from_le_bytes(b.try_into().unwrap()) as f32);
}

#[test]
fn sums_beside_the_codes_are_those_of_the_codes() {
    let values: Vec<f32> = noise(512).iter().map(|&b| f32::from(b as i8) / 7.0).collect();
    let mut packed = vec![0; 16 * 36];
    quantise(TensorType::Q8_1, &values, 512, None, &mut packed).unwrap();
    for block in packed.chunks_exact(36) {
        let sum: i32 = block[4..].iter().map(|&q| i32::from(q as i8)).sum();
        let (d, s) = (half(block[0], block[1]), half(block[2], block[3]));
        assert!((s - d * sum as f32).abs() <= 0.002 * (d * sum as f32).abs() + 1e-3, "{s} and {d} * {sum}");
    }
    let mut packed = vec![0; 2 * 292];
    quantise(TensorType::Q8_K, &values, 256, None, &mut packed).unwrap();
    for block in packed.chunks_exact(292) {
        for i in 0..16 {
            let sum: i16 = block[4 + 16 * i..][..16].iter().map(|&q| i16::from(q as i8)).sum();
            assert_eq!(i16::from_le_bytes([block[260 + 2 * i], block[261 + 2 * i]]), sum);
        }
    }
}
