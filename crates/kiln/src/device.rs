//! Opening the device a user asked for.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use kiln_gpu::{Adapter, Cache, Device, Error, Instance, Sources, adapters, choose};
use kiln_system::environment;
use kiln_system::text::shown;

/// The `--device` flag, shared by every command that runs on a device.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct DeviceFlag {
    /// GPU to use: index, part of the name, PCI address or UUID (see `kiln devices`); several as 0,1; `cpu` or `none` for no GPU
    /// [env: KILN_DEVICE]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
}

/// Where a user wants something to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// The best device, else the CPU.
    Any,
    /// The CPU, without any device.
    Cpu,
    /// A device that goes by this.
    Device(String),
}

/// The instance and every adapter.
pub(crate) fn all_adapters() -> Result<(Arc<Instance>, Vec<Adapter>), Error> {
    let instance = Instance::new(&Cache::user())?;
    let adapters = adapters(&instance)?;
    Ok((instance, adapters))
}

impl DeviceFlag {
    /// What the flag says, else the variable. An empty one says nothing.
    pub(crate) fn wish(&self) -> Wish {
        let named = self.device.clone().or_else(|| environment::text("KILN_DEVICE"));
        match named.as_deref().map(str::trim) {
            None | Some("") => Wish::Any,
            Some(word) if is_cpu(word) => Wish::Cpu,
            Some(word) => Wish::Device(word.to_owned()),
        }
    }

    /// The adapter to take.
    pub(crate) fn choose<'a>(&self, adapters: &'a [Adapter]) -> Result<&'a Adapter, Error> {
        match self.wish() {
            Wish::Any => choose(adapters, None),
            Wish::Device(name) => choose(adapters, Some(&name)).map_err(|e| match e {
                Error::UnknownDevice { wanted, available } => {
                    Error::UnknownDevice { wanted: shown(&wanted), available }
                }
                other => other,
            }),
            Wish::Cpu => Err(Error::Setting(
                "`--device cpu` means no device, and this needs one\nhint: `kiln devices` lists what there is".into(),
            )),
        }
    }

    /// Opens the chosen device with Kiln's kernels.
    pub(crate) fn open(&self) -> Result<Arc<Device>, Error> {
        let (instance, adapter) = self.adapter()?;
        kiln_kernels::open(&instance, &adapter, Cache::user())
    }

    /// Opens every device of a list, as `0,1`; one that is named twice is opened twice.
    pub(crate) fn open_all(&self) -> Result<Vec<Arc<Device>>, Error> {
        match self.wish() {
            Wish::Device(list) => {
                let names: Vec<DeviceFlag> = each(&list).collect();
                let twice = names
                    .iter()
                    .enumerate()
                    .find(|(at, one)| names[..*at].iter().any(|other| other.device == one.device));
                if let Some((_, DeviceFlag { device: Some(name) })) = twice {
                    log::warn!("--device {} names {} twice: its memory is counted twice", shown(&list), shown(name));
                }
                names.iter().map(DeviceFlag::open).collect()
            }
            _ => Ok(vec![self.open()?]),
        }
    }

    /// The first device of a list.
    pub(crate) fn first(&self) -> DeviceFlag {
        match self.wish() {
            Wish::Device(list) => each(&list).next().unwrap_or_else(|| self.clone()),
            _ => self.clone(),
        }
    }

    /// Those of the list that can be opened; none where none can.
    pub(crate) fn that_open(&self) -> Option<DeviceFlag> {
        let Wish::Device(list) = self.wish() else { return self.open().is_ok().then(|| self.clone()) };
        let open = each(&list).filter(|device| device.open().is_ok()).filter_map(|device| device.device);
        let open = open.collect::<Vec<_>>().join(",");
        (!open.is_empty()).then_some(DeviceFlag { device: Some(open) })
    }

    /// Opens it to compile them alone: a driver without hardware will do.
    pub(crate) fn open_to_compile(&self) -> Result<Arc<Device>, Error> {
        let (instance, adapter) = self.adapter()?;
        Device::open_to_compile(&instance, &adapter, Sources::new(kiln_kernels::SOURCES), Cache::user())
    }

    /// The chosen device, not opened, with the splits of work that `kiln tune` kept for it.
    pub(crate) fn adapter(&self) -> Result<(Arc<Instance>, Adapter), Error> {
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
pub(crate) struct Early(Arc<Mutex<Opening>>);

/// What comes of opening every device of a list.
type Opened = Result<Vec<Arc<Device>>, Error>;

#[derive(Default)]
struct Opening(Option<JoinHandle<Opened>>);

impl Early {
    /// Begins to open them.
    pub(crate) fn begin(&self, flag: DeviceFlag) {
        let mut opening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        opening.0 = Some(std::thread::spawn(move || flag.open_all()));
    }

    /// Whether they are being opened, or are open and not taken yet.
    pub(crate) fn has_begun(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.is_some()
    }

    /// Waits for them; `None` if opening was not started or they were taken before.
    pub(crate) fn end(&self) -> Option<Opened> {
        let opening = self.0.lock().unwrap_or_else(PoisonError::into_inner).0.take()?;
        Some(opening.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl std::fmt::Debug for Early {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Early")
    }
}

impl Drop for Opening {
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
fn each(list: &str) -> impl Iterator<Item = DeviceFlag> {
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty() && !is_cpu(name));
    names.map(|name| DeviceFlag { device: Some(name.to_owned()) })
}

/// Where `kiln tune` keeps what it found on a device; another driver may want other splits.
pub(crate) fn tuning_file(adapter: &Adapter) -> Option<PathBuf> {
    let words = [&adapter.name, &adapter.driver, &adapter.driver_version].map(|text| {
        text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect::<String>()
    });
    Some(Cache::user().folder()?.join("tuning").join(format!("{}.txt", words.join("_"))))
}
