//! What happens when a device fails in the middle of its work, and when somebody asks for what cannot be: one clear error for each
//! request concerned, the others go on or are told, nothing hangs, nothing leaks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod frail;

use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln_engine::Error;
use kiln_engine::arch::{Room, pages_of_window};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Memory};
use kiln_engine::lower::Target;
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{
    Engine, Entry, Event, Events, Place, Policy, Request, Scheduler, StopRule, Wanted, Wish, fit, fit_in,
};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, TensorType};
use kiln_gpu::Error as GpuError;

use crate::frail::{Fault, Frail, Trigger};

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn scheduler(preset: &str, trigger: &Trigger, [pages, sequences]: [usize; 2]) -> (Scheduler, Arc<Mutex<[isize; 3]>>) {
    let (executor, held) = Frail::counted(trigger);
    let room = Room { pages, sequences, states: sequences, ..Room::one(256) };
    let engine = Engine::new(model(preset), executor, room, &mut |_, _| {}).unwrap();
    (Scheduler::start(engine, Policy::default()), held)
}

fn request(tokens: u32, limit: usize) -> Request {
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    let prompt = (0..tokens).map(|i| (i * i * 7 + i * 37 + 11 + tokens * 101) % 256).collect();
    Request { limit: Some(limit), sampling: Sampling::greedy(), stop, ..Request::new(prompt) }
}

/// The tokens of a request, or what was said when it failed: once, and nothing after it.
fn end(events: Events) -> Result<usize, String> {
    let (mut tokens, mut end) = (0, None);
    for event in events {
        assert!(end.is_none(), "{event:?} after the end");
        match event {
            Event::Token { .. } => tokens += 1,
            Event::End { .. } => end = Some(Ok(tokens)),
            Event::Failed(error) => end = Some(Err(error.to_string())),
            Event::Started { .. } | Event::Read { .. } => {}
        }
    }
    end.unwrap()
}

fn nothing_is_left(scheduler: &Scheduler, held: &Mutex<[isize; 3]>) {
    let (free, all) = scheduler.with_engine(|engine| engine.pages()).unwrap();
    assert_eq!(free, all, "every page came back");
    let load = scheduler.load();
    assert_eq!((load.waiting, load.reading, load.writing, load.swapped), (0, 0, 0, 0));
    assert_eq!(held.lock().unwrap()[0], 0, "every step on its way was waited for");
}

/// Prompts are read while others write: every token is drawn on the device, and no logits come back.
#[test]
fn logits_stay_on_the_device_wherever_it_can_draw() {
    let (scheduler, held) = scheduler("tiny-llama", &Trigger::after(Fault::Once, isize::MAX), [64, 8]);
    let row = 4 * scheduler.model().config.vocab as isize;
    let hot = Sampling { seed: Some(3), temperature: 1.2, top_k: 50, ..Sampling::default() };
    let all: Vec<Events> = (0..12)
        .map(|i| {
            let sampling = if i % 2 == 0 { Sampling::greedy() } else { hot.clone() };
            scheduler.generate(Request { sampling, ..request(3 + 10 * i, 20 + i as usize) })
        })
        .collect();
    for (i, events) in all.into_iter().enumerate() {
        assert_eq!(end(events), Ok(20 + i));
    }
    assert!(held.lock().unwrap()[2] < row, "{} bytes were read at once", held.lock().unwrap()[2]);
    // A rule that only the host can keep brings them back.
    let host = Sampling { repeat_penalty: 1.5, repeat_last_n: 64, ..Sampling::greedy() };
    assert_eq!(end(scheduler.generate(Request { sampling: host, ..request(9, 5) })), Ok(5));
    assert!(held.lock().unwrap()[2] >= row);
    nothing_is_left(&scheduler, &held);
}

#[test]
fn a_device_that_is_lost_with_steps_on_their_way_fails_every_request_once() {
    for (preset, fault, words) in [
        ("tiny-llama", Fault::Lost, "the GPU is lost"),
        ("tiny-llama", Fault::Hung, "did not finish within 1 s"),
        ("tiny-rwkv6", Fault::Lost, "the GPU is lost"),
    ] {
        // Ten texts that go on by themselves, and five more that wait for one of them to end.
        let trigger = Trigger::after(fault, 30);
        let (scheduler, held) = scheduler(preset, &trigger, [64, 10]);
        let all: Vec<Events> = (0..15).map(|i| scheduler.generate(request(3 + i, 200))).collect();
        for events in all {
            let why = end(events).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
        nothing_is_left(&scheduler, &held);
        assert!(!scheduler.is_running() && scheduler.load().lost);
        let late = end(scheduler.generate(request(5, 5))).unwrap_err();
        assert!(late.contains(words), "{late}");
        nothing_is_left(&scheduler, &held);
    }
}

#[test]
fn a_device_that_is_lost_while_texts_make_room_for_each_other_fails_every_request_once() {
    // So few pages that texts are swapped out and in all the time: some are in host memory when it happens.
    for steps in [40, 90, 137, 138, 139, 140] {
        let trigger = Trigger::after(Fault::Lost, steps);
        let (scheduler, held) = scheduler("tiny-llama", &trigger, [7, 8]);
        let all: Vec<Events> = (0..8).map(|i| scheduler.generate(request(40 + i, 150))).collect();
        for events in all {
            // A text may have ended before, or wanted more pages than there are.
            if let Err(why) = end(events) {
                assert!(why.contains("the GPU is lost") || why.contains("pages of the cache"), "{why}");
            }
        }
        nothing_is_left(&scheduler, &held);
        assert!(scheduler.load().lost, "{steps}");
    }
}

#[test]
fn an_engine_whose_device_was_lost_is_built_again_and_serves_on() {
    let trigger = Trigger::after(Fault::Lost, 12);
    let (executor, _) = Frail::counted(&trigger);
    let room = Room { pages: 64, sequences: 4, states: 4, ..Room::one(256) };
    let model = model("tiny-llama");
    let engine = Engine::new(Arc::clone(&model), executor, room, &mut |_, _| {}).unwrap();
    let tries = Arc::new(AtomicIsize::new(0));
    let (seen, again) = (Arc::clone(&tries), Arc::clone(&model));
    // The device is not there at once; then the CPU takes its place.
    let rebuild = move |before: usize| {
        seen.fetch_add(1, Ordering::Relaxed);
        if before == 0 {
            return Err(GpuError::NoDevice.into());
        }
        Engine::new(Arc::clone(&again), Box::new(CpuExecutor::new(Arithmetic::Fast)), room, &mut |_, _| {})
    };
    let scheduler = Scheduler::start_lasting(engine, Policy::default(), Box::new(rebuild));
    let all: Vec<Events> = (0..6).map(|i| scheduler.generate(request(3 + i, 100))).collect();
    for events in all {
        let why = end(events).unwrap_err();
        assert!(why.contains("the GPU is lost"), "{why}");
    }
    // Whoever comes while it is being built is told, and nobody waits for ever.
    let mut refused = 0;
    while let Err(why) = end(scheduler.generate(request(5, 5))) {
        assert!(why.contains("the GPU is lost"), "{why}");
        assert!(!scheduler.is_running() && scheduler.load().lost && scheduler.load().rebuilding);
        refused += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(refused > 0 && tries.load(Ordering::Relaxed) == 2);
    assert!(scheduler.is_running() && !scheduler.load().rebuilding);
    assert_eq!(end(scheduler.generate(request(5, 5))), Ok(5));
}

#[test]
fn a_step_that_fails_once_ends_its_own_requests_and_no_others() {
    let trigger = Trigger::after(Fault::Once, 20);
    let (scheduler, held) = scheduler("tiny-llama", &trigger, [64, 4]);
    let all: Vec<Events> = (0..9).map(|i| scheduler.generate(request(3 + i, 60))).collect();
    let ends: Vec<Result<usize, String>> = all.into_iter().map(end).collect();
    let (done, failed): (Vec<_>, Vec<_>) = ends.iter().partition(|end| end.is_ok());
    assert!((1..=4).contains(&failed.len()) && done.len() == 9 - failed.len(), "{ends:?}");
    assert!(failed.iter().all(|end| end.as_ref().is_err_and(|why| why.contains("a step failed"))), "{ends:?}");
    assert!(done.iter().all(|end| **end == Ok(60)), "{ends:?}");
    assert!(scheduler.is_running());
    nothing_is_left(&scheduler, &held);
}

#[test]
fn a_sequence_whose_run_failed_says_so_until_it_goes_back() {
    let trigger = Trigger::after(Fault::Once, 2);
    let (executor, _) = Frail::counted(&trigger);
    let room = Room { pages: 8, sequences: 2, states: 2, ..Room::one(256) };
    let mut engine = Engine::new(model("tiny-llama"), executor, room, &mut |_, _| {}).unwrap();
    let (a, b) = (engine.open(0).unwrap(), engine.open(0).unwrap());
    let entry = |sequence, tokens| Entry { sequence, tokens, wanted: Wanted::Last };
    let first = engine.feed(&[entry(a, &[1, 2, 3])]).unwrap();
    engine.feed(&[entry(b, &[4])]).unwrap();
    assert!(engine.feed(&[entry(a, &[5, 6])]).is_err());
    let why = engine.feed(&[entry(a, &[5, 6])]).unwrap_err().to_string();
    assert!(why.contains("a run with it failed"), "{why}");
    assert!(engine.fork(a).is_err() && engine.swap_out(a).is_err() && engine.save_state(a).is_err());
    engine.feed(&[entry(b, &[7])]).unwrap();
    engine.truncate(a, 0).unwrap();
    assert_eq!(engine.feed(&[entry(a, &[1, 2, 3])]).unwrap(), first);
}

#[test]
fn a_prompt_of_more_pages_than_there_are_gets_both_numbers() {
    let trigger = Trigger::after(Fault::Once, isize::MAX);
    let (scheduler, held) = scheduler("tiny-llama", &trigger, [2, 2]);
    let why = end(scheduler.generate(request(200, 1))).unwrap_err();
    assert!(why.contains("4 pages of the cache are needed, 2 of 2 are free"), "{why}");
    assert_eq!(end(scheduler.generate(request(100, 3))), Ok(3));
    nothing_is_left(&scheduler, &held);
}

#[test]
fn a_cache_type_that_heads_cannot_have_is_refused() {
    let room = Room { k_type: TensorType::Q8_0, ..Room::one(64) };
    let (executor, _) = Frail::counted(&Trigger::after(Fault::Once, 0));
    let why = Engine::new(model("tiny-llama"), executor, room, &mut |_, _| {}).err().unwrap().to_string();
    assert!(why.contains("Q8_0") && why.contains("blocks of 32") && why.contains("16 elements"), "{why}");
}

fn wish(context: usize) -> Wish {
    Wish { context: Some(context), sequences: 1, caches: [TensorType::F32; 2] }
}

/// An executor with so much memory.
fn on(memory: u64) -> Frail {
    let inner = CpuExecutor::new(Arithmetic::Fast);
    Frail { inner, trigger: Trigger::after(Fault::Once, 0), held: Arc::default(), memory }
}

#[test]
fn caches_of_layers_with_a_window_do_not_grow_with_the_context() {
    let model = model("tiny-gemma2");
    let place = |memory| Place::thought(Target::cpu(), 64, memory);
    let fits = |context| fit_in(&model, &place(None), &wish(context)).unwrap();
    let (short, long) = (fits(448), fits(512));
    assert_eq!([&short, &long].map(|fit| fit.room.window_pages), [2 * pages_of_window(32) + 1; 2]);
    assert!(short.page() > 0 && short.window_page() > 0);
    assert_eq!(long.cache_bytes() - short.cache_bytes(), short.page(), "one page, and none of it for windows");
    // A context of two pages has no more of either.
    assert_eq!(fits(128).room.window_pages, 2);
    // What fits is found with both: four pages, and four of windows.
    let free = long.bytes() - 4 * long.page() - long.window_page();
    let place = place(Some(Memory { free, total: 0, place: "here" }));
    let why = fit_in(&model, &place, &wish(512)).unwrap_err();
    assert!(matches!(why, Error::DoesNotFit { largest: 256, .. }), "{why}");
}

#[test]
fn a_context_that_does_not_fit_names_the_largest_that_does() {
    let model = model("tiny-llama");
    let most = model.config.context;
    let whole = fit(&model, &on(1 << 40), &wish(most)).unwrap();
    // Three pages fit; a twentieth of all memory is left to others.
    let few = on((whole.bytes() - whole.page() * whole.room.pages as u64 + 3 * whole.page()) * 20 / 19 + 64);
    let why = fit(&model, &few, &wish(most)).unwrap_err();
    assert!(matches!(why, Error::DoesNotFit { context, largest: 192, .. } if context == most), "{why}");
    assert!(why.to_string().contains("--ctx-size 192 fits"), "{why}");
    assert_eq!(fit(&model, &few, &wish(192)).unwrap().room.context, 192);
}
