//! Adapters, sparse attention, windows, states and models of two texts, each on one device and on two, in whole prompts, in chunks and
//! beside other sequences: every way gives the logits of the whole prompt on one device.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod tiny;

use std::sync::Arc;

use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, PipelineExecutor};
use kiln_engine::lower::cut;
use kiln_engine::model::{Adapter, Model};
use kiln_engine::placement::Placement;
use kiln_engine::plan::Plan;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, SequenceId, Wanted};
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, Metadata, TensorType, Value, Writer};

/// Tokens of the prompt that is judged: more than windows see and than sparse attention chooses.
const PROMPT: usize = 70;

fn preset(name: &str) -> Model {
    let synth = Synth::new(Preset::from_name(name).unwrap(), Recipe::from_name("F32").unwrap(), 11);
    Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap()
}

/// Models that goldens describe.
struct Goldens(Vec<(String, Gguf)>);

impl Goldens {
    fn model(&self, name: &str) -> Model {
        tiny::model(&self.0.iter().find(|(known, _)| known == name).unwrap().1)
    }
}

/// A model with an adapter of the outputs of all its layers.
fn adapted(model: Model) -> Model {
    let mut metadata = Metadata::new();
    let architecture = model.config.architecture.name;
    for (key, value) in [("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", architecture)]
    {
        metadata.set(key, value);
    }
    metadata.set("adapter.lora.alpha", Value::F32(4.0));
    let mut writer = Writer::new(metadata);
    for info in model.gguf.tensors().iter().filter(|info| info.name.ends_with("attn_output.weight")) {
        for (end, dims) in [("lora_a", [info.shape[0], 2]), ("lora_b", [2, info.shape[1]])] {
            let values = (0..dims[0] * dims[1]).flat_map(|i| ((i % 7) as f32 * 0.2 - 0.6).to_le_bytes());
            writer.add(&format!("{}.{end}", info.name), &dims, TensorType::F32, values.collect::<Vec<u8>>()).unwrap();
        }
    }
    let file = Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap();
    let adapter = Adapter::new(&file, "adapter.gguf", 1.0, &model).unwrap();
    model.with_adapters(vec![adapter]).unwrap()
}

/// Tokens without a pattern.
fn text(model: &Model, n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 37 + 11 + salt * 101) % model.config.vocab) as u32).collect()
}

fn room(model: &Model) -> Room {
    let room = Room::for_sequences(4, 128).with_windows(model.facts.window, 128);
    Room { k_type: TensorType::F32, v_type: TensorType::F32, ..room }
}

fn cpu() -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(Arithmetic::Fast))
}

/// The first half of the layers on one device, the second half on another, as models are placed.
fn two(model: &Model, devices: [Box<dyn Executor>; 2]) -> Box<dyn Executor> {
    let graph = model.graph(&Room::one(64)).unwrap();
    let plans: Vec<Plan> = [1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1)).unwrap()).into();
    let layers = 1 + plans[0].steps.iter().filter_map(|step| cut::layer(&step.label)).max().unwrap();
    let devices_of: Vec<usize> = (0..layers).map(|layer| usize::from(2 * layer >= layers)).collect();
    let placement =
        Placement { input: 0, output: 1, experts: devices_of.clone(), layers: devices_of, rules: Vec::new() };
    Box::new(PipelineExecutor::new(devices.into(), placement, &plans))
}

/// How the prompt goes through the model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    Whole,
    Chunked,
    /// In chunks, beside a sequence that decodes and another prompt.
    Mixed,
}

/// How strongly the adapter of the judged sequence counts; all others have it as the model does.
const SCALE: f32 = 0.6;

fn open(engine: &mut Engine, scale: Option<f32>) -> SequenceId {
    let scales: Option<Vec<f32>> = scale.filter(|_| engine.model().scales().len() == 1).map(|scale| vec![scale]);
    engine.open_adapted(0, scales.as_deref()).unwrap()
}

fn entry(sequence: SequenceId, tokens: &[u32], wanted: Wanted) -> Entry<'_> {
    Entry { sequence, tokens, wanted }
}

/// The logits of all tokens of the prompt.
fn logits(model: &Arc<Model>, executor: Box<dyn Executor>, form: Form) -> Vec<f32> {
    let mut engine = Engine::new(Arc::clone(model), executor, room(model), &mut |_, _| {}).unwrap();
    let tokens = text(model, PROMPT, 1);
    let judged = open(&mut engine, Some(SCALE));
    if form == Form::Whole {
        return engine.feed(&[entry(judged, &tokens, Wanted::All)]).unwrap().remove(0);
    }
    let others = [open(&mut engine, None), open(&mut engine, None)];
    if form == Form::Mixed {
        let begin = text(model, 40, 2);
        engine.feed(&[entry(others[0], &begin, Wanted::Last)]).unwrap();
    }
    let (mut all, mut at) = (Vec::new(), 0);
    for chunk in [1, 33, 5, 1, PROMPT] {
        let end = (at + chunk).min(PROMPT);
        let (next, piece) = (text(model, 1, end), text(model, 9, end));
        let mut entries = vec![entry(judged, &tokens[at..end], Wanted::All)];
        if form == Form::Mixed {
            entries.insert(0, entry(others[0], &next, Wanted::Last));
            entries.push(entry(others[1], &piece, Wanted::Nothing));
        }
        all.extend(engine.feed(&entries).unwrap().remove(usize::from(form == Form::Mixed)));
        at = end;
    }
    all
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = got.iter().zip(want).map(|(g, w)| square(g - w)).sum();
    error / want.iter().map(|w| square(*w)).sum::<f64>()
}

fn judge(what: &str, model: &Arc<Model>) {
    let want = logits(model, cpu(), Form::Whole);
    let same = |executor: Box<dyn Executor>, form: Form, devices: &str| {
        let error = nmse(&logits(model, executor, form), &want);
        assert!(error <= 1e-6, "{what} on {devices}, {form:?}: {error:.1e}");
    };
    for form in [Form::Chunked, Form::Mixed] {
        same(cpu(), form, "one device");
    }
    for form in [Form::Whole, Form::Chunked, Form::Mixed] {
        same(two(model, [cpu(), cpu()]), form, "two devices");
    }
}

/// One model of each kind. With `KILN_ARCHITECTURES`, whatever it says, of sparse attention, windows and states all that differ in kind.
fn models() -> Vec<(&'static str, Arc<Model>)> {
    let presets = ["tiny-gemma2", "tiny-gpt-oss", "tiny-gemma4", "tiny-qwen3next", "tiny-rwkv7", "tiny-mamba2"];
    let sparse = [
        "deepseek32-chosen",
        "dots3note-chosen",
        "glm-dsa-chosen",
        "glm5-next-chosen",
        "hy_v4-chosen",
        "minimax-m3-chosen",
    ];
    let hybrids = ["granitehybrid-dense", "jamba-dense", "kimi-linear-moe", "lfm2-dense"];
    let goldens = Goldens(tiny::goldens());
    let mut all = vec![
        ("an adapter of tiny-llama", adapted(preset("tiny-llama"))),
        ("an adapter of tiny-gemma2", adapted(preset("tiny-gemma2"))),
        ("an adapter of tiny-qwen3next", adapted(preset("tiny-qwen3next"))),
        ("an adapter of deepseek32", adapted(goldens.model("deepseek32-chosen"))),
    ];
    all.extend(presets.map(|name| (name, preset(name))));
    all.extend(sparse.into_iter().chain(hybrids).map(|name| (name, goldens.model(name))));
    let usual =
        ["an adapter of tiny-llama", "an adapter of deepseek32", "tiny-gemma2", "tiny-qwen3next", "minimax-m3-chosen"];
    all.retain(|(name, _)| std::env::var_os("KILN_ARCHITECTURES").is_some() || usual.contains(name));
    all.into_iter().map(|(name, model)| (name, Arc::new(model))).collect()
}

#[test]
fn every_form_of_a_prompt_says_the_same_on_one_device_and_on_two() {
    for (name, model) in models() {
        judge(name, &model);
    }
}

/// An encoder and a decoder stay on one device, where a text is read whole and its answer may come in pieces.
#[test]
fn models_of_two_texts_run_on_one_device_and_refuse_two() {
    let model = Arc::new(Goldens(tiny::goldens()).model("t5-dense"));
    let executor = two(&model, [cpu(), cpu()]);
    let refused = Engine::new(Arc::clone(&model), executor, room(&model), &mut |_, _| {}).err().unwrap().to_string();
    assert!(refused.contains("t5") && refused.contains("one device"), "{refused}");
    let (source, answer) = (text(&model, 30, 1), text(&model, 12, 2));
    let mut engine = Engine::new(Arc::clone(&model), cpu(), room(&model), &mut |_, _| {}).unwrap();
    let open = |engine: &mut Engine, source: &[u32]| {
        let id = engine.open(0).unwrap();
        engine.read_source(id, source).unwrap();
        id
    };
    let whole = open(&mut engine, &source);
    let want = engine.feed(&[entry(whole, &answer, Wanted::All)]).unwrap().remove(0);
    engine.close(whole);
    let (pieces, beside) = (open(&mut engine, &source), open(&mut engine, &text(&model, 9, 3)));
    let mut got = engine.feed(&[entry(pieces, &answer[..5], Wanted::All)]).unwrap().remove(0);
    for end in [6, 12] {
        let piece = &answer[got.len() / (want.len() / 12)..end];
        let entries = [entry(beside, &answer[end - 4..end], Wanted::Last), entry(pieces, piece, Wanted::All)];
        got.extend(engine.feed(&entries).unwrap().remove(1));
    }
    let error = nmse(&got, &want);
    assert!(error <= 1e-6, "{error:.1e}");
}
