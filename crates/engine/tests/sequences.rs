//! Many sequences in one engine: together they say what each says alone, whatever they share, and nothing leaks.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::Arc;

use kiln_engine::Error;
use kiln_engine::arch::{PAGE, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, GpuExecutor, Options, Order};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, SequenceId, Wanted};
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::Gguf;
use kiln_kernels::sample::Row;

use device::{device, gpu, gpu_with};

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>, pages: usize, sequences: usize) -> Engine {
    let room = Room { pages, sequences, states: sequences, ..Room::one(256) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

/// Tokens without a pattern.
fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11 + salt * 101) % 256).collect()
}

fn last(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

fn alone(model: &Arc<Model>, tokens: &[u32]) -> Vec<f32> {
    let mut engine = engine(model, cpu(), 4, 1);
    let sequence = engine.open(0).unwrap();
    last(&mut engine, sequence, tokens)
}

fn close(got: &[f32], want: &[f32]) -> bool {
    let (sum, norm) = got
        .iter()
        .zip(want)
        .fold((0.0, 0.0), |(s, n), (g, w)| (s + f64::from(g - w).powi(2), n + f64::from(*w).powi(2)));
    got.len() == want.len() && sum < 1e-6 * norm
}

#[test]
fn sequences_of_different_lengths_together_are_as_each_alone() {
    let recurrent = ["tiny-rwkv6", "tiny-rwkv7", "tiny-rwkv6qwen2", "tiny-arwkv7", "tiny-mamba2", "tiny-qwen3next"];
    for preset in ["tiny-llama", "tiny-deepseek2"].into_iter().chain(recurrent) {
        together_as_alone(preset);
    }
}

fn together_as_alone(preset: &str) {
    let model = model(preset);
    let texts: Vec<Vec<u32>> = [1, 70, 3, 130, 9].into_iter().zip(0..).map(|(n, salt)| text(n + 1, salt)).collect();
    let want: Vec<Vec<f32>> = texts.iter().map(|t| alone(&model, t)).collect();
    for executor in [Some(cpu()), gpu().map(|(gpu, _)| gpu)].into_iter().flatten() {
        let mut engine = engine(&model, executor, 16, 8);
        let ids: Vec<SequenceId> = texts.iter().map(|_| engine.open(0).unwrap()).collect();
        // Prompts of one, several and many tokens at once; then all go on by one token, beside a prompt in two pieces.
        let prompts: Vec<Entry<'_>> = ids
            .iter()
            .zip(&texts)
            .map(|(sequence, t)| Entry { sequence: *sequence, tokens: &t[..t.len() - 1], wanted: Wanted::Nothing })
            .collect();
        assert!(engine.feed(&prompts).unwrap().iter().all(Vec::is_empty));
        let late = engine.open(0).unwrap();
        let (first, second) = texts[3].split_at(77);
        let mut all: Vec<Entry<'_>> = ids
            .iter()
            .zip(&texts)
            .map(|(sequence, t)| Entry { sequence: *sequence, tokens: &t[t.len() - 1..], wanted: Wanted::Last })
            .collect();
        all.insert(2, Entry { sequence: late, tokens: first, wanted: Wanted::Nothing });
        let mut got = engine.feed(&all).unwrap();
        assert!(got.remove(2).is_empty());
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!(close(got, want), "{preset}: sequence {i} on {}", engine.describe());
        }
        assert!(close(&last(&mut engine, late, second), &want[3]), "{preset}: a prompt in pieces");
        // Padding has left nothing behind.
        let more = [&texts[3][..], &[9]].concat();
        assert!(close(&last(&mut engine, late, &[9]), &alone(&model, &more)), "{preset}: one token more");
        ids.into_iter().chain([late]).for_each(|id| engine.close(id));
        assert_eq!(engine.pages().0, engine.pages().1, "every page came back");
    }
}

/// What two texts say, greedily, with steps in this order.
fn written(model: &Arc<Model>, order: Order) -> Option<Vec<Vec<u32>>> {
    let (executor, instance) = gpu_with(Options { order, ..Options::default() })?;
    let mut engine = engine(model, executor, 8, 2);
    let texts: Vec<(SequenceId, u32)> = (0..2).map(|i| (engine.open(0).unwrap(), 17 + 31 * i)).collect();
    for (i, (sequence, _)) in texts.iter().enumerate() {
        last(&mut engine, *sequence, &text(5 + 60 * i as u32, i as u32));
    }
    // Again, with counters that the first time left behind; then one alone, as most texts are.
    let mut all = engine.go_on(&texts, 9, Row::default()).unwrap();
    all.extend(engine.go_on(&texts[1..], 4, Row::default()).unwrap());
    drop(engine);
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
    Some(all)
}

#[test]
fn steps_that_hand_over_to_each_other_say_what_steps_between_barriers_say() {
    for preset in ["tiny-llama", "tiny-qwen3moe", "tiny-rwkv7"] {
        let model = model(preset);
        let Some(want) = written(&model, Order::Barriers) else { return };
        assert_eq!(written(&model, Order::DependentLaunch), Some(want), "{preset}");
    }
}

#[test]
fn a_step_that_waits_in_vain_is_run_again_between_barriers() {
    // A recurrent state that such a step has written over is computed again.
    for preset in ["tiny-llama", "tiny-rwkv7"] {
        let model = model(preset);
        let Some(want) = written(&model, Order::Barriers) else { return };
        assert_eq!(written(&model, Order::Stalls), Some(want), "{preset}");
    }
}

#[test]
fn kernels_of_the_device_hand_over_as_they_should() {
    let Some((device, instance)) = device() else { return };
    if device.adapter.caps.memory_model {
        assert!(kiln_kernels::dependent_launch::prove(&device).unwrap(), "every stage sees what the one before wrote");
    }
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
}

#[test]
fn a_common_beginning_is_computed_once_and_a_fork_goes_its_own_way() {
    let model = model("tiny-llama");
    let (a, b) = (text(150, 1), [text(150, 1), text(9, 2)].concat());
    for executor in [Some(cpu()), gpu().map(|(gpu, _)| gpu)].into_iter().flatten() {
        let mut engine = engine(&model, executor, 8, 4);
        let first = engine.open(5).unwrap();
        assert_eq!(engine.reuse(first, &a).unwrap(), 0);
        last(&mut engine, first, &a);
        let second = engine.open(5).unwrap();
        assert_eq!(engine.reuse(second, &b).unwrap(), 2 * PAGE);
        assert!(close(&last(&mut engine, second, &b[2 * PAGE..]), &alone(&model, &b)));
        assert_eq!(engine.pages().0, 8 - 4, "two pages are shared");
        let stranger = engine.open(6).unwrap();
        assert_eq!(engine.reuse(stranger, &a).unwrap(), 0, "owners do not share");

        // Both write to the page they share, each its own token.
        let fork = engine.fork(first).unwrap();
        let entries = [first, fork].map(|sequence| Entry { sequence, tokens: &[0][..], wanted: Wanted::Last });
        let entries = [Entry { tokens: &[7], ..entries[0] }, Entry { tokens: &[99], ..entries[1] }];
        let got = engine.feed(&entries).unwrap();
        for (got, token) in got.iter().zip([7, 99]) {
            assert!(close(got, &alone(&model, &[&a[..], &[token]].concat())), "token {token}");
        }
        [first, second, stranger, fork].into_iter().for_each(|id| engine.close(id));
        assert_eq!(engine.pages(), (8, 8));
        let again = engine.open(5).unwrap();
        assert_eq!(engine.reuse(again, &a).unwrap(), 2 * PAGE, "closed sequences leave their pages to be found");
    }
}

#[test]
fn the_end_of_a_prefix_is_evicted_before_its_beginning() {
    let mut engine = engine(&model("tiny-llama"), cpu(), 4, 2);
    let prefix = text(3 * PAGE as u32 + 1, 1);
    let first = engine.open(0).unwrap();
    last(&mut engine, first, &prefix);
    engine.close(first);
    // One page was never full, so it is free; this takes one of the three beside it.
    let other = engine.open(0).unwrap();
    last(&mut engine, other, &text(2 * PAGE as u32, 2));
    let again = engine.open(0).unwrap();
    assert_eq!(engine.reuse(again, &prefix).unwrap(), 2 * PAGE, "only the last page of the prefix is gone");
}

#[test]
fn texts_with_beginnings_in_common_go_on_as_each_does_alone() {
    let model = model("tiny-llama");
    // Two beginnings in turn, so that those who share one are no neighbours.
    let texts: Vec<Vec<u32>> = (0..9).map(|i| [text(140, i % 2), text(3 + i, 20 + i)].concat()).collect();
    for executor in [|| Some(cpu()), || gpu().map(|(gpu, _)| gpu)] {
        let Some(one) = executor() else { continue };
        let mut engine = engine(&model, one, 40, 9);
        let mut going = Vec::new();
        for (tokens, next) in texts.iter().zip(50..) {
            let id = engine.open(5).unwrap();
            let known = engine.reuse(id, tokens).unwrap();
            assert_eq!(known, if going.len() < 2 { 0 } else { 2 * PAGE });
            last(&mut engine, id, &tokens[known..]);
            going.push((id, next));
        }
        let together = engine.go_on(&going, 8, Row::default()).unwrap();
        for (i, (tokens, (_, next))) in texts.iter().zip(&going).enumerate() {
            let mut alone = self::engine(&model, executor().unwrap(), 4, 1);
            let id = alone.open(0).unwrap();
            last(&mut alone, id, tokens);
            let want = alone.go_on(&[(id, *next)], 8, Row::default()).unwrap().remove(0);
            assert_eq!(together[i], want, "text {i} on {}", engine.describe());
        }
    }
}

#[test]
fn sequences_come_back_from_host_memory_as_they_went() {
    let model = model("tiny-llama");
    let a = text(100, 3);
    for executor in [Some(cpu()), gpu().map(|(gpu, _)| gpu)].into_iter().flatten() {
        let mut engine = engine(&model, executor, 3, 2);
        let first = engine.open(0).unwrap();
        last(&mut engine, first, &a[..99]);
        engine.swap_out(first).unwrap();
        assert!(engine.is_swapped(first) && engine.pages().0 == 3);
        let other = engine.open(0).unwrap();
        last(&mut engine, other, &text(150, 4));
        let full = engine.swap_in(first).unwrap_err();
        assert!(matches!(full, Error::NoRoom { needed: 2, free: 0, all: 3, .. }), "{full}");
        assert!(engine.feed(&[Entry { sequence: first, tokens: &a[99..], wanted: Wanted::Last }]).is_err());
        engine.close(other);
        engine.swap_in(first).unwrap();
        assert!(close(&last(&mut engine, first, &a[99..]), &alone(&model, &a)));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers_and_changes_nothing() {
    let model = model("tiny-llama");
    let mut engine = engine(&model, cpu(), 2, 2);
    let (a, b) = (engine.open(0).unwrap(), engine.open(0).unwrap());
    last(&mut engine, a, &text(100, 0));
    let tokens = text(1, 0);
    let full = engine.feed(&[Entry { sequence: b, tokens: &tokens, wanted: Wanted::Last }]).unwrap_err();
    assert!(matches!(full, Error::NoRoom { needed: 1, free: 0, all: 2, .. }), "{full}");
    let twice = [Entry { sequence: a, tokens: &tokens, wanted: Wanted::Last }; 2];
    assert!(engine.feed(&twice).unwrap_err().to_string().contains("twice"));
    let long = text(200, 0);
    let error = engine.feed(&[Entry { sequence: a, tokens: &long, wanted: Wanted::Last }]).unwrap_err().to_string();
    assert!(error.contains("300 tokens") && error.contains("256"), "{error}");
    engine.close(a);
    assert!(engine.feed(&[Entry { sequence: a, tokens: &tokens, wanted: Wanted::Last }]).is_err(), "it was closed");
    last(&mut engine, b, &text(128, 0));
}

#[test]
fn fifty_prompts_of_different_lengths_take_no_more_memory_than_two() {
    let Some((device, _instance)) = device() else { return };
    let mut engine = engine(&model("tiny-llama"), Box::new(GpuExecutor::new(Arc::clone(&device))), 4, 1);
    let read = |engine: &mut Engine, n: u32| {
        let id = engine.open(u64::from(n)).unwrap();
        last(engine, id, &text(n, n));
        engine.close(id);
        device.held_bytes()
    };
    read(&mut engine, 3);
    let two = read(&mut engine, 9);
    let fifty = (0..48).map(|i| read(&mut engine, 10 + 5 * i)).last().unwrap();
    // Inputs and results of the plans that are kept ready, and nothing that grows with their tokens.
    assert!(fifty - two < 256 << 10, "{two} bytes became {fifty}");
}

#[test]
fn an_engine_that_has_rested_goes_on_where_it_was() {
    let model = model("tiny-llama");
    let want = alone(&model, &text(90, 1));
    let mut engine = engine(&model, cpu(), 8, 2);
    let sequence = engine.open(0).unwrap();
    last(&mut engine, sequence, &text(90, 1)[..70]);
    engine.rest();
    assert!(close(&last(&mut engine, sequence, &text(90, 1)[70..]), &want));
    engine.rest();
    engine.rest();
    let again = engine.open(0).unwrap();
    assert!(close(&last(&mut engine, again, &text(90, 1)), &want));
}
