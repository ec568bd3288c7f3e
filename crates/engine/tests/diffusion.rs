//! Models that fill in texts: the loop against the plainest one, for every way to choose what is filled in first.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod device;
mod tiny;

use std::sync::Arc;

use kiln_engine::diffusion::{Algorithm, Filled, Schedule, Settings, fill};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::model::Model;
use kiln_engine::run::{Event, Policy, Request, Scheduler, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::{Error, Session};
use kiln_gguf::TensorType;

use tiny::{changed, drawn, golden};

const MASK: u32 = 100;
const PROMPT: [u32; 7] = [5, 90, 17, 17, 41, 3, 66];

fn model(name: &str, shifts: bool) -> Arc<Model> {
    let named = changed(&golden(name), drawn, |keys, _| {
        keys.set("tokenizer.ggml.mask_token_id", MASK);
        keys.set("diffusion.shift_logits", shifts);
    });
    Arc::new(named.unwrap())
}

fn session(model: &Arc<Model>, executor: Box<dyn Executor>) -> Session {
    Session::with_caches(Arc::clone(model), executor, 64, [TensorType::F32; 2], &mut |_, _| {}).unwrap()
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

fn settings(temperature: f32, seed: u64) -> Settings {
    let sampling = Sampling { temperature, seed: Some(seed), ..Sampling::default() };
    Settings { length: 21, steps: 9, ..Settings::new(sampling) }
}

fn filled(model: &Arc<Model>, settings: &Settings) -> Filled {
    fill(&mut session(model, cpu()), &PROMPT, settings, &mut |_| true).unwrap()
}

/// The surest token first, one in each step, by whole texts.
fn by_hand(model: &Arc<Model>, length: usize, shifts: bool) -> Vec<u32> {
    let mut text: Vec<Option<u32>> = PROMPT.iter().copied().map(Some).chain(vec![None; length]).collect();
    let mut session = session(model, cpu());
    while text.contains(&None) {
        let tokens: Vec<u32> = text.iter().map(|token| token.unwrap_or(MASK)).collect();
        session.reset().unwrap();
        let logits = session.feed(&tokens, Wanted::All).unwrap();
        let vocab = model.config.vocab;
        let mut best = (0, 0, -1.0);
        for place in (0..text.len()).filter(|place| text[*place].is_none()) {
            let row = &logits[(place - usize::from(shifts)) * vocab..][..vocab];
            let others = || row.iter().enumerate().filter(|(id, _)| *id != MASK as usize);
            // The 40 likeliest, and of those the likeliest up to 0.95, and what is at least 0.05 as likely as the best.
            let mut weights: Vec<(usize, f64)> = others().map(|(id, logit)| (id, f64::from(*logit).exp())).collect();
            weights.sort_by(|a, b| b.1.total_cmp(&a.1));
            weights.truncate(40);
            let sum: f64 = weights.iter().map(|w| w.1).sum();
            let mut reached = 0.0;
            let enough = weights.iter().position(|w| {
                reached += w.1 / sum;
                reached >= f64::from(0.95f32)
            });
            weights.truncate(enough.map_or(40, |at| at + 1));
            let least = weights[0].1 * f64::from(0.05f32);
            weights.retain(|w| w.1 >= least);
            let sure = weights[0].1 / weights.iter().map(|w| w.1).sum::<f64>();
            if sure > best.2 {
                best = (place, weights[0].0 as u32, sure);
            }
        }
        text[best.0] = Some(best.1);
    }
    text.into_iter().skip(PROMPT.len()).flatten().collect()
}

#[test]
fn the_surest_are_filled_in_first() {
    for (name, shifts) in [("llada-dense", false), ("dream-dense", true)] {
        let model = model(name, shifts);
        let schedule = Some(Schedule::Blocks(12));
        let one_by_one = Settings { length: 12, steps: 12, schedule, ..settings(0.0, 1) };
        let got = filled(&model, &one_by_one);
        assert_eq!((got.runs, got.complete), (12, true));
        assert_eq!(got.tokens, by_hand(&model, 12, shifts), "{name}");
    }
}

#[test]
fn every_way_fills_in_everything_and_a_seed_repeats_it() {
    for number in 0..5 {
        let algorithm = Algorithm::from_name(&number.to_string()).unwrap();
        for (name, schedule) in [("rnd1-moe", Schedule::Timesteps(1e-3)), ("llada-moe-moe", Schedule::Blocks(8))] {
            let model = model(name, name == "rnd1-moe");
            let with =
                |seed| Settings { algorithm, schedule: Some(schedule), place_temperature: 0.2, ..settings(1.0, seed) };
            let first = filled(&model, &with(1));
            assert!(first.complete && !first.tokens.contains(&MASK), "{algorithm:?} {first:?}");
            assert_eq!((first.tokens.len(), first.runs <= 9), (21, true));
            assert_eq!(filled(&model, &with(1)), first);
            assert_ne!(filled(&model, &with(2)).tokens, first.tokens);
        }
    }
}

#[test]
fn blocks_are_filled_in_from_left_to_right_and_somebody_may_break_it_off() {
    let model = model("llada-dense", false);
    let settings = Settings { schedule: Some(Schedule::Blocks(8)), ..settings(0.0, 1) };
    let mut seen = 0;
    let filled = fill(&mut session(&model, cpu()), &PROMPT, &settings, &mut |step| {
        let first = step.answer.iter().position(Option::is_none).unwrap_or(21);
        assert!(step.answer[(first / 8 + 1) * 8..].iter().all(Option::is_none), "{:?}", step.answer);
        seen += 1;
        step.number < 4
    });
    let filled = filled.unwrap();
    assert_eq!((seen, filled.runs, filled.complete), (4, 4, false));
    assert_eq!(filled.tokens.iter().filter(|t| **t == MASK).count(), 21 - 8 - 3);
}

#[test]
fn devices_fill_in_the_same() {
    let Some((executor, _instance)) = device::gpu() else { return };
    let model = model("dream-dense", true);
    let settings = Settings { steps: 5, ..settings(0.0, 1) };
    let got = fill(&mut session(&model, executor), &PROMPT, &settings, &mut |_| true).unwrap();
    assert_eq!(got, filled(&model, &settings));
}

#[test]
fn what_cannot_be_is_said() {
    let model = model("llada-dense", false);
    let why = |settings: &Settings, prompt: &[u32]| {
        fill(&mut session(&model, cpu()), prompt, settings, &mut |_| true).unwrap_err().to_string()
    };
    assert!(why(&Settings { steps: 0, ..settings(0.0, 1) }, &PROMPT).contains("number of steps is 0"));
    let schedule = Some(Schedule::Timesteps(0.0));
    assert!(why(&Settings { schedule, ..settings(0.0, 1) }, &PROMPT).contains("epsilon is 0"));
    let schedule = Some(Schedule::Blocks(0));
    assert!(why(&Settings { schedule, ..settings(0.0, 1) }, &PROMPT).contains("block length is 0"));
    assert!(why(&Settings { length: 60, ..settings(0.0, 1) }, &PROMPT).contains("67 tokens"));
    assert!(why(&settings(0.0, 1), &[]).contains("empty"));
    let scheduler = {
        let room = kiln_engine::arch::Room::one(64);
        let engine = kiln_engine::run::Engine::new(Arc::clone(&model), cpu(), room, &mut |_, _| {}).unwrap();
        Scheduler::start(engine, Policy::default())
    };
    let failed = scheduler.generate(Request::new(PROMPT.to_vec())).last();
    assert!(matches!(failed, Some(Event::Failed(Error::Fills))), "{failed:?}");
    let bare = Arc::new(tiny::model(&golden("dream-dense")));
    let missing = fill(&mut session(&bare, cpu()), &PROMPT, &settings(0.0, 1), &mut |_| true).unwrap_err();
    assert!(missing.to_string().contains("mask_token_id"), "{missing}");
    let llama = Arc::new(tiny::model(&golden("llama-dense")));
    let decoder = fill(&mut session(&llama, cpu()), &PROMPT, &settings(0.0, 1), &mut |_| true).unwrap_err();
    assert!(matches!(decoder, Error::FillsNothing { architecture: "llama" }), "{decoder}");
}
