//! What a driver tells of the kernels it compiled: registers, memory they spill to. Asked for when a device is opened to
//! compile, and with `KILN_STATISTICS=1`, for those who write kernels: an array that is not in registers shows here and
//! nowhere else.

use vulkanalia::prelude::v1_2::*;
use vulkanalia::vk::KhrPipelineExecutablePropertiesExtensionDeviceCommands;

use crate::Adapter;

/// One number that a driver tells of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistic {
    /// The driver's name for it, such as `VGPRs` or `Spilled VGPRs`.
    pub name: String,
    /// Its value.
    pub value: f64,
}

/// What drivers tell of a pipeline under names of their own, under one. Numbers that a driver does not tell are absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Told {
    /// Registers of each thread.
    pub registers: Option<f64>,
    /// Registers of each subgroup.
    pub scalar_registers: Option<f64>,
    /// Registers of both kinds that found no place.
    pub spilled: Option<f64>,
    /// Bytes of slow memory for them, and for arrays that are not in registers.
    pub scratch: Option<f64>,
    /// Bytes of shared memory of a workgroup.
    pub shared: Option<f64>,
    /// Bytes of code.
    pub code: Option<f64>,
    /// Subgroups that a SIMD unit holds at once.
    pub subgroups: Option<f64>,
    /// The compiler's estimate of the cycles that one subgroup takes alone.
    pub latency: Option<f64>,
    /// The compiler's estimate of the cycles that a SIMD unit is busy with one subgroup.
    pub busy: Option<f64>,
}

impl Told {
    /// What these statistics say. Names are those of RADV, ANV and NVIDIA.
    pub fn of(statistics: &[Statistic]) -> Told {
        let value = |name: &&str| statistics.iter().find(|one| one.name == **name).map(|one| one.value);
        let first = |names: &[&str]| names.iter().find_map(value);
        let sum = |names: &[&str]| names.iter().filter_map(value).reduce(|a, b| a + b);
        Told {
            registers: first(&["VGPRs", "Max live registers", "Register Count"]),
            scalar_registers: first(&["SGPRs"]),
            spilled: sum(&["Spilled VGPRs", "Spilled SGPRs", "Spill count"]),
            scratch: first(&["Scratch size", "Scratch Memory Size", "Local Memory Size"]),
            shared: first(&["LDS size", "Workgroup Memory Size", "Shared Memory Size"]),
            code: first(&["Code size", "Binary Size"]),
            subgroups: first(&["Subgroups per SIMD"]),
            latency: first(&["Latency"]),
            busy: first(&["Inverse Throughput"]),
        }
    }

    /// Whether the kernel keeps anything in slow memory that should be in registers.
    pub fn spills(&self) -> bool {
        [self.spilled, self.scratch].into_iter().flatten().any(|n| n > 0.0)
    }
}

/// The extension that tells.
pub(crate) const EXTENSION: vk::Extension = vk::KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION;

/// Whether the environment asks for statistics.
pub(crate) fn asked() -> bool {
    kiln_system::environment::is_on("KILN_STATISTICS")
}

/// Whether statistics are asked for, `always` or by the environment, and the driver has them.
pub(crate) fn wanted(adapter: &Adapter, always: bool) -> bool {
    let offered = adapter.has(&EXTENSION);
    if asked() && !offered {
        log::warn!("KILN_STATISTICS: {} tells nothing of its kernels", adapter.name);
    }
    (always || asked()) && offered
}

/// Every statistic of a pipeline that was made with `CAPTURE_STATISTICS`.
pub(crate) fn of(raw: &vulkanalia::Device, pipeline: vk::Pipeline) -> Vec<Statistic> {
    // SAFETY: the pipeline is alive, the device has the extension (`wanted`), and the pipeline was made to be asked.
    let executables =
        unsafe { raw.get_pipeline_executable_properties_khr(&vk::PipelineInfoKHR::builder().pipeline(pipeline)) };
    let mut told = Vec::new();
    for i in 0..executables.map_or(0, |all| all.len() as u32) {
        let info = vk::PipelineExecutableInfoKHR::builder().pipeline(pipeline).executable_index(i);
        // SAFETY: as above; the number is one of those just counted.
        let statistics = unsafe { raw.get_pipeline_executable_statistics_khr(&info) };
        for one in statistics.unwrap_or_default() {
            // SAFETY: the format says which member the driver wrote.
            let value = unsafe {
                match one.format {
                    vk::PipelineExecutableStatisticFormatKHR::BOOL32 => f64::from(one.value.b32),
                    vk::PipelineExecutableStatisticFormatKHR::INT64 => one.value.i64 as f64,
                    vk::PipelineExecutableStatisticFormatKHR::UINT64 => one.value.u64 as f64,
                    _ => one.value.f64,
                }
            };
            told.push(Statistic { name: one.name.to_string_lossy().into_owned(), value });
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statistics(rows: &[(&str, f64)]) -> Vec<Statistic> {
        rows.iter().map(|&(name, value)| Statistic { name: name.into(), value }).collect()
    }

    #[test]
    fn names_of_several_drivers_mean_the_same() {
        let radv = Told::of(&statistics(&[("VGPRs", 96.0), ("Spilled VGPRs", 0.0), ("Spilled SGPRs", 3.0)]));
        assert_eq!((radv.registers, radv.spilled, radv.code), (Some(96.0), Some(3.0), None));
        assert!(radv.spills());
        let anv =
            Told::of(&statistics(&[("Max live registers", 80.0), ("Spill count", 0.0), ("Scratch Memory Size", 0.0)]));
        assert!(anv.registers == Some(80.0) && !anv.spills());
        assert!(Told::of(&statistics(&[("Scratch size", 64.0)])).spills(), "an array that is not in registers");
        assert_eq!(Told::of(&[]), Told::default());
    }
}
