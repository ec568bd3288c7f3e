//! `kv_write`: between the projections and attention. Queries are turned by their positions, keys are turned and
//! written to the cache, values are written to the cache: four steps that wait for each other in turn, as one. Heads of queries and
//! keys may be normed first.

pub mod cases;
mod cpu;
mod fuse;
mod reference;

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::formats;
use crate::host::HostMemory;
use crate::mul_mat::Norm;
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, Work, grid, only_scalar, require};
use crate::rms_norm;
use crate::rope::{self, RopeStyle};
use crate::rows::reachable;
use crate::set_rows::{self, BLOCK_TYPES};
use crate::tensor::Tensor;

pub(crate) use fuse::{of, with_norms};

const NAME: &str = "kv_write";
const FILE: &str = "kv_write/kv_write.comp";

/// One line for the registry.
pub const SUMMARY: &str = "norm and rope of queries and keys, keys and values written to the cache";

/// Operands of `kv_write`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// How queries `[head_dim, heads, tokens]` are turned, in place; keys are turned the same way.
    pub q: rope::Call,
    /// Keys `[head_dim, kv_heads, tokens]`, F32; heads lie side by side. They stay as they are.
    pub k: Tensor,
    /// Values `[value_dim, kv_heads, tokens]`, F32; heads lie side by side.
    pub v: Tensor,
    /// How every head of the queries and of the keys is normed before it is turned.
    pub norms: Option<[Norm; 2]>,
    /// I32 `[tokens]`, dense: rows of the caches, none twice; a number outside of them drops the row.
    pub ids: Tensor,
    /// Cache of keys `[head_dim * kv_heads, rows]`: what [`set_rows`] writes.
    pub k_cache: Tensor,
    /// Cache of values `[value_dim * kv_heads, rows]`.
    pub v_cache: Tensor,
}

/// Rows of all heads of a token.
fn by_token(t: &Tensor) -> Tensor {
    let [width, heads, tokens, _] = t.shape;
    let stride = [t.stride[0], t.stride[2], t.stride[3], t.stride[3]];
    Tensor { shape: [width * heads, tokens, 1, 1], stride, ..*t }
}

impl Call {
    fn turn_k(&self) -> rope::Call {
        rope::Call { x: self.k, y: self.k, ..self.q }
    }

    /// The norm of the queries, in place.
    fn normed_q(&self) -> Option<rms_norm::Call> {
        self.norms.map(|[norm, _]| rms_norm::Call { x: self.q.x, y: self.q.x, weight: norm.weight, eps: norm.eps })
    }

    /// The norm of the keys, in place.
    fn normed_k(&self) -> Option<rms_norm::Call> {
        self.norms.map(|[_, norm]| rms_norm::Call { x: self.k, y: self.k, weight: norm.weight, eps: norm.eps })
    }

    fn write_k(&self) -> set_rows::Call {
        set_rows::Call { src: by_token(&self.k), ids: self.ids, dst: self.k_cache }
    }

    fn write_v(&self) -> set_rows::Call {
        set_rows::Call { src: by_token(&self.v), ids: self.ids, dst: self.v_cache }
    }
}

kiln_gpu::params! {
    struct Params {
        q: Address,
        k: Address,
        v: Address,
        k_cache: Address,
        v_cache: Address,
        positions: Address,
        freqs: Address,
        ids: Address,
        q_stride: [u32; 2],
        k_stride: u32,
        v_stride: u32,
        k_row: u32,
        v_row: u32,
        rows: u32,
        tokens: u32,
        q_weight: Address,
        k_weight: Address,
        eps: [f32; 2],
    }
}

/// Threads of a workgroup: within every device's limit.
const THREADS: u32 = 128;
/// Threads of a head that is normed: about a pair each.
pub(crate) const HEAD_THREADS: u32 = 64;
/// Most elements of such a head: it lies in shared memory.
const MOST_NORMED: usize = 1024;

fn unsupported<T>(reason: String) -> Result<T, Unsupported> {
    Err(Unsupported { operation: NAME, reason })
}

/// Elements of a cache that one thread writes.
fn unit(cache: &Tensor) -> usize {
    if BLOCK_TYPES.contains(&cache.ty) { 32 } else { 1 }
}

/// Heads of q that a thread turns: sines and cosines cost more than turning.
fn q_group(heads: usize) -> usize {
    [4, 3, 2].into_iter().find(|n| heads.is_multiple_of(*n)).unwrap_or(1)
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let weights = self.norms.into_iter().flatten().filter_map(|norm| norm.weight);
        [self.q.x, self.k, self.v, self.q.positions, self.q.freqs, self.ids].into_iter().chain(weights).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.q.y, self.k_cache, self.v_cache]
    }

    fn early(&self) -> Vec<Tensor> {
        vec![self.q.positions, self.q.freqs]
    }

    fn check(&self) -> Result<(), Invalid> {
        let Call { q, k, v, ids, .. } = self;
        q.check()?;
        self.turn_k().check()?;
        for norm in self.normed_q().into_iter().chain(self.normed_k()) {
            norm.check()?;
        }
        require(q.x == q.y, NAME, || format!("queries are turned in place, not from {} to {}", q.x, q.y))?;
        require(!q.backward, NAME, || "queries are turned forward only".into())?;
        require(q.x.shape[3] == 1, NAME, || format!("q is {}: one batch is written", q.x))?;
        for (name, t) in [("q", &q.x), ("k", k), ("v", v)] {
            require(t.ty == TensorType::F32 && t.shape[2] == q.x.shape[2] && t.shape[3] == 1, NAME, || {
                format!("{name} is {t}, want F32 of {} tokens", q.x.shape[2])
            })?;
        }
        for (name, t) in [("k", k), ("v", v)] {
            let beside = t.shape[1] == 1 || t.stride[1] == t.row_bytes();
            require(t.has_dense_rows() && beside, NAME, || format!("heads of {name} {t} must lie side by side"))?;
        }
        require(k.shape[..2] == [q.x.shape[0], v.shape[1]], NAME, || format!("q is {}, k is {k}, v is {v}", q.x))?;
        require(ids.ty == TensorType::I32 && ids.is_dense(), NAME, || format!("ids are {ids}, want dense I32"))?;
        let (k_rows, v_rows) = (self.k_cache.shape[1], self.v_cache.shape[1]);
        require(k_rows == v_rows, NAME, || format!("{k_rows} rows of keys but {v_rows} of values"))?;
        self.write_k().check()?;
        self.write_v().check()
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let Call { q, k, v, k_cache, v_cache, .. } = self;
        if !matches!(q.style, RopeStyle::Normal | RopeStyle::Neox) {
            return unsupported(format!("{:?} has several positions for a token", q.style));
        }
        for t in [&q.x, k, v] {
            reachable(NAME, t)?;
        }
        // The steps one by one find out whether the types and strides can be written.
        self.write_k().pick(caps, None)?;
        self.write_v().pick(caps, None)?;
        let mut shader =
            Shader::new(format!("{NAME}.{}.{}", k_cache.ty, v_cache.ty).to_lowercase(), FILE, Params::glsl())
                .define("WG", if self.norms.is_some() { HEAD_THREADS } else { THREADS })
                .define("HEAD_DIM", k.shape[0])
                .define("Q_HEADS", q.x.shape[1])
                .define("Q_GROUP", q_group(q.x.shape[1]))
                .define("PAIRS", q.style.pairs(q.n_dims))
                .define("OFFSET", q.offset)
                .define("MAGNITUDE", format!("{}u", q.magnitude.to_bits()))
                .define("ADJACENT", u32::from(q.style == RopeStyle::Normal))
                .define("K_COLS", k_cache.shape[0])
                .define("V_COLS", v_cache.shape[0])
                .define("UNIT_K", unit(k_cache))
                .define("UNIT_V", unit(v_cache))
                .define("BLOCKS", u32::from(unit(k_cache).max(unit(v_cache)) > 1))
                .define("NORMS", u32::from(self.norms.is_some()));
        if let Some(norms) = self.norms {
            let [q_weight, k_weight] = norms.map(|norm| u32::from(norm.weight.is_some()));
            shader = shader
                .define("Q_WEIGHT", q_weight)
                .define("K_WEIGHT", k_weight)
                .define("SUBGROUPS", u32::from(caps.subgroups.arithmetic))
                .define("KV_HEADS", k.shape[1])
                .define("VALUE_DIM", v.shape[0]);
        }
        for (name, cache) in [("K", k_cache), ("V", v_cache)] {
            shader = if unit(cache) > 1 {
                shader
                    .define(&format!("{name}_ENCODE"), format!("encode_{}", cache.ty.name().to_lowercase()))
                    .define(&format!("{name}_BLOCK_BYTES"), cache.ty.block_bytes())
            } else {
                shader.define(&format!("{name}_STORE"), set_rows::cache_store(NAME, cache.ty)?)
            };
        }
        let shader = formats::define(shader, "S", TensorType::F32)?;
        if self.norms.is_some() {
            let heads = q.x.shape[2].saturating_mul(q.x.shape[1] + 2 * k.shape[1]);
            if heads > 1 << 31
                || k.shape[0] > MOST_NORMED
                || [k_cache, v_cache].iter().any(|c| !(c.shape[0] / k.shape[1]).is_multiple_of(unit(c)))
            {
                return unsupported(format!("{heads} heads of {} elements and their norms in one call", k.shape[0]));
            }
            return Ok(Choice::one(Path::Scalar, shader, grid(heads, caps)));
        }
        let pairs = q.style.pairs(q.n_dims) * (q.x.shape[1] / q_group(q.x.shape[1]));
        let items =
            q.x.shape[2].saturating_mul(pairs + k_cache.shape[0] / unit(k_cache) + v_cache.shape[0] / unit(v_cache));
        // The last workgroups of the grid lie past the end, and their indices must not wrap.
        if items > 1 << 31 {
            return unsupported(format!("{items} pairs and elements in one call, at most 2^31"));
        }
        Ok(Choice::one(Path::Scalar, shader, grid(items.div_ceil(THREADS as usize), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let narrow = |n: usize| u32::try_from(n).expect("check and pick refuse numbers past 32 bits");
        Params {
            q: at(&self.q.x),
            k: at(&self.k),
            v: at(&self.v),
            k_cache: at(&self.k_cache),
            v_cache: at(&self.v_cache),
            positions: at(&self.q.positions),
            freqs: at(&self.q.freqs),
            ids: at(&self.ids),
            q_stride: [narrow(self.q.x.stride[1]), narrow(self.q.x.stride[2])],
            k_stride: narrow(self.k.stride[2]),
            v_stride: narrow(self.v.stride[2]),
            k_row: narrow(self.k_cache.stride[1]),
            v_row: narrow(self.v_cache.stride[1]),
            // Ids are signed: as unsigned numbers the negative ones lie above this.
            rows: narrow(self.k_cache.shape[1].min(i32::MAX as usize)),
            tokens: narrow(self.q.x.shape[2]),
            q_weight: self.norms.and_then(|[q, _]| q.weight).as_ref().map_or(Address::default(), at),
            k_weight: self.norms.and_then(|[_, k]| k.weight).as_ref().map_or(Address::default(), at),
            eps: self.norms.map_or([0.0; 2], |norms| norms.map(|norm| norm.eps)),
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        if cpu::fits(self) {
            return cpu::compute(self, memory);
        }
        let before = memory.bytes(self.k.slot).to_vec();
        if let Some(norm) = self.normed_k() {
            norm.cpu(memory);
        }
        self.turn_k().cpu(memory);
        self.write_k().cpu(memory);
        memory.bytes_mut(self.k.slot).copy_from_slice(&before);
        self.write_v().cpu(memory);
        if let Some(norm) = self.normed_q() {
            norm.cpu(memory);
        }
        self.q.cpu(memory);
    }

    fn work(&self) -> Work {
        let [turn, write_k, write_v] = [self.q.work(), self.write_k().work(), self.write_v().work()];
        let bytes = turn.bytes + write_k.bytes + write_v.bytes;
        Work { bytes, flops: turn.flops + write_k.flops + write_v.flops }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |token: usize| {
            let of = |t: Tensor| t.narrow(2, token, 1);
            let (x, y) = (of(self.q.x), of(self.q.y));
            let q = rope::Call { x, y, positions: self.q.positions.narrow(0, token, 1), ..self.q };
            Call { q, k: of(self.k), v: of(self.v), ids: self.ids.narrow(0, token, 1), ..*self }.into()
        };
        (0..self.q.x.shape[2]).map(part).collect()
    }
}
