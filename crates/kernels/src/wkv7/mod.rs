//! `wkv7`: the recurrence of RWKV-7, S = S diag(w) + (S a) b + v k. Sequential, or in chunks for long sequences, where
//! the coupling of tokens through a and b becomes a triangular system. What models do with the result, `head_mix`, may be
//! a part of it.

pub mod cases;
mod fuse;
mod reference;

use kiln_gpu::{Address, Caps};

use crate::head_mix;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Launch, Operation, Path, Touches, Unsupported, Work, grid, maybe, only_scalar,
};
use crate::recurrence::{self, Form, Layout, Sequences, lanes, part_of_states, tile};
use crate::tensor::Tensor;

const NAME: &str = "wkv7";

/// One line for the registry.
pub const SUMMARY: &str = "S = S diag(w) + (S a) b + v k, y = S r: the recurrence of RWKV-7";

/// Operands of `wkv7`. All tensors begin at multiples of 16 bytes; S is 32, 64 or 128.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Receptances `[S, heads, tokens]`, F32, dense.
    pub r: Tensor,
    /// Decays, as `r`; at most one in magnitude unless the form is [`Form::Sequential`].
    pub w: Tensor,
    /// Keys, as `r`.
    pub k: Tensor,
    /// Values, as `r`.
    pub v: Tensor,
    /// What is read from the state, as `r`.
    pub a: Tensor,
    /// Where that is written back, as `r`.
    pub b: Tensor,
    /// States before the first tokens, F32 `[S keys, S values, heads, sequences]`; each sequence's is dense.
    pub state_in: Tensor,
    /// Results, as `r`.
    pub y: Tensor,
    /// States after the last tokens, as `state_in`; may be `state_in` itself.
    pub state_out: Tensor,
    /// Memory between launches, dense, of at least [`scratch_bytes`]; without it the form is sequential.
    pub scratch: Option<Tensor>,
    /// Which tokens belong together.
    pub sequences: Sequences,
    /// I32 `[sequences]`, dense: where each sequence's state lies among those of `state_in`, which then holds any number of them
    /// and is `state_out`, too. A negative one is padding: the sequence starts from zeros, and its state goes nowhere.
    pub slots: Option<Tensor>,
    /// The way through the tokens.
    pub form: Form,
    /// What becomes of `y` before it is stored; only for sequences of equal length.
    pub mix: Option<Mix>,
}

/// The mix of heads with the bonus of the token itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// The norm and the gate.
    pub heads: head_mix::Mix,
    /// A factor for each channel, `[S * heads]`: v times the sum of r k bonus over the head is added before the gate.
    pub bonus: Tensor,
}

/// Most tokens of a chunk: the triangular system grows with its square.
const MOST_CHUNK: usize = 32;
/// Length from which chunks are faster: none was found on a large GPU, where they run only where they are asked for.
const CHUNKED_FROM: usize = usize::MAX;

/// Bytes of scratch memory that the chunked form needs on any device.
pub fn scratch_bytes(head_size: usize, heads: usize, tokens: usize, sequences: usize) -> usize {
    // For each chunk and head a transition, a state, and a row for each token: `glsl/chunk_block.glsl`.
    let floats = 2 * head_size * head_size + MOST_CHUNK * head_size;
    recurrence::scratch_bytes(heads, tokens, sequences, floats)
}

kiln_gpu::params! {
    struct Params {
        r: Address,
        w: Address,
        k: Address,
        v: Address,
        a: Address,
        b: Address,
        state_in: Address,
        y: Address,
        state_out: Address,
        scratch: Address,
        starts: Address,
        heads: u32,
        tokens: u32,
        sequences: u32,
        chunks: u32,
        in_stride: u32,
        out_stride: u32,
    }
}

kiln_gpu::params! {
    /// Of the sequential kernel with the mix of heads inside: no chunks, no lengths that differ.
    struct MixedParams {
        r: Address,
        w: Address,
        k: Address,
        v: Address,
        a: Address,
        b: Address,
        state_in: Address,
        y: Address,
        state_out: Address,
        weight: Address,
        bias: Address,
        bonus_weight: Address,
        gate: Address,
        heads: u32,
        tokens: u32,
        sequences: u32,
        in_stride: u32,
        out_stride: u32,
        eps: f32,
    }
}

impl Call {
    fn layout(&self) -> Layout {
        Layout::new(NAME, &self.y, self.sequences, self.slots)
    }

    fn sequential(&self, caps: &Caps) -> Choice {
        let layout = self.layout();
        let s = layout.head_size;
        let mixed = self.mixed().and_then(|mix| Some((mix, layout.whole_heads(caps)?)));
        let (n_lanes, columns) = mixed.map_or_else(|| layout.columns(caps), |(_, whole)| whole);
        let threads = n_lanes * columns;
        // Staged for each token: five vectors of the head, values, shares of y. Sums of lanes may need shared memory, and
        // the mix adds up four floats of every thread.
        let sums = if mixed.is_some() { 5 * threads } else { threads };
        let floats = |step: usize| step * (5 * s + columns + threads) + sums;
        let budget = caps.limits.max_shared_bytes.min(24 << 10) as usize;
        let step = [16, 8, 4].into_iter().find(|&step| 4 * floats(step) <= budget).unwrap_or(2);
        let file = "wkv7/wkv7.comp";
        let shader = match mixed {
            Some((mix, _)) => mix.defines(layout.shader_with_mix(file, MixedParams::glsl())),
            None => layout.shader(file, Params::glsl()).define("MIX", 0),
        };
        let shader = shader.define("COLS", columns).define("STEP", step).define("WG", threads);
        let shader = lanes(shader, n_lanes, threads, caps);
        Choice::one(Path::Scalar, shader, grid(self.sequences.count() * layout.heads * (s / columns), caps))
    }

    /// The mix of heads as a call by itself.
    fn mixed(&self) -> Option<head_mix::Call> {
        let Call { r, k, v, y, .. } = *self;
        self.mix.map(|mix| mix.heads.of(y, Some(head_mix::Bonus { r, k, v, weight: mix.bonus })))
    }

    fn mixed_params(&self, mix: &Mix, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let layout = self.layout();
        let head_mix::Mix { weight, bias, eps, gate } = mix.heads;
        let ([state_in, state_out], [in_stride, out_stride]) =
            layout.state_params([&self.state_in, &self.state_out], at);
        MixedParams {
            r: at(&self.r),
            w: at(&self.w),
            k: at(&self.k),
            v: at(&self.v),
            a: at(&self.a),
            b: at(&self.b),
            state_in,
            y: at(&self.y),
            state_out,
            weight: at(&weight),
            bias: at(&bias),
            bonus_weight: at(&mix.bonus),
            gate: gate.as_ref().map_or(Address::default(), |(gate, _)| at(gate)),
            heads: layout.number(layout.heads),
            tokens: layout.number(layout.tokens),
            sequences: layout.number(self.sequences.count()),
            in_stride,
            out_stride,
            eps,
        }
        .bytes()
    }

    fn plain_params(&self, choice: &Choice, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let layout = self.layout();
        let maybe = maybe(at);
        let ([state_in, state_out], [in_stride, out_stride]) =
            layout.state_params([&self.state_in, &self.state_out], at);
        Params {
            r: at(&self.r),
            w: at(&self.w),
            k: at(&self.k),
            v: at(&self.v),
            a: at(&self.a),
            b: at(&self.b),
            state_in,
            y: at(&self.y),
            state_out,
            scratch: maybe(self.scratch),
            starts: maybe(self.sequences.tensor()),
            heads: layout.number(layout.heads),
            tokens: layout.number(layout.tokens),
            sequences: layout.number(self.sequences.count()),
            chunks: layout.number(layout.chunks_of(choice)),
            in_stride,
            out_stride,
        }
        .bytes()
    }

    /// The launches of the chunked form; none where no chunk fits the device.
    fn chunked(&self, caps: &Caps) -> Option<Vec<Launch>> {
        let layout = self.layout();
        let (s, tile) = (layout.head_size, tile(layout.head_size));
        let scan_rows = if s == 64 { 64 } else { 32 };
        // The first launch stages three vectors a token and four weights for each pair of them, the second a slab of
        // the transition and two states, the third the rows and 64 keys of the state.
        let shared = |n: usize| {
            let local = 3 * n * s + 4 * n * n + s;
            let scan = scan_rows * s + 2 * 16 * s;
            local.max(scan).max(n * s + s.min(64) * tile)
        };
        let chunk = recurrence::chunk(caps, if s > 64 { 16 } else { MOST_CHUNK }, shared)?;
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]) as usize;
        let chunks = layout.chunks(chunk);
        let shader = |file| layout.shader(file, Params::glsl()).define("CHUNK", chunk);

        let local_threads = if s == 32 { 128 } else { 256 };
        let scan_threads = scan_rows * 4;
        let output_threads = chunk / 4 * (tile / 4);
        if limit < local_threads.max(scan_threads).max(output_threads) {
            return None;
        }
        let local = shader("wkv7/chunk_local.comp").define("WG", local_threads);
        let scan = shader("wkv7/chunk_scan.comp").define("WG", scan_threads);
        let output = shader("wkv7/chunk_output.comp").define("TILE", tile).define("WG", output_threads);
        let per_chunk = chunks * layout.heads;
        let per_state = self.sequences.count() * layout.heads * (s / 16);
        Some(vec![
            Launch::new(local, grid(per_chunk, caps)),
            Launch::new(scan, grid(per_state, caps)),
            Launch::new(output, grid(per_chunk * (s / tile), caps)),
        ])
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        let tokens = [self.r, self.w, self.k, self.v, self.a, self.b, self.state_in];
        let mix = self.mix.into_iter().flat_map(|mix| mix.heads.reads().chain([mix.bonus]));
        tokens.into_iter().chain(self.sequences.tensor()).chain(self.slots).chain(mix).collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y, self.state_out]
    }

    fn scratch(&self) -> Vec<Tensor> {
        self.scratch.into_iter().collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        let layout = self.layout();
        let per_token =
            [("r", self.r), ("w", self.w), ("k", self.k), ("v", self.v), ("a", self.a), ("b", self.b), ("y", self.y)];
        layout.check(&per_token, [self.state_in, self.state_out])?;
        self.mixed().map_or(Ok(()), |mix| mix.check_within(self.sequences))?;
        let bytes = scratch_bytes(layout.head_size, layout.heads, layout.tokens, self.sequences.count());
        layout.check_scratch(self.scratch, self.form, bytes)
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        only_scalar(NAME, want)?;
        let layout = self.layout();
        layout.supported(&[self.state_in, self.state_out])?;
        let launches = if layout.is_chunked(self.form, self.scratch, CHUNKED_FROM) { self.chunked(caps) } else { None };
        let choice = layout.choice(self.form, caps, launches, || self.sequential(caps))?;
        match self.mixed() {
            Some(mix) => mix.after(choice, caps),
            None => Ok(choice),
        }
    }

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        match (self.mixed(), &self.mix) {
            (Some(mix), _) if head_mix::is_mix(choice, launch) => mix.params(choice, launch, at),
            (_, Some(mix)) if head_mix::is_within(choice) => self.mixed_params(mix, at),
            _ => self.plain_params(choice, at),
        }
    }

    fn touches(&self, choice: &Choice, launch: usize) -> Touches {
        head_mix::touches(self, self.mixed(), choice, launch)
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
        if let Some(mix) = self.mixed() {
            mix.reference(memory);
        }
    }

    fn work(&self) -> Work {
        let Layout { head_size: s, heads, tokens, .. } = self.layout();
        let states = 2 * 4 * s * s * heads * self.sequences.count();
        // A multiply for v k, and four multiply-adds.
        let per_token = 7 + usize::from(self.mix.is_some_and(|mix| mix.heads.gate.is_some()));
        Work { bytes: (per_token * 4 * s * heads * tokens + states) as f64, flops: (9 * s * s * heads * tokens) as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let n = self.sequences.count();
        let part = |b| {
            let (sequences, view) = self.sequences.alone(b);
            let [r, w, k, v, a] = [self.r, self.w, self.k, self.v, self.a].map(&view);
            let (slots, state) = part_of_states(self.slots, b);
            let (state_in, state_out) = (state(self.state_in), state(self.state_out));
            let mix = self.mix.map(|mix| Mix { heads: mix.heads.view(&view), ..mix });
            Call {
                r,
                w,
                k,
                v,
                a,
                b: view(self.b),
                y: view(self.y),
                state_in,
                state_out,
                sequences,
                slots,
                mix,
                ..*self
            }
            .into()
        };
        if n > 1 { (0..n).map(part).collect() } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use kiln_gguf::TensorType::{F32, I32};

    use super::*;
    use crate::tensor::Slot;

    fn call(head_size: usize, tokens: usize, sequences: usize) -> Call {
        let x = |slot| Tensor::dense(Slot(slot), F32, [head_size, 3, tokens, 1]);
        let state = |slot| Tensor::dense(Slot(slot), F32, [head_size, head_size, 3, sequences]);
        let scratch = scratch_bytes(head_size, 3, tokens, sequences) / 4;
        Call {
            r: x(0),
            w: x(1),
            k: x(2),
            v: x(3),
            a: x(4),
            b: x(5),
            state_in: state(6),
            y: x(7),
            state_out: state(8),
            scratch: Some(Tensor::dense(Slot(9), F32, [scratch, 1, 1, 1])),
            sequences: Sequences::Equal(sequences),
            slots: None,
            form: Form::Auto,
            mix: None,
        }
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let whole = call(64, 12, 3);
        assert_eq!(whole.check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { k: call(64, 11, 1).k, ..whole }).contains("k is F32[64, 3, 11]"));
        assert!(reason(Call { b: whole.b.at(4), ..whole }).contains("b is F32[64, 3, 12] at byte 4"));
        assert!(reason(Call { state_in: call(64, 12, 2).state_in, ..whole }).contains("state_in"));
        assert!(reason(Call { scratch: None, form: Form::Chunked, ..whole }).contains("scratch"));
        assert!(reason(Call { scratch: call(64, 12, 2).scratch, ..whole }).contains("bytes of dense scratch"));
        let five = Call { state_in: call(64, 12, 5).state_in, state_out: call(64, 12, 5).state_out, ..whole };
        assert!(reason(Call { sequences: Sequences::Equal(5), ..five }).contains("12 tokens are no 5 sequences"));
        let starts = Tensor::dense(Slot(10), I32, [4, 1, 1, 1]);
        let ragged = |longest| Call { sequences: Sequences::Ragged { starts, longest }, ..whole };
        assert_eq!(ragged(12).check(), Ok(()));
        assert!(reason(ragged(13)).contains("longest is 13"));
    }

    #[test]
    fn chunks_run_where_they_are_asked_for_and_fit() {
        let launches = |call: &Call, caps: &Caps| call.pick(caps, None).map(|c| c.launches.len());
        let nvidia = Caps::example_nvidia();
        assert_eq!(launches(&call(64, 4096, 1), &nvidia), Ok(1));
        assert_eq!(launches(&Call { form: Form::Chunked, ..call(64, 1, 1) }, &nvidia), Ok(3));
        assert_eq!(launches(&Call { form: Form::Sequential, ..call(64, 999, 1) }, &nvidia), Ok(1));
        // Too little shared memory for any chunk.
        assert_eq!(launches(&call(128, 64, 1), &Caps::least()), Ok(1));
        assert!(launches(&Call { form: Form::Chunked, ..call(128, 64, 1) }, &Caps::least()).is_err());
        assert!(call(48, 1, 1).pick(&nvidia, None).unwrap_err().reason.contains("heads of 48"));
    }

    #[test]
    fn the_parameter_block_fits_every_device() {
        let call = call(64, 64, 1);
        let choice = call.pick(&Caps::example_nvidia(), None).unwrap();
        assert!(call.params(&choice, 0, &|_| Address(0)).len() <= 128);
    }

    #[test]
    fn more_sequences_do_not_change_the_order_of_additions() {
        let lanes = |sequences| {
            let choice = call(64, sequences, sequences).pick(&Caps::example_nvidia(), None).unwrap();
            let defines = choice.launches[0].shader.defines.clone();
            defines.into_iter().find(|(name, _)| name == "LANES").unwrap()
        };
        assert_eq!(lanes(1), lanes(500));
    }
}
