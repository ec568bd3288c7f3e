//! `kiln tune`: times ways to split the work of generated tokens and of prompts on this device, and keeps the fastest for later runs.

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
use kiln_kernels::{mul_mat_vec, mul_mm, tuning};
use kiln_llm::tuning_file;
use kiln_system::files::{Output, Overwrite};
use serde_json::json;

use super::bench::time;
use crate::device::DeviceFlag;
use crate::output::{print, progress, say, size};

/// Flags of `kiln tune`.
#[derive(clap::Args)]
#[command(after_help = "Example:
  kiln tune --format q4_k,q6_k --columns 1")]
pub(crate) struct Arguments {
    /// Tensor formats; the ones most models have without any, packed as the device gets them
    #[arg(long, value_name = "FORMATS", value_delimiter = ',', value_parser = format_of)]
    format: Vec<TensorType>,
    /// Numbers of columns (sequences, or tokens at once) to tune for, from 1 to 16
    #[arg(long, value_name = "COLUMNS", value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16],
          value_parser = clap::value_parser!(u8).range(1..=16))]
    columns: Vec<u8>,
    /// Numbers of columns (texts that are written together, tokens of prompts) to tune matrix units for, where the device has them
    #[arg(long, value_name = "COLUMNS", value_delimiter = ',', default_values_t = [8, 16, 32, 64, 128, 512, 2048],
          value_parser = clap::value_parser!(u16).range(2..=4096))]
    many: Vec<u16>,
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

/// Most elements of a matrix to time: as large as those of models with 70 billion weights.
const MOST_ELEMENTS: usize = 1 << 28;
/// Matrices with fewer elements say nothing about others: they fit caches.
const LEAST_ELEMENTS: usize = 1 << 22;
/// A split must be this much faster than the present one to be kept: less is chance.
const GAIN: f64 = 1.02;

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
    let (k, m) = numbers.filter(|&(k, m): &(usize, usize)| k > 0 && k.is_multiple_of(32) && m > 0).ok_or_else(wrong)?;
    match k.checked_mul(m) {
        Some(elements) if elements <= MOST_ELEMENTS => Ok((k, m)),
        _ => Err(format!("a matrix of more than {MOST_ELEMENTS} elements is larger than those of models")),
    }
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let device = arguments.device.choice().open()?;
    let caps = &device.adapter.caps;
    let common = COMMON.map(|ty| type_on(ty, arguments.shape.0, caps));
    let formats = if arguments.format.is_empty() { &common[..] } else { &arguments.format };
    if let Some(ty) = formats.iter().find(|ty| !arguments.shape.0.is_multiple_of(ty.block_len())) {
        let (k, block) = (arguments.shape.0, ty.block_len());
        anyhow::bail!(
            "rows of {k} elements are no whole number of {ty} blocks\nhint: --shape with a multiple of {block}"
        );
    }
    let mut kept = 0;
    let mut columns: Vec<usize> = arguments.columns.iter().map(|&n| usize::from(n)).collect();
    columns.sort_unstable();
    columns.dedup();
    let mut many: Vec<usize> = arguments.many.iter().map(|&n| usize::from(n)).collect();
    many.sort_unstable();
    many.dedup();
    check_memory(&device, formats, arguments.shape)?;
    let elements = arguments.shape.0 * arguments.shape.1;
    // The order of lines is that of preference, which one path alone does not tell.
    let keeps = !arguments.dry_run && arguments.path.is_none() && elements >= LEAST_ELEMENTS;
    if !arguments.dry_run && elements < LEAST_ELEMENTS {
        say(&format!("note: a matrix of {elements} elements is too small to speak for others: nothing is kept"));
    }
    let mut rows = Vec::new();
    for &ty in formats {
        for &n in &columns {
            let paths = arguments.path.map_or(PATHS.to_vec(), |path| vec![path]);
            let found = tuned(&device, ty, [arguments.shape.0, arguments.shape.1, n], &paths)?;
            let faster = |found: &Found| is_gain(found.now.map(|now| now.dependent), best(found));
            for (subject, found) in &found {
                let line = line(&device, subject, found.trials[0].split);
                let gain = found.now.map(|now| now.dependent / best(found));
                if !arguments.json {
                    let told = match gain {
                        Some(gain) if faster(found) => format!(", {gain:.2} times as fast as now"),
                        Some(_) => ", no faster than now".to_owned(),
                        None => String::new(),
                    };
                    print(&format!("{line:60} # {}{told}", time(best(found))));
                }
                rows.push(json!({
                    "format": ty.name(),
                    "columns": n,
                    "path": subject.path.name(),
                    "line": line.to_string(),
                    "seconds": best(found),
                    "seconds_now": found.now.map(|t| t.dependent),
                    "faster": faster(found),
                }));
            }
            // As they come, so that an end half-way loses nothing. What is no faster keeps the split that it has.
            if keeps && found.first().is_some_and(|(_, first)| faster(first)) {
                let now = |s: &Subject| mul_mat_vec::tuning::table(caps).ok()?.find(s.ty, s.path, n, caps);
                let split = |s: &Subject, f: &Found| now(s).filter(|_| !faster(f)).unwrap_or(f.trials[0].split);
                let lines: Vec<Line> = found.iter().map(|(s, f)| line(&device, s, split(s, f))).collect();
                keep(&device, &lines, &[])?;
                kept += lines.len();
            }
        }
    }
    // A path of few columns was asked for, or matrix units would only be imitated.
    if arguments.path.is_none() && !caps.is_cpu {
        for (&ty, &n) in formats.iter().flat_map(|ty| many.iter().map(move |n| (ty, n))) {
            kept += tune_products(
                &device,
                (ty, [arguments.shape.0, arguments.shape.1, n]),
                &mut rows,
                (arguments.json, keeps),
            )?;
        }
    }
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({ "device": device.adapter.name, "rows": rows }))?);
    }
    if keeps {
        let file = tuning_file(&device.adapter).map(|file| file.display().to_string()).unwrap_or_default();
        say(&if kept > 0 { format!("{kept} lines kept in {file}") } else { "nothing was faster than now".to_owned() });
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds the best path and tile of a product of many columns; the number of lines that were kept.
fn tune_products(
    device: &Arc<Device>,
    (ty, shape): (TensorType, [usize; 3]),
    rows: &mut Vec<serde_json::Value>,
    (json, keeps): (bool, bool),
) -> anyhow::Result<usize> {
    let subject = mul_mm::search::Subject { ty, shape };
    let bar = progress(1, &format!("{ty}, {} columns on matrix units", shape[2]));
    let found = mul_mm::search::search(device, subject, &|done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    let (Some(best), Some((path, now))) = (found.trials.first(), found.now) else { return Ok(0) };
    let lines = mul_mm::search::lines(&subject, best, device.adapter.caps.is_cpu);
    let (seconds, faster) = (best.timing.dependent, is_gain(Some(now.dependent), best.timing.dependent));
    if !json {
        let told = match faster {
            true => format!("{:.2} times as fast as now ({})", now.dependent / seconds, path.name()),
            false => "no faster than now".to_owned(),
        };
        print(&format!("{:60} # {}, {told}", lines[0], time(seconds)));
    }
    rows.push(json!({
        "format": ty.name(),
        "columns": shape[2],
        "path": best.path.name(),
        "line": lines[0],
        "seconds": seconds,
        "seconds_now": now.dependent,
        "faster": faster,
    }));
    if !(keeps && faster) {
        return Ok(0);
    }
    keep(device, &[], &lines)?;
    Ok(lines.len())
}

/// Whether this time beats that of the present split by more than noise.
fn is_gain(now: Option<f64>, best: f64) -> bool {
    now.is_none_or(|now| now > GAIN * best)
}

/// Seconds of the best split.
fn best(found: &Found) -> f64 {
    found.trials[0].timing.dependent
}

/// Whether the matrices fit the device and the host. Timing takes several copies, so that caches do not help.
fn check_memory(device: &Device, formats: &[TensorType], (k, m): (usize, usize)) -> anyhow::Result<()> {
    const COPIES: u64 = 4;
    let bytes = formats.iter().filter_map(|ty| ty.row_bytes(k)).max().unwrap_or(0) as u64 * m as u64;
    let (_, free) = device.memory_now();
    if COPIES * bytes > free {
        let (needed, free) = (size(COPIES * bytes), size(free));
        anyhow::bail!(
            "timing matrices of {k}x{m} takes {needed} of the device's memory, {free} are free\nhint: a smaller --shape"
        );
    }
    // The host draws the weights as floats before it packs them.
    let needed = COPIES * 4 * (k as u64) * (m as u64);
    match kiln_system::memory::available() {
        Some(there) if needed > there.bytes => anyhow::bail!(
            "making matrices of {k}x{m} takes {} of memory, {} are left {}\nhint: a smaller --shape",
            size(needed),
            size(there.bytes),
            there.bound.name()
        ),
        _ => Ok(()),
    }
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

/// Replaces the tuning lines of the device.
fn keep(device: &Device, lines: &[Line], products: &[String]) -> anyhow::Result<()> {
    let Some(file) = tuning_file(&device.adapter) else {
        say("there is no cache folder to keep the result in; KILN_CACHE_DIR names one");
        return Ok(());
    };
    keep_in(&file, &device.adapter.describe(), lines, products)
}

/// What a line of products of many columns is for: its format and the most columns.
fn product_subject(line: &str) -> (String, usize) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let word = |i: usize| words.get(i).copied().unwrap_or_default();
    (word(2).to_owned(), word(4).parse().unwrap_or(usize::MAX))
}

/// Writes lines into the file of a device, replacing those for the same format and N; `products` are lines of `mul_mm`.
fn keep_in(file: &std::path::Path, device: &str, lines: &[Line], products: &[String]) -> anyhow::Result<()> {
    let text = tuning::present(&std::fs::read_to_string(file).unwrap_or_default());
    let old = Table::parse(&text).unwrap_or_default();
    let subject = |l: &Line| (l.format.clone(), l.columns);
    let is_old = |l: &Line| !lines.iter().any(|new| subject(new) == subject(l));
    let mut all: Vec<Line> = lines.iter().cloned().chain(old.0.into_iter().filter(is_old)).collect();
    // The first line that fits is taken: fewer columns go first. Paths keep their order.
    all.sort_by_key(subject);
    let old = tuning::lines(&text, "mul_mm").map(|(_, words)| format!("mul_mm {}", words.join(" ")));
    let is_old = |l: &String| !products.iter().any(|new| product_subject(new) == product_subject(l));
    let mut many: Vec<String> = products.iter().cloned().chain(old.filter(is_old)).collect();
    many.sort_by_key(|line| product_subject(line));
    let lines = all.iter().map(Line::to_string).chain(many);
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let text = format!("# {device}\n{text}");
    Output::write(file, Overwrite::Yes, text.as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gains_are_kept() {
        assert!(is_gain(None, 1.0), "a product without a split of its own takes what is found");
        assert!(is_gain(Some(1.1), 1.0));
        assert!(!is_gain(Some(1.01), 1.0), "a hundredth is chance");
        assert!(!is_gain(Some(0.97), 1.0));
    }

    #[test]
    fn lines_are_kept_as_they_come_in_the_place_of_older_ones() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("below/tuning");
        let line = |format: &str, columns, path: Path| {
            let text = format!("gpu {format} {} {columns} 64 subgroup 2 1 quads:4x1", path.name());
            Table::parse(&text).unwrap().0.remove(0)
        };
        let read = || Table::parse(&std::fs::read_to_string(&file).unwrap()).unwrap().0;
        let keep = |lines: &[Line]| keep_in(&file, "a device", lines, &[]).unwrap();
        keep(&[line("q4_k", 2, Path::Scalar), line("q4_k", 2, Path::IntDot)]);
        assert_eq!(read().len(), 2);
        keep(&[line("q4_k", 1, Path::Scalar)]);
        keep(&[line("q4_k", 2, Path::IntDot)]);
        let kept: Vec<_> = read().iter().map(|l| (l.columns, l.path)).collect();
        assert_eq!(kept, [(1, Path::Scalar), (2, Path::IntDot)]);
        // Those of many columns lie beside them, and neither takes the place of the other.
        let many = |lines: &[&str]| {
            let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
            keep_in(&file, "a device", &[], &lines).unwrap();
        };
        many(&["mul_mm gpu q4_k fragment 128 tile=16x128", "mul_mm * q4_k prefer 128 fragment"]);
        many(&["mul_mm gpu q4_k fragment 16 tile=16x16", "mul_mm * q4_k prefer 16 fragment"]);
        many(&["mul_mm gpu q4_k fragment 128 tile=16x64", "mul_mm * q4_k prefer 128 fragment"]);
        keep(&[line("q4_k", 1, Path::IntDot)]);
        let text = std::fs::read_to_string(&file).unwrap();
        let products: Vec<&str> = text.lines().filter(|line| line.starts_with("mul_mm ")).collect();
        assert_eq!(
            products,
            [
                "mul_mm gpu q4_k fragment 16 tile=16x16",
                "mul_mm * q4_k prefer 16 fragment",
                "mul_mm gpu q4_k fragment 128 tile=16x64",
                "mul_mm * q4_k prefer 128 fragment"
            ]
        );
        assert_eq!(read().len(), 2);
    }
}
