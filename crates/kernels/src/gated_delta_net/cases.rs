//! Cases of `gated_delta_net`.

use kiln_gguf::TensorType::F32;

use super::{Call, Gate};
use crate::case::{Case, Data, Level};
use crate::recurrence::Form;
use crate::ssm_conv::cases::{sequences_of, tokens_of};
use crate::tensor::Tensor;
use crate::wkv6::cases::{CLOSE, ROUNDED};

/// What the decays are made of.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Decay {
    /// Logarithms from -20 to -1e-4.
    Log,
    Softplus,
    Bounded,
}

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    size: usize,
    key_heads: usize,
    heads: usize,
    grouped: bool,
    /// Whether every key has its own decay.
    vector: bool,
    decay: Decay,
    /// Length of each sequence.
    lengths: &'static [usize],
    /// Whether states lie in slots, that of the second sequence nowhere.
    slots: bool,
    form: Form,
}

/// Columns of length one, `[size, heads, tokens]`, with elements of others between the tokens.
fn unit(data: &mut Data, [size, heads, tokens]: [usize; 3]) -> Tensor {
    let t = data.strided_input(F32, [size * heads, tokens, 1, 1], [size * heads + 6, tokens, 1, 1]);
    let mut values = data.memory.read(&t);
    for row in values.chunks_exact_mut(size) {
        let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
        row.iter_mut().for_each(|x| *x /= length);
    }
    data.memory.write(&t, &values);
    t.heads(0, size, heads)
}

fn case(sizes: Sizes) -> Case {
    let Sizes { size, key_heads, heads, grouped, vector, decay, lengths, slots, form } = sizes;
    let name = format!(
        "gated_delta_net S={size} Hk={key_heads} H={heads} grouped={grouped} vector={vector} {decay:?} L={lengths:?} slots={slots}"
    );
    let name = if form == Form::Auto { name } else { format!("{name} {form:?}") };
    Case::new(name, move |data| {
        let tokens = tokens_of(lengths);
        let [q, k] = [0, 1].map(|_| unit(data, [size, key_heads, tokens]));
        let v = data.input_with(F32, [size, heads, tokens, 1], |random, _| random.uniform(-0.3, 5.0));
        let gates = if vector { size } else { 1 };
        let shape = [gates, heads, tokens, 1];
        let g = data.input_with(F32, shape, |random, _| match decay {
            Decay::Log => -random.uniform((1e-4f64).ln(), 20f64.ln()).exp(),
            _ => random.uniform(-4.0, 3.0),
        });
        let a = data.input_with(F32, [heads, 1, 1, 1], |random, _| {
            let rate = random.uniform(-3.0, 0.5).exp();
            if decay == Decay::Bounded { rate } else { -rate }
        });
        let bias = data.input(F32, [gates * heads, 1, 1, 1]);
        let gate = match decay {
            Decay::Log => Gate::Log,
            Decay::Softplus => Gate::Softplus { a, bias },
            Decay::Bounded => Gate::Bounded { a, bias, bound: -5.0 },
        };
        let beta = data.input_with(F32, [heads + 2, tokens, 1, 1], |random, _| random.uniform(-6.0, 6.0));
        let count = lengths.len() + if slots { 2 } else { 0 };
        let state = data.input(F32, [size, size, heads, count]);
        // Tokens of no sequence are left as they are: numbers that can be compared.
        let y = data.input(F32, [size, heads, tokens, 1]);
        let (sequences, slots) = sequences_of(data, lengths, slots);
        let (beta, scale) = (beta.narrow(0, 1, heads), (size as f32).sqrt().recip());
        // On matrix units the factors of a product are rounded to f16, and those of a chunk are products themselves. Long sequences run so
        // by themselves where there are such units.
        let longest = lengths.iter().max().copied().unwrap_or(0);
        let rounds = form == Form::Chunked || form == Form::Auto && longest >= 64;
        let tolerance = if rounds { ROUNDED } else { CLOSE };
        (Call { q, k, v, g, gate, beta, state, y, scale, grouped, sequences, slots, form }.into(), tolerance)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let of = |size, [key_heads, heads]: [usize; 2], vector, decay, lengths: &'static [usize]| Sizes {
        size,
        key_heads,
        heads,
        grouped: false,
        vector,
        decay,
        lengths,
        slots: false,
        form: Form::Auto,
    };
    let chunked = |sizes: Sizes| case(Sizes { form: Form::Chunked, ..sizes });
    if level == Level::Bench {
        let lengths: [&[usize]; 4] = [&[1], &[1; 32], &[512], &[2048]];
        let both = |lengths| {
            [of(128, [16, 32], false, Decay::Softplus, lengths), of(128, [32, 32], true, Decay::Softplus, lengths)]
        };
        let forms =
            [Form::Sequential, Form::Chunked].into_iter().flat_map(|form| both(&[2048]).map(|of| Sizes { form, ..of }));
        return lengths.into_iter().flat_map(both).chain(forms).map(case).collect();
    }
    let mut cases = Vec::new();
    for vector in [false, true] {
        cases.push(case(of(128, [1, 2], vector, Decay::Softplus, &[1])));
        cases.push(case(of(128, [1, 1], vector, Decay::Log, &[35])));
        cases.push(case(of(64, [2, 4], vector, Decay::Log, &[4; 2])));
        cases.push(case(of(32, [2, 6], vector, Decay::Softplus, &[65])));
        cases.push(case(Sizes { grouped: true, ..of(32, [2, 6], vector, Decay::Softplus, &[17, 0, 1, 40]) }));
        cases.push(case(of(16, [3, 3], vector, Decay::Bounded, &[20])));
        cases.push(case(Sizes { slots: true, ..of(64, [2, 2], vector, Decay::Bounded, &[1; 5]) }));
        cases.push(case(Sizes { slots: true, ..of(32, [1, 2], vector, Decay::Log, &[2, 40, 0, 1]) }));
        // Whole chunks, parts of one, several sequences.
        cases.push(chunked(of(64, [1, 2], vector, Decay::Log, &[70; 2])));
        cases.push(chunked(Sizes {
            slots: true,
            grouped: true,
            ..of(32, [2, 4], vector, Decay::Softplus, &[33, 0, 1, 96])
        }));
    }
    if level == Level::Full {
        for vector in [false, true] {
            cases.push(case(of(128, [16, 32], vector, Decay::Softplus, &[200])));
            cases.push(case(of(128, [32, 32], vector, Decay::Log, &[256, 1, 100])));
            cases.push(chunked(of(128, [16, 32], vector, Decay::Softplus, &[200])));
            cases.push(chunked(of(16, [2, 2], vector, Decay::Bounded, &[1])));
            cases.push(chunked(of(128, [32, 32], vector, Decay::Log, &[256, 1, 100])));
            cases.push(case(Sizes { slots: true, ..of(128, [16, 32], vector, Decay::Softplus, &[1; 40]) }));
        }
    }
    cases
}
