//! `kiln split` and `kiln merge`: one model in several files, and in one again.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, ensure};
use kiln_gguf::parts::{Cut, cut, merge, write_part};
use kiln_gguf::split::part_name;
use kiln_gguf::{Gguf, TensorInfo};
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use crate::model::resolve;
use crate::output::{byte_progress, print, say, size};

/// Flags of `kiln split`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln split smollm2 part --max-size 50M  # part-00001-of-00002.gguf and so on
  kiln split smollm2 few --max-tensors 128

Any part can be given to commands that take a MODEL; the others are found beside it.")]
pub(crate) struct SplitArguments {
    /// GGUF file or a name, as `kiln pull` takes them
    model: PathBuf,
    /// What the names of the parts begin with
    prefix: PathBuf,
    /// Bytes of tensors in a part at most: 500M, 2G
    #[arg(long, value_name = "SIZE", value_parser = bytes, required_unless_present = "max_tensors", conflicts_with = "max_tensors")]
    max_size: Option<u64>,
    /// Tensors in a part at most
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_tensors: Option<u32>,
    /// Overwrite parts that are there
    #[arg(long)]
    force: bool,
    /// Only say what would be written
    #[arg(long)]
    dry_run: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Flags of `kiln merge`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln split smollm2 part --max-size 50M
  kiln merge part-00001-of-*.gguf whole.gguf")]
pub(crate) struct MergeArguments {
    /// Any part of the model
    model: PathBuf,
    /// The file to write
    out: PathBuf,
    /// Overwrite OUT if it is there
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A number of bytes with a letter behind it.
fn bytes(text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.strip_suffix(['k', 'K', 'm', 'M', 'g', 'G']) {
        Some(digits) => (
            digits,
            match text.to_ascii_uppercase().as_bytes().last() {
                Some(b'K') => 1_000,
                Some(b'M') => 1_000_000,
                _ => 1_000_000_000,
            },
        ),
        None => (text, 1),
    };
    let number: Option<u64> = digits.parse().ok().filter(|n| *n > 0);
    number.and_then(|n| n.checked_mul(factor)).ok_or_else(|| "a size is a number with K, M or G behind it".to_owned())
}

/// Runs `kiln split`.
pub(crate) fn split(arguments: &SplitArguments) -> anyhow::Result<ExitCode> {
    let model = Gguf::open(resolve(Some(&arguments.model))?)?;
    let at = match (arguments.max_size, arguments.max_tensors) {
        (Some(size), _) => Cut::Bytes(size),
        (None, Some(tensors)) => Cut::Tensors(tensors as usize),
        (None, None) => bail!("say where to cut\nhint: --max-size 2G"),
    };
    if let (Cut::Bytes(most), Some(largest)) = (&at, model.tensors().iter().max_by_key(|info| info.bytes)) {
        ensure!(
            largest.bytes as u64 <= *most,
            "--max-size {most}: the tensor {} alone has {} bytes, and tensors are not split\nhint: --max-size {} or more",
            kiln_system::text::shown(&largest.name),
            largest.bytes,
            largest.bytes
        );
    }
    let parts = cut(&model, at);
    ensure!(parts.len() <= 1000, "{} parts are too many\nhint: make them larger", parts.len());
    let prefix = arguments.prefix.file_name().and_then(|name| name.to_str());
    let Some(prefix) = prefix else { bail!("{} is no beginning of a name", arguments.prefix.display()) };
    let paths: Vec<PathBuf> = (0..parts.len())
        .map(|no| arguments.prefix.with_file_name(part_name(prefix, no as u64, parts.len() as u64)))
        .collect();
    let inputs: Vec<&Path> = model.paths().collect();
    let sum = |part: &[&TensorInfo]| part.iter().map(|tensor| tensor.bytes as u64).sum::<u64>();
    if !arguments.dry_run {
        // All names are taken before the first byte is written.
        let create = |path: &PathBuf| Output::create(path, Overwrite::if_forced(arguments.force), &inputs);
        let outputs = paths.iter().map(create).collect::<Result<Vec<_>, _>>()?;
        let bar = byte_progress(model.data_bytes(), "split");
        let write = |(no, output)| write_part(&model, &parts, no, output, &|bytes| bar.inc(bytes));
        let written = outputs.into_iter().enumerate().map(write).collect::<Result<Vec<_>, _>>()?;
        // Some parts without the others would be taken for a model.
        Output::finish_all(written)?;
        bar.finish_and_clear();
    }
    if arguments.json {
        let row = |(path, part): (&PathBuf, &Vec<&TensorInfo>)| json!({"file": path, "tensors": part.len(), "data_bytes": sum(part)});
        let rows: Vec<_> = paths.iter().zip(&parts).map(row).collect();
        print(&serde_json::to_string_pretty(&rows)?);
        return Ok(ExitCode::SUCCESS);
    }
    for (path, part) in paths.iter().zip(&parts) {
        print(&format!("{}: {} tensors, {}", path.display(), part.len(), size(sum(part))));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `kiln merge`.
pub(crate) fn run_merge(arguments: &MergeArguments) -> anyhow::Result<ExitCode> {
    let model = Gguf::open(resolve(Some(&arguments.model))?)?;
    let inputs: Vec<&Path> = model.paths().collect();
    let output = Output::create(&arguments.out, Overwrite::if_forced(arguments.force), &inputs)?;
    let bar = byte_progress(model.data_bytes(), "merge");
    merge(&model, output, &|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    let (tensors, bytes) = (model.tensors().len(), model.data_bytes());
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({"file": arguments.out, "tensors": tensors, "data_bytes": bytes}))?);
    } else {
        say(&format!("{}: {tensors} tensors of {} files, {}", arguments.out.display(), inputs.len(), size(bytes)));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!([bytes("2G"), bytes("500m"), bytes("17")], [Ok(2_000_000_000), Ok(500_000_000), Ok(17)]);
        for bad in ["", "G", "-1", "0", "1.5G", "99999999999999999999", "9999999999999G"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }
}
