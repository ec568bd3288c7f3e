//! The choice of a device, and opening it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use kiln_gpu::{Adapter, Cache, Device, Error, Instance, Sources, adapters, choose};
use kiln_system::environment;
use kiln_system::text::shown;

/// Where a model is to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best GPU, else the CPU.
    #[default]
    Any,
    /// The CPU, without any GPU.
    Cpu,
    /// The GPU that goes by this: index, part of the name, PCI address or UUID; several with commas between.
    Gpu(String),
}

/// The Vulkan instance and every adapter.
pub fn all_adapters() -> Result<(Arc<Instance>, Vec<Adapter>), Error> {
    let instance = Instance::new(&Cache::user())?;
    let adapters = adapters(&instance)?;
    Ok((instance, adapters))
}

impl DeviceChoice {
    /// What a word means, as people write it: `cpu` and `none` are the CPU, an empty one is any device.
    pub fn from_word(word: &str) -> DeviceChoice {
        match word.trim() {
            "" => DeviceChoice::Any,
            word if is_cpu(word) => DeviceChoice::Cpu,
            word => DeviceChoice::Gpu(word.to_owned()),
        }
    }

    /// The word, else what the variable `KILN_DEVICE` says. An empty one says nothing.
    pub fn from_word_or_environment(word: Option<&str>) -> DeviceChoice {
        match word {
            Some(word) => DeviceChoice::from_word(word),
            None => environment::text("KILN_DEVICE").map_or(DeviceChoice::Any, |word| DeviceChoice::from_word(&word)),
        }
    }

    /// The adapter to take.
    pub fn choose<'a>(&self, adapters: &'a [Adapter]) -> Result<&'a Adapter, Error> {
        match self {
            DeviceChoice::Any => choose(adapters, None),
            DeviceChoice::Gpu(name) => choose(adapters, Some(name)).map_err(|e| match e {
                Error::UnknownDevice { wanted, available } => {
                    Error::UnknownDevice { wanted: shown(&wanted), available }
                }
                other => other,
            }),
            DeviceChoice::Cpu => Err(Error::Setting(
                "the CPU was chosen, and this needs a GPU\nhint: `kiln devices` lists what there is".into(),
            )),
        }
    }

    /// Opens the chosen device with Kiln's kernels.
    pub fn open(&self) -> Result<Arc<Device>, Error> {
        let (instance, adapter) = self.adapter()?;
        kiln_kernels::open(&instance, &adapter, Cache::user())
    }

    /// Opens every device of a list, as `0,1`; one that is named twice is opened twice.
    pub fn open_all(&self) -> Result<Vec<Arc<Device>>, Error> {
        let DeviceChoice::Gpu(list) = self else { return Ok(vec![self.open()?]) };
        let names: Vec<&str> = each(list).collect();
        if let Some((_, name)) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            log::warn!("the devices {} names {} twice: its memory is counted twice", shown(list), shown(name));
        }
        names.into_iter().map(|name| DeviceChoice::Gpu(name.to_owned()).open()).collect()
    }

    /// The first device of a list.
    pub fn first(&self) -> DeviceChoice {
        match self {
            DeviceChoice::Gpu(list) => {
                each(list).next().map_or_else(|| self.clone(), |name| DeviceChoice::Gpu(name.to_owned()))
            }
            other => other.clone(),
        }
    }

    /// Those of the list that can be opened; the CPU where none can.
    pub fn that_open(&self) -> DeviceChoice {
        let DeviceChoice::Gpu(list) = self else {
            return if self.open().is_ok() { self.clone() } else { DeviceChoice::Cpu };
        };
        let opens = |name: &&str| DeviceChoice::Gpu((*name).to_owned()).open().is_ok();
        let open = each(list).filter(opens).collect::<Vec<_>>().join(",");
        if open.is_empty() { DeviceChoice::Cpu } else { DeviceChoice::Gpu(open) }
    }

    /// Opens it to compile kernels alone: a driver without hardware will do.
    pub fn open_to_compile(&self) -> Result<Arc<Device>, Error> {
        let (instance, adapter) = self.adapter()?;
        Device::open_to_compile(&instance, &adapter, Sources::new(kiln_kernels::SOURCES), Cache::user())
    }

    /// The chosen device, not opened, with the splits of work that `kiln tune` kept for it.
    pub fn adapter(&self) -> Result<(Arc<Instance>, Adapter), Error> {
        // Wrong lines would only show as a path that is missing.
        kiln_kernels::tuning::check().map_err(Error::Setting)?;
        let (instance, adapters) = all_adapters()?;
        let mut adapter = self.choose(&adapters)?.clone();
        adapter.caps.tuned = tuning_file(&adapter).and_then(|file| kiln_kernels::tuning::kept_in(&file));
        Ok((instance, adapter))
    }
}

/// Devices that are being opened on a thread of their own.
#[derive(Clone, Default)]
pub struct Early(Arc<Mutex<Pending>>);

/// What comes of opening every device of a list.
type Opened = Result<Vec<Arc<Device>>, Error>;

#[derive(Default)]
struct Pending(Option<JoinHandle<Opened>>);

impl Early {
    /// Begins to open them.
    pub fn begin(&self, choice: DeviceChoice) {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pending.0 = Some(std::thread::spawn(move || choice.open_all()));
    }

    /// Whether they are being opened, or are open and not taken yet.
    pub fn has_begun(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.is_some()
    }

    /// Waits for them; `None` if opening was not started or they were taken before.
    pub(crate) fn end(&self) -> Option<Opened> {
        let pending = self.0.lock().unwrap_or_else(PoisonError::into_inner).0.take()?;
        Some(pending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl std::fmt::Debug for Early {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Early")
    }
}

impl Drop for Pending {
    /// A program that ends early waits: drivers do not like to be left while they open a device.
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(|opening| drop(opening.join()));
    }
}

/// Whether a word means the CPU; `none` is llama.cpp's word.
fn is_cpu(word: &str) -> bool {
    word.eq_ignore_ascii_case("cpu") || word.eq_ignore_ascii_case("none")
}

/// The devices of a list. The CPU takes what is left in any case, so it does not count.
fn each(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim).filter(|name| !name.is_empty() && !is_cpu(name))
}

/// Where `kiln tune` keeps what it found on a device; another driver may want other splits.
pub fn tuning_file(adapter: &Adapter) -> Option<PathBuf> {
    let words = [&adapter.name, &adapter.driver, &adapter.driver_version].map(|text| {
        text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect::<String>()
    });
    Some(Cache::user().folder()?.join("tuning").join(format!("{}.txt", words.join("_"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_choose_devices() {
        for (word, choice) in [
            ("", DeviceChoice::Any),
            (" CPU ", DeviceChoice::Cpu),
            ("none", DeviceChoice::Cpu),
            ("0,1", DeviceChoice::Gpu("0,1".into())),
        ] {
            assert_eq!(DeviceChoice::from_word(word), choice, "{word}");
        }
        let list = DeviceChoice::Gpu(" 3, cpu ,1".into());
        assert_eq!(list.first(), DeviceChoice::Gpu("3".into()));
        assert_eq!(each("3, cpu,,1").collect::<Vec<_>>(), ["3", "1"]);
    }
}
