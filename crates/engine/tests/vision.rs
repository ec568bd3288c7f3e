//! Encoders of pictures: what comes out of a tiny one of every family, on the CPU and on a device, against `scripts/goldens/vision`.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;
mod encoder;
mod frail;
mod tiny;

use std::collections::HashSet;
use std::sync::Arc;

use kiln_engine::Error;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::media::{Encoder, Input, Mmproj, PromptPart, Shown};
use kiln_engine::vision::TABLE;
use kiln_media::Pixels;
use serde_json::Value as Json;

use encoder::{drawn, file, goldens, nmse, number};
use frail::{Fault, Frail, Trigger};

/// How far the rows of each golden are off, at worst.
fn judge(executor: impl Fn() -> Box<dyn Executor>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, golden) in goldens("vision") {
        let mmproj = Arc::new(Mmproj::new(file(&golden, None, &[])).unwrap_or_else(|e| panic!("{name}: {e}")));
        let vision = mmproj.vision().unwrap();
        let prepared = vision.prepare(&drawn(&golden)).unwrap();
        let inputs: Vec<&Pixels> = prepared.tiles.iter().chain(&prepared.overview).collect();
        assert_eq!(inputs.len(), number(&golden["inputs"]), "{name}");
        let mut encoder = Encoder::new(mmproj.clone(), executor(), &mut |_, _| {}).unwrap();
        for chunk in golden["chunks"].as_array().unwrap() {
            let input = inputs[number(&chunk["input"])];
            let rows = encoder.encode(Input::Picture(input)).unwrap_or_else(|e| panic!("{name}: {e}"));
            let sums: Vec<f32> = chunk["sums"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
            assert_eq!(rows.values.len(), sums.len() * mmproj.width(), "{name}: rows");
            assert_eq!(vision.rows(vision.grid(input.size)), sums.len(), "{name}: rows that are counted");
            let got: Vec<f32> = rows.values.chunks_exact(rows.width).map(|row| row.iter().sum()).collect();
            let by_sums = nmse(&got, &sums);
            let kept = chunk["rows"].as_array().unwrap().iter().map(number);
            let got: Vec<f32> = kept.flat_map(|row| rows.values[row * rows.width..][..rows.width].to_vec()).collect();
            let want = chunk["values"].as_array().unwrap().iter().flat_map(|row| row.as_array().unwrap());
            let want: Vec<f32> = want.map(|v| v.as_f64().unwrap() as f32).collect();
            let off = nmse(&got, &want);
            println!("{name} input {}: {off:.1e}, sums {by_sums:.1e}", chunk["input"]);
            if off.is_nan() || off > 1e-6 || by_sums.is_nan() || by_sums > 1e-6 {
                wrong.push(format!("{name}: {off:.1e}, sums {by_sums:.1e}"));
            }
        }
    }
    wrong
}

#[test]
fn rows_are_those_of_the_reference_on_the_cpu() {
    let wrong = judge(|| Box::new(CpuExecutor::new(Arithmetic::Fast)));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn rows_are_those_of_the_reference_on_a_device() {
    let Some((_, _instance)) = device::gpu() else { return };
    let wrong = judge(|| device::gpu().unwrap().0);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_words_around_pictures_are_those_of_the_reference() {
    /// Words that follow each other are one text.
    fn shown(pieces: impl Iterator<Item = PromptPart<usize>>) -> String {
        pieces
            .map(|piece| match piece {
                PromptPart::Words(text) => text,
                PromptPart::Input(input) => format!("\u{1}{input}\u{1}"),
            })
            .collect()
    }
    for (name, golden) in goldens("vision") {
        let mmproj = Mmproj::new(file(&golden, None, &[])).unwrap();
        let vision = mmproj.vision().unwrap();
        let prepared = vision.prepare(&drawn(&golden)).unwrap();
        let want = golden["layout"].as_array().unwrap().iter().map(|piece| match piece.as_str() {
            Some(text) => PromptPart::Words(text.to_owned()),
            None => PromptPart::Input(number(piece)),
        });
        assert_eq!(shown(vision.pieces(&prepared, 0).into_iter()), shown(want), "{name}");
    }
}

#[test]
fn models_that_pictures_cannot_be_put_before_are_refused() {
    let vision = |name: &str| {
        let (_, golden) = goldens("vision").into_iter().find(|(known, _)| known == name).unwrap();
        Mmproj::new(file(&golden, None, &[])).unwrap()
    };
    for (encoder, model, part) in [
        ("llava", "llama-dense", "belongs to another model"),
        ("llava", "granite-dense", "factor of its embeddings"),
        ("llava", "hunyuan_vl-dense", "several positions"),
        ("qwen2vl", "qwen2vl-dense", "belongs to another model"),
        ("gemma3", "llama-dense", "both directions"),
        ("llava", "bert-dense", "does not continue a text"),
    ] {
        let refused = vision(encoder).check_model(&tiny::model(&tiny::golden(model))).unwrap_err().to_string();
        assert!(refused.contains(part), "{encoder} before {model}: {refused}");
    }
}

#[test]
fn every_family_has_a_golden() {
    let judged: HashSet<String> = goldens("vision")
        .iter()
        .map(|(_, golden)| Mmproj::new(file(golden, None, &[])).unwrap().vision().unwrap().row.projector.to_owned())
        .collect();
    let missing: Vec<&str> = TABLE.iter().map(|row| row.projector).filter(|name| !judged.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    for (name, golden) in goldens("vision") {
        // Every tensor that a family needs is missed by name; those that may be missing change the plan and break nothing.
        for tensor in golden["tensors"].as_array().unwrap() {
            let without = tensor[0].as_str().unwrap();
            if let Err(error) = Mmproj::new(file(&golden, Some(without), &[])) {
                let message = error.to_string();
                assert!(message.contains('`') || message.contains("keys of"), "{name} without {without}: {message}");
            }
        }
        for (key, value, part) in [
            ("clip.vision.patch_size", Json::from(0), "clip.vision.patch_size"),
            ("clip.vision.embedding_length", Json::from(60), "`"),
            ("clip.vision.image_size", Json::from(9000), "clip.vision.image_size"),
            ("clip.vision.attention.head_count", Json::from(7), "clip.vision.attention.head_count"),
            ("clip.projector_type", Json::from("hologram"), "hologram"),
            ("general.architecture", Json::from("llama"), "llama"),
            ("clip.has_vision_encoder", Json::from(false), "neither"),
        ] {
            let error = Mmproj::new(file(&golden, None, &[(key, value)])).unwrap_err().to_string();
            assert!(error.contains(part), "{name} with {key}: {error}");
        }
    }
}

/// A picture of one colour, in bytes of a file.
fn bmp(side: u32, colour: u32) -> Vec<u8> {
    let row = (3 * side).next_multiple_of(4);
    let mut bytes = b"BM".to_vec();
    for word in [54 + row * side, 0, 54, 40, side, side, 1 | 24 << 16, 0, row * side, 2835, 2835, 0, 0] {
        bytes.extend(word.to_le_bytes());
    }
    let line = colour.to_le_bytes()[..3].repeat(side as usize);
    (0..side).for_each(|_| bytes.extend(line.iter().copied().chain(std::iter::repeat_n(0, row as usize - line.len()))));
    bytes
}

fn one_of(name: &str) -> Arc<Mmproj> {
    let (_, golden) = goldens("vision").into_iter().find(|(found, _)| found == name).unwrap();
    Arc::new(Mmproj::new(file(&golden, None, &[])).unwrap())
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

/// Many small pictures hold no more memory than few, and what was prepared again when it was encoded gives the same rows.
#[test]
fn a_prompt_of_many_small_pictures_holds_little_memory() {
    const MOST: usize = 128 << 20;
    let mmproj = one_of("qwen2vl");
    let (mut all, mut held): (Vec<Shown>, usize) = (Vec::new(), 0);
    let small = bmp(4, 0x40_80_C0);
    while all.last().is_none_or(|shown| shown.held() > 0) {
        all.push(mmproj.show(&small, 0).unwrap());
        held += all.last().unwrap().held();
        assert!(held <= MOST, "{} pictures hold {held} bytes", all.len());
    }
    assert!(all.len() > 10);
    let rows =
        |shown: &Shown| Encoder::new(Arc::clone(&mmproj), cpu(), &mut |_, _| {}).unwrap().vectors(shown, 0).unwrap();
    let (first, last) = (all.first().unwrap(), all.last().unwrap());
    assert_eq!((last.held(), last.rows()), (0, first.rows()));
    assert_eq!(rows(first).values(), rows(last).values());
    // What is dropped makes room.
    all.truncate(1);
    assert!(mmproj.show(&small, 0).unwrap().held() > 0);
}

/// What goes wrong once on a device is mended, also where the device has to be opened again.
#[test]
fn an_encoder_outlives_what_happens_to_its_device() {
    let mmproj = one_of("gemma3");
    let pictures = [1, 2, 3].map(|colour| mmproj.show(&bmp(8, colour), 0).unwrap());
    let encode = |encoder: &mut Encoder| -> Result<Vec<Vec<f32>>, Error> {
        pictures.iter().map(|shown| Ok(encoder.vectors(shown, 0)?.values().to_vec())).collect()
    };
    let on = |fault| {
        let executor = Box::new(Frail::new(&Trigger::after(fault, 1)));
        Encoder::new(Arc::clone(&mmproj), executor, &mut |_, _| {}).unwrap()
    };
    let want = encode(&mut Encoder::new(Arc::clone(&mmproj), cpu(), &mut |_, _| {}).unwrap()).unwrap();
    for fault in [Fault::Stall, Fault::Range] {
        assert_eq!(encode(&mut on(fault)).unwrap(), want);
    }
    for fault in [Fault::Lost, Fault::Hung] {
        assert!(encode(&mut on(fault)).unwrap_err().is_lost(), "nobody can open it again");
        assert_eq!(encode(&mut on(fault).lasting(Box::new(|| Ok(cpu())))).unwrap(), want);
        // It is not there again at once: that picture fails, the next one does not.
        let tries = std::sync::atomic::AtomicUsize::new(0);
        let later = move || match tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => Err(kiln_gpu::Error::NoDevice.into()),
            _ => Ok(cpu()),
        };
        let mut encoder = on(fault).lasting(Box::new(later));
        assert!(encode(&mut encoder).unwrap_err().is_lost());
        assert_eq!(encode(&mut encoder).unwrap(), want);
    }
}
