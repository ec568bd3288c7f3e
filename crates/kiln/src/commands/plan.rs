//! `kiln plan`: the steps a model is made of, how each is carried out, and where two executors differ.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::compare;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor, Share};
use kiln_engine::lower::cut::Part;
use kiln_engine::lower::{Target, lower_until};
use kiln_engine::plan::{SlotKind, Step};
use kiln_engine::run::Wish;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use kiln_gpu::Adapter;
use serde_json::json;

use super::estimate::{Assumed, Estimates};
use crate::model::{ModelFlags, resolve};
use crate::output::print;

/// Flags of `kiln plan`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln plan smollm2
  kiln plan smollm2 --tokens 300 --after fuse-products
  kiln plan smollm2 --gpu-layers 20
  kiln plan smollm2 --diff \"Hello there\"
  kiln plan smollm2 --estimates --memory 16GiB --bandwidth 960GB")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them; without one the default model of the local store
    model: Option<PathBuf>,
    /// Tokens read at once: 1 as when generating, more as when reading a prompt
    #[arg(long, default_value_t = 1)]
    tokens: usize,
    /// Show the plan as it is after this pass; `plain` for the one that the architecture makes [default: the last one]
    #[arg(long, value_name = "PASS")]
    after: Option<String>,
    /// Run this prompt on the device and on the CPU reference, step by step, and show the first difference
    #[arg(long, value_name = "PROMPT")]
    diff: Option<String>,
    /// Also print what the driver tells of the kernels and what bounds the plan; always so on a device without hardware
    #[arg(long, conflicts_with_all = ["after", "diff"])]
    estimates: bool,
    /// With estimates: count memory as if the device had so much, such as 16GiB
    #[arg(long, value_name = "SIZE", value_parser = kiln_system::memory::bytes_of)]
    memory: Option<u64>,
    /// With estimates: how much the device's memory moves in a second, such as 960GB
    #[arg(long, value_name = "SIZE", value_parser = kiln_system::memory::bytes_of)]
    bandwidth: Option<u64>,
    /// Normalised mean squared error up to which a step counts as equal
    #[arg(long, default_value_t = 1e-5, value_parser = tolerance_of)]
    tolerance: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

fn tolerance_of(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
    number.ok_or_else(|| "want a number that is not negative, such as 1e-5".to_owned())
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = arguments.flags.open(&resolve(arguments.model.as_deref())?)?;
    if let Some(prompt) = &arguments.diff {
        return diff(arguments, &model, prompt);
    }
    if arguments.tokens == 0 {
        bail!("--tokens must be at least 1");
    }
    let room = Room::one(arguments.flags.context(&model)).with_windows(model.facts.window, arguments.tokens);
    let graph = model.graph(&room)?;
    let mut adapter = arguments.flags.adapter()?;
    // Opened, a device knows more of itself than its driver told; one without hardware proves nothing.
    let mut executor = match &adapter {
        Some(adapter) if !adapter.is_null() => {
            let context = Some(arguments.flags.context(&model)).filter(|_| model.facts.has_cache());
            Some(arguments.flags.executor_for(&model, &Wish { context, ..arguments.flags.wish(1) })?)
        }
        _ => None,
    };
    let targets = match (&executor, &adapter) {
        (Some(executor), _) => executor.targets(),
        (None, Some(null)) => vec![Target::gpu(&null.caps)],
        (None, None) => vec![Target::cpu()],
    };
    if let (Some(adapter), [Target { caps: Some(caps), .. }]) = (&mut adapter, &targets[..]) {
        adapter.caps = caps.clone();
    }
    // What a prompt that begins its text gets.
    let plan = graph.plan(graph.expanding(BatchShape::new(arguments.tokens, 1), &targets[0]))?;
    let order = executor.as_mut().and_then(|executor| executor.order().ok());
    let parts = match (arguments.after.as_deref(), &executor) {
        (Some("plain"), _) => vec![Part { device: 0, plan }],
        (after, Some(executor)) => executor.parts(plan, after)?,
        (after, None) => vec![Part { device: 0, plan: lower_until(plan, &targets[0], after)? }],
    };
    let null = adapter.as_ref().is_some_and(Adapter::is_null);
    let estimates = match (&adapter, &parts[..]) {
        (Some(adapter), [whole]) if arguments.estimates || (null && arguments.after.is_none()) => {
            let assumed = Assumed { memory: arguments.memory, bandwidth: arguments.bandwidth };
            Some(Estimates::new(&model, &whole.plan, adapter, &arguments.flags, assumed)?)
        }
        (Some(_), _) if arguments.estimates => {
            bail!("--estimates are for one device, and this plan has {}", targets.len())
        }
        (None, _) if arguments.estimates => bail!("--estimates are for a device, and the CPU would run this plan"),
        _ if arguments.memory.or(arguments.bandwidth).is_some() => {
            bail!("--memory and --bandwidth go with --estimates")
        }
        _ => None,
    };
    let shares = executor.as_ref().map(|executor| executor.shares()).unwrap_or_default();
    let shown = Shown { tokens: arguments.tokens, parts, targets, shares, order };
    if arguments.json {
        let mut all = shown.as_value();
        if let Some(estimates) = &estimates {
            all["estimates"] = estimates.as_value();
        }
        print(&serde_json::to_string_pretty(&all)?);
    } else {
        shown.print();
        if let Some(estimates) = &estimates {
            estimates.lines().iter().for_each(|line| print(line));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A plan in parts, to be printed.
struct Shown {
    tokens: usize,
    parts: Vec<Part>,
    targets: Vec<Target>,
    shares: Vec<Share>,
    order: Option<&'static str>,
}

impl Shown {
    /// How a device runs a step; steps of a plan that is not lowered to the end may have no way yet.
    fn runs(&self, device: usize, step: &Step) -> String {
        let caps = self.targets.get(device).and_then(|target| target.caps.as_ref());
        match caps.map(|caps| step.call.operation().pick(caps, None)) {
            None => "cpu".to_owned(),
            Some(Ok(choice)) => choice.launches.iter().map(|l| l.shader.name.clone()).collect::<Vec<_>>().join(" + "),
            Some(Err(_)) => "not yet".to_owned(),
        }
    }

    /// Bytes that a part gets from others, and makes for them.
    fn crossing(part: &Part, kind: &SlotKind) -> usize {
        part.plan.slots.iter().filter(|slot| slot.kind == *kind).map(|slot| slot.bytes).sum()
    }

    /// What is brought for a part of weights and caches that another device holds.
    fn brought(&self, part: &Part) -> Option<String> {
        let slots = part.plan.slots.iter().filter(|slot| matches!(slot.kind, SlotKind::StreamedWeight(_)));
        let weights: usize = slots.map(|slot| slot.bytes).sum();
        let staging = &self.shares[part.device].staging;
        let touched = |slot: &usize| {
            let touches = |step: &Step| {
                let operation = step.call.operation();
                operation.reads().iter().chain(&operation.writes()).any(|t| t.slot.0 as usize == *slot)
            };
            part.plan.steps.iter().any(touches)
        };
        let staged_bytes = (0..staging.len()).filter(|slot| staging[*slot].is_some()).filter(touched);
        let staged_bytes: Vec<&str> = staged_bytes.map(|slot| part.plan.slots[slot].name.as_str()).collect();
        let caches =
            if staged_bytes.is_empty() { String::new() } else { format!(", and pages of {}", staged_bytes.join(", ")) };
        (weights > 0 || !staged_bytes.is_empty()).then(|| format!("{weights} bytes of weights are brought{caches}"))
    }

    fn print(&self) {
        let several = self.shares.len() > 1 && self.parts.len() > 1;
        for part in &self.parts {
            if several {
                let [arrive, leave] = [SlotKind::Recv, SlotKind::Send].map(|kind| Shown::crossing(part, &kind));
                let name = &self.shares[part.device].name;
                let brought = self.brought(part).map_or_else(String::new, |brought| format!("; {brought}"));
                print(&format!("device {} ({name}): {arrive} bytes arrive, {leave} leave{brought}", part.device));
            }
            let device = if several { format!("{}: ", part.device) } else { String::new() };
            for (line, step) in part.plan.print().lines().zip(&part.plan.steps) {
                print(&format!("{line}  [{device}{}]", self.runs(part.device, step)));
            }
        }
        let steps: usize = self.parts.iter().map(|part| part.plan.len()).sum();
        let arena = self.parts.iter().map(|part| part.plan.arena).max().unwrap_or(0);
        let parts = if several { format!(" in {} parts", self.parts.len()) } else { String::new() };
        print(&format!("{steps} steps{parts} for {} token(s), {arena} bytes between them", self.tokens));
        self.order.iter().for_each(|order| print(order));
        for (number, share) in self.shares.iter().enumerate().filter(|_| several) {
            print(&format!("device {number}: {}, {}", share.name, share.part.as_deref().unwrap_or_default()));
        }
    }

    fn as_value(&self) -> serde_json::Value {
        let steps = self.parts.iter().enumerate().flat_map(|(number, part)| {
            let names = |t: Vec<kiln_kernels::tensor::Tensor>| {
                t.iter().map(|t| format!("{} {t}", part.plan.slot_name(t))).collect::<Vec<_>>()
            };
            part.plan.steps.iter().map(move |step| {
                let operation = step.call.operation();
                json!({
                    "label": step.label,
                    "operation": operation.name(),
                    "runs": self.runs(part.device, step),
                    "device": part.device,
                    "part": number,
                    "reads": names(operation.reads()),
                    "writes": names(operation.writes()),
                })
            })
        });
        let arena = self.parts.iter().map(|part| part.plan.arena).max().unwrap_or(0);
        let device = |share: &Share| json!({ "name": share.name, "holds": share.part });
        json!({
            "tokens": self.tokens,
            "arena": arena,
            "order": self.order,
            "devices": self.shares.iter().map(device).collect::<Vec<_>>(),
            "steps": steps.collect::<Vec<_>>(),
        })
    }
}

/// Runs the same plan twice, step by step.
fn diff(arguments: &Arguments, model: &kiln_engine::model::Model, prompt: &str) -> anyhow::Result<ExitCode> {
    let tokens = model.tokenizer.encode(prompt, AddSpecial::Yes, ParseSpecial::Yes)?;
    if tokens.is_empty() {
        return Err(kiln_engine::Error::EmptyPrompt.into());
    }
    let mut device = arguments.flags.executor()?;
    let mut reference: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Reference));
    let context = tokens.len().max(16).min(model.config.context);
    let report = compare::run(model, &tokens, context, device.as_mut(), reference.as_mut(), arguments.tolerance)?;
    let differs = report.first_difference.is_some();
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({
            "agree": !differs,
            "first_difference": report.first_difference,
            "steps": report.steps,
            "largest_error": if report.worst.is_finite() { Some(report.worst) } else { None },
            "tolerance": arguments.tolerance,
            "lines": report.lines,
        }))?);
        return Ok(if differs { ExitCode::from(1) } else { ExitCode::SUCCESS });
    }
    for line in &report.lines {
        print(line);
    }
    match report.first_difference {
        None => {
            print(&format!("{} steps agree; largest error {:.1e}", report.steps, report.worst));
            Ok(ExitCode::SUCCESS)
        }
        Some(difference) => {
            print(&difference);
            Ok(ExitCode::from(1))
        }
    }
}
