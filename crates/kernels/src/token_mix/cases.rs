//! Cases of `token_mix`.

use kiln_gguf::TensorType::{F32, I32};

use super::{Call, Norm};
use crate::case::{Case, Data, Level, Random};
use crate::elementwise::tolerance;
use crate::recurrence::Sequences;
use crate::row_norm;

/// How the blends lean: by groups of one tensor, by one more, by an extra for each token.
#[derive(Clone, Copy, Debug)]
struct Lean {
    groups: usize,
    another: bool,
    extra: bool,
}

fn call(data: &mut Data, [width, tokens]: [usize; 2], lean: Lean, keep: bool) -> Call {
    let shape = [width, tokens, lean.groups + usize::from(lean.another), 1];
    let x = data.input(F32, [width, tokens, 1, 1]);
    let before = data.input(F32, [width, 1, 1, 1]);
    let lerp = data.input(F32, [width, 1, lean.groups, 1]);
    let another = lean.another.then(|| data.input(F32, [width, 1, 1, 1]));
    let extra = lean.extra.then(|| data.input(F32, shape));
    // What is added lies where the result goes, as models have it.
    let y = extra.unwrap_or_else(|| data.output(F32, shape));
    let (sequences, slots) = (Sequences::Equal(1), None);
    Call { x, norm: None, before, lerp, another, extra, y, keep, sequences, slots }
}

fn case(width: usize, tokens: usize, lean: Lean, keep: bool) -> Case {
    Case::new(format!("token_mix {width} x {tokens} {lean:?} keep={keep}"), move |data| {
        (call(data, [width, tokens], lean, keep).into(), tolerance(F32))
    })
}

/// With a norm before it. Columns differ in mean and deviation: one in place of another shows.
fn normed(width: usize, tokens: usize, lean: Lean, keep: bool, written: bool) -> Case {
    let name = format!("token_mix norm {width} x {tokens} {lean:?} keep={keep} written={written}");
    Case::new(name, move |data| {
        let call = call(data, [width, tokens], lean, keep);
        let x =
            data.input_with(F32, call.x.shape, |r, i| (i / width) as f64 + r.uniform(-1.0, 1.0 + (i / width) as f64));
        let [weight, bias] = [(); 2].map(|()| data.input(F32, [width, 1, 1, 1]));
        let y = written.then(|| data.output(F32, x.shape));
        let norm = Some(Norm { weight, bias, eps: 0.1, y });
        (Call { x, norm, ..call }.into(), row_norm::tolerance(F32))
    })
}

/// Many sequences: in order or in slots, of which the second is padding; equal or ragged, with a token of no sequence.
fn many(lean: Lean, norm: bool, slots: bool, lengths: &'static [usize]) -> Case {
    Case::new(format!("token_mix of {lengths:?} {lean:?} norm={norm} slots={slots}"), move |data| {
        let (n, ragged) = (lengths.len(), lengths.iter().any(|l| *l != lengths[0]));
        let tokens = lengths.iter().sum::<usize>() + usize::from(ragged);
        let width = 132;
        let call = call(data, [width, tokens], lean, true);
        // Tokens of no sequence are left as they are: numbers that can be compared.
        let y = call.extra.unwrap_or_else(|| data.input(F32, call.y.shape));
        let starts = |_: &mut Random, b: usize| lengths[..b].iter().sum::<usize>() as f64;
        let sequences = if ragged {
            let starts = data.input_with(I32, [n + 1, 1, 1, 1], starts);
            Sequences::Ragged { starts, longest: lengths.iter().copied().max().unwrap_or(0) }
        } else {
            Sequences::Equal(n)
        };
        let before = data.input(F32, [width, n + if slots { 2 } else { 0 }, 1, 1]);
        let slot = |_: &mut Random, b: usize| if b == 1 { -1.0 } else { (n + 1 - b) as f64 };
        let slots = slots.then(|| data.input_with(I32, [n, 1, 1, 1], slot));
        let norm = norm.then(|| {
            let [weight, bias] = [(); 2].map(|()| data.input(F32, [width, 1, 1, 1]));
            Norm { weight, bias, eps: 0.1, y: Some(data.input(F32, [width, tokens, 1, 1])) }
        });
        (Call { y, norm, before, sequences, slots, ..call }.into(), row_norm::tolerance(F32))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let one = Lean { groups: 1, another: false, extra: false };
    let two = Lean { groups: 1, another: true, extra: false };
    let five = Lean { groups: 5, another: false, extra: true };
    if level == Level::Bench {
        return [1, 2048]
            .into_iter()
            .flat_map(|tokens| {
                let plain = [one, two, five].map(|l| case(4096, tokens, l, true));
                // The three ways in which models begin with a norm.
                let six = Lean { groups: 6, another: false, extra: false };
                plain.into_iter().chain(
                    [(one, false), (two, true), (six, true)].map(move |(l, keep)| normed(4096, tokens, l, keep, !keep)),
                )
            })
            .collect();
    }
    let mut cases = Vec::new();
    for (width, tokens) in [(4, 1), (64, 1), (132, 2), (256, 5), (1028, 3)] {
        cases.push(case(width, tokens, one, false));
        cases.push(case(width, tokens, two, true));
        cases.push(case(width, tokens, five, true));
    }
    // Channels in slices and whole, in registers and too many for them, one round of a workgroup and several.
    for (width, tokens) in [(4, 1), (132, 2), (1028, 5), (2060, 1), (2060, 3)] {
        cases.push(normed(width, tokens, one, false, true));
        cases.push(normed(width, tokens, two, true, false));
    }
    cases.push(normed(260, 3, five, true, true));
    for slots in [false, true] {
        for lengths in [&[1; 5][..], &[3; 4], &[2, 3, 0, 1, 4]] {
            cases.push(many(two, false, slots, lengths));
            cases.push(many(five, true, slots, lengths));
        }
    }
    if level == Level::Full {
        cases.push(normed(4096, 1, five, true, true));
        cases.push(normed(4096, 1000, two, true, false));
        cases.push(normed(16384, 3, one, false, true));
        cases.push(case(4096, 1000, five, true));
        cases.push(case(2560, 4097, two, true));
    }
    cases
}
