//! RWKV models from file to tokens: against llama.cpp on random weights, against a plain implementation on trained ones,
//! both executors against each other, and what makes a recurrence worth having: batches of any size, saved states.
//!
//! `scripts/goldens/models` made `goldens/tiny-*.gguf`; `scripts/convert/rwkv-test` made `data/rwkv7-834k.gguf` (a
//! small model trained on text, by the authors of rwkv.cpp, MIT) and `goldens/rwkv7-834k.gguf`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod golden;

use std::sync::Arc;

use kiln_engine::arch::{BatchShape, Room, graph};
use kiln_engine::executor::{Arithmetic, BATCH, CpuExecutor, Executor};
use kiln_engine::lower::{Target, lower};
use kiln_engine::model::Model;
use kiln_engine::run::Wanted;
use kiln_engine::{Error, Session, compare};

use device::gpu;
use golden::{Golden, SEED, path, synth};

const PRESETS: [&str; 4] = ["tiny-rwkv6", "tiny-rwkv7", "tiny-rwkv6qwen2", "tiny-arwkv7"];
fn session(model: &Arc<Model>, arithmetic: Arithmetic) -> Session {
    on(model, Box::new(CpuExecutor::new(arithmetic)))
}

fn on(model: &Arc<Model>, executor: Box<dyn Executor>) -> Session {
    Session::new(Arc::clone(model), executor, 1, &mut |_, _| {}).unwrap()
}

/// The largest difference of a row of logits, as a share of the row's largest logit.
fn difference(golden: &Golden, all: &[f32]) -> f64 {
    let vocab = all.len() / golden.tokens.len();
    assert_eq!(golden.logits.len(), golden.positions.len() * vocab);
    let rows = golden.positions.iter().map(|p| &all[*p as usize * vocab..][..vocab]);
    rows.zip(golden.logits.chunks(vocab)).map(|(got, want)| relative(got, want)).fold(0.0, f64::max)
}

fn relative(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |most, w| most.max(w.abs()));
    let worst = got.iter().zip(want).map(|(g, w)| f64::from(g - w).abs());
    worst.fold(0.0, |most, d| if d.is_nan() { f64::INFINITY } else { f64::max(most, d) }) / f64::from(largest)
}

/// Tokens without a pattern.
fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11) % 256).collect()
}

#[test]
fn logits_and_greedy_tokens_are_those_of_llama_cpp() {
    for preset in PRESETS {
        let (golden, model) = (Golden::read(preset), synth(preset, SEED));
        let all = session(&model, Arithmetic::Fast).feed(&golden.tokens, Wanted::All).unwrap();
        let worst = difference(&golden, &all);
        assert!(worst < 1e-5, "{preset}: {worst:.1e}");

        let mut session = session(&model, Arithmetic::Fast);
        let banned = model.tokenizer.end_ids();
        let mut made = vec![session.next_greedy(&golden.prompt, banned).unwrap()];
        while made.len() < golden.greedy.len() {
            made.push(session.next_greedy(&made[made.len() - 1..], banned).unwrap());
        }
        assert_eq!(made, golden.greedy, "{preset}");
        assert_eq!(made.len(), 64);
    }
}

#[test]
fn a_trained_model_gives_the_logits_of_the_plain_implementation() {
    let golden = Golden::read("rwkv7-834k");
    let model = Arc::new(Model::open(path("data/rwkv7-834k.gguf")).unwrap());
    let all = session(&model, Arithmetic::Reference).feed(&golden.tokens, Wanted::All).unwrap();
    assert!(difference(&golden, &all) < 1e-5, "{:.1e}", difference(&golden, &all));
    let Some((gpu, instance)) = gpu() else { return };
    let all = on(&model, gpu).feed(&golden.tokens, Wanted::All).unwrap();
    // Integer dot products round activations to 8 bits where the device prefers them.
    assert!(difference(&golden, &all) < 2e-2, "{:.1e}", difference(&golden, &all));
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
}

#[test]
fn parts_of_a_sequence_are_the_same_as_the_whole() {
    for preset in PRESETS {
        let model = synth(preset, SEED);
        let tokens = tokens(40);
        let whole = session(&model, Arithmetic::Reference).feed(&tokens, Wanted::All).unwrap();
        for parts in [vec![20, 20], vec![1, 2, 37], vec![1; 40]] {
            let mut session = session(&model, Arithmetic::Reference);
            let (mut rest, mut apart) = (&tokens[..], Vec::new());
            for n in parts {
                apart.extend(session.feed(&rest[..n], Wanted::All).unwrap());
                rest = &rest[n..];
            }
            assert_eq!(session.length(), tokens.len());
            assert!(relative(&apart, &whole) < 1e-6, "{preset}: {:.1e}", relative(&apart, &whole));
        }
    }
}

#[test]
fn a_sequence_has_no_end() {
    let model = synth("tiny-rwkv6", SEED);
    // The context that was asked for is 1, the one of training 512, and a batch holds 512 tokens.
    let tokens = tokens(BATCH as u32 + 30);
    let mut long = session(&model, Arithmetic::Fast);
    let whole = long.feed(&tokens, Wanted::Last).unwrap();
    assert_eq!(long.length(), tokens.len());
    let mut again = session(&model, Arithmetic::Fast);
    again.feed(&tokens[..100], Wanted::Last).unwrap();
    let apart = again.feed(&tokens[100..], Wanted::Last).unwrap();
    assert!(relative(&apart, &whole) < 1e-6, "{:.1e}", relative(&apart, &whole));
}

#[test]
fn a_saved_state_goes_on_as_if_nothing_had_happened() {
    for preset in PRESETS {
        let model = synth(preset, SEED);
        let tokens = tokens(24);
        let mut first = session(&model, Arithmetic::Fast);
        first.feed(&tokens[..16], Wanted::Last).unwrap();
        let saved = first.save_state().unwrap();
        let want = first.feed(&tokens[16..], Wanted::All).unwrap();

        // In another session, which was elsewhere before; then twice in the same one: a fork.
        let mut second = session(&model, Arithmetic::Fast);
        second.feed(&tokens[3..9], Wanted::Last).unwrap();
        for _ in 0..2 {
            second.load_state(&saved).unwrap();
            assert_eq!(second.length(), 16);
            assert_eq!(second.feed(&tokens[16..], Wanted::All).unwrap(), want, "{preset}");
        }
        second.load_state(&saved).unwrap();
        assert_eq!(second.save_state().unwrap(), saved);
    }
}

#[test]
fn states_of_other_models_and_damaged_ones_are_refused() {
    let model = synth("tiny-rwkv7", SEED);
    let mut own = session(&model, Arithmetic::Fast);
    own.feed(&tokens(5), Wanted::Last).unwrap();
    let saved = own.save_state().unwrap();
    let refusal = |session: &mut Session, bytes: &[u8]| match session.load_state(bytes) {
        Err(Error::SavedState { why, .. }) => why,
        other => panic!("should be refused: {other:?}"),
    };
    // Another architecture; then only other weights.
    let why = refusal(&mut session(&synth("tiny-rwkv6", SEED), Arithmetic::Fast), &saved);
    assert!(why.contains("rwkv6"), "{why}");
    let why = refusal(&mut session(&synth("tiny-rwkv7", SEED + 1), Arithmetic::Fast), &saved);
    assert!(why.contains("rwkv7"), "{why}");

    let before = own.save_state().unwrap();
    for cut in [0, 7, 8, 12, 20, 60, saved.len() - 1] {
        refusal(&mut own, &saved[..cut]);
    }
    let mut longer = saved.clone();
    longer.push(0);
    refusal(&mut own, &longer);
    let mut absurd = saved.clone();
    absurd[8..16].fill(0xff);
    refusal(&mut own, &absurd);
    assert_eq!(own.save_state().unwrap(), before, "a refused state should change nothing");
}

#[test]
fn a_recurrence_goes_back_to_its_beginning_only() {
    let model = synth("tiny-rwkv6", SEED);
    let mut session = session(&model, Arithmetic::Fast);
    let tokens = tokens(6);
    let want = session.feed(&tokens, Wanted::All).unwrap();
    assert!(matches!(session.truncate(3), Err(Error::NoWayBack { length: 6, asked: 3, .. })));
    session.truncate(6).unwrap();
    assert_eq!(session.length(), 6);
    session.truncate(0).unwrap();
    assert_eq!(session.feed(&tokens, Wanted::All).unwrap(), want);
    session.reset().unwrap();
    assert_eq!(session.length(), 0);
    assert_eq!(session.feed(&tokens, Wanted::All).unwrap(), want);
}

#[test]
fn every_step_agrees_on_both_executors() {
    for preset in PRESETS {
        // Few tokens take the products of vectors, many those of matrices, and one has a plan of its own.
        for n in [1, 9, 40] {
            let Some((mut gpu, instance)) = gpu() else { return };
            let model = synth(preset, SEED);
            let mut reference = CpuExecutor::new(Arithmetic::Reference);
            let tokens = tokens(n);
            let report = compare::run(&model, &tokens, 1, gpu.as_mut(), &mut reference, 1e-7).unwrap();
            assert_eq!(report.first_difference, None, "{preset}, {n} tokens");
            let shape = BatchShape::new(tokens.len(), 1);
            let plan = graph(&model.config, &model.gguf, &Room::one(1)).unwrap().plan(shape).unwrap();
            let plan = lower(plan, &gpu.target()).unwrap();
            assert_eq!(report.steps, plan.steps.len(), "{preset}, {n} tokens: every step of the plan is compared");
            assert_eq!(instance.validation_messages(), Vec::<String>::new());
        }
    }
}

#[test]
fn a_device_keeps_and_gives_back_states_like_the_cpu() {
    for preset in PRESETS {
        let Some((gpu, instance)) = gpu() else { return };
        let model = synth(preset, SEED);
        let tokens = tokens(100);
        let want = session(&model, Arithmetic::Reference).feed(&tokens, Wanted::Last).unwrap();
        let mut device = on(&model, gpu);
        device.feed(&tokens[..64], Wanted::Last).unwrap();
        let saved = device.save_state().unwrap();
        device.reset().unwrap();
        device.feed(&tokens[..7], Wanted::Last).unwrap();
        device.load_state(&saved).unwrap();
        let got = device.feed(&tokens[64..], Wanted::Last).unwrap();
        assert!(relative(&got, &want) < 1e-3, "{preset}: {:.1e}", relative(&got, &want));
        // What the device saved, the CPU takes.
        let mut cpu = session(&model, Arithmetic::Reference);
        cpu.load_state(&saved).unwrap();
        let got = cpu.feed(&tokens[64..], Wanted::Last).unwrap();
        assert!(relative(&got, &want) < 1e-3, "{preset}: {:.1e}", relative(&got, &want));
        assert_eq!(instance.validation_messages(), Vec::<String>::new());
    }
}

#[test]
fn the_plans_are_those_of_the_snapshots() {
    for preset in PRESETS {
        let model = synth(preset, SEED);
        let graph = graph(&model.config, &model.gguf, &Room::one(1)).unwrap();
        let plan = lower(graph.plan(BatchShape::new(2, 1)).unwrap(), &Target::cpu()).unwrap().print();
        let path = path(&format!("plans/{preset}.txt"));
        if std::env::var_os("KILN_UPDATE_SNAPSHOTS").is_some() {
            std::fs::write(&path, &plan).unwrap();
        }
        assert_eq!(plan, std::fs::read_to_string(path).unwrap(), "KILN_UPDATE_SNAPSHOTS=1 writes the new plan");
    }
}
