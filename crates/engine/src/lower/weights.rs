//! Weights are read in the form in which the device has them: packed on their way to it, or kept decoded besides. Such forms are
//! slots of the plan, which the executor fills when it makes the plan ready.

use std::collections::{HashMap, HashSet};

use kiln_gguf::{TensorType, quant};
use kiln_gpu::Caps;
use kiln_kernels::tensor::{Slot, Tensor};
use kiln_kernels::{Call, mul_mm, packing};

use super::Target;
use crate::plan::{Plan, SlotKind};

/// Which weights are packed for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// Those that the device reads faster so.
    Faster,
    /// All that can be: for tests on devices that gain nothing.
    All,
    /// None, to see what packing gains.
    None,
}

/// Which weights the device keeps as F16 besides, once a product of large N has decoded them: it need not do so
/// again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DequantCache {
    /// As many as fit a quarter of the device's memory and half of what is free.
    WhenRoom,
    /// All weights of such products: for tests on devices that do not decode.
    All,
    /// None.
    None,
}

/// How weights lie on a device, and how products of large N add up.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// Which are packed.
    pub packing: Packing,
    /// Which are kept decoded.
    pub f16_cache: DequantCache,
    /// Bytes that there are for weights which are not kept yet.
    pub room: u64,
    /// Slots whose weights are kept already.
    pub cached: Vec<Slot>,
    /// Whether products of large N add up in 16 bits, where matrix units can.
    pub half_sums: bool,
}

impl Weights {
    /// Nothing but what the file has.
    pub(super) fn as_they_are() -> Weights {
        Weights { packing: Packing::None, f16_cache: DequantCache::None, room: 0, cached: Vec::new(), half_sums: false }
    }

    /// The packed type for rows of `len` elements of a type, where they should have one.
    pub fn packed_type(&self, ty: TensorType, len: usize, caps: &Caps) -> Option<TensorType> {
        match self.packing {
            Packing::Faster => Some(packing::type_on(ty, len, caps)).filter(|to| *to != ty),
            Packing::All => quant::packed_type(ty, len),
            Packing::None => None,
        }
    }
}

pub(super) fn run(plan: &mut Plan, target: &Target) {
    if let Some(caps) = &target.caps {
        pack(plan, &target.weights, caps);
        keep(plan, target, caps);
    }
}

/// What was packed is read so.
fn pack(plan: &mut Plan, weights: &Weights, caps: &Caps) {
    let packed = |slot: usize| {
        let info = &plan.slots[slot];
        if info.kind == SlotKind::Weight { weights.packed_type(info.ty, info.shape[0], caps) } else { None }
    };
    let types: Vec<Option<TensorType>> = (0..plan.n_fixed).map(packed).collect();
    let reads = plan.steps.iter().flat_map(|step| step.call.operation().reads());
    let reads: HashSet<Slot> = reads.map(|tensor| tensor.slot).collect();
    let mut forms = HashMap::new();
    for (at, ty) in types.into_iter().enumerate() {
        let Some(ty) = ty else { continue };
        let of = Slot(u32::try_from(at).expect("slots are numbered with 32 bits"));
        if reads.contains(&of) {
            let (name, shape) = (format!("{}.{}", plan.slots[at].name, ty.name()), plan.slots[at].shape);
            forms.insert(of, (plan.add(&name, SlotKind::WeightVariant(of), ty, shape).slot, ty));
        }
    }
    for step in &mut plan.steps {
        // A step that cannot read what was packed reads the slot as it was, and the executor refuses it by name.
        let mut call = step.call.clone();
        if packing::use_packed(&mut call, &|slot| forms.get(&slot).copied()).is_ok() {
            step.call = call;
        }
    }
}

/// Products of large N add up as they should, and read weights that are kept decoded.
fn keep(plan: &mut Plan, target: &Target, caps: &Caps) {
    let (mut room, mut forms) = (target.weights.room, HashMap::new());
    for at in 0..plan.steps.len() {
        let Call::MulMm(call) = &mut plan.steps[at].call else { continue };
        call.half_sums |= target.weights.half_sums;
        let wanted = call.ids.is_none()
            && match target.weights.f16_cache {
                DequantCache::WhenRoom => super::target::with_ample_memory(call).decodes(caps),
                DequantCache::All => true,
                DequantCache::None => false,
            };
        let mut call = call.clone();
        let all: Vec<Tensor> = matrices(&mut call).into_iter().map(|t| *t).collect();
        if !wanted || !all.iter().all(|t| is_whole(plan, t)) {
            continue;
        }
        let of = |t: &Tensor| origin(plan, t.slot);
        let known = |t: &&Tensor| target.weights.cached.contains(&of(t)) || forms.contains_key(&of(t));
        let bytes = all.iter().filter(|t| !known(t)).map(|t| 2 * t.len() as u64).sum();
        if target.weights.f16_cache == DequantCache::WhenRoom {
            let Some(left) = room.checked_sub(bytes) else { continue };
            room = left;
        }
        for tensor in matrices(&mut call) {
            let of = origin(plan, tensor.slot);
            let name = format!("{}.{}", plan.slots[of.0 as usize].name, TensorType::F16);
            let slot = *forms
                .entry(of)
                .or_insert_with(|| plan.add(&name, SlotKind::WeightVariant(of), TensorType::F16, tensor.shape).slot);
            *tensor = Tensor::dense(slot, TensorType::F16, tensor.shape);
        }
        plan.steps[at].call = call.into();
    }
}

/// The weights of a product and of those beside it.
fn matrices(call: &mut mul_mm::Call) -> Vec<&mut Tensor> {
    std::iter::once(&mut call.product.a).chain(call.others.iter_mut().map(|s| &mut s.a)).collect()
}

/// Whether a tensor is all of its weights.
fn is_whole(plan: &Plan, t: &Tensor) -> bool {
    let slot = &plan.slots[t.slot.0 as usize];
    let weights = matches!(slot.kind, SlotKind::Weight | SlotKind::WeightVariant(_));
    weights && t.ty.is_quantised() && t.offset == 0 && t.is_dense() && t.span().1 == slot.bytes
}

/// The slot that holds the weights as the file has them.
fn origin(plan: &Plan, slot: Slot) -> Slot {
    match plan.slots[slot.0 as usize].kind {
        SlotKind::WeightVariant(of) => of,
        _ => slot,
    }
}
