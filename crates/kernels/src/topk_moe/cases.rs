//! Cases of `topk_moe`.

use kiln_gguf::TensorType::{F32, I32};

use super::{Call, Gate, Groups, Router, Shares};
use crate::case::{Case, Data, Level, Tolerance};
use crate::mul_mat::Norm;
use crate::tensor::Tensor;

/// Strict enough to fail on a single wrong expert; gates are right to some ulps of f32. The logits of a case lie far
/// enough apart for f32 and f64 to order them the same way, or are equal.
const CLOSE: Tolerance = Tolerance::Nmse(1e-10);

fn call(data: &mut Data, logits: Tensor, n_used: usize, gate: Gate) -> Call {
    let tokens = logits.shape[1];
    let ids = data.output(I32, [n_used, tokens, 1, 1]);
    let weights = data.output(F32, [n_used, tokens, 1, 1]);
    Call {
        logits,
        router: None,
        bias: None,
        ids,
        weights,
        groups: None,
        gate,
        shares: Shares::Gates,
        scale: 1.0,
        shift: 0.0,
    }
}

/// Distinct logits: a random order of evenly spaced numbers.
fn logits(data: &mut Data, experts: usize, tokens: usize) -> Tensor {
    let mut order: Vec<usize> = (0..experts).collect();
    data.input_with(F32, [experts, tokens, 1, 1], |random, i| {
        let at = i % experts;
        order.swap(at, at + random.below(experts - at));
        order[at] as f64 / experts as f64 * 8.0 - 4.0
    })
}

fn case(experts: usize, tokens: usize, n_used: usize, gate: Gate, shares: Shares) -> Case {
    Case::new(format!("topk_moe {n_used} of {experts} tokens={tokens} {gate:?} {shares:?}"), move |data| {
        let logits = logits(data, experts, tokens);
        (Call { shares, ..call(data, logits, n_used, gate) }.into(), CLOSE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let of_sum = Shares::OfSum { least: 6e-5, most: f32::INFINITY };
    if level == Level::Bench {
        return [1, 512].map(|tokens| case(128, tokens, 8, Gate::Softmax, of_sum)).into();
    }
    let mut cases = vec![
        case(1, 1, 1, Gate::Softmax, Shares::Gates),
        case(33, 2, 33, Gate::Softmax, Shares::Gates),
        case(33, 2, 33, Gate::SqrtSoftplus, Shares::Gates),
    ];
    for gate in [Gate::Softmax, Gate::Sigmoid, Gate::SqrtSoftplus, Gate::Identity] {
        cases.push(case(8, 3, 2, gate, Shares::Gates));
        cases.push(case(71, 3, 4, gate, of_sum));
    }
    cases.push(case(128, 2, 8, Gate::Identity, Shares::Softmax));
    cases.push(case(288, 2, 9, Gate::Sigmoid, of_sum));
    cases.push(case(640, 2, 5, Gate::Softmax, of_sum));
    cases.push(Case::new("topk_moe bias chooses, scale and shift weigh; strided", |data| {
        let logits = data.strided_input(F32, [40, 3, 1, 1], [48, 3, 1, 1]);
        let bias = Some(data.input(F32, [40, 1, 1, 1]));
        let ids = data.strided_output(I32, [6, 3, 1, 1], [40, 3, 1, 1]);
        let shares = Shares::OfSum { least: 20.0, most: 30.0 };
        let call = Call { ids, bias, shares, scale: 2.5, shift: 0.125, ..call(data, logits, 6, Gate::Sigmoid) };
        (call.into(), CLOSE)
    }));
    for (experts, count, used, n_used) in [(8, 4, 2, 3), (256, 8, 4, 8), (160, 8, 3, 6), (640, 32, 5, 10), (6, 3, 3, 4)]
    {
        let name = format!("topk_moe {n_used} of {experts} in the {used} best of {count} groups");
        cases.push(Case::new(name, move |data| {
            let logits = logits(data, experts, 5);
            let bias = Some(data.input_with(F32, [experts, 1, 1, 1], |random, _| random.uniform(-0.1, 0.1)));
            let groups = Some(Groups { count, used });
            (Call { groups, bias, shares: of_sum, ..call(data, logits, n_used, Gate::Sigmoid) }.into(), CLOSE)
        }));
    }
    cases.push(Case::new("topk_moe of equal groups the first", |data| {
        let logits = data.input_with(F32, [64, 3, 1, 1], |random, _| random.below(2) as f64);
        let groups = Some(Groups { count: 8, used: 2 });
        (Call { groups, ..call(data, logits, 9, Gate::Sigmoid) }.into(), CLOSE)
    }));
    cases.push(Case::new("topk_moe ties go to the lower number", |data| {
        let logits = data.input_with(F32, [100, 3, 1, 1], |random, _| random.below(3) as f64);
        (call(data, logits, 50, Gate::Sigmoid).into(), CLOSE)
    }));
    for (experts, k, normed) in [(128, 2048, true), (8, 64, false), (71, 300, true), (300, 4096, true)] {
        cases.push(Case::new(
            format!("topk_moe with the router, {experts} experts k={k} norm={normed}"),
            move |data| {
                let a = data.input(F32, [k, experts, 1, 1]);
                let b = data.input(F32, [k, 1, 1, 1]);
                let norm = normed.then(|| Norm { weight: Some(data.input(F32, [k, 1, 1, 1])), eps: 0.25 });
                let bias = normed.then(|| data.input(F32, [experts, 1, 1, 1]));
                let counter = data.input_with(I32, [1, 1, 1, 1], |_, _| 0.0);
                let logits = data.output(F32, [experts, 1, 1, 1]);
                let router = Some(Router { a, b, norm, scale: 0.5, bias, counter });
                (Call { router, shares: of_sum, ..call(data, logits, 4, Gate::Softmax) }.into(), Tolerance::Nmse(1e-9))
            },
        ));
    }
    cases.push(Case::new("topk_moe large logits of either sign", |data| {
        let logits =
            data.input_with(F32, [32, 2, 1, 1], |_, i| if i < 32 { -500.0 - i as f64 } else { 3.0 * i as f64 });
        (call(data, logits, 4, Gate::SqrtSoftplus).into(), CLOSE)
    }));
    if level == Level::Full {
        cases.push(case(256, 4096, 8, Gate::Sigmoid, of_sum));
        cases.push(case(2048, 70, 160, Gate::Softmax, of_sum));
    }
    cases
}
