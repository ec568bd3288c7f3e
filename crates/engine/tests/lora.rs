//! Adapters: a model with one says what the same model says after the adapter was added to its weights, on every executor and
//! in batches where each text has its own; files that do not fit are refused with one clear line.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::Arc;

use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::lower::{Target, lower};
use kiln_engine::model::{Adapter, Model};
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, SequenceId, Wanted};
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, Metadata, TensorType, Value, Writer};
use kiln_gpu::Caps;
use kiln_kernels::sample::Row;

use device::gpu;

const EMBEDDING: &str = "token_embd.weight";

fn base(preset: &str) -> Vec<u8> {
    let synth = Synth::new(Preset::from_name(preset).unwrap(), Recipe::from_name("F32").unwrap(), 5);
    synth.to_bytes().unwrap()
}

fn gguf(bytes: &[u8]) -> Gguf {
    Gguf::from_bytes(bytes.to_vec()).unwrap()
}

fn model(bytes: &[u8]) -> Model {
    Model::new(gguf(bytes)).unwrap()
}

/// Small numbers without a pattern.
fn noise(n: usize, seed: usize, size: f32) -> Vec<f32> {
    let mut state = seed as u64 * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
    };
    (0..n).map(|_| next()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn metadata(architecture: &str, alpha: f32) -> Metadata {
    let mut metadata = Metadata::new();
    metadata.set("general.type", "adapter");
    metadata.set("general.architecture", architecture);
    metadata.set("adapter.type", "lora");
    metadata.set("adapter.lora.alpha", Value::F32(alpha));
    metadata
}

/// A pair for one tensor: names, extents, numbers.
struct Pair {
    weight: String,
    a: (Vec<usize>, Vec<f32>),
    b: (Vec<usize>, Vec<f32>),
}

const ALPHA: f32 = 6.0;

/// A pair for every matrix of a model, experts and embeddings too.
fn pairs(base: &Gguf, rank: usize, seed: usize) -> Vec<Pair> {
    let mut all = Vec::new();
    for (i, info) in base.tensors().iter().enumerate() {
        let [input, output, experts, _] = info.shape;
        if info.n_dims < 2 || info.name.contains("norm") {
            continue;
        }
        let (a, b) = match info.name == EMBEDDING {
            true => (vec![rank, output], vec![rank, input]),
            false if experts > 1 => (vec![input, rank, experts], vec![rank, output, experts]),
            false => (vec![input, rank], vec![rank, output]),
        };
        let values = |shape: &[usize], seed| noise(shape.iter().product(), seed, 0.3);
        let (first, second) = (values(&a, seed + 2 * i), values(&b, seed + 2 * i + 1));
        all.push(Pair { weight: info.name.clone(), a: (a, first), b: (b, second) });
    }
    all
}

fn file(architecture: &str, pairs: &[Pair]) -> Gguf {
    let mut writer = Writer::new(metadata(architecture, ALPHA));
    for Pair { weight, a, b } in pairs {
        writer.add(&format!("{weight}.lora_a"), &a.0, TensorType::F32, bytes(&a.1)).unwrap();
        writer.add(&format!("{weight}.lora_b"), &b.0, TensorType::F32, bytes(&b.1)).unwrap();
    }
    Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()
}

/// The model's file with pairs added to its weights, in f64.
fn merged(base: &Gguf, all: &[(&[Pair], f32)]) -> Vec<u8> {
    let mut metadata = Metadata::new();
    base.metadata().iter().for_each(|(key, value)| metadata.set(key, value.clone()));
    let mut writer = Writer::new(metadata);
    for info in base.tensors() {
        let mut data = base.data(info).to_vec();
        for (pairs, scale) in all {
            if let Some(pair) = pairs.iter().find(|pair| pair.weight == info.name) {
                data = add(&data, pair, *scale, info.shape);
            }
        }
        writer.add(&info.name, info.dims(), info.ty, data).unwrap();
    }
    writer.to_bytes().unwrap()
}

fn add(data: &[u8], pair: &Pair, scale: f32, [input, output, ..]: [usize; 4]) -> Vec<u8> {
    let embeds = pair.weight == EMBEDDING;
    let rank = pair.b.0[0];
    let factor = f64::from(scale) * f64::from(ALPHA) / rank as f64;
    let mut values: Vec<f32> = data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    for (at, value) in values.iter_mut().enumerate() {
        let (i, o, e) = (at % input, at / input % output, at / input / output);
        let term = |r: usize| {
            let (a, b) = match embeds {
                true => (pair.a.1[o * rank + r], pair.b.1[i * rank + r]),
                false => (pair.a.1[(e * rank + r) * input + i], pair.b.1[(e * output + o) * rank + r]),
            };
            f64::from(a) * f64::from(b)
        };
        *value = (f64::from(*value) + factor * (0..rank).map(term).sum::<f64>()) as f32;
    }
    bytes(&values)
}

fn with(model: Model, adapters: &[(&Gguf, f32)]) -> Arc<Model> {
    let one = |(file, scale): &(&Gguf, f32)| Adapter::new(file, "adapter.gguf", *scale, &model).unwrap();
    let adapters = adapters.iter().map(one).collect();
    Arc::new(model.with_adapters(adapters).unwrap())
}

fn executors() -> Vec<Box<dyn Executor>> {
    let cpu: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Fast));
    [Some(cpu), gpu().map(|(gpu, _)| gpu)].into_iter().flatten().collect()
}

fn engine(model: &Arc<Model>, executor: Box<dyn Executor>) -> Engine {
    let room = Room { pages: 16, sequences: 4, states: 4, ..Room::one(256) };
    Engine::new(Arc::clone(model), executor, room, &mut |_, _| {}).unwrap()
}

fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11 + salt * 101) % 256).collect()
}

fn feed(engine: &mut Engine, sequence: SequenceId, tokens: &[u32], wanted: Wanted) -> Vec<f32> {
    engine.feed(&[Entry { sequence, tokens, wanted }]).unwrap().remove(0)
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let squares = |a: f32, b: f32| f64::from(a - b).powi(2);
    let sum: f64 = got.iter().zip(want).map(|(a, b)| squares(*a, *b)).sum();
    sum / want.iter().map(|w| squares(*w, 0.0)).sum::<f64>()
}

#[test]
fn an_adapter_says_what_the_merged_model_says() {
    // Caches of F16 round; what is left of both sides differs by that.
    for (preset, most) in [("tiny-llama", 1e-5), ("tiny-qwen3moe", 1e-5)] {
        let bytes = base(preset);
        let plain = model(&bytes);
        let kind = plain.config.architecture.name;
        let (one, two) = (pairs(&plain.gguf, 4, 100), pairs(&plain.gguf, 3, 900));
        let want = Arc::new(model(&merged(&gguf(&bytes), &[(&one, 0.7), (&two, -0.4)])));
        let files = [file(kind, &one), file(kind, &two)];
        let adapted = with(plain, &[(&files[0], 0.7), (&files[1], -0.4)]);
        let plain = Arc::new(model(&bytes));
        for (mine, judge) in executors().into_iter().zip(executors()) {
            let place = mine.describe();
            let (mut mine, mut judge) = (engine(&adapted, mine), engine(&want, judge));
            let mut untouched = engine(&plain, Box::new(CpuExecutor::new(Arithmetic::Fast)));
            for (n, wanted) in [(1, Wanted::Last), (7, Wanted::All), (40, Wanted::Last), (3, Wanted::All)] {
                let tokens = text(n, n);
                let of = |engine: &mut Engine| {
                    let sequence = engine.open(0).unwrap();
                    let logits = feed(engine, sequence, &tokens, wanted);
                    engine.close(sequence);
                    logits
                };
                let (got, want) = (of(&mut mine), of(&mut judge));
                let error = nmse(&got, &want);
                assert!(error < most, "{preset}, {n} tokens on {place}: {error}");
                // And the adapter is worth looking at.
                assert!(nmse(&got, &of(&mut untouched)) > 0.01, "{preset}: the adapter changes nothing");
            }
        }
    }
}

#[test]
fn texts_of_one_batch_have_adapters_of_their_own() {
    let bytes = base("tiny-llama");
    let plain = model(&bytes);
    let (one, two) = (pairs(&plain.gguf, 4, 1), pairs(&plain.gguf, 8, 2));
    let files = [file("llama", &one), file("llama", &two)];
    let adapted = with(plain, &[(&files[0], 1.0), (&files[1], 0.0)]);
    // The second is the model's own way.
    let mixes = [[0.0, 0.0], [1.0, 0.0], [0.5, -1.0], [0.0, 1.0]];
    let texts: Vec<Vec<u32>> = [5, 1, 70, 9].into_iter().zip(0..).map(|(n, salt)| text(n + 1, salt)).collect();
    for executor in executors() {
        let place = executor.describe();
        let mut together = engine(&adapted, executor);
        let open = |engine: &mut Engine| mixes.map(|mix| engine.open_adapted(0, Some(&mix)).unwrap());
        let ids = open(&mut together);
        let cut = |part: fn(&Vec<u32>) -> &[u32]| texts.iter().map(part).collect::<Vec<_>>();
        let mut all = |tokens: Vec<&[u32]>| {
            let entries = ids.iter().zip(tokens);
            let entries = entries.map(|(id, tokens)| Entry { sequence: *id, tokens, wanted: Wanted::Last });
            together.feed(&entries.collect::<Vec<_>>()).unwrap()
        };
        all(cut(|text| &text[..text.len() - 1]));
        let got = all(cut(|text| &text[text.len() - 1..]));
        for ((mix, text), got) in mixes.iter().zip(&texts).zip(&got) {
            let alone = Arc::new(model(&merged(&gguf(&bytes), &[(&one, mix[0]), (&two, mix[1])])));
            let mut alone = engine(&alone, Box::new(CpuExecutor::new(Arithmetic::Fast)));
            let id = alone.open(0).unwrap();
            let error = nmse(got, &feed(&mut alone, id, text, Wanted::Last));
            assert!(error < 1e-5, "{mix:?} on {place}: {error}");
        }
        // Texts that go on by themselves keep their adapters: each says what it says alone.
        let going: Vec<(SequenceId, u32)> = ids.iter().map(|id| (*id, 7)).collect();
        let written = together.go_on(&going, 6, Row::default()).unwrap();
        for ((mix, text), written) in mixes.iter().zip(&texts).zip(&written) {
            let id = together.open_adapted(9, Some(mix)).unwrap();
            feed(&mut together, id, text, Wanted::Last);
            let alone = together.go_on(&[(id, 7)], 6, Row::default()).unwrap();
            assert_eq!(*written, alone[0], "{mix:?} on {place}");
            together.close(id);
        }
    }
}

#[test]
fn what_adapters_changed_is_shared_with_nobody_else() {
    let plain = model(&base("tiny-llama"));
    let adapter = file("llama", &pairs(&plain.gguf, 4, 1));
    let adapted = with(plain, &[(&adapter, 1.0)]);
    let mut engine = engine(&adapted, Box::new(CpuExecutor::new(Arithmetic::Fast)));
    let tokens = text(130, 3);
    let first = engine.open(0).unwrap();
    feed(&mut engine, first, &tokens, Wanted::Last);
    for (scales, found) in [(None, 128), (Some([1.0]), 128), (Some([0.5]), 0)] {
        let id = engine.open_adapted(0, scales.as_ref().map(|s| &s[..])).unwrap();
        assert_eq!(engine.reuse(id, &tokens).unwrap(), found, "{scales:?}");
    }
    // Saved states belong to their adapters, too.
    let state = engine.save_state(first).unwrap();
    let other = engine.open_adapted(0, Some(&[0.5])).unwrap();
    let why = engine.load_state(other, &state).unwrap_err().to_string();
    assert!(why.contains("other adapters"), "{why}");
    let same = engine.open(0).unwrap();
    engine.load_state(same, &state).unwrap();
    let why = engine.open_adapted(0, Some(&[1.0, 2.0])).unwrap_err().to_string();
    assert!(why.contains("2 scales"), "{why}");
}

#[test]
fn plans_show_adapters_and_passes_fuse_them() {
    let plain = model(&base("tiny-llama"));
    let adapter = file("llama", &pairs(&plain.gguf, 4, 1));
    let adapted = with(plain, &[(&adapter, 1.0)]);
    let graph = adapted.graph(&Room::one(64)).unwrap();
    let plan = lower(graph.plan(BatchShape::new(1, 1)).unwrap(), &Target::gpu(&Caps::example_nvidia())).unwrap();
    let shown = plan.print();
    assert!(shown.contains("blk.0.attn_output.weight.lora0.a"), "{shown}");
    // No sum stands alone: it is the end of the product before it.
    assert!(
        !plan.steps.iter().any(|step| step.label.ends_with(".lora0") && step.call.operation().name() == "binary"),
        "{shown}"
    );
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let plain = model(&base("tiny-llama"));
    let [input, output, ..] = plain.gguf.tensor("blk.0.attn_q.weight").unwrap().shape;
    let key = "blk.0.attn_q.weight";
    let good = |writer: &mut Writer<'_>| {
        let (a, b) = (bytes(&noise(input * 2, 1, 1.0)), bytes(&noise(output * 2, 2, 1.0)));
        writer.add(&format!("{key}.lora_a"), &[input, 2], TensorType::F32, a).unwrap();
        writer.add(&format!("{key}.lora_b"), &[2, output], TensorType::F32, b).unwrap();
    };
    let zeros = |writer: &mut Writer<'_>, name: &str, dims: &[usize]| {
        let n: usize = dims.iter().product();
        writer.add(name, dims, TensorType::F32, bytes(&vec![0.5; n])).unwrap();
    };
    type Build<'a> = Box<dyn Fn(&mut Writer<'_>) + 'a>;
    let keys = |key: &'static str, value: &'static str| -> Build<'_> {
        Box::new(move |writer| {
            good(writer);
            writer.metadata_mut().set(key, value);
        })
    };
    let pair = |name: &'static str, a: [usize; 2], b: [usize; 2]| -> Build<'_> {
        Box::new(move |writer| {
            zeros(writer, &format!("{name}.lora_a"), &a);
            zeros(writer, &format!("{name}.lora_b"), &b);
        })
    };
    let nan: Build<'_> = Box::new(|writer| {
        good(writer);
        let mut values = vec![0.5; 2 * input];
        values[5] = f32::NAN;
        writer.add("blk.1.attn_q.weight.lora_a", &[input, 2], TensorType::F32, bytes(&values)).unwrap();
        zeros(writer, "blk.1.attn_q.weight.lora_b", &[2, output]);
    });
    let table: Vec<(&str, Build<'_>)> = vec![
        ("no adapter: its general.type is model", keys("general.type", "model")),
        ("of type control_vector", keys("adapter.type", "control_vector")),
        ("made for architecture qwen2, the model is llama", keys("general.architecture", "qwen2")),
        ("aLoRA", keys("adapter.alora.invocation_tokens", "x")),
        ("changes no tensor", Box::new(|_| {})),
        ("`blk.0.attn_q.weight.lora_b` is missing", Box::new(|w| zeros(w, &format!("{key}.lora_a"), &[input, 2]))),
        ("`blk.0.attn_q.weight.lora_a` is missing", Box::new(|w| zeros(w, &format!("{key}.lora_b"), &[2, output]))),
        (
            "tensor `odd` is none of its kind",
            Box::new(|w| {
                good(w);
                zeros(w, "odd", &[3]);
            }),
        ),
        (
            "changes `blk.99.attn_q.weight`, which the model does not have",
            pair("blk.99.attn_q.weight", [input, 2], [2, output]),
        ),
        ("in the model, its pair", pair(key, [input + 4, 2], [2, output])),
        ("in the model, its pair", pair(key, [input, 2], [3, output])),
        ("in the model, its pair", pair(key, [input, 2], [2, output + 1])),
        ("not transposed", pair(key, [input, 2], [output, 2])),
        ("blk.1.attn_q.weight.lora_a` holds NaN", nan),
    ];
    for (word, build) in table {
        let mut writer = Writer::new(metadata("llama", ALPHA));
        build(&mut writer);
        let file = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
        let error = Adapter::new(&file, "adapter.gguf", 1.0, &plain).map(drop).unwrap_err().to_string();
        assert!(error.contains(word), "want {word}: {error}");
        assert_eq!(error.lines().count(), 2, "one line and one hint: {error}");
    }
    // A vector that no product multiplies.
    let mut writer = Writer::new(metadata("llama", ALPHA));
    good(&mut writer);
    zeros(&mut writer, "blk.0.ffn_norm.weight.lora_a", &[input, 2]);
    zeros(&mut writer, "blk.0.ffn_norm.weight.lora_b", &[2, 1]);
    let file = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
    let adapter = Adapter::new(&file, "adapter.gguf", 1.0, &plain).unwrap();
    let error = plain.with_adapters(vec![adapter]).map(drop).unwrap_err().to_string();
    assert!(error.contains("does not multiply"), "{error}");
}
