//! `wkv6`: the recurrence of RWKV-6, S = td S + k v with a bonus for the token itself. Sequential, or in chunks for
//! long sequences. What models do with the result, `head_mix`, may be a part of it.

pub mod cases;
mod fuse;
mod reference;

use kiln_gpu::{Address, Caps};

use crate::head_mix::{self, Mix};
use crate::host::HostMemory;
use crate::linear_recurrence::{self, Linear};
use crate::operation::{Choice, Invalid, Operation, Path, Touches, Unsupported, Work};
use crate::recurrence::{Form, Sequences};
use crate::tensor::Tensor;

const NAME: &str = "wkv6";

/// One line for the registry.
pub const SUMMARY: &str = "y = r (S + tf k v), S = td S + k v: the recurrence of RWKV-6";

/// Operands of `wkv6`. All tensors begin at multiples of 16 bytes; S is 32, 64 or 128.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Keys `[S, heads, tokens]`, F32, dense.
    pub k: Tensor,
    /// Values, as `k`.
    pub v: Tensor,
    /// Receptances, as `k`.
    pub r: Tensor,
    /// Bonus of the token itself, `[S, heads]`, F32, dense.
    pub tf: Tensor,
    /// Decays, as `k`; at most one in magnitude unless the form is [`Form::Sequential`].
    pub td: Tensor,
    /// States before the first tokens, F32 `[S values, S keys, heads, sequences]`; each sequence's is dense.
    pub state_in: Tensor,
    /// Results, as `k`.
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

/// Bytes of scratch memory that the chunked form needs on any device.
pub fn scratch_bytes(head_size: usize, heads: usize, tokens: usize, sequences: usize) -> usize {
    linear_recurrence::scratch_bytes(head_size, heads, tokens, sequences)
}

impl Call {
    fn linear(&self) -> Linear {
        let &Call { k, v, r, tf, td, state_in, y, state_out, scratch, sequences, slots, form, mix } = self;
        Linear {
            operation: NAME,
            file: "wkv6/wkv6.comp",
            k,
            v,
            r,
            tf: Some(tf),
            td,
            state_in,
            y,
            state_out,
            scratch,
            sequences,
            slots,
            form,
            scale: 1.0,
            mix,
        }
    }
}

impl Operation for Call {
    fn name(&self) -> &'static str {
        NAME
    }

    fn reads(&self) -> Vec<Tensor> {
        self.linear().reads()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.y, self.state_out]
    }

    fn scratch(&self) -> Vec<Tensor> {
        self.scratch.into_iter().collect()
    }

    fn check(&self) -> Result<(), Invalid> {
        self.linear().check()
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        self.linear().pick(caps, want)
    }

    fn params(&self, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        self.linear().params(choice, launch, at)
    }

    fn touches(&self, choice: &Choice, launch: usize) -> Touches {
        head_mix::touches(self, self.linear().mixed(), choice, launch)
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
        if let Some(mix) = self.linear().mixed() {
            mix.reference(memory);
        }
    }

    fn work(&self) -> Work {
        self.linear().work()
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |Linear { k, v, r, td, state_in, y, state_out, sequences, slots, mix, .. }| {
            Call { k, v, r, td, state_in, y, state_out, sequences, slots, mix, ..*self }.into()
        };
        self.linear().parts().into_iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use kiln_gguf::TensorType::F32;

    use super::*;
    use crate::tensor::Slot;

    fn call(head_size: usize, tokens: usize, sequences: usize) -> Call {
        let x = |slot| Tensor::dense(Slot(slot), F32, [head_size, 3, tokens, 1]);
        let state = |slot| Tensor::dense(Slot(slot), F32, [head_size, head_size, 3, sequences]);
        let scratch = scratch_bytes(head_size, 3, tokens, sequences) / 4;
        Call {
            k: x(0),
            v: x(1),
            r: x(2),
            tf: Tensor::dense(Slot(3), F32, [head_size, 3, 1, 1]),
            td: x(4),
            state_in: state(5),
            y: x(6),
            state_out: state(7),
            scratch: Some(Tensor::dense(Slot(8), F32, [scratch, 1, 1, 1])),
            sequences: Sequences::Equal(sequences),
            slots: None,
            form: Form::Auto,
            mix: None,
        }
    }

    #[test]
    fn long_sequences_run_in_chunks_where_they_fit() {
        let launches = |call: &Call, caps: &Caps| call.pick(caps, None).map(|c| c.launches.len());
        let nvidia = Caps::example_nvidia();
        let mut plain = nvidia.clone();
        plain.coopmat.clear();
        assert_eq!(launches(&call(64, 255, 1), &plain), Ok(1));
        assert_eq!(launches(&call(64, 256, 1), &plain), Ok(3));
        assert_eq!(launches(&call(64, 256, 2), &plain), Ok(1));
        assert_eq!(launches(&call(64, 256, 1), &nvidia), Ok(2));
        assert_eq!(launches(&call(128, 4096, 1), &nvidia), Ok(1));
        assert_eq!(launches(&Call { scratch: None, ..call(64, 256, 1) }, &nvidia), Ok(1));
        assert_eq!(launches(&Call { form: Form::Chunked, ..call(128, 1, 1) }, &nvidia), Ok(3));
        // Too few threads for the products of a chunk.
        assert_eq!(launches(&call(64, 256, 1), &Caps::least()), Ok(1));
        assert!(launches(&Call { form: Form::Chunked, ..call(64, 64, 1) }, &Caps::least()).is_err());
    }

    #[test]
    fn heads_are_mixed_inside_the_kernel_for_few_tokens_and_after_it_otherwise() {
        let mixed = |head_size, tokens, sequences| {
            let call = call(head_size, tokens, sequences);
            let weight = Tensor::dense(Slot(9), F32, [3 * head_size, 1, 1, 1]);
            let mix = Mix { weight, bias: weight, eps: 1e-5, gate: Some((Tensor { slot: Slot(10), ..call.y }, None)) };
            Call { mix: Some(mix), ..call }
        };
        let nvidia = Caps::example_nvidia();
        let files = |call: &Call, caps: &Caps| {
            let choice = call.pick(caps, None).unwrap();
            choice.launches.iter().map(|launch| launch.shader.file).collect::<Vec<_>>()
        };
        let (within, after) = (["wkv6/wkv6.comp"], ["wkv6/wkv6.comp", "head_mix/head_mix.comp"]);
        assert_eq!(files(&mixed(64, 1, 1), &nvidia), within);
        assert_eq!(files(&mixed(64, 64, 64), &nvidia), within);
        assert_eq!(files(&mixed(64, 64, 1), &nvidia), after);
        assert_eq!(files(&mixed(128, 1, 1), &nvidia), after);
        assert_eq!(files(&mixed(64, 1, 1), &Caps::least()), after);
        let chunks = mixed(64, 256, 1);
        assert_eq!(files(&chunks, &nvidia), ["wkv6/chunk_clear.comp", "wkv6/coopmat.comp", "head_mix/head_mix.comp"]);
        // The mix waits for y and for its own operands alone.
        let choice = chunks.pick(&nvidia, None).unwrap();
        assert_eq!(chunks.touches(&choice, 2).writes, [chunks.y]);
        assert!(!chunks.touches(&choice, 2).reads.contains(&chunks.k));

        let starts = Tensor::dense(Slot(11), kiln_gguf::TensorType::I32, [2, 1, 1, 1]);
        let ragged = Call { sequences: Sequences::Ragged { starts, longest: 1 }, ..mixed(64, 1, 1) };
        assert!(ragged.check().unwrap_err().reason.contains("different lengths"));
    }

    #[test]
    fn matrix_units_take_chunks_of_64() {
        let nvidia = Caps::example_nvidia();
        for head_size in [32, 64] {
            let choice = call(head_size, 256, 1).pick(&nvidia, None).unwrap();
            assert_eq!(choice.path, Path::Coopmat);
            let chunk = choice.launches[1].shader.defines.iter().find(|(name, _)| name == "CHUNK");
            assert_eq!(chunk.map(|(_, n)| n.as_str()), Some("64"));
        }
        assert!(call(64, 64, 1).pick(&nvidia, Some(Path::Coopmat)).is_err(), "too short for chunks");
        let mut software = nvidia.clone();
        software.is_cpu = true;
        assert_eq!(call(64, 256, 1).pick(&software, None).unwrap().path, Path::Scalar);
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        assert_eq!(call(64, 12, 3).check(), Ok(()));
        let reason = |call: Call| call.check().unwrap_err().reason;
        assert!(reason(Call { tf: call(64, 12, 3).k, ..call(64, 12, 3) }).contains("tf is F32[64, 3, 12]"));
        assert!(reason(Call { td: call(32, 12, 3).td, ..call(64, 12, 3) }).contains("td is F32[32, 3, 12]"));
    }

    #[test]
    fn the_parameter_block_fits_every_device() {
        let call = call(64, 256, 1);
        let choice = call.pick(&Caps::example_nvidia(), None).unwrap();
        assert!(call.params(&choice, 2, &|_| Address(0)).len() <= 128);
    }
}
