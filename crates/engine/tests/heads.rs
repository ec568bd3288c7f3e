//! Heads in the file that draft: their logits against a reference in numpy (`scripts/goldens/heads`), whatever happened to a text before, on
//! the CPU and on a GPU; and files whose heads are damaged.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod device;
mod heads_of_files;
mod tiny;

use std::sync::Arc;

use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::model::Model;
use kiln_engine::run::{Engine, Entry, SequenceId, Wanted};
use kiln_gguf::{Gguf, TensorType};

use heads_of_files::{Weights, goldens, model};
use tiny::words;

/// Goldens that are compared on a GPU, too.
const ON_GPU: [&str; 3] = ["glm4moe-1", "qwen35-2", "deepseek2-1"];

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>) -> Engine {
    let room = Room { k_type: TensorType::F32, v_type: TensorType::F32, ..Room::for_sequences(3, 192) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

fn feed(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) {
    engine.feed(&[Entry { sequence, tokens, wanted: Wanted::Last }]).unwrap();
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let squared = |a: f32, b: f32| f64::from(a - b).powi(2);
    let sum: f64 = got.iter().zip(want).map(|(a, b)| squared(*a, *b)).sum();
    sum / want.iter().map(|w| squared(*w, 0.0)).sum::<f64>()
}

/// The logits of every draft of a golden, drawn and verified as it says.
fn drafts(golden: &Gguf, model: &Arc<Model>, executor: Box<dyn Executor>) -> Vec<f32> {
    let numbers = |key: &str| -> Vec<usize> {
        golden.metadata().get_u32_array(key).unwrap().iter().map(|n| *n as usize).collect()
    };
    let (pieces, checks) = (numbers("golden.pieces"), numbers("golden.checks"));
    let (mut engine, tokens) = (engine(model, executor), words(golden, "tokens"));
    let (mut rest, mut logits) = (&tokens[..], Vec::new());
    let sequence = engine.open(0).unwrap();
    for piece in pieces {
        feed(&mut engine, sequence, &rest[..piece]);
        rest = &rest[piece..];
    }
    for check in checks.chunks_exact(2) {
        let [accepted, drafted] = [check[0], check[1]];
        let verified = &rest[..=drafted];
        rest = &rest[drafted + 1..];
        logits.extend(engine.head_logits(sequence, verified[0], &verified[1..drafted]).unwrap().concat());
        if model.facts.has_state() {
            // A state goes back to a copy, and takes in what was accepted once more.
            feed(&mut engine, sequence, &verified[..=accepted]);
        } else {
            let length = engine.length(sequence);
            feed(&mut engine, sequence, verified);
            engine.truncate(sequence, length + accepted + 1).unwrap();
        }
    }
    assert!(rest.is_empty());
    logits
}

#[test]
fn logits_are_those_of_the_reference() {
    let all = goldens();
    assert!(all.len() >= 12, "two seeds of every model");
    for (name, golden) in all {
        let model = Arc::new(model(&golden, &Weights::of_file(&name).without_layers()));
        let want: Vec<f32> = words(&golden, "logits").into_iter().map(f32::from_bits).collect();
        // A software GPU compiles kernels for seconds: attention, states and latents stand for all there.
        let gpu = ON_GPU.contains(&&*name).then(device::gpu).flatten();
        for executor in [Some(cpu()), gpu.map(|(gpu, _)| gpu)].into_iter().flatten() {
            let place = executor.describe();
            let error = nmse(&drafts(&golden, &model, executor), &want);
            assert!(error < 1e-6, "{name} on {place}: {error:.1e}");
        }
    }
}

/// A head gives the same logits behind a text that was read whole, in pieces, as a copy of another sequence, with drafts that were wrong, or one token after
/// the other on the device.
#[test]
fn a_head_knows_a_text_however_it_came() {
    for name in ["glm4moe-shared-1", "qwen35-1"] {
        let golden = heads_of_files::golden(name);
        let model = Arc::new(model(&golden, &Weights::of_file(name)));
        let text: Vec<u32> = (0..150u32).map(|i| (i * i * 7 + 3 * i) % 256).collect();
        let mut want = Vec::new();
        let mut check = |engine: &mut Engine, sequence: SequenceId, how: &str| {
            assert_eq!(engine.tokens(sequence), &text[..], "{name}, {how}");
            let got = engine.head_logits(sequence, 9, &[8, 7]).unwrap().concat();
            if want.is_empty() {
                want.clone_from(&got);
            }
            let error = nmse(&got, &want);
            assert!(error < 1e-6, "{name}, {how}: {error:.1e}");
        };
        for executor in [Some(cpu()), device::gpu().map(|(gpu, _)| gpu)].into_iter().flatten() {
            let mut engine = engine(&model, executor);
            let whole = engine.open(0).unwrap();
            feed(&mut engine, whole, &text);
            check(&mut engine, whole, "whole");
            let forked = engine.fork(whole).unwrap();
            engine.close(whole);
            check(&mut engine, forked, "as a copy");
            engine.close(forked);
            let pieces = engine.open(1).unwrap();
            for piece in [&text[..70], &text[70..71], &text[71..149], &text[149..]] {
                feed(&mut engine, pieces, piece);
            }
            check(&mut engine, pieces, "in pieces");
            if !model.facts.has_state() {
                engine.truncate(pieces, 140).unwrap();
                feed(&mut engine, pieces, &text[140..145]);
                engine.head_logits(pieces, 1, &[2, 3, 4]).unwrap();
                feed(&mut engine, pieces, &[text[145], 200, 201, 202]);
                engine.truncate(pieces, 146).unwrap();
                feed(&mut engine, pieces, &text[146..]);
                check(&mut engine, pieces, "behind wrong drafts");
            }
            engine.close(pieces);
        }
    }
}

#[test]
fn a_head_follows_steps_that_go_on_by_themselves() {
    for name in ["glm4moe-shared-1", "qwen35-1"] {
        let golden = heads_of_files::golden(name);
        let model = Arc::new(model(&golden, &Weights::of_file(name)));
        for executor in [Some(cpu()), device::gpu().map(|(gpu, _)| gpu)].into_iter().flatten() {
            let mut engine = engine(&model, executor);
            let prompts: [&[u32]; 2] = [&[5, 6, 7, 8, 9], &[50, 60, 70]];
            let sequences = prompts.map(|prompt| {
                let sequence = engine.open(0).unwrap();
                feed(&mut engine, sequence, prompt);
                sequence
            });
            engine.go_on(&[(sequences[0], 3), (sequences[1], 4)], 40, Default::default()).unwrap();
            for sequence in sequences {
                let text = engine.tokens(sequence).to_vec();
                let got = engine.head_logits(sequence, 9, &[8, 7]).unwrap().concat();
                engine.close(sequence);
                let again = engine.open(1).unwrap();
                feed(&mut engine, again, &text);
                let error = nmse(&got, &engine.head_logits(again, 9, &[8, 7]).unwrap().concat());
                assert!(error < 1e-6, "{name}: {error:.1e}");
                engine.close(again);
            }
        }
    }
}

#[test]
fn heads_that_were_left_out_are_no_error_and_damaged_ones_are() {
    let name = "glm4moe-1";
    let golden = heads_of_files::golden(name);
    let with = |change: &dyn Fn(&mut Vec<String>)| {
        let weights = Weights::of_file(name);
        tiny::changed(&golden, |name, shape| weights.of(name, shape), |_, tensors| change(tensors)).unwrap().with_head()
    };
    assert!(with(&|_| {}).unwrap().facts.drafts);
    // A file without the tensors, and one without what joins embedding and state: nothing to run.
    assert!(!with(&|tensors| tensors.retain(|line| !line.starts_with("blk.2."))).unwrap().facts.drafts);
    assert!(!with(&|tensors| tensors.retain(|line| !line.contains("eh_proj"))).unwrap().facts.drafts);
    let missing = with(&|tensors| tensors.retain(|line| !line.contains("nextn.hnorm"))).err().unwrap().to_string();
    assert!(missing.contains("blk.2.nextn.hnorm.weight") && missing.contains("draft head"), "{missing}");
    let misshapen = with(&|tensors| {
        let line = tensors.iter_mut().find(|line| line.contains("eh_proj")).unwrap();
        *line = "blk.2.nextn.eh_proj.weight 64 64".to_owned();
    });
    let misshapen = misshapen.err().unwrap().to_string();
    assert!(misshapen.contains("blk.2.nextn.eh_proj.weight") && misshapen.contains("128"), "{misshapen}");
}
