//! Warm-up: compiles the kernels of plans that will be needed while other threads upload the weights.

use std::sync::Arc;

use kiln_gpu::{Address, Device, Shader};
use kiln_kernels::dependent_launch;
use kiln_kernels::operation::Choice;
use kiln_kernels::tensor::Tensor;

use crate::Error;
use crate::plan::{Plan, SlotKind, Step};

/// Compiles the kernels of plans for a device, on any thread. `may_launch_dependent`: whether decode steps may be dependent launches.
pub struct Warmer {
    device: Arc<Device>,
    may_launch_dependent: bool,
}

impl Warmer {
    pub(super) fn new(device: Arc<Device>, may_launch_dependent: bool) -> Warmer {
        Warmer { device, may_launch_dependent }
    }

    /// Compiles the kernels of a plan that are not there yet.
    pub fn compile(&self, plan: &Plan) -> Result<(), Error> {
        let device = &self.device;
        let mut choices = picked(plan, device)?;
        if self.may_launch_dependent
            && waits_by_itself(plan)
            && dependent_launch::proved(device)?
            && let Some(launching_dependent) = launching_dependent(plan, &choices, device)
        {
            choices = launching_dependent;
        }
        Ok(device.prepare(&shaders(&choices), &|| {})?)
    }

    /// Whether kernels had to be compiled that no earlier process had stored.
    pub fn has_compiled(&self) -> bool {
        self.device.pipeline_counts().glsl_compiled > 0
    }

    /// Kernels that the device has, of all plans.
    pub fn kernels(&self) -> u64 {
        self.device.pipeline_counts().made
    }

    /// Stores what was compiled, so that a process that is killed has not compiled it for nothing.
    pub fn store(&self) {
        self.device.save_pipelines();
    }
}

/// How the steps of a plan run on a device.
pub(super) fn picked(plan: &Plan, device: &Device) -> Result<Vec<Choice>, Error> {
    let pick = |step: &Step| {
        let refused = |why: kiln_kernels::operation::Unsupported| Error::OnDevice {
            device: device.adapter.name.clone(),
            step: step.label.clone(),
            why: why.to_string(),
        };
        step.call.operation().pick(&device.adapter.caps, None).map_err(refused)
    };
    plan.steps.iter().map(pick).collect()
}

/// Whether the steps of a plan may be dependent launches where the device supports it: those of run-ahead decode plans, unless one of them is
/// slower that way.
pub(super) fn waits_by_itself(plan: &Plan) -> bool {
    let goes_on = plan.slots.iter().any(|slot| slot.kind == SlotKind::Log);
    goes_on && !plan.steps.iter().any(|step| dependent_launch::costs(&step.call))
}

/// The same choices as dependent launches; `None` if the parameter block of one has no room for the counter fields.
pub(super) fn launching_dependent(plan: &Plan, choices: &[Choice], device: &Device) -> Option<Vec<Choice>> {
    let nowhere = |_: &Tensor| Address::default();
    let bytes = |step: usize, launch| plan.steps[step].call.operation().params(&choices[step], launch, &nowhere).len();
    dependent_launch::launching_dependent(choices, bytes, &device.adapter.caps)
}

/// The kernels of all steps.
pub(super) fn shaders(choices: &[Choice]) -> Vec<Shader> {
    choices.iter().flat_map(|choice| choice.launches.iter().map(|launch| launch.shader.clone())).collect()
}
