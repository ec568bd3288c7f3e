//! Runs an encoder: pictures in, rows of vectors out. Plans of the sizes that were met last stay ready.

use std::sync::Arc;

use kiln_media::Pixels;

use super::kept::Kept;
use super::{Drawing, Grid, Vision};
use crate::Error;
use crate::executor::{Executor, PlanId, Progress};
use crate::lower::lower;
use kiln_kernels::tensor::Tensor;

/// Plans that stay ready: most pictures of a conversation have one of few sizes, and plans hold memory.
const MOST_PLANS: usize = 4;

/// Vectors, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// Elements of a vector.
    pub width: usize,
    /// The vectors.
    pub values: Vec<f32>,
}

/// A plan that is ready.
struct Ready {
    grid: Grid,
    plan: PlanId,
    patches: Tensor,
    rows: Tensor,
    order: Vec<usize>,
}

/// An encoder with its weights loaded.
pub struct Encoder {
    vision: Arc<Vision>,
    executor: Box<dyn Executor>,
    /// The one that was used last stands at the end.
    plans: Vec<Ready>,
    kept: Kept,
}

impl Encoder {
    /// Loads the weights.
    pub fn new(vision: Arc<Vision>, mut executor: Box<dyn Executor>, progress: Progress<'_>) -> Result<Encoder, Error> {
        executor.load(vision.fixed(), &vision.gguf, progress)?;
        Ok(Encoder { vision, executor, plans: Vec::new(), kept: Kept::default() })
    }

    /// What it encodes with.
    pub fn vision(&self) -> &Arc<Vision> {
        &self.vision
    }

    /// Vectors that were made before.
    pub(super) fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }

    /// The vectors of one input.
    pub fn encode(&mut self, pixels: &Pixels) -> Result<Rows, Error> {
        match self.encode_once(pixels) {
            Err(Error::OutOfRange) => {
                self.plans.drain(..).for_each(|ready| self.executor.forget(ready.plan));
                self.encode_once(pixels)
            }
            result => result,
        }
    }

    fn encode_once(&mut self, pixels: &Pixels) -> Result<Rows, Error> {
        let grid = self.vision.grid(pixels.size);
        self.prepare(grid)?;
        let Some(ready) = self.plans.last() else { return Err(Error::NoEncoder { why: "it has no plan".to_owned() }) };
        let patches = unfolded(pixels, self.vision.patch(), grid, &ready.order);
        self.executor.write(ready.plan, &ready.patches, bytemuck::cast_slice(&patches))?;
        self.executor.run(ready.plan)?;
        let mut values = vec![0.0_f32; ready.rows.len()];
        self.executor.read(ready.plan, &ready.rows, bytemuck::cast_slice_mut(&mut values))?;
        if values.iter().any(|v| !v.is_finite()) {
            return Err(Error::NoEncoder { why: "it gives numbers that are not finite".to_owned() });
        }
        Ok(Rows { width: ready.rows.shape[0], values })
    }

    /// Brings the plan of a grid to the end of the list.
    fn prepare(&mut self, grid: Grid) -> Result<(), Error> {
        if let Some(at) = self.plans.iter().position(|ready| ready.grid == grid) {
            let ready = self.plans.remove(at);
            self.plans.push(ready);
            return Ok(());
        }
        if self.plans.len() == MOST_PLANS {
            self.executor.forget(self.plans.remove(0).plan);
        }
        let Drawing { plan, patches, order, given } = self.vision.draw(grid)?;
        let plan = lower(plan, &self.executor.target())?;
        let rows = plan.ports.logits;
        let plan = self.executor.prepare(plan)?;
        for (tensor, bytes) in &given {
            self.executor.write(plan, tensor, bytes)?;
        }
        self.plans.push(Ready { grid, plan, patches, rows, order });
        Ok(())
    }
}

/// The patches of an input, each as one row: channels slowest, then rows, then columns.
fn unfolded(pixels: &Pixels, side: usize, grid: Grid, order: &[usize]) -> Vec<f32> {
    let width = pixels.size.width;
    let mut out = Vec::with_capacity(order.len() * 3 * side * side);
    for patch in order {
        let (top, left) = (patch / grid.columns * side, patch % grid.columns * side);
        for channel in 0..3 {
            for row in 0..side {
                let at = (channel * pixels.size.height + top + row) * width + left;
                out.extend_from_slice(&pixels.values[at..at + side]);
            }
        }
    }
    out
}
