//! What can go wrong with a GPU that a caller cannot foresee. Every message names the thing, the numbers, the way out.

use std::time::Duration;

use vulkanalia::vk;

/// An error of the GPU layer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No Vulkan loader on this machine.
    #[error(
        "no Vulkan loader: {detail}\nhint: install libvulkan1 (Debian, Ubuntu) or vulkan-loader (Fedora, Arch); Kiln runs on the CPU without it"
    )]
    NoLoader {
        /// What the dynamic linker said.
        detail: String,
    },
    /// The program was built without what GPUs need.
    #[error("this program was built for the CPU alone\nhint: build it with its feature `gpu` to use GPUs")]
    CpuOnly,
    /// The loader is there but no driver offers a device.
    #[error("no Vulkan device found\nhint: `kiln doctor` tells what is missing; Kiln runs on the CPU without one")]
    NoDevice,
    /// The only device is the CPU pretending to be a GPU.
    #[error(
        "the only Vulkan device is a software one ({name}), which is slow and taken only when named\nhint: --device {index} takes it; models run on the CPU without it"
    )]
    OnlySoftware {
        /// Its name.
        name: String,
        /// Its position in the list.
        index: usize,
    },
    /// A variable of the environment has a value that makes no sense.
    #[error("{0}")]
    Setting(String),
    /// No adapter fits the request.
    #[error(
        "no device matches {wanted:?}; there are: {available}\nhint: `kiln devices` lists index, name, PCI address and UUID"
    )]
    UnknownDevice {
        /// What was asked for.
        wanted: String,
        /// The names that are there.
        available: String,
    },
    /// Several adapters fit the request.
    #[error(
        "{wanted:?} matches several devices: {matches}\nhint: name one by index, PCI address or UUID (`kiln devices`)"
    )]
    AmbiguousDevice {
        /// What was asked for.
        wanted: String,
        /// The names that fit.
        matches: String,
    },
    /// A device lacks something every kernel needs.
    #[error(
        "{device} lacks {feature}, which Kiln needs\nhint: a newer driver may have it; `kiln devices` lists the others"
    )]
    MissingFeature {
        /// The device's name.
        device: String,
        /// What it lacks.
        feature: &'static str,
    },
    /// A device that only compiles was asked to run something.
    #[error(
        "{device} is no hardware: its driver compiles kernels, but there is no memory and nothing runs\nhint: `kiln selftest --compile` and `kiln plan MODEL` work on it"
    )]
    CompilesOnly {
        /// The device's name.
        device: String,
    },
    /// A Vulkan call failed.
    #[error("{call} failed: {result:?}")]
    Vulkan {
        /// The call.
        call: &'static str,
        /// The driver's answer.
        result: vk::ErrorCode,
    },
    /// The driver gave the device up.
    #[error(
        "the GPU is lost: {during}\nhint: the driver reset the GPU or it hung; start again, and see the system log if it happens again"
    )]
    DeviceLost {
        /// What was running.
        during: String,
    },
    /// The GPU did not finish in time.
    #[error(
        "{what} did not finish within {:.0} s\nhint: the GPU is hung or far slower than expected; see the system log, or wait longer with KILN_TIMEOUT=SECONDS", after.as_secs_f64().ceil()
    )]
    Timeout {
        /// What was waited for.
        what: String,
        /// For how long.
        after: Duration,
    },
    /// Not enough memory on the device.
    #[error(
        "out of {kind} memory: asked for {}, {} of {} free\nhint: at most {} would fit now", mib(*asked), mib(*free), mib(*total), mib(*fits)
    )]
    OutOfMemory {
        /// Kind of memory.
        kind: &'static str,
        /// Bytes asked for.
        asked: u64,
        /// Bytes the driver says are free.
        free: u64,
        /// Bytes of the heaps.
        total: u64,
        /// Largest single request that would fit.
        fits: u64,
    },
    /// A shader that does not compile.
    #[error("shader {name} does not compile:\n{messages}")]
    Compile {
        /// The shader's name.
        name: String,
        /// The compiler's messages with the GLSL lines they speak of.
        messages: String,
    },
    /// A shader file that is not there.
    #[error("shader {name} includes {file:?}, which is not among the sources")]
    NoSource {
        /// The shader's name.
        name: String,
        /// The missing file.
        file: String,
    },
    /// A folder of shaders, or a file in it, that cannot take the place of embedded ones.
    #[error("KILN_SHADER_DIR: {why}\nhint: files lie in it as in `crates/kernels`, such as rms_norm/rms_norm.comp")]
    ShaderFolder {
        /// What is wrong with it.
        why: String,
    },
    /// Includes without end.
    #[error("shader {name} includes too much at {file:?}: {why}")]
    Includes {
        /// The shader's name.
        name: String,
        /// The file that went too far.
        file: String,
        /// How far.
        why: String,
    },
    /// A kernel that exceeds a limit of the device; drivers do not always check and may lose the device instead.
    #[error("shader {name} needs {needs} {what}, the device has {limit}")]
    OverLimit {
        /// The shader's name.
        name: String,
        /// Which resource.
        what: &'static str,
        /// How much the shader needs.
        needs: u64,
        /// How much there is.
        limit: u64,
    },
}

/// Bytes as people read them.
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Turns a Vulkan error into ours; a lost device is its own kind because callers recover from it.
pub(crate) fn vulkan(call: &'static str) -> impl Fn(vk::ErrorCode) -> Error {
    move |result| match result {
        vk::ErrorCode::DEVICE_LOST => Error::DeviceLost { during: call.to_owned() },
        result => Error::Vulkan { call, result },
    }
}
