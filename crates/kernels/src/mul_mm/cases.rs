//! Cases of `mul_mm`: sizes around every tile, every format, odd rows, batches, experts, and what follows the product.

use kiln_gguf::TensorType::{self, BF16, F16, F32, I32, MXFP4x16, Q4_0, Q4_0x8, Q4_K, Q6_K, Q6_Kx8, Q8_0, Q8_0x8};

use super::{Call, Prologue};
use crate::case::{Case, Data, Level, Random, Tolerance};
use crate::formats::{FORMATS, random_blocks};
use crate::glu::Gate;
use crate::mul_mat::{Epilogue, FusedProduct, Norm, Product};
use crate::tensor::Tensor;

/// The plain path has exact weights and sums in f32 (1e-13 or so); paths with f16 operands round each to 11 bits, which
/// leaves 2^-24 / 3 for each of both, and sums over k average it.
pub(super) const TOLERANCE: Tolerance = Tolerance::Nmse(2e-7);

/// F32 weights are multiplied in f32 on every path: a rounding for each product and sum, and a sum that misses an element is
/// wrong by 1 / K.
const PLAIN: Tolerance = Tolerance::Nmse(1e-11);

/// Activations become BF16 beside BF16 weights where matrix units take those: 8 bits, 2^-18 / 3 and some.
fn tolerance(a: TensorType) -> Tolerance {
    if a == BF16 { Tolerance::Nmse(4e-6) } else { TOLERANCE }
}

pub(super) fn weights(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    let quick = kiln_gguf::quant::can_quantise(ty) && !kiln_gguf::quant::searches_a_grid(ty);
    if quick { data.input(ty, shape) } else { random_blocks(data, ty, shape, false) }
}

pub(super) fn with_scratch(data: &mut Data, call: Call) -> Call {
    let bytes = call.ample_scratch_bytes();
    Call { scratch: (bytes > 0).then(|| data.output(I32, [bytes / 4, 1, 1, 1])), ..call }
}

fn product(data: &mut Data, [a, b, d]: [TensorType; 3], [k, m, n]: [usize; 3]) -> Product {
    let a = weights(data, a, [k, m, 1, 1]);
    let b = data.input(b, [k, n, 1, 1]);
    Product { a, b, d: data.output(d, [m, n, 1, 1]) }
}

fn case(types: [TensorType; 3], [k, m, n]: [usize; 3]) -> Case {
    let [a, b, d] = types;
    Case::new(format!("mul_mm {a} x {b} to {d} k={k} m={m} n={n}"), move |data| {
        let product = product(data, types, [k, m, n]);
        (with_scratch(data, Call::plain(product)).into(), tolerance(a))
    })
}

/// Every path may run: activations of integers have 8 bits and a scale per 32 values, (1/127)^2 / 12 or so of the largest.
const ROUNDED: Tolerance = Tolerance::Nmse(1e-4);

fn rounded(ty: TensorType, [k, m, n]: [usize; 3]) -> Case {
    Case::new(format!("mul_mm {ty} x rounded columns k={k} m={m} n={n}"), move |data| {
        let product = product(data, [ty, F32, F32], [k, m, n]);
        let call = with_scratch(data, Call::plain(product));
        (Call { exact: false, ..call }.into(), ROUNDED)
    })
}

/// Sums of 16 bits where the device has them: K / 10^8 of NMSE.
fn half_sums(ty: TensorType, [k, m, n]: [usize; 3]) -> Case {
    Case::new(format!("mul_mm {ty} k={k} m={m} n={n}, sums of 16 bits"), move |data| {
        let product = product(data, [ty, F32, F32], [k, m, n]);
        let call = with_scratch(data, Call::plain(product));
        (Call { half_sums: true, ..call }.into(), Tolerance::Nmse(1e-4))
    })
}

/// Which expert a pair goes to: gets the generator, the pair's number and the number of experts.
type Choose = fn(&mut Random, usize, usize) -> usize;

#[derive(Clone, Copy)]
struct Experts {
    ty: TensorType,
    k: usize,
    m: usize,
    experts: usize,
    used: usize,
    tokens: usize,
    shared_b: bool,
}

fn experts(what: &str, sizes: Experts, choose: Choose) -> Case {
    let Experts { ty, k, m, experts, used, tokens, shared_b } = sizes;
    let columns = if shared_b { 1 } else { used };
    let name = format!("mul_mm {ty} k={k} m={m}, {used} of {experts} experts, {tokens} tokens x {columns}, {what}");
    Case::new(name, move |data| {
        let a = weights(data, ty, [k, m, experts, 1]);
        let b = data.input(F32, [k, columns, tokens, 1]);
        let d = data.output(F32, [m, used, tokens, 1]);
        let ids = data.input_with(I32, [used, tokens, 1, 1], |random, i| choose(random, i, experts) as f64);
        (with_scratch(data, Call { ids: Some(ids), ..Call::plain(Product { a, b, d }) }).into(), TOLERANCE)
    })
}

/// Every type that weights may have.
fn weight_types() -> impl Iterator<Item = TensorType> {
    FORMATS.iter().map(|format| format.ty).filter(|&ty| ty != I32)
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return bench();
    }
    let mut cases = Vec::new();
    // Compiling is most of what a case costs on a software GPU, so most formats have one.
    for ty in weight_types() {
        cases.push(case([ty, F32, F32], [3 * ty.block_len().max(64), 17, 18]));
    }
    for ty in [F16, Q4_0, Q4_K] {
        cases.push(case([ty, F16, F16], [ty.block_len().max(32), 9, 18]));
        cases.push(unaligned_columns(ty));
    }
    for ty in weight_types().filter(|ty| ty.is_quantised()) {
        cases.push(rounded(ty, [3 * ty.block_len().max(32), 17, 18]));
    }
    cases.extend(
        [(F16, [160, 70, 40]), (Q8_0, [96, 33, 18]), (Q4_K, [512, 17, 130])].map(|(ty, size)| half_sums(ty, size)),
    );
    for (m, n) in [(1, 1), (15, 16), (16, 17), (63, 64), (64, 65), (65, 63)] {
        cases.push(rounded(Q8_0, [160, m, n]));
    }
    // Just below, at and above the tiles of every path.
    for n in [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129] {
        cases.push(case([F16, F32, F32], [40, 10, n]));
    }
    for m in [1, 7, 8, 9, 31, 33, 63, 64, 65, 127, 128, 129, 257] {
        cases.push(case([Q8_0, F32, F32], [64, m, 20]));
    }
    for k in [1, 2, 3, 4, 15, 16, 17, 31, 33, 65, 77, 193] {
        cases.push(case([F32, F32, F32], [k, 11, 19]));
        cases.push(case([F16, F16, F32], [k, 65, 65]));
    }
    for k in [17, 36] {
        cases.push(case([BF16, BF16, F32], [k, 5, 19]));
    }
    cases.push(case([F32, F32, F32], [8, 3, 0]));
    cases.extend(split_cases());
    cases.extend(plain_split_cases());
    cases.extend(tail_cases());
    cases.extend(fragment_cases());
    cases.extend(shapes());
    cases.extend(extras());
    cases.extend(sibling_cases());
    cases.extend(before_cases());
    cases.extend(expert_cases());
    cases.push(rounded_experts());
    if level == Level::Full {
        cases.extend(full());
    }
    cases
}

/// Activations at odd places, which no vector load can read.
fn unaligned_columns(ty: TensorType) -> Case {
    let block = ty.block_len().max(32);
    Case::new(format!("mul_mm {ty} x unaligned columns"), move |data| {
        let product = product(data, [ty, F32, F32], [block, 67, 20]);
        let b = data.input(F32, [block + 3, 20, 1, 1]).narrow(0, 1, block);
        (with_scratch(data, Call::plain(Product { b, ..product })).into(), tolerance(ty))
    })
}

fn shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    for (a_batch, b_batch) in [([1, 1], [3, 2]), ([2, 1], [4, 1]), ([2, 3], [4, 6])] {
        cases.push(Case::new(format!("mul_mm batches {a_batch:?} {b_batch:?}"), move |data| {
            let a = data.input(F16, [36, 9, a_batch[0], a_batch[1]]);
            let b = data.input(F32, [36, 18, b_batch[0], b_batch[1]]);
            let d = data.output(F32, [9, 18, b_batch[0], b_batch[1]]);
            (with_scratch(data, Call::plain(Product { a, b, d })).into(), TOLERANCE)
        }));
    }
    cases.push(Case::new("mul_mm strided rows of everything", |data| {
        let a = data.strided_input(F16, [64, 9, 2, 1], [72, 10, 2, 1]);
        let b = data.strided_input(F32, [64, 18, 2, 1], [80, 19, 2, 1]);
        let d = data.strided_output(F32, [9, 18, 2, 1], [11, 20, 2, 1]);
        (with_scratch(data, Call::plain(Product { a, b, d })).into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mm permuted columns", |data| {
        // As the heads of an attention lie: activations are further apart than batches.
        let a = data.input(F16, [32, 4, 20, 1]).permute([0, 2, 1, 3]);
        let b = data.input(F32, [32, 8, 18, 1]).permute([0, 2, 1, 3]);
        let d = data.output(F32, [20, 8, 18, 1]).permute([0, 2, 1, 3]);
        (with_scratch(data, Call::plain(Product { a, b, d })).into(), TOLERANCE)
    }));
    for k in [20, 21] {
        cases.push(Case::new(format!("mul_mm NaN beside every operand k={k}"), move |data| {
            // Rows end inside a tile, and what follows them is NaN: 0 * NaN must not reach a result.
            let nan = f64::NAN;
            let a =
                data.input_with(F16, [24, 70, 1, 1], move |r, i| if i % 24 < k { r.uniform(-1.0, 1.0) } else { nan });
            let b =
                data.input_with(F32, [24, 70, 1, 1], move |r, i| if i % 24 < k { r.uniform(-1.0, 1.0) } else { nan });
            let (a, b) = (a.narrow(0, 0, k).narrow(1, 0, 66), b.narrow(0, 0, k).narrow(1, 0, 67));
            let d = data.output(F32, [66, 67, 1, 1]);
            (with_scratch(data, Call::plain(Product { a, b, d })).into(), TOLERANCE)
        }));
    }
    // As a factor of all activations, and as one that grows from activation vector to activation vector.
    for (what, low, high) in [("small", -9, -9), ("large", 9, 9), ("small and large", -9, 9)] {
        cases.push(Case::new(format!("mul_mm columns too {what} for F16"), move |data| {
            let a = data.input(Q8_0, [64, 20, 1, 1]);
            let b = data.input_with(F32, [64, 19, 1, 1], |random, i| {
                random.uniform(-1.0, 1.0) * 10f64.powi(low + (high - low) * (i / 64) as i32 / 18)
            });
            let d = data.output(F32, [20, 19, 1, 1]);
            (with_scratch(data, Call::plain(Product { a, b, d })).into(), TOLERANCE)
        }));
    }
    cases
}

/// Products so small and so deep that several workgroups share a tile: chunks of the same size and with a shorter last
/// one, k that ends inside a tile, and the first depth and N that are not split.
fn split_cases() -> Vec<Case> {
    let mut cases: Vec<Case> = [[512, 33, 20], [1056, 17, 65], [511, 9, 18], [700, 18, 256], [700, 18, 257]]
        .map(|sizes| case([F16, F32, F32], sizes))
        .into();
    cases.push(case([Q8_0, F32, F16], [1056, 35, 19]));
    cases.push(case([Q4_K, F32, F32], [2304, 10, 17]));
    cases.push(Case::new("mul_mm split over k, scale, bias and residual in place", |data| {
        let product = product(data, [F16, F32, F32], [777, 67, 21]);
        let (d, bias) = (data.input(F32, [67, 21, 1, 1]), Some(data.input(F32, [67, 1, 1, 1])));
        let epilogue = Epilogue { residual: Some(d), bias, scale: 0.5 };
        (with_scratch(data, Call { epilogue, ..Call::plain(Product { d, ..product }) }).into(), TOLERANCE)
    }));
    cases
}

/// Products whose last round of tiles would leave places of a software GPU empty, of which it is taken to have 32, so that lower tiles take its rows: 51
/// tiles of a matrix alone, with a bias, and 85 of two, the last of which had its weights decoded. Rows end inside a tile of either kind.
fn tail_cases() -> Vec<Case> {
    let alone = Case::new("mul_mm rows of the last round of tiles, scale and bias", |data| {
        let product = product(data, [F16, F32, F32], [48, 38, 270]);
        let epilogue = Epilogue { bias: Some(data.input(F32, [38, 1, 1, 1])), scale: 0.5, residual: None };
        (with_scratch(data, Call { epilogue, ..Call::plain(product) }).into(), TOLERANCE)
    });
    let last = Case::new("mul_mm rows of the last round of tiles, fused products", |data| {
        let call = fused_products(data, &[(F16, 40), (Q4_K, 37)], [256, 260]);
        (with_scratch(data, call).into(), TOLERANCE)
    });
    vec![alone, last]
}

/// Small N in the order of matrices: one matrix of them and more than a workgroup takes, rows that end inside a tile, fewer chunks of k
/// than subgroups, as many, and more, the last of them not whole; what follows the product, and fused products of several formats.
fn fragment_cases() -> Vec<Case> {
    let mut cases: Vec<Case> =
        [[64, 9, 2], [1088, 21, 7], [2432, 40, 50]].map(|sizes| case([F16, F32, F32], sizes)).into();
    // As many subgroups to a tile as leave the fewest chunks one after the other: five, and no more than there are chunks.
    cases.push(case([Q4_K, F32, F16], [1280, 35, 28]));
    cases.push(case([Q4_K, F32, F32], [256, 9, 21]));
    cases.push(Case::new("mul_mm few columns, scale, bias and residual in place", |data| {
        let product = product(data, [Q4_0, F32, F32], [576, 67, 5]);
        let (d, bias) = (data.input(F32, [67, 5, 1, 1]), Some(data.input(F32, [67, 1, 1, 1])));
        let epilogue = Epilogue { residual: Some(d), bias, scale: 0.5 };
        (with_scratch(data, Call { epilogue, ..Call::plain(Product { d, ..product }) }).into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mm few normed columns, fused products", |data| {
        let call = fused_products(data, &[(Q4_K, 18), (Q6_K, 9), (F16, 20)], [768, 12]);
        let prologue = Some(Prologue::Norm(Norm { weight: Some(data.input(F32, [768, 1, 1, 1])), eps: 1e-5 }));
        (with_scratch(data, Call { prologue, ..call }).into(), TOLERANCE)
    }));
    cases.extend(super::packed_b_cases::cases());
    cases
}

/// Activations that lie one element off, all of them: software GPUs, too, multiply them by tiles in shared memory.
fn askew(data: &mut Data, types: [TensorType; 3], [k, m, n]: [usize; 3]) -> Product {
    let product = product(data, types, [k, m, n]);
    let b = data.input(types[1], [k + 4, n, 1, 1]).narrow(0, 1, k);
    Product { b, ..product }
}

/// The same for the scalar path, which is split for any N: two chunks, a shorter last one, k that ends inside a
/// tile and inside a four, several tiles both ways, more chunks than are loaded at once, and the first depth that is not split.
fn plain_split_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for sizes in [[256, 33, 20], [252, 36, 20], [700, 72, 67], [2556, 9, 18]] {
        let [k, m, n] = sizes;
        cases.push(Case::new(format!("mul_mm F32 x askew columns k={k} m={m} n={n}"), move |data| {
            let product = askew(data, [F32, F32, F32], sizes);
            (with_scratch(data, Call::plain(product)).into(), PLAIN)
        }));
    }
    cases.push(case([F32, F32, F32], [391, 35, 50]));
    cases.push(Case::new("mul_mm Q8_0 x askew columns to F16, split over k", |data| {
        let product = askew(data, [Q8_0, F32, F16], [416, 38, 19]);
        // Rows of results take vectors, and the last one is not whole.
        let d = data.strided_output(F16, [38, 19, 1, 1], [40, 19, 1, 1]);
        (with_scratch(data, Call::plain(Product { d, ..product })).into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mm askew columns split over k, scale, bias and residual in place", |data| {
        let product = askew(data, [F32, F32, F32], [388, 67, 21]);
        let (d, bias) = (data.input(F32, [67, 21, 1, 1]), Some(data.input(F32, [67, 1, 1, 1])));
        let epilogue = Epilogue { residual: Some(d), bias, scale: 0.5 };
        (with_scratch(data, Call { epilogue, ..Call::plain(Product { d, ..product }) }).into(), PLAIN)
    }));
    // Activations that are made in the same memory as the sums, and sums of some of the matrices (software GPUs) or of all.
    cases.push(Case::new("mul_mm normed columns, fused products of which the askew ones are split over k", |data| {
        let mut call = fused_products(data, &[(F32, 9), (F32, 35), (F32, 18)], [388, 20]);
        for (other, m) in call.others.iter_mut().zip([35, 18]) {
            other.a = data.input(F32, [392, m, 1, 1]).narrow(0, 1, 388);
        }
        let prologue = Some(Prologue::Norm(Norm { weight: Some(data.input(F32, [388, 1, 1, 1])), eps: 1e-5 }));
        (with_scratch(data, Call { prologue, ..call }).into(), PLAIN)
    }));
    // No memory for the sums of several workgroups: one of them computes all.
    cases.push(Case::new("mul_mm askew columns without scratch memory", |data| {
        (Call::plain(askew(data, [F32, F32, F32], [512, 34, 20])).into(), PLAIN)
    }));
    cases
}

fn extras() -> Vec<Case> {
    let mut cases = Vec::new();
    // With room for decoded weights, and just without.
    for (what, less) in [("ample", 0), ("scarce", 4)] {
        cases.push(Case::new(format!("mul_mm many columns with {what} scratch memory"), move |data| {
            let product = product(data, [Q4_K, F32, F32], [256, 9, 512]);
            let call = Call::plain(product);
            let words = (call.ample_scratch_bytes() - less) / 4;
            assert!(4 * words >= call.scratch_bytes());
            (Call { scratch: Some(data.output(I32, [words, 1, 1, 1])), ..call }.into(), TOLERANCE)
        }));
    }
    for d in [F32, F16] {
        cases.push(Case::new(format!("mul_mm scale and bias to {d}"), move |data| {
            let product = product(data, [Q8_0, F32, d], [64, 19, 23]);
            let bias = Some(data.input(F32, [19, 1, 1, 1]));
            let epilogue = Epilogue { scale: 0.25, bias, residual: None };
            (with_scratch(data, Call { epilogue, ..Call::plain(product) }).into(), TOLERANCE)
        }));
    }
    cases.push(Case::new("mul_mm bias and residual in place", |data| {
        let product = product(data, [Q4_K, F32, F32], [256, 67, 65]);
        let (d, bias) = (data.input(F32, [67, 65, 1, 1]), Some(data.input(F32, [67, 1, 1, 1])));
        let epilogue = Epilogue { residual: Some(d), bias, ..Epilogue::default() };
        (with_scratch(data, Call { epilogue, ..Call::plain(Product { d, ..product }) }).into(), TOLERANCE)
    }));
    cases
}

/// Several matrices, each of a type and with this many rows, for n activations of k elements.
fn fused_products(data: &mut Data, types: &[(TensorType, usize)], [k, n]: [usize; 2]) -> Call {
    let (ty, m) = types[0];
    let product = product(data, [ty, F32, F32], [k, m, n]);
    let mut call = Call::plain(product);
    for &(ty, m) in &types[1..] {
        let (a, d) = (weights(data, ty, [k, m, 1, 1]), data.output(F32, [m, n, 1, 1]));
        call.others.push(FusedProduct { a, d, bias: None });
    }
    call
}

/// Matrices that share their activations: every kind of preparation, shared or not, and weights decoded before all products
/// (few tiles) or between them (many).
fn sibling_cases() -> Vec<Case> {
    let case = |what: &str, types: &'static [(TensorType, usize)], sizes: [usize; 2]| {
        let name = format!("mul_mm fused products {types:?} k={} n={}, {what}", sizes[0], sizes[1]);
        let tolerance = types.iter().map(|(ty, _)| *ty).find(|ty| *ty == BF16).map_or(TOLERANCE, tolerance);
        Case::new(name, move |data| {
            let call = fused_products(data, types, sizes);
            (with_scratch(data, call).into(), tolerance)
        })
    };
    let mut cases = vec![
        case("like q, k, v", &[(Q4_K, 33), (Q4_K, 17), (Q6_K, 9)], [256, 20]),
        case("columns of two types", &[(F16, 9), (BF16, 18), (F16, 17)], [40, 18]),
        case("one of F32", &[(F16, 9), (F32, 10)], [40, 18]),
        case("split over k", &[(F16, 35), (F16, 67), (F16, 3)], [777, 21]),
        case("only one is split", &[(F32, 18), (F16, 18)], [700, 21]),
        case("decoded together", &[(Q4_K, 9), (F16, 12), (Q6_K, 10)], [256, 256]),
        case("decoded in turn", &[(Q4_K, 18), (Q4_K, 17)], [256, 512]),
        case("decoded in turn, two late", &[(Q4_K, 2), (F16, 18), (Q6_K, 9), (Q4_K, 10)], [256, 512]),
    ];
    cases.push(Case::new("mul_mm fused products with scale, biases, strides and an F16 result", |data| {
        let mut call = fused_products(data, &[(Q8_0, 19), (Q8_0, 12), (Q8_0, 8)], [64, 23]);
        let bias = |data: &mut Data, m: usize| Some(data.input(F32, [m, 1, 1, 1]));
        call.epilogue = Epilogue { scale: 0.25, bias: bias(data, 19), residual: None };
        call.others[0].bias = bias(data, 12);
        call.others[0].d = data.strided_output(F32, [12, 23, 1, 1], [15, 23, 1, 1]);
        call.others[1].d = data.output(F16, [8, 23, 1, 1]);
        (with_scratch(data, call).into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mm fused products with rounded columns", |data| {
        let call = fused_products(data, &[(Q8_0, 17), (Q4_0, 9), (Q4_0, 20)], [96, 18]);
        (Call { exact: false, ..with_scratch(data, call) }.into(), ROUNDED)
    }));
    cases.push(Case::new("mul_mm fused products with scarce scratch memory", |data| {
        let call = fused_products(data, &[(Q4_K, 9), (Q4_K, 10)], [256, 512]);
        let words = (call.ample_scratch_bytes() - 4) / 4;
        (Call { scratch: Some(data.output(I32, [words, 1, 1, 1])), ..call }.into(), TOLERANCE)
    }));
    cases
}

/// Activations that are made on their way: short ones and such as do not fit registers, odd lengths and places, with and without
/// a weight; beside fused products and with decoded weights; small enough to vanish without their factor.
fn before_cases() -> Vec<Case> {
    let norm = |data: &mut Data, k: usize, eps: f32| {
        Some(Prologue::Norm(Norm { weight: Some(data.input(F32, [k, 1, 1, 1])), eps }))
    };
    let gate = |data: &mut Data, kind: Gate, ty: TensorType, shape: [usize; 4]| {
        Some(Prologue::Gate { kind, up: data.input(ty, shape) })
    };
    let mut cases = Vec::new();
    for (ty, k) in [(F16, 40), (F16, 77), (F16, 1500), (Q8_0, 320), (BF16, 40)] {
        cases.push(Case::new(format!("mul_mm {ty} x normed columns k={k}"), move |data| {
            let product = product(data, [ty, F32, F32], [k, 17, 19]);
            let prologue = norm(data, k, 1e-5);
            (with_scratch(data, Call { prologue, ..Call::plain(product) }).into(), tolerance(ty))
        }));
        cases.push(Case::new(format!("mul_mm {ty} x gated columns k={k}"), move |data| {
            let product = product(data, [ty, F32, F32], [k, 17, 19]);
            let prologue = gate(data, Gate::Swiglu, F32, [k, 19, 1, 1]);
            (with_scratch(data, Call { prologue, ..Call::plain(product) }).into(), tolerance(ty))
        }));
    }
    cases.push(Case::new("mul_mm fused products x columns normed without a weight, decoded weights", |data| {
        let call = fused_products(data, &[(Q4_K, 9), (Q6_K, 10)], [256, 256]);
        let prologue = Some(Prologue::Norm(Norm { weight: None, eps: 0.25 }));
        (with_scratch(data, Call { prologue, ..call }).into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mm fused products x normed columns, rounded", move |data| {
        let call = fused_products(data, &[(Q8_0, 17), (Q4_0, 9)], [96, 18]);
        let prologue = norm(data, 96, 1e-5);
        (Call { exact: false, ..with_scratch(data, Call { prologue, ..call }) }.into(), ROUNDED)
    }));
    cases.push(Case::new("mul_mm batches of normed columns of 1e-12, strided", move |data| {
        let a = data.input(F16, [36, 9, 2, 1]);
        let b = data.input_with(F32, [39, 18, 4, 1], |random, _| 1e-12 * random.uniform(-1.0, 1.0)).narrow(0, 1, 36);
        let d = data.output(F32, [9, 18, 4, 1]);
        let prologue = norm(data, 36, 1e-30);
        (with_scratch(data, Call { prologue, ..Call::plain(Product { a, b, d }) }).into(), TOLERANCE)
    }));
    cases.push(Case::new("mul_mm split over k x columns gated by unaligned F16, residual in place", |data| {
        let product = product(data, [F16, F16, F32], [700, 18, 21]);
        let up = data.input(F16, [703, 21, 1, 1]).narrow(0, 1, 700);
        let d = data.input(F32, [18, 21, 1, 1]);
        let epilogue = Epilogue { residual: Some(d), ..Epilogue::default() };
        let prologue = Some(Prologue::Gate { kind: Gate::Geglu, up });
        let call = Call { prologue, epilogue, ..Call::plain(Product { d, ..product }) };
        (with_scratch(data, call).into(), TOLERANCE)
    }));
    cases
}

fn expert_cases() -> Vec<Case> {
    let sizes = Experts { ty: Q4_0, k: 64, m: 20, experts: 8, used: 2, tokens: 33, shared_b: false };
    let any: Choose = |random, _, experts| random.below(experts);
    let mut cases = vec![
        experts("any", sizes, any),
        experts("any", Experts { shared_b: true, ..sizes }, any),
        experts("all to one", Experts { shared_b: true, ..sizes }, |_, _, _| 5),
        experts("the last alone", sizes, |_, i, experts| if i == 0 { experts - 1 } else { 0 }),
        experts("repeats within a token", Experts { used: 4, tokens: 9, ..sizes }, |_, i, experts| i / 4 % experts),
        experts("one token", Experts { tokens: 1, used: 4, ..sizes }, any),
        experts("one expert", Experts { experts: 1, used: 1, k: 1, ty: F32, ..sizes }, any),
        experts("any", Experts { ty: F16, k: 17, m: 70, experts: 4, used: 3, tokens: 50, shared_b: true }, any),
        experts("any", Experts { experts: 300, used: 3, k: 32, m: 9, ..sizes }, any),
    ];
    // The first expert gets just below, at and just above a tile of activations.
    for rows in [15, 16, 17, 31, 32, 33, 63, 64, 65] {
        let sizes = Experts { ty: Q8_0, k: 32, m: 9, experts: 3, used: 1, tokens: rows + 2, shared_b: true };
        cases.push(experts("two to others", sizes, |_, i, _| if i < 2 { i + 1 } else { 0 }));
    }
    cases.push(Case::new("mul_mm experts with bias, residual, strided ids and columns", |data| {
        let (k, m, n_experts, used, tokens) = (64, 19, 5, 2, 21);
        let a = data.input(Q8_0, [k, m, n_experts, 1]);
        let b = data.strided_input(F32, [k, used, tokens, 1], [k + 4, used + 1, tokens, 1]);
        let d = data.strided_output(F32, [m, used, tokens, 1], [m + 1, used, tokens, 1]);
        let bias = Some(data.input(F32, [m, n_experts, 1, 1]));
        let residual = Some(data.input(F32, [m, used, tokens, 1]));
        let ids = data.input_with(I32, [used + 3, tokens, 1, 1], move |random, _| random.below(n_experts) as f64);
        let epilogue = Epilogue { scale: 0.5, bias, residual };
        let call = Call { epilogue, ids: Some(ids.narrow(0, 0, used)), ..Call::plain(Product { a, b, d }) };
        (with_scratch(data, call).into(), TOLERANCE)
    }));
    cases.extend(expert_siblings());
    cases
}

/// Gate and up of the same activations, and down of gated ones.
fn expert_siblings() -> Vec<Case> {
    let (k, n_experts, used, tokens) = (64, 5, 2, 21);
    let chosen = move |data: &mut Data| {
        data.input_with(I32, [used, tokens, 1, 1], move |random, _| random.below(n_experts) as f64)
    };
    let fused_products = move |name: &str, types: [TensorType; 2]| {
        Case::new(format!("mul_mm {name}"), move |data| {
            let b = data.input(F32, [k, 1, tokens, 1]);
            let mut matrix = |ty: TensorType, m: usize| {
                let (a, d) = (weights(data, ty, [k, m, n_experts, 1]), data.output(F32, [m, used, tokens, 1]));
                FusedProduct { a, d, bias: Some(data.input(F32, [m, n_experts, 1, 1])) }
            };
            let (FusedProduct { a, d, bias }, other) = (matrix(types[0], 19), matrix(types[1], 34));
            let epilogue = Epilogue { scale: 0.5, bias, residual: None };
            let ids = Some(chosen(data));
            let call = Call { others: vec![other], epilogue, ids, ..Call::plain(Product { a, b, d }) };
            (with_scratch(data, call).into(), TOLERANCE)
        })
    };
    let gated = Case::new("mul_mm experts x gated columns", move |data| {
        let (a, b) = (data.input(Q8_0, [k, 19, n_experts, 1]), data.input(F32, [k, used, tokens, 1]));
        let d = data.output(F32, [19, used, tokens, 1]);
        let prologue = Some(Prologue::Gate { kind: Gate::Swiglu, up: data.input(F32, [k, used, tokens, 1]) });
        let call = Call { prologue, ids: Some(chosen(data)), ..Call::plain(Product { a, b, d }) };
        (with_scratch(data, call).into(), TOLERANCE)
    });
    vec![
        fused_products("fused products of experts", [Q4_0, Q4_0]),
        fused_products("fused products of experts in two formats", [Q8_0, F16]),
        gated,
    ]
}

/// Experts with activations of integers, gathered pair by pair.
fn rounded_experts() -> Case {
    Case::new("mul_mm experts with rounded columns", |data| {
        let a = data.input(Q4_0, [64, 20, 5, 1]);
        let (b, d) = (data.input(F32, [64, 2, 30, 1]), data.output(F32, [20, 2, 30, 1]));
        let ids = data.input_with(I32, [2, 30, 1, 1], |random, _| random.below(5) as f64);
        let call = with_scratch(data, Call { ids: Some(ids), ..Call::plain(Product { a, b, d }) });
        (Call { exact: false, ..call }.into(), ROUNDED)
    })
}

fn full() -> Vec<Case> {
    let mut cases: Vec<Case> = weight_types().map(unaligned_columns).collect();
    for ty in weight_types() {
        cases.push(case([ty, F32, F32], [8 * ty.block_len().max(32), 257, 300]));
        cases.push(case([ty, F16, F16], [3 * ty.block_len().max(32), 129, 65]));
    }
    for ty in [F32, F16, BF16, Q4_0, Q8_0, Q4_K, Q6_K] {
        for [k, m, n] in [[2880, 2880, 32], [576, 576, 512], [5120, 6, 4096], [8192, 1, 2048], [1024, 1057, 257]] {
            if k % ty.block_len() == 0 {
                cases.push(case([ty, F32, F32], [k, m, n]));
            }
        }
    }
    for k in [128, 129, 1056, 1057] {
        for m in [83, 1056, 1057] {
            cases.push(case([F16, F32, F32], [k, m, 200]));
        }
    }
    // Tiles that only products take which give one to nearly every core: an odd and an even number of rounds over k.
    for (ty, k) in [(F16, 160), (F16, 200), (BF16, 192), (Q8_0, 288), (Q4_K, 512)] {
        cases.extend([(4100, 1030), (4096, 515), (2100, 900)].map(|(m, n)| case([ty, F32, F32], [k, m, n])));
    }
    let any: Choose = |random, _, experts| random.below(experts);
    let sizes = Experts { ty: Q4_K, k: 2048, m: 768, experts: 128, used: 8, tokens: 512, shared_b: true };
    cases.push(experts("any", sizes, any));
    let sizes = Experts { ty: Q4_0, k: 2880, m: 2880, experts: 32, used: 2, tokens: 32, shared_b: false };
    cases.push(experts("any", sizes, any));
    let many = Experts { ty: F16, k: 16, m: 8, experts: 16, used: 1, tokens: 70_000, shared_b: true };
    cases.push(experts("any", many, any));
    cases
}

/// Benches are not judged, so one row of data is enough for a tensor: making more takes longer than multiplying it.
fn repeated(data: &mut Data, ty: TensorType, shape: [usize; 4]) -> Tensor {
    if data.is_blank() {
        return data.output(ty, shape);
    }
    let row = weights(data, ty, [shape[0], 1, 1, 1]);
    let row = data.memory.bytes(row.slot).to_vec();
    let tensor = data.output(ty, shape);
    data.memory.bytes_mut(tensor.slot).chunks_exact_mut(row.len()).for_each(|to| to.copy_from_slice(&row));
    tensor
}

fn timed(ty: TensorType, sizes: [usize; 3]) -> Case {
    timed_with(ty, sizes, false)
}

fn timed_with(ty: TensorType, [k, m, n]: [usize; 3], half_sums: bool) -> Case {
    let sums = if half_sums { ", sums of 16 bits" } else { "" };
    Case::new(format!("mul_mm {ty} k={k} m={m} n={n}{sums}"), move |data| {
        (timed_call(data, ty, [k, m, n], half_sums).into(), ROUNDED)
    })
}

/// A product that is timed and not judged.
pub(super) fn timed_call(data: &mut Data, ty: TensorType, [k, m, n]: [usize; 3], half_sums: bool) -> Call {
    let (a, b) = (repeated(data, ty, [k, m, 1, 1]), repeated(data, F32, [k, n, 1, 1]));
    let product = Product { a, b, d: data.output(F32, [m, n, 1, 1]) };
    let call = with_scratch(data, Call::plain(product));
    Call { half_sums, ..call }
}

/// The low-rank products of RWKV-6: five outputs of one matrix of ranks.
fn timed_ranks([k, m, n]: [usize; 3]) -> Case {
    Case::new(format!("mul_mm F32 k={k} m={m} n={n}, 5 batches"), move |data| {
        let (a, b) = (repeated(data, F32, [k, m, 5, 1]), repeated(data, F32, [k, 5, n, 1]).permute([0, 2, 1, 3]));
        let product = Product { a, b, d: data.output(F32, [m, n, 5, 1]) };
        (with_scratch(data, Call::plain(product)).into(), ROUNDED)
    })
}

fn timed_experts(ty: TensorType, tokens: usize) -> Case {
    let (k, m, n_experts, used) = (2048, 768, 128, 8);
    Case::new(format!("mul_mm {ty} k={k} m={m}, {used} of {n_experts} experts, {tokens} tokens"), move |data| {
        let (a, b) = (repeated(data, ty, [k, m, n_experts, 1]), repeated(data, F32, [k, 1, tokens, 1]));
        let d = data.output(F32, [m, used, tokens, 1]);
        let ids = data.input_with(I32, [used, tokens, 1, 1], move |random, _| random.below(n_experts) as f64);
        (with_scratch(data, Call { ids: Some(ids), ..Call::plain(Product { a, b, d }) }).into(), TOLERANCE)
    })
}

/// Q, k and v, or gate and up, of a model with 8 billion weights.
fn timed_siblings(ty: TensorType, rows: &'static [usize], n: usize) -> Case {
    Case::new(format!("mul_mm {ty} k=4096 m={rows:?} n={n}"), move |data| {
        let b = repeated(data, F32, [4096, n, 1, 1]);
        let mut matrix = |m: usize| {
            let (a, d) = (repeated(data, ty, [4096, m, 1, 1]), data.output(F32, [m, n, 1, 1]));
            FusedProduct { a, d, bias: None }
        };
        let others: Vec<FusedProduct> = rows[1..].iter().map(|&m| matrix(m)).collect();
        let FusedProduct { a, d, .. } = matrix(rows[0]);
        (with_scratch(data, Call { others, ..Call::plain(Product { a, b, d }) }).into(), TOLERANCE)
    })
}

fn bench() -> Vec<Case> {
    let mut cases = Vec::new();
    // As models have them on a GPU.
    for ty in crate::formats::on_a_gpu(4096) {
        cases.extend([8, 16, 32, 128, 512, 2048].map(|n| timed(ty, [4096, 4096, n])));
    }
    // As they have them on a software GPU, and small enough for others' tools there.
    cases.extend(crate::formats::of_files().map(|ty| timed(ty, [2048, 2048, 64])));
    for ty in [F16, Q4_K, Q4_0x8, Q8_0x8, Q6_Kx8] {
        cases.extend([2, 4, 8, 16, 32, 64, 128, 512, 2048].map(|n| timed(ty, [4096, 14336, n])));
    }
    cases.extend([8, 16, 32, 128].map(|n| timed(BF16, [4096, 14336, n])));
    // Whether time jumps from N to the next, and what gate, up and down of a model take.
    cases.extend([3, 5, 9, 17, 24, 33, 48, 65, 96].map(|n| timed(Q4_K, [4096, 14336, n])));
    for ty in [Q4_K, Q6_Kx8] {
        cases.extend([8, 16, 17, 32, 33, 64, 65, 128].map(|n| timed(ty, [14336, 4096, n])));
    }
    for ty in [F16, Q4_K] {
        cases.extend([512, 2048].map(|n| timed_with(ty, [4096, 14336, n], true)));
    }
    for n in [512, 2048] {
        cases.extend([&[4096, 1024, 1024][..], &[14336, 14336]].map(|rows| timed_siblings(Q4_K, rows, n)));
    }
    let whole = weight_types().filter(|ty| ty.row_bytes(14336).is_some());
    cases.extend(whole.map(|ty| timed(ty, [14336, 4096, 512])));
    for tokens in [512, 2048] {
        cases.extend([F16, Q4_0x8, Q4_K, Q8_0x8, MXFP4x16].map(|ty| timed_experts(ty, tokens)));
    }
    cases.extend([8, 32, 64].map(|tokens| timed_experts(Q4_K, tokens)));
    for n in [512, 2048] {
        cases.extend([[4096, 64, n], [4096, 160, n], [64, 4096, n]].map(|sizes| timed(F32, sizes)));
        cases.push(timed_ranks([32, 4096, n]));
    }
    cases
}
