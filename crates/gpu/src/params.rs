//! Parameter blocks of kernels, declared once in Rust. The GLSL declaration is generated from the same list of
//! fields, so the two cannot drift.

/// A device address. In GLSL it is a `uvec2`, which becomes a typed pointer by naming the type: `F32(p.x).v[i]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub u64);

impl Address {
    /// The address `bytes` further on.
    pub fn offset(self, bytes: u64) -> Address {
        Address(self.0 + bytes)
    }
}

/// A type that may stand in a parameter block. `ALIGN` and the bytes follow std430.
pub trait Param: Copy {
    /// Alignment in the block.
    const ALIGN: usize;
    /// The declaration of a field of this type in GLSL.
    fn glsl(field: &str) -> String;
    /// Appends the value.
    fn write(self, out: &mut Vec<u8>);
}

macro_rules! scalar_param {
    ($($rust:ty => $glsl:literal),*) => {$(
        impl Param for $rust {
            const ALIGN: usize = 4;
            fn glsl(field: &str) -> String {
                format!("{} {field};", $glsl)
            }
            fn write(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_ne_bytes());
            }
        }
        impl<const N: usize> Param for [$rust; N] {
            const ALIGN: usize = 4;
            fn glsl(field: &str) -> String {
                format!("{} {field}[{N}];", $glsl)
            }
            fn write(self, out: &mut Vec<u8>) {
                self.into_iter().for_each(|v| v.write(out));
            }
        }
    )*};
}

scalar_param!(u32 => "uint", i32 => "int", f32 => "float");

impl Param for Address {
    const ALIGN: usize = 8;
    fn glsl(field: &str) -> String {
        format!("uvec2 {field};")
    }
    fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0.to_ne_bytes());
    }
}

/// Appends one field with the padding std430 puts before it.
#[doc(hidden)]
pub fn push<P: Param>(out: &mut Vec<u8>, value: P) {
    out.resize(out.len().next_multiple_of(P::ALIGN), 0);
    value.write(out);
}

/// The declaration of a block with these fields, one list after the other. The bytes of lists follow each other without a gap
/// where each has a multiple of 8 of them but the last.
pub fn block(fields: &[String]) -> String {
    format!("layout(push_constant, std430) uniform Params {{ {} }} p;\n", fields.join(" "))
}

/// Declares a parameter block.
///
/// ```
/// kiln_gpu::params! {
///     /// y[i] = factor * x[i] for i < n.
///     pub struct Params {
///         x: kiln_gpu::Address,
///         y: kiln_gpu::Address,
///         n: u32,
///         factor: f32,
///     }
/// }
/// let block = Params { x: Default::default(), y: Default::default(), n: 3, factor: 0.5 };
/// assert_eq!(block.bytes().len(), 24);
/// assert!(Params::glsl().contains("uvec2 x; uvec2 y; uint n; float factor;"));
/// ```
#[macro_export]
macro_rules! params {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($field:ident : $ty:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs, reason = "the fields are the kernel's own vocabulary")]
        $vis struct $name { $($vis $field: $ty),* }

        #[allow(dead_code, reason = "not every block is used in both ways")]
        impl $name {
            /// The block as the shader sees it.
            $vis fn bytes(&self) -> Vec<u8> {
                let mut out = Vec::new();
                $($crate::params::push(&mut out, self.$field);)*
                out
            }

            /// Its fields in GLSL.
            $vis fn fields() -> String {
                [$(<$ty as $crate::params::Param>::glsl(stringify!($field))),*].join(" ")
            }

            /// The block's declaration in GLSL; the shader names it `p`.
            $vis fn glsl() -> String {
                $crate::params::block(&[Self::fields()])
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    params! {
        struct Mixed { n: u32, x: Address, strides: [u32; 3], eps: f32 }
    }

    #[test]
    fn addresses_are_aligned_as_std430_does() {
        let block = Mixed { n: 1, x: Address(0x1122_3344_5566_7788), strides: [7, 8, 9], eps: 0.5 };
        let bytes = block.bytes();
        assert_eq!(bytes.len(), 32);
        assert_eq!(bytes[8..16], 0x1122_3344_5566_7788u64.to_ne_bytes());
        assert_eq!(bytes[24..28], 9u32.to_ne_bytes());
        assert!(Mixed::glsl().contains("uint n; uvec2 x; uint strides[3]; float eps;"));
    }
}
