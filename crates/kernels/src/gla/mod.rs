//! `gla`: gated linear attention, S = td S + k v and y = scale r S. Sequential, or in chunks for long sequences.

pub mod cases;
mod reference;

use kiln_gpu::{Address, Caps};

use crate::host::HostMemory;
use crate::linear_recurrence::{self, Linear};
use crate::operation::{Choice, Invalid, Operation, Path, Unsupported, Work};
use crate::recurrence::{Form, Sequences};
use crate::tensor::Tensor;

const NAME: &str = "gla";

/// One line for the registry.
pub const SUMMARY: &str = "S = td S + k v, y = scale r S: gated linear attention";

/// Operands of `gla`. All tensors begin at multiples of 16 bytes; S is 32, 64 or 128.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Call {
    /// Keys `[S, heads, tokens]`, F32, dense.
    pub k: Tensor,
    /// Values, as `k`.
    pub v: Tensor,
    /// Receptances (queries), as `k`.
    pub r: Tensor,
    /// Decays (gates), as `k`; at most one in magnitude unless the form is [`Form::Sequential`].
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
    /// Factor of `y`.
    pub scale: f32,
}

/// Bytes of scratch memory that the chunked form needs on any device.
pub fn scratch_bytes(head_size: usize, heads: usize, tokens: usize, sequences: usize) -> usize {
    linear_recurrence::scratch_bytes(head_size, heads, tokens, sequences)
}

impl Call {
    fn linear(&self) -> Linear {
        let &Call { k, v, r, td, state_in, y, state_out, scratch, sequences, slots, form, scale } = self;
        Linear {
            operation: NAME,
            file: "gla/gla.comp",
            k,
            v,
            r,
            tf: None,
            td,
            state_in,
            y,
            state_out,
            scratch,
            sequences,
            slots,
            form,
            scale,
            mix: None,
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

    fn reference(&self, memory: &mut HostMemory) {
        reference::reference(self, memory);
    }

    fn work(&self) -> Work {
        self.linear().work()
    }

    fn parts(&self) -> Vec<crate::Call> {
        let part = |Linear { k, v, r, td, state_in, y, state_out, sequences, slots, .. }| {
            Call { k, v, r, td, state_in, y, state_out, sequences, slots, ..*self }.into()
        };
        self.linear().parts().into_iter().map(part).collect()
    }
}
