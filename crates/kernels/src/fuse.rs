//! One call instead of several. What an operation can take in is said in its own folder (`fuse.rs` there); these
//! functions only find the folder. They answer whether the meaning is the same. Whether the operands fit is for `check`,
//! whether a device can run it is for `pick`.

use crate::Call;
use crate::glu;
use crate::packed_b::PackedB;
use crate::rms_norm;
use crate::rope;
use crate::rounded::Rounding;
use crate::set_rows;
use crate::tensor::Tensor;
use crate::{kv_write, mul_mat_vec};

/// `first` with `next` as its last part: `next` reads the one result of `first`, and nothing else does.
pub fn after(first: &Call, next: &Call) -> Option<Call> {
    match first {
        Call::MulMatVec(call) => call.after(next).map(Into::into),
        Call::MulMm(call) => call.after(next).map(Into::into),
        Call::Wkv6(call) => call.after(next).map(Into::into),
        Call::Wkv7(call) => call.after(next).map(Into::into),
        _ => None,
    }
}

/// `last` with `previous` as its first part: `last` reads the one result of `previous`. If other calls read that result as
/// well, it is `kept`: the new call writes it too.
pub fn before(last: &Call, previous: &Call, kept: bool) -> Option<Call> {
    match last {
        Call::MulMatVec(call) if !kept => call.before(previous).map(Into::into),
        Call::MulMm(call) if !kept => call.with_prologue(previous).map(Into::into),
        Call::SumRows(call) if !kept => call.before(previous).map(Into::into),
        Call::TokenMix(call) => call.before(previous, kept).map(Into::into),
        _ => None,
    }
}

/// Two GEMMs of the same activations as one.
pub fn beside(first: &Call, other: &Call) -> Option<Call> {
    match (first, other) {
        (Call::MulMatVec(first), Call::MulMatVec(other)) => first.beside(other).map(Into::into),
        (Call::MulMm(first), Call::MulMm(other)) => first.beside(other).map(Into::into),
        _ => None,
    }
}

/// Two products of the same activations and the gate between their results as one.
pub fn gated(gate: &Call, up: &Call, glu: &glu::Call) -> Option<Call> {
    match (gate, up) {
        (Call::MulMatVec(gate), Call::MulMatVec(up)) => mul_mat_vec::gated(gate, up, glu).map(Into::into),
        _ => None,
    }
}

/// The choice of experts with the product of its router, for one token. `counter` is zero before and after every run.
pub fn routed(choice: &Call, product: &Call, counter: Tensor) -> Option<Call> {
    match (choice, product) {
        (Call::TopkMoe(choice), Call::MulMatVec(product)) => choice.with_router(product, counter).map(Into::into),
        _ => None,
    }
}

/// Queries and keys turned by their positions, keys and values written to their caches, as one. The queries are turned in
/// place: the result lies where `q.x` lay.
pub fn cache_write(q: &rope::Call, k: &rope::Call, writes: [&set_rows::Call; 2]) -> Option<Call> {
    kv_write::of(q, k, writes).map(Into::into)
}

/// The same with the norms of queries and keys before it. The queries lie where `q.x` lay then.
pub fn normed_cache_write(write: &Call, q: &rms_norm::Call, k: &rms_norm::Call) -> Option<Call> {
    match write {
        Call::KvWrite(write) => kv_write::with_norms(write, q, k).map(Into::into),
        _ => None,
    }
}

/// Attention of single tokens with the step in it that turns their queries and writes their caches. The caller knows that the rows which
/// are written are those that the table of pages has for the positions of the tokens.
pub fn kv_append(attention: &Call, write: &Call) -> Option<Call> {
    match (attention, write) {
        (Call::FlashAttention(attention), Call::KvWrite(write)) => attention.kv_append(write).map(Into::into),
        _ => None,
    }
}

/// The one activation vector of floats that a call leaves and could leave rounded as well.
pub fn column(call: &Call) -> Option<Tensor> {
    match call {
        Call::MulMatVec(call) => Some(call.product.d).filter(|d| d.rows() == 1),
        Call::FlashAttention(call) => Some(call.out).filter(|out| out.shape[2..] == [1, 1] && out.is_dense()),
        _ => None,
    }
}

/// Activations that a call leaves as matrix units take them: their elements, and how many there are.
pub fn emitted_packed_b(call: &Call) -> Option<(PackedB, [usize; 2])> {
    match call {
        Call::MulMm(call) => {
            call.emit_packed_b.map(|packed_b| (packed_b, [call.product.d.shape[0], call.product.d.shape[1]]))
        }
        Call::FlashAttention(call) => call.emit_packed_b.map(|packed_b| (packed_b, call.columns())),
        _ => None,
    }
}

/// A call with its activation vector left rounded as well.
pub fn rounding(call: &Call, rounding: Rounding) -> Option<Call> {
    match call {
        Call::MulMatVec(call) => call.leaving(rounding).map(Into::into),
        Call::FlashAttention(call) => call.leaving(rounding).map(Into::into),
        _ => None,
    }
}
