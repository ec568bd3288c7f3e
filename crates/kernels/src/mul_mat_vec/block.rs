//! The parameter block of a launch, put together field by field: which fields there are depends on the call's options, and
//! all of them together would not fit the 128 bytes every device has.

use kiln_gpu::params::{Param, push};

/// Fields as GLSL declares them, and their bytes. Addresses come first, so that nothing is lost to alignment.
#[derive(Default)]
pub(super) struct Block {
    addresses: Fields,
    others: Fields,
}

#[derive(Default)]
struct Fields {
    glsl: Vec<String>,
    bytes: Vec<u8>,
}

impl Block {
    /// Adds a field.
    pub(super) fn add<P: Param>(&mut self, name: &str, value: P) {
        let fields = if P::ALIGN == 8 { &mut self.addresses } else { &mut self.others };
        fields.glsl.push(P::glsl(name));
        push(&mut fields.bytes, value);
    }

    /// The block's declaration; the shader names it `p`.
    pub(super) fn glsl(&self) -> String {
        let fields: Vec<&str> = self.addresses.glsl.iter().chain(&self.others.glsl).map(String::as_str).collect();
        format!("layout(push_constant, std430) uniform Params {{ {} }} p;\n", fields.join(" "))
    }

    /// The block as the shader sees it.
    pub(super) fn bytes(mut self) -> Vec<u8> {
        self.addresses.bytes.append(&mut self.others.bytes);
        self.addresses.bytes
    }
}
