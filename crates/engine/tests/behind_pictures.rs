//! Text behind pictures: models whose tokens have several positions, whose layers get parts of the vectors, or whose pictures see themselves in both
//! directions. Logits are judged by those of `scripts/goldens/vision`; every other way to the same text must give the same.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod encoder;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use kiln_engine::Error;
use kiln_engine::arch::{PAGE, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::media::{Encoder, Input, Mmproj, Rows};
use kiln_engine::model::Model;
use kiln_engine::run::{Engine, Entry, Event, Policy, Request, Scheduler, SequenceId, Span, Standing, Vectors, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::vision::Grid;
use kiln_gguf::TensorType;
use serde_json::Value as Json;

use encoder::{drawn, file, goldens, nmse, number, text};

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>) -> Engine {
    let [k_type, v_type] = [TensorType::F32; 2];
    let room = Room { pages: 60, sequences: 4, states: 4, k_type, v_type, ..Room::one(640) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

/// A prompt of a golden: its tokens and where its pictures stand.
struct Shown {
    name: String,
    model: Arc<Model>,
    tokens: Vec<u32>,
    spans: Vec<Span>,
    logits: Vec<f32>,
}

impl Shown {
    /// The prompt with its picture encoded by the family's own encoder.
    fn new(name: &str, golden: &Json) -> Shown {
        let (_, of_encoder) = goldens("vision").into_iter().find(|(known, _)| known == name).unwrap();
        let mmproj = Arc::new(Mmproj::new(file(&of_encoder, None, &[])).unwrap());
        let vision = mmproj.vision().unwrap();
        let model = Arc::new(text(golden));
        mmproj.check_model(&model).unwrap_or_else(|e| panic!("{name}: {e}"));
        let prepared = vision.prepare(&drawn(&of_encoder)).unwrap();
        let input = prepared.tiles.iter().chain(&prepared.overview).next().unwrap();
        let rows = Encoder::new(mmproj.clone(), cpu(), &mut |_, _| {}).unwrap().encode(Input::Picture(input)).unwrap();
        let standing = vision.standing(vision.grid(input.size));
        assert_eq!(rows.values.len(), number(&golden["rows"]) * rows.width, "{name}");
        if model.facts.several_positions {
            assert_eq!(standing.grid.unwrap().columns, number(&golden["columns"]), "{name}");
        }
        let vectors = Vectors::new(name.as_bytes(), Arc::new(rows)).standing_as(standing);
        let (mut tokens, mut spans) = (Vec::new(), Vec::new());
        for words in golden["words"].as_array().unwrap() {
            if !tokens.is_empty() {
                spans.push(Span { start: tokens.len(), vectors: vectors.clone() });
                tokens.extend(vectors.tokens());
            }
            tokens.extend(words.as_array().unwrap().iter().map(|token| number(token) as u32));
        }
        let logits = golden["logits"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
        Shown { name: name.to_owned(), model, tokens, spans, logits }
    }

    fn all() -> Vec<Shown> {
        let all: Vec<Shown> = goldens("behind").iter().map(|(name, golden)| Shown::new(name, golden)).collect();
        assert!(all.len() > 5);
        all
    }

    /// Where the last words begin.
    fn question(&self) -> usize {
        let last = self.spans.last().unwrap();
        last.start + last.vectors.tokens().len()
    }

    fn open(&self, engine: &mut Engine) -> SequenceId {
        let id = engine.open(0).unwrap();
        engine.attach(id, &self.spans).unwrap();
        id
    }

    fn judge(&self, got: &[f32], how: &str) {
        let off = nmse(got, &self.logits);
        println!("{} {how}: {off:.1e}", self.name);
        assert!(off < 1e-6, "{} {how}: {off:.1e}", self.name);
    }
}

fn last(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

/// Cuts a prompt into pieces of about this size, and never a picture that sees itself.
fn pieces(spans: &[Span], tokens: usize, size: usize) -> Vec<std::ops::Range<usize>> {
    let mut pieces = Vec::new();
    let mut start = 0;
    while start < tokens {
        let mut end = (start + size).min(tokens);
        for span in spans.iter().filter(|span| span.vectors.standing().both_ways) {
            let behind = span.start + span.vectors.tokens().len();
            if span.start < end && end < behind {
                end = behind;
            }
        }
        pieces.push(start..end);
        start = end;
    }
    pieces
}

fn judge(make: &dyn Fn() -> Box<dyn Executor>, reproducible: bool) {
    for shown in Shown::all() {
        let mut engine = engine(&shown.model, make());
        let both_ways = shown.spans.iter().any(|span| span.vectors.standing().both_ways);
        if reproducible && both_ways {
            let id = engine.open(0).unwrap();
            let refused = engine.attach(id, &shown.spans).unwrap_err().to_string();
            assert!(refused.contains("reproducible"), "{refused}");
            continue;
        }
        let whole = shown.open(&mut engine);
        let got = last(&mut engine, whole, &shown.tokens);
        shown.judge(&got, "whole");
        engine.close(whole);
        for size in [33, 7] {
            let (id, beside, twin) = (shown.open(&mut engine), engine.open(0).unwrap(), shown.open(&mut engine));
            let mut got = [Vec::new(), Vec::new()];
            for (nth, piece) in pieces(&shown.spans, shown.tokens.len(), size).into_iter().enumerate() {
                let other = [5 + nth as u32, 9, 7 + nth as u32];
                // The twin is one piece behind for a while, so that the batch holds both sides of a picture.
                let mut entries = vec![(beside, &other[..nth % 3 + 1]), (id, &shown.tokens[piece])];
                if nth == 0 {
                    entries.push((twin, &shown.tokens[..4]));
                }
                let entries = entries.iter().map(|(sequence, tokens)| Entry {
                    sequence: *sequence,
                    tokens,
                    wanted: Wanted::Last,
                });
                got[0] = engine.feed(&entries.collect::<Vec<_>>()).unwrap().remove(1);
            }
            got[1] = last(&mut engine, twin, &shown.tokens[4..]);
            shown.judge(&got[0], &format!("in pieces of {size}"));
            shown.judge(&got[1], "beside");
            [id, beside, twin].into_iter().for_each(|id| engine.close(id));
        }
        // The question token by token.
        let id = shown.open(&mut engine);
        let (before, question) = shown.tokens.split_at(shown.question());
        last(&mut engine, id, before);
        let mut got = Vec::new();
        for token in question {
            got = last(&mut engine, id, &[*token]);
        }
        shown.judge(&got, "token by token");
    }
}

#[test]
fn logits_behind_pictures_are_those_of_the_reference_on_the_cpu() {
    judge(&cpu, false);
    judge(&|| Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(true)), true);
}

#[test]
fn logits_behind_pictures_are_those_of_the_reference_on_a_device() {
    let Some((_, _instance)) = device::gpu() else { return };
    judge(&|| device::gpu().unwrap().0, false);
}

/// The same prompt with so many words more before it, so that pages end within its first picture.
fn moved(shown: &Shown, words: usize) -> (Vec<u32>, Vec<Span>) {
    let before: Vec<u32> = (0..words as u32).map(|i| 3 + i * 11 % 250).collect();
    let moved = |span: &Span| Span { start: span.start + words, vectors: span.vectors.clone() };
    ([before, shown.tokens.clone()].concat(), shown.spans.iter().map(moved).collect())
}

fn ways(make: &dyn Fn() -> Box<dyn Executor>) {
    for shown in Shown::all() {
        let name = &shown.name;
        let mut engine = engine(&shown.model, make());
        let (tokens, spans) = moved(&shown, PAGE - 15);
        assert!(spans[0].start < PAGE && PAGE < spans[0].start + spans[0].vectors.tokens().len(), "{name}");
        let open = |engine: &mut Engine| {
            let id = engine.open(0).unwrap();
            engine.attach(id, &spans).unwrap();
            id
        };
        let near = |got: &[f32], want: &[f32], how: &str| {
            let off = nmse(got, want);
            assert!(off < 1e-8, "{name} {how}: {off:.1e}");
        };
        let first = open(&mut engine);
        let want = last(&mut engine, first, &tokens);
        engine.close(first);
        // Found again, from the middle of a picture on.
        let again = open(&mut engine);
        let known = engine.reuse(again, &tokens).unwrap();
        assert_eq!(known, (tokens.len() - 1) / PAGE * PAGE, "{name}");
        near(&last(&mut engine, again, &tokens[known..]), &want, "found again");
        // Another turn behind it: read, drawn ahead, forked, after being elsewhere, and from a saved state.
        let turn = [9, 8, 7, 6, 5];
        let token = 17;
        let forked = engine.fork(again).unwrap();
        let behind = last(&mut engine, again, &turn);
        let by_itself = engine.go_on(&[(again, token)], 6, Default::default()).unwrap().remove(0);
        near(&last(&mut engine, forked, &turn), &behind, "forked");
        engine.swap_out(forked).unwrap();
        engine.swap_in(forked).unwrap();
        let mut one_by_one = Vec::new();
        let mut next = token;
        for _ in 0..6 {
            let logits = last(&mut engine, forked, &[next]);
            next = (0..).zip(&logits).max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            one_by_one.push(next);
        }
        assert_eq!(by_itself, one_by_one, "{name}: drawn ahead");
        let half = open(&mut engine);
        let read = spans[1].start + spans[1].vectors.tokens().len();
        last(&mut engine, half, &tokens[..read]);
        let saved = engine.save_state(half).unwrap();
        let loaded = engine.open(0).unwrap();
        engine.load_state(loaded, &saved).unwrap();
        let rest = &tokens[read..];
        if shown.model.facts.several_positions {
            let feed = engine.feed(&[Entry { sequence: loaded, tokens: rest, wanted: Wanted::Last }]);
            let refused = feed.unwrap_err().to_string();
            assert!(refused.contains("not shown again"), "{name}: {refused}");
        }
        engine.attach(loaded, &spans).unwrap();
        near(&last(&mut engine, loaded, rest), &want, "from a saved state");
        // Pictures that are taken back count no more.
        let plain = engine.open(0).unwrap();
        let words = [&tokens[..spans[0].start], &turn].concat();
        let want = last(&mut engine, plain, &words);
        engine.truncate(half, spans[0].start).unwrap();
        near(&last(&mut engine, half, &turn), &want, "taken back");
    }
}

#[test]
fn every_way_behind_a_picture_leads_to_the_same_on_the_cpu() {
    ways(&cpu);
}

#[test]
fn every_way_behind_a_picture_leads_to_the_same_on_a_device() {
    let Some((_, _instance)) = device::gpu() else { return };
    ways(&|| device::gpu().unwrap().0);
}

#[test]
fn pictures_that_see_themselves_are_read_whole() {
    let shown = Shown::all().into_iter().find(|shown| shown.name == "gemma3").unwrap();
    let mut engine = engine(&shown.model, cpu());
    let id = shown.open(&mut engine);
    let cut = &shown.tokens[..shown.spans[0].start + 3];
    let refused = engine.feed(&[Entry { sequence: id, tokens: cut, wanted: Wanted::Last }]).unwrap_err().to_string();
    assert!(refused.contains("see each other"), "{refused}");
}

/// What is written greedily behind a prompt, and how many of its tokens were known.
fn written(
    scheduler: &Scheduler,
    tokens: &[u32],
    spans: &[Span],
) -> impl FnOnce() -> Result<(Vec<u32>, usize), Error> + use<> {
    let request = Request {
        limit: Some(10),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        spans: spans.to_vec(),
        ..Request::new(tokens.to_vec())
    };
    let (to, from) = channel();
    let cancel = scheduler.submit(request, move |event| to.send(event).is_ok());
    move || {
        let _cancel = cancel;
        let (mut text, mut known) = (Vec::new(), 0);
        loop {
            match from.recv().unwrap() {
                Event::Started { cached_tokens } => known = cached_tokens,
                Event::Token { token, .. } => text.push(token),
                Event::End { .. } => return Ok((text, known)),
                Event::Failed(error) => return Err(error),
                _ => {}
            }
        }
    }
}

#[test]
fn requests_beside_each_other_write_what_they_write_alone() {
    for shown in Shown::all() {
        // Long pictures, so that chunks of the smallest size would cut them; and others behind them.
        let width = shown.spans[0].vectors.width();
        let standing = shown.spans[0].vectors.standing();
        let standing = Standing { grid: standing.grid.map(|_| Grid { rows: 9, columns: 10 }), ..standing };
        let values = (0..90 * width).map(|i| ((i * i % 1013) as f32 / 506.0 - 1.0) * 0.7).collect();
        let vectors = Vectors::new(b"long", Arc::new(Rows { width, values })).standing_as(standing);
        let mut tokens: Vec<u32> = (0..40).map(|i| 3 + i * 13 % 250).collect();
        let spans = vec![Span { start: 21, vectors: vectors.clone() }, Span { start: 120, vectors: vectors.clone() }];
        tokens.splice(21..21, vectors.tokens().iter().copied());
        tokens.splice(120..120, vectors.tokens().iter().copied());
        let (other, other_spans) = moved(&shown, 30);

        let scheduler = |stutter| {
            let policy = Policy { stutter, alone: Some(stutter), ..Policy::default() };
            Scheduler::start(engine(&shown.model, cpu()), policy)
        };
        let slow = scheduler(Duration::from_secs(3600));
        let want = written(&slow, &tokens, &spans)().unwrap();
        let want_other = written(&slow, &other, &other_spans)().unwrap();
        assert_eq!([want.1, want_other.1], [0, 0], "{}", shown.name);
        // The second question about a picture reads nothing of it again.
        let again = written(&slow, &tokens, &spans)().unwrap();
        assert_eq!((again.0, again.1), (want.0.clone(), (tokens.len() - 1) / PAGE * PAGE), "{}", shown.name);

        let hasty = scheduler(Duration::from_nanos(1));
        let all = [written(&hasty, &tokens, &spans), written(&hasty, &[3, 4, 5], &[])];
        let rest = written(&hasty, &other, &other_spans);
        let all: Vec<Vec<u32>> = all.into_iter().map(|text| text().unwrap().0).collect();
        assert_eq!((&all[0], &rest().unwrap().0), (&want.0, &want_other.0), "{}", shown.name);
    }
}
