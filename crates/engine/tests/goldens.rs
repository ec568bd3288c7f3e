//! Transformers against llama.cpp on both executors: prompts of 1 to 370 tokens, and greedy texts. The models are tiny and have
//! random weights; `scripts/oracle/models` does the same with real ones.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod device;
mod golden;

use std::sync::Arc;

use kiln_engine::Session;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::model::Model;
use kiln_engine::run::Wanted;
use kiln_gguf::TensorType;

use device::gpu;
use golden::{Golden, SEED, synth};

/// Tokens that are further ahead of the next likely one than this must be those of llama.cpp.
const LEAD: f32 = 0.05;

fn executors() -> Vec<Box<dyn Executor>> {
    let cpu: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Fast));
    std::iter::once(cpu).chain(gpu().map(|(gpu, _)| gpu)).collect()
}

fn session(model: &Arc<Model>, executor: Box<dyn Executor>) -> Session {
    Session::with_caches(Arc::clone(model), executor, 512, [TensorType::F32; 2], &mut |_, _| {}).unwrap()
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let squared = |a: f32, b: f32| f64::from(a - b).powi(2);
    let sum: f64 = got.iter().zip(want).map(|(a, b)| squared(*a, *b)).sum();
    sum / want.iter().map(|w| squared(*w, 0.0)).sum::<f64>()
}

#[test]
fn logits_and_greedy_texts_are_those_of_llama_cpp() {
    for preset in ["tiny-llama", "tiny-qwen2", "tiny-gemma2"] {
        let (golden, model) = (Golden::read(preset), synth(preset, SEED));
        let vocab = model.config.vocab;
        assert!(golden.positions.contains(&299) && golden.greedy.len() == 64);
        for executor in executors() {
            let mut session = session(&model, executor);
            for (last, want) in golden.positions.iter().zip(golden.logits.chunks_exact(vocab)) {
                session.reset().unwrap();
                let got = session.feed(&golden.tokens[..=*last as usize], Wanted::Last).unwrap();
                let error = nmse(&got, want);
                assert!(error < 1e-5, "{preset} on {}: {} tokens, {error:.1e}", session.describe(), last + 1);
            }
            // Given the same text before it, every token that is clearly the likeliest.
            session.reset().unwrap();
            let text = [&golden.prompt[..], &golden.greedy[..golden.greedy.len() - 1]].concat();
            let all = session.feed(&text, Wanted::All).unwrap();
            let (ends, mut clear) = (model.tokenizer.end_ids(), 0);
            for (row, token) in all.chunks_exact(vocab).skip(golden.prompt.len() - 1).zip(&golden.greedy) {
                let mut best: Vec<(f32, u32)> =
                    row.iter().copied().zip(0..).filter(|(_, id)| !ends.contains(id)).collect();
                best.sort_by(|a, b| b.0.total_cmp(&a.0));
                if best[0].0 - best[1].0 > LEAD {
                    assert_eq!(best[0].1, *token, "{preset} on {}", session.describe());
                    clear += 1;
                }
            }
            assert!(clear > 32, "{preset}: only {clear} tokens are far ahead of others");
        }
    }
}
