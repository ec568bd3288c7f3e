//! HRM: two stacks of layers that are run again and again. The low stack refines a state of its own several times, then the
//! high one takes it in; each run of a layer has caches of its own.

use kiln_kernels::rope::RopeStyle;
use kiln_kernels::tensor::Tensor;

use super::{Architecture, Batch};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::decoder::{Entering, Layer, Spec};
use crate::blocks::norms::NormKind;
use crate::blocks::output::{Embedding, Output};
use crate::model::Loader;
use crate::model::parts::Factors;
use crate::plan::{Builder, Norm};

struct Hrm {
    spec: Spec,
    embedding: Embedding,
    /// The low state before anything is read, `[hidden]`.
    start: Tensor,
    /// Runs of both stacks in their order.
    runs: Vec<Run>,
    output: Output,
}

/// One run of a stack.
struct Run {
    high: bool,
    layers: Vec<Layer>,
}

pub(super) fn load(l: &mut Loader<'_>) -> Result<Box<dyn Architecture>, Error> {
    let keys = l.keys;
    let spec = Spec::rotary(l, NormKind::BareRms, RopeStyle::Neox, Factors::Unused)?;
    let mut spec = spec.with_result_gate(ResultGate::Sigmoid);
    spec.embedding_scale = keys.factor("embedding_scale")?.unwrap_or(1.0);
    spec.scales_by_slot = true;
    let slots = spec.sizes.layers;
    let stack = keys.count("hrm.layers_per_stack", slots)?;
    let high_cycles = keys.count("hrm.h_cycles", slots)?;
    let low_cycles = keys.count("hrm.l_cycles", slots)?;
    let want = stack * high_cycles * (low_cycles + 1);
    keys.require(slots == want, "block_count", slots, &format!("{want}, one for each run of a layer"))?;
    let embedding = spec.embedding(l)?;
    let mut runs = Vec::new();
    for cycle in 0..high_cycles {
        for step in 0..=low_cycles {
            let high = step == low_cycles;
            let first = (cycle * (low_cycles + 1) + step) * stack;
            let block = if high { stack } else { 0 };
            let layers = (0..stack).map(|i| Layer::load(l, &spec, block + i, first + i)).collect::<Result<_, _>>()?;
            runs.push(Run { high, layers });
        }
    }
    l.whole();
    let start = l.vector("hrm.z_l_init", &[spec.sizes.hidden])?;
    let output = Output::load(l, (NormKind::BareRms, spec.eps), spec.head, &embedding)?.without_norm();
    Ok(Box::new(Hrm { spec, embedding, start, runs, output }))
}

impl Architecture for Hrm {
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor {
        let norm = Norm::Rms { weight: None, eps: self.spec.eps };
        let first = self.embedding.build(b, batch);
        let (mut high, mut low) = (first, self.start);
        for (i, run) in self.runs.iter().enumerate() {
            b.at(format!("{i}"));
            let mut x = b.add("both", high, low);
            for (n, layer) in run.layers.iter().enumerate() {
                x = layer.build(b, batch, (&self.spec, &format!("{i}.{n}")), Entering { x, first, own: None });
            }
            b.at(format!("{i}"));
            x = b.norm("norm", x, &norm);
            *(if run.high { &mut high } else { &mut low }) = x;
        }
        self.output.build(b, batch, high)
    }
}
