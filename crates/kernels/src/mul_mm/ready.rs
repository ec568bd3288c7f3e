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
use crate::ready::{self, Ready, Samples};
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
        self.ready.is_some() || self.has_more_results()
    }

    /// Whether its end differs from that of a plain product: a gate, or something left beside d.
    fn has_more_results(&self) -> bool {
        self.gate.is_some() || self.samples.is_some() || self.leaving.is_some() || self.sums.is_some()
    }

    /// The sums that squares are added to: none without columns that are left.
    fn squares(&self) -> Option<Tensor> {
        self.sums.filter(|_| self.leaving.is_some()).map(|sums| sums.narrow(2, 0, 1))
    }

    /// What it reads beside the operands of a plain product.
    pub(super) fn takes(&self) -> Vec<Tensor> {
        let ready = self.ready.iter().flat_map(Ready::all);
        // Squares are added to what is there.
        let more = [self.left_weight, self.squares()].into_iter().flatten();
        self.gate.map(|gate| gate.up).into_iter().chain(more).chain(ready).chain(self.reference.map(|samples| samples.sums)).collect()
    }

    /// What it writes beside d.
    pub(super) fn leaves(&self) -> Vec<Tensor> {
        let sums = [self.squares(), self.sums.map(|sums| sums.narrow(2, 1, 1))].into_iter().flatten();
        self.leaving.iter().flat_map(Ready::all).chain(sums).chain(self.samples.map(|samples| samples.sums)).collect()
    }

    pub(super) fn check_ready(&self) -> Result<(), Invalid> {
        if !(self.wants_lanes() || self.leaving.is_some() || self.reference.is_some()) {
            return Ok(());
        }
        let Product { a, b, d } = self.product;
        let plain = self.ids.is_none() && b.shape[2..] == [1, 1];
        require(plain, NAME, || "gates and ready columns are for products without experts or batches".into())?;
        if let Some(ready) = &self.ready {
            let normed = self.before.is_some_and(|before| before.norm().is_some());
            let fits = normed == ready.squares.is_some() && (normed || self.before.is_none());
            require(fits, NAME, || "columns that come ready are not made on the way, and normed by their squares".into())?;
            ready.check([b.shape[0], b.shape[1]], NAME)?;
        }
        require(!self.has_more_results() || self.others.is_empty(), NAME, || "one product alone has a gate or leaves columns ready".into())?;
        if let Some(Gated { kind, up }) = self.gate {
            let same = (up.ty, up.shape, up.stride) == (a.ty, a.shape, a.stride);
            require(same, NAME, || format!("up is {up}, want the type, extents and strides of {a}"))?;
            require(kind.function().is_some(), NAME, || format!("{} is no plain activation", kind.name()))?;
            let bare = self.epilogue.bias.is_none() && self.epilogue.residual.is_none();
            require(bare, NAME, || "a gate has no bias or residual beside it".into())?;
        }
        let samples = [self.samples, self.reference];
        samples.iter().flatten().try_for_each(|samples| samples.check(d.shape[1], NAME))?;
        let want = |samples: &Samples| Samples::tiles(d.shape[0], samples.rows).1;
        if let Some(samples) = self.samples.filter(|samples| samples.sums.shape[1] != want(samples)) {
            let reason = format!("samples are {}, want those of {} tiles", samples.sums, want(&samples));
            return Err(Invalid { operation: NAME, reason });
        }
        if let Some(sums) = self.sums {
            let fits = sums.ty == TensorType::I32 && sums.is_dense() && sums.shape == [d.shape[1], 2, 2, 1] && self.gate.is_none();
            require(fits, NAME, || format!("sums are {sums}, want I32[{}, 2, 2], and no gate", d.shape[1]))?;
        }
        if let Some(weight) = self.left_weight {
            let fits = weight.ty == TensorType::F32 && weight.is_dense() && weight.len() == d.shape[0] && self.gate.is_none();
            require(fits, NAME, || format!("the weights of the norm that follows are {weight}, want F32[{}], and no gate", d.shape[0]))?;
        }
        let Some(leaving) = &self.leaving else { return Ok(()) };
        let known = self.reference.is_some() && leaving.factors.is_some() && leaving.squares.is_none();
        require(known && self.gate.is_some() != self.sums.is_some(), NAME, || {
            "results are left ready with factors by a reference, behind a gate or with sums of squares".into()
        })?;
        leaving.check([d.shape[0], d.shape[1]], NAME)
    }

    /// Powers of two of the factors of what is left above its mean.
    fn above(&self) -> u32 {
        if self.gate.is_some() { ready::GATED_ABOVE } else { ready::NORMED_ABOVE }
    }

    /// Shared memory for tiles of so many columns and matrices of so many rows: sums of a gate, factors, magnitudes and squares.
    pub(super) fn gate_bytes(&self, columns: usize, rows: usize) -> usize {
        let sums = if self.gate.is_some() { 4 * rows * columns } else { 0 };
        if self.wants_lanes() { sums + 4 * columns + 2 * rows * rows } else { 0 }
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
        if self.has_more_results() && tile != rows {
            return unsupported(format!("a gate, or columns that are left, in tiles of {tile} rows, matrices have {rows}"));
        }
        let mut shader = shader
            .define("GATED", u32::from(self.gate.is_some()))
            .define("FACTORS", u32::from(self.ready.is_none_or(|ready| ready.factors.is_some())))
            .define("LEAVING", u32::from(self.leaving.is_some()))
            .define("LEFT_WEIGHT", u32::from(self.left_weight.is_some()))
            .define("SUMS", u32::from(self.sums.is_some()))
            .define("FRACTION", ready::FRACTION)
            .define("MOST_SQUARES", format!("{:.1}", ready::MOST_SQUARES))
            .define("SAMPLED_APART", self.samples.map_or(1, |samples| Samples::tiles(self.product.d.shape[0], samples.rows).0))
            .define("REFERENCE_ROWS", self.reference.map_or(1, |samples| samples.rows))
            .define("SAMPLES", self.samples.map_or(0, |samples| samples.sums.shape[1]))
            .define("REFERENCES", self.reference.map_or(0, |samples| samples.sums.shape[1]));
        if let Some(Gated { kind, .. }) = self.gate {
            shader = shader.define("GATE", kind.function().map_or("silu", Function::glsl));
        }
        let norm = self.before.and_then(|before| before.norm()).filter(|_| self.ready.is_some());
        if let Some(norm) = norm {
            shader = shader.define("NORMED_READY", 1).define("EPS", format!("uintBitsToFloat({:#x}u)", norm.eps.to_bits()));
        }
        if let Some(ready) = self.leaving {
            shader = shader.define("LEFT_PIECE", ready.piece).define("LEFT_ABOVE", self.above());
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
    }

    /// What is left beside d, when that is there.
    pub(super) fn leave(&self, memory: &mut HostMemory) {
        if self.leaving.is_none() && self.samples.is_none() && self.sums.is_none() {
            return;
        }
        let floats = memory.read(&self.product.d);
        if let (Some(leaving), Some(reference)) = (&self.leaving, &self.reference) {
            let factors = reference.factors(self.above(), memory);
            let weight = self.left_weight.map(|weight| memory.read(&weight));
            let weighed = |(i, x): (usize, &f64)| x * weight.as_ref().map_or(1.0, |weight| weight[i % weight.len()]);
            leaving.write(&floats.iter().enumerate().map(weighed).collect::<Vec<_>>(), &factors, memory);
            if let Some(squares) = self.squares() {
                ready::add_squares(&squares, ready::rows(leaving.order), &floats, &factors, memory);
            }
        }
        if let Some(sums) = self.sums {
            let next = sums.narrow(2, 1, 1);
            memory.write(&next, &vec![0.0; next.len()]);
        }
        if let Some(samples) = &self.samples {
            samples.write(&floats, memory);
        }
    }
}
