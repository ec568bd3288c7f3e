//! Headless NVIDIA machines (containers above all) often have the driver's libraries but no manifest that tells the
//! Vulkan loader about them. Kiln writes such a manifest into its cache folder and names it to the loader.

use std::path::PathBuf;
use std::sync::Once;

use kiln_system::environment;
use kiln_system::files::{Output, Overwrite};

use crate::Cache;

/// The NVIDIA library that works as a Vulkan driver without an X server.
pub const NVIDIA_LIBRARY: &str = "libEGL_nvidia.so.0";

/// The variables by which a user tells the loader which drivers to take.
pub const OVERRIDES: [&str; 3] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES"];

/// Folders where the loader looks for manifests on Linux.
pub fn manifest_folders() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let data_home = std::env::var_os("XDG_DATA_HOME").map_or_else(|| home.join(".local/share"), PathBuf::from);
    let config_home = std::env::var_os("XDG_CONFIG_HOME").map_or_else(|| home.join(".config"), PathBuf::from);
    let listed = |variable: &str, default: &str| {
        let value = std::env::var(variable).unwrap_or_default();
        let value = if value.is_empty() { default.to_owned() } else { value };
        value.split(':').map(PathBuf::from).collect::<Vec<_>>()
    };
    let mut bases = vec![config_home];
    bases.extend(listed("XDG_CONFIG_DIRS", "/etc/xdg"));
    bases.push(PathBuf::from("/etc"));
    bases.push(data_home);
    bases.extend(listed("XDG_DATA_DIRS", "/usr/local/share:/usr/share"));
    bases.into_iter().map(|base| base.join("vulkan/icd.d")).collect()
}

/// Every driver manifest in those folders.
pub fn manifests() -> Vec<PathBuf> {
    let entries = manifest_folders().into_iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let mut found: Vec<PathBuf> =
        entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")).collect();
    found.sort();
    found.dedup();
    found
}

/// Whether a manifest names an NVIDIA library.
fn is_nvidia(manifest: &PathBuf) -> bool {
    std::fs::read_to_string(manifest).is_ok_and(|text| text.contains("nvidia"))
}

/// Whether the dynamic linker finds this library; the error says why not.
pub fn can_load(library: &str) -> Result<(), String> {
    // SAFETY: loading runs the library's initialisers. These are driver libraries, which the Vulkan loader would load
    // in the same way.
    unsafe { vulkanalia::loader::LibloadingLoader::new(library) }.map(drop).map_err(|e| e.to_string())
}

/// Makes the loader see an NVIDIA driver that has no manifest. Returns the manifest it wrote. Programs call this first in
/// `main`: the variable that names the manifest can only be set while there are no other threads.
pub fn help_headless_nvidia(cache: &Cache) -> Option<PathBuf> {
    static ONCE: Once = Once::new();
    let mut written = None;
    ONCE.call_once(|| written = write_manifest(cache));
    written
}

fn write_manifest(cache: &Cache) -> Option<PathBuf> {
    if OVERRIDES.iter().any(|v| environment::variable(v).is_some()) || manifests().iter().any(is_nvidia) {
        return None;
    }
    can_load(NVIDIA_LIBRARY).ok()?;
    let Some(folder) = cache.folder() else {
        log::warn!("no cache folder for a driver manifest (KILN_CACHE_DIR names one); the NVIDIA driver stays unseen");
        return None;
    };
    let path = folder.join("nvidia_headless_icd.json");
    let text = format!(
        "{{\"file_format_version\": \"1.0.1\", \"ICD\": {{\"library_path\": \"{NVIDIA_LIBRARY}\", \"api_version\": \"1.4.312\"}}}}\n"
    );
    let _ = std::fs::create_dir_all(folder);
    Output::write(&path, Overwrite::Yes, text.as_bytes())
        .inspect_err(|e| log::warn!("{e}; the NVIDIA driver stays unseen"))
        .ok()?;
    let files: Vec<PathBuf> = manifests().into_iter().chain([path.clone()]).collect();
    let joined = std::env::join_paths(files).ok()?;
    // VK_DRIVER_FILES is unknown to loaders before 1.3.207; the older name works with all.
    if kiln_system::process::threads() != Some(1) {
        let path = path.display();
        log::warn!("no manifest names the NVIDIA driver; VK_ICD_FILENAMES={path} shows it to the loader");
        return None;
    }
    // SAFETY: no other thread is there that could read the environment at the same time.
    unsafe { std::env::set_var("VK_ICD_FILENAMES", joined) };
    log::info!("no manifest for the NVIDIA driver found; using {}", path.display());
    Some(path)
}
