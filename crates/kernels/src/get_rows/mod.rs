//! `get_rows`: rows of a table of any format, chosen by ids: token embeddings, positions, experts' biases.

pub mod cases;
mod cpu;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::formats;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, element_functions, grid, only_scalar, require, rows_apart,
};
use crate::tensor::Tensor;

const NAME: &str = "get_rows";

/// One line for the registry.
pub const SUMMARY: &str = "dst row i = values of src row ids[i]: any format to F32 or F16";

/// Operands of `get_rows`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Table `[cols, rows, n11, n12]` of any format, rows without gaps.
    pub src: Tensor,
    /// Row numbers `[n10, n11, n12]`, I32, any strides. One outside of `src` gives a row of zeros.
    pub ids: Tensor,
    /// Result `[cols, n10, n11, n12]`, F32 or F16, rows without gaps.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        src: Address,
        ids: Address,
        dst: Address,
        shape: [u32; 3],
        src_stride: [u32; 3],
        ids_stride: [u32; 3],
        dst_stride: [u32; 3],
        src_rows: u32,
        row_units: u32,
        units: u32,
    }
}

impl Call {
    /// The ids with the extents of the result's rows, so that one index serves both.
    fn ids_as_rows(&self) -> Tensor {
        self.ids.permute([3, 0, 1, 2])
    }

    fn unit(&self) -> usize {
        let aligned = formats::is_aligned(&self.src) && formats::is_aligned(&self.dst);
        if aligned && self.dst.shape[0].is_multiple_of(4) { 4 } else { 1 }
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.src, self.ids]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { src, ids, dst } = self;
        let fits = src.shape[0] == dst.shape[0] && src.shape[2..] == dst.shape[2..];
        require(fits, NAME, || format!("src is {src} but dst is {dst}"))?;
        let shape = [dst.shape[1], dst.shape[2], dst.shape[3], 1];
        require(ids.shape == shape, NAME, || format!("ids are {ids} but dst is {dst}"))?;
        require(ids.ty == TensorType::I32, NAME, || format!("ids are {ids}, not I32"))?;
        require(src.has_dense_rows() && dst.has_dense_rows(), NAME, || "rows of src and dst must be dense".into())?;
        let float = matches!(dst.ty, TensorType::F32 | TensorType::F16);
        require(float, NAME, || format!("dst is {dst}, not F32 or F16"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        formats::readable(NAME, &self.src)?;
        // Of src only single rows are reached; how many there are does not matter.
        let one_row = self.src.narrow(1, 0, self.src.shape[1].min(1));
        formats::rows_reachable(NAME, &[one_row, self.ids_as_rows(), self.dst])?;
        if u32::try_from(self.src.stride[1]).is_err() {
            return Err(Unsupported { operation: NAME, reason: format!("rows of {} bytes", self.src.stride[1]) });
        }
        let units = self.dst.len() / self.unit();
        let format = formats::format(self.src.ty).expect("`readable` should have found the format");
        let (threads, per) = formats::split(format, units, caps);
        let (_, store) = element_functions(NAME, self.dst.ty)?;
        let name = format!("{NAME}.{}.{}", self.src.ty, self.dst.ty).to_lowercase();
        let shader = Shader::new(name, "get_rows/get_rows.comp", Params::glsl())
            .define("WG", threads)
            .define("PER", per)
            .define("UNIT", self.unit())
            .define("STORE_D", store)
            .define("PUT4_D", store.replace("store", "put4"));
        let shader = formats::define(shader, "A", self.src.ty)?;
        let groups = units.div_ceil(threads as usize * per);
        Ok(Choice::one(Path::Scalar, shader, grid(groups, caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let [cols, shape @ ..] = self.dst.extents();
        let row_units = cols / self.unit() as u32;
        Params {
            src: at(&self.src),
            ids: at(&self.ids),
            dst: at(&self.dst),
            shape,
            src_stride: formats::row_strides(&self.src),
            ids_stride: formats::row_strides(&self.ids_as_rows()),
            dst_stride: formats::row_strides(&self.dst),
            // Ids are signed: rows past 2^31 cannot be named.
            src_rows: self.src.shape[1].min(i32::MAX as usize) as u32,
            row_units,
            units: row_units * self.dst.rows() as u32,
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
        let read = self.dst.rows() * (self.src.row_bytes() + 4);
        Work { bytes: (read + self.dst.rows() * self.dst.row_bytes()) as f64, flops: self.dst.len() as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |[i1, i2, i3]: [usize; 3]| {
            let src = self.src.narrow(2, i2, 1).narrow(3, i3, 1);
            let ids = self.ids.narrow(0, i1, 1).narrow(1, i2, 1).narrow(2, i3, 1);
            let dst = crate::elementwise::row(self.dst, [i1, i2, i3]);
            Call { src, ids, dst }.into()
        };
        rows_apart(self.dst.shape).map(part).collect()
    }
}
