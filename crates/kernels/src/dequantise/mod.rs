//! `dequantise`: the values of a tensor of any format, as dense floats.

pub mod cases;
mod reference;

use kiln_gpu::{Address, Caps, Shader};

use crate::formats;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, element_functions, grid, only_scalar, require, rows_apart,
};
use crate::tensor::Tensor;
use kiln_gguf::TensorType;

const NAME: &str = "dequantise";

/// One line for the registry.
pub const SUMMARY: &str = "dst = the values of src: any format to F32 or F16";

/// Operands of `dequantise`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Source of any format, rows without gaps.
    pub src: Tensor,
    /// Result, F32 or F16, extents of `src`, rows without gaps.
    pub dst: Tensor,
}

/// The kernel.
const FILE: &str = "dequantise/dequantise.comp";

kiln_gpu::params! {
    struct Params {
        src: Address,
        dst: Address,
        shape: [u32; 3],
        src_stride: [u32; 3],
        dst_stride: [u32; 3],
        row_units: u32,
        units: u32,
    }
}

/// How threads share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// Elements that a thread makes at once.
    unit: usize,
    /// Both tensors are one long row.
    flat: bool,
    /// Values go through shared memory on their way to the result.
    staged: bool,
}

impl Call {
    /// A thread that makes 32 elements reads its codes and their scale once; neighbouring threads that store 16 bytes each
    /// write whole lines of memory. Shared memory gives both. Software GPUs take the same form, so that tests see it; to
    /// F32, which has no such form, they make 32 as well, because their threads are slow.
    fn form(&self, caps: &Caps) -> Form {
        let Call { src, dst } = self;
        // The products of the wide form may lose the subnormal values of MXFP4.
        let wide = formats::format(src.ty).is_some_and(|f| f.group > 0) && src.ty.base() != TensorType::MXFP4;
        let fours = src.shape[0].is_multiple_of(4) && formats::is_aligned(src);
        // Formats count the bytes of a row with 32 bits.
        let short = |t: &Tensor| t.is_dense() && u32::try_from(t.span().1).is_ok();
        let flat = short(src) && short(dst);
        let unit = match formats::is_aligned(dst) {
            true if wide && flat && dst.ty == TensorType::F16 && dst.offset.is_multiple_of(16) => {
                return Form { unit: 32, flat, staged: true };
            }
            true if wide && caps.is_cpu => 32,
            true if fours => 4,
            _ => 1,
        };
        Form { unit, flat, staged: false }
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.src]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { src, dst } = self;
        require(src.shape == dst.shape, NAME, || format!("src is {src} but dst is {dst}"))?;
        require(src.has_dense_rows() && dst.has_dense_rows(), NAME, || "rows of src and dst must be dense".into())?;
        let float = matches!(dst.ty, TensorType::F32 | TensorType::F16);
        require(float, NAME, || format!("dst is {dst}, not F32 or F16"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        formats::readable(NAME, &self.src)?;
        let reach = formats::rows_reachable(NAME, &[self.src, self.dst]);
        let Form { unit, flat, staged } = self.form(caps);
        let units = self.src.len() / unit;
        let format = formats::format(self.src.ty).expect("`readable` should have found the format");
        let (threads, per) = formats::split(format, units, caps);
        // A staged unit is worth four others; more of them would leave cores without a workgroup.
        let per = if staged { per.div_ceil(4) } else { per };
        let (_, store) = element_functions(NAME, self.dst.ty)?;
        let name = format!("{NAME}.{}.{}", self.src.ty, self.dst.ty).to_lowercase();
        let shader = Shader::new(name, FILE, Params::glsl())
            .define("WG", threads)
            .define("PER", per)
            .define("UNIT", unit)
            .define("FLAT", u32::from(flat))
            .define("STAGED", u32::from(staged))
            .define("STORE_D", store)
            .define("PUT4_D", store.replace("store", "put4"));
        let shader = formats::define(shader, "A", self.src.ty)?;
        let groups = units.div_ceil(threads as usize * per);
        reach.map(|()| Choice::one(Path::Scalar, shader, grid(groups, caps)))
    }

    fn params(&self, choice: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let [cols, shape @ ..] = self.dst.extents();
        let row_units = cols / formats::defined(choice, "UNIT") as u32;
        Params {
            src: at(&self.src),
            dst: at(&self.dst),
            shape,
            src_stride: formats::row_strides(&self.src),
            dst_stride: formats::row_strides(&self.dst),
            row_units,
            units: row_units * self.dst.rows() as u32,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn parts(&self) -> Vec<crate::Call> {
        let row = crate::elementwise::row;
        rows_apart(self.dst.shape).map(|i| Call { src: row(self.src, i), dst: row(self.dst, i) }.into()).collect()
    }
}
