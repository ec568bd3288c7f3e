//! Where a model's layers lie: the flags.

use kiln_engine::placement::{CpuExperts, GpuLayers};
use kiln_llm::{PlaceRule, Placing, PlacingError};

/// Flags that say which device holds what.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct PlaceFlags {
    /// Layers to offload to GPUs (-ngl), counted from the end; the output layer counts as one. A number, `all`, or `auto` for as many as
    /// fit [default: auto]
    #[arg(long, alias = "n-gpu-layers", value_name = "N", value_parser = gpu_layers)]
    gpu_layers: Option<GpuLayers>,
    /// Keep the expert weights of all layers on the CPU (-cmoe)
    #[arg(long, conflicts_with = "n_cpu_moe")]
    cpu_moe: bool,
    /// Keep the expert weights of the first N layers on the CPU (-ncmoe)
    #[arg(long, value_name = "N")]
    n_cpu_moe: Option<usize>,
    /// Share of the model for each GPU (-ts), as 3,1 for `--device 0,1` [default: by free memory]
    #[arg(long, value_name = "SHARES", value_delimiter = ',', value_parser = share)]
    tensor_split: Vec<f64>,
    /// Put tensors whose names match a regular expression on a device (-ot): 'blk.*.ffn_.*_exps=cpu', 'blk.[0-7]\.=1'; may be given
    /// several times, and the first match counts
    #[arg(long, alias = "override-tensor", value_name = "PATTERN=DEVICE")]
    place: Vec<String>,
    /// Use at most this much memory of each GPU, as 3GiB
    #[arg(long, value_name = "SIZE", value_parser = kiln_system::memory::bytes_of)]
    memory_limit: Option<u64>,
}

fn gpu_layers(text: &str) -> Result<GpuLayers, String> {
    match text {
        // The number is llama.cpp's word for it.
        "auto" | "-1" => Ok(GpuLayers::Auto),
        "all" => Ok(GpuLayers::All),
        number => number.parse().map(GpuLayers::Count).map_err(|_| "want a number, `auto` or `all`".to_owned()),
    }
}

pub(crate) fn share(text: &str) -> Result<f64, String> {
    let share = text.trim().parse().ok().filter(|share: &f64| share.is_finite() && *share >= 0.0);
    share.ok_or_else(|| "want numbers that are not negative, as 3,1".to_owned())
}

impl PlaceFlags {
    /// What the flags say of where layers lie.
    pub(crate) fn placing(&self) -> Result<Placing, PlacingError> {
        Ok(Placing {
            gpu_layers: self.gpu_layers.unwrap_or_default(),
            cpu_experts: match (self.cpu_moe, self.n_cpu_moe) {
                (true, _) => CpuExperts::All,
                (_, Some(n)) => CpuExperts::First(n),
                _ => CpuExperts::Auto,
            },
            split: self.tensor_split.clone(),
            rules: self.place.iter().map(|rule| PlaceRule::parse(rule)).collect::<Result<_, _>>()?,
            memory_limit: self.memory_limit,
        })
    }
}
