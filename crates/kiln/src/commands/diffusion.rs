//! `kiln run` with a model that fills in texts: an answer of masks that becomes text step by step.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use kiln_engine::diffusion::{Algorithm, Schedule, Settings, Step, USUAL_LENGTH, USUAL_STEPS, fill};
use kiln_engine::model::Model;
use kiln_engine::sampler::Sampling;
use kiln_engine::tokenizer::{ShowSpecial, Tokenizer};
use kiln_system::interrupt::Catch;
use serde_json::json;

use crate::generate::name;
use crate::model::ModelFlags;
use crate::output::{is_watched, print, print_piece, progress, say};

/// Flags for models that fill in texts.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Diffusion models (dream, llada, llada-moe, rnd1)")]
pub(crate) struct DiffusionFlags {
    /// Number of denoising steps [default: 128]
    #[arg(long, value_name = "N")]
    diffusion_steps: Option<usize>,
    /// Which tokens to unmask first: origin, entropy, margin, random or confidence [default: confidence]
    #[arg(long, alias = "diffusion-algo", value_name = "NAME", value_parser = algorithm)]
    diffusion_algorithm: Option<Algorithm>,
    /// Final timestep of the diffusion schedule (Dream uses 0.001)
    #[arg(long, value_name = "N", conflicts_with = "diffusion_block_length")]
    diffusion_eps: Option<f32>,
    /// Unmask blocks of N tokens from left to right (LLaDA uses 32)
    #[arg(long, value_name = "TOKENS")]
    diffusion_block_length: Option<usize>,
    /// Temperature for choosing which tokens to unmask; 0 takes the most confident [default: 0]
    #[arg(long, value_name = "N")]
    diffusion_alg_temp: Option<f32>,
    /// Print the text to stderr after each step
    #[arg(long)]
    diffusion_visual: bool,
}

fn algorithm(name: &str) -> Result<Algorithm, String> {
    Algorithm::from_name(name).ok_or_else(|| format!("it can be {}", Algorithm::names()))
}

impl DiffusionFlags {
    /// The first of these flags that was given.
    fn given(&self) -> Option<&'static str> {
        let flags = [
            (self.diffusion_steps.is_some(), "--diffusion-steps"),
            (self.diffusion_algorithm.is_some(), "--diffusion-algorithm"),
            (self.diffusion_eps.is_some(), "--diffusion-eps"),
            (self.diffusion_block_length.is_some(), "--diffusion-block-length"),
            (self.diffusion_alg_temp.is_some(), "--diffusion-alg-temp"),
            (self.diffusion_visual, "--diffusion-visual"),
        ];
        flags.into_iter().find_map(|(given, name)| given.then_some(name))
    }

    /// These flags mean nothing to a model that writes token by token.
    pub(crate) fn refuse(&self, model: &Model) -> anyhow::Result<()> {
        if let Some(flag) = self.given() {
            let architecture = model.config.architecture.name;
            bail!(
                "{flag} is for models that fill in texts; a model of architecture \"{architecture}\" writes token by token"
            );
        }
        Ok(())
    }

    fn settings(&self, sampling: Sampling, length: Option<usize>) -> Settings {
        let timesteps = self.diffusion_eps.map(Schedule::Timesteps);
        let usual = Settings::new(sampling);
        Settings {
            length: length.unwrap_or(USUAL_LENGTH),
            steps: self.diffusion_steps.unwrap_or(USUAL_STEPS),
            algorithm: self.diffusion_algorithm.unwrap_or(usual.algorithm),
            schedule: timesteps.or(self.diffusion_block_length.map(Schedule::Blocks)),
            place_temperature: self.diffusion_alg_temp.unwrap_or(0.0),
            ..usual
        }
    }
}

/// What is filled in, and how it is shown.
pub(super) struct Task<'a> {
    pub(super) flags: &'a DiffusionFlags,
    pub(super) prompt: Vec<u32>,
    pub(super) sampling: Sampling,
    /// Tokens of the answer.
    pub(super) length: Option<usize>,
    /// Texts that end the answer.
    pub(super) stops: &'a [String],
    pub(super) json: bool,
}

/// Fills in an answer and prints it.
pub(super) fn run(model: &Arc<Model>, model_flags: &ModelFlags, task: &Task<'_>) -> anyhow::Result<ExitCode> {
    let settings = task.flags.settings(task.sampling.clone(), task.length);
    let mut session = model_flags.session_for(model, task.prompt.len() + settings.length)?;
    if is_watched() {
        say(&format!("{} on {}", name(model), session.describe()));
    }
    let (catch, start, visual) = (Catch::new(), Instant::now(), task.flags.diffusion_visual);
    let bar = (!visual).then(|| progress(1, "filling in"));
    let filled = fill(&mut session, &task.prompt, &settings, &mut |step| {
        if visual {
            say(&format!("{:4}/{} {}", step.number, step.steps, sketch(&model.tokenizer, step)));
        }
        if let Some(bar) = &bar {
            bar.set_length(step.steps as u64);
            bar.set_position(step.number as u64);
        }
        !catch.happened()
    });
    bar.iter().for_each(indicatif::ProgressBar::finish_and_clear);
    let filled = filled?;
    // Behind the first token that ends a text stand more of them.
    let end = filled.tokens.iter().position(|id| model.tokenizer.is_end(*id));
    let tokens = &filled.tokens[..end.unwrap_or(filled.tokens.len())];
    let mut text = model.tokenizer.decode(tokens, ShowSpecial::No)?;
    let stop = task.stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
    text.truncate(stop.unwrap_or(text.len()));
    let seconds = start.elapsed().as_secs_f64();
    if task.json {
        let told = json!({
            "model": name(model),
            "device": session.describe(),
            "text": text,
            "end": if !filled.complete { "interrupted" } else if stop.is_some() { "stop" } else if end.is_some() { "end" } else { "limit" },
            "tokens": filled.tokens,
            "steps": filled.runs,
            "algorithm": settings.algorithm.name(),
            "seed": filled.seed,
            "usage": {"prompt_tokens": task.prompt.len(), "generated_tokens": tokens.len()},
            "timings": {"generation_ms": seconds * 1e3, "step_ms": seconds * 1e3 / filled.runs.max(1) as f64},
        });
        print(&serde_json::to_string_pretty(&told)?);
    } else {
        print_piece(&text);
        if !text.ends_with('\n') {
            print_piece("\n");
        }
    }
    if is_watched() {
        let (count, runs) = (tokens.len(), filled.runs);
        say(&format!("prompt: {} tokens; {count} tokens in {runs} steps, {seconds:.1} s", task.prompt.len()));
    }
    if !filled.complete {
        return Err(super::run::interrupted().into());
    }
    Ok(ExitCode::SUCCESS)
}

/// An answer on its way as one line.
fn sketch(tokenizer: &Tokenizer, step: Step<'_>) -> String {
    let piece = |token: &Option<u32>| match token {
        Some(id) => tokenizer.piece(*id).map(|bytes| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default(),
        None => "_".to_owned(),
    };
    let text: String = step.answer.iter().map(piece).collect();
    kiln_system::text::shown(&text.replace('\u{2581}', " "))
}
