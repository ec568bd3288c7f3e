//! `kiln synth`: a model file with random weights in the shape of a real model, for tests and benches.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use kiln_engine::quantise_recipe::{RECIPES, Recipe};
use kiln_engine::synth::{PRESETS, Preset, Synth};
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use crate::output::{byte_progress, print, say, size};

/// Flags of `kiln synth`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln synth tiny-llama Q8_0 tiny.gguf
  kiln synth llama-8b Q4_K_M 8b.gguf --seed 7")]
pub(crate) struct Arguments {
    /// The shape (see --list)
    #[arg(required_unless_present = "list")]
    preset: Option<String>,
    /// The tensor type or recipe, as for `kiln quantize`
    #[arg(required_unless_present = "list", value_name = "TYPE")]
    recipe: Option<String>,
    /// The file to write
    #[arg(required_unless_present = "list")]
    out: Option<PathBuf>,
    /// Another seed gives other weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Overwrite OUT if it is there
    #[arg(long)]
    force: bool,
    /// List the presets with their sizes
    #[arg(long)]
    list: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The recipe of this name, or an error that names them all.
pub(crate) fn recipe(name: &str) -> anyhow::Result<Recipe> {
    let known = || RECIPES.iter().map(|r| r.name).collect::<Vec<_>>().join(", ");
    Recipe::from_name(name).with_context(|| format!("no type {name:?}\nhint: there are {}", known()))
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (Some(preset), Some(recipe_name), Some(out)) = (&arguments.preset, &arguments.recipe, &arguments.out) else {
        return list(arguments.json);
    };
    if arguments.list {
        return list(arguments.json);
    }
    let known = || PRESETS.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
    let preset =
        Preset::from_name(preset).with_context(|| format!("no preset {preset:?}\nhint: there are {}", known()))?;
    let recipe = recipe(recipe_name)?;
    let output = Output::create(out, Overwrite::if_forced(arguments.force), &[])?;
    let start = Instant::now();
    let synth = Synth::new(preset, recipe, arguments.seed);
    let bar = byte_progress(synth.data_bytes(), preset.name);
    synth.save(output, &|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({
            "file": out.to_string_lossy(),
            "preset": preset.name,
            "type": recipe.name,
            "seed": arguments.seed,
            "data_bytes": synth.data_bytes(),
            "seconds": seconds,
        }))?);
    } else {
        say(&format!(
            "{}: {} {}, {} in {seconds:.1} s",
            out.display(),
            preset.name,
            recipe.name,
            size(synth.data_bytes())
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn list(as_json: bool) -> anyhow::Result<ExitCode> {
    let parameters = |p: &Preset| Recipe::from_name("F32").map_or(0, |f32| Synth::new(p, f32, 0).data_bytes() / 4);
    let rows: Vec<_> = PRESETS.iter().map(|p| (p, parameters(p))).collect();
    if as_json {
        let row = |(p, n): &(&Preset, u64)| json!({"name": p.name, "architecture": p.architecture(), "layers": p.layers, "hidden": p.hidden, "parameters": n});
        print(&serde_json::to_string_pretty(&rows.iter().map(row).collect::<Vec<_>>())?);
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!("{:16} {:12} {:>6} {:>7} {:>12}", "preset", "architecture", "layers", "hidden", "parameters"));
    for (p, n) in rows {
        let parameters = if n >= 1_000_000_000 { format!("{:.2} B", n as f64 / 1e9) } else { n.to_string() };
        print(&format!("{:16} {:12} {:>6} {:>7} {parameters:>12}", p.name, p.architecture(), p.layers, p.hidden));
    }
    Ok(ExitCode::SUCCESS)
}
