//! Where the files of records lie. A record holds paths relative to a folder of this machine, so that a store can be moved,
//! copied and shared, and so that no record names a file outside these folders.

use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::name::Name;
use crate::record::Kept;
use crate::settings::Settings;

/// The folder that a path is relative to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Root {
    /// The store's own.
    #[default]
    Store,
    /// The cache that all programs share which use Hugging Face.
    Hub,
}

impl Root {
    fn is_store(&self) -> bool {
        *self == Root::Store
    }

    fn folder(self, settings: &Settings) -> &Path {
        match self {
            Root::Store => &settings.folder,
            Root::Hub => &settings.hub_cache,
        }
    }
}

/// A file of a model as a record has it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Stored {
    #[serde(default, skip_serializing_if = "Root::is_store")]
    root: Root,
    pub(crate) path: PathBuf,
    bytes: u64,
    sha256: Option<Digest>,
    own: bool,
}

impl Stored {
    /// The record's form of a file; none for a file that lies in no folder of the store.
    pub(crate) fn of(settings: &Settings, kept: &Kept) -> Option<Stored> {
        let (root, path) = relative(settings, &kept.path)?;
        Some(Stored { root, path, bytes: kept.bytes, sha256: kept.sha256.clone(), own: kept.own })
    }

    /// The file on this machine; none where the path leads out of the folders of the store, or is no model file. Versions before
    /// wrote absolute paths: those inside the folders are still taken.
    pub(crate) fn locate(&self, settings: &Settings, source: &str) -> Option<Kept> {
        let (root, path) = match relative(settings, &self.path) {
            Some(inside) => inside,
            None if self.path.is_absolute() => return None,
            None => (self.root, self.path.clone()),
        };
        let stays = path.components().all(|part| matches!(part, Component::Normal(_)));
        let fits = match root {
            Root::Store => is_model_file(&path),
            // A record of one repository says nothing about another.
            Root::Hub => is_gguf(&path) && repository_folder(source).is_some_and(|folder| path.starts_with(folder)),
        };
        let kept = || Kept {
            path: root.folder(settings).join(&path),
            bytes: self.bytes,
            sha256: self.sha256.clone(),
            own: self.own,
        };
        (stays && fits).then(kept)
    }
}

/// A path below one of the folders, from there.
fn relative(settings: &Settings, path: &Path) -> Option<(Root, PathBuf)> {
    // The cache of Hugging Face may lie inside the store.
    [Root::Hub, Root::Store].into_iter().find_map(|root| {
        let folder = root.folder(settings);
        let whole = || path.strip_prefix(fs::canonicalize(folder).ok()?).ok();
        let inside = path.strip_prefix(folder).ok().or_else(whole)?;
        (inside != Path::new("")).then(|| (root, inside.to_owned()))
    })
}

/// The folder of a repository in the cache of Hugging Face.
fn repository_folder(source: &str) -> Option<String> {
    match Name::parse(source).ok()? {
        Name::Hub { repo, .. } => Some(format!("models--{}", repo.replace('/', "--"))),
        _ => None,
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// Whether a file of the store can be a model by its name: a GGUF file, or a blob as Ollama names them.
fn is_model_file(path: &Path) -> bool {
    let blob = || {
        let hex = path.strip_prefix("ollama/blobs").ok()?.to_str()?.strip_prefix("sha256-")?;
        Digest::parse(hex)
    };
    is_gguf(path) || blob().is_some()
}

/// Whether deleting this path deletes a file of the folder itself: no folder on the way and not the file is a link to elsewhere.
pub(crate) fn is_file_of(folder: &Path, path: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).ok();
    let inside = |parent: &Path| Some(real(parent)?.starts_with(real(folder)?));
    fs::symlink_metadata(path).is_ok_and(|there| there.is_file()) && path.parent().and_then(inside).unwrap_or(false)
}

/// Removes folders that became empty, from this one up to the root, which stays.
pub(crate) fn prune(folder: &Path, root: &Path) {
    let empty = |folder: &&Path| folder.starts_with(root) && *folder != root && fs::remove_dir(folder).is_ok();
    folder.ancestors().take_while(empty).for_each(drop);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_name_model_files_of_the_store_alone() {
        let settings = Settings::new("/s/models", "/c/hub");
        let digest = "97ff8a35544dcf40ad84047074439dd6aa3a0be469ea578a1b1c017d939ec61c";
        let (blob, odd) = (format!("ollama/blobs/sha256-{digest}"), format!("web/sha256-{digest}"));
        let locate = |root: Root, path: &str, source: &str| {
            let stored = Stored { root, path: path.into(), bytes: 1, sha256: None, own: true };
            stored.locate(&settings, source).map(|kept| kept.path.to_str().unwrap().to_owned())
        };
        let hub = "models--a--b/snapshots/0/m.gguf";
        for (root, path, source, want) in [
            (Root::Store, "web/0/m.gguf", "https://h/m.gguf", Some("/s/models/web/0/m.gguf")),
            (Root::Store, "M.GGUF", "x", Some("/s/models/M.GGUF")),
            (Root::Store, blob.as_str(), "ollama:x:y", Some("/s/models/ollama/blobs/sha256-97ff")),
            (Root::Hub, hub, "hf:a/b:Q4_0", Some("/c/hub/models--a--b/snapshots/0/m.gguf")),
            // As earlier versions wrote them.
            (Root::Store, "/s/models/web/0/m.gguf", "x", Some("/s/models/web/0/m.gguf")),
            (Root::Store, "/c/hub/models--a--b/snapshots/0/m.gguf", "hf:a/b", Some("/c/hub/models--a--b/snap")),
            (Root::Store, "/s/other/web/0/m.gguf", "x", None),
            (Root::Store, "/home/me/precious.gguf", "x", None),
            (Root::Store, "/s/models/../m.gguf", "x", None),
            (Root::Store, "../m.gguf", "x", None),
            (Root::Store, "web/../../m.gguf", "x", None),
            (Root::Store, "records/0.json", "x", None),
            (Root::Store, "notes.txt", "x", None),
            (Root::Store, "", "x", None),
            (Root::Store, odd.as_str(), "x", None),
            (Root::Hub, hub, "hf:a/c", None),
            (Root::Hub, hub, "https://h/m.gguf", None),
            (Root::Hub, "models--a--b/../m.gguf", "hf:a/b", None),
        ] {
            let got = locate(root, path, source);
            let fits = match (&got, want) {
                (Some(got), Some(want)) => got.starts_with(want),
                (got, want) => got.is_none() && want.is_none(),
            };
            assert!(fits, "{path}: {got:?}");
        }
    }
}
