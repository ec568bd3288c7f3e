//! `set_rows`: writes rows to places chosen by ids, converted to the type of the destination: how caches are filled.

pub mod cases;
mod cpu;
pub(crate) mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::formats;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, element_functions, grid, only_scalar, require, rows_apart,
};
use crate::tensor::Tensor;

const NAME: &str = "set_rows";

/// One line for the registry.
pub const SUMMARY: &str = "dst row ids[i] = src row i, converted: F32 or F16 to floats and simple block types";

/// Operands of `set_rows`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Source `[cols, n1, n2, n3]`, F32 or F16, rows without gaps.
    pub src: Tensor,
    /// Row numbers `[n1, a, b]`, I32 or I64, any strides; a divides n2 and b divides n3, where they repeat. A number
    /// outside of `dst` drops the row. No number may occur twice in a batch.
    pub ids: Tensor,
    /// Result `[cols, rows, n2, n3]`, rows without gaps: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or IQ4_NL.
    /// Rows that no id names stay as they are. What F16 cannot hold becomes its largest number, 65504, as the scales of blocks do.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        src: Address,
        ids: Address,
        dst: Address,
        shape: [u32; 3],
        src_stride: [u32; 3],
        ids_shape: [u32; 2],
        ids_stride: [u32; 3],
        dst_stride: [u32; 3],
        dst_rows: u32,
        row_units: u32,
        units: u32,
    }
}

/// The block types that shaders can write.
pub(crate) const BLOCK_TYPES: [TensorType; 6] =
    [TensorType::Q8_0, TensorType::Q4_0, TensorType::Q4_1, TensorType::Q5_0, TensorType::Q5_1, TensorType::IQ4_NL];

/// The GLSL function that writes an element of a cache of plain floats: F16 saturates.
pub(crate) fn cache_store(operation: &'static str, ty: TensorType) -> Result<&'static str, Unsupported> {
    let (_, store) = element_functions(operation, ty)?;
    Ok(if ty == TensorType::F16 { "store_f16_saturated" } else { store })
}

/// The work without the ids' values: what `set_rows` and the conversions of `copy` launch.
pub(crate) struct Conversion {
    /// The operation it is done for.
    pub operation: &'static str,
    /// Source rows.
    pub src: Tensor,
    /// Where rows go; none for every row at its own place.
    pub ids: Option<Tensor>,
    /// Result.
    pub dst: Tensor,
}

impl Conversion {
    fn blocks(&self) -> bool {
        BLOCK_TYPES.contains(&self.dst.ty)
    }

    /// Whether rows take vectors of four elements.
    fn fours(&self) -> bool {
        let plain = |t: &Tensor| formats::is_aligned(t) && t.shape[0].is_multiple_of(4);
        plain(&self.src) && (self.blocks() || plain(&self.dst))
    }

    fn unit(&self) -> usize {
        match (self.blocks(), self.fours()) {
            (true, _) => 32,
            (false, true) => 4,
            (false, false) => 1,
        }
    }

    pub(crate) fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        let Conversion { operation, src, ids, dst } = *self;
        only_scalar(operation, want)?;
        if !matches!(src.ty, TensorType::F32 | TensorType::F16) {
            return Err(Unsupported { operation, reason: format!("from {} (F32 and F16 can be converted)", src.ty) });
        }
        let one_row = dst.narrow(1, 0, dst.shape[1].min(1));
        formats::rows_reachable(operation, &[src, one_row])?;
        if let Some(ids) = ids {
            formats::rows_reachable(operation, &[ids.permute([3, 0, 1, 2])])?;
        }
        if u32::try_from(dst.stride[1]).is_err() {
            return Err(Unsupported { operation, reason: format!("rows of {} bytes", dst.stride[1]) });
        }
        let threads = caps.limits.max_workgroup_invocations.min(if caps.is_cpu { 64 } else { 128 });
        let id_bits = ids.map_or(0, |ids| 8 * ids.ty.block_bytes());
        let name = format!("{operation}.{}.{}", src.ty, dst.ty).to_lowercase();
        let shader = Shader::new(name, "set_rows/set_rows.comp", Params::glsl())
            .define("WG", threads)
            .define("UNIT", self.unit())
            .define("IDS", id_bits)
            .define("FOURS", u32::from(self.fours()))
            .define("BLOCKS", u32::from(self.blocks()));
        let shader = formats::define(shader, "S", src.ty)?;
        let shader = if self.blocks() {
            formats::readable(operation, &dst)?;
            shader
                .define("ENCODE", format!("encode_{}", dst.ty.name().to_lowercase()))
                .define("BLOCK_BYTES", dst.ty.block_bytes())
        } else {
            let store =
                if ids.is_some() { cache_store(operation, dst.ty)? } else { element_functions(operation, dst.ty)?.1 };
            if dst.ty == TensorType::I32 {
                return Err(Unsupported { operation, reason: "floats to I32".into() });
            }
            shader.define("STORE_D", store).define("PUT4_D", store.replace("store", "put4"))
        };
        let groups = (src.len() / self.unit()).div_ceil(threads as usize);
        Ok(Choice::one(Path::Scalar, shader, grid(groups, caps)))
    }

    pub(crate) fn params(&self, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let [cols, shape @ ..] = self.src.extents();
        let row_units = cols / self.unit() as u32;
        let rows = self.ids.map(|ids| ids.permute([3, 0, 1, 2]));
        Params {
            src: at(&self.src),
            ids: self.ids.map(|ids| at(&ids)).unwrap_or_default(),
            dst: at(&self.dst),
            shape,
            src_stride: formats::row_strides(&self.src),
            ids_shape: rows.map_or([1, 1], |r| [r.extents()[2], r.extents()[3]]),
            ids_stride: rows.map_or([0; 3], |r| formats::row_strides(&r)),
            dst_stride: formats::row_strides(&self.dst),
            // Ids of 32 bits are signed: as unsigned numbers the negative ones lie above this.
            dst_rows: self.dst.shape[1].min(i32::MAX as usize) as u32,
            row_units,
            units: row_units * self.src.rows() as u32,
        }
        .bytes()
    }
}

impl Call {
    fn conversion(&self) -> Conversion {
        Conversion { operation: NAME, src: self.src, ids: Some(self.ids), dst: self.dst }
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
        let repeats = |n: usize, whole: usize| n > 0 && whole.is_multiple_of(n);
        let ids_fit = ids.shape[0] == src.shape[1]
            && repeats(ids.shape[1], src.shape[2])
            && repeats(ids.shape[2], src.shape[3])
            && ids.shape[3] == 1;
        require(ids_fit, NAME, || format!("ids are {ids} but src is {src}"))?;
        let integers = matches!(ids.ty, TensorType::I32 | TensorType::I64);
        require(integers, NAME, || format!("ids are {ids}, not I32 or I64"))?;
        require(src.has_dense_rows() && dst.has_dense_rows(), NAME, || "rows of src and dst must be dense".into())
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        self.conversion().pick(caps, want)
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        self.conversion().params(at)
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        cpu::compute(self, memory);
    }

    fn work(&self) -> Work {
        let written = self.src.rows() * self.dst.row_bytes();
        Work { bytes: (self.src.rows() * self.src.row_bytes() + written) as f64, flops: self.src.len() as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |[i1, i2, i3]: [usize; 3]| {
            let src = crate::elementwise::row(self.src, [i1, i2, i3]);
            let (a, b) = (i2 % self.ids.shape[1], i3 % self.ids.shape[2]);
            let ids = self.ids.narrow(0, i1, 1).narrow(1, a, 1).narrow(2, b, 1);
            let dst = self.dst.narrow(2, i2, 1).narrow(3, i3, 1);
            Call { src, ids, dst }.into()
        };
        rows_apart(self.src.shape).map(part).collect()
    }
}
