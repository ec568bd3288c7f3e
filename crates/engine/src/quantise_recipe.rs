//! Which tensor type each tensor of a model gets: the recipes that users know by name (`Q4_K_M`), with the same choice
//! per tensor that they know from llama.cpp. Only names and shapes are looked at here; the numbers are in `kiln_gguf`.

use kiln_gguf::{Gguf, Metadata, TensorType};

use TensorType::{
    BF16, F16, F32, IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS, MXFP4, Q1_0, Q2_0, Q2_K,
    Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, TQ1_0, TQ2_0,
};

/// A recipe: what most tensors become, and the mixing rules of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// The name users know.
    pub name: &'static str,
    /// The type of most tensors.
    pub base: TensorType,
    /// The number of `general.file_type`.
    pub file_type: u32,
    mix: Mix,
}

/// The mixing rules.
#[allow(non_camel_case_types, reason = "the names are those of the recipes")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mix {
    /// No mixing: every tensor that may be quantised has the one type.
    Pure,
    /// Only the output is better.
    Output,
    Q2_K,
    Q2_K_S,
    Q3_K_M,
    Q3_K_L,
    Q4_K_S,
    Q4_K_M,
    Q5_K_M,
    /// IQ4_NL and IQ4_XS.
    Iq4,
    /// IQ3_S, IQ3_M and IQ3_XXS.
    Iq3,
    Iq3M,
    Iq3Xs,
    Iq3Xxs,
    /// IQ2_S and IQ2_M.
    Iq2M,
    /// IQ2_XS and IQ2_XXS.
    Iq2,
    /// IQ1_M and IQ1_S.
    Iq1,
    /// MXFP4 for stacked experts only.
    Experts,
    /// MXFP4 for everything but the output.
    Mxfp4,
    /// TQ1_0, TQ2_0 and Q2_0: only the embeddings are better.
    Ternary,
}

const fn recipe(name: &'static str, base: TensorType, file_type: u32, mix: Mix) -> Recipe {
    Recipe { name, base, file_type, mix }
}

/// Every recipe, largest files first.
pub const RECIPES: &[Recipe] = &[
    recipe("F32", F32, 0, Mix::Pure),
    recipe("F16", F16, 1, Mix::Pure),
    recipe("BF16", BF16, 32, Mix::Pure),
    recipe("Q8_0", Q8_0, 7, Mix::Output),
    recipe("Q6_K", Q6_K, 18, Mix::Output),
    recipe("Q5_K_M", Q5_K, 17, Mix::Q5_K_M),
    recipe("Q5_K_S", Q5_K, 16, Mix::Output),
    recipe("Q5_1", Q5_1, 9, Mix::Output),
    recipe("Q5_0", Q5_0, 8, Mix::Output),
    recipe("Q4_K_M", Q4_K, 15, Mix::Q4_K_M),
    recipe("Q4_K_S", Q4_K, 14, Mix::Q4_K_S),
    recipe("Q4_1", Q4_1, 3, Mix::Output),
    recipe("Q4_0", Q4_0, 2, Mix::Output),
    recipe("IQ4_NL", IQ4_NL, 25, Mix::Iq4),
    recipe("IQ4_XS", IQ4_XS, 30, Mix::Iq4),
    recipe("MXFP4", MXFP4, 38, Mix::Mxfp4),
    recipe("MXFP4_MOE", MXFP4, 38, Mix::Experts),
    recipe("Q3_K_L", Q3_K, 13, Mix::Q3_K_L),
    recipe("Q3_K_M", Q3_K, 12, Mix::Q3_K_M),
    recipe("Q3_K_S", Q3_K, 11, Mix::Output),
    recipe("IQ3_M", IQ3_S, 27, Mix::Iq3M),
    recipe("IQ3_S", IQ3_S, 26, Mix::Iq3),
    recipe("IQ3_XS", IQ3_S, 22, Mix::Iq3Xs),
    recipe("IQ3_XXS", IQ3_XXS, 23, Mix::Iq3Xxs),
    recipe("Q2_K", Q2_K, 10, Mix::Q2_K),
    recipe("Q2_K_S", Q2_K, 21, Mix::Q2_K_S),
    recipe("IQ2_M", IQ2_S, 29, Mix::Iq2M),
    recipe("IQ2_S", IQ2_XS, 28, Mix::Iq2M),
    recipe("IQ2_XS", IQ2_XS, 20, Mix::Iq2),
    recipe("IQ2_XXS", IQ2_XXS, 19, Mix::Iq2),
    recipe("Q2_0", Q2_0, 41, Mix::Ternary),
    recipe("TQ2_0", TQ2_0, 37, Mix::Ternary),
    recipe("IQ1_M", IQ1_M, 31, Mix::Iq1),
    recipe("TQ1_0", TQ1_0, 36, Mix::Ternary),
    recipe("IQ1_S", IQ1_S, 24, Mix::Iq1),
    recipe("Q1_0", Q1_0, 40, Mix::Output),
];

/// Short names of recipes.
const ALIASES: &[(&str, &str)] = &[("Q3_K", "Q3_K_M"), ("Q4_K", "Q4_K_M"), ("Q5_K", "Q5_K_M")];

/// What the rules ask about a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// `general.architecture`.
    pub architecture: String,
    /// Layers.
    pub n_layers: usize,
    /// Query heads for each key-value head.
    pub heads_per_kv: usize,
    /// Experts; 0 for a dense model.
    pub n_experts: usize,
}

/// What the rules ask about a tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorFacts<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its dimensions, innermost first.
    pub dims: &'a [usize],
    /// The type it has now, which it keeps where it is not to be quantised.
    pub ty: TensorType,
}

impl ModelFacts {
    /// The facts of a model file's metadata. What is missing counts as plain: no experts, no shared heads.
    pub fn of(metadata: &Metadata) -> kiln_gguf::Result<ModelFacts> {
        let architecture = metadata.get_str_or("general.architecture", "")?.to_owned();
        let n_layers = metadata.get_usize_or(&format!("{architecture}.block_count"), 0)?;
        // A bound for what the file claims; no model comes near it.
        let layers = n_layers.min(1 << 16);
        let heads = |key: &str| metadata.get_u32_per_layer_opt(&format!("{architecture}.attention.{key}"), layers);
        let first = |list: Option<Vec<u32>>| list.and_then(|l| l.first().copied()).unwrap_or(0) as usize;
        let n_heads = first(heads("head_count")?);
        let n_kv_heads = heads("head_count_kv")?.map_or(n_heads, |list| first(Some(list)));
        let heads_per_kv = n_heads.checked_div(n_kv_heads).unwrap_or(0);
        let n_experts = metadata.get_usize_or(&format!("{architecture}.expert_count"), 0)?;
        Ok(ModelFacts { architecture, n_layers, heads_per_kv, n_experts })
    }
}

/// What part of a model a tensor is, as far as the rules care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Output,
    TokenEmbedding,
    /// Values, and what holds them.
    AttentionV,
    AttentionK,
    AttentionQ,
    AttentionOutput,
    FfnDown,
    /// The other matrices of a feed-forward network.
    FfnGateUp,
    Other,
}

fn part(name: &str) -> Part {
    let has = |piece: &str| name.contains(piece);
    match name {
        "output.weight" => Part::Output,
        "token_embd.weight" | "per_layer_token_embd.weight" => Part::TokenEmbedding,
        _ if has("attn_qkv.weight") || has("attn_kv_b.weight") || has("attn_v.weight") => Part::AttentionV,
        _ if has("attn_k.weight") => Part::AttentionK,
        _ if has("attn_q.weight") => Part::AttentionQ,
        _ if has("attn_output.weight") => Part::AttentionOutput,
        _ if has("ffn_down") => Part::FfnDown,
        _ if has("ffn_gate") || has("ffn_up") => Part::FfnGateUp,
        _ => Part::Other,
    }
}

/// Pieces of names that mark tensors too small or too delicate to quantise.
const KEPT: &[&str] = &[
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "time_mix_first.weight",
    "time_mix_w0.weight",
    "time_mix_w1.weight",
    "time_mix_w2.weight",
    "time_mix_v0.weight",
    "time_mix_v1.weight",
    "time_mix_v2.weight",
    "time_mix_a0.weight",
    "time_mix_a1.weight",
    "time_mix_a2.weight",
    "time_mix_g1.weight",
    "time_mix_g2.weight",
    "time_mix_decay_w1.weight",
    "time_mix_decay_w2.weight",
    "time_mix_lerp_fused.weight",
    "attn_rel_b.weight",
    ".position_embd",
    "sam.pos_embd",
    "sam.neck.",
    "sam.net_",
    ".rel_pos",
    ".patch_embd",
    ".patch_merger",
    "a.rvq.codebook",
    "mm.a.code_embd",
];

/// Whether a tensor is a matrix that may lose precision.
pub fn may_quantise(name: &str, dims: &[usize]) -> bool {
    let n_dims = dims.iter().rposition(|&len| len > 1).map_or(1, |last| last + 1);
    let whole = ["position_embd.weight", "token_types.weight"];
    n_dims >= 2 && name.ends_with("weight") && !whole.contains(&name) && !KEPT.iter().any(|piece| name.contains(piece))
}

/// The layer a name speaks of.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// First and last eighth of the layers, and every third between.
fn wants_more_bits(layer: usize, n_layers: usize) -> bool {
    let eighth = n_layers / 8;
    layer < eighth || layer >= 7 * n_layers / 8 || (layer - eighth) % 3 == 2
}

/// Whether a tensor's layer is one of the first or the last eighth.
fn at_an_end(name: &str, n_layers: usize) -> bool {
    layer(name).is_none_or(|layer| layer < n_layers / 8 || layer >= 7 * n_layers / 8)
}

/// The type to take where rows of `cols` are no whole number of blocks.
fn fall_back(ty: TensorType, cols: usize) -> TensorType {
    if cols.is_multiple_of(ty.block_len()) {
        return ty;
    }
    let smaller = match ty {
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        IQ4_XS | IQ3_S | IQ3_XXS | IQ2_S | IQ2_XS | IQ2_XXS | IQ1_M | IQ1_S => IQ4_NL,
        Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        other => other,
    };
    if cols.is_multiple_of(smaller.block_len()) { smaller } else { F16 }
}

/// One tensor among its like: the how many-th and of how many.
#[derive(Clone, Copy)]
struct Place {
    index: usize,
    count: usize,
}

impl Recipe {
    /// The recipe of this name, in any case.
    pub fn from_name(name: &str) -> Option<Recipe> {
        let full = ALIASES.iter().find(|(short, _)| short.eq_ignore_ascii_case(name)).map_or(name, |(_, full)| full);
        RECIPES.iter().find(|recipe| recipe.name.eq_ignore_ascii_case(full)).copied()
    }

    /// The same base type without mixing.
    pub fn pure(self) -> Recipe {
        Recipe { mix: Mix::Pure, ..self }
    }

    /// The type of each tensor, in their order.
    pub fn types(&self, model: &ModelFacts, tensors: &[TensorFacts<'_>]) -> Vec<TensorType> {
        let tied = !tensors.iter().any(|t| t.name == "output.weight");
        let count = |wanted: Part| tensors.iter().filter(|t| part(t.name) == wanted).count();
        let n_values = count(Part::AttentionV);
        // Tensors are counted by layer, whatever their order in the file.
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&i| (layer(tensors[i].name), tensors[i].name));
        let (mut values_seen, mut downs_seen) = (0, 0);
        let mut types = vec![F32; tensors.len()];
        for i in order {
            let tensor = &tensors[i];
            types[i] = tensor.ty;
            if !may_quantise(tensor.name, tensor.dims) {
                continue;
            }
            let part = part(tensor.name);
            let place = match part {
                Part::AttentionV => Place { index: values_seen, count: n_values },
                Part::FfnDown if model.n_experts > 1 => {
                    Place { index: layer(tensor.name).unwrap_or(0), count: model.n_layers }
                }
                _ => Place { index: downs_seen, count: model.n_layers },
            };
            values_seen += usize::from(part == Part::AttentionV);
            downs_seen += usize::from(part == Part::FfnDown);
            types[i] = match self.base.is_quantised() {
                true => fall_back(self.mixed(model, tensor, (part, tied), place), tensor.dims[0]),
                false => self.base,
            };
        }
        types
    }

    /// The rules of the mixtures, before shapes are looked at.
    fn mixed(&self, m: &ModelFacts, t: &TensorFacts<'_>, (part, tied): (Part, bool), place: Place) -> TensorType {
        if self.mix == Mix::Pure {
            return self.base;
        }
        if part == Part::Output || (tied && part == Part::TokenEmbedding) {
            let whole = t.dims[0].is_multiple_of(self.base.block_len());
            let eight = matches!(self.mix, Mix::Experts | Mix::Mxfp4) || m.architecture == "falcon" || !whole;
            let least = matches!(self.mix, Mix::Iq1 | Mix::Iq2 | Mix::Iq2M | Mix::Iq3Xxs);
            return match eight || self.base == Q8_0 {
                true => Q8_0,
                false if least => Q5_K,
                false => Q6_K,
            };
        }
        if self.mix == Mix::Experts {
            return if t.dims.get(2).is_some_and(|&n| n > 1) { MXFP4 } else { Q8_0 };
        }
        match part {
            Part::AttentionV => self.values(m, place),
            Part::AttentionK if m.n_experts == 8 => match self.mix {
                Mix::Iq1 | Mix::Iq2 | Mix::Iq2M => Q4_K,
                _ => Q8_0,
            },
            Part::AttentionK | Part::AttentionQ if self.mix == Mix::Iq3Xxs => IQ2_S,
            Part::AttentionK | Part::AttentionQ if self.mix == Mix::Iq3Xs => IQ3_XXS,
            Part::FfnGateUp if self.mix == Mix::Iq3Xs && !at_an_end(t.name, m.n_layers) => IQ3_XXS,
            Part::FfnDown => self.ffn_down(m, place),
            Part::AttentionOutput => self.attention_output(m),
            Part::TokenEmbedding => match self.mix {
                Mix::Ternary => Q4_K,
                Mix::Iq1 | Mix::Iq2 => Q2_K,
                Mix::Iq2M | Mix::Iq3Xxs => IQ3_S,
                _ => self.base,
            },
            _ => self.base,
        }
    }

    fn values(&self, m: &ModelFacts, Place { index, count }: Place) -> TensorType {
        let shared = m.heads_per_kv >= 4;
        let ty = match self.mix {
            Mix::Iq1 | Mix::Iq2 | Mix::Iq2M if shared || m.n_experts >= 4 => return Q4_K,
            Mix::Iq1 | Mix::Iq2 => return Q2_K,
            Mix::Iq2M => return IQ3_S,
            Mix::Iq3 | Mix::Iq3Xs | Mix::Iq3Xxs if shared => Q4_K,
            Mix::Iq3M => Q4_K,
            Mix::Q2_K if shared => Q4_K,
            Mix::Q2_K => Q3_K,
            Mix::Q2_K_S if shared => Q4_K,
            Mix::Q3_K_M if index < 2 => Q5_K,
            Mix::Q3_K_M => Q4_K,
            Mix::Q3_K_L => Q5_K,
            Mix::Iq4 if shared => Q5_K,
            Mix::Q4_K_M | Mix::Q5_K_M if wants_more_bits(index, count) => Q6_K,
            Mix::Q4_K_S if index < 4 => Q5_K,
            _ => self.base,
        };
        // Llama 70B shares values among so many heads that better ones cost almost nothing.
        let large = m.architecture == "llama" && m.n_layers == 80;
        match ty {
            _ if m.n_experts == 8 => Q8_0,
            Q3_K | Q4_K if large => Q5_K,
            ty => ty,
        }
    }

    fn ffn_down(&self, m: &ModelFacts, Place { index, count }: Place) -> TensorType {
        let falcon = m.architecture == "falcon";
        let first_eighth = index < count / 8;
        let first_sixteenth = index < count / 16;
        let more = wants_more_bits(index, count);
        match self.mix {
            Mix::Iq1 | Mix::Iq2 if first_eighth => Q2_K,
            Mix::Iq2M if first_eighth => IQ3_S,
            Mix::Iq3M if first_eighth => Q4_K,
            Mix::Q2_K => Q3_K,
            Mix::Q2_K_S if first_eighth => Q4_K,
            Mix::Q3_K_M if first_sixteenth => Q5_K,
            Mix::Q3_K_M if !falcon || more => Q4_K,
            Mix::Q3_K_L if falcon => Q4_K,
            Mix::Q3_K_L => Q5_K,
            Mix::Q4_K_M if falcon && first_sixteenth => Q6_K,
            Mix::Q4_K_M if falcon && more => Q5_K,
            Mix::Q4_K_M if !falcon && more => Q6_K,
            Mix::Iq4 if first_eighth => Q5_K,
            Mix::Q5_K_M if more => Q6_K,
            Mix::Q4_K_S if !falcon && first_eighth => Q5_K,
            _ => self.base,
        }
    }

    fn attention_output(&self, m: &ModelFacts) -> TensorType {
        if m.architecture == "falcon" {
            return if self.mix == Mix::Q3_K_L { Q4_K } else { self.base };
        }
        if m.n_experts == 8 {
            let mixes = [
                Mix::Q2_K,
                Mix::Q3_K_M,
                Mix::Q4_K_S,
                Mix::Q4_K_M,
                Mix::Iq4,
                Mix::Iq3,
                Mix::Iq3M,
                Mix::Iq3Xs,
                Mix::Iq3Xxs,
                Mix::Iq1,
                Mix::Iq2,
                Mix::Iq2M,
            ];
            return if mixes.contains(&self.mix) || self.name == "Q3_K_S" { Q5_K } else { self.base };
        }
        match self.mix {
            Mix::Q2_K => Q3_K,
            Mix::Iq1 => IQ2_XXS,
            Mix::Iq2M | Mix::Iq3Xxs => IQ3_S,
            Mix::Q3_K_M | Mix::Iq3M => Q4_K,
            Mix::Q3_K_L => Q5_K,
            _ => self.base,
        }
    }

    /// The type of each tensor of an open model.
    pub fn types_of(&self, model: &Gguf) -> kiln_gguf::Result<Vec<TensorType>> {
        let facts = |t: &'_ kiln_gguf::TensorInfo| (t.name.clone(), t.dims().to_vec(), t.ty);
        let owned: Vec<_> = model.tensors().iter().map(facts).collect();
        let tensors: Vec<TensorFacts<'_>> =
            owned.iter().map(|(name, dims, ty)| TensorFacts { name, dims, ty: *ty }).collect();
        Ok(self.types(&ModelFacts::of(model.metadata())?, &tensors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dense(layers: usize) -> ModelFacts {
        ModelFacts { architecture: "llama".into(), n_layers: layers, heads_per_kv: 4, n_experts: 0 }
    }

    fn types(name: &str, model: &ModelFacts, tensors: &[(&str, &[usize])]) -> Vec<TensorType> {
        let tensors: Vec<_> = tensors.iter().map(|&(name, dims)| TensorFacts { name, dims, ty: F32 }).collect();
        Recipe::from_name(name).unwrap().types(model, &tensors)
    }

    #[test]
    fn names_lead_to_recipes_in_any_case_and_short() {
        for recipe in RECIPES {
            assert_eq!(Recipe::from_name(&recipe.name.to_lowercase()), Some(*recipe));
        }
        assert_eq!(Recipe::from_name("q4_k").unwrap().name, "Q4_K_M");
        assert_eq!(Recipe::from_name("Q4_K_X"), None);
    }

    #[test]
    fn more_bits_go_to_the_ends_and_to_every_third_layer() {
        let better: Vec<usize> = (0..32).filter(|&layer| wants_more_bits(layer, 32)).collect();
        assert_eq!(better, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
    }

    #[test]
    fn norms_biases_routers_and_small_matrices_keep_their_type() {
        let got = types(
            "Q4_0",
            &dense(1),
            &[
                ("blk.0.attn_norm.weight", &[64]),
                ("blk.0.attn_q.bias", &[64]),
                ("blk.0.ffn_gate_inp.weight", &[64, 8]),
                ("blk.0.time_mix_w1.weight", &[64, 8]),
                ("blk.0.time_mix_lerp_x.weight", &[64, 1, 1]),
                ("blk.0.attn_q.weight", &[64, 64]),
            ],
        );
        assert_eq!(got, [F32, F32, F32, F32, F32, Q4_0]);
    }

    #[test]
    fn tied_embeddings_are_treated_as_the_output() {
        let embedding: (&str, &[usize]) = ("token_embd.weight", &[256, 1000]);
        assert_eq!(types("Q4_K_M", &dense(1), &[embedding]), [Q6_K]);
        assert_eq!(types("Q4_K_M", &dense(1), &[embedding, ("output.weight", &[256, 1000])]), [Q4_K, Q6_K]);
        assert_eq!(types("Q8_0", &dense(1), &[embedding]), [Q8_0]);
    }

    #[test]
    fn rows_that_are_no_whole_blocks_fall_back() {
        let narrow: (&str, &[usize]) = ("blk.0.attn_q.weight", &[96, 8]);
        for (name, expected) in
            [("Q4_K_S", Q5_0), ("Q5_K_S", Q5_1), ("Q6_K", Q8_0), ("Q3_K_S", Q4_0), ("IQ4_XS", IQ4_NL)]
        {
            assert_eq!(types(name, &dense(8), &[narrow]), [expected], "{name}");
        }
        assert_eq!(types("Q4_0", &dense(8), &[("blk.0.attn_q.weight", &[48, 8])]), [F16]);
    }

    #[test]
    fn eight_experts_get_better_attention() {
        let model = ModelFacts { n_experts: 8, ..dense(32) };
        let tensors: [(&str, &[usize]); 4] = [
            ("blk.9.attn_k.weight", &[4096, 1024]),
            ("blk.9.attn_v.weight", &[4096, 1024]),
            ("blk.9.attn_output.weight", &[4096, 4096]),
            ("blk.9.ffn_down_exps.weight", &[14336, 4096, 8]),
        ];
        assert_eq!(types("Q4_K_M", &model, &tensors), [Q8_0, Q8_0, Q5_K, Q6_K]);
        assert_eq!(types("MXFP4_MOE", &model, &tensors), [Q8_0, Q8_0, Q8_0, MXFP4]);
    }

    #[test]
    fn pure_means_one_type() {
        let tensors = [TensorFacts { name: "output.weight", dims: &[256, 8], ty: F16 }];
        assert_eq!(Recipe::from_name("Q4_K_M").unwrap().pure().types(&dense(1), &tensors), [Q4_K]);
    }
}
