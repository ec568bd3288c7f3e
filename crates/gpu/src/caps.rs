//! What a device can do, as plain data: kernels choose their path from it, and tests can make any device up.

use std::borrow::Cow;
use std::sync::Arc;

/// A component type of a cooperative matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "the names are the types")]
pub enum Component {
    F16,
    F32,
    F64,
    Bf16,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    /// A type this version has no name for, with the driver's number.
    Other(i32),
}

/// Which threads share a cooperative matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Scope {
    /// One subgroup.
    Subgroup,
    /// The whole workgroup (cooperative matrix 2).
    Workgroup,
}

/// One shape the driver lists for `VK_KHR_cooperative_matrix`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "an M x N x K product of these component types")]
pub struct CoopmatShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub a: Component,
    pub b: Component,
    pub c: Component,
    pub result: Component,
    pub saturating: bool,
    pub scope: Scope,
}

/// One row of the flexible dimensions of `VK_NV_cooperative_matrix2`: any multiple of the granularity may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "granularities of an M x N x K product of these component types")]
pub struct FlexibleShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub a: Component,
    pub b: Component,
    pub c: Component,
    pub result: Component,
    pub saturating: bool,
    pub scope: Scope,
    /// Threads of the workgroup this row is for; 0 for subgroup scope.
    pub workgroup: u32,
}

/// Which components of a cooperative matrix of 16-bit floats each lane holds, among the layouts that kernels know. Vulkan leaves the
/// layout to the driver, so a probe asks the device (`kiln_kernels::open`). K may be permuted freely as long as A and B use the same
/// permutation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum FragmentLayout {
    /// 16 x 16 x 16 in 32 lanes, as NVIDIA's m16n8k16 fragments: lane 4 g + q holds four elements of k of row (column) g, then the same
    /// four of row (column) g + 8. Usually these are elements 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
    Mma16x8,
    /// 8 x 8 x 8 in 8 lanes: a lane holds one element of k of all eight rows (columns), usually element `lane`.
    Row8,
}

/// The parts of `VK_NV_cooperative_matrix2` a device has.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "the names are the feature bits of the extension")]
pub struct Coopmat2 {
    pub workgroup_scope: bool,
    pub flexible_dimensions: bool,
    pub reductions: bool,
    pub conversions: bool,
    pub per_element_operations: bool,
    pub tensor_addressing: bool,
    pub block_loads: bool,
    /// Largest workgroup for workgroup-scope matrices.
    pub max_workgroup: u32,
    /// Largest dimension of a matrix.
    pub max_dimension: u32,
    /// Shared memory the driver keeps for itself in such workgroups.
    pub reserved_shared_bytes: u32,
    pub shapes: Vec<FlexibleShape>,
    /// `VK_NV_cooperative_matrix_decode_vector`: the decode callback may return several elements.
    pub decode_vector: bool,
}

impl Coopmat2 {
    /// Whether everything the workgroup-scope kernels use is there.
    pub fn is_complete(&self) -> bool {
        self.workgroup_scope
            && self.flexible_dimensions
            && self.reductions
            && self.conversions
            && self.per_element_operations
            && self.tensor_addressing
            && self.block_loads
    }
}

/// Integer dot products of four packed 8-bit values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum IntDot {
    /// Not offered.
    #[default]
    None,
    /// Offered, but emulated with several instructions.
    Emulated,
    /// One instruction for signed packed operands.
    Accelerated,
}

/// The subgroup abilities of a device in compute shaders.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "the names are Vulkan's operation groups")]
pub struct Subgroups {
    /// The size without further requests.
    pub size: u32,
    pub min_size: u32,
    pub max_size: u32,
    /// Whether a size may be asked for per pipeline.
    pub size_control: bool,
    /// Whether full subgroups may be asked for.
    pub full: bool,
    pub arithmetic: bool,
    pub shuffle: bool,
    pub ballot: bool,
    pub vote: bool,
    pub clustered: bool,
}

/// Limits that kernels must respect.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "the names are Vulkan's limits")]
pub struct Limits {
    pub max_workgroup_count: [u32; 3],
    pub max_workgroup_size: [u32; 3],
    pub max_workgroup_invocations: u32,
    pub max_shared_bytes: u32,
    pub max_push_bytes: u32,
    pub max_buffer_bytes: u64,
    pub max_allocation_bytes: u64,
    /// Femtoseconds of one tick of a timestamp: periods of some devices are no whole nanoseconds (83.333).
    pub timestamp_femtoseconds: u64,
}

/// Everything a kernel may ask about the device before it chooses its path.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs, reason = "the names say it; see the field types")]
pub struct Caps {
    pub subgroups: Subgroups,
    pub limits: Limits,
    pub storage_8bit: bool,
    pub storage_16bit: bool,
    pub float16: bool,
    pub int8: bool,
    pub int16: bool,
    pub int64: bool,
    pub float64: bool,
    pub bfloat16: bool,
    pub int_dot: IntDot,
    pub memory_model: bool,
    /// Shapes of `VK_KHR_cooperative_matrix`; empty where it is not offered.
    pub coopmat: Vec<CoopmatShape>,
    /// Fragment layout of `coopmat_shape(F16, F32)`, once the probe has found it and if kernels know it.
    pub fragment_layout: Option<FragmentLayout>,
    /// Whether components of their sums are of the rows and columns that the same components of A fragments are of: then sums become a
    /// A fragment without leaving their registers. Elements of k are those of the rule that [`FragmentLayout`] names.
    #[serde(default)]
    pub accumulator_is_a_fragment: bool,
    /// Whether bfloat16 matrices have the same fragment layout.
    #[serde(default)]
    pub bf16_shares_layout: bool,
    pub coopmat2: Coopmat2,
    /// Number of shader cores (SMs, CUs), where the driver tells.
    pub cores: Option<u32>,
    /// Whether dependent launches may be tried: kernels that wait for the previous dispatch by a counter instead of a barrier.
    #[serde(default)]
    pub dependent_launch: bool,
    /// A software rasteriser: threads are slow, memory is the CPU's.
    pub is_cpu: bool,
    /// Tuning lines found on this device and driver, as text. They belong to the machine, so descriptions of devices leave them out.
    #[serde(skip)]
    pub tuned: Option<Arc<str>>,
}

/// Cores of a device that does not tell.
const USUAL_CORES: u32 = 32;

impl Caps {
    /// Number of shader cores, or a guess where the driver does not tell.
    pub fn cores_or_guess(&self) -> u32 {
        self.cores.unwrap_or(USUAL_CORES)
    }

    /// The least a device must have for Kiln: useful as the base of made-up devices in tests.
    pub fn least() -> Caps {
        Caps {
            subgroups: Subgroups { size: 4, min_size: 4, max_size: 4, ..Subgroups::default() },
            limits: Limits {
                max_workgroup_count: [65535; 3],
                max_workgroup_size: [128, 128, 64],
                max_workgroup_invocations: 128,
                max_shared_bytes: 16384,
                max_push_bytes: 128,
                max_buffer_bytes: 1 << 30,
                max_allocation_bytes: 1 << 30,
                timestamp_femtoseconds: 1_000_000,
            },
            storage_8bit: true,
            storage_16bit: true,
            float16: false,
            int8: false,
            int16: false,
            int64: false,
            float64: false,
            bfloat16: false,
            int_dot: IntDot::None,
            memory_model: false,
            coopmat: Vec::new(),
            fragment_layout: None,
            accumulator_is_a_fragment: false,
            bf16_shares_layout: false,
            coopmat2: Coopmat2::default(),
            cores: None,
            dependent_launch: false,
            is_cpu: false,
            tuned: None,
        }
    }

    /// A large NVIDIA card as its driver describes it, for tests and for compiling every kernel path without one.
    pub fn example_nvidia() -> Caps {
        use Component::{Bf16, F16, F32, I8, I32};
        let shape =
            |m, n, k, a, c| CoopmatShape { m, n, k, a, b: a, c, result: c, saturating: false, scope: Scope::Subgroup };
        let flexible = |m, n, k, a, c, workgroup| FlexibleShape {
            m,
            n,
            k,
            a,
            b: a,
            c,
            result: c,
            saturating: false,
            scope: Scope::Workgroup,
            workgroup,
        };
        Caps {
            subgroups: Subgroups {
                size: 32,
                min_size: 32,
                max_size: 32,
                size_control: true,
                full: true,
                arithmetic: true,
                shuffle: true,
                ballot: true,
                vote: true,
                clustered: true,
            },
            limits: Limits {
                max_workgroup_count: [u32::MAX >> 1, 65535, 65535],
                max_workgroup_size: [1024, 1024, 64],
                max_workgroup_invocations: 1024,
                max_shared_bytes: 49152,
                max_push_bytes: 256,
                max_buffer_bytes: 1 << 40,
                max_allocation_bytes: 4 << 30,
                timestamp_femtoseconds: 1_000_000,
            },
            float16: true,
            int8: true,
            int16: true,
            int64: true,
            float64: true,
            bfloat16: true,
            int_dot: IntDot::Accelerated,
            memory_model: true,
            coopmat: vec![
                shape(16, 16, 16, F16, F16),
                shape(16, 16, 16, F16, F32),
                shape(16, 8, 16, F16, F32),
                shape(16, 16, 32, I8, I32),
                shape(16, 16, 16, Bf16, F32),
            ],
            fragment_layout: Some(FragmentLayout::Mma16x8),
            accumulator_is_a_fragment: true,
            bf16_shares_layout: true,
            coopmat2: Coopmat2 {
                workgroup_scope: true,
                flexible_dimensions: true,
                reductions: true,
                conversions: true,
                per_element_operations: true,
                tensor_addressing: true,
                block_loads: true,
                max_workgroup: 256,
                max_dimension: 1024,
                reserved_shared_bytes: 8192,
                shapes: vec![flexible(32, 16, 16, F16, F32, 128), flexible(32, 32, 16, F16, F32, 256)],
                decode_vector: false,
            },
            cores: Some(132),
            dependent_launch: true,
            ..Caps::least()
        }
    }

    /// Lanes of the subgroups that share a matrix. Intel's matrices are as wide as the subgroup they are made for, 8 or 16,
    /// which is narrower than its own.
    pub fn matrix_lanes(&self, shape: &CoopmatShape) -> u32 {
        let s = &self.subgroups;
        let runs = s.size_control && (s.min_size..=s.max_size).contains(&shape.n);
        if runs { shape.n.min(s.size) } else { s.size }
    }

    /// The same device with subgroups of 32 lanes, where its own have more and these can be asked for: AMD's RDNA runs both. For
    /// kernels that ask with [`crate::SubgroupRequest::Size`].
    pub fn narrowed(&self) -> Cow<'_, Caps> {
        const LANES: u32 = 32;
        let s = &self.subgroups;
        if !(s.size_control && s.full && s.min_size <= LANES && s.size > LANES) {
            return Cow::Borrowed(self);
        }
        let mut caps = self.clone();
        caps.subgroups.size = LANES;
        Cow::Owned(caps)
    }

    /// Switches features off by name: `coopmat2`, `coopmat`, `fragment`, `int_dot`, `bfloat16`, `subgroups`, `dependent_launch`. Returns the
    /// names it does not know. For drivers whose feature is broken, and for measuring one path against another. `lanes` and `handover` are
    /// the old names of `fragment` and `dependent_launch`.
    pub fn disable<'a>(&mut self, names: &'a str) -> Vec<&'a str> {
        let mut unknown = Vec::new();
        for name in names.split(',').map(str::trim).filter(|n| !n.is_empty()) {
            match name {
                "coopmat2" => self.coopmat2 = Coopmat2::default(),
                "coopmat" => self.coopmat.clear(),
                "fragment" | "lanes" => {
                    self.fragment_layout = None;
                    (self.accumulator_is_a_fragment, self.bf16_shares_layout) = (false, false);
                }
                "int_dot" => self.int_dot = IntDot::None,
                "bfloat16" => self.bfloat16 = false,
                "subgroups" => self.subgroups.arithmetic = false,
                "dependent_launch" | "handover" => self.dependent_launch = false,
                other => unknown.push(other),
            }
        }
        unknown
    }

    /// The subgroup-scope cooperative-matrix shape with these component types, if the driver lists one.
    pub fn coopmat_shape(&self, a: Component, c: Component) -> Option<&CoopmatShape> {
        let fits = |s: &&CoopmatShape| {
            s.a == a && s.b == a && s.c == c && s.result == c && !s.saturating && s.scope == Scope::Subgroup
        };
        self.coopmat.iter().find(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subgroups_are_narrowed_where_the_device_runs_both() {
        let with = |size, min_size, size_control| {
            let mut caps = Caps::example_nvidia();
            caps.subgroups = Subgroups { size, min_size, max_size: 64, size_control, ..caps.subgroups };
            caps.narrowed().subgroups.size
        };
        assert_eq!(with(64, 32, true), 32, "RDNA");
        assert_eq!(with(64, 64, true), 64, "GCN");
        assert_eq!(with(64, 32, false), 64, "a driver that takes no size");
        assert_eq!(with(32, 8, true), 32, "Intel");
    }

    #[test]
    fn matrices_of_intel_have_subgroups_of_their_width() {
        let nvidia = Caps::example_nvidia();
        let shape = nvidia.coopmat[0];
        assert_eq!(nvidia.matrix_lanes(&shape), 32);
        let mut intel = nvidia.clone();
        intel.subgroups.min_size = 8;
        assert_eq!(intel.matrix_lanes(&CoopmatShape { m: 8, n: 16, k: 16, ..shape }), 16);
        intel.subgroups.size_control = false;
        assert_eq!(intel.matrix_lanes(&CoopmatShape { m: 8, n: 16, k: 16, ..shape }), 32);
    }

    #[test]
    fn abilities_are_switched_off_by_name() {
        let mut caps = Caps::example_nvidia();
        assert_eq!(caps.disable("coopmat2, int_dot,warp"), ["warp"]);
        assert!(!caps.coopmat2.is_complete() && caps.int_dot == IntDot::None && !caps.coopmat.is_empty());
    }
}
