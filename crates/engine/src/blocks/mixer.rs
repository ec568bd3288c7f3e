//! What mixes the tokens of a sequence in a layer: attention over a cache, or a recurrence with a state.

use kiln_kernels::ssm_conv;
use kiln_kernels::tensor::Tensor;

use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear};

/// A half of a layer, read from a file.
pub trait Mixer: Send + Sync {
    /// Adds the steps; gives what is added to the residual stream.
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor;

    /// Adds the steps that keep what later tokens need of these, and no others where they can be told apart.
    fn keep(&self, b: &mut Builder, batch: &Batch, x: Tensor) {
        self.build(b, batch, x);
    }
}

/// A matrix in the place of attention.
impl Mixer for Linear {
    fn build(&self, b: &mut Builder, _: &Batch, x: Tensor) -> Tensor {
        b.linear("output", x, self)
    }
}

/// Two mixers of the same tokens, added together.
pub struct Both(pub Box<dyn Mixer>, pub Box<dyn Mixer>);

impl Mixer for Both {
    fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor) -> Tensor {
        let first = self.0.build(b, batch, x);
        let second = self.1.build(b, batch, x);
        b.add("both", first, second)
    }
}

/// A convolution of each channel with the tokens before, with its state.
#[derive(Clone, Copy, Debug)]
pub struct Convolution {
    weight: Tensor,
    bias: Option<Tensor>,
    state: Tensor,
    silu: bool,
}

impl Convolution {
    /// Reads `NAME.weight` of so many taps and channels, and `NAME.bias` where it is wanted; `layer` names the state.
    pub fn load(
        l: &mut Loader<'_>,
        name: &str,
        layer: usize,
        [taps, channels]: [usize; 2],
        (bias, silu): (bool, bool),
    ) -> Result<Convolution, Error> {
        let weight = format!("{name}.weight");
        // Files may write the same with extents of 1 between and behind.
        let shape = l.shape(&weight).filter(|shape| shape.iter().product::<usize>() == taps * channels);
        let weight = match shape {
            Some(shape) if shape[0] == taps && shape != [taps, channels, 1, 1] => {
                l.vector(&weight, &shape)?.reshape([taps, channels, 1, 1])
            }
            _ => l.vector(&weight, &[taps, channels])?,
        };
        let bias = if bias { Some(l.vector(&format!("{name}.bias"), &[channels])?) } else { None };
        let state = l.state(&format!("{layer}.{name}.state"), &[channels, taps - 1]);
        Ok(Convolution { weight, bias, state, silu })
    }

    /// Reads `NAME.weight` of so many taps that lie `apart` tokens from each other, without a bias; silu of the result.
    pub fn spread(
        l: &mut Loader<'_>,
        name: &str,
        layer: usize,
        [taps, channels]: [usize; 2],
        apart: usize,
    ) -> Result<Convolution, Error> {
        let weight = format!("{name}.weight");
        let missing = || Error::MissingTensor { name: l.full(&weight) };
        let shape = l.shape(&weight).ok_or_else(missing)?;
        if shape.iter().product::<usize>() != taps * channels || shape[0] != taps {
            let (got, want) = (shape.to_vec(), vec![taps, channels]);
            return Err(Error::TensorShape { name: l.full(&weight), got, want });
        }
        let values = l.values(&weight)?.unwrap_or_default();
        let all = (taps - 1) * apart + 1;
        let tap =
            |i: usize| if (i % all).is_multiple_of(apart) { values[i / all * taps + i % all / apart] } else { 0.0 };
        let wide: Vec<f32> = (0..all * channels).map(tap).collect();
        let weight = l.constant(&format!("{layer}.{name}.spread"), &wide, [all, channels, 1, 1]);
        let state = l.state(&format!("{layer}.{name}.state"), &[channels, all - 1]);
        Ok(Convolution { weight, bias: None, state, silu: true })
    }

    /// One that gives each token and those before it: of `[width, taps]` columns, part j becomes that of the token `taps - 1 - j` before.
    pub fn delays(l: &mut Loader<'_>, name: &str, [taps, width]: [usize; 2]) -> Convolution {
        let channels = width * taps;
        let one = |i: usize| if i % taps == i / taps / width { 1.0 } else { 0.0 };
        let weight: Vec<f32> = (0..taps * channels).map(one).collect();
        let weight = l.constant(&format!("delays.{taps}.{width}"), &weight, [taps, channels, 1, 1]);
        let state = l.state(&format!("{name}.state"), &[channels, taps - 1]);
        Convolution { weight, bias: None, state, silu: false }
    }

    /// Adds the step; `x` is `[channels, tokens]`, a part of wider columns perhaps.
    pub fn build(&self, b: &mut Builder, batch: &Batch, name: &str, x: Tensor) -> Tensor {
        let y = b.like(name, x);
        let (sequences, slots) = batch.recurrence();
        let Convolution { weight, bias, state, silu } = *self;
        b.step(name, ssm_conv::Call { x, weight, bias, state, y, silu, sequences, slots });
        y
    }
}

/// The number of taps of a convolution, by its key.
pub fn taps(l: &Loader<'_>, key: &str) -> Result<usize, Error> {
    let taps = l.keys.count(key, ssm_conv::MOST_TAPS)?;
    l.keys.require(taps > 1, key, taps, &format!("2 to {}", ssm_conv::MOST_TAPS))?;
    Ok(taps)
}
