//! Fragment path: activations that arrive in fragment order, results emitted in it ([`crate::packed_b`]), and the gate over two matrices
//! whose result is emitted. These replace the pass that packs activations.

use kiln_gguf::TensorType;
use kiln_gpu::{Caps, Shader};

use super::params::LaneParams;
use super::pick::unsupported;
use super::{Call, NAME};
use crate::glu::{self, Gate};
use crate::host::HostMemory;
use crate::mul_mat::Product;
use crate::operation::{Invalid, Unsupported, require};
use crate::packed_b::{self, MagnitudeProbe, PackedB};
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
    /// Whether only the fragment path can run it.
    pub(super) fn wants_fragments(&self) -> bool {
        self.packed_b.is_some() || self.has_more_results()
    }

    /// Whether the epilogue does more than write d: a gate, or packed activations, probes and sums besides.
    fn has_more_results(&self) -> bool {
        self.gate.is_some() || self.magnitude_probe.is_some() || self.emit_packed_b.is_some() || self.sums.is_some()
    }

    /// Whether something may be out of range: emitted activations, or the squares that a norm is applied from.
    fn can_overflow(&self) -> bool {
        self.emit_packed_b.is_some() || self.packed_b.is_some_and(|packed_b| packed_b.squares.is_some())
    }

    /// Where squares are accumulated: only with emitted activations.
    fn squares(&self) -> Option<Tensor> {
        self.sums.filter(|_| self.emit_packed_b.is_some()).map(|sums| sums.narrow(2, 0, 1))
    }

    /// What it reads beside the operands of a plain product.
    pub(super) fn takes(&self) -> Vec<Tensor> {
        let packed_b = self.packed_b.iter().flat_map(PackedB::all);
        // Squares are added to what is there.
        let more = [self.emit_weight, self.squares()].into_iter().flatten();
        self.gate
            .map(|gate| gate.up)
            .into_iter()
            .chain(more)
            .chain(packed_b)
            .chain(self.scale_hint.map(|magnitude_probe| magnitude_probe.sums))
            // It may have been set before.
            .chain(self.overflow)
            .collect()
    }

    /// What it writes beside d.
    pub(super) fn leaves(&self) -> Vec<Tensor> {
        let sums = [self.squares(), self.sums.map(|sums| sums.narrow(2, 1, 1))].into_iter().flatten();
        self.emit_packed_b
            .iter()
            .flat_map(PackedB::all)
            .chain(sums)
            .chain(self.magnitude_probe.map(|magnitude_probe| magnitude_probe.sums))
            .chain(self.overflow)
            .collect()
    }

    /// What is written besides d, by activation vector.
    pub(super) fn emitted_by_column(&self, written: &Tensor, values: &[f64]) -> Option<Vec<Vec<f64>>> {
        if self.squares() == Some(*written) {
            return Some(packed_b::sums_of_squares(values));
        }
        if let Some(magnitude_probe) = self.magnitude_probe.filter(|magnitude_probe| magnitude_probe.sums == *written) {
            return Some(magnitude_probe.by_column(values));
        }
        let [m, n, ..] = self.product.d.shape;
        self.emit_packed_b.and_then(|emit_packed_b| emit_packed_b.by_column([m, n], written, values))
    }

    pub(super) fn check_packed_b(&self) -> Result<(), Invalid> {
        if !(self.wants_fragments() || self.scale_hint.is_some() || self.overflow.is_some()) {
            return Ok(());
        }
        let can = self.can_overflow();
        require(can == self.overflow.is_some(), NAME, || {
            format!("a flag for what is out of range: {}, and something that can be: {can}", self.overflow.is_some())
        })?;
        if let Some(overflow) = self.overflow {
            let fits = overflow.ty == TensorType::I32 && overflow.shape == [1; 4];
            require(fits, NAME, || format!("the flag for what is out of range is {overflow}, want I32[1]"))?;
        }
        let Product { a, b, d } = self.product;
        let plain = self.ids.is_none() && b.shape[2..] == [1, 1];
        require(plain, NAME, || "gates and packed activations are for products without experts or batches".into())?;
        if let Some(packed_b) = &self.packed_b {
            let normed = self.prologue.is_some_and(|prologue| prologue.norm().is_some());
            let fits = normed == packed_b.squares.is_some() && (normed || self.prologue.is_none());
            require(fits, NAME, || {
                "activations that come packed are not made on the way, and normed by their squares".into()
            })?;
            packed_b.check([b.shape[0], b.shape[1]], NAME)?;
        }
        require(!self.has_more_results() || self.others.is_empty(), NAME, || {
            "one product alone has a gate or emits packed activations".into()
        })?;
        if let Some(Gated { kind, up }) = self.gate {
            let same = (up.ty, up.shape, up.stride) == (a.ty, a.shape, a.stride);
            require(same, NAME, || format!("up is {up}, want the type, extents and strides of {a}"))?;
            require(kind.function().is_some(), NAME, || format!("{} is no plain activation", kind.name()))?;
            let bare = self.epilogue.bias.is_none() && self.epilogue.residual.is_none();
            require(bare, NAME, || "a gate has no bias or residual beside it".into())?;
        }
        let magnitude_probe = [self.magnitude_probe, self.scale_hint];
        magnitude_probe.iter().flatten().try_for_each(|magnitude_probe| magnitude_probe.check(d.shape[1], NAME))?;
        let want = |magnitude_probe: &MagnitudeProbe| MagnitudeProbe::tiles(d.shape[0], magnitude_probe.rows).1;
        if let Some(magnitude_probe) =
            self.magnitude_probe.filter(|magnitude_probe| magnitude_probe.sums.shape[1] != want(magnitude_probe))
        {
            let reason = format!(
                "magnitude probes are {}, want those of {} tiles",
                magnitude_probe.sums,
                want(&magnitude_probe)
            );
            return Err(Invalid { operation: NAME, reason });
        }
        if let Some(sums) = self.sums {
            let fits = sums.ty == TensorType::I32
                && sums.is_dense()
                && sums.shape == [d.shape[1], 2, 2, 1]
                && self.gate.is_none();
            require(fits, NAME, || format!("sums are {sums}, want I32[{}, 2, 2], and no gate", d.shape[1]))?;
        }
        if let Some(weight) = self.emit_weight {
            let fits =
                weight.ty == TensorType::F32 && weight.is_dense() && weight.len() == d.shape[0] && self.gate.is_none();
            require(fits, NAME, || {
                format!("the weights of the norm that follows are {weight}, want F32[{}], and no gate", d.shape[0])
            })?;
        }
        let Some(emit_packed_b) = &self.emit_packed_b else { return Ok(()) };
        let known = self.scale_hint.is_some() && emit_packed_b.factors.is_some() && emit_packed_b.squares.is_none();
        require(known && self.gate.is_some() != self.sums.is_some(), NAME, || {
            "results are emitted packed with factors by a scale hint, behind a gate or with sums of squares".into()
        })?;
        emit_packed_b.check([d.shape[0], d.shape[1]], NAME)
    }

    /// Exponent of the emitted scales above the mean.
    fn above(&self) -> u32 {
        if self.gate.is_some() { packed_b::GATED_ABOVE } else { packed_b::NORMED_ABOVE }
    }

    /// Shared memory for tiles of N activations and matrices of this many rows: sums of a gate, factors, magnitudes and squares.
    pub(super) fn gate_bytes(&self, columns: usize, rows: usize) -> usize {
        let sums = if self.gate.is_some() { 4 * rows * columns } else { 0 };
        if self.wants_fragments() { sums + 4 * columns + 2 * rows * rows } else { 0 }
    }

    /// The defines of all this, for tiles and matrices of this many rows; the order must be that of the device.
    pub(super) fn define_packed_b(
        &self,
        shader: Shader,
        caps: &Caps,
        [tile, rows]: [usize; 2],
    ) -> Result<Shader, Unsupported> {
        let other = [self.packed_b, self.emit_packed_b]
            .into_iter()
            .flatten()
            .any(|packed_b| Some(packed_b.layout) != caps.fragment_layout);
        if other {
            return unsupported("packed activations lie in another device's fragment layout");
        }
        if let Some(magnitude_probe) = self.magnitude_probe.filter(|magnitude_probe| magnitude_probe.rows != rows) {
            return unsupported(format!("magnitude probes of {} rows, matrices have {rows}", magnitude_probe.rows));
        }
        if self.has_more_results() && tile != rows {
            return unsupported(format!(
                "a gate, or columns that are left, in tiles of {tile} rows, matrices have {rows}"
            ));
        }
        let (room, bytes) = (caps.limits.max_push_bytes.min(256) as usize, size_of::<LaneParams>());
        if bytes > room {
            return unsupported(format!("{bytes} bytes of parameters, the device takes {room}"));
        }
        let mut shader = shader
            .define("GATED", u32::from(self.gate.is_some()))
            .define("FACTORS", u32::from(self.packed_b.is_none_or(|packed_b| packed_b.factors.is_some())))
            .define("EMIT_PACKED_B", u32::from(self.emit_packed_b.is_some()))
            .define("EMIT_WEIGHT", u32::from(self.emit_weight.is_some()))
            .define("SUMS", u32::from(self.sums.is_some()))
            .define("MOST_SQUARES", format!("{:.1}", packed_b::MOST_SQUARES))
            .define("OVERFLOW", u32::from(self.overflow.is_some()))
            .define("LEAST_SQUARES", format!("{:e}", packed_b::LEAST_SQUARES))
            .define(
                "PROBES_APART",
                self.magnitude_probe.map_or(1, |magnitude_probe| {
                    MagnitudeProbe::tiles(self.product.d.shape[0], magnitude_probe.rows).0
                }),
            )
            .define("SCALE_HINT_ROWS", self.scale_hint.map_or(1, |magnitude_probe| magnitude_probe.rows))
            .define("MAGNITUDE_PROBES", self.magnitude_probe.map_or(0, |magnitude_probe| magnitude_probe.sums.shape[1]))
            .define("SCALE_HINTS", self.scale_hint.map_or(0, |magnitude_probe| magnitude_probe.sums.shape[1]));
        if let Some(Gated { kind, .. }) = self.gate {
            shader = shader.define("GATE", kind.function().map_or("silu", Function::glsl));
        }
        let norm = self.prologue.and_then(|prologue| prologue.norm()).filter(|_| self.packed_b.is_some());
        if let Some(norm) = norm {
            shader = shader
                .define("NORMED_PACKED_B", 1)
                .define("EPS", format!("uintBitsToFloat({:#x}u)", norm.eps.to_bits()));
        }
        if let Some(packed_b) = self.emit_packed_b {
            shader = shader.define("EMIT_PIECE", packed_b.piece).define("EMIT_ABOVE", self.above());
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
            let bare = Call {
                prologue: self.prologue,
                epilogue: self.epilogue,
                scratch: self.scratch,
                ..Call::plain(self.product)
            };
            run(&Call { product: Product { a, d: part, ..self.product }, ..bare }, memory);
            part
        });
        join(&glu::Call { kind, gate: parts[0], up: parts[1], dst: d }, memory);
        memory.slots.truncate(memory.slots.len() - 2);
    }

    /// Writes what is emitted besides d, once d is written.
    pub(super) fn leave(&self, memory: &mut HostMemory) {
        if self.emit_packed_b.is_none()
            && self.magnitude_probe.is_none()
            && self.sums.is_none()
            && self.overflow.is_none()
        {
            return;
        }
        let squares = self.packed_b.and_then(|packed_b| packed_b.squares);
        let too_small = |sums: &[f64]| sums.iter().any(|sum| packed_b::is_too_small(*sum));
        let mut holds = !squares.is_some_and(|at| too_small(&packed_b::sums_of_squares(&memory.read(&at)).concat()));
        let floats = memory.read(&self.product.d);
        if let (Some(emit_packed_b), Some(scale_hint)) = (&self.emit_packed_b, &self.scale_hint) {
            let factors = scale_hint.factors(self.above(), memory);
            let weight = self.emit_weight.map(|weight| memory.read(&weight));
            let weighed = |(i, x): (usize, &f64)| x * weight.as_ref().map_or(1.0, |weight| weight[i % weight.len()]);
            holds &= emit_packed_b.write(&floats.iter().enumerate().map(weighed).collect::<Vec<_>>(), &factors, memory);
            if let Some(squares) = self.squares() {
                let rows = packed_b::rows(emit_packed_b.layout);
                holds &= packed_b::add_squares(&squares, rows, &floats, &factors, memory);
            }
        }
        if let Some(overflow) = self.overflow.filter(|_| !holds) {
            memory.write(&overflow, &[1.0]);
        }
        if let Some(sums) = self.sums {
            let next = sums.narrow(2, 1, 1);
            memory.write(&next, &vec![0.0; next.len()]);
        }
        if let Some(magnitude_probe) = &self.magnitude_probe {
            magnitude_probe.write(&floats, memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::{Operation as _, Path};
    use kiln_gpu::FragmentLayout;

    /// A product of this many rows whose squares are added up for a norm.
    fn before_a_norm(m: usize, order: FragmentLayout) -> Call {
        let mut slots = 0..;
        let mut dense = |ty, shape| Tensor::dense(Slot(slots.next().unwrap()), ty, shape);
        let (k, n, rows) = (256, 16, packed_b::rows(order));
        let product = Product {
            a: dense(TensorType::Q8_0, [k, m, 1, 1]),
            b: dense(TensorType::F32, [k, n, 1, 1]),
            d: dense(TensorType::F32, [m, n, 1, 1]),
        };
        let halves = dense(TensorType::F16, [packed_b::len(m, n), 1, 1, 1]);
        let factors = Some(dense(TensorType::F32, [n, 1, 1, 1]));
        let tiles = MagnitudeProbe::tiles(m, rows).1;
        let mut magnitude_probe = || Some(MagnitudeProbe { sums: dense(TensorType::F32, [n, tiles, 1, 1]), rows });
        Call {
            emit_packed_b: Some(PackedB { halves, layout: order, piece: 64, factors, squares: None }),
            scale_hint: magnitude_probe(),
            magnitude_probe: magnitude_probe(),
            sums: Some(dense(TensorType::I32, [n, 2, 2, 1])),
            overflow: Some(dense(TensorType::I32, [1; 4])),
            ..Call::plain(product)
        }
    }

    #[test]
    fn a_call_that_can_overflow_has_a_flag_and_no_other_one_has() {
        for layout in [FragmentLayout::Mma16x8, FragmentLayout::Row8] {
            let call = before_a_norm(256, layout);
            assert_eq!(call.check_packed_b(), Ok(()));
            let reason = |call: Call| call.check_packed_b().unwrap_err().reason;
            assert!(reason(Call { overflow: None, ..call.clone() }).contains("a flag for what is out of range: false"));
            let bare = Call { emit_packed_b: None, scale_hint: None, ..call.clone() };
            assert!(reason(bare).contains("something that can be: false"));
            let wide = call.overflow.map(|flag| Tensor::dense(flag.slot, TensorType::I32, [2, 1, 1, 1]));
            assert!(reason(Call { overflow: wide, ..call }).contains("want I32[1]"));
        }
    }

    #[test]
    fn fused_products_do_not_wait_for_each_other_because_of_the_flag() {
        let is_normed =
            |case: &crate::case::Case| case.name.contains("fused products") && case.name.contains("Mma16x8");
        let case = super::super::packed_b_cases::cases().into_iter().find(is_normed).unwrap();
        let (crate::Call::MulMm(call), ..) = case.build() else { panic!("{} is another operation", case.name) };
        let choice = call.pick(&Caps::example_nvidia(), Some(Path::Fragment)).unwrap();
        let sets_it = |launch: usize| call.touches(&choice, launch).writes.contains(&call.overflow.unwrap());
        let launches: Vec<bool> = (0..choice.launches.len()).map(sets_it).collect();
        assert_eq!(launches, [false, true]);
    }
}
