//! Sixty-four texts at once are what each is alone: bit for bit where the engine was told to be reproducible, and else wherever no
//! two tokens are nearly equally likely. Prompts come in pieces, beginnings are shared, texts are moved to host memory and back.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::Arc;

use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, Options};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, SequenceId, Wanted};
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, TensorType};
use kiln_kernels::sample::Row;

use device::gpu_with;

/// Texts at once.
const TEXTS: usize = 64;
/// Tokens of each text that are compared by their logits, and those that go on by themselves after them.
const STEPS: usize = 2;
const GOING_ON: usize = 3;
/// Texts whose two likeliest tokens are closer than this may differ without the switch.
const NEAR: f32 = 0.02;

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("Q8_0").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>, caches: TensorType) -> Engine {
    let room = Room { k_type: caches, v_type: caches, ..Room::for_sequences(TEXTS, 192) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

/// Executors, and which texts are compared there, one of so many: the software GPU takes its time.
fn executors(reproducible: bool) -> Vec<(Box<dyn Executor>, usize)> {
    let cpu: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(reproducible));
    let gpu = gpu_with(Options { reproducible, ..Options::default() }).map(|(gpu, _)| gpu);
    [Some((cpu, 1)), gpu.map(|gpu| (gpu, 4))].into_iter().flatten().collect()
}

/// Prompts of 1 to 85 tokens; every fourth begins as all its kind do, for more than a page.
fn prompts() -> Vec<Vec<u32>> {
    let tokens = |n: usize, salt: usize| (0..n).map(move |i| ((i * i * 7 + i * 37 + 11 + salt * 101) % 256) as u32);
    let prompt = |text: usize| -> Vec<u32> {
        let own = tokens(1 + text * 29 % 19, text);
        if text.is_multiple_of(4) { tokens(66, 999).chain(own).collect() } else { own.collect() }
    };
    (0..TEXTS).map(prompt).collect()
}

fn likeliest(logits: &[f32]) -> (u32, f32) {
    let top = |skip: Option<usize>| {
        let all = logits.iter().enumerate().filter(|(id, _)| Some(*id) != skip);
        all.max_by(|a, b| a.1.total_cmp(b.1)).map(|(id, value)| (id, *value)).unwrap()
    };
    let (first, value) = top(None);
    (first as u32, value - top(Some(first)).1)
}

/// What came of one text.
#[derive(Default)]
struct Text {
    logits: Vec<Vec<f32>>,
    went_on: Vec<u32>,
}

impl Text {
    fn next(&self) -> u32 {
        likeliest(self.logits.last().unwrap()).0
    }

    fn bits(&self) -> Vec<Vec<u32>> {
        self.logits.iter().map(|logits| logits.iter().map(|x| x.to_bits()).collect()).collect()
    }
}

fn feed(engine: &mut Engine, entries: &[(SequenceId, &[u32])]) -> Vec<Vec<f32>> {
    let entry =
        |(sequence, tokens): &(SequenceId, &'_ [u32])| -> (SequenceId, Vec<u32>) { (*sequence, tokens.to_vec()) };
    let owned: Vec<(SequenceId, Vec<u32>)> = entries.iter().map(entry).collect();
    let entries: Vec<Entry<'_>> =
        owned.iter().map(|(id, tokens)| Entry { sequence: *id, tokens, wanted: Wanted::Last }).collect();
    engine.feed(&entries).unwrap()
}

fn alone(engine: &mut Engine, owner: u64, prompt: &[u32]) -> Text {
    let id = engine.open(owner).unwrap();
    let mut text = Text::default();
    text.logits.extend(feed(engine, &[(id, prompt)]));
    for _ in 0..STEPS {
        let next = text.next();
        text.logits.extend(feed(engine, &[(id, &[next])]));
    }
    text.went_on = engine.go_on(&[(id, text.next())], GOING_ON, Row::default()).unwrap().remove(0);
    engine.close(id);
    text
}

/// All at once. Each goes on with the token that it chose alone, so that one difference does not make others; any token does for
/// those that nobody compares.
fn together(engine: &mut Engine, prompts: &[Vec<u32>], alone: &[Option<Text>], has_caches: bool) -> Vec<Text> {
    let next = |at: usize, step: usize| {
        alone[at].as_ref().map_or(((at * 7 + step) % 256) as u32, |text| likeliest(&text.logits[step]).0)
    };
    let mut shared = 0;
    let mut ids: Vec<SequenceId> = Vec::new();
    let mut read = Vec::new();
    for prompt in prompts {
        let id = engine.open(7).unwrap();
        let found = engine.reuse(id, prompt).unwrap();
        shared += found;
        // The first one of those that begin alike is read by itself, so that the others find its pages.
        if ids.is_empty() {
            feed(engine, &[(id, &prompt[..prompt.len() - 1])]);
            read.push(prompt.len() - 1);
        } else {
            read.push(found);
        }
        ids.push(id);
    }
    assert_eq!(shared > 0, has_caches, "{shared} tokens were shared");
    // A piece of every second prompt, then the rest of all.
    let half = |at: usize| read[at] + (prompts[at].len() - read[at]) / 2;
    let pieces: Vec<usize> = (0..TEXTS).filter(|at| at % 2 == 1 && half(*at) > read[*at]).collect();
    let entries: Vec<_> = pieces.iter().map(|at| (ids[*at], &prompts[*at][read[*at]..half(*at)])).collect();
    feed(engine, &entries);
    let from = |at: usize| if pieces.contains(&at) { half(at) } else { read[at] };
    let entries: Vec<_> = (0..TEXTS).map(|at| (ids[at], &prompts[at][from(at)..])).collect();
    let mut texts: Vec<Text> =
        feed(engine, &entries).into_iter().map(|logits| Text { logits: vec![logits], ..Text::default() }).collect();
    for step in 0..STEPS {
        for id in ids.iter().skip(step).step_by(5) {
            engine.swap_out(*id).unwrap();
        }
        for id in ids.iter().rev().filter(|id| engine.is_swapped(**id)).copied().collect::<Vec<_>>() {
            engine.swap_in(id).unwrap();
        }
        let next: Vec<[u32; 1]> = (0..TEXTS).map(|at| [next(at, step)]).collect();
        let entries: Vec<_> = ids.iter().zip(&next).map(|(id, token)| (*id, &token[..])).collect();
        for (text, logits) in texts.iter_mut().zip(feed(engine, &entries)) {
            text.logits.push(logits);
        }
    }
    let going: Vec<(SequenceId, u32)> = ids.iter().copied().zip((0..TEXTS).map(|at| next(at, STEPS))).collect();
    for (text, tokens) in texts.iter_mut().zip(engine.go_on(&going, GOING_ON, Row::default()).unwrap()) {
        text.went_on = tokens;
    }
    ids.into_iter().for_each(|id| engine.close(id));
    texts
}

/// Each text that is compared alone and together, with its number; what was compared.
fn both(
    preset: &str,
    (executor, every): (Box<dyn Executor>, usize),
    caches: TensorType,
) -> (Vec<(usize, Text, Text)>, String) {
    let model = model(preset);
    let mut engine = engine(&model, executor, caches);
    let prompts = prompts();
    let compared = |(at, prompt): (usize, &Vec<u32>)| {
        at.is_multiple_of(every).then(|| alone(&mut engine, 100 + at as u64, prompt))
    };
    let want: Vec<Option<Text>> = prompts.iter().enumerate().map(compared).collect();
    let got = together(&mut engine, &prompts, &want, model.facts.has_cache());
    let (free, all) = engine.pages();
    assert_eq!(free, all, "every page came back");
    let pairs = want.into_iter().zip(got).enumerate().filter_map(|(at, (want, got))| Some((at, want?, got)));
    (pairs.collect(), format!("{preset}, {caches}, {}", engine.describe()))
}

fn has_the_same_bits(preset: &str, executor: (Box<dyn Executor>, usize), caches: TensorType) {
    let (texts, what) = both(preset, executor, caches);
    for (i, want, got) in &texts {
        assert!(want.bits() == got.bits(), "{what}: text {i} has other bits");
        assert_eq!(want.went_on, got.went_on, "{what}: text {i} went on otherwise");
    }
}

#[test]
fn with_the_switch_company_changes_no_bit() {
    for (preset, caches) in [("tiny-llama", TensorType::F16), ("tiny-llama-256", TensorType::Q8_0)] {
        for executor in executors(true) {
            has_the_same_bits(preset, executor, caches);
        }
    }
}

/// Every kind of layer, on the CPU alone: experts, windows, norms behind products, states.
#[test]
fn with_the_switch_company_changes_no_bit_of_other_architectures() {
    for preset in ["tiny-qwen3moe", "tiny-gemma2", "tiny-qwen2", "tiny-rwkv6qwen2", "tiny-rwkv7"] {
        let executor = Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(true));
        has_the_same_bits(preset, (executor, 1), TensorType::F16);
    }
}

/// The same on a GPU; with `KILN_TESTS_LONG` set also of others, which take a minute on a software GPU.
#[test]
fn with_the_switch_company_changes_no_bit_of_other_architectures_on_a_gpu() {
    let long = std::env::var_os("KILN_TESTS_LONG").is_some();
    let more = ["tiny-rwkv6", "tiny-gemma2"].into_iter().filter(|_| long);
    for preset in std::iter::once("tiny-rwkv7").chain(more) {
        let Some((gpu, instance)) = gpu_with(Options { reproducible: true, ..Options::default() }) else { return };
        has_the_same_bits(preset, (gpu, 4), TensorType::F16);
        assert_eq!(instance.validation_messages(), Vec::<String>::new());
    }
}

#[test]
fn without_it_only_tokens_that_are_nearly_as_likely_change() {
    for (preset, caches) in [("tiny-llama", TensorType::F16), ("tiny-llama-256", TensorType::Q8_0)] {
        for executor in executors(false) {
            let (texts, what) = both(preset, executor, caches);
            let mut compared = 0;
            for (i, want, got) in &texts {
                for (step, (want, got)) in want.logits.iter().zip(&got.logits).enumerate() {
                    let (token, lead) = likeliest(want);
                    if lead > NEAR {
                        assert_eq!(likeliest(got).0, token, "{what}: text {i}, step {step}, ahead by {lead}");
                        compared += 1;
                    }
                }
            }
            assert!(compared > texts.len(), "{what}: only {compared} tokens are far from others");
        }
    }
}
