//! What happens when a device fails in the middle of its work, and when somebody asks for what cannot be: one clear error for each
//! request concerned, the others go on or are told, nothing hangs, nothing leaks.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod frail;

use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln_engine::Error;
use kiln_engine::arch::{Room, pages_of_window};
use kiln_engine::embed::Pooling;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Memory};
use kiln_engine::lower::Target;
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{
    EmbedRequest, Engine, Entry, Event, Events, Place, Policy, Request, Scheduler, StopRule, Wanted, Wish, fit, fit_in,
};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, TensorType};
use kiln_gpu::Error as GpuError;

use crate::frail::{Counts, Fault, Frail, Trigger};

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn scheduler(preset: &str, trigger: &Trigger, [pages, sequences]: [usize; 2]) -> (Scheduler, Arc<Mutex<Counts>>) {
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

fn nothing_is_left(scheduler: &Scheduler, held: &Mutex<Counts>) {
    let (free, all) = scheduler.with_engine(|engine| engine.pages()).unwrap();
    assert_eq!(free, all, "every page came back");
    let load = scheduler.load();
    assert_eq!((load.waiting, load.reading, load.writing, load.swapped), (0, 0, 0, 0));
    assert_eq!(held.lock().unwrap().on_their_way, 0, "every step on its way was waited for");
}

/// Prompts are read while others write: every token is drawn on the device, and no logits come back.
#[test]
fn logits_stay_on_the_device_wherever_it_can_draw() {
    let (scheduler, held) = scheduler("tiny-llama", &Trigger::after(Fault::Once, isize::MAX), [64, 8]);
    let row = 4 * scheduler.model().config.vocab;
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
    assert!(held.lock().unwrap().largest_read < row, "{} bytes were read at once", held.lock().unwrap().largest_read);
    // A rule that only the host can keep brings them back.
    let host = Sampling { repeat_penalty: 1.5, repeat_last_n: 64, ..Sampling::greedy() };
    assert_eq!(end(scheduler.generate(Request { sampling: host, ..request(9, 5) })), Ok(5));
    assert!(held.lock().unwrap().largest_read >= row);
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
    Wish { context: Some(context), expected: None, sequences: 1, caches: [TensorType::F32; 2] }
}

/// An executor with so much memory.
fn on(memory: u64) -> Frail {
    let inner = CpuExecutor::new(Arithmetic::Fast);
    Frail { inner, memory, ..Frail::new(&Trigger::after(Fault::Once, 0)) }
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

/// A model with a context of 131,072 tokens.
fn long_model() -> Model {
    let preset = Preset { context: 128 << 10, ..*Preset::from_name("tiny-llama").unwrap() };
    let synth = Synth::new(&preset, Recipe::from_name("F32").unwrap(), 11);
    Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap()
}

/// What a model gets of so much memory where no context is asked for: tokens of context, and of the page pool.
fn by_default(model: &Model, free: Option<u64>, sequences: usize, expected: Option<usize>) -> [usize; 2] {
    let memory = free.map(|free| Memory { free, total: 0, place: "here" });
    let place = Place::thought(Target::cpu(), 64, memory);
    let wish = Wish { context: None, expected, sequences, caches: [TensorType::F32; 2] };
    let room = fit_in(model, &place, &wish).unwrap().room;
    [room.context, room.pages * 64]
}

#[test]
fn the_default_context_is_the_models_own_as_far_as_memory_allows() {
    let model = long_model();
    let own = model.config.context;
    assert_eq!(own, 128 << 10);
    // Eight sequences share the memory of one that is as long as it may be.
    assert_eq!(by_default(&model, None, 1, None), [own, own]);
    assert_eq!(by_default(&model, None, 8, None), [own, own]);
    // Many sequences have their share each.
    assert_eq!(by_default(&model, None, 64, None), [own, 64 * 4096]);
    // Who knows how much is needed gets that, in whole pages.
    assert_eq!(by_default(&model, None, 1, Some(100)), [100, 128]);

    let whole = fit_in(&model, &Place::thought(Target::cpu(), 64, None), &Wish { context: None, ..wish(1) }).unwrap();
    let caches = whole.cache_bytes();
    // All of it and as much again for others: the whole context. Without the latter half of it.
    assert_eq!(by_default(&model, Some(whole.bytes() + caches), 1, None), [own, own]);
    assert_eq!(by_default(&model, Some(whole.bytes()), 1, None), [own / 2, own / 2]);
    // Where memory is short, 8,192 tokens come before anything is left to others.
    let short = whole.bytes() - caches + caches / 16;
    assert_eq!(by_default(&model, Some(short), 1, None), [8192, 8192]);
    let shorter = whole.bytes() - caches + caches / 32;
    assert_eq!(by_default(&model, Some(shorter), 1, None), [4096, 4096]);
}

#[test]
fn sequences_that_ask_for_a_context_share_one_pool() {
    let model = long_model();
    let pool = |context, sequences| {
        let wish = Wish { sequences, ..wish(context) };
        fit_in(&model, &Place::thought(Target::cpu(), 64, None), &wish).unwrap().room.pages * 64
    };
    assert_eq!(pool(3072, 64), 64 * 3072, "short ones all fit whole");
    assert_eq!(pool(65536, 8), 65536, "the longest one fits, and so do eight of a share each");
    assert_eq!(pool(65536, 32), 32 * 4096);
}

/// The tokens of all requests of an engine whose device stalls after so many steps.
fn tokens_with(fault: Fault, preset: &str, steps: isize) -> Vec<Vec<u32>> {
    let trigger = Trigger::after(fault, steps);
    let (scheduler, held) = scheduler(preset, &trigger, [64, 4]);
    let all: Vec<Events> = (0..4).map(|i| scheduler.generate(request(3 + 20 * i, 24))).collect();
    let tokens = all.into_iter().map(|events| {
        let of = |event: Event| match event {
            Event::Token { token, .. } => Some(token),
            Event::Failed(error) => panic!("{preset}, {steps} steps: {error}"),
            _ => None,
        };
        events.filter_map(of).collect()
    });
    let tokens = tokens.collect();
    nothing_is_left(&scheduler, &held);
    tokens
}

#[test]
fn a_step_that_stalls_runs_again_and_nobody_notices_also_where_states_were_written_over() {
    for preset in ["tiny-llama", "tiny-gemma2", "tiny-rwkv6", "tiny-mamba2", "tiny-qwen3next"] {
        let want = tokens_with(Fault::Stall, preset, isize::MAX);
        assert!(want.iter().all(|tokens| tokens.len() == 24));
        // While prompts are prefilled, while they are mixed with decode steps, and in run-ahead decode.
        for steps in [0, 1, 3, 9, 17] {
            assert_eq!(tokens_with(Fault::Stall, preset, steps), want, "{preset} stalled after {steps} steps");
        }
    }
}

#[test]
fn a_step_whose_activations_leave_their_range_runs_again_with_plans_that_were_made_again() {
    for preset in ["tiny-llama", "tiny-rwkv6", "tiny-qwen3next"] {
        let want = tokens_with(Fault::Range, preset, isize::MAX);
        for steps in [0, 3, 9, 17] {
            assert_eq!(tokens_with(Fault::Range, preset, steps), want, "{preset} after {steps} steps");
        }
    }
}

/// A mistake in Kiln ends the requests that run. It must not end the server, nor let it say that it is ready where it is not.
#[test]
fn an_engine_that_panics_is_built_again_and_serves_on_or_says_that_it_is_gone() {
    let (room, model) = (Room { pages: 64, sequences: 4, ..Room::one(256) }, model("tiny-llama"));
    let make = |steps| {
        let (executor, _) = Frail::counted(&Trigger::after(Fault::Panic, steps));
        Engine::new(Arc::clone(&model), executor, room, &mut |_, _| {}).unwrap()
    };
    for steps in [0, 1, 5, 20] {
        let (again, tries) = (Arc::clone(&model), Arc::new(AtomicIsize::new(0)));
        let tried = Arc::clone(&tries);
        let rebuild = move |_| {
            // Building it panics at first, too.
            assert!(tried.fetch_add(1, Ordering::Relaxed) > 0, "building panics, as the test wants it");
            let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
            Engine::new(Arc::clone(&again), executor, room, &mut |_, _| {})
        };
        let scheduler = Scheduler::start_lasting(make(steps), Policy::default(), Box::new(rebuild));
        let all: Vec<Events> = (0..6).map(|i| scheduler.generate(request(3 + i, 100))).collect();
        for events in all {
            let why = end(events).unwrap_err();
            assert!(why.contains("the engine panicked"), "{why}");
        }
        let start = std::time::Instant::now();
        while !scheduler.is_running() {
            assert!(start.elapsed() < Duration::from_secs(60), "it is not built again");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(end(scheduler.generate(request(5, 7))), Ok(7), "after {steps} steps");
        assert_eq!(tries.load(Ordering::Relaxed), 2);
    }
    // Where nobody builds it again, everybody learns so, now and later.
    let scheduler = Scheduler::start(make(5), Policy::default());
    for tokens in [4, 5] {
        let why = end(scheduler.generate(request(tokens, 100))).unwrap_err();
        assert!(why.contains("the engine panicked"), "{why}");
        assert!(!scheduler.is_running() && scheduler.load().lost && !scheduler.load().rebuilding);
    }
    assert!(scheduler.with_engine(|engine| engine.pages()).is_err());
}

/// Sequences that grow beyond the prefix they share are bound to another plan when a step of them is repeated.
#[test]
fn a_step_that_stalls_runs_again_with_the_plan_that_fits_by_then() {
    const PAGE: u32 = 64;
    let written = |stalls: isize| {
        let trigger = Trigger::after(Fault::Stall, isize::MAX);
        let frail = Frail { shares_from: 2, ..Frail::new(&trigger) };
        let held = Arc::clone(&frail.held);
        let room = Room { pages: 64, sequences: 2, ..Room::one(1024) };
        let mut engine = Engine::new(model("tiny-llama"), Box::new(frail), room, &mut |_, _| {}).unwrap();
        // Two of the four pages of each are the same: two of eight are saved. Two of ten are not enough.
        let texts: Vec<_> = (0..2)
            .map(|own| {
                let token = |i: u32| if i < 2 * PAGE { i * 7 % 251 } else { (i * 11 + own * 13) % 241 };
                let tokens: Vec<u32> = (0..3 * PAGE).map(token).collect();
                let sequence = engine.open(1).unwrap();
                let known = engine.reuse(sequence, &tokens).unwrap();
                engine.feed(&[Entry { sequence, tokens: &tokens[known..], wanted: Wanted::Nothing }]).unwrap();
                (sequence, 5 + own)
            })
            .collect();
        let before = held.lock().unwrap().prepared;
        trigger.set(stalls);
        let tokens = engine.go_on(&texts, 200, Default::default()).unwrap();
        (tokens, held.lock().unwrap().prepared - before)
    };
    let (want, plans) = written(isize::MAX);
    assert_eq!(plans, 1);
    let (got, plans) = written(190);
    assert_eq!((got, plans), (want, 2), "another plan was bound, and it ran");
}

#[test]
fn decode_runs_ahead_beside_a_request_that_waits_for_pages() {
    let (scheduler, held) = scheduler("tiny-llama", &Trigger::after(Fault::Once, isize::MAX), [4, 3]);
    let long = scheduler.generate(request(100, 100));
    // All pages but one are held, and a sequence is free: this one cannot begin before the other ends.
    let waits = scheduler.generate(request(200, 4));
    assert_eq!((end(long), end(waits)), (Ok(100), Ok(4)));
    let Counts { runs, submits, .. } = *held.lock().unwrap();
    assert!(submits > 90 && runs < 12, "{submits} steps were submitted ahead, {runs} made by the host");
    nothing_is_left(&scheduler, &held);
}

#[test]
fn decode_runs_ahead_beside_a_sequence_that_has_no_room_to_return() {
    let (scheduler, held) = scheduler("tiny-llama", &Trigger::after(Fault::Once, isize::MAX), [5, 2]);
    // Both need four pages in the end: the younger one is swapped out for about a hundred steps.
    let (older, younger) = (scheduler.generate(request(120, 130)), scheduler.generate(request(100, 150)));
    assert_eq!((end(older), end(younger)), (Ok(130), Ok(150)));
    let Counts { runs, submits, .. } = *held.lock().unwrap();
    assert!(submits > 180 && runs < 60, "{submits} steps were submitted ahead, {runs} made by the host");
    nothing_is_left(&scheduler, &held);
}

#[test]
fn decode_runs_ahead_beside_a_text_that_waits_for_pages_to_be_embedded() {
    let (scheduler, held) = scheduler("tiny-llama", &Trigger::after(Fault::Once, isize::MAX), [4, 3]);
    let long = scheduler.generate(request(100, 100));
    let texts = EmbedRequest { texts: vec![request(200, 0).prompt], pooling: Pooling::Mean };
    let (to, vectors) = std::sync::mpsc::channel();
    scheduler.submit_embed(texts, move |result| to.send(result.map(|vectors| vectors.len())).unwrap());
    assert_eq!(end(long), Ok(100));
    assert_eq!(vectors.recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), 1);
    let Counts { runs, submits, .. } = *held.lock().unwrap();
    assert!(submits > 90 && runs < 12, "{submits} steps were submitted ahead, {runs} made by the host");
    nothing_is_left(&scheduler, &held);
}

#[test]
fn a_fork_whose_copy_fails_leaves_nothing_behind() {
    let trigger = Trigger::after(Fault::Lost, isize::MAX);
    let room = Room { pages: 8, sequences: 4, states: 4, ..Room::one(256) };
    let mut engine =
        Engine::new(model("tiny-qwen3next"), Box::new(Frail::new(&trigger)), room, &mut |_, _| {}).unwrap();
    let sequence = engine.open(0).unwrap();
    let tokens: Vec<u32> = (0..70).collect();
    engine.feed(&[Entry { sequence, tokens: &tokens, wanted: Wanted::Last }]).unwrap();
    let free = engine.pages();
    trigger.set(-1);
    assert!(engine.fork(sequence).is_err());
    trigger.set(isize::MAX);
    // There is room for three more sequences with states, and the pages belong to the first alone.
    assert_eq!(engine.pages(), free);
    (0..3).for_each(|_| assert!(engine.open(0).is_ok()));
    engine.close(sequence);
    let (free, all) = engine.pages();
    assert_eq!(free, all);
}

/// The bytes of a sequence that leaves while it is swapped out count no longer.
#[test]
fn the_budget_of_swapped_sequences_is_that_of_those_which_are_swapped_out_now() {
    let (executor, _) = Frail::counted(&Trigger::after(Fault::Once, isize::MAX));
    let room = Room { pages: 5, sequences: 2, ..Room::one(256) };
    let engine = Engine::new(model("tiny-llama"), executor, room, &mut |_, _| {}).unwrap();
    // Room for one of them, of up to 256 tokens with keys and values of 2 layers and 2 heads of 32 halves.
    let policy = Policy { swap_bytes: 256 * 2 * 2 * 2 * 64 * 2, ..Policy::default() };
    let scheduler = Scheduler::start(engine, policy);
    for round in 0..4 {
        let older = scheduler.generate(request(120, 130));
        let younger = scheduler.generate(request(100, 150));
        let start = std::time::Instant::now();
        while scheduler.load().swapped == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "round {round}: {:?}", scheduler.load());
            std::thread::yield_now();
        }
        // Its client goes.
        drop(younger);
        assert_eq!(end(older), Ok(130), "round {round}");
    }
}

/// A server under a mixed load meets few plans: sizes are padded, and chunks of prompts end where a plan is full.
#[test]
fn a_mixed_load_needs_few_plans() {
    let (executor, held) = Frail::counted(&Trigger::after(Fault::Once, isize::MAX));
    let room = Room { pages: 200, sequences: 16, ..Room::one(512) };
    let engine = Engine::new(model("tiny-llama"), executor, room, &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, Policy::default());
    let load = |salt: u32| {
        let all: Vec<Events> = (0..48).map(|i| scheduler.generate(request(64 + salt + i % 7, 16))).collect();
        all.into_iter().for_each(|events| assert_eq!(end(events), Ok(16)));
        held.lock().unwrap().prepared
    };
    // Which steps a run has depends on when its requests arrive and how fast steps are, so a run may meet a size that the others
    // missed; but the sizes themselves are few.
    let met = (0..10).fold(0, |_, salt| load(salt % 8));
    assert!(met <= 40, "ten runs met {met} sizes of steps");
    let Counts { plans, prepared, .. } = *held.lock().unwrap();
    assert_eq!(plans, prepared, "every plan stays");
}
