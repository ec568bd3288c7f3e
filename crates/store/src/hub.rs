//! Hugging Face: what a repository holds, and the cache that its programs share (`models--OWNER--REPO` with `blobs`, `refs` and
//! `snapshots`).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use kiln_system::files::{Output, Overwrite};
use kiln_system::os;
use kiln_system::text::shown;
use serde::Deserialize;

use crate::digest::Digest;
use crate::download::{Downloader, Remote};
use crate::error::{Error, Result};
use crate::http::{Client, Request, host};
use crate::name::{is_path, is_word};
use crate::place::prune;
use crate::quants;
use crate::record::{Expected, Kept, Record, stem};
use crate::settings::Settings;

/// What the hub says of a repository.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<Large>,
}

#[derive(Deserialize)]
struct Large {
    sha256: Option<String>,
    size: Option<u64>,
}

/// One repository at one revision.
pub(crate) struct Repository<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) repo: &'a str,
    pub(crate) revision: &'a str,
}

impl Repository<'_> {
    fn folder(&self) -> PathBuf {
        self.settings.hub_cache.join(format!("models--{}", self.repo.replace('/', "--")))
    }

    /// The folder of the revision, if it is known.
    fn snapshot(&self) -> Option<PathBuf> {
        let folder = self.folder();
        let named = fs::read_to_string(folder.join("refs").join(self.revision)).ok();
        let commit = named.map_or_else(|| self.revision.to_owned(), |text| text.trim().to_owned());
        is_word(&commit).then(|| folder.join("snapshots").join(commit))
    }

    /// A model that some program has fetched already.
    pub(crate) fn cached(&self, wish: Option<&str>) -> Option<Vec<Kept>> {
        let snapshot = self.snapshot()?;
        let mut files = Vec::new();
        list(&snapshot, "", 0, &mut files);
        let names: Vec<&str> = files.iter().map(String::as_str).collect();
        let chosen = quants::choose(self.repo, &names, wish).ok()?;
        // Without a wish the cache cannot tell what else the repository has; what is there serves.
        let kept = |name: &String| {
            let path = snapshot.join(name);
            let bytes = fs::metadata(&path).ok()?.len();
            let blob = fs::read_link(&path).ok();
            let sha256 = blob.and_then(|blob| Digest::parse(blob.file_name()?.to_str()?));
            Some(Kept { path, bytes, sha256, own: false })
        };
        chosen.iter().map(kept).collect()
    }

    /// Fetches a model into the cache.
    pub(crate) fn fetch(
        &self,
        client: &Client,
        down: &Downloader<'_>,
        wish: Option<&str>,
        expected: &Expected<'_>,
    ) -> Result<Vec<Kept>> {
        if self.settings.offline {
            return Err(Error::Offline { name: format!("hf:{}", self.repo) });
        }
        let listing = self.listing(client)?;
        let names: Vec<&str> = listing.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        let chosen = quants::choose(self.repo, &names, wish)?;
        expected.check_count(self.repo, chosen.len())?;
        let folder = self.folder();
        let mut kept = Vec::new();
        for name in &chosen {
            let Some(file) = listing.siblings.iter().find(|file| file.rfilename == *name) else { continue };
            kept.push(self.fetch_file(down, &folder, &listing.sha, file, expected)?);
        }
        // Only when all is there: who follows this finds a whole model.
        if listing.sha != self.revision {
            let reference = folder.join("refs").join(self.revision);
            let parent = reference.parent().unwrap_or(&folder);
            fs::create_dir_all(parent).map_err(Error::io(parent))?;
            Output::write(&reference, Overwrite::Yes, listing.sha.as_bytes())?;
        }
        self.tell_encoders(down, &quants::encoders(&names), &chosen);
        Ok(kept)
    }

    /// Says which encoders of pictures or sound lie beside what was fetched.
    fn tell_encoders(&self, down: &Downloader<'_>, encoders: &[&str], chosen: &[String]) {
        let (Some(first), repo) = (encoders.first(), self.repo) else { return };
        if chosen.iter().any(|name| encoders.contains(&name.as_str())) {
            return;
        }
        let at = if self.revision == "main" { String::new() } else { format!("@{}", self.revision) };
        let list: Vec<String> = encoders.iter().map(|name| shown(name)).collect();
        down.watch.say(&format!(
            "note: beside the model lies what shows it pictures or sound: {}\nhint: `kiln pull hf:{repo}{at}:{}` fetches it",
            list.join(", "),
            shown(first),
        ));
    }

    fn listing(&self, client: &Client) -> Result<Listing> {
        let Settings { hub_endpoint, hub_token, .. } = self.settings;
        let (repo, revision) = (self.repo, self.revision);
        let url = format!("{hub_endpoint}/api/models/{repo}/revision/{}?blobs=true", revision.replace('/', "%2F"));
        let text = client.text(&Request { token: hub_token.as_deref(), ..Request::new(&url) });
        let text = text.map_err(|why| match why {
            Error::Status { status: 401 | 403 | 404, .. } => self.refused(),
            why => why,
        })?;
        let nonsense = |why: String| Error::Nonsense { host: host(&url), why };
        let mut listing: Listing = serde_json::from_str(&text).map_err(|why| nonsense(why.to_string()))?;
        if !is_word(&listing.sha) {
            return Err(nonsense("its commit is no word".into()));
        }
        // What could leave the cache is not there for us.
        listing.siblings.retain(|file| is_path(&file.rfilename));
        Ok(listing)
    }

    fn refused(&self) -> Error {
        let (repo, revision) = (self.repo, self.revision);
        let at = if revision == "main" { String::new() } else { format!(" at {revision}") };
        let hint = match self.settings.hub_token {
            None => {
                "is it spelled right? A private or gated one needs a key in HF_TOKEN, and its terms accepted on the site"
            }
            Some(_) => {
                "is it spelled right? Your key (HF_TOKEN) may not read it, or its terms were not accepted on the site"
            }
        };
        let what = format!("{} has no repository {repo}{at}, or does not show it", host(&self.settings.hub_endpoint));
        Error::Refused { what, hint: hint.into() }
    }

    fn fetch_file(
        &self,
        down: &Downloader<'_>,
        folder: &Path,
        commit: &str,
        file: &Sibling,
        expected: &Expected<'_>,
    ) -> Result<Kept> {
        let name = &file.rfilename;
        let nonsense =
            |why: &str| Error::Nonsense { host: host(&self.settings.hub_endpoint), why: format!("{name}: {why}") };
        let sha256 = file.lfs.as_ref().and_then(|large| Digest::parse(large.sha256.as_deref()?));
        // Files that are not large go by another hash, which Git makes of them.
        let blob = sha256.as_ref().map(|digest| digest.hex().to_owned()).or_else(|| file.blob_id.clone());
        let blob = blob.filter(|blob| is_word(blob)).ok_or_else(|| nonsense("it has no hash"))?;
        let target = folder.join("blobs").join(&blob);
        if let Some(announced) = &sha256 {
            expected.check(name, announced)?;
        }
        let path = folder.join("snapshots").join(commit).join(name);
        let url = format!("{}/{}/resolve/{commit}/{name}", self.settings.hub_endpoint, self.repo);
        let remote = Remote {
            name: name.rsplit('/').next().unwrap_or(name).to_owned(),
            url,
            token: self.settings.hub_token.clone(),
            bytes: file.lfs.as_ref().and_then(|large| large.size).or(file.size),
            sha256: sha256.or_else(|| expected.sha256.cloned()),
            recorded: expected.recorded(&path),
            variable: "HF_HOME",
        };
        let fetched = down.fetch(&remote, &target).map_err(|why| {
            prune(target.parent().unwrap_or(folder), &self.settings.hub_cache);
            match why {
                Error::Status { status: 401 | 403, .. } => self.refused(),
                why => why,
            }
        })?;
        link(&path, &target, name.split('/').count())?;
        Ok(Kept { path, bytes: fetched.bytes, sha256: Some(fetched.sha256), own: !fetched.was_there })
    }
}

/// Makes the name in a snapshot, a link that stays right when the whole cache is moved.
fn link(path: &Path, blob: &Path, depth: usize) -> Result<()> {
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(Error::io(parent))?;
    let up = "../".repeat(depth + 1);
    let to = format!("{up}blobs/{}", blob.file_name().unwrap_or_default().to_string_lossy());
    if fs::metadata(path).is_ok() {
        return Ok(());
    }
    // A dead link is in the way.
    let _ = fs::remove_file(path);
    match os::link(&to, path) {
        Err(why) if why.kind() != std::io::ErrorKind::AlreadyExists => Err(Error::Io { path: path.into(), why }),
        _ => Ok(()),
    }
}

/// Files below a folder whose links lead somewhere, as paths from it.
fn list(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        match fs::metadata(entry.path()) {
            Ok(there) if there.is_dir() && depth < 4 => list(&entry.path(), &format!("{name}/"), depth + 1, found),
            Ok(there) if there.is_file() => found.push(name),
            _ => {}
        }
    }
}

/// Models in the cache, whichever program fetched them.
pub(crate) fn cached_models(settings: &Settings) -> Vec<Record> {
    let mut found = Vec::new();
    for entry in fs::read_dir(&settings.hub_cache).into_iter().flatten().flatten() {
        let folder = entry.file_name().to_string_lossy().into_owned();
        let Some((owner, repo)) = folder.strip_prefix("models--").and_then(|rest| rest.split_once("--")) else {
            continue;
        };
        let repo = format!("{owner}/{repo}");
        let repository = Repository { settings, repo: &repo, revision: "main" };
        let mut files = Vec::new();
        let Some(snapshot) = repository.snapshot() else { continue };
        list(&snapshot, "", 0, &mut files);
        let names: Vec<&str> = files.iter().map(String::as_str).collect();
        for parts in quants::models(&names).into_values() {
            let Some(kept) = repository.cached(parts.first().map(String::as_str)) else { continue };
            let fetched = kept.first().and_then(|first| fs::metadata(&first.path).ok()?.modified().ok());
            let fetched = fetched.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            found.push(Record {
                name: stem(&parts[0]),
                source: format!("hf:{repo}:{}", parts[0]),
                files: kept,
                fetched: fetched.map_or(0, |age| age.as_secs()),
            });
        }
    }
    found
}

/// Removes a file of a snapshot, and its blob where no other snapshot leads to it. A link to anything but a blob of the same
/// repository goes alone: what it leads to is not of the cache.
pub(crate) fn remove(path: &Path) -> std::io::Result<()> {
    let target = fs::canonicalize(path)?;
    fs::remove_file(path)?;
    let Some(snapshots) = path.ancestors().find(|folder| folder.file_name().is_some_and(|name| name == "snapshots"))
    else {
        return Ok(());
    };
    let blobs = fs::canonicalize(snapshots.with_file_name("blobs"));
    let is_blob = blobs.is_ok_and(|blobs| target.parent() == Some(blobs.as_path()));
    let mut files = Vec::new();
    list(snapshots, "", 0, &mut files);
    let used = files.iter().any(|file| fs::canonicalize(snapshots.join(file)).is_ok_and(|other| other == target));
    if is_blob && !used && fs::symlink_metadata(&target).is_ok() {
        fs::remove_file(&target)?;
    }
    Ok(())
}
