//! Two executors side by side: the same plan, step by step, every written tensor compared. Each step starts from the
//! reference's memory, so an error does not travel and the first difference is the step at fault.

use kiln_kernels::fuse;
use kiln_kernels::host::HostMemory;
use kiln_kernels::tensor::{Slot, Tensor};

use crate::Error;
use crate::arch::{BatchShape, Graph, Room};
use crate::executor::{Executor, PlanId};
use crate::lower::lower;
use crate::model::Model;
use crate::plan::Plan;
use crate::run::batch::{Inputs, Taken};
use crate::run::cache::{KINDS, PageTable};

/// What came of a comparison.
pub struct Report {
    /// One line a step.
    pub lines: Vec<String>,
    /// The first step whose result differs by more than the tolerance.
    pub first_difference: Option<String>,
    /// Steps compared.
    pub steps: usize,
    /// Largest error of any step.
    pub worst: f64,
}

/// Feeds `tokens` to both and compares after every step; stops at the first difference.
pub fn run(
    model: &Model,
    tokens: &[u32],
    context: usize,
    device: &mut dyn Executor,
    reference: &mut dyn Executor,
    tolerance: f64,
) -> Result<Report, Error> {
    let room = Room::one(context).with_windows(model.facts.window, tokens.len());
    let graph = model.graph(&room)?;
    let shape = graph.expanding(BatchShape::new(tokens.len(), 1), &device.target());
    let plan = lower(graph.plan(shape)?, &device.target())?;
    let inputs = inputs(&plan, shape, tokens);
    let start = |executor: &mut dyn Executor| -> Result<PlanId, Error> {
        executor.load(graph.fixed(), &model.gguf, &mut |_, _| {})?;
        let id = executor.prepare(plan.clone())?;
        for (tensor, bytes) in inputs.bytes() {
            executor.write(id, tensor, bytes)?;
        }
        Ok(id)
    };
    let ids = [start(device)?, start(reference)?];
    let choices = device.choices(ids[0]);
    let mut report = Report { lines: Vec::new(), first_difference: None, steps: 0, worst: 0.0 };
    for (i, step) in plan.steps.iter().enumerate() {
        device.run_step(ids[0], i)?;
        reference.run_step(ids[1], i)?;
        for written in step.call.operation().writes() {
            let got = read(device, ids[0], &written)?;
            let want = read(reference, ids[1], &written)?;
            let (mut got, wanted) = (values(&written, got), values(&written, want.clone()));
            let packed_b = fuse::emitted_packed_b(&step.call).filter(|(packed_b, _)| packed_b.halves == written);
            if let Some((packed_b, extents)) = packed_b {
                // Places of columns that are not there hold whatever was there before.
                let gaps = packed_b
                    .written(extents)
                    .into_iter()
                    .zip(got.iter_mut().zip(&wanted))
                    .filter(|(written, _)| !written);
                gaps.for_each(|(_, (got, want))| *got = *want);
            }
            let (error, worst) = nmse(&got, &wanted);
            report.worst = report.worst.max(error);
            let slot = plan.slot_name(&written);
            report.lines.push(format!("{:28} {:44} {slot:16} {error:.1e}", step.label, choices[i]));
            if error.is_nan() || error > tolerance {
                let (index, got, want) = worst;
                report.first_difference = Some(format!(
                    "{}: {slot} differs by {error:.2e} (over {tolerance:.0e}); worst at element {index}: got {got}, want {want}",
                    step.label
                ));
                return Ok(report);
            }
            // Both go on from the same bits.
            let whole = Tensor { offset: written.span().0, ..written };
            device.write(ids[0], &whole, &want)?;
        }
        report.steps += 1;
    }
    Ok(report)
}

/// The logits that a plan gives for the beginning of a sequence, on an executor of its own: for comparing plans.
pub fn logits(
    model: &Model,
    graph: &Graph,
    plan: &Plan,
    (shape, tokens): (BatchShape, &[u32]),
    executor: &mut dyn Executor,
) -> Result<Vec<f32>, Error> {
    executor.load(graph.fixed(), &model.gguf, &mut |_, _| {})?;
    let id = executor.prepare(plan.clone())?;
    for (tensor, bytes) in inputs(plan, shape, tokens).bytes() {
        executor.write(id, tensor, bytes)?;
    }
    executor.run(id)?;
    let mut logits = vec![0.0f32; plan.ports.logits.len()];
    executor.read(id, &plan.ports.logits, bytemuck::cast_slice_mut(&mut logits))?;
    Ok(logits)
}

/// What the host writes for the beginning of a sequence.
fn inputs(plan: &Plan, shape: BatchShape, tokens: &[u32]) -> Inputs {
    let tables = [(); KINDS].map(|()| PageTable::identity(tokens.len()));
    let taken = [Taken { tokens, start: 0, tables: &tables, encoder: None, state: Some(0), first: false, carry: None }];
    let (decode, prompts) = if shape.decode > 0 { (&taken[..], &[][..]) } else { (&[][..], &taken[..]) };
    Inputs::new(&shape, &plan.ports, decode, prompts)
}

/// The bytes of a tensor's span.
pub(crate) fn read(executor: &mut dyn Executor, plan: PlanId, tensor: &Tensor) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; tensor.span().1];
    executor.read(plan, tensor, &mut bytes)?;
    Ok(bytes)
}

/// The values of a tensor given the bytes of its span.
pub(crate) fn values(tensor: &Tensor, bytes: Vec<u8>) -> Vec<f64> {
    let memory = HostMemory { slots: vec![bytes], ..HostMemory::default() };
    memory.read(&Tensor { slot: Slot(0), offset: 0, ..*tensor })
}

/// The error, and the element that adds most to it.
fn nmse(got: &[f64], want: &[f64]) -> (f64, (usize, f64, f64)) {
    let (mut sum, mut norm, mut worst) = (0.0, 0.0, (0, 0.0, 0.0));
    let mut largest = -1.0;
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let squared = (g - w).powi(2);
        sum += squared;
        norm += w * w;
        if squared.is_nan() || squared > largest {
            largest = if squared.is_nan() { f64::INFINITY } else { squared };
            worst = (i, g, w);
        }
    }
    let error = if sum == 0.0 { 0.0 } else { sum / f64::max(norm, f64::MIN_POSITIVE) };
    (error, worst)
}
