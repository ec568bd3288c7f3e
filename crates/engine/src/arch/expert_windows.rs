//! Decoders with many small experts whose layers differ: some see a window alone, some do not turn their heads, some have no
//! experts.

use kiln_kernels::choose_keys::Rule;
use kiln_kernels::glu;
use kiln_kernels::rope::RopeStyle;
use kiln_kernels::topk_moe::{Gate, Shares};

use super::Architecture;
use super::experts::{by_tensor, gating, keyed};
use crate::Error;
use crate::blocks::attend::ResultGate;
use crate::blocks::attention::HeadNorm;
use crate::blocks::decoder::{Decoder, Layout, Spec};
use crate::blocks::indexer::IndexSpec;
use crate::blocks::mlp::Activation;
use crate::blocks::moe::MoeSpec;
use crate::blocks::norms::NormKind;
use crate::blocks::output::Head;
use crate::model::Loader;
use crate::model::parts::{Factors, Period, Rope, expert_width, window_base, windows, windows_by, windows_opt};

type Loaded = Result<Box<dyn Architecture>, Error>;

/// Heads with norms, pairs half a head apart.
fn neox(l: &mut Loader<'_>) -> Result<Spec, Error> {
    Ok(Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?.with_head_norm(HeadNorm::Rms))
}

/// The base of the frequencies in layers with a window, the common one where the file has no other.
fn base_of_windows(l: &Loader<'_>) -> Result<f32, Error> {
    let base = l.keys.float("rope.freq_base", 10000.0, [1.0, 1e12])?;
    window_base(l, base)
}

/// Windows that must be there.
fn required(l: &Loader<'_>, layers: usize, period: Period) -> Result<Vec<Option<usize>>, Error> {
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    windows_by(l, layers, window, period)
}

/// EXAONE with experts: heads are turned in layers with a window alone.
pub(super) fn exaone(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Usual)?;
    let mut spec = spec.with_head_norm(HeadNorm::Rms);
    spec.head = Head::Own;
    let window = l.keys.count("attention.sliding_window", 1 << 24)?;
    let windows = windows(l, spec.sizes.layers, window, 4)?;
    spec.each_attention(|i, attention| {
        attention.window = windows[i];
        attention.rope = attention.rope.take().filter(|_| windows[i].is_some());
    });
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?.or(Some(moe.width));
    spec.moe = Some(MoeSpec { shared, ..moe });
    Decoder::load(l, spec)
}

/// Arcee Trinity: gates on attention, norms before and after each half, no turning in every fourth layer.
pub(super) fn afmoe(l: &mut Loader<'_>) -> Loaded {
    let spec = neox(l)?.with_result_gate(ResultGate::Sigmoid);
    let base = base_of_windows(l)?;
    let windows = required(l, spec.sizes.layers, Period::Last(4))?;
    let mut spec = spec.with_windows(&windows, |rope| rope.with_base(base));
    spec.turned_where(|i| (i + 1) % 4 != 0);
    spec.layout = Layout::Sandwich;
    spec.embedding_scale = (spec.sizes.hidden as f32).sqrt();
    spec.moe = Some(keyed(l, &mut spec, Gate::Sigmoid)?);
    Decoder::load(l, spec)
}

/// Laguna: gates on attention, one for a head or for an element; layers with a window turn another number of elements.
pub(super) fn laguna(l: &mut Loader<'_>) -> Loaded {
    let spec = neox(l)?.with_result_gate(ResultGate::Softplus);
    let base = base_of_windows(l)?;
    let windows = windows_opt(l, spec.sizes.layers, Period::First(4))?;
    let dims = l.keys.count_opt("rope.dimension_count_swa", spec.sizes.head_dim)?;
    let own = |rope: &Rope| rope.unscaled(base).with_dims(dims.unwrap_or(rope.params.n_dims));
    let mut spec = spec.with_windows(&windows, own);
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    let shared = l.keys.count_opt("expert_shared_feed_forward_length", 1 << 20)?;
    spec.moe = Some(MoeSpec { shared: shared.or(moe.shared).or(Some(moe.width)), ..moe });
    Decoder::load(l, spec)
}

/// Maple: heads are turned in layers with a window alone; gate and up of experts are bounded.
pub(super) fn maple(l: &mut Loader<'_>) -> Loaded {
    let spec = neox(l)?;
    let base = base_of_windows(l)?;
    let windows = required(l, spec.sizes.layers, Period::Last(1))?;
    let dims = l.keys.count_opt("rope.dimension_count_swa", spec.sizes.head_dim)?;
    let own = |rope: &Rope| rope.with_base(base).with_dims(dims.unwrap_or(rope.params.n_dims));
    let mut spec = spec.with_windows(&windows, own);
    spec.turned_where(|i| windows[i].is_some());
    spec.head = Head::Own;
    let counts = MoeSpec::required_counts(l)?;
    let moe = MoeSpec::usual(spec.sizes.hidden, expert_width(l, &spec.sizes, counts)?, counts);
    let limits = l.keys.floats("swiglu_clamp_exp", spec.sizes.layers, [0.0, 1e6])?;
    spec.moe_where(|i| {
        let limit = limits[i];
        let activation = if limit > 1e-6 { glu::Gate::SwigluBounded { limit } } else { moe.activation };
        Some(MoeSpec { activation, ..moe })
    });
    Decoder::load(l, spec)
}

/// Mellum: plain turning in layers with a window.
pub(super) fn mellum(l: &mut Loader<'_>) -> Loaded {
    let spec = neox(l)?;
    let base = base_of_windows(l)?;
    let windows = windows_opt(l, spec.sizes.layers, Period::Last(4))?;
    let mut spec = spec.with_windows(&windows, |rope| rope.unscaled(base));
    spec.head = Head::Own;
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    let shares = if l.keys.flag("expert_weights_norm", true)? { MoeSpec::of_sum() } else { Shares::Gates };
    let gating = gating(l, Gate::Sigmoid)?;
    spec.moe = Some(MoeSpec { gating, shares, scaled: true, ..MoeSpec::usual(spec.sizes.hidden, width, counts) });
    Decoder::load(l, spec)
}

/// MiMo 2: a sink for every head, values of another width, experts where the file has them.
pub(super) fn mimo2(l: &mut Loader<'_>) -> Loaded {
    let spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    let base = window_base(l, 10000.0)?;
    let windows = required(l, spec.sizes.layers, Period::Last(1))?;
    // Layers with a window are not stretched; the factor of turned elements stays.
    let own = |rope: &Rope| {
        let mut own = rope.unscaled(base);
        own.params.attn_factor = rope.params.attn_factor;
        own
    };
    let mut spec = spec.with_windows(&windows, own);
    spec.head = Head::Own;
    let result_scale = l.keys.factor("attention.value_scale")?.unwrap_or(1.0);
    spec.each_attention(|i, attention| {
        l.layer(i);
        attention.sinks = l.has("attn_sinks.weight");
        (attention.bias, attention.scaled, attention.output_bias) = (false, false, false);
        attention.result_scale = result_scale;
    });
    let counts = MoeSpec::required_counts(l)?;
    let width = expert_width(l, &spec.sizes, counts)?;
    let moe = MoeSpec { gating: Gate::Sigmoid, ..MoeSpec::usual(spec.sizes.hidden, width, counts) };
    by_tensor(l, &mut spec, moe);
    Decoder::load(l, spec)
}

/// SmallThinker: the router reads what enters the layer; negative gates are dropped.
pub(super) fn smallthinker(l: &mut Loader<'_>) -> Loaded {
    let mut spec = Spec::rotary(l, NormKind::Rms, RopeStyle::Neox, Factors::Unused)?;
    if l.keys.count_opt("attention.sliding_window", 1 << 24)?.is_some() {
        // Whatever the file says, the window is this.
        let windows = windows_by(l, spec.sizes.layers, 4096, Period::First(4))?;
        let base = base_of_windows(l)?;
        spec = spec.with_windows(&windows, |rope| rope.with_base(base));
        spec.turned_where(|i| i % 4 != 0);
    }
    spec.routes_input = true;
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    spec.dense_layers = 0;
    let activation = glu::Gate::Reglu;
    spec.moe = Some(MoeSpec { activation, shares: MoeSpec::of_sum(), scale: 1.0, shared: None, ..moe });
    Decoder::load(l, spec)
}

/// Maion Coder: experts in a narrower space in some layers; which layers turn their heads is said by the file.
pub(super) fn maion(l: &mut Loader<'_>) -> Loaded {
    let spec = neox(l)?;
    let layers = spec.sizes.layers;
    let windows = windows_opt(l, layers, Period::Last(1))?;
    let mut spec = spec.with_windows(&windows, Rope::clone);
    if l.keys.is_array("attention.rope_pattern") {
        let turned = l.keys.flags("attention.rope_pattern")?;
        l.keys.require(turned.len() >= layers, "attention.rope_pattern", turned.len(), "one flag for each layer")?;
        spec.turned_where(|i| turned[i]);
    }
    spec.layout = Layout::Sandwich;
    let counts = MoeSpec::required_counts(l)?;
    let step = l.keys.count("interleave_moe_layer_step", layers)?;
    let widths = l.keys.per_layer("expert_feed_forward_length", layers, [0, 1 << 20])?;
    let widths = widths.unwrap_or_else(|| vec![spec.sizes.feed_forward[0]; layers]);
    let latent = l.keys.count_opt("moe_latent_size", 1 << 17)?;
    let hidden = spec.sizes.hidden;
    spec.moe_where(|i| {
        let moe = MoeSpec { latent, ..MoeSpec::usual(hidden, widths[i], counts) };
        ((i + 1) % step == 0).then_some(moe)
    });
    Decoder::load(l, spec)
}

/// MiniMax M3: layers with experts choose blocks of keys, each head of keys for itself.
pub(super) fn minimax3(l: &mut Loader<'_>) -> Loaded {
    let mut spec = neox(l)?;
    spec.head = Head::Own;
    let activation = glu::Gate::SwigluOai { alpha: 1.702, limit: 7.0 };
    spec.activation = Activation::Gated(activation);
    let moe = keyed(l, &mut spec, Gate::Sigmoid)?;
    spec.moe = Some(MoeSpec { activation, ..moe });
    let keys = l.keys;
    let count = |name: &str, most: usize| keys.count(&format!("attention.indexer.{name}"), most);
    let (most, block) = (count("top_k", 1 << 24)?, count("block_size", 1 << 16)?);
    // As long as there are no more blocks than layers choose, they see all.
    if keys.count("context_length", 1 << 24)? > most * block {
        let (heads, width) = (count("head_count", 4096)?, count("key_length", 4096)?);
        let near = keys.count_opt("attention.indexer.local_blocks", most)?.unwrap_or(0);
        let (dense, eps) = (spec.dense_layers, spec.eps);
        for attention in spec.attention.iter_mut().skip(dense) {
            let kv_heads = attention.kv_heads;
            let fits = heads == kv_heads;
            keys.require(
                fits,
                "attention.indexer.head_count",
                heads,
                &format!("{kv_heads}, as many as heads of keys"),
            )?;
            let rule = Rule { per_key: 1, block, most, near, tail: false };
            attention.index = Some(IndexSpec { heads, width, rule, rope: attention.rope.clone(), offset: 0, eps });
        }
    }
    Decoder::load(l, spec)
}
