//! Models with recurrent layers reuse prefixes: a prompt that continues what was computed before starts from a saved state, and
//! gives the logits of one that was computed whole.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod tiny;

use std::sync::{Arc, Barrier, mpsc};

use kiln_engine::arch::{PAGE, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, Options};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, Event, Policy, Request, Scheduler, SequenceId, StopRule, Usage, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::Gguf;

use device::gpu_with;

fn preset(name: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(name).unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

const PRESETS: [&str; 6] =
    ["tiny-rwkv6", "tiny-rwkv7", "tiny-rwkv6qwen2", "tiny-arwkv7", "tiny-mamba2", "tiny-qwen3next"];

/// The synthetic recurrent models, and every architecture with states that a golden describes.
fn models() -> Vec<(String, Arc<Model>)> {
    let goldens = tiny::goldens().into_iter().map(|(name, golden)| (name, Arc::new(tiny::model(&golden))));
    let goldens = goldens.filter(|(_, model)| model.facts.has_state());
    PRESETS.iter().map(|name| ((*name).to_owned(), preset(name))).chain(goldens).collect()
}

/// Some of those goldens: recurrences, convolutions and delta nets, beside attention and alone.
const KNOWN: [&str; 8] =
    ["falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "mamba", "nemotron_h", "qwen3next"];

fn cpu(reproducible: bool) -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(reproducible))
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>) -> Engine {
    let room = Room { pages: 40, sequences: 4, states: 4, ..Room::one(512) };
    let room = room.with_windows(model.facts.window, 512);
    let mut engine = Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap();
    engine.limit_checkpoints(64 << 20);
    engine
}

/// Tokens without a pattern.
fn text(model: &Model, n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 37 + 11 + salt * 101) % model.config.vocab) as u32).collect()
}

fn feed(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>();
    let error = squares(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
    error / squares(&mut want.iter().map(|w| f64::from(*w)))
}

/// The logits of tokens that were not computed before.
fn uncached(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let id = engine.open(u64::MAX).unwrap();
    let logits = feed(engine, id, tokens);
    engine.close(id);
    logits
}

/// A first turn: a prompt with checkpoints where the scheduler has them, and an answer.
fn first_turn(engine: &mut Engine, scope: u64, prompt: &[u32], answer: &[u32]) {
    let id = engine.open(scope).unwrap();
    assert_eq!(engine.reuse(id, prompt).unwrap(), 0);
    let boundary = (prompt.len() - 1) / PAGE * PAGE;
    for piece in [&prompt[..boundary], &prompt[boundary..]] {
        feed(engine, id, piece);
        engine.checkpoint(id).unwrap();
    }
    answer.iter().for_each(|token| drop(feed(engine, id, &[*token])));
    engine.checkpoint(id).unwrap();
    engine.close(id);
}

/// Turns that continue the first one from its end, from the end of its prompt, and from the page boundary before that.
fn later_turns(name: &str, model: &Model, engine: &mut Engine, is_same: impl Fn(&[f32], &[f32]) -> bool) {
    let (prompt, answer) = (text(model, 150, 1), text(model, 9, 2));
    first_turn(engine, 1, &prompt, &answer);
    let question = text(model, 20, 3);
    let cases = [
        ("the whole turn", [&prompt[..], &answer, &question].concat(), 159),
        ("another answer", [&prompt[..], &question].concat(), 150),
        ("another end of the prompt", [&prompt[..140], &question].concat(), 128),
        ("the same prompt", prompt.clone(), 128),
    ];
    let wanted = cases
        .each_ref()
        .map(|(_, tokens, _)| [uncached(engine, tokens), uncached(engine, &[&tokens[..], &[5]].concat())]);
    for round in 0..2 {
        for ((what, tokens, cached), [want, again]) in cases.iter().zip(&wanted) {
            let id = engine.open(1).unwrap();
            assert_eq!(engine.reuse(id, tokens).unwrap(), *cached, "{name}: {what}, round {round}");
            let got = feed(engine, id, &tokens[*cached..]);
            assert!(is_same(&got, want), "{name}: {what}: {:.1e}", nmse(&got, want));
            // It goes on as the uncached one would.
            let more = feed(engine, id, &[5]);
            assert!(is_same(&more, again), "{name}: {what}, one token more: {:.1e}", nmse(&more, again));
            engine.close(id);
        }
        // Others come between.
        (0..3).for_each(|i| first_turn(engine, 100 + 10 * round + i, &text(model, 130, 7 + i as usize), &answer));
    }
    let stranger = engine.open(2).unwrap();
    assert_eq!(engine.reuse(stranger, &prompt).unwrap(), 0, "{name}: another scope");
    engine.close(stranger);
    assert_eq!(engine.pages().0, engine.pages().1, "{name}: every page came back");
}

#[test]
fn a_second_turn_computes_only_what_is_new() {
    let models = models();
    for known in KNOWN {
        assert!(models.iter().any(|(name, _)| name.starts_with(known)), "{known}");
    }
    for (name, model) in models {
        let mut engine = engine(&model, cpu(false));
        later_turns(&name, &model, &mut engine, |got, want| nmse(got, want) < 1e-6);
        assert!(engine.checkpoint_bytes() > 0, "{name} has states");
    }
}

#[test]
fn reproducible_turns_have_the_bits_of_uncached_ones() {
    for (name, model) in models() {
        let mut engine = engine(&model, cpu(true));
        later_turns(&name, &model, &mut engine, |got, want| got == want);
    }
}

#[test]
fn a_device_continues_from_saved_states() {
    for name in ["tiny-rwkv7", "tiny-mamba2", "tiny-qwen3next"] {
        let Some((gpu, instance)) = gpu_with(Options::default()) else { return };
        let model = preset(name);
        let mut engine = engine(&model, gpu);
        later_turns(name, &model, &mut engine, |got, want| nmse(got, want) < 1e-6);
        drop(engine);
        assert_eq!(instance.validation_messages(), Vec::<String>::new());
    }
}

#[test]
fn a_reproducible_device_continues_with_the_same_bits() {
    let Some((gpu, _instance)) = gpu_with(Options { reproducible: true, ..Options::default() }) else { return };
    let model = preset("tiny-qwen3next");
    later_turns("tiny-qwen3next", &model, &mut engine(&model, gpu), |got, want| got == want);
}

#[test]
fn evicted_states_and_pages_are_computed_again() {
    for name in ["tiny-rwkv7", "tiny-qwen3next"] {
        let model = preset(name);
        let (prompt, answer) = (text(&model, 150, 1), text(&model, 9, 2));
        let tokens = [&prompt[..], &answer, &[1, 2, 3]].concat();
        let mut engine = engine(&model, cpu(false));
        let want = uncached(&mut engine, &tokens);
        first_turn(&mut engine, 1, &prompt, &answer);
        // Room for the checkpoints of one turn: another one evicts them all.
        let bytes = engine.checkpoint_bytes();
        engine.limit_checkpoints(bytes);
        first_turn(&mut engine, 1, &prompt, &answer);
        first_turn(&mut engine, 2, &prompt, &answer);
        let cached = |engine: &mut Engine, expected: usize| {
            let id = engine.open(1).unwrap();
            assert_eq!(engine.reuse(id, &tokens).unwrap(), expected, "{name}");
            assert!(nmse(&feed(engine, id, &tokens[expected..]), &want) < 1e-6, "{name}");
            engine.close(id);
        };
        cached(&mut engine, 0);
        // States without the pages of the same tokens are of no use.
        first_turn(&mut engine, 1, &prompt, &answer);
        if engine.pages().1 > 0 && name == "tiny-qwen3next" {
            let long = text(&model, 500, 9);
            for scope in 10..16 {
                let id = engine.open(scope).unwrap();
                feed(&mut engine, id, &long);
                engine.close(id);
            }
            cached(&mut engine, 0);
        }
        engine.limit_checkpoints(0);
        first_turn(&mut engine, 3, &prompt, &answer);
        assert_eq!(engine.checkpoint_bytes(), 0, "{name}");
        cached(&mut engine, 0);
    }
}

fn scheduler(model: &Arc<Model>, executor: Box<dyn Executor>) -> Scheduler {
    Scheduler::start(engine(model, executor), Policy::default())
}

fn greedy(prompt: Vec<u32>, limit: usize) -> Request {
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    Request { limit: Some(limit), sampling: Sampling::greedy(), stop, owner: 1, ..Request::new(prompt) }
}

/// The tokens of an answer, and what it took.
fn answer(scheduler: &Scheduler, request: Request) -> (Vec<u32>, Usage) {
    let mut tokens = Vec::new();
    for event in scheduler.generate(request) {
        match event {
            Event::Token { token, .. } => tokens.push(token),
            Event::End { usage, .. } => return (tokens, usage),
            Event::Failed(error) => panic!("{error}"),
            Event::Started { .. } | Event::Read { .. } => {}
        }
    }
    panic!("it has no end")
}

#[test]
fn a_chat_of_several_turns_reads_each_of_them_once() {
    for (name, model) in models() {
        let uncached = scheduler(&model, cpu(true));
        let scheduler = scheduler(&model, cpu(true));
        let mut prompt = text(&model, 100, 1);
        for turn in 0..4 {
            let (tokens, usage) = answer(&scheduler, greedy(prompt.clone(), 12));
            let want = answer(&uncached, Request { reuse: false, ..greedy(prompt.clone(), 12) });
            assert_eq!((&tokens, want.1.cached_tokens), (&want.0, 0), "{name}: turn {turn}");
            if turn > 0 {
                // All of it but the question, and the last token of the answer where nothing has read that.
                let least = prompt.len() - 31;
                assert!((least..=least + 1).contains(&usage.cached_tokens), "{name}: {turn}: {usage:?}");
            }
            prompt.extend(tokens);
            // Somebody else asks in between.
            answer(&scheduler, Request { owner: 2, ..greedy(text(&model, 70, 50 + turn), 3) });
            prompt.extend(text(&model, 30, 9 + turn));
        }
    }
}

#[test]
fn a_common_prefix_without_a_state_gets_one_when_it_comes_again() {
    let model = preset("tiny-rwkv7");
    let scheduler = scheduler(&model, cpu(false));
    let system = text(&model, 200, 1);
    let cached = |salt: usize| {
        let prompt = [&system[..], &text(&model, 90, salt)].concat();
        answer(&scheduler, greedy(prompt, 2)).1.cached_tokens
    };
    // Where the first two prompts part is known only when the second one comes.
    assert_eq!([2, 3, 4, 5].map(cached), [0, 0, 192, 192]);
}

#[test]
fn a_prefix_that_many_come_with_at_once_is_computed_once() {
    for name in ["tiny-rwkv7", "tiny-qwen3next"] {
        let model = preset(name);
        let scheduler = scheduler(&model, cpu(false));
        let system = text(&model, 200, 1);
        let request = |i: usize| greedy([&system[..], &text(&model, 20 + i, 10 + i)].concat(), 4);
        let (told, events) = mpsc::channel();
        let (here, go_on) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let started: Vec<(usize, usize)> = std::thread::scope(|scope| {
            let (there, wait) = (Arc::clone(&here), Arc::clone(&go_on));
            let scheduler = &scheduler;
            scope.spawn(move || scheduler.with_engine(move |_| (there.wait(), wait.wait()).0.is_leader()));
            here.wait();
            for i in 0..4 {
                let told = told.clone();
                scheduler.submit(request(i), move |event| match event {
                    Event::Started { cached_tokens } => told.send((i, cached_tokens)).is_ok(),
                    _ => true,
                });
            }
            drop(told);
            go_on.wait();
            events.into_iter().collect()
        });
        assert_eq!(started, [(0, 0), (1, 192), (2, 192), (3, 192)], "{name}");
    }
}

#[test]
fn requests_that_must_not_share_save_nothing() {
    let model = preset("tiny-rwkv7");
    let scheduler = scheduler(&model, cpu(false));
    answer(&scheduler, Request { reuse: false, ..greedy(text(&model, 150, 1), 4) });
    assert_eq!(scheduler.with_engine(|engine| engine.checkpoint_bytes()).unwrap(), 0);
}
