//! What tensors are called there and here.

/// The table of embeddings, as Hugging Face calls it.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";

/// Names outside of layers.
const WHOLE: [(&str, &str); 4] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("model.final_layernorm", "output_norm"),
    ("lm_head", "output"),
];

/// Names inside of a layer that most models have.
const LAYER: [(&str, &str); 16] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.dense", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("post_attention_layernorm", "ffn_norm"),
];

/// Norms of layers that have one before and one behind each half.
const SANDWICH: [(&str, &str); 3] = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Layers with experts.
const EXPERTS: [(&str, &str); 6] = [
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
];

/// Matrices of one expert.
const EXPERT: [(&str, &str); 6] = [
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

/// What a tensor of a folder is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A tensor of its own.
    Own(String),
    /// One of a stack: the name of the stack, and the number of the expert.
    Stacked(String, usize),
    /// Nothing that is needed: it can be computed, or belongs to another part than the language model.
    Nothing,
}

/// The place of a tensor; `None` where it has none.
pub(crate) fn place(name: &str, sandwich: bool) -> Option<Place> {
    if ["vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."]
        .iter()
        .any(|start| name.starts_with(start))
        || name.ends_with(".rotary_emb.inv_freq")
    {
        return Some(Place::Nothing);
    }
    let (stem, end) = name.rsplit_once('.').filter(|(_, end)| matches!(*end, "weight" | "bias"))?;
    if let Some((_, here)) = WHOLE.iter().find(|(there, _)| *there == stem) {
        return Some(Place::Own(format!("{here}.{end}")));
    }
    let (layer, inside) = stem.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let sandwich = if sandwich { &SANDWICH[..] } else { &[] };
    // The names of a sandwich come first: one of them means something else in other models.
    if let Some((_, here)) = sandwich.iter().chain(&LAYER).chain(&EXPERTS).find(|(there, _)| *there == inside) {
        return Some(Place::Own(format!("blk.{layer}.{here}.{end}")));
    }
    let expert = inside.strip_prefix("mlp.experts.").or_else(|| inside.strip_prefix("block_sparse_moe.experts."))?;
    let (number, matrix) = expert.split_once('.')?;
    let (_, here) = EXPERT.iter().find(|(there, _)| *there == matrix)?;
    Some(Place::Stacked(format!("blk.{layer}.{here}.{end}"), number.parse().ok()?))
}

/// Names as they would be without the language model's own prefix.
pub(crate) fn bare(name: &str) -> String {
    for (prefix, with) in
        [("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", "")]
    {
        if let Some(rest) = name.strip_prefix(prefix) {
            return format!("{with}{rest}");
        }
    }
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tensor_has_its_place_or_none() {
        let own = |name: &str| Some(Place::Own(name.into()));
        assert_eq!(place(EMBEDDING, false), own("token_embd.weight"));
        assert_eq!(place("model.layers.12.self_attn.q_proj.bias", false), own("blk.12.attn_q.bias"));
        assert_eq!(place("model.layers.0.post_attention_layernorm.weight", false), own("blk.0.ffn_norm.weight"));
        assert_eq!(
            place("model.layers.0.post_attention_layernorm.weight", true),
            own("blk.0.post_attention_norm.weight")
        );
        let stacked = Some(Place::Stacked("blk.3.ffn_down_exps.weight".into(), 7));
        assert_eq!(place("model.layers.3.mlp.experts.7.down_proj.weight", false), stacked);
        assert_eq!(place("model.layers.3.block_sparse_moe.experts.7.w2.weight", false), stacked);
        assert_eq!(place("vision_tower.x.weight", false), Some(Place::Nothing));
        for name in ["model.layers.x.mlp.up_proj.weight", "model.layers.0.mamba.weight", "lm_head.scales", "weight"] {
            assert_eq!(place(name, false), None, "{name}");
        }
        assert_eq!(bare("language_model.model.norm.weight"), "model.norm.weight");
        assert_eq!(bare("model.language_model.norm.weight"), "model.norm.weight");
    }
}
