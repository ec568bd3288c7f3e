//! Results of single tokens that are left as matrix units take them, for the product that reads them ([`crate::packed_b`]): by whichever step writes the
//! floats, on the fragment path. What attention makes of keys and values of halves fits halves, so factors are 1.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, FIELD_BYTES, Shader};

use super::fragment::fragment;
use super::plan::{self, unsupported};
use super::{Call, NAME};
use crate::host::HostMemory;
use crate::operation::{Choice, Invalid, Path, Unsupported, require};
use crate::packed_b::PackedB;
use crate::tensor::Tensor;

kiln_gpu::params! {
    /// What stands behind the parameters of a causal call.
    pub(super) struct Params { emit_packed_b: Address }
}

impl Call {
    /// Elements of a column of the product that reads the result, and how many columns it has.
    pub fn columns(&self) -> [usize; 2] {
        let [head, heads, tokens, batch] = self.out.shape;
        [head * heads, tokens * batch]
    }

    pub(super) fn check_packed_b(&self) -> Result<(), Invalid> {
        let Some(emit_packed_b) = &self.emit_packed_b else { return Ok(()) };
        require(self.rounding.is_none() && emit_packed_b.factors.is_none(), NAME, || {
            "packed results have no factors, and are not rounded as well".into()
        })?;
        require(self.v.ty == TensorType::F16, NAME, || {
            format!("v is {}: only what is made of halves fits them", self.v)
        })?;
        require(self.out.is_dense(), NAME, || format!("out is {}, want columns side by side", self.out))?;
        emit_packed_b.check(self.columns(), NAME)
    }

    /// Leaves the result ready as well, if it is to be.
    pub(super) fn write_packed_b(&self, memory: &mut HostMemory) {
        if let Some(emit_packed_b) = &self.emit_packed_b {
            let [_, columns] = self.columns();
            emit_packed_b.write(&memory.read(&self.out), &vec![1.0; columns], memory);
        }
    }
}

/// The fragment path, where one dispatch writes the result and there is room for one more parameter.
pub(super) fn pick(
    call: &Call,
    emit_packed_b: &PackedB,
    caps: &Caps,
    want: Option<Path>,
) -> Result<Choice, Unsupported> {
    if let Some(path) = want.filter(|path| *path != Path::Fragment) {
        return Err(unsupported(format!("results are not emitted packed on the path {}", path.name())));
    }
    if Some(emit_packed_b.layout) != caps.fragment_layout {
        return Err(unsupported("packed results in another device's fragment layout".into()));
    }
    let bytes = plan::params(call, &|_| Address::default()).len();
    let room = caps.limits.max_push_bytes.min(256) as usize;
    if bytes + FIELD_BYTES > room {
        return Err(unsupported(format!("{bytes} bytes of parameters, the device takes {room}")));
    }
    if call.split.is_some_and(|split| split.counters.is_none()) {
        return Err(unsupported("splits without counters leave no packed results".into()));
    }
    fragment(call, caps)
}

pub(super) fn defines(shader: Shader, call: &Call) -> Shader {
    let shader = shader.define("EMIT_PACKED_B", u32::from(call.emit_packed_b.is_some()));
    match call.emit_packed_b {
        Some(emit_packed_b) => shader.define("PIECE", emit_packed_b.piece).define("HALF", 1),
        None => shader,
    }
}

pub(super) fn params(emit_packed_b: &PackedB, at: &dyn Fn(&Tensor) -> Address) -> Params {
    Params { emit_packed_b: at(&emit_packed_b.halves) }
}
