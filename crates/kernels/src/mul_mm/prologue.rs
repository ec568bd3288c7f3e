//! What makes the activations before they are multiplied. Matrix units want them as 16-bit floats anyway: the pass that turns
//! them (`pack_activations.comp`) makes them too. For the other paths it is a launch of the operation itself.

use kiln_gguf::TensorType;

use super::{Call, NAME};
use crate::glu::{self, Gate};
use crate::host::HostMemory;
use crate::mul_mat::{Norm, Product};
use crate::operation::{Invalid, Path, require};
use crate::rms_norm;
use crate::tensor::{Slot, Tensor};

/// What makes the activations that are multiplied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Prologue {
    /// They are those of b, normed.
    Norm(Norm),
    /// They are activation(b) * up.
    Gate {
        /// The activation, a plain one.
        kind: Gate,
        /// Floats with the extents of b, dense rows.
        up: Tensor,
    },
}

impl Prologue {
    /// The tensor it reads beside b.
    pub(super) fn operand(self) -> Option<Tensor> {
        match self {
            Prologue::Norm(norm) => norm.weight,
            Prologue::Gate { up, .. } => Some(up),
        }
    }

    pub(super) fn norm(self) -> Option<Norm> {
        if let Prologue::Norm(norm) = self { Some(norm) } else { None }
    }

    /// The same for some of the activations.
    pub(super) fn cut(self, cut: impl Fn(Tensor) -> Tensor) -> Prologue {
        match self {
            Prologue::Norm(_) => self,
            Prologue::Gate { kind, up } => Prologue::Gate { kind, up: cut(up) },
        }
    }
}

impl Call {
    /// The operation that makes the activations, with this result.
    fn made(&self, y: Tensor) -> Option<crate::Call> {
        let b = self.product.b;
        Some(match self.prologue? {
            Prologue::Norm(Norm { weight, eps }) => rms_norm::Call { x: b, weight, y, eps }.into(),
            Prologue::Gate { kind, up } => glu::Call { kind, gate: b, up, dst: y }.into(),
        })
    }

    pub(super) fn check_before(&self) -> Result<(), Invalid> {
        let (b, Some(prologue)) = (self.product.b, self.prologue) else { return Ok(()) };
        if let Prologue::Gate { kind, up } = prologue {
            let floats = matches!(up.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16);
            let fits = floats && up.shape == b.shape && up.has_dense_rows();
            require(fits, NAME, || format!("up is {up}, want floats with the extents of b, {b}, and dense rows"))?;
            let plain = kind.function().is_some();
            require(plain, NAME, || format!("{} is no plain activation: make it a step of its own", kind.name()))?;
        }
        let made = self.made(Tensor::dense(b.slot, TensorType::F32, b.shape));
        made.map_or(Ok(()), |made| made.operation().check())?;
        let (has, bytes) = (self.scratch.map_or(0, |s| s.span().1), self.layout().end);
        require(has >= bytes, NAME, || format!("{has} bytes of scratch memory, want {bytes}"))
    }

    /// For paths that take floats: the operation that makes the activations in the scratch memory, and the call on those.
    pub(super) fn on_floats(&self, path: Path) -> Option<(crate::Call, Call)> {
        let scratch = self.scratch.filter(|_| path < Path::Coopmat)?;
        let dense = Tensor::dense(scratch.slot, TensorType::F32, self.product.b.shape);
        let b = dense.at(scratch.offset + self.layout().floats);
        let product = Product { b, ..self.product };
        Some((self.made(b)?, Call { product, prologue: None, ..self.clone() }))
    }

    /// On the host: makes the activations in memory of their own, then runs the call on those.
    pub(super) fn with_made(
        &self,
        memory: &mut HostMemory,
        make: impl Fn(&crate::Call, &mut HostMemory),
        run: impl Fn(&Call, &mut HostMemory),
    ) {
        let slot = Slot(u32::try_from(memory.slots.len()).expect("far fewer slots than 2^32"));
        let b = Tensor::dense(slot, TensorType::F32, self.product.b.shape);
        let Some(made) = self.made(b) else { return run(self, memory) };
        memory.slots.push(vec![0; b.span().1]);
        make(&made, memory);
        run(&Call { product: Product { b, ..self.product }, prologue: None, ..self.clone() }, memory);
        memory.slots.pop();
    }
}
