//! Encoders of sounds: what comes out of a tiny one of every family, on the CPU and on a device, and the text behind it, against
//! `scripts/goldens/vision --sound`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod encoder;
mod tiny;

use std::collections::HashSet;
use std::sync::Arc;

use kiln_engine::arch::Room;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::media::{Encoder, Input, Medium, Mmproj, PromptPart};
use kiln_engine::run::{Engine, Entry, Span, Vectors, Wanted};
use kiln_engine::sound::TABLE;
use kiln_gguf::TensorType;
use kiln_media::Sound;
use serde_json::Value as Json;

use encoder::{file, goldens, nmse, number, text, wav};

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

/// The sound that `heard` of the script makes, in whole numbers of 16 bits.
fn heard(golden: &Json) -> Vec<i16> {
    let one = |i: i64| {
        let phase = (i * 331 + ((i * i) >> 7) * (i / 8000 % 3)) & 0xFFFF;
        let wave = (phase - 32_768).abs() - 16_384;
        let noise = ((((i * 7919 + ((i * i) >> 3)) * 104_729) >> 5) & 0x7FF) - 1024;
        ((wave * (i % 4000)).div_euclid(5000) + noise) as i16
    };
    (0..number(&golden["samples"]) as i64).map(one).collect()
}

fn sound(golden: &Json) -> Sound {
    Sound { rate: 16_000, samples: heard(golden).into_iter().map(|v| f32::from(v) / 32_768.0).collect() }
}

fn open(golden: &Json) -> Arc<Mmproj> {
    Arc::new(Mmproj::new(file(golden, None, &[])).unwrap())
}

fn golden(name: &str) -> Json {
    goldens("sound").into_iter().find(|(known, _)| known == name).unwrap().1
}

fn floats(values: &Json) -> Vec<f32> {
    values.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
}

/// How far the rows of each golden are off, at worst.
fn judge(executor: impl Fn() -> Box<dyn Executor>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, golden) in goldens("sound") {
        let mmproj = Arc::new(Mmproj::new(file(&golden, None, &[])).unwrap_or_else(|e| panic!("{name}: {e}")));
        let audio = mmproj.audio().unwrap();
        let inputs = audio.prepare(sound(&golden));
        assert_eq!(inputs.len(), number(&golden["inputs"]), "{name}");
        let mut encoder = Encoder::new(mmproj.clone(), executor(), &mut |_, _| {}).unwrap();
        for chunk in golden["chunks"].as_array().unwrap() {
            let input = &inputs[number(&chunk["input"])];
            let start = std::time::Instant::now();
            let rows = encoder.encode(Input::Sound(input)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let seconds = start.elapsed().as_secs_f32();
            let sums = floats(&chunk["sums"]);
            assert_eq!(rows.values.len(), sums.len() * mmproj.width(), "{name}: rows");
            assert_eq!(audio.rows(input.frames()), sums.len(), "{name}: rows that are counted");
            let got: Vec<f32> = rows.values.chunks_exact(rows.width).map(|row| row.iter().sum()).collect();
            let by_sums = nmse(&got, &sums);
            let kept = chunk["rows"].as_array().unwrap().iter().map(number);
            let got: Vec<f32> = kept.flat_map(|row| rows.values[row * rows.width..][..rows.width].to_vec()).collect();
            let want: Vec<f32> = chunk["values"].as_array().unwrap().iter().flat_map(floats).collect();
            let off = nmse(&got, &want);
            println!("{name} input {}: {off:.1e}, sums {by_sums:.1e}, {seconds:.2} s", chunk["input"]);
            if off.is_nan() || off > 1e-6 || by_sums.is_nan() || by_sums > 1e-6 {
                wrong.push(format!("{name}: {off:.1e}, sums {by_sums:.1e}"));
            }
        }
    }
    wrong
}

#[test]
fn rows_are_those_of_the_reference_on_the_cpu() {
    let wrong = judge(cpu);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn rows_are_those_of_the_reference_on_a_device() {
    let Some((_, _instance)) = device::gpu() else { return };
    let wrong = judge(|| device::gpu().unwrap().0);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_words_around_sounds_are_those_of_the_reference() {
    for (name, golden) in goldens("sound") {
        let mmproj = open(&golden);
        let got = mmproj.audio().unwrap().pieces(number(&golden["inputs"])).into_iter().map(|piece| match piece {
            PromptPart::Words(text) => Json::from(text),
            PromptPart::Input(input) => Json::from(input),
        });
        let want = golden["layout"].as_array().unwrap().iter().filter(|piece| piece.as_str() != Some("")).cloned();
        assert_eq!(got.collect::<Vec<_>>(), want.collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn logits_behind_sounds_are_those_of_the_reference() {
    let all = goldens("behind_sounds");
    assert!(all.len() > 2);
    for (name, behind) in all {
        let of_encoder = golden(&name);
        let (mmproj, model) = (open(&of_encoder), Arc::new(text(&behind)));
        mmproj.check_model(&model).unwrap_or_else(|e| panic!("{name}: {e}"));
        // From the bytes of a file, as people bring them.
        let shown = mmproj.hear(&wav(16_000, &heard(&of_encoder))).unwrap();
        let mut encoder = Encoder::new(mmproj.clone(), cpu(), &mut |_, _| {}).unwrap();
        let vectors: Vectors = encoder.vectors(&shown, number(&of_encoder["inputs"]) - 1).unwrap();
        assert_eq!(vectors.tokens().len(), number(&behind["rows"]), "{name}");
        let (mut tokens, mut spans) = (Vec::new(), Vec::new());
        for words in behind["words"].as_array().unwrap() {
            if !tokens.is_empty() {
                spans.push(Span { start: tokens.len(), vectors: vectors.clone() });
                tokens.extend(vectors.tokens());
            }
            tokens.extend(words.as_array().unwrap().iter().map(|token| number(token) as u32));
        }
        let [k_type, v_type] = [TensorType::F32; 2];
        let context = tokens.len().next_multiple_of(64) + 64;
        let room = Room { pages: context / 16, sequences: 2, states: 2, k_type, v_type, ..Room::one(context) };
        let mut engine = Engine::new(Arc::clone(&model), cpu(), room, &mut |_, _| {}).unwrap();
        let want = floats(&behind["logits"]);
        for size in [tokens.len(), 33] {
            let id = engine.open(0).unwrap();
            engine.attach(id, &spans).unwrap();
            let mut got = Vec::new();
            for piece in tokens.chunks(size) {
                let entry = Entry { sequence: id, tokens: piece, wanted: Wanted::Last };
                got = engine.feed(&[entry]).unwrap().remove(0);
            }
            engine.close(id);
            let off = nmse(&got, &want);
            println!("{name} in pieces of {size}: {off:.1e}");
            assert!(off < 1e-6, "{name} in pieces of {size}: {off:.1e}");
        }
    }
}

#[test]
fn what_a_file_does_not_encode_is_refused() {
    let hears = open(&golden("ultravox"));
    let pictures = hears.show(b"\x89PNG\r\n\x1a\n", 0).unwrap_err().to_string();
    assert!(pictures.contains("encodes no pictures"), "{pictures}");
    let (_, sees) = goldens("vision").into_iter().find(|(name, _)| name == "llava").unwrap();
    let sounds = open(&sees).hear(&wav(16_000, &[0; 400])).unwrap_err().to_string();
    assert!(sounds.contains("encodes no sounds"), "{sounds}");
    let broken = hears.hear(b"RIFF\0\0\0\0WAVE").unwrap_err().to_string();
    assert!(broken.contains("WAV sound cannot be decoded"), "{broken}");
    assert_eq!(Medium::of(&wav(16_000, &[0; 4])), Some(Medium::Sound));
    assert_eq!(Medium::of(b"text"), None);
    for (encoder, model, part) in [
        ("ultravox", "llama-dense", "belongs to another model"),
        ("ultravox", "granite-dense", "factor of its embeddings"),
        ("ultravox", "bert-dense", "does not continue a text"),
    ] {
        let refused = open(&golden(encoder)).check_model(&tiny::model(&tiny::golden(model))).unwrap_err().to_string();
        assert!(refused.contains(part), "{encoder} before {model}: {refused}");
    }
}

#[test]
fn a_file_may_see_and_hear() {
    let (_, mut both) = goldens("vision").into_iter().find(|(name, _)| name == "qwen25vl").unwrap();
    let hears = golden("qwen2a");
    let (keys, more) = (both["keys"].as_object_mut().unwrap(), hears["keys"].as_object().unwrap());
    more.iter().for_each(|(key, value)| _ = keys.insert(key.clone(), value.clone()));
    keys.insert("clip.projector_type".to_owned(), "qwen2.5o".into());
    both["tensors"].as_array_mut().unwrap().extend(hears["tensors"].as_array().unwrap().clone());
    let mmproj = open(&both);
    assert_eq!(mmproj.vision().unwrap().row.projector, "qwen2.5vl_merger");
    assert_eq!(mmproj.audio().unwrap().row.projector, "qwen2a");
    let mut encoder = Encoder::new(mmproj.clone(), cpu(), &mut |_, _| {}).unwrap();
    let heard_alone = {
        let alone = open(&hears);
        let shown = alone.hear(&wav(16_000, &heard(&hears))).unwrap();
        let vectors = Encoder::new(alone, cpu(), &mut |_, _| {}).unwrap().vectors(&shown, 0).unwrap();
        (shown.rows(), vectors.width())
    };
    let shown = mmproj.take(Medium::Sound, &wav(16_000, &heard(&hears)), 0).unwrap();
    let vectors = encoder.vectors(&shown, 0).unwrap();
    assert_eq!((shown.rows(), vectors.width()), heard_alone);
    let picture = mmproj.vision().unwrap().prepare(&encoder::drawn(&both)).unwrap();
    let rows = encoder.encode(Input::Picture(&picture.tiles[0])).unwrap();
    assert_eq!(rows.width, mmproj.width());
    // Another sound, and the same sound by another file, have other names in the prefix cache.
    let other = mmproj.hear(&wav(16_000, &heard(&hears)[1..])).unwrap();
    assert_ne!(encoder.vectors(&other, 0).unwrap().tokens(), vectors.tokens());
    // One of a family that is not known does not stand in the way of the other.
    both["keys"]["clip.vision.projector_type"] = "hologram".into();
    both["keys"]["clip.audio.projector_type"] = "qwen2a".into();
    both["keys"].as_object_mut().unwrap().remove("clip.projector_type");
    let deaf = open(&both);
    assert!(deaf.vision().is_none() && deaf.audio().is_some());
    assert!(deaf.needs_vision().err().unwrap().to_string().contains("hologram"));
}

#[test]
fn every_family_has_a_golden() {
    let judged: HashSet<&str> =
        goldens("sound").iter().map(|(_, golden)| open(golden).audio().unwrap().row.projector).collect();
    let missing: Vec<&str> = TABLE.iter().map(|row| row.projector).filter(|name| !judged.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    for (name, golden) in goldens("sound") {
        for tensor in golden["tensors"].as_array().unwrap() {
            let without = tensor[0].as_str().unwrap();
            if let Err(error) = Mmproj::new(file(&golden, Some(without), &[])) {
                let message = error.to_string();
                assert!(message.contains('`'), "{name} without {without}: {message}");
            }
        }
        for (key, value, part) in [
            ("clip.audio.num_mel_bins", Json::from(0), "clip.audio.num_mel_bins"),
            ("clip.audio.num_mel_bins", Json::from(300), "clip.audio.num_mel_bins"),
            ("clip.projector_type", Json::from("hologram"), "hologram"),
            ("clip.has_audio_encoder", Json::from(false), "neither"),
        ] {
            let error = Mmproj::new(file(&golden, None, &[(key, value)])).unwrap_err().to_string();
            assert!(error.contains(part), "{name} with {key}: {error}");
        }
        if name != "gemma4ua" {
            for (key, value) in [("embedding_length", 60), ("attention.head_count", 7)] {
                let key = format!("clip.audio.{key}");
                let error = Mmproj::new(file(&golden, None, &[(&key, Json::from(value))])).unwrap_err().to_string();
                assert!(error.contains('`') || error.contains(&key), "{name} with {key}: {error}");
            }
        }
    }
}
