//! Layers that see the last tokens alone keep only pages that a token to come can see, and texts say what they say where nothing is
//! ever given back.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::Arc;

use kiln_engine::Error;
use kiln_engine::arch::{PAGE, Room, pages_of_window};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, Event, Events, Policy, Request, Scheduler, SequenceId, StopRule, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::Gguf;
use kiln_kernels::sample::Row;

use device::gpu;

/// Tokens that the layers with a window of the tiny models see.
const WINDOW: usize = 32;
const CONTEXT: usize = 512;

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 23);
    let model = Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap();
    assert_eq!(model.facts.window, Some(WINDOW));
    Arc::new(model)
}

fn executors() -> impl Iterator<Item = Box<dyn Executor>> {
    let cpu: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Fast));
    [Some(cpu), gpu().map(|(gpu, _)| gpu)].into_iter().flatten()
}

/// An engine whose layers with a window have so many pages; with 0 they lie in those of all others, and nothing is given back.
fn engine(model: &Arc<Model>, executor: Box<dyn Executor>, window_pages: usize) -> Engine {
    let room = Room { window_pages, ..Room::for_sequences(4, CONTEXT) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

fn text(n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 37 + 11 + salt * 101) % 256) as u32).collect()
}

fn feed(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

/// The logits behind a text that is read at once where nothing is given back.
fn alone(model: &Arc<Model>, tokens: &[u32]) -> Vec<f32> {
    let mut engine = engine(model, Box::new(CpuExecutor::new(Arithmetic::Fast)), 0);
    let sequence = engine.open(0).unwrap();
    feed(&mut engine, sequence, tokens)
}

#[track_caller]
fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len());
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let (error, norm) = (square(&mut got.iter().zip(want).map(|(g, w)| g - w)), square(&mut want.iter().copied()));
    assert!(error < 1e-6 * norm, "{what}: {:.1e}", error / norm);
}

/// Pages that a text of so many tokens must have, and no others: those of the keys that its next token sees.
fn seen(tokens: usize) -> usize {
    let first = (tokens + 1).saturating_sub(WINDOW) / PAGE;
    tokens.div_ceil(PAGE) - first
}

fn taken(engine: &Engine) -> usize {
    let (free, all) = engine.window_pages().unwrap();
    all - free
}

#[test]
fn pages_are_held_for_as_long_as_a_token_can_see_them_and_no_longer() {
    for preset in ["tiny-gemma2", "tiny-gpt-oss"] {
        let model = model(preset);
        let (a, b) = (text(500, 1), text(500, 2));
        for executor in executors() {
            // Two texts, each as long as eight pages, in five pages: what one gives back the other writes to.
            let mut engine = engine(&model, executor, 5);
            let ids = [0, 1].map(|owner| engine.open(owner).unwrap());
            let mut read = 0;
            // Pieces that end before, at and behind the ends of pages, and where the window leaves one.
            for piece in [1, 62, 1, 1, 30, 1, 1, 63, 64, 65, 2, 100, 1] {
                for (id, text) in ids.iter().zip([&a, &b]) {
                    let got = feed(&mut engine, *id, &text[read..read + piece]);
                    let want = alone(&model, &text[..read + piece]);
                    assert_close(&got, &want, &format!("{preset} at {read} + {piece} on {}", engine.describe()));
                }
                read += piece;
                assert_eq!(taken(&engine), 2 * seen(read), "{preset}: after {read} tokens");
            }
            ids.into_iter().for_each(|id| engine.close(id));
            let (free, all) = engine.window_pages().unwrap();
            assert_eq!((free, engine.pages().0), (all, engine.pages().1), "every page came back");
        }
    }
}

#[test]
fn texts_that_go_on_by_themselves_say_the_same_through_a_window() {
    let model = model("tiny-gemma2");
    for (executor, other) in executors().zip(executors()) {
        let written = |mut engine: Engine| {
            let texts = [0, 1].map(|i| {
                let id = engine.open(i as u64).unwrap();
                feed(&mut engine, id, &text(40 + 70 * i, i));
                (id, 17 + 31 * i as u32)
            });
            let tokens = engine.go_on(&texts, 200, Row::default()).unwrap();
            (tokens, engine, texts.map(|(id, _)| id))
        };
        let (want, ..) = written(engine(&model, executor, 0));
        let (got, mut engine, ids) = written(engine(&model, other, 6));
        assert_eq!(got, want);
        assert_eq!(taken(&engine), ids.iter().map(|id| seen(engine.length(*id))).sum::<usize>());
        let all = [engine.tokens(ids[0]), &[3]].concat();
        assert_close(&feed(&mut engine, ids[0], &[3]), &alone(&model, &all), "one more token");
    }
}

#[test]
fn beginnings_are_shared_as_long_as_their_ends_are_still_seen() {
    let model = model("tiny-gemma2");
    let (a, b) = (text(300, 1), [text(260, 1), text(30, 7)].concat());
    for executor in executors() {
        let mut engine = engine(&model, executor, 7);
        let first = engine.open(0).unwrap();
        feed(&mut engine, first, &a);
        let second = engine.open(0).unwrap();
        // Of the beginning only one page is needed in layers with a window.
        assert_eq!(engine.reuse(second, &b).unwrap(), 4 * PAGE);
        assert_eq!(taken(&engine), 1 + seen(300));
        assert_close(&feed(&mut engine, second, &b[4 * PAGE..]), &alone(&model, &b), "a shared beginning");
        engine.close(first);
        engine.close(second);
        // A stranger takes every page; of the beginning nothing is left that could be seen.
        let stranger = engine.open(9).unwrap();
        feed(&mut engine, stranger, &text(7 * PAGE, 5));
        let third = engine.open(0).unwrap();
        assert_eq!(engine.reuse(third, &b).unwrap(), 0);
        feed(&mut engine, third, &b[..200]);
        assert_close(&feed(&mut engine, third, &b[200..]), &alone(&model, &b), "read again");
    }
}

#[test]
fn forks_swaps_and_saved_states_keep_what_a_window_sees() {
    let model = model("tiny-gemma2");
    let a = text(210, 3);
    for (executor, other) in executors().zip(executors()) {
        let mut first = engine(&model, executor, 8);
        let id = first.open(0).unwrap();
        feed(&mut first, id, &a[..209]);
        let fork = first.fork(id).unwrap();
        for (id, token) in [(id, a[209]), (fork, 99)] {
            let want = alone(&model, &[&a[..209], &[token]].concat());
            assert_close(&feed(&mut first, id, &[token]), &want, "a fork goes its own way");
        }
        first.swap_out(id).unwrap();
        assert_eq!(taken(&first), seen(210), "the fork alone is left");
        feed(&mut first, fork, &text(150, 4));
        first.swap_in(id).unwrap();
        let more = [&a[..], &[5]].concat();
        assert_close(&feed(&mut first, id, &[5]), &alone(&model, &more), "back from host memory");

        let state = first.save_state(id).unwrap();
        let mut second = engine(&model, other, 3);
        let id = second.open(0).unwrap();
        second.load_state(id, &state).unwrap();
        assert_eq!(taken(&second), seen(211));
        let more = [&more[..], &[6]].concat();
        assert_close(&feed(&mut second, id, &[6]), &alone(&model, &more), "from a saved state");
    }
}

#[test]
fn a_text_goes_back_while_what_it_would_see_is_there_and_else_says_so() {
    let model = model("tiny-gemma2");
    let a = text(300, 6);
    for executor in executors() {
        let mut engine = engine(&model, executor, 6);
        let id = engine.open(0).unwrap();
        feed(&mut engine, id, &a);
        // Within the pages that it holds, and to one that it gave back and nobody has taken.
        for length in [299, 290, 150, 64] {
            engine.truncate(id, length).unwrap();
            assert_eq!(taken(&engine), seen(length), "at {length}");
            let want = alone(&model, &[&a[..length], &[7]].concat());
            assert_close(&feed(&mut engine, id, &[7]), &want, &format!("back at {length}"));
            engine.truncate(id, length).unwrap();
            feed(&mut engine, id, &a[length..]);
        }
        let other = engine.open(1).unwrap();
        feed(&mut engine, other, &text(5 * PAGE, 8));
        let error = engine.truncate(id, 100).unwrap_err();
        assert!(matches!(error, Error::NoWayBack { length: 300, asked: 100, .. }), "{error}");
        // Nothing has changed.
        let want = alone(&model, &[&a[..], &[9]].concat());
        assert_close(&feed(&mut engine, id, &[9]), &want, "as if it had not been asked");
        engine.truncate(id, 0).unwrap();
        engine.close(other);
        assert_eq!(taken(&engine), 0);
        assert_close(&feed(&mut engine, id, &a[..200]), &alone(&model, &a[..200]), "from the beginning");
    }
}

fn greedy(prompt: Vec<u32>) -> Request {
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    Request { limit: Some(90), sampling: Sampling::greedy(), stop, ..Request::new(prompt) }
}

fn tokens(events: Events) -> Vec<u32> {
    let token = |event| match event {
        Event::Token { token, .. } => Some(token),
        Event::Failed(error) => panic!("{error}"),
        _ => None,
    };
    events.into_iter().filter_map(token).collect()
}

#[test]
fn many_texts_share_an_engine_whose_windows_are_small() {
    let model = model("tiny-gpt-oss");
    for (executor, other) in executors().zip(executors()) {
        let room = Room::for_sequences(3, CONTEXT).with_windows(model.facts.window, 256);
        assert_eq!(room.window_pages, 2 * 3 * pages_of_window(WINDOW) + 4);
        let of = |room: Room, executor| {
            let engine = Engine::new(Arc::clone(&model), executor, room, &mut |_, _| {}).unwrap();
            let scheduler = Scheduler::start(engine, Policy::default());
            let asked: Vec<Events> = (0..6).map(|i| scheduler.generate(greedy(text(30 + 70 * i, i)))).collect();
            let tokens: Vec<Vec<u32>> = asked.into_iter().map(tokens).collect();
            (tokens, scheduler.with_engine(|engine| engine.window_pages()).unwrap())
        };
        let (got, pages) = of(room, executor);
        let (free, all) = pages.unwrap();
        assert_eq!(free, all);
        let (want, _) = of(Room::for_sequences(3, CONTEXT), other);
        assert_eq!(got, want);
    }
}
