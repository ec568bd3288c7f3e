//! The definition of `topk_moe`.

use super::{Call, Gate, Groups, Shares};
use crate::host::HostMemory;

/// Chooses the experts of every token and weighs them.
pub(crate) fn reference(call: &Call, memory: &mut HostMemory) {
    let n_experts = call.logits.shape[0];
    let logits = memory.read(&call.logits);
    let bias = call.bias.map_or(vec![0.0; n_experts], |b| memory.read(&b));
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.chunks_exact(n_experts) {
        let gates = gates(call.gate, row);
        let scores: Vec<f64> = gates.iter().zip(&bias).map(|(g, b)| g + b).collect();
        let scores = in_best_groups(call.groups, scores);
        let score = |&i: &usize| scores[i];
        let mut order: Vec<usize> = (0..n_experts).collect();
        order.sort_by(|a, b| score(b).total_cmp(&score(a)));
        let picked = &order[..call.ids.shape[0]];
        ids.extend(picked.iter().map(|&i| i as f64));
        let picked: Vec<f64> = picked.iter().map(|&i| gates[i]).collect();
        weights.extend(shares(call.shares, picked).map(|w| w * f64::from(call.scale) + f64::from(call.shift)));
    }
    memory.write(&call.ids, &ids);
    memory.write(&call.weights, &weights);
}

/// Minus infinity for the experts of groups that are not among the best.
fn in_best_groups(groups: Option<Groups>, mut scores: Vec<f64>) -> Vec<f64> {
    let Some(Groups { count, used }) = groups else { return scores };
    let size = scores.len() / count;
    let goodness = |group: &[f64]| {
        let mut group = group.to_vec();
        group.sort_by(|a, b| b.total_cmp(a));
        group[0] + group[1]
    };
    let good: Vec<f64> = scores.chunks_exact(size).map(goodness).collect();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|a, b| good[*b].total_cmp(&good[*a]));
    for &group in &order[used..] {
        scores[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
    }
    scores
}

fn gates(gate: Gate, logits: &[f64]) -> Vec<f64> {
    match gate {
        Gate::Softmax => softmax(logits),
        Gate::Sigmoid => logits.iter().map(|v| 1.0 / (1.0 + (-v).exp())).collect(),
        Gate::SqrtSoftplus => logits.iter().map(|v| (v.max(0.0) + (-v.abs()).exp().ln_1p()).sqrt()).collect(),
        Gate::Identity => logits.to_vec(),
    }
}

fn shares(shares: Shares, gates: Vec<f64>) -> impl Iterator<Item = f64> {
    let gates = match shares {
        Shares::Gates => gates,
        Shares::OfSum { least, most } => {
            let sum = gates.iter().sum::<f64>().clamp(f64::from(least), f64::from(most));
            gates.into_iter().map(|g| g / sum).collect()
        }
        Shares::Softmax => softmax(&gates),
    };
    gates.into_iter()
}

fn softmax(values: &[f64]) -> Vec<f64> {
    let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = values.iter().map(|v| (v - top).exp()).sum();
    values.iter().map(|v| (v - top).exp() / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_and_shares_by_hand() {
        assert_eq!(gates(Gate::Sigmoid, &[0.0]), [0.5]);
        assert!((gates(Gate::SqrtSoftplus, &[0.0])[0] - 2f64.ln().sqrt()).abs() < 1e-15);
        assert_eq!(gates(Gate::Softmax, &[1.0, 1.0]), [0.5, 0.5]);
        let of_sum = Shares::OfSum { least: 2.0, most: 3.0 };
        assert_eq!(shares(of_sum, vec![0.5, 0.25]).collect::<Vec<_>>(), [0.25, 0.125]);
        assert_eq!(shares(of_sum, vec![6.0, 3.0]).collect::<Vec<_>>(), [2.0, 1.0]);
        assert_eq!(shares(Shares::Softmax, vec![3.0, 3.0]).collect::<Vec<_>>(), [0.5, 0.5]);
    }
}
