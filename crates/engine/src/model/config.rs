//! Hyper-parameters, read from the metadata and bounded: the file is not trusted.

use kiln_gguf::{Gguf, Metadata};
use kiln_kernels::rope::{RopeParams, RopeStyle};

use super::names;
use crate::Error;

/// The architectures Kiln can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama and everything that is built like it (SmolLM2, TinyLlama, Mistral).
    Llama,
    /// RWKV-6: a recurrence with decays that depend on the token.
    Rwkv6,
    /// RWKV-7: a recurrence that also replaces what it remembers.
    Rwkv7,
    /// QRWKV: Qwen 2 with gated linear attention and the token mixing of RWKV-6 in the place of attention.
    Rwkv6Qwen2,
    /// ARWKV: Qwen 2 with the time mix of RWKV-7 in the place of attention.
    Arwkv7,
}

impl Architecture {
    const ALL: [(&str, Architecture); 5] = [
        ("llama", Architecture::Llama),
        ("rwkv6", Architecture::Rwkv6),
        ("rwkv7", Architecture::Rwkv7),
        ("rwkv6qwen2", Architecture::Rwkv6Qwen2),
        ("arwkv7", Architecture::Arwkv7),
    ];

    /// The name in files.
    pub fn name(self) -> &'static str {
        Architecture::ALL.iter().find(|(_, a)| *a == self).map_or("unknown", |(name, _)| name)
    }

    /// Whether a state of fixed size takes the place of a cache: the context has no end, and no way back.
    pub fn is_recurrent(self) -> bool {
        matches!(self, Architecture::Rwkv6 | Architecture::Rwkv7) || self.is_hybrid()
    }

    /// Whether only attention was replaced: norms and feed-forward layers are those of a transformer.
    pub fn is_hybrid(self) -> bool {
        matches!(self, Architecture::Rwkv6Qwen2 | Architecture::Arwkv7)
    }

    fn read(metadata: &Metadata) -> Result<(&str, Architecture), Error> {
        let name = metadata.get_str("general.architecture")?;
        let found = Architecture::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, architecture)| (name, *architecture)).ok_or_else(|| Error::Architecture {
            name: name.to_owned(),
            known: Architecture::ALL.map(|(name, _)| name).join(", "),
        })
    }
}

/// Everything about a model but its weights.
#[derive(Clone, Debug)]
pub struct Config {
    /// How it is built.
    pub architecture: Architecture,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub feed_forward: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Context length the model was trained with.
    pub context: usize,
    /// Added to the mean square in norms.
    pub rms_eps: f32,
    /// Rotary embedding.
    pub rope: RopeParams,
    /// What only RWKV models have.
    pub rwkv: Option<Rwkv>,
}

/// Hyper-parameters of RWKV models. Ranks are those of its pairs of small matrices; 0 where a version has no such pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rwkv {
    /// Added to the variance in layer norms.
    pub norm_eps: f32,
    /// After so many layers the residual stream is halved; 0 for never.
    pub rescale_every: usize,
    /// Rank of the mixing of neighbouring tokens.
    pub mix_rank: usize,
    /// Rank of the decays.
    pub decay_rank: usize,
    /// Rank of the rates at which memory is replaced.
    pub rate_rank: usize,
    /// Rank of the share of the first layer's values.
    pub value_rank: usize,
    /// Rank of the gate.
    pub gate_rank: usize,
}

/// A bounded whole number.
fn bounded(metadata: &Metadata, key: &str, default: Option<usize>, most: usize) -> Result<usize, Error> {
    let value = match default {
        Some(default) => metadata.get_usize_or(key, default)?,
        None => metadata.get_usize(key)?,
    };
    if value == 0 || value > most {
        let want = format!("1 to {most}");
        return Err(Error::Hyperparameter { key: key.to_owned(), value: value as u64, want });
    }
    Ok(value)
}

impl Config {
    /// Reads and checks the hyper-parameters of a file.
    pub fn read(gguf: &Gguf) -> Result<Config, Error> {
        let metadata = gguf.metadata();
        let (name, architecture) = Architecture::read(metadata)?;
        let key = |suffix: &str| format!("{name}.{suffix}");
        let number = |suffix: &str, default, most| bounded(metadata, &key(suffix), default, most);

        let layers = number("block_count", None, 1024)?;
        let hidden = number("embedding_length", None, 1 << 17)?;
        let divides = |value: usize, of: usize, suffix: &str, want: String| {
            if of.is_multiple_of(value) {
                Ok(())
            } else {
                Err(Error::Hyperparameter { key: key(suffix), value: value as u64, want })
            }
        };
        let (heads, kv_heads, head_dim) = if architecture.is_recurrent() {
            let head_size = number("wkv.head_size", None, 1024)?;
            divides(head_size, hidden, "wkv.head_size", format!("a divisor of the width {hidden}"))?;
            let heads = hidden / head_size;
            // Files of models without grouped heads say 0.
            let kv_heads = match metadata.get_usize_or(&key("attention.head_count_kv"), 0)? {
                0 => heads,
                _ => number("attention.head_count_kv", None, heads)?,
            };
            divides(kv_heads, heads, "attention.head_count_kv", format!("a divisor of the {heads} heads"))?;
            (heads, kv_heads, head_size)
        } else {
            let heads = number("attention.head_count", None, 1 << 12)?;
            let kv_heads = number("attention.head_count_kv", Some(heads), heads)?;
            divides(kv_heads, heads, "attention.head_count_kv", format!("a divisor of the {heads} heads"))?;
            let head_dim = match metadata.get_usize_opt(&key("attention.key_length"))? {
                Some(_) => number("attention.key_length", None, 4096)?,
                None => {
                    divides(heads, hidden, "attention.head_count", format!("a divisor of the width {hidden}"))?;
                    hidden / heads
                }
            };
            (heads, kv_heads, head_dim)
        };
        let feed_forward = number("feed_forward_length", None, 1 << 20)?;
        let context = number("context_length", None, 1 << 24)?;
        let embedding = gguf.find(names::TOKEN_EMBEDDING);
        let embedding = embedding.ok_or_else(|| Error::MissingTensor { name: names::TOKEN_EMBEDDING.into() })?;
        let vocab = embedding.shape[1];
        let n_dims = number("rope.dimension_count", Some(head_dim), head_dim)?;
        if n_dims % 2 != 0 {
            let (key, want) = (key("rope.dimension_count"), "even".to_owned());
            return Err(Error::Hyperparameter { key, value: n_dims as u64, want });
        }
        Ok(Config {
            architecture,
            layers,
            hidden,
            heads,
            kv_heads,
            head_dim,
            feed_forward,
            vocab,
            context,
            rms_eps: metadata.get_f32_or(&key("attention.layer_norm_rms_epsilon"), 1e-5)?,
            rope: rope(metadata, name, n_dims, context)?,
            rwkv: rwkv(metadata, architecture, name)?,
        })
    }
}

fn rwkv(metadata: &Metadata, architecture: Architecture, name: &str) -> Result<Option<Rwkv>, Error> {
    let key = |suffix: &str| format!("{name}.{suffix}");
    let rank = |suffix: &str| bounded(metadata, &key(suffix), None, 1 << 14);
    // Files without a gate say that its rank is 0.
    let gate_rank = || match metadata.get_usize_or(&key("attention.gate_lora_rank"), 0)? {
        0 => Ok(0),
        _ => rank("attention.gate_lora_rank"),
    };
    let plain = Rwkv {
        norm_eps: metadata.get_f32_or(&key("attention.layer_norm_epsilon"), 1e-5)?,
        rescale_every: metadata.get_usize_or(&key("rescale_every_n_layers"), 0)?,
        mix_rank: 0,
        decay_rank: 0,
        rate_rank: 0,
        value_rank: 0,
        gate_rank: 0,
    };
    match architecture {
        Architecture::Rwkv6 | Architecture::Rwkv6Qwen2 => {
            Ok(Some(Rwkv { mix_rank: rank("time_mix_extra_dim")?, decay_rank: rank("time_decay_extra_dim")?, ..plain }))
        }
        Architecture::Rwkv7 | Architecture::Arwkv7 => Ok(Some(Rwkv {
            decay_rank: rank("attention.decay_lora_rank")?,
            rate_rank: rank("attention.iclr_lora_rank")?,
            value_rank: rank("attention.value_residual_mix_lora_rank")?,
            gate_rank: gate_rank()?,
            ..plain
        })),
        Architecture::Llama => Ok(None),
    }
}

fn rope(metadata: &Metadata, name: &str, n_dims: usize, context: usize) -> Result<RopeParams, Error> {
    let key = |suffix: &str| format!("{name}.rope.{suffix}");
    let mut rope = RopeParams::plain(RopeStyle::Normal, n_dims, metadata.get_f32_or(&key("freq_base"), 10000.0)?);
    let linear = metadata.get_f32_or(&key("scale_linear"), 1.0)?;
    let factor = metadata.get_f32_or(&key("scaling.factor"), linear)?;
    match metadata.get_str_or(&key("scaling.type"), if factor == 1.0 { "none" } else { "linear" })? {
        "none" => {}
        "linear" if factor > 0.0 => rope.freq_scale = 1.0 / factor,
        "yarn" if factor > 0.0 => {
            rope.freq_scale = 1.0 / factor;
            rope.ext_factor = 1.0;
            rope.attn_factor = metadata.get_f32_or(&key("scaling.attn_factor"), 1.0)?;
            rope.n_ctx_orig = metadata.get_usize_or(&key("scaling.original_context_length"), context)?;
        }
        other => {
            let key = format!("{} ({other}, factor {factor})", key("scaling.type"));
            return Err(Error::Hyperparameter {
                key,
                value: 0,
                want: "none, linear or yarn with a positive factor".into(),
            });
        }
    }
    Ok(rope)
}
