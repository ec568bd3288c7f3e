//! What `kiln doctor` looks at: loader, manifests, device nodes and rights, cards, caches. It only gathers; what to
//! make of it is in `findings.rs`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use kiln_gpu::{Adapter, AdapterKind, Cache, Error, icd};
use kiln_llm::all_adapters;
use kiln_system::files::{Workspace, stale};
use kiln_system::os;
use serde::Serialize;

use crate::device::DeviceFlag;

/// Everything that was looked at.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) loader_library: &'static str,
    /// The Vulkan version it offers, or the dynamic linker's words.
    pub(super) loader: Result<String, String>,
    /// Variables that change what the loader sees.
    pub(super) overrides: BTreeMap<String, String>,
    pub(super) folders: Vec<PathBuf>,
    pub(super) manifests: Vec<Manifest>,
    pub(super) nvidia: Nvidia,
    pub(super) nodes: Vec<Node>,
    pub(super) uid: u32,
    pub(super) groups: Vec<String>,
    pub(super) cards: Vec<Card>,
    pub(super) glibc: Option<String>,
    pub(super) in_container: bool,
    pub(super) cache: Result<PathBuf, String>,
    /// Incomplete files that killed processes left, with their bytes.
    pub(super) leftovers: Vec<(PathBuf, u64)>,
    pub(super) adapters: Result<Vec<Found>, String>,
    /// The device that Kiln would take, opened once to be sure; or why there is none.
    pub(super) usable: Result<String, String>,
}

/// A driver manifest and whether its library loads.
#[derive(Debug, Serialize)]
pub(super) struct Manifest {
    pub(super) path: PathBuf,
    pub(super) library: Result<String, String>,
}

/// The state of a headless NVIDIA driver.
#[derive(Debug, Serialize)]
pub(super) struct Nvidia {
    pub(super) library: &'static str,
    pub(super) loads: Result<(), String>,
    pub(super) has_manifest: bool,
    /// Overrides keep Kiln from adding its own manifest.
    pub(super) overridden: bool,
}

impl Nvidia {
    pub(super) fn describe(&self) -> String {
        let Nvidia { library, loads, has_manifest, overridden } = self;
        match loads {
            Err(e) => format!("{library} does not load: {e}"),
            Ok(()) if *has_manifest => format!("{library} loads and a manifest names the driver"),
            Ok(()) if *overridden => format!("{library} loads, but the override above hides it"),
            Ok(()) => format!("{library} loads without a manifest; Kiln writes one for the loader"),
        }
    }
}

/// A device node.
#[derive(Debug, Serialize)]
pub(super) struct Node {
    pub(super) path: PathBuf,
    pub(super) group: String,
    pub(super) access: Result<(), String>,
}

/// A display or compute card on the PCI bus.
#[derive(Debug, Serialize)]
pub(super) struct Card {
    pub(super) address: String,
    pub(super) vendor: &'static str,
    /// The kernel driver that holds it.
    pub(super) driver: Option<String>,
}

/// A Vulkan device.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) index: usize,
    pub(super) description: String,
    pub(super) is_cpu: bool,
    pub(super) missing: Option<String>,
}

impl Machine {
    pub(super) fn examine(flag: &DeviceFlag) -> Machine {
        let watched = ["VK_LOADER_DRIVERS_SELECT", "VK_LOADER_DRIVERS_DISABLE", "KILN_DEVICE"];
        let overrides: BTreeMap<String, String> = icd::OVERRIDES
            .iter()
            .chain(&watched)
            .filter_map(|name| Some(((*name).to_owned(), std::env::var_os(name)?.to_string_lossy().into_owned())))
            .collect();
        let manifests: Vec<Manifest> = manifest_paths(&overrides).into_iter().map(Manifest::read).collect();
        let named = |text: &str| text.to_lowercase().contains("nvidia");
        let nvidia = Nvidia {
            library: icd::NVIDIA_LIBRARY,
            loads: icd::can_load(icd::NVIDIA_LIBRARY),
            has_manifest: manifests
                .iter()
                .any(|m| named(&m.path.to_string_lossy()) || m.library.iter().any(|l| named(l))),
            overridden: icd::OVERRIDES.iter().any(|name| overrides.contains_key(*name)),
        };
        let (uid, group_ids) = identity();
        let names = group_names();
        let name_of = |id: u32| names.get(&id).cloned().unwrap_or_else(|| id.to_string());
        // After the manifests were read: making the instance may add Kiln's own one.
        let (adapters, usable) = vulkan(flag);
        Machine {
            loader_library: kiln_gpu::LOADER_LIBRARY,
            loader: kiln_gpu::loader_version().map(|(major, minor, patch)| format!("{major}.{minor}.{patch}")),
            overrides,
            folders: icd::manifest_folders(),
            manifests,
            nvidia,
            nodes: nodes().into_iter().map(|path| Node::look(path, &name_of)).collect(),
            uid,
            groups: group_ids.into_iter().map(name_of).collect(),
            cards: cards(Path::new("/sys/bus/pci/devices")),
            glibc: glibc(),
            in_container: ["/.dockerenv", "/run/.containerenv"].iter().any(|mark| Path::new(mark).exists()),
            cache: cache(),
            leftovers: leftovers(),
            adapters,
            usable,
        }
    }
}

fn vulkan(flag: &DeviceFlag) -> (Result<Vec<Found>, String>, Result<String, String>) {
    let (instance, adapters) = match all_adapters() {
        Ok(found) => found,
        // A loader that no driver answers is a machine without devices.
        Err(Error::NoDevice) => return (Ok(Vec::new()), Err(Error::NoDevice.to_string())),
        Err(e) => return (Err(e.to_string()), Err(e.to_string())),
    };
    let found = |a: &Adapter| Found {
        index: a.index,
        description: a.describe(),
        is_cpu: a.kind == AdapterKind::Cpu,
        missing: a.missing().map(str::to_owned),
    };
    let usable = flag
        .choice()
        .choose(&adapters)
        .and_then(|adapter| kiln_kernels::open(&instance, adapter, Cache::user()))
        .map(|device| device.adapter.describe())
        .map_err(|e| e.to_string());
    (Ok(adapters.iter().map(found).collect()), usable)
}

/// The manifests the loader reads: those of the overriding variables, else those of its folders; and added ones.
fn manifest_paths(overrides: &BTreeMap<String, String>) -> Vec<PathBuf> {
    let listed = |name: &str| -> Option<Vec<PathBuf>> {
        let value = overrides.get(name)?;
        Some(std::env::split_paths(value).filter(|p| !p.as_os_str().is_empty()).flat_map(expand).collect())
    };
    let instead = listed("VK_DRIVER_FILES").or_else(|| listed("VK_ICD_FILENAMES"));
    let mut paths = instead.unwrap_or_else(|| {
        let mut paths = listed("VK_ADD_DRIVER_FILES").unwrap_or_default();
        paths.extend(icd::manifests());
        paths
    });
    let mut seen = std::collections::BTreeSet::new();
    paths.retain(|path| seen.insert(path.clone()));
    paths
}

/// A folder stands for the manifests in it.
fn expand(path: PathBuf) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(&path) else { return vec![path] };
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")).collect();
    files.sort();
    files
}

impl Manifest {
    fn read(path: PathBuf) -> Manifest {
        let library = library_of(&path).and_then(|library| {
            icd::can_load(&library).map_err(|e| format!("{library} does not load: {e}")).map(|()| library)
        });
        Manifest { path, library }
    }
}

/// The library a manifest names; a relative path with a slash starts at the manifest's folder.
fn library_of(manifest: &Path) -> Result<String, String> {
    let text = fs::read_to_string(manifest).map_err(|e| format!("cannot be read: {e}"))?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|e| format!("is no JSON: {e}"))?;
    let named = json["ICD"]["library_path"].as_str().ok_or("names no ICD.library_path")?;
    if named.contains('/') && !named.starts_with('/') {
        let folder = manifest.parent().unwrap_or(Path::new("."));
        return Ok(folder.join(named).to_string_lossy().into_owned());
    }
    Ok(named.to_owned())
}

fn nodes() -> Vec<PathBuf> {
    let inside = |folder: &str, prefix: &str| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let fits = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(prefix) && fs::metadata(path).is_ok_and(|m| os::is_char_device(&m))
        };
        let mut found: Vec<PathBuf> = entries.map(|e| e.path()).filter(fits).collect();
        found.sort();
        found
    };
    [inside("/dev/dri", "renderD"), inside("/dev", "nvidia"), inside("/dev", "kfd")].concat()
}

impl Node {
    fn look(path: PathBuf, name_of: &dyn Fn(u32) -> String) -> Node {
        let group =
            fs::metadata(&path).ok().and_then(|m| os::group_of(&m)).map_or_else(|| "unknown".to_owned(), name_of);
        let access = fs::OpenOptions::new().read(true).write(true).open(&path);
        Node { path, group, access: access.map(drop).map_err(|e| e.to_string()) }
    }
}

/// The user's id and group ids, as the kernel sees them.
fn identity() -> (u32, Vec<u32>) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).unwrap_or_default();
    let effective = |key: &str| line(key).split_whitespace().nth(1).and_then(|id| id.parse::<u32>().ok());
    let mut groups: Vec<u32> = line("Groups:").split_whitespace().filter_map(|id| id.parse().ok()).collect();
    groups.extend(effective("Gid:"));
    groups.sort_unstable();
    groups.dedup();
    (effective("Uid:").unwrap_or_default(), groups)
}

fn group_names() -> BTreeMap<u32, String> {
    let text = fs::read_to_string("/etc/group").unwrap_or_default();
    let row = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        Some((fields.nth(1)?.parse().ok()?, name))
    };
    text.lines().filter_map(row).collect()
}

/// Display controllers and processing accelerators.
fn cards(bus: &Path) -> Vec<Card> {
    let mut found: Vec<Card> = fs::read_dir(bus)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).map(|s| s.trim().to_owned());
            let class = read("class").ok()?;
            let vendor = match read("vendor").ok()?.as_str() {
                "0x10de" => "NVIDIA",
                "0x1002" => "AMD",
                "0x8086" => "Intel",
                _ => return None,
            };
            let shows = class.starts_with("0x03") || class.starts_with("0x12");
            let driver = fs::read_link(entry.path().join("driver")).ok();
            let driver = driver.and_then(|d| Some(d.file_name()?.to_string_lossy().into_owned()));
            shows.then(|| Card { address: entry.file_name().to_string_lossy().into_owned(), vendor, driver })
        })
        .collect();
    found.sort_by(|a, b| a.address.cmp(&b.address));
    found
}

/// The version of the C library this process runs with, from the library's own text.
fn glibc() -> Option<String> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().filter_map(|l| l.split_whitespace().nth(5)).find(|p| p.contains("/libc.so.6"))?;
    let bytes = fs::read(path).ok()?;
    let mark = b"GNU C Library";
    let at = bytes.windows(mark.len()).position(|w| w == mark)?;
    let line = bytes[at..].split(|&b| b == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    let (_, version) = line.split_once("version ")?;
    Some(version.trim_end_matches('.').to_owned())
}

/// The cache folder, tried by writing into it.
fn cache() -> Result<PathBuf, String> {
    let cache = Cache::user();
    let folder = cache.folder().ok_or("there is no cache folder: neither HOME nor KILN_CACHE_DIR is set")?;
    let failed = |e: std::io::Error| format!("{} cannot be written: {e}", folder.display());
    fs::create_dir_all(folder).map_err(failed)?;
    Workspace::in_folder(folder).map_err(failed)?;
    Ok(folder.to_owned())
}

/// Incomplete files in the current folder, the store of models and the cache.
fn leftovers() -> Vec<(PathBuf, u64)> {
    let cache = Cache::user().folder().map(Path::to_owned);
    let inside = |folder: &PathBuf| ["", "spirv", "pipelines", "tuning"].map(|name| folder.join(name));
    let mut folders = vec![PathBuf::from(".")];
    folders.extend(crate::store::store().ok().map(|store| store.settings().folder.clone()));
    folders.extend(cache.iter().flat_map(inside));
    folders.iter().flat_map(|folder| stale(folder)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_library_starts_at_its_manifest() {
        let folder = std::env::temp_dir().join(format!("kiln-doctor-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let manifest = folder.join("x.json");
        let write = |library: &str| {
            fs::write(&manifest, format!("{{\"ICD\": {{\"library_path\": \"{library}\"}}}}")).unwrap();
            library_of(&manifest).unwrap()
        };
        assert_eq!(write("../lib/libx.so"), folder.join("../lib/libx.so").to_string_lossy());
        assert_eq!(write("libx.so"), "libx.so", "a bare name is the dynamic linker's to find");
        assert_eq!(write("/opt/libx.so"), "/opt/libx.so");
        fs::write(&manifest, "{").unwrap();
        assert!(library_of(&manifest).unwrap_err().starts_with("is no JSON"));
        let listed = BTreeMap::from([("VK_ICD_FILENAMES".to_owned(), folder.to_string_lossy().into_owned())]);
        assert_eq!(manifest_paths(&listed), [manifest], "a folder stands for its manifests");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_c_library_tells_its_version() {
        let has = fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("/libc.so.6"));
        assert_eq!(glibc().is_some_and(|v| v.starts_with("2.")), has, "{:?}", glibc());
    }
}
