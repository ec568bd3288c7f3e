//! `rms_norm`: divides each row by its root mean square, then multiplies by a weight row if there is one.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, element_functions, grid, only_scalar, reduce_defines, require,
};
use crate::tensor::Tensor;

const NAME: &str = "rms_norm";

/// One line for the registry.
pub const SUMMARY: &str = "y = x / sqrt(mean(x^2) + eps) * weight, per row";

/// Operands of `rms_norm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Input `[cols, ..]`, F32 or F16, dense rows.
    pub x: Tensor,
    /// Weight `[cols]`, F32.
    pub weight: Option<Tensor>,
    /// Result, same extents as `x`, F32 or F16; may be `x` itself.
    pub y: Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        y: Address,
        weight: Address,
        shape: [u32; 3],
        x_stride: [u32; 3],
        y_stride: [u32; 3],
        cols: u32,
        rows: u32,
        eps: f32,
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        [Some(self.x), self.weight].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { x, weight, y, .. } = self;
        require(x.shape == y.shape, NAME, || format!("x is {x} but y is {y}"))?;
        require(x.has_dense_rows() && y.has_dense_rows(), NAME, || "rows of x and y must be dense".into())?;
        if let Some(w) = weight {
            let fits = w.len() == x.shape[0] && w.ty == TensorType::F32 && w.is_dense();
            require(fits, NAME, || format!("weight is {w}, want F32[{}]", x.shape[0]))?;
        }
        Ok(())
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let (load_x, _) = element_functions(NAME, self.x.ty)?;
        let (_, store_y) = element_functions(NAME, self.y.ty)?;
        let name = format!("{NAME}.{}", self.x.ty.name().to_lowercase());
        let shader = Shader::new(name, "rms_norm/rms_norm.comp", Params::glsl())
            .define("LOAD_X", load_x)
            .define("STORE_Y", store_y)
            .define("WEIGHT", u32::from(self.weight.is_some()));
        Ok(Choice::one(Path::Scalar, reduce_defines(shader, self.x.shape[0], caps), grid(self.x.rows(), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let outer = |all: [u32; 4]| [all[1], all[2], all[3]];
        Params {
            x: at(&self.x),
            y: at(&self.y),
            weight: self.weight.as_ref().map_or(Address::default(), at),
            shape: outer(self.x.extents()),
            x_stride: outer(self.x.element_strides()),
            y_stride: outer(self.y.element_strides()),
            cols: self.x.extents()[0],
            rows: u32::try_from(self.x.rows()).expect("rows fit 32 bits"),
            eps: self.eps,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        let bytes = (self.x.rows() * (self.x.row_bytes() + self.y.row_bytes())) as f64;
        Work { bytes, flops: 4.0 * self.x.len() as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        crate::operation::rows_apart(self.x.shape)
            .map(|[i1, i2, i3]| {
                let row = |t: Tensor| t.narrow(1, i1, 1).narrow(2, i2, 1).narrow(3, i3, 1);
                Call { x: row(self.x), y: row(self.y), ..*self }.into()
            })
            .collect()
    }
}
