//! What a user says of a model in the place of its file: flags with llama.cpp's names and meaning.

use std::str::FromStr;

use kiln_engine::model::{KeyValue, Overlay, RopeOptions, RopeScaling};

/// Other values of keys, another scaling of rotary embeddings.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Instead of what the file says")]
pub(crate) struct KeyFlags {
    /// Value of a key of the file, int, float, bool or str: tokenizer.ggml.add_bos_token=bool:false; several by commas or several flags
    #[arg(long, value_name = "KEY=TYPE:VALUE", value_delimiter = ',')]
    override_kv: Vec<KeyValue>,
    /// How rotary embeddings (RoPE) are scaled: none, linear, yarn [default: the file's]
    #[arg(long, value_name = "KIND", value_parser = scaling)]
    rope_scaling: Option<RopeScaling>,
    /// Base of RoPE frequencies; 0 for the file's [default: the file's]
    #[arg(long, value_name = "N", value_parser = |text: &str| zero_or(text, 1.0, 1e12))]
    rope_freq_base: Option<f32>,
    /// Factor of RoPE frequencies: 0.5 stretches contexts to twice their length; 0 for the file's [default: the file's]
    #[arg(long, value_name = "N", value_parser = |text: &str| zero_or(text, 1e-6, 1e6))]
    rope_freq_scale: Option<f32>,
    /// One over --rope-freq-scale
    #[arg(long, value_name = "N", value_parser = |text: &str| zero_or(text, 1e-6, 1e6), conflicts_with = "rope_freq_scale")]
    rope_scale: Option<f32>,
    /// YaRN: context length of the model before it is stretched; 0 for the file's [default: the file's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(..=1 << 24))]
    yarn_orig_ctx: Option<u32>,
    /// YaRN: how much of the high frequencies stays; 0 switches YaRN off, -1 leaves it to --rope-scaling [default: -1]
    #[arg(long, value_name = "N", value_parser = |text: &str| within(text, -1e6, 1e3), allow_negative_numbers = true)]
    yarn_ext_factor: Option<f32>,
    /// Factor of turned heads without YaRN, which has its own [default: 1]
    #[arg(long, value_name = "N", value_parser = |text: &str| within(text, 1e-3, 1e3))]
    yarn_attn_factor: Option<f32>,
    /// YaRN: pairs that turn less often than this in the original context are scaled as a whole [default: 1]
    #[arg(long, value_name = "N", value_parser = |text: &str| within(text, 1e-3, 1e6))]
    yarn_beta_slow: Option<f32>,
    /// YaRN: pairs that turn more often than this in the original context stay as they are [default: 32]
    #[arg(long, value_name = "N", value_parser = |text: &str| within(text, 1e-3, 1e6))]
    yarn_beta_fast: Option<f32>,
    /// Read the file as this architecture, whatever it says: for experiments with files that Kiln does not know (kiln inspect names the nearest one)
    #[arg(long, value_name = "ARCHITECTURE")]
    r#as: Option<String>,
}

impl KeyFlags {
    /// For the library.
    pub(crate) fn overlay(&self) -> Overlay {
        let given = |number: Option<f32>| number.filter(|n| *n != 0.0);
        Overlay {
            keys: self.override_kv.clone(),
            rope: RopeOptions {
                scaling: self.rope_scaling,
                freq_base: given(self.rope_freq_base),
                freq_scale: given(self.rope_freq_scale).or(given(self.rope_scale).map(|n| 1.0 / n)),
                yarn_orig_ctx: self.yarn_orig_ctx.filter(|n| *n != 0),
                yarn_ext_factor: self.yarn_ext_factor,
                yarn_attn_factor: self.yarn_attn_factor,
                yarn_beta_slow: self.yarn_beta_slow,
                yarn_beta_fast: self.yarn_beta_fast,
            },
            read_as: self.r#as.clone(),
        }
    }
}

fn scaling(name: &str) -> Result<RopeScaling, String> {
    let found = RopeScaling::ALL.into_iter().find(|kind| kind.name() == name);
    found.ok_or_else(|| format!("RoPE can be scaled by {}", RopeScaling::ALL.map(RopeScaling::name).join(", ")))
}

fn within(text: &str, least: f32, most: f32) -> Result<f32, String> {
    let number = f32::from_str(text).ok().filter(|n| (least..=most).contains(n));
    number.ok_or_else(|| format!("it must be a number from {least} to {most}"))
}

fn zero_or(text: &str, least: f32, most: f32) -> Result<f32, String> {
    within(text, 0.0, most)
        .ok()
        .filter(|n| *n == 0.0 || *n >= least)
        .ok_or_else(|| format!("it must be a number from {least} to {most}, or 0"))
}
