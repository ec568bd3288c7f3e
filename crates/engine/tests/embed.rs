//! Vectors of texts through the scheduler: many at once, with every pooling, beside texts that are being written.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::Arc;

use kiln_engine::Error;
use kiln_engine::arch::Room;
use kiln_engine::embed::{Layers, Pooling, cosine};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{EmbedRequest, Engine, Event, Policy, Request, Scheduler};
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, TensorType};

fn model(preset: &str) -> Arc<Model> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 5);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

fn scheduler_on(model: &Arc<Model>, executor: Box<dyn Executor>, context: usize) -> Scheduler {
    let room = Room::for_sequences(4, context);
    let room = Room { k_type: TensorType::F32, v_type: TensorType::F32, ..room };
    let engine = Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap();
    Scheduler::start(engine, Policy::default())
}

fn scheduler(model: &Arc<Model>, context: usize) -> Scheduler {
    scheduler_on(model, Box::new(CpuExecutor::new(Arithmetic::Fast)), context)
}

/// Texts of so many tokens, all different.
fn texts(lengths: &[usize]) -> Vec<Vec<u32>> {
    let token = |i: usize, n: usize| (7 + i * 31 + n * n * 13) as u32 % 150;
    lengths.iter().enumerate().map(|(i, n)| (0..*n).map(|n| token(i, n)).collect()).collect()
}

fn embed(scheduler: &Scheduler, texts: &[Vec<u32>], pooling: Pooling) -> Vec<Vec<f32>> {
    scheduler.embed(EmbedRequest { texts: texts.to_vec(), pooling }).unwrap()
}

const LENGTHS: [usize; 9] = [1, 2, 100, 7, 64, 65, 128, 3, 31];

#[test]
fn texts_together_are_as_each_alone_with_every_pooling() {
    let model = model("bert-tiny");
    let scheduler = scheduler(&model, 128);
    let texts = texts(&LENGTHS);
    let all = embed(&scheduler, &texts, Pooling::None);
    for pooling in [Pooling::None, Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Rank] {
        let together = embed(&scheduler, &texts, pooling);
        for ((text, together), rows) in texts.iter().zip(&together).zip(&all) {
            let alone = embed(&scheduler, std::slice::from_ref(text), pooling).remove(0);
            assert_eq!(alone.len(), together.len());
            let far = alone.iter().zip(together).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far < 1e-4, "{pooling:?} of {} tokens: {far}", text.len());
            // What a pooling takes of the tokens' vectors.
            let rows: Vec<&[f32]> = rows.chunks_exact(64).collect();
            let want = match pooling {
                Pooling::None | Pooling::Rank => continue,
                Pooling::Cls => rows[0].to_vec(),
                Pooling::Last => rows[rows.len() - 1].to_vec(),
                Pooling::Mean => {
                    (0..64).map(|i| rows.iter().map(|row| row[i]).sum::<f32>() / rows.len() as f32).collect()
                }
            };
            assert!(cosine(&want, together) > 1.0 - 1e-9, "{pooling:?} of {} tokens", text.len());
        }
    }
    let scores = embed(&scheduler, &texts, Pooling::Rank);
    let first = all[2].chunks_exact(64).next().unwrap().to_vec();
    assert!((Layers::read(&model).unwrap().scores(first)[0] - scores[2][0]).abs() < 1e-5, "{:?}", scores[2]);
}

#[test]
fn a_device_gives_the_same_vectors() {
    let Some((executor, _instance)) = device::gpu() else { return };
    let (model, texts) = (model("bert-tiny"), texts(&[5, 1, 40]));
    let want = embed(&scheduler(&model, 64), &texts, Pooling::Mean);
    let got = embed(&scheduler_on(&model, executor, 64), &texts, Pooling::Mean);
    for (got, want) in got.iter().zip(&want) {
        assert!(cosine(got, want) > 1.0 - 1e-8, "{}", cosine(got, want));
    }
}

#[test]
fn a_model_that_writes_embeds_in_pieces_and_beside_texts() {
    let model = model("tiny-llama");
    // Longer than what goes through the model at once.
    let long = texts(&[1300, 5]);
    let scheduler = scheduler(&model, 1536);
    let writes = scheduler.generate(Request { limit: Some(40), ..Request::new(vec![5, 6, 7]) });
    let last = embed(&scheduler, &long, Pooling::Last);
    let all = embed(&scheduler, &long, Pooling::None);
    let mean = embed(&scheduler, &long, Pooling::Mean);
    for i in 0..2 {
        assert_eq!(all[i].len(), 64 * long[i].len());
        assert!(cosine(&all[i][all[i].len() - 64..], &last[i]) > 1.0 - 1e-9);
        let sums = (0..64).map(|c| all[i].iter().skip(c).step_by(64).sum::<f32>());
        assert!(cosine(&sums.collect::<Vec<f32>>(), &mean[i]) > 1.0 - 1e-9);
    }
    assert!(matches!(writes.last(), Some(Event::End { .. })), "the text beside them is finished");
    assert!(matches!(Pooling::choose(&model, None), Err(Error::NoEmbedder { .. })));
    assert!(matches!(Pooling::choose(&model, Some(Pooling::Rank)), Err(Error::NoRanking)));
}

#[test]
fn what_cannot_be_embedded_is_refused_with_both_numbers() {
    let model = model("bert-tiny");
    let scheduler = scheduler(&model, 128);
    let refused =
        |texts: Vec<Vec<u32>>| scheduler.embed(EmbedRequest { texts, pooling: Pooling::Mean }).unwrap_err().to_string();
    let long = refused(texts(&[3, 129]));
    assert!(long.contains("text 2 has 129 tokens") && long.contains("128"), "{long}");
    assert!(refused(vec![vec![1], vec![]]).contains("text 2 is empty"));
    assert!(refused(vec![vec![1_000_000]]).contains("1000000"));
    assert!(embed(&scheduler, &[], Pooling::Mean).is_empty());
    let event = scheduler.generate(Request::new(vec![5])).next();
    assert!(matches!(event, Some(Event::Failed(Error::NoText))), "{event:?}");
    assert_eq!(Pooling::choose(&model, None).unwrap(), Pooling::Mean);
}
