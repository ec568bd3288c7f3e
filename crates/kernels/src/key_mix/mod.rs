//! `key_mix`: what RWKV-7 makes of its products before the recurrence, in one pass: the key to look up and what takes the
//! place of what is found there, the key to store, the decay, and the values' share of the first layer's.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, require, word};
use crate::tensor::Tensor;

const NAME: &str = "key_mix";

/// One line for the registry.
pub const SUMMARY: &str = "keys, decays and values of RWKV-7: kk = k k_k / |k k_k|, k += k k_a (sigmoid(rate) - 1), ..";

/// Operands of `key_mix`. All are F32, dense, and begin at multiples of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Keys `[size, heads, tokens]` of 16, 32, 64, 128 or 256; k + k k_a (a - 1) takes their place.
    pub k: Tensor,
    /// What keys are looked up by, `[size * heads]`: kk = k k_k, of length one in each head.
    pub k_k: Tensor,
    /// How much keys depend on the rate, as `k_k`.
    pub k_a: Tensor,
    /// The rate before its sigmoid a, as `k`.
    pub rate: Tensor,
    /// What the decay is made of, as `k`; exp(-sigmoid(w) / sqrt(e)) takes its place.
    pub w: Tensor,
    /// Result -kk, as `k`.
    pub lookup: Tensor,
    /// Result kk a, as `k`.
    pub replaced: Tensor,
    /// The values, where they lean to the first layer's.
    pub value: Option<Value>,
    /// The least length that kk is divided by.
    pub eps: f32,
}

/// v + (first - v) sigmoid(share)
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Value {
    /// Values, as `k`; the result takes their place.
    pub v: Tensor,
    /// The first layer's, as `k`.
    pub first: Tensor,
    /// How far they lean, before the sigmoid, as `k`.
    pub share: Tensor,
}

kiln_gpu::params! {
    struct Params {
        k: Address,
        k_k: Address,
        k_a: Address,
        rate: Address,
        w: Address,
        lookup: Address,
        replaced: Address,
        v: Address,
        first: Address,
        share_of_first: Address,
        heads: u32,
        rows: u32,
        eps: f32,
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let value = self.value.map(|v| [v.v, v.first, v.share]);
        [self.k, self.k_k, self.k_a, self.rate, self.w].into_iter().chain(value.into_iter().flatten()).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        [self.k, self.w, self.lookup, self.replaced].into_iter().chain(self.value.map(|v| v.v)).collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        let [size, heads, tokens, _] = self.k.shape;
        require(self.k.len() == size * heads * tokens, NAME, || format!("k is {}, want three dimensions", self.k))?;
        let fits = |t: &Tensor| t.ty == TensorType::F32 && t.is_dense() && t.offset.is_multiple_of(16);
        let always =
            [("k", self.k), ("rate", self.rate), ("w", self.w), ("lookup", self.lookup), ("replaced", self.replaced)];
        let value = self.value.map(|v| [("v", v.v), ("first", v.first), ("share", v.share)]);
        for (name, t) in always.into_iter().chain(value.into_iter().flatten()) {
            require(fits(&t) && t.shape == self.k.shape, NAME, || {
                format!("{name} is {t} at byte {}, want dense F32 of the extents of k at a multiple of 16", t.offset)
            })?;
        }
        for (name, t) in [("k_k", self.k_k), ("k_a", self.k_a)] {
            require(fits(&t) && t.len() == size * heads, NAME, || {
                format!("{name} is {t} at byte {}, want dense F32[{}] at a multiple of 16", t.offset, size * heads)
            })?;
        }
        require(self.eps >= 0.0, NAME, || format!("eps is {}, want 0 or more", self.eps))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let size = self.k.shape[0];
        let refuse = |reason: String| Err(Unsupported { operation: NAME, reason });
        if !matches!(size, 16 | 32 | 64 | 128 | 256) {
            return refuse(format!("heads of {size} (16, 32, 64, 128 and 256 are supported)"));
        }
        if self.k.rows() > i32::MAX as usize {
            return refuse(format!("k is {}, beyond 31 bits", self.k));
        }
        let threads = 64;
        let shader = Shader::new(NAME, "key_mix/key_mix.comp", Params::glsl())
            .define("WG", threads)
            .define("S", size)
            .define("VALUE", u32::from(self.value.is_some()));
        Ok(Choice::one(Path::Scalar, shader, grid(self.k.rows().div_ceil(threads / (size / 4)), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let value = |part: fn(&Value) -> Tensor| self.value.as_ref().map_or(Address::default(), |v| at(&part(v)));
        Params {
            k: at(&self.k),
            k_k: at(&self.k_k),
            k_a: at(&self.k_a),
            rate: at(&self.rate),
            w: at(&self.w),
            lookup: at(&self.lookup),
            replaced: at(&self.replaced),
            v: value(|v| v.v),
            first: value(|v| v.first),
            share_of_first: value(|v| v.share),
            heads: word(self.k.shape[1]),
            rows: word(self.k.rows()),
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
            let [k, rate, w] = [self.k, self.rate, self.w].map(only);
            let [lookup, replaced] = [self.lookup, self.replaced].map(only);
            let value = self.value.map(|v| Value { v: only(v.v), first: only(v.first), share: only(v.share) });
            Call { k, rate, w, lookup, replaced, value, ..*self }.into()
        };
        (0..self.k.shape[2]).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let k = Tensor::dense(Slot(0), TensorType::F32, [64, 3, 2, 1]);
        let w = Tensor::dense(Slot(1), TensorType::F32, [192, 1, 1, 1]);
        let good = Call { k, k_k: w, k_a: w, rate: k, w: k, lookup: k, replaced: k, value: None, eps: 1e-12 };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { k_a: k, ..good }).contains("k_a is F32[64, 3, 2]"));
        assert!(reason(Call { rate: w, ..good }).contains("rate is F32[192]"));
        let value = Value { v: k, first: k, share: k.narrow(2, 0, 1) };
        assert!(reason(Call { value: Some(value), ..good }).contains("share is F32[64, 3]"));
    }
}
