//! Cases of `wkv6`, and what the cases of all recurrences are made of.

use kiln_gguf::TensorType::{F32, I32};

use super::{Call, scratch_bytes};
use crate::case::{Case, Data, Level, Random, Tolerance};
use crate::head_mix::{self, Mix};
use crate::recurrence::{Form, Sequences};
use crate::tensor::Tensor;
use crate::unary::Function;

/// Sums of f32 products along a sequence, whose terms decay.
pub(crate) const CLOSE: Tolerance = Tolerance::Nmse(1e-7);

/// On matrix units a result is a sum of products of four numbers that were rounded to f16, each with a squared error of
/// 4e-8 of its own.
pub(crate) const ROUNDED: Tolerance = Tolerance::Nmse(1e-6);

/// How the decays of a case are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Decay {
    /// Uniform in [-1, 1): zero and negative ones as well.
    Any,
    /// Uniform in (0, 1).
    Unit,
    /// As trained models have them: mostly close to one.
    Slow,
    /// The ends of (0, 1): the next to nothing and the next to one.
    Extreme,
}

impl Decay {
    pub(crate) fn draw(self, random: &mut Random) -> f64 {
        match self {
            Decay::Any => random.uniform(-1.0, 1.0),
            Decay::Unit => random.uniform(1e-6, 1.0),
            Decay::Slow => (-(random.uniform(-6.0, 0.0).exp())).exp(),
            Decay::Extreme => [1e-30, 1.0 - 1e-7, 1e-3, 0.999][random.below(4)],
        }
    }
}

/// The sizes of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) head_size: usize,
    pub(crate) heads: usize,
    /// Length of each sequence.
    pub(crate) lengths: &'static [usize],
    pub(crate) form: Form,
    pub(crate) decay: Decay,
    /// Whether states lie in slots, those of a sequence of padding nowhere.
    pub(crate) slots: bool,
}

impl Sizes {
    pub(crate) fn name(&self, operation: &str) -> String {
        let Sizes { head_size, heads, lengths, form, decay, slots } = self;
        let slots = if *slots { ", in slots" } else { "" };
        format!("{operation} S={head_size} H={heads} L={lengths:?} {form:?} decay {decay:?}{slots}")
    }

    pub(crate) fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// What is asked of `wkv6` and `gla`.
    pub(crate) fn tolerance(&self) -> Tolerance {
        if self.form == Form::Sequential { CLOSE } else { ROUNDED }
    }

    /// `[S, heads, tokens]`.
    pub(crate) fn shape(&self) -> [usize; 4] {
        [self.head_size, self.heads, self.tokens(), 1]
    }

    /// Sequences of one length need no starts; others get a tensor.
    pub(crate) fn sequences(&self, data: &mut Data) -> Sequences {
        let n = self.lengths.len();
        if self.lengths.iter().all(|l| *l == self.lengths[0]) {
            return Sequences::Equal(n);
        }
        let lengths = self.lengths;
        let starts = data.input_with(I32, [n + 1, 1, 1, 1], |_, b| lengths[..b].iter().sum::<usize>() as f64);
        Sequences::Ragged { starts, longest: lengths.iter().copied().max().unwrap_or(0) }
    }

    /// States before the tokens, y, states after the tokens, slots.
    pub(crate) fn operands(&self, data: &mut Data) -> (Tensor, Tensor, Tensor, Option<Tensor>) {
        let (s, n) = (self.head_size, self.lengths.len());
        if !self.slots {
            let state_in = data.input(F32, [s, s, self.heads, n]);
            let (y, state_out) = self.results(data);
            return (state_in, y, state_out, None);
        }
        let state = data.input(F32, [s, s, self.heads, n + 3]);
        // In no order, and the second sequence is padding.
        let slots = data.input_with(I32, [n, 1, 1, 1], |_, b| if b == 1 { -1.0 } else { (n + 1 - b) as f64 });
        (state, data.output(F32, self.shape()), state, Some(slots))
    }

    /// y and the final states in one slot, as models take them apart.
    fn results(&self, data: &mut Data) -> (Tensor, Tensor) {
        let s = self.head_size;
        let y = Tensor::dense(data.slot(Vec::new()), F32, self.shape());
        let state = Tensor::dense(y.slot, F32, [s, s, self.heads, self.lengths.len()]).at(y.span().1);
        data.memory.slots[y.slot.0 as usize] = vec![crate::case::POISON; state.offset + state.span().1];
        (y, state)
    }

    pub(crate) fn scratch(&self, data: &mut Data, bytes: fn(usize, usize, usize, usize) -> usize) -> Option<Tensor> {
        let bytes = bytes(self.head_size, self.heads, self.tokens(), self.lengths.len());
        (self.form != Form::Sequential).then(|| data.output(F32, [bytes / 4, 1, 1, 1]))
    }
}

/// The cases of every recurrence; `case` makes one of them.
pub(crate) fn of_all(level: Level, case: fn(Sizes) -> Case) -> Vec<Case> {
    use Form::{Auto, Chunked, Sequential};
    let of = |head_size, heads, lengths: &'static [usize], form, decay| {
        case(Sizes { head_size, heads, lengths, form, decay, slots: false })
    };
    if level == Level::Bench {
        return vec![
            of(64, 32, &[4096], Sequential, Decay::Slow),
            of(64, 32, &[4096], Chunked, Decay::Slow),
            of(64, 64, &[2048], Sequential, Decay::Slow),
            of(64, 64, &[2048], Chunked, Decay::Slow),
            of(64, 32, &[512], Sequential, Decay::Slow),
            of(64, 32, &[512], Chunked, Decay::Slow),
            of(64, 32, &[64], Sequential, Decay::Slow),
            of(64, 32, &[64], Chunked, Decay::Slow),
            of(128, 16, &[4096], Sequential, Decay::Slow),
            of(128, 16, &[4096], Chunked, Decay::Slow),
            of(64, 32, &[1], Auto, Decay::Slow),
            of(64, 32, &[1; 32], Auto, Decay::Slow),
        ];
    }
    let mut cases = Vec::new();
    for form in [Sequential, Chunked] {
        cases.push(of(64, 2, &[1], form, Decay::Any));
        cases.push(of(64, 2, &[32], form, Decay::Any));
        cases.push(of(64, 1, &[32; 4], form, Decay::Unit));
        cases.push(of(64, 1, &[128; 2], form, Decay::Unit));
        cases.push(of(32, 3, &[17, 0, 1, 40], form, Decay::Any));
        cases.push(of(32, 1, &[2, 65, 64, 130], form, Decay::Unit));
        cases.push(of(128, 3, &[1, 2, 3], form, Decay::Any));
        cases.push(of(128, 1, &[33, 35], form, Decay::Slow));
        cases.push(of(64, 3, &[3; 3], form, Decay::Slow));
        cases.push(of(32, 1, &[150], form, Decay::Extreme));
        cases.push(of(64, 1, &[70], form, Decay::Extreme));
        let slots = |head_size, heads, lengths: &'static [usize]| {
            case(Sizes { head_size, heads, lengths, form, decay: Decay::Unit, slots: true })
        };
        cases.extend([slots(64, 2, &[1; 5]), slots(32, 3, &[17, 40, 0, 1, 90]), slots(32, 1, &[3, 0, 2])]);
        // Longer than the chunks that a chunk looks back over.
        cases.push(of(32, 1, &[700], form, Decay::Slow));
    }
    cases.push(of(32, 1, &[260, 3], Auto, Decay::Unit));
    if level == Level::Full {
        for form in [Sequential, Chunked] {
            for lengths in [&[1][..], &[32], &[32; 4], &[128; 4], &[1; 4]] {
                for decay in [Decay::Any, Decay::Unit] {
                    cases.push(of(64, 32, lengths, form, decay));
                }
            }
            for head_size in [32, 64, 128] {
                cases.push(of(head_size, 3, &[1000], form, Decay::Slow));
                cases.push(of(head_size, 32, &[1000, 1, 77], form, Decay::Extreme));
            }
            cases.push(of(64, 1, &[5000], form, Decay::Slow));
            cases.push(of(64, 5, &[1; 100], form, Decay::Unit));
        }
    }
    cases
}

/// The cases of a recurrence whose heads are mixed; `case` makes one of them, with the gate of RWKV-6, or one without a
/// function, or none.
pub(crate) fn mixed(level: Level, case: fn(Sizes, Option<Option<Function>>) -> Case) -> Vec<Case> {
    use Form::{Auto, Chunked, Sequential};
    let silu = Some(Some(Function::Silu));
    let of = |head_size, heads, lengths: &'static [usize], form, gate| {
        case(Sizes { head_size, heads, lengths, form, decay: Decay::Unit, slots: false }, gate)
    };
    let in_slots = |head_size, lengths: &'static [usize]| {
        let sizes = Sizes { head_size, heads: 2, lengths, form: Sequential, decay: Decay::Unit, slots: true };
        case(sizes, silu)
    };
    if level == Level::Bench {
        return vec![of(64, 32, &[1], Auto, silu), of(64, 64, &[1], Auto, silu), of(64, 32, &[1; 32], Auto, silu)];
    }
    let mut cases = vec![
        // Inside the kernel: one token, several, several sequences.
        of(64, 3, &[1], Sequential, silu),
        of(64, 3, &[1], Sequential, None),
        of(64, 2, &[7; 3], Sequential, Some(None)),
        of(32, 5, &[8; 2], Sequential, silu),
        // After it: heads too wide for a workgroup, sequences too long, chunks.
        of(128, 2, &[3; 2], Sequential, silu),
        of(64, 2, &[20; 2], Sequential, silu),
        of(32, 2, &[40; 2], Chunked, silu),
        in_slots(64, &[1; 5]),
        in_slots(32, &[20; 3]),
    ];
    if level == Level::Full {
        cases.extend([of(64, 64, &[1; 32], Auto, silu), of(64, 32, &[1000], Auto, silu)]);
    }
    cases
}

fn case(sizes: Sizes) -> Case {
    made(sizes.name("wkv6"), sizes, |_| None)
}

fn mixed_case(sizes: Sizes, gate: Option<Option<Function>>) -> Case {
    made(sizes.name(&format!("wkv6 mixed, gate {gate:?}")), sizes, move |data| {
        Some(head_mix::cases::within(data, sizes.shape(), gate))
    })
}

fn made(name: String, sizes: Sizes, mix: impl Fn(&mut Data) -> Option<Mix> + Send + Sync + 'static) -> Case {
    Case::new(name, move |data| {
        let [k, v, r] = std::array::from_fn(|_| data.input(F32, sizes.shape()));
        let tf = data.input(F32, [sizes.head_size, sizes.heads, 1, 1]);
        let td = data.input_with(F32, sizes.shape(), |random, _| sizes.decay.draw(random));
        let (state_in, y, state_out, slots) = sizes.operands(data);
        let scratch = sizes.scratch(data, scratch_bytes);
        let sequences = sizes.sequences(data);
        let (form, mix) = (sizes.form, mix(data));
        let call = Call { k, v, r, tf, td, state_in, y, state_out, scratch, sequences, slots, form, mix };
        (call.into(), sizes.tolerance())
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    let mut cases = of_all(level, case);
    cases.extend(mixed(level, mixed_case));
    if level != Level::Bench {
        // The state lies in a cache with room for more, and is updated in place; there are tokens of no sequence.
        for form in [Form::Sequential, Form::Chunked] {
            cases.push(Case::new(format!("wkv6 states in place, spare tokens, {form:?}"), move |data| {
                let sizes =
                    Sizes { head_size: 32, heads: 2, lengths: &[20, 90], form, decay: Decay::Unit, slots: false };
                let sequences = sizes.sequences(data);
                let shape = [32, 2, 115, 1];
                let [k, v, r] = std::array::from_fn(|_| data.input(F32, shape));
                let y = data.input(F32, shape);
                let tf = data.input(F32, [32, 2, 1, 1]);
                let td = data.input_with(F32, shape, |random, _| sizes.decay.draw(random));
                let state = data.strided_input(F32, [32, 32, 2, 2], [32, 32, 3, 4]);
                let scratch =
                    (form == Form::Chunked).then(|| data.output(F32, [scratch_bytes(32, 2, 115, 2) / 4, 1, 1, 1]));
                let (state_in, state_out) = (state, state);
                let call =
                    Call { k, v, r, tf, td, state_in, y, state_out, scratch, sequences, slots: None, form, mix: None };
                (call.into(), sizes.tolerance())
            }));
        }
        // Numbers beyond the range of f16, which matrix units take.
        cases.push(Case::new("wkv6 far from one", |data| {
            let sizes = Sizes {
                head_size: 64,
                heads: 1,
                lengths: &[100],
                form: Form::Chunked,
                decay: Decay::Unit,
                slots: false,
            };
            let mut scaled = |shape, most: f64| data.input_with(F32, shape, |random, _| random.uniform(-most, most));
            let [k, v] = [scaled(sizes.shape(), 1e6), scaled(sizes.shape(), 1e-9)];
            let r = scaled(sizes.shape(), 1e-7);
            let tf = scaled([64, 1, 1, 1], 10.0);
            let state_in = scaled([64, 64, 1, 1], 1e-3);
            let td = data.input_with(F32, sizes.shape(), |random, _| sizes.decay.draw(random));
            let (y, state_out) = sizes.results(data);
            let scratch = sizes.scratch(data, scratch_bytes);
            let sequences = sizes.sequences(data);
            let call = Call {
                k,
                v,
                r,
                tf,
                td,
                state_in,
                y,
                state_out,
                scratch,
                sequences,
                slots: None,
                form: sizes.form,
                mix: None,
            };
            (call.into(), sizes.tolerance())
        }));
    }
    cases
}
