//! `kiln plan`: the steps a model is made of, how each is carried out, and where two executors differ.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use kiln_engine::arch::{BatchShape, Room};
use kiln_engine::compare;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::lower::{Target, lower_until};
use kiln_engine::plan::Step;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use kiln_gpu::Adapter;
use serde_json::json;

use super::estimate::{Assumed, Estimates};
use crate::model::{ModelFlags, resolve};
use crate::output::print;

/// Flags of `kiln plan`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  kiln plan model.gguf\n  kiln plan model.gguf --tokens 300 --after siblings\n  kiln plan model.gguf --diff \"Hello there\"\n  kiln plan model.gguf --estimates --memory 16GiB --bandwidth 960GB"
)]
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
    let plan = graph.plan(BatchShape::new(arguments.tokens, 1))?;
    let mut adapter = arguments.flags.adapter()?;
    // Opened, a device knows more of itself than its driver told; one without hardware proves nothing.
    let mut executor = match &adapter {
        Some(adapter) if !adapter.is_null() => Some(arguments.flags.executor()?),
        _ => None,
    };
    let target = match (&executor, &adapter) {
        (Some(executor), _) => executor.target(),
        (None, Some(null)) => Target::gpu(&null.caps),
        (None, None) => Target::cpu(),
    };
    if let (Some(adapter), Some(caps)) = (&mut adapter, &target.caps) {
        adapter.caps = caps.clone();
    }
    let order = executor.as_mut().and_then(|executor| executor.order().ok());
    let plan = match arguments.after.as_deref() {
        Some("plain") => plan,
        after => lower_until(plan, &target, after)?,
    };
    // How the device runs a step; steps of a plan that is not lowered to the end may have no way yet.
    let runs = |step: &Step| {
        let choice = target.caps.as_ref().map(|caps| step.call.operation().pick(caps, None));
        match choice {
            None => "cpu".to_owned(),
            Some(Ok(choice)) => choice.launches.iter().map(|l| l.shader.name.clone()).collect::<Vec<_>>().join(" + "),
            Some(Err(_)) => "not yet".to_owned(),
        }
    };
    let null = adapter.as_ref().is_some_and(Adapter::is_null);
    let estimates = match &adapter {
        Some(adapter) if arguments.estimates || (null && arguments.after.is_none()) => {
            let assumed = Assumed { memory: arguments.memory, bandwidth: arguments.bandwidth };
            Some(Estimates::new(&model, &plan, adapter, &arguments.flags, assumed)?)
        }
        None if arguments.estimates => bail!("--estimates are for a device, and the CPU would run this plan"),
        _ if arguments.memory.or(arguments.bandwidth).is_some() => {
            bail!("--memory and --bandwidth go with --estimates")
        }
        _ => None,
    };
    if arguments.json {
        let names = |t: Vec<kiln_kernels::tensor::Tensor>| {
            t.iter().map(|t| format!("{} {t}", plan.slot_name(t))).collect::<Vec<_>>()
        };
        let step = |s: &Step| {
            let operation = s.call.operation();
            json!({
                "label": s.label,
                "operation": operation.name(),
                "runs": runs(s),
                "reads": names(operation.reads()),
                "writes": names(operation.writes()),
            })
        };
        let steps: Vec<_> = plan.steps.iter().map(step).collect();
        let mut all = json!({ "tokens": arguments.tokens, "arena": plan.arena, "order": order, "steps": steps });
        if let Some(estimates) = &estimates {
            all["estimates"] = estimates.as_value();
        }
        print(&serde_json::to_string_pretty(&all)?);
    } else {
        for (line, step) in plan.print().lines().zip(&plan.steps) {
            print(&format!("{line}  [{}]", runs(step)));
        }
        print(&format!("{} steps for {} token(s), {} bytes between them", plan.len(), arguments.tokens, plan.arena));
        order.iter().for_each(|order| print(order));
        if let Some(estimates) = &estimates {
            estimates.lines().iter().for_each(|line| print(line));
        }
    }
    Ok(ExitCode::SUCCESS)
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
