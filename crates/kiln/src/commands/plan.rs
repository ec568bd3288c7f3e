//! `kiln plan`: the steps a model is made of, how each is carried out, and where two executors differ.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::bail;
use kiln_engine::arch::{BatchShape, Room, graph};
use kiln_engine::compare;
use kiln_engine::executor::{Arithmetic, CpuExecutor, Executor};
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use serde_json::json;

use crate::model::{ModelFlags, open, resolve};
use crate::output::print;

/// Flags of `kiln plan`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  kiln plan model.gguf\n  kiln plan model.gguf --diff \"Hello there\"")]
pub(crate) struct Arguments {
    /// GGUF file; without one the default model of the local store
    model: Option<PathBuf>,
    /// Tokens that enter at once; from six on a device with matrix units gets other products than shown
    #[arg(long, default_value_t = 1)]
    tokens: usize,
    /// Run this prompt on the device and on the CPU reference, step by step, and show the first difference
    #[arg(long, value_name = "PROMPT")]
    diff: Option<String>,
    /// Normalised mean squared error up to which a step counts as equal
    #[arg(long, default_value_t = 1e-5)]
    tolerance: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    flags: ModelFlags,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let model = open(&resolve(arguments.model.as_deref())?)?;
    if let Some(prompt) = &arguments.diff {
        return diff(arguments, &model, prompt);
    }
    if arguments.tokens == 0 {
        bail!("--tokens must be at least 1");
    }
    let graph = graph(&model.config, &model.gguf, &Room::one(arguments.flags.context(&model)))?;
    let plan = graph.plan(BatchShape::new(arguments.tokens, 1))?;
    if arguments.json {
        let steps: Vec<_> = plan
            .steps
            .iter()
            .map(|s| {
                let names = |t: Vec<kiln_kernels::tensor::Tensor>| {
                    t.iter().map(|t| format!("{} {t}", plan.slot_name(t))).collect::<Vec<_>>()
                };
                let operation = s.call.operation();
                json!({
                    "label": s.label,
                    "operation": operation.name(),
                    "reads": names(operation.reads()),
                    "writes": names(operation.writes()),
                })
            })
            .collect();
        print(&serde_json::to_string_pretty(&json!({ "tokens": arguments.tokens, "steps": steps }))?);
    } else {
        print(plan.print().trim_end());
        print(&format!("{} steps for {} token(s)", plan.len(), arguments.tokens));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the same plan twice, step by step.
fn diff(arguments: &Arguments, model: &kiln_engine::model::Model, prompt: &str) -> anyhow::Result<ExitCode> {
    let tokens = model.tokenizer.encode(prompt, AddSpecial::Yes, ParseSpecial::Yes)?;
    let mut device = arguments.flags.executor()?;
    let mut reference: Box<dyn Executor> = Box::new(CpuExecutor::new(Arithmetic::Reference));
    let context = tokens.len().max(16).min(model.config.context);
    let report = compare::run(model, &tokens, context, device.as_mut(), reference.as_mut(), arguments.tolerance)?;
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
