//! The operations of Kiln, one folder each: GLSL, contract, reference, cases. Operations record work; they never
//! allocate and never submit.
// Set by `build.rs` where the compiler knows these instructions, but not yet as a part of the stable library.
#![cfg_attr(arm_dotprod_unstable, feature(stdarch_neon_dotprod))]
#![cfg_attr(arm_i8mm_unstable, feature(stdarch_neon_i8mm))]

pub mod case;
pub mod ceiling;
mod chunks;
pub mod compiled;
pub mod dependent_launch;
mod elementwise;
mod floats;
pub mod formats;
mod fragment_layout;
pub mod fuse;
pub mod harness;
pub mod host;
mod linear_recurrence;
pub mod mul_mat;
pub mod operation;
pub mod packed_b;
pub mod packing;
pub mod probe;
pub mod record;
pub mod recurrence;
pub mod rounded;
pub mod row_norm;
pub mod rows;
mod simd;
pub mod tensor;
pub mod timing;
pub mod tuning;

// The operations.
pub mod advance;
pub mod argmax;
pub mod argsort;
pub mod binary;
pub mod choose_keys;
pub mod concat;
pub mod copy;
pub mod dequantise;
pub mod flash_attention;
pub mod gated_add;
pub mod gated_delta_net;
pub mod get_rows;
pub mod gla;
pub mod glu;
pub mod group_norm;
pub mod hadamard;
pub mod head_mix;
pub mod key_mix;
pub mod kv_write;
pub mod l2_norm;
pub mod list_blocks;
pub mod mul_mat_vec;
pub mod mul_mm;
pub mod ngram_rows;
pub mod norm;
pub mod pool_keys;
pub mod quantise_q8_1;
pub mod rms_norm;
pub mod rope;
pub mod sample;
pub mod scale;
pub mod set_rows;
pub mod sinkhorn;
pub mod soft_max;
pub mod ssm_conv;
pub mod ssm_scan;
pub mod sum_rows;
pub mod token_mix;
pub mod top_k;
pub mod topk_moe;
pub mod unary;
pub mod wkv6;
pub mod wkv7;
pub mod xielu;

pub use fragment_layout::open;

/// Every operation is one line here: its module and the name of its variant in [`Call`]. The modules themselves are declared above: rustfmt does
/// not see what a macro declares.
macro_rules! operations {
    ($($module:ident => $variant:ident),* $(,)?) => {
        /// One operation with its operands: what a step of a plan holds.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs, reason = "each variant is documented in its module")]
        #[allow(clippy::large_enum_variant, reason = "a plan has some hundred steps: a kilobyte each is little, and pointers to follow are no gain")]
        pub enum Call { $($variant($module::Call)),* }

        impl Call {
            /// The operation behind the call.
            pub fn operation(&self) -> &dyn operation::Operation {
                match self { $(Call::$variant(call) => call),* }
            }
        }

        $(impl From<$module::Call> for Call {
            fn from(call: $module::Call) -> Call { Call::$variant(call) }
        })*

        /// The registry: tests, `kiln selftest`, `kiln bench ops` and the support table come from it.
        pub const KERNELS: &[Kernel] = &[$(Kernel {
            name: stringify!($module),
            summary: $module::SUMMARY,
            cases: $module::cases::cases,
        }),*];
    };
}

/// One row of the registry.
pub struct Kernel {
    /// The operation's one name.
    pub name: &'static str,
    /// What it computes, in one line.
    pub summary: &'static str,
    /// Its cases.
    pub cases: fn(case::Level) -> Vec<case::Case>,
}

operations! {
    rms_norm => RmsNorm,
    norm => Norm,
    l2_norm => L2Norm,
    group_norm => GroupNorm,
    rope => Rope,
    kv_write => KvWrite,
    soft_max => SoftMax,
    sinkhorn => Sinkhorn,
    flash_attention => FlashAttention,
    choose_keys => ChooseKeys,
    pool_keys => PoolKeys,
    list_blocks => ListBlocks,
    ngram_rows => NgramRows,
    topk_moe => TopkMoe,
    binary => Binary,
    scale => Scale,
    unary => Unary,
    xielu => Xielu,
    hadamard => Hadamard,
    glu => Glu,
    gated_add => GatedAdd,
    copy => Copy,
    dequantise => Dequantise,
    get_rows => GetRows,
    set_rows => SetRows,
    quantise_q8_1 => QuantiseQ8_1,
    concat => Concat,
    sum_rows => SumRows,
    argmax => Argmax,
    argsort => Argsort,
    top_k => TopK,
    wkv6 => Wkv6,
    wkv7 => Wkv7,
    gla => Gla,
    ssm_conv => SsmConv,
    ssm_scan => SsmScan,
    gated_delta_net => GatedDeltaNet,
    token_mix => TokenMix,
    head_mix => HeadMix,
    key_mix => KeyMix,
    mul_mat_vec => MulMatVec,
    mul_mm => MulMm,
    sample => Sample,
    advance => Advance,
}

/// Every GLSL file of this crate: path as shaders name it, and text.
pub const SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));
