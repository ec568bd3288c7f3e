//! Layers on stages: a leader and one or two stages, each with its own copy of the model, give the bits of one process, and what makes no sense
//! to a stage changes nothing there. Messages go through channels here; how they travel is `crates/stage`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod frail;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use kiln_engine::Error;
use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::executor::{
    Arithmetic, CpuExecutor, Executor, FromStage, Link, Make, PartKey, PipelineExecutor, Range, RemoteExecutor, Seat,
    SlotRange, StageHost, ToStage,
};
use kiln_engine::model::Model;
use kiln_engine::placement::Placement;
use kiln_engine::plan::Plan;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, Event, PlanKey, Policy, Request, Scheduler, SequenceId, StopRule, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::state::of_model;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, TensorType};

use crate::frail::{Fault, Frail, Trigger};

const LAYERS: usize = 3;
/// A dense model, a mixture, one with windows, one with states.
const PRESETS: [&str; 4] = ["tiny-llama", "tiny-qwen3moe", "tiny-gemma2", "tiny-rwkv7"];

fn model_of(preset: &str, seed: u64) -> Arc<Model> {
    let preset = Preset { layers: LAYERS, ..*Preset::from_name(preset).unwrap() };
    let synth = Synth::new(&preset, Recipe::from_name("F32").unwrap(), seed);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn model(preset: &str) -> Arc<Model> {
    model_of(preset, 11)
}

fn cpu(reproducible: bool) -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(reproducible))
}

fn host(model: &Arc<Model>) -> StageHost {
    host_over(model, Box::new(|reproducible| Ok(cpu(reproducible))))
}

fn host_over(model: &Arc<Model>, make: Make) -> StageHost {
    StageHost::new(Arc::clone(model), make).unwrap()
}

/// A link to a stage on a thread of this process.
struct Near {
    to: Sender<ToStage>,
    from: Receiver<FromStage>,
}

impl Link for Near {
    fn place(&self) -> String {
        "a thread".into()
    }

    fn send(&mut self, message: ToStage) -> Result<(), Error> {
        self.to.send(message).map_err(|_| Error::Stopped)
    }

    fn receive(&mut self) -> Result<FromStage, Error> {
        self.from.recv_timeout(Duration::from_secs(60)).map_err(|_| Error::Stopped)
    }
}

/// A stage with its own copy of the model. After so many messages it is gone.
fn stage_for(model: &Arc<Model>, copy: &Arc<Model>, messages: usize) -> Box<dyn Executor> {
    stage_of(model, host(copy), messages)
}

fn stage_of(model: &Arc<Model>, mut host: StageHost, messages: usize) -> Box<dyn Executor> {
    let (to, asked) = channel::<ToStage>();
    let (answers, from) = channel();
    let about = host.about();
    std::thread::spawn(move || {
        for message in asked.iter().take(messages) {
            if let Err(why) = host.handle(message, &mut |answer| drop(answers.send(answer))) {
                return println!("the stage ends: {why}");
            }
        }
    });
    Box::new(RemoteExecutor::new(Box::new(Near { to, from }), about, of_model(model)))
}

fn stage(model: &Arc<Model>, copy: &Arc<Model>) -> Box<dyn Executor> {
    stage_for(model, copy, usize::MAX)
}

fn plain(model: &Model) -> Vec<Plan> {
    let graph = model.graph(&Room::one(64)).unwrap();
    [1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1)).unwrap()).into()
}

fn pipeline(model: &Model, devices: Vec<Box<dyn Executor>>, placement: &Placement) -> Box<dyn Executor> {
    Box::new(PipelineExecutor::new(devices, placement.clone(), &plain(model)).without_streaming())
}

/// The first layers here, all others on the stage.
fn cut_at(at: usize) -> Placement {
    let layers: Vec<usize> = (0..LAYERS).map(|layer| usize::from(layer >= at)).collect();
    Placement { input: 0, experts: layers.clone(), layers, output: 1, rules: Vec::new() }
}

/// A layer for each of three.
fn in_three() -> Placement {
    Placement { input: 0, experts: vec![0, 1, 2], layers: vec![0, 1, 2], output: 2, rules: Vec::new() }
}

fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11 + salt * 101) % 256).collect()
}

fn room(model: &Model) -> Room {
    let [k_type, v_type] = [TensorType::F32; 2];
    Room { k_type, v_type, ..Room::for_sequences(4, 256) }.with_windows(model.facts.window, 512)
}

/// Prompts of several sequences at once and in pieces, single tokens, forks, swaps.
fn logits(model: &Arc<Model>, executor: Box<dyn Executor>) -> Vec<f32> {
    let mut engine = Engine::new(Arc::clone(model), executor, room(model), &mut |_, _| {}).unwrap();
    let ids: Vec<SequenceId> = (0..3).map(|_| engine.open(0).unwrap()).collect();
    let entry = |sequence, tokens, wanted| Entry { sequence, tokens, wanted };
    let (long, short, one) = (text(70, 1), text(5, 2), text(1, 3));
    let mut all = Vec::new();
    let mut feed = |engine: &mut Engine, entries: &[Entry<'_>]| {
        all.extend(engine.feed(entries).unwrap().into_iter().flatten());
    };
    feed(&mut engine, &[entry(ids[0], &long, Wanted::Last), entry(ids[1], &short, Wanted::All)]);
    feed(&mut engine, &[entry(ids[0], &one, Wanted::Last), entry(ids[2], &short, Wanted::Last)]);
    let fork = engine.fork(ids[0]).unwrap();
    feed(&mut engine, &[entry(ids[0], &[7], Wanted::Last), entry(fork, &[9], Wanted::Last)]);
    engine.swap_out(ids[0]).unwrap();
    engine.swap_in(ids[0]).unwrap();
    feed(&mut engine, &[entry(ids[0], &[3], Wanted::Last), entry(ids[1], &[4], Wanted::Last)]);
    all
}

/// Texts of many requests at once that begin alike, drawn on the devices and by the host.
fn texts(model: &Arc<Model>, executor: Box<dyn Executor>) -> Vec<Vec<u32>> {
    let engine = Engine::new(Arc::clone(model), executor, room(model), &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, Policy::default());
    let hot = Sampling { seed: Some(3), temperature: 0.7, top_k: 20, ..Sampling::default() };
    let host = Sampling { repeat_penalty: 1.5, repeat_last_n: 64, ..Sampling::greedy() };
    let request = |(i, sampling): (u32, Sampling)| {
        let stop = StopRule { ignore_end: true, ..StopRule::default() };
        let prompt = [text(66, 0), text(3 + 20 * i, i)].concat();
        scheduler.generate(Request { limit: Some(24), sampling, stop, ..Request::new(prompt) })
    };
    let all: Vec<_> = (0..).zip([Sampling::greedy(), hot, Sampling::greedy(), host]).map(request).collect();
    let token = |event| match event {
        Event::Token { token, .. } => Some(token),
        Event::Failed(error) => panic!("{error}"),
        _ => None,
    };
    all.into_iter().map(|events| events.filter_map(token).collect()).collect()
}

#[test]
fn one_and_two_stages_write_what_one_process_writes() {
    for preset in PRESETS {
        let (model, copy) = (model(preset), model(preset));
        let want = (logits(&model, cpu(false)), texts(&model, cpu(false)));
        let placements = [(cut_at(0), 1), (cut_at(2), 1), (in_three(), 2)];
        for (placement, stages) in placements {
            let all = || {
                let far = (0..stages).map(|_| stage(&model, &copy));
                pipeline(&model, std::iter::once(cpu(false)).chain(far).collect(), &placement)
            };
            // As on two devices of one process, bit for bit.
            let near = (0..=stages).map(|_| cpu(false)).collect();
            assert!(logits(&model, all()) == logits(&model, pipeline(&model, near, &placement)), "{preset}");
            assert_eq!(texts(&model, all()), want.1, "{preset}: {placement:?}");
        }
    }
}

#[test]
fn reproducible_bits_are_the_bits_of_one_process() {
    for preset in PRESETS {
        let (model, copy) = (model(preset), model(preset));
        let want = logits(&model, cpu(true));
        let devices = vec![cpu(true), stage(&model, &copy), stage(&model, &copy)];
        let got = logits(&model, pipeline(&model, devices, &in_three()));
        let same = got.iter().zip(&want).filter(|(got, want)| got.to_bits() == want.to_bits()).count();
        assert_eq!((same, got.len()), (want.len(), want.len()), "{preset}");
    }
}

/// A step whose results are wrong on a stage is run again as it would be here: kernels that stall, and activations that leave their range, where
/// the stage makes its plans again. The device before it may say the same of the same step.
#[test]
fn steps_that_go_wrong_on_a_stage_run_again() {
    let frail = |trigger: &Trigger| -> Box<dyn Executor> { Box::new(Frail::new(trigger)) };
    for preset in ["tiny-llama", "tiny-rwkv7"] {
        let model = model(preset);
        let written = |fault, [here, there]: [isize; 2]| {
            let [here, there] = [here, there].map(|steps| Trigger::after(fault, steps));
            let host = host_over(&model, Box::new(move |_| Ok(frail(&there))));
            let devices = vec![frail(&here), stage_of(&model, host, usize::MAX)];
            texts(&model, pipeline(&model, devices, &cut_at(1)))
        };
        const NEVER: isize = isize::MAX;
        let want = written(Fault::Range, [NEVER; 2]);
        for fault in [Fault::Range, Fault::Stall] {
            for steps in [[NEVER, 0], [NEVER, 2], [NEVER, 11], [4, 4], [11, 11]] {
                assert_eq!(written(fault, steps), want, "{preset} after {steps:?} steps");
            }
        }
    }
}

#[test]
fn a_stage_of_another_file_is_refused() {
    let (model, other) = (model("tiny-llama"), model_of("tiny-llama", 12));
    let devices = vec![cpu(false), stage(&model, &other)];
    let executor = pipeline(&model, devices, &cut_at(1));
    let why = Engine::new(Arc::clone(&model), executor, room(&model), &mut |_, _| {}).err().unwrap().to_string();
    assert!(why.contains("another model file") && why.contains("a thread"), "{why}");
}

#[test]
fn a_lost_stage_is_one_error_that_says_so() {
    let model = model("tiny-llama");
    // It is gone in the middle of some step, whichever.
    for messages in [40, 61, 90] {
        let devices = vec![cpu(false), stage_for(&model, &model, messages)];
        let executor = pipeline(&model, devices, &cut_at(1));
        let engine = Engine::new(Arc::clone(&model), executor, room(&model), &mut |_, _| {}).unwrap();
        let scheduler = Scheduler::start(engine, Policy::default());
        let stop = StopRule { ignore_end: true, ..StopRule::default() };
        let request = Request { limit: Some(200), stop, ..Request::new(text(20, 1)) };
        let ends: Vec<Event> = scheduler
            .generate(request)
            .filter(|event| !matches!(event, Event::Token { .. } | Event::Started { .. } | Event::Read { .. }))
            .collect();
        let [Event::Failed(why)] = &ends[..] else { panic!("{ends:?}") };
        assert!(why.is_lost() && why.to_string().contains("a thread"), "{why}");
    }
}

/// Numbers without a pattern.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> usize {
        usize::try_from(self.next() % n).unwrap()
    }

    /// Mostly small, sometimes absurd.
    fn size(&mut self) -> usize {
        match self.below(16) {
            0 => usize::MAX,
            1 => self.below(1 << 40),
            2..6 => self.below(1 << 16),
            _ => 4 * self.below(300),
        }
    }
}

/// A message that makes sense here and there.
fn any(chance: &mut Chance, seat: &Seat, fingerprint: [u8; 32], known: &[PartKey]) -> ToStage {
    let piece = |chance: &mut Chance| {
        let slot = if chance.below(8) == 0 { chance.size() } else { chance.below(90) };
        SlotRange { plan: chance.below(5), slot, offset: chance.size() }
    };
    let range =
        |chance: &mut Chance| Range::new(u32::try_from(chance.below(40)).unwrap(), chance.size(), chance.size());
    let bytes = |chance: &mut Chance| vec![chance.next() as u8; chance.below(2000)];
    match chance.below(14) {
        0 => {
            let mut seat = seat.clone();
            match chance.below(6) {
                0 => seat.device = chance.size(),
                1 => seat.room.context = chance.size(),
                2 => seat.room.pages = chance.below(1 << 30),
                3 => seat.placement.layers = vec![chance.below(3); chance.below(6)],
                4 => seat.keeps = vec![true; chance.below(90)],
                _ => {}
            }
            ToStage::Open { seat: Box::new(seat), fingerprint }
        }
        1..4 => {
            let mut key = known[chance.below(known.len() as u64)];
            if chance.below(2) == 0 {
                let mut numbers = key.plan.numbers();
                numbers[chance.below(7)] = if chance.below(3) == 0 { chance.next() } else { chance.next() % 40 };
                key.plan = PlanKey::from_numbers(&numbers).unwrap_or(key.plan);
            }
            key.part = chance.below(4);
            ToStage::Prepare { plan: chance.below(6), key: Box::new(key) }
        }
        4 => ToStage::Forget { plan: chance.below(6) },
        5..7 => ToStage::Write(piece(chance), bytes(chance)),
        7..9 => ToStage::Run { plan: chance.below(5) },
        9 => ToStage::Read(piece(chance), chance.size()),
        10 => ToStage::Gather((0..chance.below(3)).map(|_| range(chance)).collect()),
        11 => ToStage::Scatter(range(chance), bytes(chance)),
        12 => ToStage::Copy((0..chance.below(3)).map(|_| (range(chance), range(chance))).collect()),
        _ if chance.below(2) == 0 => ToStage::Zero((0..chance.below(3)).map(|_| range(chance)).collect()),
        _ => ToStage::Rest,
    }
}

/// Links that note what a leader says.
struct Noting {
    near: Near,
    said: Sender<ToStage>,
}

impl Link for Noting {
    fn place(&self) -> String {
        "a thread".into()
    }

    fn send(&mut self, message: ToStage) -> Result<(), Error> {
        drop(self.said.send(message.clone()));
        self.near.send(message)
    }

    fn receive(&mut self) -> Result<FromStage, Error> {
        self.near.receive()
    }
}

/// A stage survives anything that it is told: 20,000 messages, or as many as `KILN_STAGE_FUZZ` says. Then it still computes the right bits.
#[test]
fn messages_that_make_no_sense_change_nothing() {
    let count = std::env::var("KILN_STAGE_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let model = model("tiny-llama");
    // What a real leader says: the fuzzer's words are made of these.
    let (noted, said) = channel();
    let (to, asked) = channel::<ToStage>();
    let (answers, from) = channel();
    let mut far = host(&model);
    let about = far.about();
    std::thread::spawn(move || {
        for message in asked {
            far.handle(message, &mut |answer| drop(answers.send(answer))).unwrap();
        }
    });
    let link = Noting { near: Near { to, from }, said: noted };
    let remote = RemoteExecutor::new(Box::new(link), about, of_model(&model));
    let want = logits(&model, pipeline(&model, vec![cpu(false), Box::new(remote)], &cut_at(1)));
    let script: Vec<ToStage> = said.iter().collect();
    let opened = script.iter().find_map(|message| match message {
        ToStage::Open { seat, fingerprint } => Some((seat.clone(), *fingerprint)),
        _ => None,
    });
    let (seat, fingerprint) = opened.unwrap();
    let known: Vec<PartKey> = script
        .iter()
        .filter_map(|message| match message {
            ToStage::Prepare { key, .. } => Some(**key),
            _ => None,
        })
        .collect();

    let mut host = host(&model);
    let mut chance = Chance(0x9E37_79B9_7F4A_7C15);
    let (mut refused, mut ran) = (0usize, 0usize);
    for number in 0..count {
        // Where nothing is opened, nothing else is looked at.
        let message = match number % 64 {
            0 => ToStage::Open { seat: seat.clone(), fingerprint },
            1 => ToStage::Prepare { plan: 0, key: Box::new(known[0]) },
            _ => any(&mut chance, &seat, fingerprint, &known),
        };
        let runs = matches!(message, ToStage::Run { .. });
        let mut done = false;
        let heard = host.handle(message, &mut |answer| done |= answer == FromStage::Done);
        refused += usize::from(heard.is_err());
        ran += usize::from(runs && done);
    }
    println!("{count} messages, {refused} refused, {ran} runs");
    assert!(refused > count / 10 && ran > count / 1000, "{refused} refused, {ran} runs");

    // What a leader said before gives what it gave before.
    let (to, asked) = channel::<ToStage>();
    let (answers, from) = channel();
    let about = host.about();
    std::thread::spawn(move || {
        for message in asked {
            host.handle(message, &mut |answer| drop(answers.send(answer))).unwrap();
        }
    });
    let remote = RemoteExecutor::new(Box::new(Near { to, from }), about, of_model(&model));
    let got = logits(&model, pipeline(&model, vec![cpu(false), Box::new(remote)], &cut_at(1)));
    assert!(got == want);
}
