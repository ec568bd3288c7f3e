//! What every executor owes the engine, one suite for all of them: whatever runs the plans, texts are read whole and in pieces, go
//! back, start over, are saved here and go on there, are moved to host memory, fork, and go on by themselves. The judge is the CPU
//! executor that computes every operation by its definition.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::Arc;

use kiln_engine::arch::{BatchShape, Pictures, Room, graph};
use kiln_engine::executor::{
    Arithmetic, CpuExecutor, DequantCache, Executor, GpuExecutor, Options, Order, PackB, Packing, Rounds,
};
use kiln_engine::lower::lower;
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, SequenceId, Wanted};
use kiln_engine::synth::{Preset, Synth};
use kiln_engine::{Error, compare, sampler};
use kiln_gguf::Gguf;
use kiln_gpu::Instance;
use kiln_kernels::Call;
use kiln_kernels::mul_mat::MAX_GEMV_N;
use kiln_kernels::sample::Row;

use device::{device, gpu_with};

type Opened = (Box<dyn Executor>, Option<Arc<Instance>>);
type Open = fn() -> Option<Opened>;

fn cpu(arithmetic: Arithmetic, reproducible: bool) -> Option<Opened> {
    Some((Box::new(CpuExecutor::new(arithmetic).reproducible(reproducible)), None))
}

fn gpu(options: Options) -> Option<Opened> {
    gpu_with(options).map(|(executor, instance)| (executor, Some(instance)))
}

/// Every kind of executor, each in every form in which it keeps weights and orders steps. The plain form of a kind runs every model.
const EXECUTORS: &[(&str, bool, Open)] = &[
    ("CPU", true, || cpu(Arithmetic::Fast, false)),
    ("CPU, threads of its own", false, || {
        Some((Box::new(CpuExecutor::new(Arithmetic::Fast).threads(3).unwrap()), None))
    }),
    ("CPU, reproducible", false, || cpu(Arithmetic::Fast, true)),
    ("CPU, by definition", false, || cpu(Arithmetic::Reference, false)),
    ("GPU", true, || gpu(Options::default())),
    ("GPU, packed weights", false, || gpu(Options { packing: Packing::All, ..Options::default() })),
    ("GPU, decoded weights", false, || gpu(Options { f16_cache: DequantCache::All, ..Options::default() })),
    ("GPU, steps hand over", false, || gpu(Options { order: Order::DependentLaunch, ..Options::default() })),
    ("GPU, columns rounded by who makes them", false, || gpu(Options { rounds: Rounds::Always, ..Options::default() })),
    ("GPU, rounded columns handed over", false, || {
        gpu(Options { rounds: Rounds::Always, order: Order::DependentLaunch, ..Options::default() })
    }),
    ("GPU, reproducible", false, || gpu(Options { reproducible: true, ..Options::default() })),
];

/// Caches, caches with a window, states.
const MODELS: [&str; 3] = ["tiny-llama-256", "tiny-gemma2", "tiny-rwkv6"];

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("Q8_0").unwrap(), 5);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>) -> Engine {
    let room = Room::for_sequences(3, 256).with_windows(model.facts.window, 128);
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

fn text(n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 37 + 11 + salt * 101) % 256) as u32).collect()
}

fn feed(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

fn judged(model: &Arc<Model>, tokens: &[u32]) -> Vec<f32> {
    let mut engine = engine(model, Box::new(CpuExecutor::new(Arithmetic::Reference)));
    let sequence = engine.open(0).unwrap();
    feed(&mut engine, sequence, tokens)
}

/// Columns and cached keys are rounded to 8 and 16 bits on some paths.
#[track_caller]
fn assert_close(got: &[f32], want: &[f32], what: &str) {
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let error = sum(&mut got.iter().zip(want).map(|(g, w)| g - w)) / sum(&mut want.iter().copied());
    assert!(got.len() == want.len() && error < 1e-3, "{what}: {error:.1e}");
}

/// Texts, and what the judge says behind them.
struct Judged {
    text: Vec<u32>,
    want: Vec<f32>,
    /// Another end, behind so many tokens of the text.
    back: (usize, Vec<u32>, Vec<f32>),
    /// The same for an end of one token.
    forked: (u32, Vec<f32>),
}

impl Judged {
    fn new(model: &Arc<Model>) -> Judged {
        let (text, end, other) = (self::text(150, 1), self::text(9, 2), 77);
        let behind = |tokens: &[u32], end: &[u32]| judged(model, &[tokens, end].concat());
        Judged {
            want: judged(model, &text),
            back: (141, end.clone(), behind(&text[..141], &end)),
            forked: (other, behind(&text[..149], &[other])),
            text,
        }
    }
}

/// One executor through everything.
fn conforms(name: &str, preset: &str, model: &Arc<Model>, judged: &Judged, open: Open) {
    let at = |what: &str| format!("{name}, {preset}: {what}");
    let Some((executor, instance)) = open() else { return };
    let mut engine = engine(model, executor);
    let Judged { text: a, want, back: (length, end, behind), forked: (other_token, forked) } = judged;
    let id = engine.open(0).unwrap();
    assert_close(&feed(&mut engine, id, a), want, &at("read at once"));

    // What is asked wrongly changes nothing.
    let wrong = engine.feed(&[Entry { sequence: id, tokens: &[1 << 20], wanted: Wanted::Last }]).unwrap_err();
    assert!(matches!(wrong, Error::TokenOutOfRange { .. }), "{wrong}");
    assert_eq!(engine.length(id), a.len());

    // Back, and on with something else; from the beginning, in pieces.
    match engine.truncate(id, *length) {
        Ok(()) => assert_close(&feed(&mut engine, id, end), behind, &at("truncated")),
        Err(error) => assert!(matches!(error, Error::NoWayBack { .. }) && model.facts.has_state(), "{error}"),
    }
    engine.truncate(id, 0).unwrap();
    for piece in [&a[..7], &a[7..8], &a[8..120], &a[120..149]] {
        feed(&mut engine, id, piece);
    }

    // Saved here, loaded here and elsewhere; a fork goes its own way; host memory gives back what it was given.
    let state = engine.save_state(id).unwrap();
    assert_close(&feed(&mut engine, id, &a[149..]), want, &at("read in pieces"));
    let (other, elsewhere) = (engine.open(1).unwrap(), cpu(Arithmetic::Fast, false).unwrap().0);
    engine.load_state(other, &state).unwrap();
    let fork = engine.fork(other).unwrap();
    engine.swap_out(other).unwrap();
    assert_close(&feed(&mut engine, fork, &[*other_token]), forked, &at("forked"));
    engine.swap_in(other).unwrap();
    assert_close(&feed(&mut engine, other, &a[149..]), want, &at("loaded, and moved to host memory and back"));
    let mut second = self::engine(model, elsewhere);
    let there = second.open(0).unwrap();
    second.load_state(there, &state).unwrap();
    assert_close(&feed(&mut second, there, &a[149..]), want, &at("gone on elsewhere"));

    // By itself it says what it says step by step; looked at step by step it says the same.
    let texts = [(other, 40), (fork, 41)];
    let written = engine.go_on(&texts, 12, Row::default()).unwrap();
    engine.close(fork);
    let fork = engine.open(2).unwrap();
    let mut token = feed_greedy(&mut engine, fork, a, 40);
    for (i, want) in written[0].iter().enumerate() {
        assert_eq!(token, *want, "{}", at(&format!("token {i}")));
        token = sampler::greedy(&feed(&mut engine, fork, &[token]), &[]).unwrap();
    }
    let times = engine.profile(&[Entry { sequence: fork, tokens: &[3], wanted: Wanted::Last }]).unwrap();
    assert!(!times.is_empty());
    [id, other, fork].into_iter().for_each(|id| engine.close(id));
    let (free, all) = engine.pages();
    assert_eq!(free, all, "{}", at("every page came back"));
    drop(engine);
    if let Some(instance) = instance {
        assert_eq!(instance.validation_messages(), Vec::<String>::new());
    }
}

/// Reads a text and one more token; gives the likeliest next one.
fn feed_greedy(engine: &mut Engine, id: SequenceId, tokens: &[u32], next: u32) -> u32 {
    feed(engine, id, tokens);
    sampler::greedy(&feed(engine, id, &[next]), &[]).unwrap()
}

#[test]
fn every_executor_keeps_the_contract() {
    for preset in MODELS {
        let model = model(preset);
        let judged = Judged::new(&model);
        for (name, every_model, open) in EXECUTORS {
            if *every_model || preset == MODELS[0] {
                conforms(name, preset, &model, &judged, *open);
            }
        }
    }
}

/// Long texts: prompts of many columns, and single tokens whose attention is split over the keys.
#[test]
fn long_texts_are_read_in_many_columns_and_attended_to_in_splits() {
    let long = Preset { context: 4096, ..*Preset::from_name("tiny-llama").unwrap() };
    let synth = Synth::new(&long, Recipe::from_name("Q8_0").unwrap(), 5);
    let model = Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap());
    let tokens = text(700, 1);
    let engine = |executor| Engine::new(Arc::clone(&model), executor, Room::one(4096), &mut |_, _| {}).unwrap();
    let said = |mut engine: Engine| {
        let id = engine.open(0).unwrap();
        feed(&mut engine, id, &tokens[..300]);
        feed(&mut engine, id, &tokens[300..699]);
        (feed(&mut engine, id, &tokens[699..]), engine)
    };
    let (want, _) = said(engine(Box::new(CpuExecutor::new(Arithmetic::Fast))));
    let Some((executor, _instance)) = gpu(Options::default()) else { return };
    let (got, engine) = said(engine(executor));
    assert_close(&got, &want, "700 tokens");
    let calls = |tokens| engine.plan(tokens, 1).unwrap().steps.into_iter().map(|step| step.call);
    assert!(calls(300).any(|call| matches!(call, Call::MulMm(_))), "many columns");
    assert!(calls(1).any(|call| matches!(call, Call::FlashAttention(call) if call.split.is_some())), "splits");
}

/// Where steps leave their columns rounded, every product of a token but the first takes one, and the text is that of exact columns.
#[test]
fn columns_that_are_rounded_by_who_makes_them_are_as_good_as_floats() {
    let model = model("tiny-llama-256");
    let said = |executor| {
        let mut engine = engine(&model, executor);
        let id = engine.open(0).unwrap();
        feed(&mut engine, id, &text(20, 3));
        (feed(&mut engine, id, &[17]), engine)
    };
    let (want, _) = said(cpu(Arithmetic::Reference, false).unwrap().0);
    let Some((executor, _instance)) = gpu(Options { rounds: Rounds::Always, ..Options::default() }) else { return };
    let (got, engine) = said(executor);
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let error = squares(&mut got.iter().zip(&want).map(|(g, w)| g - w)) / squares(&mut want.iter().copied());
    assert!(error < 1e-6, "{error:.1e}");
    let steps = engine.plan(1, 1).unwrap().steps;
    let product = |step: &kiln_engine::plan::Step| match &step.call {
        Call::MulMatVec(call) => Some(call.rounded.is_some()),
        _ => None,
    };
    let products: Vec<bool> = steps.iter().filter_map(product).collect();
    assert!(products.len() == 9 && !products[0] && products[1..].iter().all(|takes| *takes), "{products:?}");
}

/// Where steps leave their columns as matrix units take them, all products take them so, but for those of the first layer whose columns would need
/// magnitudes to go by; and texts are those of exact columns.
#[test]
fn columns_that_are_left_ready_are_as_good_as_floats() {
    // More columns than mul_mat_vec takes, and more keys than for which attention writes its caches by itself.
    const TEXTS: usize = MAX_GEMV_N + 3;
    let (model, room) = (model("tiny-llama-256"), Room::for_sequences(TEXTS, 5000));
    let said = |executor| {
        let mut engine = Engine::new(Arc::clone(&model), executor, room, &mut |_, _| {}).unwrap();
        let texts: Vec<Vec<u32>> = (0..TEXTS).map(|i| text(5 + 3 * i, i)).collect();
        let ids: Vec<SequenceId> = texts.iter().map(|_| engine.open(0).unwrap()).collect();
        for (id, text) in ids.iter().zip(&texts) {
            feed(&mut engine, *id, text);
        }
        let entry = |id: &SequenceId| Entry { sequence: *id, tokens: &[17], wanted: Wanted::Last };
        engine.feed(&ids.iter().map(entry).collect::<Vec<_>>()).unwrap()
    };
    let want = said(cpu(Arithmetic::Reference, false).unwrap().0);
    for order in [Order::Barriers, Order::DependentLaunch] {
        let Some((executor, instance)) = gpu(Options { pack_b: PackB::Always, order, ..Options::default() }) else {
            return;
        };
        let shape = BatchShape {
            decode: TEXTS,
            prompt: 0,
            pieces: 0,
            outputs: TEXTS,
            expands: false,
            shares: false,
            pictures: Pictures::default(),
        };
        let plan = graph(&model.config, &model.gguf, &room).unwrap().plan(shape).unwrap();
        let steps = lower(plan, &executor.target()).unwrap().steps;
        let got = said(executor);
        let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
        for (got, want) in got.iter().zip(&want) {
            let error = squares(&mut got.iter().zip(want).map(|(g, w)| g - w)) / squares(&mut want.iter().copied());
            assert!(error < 1e-6, "{error:.1e}");
        }
        // In a layer: queries, keys and values, the output of attention, gate and up, down; then the output matrix.
        let taken = |step: &kiln_engine::plan::Step| match &step.call {
            Call::MulMm(call) => Some(call.packed_b.is_some()),
            _ => None,
        };
        let taken: Vec<bool> = steps.iter().filter_map(taken).collect();
        let first = [false, true, false, false];
        let (behind, rest) = taken.split_at(4.min(taken.len()));
        assert!(behind == first && rest.len() > 4 && rest.iter().all(|taken| *taken), "{taken:?}");
        assert_eq!(instance.map(|instance| instance.validation_messages()), Some(Vec::new()));
    }
}

/// `tiny-llama-256` with blocks of Q8_0 of some tensors multiplied by powers of two.
fn scaled(by: &[(&str, i32)]) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name("tiny-llama-256").unwrap(), Recipe::from_name("Q8_0").unwrap(), 5);
    let mut bytes = synth.to_bytes().unwrap();
    let gguf = Gguf::from_bytes(bytes.clone()).unwrap();
    for (name, exponent) in by {
        let data = gguf.data(gguf.tensor(name).unwrap());
        let start = bytes.windows(64).position(|window| window == &data[..64]).unwrap();
        for block in bytes[start..start + data.len()].chunks_exact_mut(34) {
            // The exponent of the block's scale, an f16.
            let scaled = i32::from(block[1] >> 2 & 31) + exponent;
            assert!((1..31).contains(&scaled), "{name} does not bear 2^{exponent}");
            block[1] = block[1] & 0x83 | u8::try_from(scaled << 2).unwrap();
        }
    }
    Arc::new(Model::new(Gguf::from_bytes(bytes).unwrap()).unwrap())
}

/// Logits of prompts and of a step of all sequences, then tokens that they continue with.
fn batches(model: &Arc<Model>, executor: Box<dyn Executor>) -> (Vec<Vec<f32>>, Vec<Vec<u32>>) {
    const TEXTS: usize = MAX_GEMV_N + 3;
    let mut engine =
        Engine::new(Arc::clone(model), executor, Room::for_sequences(TEXTS, 5000), &mut |_, _| {}).unwrap();
    let ids: Vec<SequenceId> = (0..TEXTS).map(|_| engine.open(0).unwrap()).collect();
    let mut logits: Vec<Vec<f32>> =
        ids.iter().enumerate().map(|(i, id)| feed(&mut engine, *id, &text(5 + 3 * i, i))).collect();
    let entry = |id: &SequenceId| Entry { sequence: *id, tokens: &[17], wanted: Wanted::Last };
    logits.extend(engine.feed(&ids.iter().map(entry).collect::<Vec<_>>()).unwrap());
    let next: Vec<(SequenceId, u32)> = ids.iter().map(|id| (*id, 9)).collect();
    (logits, engine.go_on(&next, 4, Row::default()).unwrap())
}

/// Scales of packed activations are predicted by the layer before. Where a layer is far off, prompts, steps of several sequences and run-ahead decode are
/// computed again without packing, and give what the reference gives.
#[test]
fn steps_whose_activations_leave_the_range_of_an_f16_run_again_without_packing() {
    let far_off: [&[(&str, i32)]; 3] = [
        // Gated activations 2^26 times as large as those of the layer before.
        &[("blk.1.ffn_gate.weight", 13), ("blk.1.ffn_up.weight", 13), ("blk.1.ffn_down.weight", -2)],
        // What a norm follows, likewise.
        &[("blk.1.attn_v.weight", 12), ("blk.1.attn_output.weight", 13)],
        // A small one.
        &[("blk.1.ffn_gate.weight", 0)],
    ];
    for (at, by) in far_off.into_iter().enumerate() {
        let model = scaled(by);
        let want = batches(&model, cpu(Arithmetic::Reference, false).unwrap().0);
        for order in [Order::Barriers, Order::DependentLaunch] {
            let Some((executor, instance)) = gpu(Options { pack_b: PackB::Always, order, ..Options::default() }) else {
                return;
            };
            let got = batches(&model, executor);
            for (got, want) in got.0.iter().zip(&want.0) {
                let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
                let error = squares(&mut got.iter().zip(want).map(|(g, w)| g - w)) / squares(&mut want.iter().copied());
                assert!(error < 1e-6, "{at}, {order:?}: {error:.1e}");
            }
            assert_eq!(got.1, want.1, "{at}, {order:?}");
            assert_eq!(instance.map(|instance| instance.validation_messages()), Some(Vec::new()));
        }
    }
}

/// Steps that leave columns ready are those of the reference one by one, with more columns than a matrix has and fewer than two have.
#[test]
fn steps_that_leave_columns_ready_are_the_references() {
    let model = model("tiny-llama-256");
    let Some((mut executor, _instance)) = gpu(Options { pack_b: PackB::Always, ..Options::default() }) else {
        return;
    };
    let mut reference = CpuExecutor::new(Arithmetic::Reference);
    let report = compare::run(&model, &text(21, 1), 64, executor.as_mut(), &mut reference, 1e-5).unwrap();
    assert_eq!(report.first_difference, None);
    let left = report.lines.iter().filter(|line| line.contains(".packed")).count();
    assert!(left >= 1, "{left} steps leave columns ready: {:#?}", report.lines);
}

/// How many dispatches and barriers a token takes: more must be meant.
#[test]
fn a_token_takes_no_more_dispatches_and_barriers_than_are_known() {
    let Some((device, _instance)) = device() else { return };
    if !device.adapter.caps.is_cpu {
        return;
    }
    let mut counted = Vec::new();
    for preset in ["tiny-llama", "tiny-gemma2", "tiny-qwen3moe", "tiny-rwkv7"] {
        let model = model(preset);
        let mut executor = GpuExecutor::new(Arc::clone(&device));
        let graph = graph(&model.config, &model.gguf, &Room::one(256)).unwrap();
        executor.load(graph.fixed(), &model.gguf, &mut |_, _| {}).unwrap();
        let plan = lower(graph.plan(BatchShape::new(1, 1)).unwrap(), &executor.target()).unwrap();
        let steps = plan.len();
        let plan = executor.prepare(plan).unwrap();
        let counts = executor.counts(plan);
        counted.push((preset, steps, counts.dispatches, counts.barriers));
    }
    // Each with its steps, dispatches and barriers.
    let known = [
        ("tiny-llama", 12, 12, 12),
        ("tiny-gemma2", 22, 22, 22),
        ("tiny-qwen3moe", 18, 18, 18),
        ("tiny-rwkv7", 37, 38, 22),
    ];
    assert_eq!(counted, known);
}
