//! What must hold between several calls of the recurrences on a real driver: carried states, forms that agree, sequences
//! that do not leak. Without any device these tests say so and pass.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may panic and print, in its helpers as well")]

use std::sync::Arc;

use kiln_gguf::TensorType::F32;
use kiln_gpu::{Adapter, Address, Cache, Caps, Device, Instance, MemoryKind, Recorder, Uploader};
use kiln_gpu::{adapters, choose};
use kiln_kernels::case::{Case, Data, Tolerance};
use kiln_kernels::host::HostMemory;
use kiln_kernels::record::record;
use kiln_kernels::recurrence::{Form, Sequences};
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_kernels::unary::Function;
use kiln_kernels::{Call, gla, head_mix, wkv6, wkv7};

const HEADS: usize = 2;

struct Machine {
    instance: Arc<Instance>,
    device: Arc<Device>,
}

impl Machine {
    fn find() -> Option<Machine> {
        let wanted = std::env::var("KILN_DEVICE").ok();
        let found = Instance::new(&Cache::user()).and_then(|instance| {
            let all = adapters(&instance)?;
            let adapter: Adapter = choose(&all, wanted.as_deref())?.clone();
            let device = kiln_kernels::open(&instance, &adapter, Cache::user())?;
            Ok(Machine { instance, device })
        });
        found
            .inspect_err(|e| {
                assert!(std::env::var_os("KILN_TESTS_NEED_DEVICE").is_none(), "no device: {e}");
                println!("no device, test passed over: {e}");
            })
            .ok()
    }

    fn caps(&self) -> Caps {
        self.device.adapter.caps.clone()
    }

    /// Runs the calls one after the other, each as `caps` would have it.
    fn run(&self, caps: &Caps, calls: &[Call], memory: &HostMemory) -> HostMemory {
        let (mut bytes, mut offsets) = (Vec::new(), Vec::new());
        for slot in &memory.slots {
            offsets.push(bytes.len());
            bytes.extend_from_slice(slot);
            bytes.resize(bytes.len().next_multiple_of(256), 0);
        }
        let buffer = self.device.allocate(MemoryKind::Device, bytes.len() as u64).unwrap();
        let mut uploader = Uploader::new(&self.device).unwrap();
        uploader.write(&buffer, 0, &bytes).unwrap();
        uploader.finish().unwrap();
        let at = |t: &Tensor| -> Address { buffer.address().offset((offsets[t.slot.0 as usize] + t.offset) as u64) };
        let mut recorder = Recorder::new(&self.device).unwrap();
        for call in calls {
            call.operation().check().unwrap();
            let choice = call.operation().pick(caps, None).unwrap();
            record(&mut recorder, &self.device, call.operation().name(), (call, &choice), &at).unwrap();
        }
        recorder.finish().unwrap().run().unwrap();
        self.device.read(&buffer, 0, &mut bytes).unwrap();
        let slots = offsets.iter().zip(&memory.slots).map(|(&o, slot)| bytes[o..o + slot.len()].to_vec()).collect();
        HostMemory { slots, ..HostMemory::default() }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let messages = self.instance.validation_messages();
        if !std::thread::panicking() {
            assert!(messages.is_empty(), "validation layer:\n{}", messages.join("\n"));
        }
    }
}

/// A call of each recurrence over sequences of equal length, with its data.
fn calls(head_size: usize, tokens: usize, sequences: usize, form: Form) -> Vec<(Call, HostMemory)> {
    type Make = fn(&mut Data, Shape) -> Call;
    #[derive(Clone, Copy)]
    struct Shape(usize, usize, usize, Form);
    impl Shape {
        fn tokens(self, data: &mut Data, low: f64, high: f64) -> Tensor {
            data.input_with(F32, [self.0, HEADS, self.1, 1], |random, _| random.uniform(low, high))
        }
        fn state(self, data: &mut Data) -> Tensor {
            data.input(F32, [self.0, self.0, HEADS, self.2])
        }
        fn scratch(self, data: &mut Data, bytes: fn(usize, usize, usize, usize) -> usize) -> Option<Tensor> {
            Some(data.output(F32, [bytes(self.0, HEADS, self.1, self.2) / 4, 1, 1, 1]))
        }
    }
    let wkv6: Make = |data, s| {
        let [k, v, r] = std::array::from_fn(|_| s.tokens(data, -1.0, 1.0));
        let tf = data.input(F32, [s.0, HEADS, 1, 1]);
        let td = s.tokens(data, 0.2, 1.0);
        let (state_in, y, state_out) = (s.state(data), s.tokens(data, 0.0, 1.0), s.state(data));
        let (scratch, sequences, form) = (s.scratch(data, wkv6::scratch_bytes), Sequences::Equal(s.2), s.3);
        wkv6::Call { k, v, r, tf, td, state_in, y, state_out, scratch, sequences, slots: None, form, mix: None }.into()
    };
    let gla: Make = |data, s| {
        let [k, v, r] = std::array::from_fn(|_| s.tokens(data, -1.0, 1.0));
        let td = s.tokens(data, 0.2, 1.0);
        let (state_in, y, state_out) = (s.state(data), s.tokens(data, 0.0, 1.0), s.state(data));
        let (scratch, sequences, form) = (s.scratch(data, gla::scratch_bytes), Sequences::Equal(s.2), s.3);
        gla::Call { k, v, r, td, state_in, y, state_out, scratch, sequences, slots: None, form, scale: 0.25 }.into()
    };
    let wkv7: Make = |data, s| {
        let [r, k, v] = std::array::from_fn(|_| s.tokens(data, -1.0, 1.0));
        let size = (s.0 as f64).sqrt().recip();
        let [a, b] = std::array::from_fn(|_| s.tokens(data, -size, size));
        let w = s.tokens(data, 0.2, 1.0);
        let (state_in, y, state_out) = (s.state(data), s.tokens(data, 0.0, 1.0), s.state(data));
        let (scratch, sequences, form) = (s.scratch(data, wkv7::scratch_bytes), Sequences::Equal(s.2), s.3);
        wkv7::Call { r, w, k, v, a, b, state_in, y, state_out, scratch, sequences, slots: None, form, mix: None }.into()
    };
    let shape = Shape(head_size, tokens, sequences, form);
    let made = [wkv6, gla, wkv7].map(|make| {
        let case = Case::new("between calls", move |data| (make(data, shape), Tolerance::Exact));
        let (call, _, memory) = case.build();
        (call, memory)
    });
    made.into()
}

/// The tokens `first .. first + len` of a call of one sequence; its states become these.
fn part(call: &Call, (first, len): (usize, usize), state_in: Tensor, state_out: Tensor) -> Call {
    let view = |t: Tensor| t.narrow(2, first, len);
    match *call {
        Call::Wkv6(c) => {
            let [k, v, r, td, y] = [c.k, c.v, c.r, c.td, c.y].map(view);
            wkv6::Call { k, v, r, td, y, state_in, state_out, ..c }.into()
        }
        Call::Gla(c) => {
            let [k, v, r, td, y] = [c.k, c.v, c.r, c.td, c.y].map(view);
            gla::Call { k, v, r, td, y, state_in, state_out, ..c }.into()
        }
        Call::Wkv7(c) => {
            let [r, w, k, v, a, y] = [c.r, c.w, c.k, c.v, c.a, c.y].map(view);
            wkv7::Call { r, w, k, v, a, b: view(c.b), y, state_in, state_out, ..c }.into()
        }
        _ => panic!("no recurrence"),
    }
}

/// The same call in another form.
fn with_form(call: &Call, form: Form) -> Call {
    match *call {
        Call::Wkv6(c) => wkv6::Call { form, ..c }.into(),
        Call::Gla(c) => gla::Call { form, ..c }.into(),
        Call::Wkv7(c) => wkv7::Call { form, ..c }.into(),
        _ => panic!("no recurrence"),
    }
}

/// Results and final states.
fn results(call: &Call, memory: &HostMemory) -> Vec<f64> {
    call.operation().writes().iter().flat_map(|t| memory.read(t)).collect()
}

fn states(call: &Call) -> (Tensor, Tensor) {
    match call {
        Call::Wkv6(c) => (c.state_in, c.state_out),
        Call::Gla(c) => (c.state_in, c.state_out),
        Call::Wkv7(c) => (c.state_in, c.state_out),
        _ => panic!("no recurrence"),
    }
}

fn assert_close(got: &[f64], want: &[f64], what: &str) {
    let squared: f64 = got.iter().zip(want).map(|(g, w)| (g - w).powi(2)).sum();
    let error = squared / want.iter().map(|w| w * w).sum::<f64>();
    assert!(error < 1e-10, "{what}: error {error:.2e}");
}

#[test]
fn one_call_equals_two_with_the_state_carried() {
    let Some(machine) = Machine::find() else { return };
    let caps = machine.caps();
    // In chunks the bits are the same where the first call ends with a whole chunk.
    for (form, tokens, cut, exact) in
        [(Form::Sequential, 40, 20, true), (Form::Chunked, 128, 64, true), (Form::Chunked, 90, 37, false)]
    {
        for (call, memory) in calls(64, tokens, 1, form) {
            let name = call.operation().name();
            let whole = results(&call, &machine.run(&caps, std::slice::from_ref(&call), &memory));
            let (state_in, state_out) = states(&call);
            // The second call updates the state in place.
            let halves =
                [part(&call, (0, cut), state_in, state_out), part(&call, (cut, tokens - cut), state_out, state_out)];
            let apart = results(&call, &machine.run(&caps, &halves, &memory));
            assert_close(&apart, &whole, name);
            assert!(!exact || apart == whole, "{name} {form:?}: other bits");
        }
    }
}

#[test]
fn forms_agree_with_and_without_subgroups() {
    let Some(machine) = Machine::find() else { return };
    let caps = machine.caps();
    let mut bare = caps.clone();
    bare.subgroups.shuffle = false;
    for head_size in [32, 64, 128] {
        for (call, memory) in calls(head_size, 75, 1, Form::Sequential) {
            let what = format!("{} of {head_size}", call.operation().name());
            let chunked = with_form(&call, Form::Chunked);
            let want = results(&call, &machine.run(&caps, std::slice::from_ref(&call), &memory));
            let bare_sequential = results(&call, &machine.run(&bare, std::slice::from_ref(&call), &memory));
            assert!(want == bare_sequential, "{what}: other bits without subgroups");
            assert_close(&results(&call, &machine.run(&caps, std::slice::from_ref(&chunked), &memory)), &want, &what);
            assert_close(&results(&call, &machine.run(&bare, &[chunked], &memory)), &want, &what);
        }
    }
}

#[test]
fn a_sequence_of_nan_leaves_the_others_alone() {
    let Some(machine) = Machine::find() else { return };
    let caps = machine.caps();
    for form in [Form::Sequential, Form::Chunked] {
        for (call, memory) in calls(32, 3 * 37, 3, form) {
            let clean = machine.run(&caps, std::slice::from_ref(&call), &memory);
            let mut spoilt = memory.clone();
            let (state_in, state_out) = states(&call);
            for t in call.operation().reads() {
                let middle = match t.shape {
                    [_, _, 111, 1] => t.narrow(2, 37, 37),
                    _ if t == state_in => t.narrow(3, 1, 1),
                    _ => continue,
                };
                spoilt.write(&middle, &vec![f64::NAN; middle.len()]);
            }
            let spoilt = machine.run(&caps, std::slice::from_ref(&call), &spoilt);
            let y = call.operation().writes()[0];
            for b in [0, 2] {
                for t in [y.narrow(2, 37 * b, 37), state_out.narrow(3, b, 1)] {
                    assert!(clean.read(&t) == spoilt.read(&t), "{} {form:?} {t}", call.operation().name());
                }
            }
            assert!(spoilt.read(&y.narrow(2, 37, 37)).iter().all(|x| x.is_nan()));
        }
    }
}

/// A token at a time, heads are mixed inside the recurrence; over many tokens, after it.
#[test]
fn heads_are_mixed_to_the_same_bits_inside_the_recurrence_and_after_it() {
    let Some(machine) = Machine::find() else { return };
    let caps = machine.caps();
    for head_size in [32, 64] {
        for (call, mut memory) in calls(head_size, 7, 1, Form::Sequential) {
            let mut slot = |t: Tensor, value: fn(usize) -> f64| {
                let slot = Slot(memory.slots.len() as u32);
                memory.slots.push(vec![0; t.span().1]);
                let t = Tensor { slot, ..t };
                memory.write(&t, &(0..t.len()).map(value).collect::<Vec<f64>>());
                t
            };
            let channels = Tensor::dense(Slot(0), F32, [head_size * HEADS, 1, 1, 1]);
            let weight = slot(channels, |i| 1.0 + (i as f64 * 0.7).sin());
            let bias = slot(channels, |i| (i as f64 * 1.3).cos());
            let bonus = slot(channels, |i| (i as f64 * 0.9).sin());
            let gate = slot(call.operation().writes()[0], |i| (i as f64 * 0.3).cos());
            let heads = head_mix::Mix { weight, bias, eps: 1e-3, gate: Some((gate, Some(Function::Silu))) };
            let (mixed, after) = match call {
                Call::Wkv6(c) => (wkv6::Call { mix: Some(heads), ..c }.into(), heads.of(c.y, None)),
                Call::Wkv7(c) => {
                    let token = head_mix::Bonus { r: c.r, k: c.k, v: c.v, weight: bonus };
                    let mix = Some(wkv7::Mix { heads, bonus });
                    (Call::from(wkv7::Call { mix, ..c }), heads.of(c.y, Some(token)))
                }
                _ => continue,
            };
            let name = mixed.operation().name();
            assert_eq!(mixed.operation().pick(&caps, None).unwrap().launches.len(), 1, "{name} of {head_size}");
            let apart = results(&call, &machine.run(&caps, &[call.clone(), after.into()], &memory));
            let within = results(&call, &machine.run(&caps, &[mixed], &memory));
            assert!(apart == within, "{name} of {head_size}: other bits");
        }
    }
}
