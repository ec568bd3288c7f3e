//! Cases of `ssm_conv`.

use kiln_gguf::TensorType::{F32, I32};

use super::Call;
use crate::case::{Case, Data, Level, Random, Tolerance};
use crate::recurrence::Sequences;
use crate::tensor::Tensor;

/// A sum of a few products in f32.
const CLOSE: Tolerance = Tolerance::Nmse(1e-12);

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    channels: usize,
    taps: usize,
    /// Length of each sequence.
    lengths: &'static [usize],
    bias: bool,
    silu: bool,
    /// Whether states lie in slots, that of the second sequence nowhere.
    slots: bool,
}

/// Sequences of such lengths, which get starts where they differ, and slots in no order of which the second is padding.
pub(crate) fn sequences_of(data: &mut Data, lengths: &'static [usize], slots: bool) -> (Sequences, Option<Tensor>) {
    let n = lengths.len();
    let sequences = if lengths.iter().all(|l| *l == lengths[0]) {
        Sequences::Equal(n)
    } else {
        let starts = data.input_with(I32, [n + 1, 1, 1, 1], |_, b| lengths[..b].iter().sum::<usize>() as f64);
        Sequences::Ragged { starts, longest: lengths.iter().copied().max().unwrap_or(0) }
    };
    let slot = |_: &mut Random, b: usize| if b == 1 { -1.0 } else { (n + 1 - b) as f64 };
    (sequences, slots.then(|| data.input_with(I32, [n, 1, 1, 1], slot)))
}

/// Tokens of all sequences, and two of none where lengths differ.
pub(crate) fn tokens_of(lengths: &[usize]) -> usize {
    let ragged = lengths.iter().any(|l| *l != lengths[0]);
    lengths.iter().sum::<usize>() + if ragged { 2 } else { 0 }
}

fn case(sizes: Sizes) -> Case {
    let Sizes { channels, taps, lengths, bias, silu, slots } = sizes;
    let name = format!("ssm_conv {channels} channels W={taps} L={lengths:?} bias={bias} silu={silu} slots={slots}");
    Case::new(name, move |data| {
        let tokens = tokens_of(lengths);
        // A part of wider columns, as models have it.
        let x = data.strided_input(F32, [channels, tokens, 1, 1], [channels + 5, tokens, 1, 1]);
        let weight = data.input(F32, [taps, channels, 1, 1]);
        let bias = bias.then(|| data.input(F32, [channels, 1, 1, 1]));
        let states = lengths.len() + if slots { 2 } else { 0 };
        let state = data.input(F32, [channels, taps - 1, states, 1]);
        // Tokens of no sequence are left as they are: numbers that can be compared.
        let y = data.input(F32, [channels, tokens, 1, 1]);
        let (sequences, slots) = sequences_of(data, lengths, slots);
        (Call { x, weight, bias, state, y, silu, sequences, slots }.into(), CLOSE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let of = |channels, taps, lengths: &'static [usize], bias, silu| {
        case(Sizes { channels, taps, lengths, bias, silu, slots: false })
    };
    let slots = |channels, taps, lengths: &'static [usize]| {
        case(Sizes { channels, taps, lengths, bias: true, silu: true, slots: true })
    };
    if level == Level::Bench {
        return vec![
            of(10240, 4, &[1], true, true),
            of(10240, 4, &[1; 32], true, true),
            of(10240, 4, &[2048], true, true),
            of(8192, 4, &[2048], false, true),
            of(2048, 3, &[2048], false, false),
        ];
    }
    let mut cases = vec![
        of(5, 2, &[1], true, false),
        of(64, 4, &[1], true, true),
        of(64, 4, &[1; 5], false, true),
        of(33, 4, &[2], true, true),
        of(33, 4, &[3; 4], true, true),
        of(100, 3, &[9], false, false),
        of(100, 3, &[1, 2, 3, 0, 7], false, false),
        of(17, 9, &[30], true, true),
        of(17, 9, &[4, 8, 9, 10, 0, 1], true, false),
        slots(64, 4, &[1; 5]),
        slots(20, 4, &[2, 5, 0, 1, 17, 3]),
        slots(20, 16, &[15; 3]),
    ];
    if level == Level::Full {
        cases.extend([
            of(10240, 4, &[1000], true, true),
            slots(1536, 4, &[64, 1, 700, 3]),
            of(2048, 3, &[1; 100], false, false),
        ]);
    }
    cases
}
