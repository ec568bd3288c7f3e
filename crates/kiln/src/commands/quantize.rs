//! `kiln quantize`: a model file made smaller (quantised), or brought into other tensor types.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use kiln_engine::importance::Importance;
use kiln_engine::requantise::Conversion;
use kiln_gguf::Gguf;
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use super::synth::recipe;
use crate::model::{in_words, resolve};
use crate::output::{byte_progress, print, say, size};

/// Flags of `kiln quantize`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln quantize smollm2 small.gguf Q4_K_M
  kiln imatrix smollm2 book.txt imatrix.gguf
  kiln quantize smollm2 smaller.gguf IQ4_XS --imatrix imatrix.gguf

Types: F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_1 Q5_0 Q4_K_M Q4_K_S Q4_1 Q4_0 IQ4_NL IQ4_XS MXFP4 MXFP4_MOE Q3_K_L \
Q3_K_M Q3_K_S IQ3_M IQ3_S IQ3_XS IQ3_XXS Q2_K Q2_K_S IQ2_M IQ2_S IQ2_XS IQ2_XXS Q2_0 TQ2_0 IQ1_M TQ1_0 IQ1_S Q1_0")]
pub(crate) struct Arguments {
    /// The model to read: a file (any part of a split one) or a name, as `kiln pull` takes them
    input: PathBuf,
    /// The file to write
    out: PathBuf,
    /// The type or recipe
    #[arg(value_name = "TYPE")]
    recipe: String,
    /// Weigh errors by how much each column counts, as `kiln imatrix` (or llama-imatrix) has measured it
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Give every matrix the one type, without mixing
    #[arg(long)]
    pure: bool,
    /// Number of threads; all cores without it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Overwrite OUT if it is there
    #[arg(long)]
    force: bool,
    /// Only say what every tensor would become
    #[arg(long)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let named = recipe(&arguments.recipe)?;
    let recipe = if arguments.pure { named.pure() } else { named };
    let path = resolve(Some(&arguments.input))?;
    let model = Gguf::open(&path)?;
    kiln_llm::check_model(&model, &path).map_err(|why| in_words(why.into()))?;
    let importance = arguments.imatrix.as_deref().map(Importance::open).transpose()?;
    let mut conversion = Conversion::new(&model, recipe)?;
    if let Some(importance) = &importance {
        conversion = conversion.with_importance(importance);
        let unknown = conversion.n_unknown();
        if unknown > 0 {
            say(&format!(
                "note: the importance matrix has no data for {unknown} tensors; their columns get the same importance"
            ));
        }
    }
    if arguments.dry_run {
        list(&conversion, arguments.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let inputs: Vec<&Path> = model.paths().chain(arguments.imatrix.as_deref()).collect();
    let output = Output::create(&arguments.out, Overwrite::if_forced(arguments.force), &inputs)?;
    if importance.is_none() && recipe.name.starts_with("IQ2") {
        say("note: so few bits without --imatrix cost much; `kiln imatrix` makes one of a text");
    }
    let again = conversion.n_requantised();
    if again > 0 {
        say(&format!("note: {again} tensors are quantised already; quantising them again costs quality"));
    }
    let mut pool = rayon::ThreadPoolBuilder::new();
    if let Some(threads) = arguments.threads {
        pool = pool.num_threads(threads.into());
    }
    let pool = pool.build().context("cannot start the threads")?;
    let start = Instant::now();
    let bar = byte_progress(conversion.data_bytes(), recipe.name);
    pool.install(|| conversion.save(output, &|bytes| bar.inc(bytes)))?;
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    let (before, after) = (model.data_bytes(), conversion.data_bytes());
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({
            "file": arguments.out.to_string_lossy(),
            "type": recipe.name,
            "tensors": model.tensors().len(),
            "data_bytes_before": before,
            "data_bytes": after,
            "requantised": again,
            "seconds": seconds,
        }))?);
    } else {
        let (from, to) = (size(before), size(after));
        say(&format!("{}: {} in {seconds:.1} s, {from} -> {to}", arguments.out.display(), recipe.name));
    }
    Ok(ExitCode::SUCCESS)
}

fn list(conversion: &Conversion<'_>, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        let rows: BTreeMap<&str, serde_json::Value> = conversion
            .tensors()
            .map(|(info, ty)| (info.name.as_str(), json!({"from": info.ty.name(), "to": ty.name()})))
            .collect();
        print(&serde_json::to_string_pretty(&json!({"data_bytes": conversion.data_bytes(), "tensors": rows}))?);
        return Ok(());
    }
    for (info, ty) in conversion.tensors() {
        let shape = info.dims().iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ");
        print(&format!("{:48} {shape:>24}  {} -> {ty}", kiln_system::text::shown(&info.name), info.ty));
    }
    print(&format!("in all {}", size(conversion.data_bytes())));
    Ok(())
}
