//! Cases of `ssm_scan`.

use kiln_gguf::TensorType::F32;

use super::Call;
use crate::case::{Case, Level};
use crate::recurrence::Form;
use crate::ssm_conv::cases::{sequences_of, tokens_of};
use crate::wkv6::cases::{CLOSE, ROUNDED};

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    states: usize,
    channels: usize,
    heads: usize,
    groups: usize,
    /// Whether every element of a state has its own decay, as in Mamba 1.
    per_state: bool,
    /// Length of each sequence.
    lengths: &'static [usize],
    /// Whether there are a bias and a skip.
    extras: bool,
    /// Whether states lie in slots, that of the second sequence nowhere.
    slots: bool,
    form: Form,
}

fn case(sizes: Sizes) -> Case {
    let Sizes { states, channels, heads, groups, per_state, lengths, extras, slots, form } = sizes;
    let kind = if per_state { "mamba1" } else { "mamba2" };
    let more = format!("extras={extras} slots={slots}");
    let more = if form == Form::Auto { more } else { format!("{more} {form:?}") };
    let name = format!("ssm_scan {kind} N={states} P={channels} H={heads} G={groups} L={lengths:?} {more}");
    Case::new(name, move |data| {
        let tokens = tokens_of(lengths);
        // x, b and c are parts of the same columns, as a convolution leaves them; dt lies at the end of others.
        let (inner, outer) = (channels * heads, states * groups);
        let all = data.input(F32, [inner + 2 * outer, tokens, 1, 1]);
        let x = all.heads(0, channels, heads);
        let [b, c] = [inner, inner + outer].map(|start| all.heads(start, states, groups));
        let dt = data.input_with(F32, [heads + 3, tokens, 1, 1], |random, i| {
            // Also beyond the bound of softplus.
            if i % 97 == 5 { random.uniform(19.0, 22.0) } else { random.uniform(-4.0, 2.0) }
        });
        let dt = dt.narrow(0, 3, heads);
        let a = data.input_with(F32, [if per_state { states } else { 1 }, heads, 1, 1], |random, _| {
            -random.uniform(-3.0, 0.5).exp()
        });
        let [dt_bias, skip] = [0, 1].map(|_| extras.then(|| data.input(F32, [heads, 1, 1, 1])));
        let count = lengths.len() + if slots { 2 } else { 0 };
        let state = data.input(F32, [states, channels, heads, count]);
        // Tokens of no sequence are left as they are: numbers that can be compared.
        let y = data.input(F32, [channels, heads, tokens, 1]);
        let (sequences, slots) = sequences_of(data, lengths, slots);
        // On matrix units the factors of a product are rounded to f16, and those of a chunk are products themselves.
        let tolerance = if form == Form::Chunked { ROUNDED } else { CLOSE };
        (Call { x, dt, dt_bias, a, b, c, skip, state, y, sequences, slots, form }.into(), tolerance)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let one = |states, heads, lengths: &'static [usize], extras, slots| {
        case(Sizes { states, channels: 1, heads, groups: 1, per_state: true, lengths, extras, slots, form: Form::Auto })
    };
    let of_form = |form| {
        move |[states, channels, heads, groups]: [usize; 4], lengths: &'static [usize], extras, slots| {
            case(Sizes { states, channels, heads, groups, per_state: false, lengths, extras, slots, form })
        }
    };
    let (two, chunked) = (of_form(Form::Auto), of_form(Form::Chunked));
    if level == Level::Bench {
        return vec![
            two([128, 64, 128, 8], &[1], true, false),
            two([128, 64, 128, 8], &[1; 32], true, false),
            two([128, 64, 128, 8], &[512], true, false),
            two([128, 64, 128, 8], &[2048], true, false),
            of_form(Form::Sequential)([128, 64, 128, 8], &[2048], true, false),
            chunked([128, 64, 128, 8], &[2048], true, false),
            two([256, 64, 48, 1], &[2048], true, false),
            one(16, 8192, &[1], true, false),
            one(16, 8192, &[2048], true, false),
        ];
    }
    let mut cases = vec![
        one(16, 100, &[1], true, false),
        one(16, 100, &[20], false, false),
        one(16, 30, &[3, 0, 1, 17], true, true),
        one(128, 6, &[5; 2], true, false),
        two([16, 4, 2, 1], &[1], true, false),
        two([128, 64, 4, 2], &[33], true, false),
        two([128, 80, 2, 1], &[3], false, false),
        two([256, 16, 4, 2], &[18; 2], true, false),
        two([64, 20, 6, 3], &[7, 1, 0, 35], true, false),
        two([32, 24, 3, 1], &[1; 5], true, true),
        two([32, 24, 3, 1], &[2, 40, 0, 1], true, true),
        two([64, 1, 5, 5], &[9], true, false),
        // Whole chunks, parts of one, several sequences; slices of heads, the last one not whole.
        chunked([64, 48, 2, 2], &[70; 2], true, false),
        chunked([32, 32, 4, 2], &[33, 0, 1, 96], true, true),
        chunked([256, 16, 2, 1], &[40], false, false),
    ];
    if level == Level::Full {
        cases.extend([
            two([128, 64, 80, 8], &[300; 2], true, false),
            chunked([128, 64, 80, 8], &[300; 2], true, false),
            chunked([16, 16, 4, 2], &[1], false, false),
            chunked([128, 80, 128, 1], &[512, 1, 77], true, true),
            two([128, 128, 4, 4], &[16; 2], true, false),
            two([128, 80, 128, 1], &[512], true, false),
            one(16, 1024, &[32; 4], true, false),
            one(16, 8192, &[700, 1, 30], true, true),
        ]);
    }
    cases
}
