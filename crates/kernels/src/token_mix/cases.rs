//! Cases of `token_mix`.

use kiln_gguf::TensorType::F32;

use super::Call;
use crate::case::{Case, Level};
use crate::elementwise::tolerance;

/// How the blends lean: by groups of one tensor, by one more, by an extra for each token.
#[derive(Clone, Copy, Debug)]
struct Lean {
    groups: usize,
    another: bool,
    extra: bool,
}

fn case(width: usize, tokens: usize, lean: Lean, keep: bool) -> Case {
    Case::new(format!("token_mix {width} x {tokens} {lean:?} keep={keep}"), move |data| {
        let shape = [width, tokens, lean.groups + usize::from(lean.another), 1];
        let x = data.input(F32, [width, tokens, 1, 1]);
        let before = data.input(F32, [width, 1, 1, 1]);
        let lerp = data.input(F32, [width, 1, lean.groups, 1]);
        let another = lean.another.then(|| data.input(F32, [width, 1, 1, 1]));
        let extra = lean.extra.then(|| data.input(F32, shape));
        // What is added lies where the result goes, as models have it.
        let y = extra.unwrap_or_else(|| data.output(F32, shape));
        (Call { x, before, lerp, another, extra, y, keep }.into(), tolerance(F32))
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
            .flat_map(|tokens| [one, two, five].map(|l| case(4096, tokens, l, true)))
            .collect();
    }
    let mut cases = Vec::new();
    for (width, tokens) in [(4, 1), (64, 1), (132, 2), (256, 5), (1028, 3)] {
        cases.push(case(width, tokens, one, false));
        cases.push(case(width, tokens, two, true));
        cases.push(case(width, tokens, five, true));
    }
    if level == Level::Full {
        cases.push(case(4096, 1000, five, true));
        cases.push(case(2560, 4097, two, true));
    }
    cases
}
