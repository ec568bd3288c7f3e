//! The device that tests of the engine run on.

#![allow(
    dead_code,
    clippy::print_stdout,
    reason = "each test takes what it needs of it, and says why it was passed over"
)]

use std::sync::Arc;

use kiln_engine::executor::{Executor, GpuExecutor, Options};
use kiln_gpu::{Cache, Device, Instance, adapters, choose};

/// The device of `KILN_DEVICE` or the first GPU; `scripts/test` always provides one.
pub(crate) fn device() -> Option<(Arc<Device>, Arc<Instance>)> {
    let open = || {
        let instance = Instance::new(&Cache::user())?;
        let all = adapters(&instance)?;
        let adapter = choose(&all, std::env::var("KILN_DEVICE").ok().as_deref())?;
        let device = kiln_kernels::open(&instance, adapter, Cache::user())?;
        Ok::<_, kiln_gpu::Error>((device, instance))
    };
    open()
        .inspect_err(|e| {
            assert!(std::env::var_os("KILN_TESTS_NEED_DEVICE").is_none(), "no device: {e}");
            println!("no device, test passed over: {e}");
        })
        .ok()
}

/// An executor on it.
pub(crate) fn gpu() -> Option<(Box<dyn Executor>, Arc<Instance>)> {
    gpu_with(Options::default())
}

/// An executor on it that keeps weights so.
pub(crate) fn gpu_with(options: Options) -> Option<(Box<dyn Executor>, Arc<Instance>)> {
    let (device, instance) = device()?;
    Some((Box::new(GpuExecutor::with_options(device, options)), instance))
}
