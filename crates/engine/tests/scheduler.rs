//! Requests of many users at once: each gets the text that it would get alone, whoever comes, goes or has to make room.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};

use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, GpuExecutor};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{
    Constraint, EndReason, Engine, Entry, Event, Events, First, Policy, Request, Scheduler, StopRule, Tally, Usage,
    Wanted,
};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_engine::{Error, Session};
use kiln_gguf::Gguf;

use device::gpu;

fn model() -> Arc<Model> {
    let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn scheduler(model: &Arc<Model>, pages: usize, sequences: usize, policy: Policy) -> Scheduler {
    on(model, Box::new(CpuExecutor::new(Arithmetic::Fast)), pages, sequences, policy)
}

fn on(model: &Arc<Model>, executor: Box<dyn Executor>, pages: usize, sequences: usize, policy: Policy) -> Scheduler {
    let room = Room { pages, sequences, states: sequences, ..Room::one(256) };
    Scheduler::start(Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap(), policy)
}

/// Tokens without a pattern.
fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11 + salt * 101) % 256).collect()
}

/// A request whose text has exactly so many tokens.
fn greedy(prompt: Vec<u32>, limit: usize) -> Request {
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    Request { limit: Some(limit), sampling: Sampling::greedy(), stop, ..Request::new(prompt) }
}

/// What became of each text of a request.
#[derive(Debug, Default, PartialEq)]
struct Result {
    tokens: Vec<u32>,
    text: String,
    end: Option<(EndReason, Usage)>,
}

fn collect(events: Events, choices: usize) -> std::result::Result<Vec<Result>, Error> {
    let mut results: Vec<Result> = (0..choices).map(|_| Result::default()).collect();
    for event in events {
        match event {
            Event::Token { choice, token, text, .. } => {
                assert!(results[choice].end.is_none(), "a token after the end");
                results[choice].tokens.push(token);
                results[choice].text += &text;
            }
            Event::End { choice, text, reason, usage } => {
                results[choice].text += &text;
                results[choice].end = Some((reason, usage));
            }
            Event::Failed(error) => return Err(error),
            Event::Started { .. } | Event::Read { .. } => {}
        }
    }
    Ok(results)
}

fn one(events: Events) -> Result {
    collect(events, 1).unwrap().remove(0)
}

#[test]
fn many_users_at_once_get_what_each_gets_alone() {
    let model = model();
    let prompts: Vec<Vec<u32>> = (0..12).map(|i| text(1 + (i * 29) % 120, i)).collect();
    let want: Vec<Vec<u32>> = prompts
        .iter()
        .map(|p| one(scheduler(&model, 4, 1, Policy::default()).generate(greedy(p.clone(), 40))).tokens)
        .collect();
    // With room for all; then with so few pages that texts must make room for each other again and again.
    for (pages, sequences) in [(64, 12), (7, 12), (64, 3)] {
        let scheduler = scheduler(&model, pages, sequences, Policy::default());
        let all: Vec<Events> = prompts.iter().map(|p| scheduler.generate(greedy(p.clone(), 40))).collect();
        for (i, (events, want)) in all.into_iter().zip(&want).enumerate() {
            let got = one(events);
            assert_eq!(&got.tokens, want, "request {i} of {pages} pages, {sequences} sequences");
            assert_eq!(got.end.unwrap().0, EndReason::Limit);
        }
        let pages = scheduler.with_engine(|engine| engine.pages()).unwrap();
        assert_eq!(pages.0, pages.1, "every page came back");
    }
}

/// A text that is being written needs one more page while all others are held by prompts that are half read: each of them had room enough when
/// it began.
#[test]
fn a_prompt_that_is_being_read_makes_room_for_a_text() {
    let model = model();
    let requests =
        || [greedy(text(62, 1), 100), greedy(text(120, 2), 8), greedy(text(120, 3), 8), greedy(text(120, 4), 8)];
    let alone: Vec<Vec<u32>> = requests()
        .into_iter()
        .map(|request| one(scheduler(&model, 64, 4, Policy::default()).generate(request)).tokens)
        .collect();
    // Four pages of 64 tokens, and short pieces of prompts between two tokens of a text.
    let policy = Policy { stutter: std::time::Duration::from_nanos(1), ..Policy::default() };
    let scheduler = scheduler(&model, 4, 4, policy);
    let events: Vec<Events> = requests().into_iter().map(|request| scheduler.generate(request)).collect();
    let got: Vec<Vec<u32>> = events.into_iter().map(|events| one(events).tokens).collect();
    assert_eq!(got, alone);
}

/// Greedy and drawn texts, beside each other: tokens are chosen on the device, and are those that the CPU chooses.
#[test]
fn a_device_draws_the_tokens_that_the_cpu_draws() {
    let Some((gpu, instance)) = gpu() else { return };
    let model = model();
    let hot = Sampling { seed: Some(3), temperature: 1.2, top_k: 50, ..Sampling::default() };
    let banned = Sampling { logit_bias: vec![(7, -100.0), (40, 2.0)], seed: Some(4), ..Sampling::default() };
    let requests = || {
        let all = [Sampling::greedy(), hot.clone(), banned.clone(), Sampling { min_p: 0.0, ..hot.clone() }];
        all.into_iter().zip(0..).map(|(sampling, i)| Request { sampling, ..greedy(text(3 + 40 * i, i), 70) })
    };
    let texts = |scheduler: &Scheduler| -> Vec<Vec<u32>> {
        let all: Vec<Events> = requests().map(|request| scheduler.generate(request)).collect();
        all.into_iter().map(|events| one(events).tokens).collect()
    };
    let want = texts(&scheduler(&model, 32, 4, Policy::default()));
    let scheduler = on(&model, gpu, 32, 4, Policy::default());
    assert_eq!(texts(&scheduler), want);
    assert_eq!(texts(&scheduler), want, "again, with pages of the first time");
    drop(scheduler);
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
}

#[test]
fn a_prompt_is_computed_once_for_all_its_texts_and_for_those_who_begin_alike() {
    let scheduler = scheduler(&model(), 32, 8, Policy::default());
    let sampling = Sampling { seed: Some(5), temperature: 1.5, ..Sampling::default() };
    let request = || Request { choices: 3, sampling: sampling.clone(), ..greedy(text(150, 1), 20) };
    let texts = collect(scheduler.generate(request()), 3).unwrap();
    assert!(texts[0].tokens != texts[1].tokens && texts[1].tokens != texts[2].tokens, "{texts:?}");
    assert_eq!(texts[0].end.as_ref().unwrap().1.cached_tokens, 0);
    let again = collect(scheduler.generate(request()), 3).unwrap();
    assert_eq!(again[2].end.as_ref().unwrap().1.cached_tokens, 128);
    let tokens = |texts: &[Result]| texts.iter().map(|t| t.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&again), tokens(&texts), "the same seed, the same texts");
    let other = one(scheduler.generate(Request { owner: 9, ..greedy(text(150, 1), 1) }));
    assert_eq!(other.end.unwrap().1.cached_tokens, 0, "another owner shares nothing");
}

/// Requests that all wait before the first of them is begun; what each tells goes into one list, with its number.
fn handed_in_together(
    scheduler: &Scheduler,
    requests: Vec<Request>,
    leaves_while_reading: Option<usize>,
) -> Vec<(usize, Event)> {
    let (told, events) = channel();
    let (here, go_on) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    std::thread::scope(|scope| {
        let (there, wait) = (Arc::clone(&here), Arc::clone(&go_on));
        scope.spawn(move || scheduler.with_engine(move |_| (there.wait(), wait.wait()).0.is_leader()));
        here.wait();
        for (number, request) in requests.into_iter().enumerate() {
            let told = told.clone();
            scheduler.submit(request, move |event| {
                let leaves = leaves_while_reading == Some(number) && matches!(event, Event::Read { .. });
                told.send((number, event)).is_ok() && !leaves
            });
        }
        drop(told);
        go_on.wait();
        events.into_iter().collect()
    })
}

/// Tokens of the prompts that were found, by the number of the request.
fn found(events: &[(usize, Event)], of: usize) -> Option<usize> {
    events.iter().find_map(|(number, event)| match event {
        Event::Started { cached_tokens } if *number == of => Some(*cached_tokens),
        _ => None,
    })
}

#[test]
fn a_beginning_that_many_come_with_at_once_is_computed_once() {
    let (model, beginning) = (model(), text(200, 1));
    let asked = |i: u32| greedy([beginning.clone(), text(20 + i, 10 + i)].concat(), 4);
    let others = || [Request { owner: 9, ..asked(0) }, Request { reuse: false, ..asked(0) }, greedy(text(40, 2), 4)];
    let requests: Vec<Request> = (0..8).map(asked).chain(others()).collect();
    let scheduler = scheduler(&model, 64, 12, Policy::default());
    let events = handed_in_together(&scheduler, requests, None);
    let failed = events.iter().find(|(_, event)| matches!(event, Event::Failed(_)));
    assert!(failed.is_none(), "{failed:?}");
    assert_eq!(found(&events, 0), Some(0));
    (1..8).for_each(|i| {
        assert_eq!(found(&events, i), Some(192), "request {i} waits for the three full pages of the first")
    });
    (8..11).for_each(|i| assert_eq!(found(&events, i), Some(0), "request {i} cannot share them"));
    // Those who need not wait for the beginning do not wait for those who do.
    let begun = |of: usize| events.iter().position(|(n, e)| *n == of && matches!(e, Event::Started { .. })).unwrap();
    assert!((8..11).all(|other| begun(other) < begun(1)));
    let tokens = |of: usize| -> Vec<u32> {
        let own = events.iter().filter(|(number, _)| *number == of);
        own.filter_map(|(_, event)| if let Event::Token { token, .. } = event { Some(*token) } else { None }).collect()
    };
    for i in 0..8 {
        let alone = one(self::scheduler(&model, 64, 1, Policy::default()).generate(asked(i)));
        assert_eq!(tokens(i as usize), alone.tokens, "request {i}");
    }
}

#[test]
fn a_beginning_whose_reader_leaves_is_read_on_by_the_next() {
    let beginning = text(200, 1);
    let asked = |i: u32| greedy([beginning.clone(), text(20 + i, 10 + i)].concat(), 4);
    // Pieces of 32 tokens: the first has read one when it leaves.
    let policy = Policy { stutter: std::time::Duration::from_nanos(1), ..Policy::default() };
    let scheduler = scheduler(&model(), 64, 8, policy);
    let events = handed_in_together(&scheduler, (0..4).map(asked).collect(), Some(0));
    assert_eq!([1, 2, 3].map(|i| found(&events, i)), [Some(0), Some(192), Some(192)]);
    let ends = |(_, event): &&(usize, Event)| matches!(event, Event::End { reason: EndReason::Limit, .. });
    assert_eq!(events.iter().filter(ends).count(), 3, "{events:?}");
    let pages = scheduler.with_engine(|engine| engine.pages()).unwrap();
    assert_eq!(pages.0, pages.1, "every page came back");
}

#[test]
fn a_text_ends_for_every_reason_there_is() {
    let model = model();
    let scheduler = scheduler(&model, 8, 2, Policy::default());
    let full = one(scheduler.generate(Request { limit: None, ..greedy(text(250, 1), 0) }));
    assert_eq!((full.tokens.len(), full.end.unwrap().0), (7, EndReason::Context));
    let free = one(scheduler.generate(greedy(text(20, 3), 30)));
    let stop = StopRule { tokens: vec![free.tokens[4]], ..StopRule::default() };
    let at = free.tokens.iter().position(|t| *t == free.tokens[4]).unwrap();
    let stopped = one(scheduler.generate(Request { stop, ..greedy(text(20, 3), 30) }));
    assert_eq!((stopped.tokens.len(), stopped.end.unwrap().0), (at + 1, EndReason::StopToken(free.tokens[4])));
    let word: String = free.text.chars().skip(6).take(3).collect();
    let strings = vec!["never to be seen".to_owned(), word.clone()];
    let stop = StopRule { strings, ignore_end: true, ..StopRule::default() };
    let cut = one(scheduler.generate(Request { stop, ..greedy(text(20, 3), 30) }));
    assert_eq!(cut.end.unwrap().0, EndReason::StopString(word.clone()));
    assert_eq!(cut.text, free.text[..free.text.find(&word).unwrap()]);

    let mut events = scheduler.generate(Request { limit: None, ..greedy(vec![1], 0) });
    let cancel = events.canceller();
    assert!(matches!(events.next(), Some(Event::Started { .. })));
    cancel.cancel();
    assert_eq!(one(events).end.unwrap().0, EndReason::Cancelled);
}

#[test]
fn control_tokens_are_shown_to_those_who_look_for_them() {
    let model = model();
    let scheduler = scheduler(&model, 8, 2, Policy::default());
    assert!(scheduler.is_running());
    let control = model.tokenizer.token_id("<|im_start|>").unwrap();
    let sampling = Sampling { logit_bias: vec![(control, 1000.0)], ..Sampling::greedy() };
    let text = |show_special| {
        one(scheduler.generate(Request { sampling: sampling.clone(), show_special, ..greedy(text(9, 1), 2) })).text
    };
    assert_eq!((text(false), text(true)), (String::new(), "<|im_start|>".repeat(2)));
}

/// Only even tokens, three of them.
#[derive(Clone)]
struct Even(usize);

impl Constraint for Even {
    fn mask(&mut self) -> std::result::Result<Vec<u32>, String> {
        Ok(vec![0x5555_5555; 9])
    }

    fn accept(&mut self, token: u32) -> std::result::Result<(), String> {
        self.0 += 1;
        if token.is_multiple_of(2) { Ok(()) } else { Err(format!("{token} is odd")) }
    }

    fn is_complete(&mut self) -> bool {
        self.0 == 3
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn a_rule_is_kept_and_ends_the_text() {
    let scheduler = scheduler(&model(), 8, 2, Policy::default());
    let request = Request { constraint: Some(Box::new(Even(0))), ..greedy(text(9, 1), 30) };
    let got = one(scheduler.generate(request));
    assert_eq!((got.tokens.len(), got.end.unwrap().0), (3, EndReason::Complete));
    assert!(got.tokens.iter().all(|t| t % 2 == 0), "{:?}", got.tokens);
}

#[test]
fn what_cannot_be_done_is_refused_and_the_others_go_on() {
    let model = model();
    let scheduler = scheduler(&model, 4, 2, Policy { queue: 2, ..Policy::default() });
    let refusal = |request: Request| {
        let choices = request.choices.max(1);
        collect(scheduler.generate(request), choices).unwrap_err().to_string()
    };
    assert!(refusal(greedy(vec![], 1)).contains("empty"));
    assert!(refusal(greedy(vec![1; 257], 1)).contains("257 tokens"));
    assert!(refusal(greedy(vec![1 << 20], 1)).contains("not in the vocabulary"));
    assert!(refusal(Request { choices: 3, ..greedy(vec![1], 1) }).contains("3 texts"));
    let hot = Sampling { temperature: f32::NAN, ..Sampling::default() };
    assert!(refusal(Request { sampling: hot, ..greedy(vec![1], 1) }).contains("temperature"));
    let long: Vec<Events> = (0..8).map(|i| scheduler.generate(greedy(text(30, i), 60))).collect();
    let ends: Vec<_> = long.into_iter().map(|events| collect(events, 1)).collect();
    let busy = ends.iter().filter(|end| matches!(end, Err(Error::Busy { .. }))).count();
    let done = ends.iter().filter(|end| end.as_ref().is_ok_and(|r| r[0].tokens.len() == 60)).count();
    assert!(busy >= 1 && done >= 2 && busy + done == 8, "{busy} refused, {done} done");
    drop(scheduler.generate(greedy(vec![1], 100)));
    assert_eq!(one(scheduler.generate(greedy(vec![1], 2))).tokens.len(), 2);
}

#[test]
fn a_request_goes_on_from_a_sequence_that_holds_its_beginning() {
    let model = model();
    let prompt = text(40, 3);
    let want = one(scheduler(&model, 8, 1, Policy::default()).generate(greedy(prompt.clone(), 20))).tokens;
    let scheduler = scheduler(&model, 8, 2, Policy::default());
    let beginning = prompt[..23].to_vec();
    let (from, state) = scheduler
        .with_engine(move |engine| {
            let id = engine.open(0).unwrap();
            engine.feed(&[Entry { sequence: id, tokens: &beginning, wanted: Wanted::Nothing }]).unwrap();
            (id, engine.save_state(id).unwrap())
        })
        .unwrap();
    let request = |from, prompt| Request { from: Some(from), ..greedy(prompt, 20) };
    // Twice: the sequence itself stays as it is.
    for _ in 0..2 {
        let got = one(scheduler.generate(request(from, prompt.clone())));
        assert_eq!(got.tokens, want);
        assert_eq!(got.end.unwrap().1.cached_tokens, 23);
    }
    // Through a saved state.
    let loaded = scheduler.with_engine(move |engine| {
        engine.close(from);
        let id = engine.open(0).unwrap();
        engine.load_state(id, &state).unwrap();
        id
    });
    let loaded = loaded.unwrap();
    assert_eq!(one(scheduler.generate(request(loaded, prompt.clone()))).tokens, want);
    // What it does not hold the beginning of, it does not go on with; nor where nothing is left to read.
    for wrong in [text(40, 4), prompt[..23].to_vec()] {
        let failed = collect(scheduler.generate(request(loaded, wrong)), 1);
        assert!(matches!(failed, Err(Error::NoSequence { .. })), "{failed:?}");
    }
}

/// States are no pages: steps of such models are made by the host, one by one.
#[test]
fn models_that_keep_states_alone_are_served() {
    let synth = Synth::new(Preset::from_name("tiny-rwkv6").unwrap(), Recipe::from_name("F32").unwrap(), 11);
    let model = Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap());
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| text(5 + 30 * i, i)).collect();
    let ends = model.tokenizer.end_ids().to_vec();
    let alone = |prompt: &[u32]| -> Vec<u32> {
        let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
        let mut session = Session::new(Arc::clone(&model), executor, 1, &mut |_, _| {}).unwrap();
        let mut tokens = vec![session.next_greedy(prompt, &ends).unwrap()];
        while tokens.len() < 12 {
            tokens.push(session.next_greedy(&tokens[tokens.len() - 1..], &ends).unwrap());
        }
        tokens
    };
    let scheduler = scheduler(&model, 1, 3, Policy::default());
    let all: Vec<Events> = prompts.iter().map(|p| scheduler.generate(greedy(p.clone(), 12))).collect();
    for (events, prompt) in all.into_iter().zip(&prompts) {
        assert_eq!(one(events).tokens, alone(prompt));
    }
    // Tools go on in the same way.
    let first = prompts[0].clone();
    let written = scheduler.with_engine(move |engine| {
        let id = engine.open(0).unwrap();
        let logits = engine.feed(&[Entry { sequence: id, tokens: &first, wanted: Wanted::Last }]).unwrap();
        let next = kiln_engine::sampler::greedy(&logits[0], &[]).unwrap();
        let on = engine.go_on(&[(id, next)], 4, kiln_kernels::sample::Row::default()).unwrap();
        (next, on[0].clone(), engine.length(id))
    });
    let (next, on, length) = written.unwrap();
    assert_eq!((on.len(), length), (4, prompts[0].len() + 4), "{next} {on:?}");
}

#[test]
fn a_lone_prompt_is_read_in_pieces_where_others_may_come() {
    let model = model();
    let pieces = |alone| {
        let scheduler = scheduler(&model, 32, 2, Policy { alone, ..Policy::default() });
        let read = |salt| {
            let events: Vec<Event> = scheduler.generate(greedy(text(200, salt), 1)).collect();
            events.iter().filter(|event| matches!(event, Event::Read { .. })).count()
        };
        // The pace is known from the first prompt on.
        [read(1), read(2)]
    };
    assert_eq!(pieces(None), [1, 1]);
    assert_eq!(pieces(Some(std::time::Duration::from_nanos(1))), [1, 200usize.div_ceil(32)]);
}

/// A first text for which kernels were made while weights were loaded asks for no other ones; one that nobody expected does.
#[test]
fn kernels_of_the_first_text_are_there_when_it_comes() {
    let prompt = text(20, 3);
    let asked_for = |first: Option<First>| {
        // A device of its own has no kernels yet.
        let (device, _instance) = device::device()?;
        let executor = Box::new(GpuExecutor::new(Arc::clone(&device)));
        let room = Room { pages: 4, sequences: 1, states: 1, ..Room::one(256) };
        let engine = Engine::expecting(model(), executor, room, first, &mut |_, _| {}).unwrap();
        let before = device.pipeline_counts().made;
        let written = one(Scheduler::start(engine, Policy::default()).generate(greedy(prompt.clone(), 4)));
        assert_eq!(written.tokens.len(), 4);
        Some(device.pipeline_counts().made - before)
    };
    let Some(unexpected) = asked_for(None) else { return };
    assert!(unexpected > 0, "a text that nobody expected should have asked for kernels");
    let expected = asked_for(Some(First::Text { prompt: prompt.len(), cuts: false, goes_on: true }));
    assert_eq!(expected, Some(0), "kernels that were not made beforehand");
}

/// What a scheduler has done, once it has nothing to do.
fn tally(scheduler: &Scheduler) -> Tally {
    scheduler.with_engine(|_| ()).unwrap();
    scheduler.load().tally
}

/// Requests that are all there before the first of them begins, so that they meet the same steps each time.
fn at_once(scheduler: &Scheduler, requests: Vec<Request>) -> Vec<Result> {
    let (here, go_on) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    std::thread::scope(|scope| {
        let (there, wait) = (Arc::clone(&here), Arc::clone(&go_on));
        scope.spawn(move || scheduler.with_engine(move |_| (there.wait(), wait.wait()).0.is_leader()));
        here.wait();
        let all: Vec<Events> = requests.into_iter().map(|request| scheduler.generate(request)).collect();
        go_on.wait();
        all.into_iter().map(one).collect()
    })
}

/// The small form of `kiln bench --load`: counts, not times.
#[test]
fn a_load_that_was_met_before_makes_no_plans_has_little_padding_and_finds_its_prefix() {
    const PREFIX: u32 = 128;
    let model = model();
    let cpu: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Fast));
    for executor in [Some(cpu), gpu().map(|(gpu, _)| gpu)].into_iter().flatten() {
        let pads = !executor.takes_any_shape();
        // However slow this machine is, chunks are as large as a batch.
        let policy = Policy { stutter: std::time::Duration::from_secs(3600), ..Policy::default() };
        let scheduler = on(&model, executor, 40, 3, policy);
        for round in 0..3 {
            let before = tally(&scheduler);
            let prompt = |i: u32| [text(PREFIX, 0), text(9 + 11 * i, 1 + i + 10 * round)].concat();
            let requests = (0..5).map(|i| greedy(prompt(i), 6)).collect();
            let cached: Vec<usize> =
                at_once(&scheduler, requests).into_iter().map(|result| result.end.unwrap().1.cached_tokens).collect();
            let after = tally(&scheduler);
            let (rows, tokens) = (after.rows - before.rows, after.row_tokens - before.row_tokens);
            let (plans, hits) = (after.plans - before.plans, after.hits.device - before.hits.device);
            let what = format!("round {round}: {plans} plans, {rows} rows for {tokens} tokens, {cached:?} cached");
            match pads {
                true => assert!(rows >= tokens && 2 * rows <= 3 * tokens, "{what}"),
                false => assert_eq!(rows, tokens, "{what}"),
            }
            let computed = usize::from(round == 0);
            assert!(cached[computed..].iter().all(|cached| *cached == PREFIX as usize), "{what}");
            assert_eq!(hits as usize, cached.iter().sum::<usize>(), "{what}");
            if pads && round == 2 {
                assert_eq!(plans, 0, "{what}");
            }
        }
    }
}
