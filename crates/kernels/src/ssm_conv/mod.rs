//! `ssm_conv`: a convolution of each channel with the tokens before, as state-space models, delta nets and short convolutions begin
//! their layers. The last tokens of each sequence are kept for the next call.

pub mod cases;
mod cpu;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, grid, maybe, only_scalar, require, within_32_bits, word,
};
use crate::recurrence::{Sequences, check_slots};
use crate::tensor::Tensor;

const NAME: &str = "ssm_conv";

/// One line for the registry.
pub const SUMMARY: &str =
    "y[t] = act(bias + sum of weight[j] x[t - j]): a convolution of each channel over time, with state";

/// Most tokens that one result depends on.
pub const MOST_TAPS: usize = 16;

/// Operands of `ssm_conv`, all F32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Tokens `[channels, tokens]`, dense columns.
    pub x: Tensor,
    /// `[taps, channels]`, dense: the last tap meets the token itself.
    pub weight: Tensor,
    /// `[channels]`, dense.
    pub bias: Option<Tensor>,
    /// The tokens before the first one of each sequence, oldest first, `[channels, taps - 1, sequences]`, or any number of them with slots.
    /// Dense; replaced by the last tokens.
    pub state: Tensor,
    /// Result `[channels, tokens]`, dense, not in `x`.
    pub y: Tensor,
    /// Whether the sum goes through x sigmoid(x).
    pub silu: bool,
    /// Which tokens belong together. Results of tokens of no sequence are left alone.
    pub sequences: Sequences,
    /// I32 `[sequences]`, dense: where each sequence's state lies. A negative one is padding: zeros come before the sequence, and its last
    /// tokens go nowhere.
    pub slots: Option<Tensor>,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        weight: Address,
        bias: Address,
        state: Address,
        y: Address,
        starts: Address,
        slots: Address,
        channels: u32,
        tokens: u32,
        units: u32,
        x_stride: u32,
        sequences: u32,
        states: u32,
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let places = self.sequences.tensor().into_iter().chain(self.slots);
        [self.x, self.weight, self.state].into_iter().chain(self.bias).chain(places).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y, self.state]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, weight, bias, state, y, .. } = self;
        let [channels, tokens, ..] = x.shape;
        let [taps, ..] = weight.shape;
        let whole = x.ty == TensorType::F32 && x.has_dense_rows() && x.stride[1].is_multiple_of(4);
        require(whole && x.len() == channels * tokens && tokens > 0, NAME, || {
            format!("x is {x}, want F32[channels, tokens] of dense columns")
        })?;
        require((2..=MOST_TAPS).contains(&taps), NAME, || format!("{taps} taps, want 2 to {MOST_TAPS}"))?;
        self.sequences.check(NAME, tokens)?;
        let states = match self.slots {
            Some(slots) => check_slots(NAME, slots, self.sequences).map(|()| state.shape[2].max(1))?,
            None => self.sequences.count(),
        };
        let fits = |t: &Tensor, shape: [usize; 4]| {
            t.ty == TensorType::F32 && t.is_dense() && t.shape == shape && t.offset.is_multiple_of(4)
        };
        let operands = [
            ("weight", Some(*weight), [taps, channels, 1, 1]),
            ("bias", *bias, [channels, 1, 1, 1]),
            ("state", Some(*state), [channels, taps - 1, states, 1]),
            ("y", Some(*y), [channels, tokens, 1, 1]),
        ];
        for (name, t, shape) in operands {
            let Some(t) = t else { continue };
            require(fits(&t, shape), NAME, || format!("{name} is {t}, want dense F32{shape:?}"))?;
        }
        require(
            x.slot != y.slot || x.offset + x.span().1 <= y.offset || y.offset + y.span().1 <= x.offset,
            NAME,
            || "y lies in x, which neighbours read".into(),
        )
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        within_32_bits(NAME, [self.y.len(), self.x.stride[1], self.state.len() / self.state.shape[2].max(1) * 4])?;
        let threads = if caps.is_cpu { 32 } else { 128 };
        let shader = Shader::new(NAME, "ssm_conv/ssm_conv.comp", Params::glsl())
            .define("TAPS", self.weight.shape[0])
            .define("BIAS", u32::from(self.bias.is_some()))
            .define("SILU", u32::from(self.silu))
            .define("WG", threads);
        Ok(Choice::one(Path::Scalar, shader, grid(self.y.len().div_ceil(threads), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let maybe = maybe(at);
        Params {
            x: at(&self.x),
            weight: at(&self.weight),
            bias: maybe(self.bias),
            state: at(&self.state),
            y: at(&self.y),
            starts: maybe(self.sequences.tensor()),
            slots: maybe(self.slots),
            channels: word(self.x.shape[0]),
            tokens: word(self.x.shape[1]),
            units: word(self.y.len()),
            x_stride: word(self.x.stride[1] / 4),
            sequences: word(self.sequences.count()),
            states: word(self.state.shape[2]),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn work(&self) -> Work {
        let [taps, channels, ..] = self.weight.shape;
        let states = 8 * channels * taps * self.sequences.count();
        Work { bytes: (8 * self.y.len() + states) as f64, flops: (2 * taps * self.y.len()) as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let tensor = |slot, shape| Tensor::dense(Slot(slot), TensorType::F32, shape);
        let good = Call {
            x: tensor(0, [6, 3, 1, 1]),
            weight: tensor(1, [4, 6, 1, 1]),
            bias: None,
            state: tensor(2, [6, 3, 1, 1]),
            y: tensor(3, [6, 3, 1, 1]),
            silu: true,
            sequences: Sequences::Equal(1),
            slots: None,
        };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { weight: tensor(1, [1, 6, 1, 1]), ..good }).contains("1 taps"));
        assert!(reason(Call { weight: tensor(1, [4, 5, 1, 1]), ..good }).contains("weight is"));
        assert!(reason(Call { state: tensor(2, [6, 3, 2, 1]), ..good }).contains("state is"));
        assert!(reason(Call { bias: Some(good.x), ..good }).contains("bias is"));
        assert!(reason(Call { y: good.x, ..good }).contains("y lies in x"));
        assert!(reason(Call { sequences: Sequences::Equal(2), ..good }).contains("2 sequences"));
    }
}
