//! Fused KV append: attention of single tokens that includes `kv_write`. It applies RoPE to Q and K and writes this token's K and V to the
//! caches before it attends, which saves a step in every layer (`docs/ladder/decode.md`).

use kiln_gguf::TensorType::{F16, F32};
use kiln_gpu::{Address, Caps, FIELD_BYTES, Shader};

use super::plan::{self, number, unsupported};
use super::threads::teams;
use super::{Call, Mask, NAME};
use crate::formats;
use crate::host::HostMemory;
use crate::kv_write::{self, HEAD_THREADS};
use crate::mul_mat::Norm;
use crate::operation::{Choice, Invalid, Operation as _, Path, Unsupported, maybe, require, within_32_bits, word};
use crate::rope::{self, RopeStyle};
use crate::tensor::Tensor;

/// K and V of the one new token of each sequence. The queries of the call are neither normed nor roped yet, and stay as they are.
/// Where a token sees its own position, that key is the one in row `ids` of the caches, and no other sequence sees that row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvAppend {
    /// Keys, F32 `[HSK, kv_heads, batch]`, as `kv_write` takes them.
    pub k: Tensor,
    /// Values, F32 `[HSV, kv_heads, batch]`.
    pub v: Tensor,
    /// How every head of the queries and of the keys is normed before it is turned.
    pub norms: Option<[Norm; 2]>,
    /// I32 `[batch]`: rows of the caches; a number outside of them drops the row.
    pub ids: Tensor,
    /// How fast pairs turn, and which elements are pairs: the fields of [`rope::Call`].
    pub freqs: Tensor,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Rotated elements of a head.
    pub n_dims: usize,
    /// The first rotated element of a head.
    pub offset: usize,
    /// Factor of the rotated elements.
    pub magnitude: f32,
}

kiln_gpu::params! {
    pub(super) struct Params {
        k_new: Address,
        v_new: Address,
        freqs: Address,
        ids: Address,
        q_weight: Address,
        k_weight: Address,
        new_stride: [u32; 2],
        cache_rows: u32,
    }
}

/// A cache `[width, rows, heads]` as `[width * heads, rows]`.
fn by_row(cache: &Tensor) -> Tensor {
    let [width, rows, heads, _] = cache.shape;
    let [element, row, _, batch] = cache.stride;
    Tensor { shape: [width * heads, rows, 1, 1], stride: [element, row, batch, batch], ..*cache }
}

/// Whether two tensors are the same elements in the same places.
fn same(a: &Tensor, b: &Tensor) -> bool {
    let strides = (0..4).all(|d| a.shape[d] == 1 || a.stride[d] == b.stride[d]);
    (a.slot, a.offset, a.ty, a.shape) == (b.slot, b.offset, b.ty, b.shape) && strides
}

impl Call {
    /// The `kv_write` that this call does first, if it does.
    pub(super) fn writing(&self) -> Option<kv_write::Call> {
        let (Some(a), Mask::Causal { positions, .. }) = (self.kv_append, self.mask) else { return None };
        let [element, _, head, batch] = self.q.stride;
        let [width, _, heads, tokens] = self.q.shape;
        let stride = [element, head, batch, batch * tokens];
        let x = Tensor { shape: [width, heads, tokens, 1], stride, ..self.q };
        let KvAppend { k, v, norms, ids, freqs, style, n_dims, offset, magnitude } = a;
        let sections = [0; 4];
        let q = rope::Call { x, y: x, positions, freqs, style, n_dims, offset, sections, magnitude, backward: false };
        Some(kv_write::Call { q, k, v, norms, ids, k_cache: by_row(&self.k), v_cache: by_row(&self.v) })
    }

    /// The two steps that this call stands for.
    pub(super) fn apart(&self) -> Option<[crate::Call; 2]> {
        self.writing().map(|write| [write.into(), Call { kv_append: None, ..*self }.into()])
    }

    /// This call with `write`, which turns its queries and writes its caches, in it. The caller guarantees that
    /// row `ids` is the row that the page table has for the token's position: operands do not show it.
    pub(crate) fn kv_append(&self, write: &kv_write::Call) -> Option<Call> {
        let kv_write::Call { q, k, v, norms, ids, .. } = *write;
        let rope::Call { freqs, style, n_dims, offset, magnitude, .. } = q;
        let kv_append = KvAppend { k, v, norms, ids, freqs, style, n_dims, offset, magnitude };
        let call = Call { kv_append: Some(kv_append), ..*self };
        let again = call.writing()?;
        let pairs = [
            (again.q.x, q.x),
            (again.q.positions, q.positions),
            (again.k_cache, write.k_cache),
            (again.v_cache, write.v_cache),
        ];
        let plain = !q.backward && q.x == q.y && matches!(style, RopeStyle::Normal | RopeStyle::Neox);
        (self.kv_append.is_none() && plain && pairs.iter().all(|(a, b)| same(a, b))).then_some(call)
    }

    pub(super) fn check_kv_append(&self) -> Result<(), Invalid> {
        if self.kv_append.is_none() {
            return Ok(());
        }
        let causal = matches!(self.mask, Mask::Causal { both: false, .. });
        let single = self.q.shape[1] == 1 && self.sequences.is_none() && !self.sees_ahead();
        require(causal && single && self.pages.is_some(), NAME, || {
            format!("q is {}: keys arrive with one token of each batch, a causal mask and pages", self.q)
        })?;
        for (name, cache) in [("k", &self.k), ("v", &self.v)] {
            let beside = cache.shape[2] == 1 || cache.stride[2] == cache.row_bytes();
            require(beside, NAME, || format!("heads of {name} {cache} must lie side by side where keys arrive"))?;
        }
        require(self.k.slot != self.v.slot, NAME, || "keys and values arrive in caches of their own".into())?;
        self.writing().map_or(Ok(()), |write| write.check())
    }

    /// Runs `kv_write` and then `attend`; the queries are what they were afterwards.
    pub(super) fn in_two_steps(
        &self,
        memory: &mut HostMemory,
        first: impl FnOnce(&kv_write::Call, &mut HostMemory),
        attend: impl FnOnce(&Call, &mut HostMemory),
    ) {
        let Some(write) = self.writing() else { return attend(self, memory) };
        let before = memory.bytes(self.q.slot).to_vec();
        first(&write, memory);
        attend(&Call { kv_append: None, ..*self }, memory);
        memory.bytes_mut(self.q.slot).copy_from_slice(&before);
    }
}

/// The path of teams, where it can do it.
pub(super) fn pick(call: &Call, kv_append: &KvAppend, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    let no = |reason: String| Err(unsupported(reason));
    within_32_bits(NAME, [kv_append.k.stride[2], kv_append.v.stride[2]])?;
    let room = caps.limits.max_push_bytes.min(256) as usize;
    let bytes = plan::params(call, &|_| Address::default()).len() + FIELD_BYTES;
    if bytes > room {
        return no(format!("{bytes} bytes of parameters, the device takes {room}"));
    }
    // Keys arrive only where attention would go the same path without.
    let path = match want {
        Some(path) => path,
        None => plan::pick(&Call { kv_append: None, ..*call }, caps, None)?.path,
    };
    if path != Path::Scalar {
        return no(format!("keys do not arrive on the path {}", path.name()));
    }
    let most = number(call, caps, Path::Scalar, "arrive")?;
    if call.keys() > most {
        return no(format!("{} keys; the tuning table lets keys arrive beside {most} at most", call.keys()));
    }
    if ![call.k.ty, call.v.ty].iter().all(|ty| matches!(ty, F16 | F32)) {
        return no(format!("keys and values arrive in caches of F16 and F32, not {} and {}", call.k.ty, call.v.ty));
    }
    let pairs = kv_append.style.pairs(kv_append.n_dims);
    if pairs == 0 || !pairs.is_multiple_of(4) || !kv_append.offset.is_multiple_of(8) {
        return no(format!("{pairs} pairs from element {} are no whole number of threads' work", kv_append.offset));
    }
    let weights = kv_append.norms.into_iter().flatten().filter_map(|norm| norm.weight);
    if let Some(t) = [kv_append.k, kv_append.v].into_iter().chain(weights).find(|t| !formats::is_aligned(t)) {
        return no(format!("rows of {t} must lie at multiples of 16 bytes"));
    }
    // The sums of squares are those of `kv_write`, which has one partial sum for each of its subgroups.
    let size = caps.subgroups.size.max(1);
    let adds = caps.subgroups.arithmetic && HEAD_THREADS.is_multiple_of(size) && HEAD_THREADS / size <= size;
    if kv_append.norms.is_some() && !adds {
        return no(format!("subgroups of {size} do not add up the squares of {HEAD_THREADS} threads"));
    }
    teams(call, caps, Path::Scalar)
}

/// What `kv_append.glsl` wants to know.
pub(super) fn defines(shader: Shader, call: &Call) -> Shader {
    let Some(a) = call.kv_append else { return shader.define("KV_APPEND", 0) };
    let bits = |x: f32| format!("{}u", x.to_bits());
    let shader = shader
        .define("KV_APPEND", 1)
        .define("PAIRS", a.style.pairs(a.n_dims))
        .define("OFFSET", a.offset)
        .define("MAGNITUDE", bits(a.magnitude))
        .define("ADJACENT", u32::from(a.style == RopeStyle::Normal))
        .define("K_HALF", u32::from(call.k.ty == F16))
        .define("V_HALF", u32::from(call.v.ty == F16))
        .define("NORMS", u32::from(a.norms.is_some()));
    let Some([q, k]) = a.norms else { return shader };
    shader
        .define("NORM_THREADS", HEAD_THREADS)
        .define("Q_WEIGHT", u32::from(q.weight.is_some()))
        .define("K_WEIGHT", u32::from(k.weight.is_some()))
        .define("Q_EPS", bits(q.eps))
        .define("K_EPS", bits(k.eps))
}

/// What stands behind the parameters of a causal call.
pub(super) fn params(call: &Call, kv_append: &KvAppend, at: &dyn Fn(&Tensor) -> Address) -> Params {
    let weight = |i: usize| maybe(at)(kv_append.norms.and_then(|norms| norms[i].weight));
    Params {
        k_new: at(&kv_append.k),
        v_new: at(&kv_append.v),
        freqs: at(&kv_append.freqs),
        ids: at(&kv_append.ids),
        q_weight: weight(0),
        k_weight: weight(1),
        new_stride: [word(kv_append.k.stride[2]), word(kv_append.v.stride[2])],
        // Ids are signed: as unsigned numbers the negative ones lie above this.
        cache_rows: word(call.k.shape[1].min(i32::MAX as usize)),
    }
}
