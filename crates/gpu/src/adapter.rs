//! Adapters: what devices there are, what each can do, and the choice among them. Only queries, no device is made.

use crate::Caps;
use vulkanalia::Version;
use vulkanalia::prelude::v1_2::*;

use crate::error::vulkan;
use crate::query::offers_extension;
use crate::{Error, Instance};

/// What kind of device an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    /// A card with its own memory.
    Discrete,
    /// Shares memory with the CPU.
    Integrated,
    /// Of a virtual machine.
    Virtual,
    /// A software rasteriser: used only when named.
    Cpu,
    /// Something else.
    Other,
}

impl AdapterKind {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            AdapterKind::Discrete => "discrete",
            AdapterKind::Integrated => "integrated",
            AdapterKind::Virtual => "virtual",
            AdapterKind::Cpu => "cpu",
            AdapterKind::Other => "other",
        }
    }

    /// Which kind is taken first when none is named.
    fn rank(self) -> u32 {
        match self {
            AdapterKind::Discrete => 0,
            AdapterKind::Integrated => 1,
            AdapterKind::Virtual => 2,
            AdapterKind::Other => 3,
            AdapterKind::Cpu => 4,
        }
    }
}

/// One adapter of the machine.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Position in the list.
    pub index: usize,
    /// The driver's name for the device.
    pub name: String,
    /// What kind of device.
    pub kind: AdapterKind,
    /// Name of the driver.
    pub driver: String,
    /// Version of the driver, as it writes it.
    pub driver_version: String,
    /// Vulkan version of the device.
    pub api_version: (u32, u32, u32),
    /// `0000:01:00.0`, where the driver tells.
    pub pci: Option<String>,
    /// The device's UUID in hex.
    pub uuid: String,
    /// Identifies device and driver build together: what caches and self-tests are kept by.
    pub driver_uuid: String,
    /// Bytes of all device-local heaps.
    pub memory_bytes: u64,
    /// Bytes of them this process may still take, where the driver tells.
    pub memory_free: Option<u64>,
    /// What it can do.
    pub caps: Caps,
    pub(crate) physical: vk::PhysicalDevice,
    pub(crate) extensions: Vec<String>,
}

impl Adapter {
    /// Whether the driver offers an extension.
    pub(crate) fn has(&self, extension: &vk::Extension) -> bool {
        offers_extension(&self.extensions, extension)
    }

    /// The first thing every kernel needs that the adapter lacks.
    pub fn missing(&self) -> Option<&'static str> {
        if self.api_version < (1, 2, 0) {
            Some("Vulkan 1.2")
        } else if !self.caps.storage_16bit {
            Some("16-bit storage")
        } else if !self.caps.storage_8bit {
            Some("8-bit storage")
        } else if !self.has_buffer_address() {
            Some("buffer device addresses")
        } else {
            None
        }
    }

    /// Whether there is only a driver and no hardware behind it: such a device has no memory. It can be opened for compiling
    /// ([`crate::Device::open_to_compile`]).
    pub fn is_null(&self) -> bool {
        self.memory_bytes == 0
    }

    fn has_buffer_address(&self) -> bool {
        self.extensions.iter().any(|e| e == BUFFER_ADDRESS_MARK)
    }

    /// `NVIDIA H200 (discrete, NVIDIA 580.159)`-like line.
    pub fn describe(&self) -> String {
        format!("{} ({}, {} {})", self.name, self.kind.name(), self.driver, self.driver_version)
    }
}

/// Stands in the extension list for the Vulkan 1.2 feature bits that make addresses and timelines usable.
const BUFFER_ADDRESS_MARK: &str = "(buffer device address)";

/// Every adapter of the machine, in the loader's order.
pub fn adapters(instance: &Instance) -> Result<Vec<Adapter>, Error> {
    // SAFETY: the instance is alive.
    let physical =
        unsafe { instance.raw.enumerate_physical_devices() }.map_err(vulkan("vkEnumeratePhysicalDevices"))?;
    physical.into_iter().enumerate().map(|(index, device)| query(instance, index, device)).collect()
}

/// Chooses an adapter: by index, part of the name, PCI address or UUID; without a wish the best that is no software
/// rasteriser.
pub fn choose<'a>(adapters: &'a [Adapter], wanted: Option<&str>) -> Result<&'a Adapter, Error> {
    let Some(wanted) = wanted.map(str::trim).filter(|w| !w.is_empty()) else {
        let usable = adapters.iter().filter(|a| a.kind != AdapterKind::Cpu && a.missing().is_none());
        let best = usable.min_by_key(|a| (a.is_null(), a.kind.rank(), std::cmp::Reverse(a.memory_bytes), a.index));
        return best.ok_or_else(|| {
            let software = adapters.iter().find(|a| a.kind == AdapterKind::Cpu && a.missing().is_none());
            software.map_or(Error::NoDevice, |a| Error::OnlySoftware { name: a.name.clone(), index: a.index })
        });
    };
    let index = wanted.parse::<usize>().ok();
    if let Some(adapter) = index.and_then(|i| adapters.get(i)) {
        return Ok(adapter);
    }
    // "7" can only be an index that is not there; "4090" may be part of a name.
    let nameable = index.is_none_or(|i| i > 99);
    let lower = wanted.to_lowercase();
    let fits = |a: &&Adapter| {
        (nameable && a.name.to_lowercase().contains(&lower))
            || a.pci.as_deref().is_some_and(|p| p == lower || p.trim_start_matches("0000:") == lower)
            || a.uuid == lower.replace('-', "")
    };
    let found: Vec<&Adapter> = adapters.iter().filter(fits).collect();
    let names =
        |list: &[&Adapter]| list.iter().map(|a| format!("{}: {}", a.index, a.name)).collect::<Vec<_>>().join(", ");
    match found.as_slice() {
        [one] => Ok(one),
        [] => {
            let all: Vec<&Adapter> = adapters.iter().collect();
            let available = if all.is_empty() { "none".to_owned() } else { names(&all) };
            Err(Error::UnknownDevice { wanted: wanted.to_owned(), available })
        }
        several => Err(Error::AmbiguousDevice { wanted: wanted.to_owned(), matches: names(several) }),
    }
}

fn text<const N: usize>(chars: &vk::StringArray<N>) -> String {
    chars.to_string_lossy().into_owned()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn query(instance: &Instance, index: usize, physical: vk::PhysicalDevice) -> Result<Adapter, Error> {
    let raw = &instance.raw;
    // SAFETY: the physical device comes from this instance.
    let offered = unsafe { raw.enumerate_device_extension_properties(physical, None) }
        .map_err(vulkan("vkEnumerateDeviceExtensionProperties"))?;
    let mut extensions: Vec<String> = offered.iter().map(|e| text(&e.extension_name)).collect();
    let has = |e: &vk::Extension| offers_extension(&extensions, e);

    let mut id = vk::PhysicalDeviceIDProperties::default();
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut pci = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceProperties2::builder().push_next(&mut id).push_next(&mut driver);
    if has(&vk::EXT_PCI_BUS_INFO_EXTENSION) {
        properties = properties.push_next(&mut pci);
    }
    // SAFETY: the chain holds structs the device's version and extensions allow, all alive during the call.
    unsafe { raw.get_physical_device_properties2(physical, &mut properties) };
    let core = properties.properties;
    let version = Version::from(core.api_version);
    let (memory_bytes, memory_free) = memory(instance, physical, has(&vk::EXT_MEMORY_BUDGET_EXTENSION));
    let (mut caps, addressable) = crate::query::caps(raw, physical, &core, &extensions);
    let disabled = kiln_system::environment::text("KILN_DISABLE").unwrap_or_default();
    for unknown in caps.disable(&disabled) {
        log::warn!(
            "KILN_DISABLE names {unknown:?}; coopmat2, coopmat, fragment, int_dot, bfloat16, subgroups and dependent_launch are known"
        );
    }
    let pci = has(&vk::EXT_PCI_BUS_INFO_EXTENSION)
        .then(|| format!("{:04x}:{:02x}:{:02x}.{}", pci.pci_domain, pci.pci_bus, pci.pci_device, pci.pci_function));
    if addressable {
        extensions.push(BUFFER_ADDRESS_MARK.to_owned());
    }
    Ok(Adapter {
        index,
        name: text(&core.device_name),
        kind: match core.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => AdapterKind::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => AdapterKind::Integrated,
            vk::PhysicalDeviceType::VIRTUAL_GPU => AdapterKind::Virtual,
            vk::PhysicalDeviceType::CPU => AdapterKind::Cpu,
            _ => AdapterKind::Other,
        },
        driver: text(&driver.driver_name),
        driver_version: text(&driver.driver_info),
        api_version: (version.major, version.minor, version.patch),
        pci,
        uuid: hex(&id.device_uuid.0),
        driver_uuid: hex(&core.pipeline_cache_uuid.0),
        memory_bytes,
        memory_free,
        caps,
        physical,
        extensions,
    })
}

/// Bytes of all device-local heaps, and what the budget leaves of them.
pub(crate) fn memory(instance: &Instance, physical: vk::PhysicalDevice, has_budget: bool) -> (u64, Option<u64>) {
    // SAFETY: the physical device belongs to this instance.
    let heaps = unsafe { instance.raw.get_physical_device_memory_properties(physical) };
    let local: Vec<usize> = (0..heaps.memory_heap_count as usize)
        .filter(|&i| heaps.memory_heaps[i].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL))
        .collect();
    let total = local.iter().map(|&i| heaps.memory_heaps[i].size).sum();
    // A null device has no budget either, and Mesa 25.0 crashes when asked for that of an integrated one.
    if total == 0 {
        return (0, has_budget.then_some(0));
    }
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceMemoryProperties2::builder();
    if has_budget {
        properties = properties.push_next(&mut budget);
    }
    // SAFETY: the budget struct is only chained where its extension is offered.
    unsafe { instance.raw.get_physical_device_memory_properties2(physical, &mut properties) };
    let free = local.iter().map(|&i| budget.heap_budget[i].saturating_sub(budget.heap_usage[i])).sum();
    (total, has_budget.then_some(free))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(index: usize, name: &str, kind: AdapterKind, memory_bytes: u64) -> Adapter {
        Adapter {
            index,
            name: name.into(),
            kind,
            driver: "driver".into(),
            driver_version: "1".into(),
            api_version: (1, 3, 0),
            pci: Some(format!("0000:0{index}:00.0")),
            uuid: format!("{index:032x}"),
            driver_uuid: String::new(),
            memory_bytes,
            memory_free: None,
            caps: Caps::least(),
            physical: vk::PhysicalDevice::null(),
            extensions: vec![BUFFER_ADDRESS_MARK.into()],
        }
    }

    fn machine() -> Vec<Adapter> {
        vec![
            adapter(0, "llvmpipe (LLVM 19, 256 bits)", AdapterKind::Cpu, 64 << 30),
            adapter(1, "Integrated Graphics", AdapterKind::Integrated, 32 << 30),
            adapter(2, "Big Card", AdapterKind::Discrete, 24 << 30),
            adapter(3, "Small Card", AdapterKind::Discrete, 8 << 30),
        ]
    }

    #[test]
    fn without_a_wish_the_largest_card_is_taken() {
        assert_eq!(choose(&machine(), None).unwrap().index, 2);
        assert_eq!(choose(&machine()[..2], Some("")).unwrap().index, 1);
    }

    #[test]
    fn a_device_without_hardware_is_taken_only_where_there_is_no_other() {
        let null = adapter(0, "Null hardware", AdapterKind::Discrete, 0);
        assert_eq!(
            choose(&[null.clone(), adapter(1, "Integrated", AdapterKind::Integrated, 1)], None).unwrap().index,
            1
        );
        assert!(choose(&[null], None).unwrap().is_null());
    }

    #[test]
    fn a_software_device_is_taken_only_when_named() {
        let error = choose(&machine()[..1], None).unwrap_err().to_string();
        assert!(error.contains("llvmpipe") && error.contains("--device 0"), "{error}");
        assert_eq!(choose(&machine()[..1], Some("llvmpipe")).unwrap().index, 0);
    }

    #[test]
    fn index_name_pci_and_uuid_choose() {
        for wanted in ["3", "small", "0000:03:00.0", "03:00.0", "00000000-0000-0000-0000-000000000003"] {
            assert_eq!(choose(&machine(), Some(wanted)).unwrap().index, 3, "{wanted}");
        }
    }

    #[test]
    fn unknown_and_ambiguous_wishes_name_what_there_is() {
        let unknown = choose(&machine(), Some("9")).unwrap_err().to_string();
        assert!(unknown.contains("\"9\"") && unknown.contains("2: Big Card"), "{unknown}");
        let several = choose(&machine(), Some("card")).unwrap_err().to_string();
        assert!(several.contains("2: Big Card, 3: Small Card"), "{several}");
    }

    #[test]
    fn a_device_without_16_bit_storage_is_not_taken_and_says_so() {
        let mut one = adapter(0, "Old Card", AdapterKind::Discrete, 1 << 30);
        one.caps.storage_16bit = false;
        assert_eq!(one.missing(), Some("16-bit storage"));
        assert!(matches!(choose(&[one], None), Err(Error::NoDevice)));
    }
}
