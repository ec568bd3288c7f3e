//! `kiln convert`: a folder as Hugging Face has it becomes a GGUF file.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use kiln_convert::{Conversion, Options};
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use super::synth::recipe;
use crate::output::{byte_progress, print, say, size};

/// Flags of `kiln convert`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln convert Llama-3.2-1B-Instruct model-F16.gguf
  kiln convert Qwen3-0.6B model-Q8_0.gguf --type Q8_0
  kiln convert Qwen3-0.6B big.gguf --type BF16
  kiln quantize big.gguf small.gguf Q4_K_M

Models of the Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi 1 to 4 and BERT (uncased) families; safetensors of F32, F16 or \
BF16. The folder is one that `git clone` or `hf download` makes.")]
pub(crate) struct Arguments {
    /// The folder with config.json, safetensors and the tokenizer
    folder: PathBuf,
    /// The file to write
    out: PathBuf,
    /// The type of the matrices: F32, F16, BF16, Q8_0; `kiln quantize` has more, and mixes them
    #[arg(long = "type", value_name = "TYPE", default_value = "F16", value_parser = matrix_type)]
    ty: String,
    /// The pre-tokenizer, where the folder does not tell: llama-bpe, qwen2, ...
    #[arg(long, value_name = "NAME")]
    pre: Option<String>,
    /// The model's name [default: the folder's]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Overwrite OUT if it is there
    #[arg(long)]
    force: bool,
    /// Only say what would be written
    #[arg(long)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Types that need no fallbacks and no importance matrix.
const TYPES: [&str; 4] = ["F32", "F16", "BF16", "Q8_0"];

fn matrix_type(text: &str) -> Result<String, String> {
    let known = TYPES.iter().find(|name| name.eq_ignore_ascii_case(text));
    let wrong = || format!("it can be {}; `kiln quantize` makes the other types of the result", TYPES.join(", "));
    known.map(|name| (*name).to_owned()).ok_or_else(wrong)
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let recipe = recipe(&arguments.ty)?;
    let (pre, name) = (arguments.pre.clone(), arguments.name.clone());
    let options = Options { ty: recipe.base, file_type: recipe.file_type, pre, name };
    let conversion = Conversion::open(&arguments.folder, &options)?;
    for note in conversion.notes() {
        say(&format!("note: {note}"));
    }
    let start = Instant::now();
    if !arguments.dry_run {
        let paths = conversion.paths();
        let inputs: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
        let output = Output::create(&arguments.out, Overwrite::if_forced(arguments.force), &inputs)?;
        let bar = byte_progress(conversion.data_bytes(), "convert");
        conversion.save(output, &|bytes| bar.inc(bytes))?;
        bar.finish_and_clear();
    }
    let (tensors, bytes, seconds) =
        (conversion.tensors().len(), conversion.data_bytes(), start.elapsed().as_secs_f64());
    let pre = conversion.metadata().get_str_or("tokenizer.ggml.pre", "")?;
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({
            "file": arguments.out.to_string_lossy(),
            "architecture": conversion.architecture,
            "tokenizer": conversion.metadata().get_str_or("tokenizer.ggml.model", "")?,
            "pre": pre,
            "type": recipe.name,
            "tensors": tensors,
            "data_bytes": bytes,
            "seconds": seconds,
        }))?);
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.dry_run {
        for (name, dims, ty) in conversion.tensors() {
            let shape = dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ");
            print(&format!("{name:44} {shape:>24}  {ty}"));
        }
    }
    let (out, architecture) = (arguments.out.display(), conversion.architecture);
    say(&format!("{out}: {architecture}, {tensors} tensors, {} in {seconds:.1} s; pre-tokenizer: {pre}", size(bytes)));
    Ok(ExitCode::SUCCESS)
}
