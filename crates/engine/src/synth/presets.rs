//! The models that can be synthesised: their shapes as data. What tensors follow from them is in `tensors.rs`.

use super::gemma4::Gemma4;

/// The family of a preset, with what only that family has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Family {
    /// Llama, and Mixtral with experts.
    Llama,
    /// Qwen 2: biases on queries, keys and values.
    Qwen2,
    /// Qwen 3 with experts: norms on queries and keys.
    Qwen3Moe,
    /// Gemma 2: norms after each part, soft caps, a sliding window of this many tokens.
    Gemma2 {
        /// Tokens of the window.
        window: usize,
    },
    /// Gemma 4.
    Gemma4(Gemma4),
    /// gpt-oss: biases everywhere, a sink for each head, a sliding window of this many tokens in every other layer.
    GptOss {
        /// Tokens of the window.
        window: usize,
    },
    /// DeepSeek 2: latent attention, a first layer without experts, experts that all tokens share.
    DeepSeek2 {
        /// Width of the latent.
        rank: usize,
        /// Elements of a head that are turned.
        turned: usize,
        /// Width of a head of values.
        values: usize,
        /// Experts that all tokens share.
        shared: usize,
    },
    /// BERT: tokens see the whole text, the stream is normed after each half of a layer; layers that make scores at the end.
    Bert,
    /// RWKV 6 with the ranks of its small matrices.
    Rwkv6 {
        /// Rank of the token-mixing matrices.
        mix_rank: usize,
        /// Rank of the decay matrices.
        decay_rank: usize,
    },
    /// RWKV 7 with the ranks of its small matrices.
    Rwkv7 {
        /// Rank of the decay matrices.
        decay_rank: usize,
        /// Rank of the in-context learning rate matrices.
        rate_rank: usize,
        /// Rank of the value-residual matrices.
        value_rank: usize,
        /// Rank of the gate matrices.
        gate_rank: usize,
    },
    /// QRWKV: Qwen 2 with the time mix of RWKV 6 and gated linear attention.
    Rwkv6Qwen2 {
        /// Rank of the token-mixing matrices.
        mix_rank: usize,
        /// Rank of the decay matrices.
        decay_rank: usize,
    },
    /// ARWKV: Qwen 2 with the time mix of RWKV 7, without its gate and its norm of the heads.
    Arwkv7 {
        /// Rank of the decay matrices.
        decay_rank: usize,
        /// Rank of the in-context learning rate matrices.
        rate_rank: usize,
        /// Rank of the value-residual matrices.
        value_rank: usize,
    },
    /// Mamba 2: heads and their width are those of the scan.
    Mamba2 {
        /// Elements of the state of a channel.
        states: usize,
        /// Groups of heads that share what is written and read.
        groups: usize,
    },
    /// Qwen 3 Next: delta nets, every so many layers gated attention, experts and one that all tokens share.
    Qwen3Next {
        /// Heads of keys of a delta net.
        key_heads: usize,
        /// Heads of a delta net.
        heads: usize,
        /// Width of its heads.
        size: usize,
        /// Every so many layers one has attention.
        interval: usize,
        /// Whether rates and decays come from a matrix each, and pairs follow several positions: Qwen 3.5.
        is_35: bool,
    },
}

/// Experts of a mixture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// How many there are.
    pub count: usize,
    /// How many a token uses.
    pub used: usize,
    /// Width of each.
    pub ff: usize,
}

/// The shape of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// The name on the command line.
    pub name: &'static str,
    /// The family.
    pub family: Family,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the feed-forward part.
    pub ff: usize,
    /// Experts, where the feed-forward part is a mixture.
    pub experts: Option<Experts>,
    /// Tokens in the vocabulary; 0 for just the bytes, a few merges and the special tokens.
    pub vocab: usize,
    /// Context length.
    pub context: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// The factor of Llama 3's long-context frequencies, where the model has them.
    pub rope_factor: Option<f32>,
    /// Whether the output shares the embedding's matrix.
    pub tied: bool,
}

const LLAMA_8B: Preset = Preset {
    name: "llama-8b",
    family: Family::Llama,
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    ff: 14336,
    experts: None,
    vocab: 128_256,
    context: 131_072,
    rope_base: 500_000.0,
    rope_factor: Some(8.0),
    tied: false,
};

const TINY: Preset = Preset {
    name: "tiny-llama",
    family: Family::Llama,
    layers: 2,
    hidden: 64,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    ff: 160,
    experts: None,
    vocab: 0,
    context: 512,
    rope_base: 10_000.0,
    rope_factor: None,
    tied: false,
};

const RWKV6_7B: Preset = Preset {
    name: "rwkv6-7b",
    family: Family::Rwkv6 { mix_rank: 64, decay_rank: 128 },
    heads: 64,
    kv_heads: 64,
    head_dim: 64,
    vocab: 65_536,
    context: 1 << 20,
    rope_factor: None,
    ..LLAMA_8B
};

const TINY_RWKV6: Preset = Preset {
    name: "tiny-rwkv6",
    family: Family::Rwkv6 { mix_rank: 8, decay_rank: 16 },
    hidden: 128,
    heads: 2,
    kv_heads: 2,
    head_dim: 64,
    ff: 448,
    ..TINY
};

const GEMMA4_31B: Preset = Preset {
    name: "gemma4-31b",
    family: Family::Gemma4(GEMMA4_LARGE),
    layers: 60,
    hidden: 5376,
    heads: 32,
    kv_heads: 4,
    head_dim: 512,
    ff: 21_504,
    vocab: 262_144,
    context: 262_144,
    rope_base: 1e6,
    rope_factor: None,
    tied: true,
    ..LLAMA_8B
};

const GEMMA4_LARGE: Gemma4 = Gemma4 {
    window: 1024,
    interval: 6,
    kv_heads: 16,
    head_dim: 256,
    per_layer: 0,
    shared: 0,
    wider: 1,
    keys_as_values: true,
};

const GEMMA4_SMALL: Gemma4 =
    Gemma4 { window: 512, kv_heads: 2, per_layer: 256, shared: 18, keys_as_values: false, ..GEMMA4_LARGE };

/// Every preset: real shapes first, then tiny ones for tests.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "smollm2-135m",
        layers: 30,
        hidden: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        ff: 1536,
        vocab: 49_152,
        context: 8192,
        rope_base: 1e5,
        rope_factor: None,
        tied: true,
        ..LLAMA_8B
    },
    Preset {
        name: "llama-1b",
        layers: 16,
        hidden: 2048,
        head_dim: 64,
        ff: 8192,
        rope_factor: Some(32.0),
        tied: true,
        ..LLAMA_8B
    },
    LLAMA_8B,
    Preset {
        name: "qwen3-30b-a3b",
        family: Family::Qwen3Moe,
        layers: 48,
        hidden: 2048,
        kv_heads: 4,
        ff: 6144,
        experts: Some(Experts { count: 128, used: 8, ff: 768 }),
        vocab: 151_936,
        context: 40_960,
        rope_base: 1e6,
        rope_factor: None,
        ..LLAMA_8B
    },
    Preset {
        name: "qwen3-20b-a2b",
        family: Family::Qwen3Moe,
        hidden: 2048,
        kv_heads: 4,
        ff: 6144,
        experts: Some(Experts { count: 128, used: 8, ff: 768 }),
        vocab: 151_936,
        context: 40_960,
        rope_base: 1e6,
        rope_factor: None,
        ..LLAMA_8B
    },
    Preset {
        name: "qwen3-2b-a0.2b",
        family: Family::Qwen3Moe,
        layers: 4,
        hidden: 2048,
        kv_heads: 4,
        ff: 6144,
        experts: Some(Experts { count: 128, used: 8, ff: 768 }),
        vocab: 8192,
        context: 40_960,
        rope_base: 1e6,
        rope_factor: None,
        ..LLAMA_8B
    },
    Preset {
        name: "gpt-oss-20b",
        family: Family::GptOss { window: 128 },
        layers: 24,
        hidden: 2880,
        heads: 64,
        head_dim: 64,
        ff: 2880,
        experts: Some(Experts { count: 32, used: 4, ff: 2880 }),
        vocab: 201_088,
        rope_base: 150_000.0,
        rope_factor: None,
        ..LLAMA_8B
    },
    Preset {
        name: "deepseek-v2-lite",
        family: Family::DeepSeek2 { rank: 512, turned: 64, values: 128, shared: 2 },
        layers: 27,
        hidden: 2048,
        heads: 16,
        kv_heads: 1,
        head_dim: 192,
        ff: 10_944,
        experts: Some(Experts { count: 64, used: 6, ff: 1408 }),
        vocab: 102_400,
        rope_base: 10_000.0,
        rope_factor: None,
        ..LLAMA_8B
    },
    Preset {
        name: "mixtral-8x7b",
        experts: Some(Experts { count: 8, used: 2, ff: 14336 }),
        vocab: 32_000,
        context: 32_768,
        rope_base: 1e6,
        rope_factor: None,
        ..LLAMA_8B
    },
    Preset {
        name: "gemma2-9b",
        family: Family::Gemma2 { window: 4096 },
        layers: 42,
        hidden: 3584,
        heads: 16,
        head_dim: 256,
        vocab: 256_000,
        context: 8192,
        rope_base: 10_000.0,
        rope_factor: None,
        tied: true,
        ..LLAMA_8B
    },
    Preset {
        name: "gemma4-e2b",
        family: Family::Gemma4(Gemma4 { interval: 5, kv_heads: 1, shared: 20, wider: 2, ..GEMMA4_SMALL }),
        layers: 35,
        hidden: 1536,
        heads: 8,
        kv_heads: 1,
        ff: 6144,
        context: 131_072,
        ..GEMMA4_31B
    },
    Preset {
        name: "gemma4-e4b",
        family: Family::Gemma4(GEMMA4_SMALL),
        layers: 42,
        hidden: 2560,
        heads: 8,
        kv_heads: 2,
        ff: 10_240,
        context: 131_072,
        ..GEMMA4_31B
    },
    // Of its sizes only the kinds of layers are known; the others are those of Gemma 3's 12B.
    Preset {
        name: "gemma4-12b",
        family: Family::Gemma4(Gemma4 { kv_heads: 8, ..GEMMA4_LARGE }),
        layers: 48,
        hidden: 3840,
        heads: 16,
        kv_heads: 2,
        ff: 15_360,
        ..GEMMA4_31B
    },
    Preset {
        name: "gemma4-26b-a4b",
        family: Family::Gemma4(Gemma4 { kv_heads: 8, ..GEMMA4_LARGE }),
        layers: 30,
        hidden: 2816,
        heads: 16,
        kv_heads: 2,
        ff: 2112,
        experts: Some(Experts { count: 128, used: 8, ff: 704 }),
        ..GEMMA4_31B
    },
    GEMMA4_31B,
    Preset {
        name: "rwkv6-1.6b",
        family: Family::Rwkv6 { mix_rank: 32, decay_rank: 64 },
        layers: 24,
        hidden: 2048,
        heads: 32,
        kv_heads: 32,
        ff: 7168,
        ..RWKV6_7B
    },
    RWKV6_7B,
    Preset {
        name: "rwkv7-2.9b",
        family: Family::Rwkv7 { decay_rank: 96, rate_rank: 96, value_rank: 64, gate_rank: 320 },
        hidden: 2560,
        heads: 40,
        kv_heads: 40,
        ff: 10_240,
        ..RWKV6_7B
    },
    Preset {
        name: "mamba2-7b",
        family: Family::Mamba2 { states: 128, groups: 8 },
        layers: 64,
        heads: 128,
        kv_heads: 128,
        head_dim: 64,
        ff: 0,
        vocab: 32_768,
        rope_factor: None,
        ..LLAMA_8B
    },
    // As the model of 80B, with fewer layers and experts.
    Preset {
        name: "qwen3next-7b",
        family: Family::Qwen3Next { key_heads: 16, heads: 32, size: 128, interval: 4, is_35: false },
        layers: 28,
        hidden: 2048,
        heads: 16,
        kv_heads: 2,
        head_dim: 256,
        ff: 512,
        experts: Some(Experts { count: 64, used: 10, ff: 512 }),
        vocab: 151_936,
        rope_base: 1e7,
        rope_factor: None,
        ..LLAMA_8B
    },
    Preset {
        name: "qwen3.5-35b-a3b",
        family: Family::Qwen3Next { key_heads: 16, heads: 32, size: 128, interval: 4, is_35: true },
        layers: 40,
        hidden: 2048,
        heads: 16,
        kv_heads: 2,
        head_dim: 256,
        ff: 512,
        experts: Some(Experts { count: 256, used: 8, ff: 512 }),
        vocab: 248_320,
        context: 262_144,
        rope_base: 1e7,
        rope_factor: None,
        ..LLAMA_8B
    },
    TINY,
    // Rows of whole 256-blocks, for the formats that need them.
    Preset { name: "tiny-llama-256", hidden: 256, head_dim: 64, ff: 512, ..TINY },
    Preset { name: "tiny-qwen2", family: Family::Qwen2, rope_base: 1e6, tied: true, ..TINY },
    Preset {
        name: "tiny-qwen3moe",
        family: Family::Qwen3Moe,
        head_dim: 32,
        experts: Some(Experts { count: 8, used: 2, ff: 32 }),
        rope_base: 1e6,
        ..TINY
    },
    Preset { name: "tiny-gemma2", family: Family::Gemma2 { window: 32 }, head_dim: 32, tied: true, ..TINY },
    Preset {
        name: "tiny-gemma4",
        family: Family::Gemma4(Gemma4 {
            window: 32,
            interval: 2,
            kv_heads: 2,
            head_dim: 16,
            per_layer: 16,
            shared: 1,
            wider: 2,
            keys_as_values: true,
        }),
        layers: 3,
        kv_heads: 1,
        head_dim: 32,
        experts: Some(Experts { count: 8, used: 2, ff: 32 }),
        rope_base: 1e6,
        tied: true,
        ..TINY
    },
    Preset {
        name: "tiny-gpt-oss",
        family: Family::GptOss { window: 32 },
        experts: Some(Experts { count: 8, used: 2, ff: 32 }),
        ..TINY
    },
    Preset {
        name: "tiny-deepseek2",
        family: Family::DeepSeek2 { rank: 32, turned: 16, values: 24, shared: 1 },
        kv_heads: 1,
        head_dim: 40,
        experts: Some(Experts { count: 8, used: 2, ff: 32 }),
        ..TINY
    },
    // Writes nothing, so it is none of those that tests let write.
    Preset { name: "bert-tiny", family: Family::Bert, kv_heads: 4, context: 128, tied: true, ..TINY },
    TINY_RWKV6,
    Preset {
        name: "tiny-rwkv7",
        family: Family::Rwkv7 { decay_rank: 16, rate_rank: 16, value_rank: 8, gate_rank: 24 },
        ff: 512,
        ..TINY_RWKV6
    },
    Preset {
        name: "tiny-rwkv6qwen2",
        family: Family::Rwkv6Qwen2 { mix_rank: 8, decay_rank: 16 },
        heads: 4,
        kv_heads: 2,
        head_dim: 32,
        ..TINY_RWKV6
    },
    Preset {
        name: "tiny-arwkv7",
        family: Family::Arwkv7 { decay_rank: 16, rate_rank: 16, value_rank: 8 },
        ..TINY_RWKV6
    },
    Preset { name: "tiny-mamba2", family: Family::Mamba2 { states: 32, groups: 2 }, head_dim: 64, ff: 0, ..TINY },
    Preset {
        name: "tiny-qwen3next",
        family: Family::Qwen3Next { key_heads: 2, heads: 4, size: 32, interval: 2, is_35: false },
        head_dim: 32,
        ff: 32,
        experts: Some(Experts { count: 8, used: 2, ff: 32 }),
        rope_base: 1e7,
        ..TINY
    },
    Preset {
        name: "tiny-qwen35moe",
        family: Family::Qwen3Next { key_heads: 2, heads: 4, size: 32, interval: 2, is_35: true },
        head_dim: 32,
        ff: 32,
        experts: Some(Experts { count: 8, used: 2, ff: 32 }),
        rope_base: 1e7,
        ..TINY
    },
];

impl Preset {
    /// The preset of this name.
    pub fn from_name(name: &str) -> Option<&'static Preset> {
        PRESETS.iter().find(|preset| preset.name == name)
    }

    /// The name of the architecture in files.
    pub fn architecture(&self) -> &'static str {
        match self.family {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3Moe => "qwen3moe",
            Family::Gemma2 { .. } => "gemma2",
            Family::Gemma4(_) => "gemma4",
            Family::GptOss { .. } => "gpt-oss",
            Family::DeepSeek2 { .. } => "deepseek2",
            Family::Bert => "bert",
            Family::Rwkv6 { .. } => "rwkv6",
            Family::Rwkv7 { .. } => "rwkv7",
            Family::Rwkv6Qwen2 { .. } => "rwkv6qwen2",
            Family::Arwkv7 { .. } => "arwkv7",
            Family::Mamba2 { .. } => "mamba2",
            Family::Qwen3Next { is_35: false, .. } => "qwen3next",
            Family::Qwen3Next { is_35: true, .. } => "qwen35moe",
        }
    }
}
