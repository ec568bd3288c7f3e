//! Results of single tokens that are left as matrix units take them, for the product that reads them ([`crate::ready`]): by whoever writes the
//! floats, on the path of lanes. What attention makes of keys and values of halves fits halves, so factors are 1.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, FIELD_BYTES, Shader};

use super::lanes::lanes;
use super::plan::{self, unsupported};
use super::{Call, NAME};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Path, Unsupported, require};
use crate::ready::Ready;
use crate::tensor::Tensor;

kiln_gpu::params! {
    /// What stands behind the parameters of a causal call.
    pub(super) struct Params { ready: Address }
}

impl Call {
    /// Elements of a column of the product that reads the result, and how many columns it has.
    pub fn columns(&self) -> [usize; 2] {
        let [head, heads, tokens, batch] = self.out.shape;
        [head * heads, tokens * batch]
    }

    pub(super) fn check_ready(&self) -> Result<(), Invalid> {
        let Some(ready) = &self.ready else { return Ok(()) };
        require(self.rounding.is_none() && ready.factors.is_none(), NAME, || "ready results have no factors, and are not rounded as well".into())?;
        require(self.v.ty == TensorType::F16, NAME, || format!("v is {}: only what is made of halves fits them", self.v))?;
        require(self.out.is_dense(), NAME, || format!("out is {}, want columns side by side", self.out))?;
        ready.check(self.columns(), NAME)
    }

    /// Leaves the result ready as well, if it is to be.
    pub(super) fn make_ready(&self, memory: &mut HostMemory) {
        if let Some(ready) = &self.ready {
            let [_, columns] = self.columns();
            ready.write(&memory.read(&self.out), &vec![1.0; columns], memory);
        }
    }
}

/// The path of lanes, where one dispatch writes the result and there is room for one more parameter.
pub(super) fn pick(call: &Call, ready: &Ready, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    if let Some(path) = want.filter(|path| *path != Path::Lanes) {
        return Err(unsupported(format!("results are not left ready on the path {}", path.name())));
    }
    if Some(ready.order) != caps.matrix_order {
        return Err(unsupported("ready results in the order of another device's matrices".into()));
    }
    let bytes = plan::params(call, &|_| Address::default()).len();
    let room = caps.limits.max_push_bytes.min(256) as usize;
    if bytes + FIELD_BYTES > room {
        return Err(unsupported(format!("{bytes} bytes of parameters, the device takes {room}")));
    }
    if call.split.is_some_and(|split| split.counters.is_none()) {
        return Err(unsupported("splits without counters leave no ready results".into()));
    }
    lanes(call, caps)
}

pub(super) fn defines(shader: Shader, call: &Call) -> Shader {
    let shader = shader.define("READY", u32::from(call.ready.is_some()));
    match call.ready {
        Some(ready) => shader.define("PIECE", ready.piece).define("HALF", 1),
        None => shader,
    }
}

pub(super) fn params(ready: &Ready, at: &dyn Fn(&Tensor) -> Address) -> Params {
    Params { ready: at(&ready.halves) }
}
