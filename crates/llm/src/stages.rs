//! A model on several hosts: this one has the first layers, stages on others have the rest. How they are reached is for the caller to say.

use std::fmt;
use std::sync::Arc;

use kiln_engine::arch::Room;
use kiln_engine::executor::{Executor, PipelineExecutor};
use kiln_engine::model::Model;
use kiln_engine::placement::{Candidate, Sizes, spread};
use kiln_engine::run::{self, Place, fit_in, usable};

use crate::error::{Error, PlacingError};
use crate::opening::Opening;
use crate::placing::{PAGES_OF_OTHERS, least_context, plain};

/// A host that takes layers.
pub trait Host: fmt::Debug + Send + Sync {
    /// Where it is, for people.
    fn name(&self) -> String;

    /// Connects. The host must have the model with this fingerprint ([`kiln_engine::state::of_model`]).
    fn join(&self, fingerprint: [u8; 32]) -> Result<Box<dyn Executor>, kiln_engine::Error>;
}

/// The hosts that take layers, in the order of these.
#[derive(Clone, Debug, Default)]
pub struct Stages {
    /// The hosts; none for this machine alone.
    pub hosts: Vec<Arc<dyn Host>>,
    /// The share of each device of this machine, then of each host; by free memory where it is empty.
    pub split: Vec<f64>,
}

impl Opening {
    /// The executor of a model whose layers lie here and on other hosts.
    pub(crate) fn over_hosts(&self, model: &Model, wish: &run::Wish) -> Result<Box<dyn Executor>, Error> {
        if self.placing.says_anything() {
            return Err(PlacingError::NotWithStages.into());
        }
        let gpus = self.open_gpus()?;
        let mut devices = match &gpus[..] {
            [] => vec![self.cpu_executor()?],
            gpus => gpus.iter().map(|gpu| self.gpu_executor(gpu)).collect::<Result<_, _>>()?,
        };
        let fingerprint = kiln_engine::state::of_model(model);
        for host in &self.stages.hosts {
            devices.push(host.join(fingerprint)?);
        }
        let split = &self.stages.split;
        if !split.is_empty() && (split.len() != devices.len() || split.iter().sum::<f64>() <= 0.0) {
            return Err(PlacingError::StageShares { given: split.len(), devices: devices.len() }.into());
        }
        let [k_type, v_type] = wish.caches;
        let sequences = wish.sequences.max(1);
        let context = least_context(model, wish);
        let one = Room { context, pages: 1, window_pages: 0, states: sequences, sequences, k_type, v_type };
        let pages = one.pages_of_a_sequence() + (sequences - 1) * PAGES_OF_OTHERS;
        let batch = devices.iter().map(|device| device.batch()).min().unwrap_or_default();
        let room = Room { pages, ..one }.with_windows(model.facts.window, batch);
        let sizes = Sizes::of(&plain(model, &room)?, room.pages);
        let candidate = |device: &dyn Executor| {
            let thought = Place::thought(device.target(), device.batch(), None);
            Ok(Candidate {
                name: device.describe(),
                usable: device.memory().as_ref().map_or(u64::MAX, usable),
                scratch: fit_in(model, &thought, wish)?.scratch(),
            })
        };
        let candidates = devices.iter().map(|device| candidate(&**device)).collect::<Result<Vec<_>, Error>>()?;
        let placement = spread(&sizes, &candidates, pages as u64, split)?;
        let plans = plain(model, &Room::one(64))?;
        Ok(Box::new(PipelineExecutor::new(devices, placement, &plans).without_streaming()))
    }
}
