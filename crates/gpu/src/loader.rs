//! Questions to the Vulkan loader itself, for diagnosis: is it there and how old is it. Work goes through `Instance`.

use vulkanalia::loader::{LIBRARY, LibloadingLoader};
use vulkanalia::prelude::v1_2::*;

/// The file name under which the loader is looked for.
pub const LOADER_LIBRARY: &str = LIBRARY;

/// The Vulkan version the loader offers, or what the dynamic linker said.
pub fn loader_version() -> Result<(u32, u32, u32), String> {
    // SAFETY: the library is the system's Vulkan loader, whose initialisers are safe to run.
    let loader = unsafe { LibloadingLoader::new(LIBRARY) }.map_err(|e| e.to_string())?;
    // SAFETY: the loader's library offers Vulkan's entry points.
    let entry = unsafe { Entry::new(loader) }.map_err(|e| e.to_string())?;
    let version = entry.version().map_err(|e| e.to_string())?;
    Ok((version.major, version.minor, version.patch))
}
