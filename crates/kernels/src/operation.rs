//! The contract every operation keeps: what it reads and writes, on which path it can run on a device, how its
//! parameters are laid out, and what it computes.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::Call;
use crate::host::HostMemory;
use crate::tensor::Tensor;

/// A family of kernels for the same operation, best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Path {
    /// Plain arithmetic: runs everywhere.
    Scalar,
    /// Packed 8-bit integer dot products.
    IntDot,
    /// KHR cooperative matrices.
    Coopmat,
    /// Register fragments: lanes write the components of KHR cooperative matrices themselves. Needs a known fragment layout.
    Fragment,
    /// Fragment path tuned for prefill (many query rows).
    FragmentPrefill,
    /// NV cooperative matrices 2: workgroup scope and tensor addressing.
    Coopmat2,
}

impl Path {
    /// Every path, plainest first.
    pub const ALL: [Path; 6] =
        [Path::Scalar, Path::IntDot, Path::Coopmat, Path::Fragment, Path::FragmentPrefill, Path::Coopmat2];

    /// The name used in variant ids, plans and tables.
    pub fn name(self) -> &'static str {
        match self {
            Path::Scalar => "scalar",
            Path::IntDot => "int_dot",
            Path::Coopmat => "coopmat",
            Path::Fragment => "fragment",
            Path::FragmentPrefill => "fragment_prefill",
            Path::Coopmat2 => "coopmat2",
        }
    }
}

/// One dispatch of a chosen path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// What to compile.
    pub shader: Shader,
    /// Workgroups in x, y, z.
    pub groups: [u32; 3],
    /// What the operation calls this dispatch, by a number of its own; 0 where it need not tell its dispatches apart.
    pub tag: u8,
    /// Where the part of the work that this dispatch does begins and ends, as the operation counts; none where it does all of it.
    pub part: Option<[usize; 2]>,
}

impl Launch {
    /// A dispatch without a tag, of all the work.
    pub fn new(shader: Shader, groups: [u32; 3]) -> Launch {
        Launch { shader, groups, tag: 0, part: None }
    }

    /// The same with a tag.
    #[must_use]
    pub fn tagged(self, tag: u8) -> Launch {
        Launch { tag, ..self }
    }

    /// The same for a part of the work.
    #[must_use]
    pub fn of_part(self, part: [usize; 2]) -> Launch {
        Launch { part: Some(part), ..self }
    }
}

/// What `pick` decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The family.
    pub path: Path,
    /// The dispatches, in order. Each waits for those before it whose memory it touches.
    pub launches: Vec<Launch>,
}

impl Choice {
    /// A choice of one dispatch.
    pub fn one(path: Path, shader: Shader, groups: [u32; 3]) -> Choice {
        Choice { path, launches: vec![Launch::new(shader, groups)] }
    }
}

/// The memory that one dispatch reads and writes: what it must wait for.
#[derive(Clone, Debug, PartialEq)]
pub struct Touches {
    /// What it reads.
    pub reads: Vec<Tensor>,
    /// What it writes.
    pub writes: Vec<Tensor>,
}

/// Why an operation cannot run on a device or on a path: an answer, not a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct Unsupported {
    /// The operation's name.
    pub operation: &'static str,
    /// What is missing, with numbers.
    pub reason: String,
}

/// A call whose operands do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation}: {reason}")]
pub struct Invalid {
    /// The operation's name.
    pub operation: &'static str,
    /// What does not fit, with numbers.
    pub reason: String,
}

/// Arithmetic and traffic of one call, for rates and for pacing submits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes that must at least move.
    pub bytes: f64,
    /// Floating-point (or integer) operations.
    pub flops: f64,
}

/// One operation with its operands: implemented by the `Call` of each operation's folder.
pub trait Operation: std::fmt::Debug + Send + Sync {
    /// The operation's one name: folder, shader, label, bench row.
    fn name(&self) -> &'static str;

    /// Tensors it reads.
    fn reads(&self) -> Vec<Tensor>;

    /// Tensors it writes, every element of them.
    fn writes(&self) -> Vec<Tensor>;

    /// What of a written tensor is compared row by row ([`Tolerance::NmsePerRow`](crate::case::Tolerance::NmsePerRow)), given its elements in index
    /// order; none for its own rows. For tensors whose memory has another order, or whose numbers say something only together.
    fn judged(&self, _written: &Tensor, _values: &[f64]) -> Option<Vec<Vec<f64>>> {
        None
    }

    /// Memory it uses between its launches: written before it is read, and worth nothing afterwards.
    fn scratch(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// Whether the operands fit together. Called when a plan is checked and before every case.
    fn check(&self) -> Result<(), Invalid>;

    /// How to run on such a device: the best path, or the one asked for. Pure, no GPU.
    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported>;

    /// The parameter block of launch number `launch` of a choice; `at` gives the address of a tensor's first element.
    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8>;

    /// What launch number `launch` of a choice reads and writes, scratch memory included. Unless an operation knows better,
    /// each touches all there is, and so waits for the one before.
    fn touches(&self, _choice: &Choice, _launch: usize) -> Touches {
        let mut writes = self.writes();
        writes.extend(self.scratch());
        Touches { reads: self.reads(), writes }
    }

    /// What a dependent launch reads before `grid_wait` (`dependent_launch.glsl`). If a pending dispatch wrote to it, the recorder places a
    /// barrier instead.
    fn early(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// The definition: the plainest loop, in f64.
    fn reference(&self, memory: &mut HostMemory);

    /// The same result at the speed of the CPU, for the CPU executor. Only worth writing where the reference is slow.
    fn cpu(&self, memory: &mut HostMemory) {
        self.reference(memory);
    }

    /// Arithmetic and traffic.
    fn work(&self) -> Work {
        let bytes: usize = self.reads().iter().chain(&self.writes()).map(|t| t.rows() * t.row_bytes()).sum();
        Work { bytes: bytes as f64, flops: self.writes().iter().map(Tensor::len).sum::<usize>() as f64 }
    }

    /// The same work as several smaller calls (one row, one token at a time), which must give the same bits.
    /// Empty where a call cannot be split.
    fn parts(&self) -> Vec<Call> {
        Vec::new()
    }
}

/// The GLSL functions of `glsl/kiln.glsl` that load and store elements of a plain type.
pub fn element_functions(operation: &'static str, ty: TensorType) -> Result<(&'static str, &'static str), Unsupported> {
    match ty {
        TensorType::F32 => Ok(("load_f32", "store_f32")),
        TensorType::F16 => Ok(("load_f16", "store_f16")),
        TensorType::BF16 => Ok(("load_bf16", "store_bf16")),
        TensorType::I32 => Ok(("load_i32", "store_i32")),
        _ => Err(Unsupported { operation, reason: format!("no element access for {ty} (F32, F16, BF16, I32 have)") }),
    }
}

/// Spreads `groups` workgroups over a grid that the device accepts. The shader finds its number with `group_index()`
/// and must leave if it is past the last one.
pub fn grid(groups: usize, caps: &Caps) -> [u32; 3] {
    let limit = caps.limits.max_workgroup_count.map(|n| n.min(65535) as usize);
    let x = groups.clamp(1, limit[0]);
    let y = groups.div_ceil(x).clamp(1, limit[1]);
    let z = groups.div_ceil(x * y).max(1);
    [x, y, z].map(|n| u32::try_from(n).expect("grid extents below the limit fit 32 bits"))
}

/// The path question of operations that have only the scalar one.
pub fn only_scalar(operation: &'static str, want: Option<Path>) -> Result<(), Unsupported> {
    match want {
        None | Some(Path::Scalar) => Ok(()),
        Some(other) => Err(Unsupported { operation, reason: format!("no {} path", other.name()) }),
    }
}

/// `Err(Unsupported)` unless all numbers fit the 32 bits that a parameter block has for each.
pub fn within_32_bits(operation: &'static str, numbers: impl IntoIterator<Item = usize>) -> Result<(), Unsupported> {
    match numbers.into_iter().find(|&n| u32::try_from(n).is_err()) {
        Some(most) => Err(Unsupported { operation, reason: format!("sizes need the number {most}, beyond 32 bits") }),
        None => Ok(()),
    }
}

/// A number of a parameter block.
pub fn word(n: usize) -> u32 {
    u32::try_from(n).expect("`check` and `pick` should have refused larger numbers")
}

/// The address of an operand that may not be there, which is 0 then.
pub fn maybe(at: &dyn Fn(&Tensor) -> Address) -> impl Fn(Option<Tensor>) -> Address {
    move |t| t.as_ref().map_or(Address::default(), at)
}

/// `Err(Invalid)` with this reason unless `holds`.
pub fn require(holds: bool, operation: &'static str, reason: impl FnOnce() -> String) -> Result<(), Invalid> {
    if holds { Ok(()) } else { Err(Invalid { operation, reason: reason() }) }
}

/// The defines of `glsl/reduce.glsl` for rows of `cols` elements: the workgroup's size and whether subgroups add.
pub fn reduce_defines(shader: Shader, cols: usize, caps: &Caps) -> Shader {
    // A software GPU runs threads one after the other, so more of them than one subgroup only add barriers.
    let most = if caps.is_cpu { 32 } else { 512 };
    let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]).min(most);
    // Two sizes are enough and keep the number of pipelines small.
    let threads = if cols <= 256 { 32 } else { limit };
    shader.define("WG", threads.min(limit)).define("SUBGROUPS", u32::from(caps.subgroups.arithmetic))
}

/// The outer indices (i1, i2, i3) of every row of a tensor with these extents: how most calls fall into parts.
pub fn rows_apart(shape: [usize; 4]) -> impl Iterator<Item = [usize; 3]> {
    let [_, n1, n2, n3] = shape;
    (0..n3).flat_map(move |i3| (0..n2).flat_map(move |i2| (0..n1).map(move |i1| [i1, i2, i3])))
}
