//! The tensors and the metadata that follow from a preset, with the names and keys that other programs expect.

use kiln_gguf::Metadata;

use super::presets::{Family, Preset};
use super::values::Fill;

/// A tensor to be made.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) name: String,
    pub(super) dims: Vec<usize>,
    pub(super) fill: Fill,
}

/// Collects the tensors of a model.
pub(super) struct Builder {
    specs: Vec<Spec>,
    /// `blk.3.` or nothing.
    prefix: String,
}

impl Builder {
    pub(super) fn add(&mut self, name: &str, dims: &[usize], fill: Fill) {
        self.specs.push(Spec { name: format!("{}{name}", self.prefix), dims: dims.to_vec(), fill });
    }

    /// A matrix that keeps the size of what it multiplies.
    pub(super) fn matrix(&mut self, name: &str, dims: &[usize]) {
        self.scaled(name, dims, 1.0);
    }

    pub(super) fn scaled(&mut self, name: &str, dims: &[usize], scale: f32) {
        let deviation = scale / (dims[0] as f32).sqrt();
        self.add(&format!("{name}.weight"), dims, Fill::Normal(0.0, deviation));
    }

    /// The weight of a norm: about one.
    pub(super) fn norm(&mut self, name: &str, len: usize) {
        self.add(&format!("{name}.weight"), &[len], Fill::Normal(1.0, 0.05));
    }

    fn bias(&mut self, name: &str, len: usize) {
        self.add(&format!("{name}.bias"), &[len], Fill::Normal(0.0, 0.02));
    }

    fn even(&mut self, name: &str, dims: &[usize], low: f32, high: f32) {
        self.add(&format!("{name}.weight"), dims, Fill::Even(low, high));
    }
}

/// Every tensor of a preset with a vocabulary of `vocab` tokens.
pub(super) fn specs(preset: &Preset, vocab: usize) -> Vec<Spec> {
    let mut b = Builder { specs: Vec::new(), prefix: String::new() };
    let hidden = preset.hidden;
    b.add("token_embd.weight", &[hidden, vocab], Fill::Normal(0.0, embedding_deviation(preset)));
    let recurrent = matches!(preset.family, Family::Rwkv6 { .. } | Family::Rwkv7 { .. });
    if recurrent {
        b.norm("token_embd_norm", hidden);
        b.bias("token_embd_norm", hidden);
    }
    if preset.family == Family::Bert {
        bert_ends(&mut b, preset);
    }
    if let Family::Gemma4(own) = preset.family {
        own.ends(&mut b, preset, vocab);
    }
    if let Some(factor) = preset.rope_factor {
        b.add("rope_freqs.weight", &[preset.head_dim / 2], Fill::Listed(llama3_factors(preset, factor)));
    }
    for layer in 0..preset.layers {
        b.prefix = format!("blk.{layer}.");
        match preset.family {
            Family::Rwkv6 { mix_rank, decay_rank } => rwkv6(&mut b, preset, mix_rank, decay_rank),
            Family::Rwkv7 { decay_rank, rate_rank, value_rank, gate_rank } => {
                rwkv7(&mut b, preset, layer, [decay_rank, rate_rank, value_rank, gate_rank]);
            }
            Family::Rwkv6Qwen2 { mix_rank, decay_rank } => qrwkv6(&mut b, preset, mix_rank, decay_rank),
            Family::Arwkv7 { decay_rank, rate_rank, value_rank } => {
                arwkv7(&mut b, preset, layer, [decay_rank, rate_rank, value_rank]);
            }
            Family::GptOss { .. } => gpt_oss(&mut b, preset),
            Family::Bert => bert(&mut b, preset),
            Family::DeepSeek2 { rank, turned, values, shared } => {
                deepseek2(&mut b, preset, layer, [rank, turned, values, shared]);
            }
            Family::Gemma4(own) => own.layer(&mut b, preset, layer),
            Family::Mamba2 { states, groups } => mamba2(&mut b, preset, states, groups),
            Family::Qwen3Next { key_heads, heads, size, interval, .. } => {
                let attention = (layer + 1).is_multiple_of(interval);
                qwen3next(&mut b, preset, (!attention).then_some([key_heads, heads, size]));
            }
            _ => transformer(&mut b, preset),
        }
    }
    b.prefix.clear();
    if preset.family == Family::Bert {
        return b.specs;
    }
    b.norm("output_norm", hidden);
    if recurrent {
        b.bias("output_norm", hidden);
    }
    if !preset.tied {
        b.matrix("output", &[hidden, vocab]);
    }
    b.specs
}

/// Small where the same matrix makes the logits, so that these stay in a sane range.
fn embedding_deviation(preset: &Preset) -> f32 {
    if preset.tied { 1.0 / (preset.hidden as f32).sqrt() } else { 1.0 }
}

fn transformer(b: &mut Builder, p: &Preset) {
    let (hidden, q, kv) = (p.hidden, p.heads * p.head_dim, p.kv_heads * p.head_dim);
    b.norm("attn_norm", hidden);
    b.matrix("attn_q", &[hidden, q]);
    b.matrix("attn_k", &[hidden, kv]);
    b.matrix("attn_v", &[hidden, kv]);
    b.matrix("attn_output", &[q, hidden]);
    match p.family {
        Family::Qwen2 => {
            b.bias("attn_q", q);
            b.bias("attn_k", kv);
            b.bias("attn_v", kv);
        }
        Family::Qwen3Moe => {
            b.norm("attn_q_norm", p.head_dim);
            b.norm("attn_k_norm", p.head_dim);
        }
        Family::Gemma2 { .. } => {
            b.norm("post_attention_norm", hidden);
            b.norm("post_ffw_norm", hidden);
        }
        _ => {}
    }
    b.norm("ffn_norm", hidden);
    feed_forward(b, p);
}

/// Experts, or one feed-forward layer for all tokens.
fn feed_forward(b: &mut Builder, p: &Preset) {
    let Some(e) = p.experts else { return dense(b, p) };
    b.matrix("ffn_gate_inp", &[p.hidden, e.count]);
    b.matrix("ffn_gate_exps", &[p.hidden, e.ff, e.count]);
    b.matrix("ffn_down_exps", &[e.ff, p.hidden, e.count]);
    b.matrix("ffn_up_exps", &[p.hidden, e.ff, e.count]);
}

fn gpt_oss(b: &mut Builder, p: &Preset) {
    let (hidden, q, kv) = (p.hidden, p.heads * p.head_dim, p.kv_heads * p.head_dim);
    b.norm("attn_norm", hidden);
    for (name, from, to) in [("q", hidden, q), ("k", hidden, kv), ("v", hidden, kv), ("output", q, hidden)] {
        b.matrix(&format!("attn_{name}"), &[from, to]);
        b.bias(&format!("attn_{name}"), to);
    }
    b.add("attn_sinks.weight", &[p.heads], Fill::Normal(0.0, 1.0));
    b.norm("post_attention_norm", hidden);
    feed_forward(b, p);
    if let Some(e) = p.experts {
        b.bias("ffn_gate_inp", e.count);
        for (name, width) in [("gate", e.ff), ("up", e.ff), ("down", hidden)] {
            b.add(&format!("ffn_{name}_exps.bias"), &[width, e.count], Fill::Normal(0.0, 0.02));
        }
    }
}

/// What BERT has before its layers and behind them.
fn bert_ends(b: &mut Builder, p: &Preset) {
    let hidden = p.hidden;
    b.add("token_types.weight", &[hidden, 2], Fill::Normal(0.0, 0.1));
    b.add("position_embd.weight", &[hidden, p.context], Fill::Normal(0.0, 0.1));
    b.norm("token_embd_norm", hidden);
    b.bias("token_embd_norm", hidden);
    for (name, rows) in [("cls", hidden), ("cls.output", 1)] {
        b.matrix(name, &[hidden, rows]);
        b.bias(name, rows);
    }
}

fn bert(b: &mut Builder, p: &Preset) {
    let hidden = p.hidden;
    let square = ["attn_q", "attn_k", "attn_v", "attn_output"].map(|name| (name, hidden, hidden));
    for (name, from, to) in square.into_iter().chain([("ffn_up", hidden, p.ff), ("ffn_down", p.ff, hidden)]) {
        b.matrix(name, &[from, to]);
        b.bias(name, to);
    }
    for name in ["attn_output_norm", "layer_output_norm"] {
        b.norm(name, hidden);
        b.bias(name, hidden);
    }
}

fn deepseek2(b: &mut Builder, p: &Preset, layer: usize, [rank, turned, values, shared]: [usize; 4]) {
    let (hidden, heads) = (p.hidden, p.heads);
    b.norm("attn_norm", hidden);
    b.matrix("attn_q", &[hidden, heads * p.head_dim]);
    b.matrix("attn_kv_a_mqa", &[hidden, rank + turned]);
    b.norm("attn_kv_a_norm", rank);
    b.matrix("attn_k_b", &[p.head_dim - turned, rank, heads]);
    b.matrix("attn_v_b", &[rank, values, heads]);
    b.matrix("attn_output", &[heads * values, hidden]);
    b.norm("ffn_norm", hidden);
    let Some(e) = p.experts.filter(|_| layer > 0) else { return dense(b, p) };
    feed_forward(b, p);
    let width = e.ff * shared;
    b.matrix("ffn_gate_shexp", &[hidden, width]);
    b.matrix("ffn_down_shexp", &[width, hidden]);
    b.matrix("ffn_up_shexp", &[hidden, width]);
}

/// Taps of the convolutions of state-space models and delta nets.
const TAPS: usize = 4;

/// What scans and delta nets have of each head: how fast it forgets, and how much it takes in.
fn decays(b: &mut Builder, dims: &[usize]) {
    b.add("ssm_a", dims, Fill::Even(-2.0, -0.2));
    b.bias("ssm_dt", dims.iter().product());
}

fn mamba2(b: &mut Builder, p: &Preset, states: usize, groups: usize) {
    let (hidden, heads, inner) = (p.hidden, p.heads, p.heads * p.head_dim);
    let wide = inner + 2 * groups * states;
    b.norm("attn_norm", hidden);
    b.matrix("ssm_in", &[hidden, inner + wide + heads]);
    b.matrix("ssm_conv1d", &[TAPS, wide]);
    b.bias("ssm_conv1d", wide);
    decays(b, &[1, heads]);
    b.add("ssm_d", &[1, heads], Fill::Normal(1.0, 0.05));
    b.add("ssm_norm.weight", &[inner / groups, groups], Fill::Normal(1.0, 0.05));
    b.matrix("ssm_out", &[inner, hidden]);
}

/// A layer with the heads of keys, the heads and the width of a delta net, or with attention.
fn qwen3next(b: &mut Builder, p: &Preset, delta: Option<[usize; 3]>) {
    let hidden = p.hidden;
    b.norm("attn_norm", hidden);
    if let Some([key_heads, heads, size]) = delta {
        let (inner, wide) = (heads * size, (2 * key_heads + heads) * size);
        b.matrix("attn_qkv", &[hidden, wide]);
        b.matrix("attn_gate", &[hidden, inner]);
        if matches!(p.family, Family::Qwen3Next { is_35: true, .. }) {
            b.matrix("ssm_beta", &[hidden, heads]);
            b.matrix("ssm_alpha", &[hidden, heads]);
        } else {
            b.matrix("ssm_ba", &[hidden, 2 * heads]);
        }
        b.matrix("ssm_conv1d", &[TAPS, wide]);
        decays(b, &[heads]);
        b.norm("ssm_norm", size);
        b.matrix("ssm_out", &[inner, hidden]);
    } else {
        let (q, kv) = (p.heads * p.head_dim, p.kv_heads * p.head_dim);
        b.matrix("attn_q", &[hidden, 2 * q]);
        b.matrix("attn_k", &[hidden, kv]);
        b.matrix("attn_v", &[hidden, kv]);
        b.matrix("attn_output", &[q, hidden]);
        b.norm("attn_q_norm", p.head_dim);
        b.norm("attn_k_norm", p.head_dim);
    }
    b.norm("post_attention_norm", hidden);
    feed_forward(b, p);
    b.add("ffn_gate_inp_shexp.weight", &[hidden], Fill::Normal(0.0, 1.0 / (hidden as f32).sqrt()));
    b.matrix("ffn_gate_shexp", &[hidden, p.ff]);
    b.matrix("ffn_down_shexp", &[p.ff, hidden]);
    b.matrix("ffn_up_shexp", &[hidden, p.ff]);
}

fn dense(b: &mut Builder, p: &Preset) {
    b.matrix("ffn_gate", &[p.hidden, p.ff]);
    b.matrix("ffn_down", &[p.ff, p.hidden]);
    b.matrix("ffn_up", &[p.hidden, p.ff]);
}

/// The norms both RWKV families share.
fn rwkv_norms(b: &mut Builder, hidden: usize) {
    for name in ["attn_norm", "attn_norm_2", "time_mix_ln"] {
        b.norm(name, hidden);
        b.bias(name, hidden);
    }
}

fn rwkv6(b: &mut Builder, p: &Preset, mix_rank: usize, decay_rank: usize) {
    let hidden = p.hidden;
    rwkv_norms(b, hidden);
    token_mix6(b, hidden, mix_rank, decay_rank);
    b.add("time_mix_first.weight", &[p.head_dim, p.heads], Fill::Normal(0.0, 0.3));
    for name in ["key", "value", "receptance", "gate", "output"] {
        b.matrix(&format!("time_mix_{name}"), &[hidden, hidden]);
    }
    b.even("channel_mix_lerp_k", &[hidden, 1, 1], 0.0, 1.0);
    b.even("channel_mix_lerp_r", &[hidden, 1, 1], 0.0, 1.0);
    b.matrix("channel_mix_key", &[hidden, p.ff]);
    b.scaled("channel_mix_value", &[p.ff, hidden], 0.5);
    b.matrix("channel_mix_receptance", &[hidden, hidden]);
}

/// Mixing of tokens and decays, as RWKV 6 and QRWKV have them.
fn token_mix6(b: &mut Builder, hidden: usize, mix_rank: usize, decay_rank: usize) {
    b.scaled("time_mix_w1", &[hidden, mix_rank * 5], 0.3);
    b.scaled("time_mix_w2", &[mix_rank, hidden, 5], 0.3);
    b.even("time_mix_lerp_x", &[hidden, 1, 1], 0.0, 1.0);
    b.even("time_mix_lerp_fused", &[hidden, 1, 1, 5], 0.0, 1.0);
    b.even("time_mix_decay", &[hidden], -6.0, -1.0);
    b.scaled("time_mix_decay_w1", &[hidden, decay_rank], 0.3);
    b.scaled("time_mix_decay_w2", &[decay_rank, hidden], 0.3);
}

fn qrwkv6(b: &mut Builder, p: &Preset, mix_rank: usize, decay_rank: usize) {
    let (hidden, kv) = (p.hidden, p.kv_heads * p.head_dim);
    b.norm("attn_norm", hidden);
    token_mix6(b, hidden, mix_rank, decay_rank);
    for (name, width) in [("key", kv), ("value", kv), ("receptance", hidden)] {
        b.matrix(&format!("time_mix_{name}"), &[hidden, width]);
        b.bias(&format!("time_mix_{name}"), width);
    }
    b.matrix("time_mix_gate", &[hidden, hidden]);
    b.matrix("time_mix_output", &[hidden, hidden]);
    b.norm("ffn_norm", hidden);
    dense(b, p);
}

fn rwkv7(b: &mut Builder, p: &Preset, layer: usize, [decay_rank, rate_rank, value_rank, gate_rank]: [usize; 4]) {
    let hidden = p.hidden;
    rwkv_norms(b, hidden);
    b.even("time_mix_lerp_fused", &[hidden, 1, 1, 6], 0.0, 1.0);
    time_mix7(b, hidden, layer, [decay_rank, rate_rank, value_rank]);
    b.matrix("time_mix_g1", &[hidden, gate_rank]);
    b.matrix("time_mix_g2", &[gate_rank, hidden]);
    b.even("channel_mix_lerp_k", &[hidden, 1, 1], 0.0, 1.0);
    b.matrix("channel_mix_key", &[hidden, p.ff]);
    b.scaled("channel_mix_value", &[p.ff, hidden], 0.5);
}

/// The matrices of the time mix, as RWKV 7 and ARWKV have them.
fn time_mix7(b: &mut Builder, hidden: usize, layer: usize, [decay_rank, rate_rank, value_rank]: [usize; 3]) {
    // The first layer has no values to mix in; files hold matrices of the rate's rank there.
    let value_rank = if layer == 0 { rate_rank } else { value_rank };
    for (letter, rank, low, high) in
        [('w', decay_rank, -6.0, 0.0), ('a', rate_rank, -1.0, 0.5), ('v', value_rank, -1.0, 1.0)]
    {
        b.even(&format!("time_mix_{letter}0"), &[hidden], low, high);
        b.scaled(&format!("time_mix_{letter}1"), &[hidden, rank], 0.3);
        b.scaled(&format!("time_mix_{letter}2"), &[rank, hidden], 0.3);
    }
    b.even("time_mix_k_k", &[hidden], 0.6, 1.0);
    b.even("time_mix_k_a", &[hidden], 0.8, 1.2);
    b.add("time_mix_r_k.weight", &[hidden], Fill::Normal(0.0, 0.1));
    for name in ["key", "value", "receptance", "output"] {
        b.matrix(&format!("time_mix_{name}"), &[hidden, hidden]);
    }
}

fn arwkv7(b: &mut Builder, p: &Preset, layer: usize, ranks: [usize; 3]) {
    b.norm("attn_norm", p.hidden);
    b.even("time_mix_lerp_fused", &[p.hidden, 1, 1, 5], 0.0, 1.0);
    time_mix7(b, p.hidden, layer, ranks);
    b.norm("ffn_norm", p.hidden);
    dense(b, p);
}

/// Llama 3's divisors of the rotary frequencies: 1 for the fast ones, `factor` for the slow ones, a ramp between.
fn llama3_factors(p: &Preset, factor: f32) -> Vec<f32> {
    let (slow, fast, trained) = (1.0, 4.0, 8192.0);
    let one = |i: usize| {
        let frequency = p.rope_base.powf(-2.0 * i as f32 / p.head_dim as f32);
        let freqs = trained * frequency / std::f32::consts::TAU;
        match freqs {
            t if t > fast => 1.0,
            t if t < slow => factor,
            t => {
                let smooth = (t - slow) / (fast - slow);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        }
    };
    (0..p.head_dim / 2).map(one).collect()
}

/// The keys that describe the shape.
pub(super) fn describe(preset: &Preset, vocab: usize, m: &mut Metadata) {
    let architecture = preset.architecture();
    m.set("general.architecture", architecture);
    m.set("general.type", "model");
    m.set("general.name", format!("synthetic {}", preset.name));
    let number = |n: usize| u32::try_from(n).expect("the numbers of presets should be small");
    let mut set = |key: &str, n: usize| m.set(format!("{architecture}.{key}"), number(n));
    set("vocab_size", vocab);
    set("context_length", preset.context);
    set("embedding_length", preset.hidden);
    set("block_count", preset.layers);
    set("feed_forward_length", preset.ff);
    match preset.family {
        Family::Bert => {
            set("attention.head_count", preset.heads);
            set("pooling_type", 1);
            m.set("bert.attention.causal", false);
            m.set("bert.attention.layer_norm_epsilon", 1e-12f32);
            m.set("tokenizer.ggml.token_type_count", 2u32);
            return;
        }
        Family::Rwkv6 { mix_rank, decay_rank } => {
            set("attention.head_count", 0);
            set("wkv.head_size", preset.head_dim);
            set("rescale_every_n_layers", 0);
            set("time_mix_extra_dim", mix_rank);
            set("time_decay_extra_dim", decay_rank);
            m.set("rwkv6.attention.layer_norm_epsilon", 1e-5f32);
            return;
        }
        Family::Rwkv7 { decay_rank, rate_rank, value_rank, gate_rank } => {
            set("attention.head_count", 0);
            set("wkv.head_size", preset.head_dim);
            set("attention.decay_lora_rank", decay_rank);
            set("attention.iclr_lora_rank", rate_rank);
            set("attention.value_residual_mix_lora_rank", value_rank);
            set("attention.gate_lora_rank", gate_rank);
            m.set("rwkv7.attention.layer_norm_epsilon", 1e-5f32);
            return;
        }
        Family::Rwkv6Qwen2 { mix_rank, decay_rank } => {
            set("attention.head_count", 0);
            set("attention.head_count_kv", preset.kv_heads);
            set("wkv.head_size", preset.head_dim);
            set("token_shift_count", 1);
            set("time_mix_extra_dim", mix_rank);
            set("time_decay_extra_dim", decay_rank);
            m.set("rwkv6qwen2.attention.layer_norm_rms_epsilon", 1e-6f32);
            return;
        }
        Family::Arwkv7 { decay_rank, rate_rank, value_rank } => {
            set("attention.head_count", 0);
            set("wkv.head_size", preset.head_dim);
            set("token_shift_count", 1);
            set("attention.decay_lora_rank", decay_rank);
            set("attention.iclr_lora_rank", rate_rank);
            set("attention.value_residual_mix_lora_rank", value_rank);
            m.set("arwkv7.attention.layer_norm_rms_epsilon", 1e-6f32);
            return;
        }
        Family::Mamba2 { states, groups } => {
            set("attention.head_count", 0);
            set("ssm.conv_kernel", TAPS);
            set("ssm.inner_size", preset.heads * preset.head_dim);
            set("ssm.state_size", states);
            set("ssm.time_step_rank", preset.heads);
            set("ssm.group_count", groups);
            m.set("mamba2.attention.layer_norm_rms_epsilon", 1e-5f32);
            return;
        }
        Family::Qwen3Next { key_heads, heads, size, interval, .. } => {
            set("ssm.conv_kernel", TAPS);
            set("ssm.inner_size", heads * size);
            set("ssm.state_size", size);
            set("ssm.time_step_rank", heads);
            set("ssm.group_count", key_heads);
            set("full_attention_interval", interval);
            set("expert_shared_feed_forward_length", preset.ff);
        }
        _ => {}
    }
    set("attention.head_count", preset.heads);
    set("attention.head_count_kv", preset.kv_heads);
    if let Family::DeepSeek2 { rank, turned, values, shared } = preset.family {
        set("attention.kv_lora_rank", rank);
        // A row of the cache, then a head.
        set("attention.key_length", rank + turned);
        set("attention.value_length", rank);
        set("attention.key_length_mla", preset.head_dim);
        set("attention.value_length_mla", values);
        set("rope.dimension_count", turned);
        set("leading_dense_block_count", 1);
        set("expert_shared_count", shared);
    } else {
        set("attention.key_length", preset.head_dim);
        set("attention.value_length", preset.head_dim);
        // Qwen 3 Next turns a quarter of a head.
        let turned = if matches!(preset.family, Family::Qwen3Next { .. }) { 4 } else { 1 };
        set("rope.dimension_count", preset.head_dim / turned);
    }
    if let Some(e) = preset.experts {
        set("expert_count", e.count);
        set("expert_used_count", e.used);
        set("expert_feed_forward_length", e.ff);
    }
    if let Family::GptOss { window } = preset.family {
        set("attention.sliding_window", window);
    }
    if let Family::Gemma2 { window } = preset.family {
        set("attention.sliding_window", window);
        m.set("gemma2.attn_logit_softcapping", 50f32);
        m.set("gemma2.final_logit_softcapping", 30f32);
    }
    if matches!(preset.family, Family::Qwen3Next { is_35: true, .. }) {
        // Time, height and width share the pairs of the quarter of a head that is turned.
        let pairs = (preset.head_dim / 8) as u32;
        let time = pairs.div_ceil(3);
        let height = (pairs - time).div_ceil(2);
        m.set("qwen35moe.rope.dimension_sections", vec![time, height, pairs - time - height, 0]);
    }
    if let Family::Gemma4(own) = preset.family {
        own.describe(preset, m);
    }
    let epsilon = if preset.family == Family::Llama { 1e-5f32 } else { 1e-6 };
    m.set(format!("{architecture}.attention.layer_norm_rms_epsilon"), epsilon);
    m.set(format!("{architecture}.rope.freq_base"), preset.rope_base);
}
