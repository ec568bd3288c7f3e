//! `mul_mat_vec`: a matrix of any format times one to sixteen columns. The decode kernel: a generated token is mostly
//! this, so it is bound by reading the weights once.

pub mod cases;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::formats::{self, row_strides};
use crate::host::HostMemory;
use crate::mul_mat::{Epilogue, MOST_COLUMNS, Product};
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, Work, grid, only_scalar, require};
use crate::tensor::Tensor;

const NAME: &str = "mul_mat_vec";

/// One line for the registry.
pub const SUMMARY: &str = "d = scale * a^T b + bias + residual, for 1 to 16 columns and every weight format";

/// Operands of `mul_mat_vec`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// The product; `b` is F32 or F16 with 1 to 16 columns, `d` is F32.
    pub product: Product,
    /// What follows it.
    pub epilogue: Epilogue,
}

impl Call {
    /// The product alone.
    pub fn plain(product: Product) -> Call {
        Call { product, epilogue: Epilogue::default() }
    }
}

kiln_gpu::params! {
    struct Params {
        a: Address,
        b: Address,
        d: Address,
        bias: Address,
        residual: Address,
        a_stride: [u32; 3],
        b_stride: [u32; 3],
        d_stride: [u32; 3],
        residual_stride: [u32; 3],
        b_shape: [u32; 2],
        share: [u32; 2],
        k: u32,
        m: u32,
        scale: f32,
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        self.product.reads(&self.epilogue)
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.product.d]
    }

    fn check(&self) -> Result<(), Invalid> {
        self.product.check(NAME, &self.epilogue)?;
        let columns = self.product.b.shape[1];
        require((1..=MOST_COLUMNS).contains(&columns), NAME, || format!("{columns} columns, at most {MOST_COLUMNS}"))?;
        require(self.product.d.ty == TensorType::F32, NAME, || format!("d is {}, want F32", self.product.d))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let Product { a, b, d } = self.product;
        formats::readable(NAME, &a)?;
        formats::rows_reachable(NAME, &[b, d])?;
        if !matches!(b.ty, TensorType::F32 | TensorType::F16) {
            return Err(Unsupported { operation: NAME, reason: format!("columns of {}; F32 and F16 are read", b.ty) });
        }
        let blocks = a.ty.is_quantised();
        let whole = formats::is_aligned(&b) && a.shape[0].is_multiple_of(4);
        if blocks && !whole {
            return Err(Unsupported { operation: NAME, reason: format!("columns {b} must lie at multiples of 16 bytes") });
        }
        let vectors = !blocks && whole && formats::is_aligned(&a);
        let tuning = Tuning::of(self, caps);
        let shader = Shader::new(format!("{NAME}.{}.scalar", a.ty.name().to_lowercase()), "mul_mat_vec/mul_mat_vec.comp", Params::glsl())
            .define("WG", tuning.threads)
            .define("ROWS", tuning.rows)
            .define("COLS", b.shape[1])
            .define("SUBGROUPS", u32::from(caps.subgroups.arithmetic))
            .define("VECTORS", u32::from(vectors))
            .define("BIAS", u32::from(self.epilogue.bias.is_some()))
            .define("RESIDUAL", u32::from(self.epilogue.residual.is_some()));
        let shader = formats::define(formats::define(shader, "A", a.ty)?, "B", b.ty)?;
        let groups = a.shape[1].div_ceil(tuning.rows) * b.shape[2] * b.shape[3];
        Ok(Choice::one(Path::Scalar, shader, grid(groups, caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let Product { a, b, d } = self.product;
        let Epilogue { bias, residual, scale } = self.epilogue;
        let count = |n: usize| u32::try_from(n).expect("extents fit 32 bits");
        Params {
            a: at(&a),
            b: at(&b),
            d: at(&d),
            bias: bias.as_ref().map_or(Address::default(), at),
            residual: residual.as_ref().map_or(Address::default(), at),
            a_stride: row_strides(&a),
            b_stride: row_strides(&b),
            d_stride: row_strides(&d),
            residual_stride: residual.as_ref().map_or([0; 3], row_strides),
            b_shape: [count(b.shape[2]), count(b.shape[3])],
            share: [count(b.shape[2] / a.shape[2]), count(b.shape[3] / a.shape[3])],
            k: count(a.shape[0]),
            m: count(a.shape[1]),
            scale,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        self.product.work()
    }
}

/// How the work is split.
struct Tuning {
    threads: u32,
    rows: usize,
}

impl Tuning {
    fn of(call: &Call, caps: &Caps) -> Tuning {
        let columns = call.product.b.shape[1];
        if caps.is_cpu {
            // One subgroup: more threads would only wait for each other.
            return Tuning { threads: caps.subgroups.size.max(1), rows: if columns <= 4 { 4 } else { 2 } };
        }
        let threads = caps.subgroups.size.max(32).min(caps.limits.max_workgroup_invocations);
        Tuning { threads, rows: if columns <= 4 { 2 } else { 1 } }
    }
}
