//! Questions to the Vulkan loader itself, for diagnosis: is it there and how old is it. Work goes through `Instance`.

use kiln_system::os;
use vulkanalia::loader::LibloadingLoader;
use vulkanalia::prelude::v1_2::*;

/// The file name under which the loader is looked for first.
pub const LOADER_LIBRARY: &str = os::VULKAN_LOADERS[0];

/// Opens the Vulkan loader, or tells what the dynamic linker said of the first name.
pub(crate) fn open() -> Result<Entry, String> {
    let mut failed = None;
    for name in os::VULKAN_LOADERS {
        // SAFETY: the library is the system's Vulkan loader, whose initialisers are safe to run.
        match unsafe { LibloadingLoader::new(name) } {
            // SAFETY: the loader's library offers Vulkan's entry points.
            Ok(loader) => return unsafe { Entry::new(loader) }.map_err(|e| e.to_string()),
            Err(why) => failed = failed.or(Some(why.to_string())),
        }
    }
    Err(failed.unwrap_or_default())
}

/// The Vulkan version the loader offers, or what the dynamic linker said.
pub fn loader_version() -> Result<(u32, u32, u32), String> {
    let version = open()?.version().map_err(|e| e.to_string())?;
    Ok((version.major, version.minor, version.patch))
}
