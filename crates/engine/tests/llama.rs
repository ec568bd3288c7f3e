//! The whole way from a file to tokens with a tiny Llama: its plan as a snapshot, both executors against each other,
//! batches against single tokens, and what is said of files and prompts that do not fit.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

mod device;

use std::sync::Arc;

use kiln_engine::arch::{BatchShape, Room, graph};
use kiln_engine::executor::{Arithmetic, BATCH, CpuExecutor, DequantCache, Executor, Options, Packing};
use kiln_engine::lower::{Target, lower};
use kiln_engine::model::Model;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::run::Wanted;
use kiln_engine::synth::{Preset, Synth};
use kiln_engine::{Session, compare};
use kiln_gguf::{Gguf, Metadata, TensorType, Writer};
use kiln_gpu::Caps;

use device::{gpu, gpu_with};

fn file(recipe: &str) -> Vec<u8> {
    let preset = Preset::from_name("tiny-llama").unwrap();
    Synth::new(preset, Recipe::from_name(recipe).unwrap(), 7).to_bytes().unwrap()
}

fn model(recipe: &str) -> Arc<Model> {
    Arc::new(Model::new(Gguf::from_bytes(file(recipe)).unwrap()).unwrap())
}

fn cpu(arithmetic: Arithmetic) -> Box<dyn Executor> {
    Box::new(CpuExecutor::new(arithmetic))
}

fn session(model: &Arc<Model>, executor: Box<dyn Executor>) -> Session {
    Session::new(Arc::clone(model), executor, 64, &mut |_, _| {}).unwrap()
}

const TOKENS: [u32; 9] = [5, 77, 3, 120, 40, 41, 7, 9, 200];

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let squared = |a: f32, b: f32| f64::from(a - b).powi(2);
    let sum: f64 = got.iter().zip(want).map(|(a, b)| squared(*a, *b)).sum();
    sum / want.iter().map(|w| squared(*w, 0.0)).sum::<f64>()
}

#[test]
fn the_plan_is_the_one_in_the_snapshot() {
    let model = model("F32");
    let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
    let plan = lower(graph.plan(BatchShape::new(1, 1)).unwrap(), &Target::cpu()).unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plans/tiny-llama.txt");
    if std::env::var_os("KILN_UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(path, plan.print()).unwrap();
    }
    // Embedding, six steps a layer on the CPU, output: a lost fusion changes the number.
    assert_eq!(plan.len(), 1 + 6 * model.config.layers + 1);
    assert_eq!(plan.print(), std::fs::read_to_string(path).unwrap(), "KILN_UPDATE_SNAPSHOTS=1 writes the new plan");
}

/// A token of a dense model on a GPU: q, k and v; attention, which writes the caches; output; gate and up; down.
#[test]
fn a_layer_of_a_token_is_five_steps_on_a_gpu() {
    let model = model("Q8_0");
    let graph = graph(&model.config, &model.gguf, &Room::one(4096)).unwrap();
    let target = Target::gpu(&Caps::example_nvidia());
    let steps = |shape: BatchShape, target: &Target| lower(graph.plan(shape).unwrap(), target).unwrap().len();
    let layers = model.config.layers;
    assert_eq!(steps(BatchShape::new(1, 1), &target), 1 + 5 * layers + 1);
    // Where bits must not depend on how texts are cut, single tokens go the way of all others.
    let batch_invariant = Target { batch_invariant: true, ..target };
    assert_eq!(steps(BatchShape::new(1, 1), &batch_invariant), 1 + 6 * layers + 1);
}

#[test]
fn more_columns_than_are_few_go_to_matrix_units_unless_weights_are_plain_floats() {
    let products = |recipe: &str, few: usize| {
        let model = model(recipe);
        let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
        let target = Target { skinny_n: few, ..Target::cpu() };
        let plan = lower(graph.plan(BatchShape::new(8, 1)).unwrap(), &target).unwrap();
        let of = |name: &str| plan.steps.iter().filter(|step| step.call.operation().name() == name).count();
        // The output has one column.
        [of("mul_mat_vec"), of("mul_mm")].map(|n| n as f64 / model.config.layers as f64)
    };
    let [vec, mm] = products("Q8_0", 16);
    assert!(vec > 4.0 && mm == 0.0, "{vec} {mm}");
    let [vec, mm] = products("Q8_0", 5);
    assert!(vec < 1.0 && mm == 4.0, "{vec} {mm}");
    let [vec, mm] = products("F32", 5);
    assert!(vec > 4.0 && mm == 0.0, "{vec} {mm}");
}

#[test]
fn both_executors_give_the_same_logits() {
    let Some((gpu, instance)) = gpu() else { return };
    let logits = |model: &Arc<Model>, executor| session(model, executor).feed(&TOKENS, Wanted::All).unwrap();
    let (plain, quantised) = (model("F32"), model("Q8_0"));
    for model in [&plain, &quantised] {
        let error = nmse(&logits(model, cpu(Arithmetic::Fast)), &logits(model, cpu(Arithmetic::Reference)));
        assert!(error < 1e-6, "CPU: {error}");
    }
    let error = nmse(&logits(&quantised, gpu), &logits(&quantised, cpu(Arithmetic::Reference)));
    assert!(error < 1e-6, "GPU: {error}");
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
}

#[test]
fn token_by_token_is_the_same_as_all_at_once() {
    let model = model("F32");
    let whole = session(&model, cpu(Arithmetic::Reference)).feed(&TOKENS, Wanted::All).unwrap();
    let mut single = session(&model, cpu(Arithmetic::Reference));
    let apart: Vec<f32> = TOKENS.iter().flat_map(|t| single.feed(&[*t], Wanted::All).unwrap()).collect();
    assert_eq!(single.length(), TOKENS.len());
    assert!(nmse(&apart, &whole) < 1e-10, "{}", nmse(&apart, &whole));
}

#[test]
fn the_first_row_of_a_prompt_that_is_read_in_pieces_is_one_row() {
    let preset = Preset { context: 1024, ..*Preset::from_name("tiny-llama").unwrap() };
    let bytes = Synth::new(&preset, Recipe::from_name("F32").unwrap(), 7).to_bytes().unwrap();
    let model = Arc::new(Model::new(Gguf::from_bytes(bytes).unwrap()).unwrap());
    let tokens: Vec<u32> = TOKENS.iter().copied().cycle().take(BATCH + 8).collect();
    let mut long = Session::new(Arc::clone(&model), cpu(Arithmetic::Fast), 1024, &mut |_, _| {}).unwrap();
    let first = long.feed(&tokens, Wanted::First).unwrap();
    let want = session(&model, cpu(Arithmetic::Fast)).feed(&TOKENS[..1], Wanted::Last).unwrap();
    assert_eq!(first.len(), want.len());
    assert!(nmse(&first, &want) < 1e-6);
}

#[test]
fn a_profile_times_every_step_and_feeds_the_tokens() {
    let model = model("F32");
    let (before, last) = TOKENS.split_at(TOKENS.len() - 1);
    let want = session(&model, cpu(Arithmetic::Reference)).feed(&TOKENS, Wanted::Last).unwrap();
    let executors = [Some(cpu(Arithmetic::Fast)), gpu().map(|(gpu, _)| gpu)];
    for executor in executors.into_iter().flatten() {
        let mut session = session(&model, executor);
        let plan = session.plan(before.len(), 1).unwrap();
        let times = session.profile(before).unwrap();
        for step in &plan.steps {
            assert!(times.iter().any(|time| time.label.starts_with(&step.label)), "{} is missing", step.label);
        }
        assert_eq!(session.length(), before.len());
        let error = nmse(&session.feed(last, Wanted::Last).unwrap(), &want);
        assert!(error < 1e-6, "{error}");
        assert!(session.profile(&[]).is_err() && session.profile(&[1; 64]).is_err());
    }
}

#[test]
fn a_prompt_over_many_columns_agrees_with_the_reference() {
    let Some((gpu, _)) = gpu() else { return };
    let model = model("Q8_0");
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 11) % 256).collect();
    let want = session(&model, cpu(Arithmetic::Reference)).feed(&tokens, Wanted::Last).unwrap();
    let got = session(&model, gpu).feed(&tokens, Wanted::Last).unwrap();
    assert!(nmse(&got, &want) < 1e-3, "{}", nmse(&got, &want));
}

#[test]
fn the_comparison_finds_no_difference_and_a_strict_one_names_the_step() {
    let Some((mut gpu, _)) = gpu() else { return };
    let model = model("F32");
    let mut reference = CpuExecutor::new(Arithmetic::Reference);
    let report = compare::run(&model, &TOKENS, 16, gpu.as_mut(), &mut reference, 1e-5).unwrap();
    assert_eq!(report.first_difference, None);
    assert_eq!(report.steps, report.lines.len().min(report.steps));
    let (mut again, mut reference) = (self::gpu().unwrap().0, CpuExecutor::new(Arithmetic::Reference));
    let strict = compare::run(&model, &TOKENS, 16, again.as_mut(), &mut reference, -1.0).unwrap();
    assert!(strict.first_difference.unwrap().starts_with("embedding:"));
}

#[test]
fn packed_weights_give_what_the_file_s_give() {
    // Rows of whole blocks of every packed type.
    let wide = Preset { hidden: 256, head_dim: 64, ff: 2048, ..*Preset::from_name("tiny-llama").unwrap() };
    let many: Vec<u32> = (0..40).map(|i| (i * 37 + 11) % 256).collect();
    for (recipe, packed) in [("Q8_0", "q8_0x8"), ("Q4_0", "q4_0x8"), ("Q6_K", "q6_kx8"), ("MXFP4", "mxfp4x16")] {
        let bytes = Synth::new(&wide, Recipe::from_name(recipe).unwrap(), 7).to_bytes().unwrap();
        let model = Arc::new(Model::new(Gguf::from_bytes(bytes).unwrap()).unwrap());
        // One token, a few and many are different kernels; compiling them is most of the time.
        let batches = if recipe == "Q8_0" { &[&TOKENS[..1], &TOKENS[..], &many[..]][..] } else { &[&TOKENS[..1]] };
        for tokens in batches {
            let Some((mut gpu, instance)) = gpu_with(Options { packing: Packing::All, ..Options::default() }) else {
                return;
            };
            let mut reference = CpuExecutor::new(Arithmetic::Reference);
            let report = compare::run(&model, tokens, 64, gpu.as_mut(), &mut reference, 1e-3).unwrap();
            assert_eq!(report.first_difference, None);
            assert!(report.lines.iter().any(|line| line.contains(packed)), "{packed}: {:#?}", report.lines);
            assert_eq!(instance.validation_messages(), Vec::<String>::new());
        }
    }
}

#[test]
fn weights_that_are_kept_decoded_give_what_the_file_s_give() {
    let model = Arc::new(Model::new(Gguf::from_bytes(file("Q8_0")).unwrap()).unwrap());
    let many: Vec<u32> = (0..40).map(|i| (i * 37 + 11) % 256).collect();
    let Some((mut gpu, instance)) = gpu_with(Options { f16_cache: DequantCache::All, ..Options::default() }) else {
        return;
    };
    let mut reference = CpuExecutor::new(Arithmetic::Reference);
    let report = compare::run(&model, &many, 64, gpu.as_mut(), &mut reference, 1e-6).unwrap();
    assert_eq!(report.first_difference, None);
    assert!(report.lines.iter().any(|line| line.contains("mul_mm.f16")), "{:#?}", report.lines);
    assert!(!report.lines.iter().any(|line| line.contains("mul_mm.q8_0")), "{:#?}", report.lines);
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
}

/// The tiny model with its metadata and tensors changed.
fn changed(edit: impl Fn(&mut Metadata), keep: impl Fn(&str) -> bool, widen: &str) -> Vec<u8> {
    let gguf = Gguf::from_bytes(file("F32")).unwrap();
    let mut metadata = gguf.metadata().clone();
    edit(&mut metadata);
    let mut writer = Writer::new(metadata);
    for info in gguf.tensors().iter().filter(|t| keep(&t.name)) {
        if info.name == widen {
            let dims = [info.shape[0], info.shape[1] / 2];
            writer.add(&info.name, &dims, info.ty, gguf.data(info)[..info.bytes / 2].to_vec()).unwrap();
        } else {
            writer.add(&info.name, info.dims(), info.ty, gguf.data(info).to_vec()).unwrap();
        }
    }
    writer.to_bytes().unwrap()
}

fn refusal(bytes: Vec<u8>) -> String {
    let opened = Model::new(Gguf::from_bytes(bytes).unwrap());
    let refused = opened.and_then(|model| graph(&model.config, &model.gguf, &Room::one(16)).map(drop));
    refused.unwrap_err().to_string()
}

#[test]
fn files_that_do_not_fit_get_one_clear_line() {
    let all = |_: &str| true;
    let other = refusal(changed(|m| m.set("general.architecture", "lama"), all, ""));
    assert!(other.contains("\"lama\" is not supported") && other.contains("llama"), "{other}");
    let missing = refusal(changed(|_| {}, |name| name != "blk.1.ffn_up.weight", ""));
    assert!(missing.contains("`blk.1.ffn_up.weight` is missing"), "{missing}");
    let shape = refusal(changed(|_| {}, all, "blk.0.attn_k.weight"));
    assert!(shape.contains("blk.0.attn_k.weight") && shape.contains("wants"), "{shape}");
    for (key, value) in [
        ("llama.attention.layer_norm_rms_epsilon", f32::NAN),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", f32::INFINITY),
        ("llama.rope.scaling.factor", -4.0),
    ] {
        let bad = refusal(changed(|m| m.set(key, value), all, ""));
        assert!(bad.contains(key) && bad.contains("must be a number from"), "{bad}");
    }
    let fewer = refusal(changed(|m| m.set("llama.block_count", 1u32), all, ""));
    assert!(fewer.contains("blk.1."), "{fewer}");
    let absurd = refusal(changed(|m| m.set("llama.block_count", 1_000_000u32), all, ""));
    assert!(absurd.contains("llama.block_count") && absurd.contains("1000000"), "{absurd}");
}

/// A head of six elements is fine with the CPU. The attention of GPUs reads eight at once, and says what runs the model.
#[test]
fn what_a_device_cannot_run_names_the_step_and_the_way_out() {
    let gguf = Gguf::from_bytes(file("F32")).unwrap();
    let mut metadata = gguf.metadata().clone();
    for key in ["attention.key_length", "attention.value_length", "rope.dimension_count"] {
        metadata.set(format!("llama.{key}"), 6u32);
    }
    let mut writer = Writer::new(metadata);
    for info in gguf.tensors() {
        let mut dims = info.dims().to_vec();
        let at = usize::from(!info.name.contains("attn_output"));
        if info.name.contains("attn_") && !info.name.contains("norm") {
            dims[at] = dims[at] / 16 * 6;
        }
        let bytes = dims.iter().product::<usize>() * size_of::<f32>();
        writer.add(&info.name, &dims, info.ty, gguf.data(info)[..bytes].to_vec()).unwrap();
    }
    let bytes = writer.to_bytes().unwrap();
    let model = Arc::new(Model::new(Gguf::from_bytes(bytes).unwrap()).unwrap());
    session(&model, cpu(Arithmetic::Fast)).feed(&TOKENS, Wanted::Last).unwrap();
    let Some((gpu, _instance)) = gpu() else { return };
    let refused = Session::new(Arc::clone(&model), gpu, 64, &mut |_, _| {})
        .and_then(|mut s| s.feed(&TOKENS, Wanted::Last).map(drop));
    let said = refused.unwrap_err().to_string();
    for word in ["0.attention", "head sizes must be multiples of 8", "--cpu"] {
        assert!(said.contains(word), "{word:?} is not in: {said}");
    }
}

#[test]
fn a_tensor_that_nobody_reads_is_named() {
    let gguf = Gguf::from_bytes(file("F32")).unwrap();
    let with = |name: &str| {
        let mut writer = Writer::new(gguf.metadata().clone());
        for info in gguf.tensors() {
            writer.add(&info.name, info.dims(), info.ty, gguf.data(info).to_vec()).unwrap();
        }
        writer.add(name, &[64], TensorType::F32, vec![0; 256]).unwrap();
        writer.to_bytes().unwrap()
    };
    let left = refusal(with("blk.1.attn_secret.weight"));
    assert!(left.contains("`blk.1.attn_secret.weight`") && left.contains("unexpected tensor"), "{left}");
    // A bias that files of this kind may have is read and counts.
    let model = Arc::new(Model::new(Gguf::from_bytes(with("blk.1.attn_q.bias")).unwrap()).unwrap());
    let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
    assert!(graph.fixed().slots.iter().any(|slot| slot.name == "blk.1.attn_q.bias"));
}

#[test]
fn a_factor_of_0_scales_nothing() {
    let all = |_: &str| true;
    let logits = |bytes: Vec<u8>| {
        let model = Arc::new(Model::new(Gguf::from_bytes(bytes).unwrap()).unwrap());
        session(&model, cpu(Arithmetic::Reference)).feed(&TOKENS, Wanted::Last).unwrap()
    };
    let plain = logits(file("F32"));
    assert_eq!(logits(changed(|m| m.set("llama.rope.scaling.factor", 0.0f32), all, "")), plain);
    assert_ne!(logits(changed(|m| m.set("llama.rope.scaling.factor", 4.0f32), all, "")), plain);
}

#[test]
fn prompts_that_do_not_fit_get_both_numbers() {
    let model = model("F32");
    let mut session = session(&model, cpu(Arithmetic::Fast));
    let long = session.feed(&[1; 65], Wanted::Last).unwrap_err().to_string();
    assert!(long.contains("65 tokens") && long.contains("holds 64"), "{long}");
    assert!(session.feed(&[], Wanted::Last).unwrap_err().to_string().contains("empty"));
    let unknown = session.feed(&[1 << 30], Wanted::Last).unwrap_err().to_string();
    assert!(unknown.contains("not in the vocabulary"), "{unknown}");
    let asked = Session::new(Arc::clone(&model), cpu(Arithmetic::Fast), 1 << 30, &mut |_, _| {});
    assert!(asked.err().unwrap().to_string().contains("1073741824"));
}

/// A file whose tensor `name` begins with bytes of ones: NaN in every float and in every scale of blocks.
fn with_nan(recipe: &str, name: &str) -> Arc<Model> {
    let mut bytes = file(recipe);
    let gguf = Gguf::from_bytes(bytes.clone()).unwrap();
    let info = gguf.tensor(name).unwrap();
    // Scales of some formats stand at the end of a block.
    bytes[info.offset as usize..][..info.bytes.min(512)].fill(0xff);
    Arc::new(Model::new(Gguf::from_bytes(bytes).unwrap()).unwrap())
}

#[test]
fn weights_that_are_no_numbers_are_refused_by_name_on_every_executor() {
    for recipe in ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"] {
        for name in ["blk.0.attn_norm.weight", "blk.1.ffn_down.weight", "token_embd.weight"] {
            let model = with_nan(recipe, name);
            let mut executors = vec![cpu(Arithmetic::Fast), cpu(Arithmetic::Reference)];
            executors.extend(gpu().map(|(executor, _)| executor));
            for executor in executors {
                let error = Session::new(Arc::clone(&model), executor, 64, &mut |_, _| {}).err();
                let error = error.unwrap_or_else(|| panic!("{recipe} {name} should be refused")).to_string();
                assert!(error.contains(name) && error.contains("NaN"), "{recipe} {name}: {error}");
            }
        }
    }
}
