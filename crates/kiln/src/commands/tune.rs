//! `kiln tune`: times ways to split the work of generated tokens on this device, and keeps the fastest for later runs.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use kiln_gguf::TensorType;
use kiln_gpu::Device;
use kiln_kernels::formats::FORMATS;
use kiln_kernels::mul_mat_vec::search::{Found, Subject, search};
use kiln_kernels::mul_mat_vec::tuning::{Line, Table, Tuning};
use kiln_kernels::operation::Path;
use kiln_kernels::packing::type_on;
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use super::bench::time;
use crate::device::{DeviceFlag, tuning_file};
use crate::output::{print, progress, say};

/// Flags of `kiln tune`.
#[derive(clap::Args)]
#[command(after_help = "Example: kiln tune --format q4_k,q6_k --columns 1")]
pub(crate) struct Arguments {
    /// Tensor formats; the ones most models have without any, packed as the device gets them
    #[arg(long, value_name = "FORMATS", value_delimiter = ',', value_parser = format_of)]
    format: Vec<TensorType>,
    /// Numbers of columns (sequences, or tokens at once) to tune for, from 1 to 16
    #[arg(long, value_name = "COLUMNS", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16],
          value_parser = clap::value_parser!(u8).range(1..=16))]
    columns: Vec<u8>,
    /// Elements and number of rows of the matrix
    #[arg(long, value_name = "KxM", default_value = "4096x14336", value_parser = shape_of)]
    shape: (usize, usize),
    /// Only show what this path (scalar or int_dot) can do; without it both are compared and the result is kept
    #[arg(long, value_name = "PATH", value_parser = path_of)]
    path: Option<Path>,
    /// Only show what was found
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    device: DeviceFlag,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const COMMON: [TensorType; 6] =
    [TensorType::Q4_K, TensorType::Q6_K, TensorType::Q8_0, TensorType::Q4_0, TensorType::Q5_K, TensorType::F16];

const PATHS: [Path; 2] = [Path::Scalar, Path::IntDot];

fn format_of(text: &str) -> Result<TensorType, String> {
    let named = FORMATS.iter().find(|f| f.ty.name().eq_ignore_ascii_case(text));
    named.map(|f| f.ty).ok_or_else(|| {
        let names: Vec<_> = FORMATS.iter().map(|f| f.ty.name()).collect();
        format!("no such format; there are {}", names.join(", "))
    })
}

fn path_of(text: &str) -> Result<Path, String> {
    let known = PATHS.into_iter().find(|path| path.name() == text);
    known.ok_or_else(|| "there are scalar and int_dot".to_owned())
}

fn shape_of(text: &str) -> Result<(usize, usize), String> {
    let numbers = text.split_once('x').and_then(|(k, m)| Some((k.parse().ok()?, m.parse().ok()?)));
    let wrong = || "want elements x rows, elements a multiple of 32, such as 4096x14336".to_owned();
    numbers.filter(|&(k, m): &(usize, usize)| k > 0 && k.is_multiple_of(32) && m > 0).ok_or_else(wrong)
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let device = arguments.device.open()?;
    let caps = &device.adapter.caps;
    let common = COMMON.map(|ty| type_on(ty, arguments.shape.0, caps));
    let formats = if arguments.format.is_empty() { &common[..] } else { &arguments.format };
    if let Some(ty) = formats.iter().find(|ty| !arguments.shape.0.is_multiple_of(ty.block_len())) {
        let (k, block) = (arguments.shape.0, ty.block_len());
        anyhow::bail!(
            "rows of {k} elements are no whole number of {ty} blocks\nhint: --shape with a multiple of {block}"
        );
    }
    let mut columns: Vec<usize> = arguments.columns.iter().map(|&n| usize::from(n)).collect();
    columns.sort_unstable();
    columns.dedup();
    let mut lines = Vec::new();
    let mut rows = Vec::new();
    for &ty in formats {
        for &n in &columns {
            let paths = arguments.path.map_or(PATHS.to_vec(), |path| vec![path]);
            for (subject, found) in tuned(&device, ty, [arguments.shape.0, arguments.shape.1, n], &paths)? {
                let best = found.trials[0];
                let line = line(&device, &subject, best.split);
                if !arguments.json {
                    let gain = found.now.map_or(String::new(), |now| {
                        format!(", {:.2} times as fast as now", now.dependent / best.timing.dependent)
                    });
                    print(&format!("{line:60} # {}{gain}", time(best.timing.dependent)));
                }
                rows.push(json!({
                    "format": ty.name(),
                    "columns": n,
                    "path": subject.path.name(),
                    "line": line.to_string(),
                    "seconds": best.timing.dependent,
                    "seconds_now": found.now.map(|t| t.dependent),
                }));
                lines.push(line);
            }
        }
    }
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({ "device": device.adapter.name, "rows": rows }))?);
    }
    // The order of lines is that of preference, which one path alone does not tell.
    if !arguments.dry_run && arguments.path.is_none() {
        keep(&device, &lines)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The paths the device has for a product, the faster one first: the order of lines is that of preference.
fn tuned(
    device: &Arc<Device>,
    ty: TensorType,
    shape: [usize; 3],
    paths: &[Path],
) -> anyhow::Result<Vec<(Subject, Found)>> {
    let mut found = Vec::new();
    for &path in paths {
        let bar = progress(1, &format!("{ty}, {} columns, {}", shape[2], path.name()));
        let subject = Subject { ty, path, shape };
        let result = search(device, subject, &|done, all| {
            bar.set_length(all as u64);
            bar.set_position(done as u64);
        })?;
        bar.finish_and_clear();
        if !result.trials.is_empty() {
            found.push((subject, result));
        }
    }
    found.sort_by(|a, b| a.1.trials[0].timing.dependent.total_cmp(&b.1.trials[0].timing.dependent));
    Ok(found)
}

fn line(device: &Device, subject: &Subject, tuning: Tuning) -> Line {
    Line {
        device: if device.adapter.caps.is_cpu { "cpu" } else { "gpu" }.to_owned(),
        format: subject.ty.name().to_lowercase(),
        path: subject.path,
        columns: subject.shape[2],
        tuning,
    }
}

/// Puts the lines in the place of those that are kept for the device already.
fn keep(device: &Device, lines: &[Line]) -> anyhow::Result<()> {
    let Some(file) = tuning_file(&device.adapter) else {
        say("there is no cache folder to keep the result in; KILN_CACHE_DIR names one");
        return Ok(());
    };
    let old = std::fs::read_to_string(&file).ok().and_then(|text| Table::parse(&text).ok()).unwrap_or_default();
    let subject = |l: &Line| (l.format.clone(), l.columns);
    let is_old = |l: &Line| !lines.iter().any(|new| subject(new) == subject(l));
    let mut all: Vec<Line> = lines.iter().cloned().chain(old.0.into_iter().filter(is_old)).collect();
    // The first line that fits is taken: fewer columns go first. Paths keep their order.
    all.sort_by_key(subject);
    let text: String = all.iter().map(|line| format!("{line}\n")).collect();
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let text = format!("# {}\n{text}", device.adapter.describe());
    Output::write(&file, Overwrite::Yes, text.as_bytes())?;
    say(&format!("kept in {}", file.display()));
    Ok(())
}
