//! Judges the fast code of the CPU against the reference: every small case of every operation, so that none can drift.

use kiln_kernels::case::{Case, Level, Tolerance};
use kiln_kernels::{Call, KERNELS};
use rayon::prelude::*;

/// f32 arithmetic stays far below; results of 16 bits or in blocks may be rounded the other way where a sum lies between
/// two of them.
const MOST_ERROR: f64 = 1e-6;

/// What is wrong with a case, if anything.
fn judge(case: &Case) -> Option<String> {
    let (call, tolerance, memory) = case.build();
    let operation = call.operation();
    let (mut got, mut want) = (memory.clone(), memory);
    operation.cpu(&mut got);
    operation.reference(&mut want);
    for t in operation.writes() {
        // Some numbers say something only together, such as the words of a sum.
        let judged = |values: Vec<f64>| operation.judged(&t, &values).map_or(values, |rows| rows.concat());
        let (got, want) = (judged(got.read(&t)), judged(want.read(&t)));
        let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan());
        // Where exact bits are asked for, and in all places that are no numbers.
        let exact = !matches!(tolerance, Tolerance::Nmse(_) | Tolerance::NmsePerRow(_));
        let differ = |i: &usize| (exact || !want[*i].is_finite() || !got[*i].is_finite()) && !same(got[*i], want[*i]);
        if let Some(i) = (0..got.len()).find(differ) {
            return Some(format!("{}: got {}, want {} at {i}", case.name, got[i], want[i]));
        }
        let finite = || got.iter().zip(&want).filter(|(_, b)| b.is_finite());
        let error: f64 = finite().map(|(a, b)| (a - b).powi(2)).sum();
        let norm: f64 = finite().map(|(_, b)| b * b).sum();
        if error > MOST_ERROR * norm {
            return Some(format!("{}: error {:.2e}", case.name, error / norm));
        }
    }
    // Nothing else may be touched, scratch memory aside.
    let owned = |slot: usize| operation.writes().iter().chain(&operation.scratch()).any(|t| t.slot.0 as usize == slot);
    (0..got.slots.len())
        .find(|slot| !owned(*slot) && got.slots[*slot] != want.slots[*slot])
        .map(|slot| format!("{}: slot {slot} was written", case.name))
}

#[test]
fn the_cpu_agrees_with_the_reference() {
    for kernel in KERNELS {
        let cases = (kernel.cases)(Level::Small);
        let wrong: Vec<String> = cases.par_iter().filter_map(judge).collect();
        assert!(wrong.is_empty(), "{} of {} cases of {}:\n{}", wrong.len(), cases.len(), kernel.name, wrong.join("\n"));
    }
}

/// A model whose numbers have gone wrong should say so: no operation on the way may make zeros of NaN.
#[test]
fn attention_passes_nan_on() {
    let kernel = KERNELS.iter().find(|k| k.name == "flash_attention").unwrap();
    let mut tried = 0;
    for case in (kernel.cases)(Level::Small) {
        let (call, _, mut memory) = case.build();
        let Call::FlashAttention(attention) = &call else { panic!("{} is another operation", case.name) };
        memory.write(&attention.q, &vec![f64::NAN; attention.q.len()]);
        let (mut got, mut want) = (memory.clone(), memory);
        call.operation().cpu(&mut got);
        call.operation().reference(&mut want);
        let (got, want) = (got.read(&attention.out), want.read(&attention.out));
        // Queries that see no key get zeros, whatever they are.
        let same = got.iter().zip(&want).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()));
        assert!(same, "{}", case.name);
        tried += usize::from(want.iter().any(|v| v.is_nan()));
    }
    assert!(tried > 10, "{tried} cases see keys");
}
