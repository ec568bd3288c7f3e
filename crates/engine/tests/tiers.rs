//! Pages that make room on the device are kept in host memory, and come back from there instead of being computed again.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod tiny;

use std::path::Path;
use std::sync::Arc;

use kiln_engine::arch::{PAGE, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, Event, Policy, Request, Scheduler, SequenceId, StopRule, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, TensorType};

use device::gpu;

/// Attention that sees every token, windows beside it, and a delta net beside it.
const PRESETS: [&str; 3] = ["tiny-llama", "tiny-gemma2", "tiny-qwen3next"];

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn executors() -> impl Iterator<Item = Box<dyn Executor>> {
    let cpu: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Fast));
    [Some(cpu), gpu().map(|(gpu, _)| gpu)].into_iter().flatten()
}

/// Room for eight pages on the device, and `host` bytes of host memory.
fn engine(model: &Arc<Model>, executor: Box<dyn Executor>, host: usize) -> Engine {
    let room = Room { pages: 8, sequences: 3, states: 3, ..Room::one(8 * PAGE) };
    let room = Room { window_pages: if model.facts.window.is_some() { 8 } else { 0 }, ..room };
    let mut engine = Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap();
    engine.limit_host_cache(host);
    engine
}

/// Tokens without a pattern.
fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11 + salt * 101) % 256).collect()
}

fn last(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

fn close(got: &[f32], want: &[f32]) -> bool {
    let (sum, norm) = got
        .iter()
        .zip(want)
        .fold((0.0, 0.0), |(s, n), (g, w)| (s + f64::from(g - w).powi(2), n + f64::from(*w).powi(2)));
    got.len() == want.len() && sum < 1e-6 * norm
}

/// Computes a text as a prompt is computed: what can be found is; a state is saved at the last page boundary.
fn read(engine: &mut Engine, scope: u64, tokens: &[u32]) -> (Vec<f32>, usize) {
    let id = engine.open(scope).unwrap();
    let found = engine.reuse(id, tokens).unwrap();
    let boundary = (tokens.len() - 1) / PAGE * PAGE;
    if found < boundary {
        last(engine, id, &tokens[found..boundary]);
        engine.checkpoint(id).unwrap();
    }
    let logits = last(engine, id, &tokens[found.max(boundary)..]);
    engine.close(id);
    (logits, found)
}

#[test]
fn evicted_pages_come_back_from_host_memory() {
    for preset in PRESETS {
        let model = model(preset);
        for executor in executors() {
            let mut engine = engine(&model, executor, 64 << 20);
            let tokens = text(4 * PAGE as u32 + 9, 1);
            let (want, _) = read(&mut engine, 1, &tokens);
            for round in 0..3 {
                // All eight pages go to others.
                read(&mut engine, 2, &text(7 * PAGE as u32 + 9, 2 + round));
                let (got, found) = read(&mut engine, 1, &tokens);
                assert_eq!(found, 4 * PAGE, "{preset} on {}", engine.describe());
                assert!(close(&got, &want), "{preset}, round {round} on {}", engine.describe());
            }
            assert!(engine.host_page_bytes() > 0);
            let (_, found) = read(&mut engine, 3, &tokens);
            assert_eq!(found, 0, "{preset}: scopes share nothing in host memory either");
            assert_eq!(engine.pages().0, engine.pages().1, "every page came back");
        }
    }
}

#[test]
fn host_memory_is_bounded_and_can_be_none() {
    let model = model("tiny-llama");
    let cpu = || Box::new(CpuExecutor::new(Arithmetic::Fast));
    let tokens = text(4 * PAGE as u32 + 9, 1);
    let evict = |engine: &mut Engine, salt: u32| drop(read(engine, 2, &text(7 * PAGE as u32 + 9, salt)));
    let mut none = engine(&model, cpu(), 0);
    read(&mut none, 1, &tokens);
    evict(&mut none, 2);
    assert_eq!((read(&mut none, 1, &tokens).1, none.host_page_bytes()), (0, 0));

    // Bytes of a page: keys and values of two layers, two heads of 32 halves.
    let page = PAGE * 2 * 2 * 2 * 32 * 2;
    let mut some = engine(&model, cpu(), 3 * page);
    let (want, _) = read(&mut some, 1, &tokens);
    (2..6).for_each(|salt| evict(&mut some, salt));
    assert_eq!(some.host_page_bytes(), 3 * page, "as much as there is room for, and no more");
    let (got, found) = read(&mut some, 1, &tokens);
    assert_eq!(found, 0, "what was evicted from there is gone");
    assert!(close(&got, &want));
}

#[test]
fn a_swapped_sequence_leaves_its_pages_to_others_and_shares_those_that_are_there_when_it_comes_back() {
    for preset in PRESETS {
        let model = model(preset);
        for executor in executors() {
            let mut engine = engine(&model, executor, 64 << 20);
            let tokens = text(4 * PAGE as u32 + 9, 1);
            let (want, _) = read(&mut engine, 9, &[&tokens[..], &[7]].concat());
            let id = engine.open(1).unwrap();
            last(&mut engine, id, &tokens);
            engine.swap_out(id).unwrap();
            assert_eq!(engine.pages().0, 8, "{preset}: nothing is held");
            read(&mut engine, 2, &text(7 * PAGE as u32 + 9, 2));
            if !model.facts.has_state() {
                assert_eq!(read(&mut engine, 1, &tokens).1, 4 * PAGE, "{preset}: others find its pages");
            }
            engine.swap_in(id).unwrap();
            assert!(close(&last(&mut engine, id, &[7]), &want), "{preset} on {}", engine.describe());
            engine.close(id);
            assert_eq!(engine.pages().0, engine.pages().1);
        }
    }
}

/// Decode that runs ahead takes pages, too: what it evicts is kept.
#[test]
fn pages_that_decode_evicts_are_kept() {
    let model = model("tiny-llama");
    for executor in executors() {
        let mut engine = engine(&model, executor, 64 << 20);
        let tokens = text(4 * PAGE as u32 + 9, 1);
        let (want, _) = read(&mut engine, 1, &tokens);
        let id = engine.open(2).unwrap();
        last(&mut engine, id, &text(3 * PAGE as u32, 5));
        engine.go_on(&[(id, 3)], 4 * PAGE, Default::default()).unwrap();
        engine.close(id);
        let (got, found) = read(&mut engine, 1, &tokens);
        assert_eq!(found, 4 * PAGE, "on {}", engine.describe());
        assert!(close(&got, &want), "on {}", engine.describe());
    }
}

/// A server with a cache folder; what it keeps is written when it ends.
fn server(model: &Arc<Model>, executor: Box<dyn Executor>, folder: &Path, keys: TensorType) -> Scheduler {
    let room = Room { pages: 8, sequences: 2, states: 2, k_type: keys, ..Room::one(8 * PAGE) };
    let room = Room { window_pages: if model.facts.window.is_some() { 8 } else { 0 }, ..room };
    let mut engine = Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap();
    engine.limit_host_cache(16 << 20);
    engine.open_disk_cache(folder, 1 << 30).unwrap();
    Scheduler::start(engine, Policy::default())
}

/// The tokens of an answer, and how many of the prompt were found.
fn answer(server: &Scheduler, owner: u64, prompt: &[u32]) -> (Vec<u32>, usize) {
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    let request =
        Request { limit: Some(9), sampling: Sampling::greedy(), stop, owner, ..Request::new(prompt.to_vec()) };
    let mut tokens = Vec::new();
    for event in server.generate(request) {
        match event {
            Event::Token { token, .. } => tokens.push(token),
            Event::End { usage, .. } => return (tokens, usage.cached_tokens),
            Event::Failed(error) => panic!("{error}"),
            Event::Started { .. } | Event::Read { .. } => {}
        }
    }
    panic!("it has no end")
}

#[test]
fn a_chat_goes_on_after_a_restart() {
    for preset in ["tiny-llama", "tiny-gemma2", "tiny-qwen3next", "tiny-rwkv7"] {
        let model = model(preset);
        for (device, executor) in executors().zip([0, 1]).map(|(executor, device)| (device, executor)) {
            let again = || executors().nth(device).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let start = |executor| server(&model, executor, folder.path(), TensorType::F16);
            let mut prompt = text(3 * PAGE as u32 + 9, 1);
            let (first, found) = answer(&start(executor), 1, &prompt);
            assert_eq!(found, 0);
            let (same, found) = answer(&start(again()), 1, &prompt);
            assert_eq!((same, found), (first.clone(), 3 * PAGE), "{preset}: the same prompt");
            prompt.extend(&first);
            prompt.extend(text(20, 2));
            let elsewhere = tempfile::tempdir().unwrap();
            let (want, _) = answer(&server(&model, again(), elsewhere.path(), TensorType::F16), 1, &prompt);
            let restarted = start(again());
            let (got, found) = answer(&restarted, 1, &prompt);
            let least = if model.facts.has_state() { 3 * PAGE + 9 + 8 } else { 3 * PAGE };
            assert!(
                (least..least + 2).contains(&found),
                "{preset}: {found} tokens were found, {least} should have been"
            );
            assert_eq!(got, want, "{preset}: the next turn");
            assert!(restarted.load().tally.hits.disk as usize >= 3 * PAGE, "{preset}: {:?}", restarted.load().tally);
            assert_eq!(answer(&restarted, 2, &prompt).1, 0, "{preset}: another key");
        }
    }
}

#[test]
fn servers_that_share_a_folder_find_what_the_other_computed() {
    for preset in ["tiny-llama", "tiny-gemma2"] {
        let model = model(preset);
        let cpu = || Box::new(CpuExecutor::new(Arithmetic::Fast));
        let folder = tempfile::tempdir().unwrap();
        let start = || server(&model, cpu(), folder.path(), TensorType::F16);
        let prompt = text(3 * PAGE as u32 + 9, 1);
        // Both have looked through the folder before anything is in it.
        let (reads, writes) = (start(), start());
        let (want, _) = answer(&reads, 1, &prompt);
        // What it keeps is written when it ends.
        drop(reads);
        assert_eq!(answer(&writes, 1, &prompt), (want, 3 * PAGE), "{preset}");
        assert!(writes.load().tally.hits.disk as usize >= 3 * PAGE, "{preset}: {:?}", writes.load().tally);
        assert_eq!(answer(&writes, 2, &prompt).1, 0, "{preset}: another key");
    }
}

#[test]
fn damaged_files_and_those_of_other_caches_are_not_taken() {
    let model = model("tiny-llama");
    let cpu = || Box::new(CpuExecutor::new(Arithmetic::Fast));
    let folder = tempfile::tempdir().unwrap();
    let prompt = text(3 * PAGE as u32 + 9, 1);
    let start = |keys| server(&model, cpu(), folder.path(), keys);
    let (want, _) = answer(&start(TensorType::F16), 1, &prompt);
    assert_eq!(answer(&start(TensorType::F32), 1, &prompt).1, 0, "another type of cache");
    let files = |folder: &Path| std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect::<Vec<_>>();
    for model in files(folder.path()).iter().filter(|path| path.is_dir()) {
        for path in files(model) {
            let mut bytes = std::fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(path, bytes).unwrap();
        }
    }
    // Each lookup ends with the first damaged page, which is computed and kept anew.
    for healed in 0..=3 {
        assert_eq!(answer(&start(TensorType::F16), 1, &prompt), (want.clone(), healed * PAGE));
    }
}

/// Synthetic models with states, and architectures with states that goldens describe: those whose names begin as `KILN_ARCHITECTURES` says,
/// with commas between; an empty one means every architecture. Without it some stand for all.
fn models_with_states() -> Vec<(String, Arc<Model>)> {
    let begin = std::env::var("KILN_ARCHITECTURES").unwrap_or_else(|_| "granitehybrid,lfm2-".to_owned());
    let is_meant = |name: &str| begin.split(',').any(|begin| name.starts_with(begin));
    let presets = ["tiny-rwkv7", "tiny-mamba2", "tiny-qwen3next"].map(|name| (name.to_owned(), model(name)));
    let goldens = tiny::goldens().into_iter().filter(|(name, _)| is_meant(name));
    let goldens = goldens.map(|(name, golden)| (name, Arc::new(tiny::model(&golden))));
    presets.into_iter().chain(goldens.filter(|(_, model)| model.facts.has_state())).collect()
}

fn text_of(model: &Model, n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 37 + 11 + salt * 101) % model.config.vocab) as u32).collect()
}

/// The logits of a second turn after its first one left the device, and after a restart: those of an uncached run, and where bits count
/// the same bits.
#[test]
fn second_turns_of_every_model_with_states_continue_from_host_memory_and_from_disk() {
    for (name, model) in models_with_states() {
        // Bits take a row at a time: the synthetic models stand for all.
        for reproducible in [false, true].into_iter().filter(|wanted| !wanted || name.starts_with("tiny-")) {
            let cpu =
                || -> Box<dyn Executor> { Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(reproducible)) };
            let is_same = |got: &[f32], want: &[f32]| if reproducible { got == want } else { close(got, want) };
            let (first, rest) = (text_of(&model, 2 * PAGE + 9, 1), text_of(&model, 20, 2));
            let second = [&first[..], &rest].concat();
            let mut engine = engine(&model, cpu(), 64 << 20);
            let id = engine.open(7).unwrap();
            let want = last(&mut engine, id, &second);
            engine.close(id);
            read(&mut engine, 1, &first);
            // All eight pages go to others.
            read(&mut engine, 2, &text_of(&model, 7 * PAGE + 9, 3));
            let (got, found) = read(&mut engine, 1, &second);
            assert_eq!(found, 2 * PAGE, "{name}");
            assert!(is_same(&got, &want), "{name}, reproducible: {reproducible}, from host memory");
            drop(engine);

            let folder = tempfile::tempdir().unwrap();
            let start = || server(&model, cpu(), folder.path(), TensorType::F16);
            answer(&start(), 1, &first);
            let restarted = start();
            let (engine_found, got) = restarted
                .with_engine(move |engine| {
                    let id = engine.open(1).unwrap();
                    let found = engine.reuse(id, &second).unwrap();
                    let got = last(engine, id, &second[found..]);
                    engine.close(id);
                    (found, got)
                })
                .unwrap();
            assert_eq!(engine_found, 2 * PAGE + 9, "{name}: the state at the end of the prompt");
            assert!(is_same(&got, &want), "{name}, reproducible: {reproducible}, from disk");
        }
    }
}
