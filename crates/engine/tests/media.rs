//! Rows that are vectors: those of embeddings say what their tokens say, whole and in chunks, beside other sequences, found again by their
//! content, and by way of the scheduler.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod tiny;

use std::sync::Arc;
use std::sync::mpsc::channel;

use kiln_engine::Error;
use kiln_engine::arch::{PAGE, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::media::Rows;
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, Event, Policy, Request, Scheduler, SequenceId, Span, Vectors, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, quant};

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>) -> Engine {
    let room = Room { pages: 24, sequences: 4, states: 4, ..Room::one(256) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11 + salt * 101) % 256).collect()
}

/// The vectors that the model has for these tokens, times a factor.
fn embedded(model: &Model, tokens: &[u32], factor: f32, key: &[u8]) -> Vectors {
    let info = model.gguf.tensor("token_embd.weight").unwrap();
    let mut all = vec![0.0; info.n_elements()];
    quant::dequantise(info.ty, model.gguf.data(info), &mut all).unwrap();
    let width = model.config.hidden;
    let row = |token: &u32| all[*token as usize * width..][..width].iter().map(|v| v * factor).collect::<Vec<f32>>();
    Vectors::new(key, Arc::new(Rows { width, values: tokens.iter().flat_map(row).collect() }))
}

/// A prompt in which vectors stand for the tokens of these ranges (first, end), and its spans.
fn seen(model: &Model, tokens: &[u32], ranges: &[[usize; 2]], factor: f32) -> (Vec<u32>, Vec<Span>) {
    let (mut prompt, mut spans) = (tokens.to_vec(), Vec::new());
    for &[start, end] in ranges {
        let part = &tokens[start..end];
        let key: Vec<u8> = part.iter().flat_map(|token| token.to_le_bytes()).collect();
        let vectors = embedded(model, part, factor, &key);
        prompt[start..end].copy_from_slice(vectors.tokens());
        spans.push(Span { start, vectors });
    }
    (prompt, spans)
}

fn last(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let off: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
    off / want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()
}

fn judge(make: &dyn Fn() -> Box<dyn Executor>) {
    // Gemma multiplies the embeddings of tokens by the root of its width, and vectors by nothing.
    for (preset, scaled) in [("tiny-llama", false), ("tiny-gemma2", true), ("tiny-qwen3next", false)] {
        let model = model(preset);
        let factor = if scaled { (model.config.hidden as f32).sqrt() } else { 1.0 };
        let tokens = text(100, 1);
        let mut engine = engine(&model, make());
        let plain = engine.open(0).unwrap();
        let want = last(&mut engine, plain, &tokens);
        let (prompt, spans) = seen(&model, &tokens, &[[7, 40], [40, 41], [70, 99]], factor);
        for chunk in [100, 33, 9] {
            let id = engine.open(0).unwrap();
            engine.attach(id, &spans).unwrap();
            let other = engine.open(0).unwrap();
            let mut got = Vec::new();
            for (nth, part) in prompt.chunks(chunk).enumerate() {
                let beside = text(3, nth as u32);
                let entries = [(other, &beside[..]), (id, part)];
                let entries = entries.map(|(sequence, tokens)| Entry { sequence, tokens, wanted: Wanted::Last });
                got = engine.feed(&entries).unwrap().remove(1);
            }
            let off = nmse(&got, &want);
            assert!(off < 1e-9, "{preset} in chunks of {chunk}: {off:.1e}");
            [id, other].into_iter().for_each(|id| engine.close(id));
        }
        engine.close(plain);
    }
}

#[test]
fn vectors_of_embeddings_are_tokens_on_the_cpu() {
    judge(&cpu);
    judge(&|| Box::new(CpuExecutor::new(Arithmetic::Fast).reproducible(true)));
}

#[test]
fn vectors_of_embeddings_are_tokens_on_a_device() {
    let Some((_, _instance)) = device::gpu() else { return };
    judge(&|| device::gpu().unwrap().0);
}

#[test]
fn beginnings_are_found_by_content() {
    let model = model("tiny-llama");
    let mut engine = engine(&model, cpu());
    let tokens = text(2 * PAGE as u32 + 5, 3);
    let (prompt, spans) = seen(&model, &tokens, &[[10, 100]], 1.0);
    let first = engine.open(0).unwrap();
    engine.attach(first, &spans).unwrap();
    let want = last(&mut engine, first, &prompt);
    engine.close(first);
    let again = engine.open(0).unwrap();
    engine.attach(again, &spans).unwrap();
    let known = engine.reuse(again, &prompt).unwrap();
    assert_eq!(known, 2 * PAGE, "the same content should be found");
    assert!(nmse(&last(&mut engine, again, &prompt[known..]), &want) < 1e-9);
    // A sequence that goes on from it has its vectors.
    let forked = engine.fork(again).unwrap();
    engine.truncate(forked, 20).unwrap();
    assert!(nmse(&last(&mut engine, forked, &prompt[20..]), &want) < 1e-9);
    // Other content has other numbers, and is not found; nor are the tokens that the vectors say.
    let vectors = embedded(&model, &tokens[10..100], 1.0, b"another picture");
    assert!(vectors.tokens().iter().zip(&prompt[10..100]).all(|(a, b)| a != b));
    let mut other = prompt.clone();
    other[10..100].copy_from_slice(vectors.tokens());
    for (prompt, spans) in [(&other, vec![Span { start: 10, vectors }]), (&tokens, Vec::new())] {
        let id = engine.open(0).unwrap();
        engine.attach(id, &spans).unwrap();
        assert_eq!(engine.reuse(id, prompt).unwrap(), 0);
        engine.close(id);
    }
}

#[test]
fn numbers_without_vectors_and_vectors_of_another_width_are_refused() {
    let model = model("tiny-llama");
    let mut engine = engine(&model, cpu());
    let (prompt, spans) = seen(&model, &text(30, 5), &[[3, 9]], 1.0);
    let id = engine.open(0).unwrap();
    let fed = |engine: &mut Engine, tokens: &[u32]| {
        engine.feed(&[Entry { sequence: id, tokens, wanted: Wanted::Last }]).map(drop)
    };
    assert!(matches!(fed(&mut engine, &prompt), Err(Error::TokenOutOfRange { .. })));
    engine.attach(id, &spans).unwrap();
    // At another place they mean nothing.
    assert!(matches!(fed(&mut engine, &prompt[1..]), Err(Error::TokenOutOfRange { .. })));
    fed(&mut engine, &prompt).unwrap();
    let narrow = Vectors::new(b"narrow", Arc::new(Rows { width: 3, values: vec![0.0; 9] }));
    let refused = engine.attach(id, &[Span { start: 40, vectors: narrow }]).unwrap_err();
    assert!(refused.to_string().contains("3 numbers each"), "{refused}");
    let encoder = Arc::new(tiny::model(&tiny::golden("bert-dense")));
    let mut engine = self::engine(&encoder, cpu());
    let id = engine.open(0).unwrap();
    let width = encoder.config.hidden;
    let vectors = Vectors::new(b"any", Arc::new(Rows { width, values: vec![0.0; width] }));
    assert!(engine.attach(id, &[Span { start: 0, vectors }]).is_err());
}

#[test]
fn requests_with_vectors_write_what_their_tokens_would() {
    let model = model("tiny-llama");
    let tokens = text(150, 7);
    let (prompt, spans) = seen(&model, &tokens, &[[20, 110]], 1.0);
    let scheduler = Scheduler::start(engine(&model, cpu()), Policy::default());
    let written = |prompt: &[u32], spans: &[Span], choices: usize| {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let (limit, spans) = (Some(12), spans.to_vec());
        let request = Request { limit, sampling, spans, choices, ..Request::new(prompt.to_vec()) };
        let (to, from) = channel();
        let _cancel = scheduler.submit(request, move |event| to.send(event).is_ok());
        let (mut texts, mut ended) = (vec![Vec::new(); choices], 0);
        while ended < choices {
            match from.recv().unwrap() {
                Event::Token { choice, token, .. } => texts[choice].push(token),
                Event::End { .. } => ended += 1,
                Event::Failed(error) => return Err(error),
                _ => {}
            }
        }
        Ok(texts)
    };
    let want = written(&tokens, &[], 1).unwrap();
    assert_eq!(written(&prompt, &spans, 1).unwrap(), want);
    // Again, with what was kept of it, and for several texts.
    assert_eq!(written(&prompt, &spans, 3).unwrap(), vec![want[0].clone(); 3]);
    assert!(matches!(written(&prompt, &[], 1), Err(Error::TokenOutOfRange { .. })));
}
