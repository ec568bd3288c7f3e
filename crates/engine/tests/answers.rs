//! Models that read one text and write another: what is written depends on the one that was read and on nothing else, alone and beside
//! others, in pages that were moved and shared.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod device;
mod tiny;

use std::sync::Arc;

use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::model::Model;
use kiln_engine::run::{Engine, Entry, Event, Policy, Request, Scheduler, SequenceId, StopRule, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::{Error, Session};
use kiln_gguf::TensorType;

use tiny::{changed, drawn, golden, model};

fn t5() -> Arc<Model> {
    Arc::new(model(&golden("t5-relu")))
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>, pages: usize) -> Engine {
    let room =
        Room { pages, sequences: 4, states: 4, k_type: TensorType::F32, v_type: TensorType::F32, ..Room::one(256) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + salt * 31) % 113 + 3).collect()
}

/// The likeliest tokens, one after the other.
fn written(model: &Arc<Model>, source: &[u32], count: usize) -> Vec<u32> {
    let caches = [TensorType::F32; 2];
    let mut session = Session::with_caches(Arc::clone(model), cpu(), 512, caches, &mut |_, _| {}).unwrap();
    session.read_source(source).unwrap();
    let mut tokens = vec![model.facts.start.unwrap()];
    for _ in 0..count {
        let next = session.next_greedy(&tokens[tokens.len() - 1..], model.tokenizer.end_ids()).unwrap();
        tokens.push(next);
    }
    tokens.split_off(1)
}

fn all_requests(scheduler: &Scheduler, sources: &[Vec<u32>], count: usize) -> Vec<Vec<u32>> {
    let request = |source: &Vec<u32>| {
        let stop = StopRule { ignore_end: true, ..StopRule::default() };
        Request { limit: Some(count), sampling: Sampling::greedy(), stop, ..Request::new(source.clone()) }
    };
    let events: Vec<_> = sources.iter().map(|source| scheduler.generate(request(source))).collect();
    let tokens = |event: Event| match event {
        Event::Token { token, .. } => Some(token),
        Event::Failed(error) => panic!("{error}"),
        _ => None,
    };
    events.into_iter().map(|events| events.filter_map(tokens).collect()).collect()
}

#[test]
fn requests_beside_others_are_answered_as_alone() {
    let model = t5();
    let sources = [text(1, 1), text(70, 2), text(200, 3), text(9, 4), text(64, 5), text(128, 6)];
    let want: Vec<Vec<u32>> = sources.iter().map(|source| written(&model, source, 40)).collect();
    assert_ne!(want[1], want[2], "answers depend on what was read");
    let scheduler = Scheduler::start(engine(&model, cpu(), 32), Policy::default());
    assert_eq!(all_requests(&scheduler, &sources, 40), want);
    // With fewer pages texts have to make room for each other.
    let scheduler = Scheduler::start(engine(&model, cpu(), 8), Policy::default());
    assert_eq!(all_requests(&scheduler, &sources, 40), want);
    let Some((executor, _instance)) = device::gpu() else { return };
    let scheduler = Scheduler::start(engine(&model, executor, 32), Policy::default());
    assert_eq!(all_requests(&scheduler, &sources, 40), want);
}

fn feed(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap().remove(0)
}

#[test]
fn what_was_read_moves_and_is_shared_with_the_text() {
    let mut engine = engine(&t5(), cpu(), 12);
    let (all, _) = engine.pages();
    let [first, other] = [text(100, 1), text(70, 2)].map(|source| {
        let id = engine.open(0).unwrap();
        engine.read_source(id, &source).unwrap();
        id
    });
    feed(&mut engine, first, &text(65, 7));
    let fork = engine.fork(first).unwrap();
    let want = feed(&mut engine, fork, &[5]);
    engine.close(fork);
    engine.swap_out(first).unwrap();
    assert_eq!(engine.pages().0, all - 2, "only the other text holds pages");
    // Somebody else writes to the pages that it had.
    let third = engine.open(0).unwrap();
    engine.read_source(third, &text(256, 3)).unwrap();
    engine.close(third);
    engine.swap_in(first).unwrap();
    assert_eq!(feed(&mut engine, first, &[5]), want);
    engine.truncate(first, 65).unwrap();
    assert_eq!(feed(&mut engine, first, &[5]), want);
    engine.close(first);
    engine.close(other);
    assert_eq!(engine.pages().0, all);
}

#[test]
fn a_source_can_be_read_again_until_the_text_begins() {
    let mut engine = engine(&t5(), cpu(), 8);
    let id = engine.open(0).unwrap();
    engine.read_source(id, &text(100, 1)).unwrap();
    engine.read_source(id, &text(30, 2)).unwrap();
    let got = feed(&mut engine, id, &[0]);
    let late = engine.read_source(id, &text(3, 1)).unwrap_err();
    assert!(late.to_string().contains("has begun"), "{late}");
    let fresh = engine.open(0).unwrap();
    engine.read_source(fresh, &text(30, 2)).unwrap();
    assert_eq!(feed(&mut engine, fresh, &[0]), got);
}

#[test]
fn what_cannot_be_is_said() {
    let model = t5();
    let mut engine = engine(&model, cpu(), 3);
    let id = engine.open(0).unwrap();
    let entry = [Entry { sequence: id, tokens: &[0], wanted: Wanted::Last }];
    assert!(matches!(engine.feed(&entry), Err(Error::NoSource)));
    assert!(matches!(engine.read_source(id, &[]), Err(Error::EmptyPrompt)));
    assert!(matches!(engine.read_source(id, &[128]), Err(Error::TokenOutOfRange { token: 128, vocab: 128 })));
    assert!(matches!(
        engine.read_source(id, &text(257, 1)),
        Err(Error::PromptTooLong { tokens: 257, context: 256, .. })
    ));
    assert!(matches!(engine.read_source(id, &text(200, 1)), Err(Error::NoRoom { needed: 4, free: 3, .. })));
    engine.read_source(id, &text(20, 1)).unwrap();
    assert!(matches!(engine.save_state(id), Err(Error::SavedState { .. })));
    let decoder = Arc::new(tiny::model(&golden("llama-dense")));
    let mut engine = self::engine(&decoder, cpu(), 3);
    let id = engine.open(0).unwrap();
    assert!(engine.read_source(id, &[1]).unwrap_err().to_string().contains("answers none"));
}

#[test]
fn vectors_of_a_text_are_those_of_what_reads() {
    let model = t5();
    let mut engine = engine(&model, cpu(), 8);
    let ids = [(); 2].map(|()| engine.open(0).unwrap());
    let texts = [text(70, 1), text(9, 2)];
    let entry = |i: usize| Entry { sequence: ids[i], tokens: &texts[i], wanted: Wanted::All };
    let both = engine.vectors(&[entry(0), entry(1)]).unwrap();
    assert_eq!(both.iter().map(Vec::len).collect::<Vec<_>>(), [70 * 64, 9 * 64]);
    let id = engine.open(0).unwrap();
    let alone = engine.vectors(&[Entry { sequence: id, tokens: &texts[1], wanted: Wanted::All }]).unwrap();
    let far = both[1].iter().zip(&alone[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far < 1e-5, "{far}");
}

#[test]
fn files_that_are_no_whole_model_are_refused_by_name() {
    let golden = golden("t5-dense");
    let refused = |change: &dyn Fn(&mut kiln_gguf::Metadata, &mut Vec<String>)| {
        changed(&golden, drawn, change).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(refused(&|_, _| {}), "");
    let key = "t5.attention.relative_buckets_count";
    for (buckets, want) in [(0u32, "1 to 255"), (3, "4 to 255"), (256, "1 to 255")] {
        let why = refused(&|keys, _| keys.set(key, buckets));
        assert!(why.contains(key) && why.contains(want), "{why}");
    }
    let why = refused(&|keys, _| keys.set(key, 16u32));
    assert!(why.contains("enc.blk.0.attn_rel_b.weight") && why.contains("[4, 16]"), "{why}");
    let why = refused(&|keys, _| keys.set("t5.decoder_start_token_id", 128u32));
    assert!(why.contains("decoder_start_token_id") && why.contains("0 to 127"), "{why}");
    for name in ["enc.blk.0.attn_rel_b.weight", "dec.blk.1.cross_attn_k.weight", "enc.output_norm.weight"] {
        let why = refused(&|_, tensors| tensors.retain(|line| !line.starts_with(name)));
        assert!(why.contains(name) && why.contains("missing"), "{why}");
    }
    let why = refused(&|keys, _| keys.set("t5.decoder_block_count", 1u32));
    assert!(why.contains("dec.blk.1.") && why.contains("unexpected tensor"), "{why}");
    let encoder = Arc::new(model(&tiny::golden("t5encoder-relu")));
    let scheduler = Scheduler::start(engine(&encoder, cpu(), 8), Policy::default());
    let failed = scheduler.generate(Request::new(text(3, 1))).last();
    assert!(matches!(failed, Some(Event::Failed(Error::NoText))), "{failed:?}");
}
