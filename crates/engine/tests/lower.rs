//! Lowering keeps the meaning: after every pass the reference executor gives the same logits, for every tiny preset and for
//! batches of every kind. Snapshots hold what devices of several kinds are given.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use kiln_engine::arch::{self, BatchShape, Graph, Pictures, Room, graph};
use kiln_engine::compare;
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::lower::{DequantCache, PASSES, Packing, Rounds, Target, Weights, lower, lower_until};
use kiln_engine::model::Model;
use kiln_engine::plan::def_use::depend;
use kiln_engine::plan::{Plan, SlotInfo, SlotKind, Step};
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::synth::{PRESETS, Preset, Synth};
use kiln_gguf::{Gguf, TensorType};
use kiln_gpu::Caps;
use kiln_kernels::Call;

fn model(preset: &Preset, recipe: &str) -> Model {
    let bytes = Synth::new(preset, Recipe::from_name(recipe).unwrap(), 7).to_bytes().unwrap();
    Model::new(Gguf::from_bytes(bytes).unwrap()).unwrap()
}

fn tiny() -> impl Iterator<Item = &'static Preset> {
    let known = |preset: &&Preset| arch::find(preset.architecture()).is_ok();
    PRESETS.iter().filter(|preset| preset.name.starts_with("tiny-")).filter(known)
}

/// Caches of F32: rounding to F16 would turn a difference of one bit into one of thousands.
fn room(context: usize) -> Room {
    Room { k_type: TensorType::F32, v_type: TensorType::F32, ..Room::one(context) }
}

/// A device with matrix units, as far as the reference executor can follow: it runs what the device would.
fn devices() -> Vec<(&'static str, Target)> {
    let nvidia = Caps::example_nvidia();
    let mut wide = nvidia.clone();
    (wide.subgroups.size, wide.subgroups.min_size, wide.subgroups.max_size) = (64, 64, 64);
    wide.coopmat2 = Default::default();
    let mut narrow = Caps::least();
    (narrow.subgroups.size, narrow.subgroups.min_size, narrow.subgroups.max_size) = (16, 8, 32);
    let software = Caps { is_cpu: true, ..Caps::least() };
    vec![
        ("cpu", Target::cpu()),
        ("nvidia", Target::gpu(&nvidia)),
        ("waves-of-64", Target::gpu(&wide)),
        ("subgroups-of-16", Target::gpu(&narrow)),
        ("software", Target::gpu(&software)),
    ]
}

/// A device with one core, whose workgroups make enough rows of these small models, and whose steps leave their columns rounded.
fn rounding() -> Target {
    Target { rounds: Rounds::Always, ..Target::gpu(&Caps { cores: Some(1), ..Caps::example_nvidia() }) }
}

/// Logits of the last token.
fn logits(model: &Model, graph: &Graph, plan: &Plan, shape: BatchShape) -> Vec<f32> {
    let tokens: Vec<u32> = (0..shape.rows() as u32).map(|i| (i * i * 7 + i * 37 + 11) % 256).collect();
    let mut executor = CpuExecutor::new(Arithmetic::Reference);
    compare::logits(model, graph, plan, (shape, &tokens), &mut executor).unwrap()
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let squared = |a: f32, b: f32| f64::from(a - b).powi(2);
    let sum: f64 = got.iter().zip(want).map(|(a, b)| squared(*a, *b)).sum();
    sum / want.iter().map(|w| squared(*w, 0.0)).sum::<f64>()
}

#[test]
fn every_pass_keeps_the_logits() {
    for preset in tiny() {
        let model = model(preset, "Q8_0");
        for n in [1, 5, 9, 40, 300] {
            let graph = graph(&model.config, &model.gguf, &room(n)).unwrap();
            // Matrix units change the plan the most; the longest prompt is run at the end alone.
            let (_, target) = &devices()[1];
            let shape = graph.expanding(BatchShape::new(n, 1), target);
            let plain = graph.plan(shape).unwrap();
            let want = logits(&model, &graph, &plain, shape);
            assert!(want.iter().all(|v| v.is_finite()));
            let last = PASSES.len() - 1;
            for (i, pass) in PASSES.iter().enumerate() {
                if n == 300 && i != last {
                    continue;
                }
                let plan = lower_until(plain.clone(), target, Some(pass.name)).unwrap();
                let error = nmse(&logits(&model, &graph, &plan, shape), &want);
                assert!(error < 1e-12, "{}, {n} tokens, after {}: {error:.1e}", preset.name, pass.name);
            }
        }
    }
}

/// Columns that leave their step rounded lie beside the floats, which is what the references read: the meaning stays. They are taken where
/// one step makes what the next product multiplies, norms between them or not, and by nobody where bits must not depend on the way.
#[test]
fn columns_that_leave_their_step_rounded_keep_the_logits() {
    let (mut left, mut taken) = (0, 0);
    for preset in tiny() {
        let model = model(preset, "Q8_0");
        let graph = graph(&model.config, &model.gguf, &room(64)).unwrap();
        let shape = BatchShape::new(1, 1);
        let plain = graph.plan(shape).unwrap();
        let want = logits(&model, &graph, &plain, shape);
        for last in [Some("rounding"), None] {
            let plan = lower_until(plain.clone(), &rounding(), last).unwrap();
            let error = nmse(&logits(&model, &graph, &plan, shape), &want);
            assert!(error < 1e-12, "{}, until {last:?}: {error:.1e}", preset.name);
        }
        let count = |target: &Target, shape| rounded(&lower(graph.plan(shape).unwrap(), target).unwrap());
        let counted = count(&rounding(), shape);
        (left, taken) = (left + counted.0, taken + counted.1);
        if preset.name == "tiny-llama-256" {
            // Two layers: attention, output, gate and up, down; who takes the last one is the output matrix.
            assert_eq!(counted, (8, 8));
        }
        // By the table nobody does. Several tokens go the other way, and so do rows that must not know how they came about.
        assert_eq!(count(&Target { rounds: Rounds::ByTable, ..rounding() }, shape), (0, 0));
        assert_eq!(count(&rounding(), BatchShape::new(3, 1)), (0, 0), "{}", preset.name);
        assert_eq!(count(&Target { batch_invariant: true, ..rounding() }, shape), (0, 0));
    }
    assert!(left >= 20 && taken >= left, "{left} left, {taken} taken");
}

/// Steps that leave a column rounded, and steps that take one.
fn rounded(plan: &Plan) -> (usize, usize) {
    let leaves = |step: &&Step| match &step.call {
        Call::MulMatVec(call) => call.rounding.is_some(),
        Call::FlashAttention(call) => call.rounding.is_some(),
        _ => false,
    };
    let takes = |step: &&Step| matches!(&step.call, Call::MulMatVec(call) if call.rounded.is_some());
    (plan.steps.iter().filter(leaves).count(), plan.steps.iter().filter(takes).count())
}

/// Keys and values that are made of the latents of a prompt give what reading the latents gives.
#[test]
fn latents_and_what_is_made_of_them_give_the_same_logits() {
    for (recipe, most) in [("F32", 1e-11), ("Q8_0", 1e-6)] {
        let model = model(Preset::from_name("tiny-deepseek2").unwrap(), recipe);
        let graph = graph(&model.config, &model.gguf, &room(100)).unwrap();
        let shape = BatchShape::new(100, 100);
        let expanded = graph.expanding(shape, &Target::cpu());
        assert!(expanded.expands && !shape.expands);
        let of = |shape| logits(&model, &graph, &graph.plan(shape).unwrap(), shape);
        let error = nmse(&of(expanded), &of(shape));
        assert!(error < most, "{recipe}: {error:.1e}");
        assert!(error > 0.0, "{recipe}: both are the same plan");
        // Nothing of a short one is expanded, nothing where rows must not know of each other, nothing of two prompts.
        let short = graph.expanding(BatchShape::new(8, 1), &Target::cpu());
        let batch_invariant = graph.expanding(shape, &Target { batch_invariant: true, ..Target::cpu() });
        let two = graph.expanding(BatchShape { pieces: 2, ..shape }, &Target::cpu());
        assert!(!short.expands && !batch_invariant.expands && !two.expands);
    }
}

/// A plan as text: how many steps, dispatches and barriers it has, and what each step is.
fn described(graph: &Graph, device: &str, target: &Target, shape: BatchShape) -> String {
    let plan = lower(graph.plan(shape).unwrap(), target).unwrap();
    let launches = target.caps.as_ref().map(|caps| {
        let count = |step: &Step| step.call.operation().pick(caps, None).unwrap().launches.len();
        plan.steps.iter().map(count).sum::<usize>()
    });
    let (mut barriers, mut start) = (0, 0);
    for (at, step) in plan.steps.iter().enumerate() {
        if plan.steps[start..at].iter().any(|before| depend(before, step)) {
            (barriers, start) = (barriers + 1, at);
        }
    }
    let launches = launches.map_or(String::new(), |n| format!(", {n} dispatches, {barriers} barriers between steps"));
    let BatchShape { decode, prompt, pieces, .. } = shape;
    let tokens = match (decode, prompt) {
        (0, n) | (n, 0) => format!("{n} token(s)"),
        _ => format!("{decode} texts and {pieces} prompts of {prompt} tokens"),
    };
    let mut text = format!("# {device}, {tokens}: {} steps{launches}, arena of {} bytes\n", plan.len(), plan.arena);
    for step in &plan.steps {
        let splits = match &step.call {
            Call::FlashAttention(call) => {
                let splits = call.split.map_or(String::new(), |split| format!(" in {} splits", split.count));
                let caches = if call.kv_append.is_some() { ", writes caches" } else { "" };
                splits + caches + if call.rounding.is_some() { ", leaves a rounded column" } else { "" }
            }
            Call::MulMatVec(call) => {
                let takes = if call.rounded.is_some() { ", takes a rounded column" } else { "" };
                let leaves = if call.rounding.is_some() { ", leaves a rounded column" } else { "" };
                format!("{takes}{leaves}")
            }
            _ => String::new(),
        };
        text += &format!("{:28} {}{splits}\n", step.label, step.call.operation().name());
    }
    text
}

#[test]
fn plans_for_several_devices_are_those_of_the_snapshots() {
    for preset in tiny() {
        let model = model(preset, "Q8_0");
        let graph = graph(&model.config, &model.gguf, &Room::one(4096)).unwrap();
        let mut text = String::new();
        for (device, target) in devices() {
            for shape in [1, 9, 40].map(|n| BatchShape::new(n, 1)) {
                text += &described(&graph, device, &target, shape);
            }
        }
        // Many columns, and texts that go on beside two prompts.
        let (device, target) = &devices()[1];
        text += &described(&graph, device, target, graph.expanding(BatchShape::new(300, 1), target));
        let mixed = BatchShape {
            decode: 4,
            prompt: 64,
            pieces: 2,
            outputs: 6,
            expands: false,
            shares: false,
            pictures: Pictures::default(),
        };
        text += &described(&graph, device, target, mixed);
        if preset.name == "tiny-llama-256" {
            text += &described(&graph, "rounded by who makes it", &rounding(), BatchShape::new(1, 1));
        }
        let path = format!("{}/tests/plans/{}-devices.txt", env!("CARGO_MANIFEST_DIR"), preset.name);
        if std::env::var_os("KILN_UPDATE_SNAPSHOTS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        assert!(
            text == std::fs::read_to_string(&path).unwrap(),
            "{path} differs: KILN_UPDATE_SNAPSHOTS=1 writes the new plans"
        );
    }
}

/// Weights that are packed or kept decoded are read so by every product of many columns, within the room there is for them.
#[test]
fn weights_are_read_in_the_form_that_the_device_has() {
    let wide = Preset { hidden: 256, head_dim: 64, ff: 2048, ..*Preset::from_name("tiny-llama").unwrap() };
    let model = model(&wide, "Q8_0");
    let (shape, graph) = (BatchShape::new(40, 1), graph(&model.config, &model.gguf, &room(64)).unwrap());
    let plain = graph.plan(shape).unwrap();
    let want = logits(&model, &graph, &plain, shape);
    let (_, target) = devices().remove(1);
    let lowered = |weights: Weights| lower(plain.clone(), &Target { weights, ..target.clone() }).unwrap();
    let forms = |plan: &Plan, ty| {
        let is_form = |slot: &&SlotInfo| matches!(slot.kind, SlotKind::WeightVariant(_)) && slot.ty == ty;
        plan.slots.iter().filter(is_form).count()
    };
    let packed = lowered(Weights { packing: Packing::All, f16_cache: DequantCache::None, ..target.weights.clone() });
    assert!(forms(&packed, TensorType::Q8_0x8) > 0 && forms(&packed, TensorType::F16) == 0);
    assert!(nmse(&logits(&model, &graph, &packed, shape), &want) < 1e-12);
    let kept = Weights { packing: Packing::None, f16_cache: DequantCache::All, ..target.weights.clone() };
    let decoded = lowered(kept.clone());
    let matrices = forms(&decoded, TensorType::F16);
    assert!(matrices > 4 && forms(&decoded, TensorType::Q8_0x8) == 0);
    // Decoded weights are rounded to 11 bits.
    assert!(nmse(&logits(&model, &graph, &decoded, shape), &want) < 1e-6);
    // With room for some, some are kept; those that are kept already take none.
    let ample = Weights { f16_cache: DequantCache::WhenRoom, room: 2 * 256 * 2048, ..kept };
    let some = forms(&lowered(ample.clone()), TensorType::F16);
    let first = decoded.slots.iter().find_map(|slot| match slot.kind {
        SlotKind::WeightVariant(of) => Some(of),
        _ => None,
    });
    let more = forms(&lowered(Weights { cached: first.into_iter().collect(), ..ample }), TensorType::F16);
    assert!(some <= more && more <= matrices, "{some}, {more} of {matrices}");
}

#[test]
fn a_lowered_plan_needs_far_less_memory_than_its_results_together() {
    let model = model(&Preset { layers: 8, ..*Preset::from_name("tiny-llama").unwrap() }, "Q8_0");
    let graph = graph(&model.config, &model.gguf, &Room::one(512)).unwrap();
    let plan = lower(graph.plan(BatchShape::new(300, 1)).unwrap(), &Target::cpu()).unwrap();
    let scratch = plan.slots[plan.n_fixed..].iter().filter(|slot| slot.kind == SlotKind::Scratch);
    assert!(scratch.clone().all(|slot| slot.place.is_some_and(|place| place + slot.bytes <= plan.arena)));
    let together: usize = scratch.map(|slot| slot.bytes).sum();
    assert!(4 * plan.arena < together, "{} of {together} bytes", plan.arena);
}

#[test]
fn results_that_are_needed_at_the_same_time_lie_apart() {
    for preset in tiny() {
        let model = model(preset, "F32");
        let graph = graph(&model.config, &model.gguf, &Room::one(64)).unwrap();
        let plan = lower(graph.plan(BatchShape::new(9, 1)).unwrap(), &Target::cpu()).unwrap();
        // From the first to the last step that touches it, nothing else may lie in a slot's place.
        let mut lives = vec![None; plan.slots.len()];
        for (at, step) in plan.steps.iter().enumerate() {
            let operation = step.call.operation();
            for tensor in operation.reads().iter().chain(&operation.writes()).chain(&operation.scratch()) {
                lives[tensor.slot.0 as usize].get_or_insert((at, at)).1 = at;
            }
        }
        let used: Vec<_> =
            plan.slots.iter().zip(&lives).filter_map(|(s, life)| Some((s, s.place?, (*life)?))).collect();
        for (i, (a, a_place, a_life)) in used.iter().enumerate() {
            for (b, b_place, b_life) in &used[i + 1..] {
                let together = a_life.0 <= b_life.1 && b_life.0 <= a_life.1;
                let meet = *a_place < b_place + b.bytes && *b_place < a_place + a.bytes;
                assert!(!(together && meet), "{}: {} and {}", preset.name, a.name, b.name);
            }
        }
    }
}

#[test]
fn an_unknown_pass_is_named_with_the_known_ones() {
    let model = model(Preset::from_name("tiny-llama").unwrap(), "F32");
    let graph = graph(&model.config, &model.gguf, &Room::one(16)).unwrap();
    let plan = graph.plan(BatchShape::new(1, 1)).unwrap();
    let refused = lower_until(plan, &Target::cpu(), Some("polish")).unwrap_err().to_string();
    assert!(refused.contains("\"polish\"") && refused.contains("sink-rows"), "{refused}");
}
