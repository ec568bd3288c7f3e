//! Kernels of plans that will be asked for, made while something else is done: weights take their way to the device through other threads.

use std::sync::Arc;

use kiln_gpu::{Address, Device, Shader};
use kiln_kernels::hand_over;
use kiln_kernels::operation::Choice;
use kiln_kernels::tensor::Tensor;

use crate::Error;
use crate::plan::{Plan, SlotKind, Step};

/// Makes the kernels of a plan.
pub type Warmer = Box<dyn Fn(&Plan) -> Result<(), Error> + Send + Sync>;

/// Makes kernels of plans for this device. `may_hand_over`: whether steps of generating may wait for each other by themselves.
pub(super) fn warmer(device: Arc<Device>, may_hand_over: bool) -> Warmer {
    Box::new(move |plan| {
        let mut choices = picked(plan, &device)?;
        if may_hand_over
            && waits_by_itself(plan)
            && hand_over::proved(&device)?
            && let Some(handing_over) = handing_over(plan, &choices, &device)
        {
            choices = handing_over;
        }
        Ok(device.prepare(&shaders(&choices), &|| {})?)
    })
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

/// Whether the steps of a plan may wait for each other by themselves, where the device can: those of a plan that goes on by itself,
/// unless one of them loses by it.
pub(super) fn waits_by_itself(plan: &Plan) -> bool {
    let goes_on = plan.slots.iter().any(|slot| slot.kind == SlotKind::Log);
    goes_on && !plan.steps.iter().any(|step| hand_over::costs(&step.call))
}

/// The same choices with kernels that wait for each other; `None` where one has no room for what it must know.
pub(super) fn handing_over(plan: &Plan, choices: &[Choice], device: &Device) -> Option<Vec<Choice>> {
    let nowhere = |_: &Tensor| Address::default();
    let bytes = |step: usize, launch| plan.steps[step].call.operation().params(&choices[step], launch, &nowhere).len();
    hand_over::handing_over(choices, bytes, &device.adapter.caps)
}

/// The kernels of all steps.
pub(super) fn shaders(choices: &[Choice]) -> Vec<Shader> {
    choices.iter().flat_map(|choice| choice.launches.iter().map(|launch| launch.shader.clone())).collect()
}
