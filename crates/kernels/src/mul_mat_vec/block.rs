//! The parameter block of a launch, put together field by field: which fields there are depends on the call's options, and
//! all of them together would not fit the 128 bytes every device has.

use kiln_gpu::params::{Param, push};

/// Fields as GLSL declares them, and their bytes.
#[derive(Default)]
pub(super) struct Block {
    fields: Vec<String>,
    bytes: Vec<u8>,
}

impl Block {
    /// Adds a field.
    pub(super) fn add<P: Param>(&mut self, name: &str, value: P) {
        self.fields.push(P::glsl(name));
        push(&mut self.bytes, value);
    }

    /// The block's declaration; the shader names it `p`.
    pub(super) fn glsl(&self) -> String {
        format!("layout(push_constant, std430) uniform Params {{ {} }} p;\n", self.fields.join(" "))
    }

    /// The block as the shader sees it.
    pub(super) fn bytes(self) -> Vec<u8> {
        self.bytes
    }
}
