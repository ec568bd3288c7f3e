//! `soft_max`: the softmax of each row of x * scale + slope * mask, with ALiBi slopes and attention sinks.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, grid, only_scalar, reduce_defines, require, rows_apart,
};
use crate::rows::{cols_bound, float_functions, outer, require_whole_strides};
use crate::tensor::Tensor;

const NAME: &str = "soft_max";

/// One line for the registry.
pub const SUMMARY: &str = "softmax(x * scale + slope * mask) per row, with ALiBi and sinks";

/// Operands of `soft_max`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, rows, heads, batch]`, F32, dense rows.
    pub x: Tensor,
    /// Mask `[cols, rows or more, m2, m3]`, F32, F16 or BF16, dense rows: head h of batch b uses `(h % m2, b % m3)`.
    pub mask: Option<Tensor>,
    /// F32 `[heads]`: one more logit per head, which takes part in maximum and sum but has no result.
    pub sinks: Option<Tensor>,
    /// Result, same extents as `x`, F32; may be `x` itself. Rows of nothing but minus infinity give 0.
    pub y: Tensor,
    /// Factor of `x`.
    pub scale: f32,
    /// Steepness of ALiBi: with 0 the mask is added as it is, otherwise times a slope that falls with the head.
    pub max_bias: f32,
}

/// The largest power of two that is not above the number of heads.
fn heads_pow2(heads: usize) -> usize {
    1 << heads.max(1).ilog2()
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        y: Address,
        mask: Address,
        sinks: Address,
        shape: [u32; 3],
        x_stride: [u32; 3],
        y_stride: [u32; 3],
        mask_shape: [u32; 2],
        mask_stride: [u32; 3],
        cols: u32,
        rows: u32,
        heads_pow2: u32,
        scale: f32,
        max_bias: f32,
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        [Some(self.x), self.mask, self.sinks].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, mask, sinks, y, max_bias, .. } = self;
        require(x.shape == y.shape, NAME, || format!("x is {x} but y is {y}"))?;
        require(!x.is_empty(), NAME, || format!("x is {x}: there is nothing to weigh"))?;
        require(x.has_dense_rows() && y.has_dense_rows(), NAME, || "rows of x and y must be dense".into())?;
        require_whole_strides(NAME, x)?;
        require_whole_strides(NAME, y)?;
        if let Some(m) = mask {
            let repeats = (2..4).all(|d| m.shape[d] > 0 && x.shape[d] % m.shape[d] == 0);
            let fits = m.shape[0] == x.shape[0] && m.shape[1] >= x.shape[1] && repeats && m.has_dense_rows();
            require(fits, NAME, || format!("mask is {m}, which does not repeat over x {x}"))?;
            require_whole_strides(NAME, m)?;
        }
        if let Some(s) = sinks {
            let fits = s.len() == x.shape[2] && s.ty == TensorType::F32 && s.is_dense();
            require(fits, NAME, || format!("sinks are {s}, want F32[{}]", x.shape[2]))?;
        }
        require(*max_bias >= 0.0, NAME, || format!("max_bias is {max_bias}, want 0 or more"))?;
        require(*max_bias == 0.0 || mask.is_some(), NAME, || format!("max_bias is {max_bias} but there is no mask"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        for tensor in [&self.x, &self.y] {
            float_functions(NAME, tensor)?;
            if tensor.ty != TensorType::F32 {
                return Err(Unsupported { operation: NAME, reason: format!("x or y is {tensor}, F32 is supported") });
            }
        }
        let load_mask = self.mask.as_ref().map_or(Ok("none"), |m| float_functions(NAME, m).map(|(load, _)| load))?;
        let cols = self.x.shape[0];
        let shader = Shader::new(format!("{NAME}.f32"), "soft_max/soft_max.comp", Params::glsl())
            .define("COLS_BOUND", cols_bound(cols))
            .define("MASK", u32::from(self.mask.is_some()))
            .define("LOAD_MASK", load_mask)
            .define("ALIBI", u32::from(self.max_bias > 0.0))
            .define("SINKS", u32::from(self.sinks.is_some()));
        Ok(Choice::one(Path::Scalar, reduce_defines(shader, cols, caps), grid(self.x.rows(), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let narrow = |n: usize| u32::try_from(n).expect("pick refuses tensors past 32 bits");
        Params {
            x: at(&self.x),
            y: at(&self.y),
            mask: self.mask.as_ref().map_or(Address::default(), at),
            sinks: self.sinks.as_ref().map_or(Address::default(), at),
            shape: outer(self.x.extents()),
            x_stride: outer(self.x.element_strides()),
            y_stride: outer(self.y.element_strides()),
            mask_shape: self.mask.map_or([1, 1], |m| [m.extents()[2], m.extents()[3]]),
            mask_stride: self.mask.map_or([0; 3], |m| outer(m.element_strides())),
            cols: self.x.extents()[0],
            rows: narrow(self.x.rows()),
            heads_pow2: narrow(heads_pow2(self.x.shape[2])),
            scale: self.scale,
            max_bias: self.max_bias,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        let mask = self.mask.map_or(0, |m| m.row_bytes());
        let bytes = self.x.rows() * (self.x.row_bytes() + self.y.row_bytes() + mask);
        Work { bytes: bytes as f64, flops: 5.0 * self.x.len() as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let [cols, rows, _, batch] = self.x.shape;
        // Slopes and sinks go by the head, so the heads stay together.
        rows_apart([cols, rows, 1, batch])
            .map(|[i1, _, i3]| {
                let part = |t: Tensor| t.narrow(1, i1, 1).narrow(3, i3 % t.shape[3], 1);
                Call { x: part(self.x), y: part(self.y), mask: self.mask.map(part), ..*self }.into()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    fn call() -> Call {
        let x = Tensor::dense(Slot(0), TensorType::F32, [16, 3, 4, 2]);
        let mask = Tensor::dense(Slot(1), TensorType::F16, [16, 5, 2, 1]);
        Call { x, mask: Some(mask), sinks: None, y: x, scale: 1.0, max_bias: 8.0 }
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(call().check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        let mask = |shape| Some(Tensor::dense(Slot(1), TensorType::F16, shape));
        assert!(reason(Call { mask: mask([16, 2, 1, 1]), ..call() }).contains("F16[16, 2]"));
        assert!(reason(Call { mask: mask([16, 3, 3, 1]), ..call() }).contains("repeat"));
        assert!(reason(Call { mask: None, ..call() }).contains("no mask"));
        assert!(reason(Call { sinks: mask([4, 1, 1, 1]), ..call() }).contains("want F32[4]"));
        assert!(reason(Call { max_bias: f32::NAN, ..call() }).contains("max_bias"));
    }

    #[test]
    fn the_parameter_block_fits_every_device() {
        let choice = call().pick(&Caps::least(), None).unwrap();
        assert!(call().params(&choice, 0, &|_| Address(0)).len() <= 128);
    }

    #[test]
    fn unsupported_types_and_paths_are_answers() {
        let half = Tensor::dense(Slot(0), TensorType::F16, [16, 3, 4, 2]);
        assert!(Call { x: half, ..call() }.pick(&Caps::least(), None).is_err());
        let whole = Tensor::dense(Slot(1), TensorType::I32, [16, 5, 2, 1]);
        assert!(Call { mask: Some(whole), ..call() }.pick(&Caps::least(), None).is_err());
        assert!(call().pick(&Caps::least(), Some(Path::IntDot)).is_err());
    }
}
