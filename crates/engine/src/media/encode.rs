//! Runs encoders: pictures and sounds in, rows of vectors out. Plans of the sizes that were met last stay ready.

use std::sync::Arc;

use kiln_media::{Pixels, Spectrogram};

use super::kept::Kept;
use super::{Drawing, Extent, Mmproj};
use crate::Error;
use crate::executor::{Executor, PlanId, Progress};
use crate::lower::lower;
use crate::vision::Grid;
use kiln_kernels::tensor::Tensor;

/// Plans that stay ready: most pictures and sounds of a conversation have one of few sizes, and plans hold memory.
const MOST_PLANS: usize = 4;

/// Vectors, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// Elements of a vector.
    pub width: usize,
    /// The vectors.
    pub values: Vec<f32>,
}

/// One input of an encoder.
#[derive(Clone, Copy, Debug)]
pub enum Input<'i> {
    /// A picture, or a tile of one.
    Picture(&'i Pixels),
    /// A sound, or a piece of one.
    Sound(&'i Spectrogram),
}

/// A plan that is ready.
struct Ready {
    extent: Extent,
    plan: PlanId,
    input: Tensor,
    rows: Tensor,
    order: Vec<usize>,
}

/// Opens the device of an encoder again.
pub type Reopen = Box<dyn Fn() -> Result<Box<dyn Executor>, Error> + Send>;

/// The encoders of a file with their weights loaded.
pub struct Encoder {
    mmproj: Arc<Mmproj>,
    executor: Box<dyn Executor>,
    /// Whether the executor is gone for good.
    lost: bool,
    reopen: Option<Reopen>,
    /// The one that was used last stands at the end.
    plans: Vec<Ready>,
    kept: Kept,
}

impl Encoder {
    /// Loads the weights.
    pub fn new(mmproj: Arc<Mmproj>, mut executor: Box<dyn Executor>, progress: Progress<'_>) -> Result<Encoder, Error> {
        executor.load(mmproj.fixed(), &mmproj.gguf, progress)?;
        Ok(Encoder { mmproj, executor, lost: false, reopen: None, plans: Vec::new(), kept: Kept::default() })
    }

    /// The same encoder, which outlives its device: where that is lost, another one is opened and the weights are loaded again.
    #[must_use]
    pub fn lasting(self, reopen: Reopen) -> Encoder {
        Encoder { reopen: Some(reopen), ..self }
    }

    /// What it encodes with.
    pub fn mmproj(&self) -> &Arc<Mmproj> {
        &self.mmproj
    }

    /// Vectors that were made before.
    pub(super) fn kept(&mut self) -> &mut Kept {
        &mut self.kept
    }

    /// The vectors of one input. A lost device is opened again once for it, where that was provided for; where this fails, the next input tries
    /// again.
    pub fn encode(&mut self, input: Input<'_>) -> Result<Rows, Error> {
        if !self.lost {
            match self.encode_right(input) {
                Err(why) if why.is_lost() && self.reopen.is_some() => {
                    log::warn!("{why}; the encoder is loaded again");
                    self.lost = true;
                }
                result => return result,
            }
        }
        self.reload()?;
        let result = self.encode_right(input);
        self.lost = result.as_ref().is_err_and(Error::is_lost);
        result
    }

    /// Another executor in place of the one that was lost.
    fn reload(&mut self) -> Result<(), Error> {
        let Some(reopen) = &self.reopen else { return Ok(()) };
        let again = |why: Error| Error::Lost { why: format!("the encoder cannot be loaded again yet: {why}") };
        let mut executor = reopen().map_err(again)?;
        executor.load(self.mmproj.fixed(), &self.mmproj.gguf, &mut |_, _| {}).map_err(again)?;
        self.plans.clear();
        (self.executor, self.lost) = (executor, false);
        Ok(())
    }

    /// The vectors of one input. Where they are wrong and the executor knows a slower way it is run again, once for each thing that can go
    /// wrong. Nothing is left of a run, so that it begins as the first one did.
    fn encode_right(&mut self, input: Input<'_>) -> Result<Rows, Error> {
        for _ in 0..2 {
            match self.encode_once(input) {
                Err(Error::OutOfRange) => self.plans.drain(..).for_each(|ready| self.executor.forget(ready.plan)),
                Err(Error::Stalled) => {}
                result => return result,
            }
        }
        self.encode_once(input)
    }

    fn encode_once(&mut self, input: Input<'_>) -> Result<Rows, Error> {
        let mmproj = Arc::clone(&self.mmproj);
        let extent = match input {
            Input::Picture(pixels) => Extent::Picture(mmproj.needs_vision()?.grid(pixels.size)),
            Input::Sound(heard) => Extent::Sound(heard.frames()),
        };
        self.prepare(extent)?;
        let Some(ready) = self.plans.last() else { return Err(Error::NoEncoder { why: "it has no plan".to_owned() }) };
        let values = match input {
            Input::Picture(pixels) => {
                let vision = mmproj.needs_vision()?;
                unfolded(pixels, vision.patch(), vision.grid(pixels.size), &ready.order)
            }
            Input::Sound(heard) => mmproj.needs_audio()?.unfolded(heard),
        };
        if values.len() != ready.input.len() {
            return Err(Error::NoEncoder { why: "it takes inputs of another size".to_owned() });
        }
        self.executor.write(ready.plan, &ready.input, bytemuck::cast_slice(&values))?;
        self.executor.run(ready.plan)?;
        let mut values = vec![0.0_f32; ready.rows.len()];
        self.executor.read(ready.plan, &ready.rows, bytemuck::cast_slice_mut(&mut values))?;
        if values.iter().any(|v| !v.is_finite()) {
            return Err(Error::NoEncoder { why: "it gives numbers that are not finite".to_owned() });
        }
        Ok(Rows { width: ready.rows.shape[0], values })
    }

    /// Brings the plan of a size to the end of the list.
    fn prepare(&mut self, extent: Extent) -> Result<(), Error> {
        if let Some(at) = self.plans.iter().position(|ready| ready.extent == extent) {
            let ready = self.plans.remove(at);
            self.plans.push(ready);
            return Ok(());
        }
        if self.plans.len() == MOST_PLANS {
            self.executor.forget(self.plans.remove(0).plan);
        }
        let Drawing { plan, input, order, given } = self.mmproj.draw(extent)?;
        let plan = lower(plan, &self.executor.target())?;
        let rows = plan.ports.logits;
        let plan = self.executor.prepare(plan)?;
        for (tensor, bytes) in &given {
            self.executor.write(plan, tensor, bytes)?;
        }
        self.plans.push(Ready { extent, plan, input, rows, order });
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
