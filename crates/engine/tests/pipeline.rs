//! A model on several devices: cut at every layer, over the CPU and a GPU, over two GPUs, over all three, it gives the logits of one
//! device and the same texts, in batches, with pages, forks, swaps and saved states.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::{Arc, LazyLock};

use kiln_engine::Session;
use kiln_engine::arch::{BatchShape, Room, graph};
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, GpuExecutor, PipelineExecutor};
use kiln_engine::model::Model;
use kiln_engine::placement::{Placement, Rule};
use kiln_engine::plan::{Plan, SlotKind};
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::{Engine, Entry, Event, Events, Policy, Request, Scheduler, StopRule, Wanted};
use kiln_engine::sampler::Sampling;
use kiln_engine::synth::{Preset, Synth};
use kiln_gguf::{Gguf, TensorType};
use kiln_gpu::Device;

const LAYERS: usize = 3;

fn model(preset: &str) -> Arc<Model> {
    let preset = Preset { layers: LAYERS, ..*Preset::from_name(preset).unwrap() };
    let synth = Synth::new(&preset, Recipe::from_name("F32").unwrap(), 11);
    Arc::new(Model::new(Gguf::from_bytes(synth.to_bytes().unwrap()).unwrap()).unwrap())
}

/// A device of a test.
#[derive(Clone, Copy, Debug, PartialEq)]
enum On {
    Cpu,
    Gpu,
}

/// The same hardware, opened twice: it counts as two devices.
static GPUS: LazyLock<Option<[Arc<Device>; 2]>> = LazyLock::new(|| Some([device::device()?.0, device::device()?.0]));

fn executor(on: On, number: usize) -> Option<Box<dyn Executor>> {
    Some(match on {
        On::Cpu => Box::new(CpuExecutor::new(Arithmetic::Fast)),
        On::Gpu => Box::new(GpuExecutor::new(Arc::clone(&GPUS.as_ref()?[number % 2]))),
    })
}

fn plain(model: &Model) -> Vec<Plan> {
    let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
    [1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1)).unwrap()).into()
}

fn several(model: &Model, devices: &[On], placement: &Placement) -> Option<Box<dyn Executor>> {
    let devices = devices.iter().zip(0..).map(|(on, number)| executor(*on, number)).collect::<Option<Vec<_>>>()?;
    Some(Box::new(PipelineExecutor::new(devices, placement.clone(), &plain(model))))
}

/// The first so many layers on device 0, all others on device 1.
fn cut_at(at: usize) -> Placement {
    let layers: Vec<usize> = (0..LAYERS).map(|layer| usize::from(layer >= at)).collect();
    Placement { input: 0, experts: layers.clone(), layers, output: 1, rules: Vec::new() }
}

/// Every layer on the next device.
fn around(devices: usize) -> Placement {
    let layers: Vec<usize> = (0..LAYERS).map(|layer| layer % devices).collect();
    Placement { experts: layers.clone(), layers, ..Placement::whole(devices - 1, LAYERS) }
}

/// Tokens without a pattern.
fn text(n: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 7 + i * 37 + 11 + salt * 101) % 256).collect()
}

fn room(model: &Model) -> Room {
    let [k_type, v_type] = [TensorType::F32; 2];
    Room { k_type, v_type, ..Room::for_sequences(4, 256) }.with_windows(model.facts.window, 512)
}

/// Prompts of several sequences at once and in pieces, single tokens beside them, and a fork.
fn logits(model: &Arc<Model>, executor: Box<dyn Executor>) -> Vec<f32> {
    let mut engine = Engine::new(Arc::clone(model), executor, room(model), &mut |_, _| {}).unwrap();
    let ids: Vec<_> = (0..3).map(|_| engine.open(0).unwrap()).collect();
    let entry = |sequence, tokens, wanted| Entry { sequence, tokens, wanted };
    let (long, short, one) = (text(70, 1), text(5, 2), text(1, 3));
    let mut all = Vec::new();
    let mut feed = |engine: &mut Engine, entries: &[Entry<'_>]| {
        all.extend(engine.feed(entries).unwrap().into_iter().flatten());
    };
    feed(&mut engine, &[entry(ids[0], &long, Wanted::Last), entry(ids[1], &short, Wanted::All)]);
    feed(&mut engine, &[entry(ids[0], &one, Wanted::Last), entry(ids[2], &short, Wanted::Last)]);
    let fork = engine.fork(ids[0]).unwrap();
    feed(&mut engine, &[entry(ids[0], &[7], Wanted::Last), entry(fork, &[9], Wanted::Last)]);
    engine.swap_out(ids[0]).unwrap();
    engine.swap_in(ids[0]).unwrap();
    feed(&mut engine, &[entry(ids[0], &[3], Wanted::Last), entry(ids[1], &[4], Wanted::Last)]);
    all
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = got.iter().zip(want).map(|(g, w)| square(g - w)).sum();
    error / want.iter().map(|w| square(*w)).sum::<f64>()
}

/// Texts of many requests at once that begin alike, drawn on the devices and by the host.
fn texts(model: &Arc<Model>, executor: Box<dyn Executor>) -> Vec<Vec<u32>> {
    let engine = Engine::new(Arc::clone(model), executor, room(model), &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, Policy::default());
    let hot = Sampling { seed: Some(3), temperature: 0.7, top_k: 20, ..Sampling::default() };
    let host = Sampling { repeat_penalty: 1.5, repeat_last_n: 64, ..Sampling::greedy() };
    let request = |(i, sampling): (u32, Sampling)| {
        let stop = StopRule { ignore_end: true, ..StopRule::default() };
        let prompt = [text(66, 0), text(3 + 20 * i, i)].concat();
        scheduler.generate(Request { limit: Some(24), sampling, stop, ..Request::new(prompt) })
    };
    let all = [Sampling::greedy(), hot, Sampling::greedy(), host, Sampling::greedy()];
    let all: Vec<Events> = (0..).zip(all).map(request).collect();
    all.into_iter().map(tokens).collect()
}

fn tokens(events: Events) -> Vec<u32> {
    let token = |event| match event {
        Event::Token { token, .. } => Some(token),
        Event::Failed(error) => panic!("{error}"),
        _ => None,
    };
    events.filter_map(token).collect()
}

/// Everything that is asked of a placement.
fn judge(model: &Arc<Model>, devices: &[On], placement: &Placement, want: &(Vec<f32>, Vec<Vec<u32>>)) {
    let Some(executor) = several(model, devices, placement) else { return };
    let what = format!("{} on {devices:?}: {placement:?}", model.config.architecture.name);
    let error = nmse(&logits(model, executor), &want.0);
    assert!(error <= 1e-6, "{what}: {error:.1e}");
    assert_eq!(texts(model, several(model, devices, placement).unwrap()), want.1, "{what}");
}

fn alone(model: &Arc<Model>) -> (Vec<f32>, Vec<Vec<u32>>) {
    let cpu = || executor(On::Cpu, 0).unwrap();
    (logits(model, cpu()), texts(model, cpu()))
}

/// A dense model, a mixture, one with windows, one with states.
const PRESETS: [&str; 4] = ["tiny-llama", "tiny-qwen3moe", "tiny-gemma2", "tiny-rwkv7"];

#[test]
fn cut_at_every_layer_over_two_of_the_cpu() {
    for preset in
        PRESETS.into_iter().chain(["tiny-gpt-oss", "tiny-gemma4", "tiny-deepseek2", "tiny-rwkv6qwen2", "tiny-qwen2"])
    {
        let model = model(preset);
        let want = alone(&model);
        for at in 0..=LAYERS {
            judge(&model, &[On::Cpu, On::Cpu], &cut_at(at), &want);
        }
        judge(&model, &[On::Cpu; 3], &around(3), &want);
    }
}

#[test]
fn cut_at_every_layer_over_the_cpu_and_a_gpu() {
    for preset in PRESETS {
        let model = model(preset);
        let want = alone(&model);
        for at in 0..=LAYERS {
            judge(&model, &[On::Cpu, On::Gpu], &cut_at(at), &want);
        }
        judge(&model, &[On::Gpu, On::Cpu], &cut_at(1), &want);
    }
}

#[test]
fn over_two_gpus_and_over_all_three() {
    for preset in PRESETS {
        let model = model(preset);
        let want = alone(&model);
        for at in 0..=LAYERS {
            judge(&model, &[On::Gpu, On::Gpu], &cut_at(at), &want);
        }
        judge(&model, &[On::Gpu, On::Gpu, On::Cpu], &around(3), &want);
    }
}

#[test]
fn experts_and_single_tensors_lie_elsewhere() {
    for preset in ["tiny-qwen3moe", "tiny-gpt-oss", "tiny-deepseek2"] {
        let model = model(preset);
        let want = alone(&model);
        let experts = Placement { experts: vec![1; LAYERS], ..Placement::whole(0, LAYERS) };
        let first = Placement { experts: vec![1, 0, 0], input: 1, ..Placement::whole(0, LAYERS) };
        let rules = Placement {
            rules: vec![Rule::new("blk.[02].ffn_.*_exps", 1).unwrap(), Rule::new("*attn_output*", 1).unwrap()],
            ..Placement::whole(0, LAYERS)
        };
        for placement in [experts, first, rules] {
            judge(&model, &[On::Gpu, On::Cpu], &placement, &want);
        }
    }
}

/// Products of many columns go to the GPU with weights that are brought there for each run; those of few stay with the CPU.
#[test]
fn weights_of_the_cpu_are_brought_to_a_gpu_for_long_prompts() {
    for preset in ["tiny-llama", "tiny-qwen3moe", "tiny-gpt-oss", "tiny-deepseek2", "tiny-rwkv7"] {
        let model = model(preset);
        let want = alone(&model);
        let experts = Placement { experts: vec![1; LAYERS], ..Placement::whole(0, LAYERS) };
        let layers = Placement { layers: vec![1, 1, 0], ..experts.clone() };
        for placement in [experts, layers, Placement { input: 0, output: 0, ..Placement::whole(1, LAYERS) }] {
            let several = || {
                let devices = [On::Gpu, On::Cpu].into_iter().map(|on| executor(on, 0)).collect::<Option<Vec<_>>>()?;
                Some(PipelineExecutor::new(devices, placement.clone(), &plain(&model)).streaming(0, 4, &plain(&model)))
            };
            let Some(executor) = several() else { return };
            let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
            let brought = |tokens: usize| {
                let parts = executor.parts(graph.plan(BatchShape::new(tokens, 1)).unwrap(), None).unwrap();
                let slots = parts.iter().filter(|part| part.device == 0).flat_map(|part| &part.plan.slots);
                slots.filter(|slot| matches!(slot.kind, SlotKind::StreamedWeight(_)) && slot.bytes > 0).count()
            };
            let expected = preset != "tiny-llama" || placement.layers.contains(&1);
            assert_eq!(
                (brought(1), brought(64) > 0),
                (0, expected && !(preset == "tiny-rwkv7" && placement.layers == [0; 3])),
                "{preset}"
            );
            let what = format!("{preset}: {placement:?}");
            let error = nmse(&logits(&model, Box::new(executor)), &want.0);
            assert!(error <= 1e-6, "{what}: {error:.1e}");
            assert_eq!(texts(&model, Box::new(several().unwrap())), want.1, "{what}");
        }
    }
}

/// Pieces of prompts behind others, of one text and of several, after forks and swaps and between single tokens: all that earlier pieces left
/// in caches is read by later ones, wherever those are computed.
fn pieces(model: &Arc<Model>, executor: Box<dyn Executor>) -> Vec<f32> {
    let mut engine = Engine::new(Arc::clone(model), executor, room(model), &mut |_, _| {}).unwrap();
    let ids: Vec<_> = (0..2).map(|_| engine.open(0).unwrap()).collect();
    let mut all = Vec::new();
    let mut feed = |engine: &mut Engine, entries: &[(kiln_engine::run::SequenceId, &[u32])]| {
        let entries: Vec<Entry<'_>> =
            entries.iter().map(|&(sequence, tokens)| Entry { sequence, tokens, wanted: Wanted::Last }).collect();
        all.extend(engine.feed(&entries).unwrap().into_iter().flatten());
    };
    feed(&mut engine, &[(ids[0], &text(50, 1))]);
    feed(&mut engine, &[(ids[0], &text(40, 2)), (ids[1], &text(30, 3))]);
    feed(&mut engine, &[(ids[0], &[7]), (ids[1], &[9])]);
    let fork = engine.fork(ids[0]).unwrap();
    feed(&mut engine, &[(ids[0], &text(33, 4)), (fork, &text(20, 5)), (ids[1], &text(21, 6))]);
    engine.swap_out(ids[0]).unwrap();
    engine.swap_in(ids[0]).unwrap();
    feed(&mut engine, &[(ids[0], &text(40, 7)), (fork, &[8])]);
    for id in [ids[0], ids[1], fork] {
        feed(&mut engine, &[(id, &[3])]);
    }
    all
}

/// An executor with layers on the CPU, whose long prompts are computed by the GPU from 4 columns on.
fn streaming(model: &Model, placement: &Placement) -> Option<PipelineExecutor> {
    let devices = [On::Gpu, On::Cpu].into_iter().map(|on| executor(on, 0)).collect::<Option<Vec<_>>>()?;
    Some(PipelineExecutor::new(devices, placement.clone(), &plain(model)).streaming(0, 4, &plain(model)))
}

/// Layers of the CPU are computed by the GPU for long prompts, with the caches and states that earlier tokens left, and leave theirs behind.
#[test]
fn caches_come_along_to_the_gpu_and_go_back() {
    let presets = ["tiny-llama", "tiny-gemma2", "tiny-qwen3moe", "tiny-gpt-oss", "tiny-deepseek2"];
    for preset in presets.into_iter().chain(["tiny-rwkv7", "tiny-mamba2", "tiny-qwen3next", "tiny-qwen2"]) {
        let model = model(preset);
        let want = pieces(&model, executor(On::Cpu, 0).unwrap());
        let layers = Placement { layers: vec![1, 1, 0], experts: vec![1, 1, 0], ..Placement::whole(0, LAYERS) };
        let all = Placement { input: 1, output: 0, ..Placement::whole(1, LAYERS) };
        let middle = Placement { layers: vec![0, 1, 0], experts: vec![0, 1, 0], ..Placement::whole(0, LAYERS) };
        for placement in [layers, all, middle] {
            let Some(executor) = streaming(&model, &placement) else { return };
            let error = nmse(&pieces(&model, Box::new(executor)), &want);
            assert!(error <= 1e-6, "{preset}: {placement:?}: {error:.1e}");
        }
    }
}

/// A real model, where one is named: `KILN_SEVERAL_MODEL=FILE.gguf cargo test -p kiln-engine --test pipeline -- real`. Half of its layers lie on the
/// CPU, long prompts are computed by the GPU; the greedy text behind pieces of a prompt is one that a device alone writes.
#[test]
fn a_real_model_writes_the_same_text() {
    let Some(path) = std::env::var_os("KILN_SEVERAL_MODEL") else {
        return println!("KILN_SEVERAL_MODEL names no file");
    };
    let model = Arc::new(Model::new(Gguf::open(std::path::Path::new(&path)).unwrap()).unwrap());
    let room = Room::for_sequences(2, 512).with_windows(model.facts.window, 512);
    let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
    let plans: Vec<Plan> = [1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1)).unwrap()).into();
    let count = 1 + plans[0].steps.iter().filter_map(|step| kiln_engine::lower::cut::layer(&step.label)).max().unwrap();
    let layers: Vec<usize> = (0..count).map(|layer| usize::from(layer < count / 2)).collect();
    let placement = Placement { input: 1, experts: layers.clone(), layers, ..Placement::whole(0, count) };
    let write = |executor: Box<dyn Executor>| {
        let mut engine = Engine::new(Arc::clone(&model), executor, room, &mut |_, _| {}).unwrap();
        let id = engine.open(0).unwrap();
        let mut feed = |tokens: &[u32]| {
            let entry = Entry { sequence: id, tokens, wanted: Wanted::Last };
            engine.feed(&[entry]).unwrap().into_iter().flatten().collect::<Vec<f32>>()
        };
        feed(&text(100, 1));
        let mut logits = feed(&text(70, 2));
        let first = logits.clone();
        let largest =
            |logits: &[f32]| (0..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(token, _)| token);
        let mut written = Vec::new();
        for _ in 0..16 {
            written.push(largest(&logits));
            logits = feed(&written[written.len() - 1..]);
        }
        (first, written)
    };
    let alone = [On::Gpu, On::Cpu].map(|on| write(executor(on, 0).unwrap()));
    let devices = [On::Gpu, On::Cpu].into_iter().map(|on| executor(on, 0).unwrap()).collect();
    let several = PipelineExecutor::new(devices, placement, &plans).streaming(0, 32, &plans);
    let shown: Vec<usize> = several
        .parts(graph.plan(BatchShape::new(64, 1)).unwrap(), None)
        .unwrap()
        .iter()
        .map(|part| part.device)
        .collect();
    let (logits, written) = write(Box::new(several));
    let [apart, error] = [&alone[1].0, &logits].map(|logits| nmse(logits, &alone[0].0));
    println!("CPU and GPU are {apart:.1e} apart, both together {error:.1e}; parts on {shown:?}; text {written:?}");
    assert!(error <= (2.0 * apart).max(1e-6), "{error:.1e}");
    assert!(alone.iter().any(|(_, text)| *text == written), "{written:?}, alone {:?} and {:?}", alone[0].1, alone[1].1);
}

/// A long prompt crosses over to the GPU once, and comes back as logits: one stay of a layer there follows the other. Single tokens stay with
/// the CPU's layers, and so do the caches if a prompt is short for the number of its texts.
#[test]
fn whole_layers_move_for_long_prompts() {
    for preset in ["tiny-llama", "tiny-gemma2"] {
        let model = model(preset);
        let placement =
            Placement { layers: vec![1, 1, 0], experts: vec![1, 1, 0], input: 1, ..Placement::whole(0, LAYERS) };
        let Some(executor) = streaming(&model, &placement) else { return };
        let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
        let devices = |shape: BatchShape| -> Vec<usize> {
            let parts = executor.parts(graph.plan(shape).unwrap(), None).unwrap();
            parts.iter().map(|part| part.device).collect()
        };
        assert_eq!(
            devices(BatchShape::new(64, 1)),
            [1, 0, 0, 0],
            "{preset}: the embedding, a layer, a layer, the rest"
        );
        assert_eq!(devices(BatchShape::new(1, 1)), [1, 0], "{preset}");
        let many = BatchShape { pieces: 17, ..BatchShape::new(64, 1) };
        assert!(devices(many).len() > 4, "{preset}: attention stays: {:?}", devices(many));
        let parts = executor.parts(graph.plan(BatchShape::new(64, 1)).unwrap(), None).unwrap();
        let count =
            |part: usize, kind: &SlotKind| parts[part].plan.slots.iter().filter(|slot| slot.kind == *kind).count();
        let crossing =
            |part: usize| [SlotKind::Recv, SlotKind::Resident, SlotKind::Send].map(|kind| count(part, &kind));
        assert_eq!([0, 1, 2, 3].map(crossing), [[0, 0, 1], [1, 1, 0], [0, 2, 0], [0, 1, 0]], "{preset}");
    }
}

/// With experts on the CPU only what they read and what they make crosses over, and each layer is two stays on the GPU.
#[test]
fn experts_on_the_cpu_take_little_across() {
    let model = model("tiny-qwen3moe");
    let placement = Placement { experts: vec![1; LAYERS], ..Placement::whole(0, LAYERS) };
    let executor = several(&model, &[On::Cpu, On::Cpu], &placement).unwrap();
    let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
    let parts = executor.parts(graph.plan(BatchShape::new(1, 1)).unwrap(), None).unwrap();
    let devices: Vec<usize> = parts.iter().map(|part| part.device).collect();
    assert_eq!(devices, [0, 1, 0, 1, 0, 1, 0]);
    for part in parts.iter().filter(|part| part.device == 1) {
        let bytes = |kind: &SlotKind| {
            part.plan.slots.iter().filter(|slot| slot.kind == *kind).map(|slot| slot.bytes).sum::<usize>()
        };
        let hidden = 4 * 64;
        assert!(bytes(&SlotKind::Send) <= hidden, "{} bytes leave", bytes(&SlotKind::Send));
        assert!(bytes(&SlotKind::Recv) <= hidden + 64, "{} bytes arrive", bytes(&SlotKind::Recv));
    }
}

#[test]
fn a_saved_state_goes_from_one_device_to_several_and_back() {
    for preset in ["tiny-llama", "tiny-rwkv7"] {
        let model = model(preset);
        let session = |executor| Session::new(Arc::clone(&model), executor, 128, &mut |_, _| {}).unwrap();
        let mut one = session(executor(On::Cpu, 0).unwrap());
        one.feed(&text(70, 1), Wanted::Nothing).unwrap();
        let saved = one.save_state().unwrap();
        let want = one.feed(&[5, 6], Wanted::Last).unwrap();
        let mut both = session(several(&model, &[On::Cpu, On::Cpu], &cut_at(1)).unwrap());
        both.load_state(&saved).unwrap();
        assert_eq!(both.save_state().unwrap(), saved);
        assert!(nmse(&both.feed(&[5, 6], Wanted::Last).unwrap(), &want) <= 1e-12);
    }
}
