//! Opening the device a user asked for.

use std::path::PathBuf;
use std::sync::Arc;

use kiln_gpu::{Adapter, Cache, Device, Error, Instance, Sources, adapters, choose};

/// The `--device` flag, shared by every command that runs on a device.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct DeviceFlag {
    /// Device by index, part of the name, PCI address or UUID (see `kiln devices`)
    #[arg(long, env = "KILN_DEVICE", value_name = "DEVICE")]
    pub(crate) device: Option<String>,
}

/// The instance and every adapter.
pub(crate) fn all_adapters() -> Result<(Arc<Instance>, Vec<Adapter>), Error> {
    let instance = Instance::new(&Cache::user())?;
    let adapters = adapters(&instance)?;
    Ok((instance, adapters))
}

impl DeviceFlag {
    /// Opens the chosen device with Kiln's kernels.
    pub(crate) fn open(&self) -> Result<Arc<Device>, Error> {
        let (instance, adapters) = all_adapters()?;
        let adapter = choose(&adapters, self.device.as_deref())?;
        if let Some(file) = tuning_file(adapter) {
            kiln_kernels::mul_mat_vec::tuning::use_file(file);
        }
        Device::open(&instance, adapter, Sources::new(kiln_kernels::SOURCES), Cache::user())
    }
}

/// Where `kiln tune` keeps what it found on a device; another driver may want other splits.
pub(crate) fn tuning_file(adapter: &Adapter) -> Option<PathBuf> {
    let words = [&adapter.name, &adapter.driver, &adapter.driver_version].map(|text| {
        text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect::<String>()
    });
    Some(Cache::user().folder()?.join("tuning").join(format!("{}.txt", words.join("_"))))
}
