//! What must hold for every quantiser: bounded error, zeros stay zeros, no infinities from finite values, rows that
//! know nothing of each other, and an importance that is heeded.

use kiln_gguf::TensorType;
use kiln_gguf::quant::{can_quantise, dequantise, quantise, quantise_rows_parallel};
use proptest::prelude::*;

const ROW: usize = 512;

fn writable() -> impl Iterator<Item = TensorType> {
    TensorType::ALL.iter().copied().filter(|&ty| can_quantise(ty))
}

fn pack(ty: TensorType, values: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let row = ty.row_bytes(ROW).expect("512 should be whole blocks of every type");
    let mut packed = vec![0xAA; values.len() / ROW * row];
    quantise(ty, values, ROW, importance, &mut packed).unwrap_or_else(|error| panic!("{ty}: {error}"));
    packed
}

fn round_trip(ty: TensorType, values: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let mut out = vec![f32::NAN; values.len()];
    dequantise(ty, &pack(ty, values, importance), &mut out).unwrap_or_else(|error| panic!("{ty}: {error}"));
    out
}

/// Values of a bell curve, the same in every run: sums of uniform numbers.
fn bell(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (0..6).map(|_| uniform()).sum()).collect()
}

fn weighted_error(x: &[f32], y: &[f32], weight: impl Fn(usize) -> f32) -> f64 {
    let terms = x.iter().zip(y).enumerate();
    terms.map(|(i, (a, b))| f64::from(weight(i)) * f64::from(a - b) * f64::from(a - b)).sum()
}

/// The squared error over the squared values.
fn relative_error(ty: TensorType, importance: Option<&[f32]>) -> f64 {
    let x = bell(16 * ROW, 7);
    let y = round_trip(ty, &x, importance);
    weighted_error(&x, &y, |_| 1.0) / weighted_error(&x, &vec![0.0; x.len()], |_| 1.0)
}

#[test]
fn the_error_of_a_bell_curve_stays_within_the_format_s_bound() {
    use TensorType::*;
    // A fiftieth above what the quantisers reach today; a quantiser that becomes better lowers its bound.
    let bounds = [
        (F32, 0.0),
        (F64, 0.0),
        (F16, 4.231e-8),
        (BF16, 2.830e-6),
        (Q8_0, 2.739e-5),
        (Q8_1, 2.739e-5),
        (Q8_K, 4.223e-5),
        (Q6_K, 3.062e-4),
        (Q5_K, 1.208e-3),
        (Q5_1, 1.375e-3),
        (Q5_0, 1.775e-3),
        (Q4_K, 5.007e-3),
        (Q4_1, 6.094e-3),
        (Q4_0, 7.136e-3),
        (IQ4_NL, 5.612e-3),
        (IQ4_XS, 5.698e-3),
        (NVFP4, 7.464e-3),
        (MXFP4, 1.248e-2),
        (IQ3_S, 2.013e-2),
        (IQ3_XXS, 3.703e-2),
        (IQ2_S, 6.491e-2),
        (IQ2_XS, 9.247e-2),
        (IQ2_XXS, 1.257e-1),
        (IQ1_M, 2.02e-1),
        (IQ1_S, 2.39e-1),
        (Q3_K, 2.166e-2),
        (Q2_K, 7.632e-2),
        (Q1_0, 3.603e-1),
        (Q2_0, 1.19e-1),
        (TQ1_0, 6.156e-1),
        (TQ2_0, 6.156e-1),
    ];
    for ty in writable() {
        let (_, bound) = bounds.iter().find(|(row, _)| *row == ty).unwrap_or_else(|| panic!("{ty} has no bound"));
        let error = relative_error(ty, None);
        assert!(error <= *bound, "{ty}: relative error {error:.3e}, bound {bound:.3e}");
        assert!(error >= bound * 0.96, "{ty}: the bound {bound:.3e} is loose, the error is {error:.3e}");
        let even = relative_error(ty, Some(&[1.0; ROW]));
        assert!(even <= *bound * 1.05, "{ty}: relative error {even:.3e} with an even importance, bound {bound:.3e}");
    }
}

#[test]
fn blocks_stand_alone() {
    let x = bell(11 * 256, 17);
    for ty in writable() {
        let bytes = ty.row_bytes(x.len()).unwrap();
        for importance in [None, Some(bell(x.len(), 19).iter().map(|v| v * v).collect::<Vec<f32>>())] {
            let mut whole = vec![0; bytes];
            quantise(ty, &x, x.len(), importance.as_deref(), &mut whole).unwrap();
            for (i, packed) in whole.chunks_exact(ty.block_bytes()).enumerate() {
                let range = i * ty.block_len()..(i + 1) * ty.block_len();
                let importance = importance.as_ref().map(|weights| &weights[range.clone()]);
                let mut alone = vec![0; ty.block_bytes()];
                quantise(ty, &x[range.clone()], ty.block_len(), importance, &mut alone).unwrap();
                assert_eq!(packed, alone, "{ty}: block {i}");
            }
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    for ty in writable() {
        for importance in [None, Some([1.0; ROW]), Some([0.0; ROW])] {
            let out = round_trip(ty, &[0.0; ROW], importance.as_ref().map(|w| w.as_slice()));
            assert!(out.iter().all(|&v| v == 0.0), "{ty}");
        }
        // A block of zeros beside others: formats of signs alone, and those whose grids begin above zero, cannot say zero.
        use TensorType::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, Q1_0};
        if ![Q1_0, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S].contains(&ty) {
            let mut row = bell(ROW, 3);
            row[128..192].fill(0.0);
            let out = round_trip(ty, &row, None);
            assert!(out[128..192].iter().all(|&v| v == 0.0), "{ty}: {:?}", &out[128..192]);
        }
    }
}

#[test]
fn no_finite_value_becomes_infinite_or_nan() {
    let steep: Vec<f32> =
        (0..ROW).map(|i| 2f32.powi(i as i32 % 254 - 126) * if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
    for ty in writable() {
        for importance in [None, Some(vec![1e30; ROW]), Some(bell(ROW, 9)), Some(vec![f32::NAN; ROW])] {
            for scale in [1e-45, 1e-40, 1e-38, 1e-30, 1e-20, 1e-10, 1e-7, 1e3, 1e5, 1e10, 1e20, 1e30, 1e37, 1e38] {
                let x: Vec<f32> = bell(ROW, 5).iter().map(|v| v * scale).collect();
                let largest = x.iter().fold(0f32, |m, v| m.max(v.abs()));
                let out = round_trip(ty, &x, importance.as_deref());
                for (a, b) in x.iter().zip(&out) {
                    assert!(b.is_finite(), "{ty}: {a} became {b}");
                    assert!(b.abs() <= largest * 1.3, "{ty}: {a} became {b}, larger than all values ({largest})");
                }
            }
            for x in [&steep, &vec![f32::MAX; ROW], &vec![-f32::MAX; ROW], &vec![1e38; ROW]] {
                let out = round_trip(ty, x, importance.as_deref());
                assert!(out.iter().all(|v| v.is_finite()), "{ty}");
            }
        }
    }
}

#[test]
fn huge_values_saturate_instead_of_vanishing() {
    for ty in writable() {
        let x: Vec<f32> = bell(ROW, 5).iter().map(|v| v * 1e30).collect();
        let out = round_trip(ty, &x, None);
        for (a, b) in x.iter().zip(&out).filter(|(a, _)| a.abs() > 1e30) {
            assert!(b.abs() > 400.0 && a.signum() == b.signum(), "{ty}: {a} became {b}");
        }
    }
}

#[test]
fn infinities_and_nan_do_not_reach_their_neighbours_as_nan() {
    for ty in writable().filter(|ty| ty.is_quantised()) {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = bell(ROW, 5);
            x[77] = bad;
            let out = round_trip(ty, &x, None);
            assert!(out.iter().all(|v| !v.is_nan()), "{ty}: {bad}");
        }
    }
}

#[test]
fn an_importance_lowers_the_error_where_it_is_high() {
    use TensorType::*;
    let importance: Vec<f32> = (0..ROW).map(|i| if i % 4 == 0 { 100.0 } else { 0.1 }).collect();
    let x = bell(32 * ROW, 11);
    let grids = [IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S];
    let scaled = [Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4];
    for ty in scaled.into_iter().chain(grids) {
        let error = |y: &[f32]| weighted_error(&x, y, |i| importance[i % ROW]);
        let (with, without) = (error(&round_trip(ty, &x, Some(&importance))), error(&round_trip(ty, &x, None)));
        assert!(with < without * 0.97, "{ty}: {with} with the importance, {without} without");
    }
}

#[test]
fn ternary_weights_survive_ternary_formats() {
    use TensorType::*;
    let x: Vec<f32> = bell(ROW, 13).iter().map(|v| 0.25 * (v * 2.0).round().clamp(-1.0, 1.0)).collect();
    for ty in [TQ1_0, TQ2_0, Q2_0] {
        assert_eq!(round_trip(ty, &x, None), x, "{ty}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn rows_are_independent_and_threads_change_nothing(seed in 0u64..1000, rows in 1usize..5, exponent in -12i32..12) {
        let x: Vec<f32> = bell(rows * ROW, seed).iter().map(|v| v * 10f32.powi(exponent)).collect();
        let importance: Vec<f32> = bell(ROW, seed + 1).iter().map(|v| v * v).collect();
        for ty in writable() {
            for importance in [None, Some(importance.as_slice())] {
                let whole = pack(ty, &x, importance);
                let single: Vec<u8> = x.chunks_exact(ROW).flat_map(|row| pack(ty, row, importance)).collect();
                prop_assert_eq!(&whole, &single, "{}", ty);
                let mut parallel = vec![0; whole.len()];
                quantise_rows_parallel(ty, &x, ROW, importance, &mut parallel).unwrap();
                prop_assert_eq!(&whole, &parallel, "{}", ty);
            }
        }
    }

    #[test]
    fn any_bytes_can_be_read(bytes in proptest::collection::vec(any::<u8>(), 600)) {
        for &ty in TensorType::ALL {
            let blocks = bytes.len() / ty.block_bytes();
            let mut out = vec![0.0; blocks * ty.block_len()];
            dequantise(ty, &bytes[..blocks * ty.block_bytes()], &mut out).unwrap();
        }
    }
}
