//! `head_mix`: what RWKV models do with the result of their recurrence before the output matrix: the norm of every head
//! with a weight and a bias for each channel, the bonus of the token itself (RWKV-7), the gate. One pass.

pub mod cases;
mod reference;
mod within;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, require, word};
use crate::tensor::Tensor;
use crate::unary::Function;

pub use within::Mix;
pub(crate) use within::{is_mix, is_within, touches};

const NAME: &str = "head_mix";

/// One line for the registry.
pub const SUMMARY: &str = "y = (norm of each head of x * weight + bias + v * sum(r k weight)) * f(gate)";

/// Operands of `head_mix`. All are F32, dense, and begin at multiples of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Heads `[size, heads, tokens]` of 16, 32, 64, 128 or 256.
    pub x: Tensor,
    /// Multiplied after the norm, `[size * heads]`.
    pub weight: Tensor,
    /// Added after that, as `weight`.
    pub bias: Tensor,
    /// Added to the variance.
    pub eps: f32,
    /// What each token adds by itself.
    pub bonus: Option<Bonus>,
    /// The gate, as `x`, and what is applied to it.
    pub gate: Option<(Tensor, Option<Function>)>,
    /// Result, as `x`; may be `x` itself.
    pub y: Tensor,
}

/// v times the sum of r k weight over the head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bonus {
    /// Receptances, as `x`.
    pub r: Tensor,
    /// Keys, as `x`.
    pub k: Tensor,
    /// Values, as `x`.
    pub v: Tensor,
    /// A factor for each channel, `[size * heads]`.
    pub weight: Tensor,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        weight: Address,
        bias: Address,
        r: Address,
        k: Address,
        v: Address,
        bonus_weight: Address,
        gate: Address,
        y: Address,
        heads: u32,
        rows: u32,
        eps: f32,
    }
}

impl Call {
    fn optional(&self) -> impl Iterator<Item = (&'static str, Tensor)> {
        let bonus = self.bonus.map(|b| [("r", b.r), ("k", b.k), ("v", b.v)]);
        bonus.into_iter().flatten().chain(self.gate.map(|(gate, _)| ("gate", gate)))
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let always = [self.x, self.weight, self.bias].into_iter();
        always.chain(self.optional().map(|(_, t)| t)).chain(self.bonus.map(|b| b.weight)).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let [size, heads, tokens, _] = self.x.shape;
        require(self.x.len() == size * heads * tokens, NAME, || format!("x is {}, want three dimensions", self.x))?;
        let fits = |t: &Tensor| t.ty == TensorType::F32 && t.is_dense() && t.offset.is_multiple_of(16);
        for (name, t) in [("x", self.x), ("y", self.y)].into_iter().chain(self.optional()) {
            require(fits(&t) && t.shape == self.x.shape, NAME, || {
                format!("{name} is {t} at byte {}, want dense F32 of the extents of x at a multiple of 16", t.offset)
            })?;
        }
        let weights = [Some(("weight", self.weight)), Some(("bias", self.bias))];
        for (name, t) in weights.into_iter().chain([self.bonus.map(|b| ("bonus.weight", b.weight))]).flatten() {
            require(fits(&t) && t.len() == size * heads, NAME, || {
                format!("{name} is {t} at byte {}, want dense F32[{}] at a multiple of 16", t.offset, size * heads)
            })?;
        }
        require(self.eps >= 0.0, NAME, || format!("eps is {}, want 0 or more", self.eps))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let size = self.x.shape[0];
        let refuse = |reason: String| Err(Unsupported { operation: NAME, reason });
        if !matches!(size, 16 | 32 | 64 | 128 | 256) {
            return refuse(format!("heads of {size} (16, 32, 64, 128 and 256 are supported)"));
        }
        if self.x.rows() > i32::MAX as usize {
            return refuse(format!("x is {}, beyond 31 bits", self.x));
        }
        let threads = 64;
        let shader = Shader::new(NAME, "head_mix/head_mix.comp", Params::glsl()).define("WG", threads);
        let shader = self.defines(shader.define("S", size));
        Ok(Choice::one(Path::Scalar, shader, grid(self.x.rows().div_ceil(threads / (size / 4)), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let bonus = |part: fn(&Bonus) -> Tensor| self.bonus.as_ref().map_or(Address::default(), |b| at(&part(b)));
        Params {
            x: at(&self.x),
            weight: at(&self.weight),
            bias: at(&self.bias),
            r: bonus(|b| b.r),
            k: bonus(|b| b.k),
            v: bonus(|b| b.v),
            bonus_weight: bonus(|b| b.weight),
            gate: self.gate.as_ref().map_or(Address::default(), |(gate, _)| at(gate)),
            y: at(&self.y),
            heads: word(self.x.shape[1]),
            rows: word(self.x.rows()),
            eps: self.eps,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |t: usize| {
            let only = |x: Tensor| x.narrow(2, t, 1);
            let bonus = self.bonus.map(|b| Bonus { r: only(b.r), k: only(b.k), v: only(b.v), ..b });
            let gate = self.gate.map(|(gate, function)| (only(gate), function));
            Call { x: only(self.x), y: only(self.y), bonus, gate, ..*self }.into()
        };
        (0..self.x.shape[2]).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let x = Tensor::dense(Slot(0), TensorType::F32, [64, 3, 2, 1]);
        let weight = Tensor::dense(Slot(1), TensorType::F32, [192, 1, 1, 1]);
        let good = Call { x, weight, bias: weight, eps: 1e-5, bonus: None, gate: Some((x, None)), y: x };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { bias: x, ..good }).contains("bias is F32[64, 3, 2]"));
        assert!(reason(Call { gate: Some((weight, None)), ..good }).contains("gate is F32[192]"));
        let bonus = Bonus { r: x, k: x, v: x.narrow(2, 0, 1), weight };
        assert!(reason(Call { bonus: Some(bonus), ..good }).contains("v is F32[64, 3]"));
        let odd = Tensor::dense(Slot(0), TensorType::F32, [48, 4, 2, 1]);
        let odd = Call { x: odd, y: odd, gate: None, ..good };
        assert!(odd.pick(&Caps::example_nvidia(), None).unwrap_err().reason.contains("heads of 48"));
    }
}
