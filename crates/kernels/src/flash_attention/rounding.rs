//! The result of one token, left rounded for the product that reads it ([`crate::rounded`]): by whichever step writes the floats, on the path of
//! teams.

use kiln_gpu::{Address, Caps, FIELD_BYTES, Shader};

use super::plan::{self, unsupported};
use super::threads::teams;
use super::{Call, Mask, NAME};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Path, Unsupported, require};
use crate::rounded::{GROUP, Rounding};
use crate::tensor::Tensor;

/// Threads that have a group together.
const THREADS: usize = GROUP / 4;

kiln_gpu::params! {
    /// What stands behind the parameters of a causal call.
    pub(super) struct Params { rounding: Address }
}

impl Call {
    /// This call with its result left rounded besides.
    pub(crate) fn leaving(&self, rounding: Rounding) -> Option<Call> {
        let call = Call { rounding: Some(rounding), ..*self };
        (self.rounding.is_none() && call.check_rounding().is_ok()).then_some(call)
    }

    pub(super) fn check_rounding(&self) -> Result<(), Invalid> {
        let Some(rounding) = &self.rounding else { return Ok(()) };
        let out = self.out;
        let one = out.shape[2..] == [1, 1] && out.shape[0].is_multiple_of(GROUP);
        require(one, NAME, || {
            format!("out is {out}: one token with heads of whole groups of {GROUP} is left rounded")
        })?;
        require(rounding.weight.is_none(), NAME, || "no weight stands between attention and its product".into())?;
        rounding.check(&out, NAME)
    }

    /// Leaves the result rounded as well, if it is to be.
    pub(super) fn round(&self, memory: &mut HostMemory) {
        if let Some(rounding) = self.rounding {
            rounding.reference(&self.out, memory);
        }
    }
}

/// The path of teams that the call would take without, where it can do it.
pub(super) fn pick(call: &Call, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    let path = match want {
        Some(path) => path,
        None => plan::pick(&Call { rounding: None, ..*call }, caps, None)?.path,
    };
    match path {
        Path::Scalar | Path::IntDot => teams(call, caps, path),
        other => Err(unsupported(format!("results are not rounded on the path {}", other.name()))),
    }
}

/// Whether teams can do it: subgroups have whole groups, there is room for one more parameter, and one dispatch writes the result.
pub(super) fn check(call: &Call, caps: &Caps) -> Result<(), Unsupported> {
    if call.rounding.is_none() {
        return Ok(());
    }
    let bytes = plan::params(call, &|_| Address::default()).len() + FIELD_BYTES;
    let room = caps.limits.max_push_bytes.min(256) as usize;
    if bytes > room {
        return Err(unsupported(format!("{bytes} bytes of parameters, the device takes {room}")));
    }
    let size = caps.subgroups.size as usize;
    if size < THREADS {
        return Err(unsupported(format!("subgroups of {size}, {THREADS} threads round a group")));
    }
    if call.split.is_some_and(|split| split.counters.is_none()) || matches!(call.mask, Mask::Explicit(_)) {
        return Err(unsupported(
            "results are rounded with neither a mask of numbers nor splits without counters".into(),
        ));
    }
    Ok(())
}

pub(super) fn defines(shader: Shader, call: &Call) -> Shader {
    shader.define("ROUNDING", u32::from(call.rounding.is_some()))
}

pub(super) fn params(rounding: &Rounding, at: &dyn Fn(&Tensor) -> Address) -> Params {
    Params { rounding: at(&rounding.to) }
}
