//! Files that are nearly right, past what the GGUF reader checks: hyper-parameters and tensors that do not go together, vocabularies
//! that contradict themselves, saved states with a checksum that fits. Each is refused by an error or does something; nothing panics,
//! hangs or takes memory for sizes that a file only claims.
//!
//! `KILN_MUTATIONS=N` tries N of each instead of a few; `KILN_MUTATION=SEED` one alone.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test that cannot go on should stop, and say where it was"
)]

mod golden;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use kiln_engine::arch::{BatchShape, Room, graph};
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::lower::{Target, lower};
use kiln_engine::model::Model;
use kiln_engine::run::{Engine, Entry, Wanted};
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial, Tokenizer};
use kiln_gguf::{Array, Gguf, Metadata, Strings, TensorType, Value, Writer};
use sha2::{Digest as _, Sha256};

/// Numbers that depend on the seed alone.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn one<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }
}

/// Tries seeds; those of tests of one kind begin where others do not.
fn each(kind: u64, few: u64, mutate: impl Fn(&mut Random)) {
    let variable = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let seeds = match variable("KILN_MUTATION") {
        Some(seed) => seed..seed + 1,
        None => kind << 32..(kind << 32) + variable("KILN_MUTATIONS").unwrap_or(few),
    };
    for seed in seeds {
        let result = catch_unwind(AssertUnwindSafe(|| mutate(&mut Random(seed))));
        assert!(result.is_ok(), "KILN_MUTATION={seed} panicked");
    }
}

/// What stands in the place of a number: bounds, their neighbours, and what nobody expects there.
fn number(random: &mut Random, was: f64) -> Value {
    match random.below(14) {
        0 => 0u32.into(),
        1 => 1u32.into(),
        2 => (was.max(0.0) as u32).wrapping_add(1).into(),
        3 => (was.max(0.0) as u32).wrapping_sub(1).into(),
        4 => (was.max(0.0) as u32).wrapping_mul(2).into(),
        5 => ((was.max(0.0) as u32) / 2).into(),
        6 => u32::MAX.into(),
        7 => u64::MAX.into(),
        8 => (-1i32).into(),
        9 => (random.below(300) as u32).into(),
        10 => random.one(&[f32::NAN, f32::INFINITY, -1.0, 0.0, 1e30, 1e-30]).into(),
        11 => "text".into(),
        12 => true.into(),
        _ => Value::Array(Array::U32((0..random.below(9)).map(|i| i as u32 % 3).collect())),
    }
}

/// Changes one to three values.
fn mutated(random: &mut Random, metadata: &Metadata, wanted: impl Fn(&str) -> bool) -> Metadata {
    let mut changed = metadata.clone();
    let keys: Vec<String> = metadata.iter().map(|(key, _)| key.to_owned()).filter(|key| wanted(key)).collect();
    for _ in 0..1 + random.below(3) {
        let key = random.one(&keys);
        let Some(value) = changed.value(&key).cloned() else { continue };
        match value {
            _ if random.below(8) == 0 => drop(changed.remove(&key)),
            Value::Array(Array::Str(all)) => {
                let mut words: Vec<Vec<u8>> = all.iter().map(<[u8]>::to_vec).collect();
                let at = random.below(words.len());
                match random.below(4) {
                    0 => words.truncate(at),
                    1 if !words.is_empty() => words[at] = b"\xff\xfe \xe2\x96\x81".to_vec(),
                    2 if !words.is_empty() => words[at].clear(),
                    _ => words.push(words.get(at).cloned().unwrap_or_default()),
                }
                changed.set(key, words.iter().collect::<Strings>());
            }
            Value::Array(Array::I32(mut all)) => {
                let at = random.below(all.len());
                match random.below(3) {
                    0 => all.truncate(at),
                    1 => all.push(i32::MAX),
                    _ if !all.is_empty() => all[at] = random.one(&[-1, 0, 6, 7, i32::MIN]),
                    _ => {}
                }
                changed.set(key, Value::Array(Array::I32(all)));
            }
            Value::Array(Array::F32(mut all)) => {
                let at = random.below(all.len());
                match random.below(3) {
                    0 => all.truncate(at),
                    1 => all.push(f32::NAN),
                    _ if !all.is_empty() => all[at] = random.one(&[f32::NAN, f32::INFINITY, -1e30, 0.0]),
                    _ => {}
                }
                changed.set(key, Value::Array(Array::F32(all)));
            }
            Value::Array(_) | Value::Bool(_) => changed.set(key, number(random, 1.0)),
            Value::Str(_) => changed.set(key, random.one(&["", "none", "yarn", "llama", "gpt2", "\u{0}"])),
            value => changed.set(key, number(random, value.to_string().parse().unwrap_or(1.0))),
        }
    }
    changed
}

/// The keys of a model, and its tensors by name and extents.
type Described = (Metadata, Vec<(String, Vec<usize>)>);

/// Keys and tensors of every architecture, with weights of zeros; and the tiny models with a tokenizer of their own.
fn models() -> Vec<Described> {
    // Those with heads that draft and those of long prompts have keys that no other file has.
    let folder = |of: &str| -> PathBuf { [env!("CARGO_MANIFEST_DIR"), "tests", "goldens", of].iter().collect() };
    let files =
        ["architectures", "heads", "long"].map(folder).into_iter().flat_map(|of| std::fs::read_dir(of).unwrap());
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
        .iter()
        .map(|path| {
            let mut metadata = Gguf::open(path).unwrap().metadata().clone();
            let Some(Value::Array(Array::Str(lines))) = metadata.remove("golden.tensors") else { panic!("no tensors") };
            let tensor = |line: &[u8]| {
                let line = String::from_utf8_lossy(line).into_owned();
                let mut words = line.split(' ');
                let name = words.next().unwrap().to_owned();
                (name, words.map(|n| n.parse().unwrap()).collect::<Vec<usize>>())
            };
            let tensors: Vec<_> = lines.iter().map(tensor).collect();
            let vocab = tensors.iter().find(|(name, _)| name == "token_embd.weight").map_or(0, |(_, shape)| shape[1]);
            metadata.set("tokenizer.ggml.model", "llama");
            metadata.set("tokenizer.ggml.tokens", (0..vocab).map(|i| format!("tok_{i}")).collect::<Strings>());
            metadata.set("tokenizer.ggml.scores", vec![0.0f32; vocab]);
            (metadata, tensors)
        })
        .collect()
}

#[test]
fn models_whose_parts_do_not_go_together_are_refused_or_run() {
    let models = models();
    let runs = std::cell::Cell::new(0);
    each(1, 1500, |random| {
        let (metadata, tensors) = random.one(&models);
        let metadata = mutated(random, &metadata, |key| !key.starts_with("tokenizer.") && !key.starts_with("golden."));
        let mut writer = Writer::new(metadata);
        for (name, mut shape) in tensors {
            match random.below(400) {
                0 => continue,
                1 => shape.reverse(),
                2 => shape[0] += 1,
                _ => {}
            }
            let bytes = vec![0; 4 * shape.iter().product::<usize>()];
            writer.add(&name, &shape, TensorType::F32, bytes).unwrap();
        }
        let gguf = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
        let Ok(model) = Model::new(gguf) else { return };
        let _ = model.with_head();
        let Ok(graph) = graph(&model.config, &model.gguf, &Room::one(32)) else { return };
        for shape in [BatchShape::new(1, 1), BatchShape::new(5, 5)] {
            let _ = graph.plan(shape).and_then(|plan| lower(plan, &Target::cpu()));
        }
        let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
        // One page for a text, and one for a text that it answers.
        let room = Room { pages: 2, ..Room::one(32) };
        let Ok(mut engine) = Engine::new(Arc::new(model), executor, room, &mut |_, _| {}) else { return };
        let Ok(sequence) = engine.open(0) else { return };
        if engine.start().is_some() && engine.read_source(sequence, &[3, 2, 1]).is_err() {
            return;
        }
        let fed = engine.feed(&[Entry { sequence, tokens: &[1, 2, 3], wanted: Wanted::Last }]);
        runs.set(runs.get() + usize::from(fed.is_ok()));
    });
    // Some changes change nothing that matters: not all may be refused, or nothing was tried.
    assert!(std::env::var_os("KILN_MUTATION").is_some() || runs.get() > 100, "only {} ran", runs.get());
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused_or_read_text() {
    let folder: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "tokenizer"].iter().collect();
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|end| end == "gguf"));
    files.sort();
    // The smallest ones: every kind of tokenizer is among them, and a large vocabulary says nothing more.
    files.sort_by_key(|path| std::fs::metadata(path).unwrap().len());
    let all: Vec<Metadata> = files.iter().take(6).map(|path| Gguf::open(path).unwrap().metadata().clone()).collect();
    assert!(!all.is_empty());
    let texts = [
        "",
        "Hello world",
        "\u{0}\u{feff} \u{1f600}\u{200d}é",
        "<s></s><unk>",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa 1234567",
    ];
    each(2, 60, |random| {
        let metadata = random.one(&all);
        let metadata = mutated(random, &metadata, |key| key.starts_with("tokenizer."));
        let Ok(tokenizer) = Tokenizer::from_gguf(&metadata) else { return };
        for text in texts {
            for parse in [ParseSpecial::Yes, ParseSpecial::No] {
                let Ok(tokens) = tokenizer.encode(text, AddSpecial::Yes, parse) else { continue };
                let _ = tokenizer.decode(&tokens, ShowSpecial::Yes);
            }
        }
    });
}

#[test]
fn saved_states_with_a_checksum_that_fits_are_refused_or_go_on() {
    for preset in ["tiny-llama", "tiny-gemma2", "tiny-rwkv7"] {
        let model = golden::synth(preset, 3);
        let engine = |context: usize| {
            let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
            let room = Room::one(context).with_windows(model.facts.window, 64);
            Engine::new(Arc::clone(&model), executor, room, &mut |_, _| {}).unwrap()
        };
        let mut first = engine(256);
        let id = first.open(0).unwrap();
        let text: Vec<u32> = (0..150).map(|i| (i * 37 + 11) % 256).collect();
        first.feed(&[Entry { sequence: id, tokens: &text, wanted: Wanted::Nothing }]).unwrap();
        let state = first.save_state(id).unwrap();
        let mut other = engine(128);
        let small = other.open(0).unwrap();
        let both = std::cell::RefCell::new([(&mut first, id), (&mut other, small)]);
        each(3, 150, |random| {
            let mut bytes = state[..state.len() - 32].to_vec();
            for _ in 0..1 + random.below(3) {
                // Mostly what comes first: sizes, words and tokens. The fingerprint of the model stays.
                let anywhere = random.below(3) == 0;
                let at = random.below(if anywhere { bytes.len() } else { 900.min(bytes.len()) });
                match random.below(6) {
                    _ if (8..40).contains(&at) => {}
                    0 => bytes.truncate(at),
                    1 => bytes.insert(at, random.next() as u8),
                    2 => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
                    _ => bytes[at] ^= 1 << random.below(8),
                }
                if bytes.is_empty() {
                    return;
                }
            }
            let sum = Sha256::digest(&bytes);
            bytes.extend(sum);
            for (engine, id) in both.borrow_mut().iter_mut() {
                if engine.load_state(*id, &bytes).is_ok() {
                    engine.feed(&[Entry { sequence: *id, tokens: &[7], wanted: Wanted::Last }]).ok();
                }
                engine.truncate(*id, 0).unwrap();
            }
        });
        first.load_state(id, &state).unwrap();
        assert_eq!(first.tokens(id), text);
    }
}
