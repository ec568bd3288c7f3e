//! What a driver tells of the kernels it compiled: registers, memory they spill to. Asked for with `KILN_STATISTICS=1`, for
//! those who write kernels: an array that is not in registers shows here and nowhere else.

use vulkanalia::prelude::v1_2::*;
use vulkanalia::vk::KhrPipelineExecutablePropertiesExtensionDeviceCommands;

use crate::Adapter;

/// The extension that tells.
pub(crate) const EXTENSION: vk::Extension = vk::KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION;

/// Whether statistics are asked for and the driver has them.
pub(crate) fn wanted(adapter: &Adapter) -> bool {
    static TOLD: std::sync::Once = std::sync::Once::new();
    let asked = kiln_system::environment::is_on("KILN_STATISTICS");
    let offered = adapter.has(&EXTENSION);
    if asked && !offered {
        TOLD.call_once(|| log::warn!("KILN_STATISTICS: {} tells nothing of its kernels", adapter.name));
    }
    asked && offered
}

/// Name and value of every statistic of a pipeline that was made with `CAPTURE_STATISTICS`.
pub(crate) fn of(raw: &vulkanalia::Device, pipeline: vk::Pipeline) -> String {
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
                    vk::PipelineExecutableStatisticFormatKHR::BOOL32 => u64::from(one.value.b32).to_string(),
                    vk::PipelineExecutableStatisticFormatKHR::INT64 => one.value.i64.to_string(),
                    vk::PipelineExecutableStatisticFormatKHR::UINT64 => one.value.u64.to_string(),
                    _ => one.value.f64.to_string(),
                }
            };
            told.push(format!("{} {value}", one.name.to_string_lossy()));
        }
    }
    told.join(", ")
}
