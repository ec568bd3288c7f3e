//! State-space mixers: a convolution and a selective scan between two matrices. Mamba 1 has a decay for each element of its state and small
//! matrices for what the scan depends on; Mamba 2 has heads, and makes all of it at once; PLaMo 2 is between them.

use kiln_gguf::TensorType;
use kiln_kernels::glu::Gate;
use kiln_kernels::recurrence::Form;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::{copy, ssm_scan};

use super::mixer::{Convolution, Mixer, taps};
use super::norms::NormKind;
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// Sizes of a state-space mixer.
#[derive(Clone, Copy, Debug)]
pub struct MambaSizes {
    /// Width of the tokens.
    pub hidden: usize,
    /// Tokens that a result of the convolution depends on.
    pub taps: usize,
    /// Width inside.
    pub inner: usize,
    /// Elements of the state of a channel.
    pub states: usize,
    /// Heads, or in Mamba 1 the rank of the matrices that make the steps.
    pub rank: usize,
    /// What norms add.
    pub eps: f32,
}

impl MambaSizes {
    /// Reads them.
    pub fn read(l: &Loader<'_>, hidden: usize, eps: f32) -> Result<MambaSizes, Error> {
        let keys = l.keys;
        let (inner, states) = (keys.count("ssm.inner_size", 1 << 18)?, keys.count("ssm.state_size", 1 << 12)?);
        let rank = keys.count("ssm.time_step_rank", inner)?;
        Ok(MambaSizes { hidden, taps: taps(l, "ssm.conv_kernel")?, inner, states, rank, eps })
    }

    /// Channels of a head.
    fn channels(&self, l: &Loader<'_>) -> Result<usize, Error> {
        let fits = self.inner.is_multiple_of(self.rank);
        l.keys.require(
            fits,
            "ssm.time_step_rank",
            self.rank,
            &format!("a divisor of ssm.inner_size {}", self.inner),
        )?;
        Ok(self.inner / self.rank)
    }
}

/// What every scan has: decays, skips, biases of the steps, and the state.
#[derive(Clone, Copy, Debug)]
struct Scan {
    a: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    state: Tensor,
}

impl Scan {
    /// For so many heads of so many channels. `own`: every element of a state has its own decay.
    fn load(
        l: &mut Loader<'_>,
        layer: usize,
        states: usize,
        [channels, heads]: [usize; 2],
        own: bool,
    ) -> Result<Scan, Error> {
        let a = if own {
            l.vector("ssm_a", &[states, heads])?
        } else {
            l.vector("ssm_a", &[heads])?.reshape([1, heads, 1, 1])
        };
        Ok(Scan {
            a,
            skip: l.vector("ssm_d", &[heads])?,
            dt_bias: l.vector("ssm_dt.bias", &[heads])?,
            state: l.state(&format!("{layer}.ssm_scan.state"), &[states, channels, heads]),
        })
    }

    /// Adds the step: x `[channels, heads, tokens]`, dt `[heads, tokens]`, b and c `[states, groups, tokens]`.
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor, dt: Tensor, [write, read]: [Tensor; 2]) -> Tensor {
        let y = b.like("scan", x);
        let (sequences, slots) = batch.recurrence();
        let Scan { a, skip, dt_bias, state } = *self;
        let (dt_bias, skip) = (Some(dt_bias), Some(skip));
        let form = Form::Auto;
        b.step("scan", ssm_scan::Call { x, dt, dt_bias, a, b: write, c: read, skip, state, y, sequences, slots, form });
        y
    }
}

/// How Mamba 1 norms steps, b and c.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Where the file has weights.
    Weighted,
    /// Without weights.
    Bare,
}

/// The mixer of Mamba 1.
pub struct Mamba1 {
    sizes: MambaSizes,
    input: Linear,
    convolution: Convolution,
    parts: Linear,
    /// Norms of steps, b and c.
    norms: Option<[Norm; 3]>,
    steps: Linear,
    scan: Scan,
    output: Linear,
}

impl Mamba1 {
    /// Reads it; `layer` names its states.
    pub fn load(l: &mut Loader<'_>, sizes: MambaSizes, norms: Norms, layer: usize) -> Result<Mamba1, Error> {
        let MambaSizes { hidden, taps, inner, states, rank, eps } = sizes;
        let has_norms = l.has("ssm_dt_norm.weight");
        let mut norm = |name: &str, width: usize| NormKind::Rms.load(l, name, width, eps);
        let norms = match norms {
            Norms::Bare => Some([Norm::Rms { weight: None, eps }; 3]),
            Norms::Weighted if has_norms => {
                Some([norm("ssm_dt_norm", rank)?, norm("ssm_b_norm", states)?, norm("ssm_c_norm", states)?])
            }
            Norms::Weighted => None,
        };
        Ok(Mamba1 {
            sizes,
            input: l.linear("ssm_in", &[hidden, 2 * inner])?,
            convolution: Convolution::load(l, "ssm_conv1d", layer, [taps, inner], (true, true))?,
            parts: l.unscaled("ssm_x", &[inner, rank + 2 * states])?,
            norms,
            steps: l.matrix("ssm_dt", &[rank, inner])?,
            scan: Scan::load(l, layer, states, [1, inner], true)?,
            output: l.linear("ssm_out", &[inner, hidden])?,
        })
    }
}

impl Mixer for Mamba1 {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let MambaSizes { inner, states, rank, .. } = self.sizes;
        let both = b.linear("in", x, &self.input);
        let (x, gate) = (both.narrow(0, 0, inner), both.narrow(0, inner, inner));
        let x = self.convolution.build(b, batch, "conv", x);
        let parts = b.linear("parts", x, &self.parts);
        let mut of = [(0, rank), (rank, states), (rank + states, states)].map(|(start, n)| parts.narrow(0, start, n));
        if let Some(norms) = &self.norms {
            let named = ["dt_norm", "b_norm", "c_norm"].into_iter().zip(norms);
            of.iter_mut().zip(named).for_each(|(part, (name, norm))| *part = b.norm(name, *part, norm));
        }
        let dt = b.linear("dt", of[0], &self.steps);
        let [write, read] = [of[1], of[2]].map(|t| t.heads(0, states, 1));
        let y = self.scan.build(b, batch, x.heads(0, 1, inner), dt, [write, read]);
        let y = b.gated("gated", Gate::Swiglu, gate, y.reshape(x.shape));
        b.linear("out", y, &self.output)
    }
}

/// The mixer of Mamba 2.
pub struct Mamba2 {
    sizes: MambaSizes,
    groups: usize,
    input: Linear,
    convolution: Convolution,
    scan: Scan,
    /// `[inner]`: the weight of the norm over each group.
    norm: Option<Tensor>,
    output: Linear,
}

impl Mamba2 {
    /// Reads it; `layer` names its states.
    pub fn load(l: &mut Loader<'_>, sizes: MambaSizes, layer: usize) -> Result<Mamba2, Error> {
        let MambaSizes { hidden, taps, inner, states, rank: heads, .. } = sizes;
        let groups = l.keys.count("ssm.group_count", heads)?;
        let fits = heads.is_multiple_of(groups);
        l.keys.require(
            fits,
            "ssm.group_count",
            groups,
            &format!("a divisor of the {heads} heads (ssm.time_step_rank)"),
        )?;
        let wide = inner + 2 * groups * states;
        let channels = sizes.channels(l)?;
        Ok(Mamba2 {
            sizes,
            groups,
            input: l.linear("ssm_in", &[hidden, inner + wide + heads])?,
            convolution: Convolution::load(l, "ssm_conv1d", layer, [taps, wide], (true, true))?,
            scan: Scan::load(l, layer, states, [channels, heads], false)?,
            norm: l.vector_opt("ssm_norm.weight", &[inner / groups, groups])?,
            output: l.linear("ssm_out", &[inner, hidden])?,
        })
    }
}

impl Mixer for Mamba2 {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let MambaSizes { inner, states, rank: heads, eps, .. } = self.sizes;
        let groups = self.groups;
        let wide = inner + 2 * groups * states;
        let all = b.linear("in", x, &self.input);
        let (gate, dt) = (all.narrow(0, 0, inner), all.narrow(0, inner + wide, heads));
        let mixed = self.convolution.build(b, batch, "conv", all.narrow(0, inner, wide));
        let x = mixed.heads(0, inner / heads, heads);
        let parts = [inner, inner + groups * states].map(|start| mixed.heads(start, states, groups));
        let y = self.scan.build(b, batch, x, dt, parts).reshape(gate.shape);
        let mut y = b.gated("gated", Gate::Swiglu, gate, y);
        if let Some(weight) = self.norm {
            // Every group has its own part of the weight.
            let grouped = y.heads(0, inner / groups, groups);
            let normed = b.norm("norm", grouped, &Norm::Rms { weight: None, eps });
            y = b.multiply("norm.weight", normed, weight.reshape([inner / groups, groups, 1, 1])).reshape(y.shape);
        }
        b.linear("out", y, &self.output)
    }
}

/// The mixer of PLaMo 2: heads and one decay each as in Mamba 2, small matrices as in Mamba 1.
pub struct PlamoMamba {
    sizes: MambaSizes,
    step_rank: usize,
    input: Linear,
    convolution: Convolution,
    parts: Linear,
    /// Norms of b, c and steps.
    norms: [Norm; 3],
    steps: Linear,
    scan: Scan,
    output: Linear,
}

impl PlamoMamba {
    /// Reads it; `layer` names its states.
    pub fn load(l: &mut Loader<'_>, sizes: MambaSizes, layer: usize) -> Result<PlamoMamba, Error> {
        let MambaSizes { hidden, taps, inner, states, rank: heads, eps } = sizes;
        let step_rank = (hidden / 16).max(64);
        let channels = sizes.channels(l)?;
        let mut norm = |name: &str, width: usize| NormKind::Rms.load(l, name, width, eps);
        let norms = [norm("ssm_b_norm", states)?, norm("ssm_c_norm", states)?, norm("ssm_dt_norm", step_rank)?];
        Ok(PlamoMamba {
            sizes,
            step_rank,
            input: l.unscaled("ssm_in", &[hidden, 2 * inner])?,
            convolution: Convolution::load(l, "ssm_conv1d", layer, [taps, inner], (false, true))?,
            parts: l.unscaled("ssm_x", &[inner, step_rank + 2 * states])?,
            norms,
            steps: l.matrix("ssm_dt", &[step_rank, heads])?,
            scan: Scan::load(l, layer, states, [channels, heads], false)?,
            output: l.unscaled("ssm_out", &[inner, hidden])?,
        })
    }
}

impl Mixer for PlamoMamba {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let MambaSizes { inner, states, rank: heads, .. } = self.sizes;
        let channels = inner / heads;
        let both = b.linear("in", x, &self.input).heads(0, 2 * channels, heads);
        let (gate, src) = (both.narrow(0, 0, channels), both.narrow(0, channels, channels));
        let x = b.fresh("x", TensorType::F32, [inner, x.shape[1], 1, 1]);
        b.step("x", copy::Call { src, dst: x.reshape(src.shape) });
        let x = self.convolution.build(b, batch, "conv", x);
        let parts = b.linear("parts", x, &self.parts);
        let of =
            [(0, states), (states, states), (2 * states, self.step_rank)].map(|(start, n)| parts.narrow(0, start, n));
        let [write, read, dt] = [0, 1, 2].map(|i| b.norm(["b_norm", "c_norm", "dt_norm"][i], of[i], &self.norms[i]));
        let dt = b.linear("dt", dt, &self.steps);
        let groups = [write, read].map(|t| t.heads(0, states, 1));
        let y = self.scan.build(b, batch, x.heads(0, channels, heads), dt, groups);
        let y = b.gated("gated", Gate::Swiglu, gate, y).reshape(x.shape);
        b.linear("out", y, &self.output)
    }
}
