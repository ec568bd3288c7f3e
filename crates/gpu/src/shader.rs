//! What to compile, as plain data: a source file, its defines and its parameter block. Equal shaders share a pipeline.

/// How a kernel wants its subgroups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SubgroupRequest {
    /// Any size, possibly not full.
    #[default]
    Any,
    /// The device's own size, every subgroup full.
    Full,
    /// Exactly this size, every subgroup full.
    Size(u32),
}

/// One compute shader variant.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shader {
    /// Variant id for people: `operation.format.path`.
    pub name: String,
    /// Path of the source among the embedded ones: `rms_norm/rms_norm.comp`.
    pub file: &'static str,
    /// Macros, in order.
    pub defines: Vec<(String, String)>,
    /// The declaration of the parameter block (`Params::glsl()`).
    pub params: String,
    /// Files that `#include "formats.glsl"` stands for: the tensor formats this variant works on.
    pub formats: Vec<String>,
    /// How the kernel wants its subgroups.
    pub subgroup: SubgroupRequest,
    /// Whether it is a dependent launch ([`Shader::launching_dependent`]).
    pub launches_dependent: bool,
}

impl Shader {
    /// A shader without defines.
    pub fn new(name: impl Into<String>, file: &'static str, params: String) -> Shader {
        Shader {
            name: name.into(),
            file,
            defines: Vec::new(),
            params,
            formats: Vec::new(),
            subgroup: SubgroupRequest::Any,
            launches_dependent: false,
        }
    }

    /// Adds `#define name value`.
    pub fn define(mut self, name: &str, value: impl ToString) -> Shader {
        self.defines.push((name.to_owned(), value.to_string()));
        self
    }

    /// Adds a file to those that `#include "formats.glsl"` stands for.
    pub fn format(mut self, file: impl Into<String>) -> Shader {
        self.formats.push(file.into());
        self
    }

    /// Asks for a kind of subgroup.
    pub fn subgroup(mut self, request: SubgroupRequest) -> Shader {
        self.subgroup = request;
        self
    }
}
