//! Hyper-parameters that many architectures share, read part by part: sizes, rotary embedding, windows. Where files may say
//! something else for each layer, there is one value for each.

use kiln_kernels::rope::{RopeParams, RopeStyle};

use super::{Loader, MOST_LAYERS, names, overlay};
use crate::Error;

/// Sizes of a transformer.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Layers that are run.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Context length the model was trained with.
    pub context: usize,
    /// Query heads of each layer.
    pub heads: Vec<usize>,
    /// Key and value heads of each layer.
    pub kv_heads: Vec<usize>,
    /// Width of a head of queries and keys.
    pub head_dim: usize,
    /// Width of a head of values.
    pub value_dim: usize,
    /// Width of the feed-forward layer of each layer; 0 where the file does not say it.
    pub feed_forward: Vec<usize>,
    /// The block that only guesses further tokens, where the file says that it has one.
    pub draft: Option<DraftBlock>,
}

/// Sizes of a block behind the layers that guesses further tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftBlock {
    /// Its number.
    pub block: usize,
    /// Such blocks in all, this one included.
    pub blocks: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of the feed-forward layer; 0 where the file does not say it.
    pub feed_forward: usize,
}

impl Sizes {
    /// Reads and checks them. Layers at the end that only guess further tokens are not among the layers.
    pub fn read(l: &mut Loader<'_>) -> Result<Sizes, Error> {
        let keys = l.keys;
        let blocks = keys.count("block_count", MOST_LAYERS)?;
        let guessing = keys.count_opt("nextn_predict_layers", blocks - 1)?.unwrap_or(0);
        let layers = blocks - guessing;
        l.ignore_layers(layers..blocks);
        let hidden = keys.count("embedding_length", 1 << 17)?;
        let first = |values: &[usize]| values[..layers].to_vec();
        let all_heads =
            keys.per_layer("attention.head_count", blocks, [0, 1 << 12])?.unwrap_or_else(|| vec![0; blocks]);
        // Files of models without grouped heads may say 0 for all layers.
        let all_kv_heads = keys.per_layer("attention.head_count_kv", blocks, [0, 1 << 12])?;
        let all_kv_heads =
            all_kv_heads.filter(|n| n[..layers].iter().any(|n| *n > 0)).unwrap_or_else(|| all_heads.clone());
        let (heads, kv_heads) = (first(&all_heads), first(&all_kv_heads));
        for (&heads, &kv_heads) in heads.iter().zip(&kv_heads) {
            let fits = kv_heads == 0 || heads.is_multiple_of(kv_heads);
            keys.require(fits, "attention.head_count_kv", kv_heads, &format!("a divisor of the {heads} heads"))?;
        }
        let head_dim = match keys.count_opt("attention.key_length", 4096)? {
            Some(given) => given,
            None => {
                // The first layers of some models have none.
                let n = heads.iter().copied().find(|n| *n > 0).unwrap_or(1);
                let fits = hidden.is_multiple_of(n);
                keys.require(fits, "attention.head_count", n, &format!("a divisor of the width {hidden}"))?;
                hidden / n
            }
        };
        let value_dim = keys.count_opt("attention.value_length", 4096)?.unwrap_or(head_dim);
        let feed_forward = keys.per_layer("feed_forward_length", blocks, [0, 1 << 20])?;
        let feed_forward = feed_forward.unwrap_or_else(|| vec![0; blocks]);
        let draft = (guessing > 0).then(|| DraftBlock {
            block: layers,
            blocks: guessing,
            heads: all_heads[layers],
            kv_heads: all_kv_heads[layers],
            feed_forward: feed_forward[layers],
        });
        Ok(Sizes {
            layers,
            hidden,
            vocab: l.vocab()?,
            context: keys.count("context_length", 1 << 24)?,
            heads,
            kv_heads,
            head_dim,
            value_dim,
            feed_forward: first(&feed_forward),
            draft,
        })
    }
}

/// A rotary embedding with the divisors of its frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// How pairs are turned.
    pub params: RopeParams,
    /// The factor of frequencies that the file says, which layers with bases of their own keep whatever options say.
    pub(crate) of_file: f32,
    /// What the frequencies are divided by, one for each pair.
    pub factors: Option<Vec<f32>>,
    /// How pairs follow several positions, where tokens have some.
    pub several: Option<Several>,
}

/// How pairs follow the several positions of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Several {
    /// Which pairs belong together.
    pub style: RopeStyle,
    /// How many follow each position.
    pub sections: [usize; 4],
}

/// Which tensors of a file divide the frequencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factors {
    /// None; such tensors may be there all the same.
    Unused,
    /// `rope_freqs`, or with the scaling type `longrope` those for long or short contexts.
    Usual,
    /// Those for long or short contexts, whatever the type.
    LongShort,
}

/// Most that a base or factor of frequencies may be.
const MOST_BASE: f32 = 1e12;

/// Bounds of the numbers of turns between which YaRN mixes.
const BETAS: [f32; 2] = [1e-3, 1e6];

/// What a file says of scaling.
struct Scaled<'a> {
    kind: &'a str,
    factor: f32,
    original: usize,
}

/// Scales frequencies by what options say, or else the file. Whether YaRN is in effect is said by the extrapolation factor, not by the kind.
fn scale(l: &mut Loader<'_>, params: &mut RopeParams, file: &Scaled<'_>) -> Result<(), Error> {
    let said = l.keys.of(overlay::ROPE);
    let kind = said.text("scaling")?.unwrap_or(file.kind);
    let scale = said.factor("freq_scale")?.unwrap_or(1.0 / file.factor);
    params.freq_scale = if kind == "none" { 1.0 } else { scale };
    let ext = said.float("yarn_ext_factor", -1.0, [-1e6, 1e3])?;
    params.ext_factor = match kind {
        _ if ext >= 0.0 => ext,
        "yarn" => 1.0,
        _ => 0.0,
    };
    if params.ext_factor == 0.0 {
        params.attn_factor *= said.float("yarn_attn_factor", 1.0, [1e-3, 1e3])?;
        return Ok(());
    }
    params.n_ctx_orig = said.count_opt("yarn_orig_ctx", 1 << 24)?.unwrap_or(file.original);
    params.beta_fast = said.float("yarn_beta_fast", params.beta_fast, BETAS)?;
    params.beta_slow = said.float("yarn_beta_slow", params.beta_slow, BETAS)?;
    if params.freq_scale > 1.0 {
        // Heads do not shrink where contexts do; the operation multiplies by this itself.
        params.attn_factor /= RopeParams { attn_factor: 1.0, ..*params }.magnitude();
    }
    let of_file = if file.kind == "none" { 1.0 } else { 1.0 / file.factor };
    if params.freq_scale != of_file {
        let stretched = (params.n_ctx_orig as f64 / f64::from(params.freq_scale)) as usize;
        l.stretched(stretched.next_multiple_of(256).clamp(256, 1 << 24));
    }
    Ok(())
}

impl Rope {
    /// Reads and checks it, for heads of `sizes.head_dim`.
    pub fn read(l: &mut Loader<'_>, sizes: &Sizes, style: RopeStyle, factors: Factors) -> Result<Rope, Error> {
        let keys = l.keys;
        let head = sizes.head_dim;
        let n_dims = keys.count_opt("rope.dimension_count", head)?.unwrap_or(head);
        keys.require(n_dims % 2 == 0, "rope.dimension_count", n_dims, "even")?;
        let said = keys.of(overlay::ROPE);
        let base = keys.float("rope.freq_base", 10000.0, [1.0, MOST_BASE])?;
        let mut params = RopeParams::plain(style, n_dims, said.float("freq_base", base, [1.0, MOST_BASE])?);
        let old = keys.factor("rope.scale_linear")?;
        // Files say 0 where they mean that nothing is scaled.
        let factor = keys.factor("rope.scaling.factor")?.or(old).unwrap_or(1.0);
        params.attn_factor = keys.float("rope.scaling.attn_factor", 1.0, [1e-3, 1e3])?;
        let original = keys.count_opt("rope.scaling.original_context_length", 1 << 24)?.unwrap_or(sizes.context);
        let kind = keys.text("rope.scaling.type")?.unwrap_or("linear");
        if !["none", "linear", "yarn", "longrope"].contains(&kind) {
            let (key, value) = (keys.name("rope.scaling.type"), format!("{kind:?}"));
            return Err(Error::Hyperparameter { key, value, want: "none, linear, yarn or longrope".into() });
        }
        let of_file = if kind == "none" { 1.0 } else { 1.0 / factor };
        scale(l, &mut params, &Scaled { kind, factor, original })?;
        let long = factors == Factors::LongShort || (factors == Factors::Usual && kind == "longrope");
        l.whole();
        let all = ["rope_factors_long.weight", "rope_factors_short.weight", names::ROPE_FACTORS];
        all.iter().for_each(|name| l.ignore(name));
        let name = match (factors, long) {
            (Factors::Unused, _) => None,
            (_, true) => Some(if l.room.context > original { all[0] } else { all[1] }),
            (_, false) => Some(all[2]),
        };
        let factors = name.map(|name| l.values(name)).transpose()?.flatten();
        if let (Some(values), Some(name)) = (&factors, name)
            && (values.len() < params.pairs() || values.contains(&0.0))
        {
            let (got, want) = (vec![values.len()], vec![params.pairs()]);
            return Err(Error::TensorShape { name: name.to_owned(), got, want });
        }
        Ok(Rope { params, of_file, factors, several: None })
    }

    /// One that nothing else is said of.
    pub fn plain(params: RopeParams) -> Rope {
        Rope { params, of_file: params.freq_scale, factors: None, several: None }
    }

    /// The same for layers with a window, where they have a base of their own and nothing is scaled.
    pub fn unscaled(&self, base: f32) -> Rope {
        let RopeParams { style, n_dims, sections, .. } = self.params;
        let params = RopeParams { sections, ..RopeParams::plain(style, n_dims, base) };
        Rope { params, ..self.clone() }
    }

    /// The same for models whose pairs follow several positions, in `style`. Time, height and width of a token of text are its
    /// place; the extra position is 0, there and in pictures, so that its pairs are not turned.
    pub fn with_sections(&self, style: RopeStyle, sections: [usize; 4]) -> Rope {
        let pairs = self.params.pairs();
        let still = |pair: usize| style.position_row(pair, sections) == 3;
        let factor = |pair: usize| if still(pair) { f32::INFINITY } else { 1.0 };
        let factors = (0..pairs).any(still).then(|| (0..pairs).map(factor).collect());
        let several = Some(Several { style, sections });
        Rope { factors: factors.or_else(|| self.factors.clone()), several, ..self.clone() }
    }

    /// Reads where YaRN begins and ends, for models that say it.
    pub fn read_betas(&mut self, l: &Loader<'_>, fast: f32) -> Result<(), Error> {
        let said = l.keys.of(overlay::ROPE);
        let fast = l.keys.float("rope.scaling.yarn_beta_fast", fast, BETAS)?;
        let slow = l.keys.float("rope.scaling.yarn_beta_slow", 1.0, BETAS)?;
        self.params.beta_fast = said.float("yarn_beta_fast", fast, BETAS)?;
        self.params.beta_slow = said.float("yarn_beta_slow", slow, BETAS)?;
        Ok(())
    }

    /// How far contexts are stretched.
    pub fn stretch(&self) -> f32 {
        1.0 / self.params.freq_scale
    }

    /// The same for heads of which another number of elements is turned.
    pub fn with_dims(&self, n_dims: usize) -> Rope {
        Rope { params: RopeParams { n_dims, ..self.params }, ..self.clone() }
    }

    /// The same with a base of its own: options do not say how such layers are scaled.
    pub fn with_base(&self, base: f32) -> Rope {
        Rope { params: RopeParams { freq_base: base, freq_scale: self.of_file, ..self.params }, ..self.clone() }
    }
}

/// Width inside an expert: what the file says, else the feed-forward layer's, divided among the experts of a token.
pub fn expert_width(l: &Loader<'_>, sizes: &Sizes, [_, used]: [usize; 2]) -> Result<usize, Error> {
    let given = l.keys.count_opt("expert_feed_forward_length", 1 << 20)?;
    let width = given.unwrap_or(sizes.feed_forward[0] / used);
    l.keys.require(width > 0, "expert_feed_forward_length", width, "1 or more")?;
    Ok(width)
}

/// Numbers of rotary pairs that follow each of several positions (time, height, width, extra), where a file has them.
pub fn sections(l: &Loader<'_>) -> Result<Option<[usize; 4]>, Error> {
    let Some(sections) = l.keys.small_array("rope.dimension_sections", 4)? else { return Ok(None) };
    Ok(<[usize; 4]>::try_from(sections).ok().filter(|s| s[0] > 0 && s[1] > 0))
}

/// The base of the frequencies in layers with a window.
pub fn window_base(l: &Loader<'_>, default: f32) -> Result<f32, Error> {
    l.keys.float("rope.freq_base_swa", default, [1.0, MOST_BASE])
}

/// Which layers of a period see everything, where the file has no flag for each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Period {
    /// The last of so many.
    Last(usize),
    /// The first of so many.
    First(usize),
}

/// The window of each layer, `None` for those that see everything: by the flags of the file, or the last of each period.
pub fn windows(l: &Loader<'_>, layers: usize, window: usize, period: usize) -> Result<Vec<Option<usize>>, Error> {
    windows_by(l, layers, window, Period::Last(period))
}

/// The same where either end of a period sees everything. `pattern` holds one flag a layer, or the length of the period.
pub fn windows_by(l: &Loader<'_>, layers: usize, window: usize, period: Period) -> Result<Vec<Option<usize>>, Error> {
    let keys = l.keys;
    let suffix = "attention.sliding_window_pattern";
    let flags = if keys.is_array(suffix) { keys.flags(suffix)? } else { Vec::new() };
    if !flags.is_empty() && flags.len() < layers {
        keys.require(false, suffix, flags.len(), &format!("one flag for each of {layers} layers"))?;
    }
    let given = if flags.is_empty() { keys.count_opt(suffix, MOST_LAYERS)? } else { None };
    let has = |i: usize| match (flags.get(i), period) {
        (Some(flag), _) => *flag,
        (None, Period::Last(n)) => {
            let n = given.unwrap_or(n);
            n == 0 || i % n < n - 1
        }
        (None, Period::First(n)) => !i.is_multiple_of(given.unwrap_or(n).max(1)),
    };
    Ok((0..layers).map(|i| has(i).then_some(window)).collect())
}

/// Windows where the file may have none.
pub fn windows_opt(l: &Loader<'_>, layers: usize, period: Period) -> Result<Vec<Option<usize>>, Error> {
    match l.keys.count_opt("attention.sliding_window", 1 << 24)? {
        Some(window) => windows_by(l, layers, window, period),
        None => Ok(vec![None; layers]),
    }
}
