//! A short convolution between two gates: out(c * conv(b * x)), with b, c and x made of the token.

use kiln_kernels::tensor::Tensor;

use super::mixer::{Convolution, Mixer, taps};
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear};

/// The mixer of LFM2.
pub struct ShortConv {
    hidden: usize,
    input: Linear,
    convolution: Convolution,
    output: Linear,
}

impl ShortConv {
    /// Reads it; `layer` names its state.
    pub fn load(l: &mut Loader<'_>, hidden: usize, layer: usize) -> Result<ShortConv, Error> {
        let taps = taps(l, "shortconv.l_cache")?;
        Ok(ShortConv {
            hidden,
            input: l.unscaled("shortconv.in_proj", &[hidden, 3 * hidden])?,
            convolution: Convolution::load(l, "shortconv.conv", layer, [taps, hidden], (false, false))?,
            output: l.unscaled("shortconv.out_proj", &[hidden, hidden])?,
        })
    }
}

impl Mixer for ShortConv {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let all = b.linear("in", x, &self.input);
        let [before, after, x] = [0, 1, 2].map(|part| all.narrow(0, part * self.hidden, self.hidden));
        let gated = b.multiply("gate_in", before, x);
        let mixed = self.convolution.build(b, batch, "conv", gated);
        let gated = b.multiply("gate_out", mixed, after);
        b.linear("out", gated, &self.output)
    }
}
