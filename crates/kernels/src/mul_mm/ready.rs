//! What stands in the place of the pass that prepares columns: columns that come ready, and results that are left so ([`crate::ready`]),
//! with the gate that makes them of two matrices. All of it is for the path of lanes.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Shader};

use super::pick::unsupported;
use super::{Call, NAME};
use crate::glu::{self, Gate};
use crate::host::HostMemory;
use crate::mul_mat::Product;
use crate::operation::{Invalid, Unsupported, require};
use crate::ready::{LEFT_ABOVE, Ready, Samples};
use crate::tensor::{Slot, Tensor};
use crate::unary::Function;

/// A matrix whose results are multiplied with an activation of those of the first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gated {
    /// The activation, a plain one.
    pub kind: Gate,
    /// Type, extents and strides of the first matrix.
    pub up: Tensor,
}

impl Call {
    /// Whether only the path of lanes can run it.
    pub(super) fn wants_lanes(&self) -> bool {
        self.gate.is_some() || self.ready.is_some() || self.samples.is_some()
    }

    /// What it reads beside the operands of a plain product.
    pub(super) fn takes(&self) -> Vec<Tensor> {
        let ready = self.ready.iter().flat_map(Ready::all);
        self.gate.map(|gate| gate.up).into_iter().chain(ready).chain(self.reference.map(|samples| samples.sums)).collect()
    }

    /// What it writes beside d.
    pub(super) fn leaves(&self) -> Vec<Tensor> {
        self.leaving.iter().flat_map(Ready::all).chain(self.samples.map(|samples| samples.sums)).collect()
    }

    pub(super) fn check_ready(&self) -> Result<(), Invalid> {
        if !(self.wants_lanes() || self.leaving.is_some() || self.reference.is_some()) {
            return Ok(());
        }
        let Product { a, b, d } = self.product;
        let alone = self.others.is_empty() && self.ids.is_none() && b.shape[2..] == [1, 1];
        require(alone, NAME, || "gates and ready columns are for one product without experts or batches".into())?;
        if let Some(ready) = &self.ready {
            require(self.before.is_none(), NAME, || "columns that come ready are not made on the way".into())?;
            ready.check([b.shape[0], b.shape[1]], NAME)?;
        }
        if let Some(Gated { kind, up }) = self.gate {
            let same = (up.ty, up.shape, up.stride) == (a.ty, a.shape, a.stride);
            require(same, NAME, || format!("up is {up}, want the type, extents and strides of {a}"))?;
            require(kind.function().is_some(), NAME, || format!("{} is no plain activation", kind.name()))?;
            let bare = self.epilogue.bias.is_none() && self.epilogue.residual.is_none();
            require(bare, NAME, || "a gate has no bias or residual beside it".into())?;
        }
        let samples = [self.samples, self.reference];
        let gated = self.gate.is_some() || samples == [None; 2];
        require(gated, NAME, || "samples are those of gated columns".into())?;
        samples.iter().flatten().try_for_each(|samples| samples.check(d.shape[1], NAME))?;
        let want = |samples: &Samples| Samples::tiles(d.shape[0], samples.rows).1;
        if let Some(samples) = self.samples.filter(|samples| samples.sums.shape[1] != want(samples)) {
            let reason = format!("samples are {}, want those of {} tiles", samples.sums, want(&samples));
            return Err(Invalid { operation: NAME, reason });
        }
        let Some(leaving) = &self.leaving else { return Ok(()) };
        let known = self.gate.is_some() && self.reference.is_some() && leaving.factors.is_some();
        require(known, NAME, || "results are left ready behind a gate, with factors by a reference".into())?;
        leaving.check([d.shape[0], d.shape[1]], NAME)
    }

    /// Shared memory of a gate for tiles of so many columns and matrices of so many rows: its sums, factors and magnitudes.
    pub(super) fn gate_bytes(&self, columns: usize, rows: usize) -> usize {
        if self.gate.is_some() { 4 * rows * columns + 4 * columns + rows * rows } else { 0 }
    }

    /// The defines of all this, for tiles and matrices of so many rows; the order must be that of the device.
    pub(super) fn define_ready(&self, shader: Shader, caps: &Caps, [tile, rows]: [usize; 2]) -> Result<Shader, Unsupported> {
        let other = [self.ready, self.leaving].into_iter().flatten().any(|ready| Some(ready.order) != caps.matrix_order);
        if other {
            return unsupported("ready columns lie in the order of another device's matrices");
        }
        if let Some(samples) = self.samples.filter(|samples| samples.rows != rows) {
            return unsupported(format!("samples of {} rows, matrices have {rows}", samples.rows));
        }
        if self.gate.is_some() && tile != rows {
            return unsupported(format!("a gate in tiles of {tile} rows, matrices have {rows}"));
        }
        let mut shader = shader
            .define("GATED", u32::from(self.gate.is_some()))
            .define("FACTORS", u32::from(self.ready.is_none_or(|ready| ready.factors.is_some())))
            .define("LEAVING", u32::from(self.leaving.is_some()))
            .define("SAMPLED_APART", self.samples.map_or(1, |samples| Samples::tiles(self.product.d.shape[0], samples.rows).0))
            .define("REFERENCE_ROWS", self.reference.map_or(1, |samples| samples.rows))
            .define("SAMPLES", self.samples.map_or(0, |samples| samples.sums.shape[1]))
            .define("REFERENCES", self.reference.map_or(0, |samples| samples.sums.shape[1]));
        if let Some(Gated { kind, .. }) = self.gate {
            shader = shader.define("GATE", kind.function().map_or("silu", Function::glsl));
        }
        if let Some(ready) = self.leaving {
            shader = shader.define("LEFT_PIECE", ready.piece).define("LEFT_ABOVE", LEFT_ABOVE);
        }
        Ok(shader)
    }

    /// On the host: both products in memory of their own, then the gate between them.
    pub(super) fn with_gate(
        &self,
        Gated { kind, up }: Gated,
        memory: &mut HostMemory,
        run: impl Fn(&Call, &mut HostMemory),
        join: impl Fn(&glu::Call, &mut HostMemory),
    ) {
        let d = self.product.d;
        let parts = [self.product.a, up].map(|a| {
            let slot = Slot(u32::try_from(memory.slots.len()).expect("far fewer slots than 2^32"));
            let part = Tensor::dense(slot, TensorType::F32, d.shape);
            memory.slots.push(vec![0; part.span().1]);
            let bare = Call { before: self.before, epilogue: self.epilogue, scratch: self.scratch, ..Call::plain(self.product) };
            run(&Call { product: Product { a, d: part, ..self.product }, ..bare }, memory);
            part
        });
        join(&glu::Call { kind, gate: parts[0], up: parts[1], dst: d }, memory);
        memory.slots.truncate(memory.slots.len() - 2);
        self.leave(memory);
    }

    /// What is left beside d, when that is there.
    fn leave(&self, memory: &mut HostMemory) {
        let floats = memory.read(&self.product.d);
        if let (Some(leaving), Some(reference)) = (&self.leaving, &self.reference) {
            let factors = reference.factors(memory);
            leaving.write(&floats, &factors, memory);
        }
        if let Some(samples) = &self.samples {
            samples.write(&floats, memory);
        }
    }
}
