//! The `--device` flag.

use kiln_llm::DeviceChoice;

/// The `--device` flag, shared by every command that runs on a device.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct DeviceFlag {
    /// GPU to use: index, part of the name, PCI address or UUID (see `kiln devices`); several as 0,1; `cpu` or `none` for no GPU
    /// [env: KILN_DEVICE]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
}

impl DeviceFlag {
    /// What the flag says, else the variable.
    pub(crate) fn choice(&self) -> DeviceChoice {
        DeviceChoice::from_word_or_environment(self.device.as_deref())
    }
}
