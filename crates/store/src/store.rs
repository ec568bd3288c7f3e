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
use crate::place::{is_file_of, prune};
use crate::quants::{part_of, part_path};
use crate::record::{Expected, Kept, Record, stem};
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
    /// Its hash is not known; its length is right.
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
    /// Files that stay.
    pub left: Vec<Left>,
}

/// A file that stays where a model is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Left {
    /// The file.
    pub path: PathBuf,
    /// Why it stays.
    pub why: Stays,
}

/// Why a file stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// Another program fetched it.
    Foreign,
    /// Another model needs it.
    Shared,
    /// It is a link, or lies behind one that leads out of the store.
    Linked,
}

/// What the default model is called, so that it can be named where a name must be given.
pub const DEFAULT_NAME: &str = "smollm2";

/// Whether a text names the default model. No other model of the store gets this name; a file of this name comes first.
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
        let recorded = Record::all(&self.settings);
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
        if let Some(record) = path.as_ref().and_then(of) {
            return Ok(record);
        }
        // A path to a file of the store is as good as its name.
        let Ok(file) = fs::canonicalize(text) else { return Err(self.unknown(text)) };
        let same = |kept: &Kept| fs::canonicalize(&kept.path).is_ok_and(|path| path == file);
        let found = self.list().into_iter().find(|record| record.files.iter().any(same));
        found.ok_or_else(|| Error::NotStored { path: text.into() })
    }

    /// What can be told of a file that the store knows nothing about.
    pub fn describe(path: &Path) -> Record {
        described(path)
    }

    /// Why records of the store are not believed: they name files outside of it.
    pub fn refused(&self) -> Vec<Error> {
        Record::refused(&self.settings).into_iter().map(|(_, why)| why).collect()
    }

    fn unknown(&self, text: &str) -> Error {
        let refused = Record::refused(&self.settings).into_iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        if let Some((_, why)) = refused {
            return why;
        }
        let lower = text.to_lowercase();
        let known = self.list().into_iter().map(|record| record.name);
        let similar: Vec<String> = known.filter(|name| name.to_lowercase().contains(&lower)).take(5).collect();
        let hint = "`kiln list` shows the models there are; `kiln pull hf:OWNER/REPO` fetches one".into();
        Error::Unknown { name: text.to_owned(), similar, hint }
    }

    fn repository<'a>(&'a self, repo: &'a str, revision: &'a str) -> Repository<'a> {
        Repository { settings: &self.settings, repo, revision }
    }

    /// The default model, if it is what was asked for and all of it is there by its length.
    fn pinned(&self, package: &str, version: Option<&str>) -> Option<Kept> {
        let kept = pip::pinned_kept(&pip::DEFAULT, self.settings.folder.join(pip::DEFAULT.file));
        (is_pinned(package, version) && kept.is_there()).then_some(kept)
    }

    /// Where a name is fetched from: one of the store is brought up to date from where it came.
    fn origin(&self, name: &Name) -> Result<Name> {
        let Name::Local(text) = name else { return Ok(name.clone()) };
        let known = self.list().into_iter().find(|record| record.name.eq_ignore_ascii_case(text));
        let source = match known {
            Some(record) => Name::parse(&record.source).ok().filter(Name::is_remote),
            None if is_default(text) => Name::parse(&default_source()).ok(),
            None => None,
        };
        let why = "it does not say where to fetch the model".into();
        source.ok_or_else(|| Error::Name { name: text.clone(), why })
    }

    /// Fetches a model, or brings it up to date. What is there is hashed, and fetched again where it is damaged. `alias` is what
    /// it shall be called; `sha256` what it must be.
    pub fn pull(&self, name: &Name, alias: Option<&str>, sha256: Option<&Digest>, watch: &dyn Watch) -> Result<Record> {
        let name = &self.origin(name)?;
        let source = name.to_string();
        if let Some(alias) = alias {
            check_alias(alias, &source)?;
        }
        let mut all = Record::all(&self.settings);
        // Bringing up to date keeps the name, and what Kiln fetched stays its own.
        let old = all.iter().position(|record| record.source == source).map(|at| all.remove(at));
        let expected = Expected { sha256, old: old.as_ref() };
        let client = Client::new(&self.settings)?;
        let down = Downloader { client: &client, settings: &self.settings, watch };
        let (files, usual) = match name {
            Name::Hub { repo, revision, wish } => {
                (self.repository(repo, revision).fetch(&client, &down, wish.as_deref(), &expected)?, None)
            }
            Name::Ollama { repo, tag } => {
                let short = format!("{}:{tag}", repo.strip_prefix("library/").unwrap_or(repo));
                (Tagged { settings: &self.settings, repo, tag }.fetch(&client, &down, &expected)?, Some(short))
            }
            Name::Web { url } => (self.pull_web(&down, url, &expected)?, None),
            Name::Pip { package, version, wish } => {
                (vec![self.pull_package(package, version.as_deref(), wish.as_deref(), &expected, watch)?], None)
            }
            Name::Local(text) => return Err(self.unknown(text)),
        };
        let first = files.first().map(|file| file.path.to_string_lossy().into_owned()).unwrap_or_default();
        let usual = usual.unwrap_or_else(|| stem(&first));
        // The default model's name is its own, whatever a file is called.
        let usual = if takes_default(&usual, &source) { format!("{usual}-2") } else { usual };
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
        record.write(&self.settings)?;
        Ok(record)
    }

    fn pull_web(&self, down: &Downloader<'_>, url: &str, expected: &Expected<'_>) -> Result<Vec<Kept>> {
        let (address, behind) = url.find(['?', '#']).map_or((url, ""), |at| url.split_at(at));
        let parts = match part_of(address) {
            None => vec![address.to_owned()],
            Some((prefix, _, count)) => (1..=count).map(|no| part_path(prefix, no, count)).collect(),
        };
        expected.check_count(&bare(url), parts.len())?;
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
            let path = folder.join(&file);
            let remote = Remote {
                name: file.clone(),
                url: format!("{part}{behind}"),
                token: None,
                bytes: None,
                sha256: expected.sha256.cloned(),
                recorded: expected.recorded(&path),
                variable: "KILN_MODELS",
            };
            let fetched = down.fetch(&remote, &path).inspect_err(|_| prune(&folder, &self.settings.folder))?;
            kept.push(Kept { path, bytes: fetched.bytes, sha256: Some(fetched.sha256), own: true });
        }
        Ok(kept)
    }

    fn pull_package(
        &self,
        package: &str,
        version: Option<&str>,
        wish: Option<&str>,
        expected: &Expected<'_>,
        watch: &dyn Watch,
    ) -> Result<Kept> {
        let fetch = |package: &str, incoming: &Path| pip::download(package, incoming, watch);
        let folder = &self.settings.folder;
        if !is_pinned(package, version) {
            let exact = version.map_or_else(|| package.to_owned(), |version| format!("{package}=={version}"));
            let folder = folder.join("pypi").join(package);
            let got = pip::get(&folder, &exact, wish, None, expected, &fetch, watch);
            return got.inspect_err(|_| prune(&folder, &self.settings.folder));
        }
        let default = &pip::DEFAULT;
        if let Some(known) = Digest::parse(default.sha256) {
            expected.check(default.file, &known)?;
        }
        if let Some(kept) = self.pinned(package, version) {
            match self.check(&kept, default.file, watch)? {
                Checked::Damaged(why) => watch.say(&format!("{}: {why}; fetching it again", default.file)),
                _ => return Ok(kept),
            }
        }
        let (file, mega) = (default.file, default.bytes / 1_000_000);
        watch.say(&format!("fetching {file} ({mega} MB) as the Python package {package}"));
        let exact = format!("{package}=={}", default.version);
        let kept = pip::get(folder, &exact, wish, Some(default), expected, &fetch, watch)?;
        watch.say(&format!("{file} saved to {}", folder.display()));
        Ok(kept)
    }

    /// All models on this machine: those that were fetched, files that lie in the store's folder, and models that other
    /// programs have put into the cache of Hugging Face.
    pub fn list(&self) -> Vec<Record> {
        let mut all = Record::all(&self.settings);
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

    /// Removes a model. Only files of the store's own folders are deleted; links and what lies behind them stay.
    pub fn remove(&self, record: &Record) -> Result<Removed> {
        let others: Vec<Record> = self.list().into_iter().filter(|other| other.source != record.source).collect();
        let mut removed = Removed::default();
        for file in &record.files {
            let path = file.path.clone();
            let shared = others.iter().any(|other| other.files.iter().any(|used| used.path == path));
            let stays = if shared {
                Some(Stays::Shared)
            } else if !file.own {
                Some(Stays::Foreign)
            } else {
                self.delete(&path)?
            };
            match stays {
                Some(why) => removed.left.push(Left { path, why }),
                None => removed.files.push((path, file.bytes)),
            }
        }
        if let Ok(Name::Ollama { repo, tag }) = Name::parse(&record.source) {
            Tagged { settings: &self.settings, repo: &repo, tag: &tag }.forget();
        }
        record.forget(&self.settings)?;
        Ok(removed)
    }

    /// Deletes a file of the store, or says why it stays. One that is gone is deleted already.
    fn delete(&self, path: &Path) -> Result<Option<Stays>> {
        let Settings { folder, hub_cache, .. } = &self.settings;
        if fs::symlink_metadata(path).is_err_and(|why| why.kind() == std::io::ErrorKind::NotFound) {
            return Ok(None);
        }
        let done = if path.starts_with(hub_cache) {
            // A name in a snapshot is a link by itself; its folder must not be one.
            let inside =
                |parent: &Path| Some(fs::canonicalize(parent).ok()?.starts_with(fs::canonicalize(hub_cache).ok()?));
            if path.parent().and_then(inside) != Some(true) {
                return Ok(Some(Stays::Linked));
            }
            hub::remove(path)
        } else if is_file_of(folder, path) {
            fs::remove_file(path)
        } else {
            return Ok(Some(Stays::Linked));
        };
        done.map_err(Error::io(path))?;
        let root = if path.starts_with(hub_cache) { hub_cache } else { folder };
        prune(path.parent().unwrap_or(root), root);
        Ok(None)
    }

    /// Compares the files of a model with what was fetched.
    pub fn verify(&self, record: &Record, watch: &dyn Watch) -> Result<Vec<(PathBuf, Checked)>> {
        record.files.iter().map(|file| Ok((file.path.clone(), self.check(file, &record.name, watch)?))).collect()
    }

    fn check(&self, file: &Kept, name: &str, watch: &dyn Watch) -> Result<Checked> {
        let Ok(there) = fs::metadata(&file.path) else { return Ok(Checked::Missing) };
        if there.len() != file.bytes {
            return Ok(Checked::Damaged(format!("it has {} bytes, expected {}", there.len(), file.bytes)));
        }
        let Some(want) = &file.sha256 else { return Ok(Checked::LengthOnly) };
        watch.start(name, file.bytes, 0);
        let got = hash_file(&file.path, &mut |n| watch.advance(n));
        watch.end();
        let got = got?;
        if got == *want {
            return Ok(Checked::Good);
        }
        Ok(Checked::Damaged(format!("SHA-256 mismatch: expected {want}, the file has {got}")))
    }
}

/// Whether a package is the one that the default model comes in.
fn is_pinned(package: &str, version: Option<&str>) -> bool {
    let pinned = &pip::DEFAULT;
    package == pinned.package && version.is_none_or(|version| version == pinned.version)
}

/// Whether a model would take the name that is the default model's.
fn takes_default(name: &str, source: &str) -> bool {
    is_default(name) && source != default_source()
}

/// What a user may call a model: a word, and not what the default model is called.
fn check_alias(alias: &str, source: &str) -> Result<()> {
    if takes_default(alias, source) {
        let what = format!("{alias:?} is the name of the default model");
        return Err(Error::Refused { what, hint: "choose another name".into() });
    }
    if !is_word(alias) {
        return Err(Error::Name { name: alias.into(), why: "a name has letters, digits and -._".into() });
    }
    Ok(())
}

/// A record of a file that none was written for.
fn described(path: &Path) -> Record {
    let metadata = fs::metadata(path).ok();
    let bytes = metadata.as_ref().map_or(0, fs::Metadata::len);
    let modified = metadata.and_then(|m| m.modified().ok()?.duration_since(UNIX_EPOCH).ok());
    Record {
        name: stem(&path.to_string_lossy()),
        source: path.display().to_string(),
        files: vec![Kept { path: path.to_owned(), bytes, sha256: None, own: true }],
        fetched: modified.map_or(0, |age| age.as_secs()),
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
        let mut record = described(&path);
        if path.file_name().is_some_and(|name| name == pip::DEFAULT.file) {
            record.source = default_source();
            record.files[0].sha256 = Digest::parse(pip::DEFAULT.sha256);
        }
        // Parts of one model come behind each other.
        match records.last_mut().filter(|last| last.name == record.name) {
            Some(last) => last.files.append(&mut record.files),
            None => records.push(record),
        }
    }
    records
}
