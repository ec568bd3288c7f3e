//! `token_mix`: blends of each token with the one before it, as RWKV models begin their layers. One pass for any number
//! of blends, and the last token is kept for the next call. The norm before it can be part of it.

pub mod cases;
mod cpu;
mod fuse;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, grid, maybe, only_scalar, require, within_32_bits, word,
};
use crate::recurrence::{Sequences, check_slots};
use crate::rows::cols_bound;
use crate::tensor::Tensor;

const NAME: &str = "token_mix";

/// One line for the registry.
pub const SUMMARY: &str =
    "y[t, g] = x[t] + (x[t - 1] - x[t]) * (lerp[g] + extra[t, g]): blends of neighbouring tokens, with norm before";

/// Threads of a workgroup that norms first. With four channels for each thread, the channels of one token are spread over
/// several cores, each of which computes the sums for itself: cheaper than reading all weights through one core. Calculated.
const NORM_THREADS: usize = 128;

/// The columns are normed first: (x - mean) / sqrt(variance + eps) * weight + bias, as `norm` does it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Norm {
    /// `[width]`.
    pub weight: Tensor,
    /// `[width]`.
    pub bias: Tensor,
    /// Added to the variance.
    pub eps: f32,
    /// Where the normed columns go if anybody else reads them: as `x`, but not `x` itself, which neighbours read too.
    pub y: Option<Tensor>,
}

/// Operands of `token_mix`. All are F32, dense, and begin at multiples of 16 bytes; the width is a multiple of 4.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Tokens `[width, tokens]`.
    pub x: Tensor,
    /// What comes before: the blends are of normed columns then.
    pub norm: Option<Norm>,
    /// The token before the first one of each sequence, `[width, sequences]`, or `[width, any number]` with slots; normed already.
    pub before: Tensor,
    /// How far the blends lean to the token before, `[width, 1, groups]`.
    pub lerp: Tensor,
    /// The same for one more blend, `[width]`.
    pub another: Option<Tensor>,
    /// Added to that for each token, as `y`; may be `y` itself.
    pub extra: Option<Tensor>,
    /// Result `[width, tokens, groups]`, with one more group for `another`.
    pub y: Tensor,
    /// Whether the last token of each sequence takes its place in `before`.
    pub keep: bool,
    /// Which tokens belong together. Results of tokens of no sequence are left alone.
    pub sequences: Sequences,
    /// I32 `[sequences]`, dense: where each sequence's token lies in `before`. A negative one is padding: zeros come before the
    /// sequence, and its last token goes nowhere.
    pub slots: Option<Tensor>,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        before: Address,
        lerp: Address,
        another: Address,
        extra: Address,
        y: Address,
        weight: Address,
        bias: Address,
        normed: Address,
        quads: u32,
        tokens: u32,
        units: u32,
        eps: f32,
        starts: Address,
        slots: Address,
        sequences: u32,
        states: u32,
    }
}

impl Call {
    fn operands(&self) -> impl Iterator<Item = (&'static str, Tensor)> {
        let named = [("x", self.x), ("before", self.before), ("lerp", self.lerp), ("y", self.y)];
        let norm = |part: fn(Norm) -> Option<Tensor>| self.norm.and_then(part);
        let optional = [
            ("another", self.another),
            ("extra", self.extra),
            ("the norm's weight", norm(|norm| Some(norm.weight))),
            ("the norm's bias", norm(|norm| Some(norm.bias))),
            ("the norm's y", norm(|norm| norm.y)),
        ];
        named.into_iter().chain(optional.into_iter().filter_map(|(name, t)| Some((name, t?))))
    }

    fn check_norm(&self, norm: &Norm) -> Result<(), Invalid> {
        let (x, width) = (self.x, self.x.shape[0]);
        for (name, t) in [("weight", norm.weight), ("bias", norm.bias)] {
            require(t.len() == width, NAME, || format!("the norm's {name} is {t}, want F32[{width}]"))?;
        }
        require(norm.eps >= 0.0, NAME, || format!("the norm's eps is {}, want 0 or more", norm.eps))?;
        let apart = norm.y.is_none_or(|y| y.shape == x.shape && y.slot != x.slot);
        require(apart, NAME, || format!("the norm's y is {:?}, want the extents of x {x}, and not in x", norm.y))
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let norm = self.norm.into_iter().flat_map(|norm| [norm.weight, norm.bias]);
        let places = self.sequences.tensor().into_iter().chain(self.slots);
        let operands = [self.x, self.before, self.lerp].into_iter().chain(self.another).chain(self.extra);
        operands.chain(norm).chain(places).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        let normed = self.norm.and_then(|norm| norm.y);
        [self.y].into_iter().chain(normed).chain(self.keep.then_some(self.before)).collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, before, lerp, another, extra, y, .. } = self;
        let [width, tokens, ..] = x.shape;
        require(width > 0 && width.is_multiple_of(4) && x.len() == width * tokens && tokens > 0, NAME, || {
            format!("x is {x}, want [width, tokens] of a width that 4 divides")
        })?;
        for (name, t) in self.operands() {
            let fits = t.ty == TensorType::F32 && t.is_dense() && t.offset.is_multiple_of(16);
            require(fits, NAME, || format!("{name} is {t} at byte {}, want dense F32 at a multiple of 16", t.offset))?;
        }
        self.sequences.check(NAME, tokens)?;
        let states = match self.slots {
            Some(slots) => check_slots(NAME, slots, self.sequences).map(|()| before.shape[1].max(1))?,
            None => self.sequences.count(),
        };
        require(before.shape == [width, states, 1, 1], NAME, || {
            format!("before is {before}, want F32[{width}, {states}]")
        })?;
        let groups = lerp.len() / width;
        require(lerp.len() == width * groups, NAME, || format!("lerp is {lerp}, want F32[{width}, 1, groups]"))?;
        require(another.is_none_or(|t| t.len() == width), NAME, || {
            format!("another is {another:?}, want F32[{width}]")
        })?;
        let shape = [width, tokens, groups + usize::from(another.is_some()), 1];
        require(y.shape == shape, NAME, || format!("y is {y}, want F32{shape:?}"))?;
        require(extra.is_none_or(|t| t.shape == shape), NAME, || format!("extra is {extra:?}, want F32{shape:?}"))?;
        self.norm.map_or(Ok(()), |norm| self.check_norm(&norm))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        within_32_bits(NAME, [self.x.len() * 4, self.y.rows()])?;
        let shader = Shader::new(NAME, "token_mix/token_mix.comp", Params::glsl())
            .define("GROUPS", self.lerp.len() / self.x.shape[0])
            .define("ANOTHER", u32::from(self.another.is_some()))
            .define("EXTRA", u32::from(self.extra.is_some()))
            .define("KEEP", u32::from(self.keep))
            .define("NORM", u32::from(self.norm.is_some()))
            .define("ALONE", u32::from(self.sequences == Sequences::Equal(1) && self.slots.is_none()));
        let Some(norm) = self.norm else {
            let threads = 64;
            let groups = grid((self.x.len() / 4).div_ceil(threads), caps);
            return Ok(Choice::one(Path::Scalar, shader.define("WG", threads), groups));
        };
        let [quads, tokens] = [self.x.shape[0] / 4, self.x.shape[1]];
        let shader = shader.define("COLS_BOUND", cols_bound(quads)).define("NORMED", u32::from(norm.y.is_some()));
        // A software GPU runs threads one after the other: more of them than one subgroup only add barriers.
        let threads = if caps.is_cpu { 32 } else { NORM_THREADS };
        let shader = shader.define("WG", threads).define("SUBGROUPS", u32::from(caps.subgroups.arithmetic));
        // Few tokens are spread over the device's cores; the order of every sum stays the same.
        let slices = quads.div_ceil(threads);
        let sliced = tokens * slices <= caps.cores_or_guess() as usize;
        let groups = if sliced { tokens * slices } else { tokens };
        Ok(Choice::one(Path::Scalar, shader.define("SLICED", u32::from(sliced)), grid(groups, caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let maybe = maybe(at);
        Params {
            x: at(&self.x),
            before: at(&self.before),
            lerp: at(&self.lerp),
            another: maybe(self.another),
            extra: maybe(self.extra),
            y: at(&self.y),
            weight: maybe(self.norm.map(|norm| norm.weight)),
            bias: maybe(self.norm.map(|norm| norm.bias)),
            normed: maybe(self.norm.and_then(|norm| norm.y)),
            quads: word(self.x.shape[0] / 4),
            tokens: word(self.x.shape[1]),
            units: word(self.x.len() / 4),
            eps: self.norm.map_or(0.0, |norm| norm.eps),
            starts: maybe(self.sequences.tensor()),
            slots: maybe(self.slots),
            sequences: word(self.sequences.count()),
            states: word(self.before.shape[1]),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
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
            x: tensor(0, [8, 3, 1, 1]),
            norm: None,
            before: tensor(1, [8, 1, 1, 1]),
            lerp: tensor(2, [8, 1, 2, 1]),
            another: None,
            extra: None,
            y: tensor(3, [8, 3, 2, 1]),
            keep: true,
            sequences: Sequences::Equal(1),
            slots: None,
        };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { x: tensor(0, [6, 3, 1, 1]), ..good }).contains("F32[6, 3]"));
        assert!(reason(Call { before: good.x, ..good }).contains("before"));
        assert!(reason(Call { another: Some(good.before), ..good }).contains("want F32[8, 3, 3, 1]"));
        assert!(reason(Call { extra: Some(good.x), ..good }).contains("extra"));
        let norm = Norm { weight: good.before, bias: good.before, eps: 1e-5, y: Some(tensor(4, good.x.shape)) };
        let normed = |norm: Norm| Call { norm: Some(norm), ..good };
        assert_eq!(normed(norm).check(), Ok(()));
        assert!(reason(normed(Norm { weight: good.x, ..norm })).contains("the norm's weight"));
        assert!(reason(normed(Norm { y: Some(good.x), ..norm })).contains("not in x"));
        assert!(reason(normed(Norm { eps: -1.0, ..norm })).contains("eps"));
    }
}
