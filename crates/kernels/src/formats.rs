//! Which GLSL file and functions read a tensor type on the device. What the bits mean is in `glsl/formats/`, one file a
//! format; the interface of all of them is described in `glsl/formats/codes.glsl`.

use half::f16;
use kiln_gguf::{TensorType, quant};
use kiln_gpu::{Caps, Shader};

use crate::case::{Data, Random};
use crate::operation::{Choice, Unsupported};
use crate::tensor::Tensor;

/// How a tensor type is read by shaders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The type.
    pub ty: TensorType,
    /// The file, as shaders name it.
    pub file: &'static str,
    /// What the names of its functions begin with; macros of the format begin with the same in capitals.
    pub prefix: &'static str,
    /// Elements that share one scale, 16 or 32 (a longer run counts as 32); 0 for plain types, which have no scales.
    pub group: usize,
    /// Whether values have a minimum: value = scale * code + minimum, else value = scale * code.
    pub has_min: bool,
    /// What the addresses of rows must be a multiple of. Plain types: for `load4` only, `load` takes any element.
    pub align: usize,
    /// Bytes of shared memory the format's table takes.
    pub shared_bytes: usize,
    /// What the codes of `raw32` are too large by; 0 where the format has no such function.
    pub bias: u32,
}

macro_rules! formats {
    ($($ty:ident $prefix:literal $group:literal $has_min:literal $align:literal $shared:literal $($bias:literal)?;)*) => {
        &[$(Format {
            ty: TensorType::$ty,
            file: concat!("formats/", $prefix, ".glsl"),
            prefix: $prefix,
            group: $group,
            has_min: $has_min,
            align: $align,
            shared_bytes: $shared,
            bias: 0 $(+ $bias)?,
        }),*]
    };
}

/// The formats of weights in files.
pub(crate) fn of_files() -> impl Iterator<Item = TensorType> {
    FORMATS.iter().map(|format| format.ty).filter(|ty| !ty.is_packed() && *ty != TensorType::I32)
}

/// The formats of weights, packed where a GPU packs rows of this many elements.
pub(crate) fn on_a_gpu(len: usize) -> impl Iterator<Item = TensorType> {
    of_files().map(move |ty| kiln_gguf::quant::packed_type(ty, len).unwrap_or(ty))
}

/// Every format that shaders can read.
pub const FORMATS: &[Format] = formats! {
    // type, prefix, elements of a scale, minimum, alignment of rows, bytes of shared memory, what raw codes are too large by
    F32 "f32" 0 false 16 0;
    F16 "f16" 0 false 8 0;
    BF16 "bf16" 0 false 8 0;
    I32 "i32" 0 false 16 0;
    Q1_0 "q1_0" 32 false 2 0;
    Q2_0 "q2_0" 32 false 2 0;
    Q4_0 "q4_0" 32 false 2 0;
    Q4_1 "q4_1" 32 true 4 0;
    Q5_0 "q5_0" 32 false 2 0;
    Q5_1 "q5_1" 32 true 4 0;
    Q8_0 "q8_0" 32 false 2 0;
    Q8_1 "q8_1" 32 false 4 0;
    Q2_K "q2_k" 16 true 4 0;
    Q3_K "q3_k" 16 false 2 0;
    Q4_K "q4_k" 32 true 16 0;
    Q5_K "q5_k" 32 true 16 0;
    Q6_K "q6_k" 16 false 2 0;
    Q8_K "q8_k" 32 false 4 0;
    IQ1_S "iq1_s" 32 false 2 4096;
    IQ1_M "iq1_m" 16 false 8 4096;
    IQ2_XXS "iq2_xxs" 32 false 2 512;
    IQ2_XS "iq2_xs" 16 false 2 1024;
    IQ2_S "iq2_s" 16 false 2 2048;
    IQ3_XXS "iq3_xxs" 32 false 2 1024;
    IQ3_S "iq3_s" 32 false 2 2048;
    IQ4_NL "iq4_nl" 32 false 2 1024;
    IQ4_XS "iq4_xs" 32 false 8 1024;
    TQ1_0 "tq1_0" 32 false 2 0;
    TQ2_0 "tq2_0" 32 false 2 0;
    MXFP4 "mxfp4" 32 false 1 0;
    NVFP4 "nvfp4" 16 false 4 0;
    Q4_0x8 "q4_0x8" 32 false 16 0 8;
    Q8_0x8 "q8_0x8" 32 false 16 0;
    Q4_1x4 "q4_1x4" 32 true 16 0;
    Q5_0x8 "q5_0x8" 32 false 16 0 16;
    Q5_1x4 "q5_1x4" 32 true 16 0;
    IQ4_NLx8 "iq4_nlx8" 32 false 16 1024;
    Q3_Kx1 "q3_kx1" 16 false 16 0 4;
    Q6_Kx8 "q6_kx8" 16 false 16 0 32;
    Q6_Kx2 "q6_kx2" 16 false 16 0 32;
    Q6_Kx1 "q6_kx1" 16 false 16 0 32;
    MXFP4x16 "mxfp4x16" 32 false 16 0;
    MXFP4x30 "mxfp4x30" 32 false 16 0;
    NVFP4x4 "nvfp4x4" 16 false 16 0;
};

/// Groups of 32 elements in a piece, for the formats that keep loading and unfolding apart.
fn piece_groups(ty: TensorType) -> usize {
    use TensorType::*;
    match ty {
        Q4_K | Q5_K => 2,
        _ if ty.is_packed() => 1,
        NVFP4 => 1,
        _ => 0,
    }
}

/// Whether every weight of a format is a whole number, of up to eight bits, times a scale that is a half.
pub(crate) fn has_half_scales(ty: TensorType) -> bool {
    use TensorType::{IQ4_NL, Q1_0, Q2_0, Q4_0, Q5_0, Q8_0};
    matches!(ty.base(), Q1_0 | Q2_0 | Q4_0 | Q5_0 | Q8_0 | IQ4_NL)
}

/// The format of a type, if shaders can read it.
pub fn format(ty: TensorType) -> Option<&'static Format> {
    FORMATS.iter().find(|format| format.ty == ty)
}

/// Whether the rows of a tensor lie as `load4` and the functions on blocks want them. Slots begin at multiples of 256.
pub fn is_aligned(tensor: &Tensor) -> bool {
    let aligned = |bytes: usize| format(tensor.ty).is_some_and(|f| bytes.is_multiple_of(f.align));
    aligned(tensor.offset) && (1..4).all(|d| tensor.shape[d] == 1 || aligned(tensor.stride[d]))
}

/// Adds the functions of a type to a shader that has `#include "formats.glsl"`, under the names of operand `letter`:
/// `A_LOAD`, `A_LOAD4`, `A_INIT`, and for block types `A_CODES4`, `A_SCALE`, `A_GROUP32`, `A_RAW32` (functions), `A_GROUP`,
/// `A_BLOCK`, `A_BLOCK_BYTES`, `A_BIAS` (numbers), `A_HAS_MIN` (1 where values have a minimum). `A_PIECE` is the number of
/// groups in a piece, and where it is not 0 there are `A_PIECE_TYPE`, `A_FETCH` and `A_UNFOLD`; where `A_PARTS` is 1 also `A_FACTOR`,
/// `A_PARTS_OF` and, for codes of four bits, `A_NIBBLES`. `A_BLOCKS` is 1 for block
/// types and 0 for plain ones.
pub fn define(shader: Shader, letter: &str, ty: TensorType) -> Result<Shader, Unsupported> {
    let Some(format) = format(ty) else {
        return Err(Unsupported { operation: "formats", reason: format!("no shader reads {ty}") });
    };
    let function = |shader: Shader, name: &str, function: &str| {
        shader.define(&format!("{letter}_{name}"), format!("{}_{function}", format.prefix))
    };
    let mut shader = shader.format(format.file);
    for (name, of) in [("LOAD", "load"), ("LOAD4", "load4"), ("INIT", "init")] {
        shader = function(shader, name, of);
    }
    let blocks = format.group > 0;
    shader = shader.define(&format!("{letter}_BLOCKS"), u32::from(blocks));
    if !blocks {
        return Ok(shader);
    }
    let raw = if format.bias > 0 { "raw32" } else { "group32" };
    for (name, of) in [("CODES4", "codes4"), ("SCALE", "scale"), ("GROUP32", "group32"), ("RAW32", raw)] {
        shader = function(shader, name, of);
    }
    let piece = piece_groups(ty);
    if piece > 0 {
        for (name, of) in [("PIECE_TYPE", "piece"), ("FETCH", "fetch"), ("UNFOLD", "unfold")] {
            shader = function(shader, name, of);
        }
    }
    let parts = matches!(ty, TensorType::Q4_K | TensorType::Q5_K);
    if parts {
        for (name, of) in [("PARTS_OF", "parts"), ("FACTOR", "factor"), ("NIBBLES", "nibbles")] {
            shader = function(shader, name, of);
        }
    }
    let numbers = [
        ("PIECE", piece),
        ("PARTS", usize::from(parts)),
        ("GROUP", format.group),
        ("BLOCK", ty.block_len()),
        ("BLOCK_BYTES", ty.block_bytes()),
        ("HAS_MIN", usize::from(format.has_min)),
        ("BIAS", format.bias as usize),
    ];
    Ok(numbers.iter().fold(shader, |shader, (name, n)| shader.define(&format!("{letter}_{name}"), n)))
}

/// Refuses tensors that the functions of their format cannot read.
pub(crate) fn readable(operation: &'static str, tensor: &Tensor) -> Result<(), Unsupported> {
    let Some(format) = format(tensor.ty) else {
        return Err(Unsupported { operation, reason: format!("no shader reads {}", tensor.ty) });
    };
    if format.group > 0 && !is_aligned(tensor) {
        let reason = format!(
            "{tensor}: offset {} and strides {:?} must be multiples of {}",
            tensor.offset, tensor.stride, format.align
        );
        return Err(Unsupported { operation, reason });
    }
    Ok(())
}

/// Byte strides of dimensions 1 to 3 as kernels take them; 0 where a dimension has one element.
pub(crate) fn row_strides(tensor: &Tensor) -> [u32; 3] {
    let stride = |d: usize| if tensor.shape[d] > 1 { tensor.stride[d] } else { 0 };
    [1, 2, 3].map(|d| u32::try_from(stride(d)).expect("`rows_reachable` should have refused longer strides"))
}

/// Refuses tensors whose elements cannot be counted with 32 bits, or whose rows lie more than 4 GiB apart.
pub(crate) fn rows_reachable(operation: &'static str, tensors: &[Tensor]) -> Result<(), Unsupported> {
    for t in tensors {
        let strides = (1..4).filter(|&d| t.shape[d] > 1).map(|d| t.stride[d]);
        let plain = t.ty.block_len() == 1;
        if plain && strides.clone().chain([t.offset]).any(|s| !s.is_multiple_of(t.ty.block_bytes())) {
            let reason = format!("{t}: offset {} and strides {:?} split elements", t.offset, t.stride);
            return Err(Unsupported { operation, reason });
        }
        if let Some(n) = strides.chain([t.len()]).max().filter(|&n| u32::try_from(n).is_err()) {
            let reason = format!("{t} needs the number {n}, beyond 32 bits: split the tensor");
            return Err(Unsupported { operation, reason });
        }
    }
    Ok(())
}

/// Threads of a workgroup and units of a thread, for kernels that spread `units` over threads. Filling a table costs a
/// workgroup as much as hundreds of elements, so formats with one give their threads more to do.
pub(crate) fn split(format: &Format, units: usize, caps: &Caps) -> (u32, usize) {
    let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]);
    let threads = limit.min(if caps.is_cpu { 64 } else { 128 });
    let per = if format.shared_bytes > 0 { (units / (threads as usize * 512)).clamp(1, 16) } else { 1 };
    (threads, per)
}

/// The number that a shader's macro stands for.
pub(crate) fn defined(choice: &Choice, name: &str) -> usize {
    let defines = &choice.launches[0].shader.defines;
    let value = defines.iter().find(|(n, _)| n == name).and_then(|(_, value)| value.parse().ok());
    value.expect("`pick` should have defined the number that `params` asks for")
}

/// A dense input for cases: random codes, and scales that are ordinary, zero, negative, subnormal and the largest.
/// Without `extreme`, scales are ordinary, so that values stay in the range of f16.
pub(crate) fn random_blocks(data: &mut Data, ty: TensorType, shape: [usize; 4], extreme: bool) -> Tensor {
    if ty.block_len() == 1 {
        return data.input_with(ty, shape, |random, _| random.uniform(-300.0, 300.0));
    }
    let tensor = data.output(ty, shape);
    if data.is_blank() {
        return tensor;
    }
    let blocks = random_bytes(&mut data.random, ty.base(), tensor.len() / ty.base().block_len(), extreme);
    let bytes = data.memory.bytes_mut(tensor.slot);
    if ty.is_packed() {
        quant::pack(ty, &blocks, bytes).expect("rows are whole blocks");
    } else {
        bytes.copy_from_slice(&blocks);
    }
    tensor
}

fn random_bytes(random: &mut Random, ty: TensorType, blocks: usize, extreme: bool) -> Vec<u8> {
    let mut bytes = vec![0; blocks * ty.block_bytes()];
    for (i, block) in bytes.chunks_exact_mut(ty.block_bytes()).enumerate() {
        match i % 8 {
            3 if extreme => block.fill(0x00),
            5 if extreme => block.fill(0xff),
            _ => block.iter_mut().for_each(|b| *b = random.bits() as u8),
        }
        const HALVES: [f32; 8] = [0.01, -0.02, 0.0, 6e-8, -3e-7, 65504.0, 1e-4, -1.0];
        let half = |random: &mut Random| {
            let ordinary = f16::from_f64(random.uniform(-0.01, 0.01));
            if extreme { [ordinary, f16::from_f32(HALVES[i % 8])][random.below(2)] } else { ordinary }
        };
        let at: &[usize] = match ty {
            TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q8_1 | TensorType::Q4_K | TensorType::Q5_K => &[0, 2],
            TensorType::Q2_K => &[80, 82],
            TensorType::Q3_K => &[108],
            TensorType::Q6_K => &[208],
            TensorType::TQ1_0 => &[52],
            TensorType::TQ2_0 => &[64],
            TensorType::MXFP4 | TensorType::NVFP4 | TensorType::IQ1_M | TensorType::Q8_K => &[],
            _ => &[0],
        };
        for &at in at {
            block[at..at + 2].copy_from_slice(&half(random).to_le_bytes());
        }
        match ty {
            TensorType::MXFP4 => block[0] = if extreme { [127, 0, 1, 2, 3, 252, 120, 5][i % 8] } else { 118 },
            TensorType::NVFP4 if !extreme => block[..4].iter_mut().for_each(|b| *b &= 0x5f),
            TensorType::Q8_K => block[..4].copy_from_slice(&half(random).to_f32().to_le_bytes()),
            // The four nibbles of d are the top ones of four words.
            TensorType::IQ1_M => {
                let bits = half(random).to_bits();
                for k in 0..4 {
                    let byte = &mut block[49 + 2 * k];
                    *byte = (*byte & 15) | ((bits >> (4 * k) & 15) as u8) << 4;
                }
            }
            _ => {}
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SOURCES;
    use kiln_gguf::quant::codebook;

    /// The words of the constant array of a file.
    fn words(file: &str) -> Vec<u32> {
        let (_, text) = SOURCES.iter().find(|(name, _)| *name == file).unwrap();
        let list = text.split("](\n").nth(1).unwrap().split(");").next().unwrap();
        let word = |w: &str| u32::from_str_radix(w.trim().trim_start_matches("0x").trim_end_matches('u'), 16).unwrap();
        list.split(',').map(word).collect()
    }

    /// Entry by entry: eight two-bit indices into `values`, two entries a word.
    fn packed(file: &str, values: [i8; 3]) -> Vec<[i8; 8]> {
        let halves = words(file).into_iter().flat_map(|w| [w & 0xffff, w >> 16]).collect::<Vec<_>>();
        halves.iter().map(|h| std::array::from_fn(|j| values[(h >> (2 * j) & 3) as usize])).collect()
    }

    fn bytes(file: &str) -> Vec<[i8; 4]> {
        words(file).into_iter().map(|w| w.to_le_bytes().map(|b| b as i8)).collect()
    }

    #[test]
    fn grids_of_shaders_are_those_of_the_host() {
        assert_eq!(packed("formats/iq1_grid.glsl", [-1, 0, 1]), codebook::iq1());
        assert_eq!(packed("formats/iq2_xxs_grid.glsl", [8, 25, 43]), codebook::iq2_xxs());
        assert_eq!(packed("formats/iq2_xs_grid.glsl", [8, 25, 43]), codebook::iq2_xs());
        assert_eq!(packed("formats/iq2_s_grid.glsl", [8, 25, 43]), codebook::iq2_s());
        assert_eq!(bytes("formats/iq3_xxs_grid.glsl"), codebook::iq3_xxs());
        assert_eq!(bytes("formats/iq3_s_grid.glsl"), codebook::iq3_s());
    }

    #[test]
    fn every_block_type_has_its_file_and_alignment() {
        for ty in TensorType::ALL.iter().chain(TensorType::PACKED).filter(|ty| ty.block_len() > 1) {
            let format = format(*ty).unwrap_or_else(|| panic!("{ty} has no format"));
            assert!(SOURCES.iter().any(|(name, _)| *name == format.file), "{}", format.file);
            assert!(
                ty.block_bytes().is_multiple_of(format.align),
                "{ty}: neighbouring blocks have different alignment"
            );
        }
    }
}
