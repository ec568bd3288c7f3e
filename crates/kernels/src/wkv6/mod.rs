//! `wkv6`: the recurrence of RWKV-6, S = td S + k v with a bonus for the token itself. Sequential, or in chunks for
//! long sequences.

pub mod cases;
mod reference;

use kiln_gpu::{Address, Caps};

use crate::host::HostMemory;
use crate::linear_recurrence::{self, Linear};
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, Work};
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
    /// The way through the tokens.
    pub form: Form,
}

/// Bytes of scratch memory that the chunked form needs on any device.
pub fn scratch_bytes(head_size: usize, heads: usize, tokens: usize, sequences: usize) -> usize {
    linear_recurrence::scratch_bytes(head_size, heads, tokens, sequences)
}

impl Call {
    fn linear(&self) -> Linear {
        let &Call { k, v, r, tf, td, state_in, y, state_out, scratch, sequences, form } = self;
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
            form,
            scale: 1.0,
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

    fn params(&self, choice: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        self.linear().params(choice, at)
    }

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        self.linear().work()
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |Linear { k, v, r, td, state_in, y, state_out, sequences, .. }| {
            Call { k, v, r, td, state_in, y, state_out, sequences, ..*self }.into()
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
            form: Form::Auto,
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
