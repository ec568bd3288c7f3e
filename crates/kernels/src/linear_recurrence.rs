//! Linear recurrences with a decay for each key, S = td S + k v: what `wkv6` and `gla` share. They differ in whether
//! the result is taken before or after the update.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Component, CoopmatShape, Scope, Shader, SubgroupRequest};

use crate::head_mix::{self, Mix};
use crate::operation::{Choice, Invalid, Launch, Operation, Path, Unsupported, Work, grid, maybe, require};
use crate::recurrence::{self, Form, Layout, Sequences, part_of_states, tile};
use crate::tensor::Tensor;

/// The operands of both operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Linear {
    pub(crate) operation: &'static str,
    /// The sequential kernel.
    pub(crate) file: &'static str,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) r: Tensor,
    /// The bonus of `wkv6`; without it the result is taken after the update.
    pub(crate) tf: Option<Tensor>,
    pub(crate) td: Tensor,
    pub(crate) state_in: Tensor,
    pub(crate) y: Tensor,
    pub(crate) state_out: Tensor,
    pub(crate) scratch: Option<Tensor>,
    pub(crate) sequences: Sequences,
    pub(crate) slots: Option<Tensor>,
    pub(crate) form: Form,
    pub(crate) scale: f32,
    /// What becomes of y; not beside a scale.
    pub(crate) mix: Option<Mix>,
}

kiln_gpu::params! {
    struct Params {
        k: Address,
        v: Address,
        r: Address,
        tf: Address,
        td: Address,
        state_in: Address,
        y: Address,
        state_out: Address,
        scratch: Address,
        decays: Address,
        marks: Address,
        starts: Address,
        heads: u32,
        tokens: u32,
        sequences: u32,
        chunks: u32,
        in_stride: u32,
        out_stride: u32,
        scale: f32,
    }
}

kiln_gpu::params! {
    /// Of the sequential kernel with the mix of heads inside: no chunks, no lengths that differ.
    struct MixedParams {
        k: Address,
        v: Address,
        r: Address,
        tf: Address,
        td: Address,
        state_in: Address,
        y: Address,
        state_out: Address,
        weight: Address,
        bias: Address,
        gate: Address,
        heads: u32,
        tokens: u32,
        sequences: u32,
        in_stride: u32,
        out_stride: u32,
        eps: f32,
    }
}

/// Bytes of scratch memory that the chunked form needs at most.
pub(crate) fn scratch_bytes(head_size: usize, heads: usize, tokens: usize, sequences: usize) -> usize {
    // For each chunk and head a state, a decay for each key, and the marks of `coopmat.comp`, of which there is one more.
    recurrence::scratch_bytes(heads, tokens, sequences, head_size * head_size + head_size + MARKS)
}

/// Words of scratch memory for the marks of a chunk and head: one, and another that keeps a place for the count of
/// workgroups; addresses stay multiples of 16 bytes.
const MARKS: usize = 4;
/// Chunks that a chunk looks back over at most on matrix units: each costs the others a read of its state, and saves
/// the chain of all chunks a wait.
const LINK: usize = 8;

/// Length from which chunks are faster, measured on a large GPU: 53 against 76 us for 512 tokens of 32 heads of 64. With
/// heads of 128 they never were.
fn chunked_from(head_size: usize) -> usize {
    if head_size <= 64 { 256 } else { usize::MAX }
}

/// How a workgroup of `coopmat.comp` divides its work.
struct Matrices {
    /// Size of the matrices, all three ways.
    size: usize,
    subgroup: usize,
    chunk: usize,
    /// Tokens of a thread, two keys of each.
    tokens: usize,
    threads: usize,
}

impl Matrices {
    /// The division for heads of this size, or what is missing.
    fn new(head_size: usize, caps: &Caps) -> Result<Matrices, String> {
        let square = |s: &&CoopmatShape| {
            let halves = s.a == Component::F16 && s.b == s.a && s.scope == Scope::Subgroup && !s.saturating;
            halves && s.m == s.n && s.n == s.k && matches!(s.m, 8 | 16)
        };
        let sums = |c: Component| move |s: &&CoopmatShape| square(s) && s.c == c && s.result == c;
        let shape = caps.coopmat.iter().find(sums(Component::F32));
        let shape = shape.filter(|shape| caps.coopmat.iter().any(|s| sums(Component::F16)(&s) && s.m == shape.m));
        let shape = shape.ok_or("no 16x16x16 or 8x8x8 matrices of F16 with sums of F32 and of F16")?;
        let s = &caps.subgroups;
        if !caps.float16 || !s.full || !s.shuffle || !s.arithmetic {
            return Err("matrices need F16 arithmetic and full subgroups that shuffle and add".into());
        }
        if head_size > 64 {
            return Err(format!("heads of {head_size} do not fit shared memory"));
        }
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]) as usize;
        let (size, subgroup) = (shape.m as usize, s.size as usize);
        let fits = |m: &Matrices| {
            // Every subgroup has whole rows of blocks of y, or an even part of one.
            let subgroups = m.threads / subgroup;
            let (blocks, wide) = (chunk_blocks(m.chunk, head_size, size), head_size / size);
            let share = blocks / subgroups.max(1);
            let even = m.threads.is_multiple_of(subgroup) && blocks.is_multiple_of(subgroups) && share > 0;
            let fits = m.threads <= limit && m.shared_bytes(head_size) <= caps.limits.max_shared_bytes as usize;
            even && wide.is_multiple_of(share) && fits && m.has_room(head_size)
        };
        // Many tokens for each thread: registers of sums are few beside those of tokens, so more workgroups fit.
        let divisions = [(64, 16), (64, 8), (32, 16), (32, 8)].map(|(chunk, tokens)| {
            let threads = chunk / tokens * (head_size / 2);
            Matrices { size, subgroup, chunk, tokens, threads }
        });
        divisions.into_iter().find(fits).ok_or_else(|| format!("subgroups of {subgroup} share out no chunk evenly"))
    }

    /// Levels inside a block of tokens, and across blocks.
    fn levels(&self) -> [usize; 2] {
        [self.size.ilog2() as usize, (self.chunk / self.size).ilog2() as usize]
    }

    /// Tiles of r and k that there are at once.
    fn tiles(&self) -> usize {
        let [inner, outer] = self.levels();
        inner.max(outer + 2)
    }

    /// Whether weights and a state fit before the last of those tiles.
    fn has_room(&self, head_size: usize) -> bool {
        let [line, weight_line] = [head_size, self.chunk].map(|n| n / 8 + 1);
        self.chunk * weight_line + head_size * line <= (self.tiles() - 1) * self.chunk * line
    }

    fn shared_bytes(&self, head_size: usize) -> usize {
        let tiles = self.tiles() + 1;
        let decays = self.chunk / self.tokens * head_size * 4;
        let bonuses = self.chunk * (head_size / 2).div_ceil(self.subgroup) * 4;
        tiles * self.chunk * (head_size / 8 + 1) * 16 + decays + bonuses + self.threads / self.subgroup * 8 + 16
    }

    fn defines(&self, shader: Shader, caps: &Caps) -> Shader {
        let [inner, outer] = self.levels();
        let request = if caps.subgroups.size_control {
            SubgroupRequest::Size(caps.subgroups.size)
        } else {
            SubgroupRequest::Full
        };
        // A software GPU takes long to compile unrolled products, and long to finish what is waited for.
        shader
            .subgroup(request)
            .define("WG", self.threads)
            .define("SG", self.subgroup)
            .define("MM", self.size)
            .define("TOKENS", self.tokens)
            .define("LOCAL", self.tokens.ilog2())
            .define("INNER", inner)
            .define("OUTER", outer)
            .define("LINK", LINK)
            .define("MOST_TRIES", if caps.is_cpu { 1u32 << 30 } else { 1 << 20 })
            .define("STEP_LOOP", if caps.is_cpu { "[[dont_unroll]]" } else { "[[unroll]]" })
    }
}

/// Matrices of `size` in the results of a chunk.
fn chunk_blocks(chunk: usize, head_size: usize, size: usize) -> usize {
    chunk / size * (head_size / size)
}

impl Linear {
    fn layout(&self) -> Layout {
        Layout::new(self.operation, &self.y, self.sequences, self.slots)
    }

    pub(crate) fn reads(&self) -> Vec<Tensor> {
        let tokens = [self.k, self.v, self.r, self.td, self.state_in];
        let mix = self.mix.iter().flat_map(Mix::reads);
        tokens.into_iter().chain(self.tf).chain(self.sequences.tensor()).chain(self.slots).chain(mix).collect()
    }

    /// The mix of heads as a call by itself.
    pub(crate) fn mixed(&self) -> Option<head_mix::Call> {
        self.mix.map(|mix| mix.of(self.y, None))
    }

    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let layout = self.layout();
        layout.check(
            &[("k", self.k), ("v", self.v), ("r", self.r), ("td", self.td), ("y", self.y)],
            [self.state_in, self.state_out],
        )?;
        if let Some(tf) = self.tf {
            let shape = [layout.head_size, layout.heads, 1, 1];
            let fits = tf.shape == shape && tf.ty == TensorType::F32 && tf.is_dense() && tf.offset.is_multiple_of(16);
            require(fits, self.operation, || format!("tf is {tf}, want dense F32{shape:?} at a multiple of 16"))?;
        }
        self.mixed().map_or(Ok(()), |mix| mix.check_within(self.sequences))?;
        let bytes = scratch_bytes(layout.head_size, layout.heads, layout.tokens, self.sequences.count());
        layout.check_scratch(self.scratch, self.form, bytes)
    }

    pub(crate) fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        let choice = self.pick_recurrence(caps, want)?;
        match self.mixed() {
            Some(mix) => mix.after(choice, caps),
            None => Ok(choice),
        }
    }

    fn pick_recurrence(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        let layout = self.layout();
        layout.supported(&[self.state_in, self.state_out])?;
        let is_chunked = layout.is_chunked(self.form, self.scratch, chunked_from(layout.head_size));
        let unsupported = |reason: String| Unsupported { operation: self.operation, reason };
        let scalar = || {
            let launches = if is_chunked { self.chunked(caps) } else { None };
            layout.choice(self.form, caps, launches, || self.sequential(caps))
        };
        match want {
            Some(Path::Scalar) => scalar(),
            Some(Path::Coopmat) if is_chunked => self.matrices(caps).map_err(unsupported),
            Some(Path::Coopmat) => Err(unsupported("only the chunked form has matrices".into())),
            Some(other) => Err(unsupported(format!("no {} path", other.name()))),
            // Matrices are no faster than plain arithmetic where both are emulated.
            None if is_chunked && !caps.is_cpu => self.matrices(caps).or_else(|_| scalar()),
            None => scalar(),
        }
    }

    /// The launches of the chunked form on matrix units, or what is missing.
    fn matrices(&self, caps: &Caps) -> Result<Choice, String> {
        let layout = self.layout();
        let division = Matrices::new(layout.head_size, caps)?;
        let groups = layout.chunks(division.chunk) * layout.heads;
        let shader = |file| layout.shader(file, Params::glsl()).define("CHUNK", division.chunk);
        let clear_threads = 64;
        let clear = shader("wkv6/chunk_clear.comp").define("WG", clear_threads);
        let all = division.defines(shader("wkv6/coopmat.comp"), caps);
        let all = all.define("AFTER_UPDATE", u32::from(self.tf.is_none()));
        let launches = vec![
            Launch::new(clear, grid((groups + 1).div_ceil(clear_threads), caps)),
            Launch::new(all, grid(groups, caps)),
        ];
        Ok(Choice { path: Path::Coopmat, launches })
    }

    fn sequential(&self, caps: &Caps) -> Choice {
        let layout = self.layout();
        let s = layout.head_size;
        let mixed = self.mixed().and_then(|mix| Some((mix, layout.whole_heads(caps)?)));
        let (lanes, columns) = mixed.map_or_else(|| layout.columns(caps), |(_, whole)| whole);
        let threads = lanes * columns;
        // Staged for each token: keys, receptances, decays, a quarter as much for the bonus, values, shares of y.
        // The mix adds up four floats of every thread.
        let sums = if mixed.is_some() { 4 * threads } else { 0 };
        let floats = |step: usize| step * (3 * s + s / 4 + columns + threads) + sums;
        let budget = caps.limits.max_shared_bytes.min(24 << 10) as usize;
        let step = [16, 8, 4].into_iter().find(|&step| 4 * floats(step) <= budget).unwrap_or(2);
        let shader = match mixed {
            Some((mix, _)) => mix.defines(layout.shader_with_mix(self.file, MixedParams::glsl())),
            None => layout.shader(self.file, Params::glsl()).define("MIX", 0),
        };
        let shader = shader.define("LANES", lanes).define("COLS", columns).define("STEP", step).define("WG", threads);
        Choice::one(Path::Scalar, shader, grid(self.sequences.count() * layout.heads * (s / columns), caps))
    }

    /// The launches of the chunked form; none where no chunk fits the device.
    fn chunked(&self, caps: &Caps) -> Option<Vec<Launch>> {
        let layout = self.layout();
        let (s, tile) = (layout.head_size, tile(layout.head_size));
        // The last launch stages keys and decays, and the weights of each pair of tokens.
        let chunk = recurrence::chunk(caps, 32, |n| 2 * n * s + n * n)?;
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]) as usize;
        let chunks = layout.chunks(chunk);
        let shader = |file| layout.shader(file, Params::glsl()).define("CHUNK", chunk);

        let state_threads = (s / 4 * (tile / 4)).min(256);
        let state = shader("wkv6/chunk_state.comp").define("TILE", tile).define("WG", state_threads);
        let scan_threads = 64;
        let scan = shader("wkv6/chunk_scan.comp").define("WG", scan_threads);
        let output_threads = chunk / 4 * (tile / 4);
        if limit < output_threads.max(state_threads) {
            return None;
        }
        let output = shader("wkv6/chunk_output.comp")
            .define("TILE", tile)
            .define("WG", output_threads)
            .define("AFTER_UPDATE", u32::from(self.tf.is_none()));
        let per_chunk = grid(chunks * layout.heads * (s / tile), caps);
        let per_state = grid(self.sequences.count() * layout.heads * (s * s / 4 / scan_threads), caps);
        Some(vec![Launch::new(state, per_chunk), Launch::new(scan, per_state), Launch::new(output, per_chunk)])
    }

    pub(crate) fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        match self.mixed() {
            Some(mix) if head_mix::is_mix(choice, launch) => mix.params(choice, launch, at),
            Some(mix) if head_mix::is_within(choice) => self.mixed_params(&mix, at),
            _ => self.plain_params(choice, at),
        }
    }

    fn mixed_params(&self, mix: &head_mix::Call, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let layout = self.layout();
        let maybe = maybe(at);
        let ([state_in, state_out], [in_stride, out_stride]) =
            layout.state_params([&self.state_in, &self.state_out], at);
        MixedParams {
            k: at(&self.k),
            v: at(&self.v),
            r: at(&self.r),
            tf: maybe(self.tf),
            td: at(&self.td),
            state_in,
            y: at(&self.y),
            state_out,
            weight: at(&mix.weight),
            bias: at(&mix.bias),
            gate: maybe(mix.gate.map(|(gate, _)| gate)),
            heads: layout.number(layout.heads),
            tokens: layout.number(layout.tokens),
            sequences: layout.number(self.sequences.count()),
            in_stride,
            out_stride,
            eps: mix.eps,
        }
        .bytes()
    }

    fn plain_params(&self, choice: &Choice, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let layout = self.layout();
        let chunks = layout.chunks_of(choice);
        let states = chunks * layout.heads * layout.head_size * layout.head_size * 4;
        let decays = chunks * layout.heads * layout.head_size * 4;
        let maybe = maybe(at);
        let scratch = maybe(self.scratch);
        let ([state_in, state_out], [in_stride, out_stride]) =
            layout.state_params([&self.state_in, &self.state_out], at);
        Params {
            k: at(&self.k),
            v: at(&self.v),
            r: at(&self.r),
            tf: maybe(self.tf),
            td: at(&self.td),
            state_in,
            y: at(&self.y),
            state_out,
            scratch,
            decays: scratch.offset(states as u64),
            marks: scratch.offset((states + decays) as u64),
            starts: maybe(self.sequences.tensor()),
            heads: layout.number(layout.heads),
            tokens: layout.number(layout.tokens),
            sequences: layout.number(self.sequences.count()),
            chunks: layout.number(chunks),
            in_stride,
            out_stride,
            scale: self.scale,
        }
        .bytes()
    }

    pub(crate) fn work(&self) -> Work {
        let Layout { head_size: s, heads, tokens, .. } = self.layout();
        let states = 2 * 4 * s * s * heads * self.sequences.count();
        // A multiply for k v, and two multiply-adds.
        let per_token = 5 + usize::from(self.mix.is_some_and(|mix| mix.gate.is_some()));
        Work { bytes: (per_token * 4 * s * heads * tokens + states) as f64, flops: (5 * s * s * heads * tokens) as f64 }
    }

    /// Every sequence alone.
    pub(crate) fn parts(&self) -> Vec<Linear> {
        let n = self.sequences.count();
        let part = |b| {
            let (sequences, view) = self.sequences.alone(b);
            let (slots, state) = part_of_states(self.slots, b);
            Linear {
                k: view(self.k),
                v: view(self.v),
                r: view(self.r),
                td: view(self.td),
                y: view(self.y),
                state_in: state(self.state_in),
                state_out: state(self.state_out),
                sequences,
                slots,
                mix: self.mix.map(|mix| mix.view(&view)),
                ..*self
            }
        };
        if n > 1 { (0..n).map(part).collect() } else { Vec::new() }
    }
}
