//! `glu`: gated linear units, an activation of one tensor times another one. The halves of one tensor are two views.

pub mod cases;
pub(crate) mod cpu;
pub(crate) mod reference;

use kiln_gpu::{Address, Caps, Shader};

use crate::elementwise::{Walk, addressable, row};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, only_scalar, require, rows_apart};
use crate::tensor::Tensor;
use crate::unary::Function;

const NAME: &str = "glu";

/// One line for the registry.
pub const SUMMARY: &str =
    "dst = f(gate) * up: swiglu, geglu (three forms), reglu, swiglu with limits (three forms), situ";

/// The kind of gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// silu(gate) * up
    Swiglu,
    /// gelu(gate) * up, the tanh form
    Geglu,
    /// gelu_erf(gate) * up
    GegluErf,
    /// gelu_quick(gate) * up
    GegluQuick,
    /// relu(gate) * up
    Reglu,
    /// g sigmoid(alpha g) * (1 + u) with g = min(gate, limit), u = clamp(up, -limit, limit)
    SwigluOai {
        /// Factor inside the sigmoid.
        alpha: f32,
        /// Bound of gate and up.
        limit: f32,
    },
    /// min(silu(gate), limit) * clamp(up, -limit, limit)
    SwigluLimited {
        /// Bound of the activation and of up.
        limit: f32,
    },
    /// silu(min(gate, limit)) * clamp(up, -limit, limit)
    SwigluBounded {
        /// Bound of gate and up.
        limit: f32,
    },
    /// beta tanh(gate / beta) sigmoid(gate) * linear tanh(up / linear), or * up where linear is 0
    Situ {
        /// What the gate stays below.
        beta: f32,
        /// What up stays below; 0 for no bound.
        linear: f32,
    },
}

impl Gate {
    /// The name in variant ids.
    pub fn name(self) -> &'static str {
        match self {
            Gate::Swiglu => "swiglu",
            Gate::Geglu => "geglu",
            Gate::GegluErf => "geglu_erf",
            Gate::GegluQuick => "geglu_quick",
            Gate::Reglu => "reglu",
            Gate::SwigluOai { .. } => "swiglu_oai",
            Gate::SwigluLimited { .. } => "swiglu_limited",
            Gate::SwigluBounded { .. } => "swiglu_bounded",
            Gate::Situ { .. } => "situ",
        }
    }

    /// The activation of the gate, where it is a plain one.
    pub(crate) fn function(self) -> Option<Function> {
        match self {
            Gate::Swiglu => Some(Function::Silu),
            Gate::Geglu => Some(Function::Gelu),
            Gate::GegluErf => Some(Function::GeluErf),
            Gate::GegluQuick => Some(Function::GeluQuick),
            Gate::Reglu => Some(Function::Relu),
            Gate::SwigluOai { .. } | Gate::SwigluLimited { .. } | Gate::SwigluBounded { .. } | Gate::Situ { .. } => {
                None
            }
        }
    }

    /// Whether a product may take it in: kernels of products know no bounds but those of SwiGLU in its first form.
    pub(crate) fn joins_products(self) -> bool {
        self.function().is_some() || matches!(self, Gate::SwigluOai { .. })
    }
}

/// Operands of `glu`. For one tensor of twice the columns, `gate` and `up` are its halves by `narrow`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// What is computed.
    pub kind: Gate,
    /// The gate, F32, F16 or BF16, any strides.
    pub gate: Tensor,
    /// What is gated, extents of `gate`, F32, F16 or BF16, any strides.
    pub up: Tensor,
    /// Result, extents of `gate`, F32, F16 or BF16; may be `gate` or `up` itself.
    pub dst: Tensor,
}

kiln_gpu::params! {
    struct Params {
        gate: Address,
        up: Address,
        dst: Address,
        shape: [u32; 4],
        gate_stride: [u32; 4],
        up_stride: [u32; 4],
        dst_stride: [u32; 4],
        units: u32,
        alpha: f32,
        limit: f32,
    }
}

impl Call {
    fn walk(&self) -> Walk {
        Walk::new(&[self.gate, self.up, self.dst])
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        vec![self.gate, self.up]
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.dst]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { gate, up, dst, .. } = self;
        require(gate.shape == up.shape, NAME, || format!("gate is {gate} but up is {up}"))?;
        require(gate.shape == dst.shape, NAME, || format!("gate is {gate} but dst is {dst}"))
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        addressable(NAME, &[self.gate, self.up, self.dst])?;
        let walk = self.walk();
        let name = format!("{NAME}.{}.{}", self.kind.name(), self.gate.ty.name().to_lowercase());
        let function = self.kind.function();
        let shader = Shader::new(name, "glu/glu.comp", Params::glsl())
            .define("FUNCTION", function.map_or("silu", Function::glsl))
            .define("GATE", if function.is_some() { "gated" } else { self.kind.name() });
        let shader = walk.float_operand(NAME, shader, "G", self.gate.ty)?;
        let shader = walk.float_operand(NAME, shader, "U", self.up.ty)?;
        let shader = walk.float_operand(NAME, shader, "D", self.dst.ty)?;
        Ok(walk.choice(shader, walk.float_value(), &self.dst, caps))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let walk = self.walk();
        let (alpha, limit) = match self.kind {
            Gate::SwigluOai { alpha, limit } => (alpha, limit),
            Gate::SwigluLimited { limit } | Gate::SwigluBounded { limit } => (0.0, limit),
            Gate::Situ { beta, linear } => (beta, linear),
            _ => (0.0, 0.0),
        };
        Params {
            gate: at(&self.gate),
            up: at(&self.up),
            dst: at(&self.dst),
            shape: walk.shape(&self.dst),
            gate_stride: walk.stride(&self.gate),
            up_stride: walk.stride(&self.up),
            dst_stride: walk.stride(&self.dst),
            units: walk.units(&self.dst),
            alpha,
            limit,
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
        let part = |i| Call { gate: row(self.gate, i), up: row(self.up, i), dst: row(self.dst, i), ..*self }.into();
        rows_apart(self.dst.shape).map(part).collect()
    }
}
