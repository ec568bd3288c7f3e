//! From a call and a choice to recorded dispatches: the one way work reaches the GPU.

use kiln_gpu::{Address, Cost, Device, Dispatch, Groups, Recorder, Span};

use crate::Call;
use crate::operation::{Choice, Invalid, Unsupported};
use crate::tensor::Tensor;

/// What can go wrong between a call and its result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operation cannot run here.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The operands do not fit together.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The device failed.
    #[error(transparent)]
    Gpu(#[from] kiln_gpu::Error),
}

/// Records every launch of a choice. `at` gives the address of a tensor's first element.
pub fn record(
    recorder: &mut Recorder,
    device: &Device,
    label: &str,
    (call, choice): (&Call, &Choice),
    at: &dyn Fn(&Tensor) -> Address,
) -> Result<(), Error> {
    let operation = call.operation();
    let span = |t: &Tensor| {
        let (first, bytes) = t.span();
        // `at` points to the tensor's first element, which is also the first byte of its span.
        debug_assert_eq!(first, t.offset);
        Span { start: at(t), bytes: bytes as u64 }
    };
    let work = operation.work();
    let launches = choice.launches.len() as f64;
    for (i, launch) in choice.launches.iter().enumerate() {
        let pipeline = device.pipeline(&launch.shader)?;
        // In a profile, the launches of a step are told apart by their kernels.
        let kernel = launch.shader.name.split(' ').next().unwrap_or_default();
        let label = if launches > 1.0 { format!("{label} {kernel}") } else { label.to_owned() };
        let params = operation.params(choice, i, at);
        let touches = operation.touches(choice, i);
        let reads: Vec<Span> = touches.reads.iter().map(span).collect();
        let writes: Vec<Span> = touches.writes.iter().map(span).collect();
        let early: Vec<Span> = operation.early().iter().map(span).collect();
        recorder.dispatch(Dispatch {
            label: &label,
            pipeline: &pipeline,
            params: &params,
            groups: Groups::Direct(launch.groups),
            reads: &reads,
            writes: &writes,
            early: &early,
            cost: Cost { bytes: work.bytes / launches, flops: work.flops / launches },
        })?;
    }
    Ok(())
}
