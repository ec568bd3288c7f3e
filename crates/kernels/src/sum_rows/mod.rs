//! `sum_rows`: the sum of each row.

pub mod cases;
mod cpu;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::binary::Operator;
use crate::elementwise::{row, rows_addressable, strides};
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, grid, only_scalar, reduce_defines, require, rows_apart,
};
use crate::tensor::Tensor;

const NAME: &str = "sum_rows";

/// Rows of so few elements have a thread each instead of a workgroup. Where rows lie side by side, as the results of a token's
/// experts do, neighbouring threads then read neighbouring elements.
const SHORT: usize = 32;
/// Threads of a workgroup of theirs.
const THREADS: u32 = 128;

/// One line for the registry.
pub const SUMMARY: &str = "dst = sum of each row of x, which may be weighed";

/// Operands of `sum_rows`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32, any strides.
    pub x: Tensor,
    /// Result `[1, ..]`, F32.
    pub dst: Tensor,
    /// F32 `[cols, 1, ..]` with dense rows: what the elements are multiplied by first, the same for all rows of dimension 1.
    pub weights: Option<Tensor>,
}

impl Call {
    /// This sum of products of `previous`: the results of experts, each times its weight.
    pub(crate) fn before(&self, previous: &crate::Call) -> Option<Call> {
        let crate::Call::Binary(mul) = previous else { return None };
        let [cols, _, n2, n3] = self.x.shape;
        let turned = |t: Tensor| t.permute([1, 0, 2, 3]);
        let fits = mul.operator == Operator::Mul
            && self.weights.is_none()
            && turned(mul.dst) == self.x
            && mul.a.shape == mul.dst.shape
            && mul.b.shape == [1, cols, n2, n3]
            && mul.b.is_dense();
        let weights = fits.then(|| mul.b.reshape([cols, 1, n2, n3]));
        weights.map(|weights| Call { x: turned(mul.a), weights: Some(weights), ..*self })
    }
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        dst: Address,
        outer: [u32; 3],
        x_stride: [u32; 4],
        dst_stride: [u32; 4],
        cols: u32,
        rows: u32,
        weights: Address,
        weights_stride: [u32; 2],
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        [Some(self.x), self.weights].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, dst, .. } = self;
        let fits = dst.shape[0] == 1 && dst.shape[1..] == x.shape[1..];
        require(fits, NAME, || format!("x is {x} but dst is {dst}, want one element for each row"))?;
        let Some(w) = self.weights else { return Ok(()) };
        let fits = w.ty == TensorType::F32 && w.has_dense_rows() && w.shape == [x.shape[0], 1, x.shape[2], x.shape[3]];
        require(fits, NAME, || format!("weights are {w} for {x}"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        rows_addressable(NAME, &[self.x, self.dst])?;
        if self.x.ty != TensorType::F32 || self.dst.ty != TensorType::F32 {
            return Err(Unsupported { operation: NAME, reason: format!("{} to {} (F32 only)", self.x, self.dst) });
        }
        let shader = |name: &str| Shader::new(format!("{NAME}.{name}"), "sum_rows/sum_rows.comp", Params::glsl());
        if self.x.shape[0] <= SHORT {
            let threads = THREADS.min(caps.limits.max_workgroup_invocations).min(caps.limits.max_workgroup_size[0]);
            let weights = u32::from(self.weights.is_some());
            let shader = shader("each.f32").define("EACH", 1).define("WEIGHTS", weights).define("WG", threads);
            return Ok(Choice::one(Path::Scalar, shader, grid(self.x.rows().div_ceil(threads as usize), caps)));
        }
        if self.weights.is_some() {
            let reason = format!("weights of rows of {}, at most {SHORT}", self.x.shape[0]);
            return Err(Unsupported { operation: NAME, reason });
        }
        let shader = shader("f32").define("EACH", 0);
        Ok(Choice::one(Path::Scalar, reduce_defines(shader, self.x.shape[0], caps), grid(self.x.rows(), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let [cols, n1, n2, n3] = self.x.extents();
        Params {
            x: at(&self.x),
            dst: at(&self.dst),
            outer: [n1, n2, n3],
            x_stride: strides(&self.x),
            dst_stride: strides(&self.dst),
            cols,
            rows: u32::try_from(self.x.rows()).expect("`rows_addressable` should have refused more rows"),
            weights: self.weights.as_ref().map_or(Address::default(), at),
            weights_stride: self.weights.map_or([0; 2], |w| [strides(&w)[2], strides(&w)[3]]),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |i: [usize; 3]| {
            let weights = self.weights.map(|weights| row(weights, [0, i[1], i[2]]));
            Call { x: row(self.x, i), dst: row(self.dst, i), weights }.into()
        };
        rows_apart(self.x.shape).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    #[test]
    fn one_sum_for_each_row() {
        let t = |ty, shape| Tensor::dense(Slot(0), ty, shape);
        let call = Call { x: t(TensorType::F32, [8, 3, 2, 1]), dst: t(TensorType::F32, [1, 3, 2, 1]), weights: None };
        assert_eq!(call.check(), Ok(()));
        assert!(Call { dst: t(TensorType::F32, [8, 3, 2, 1]), ..call }.check().is_err());
        assert!(Call { dst: t(TensorType::F32, [1, 6, 1, 1]), ..call }.check().is_err());
        assert!(Call { x: t(TensorType::F16, [8, 3, 2, 1]), ..call }.pick(&Caps::least(), None).is_err());
    }
}
