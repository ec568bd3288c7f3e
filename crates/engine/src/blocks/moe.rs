//! A mixture of experts: a router chooses some feed-forward layers for each token and weighs their results. Experts that all
//! tokens share may stand beside them.

use kiln_gguf::TensorType;
use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::topk_moe::{self, Groups, Shares};
use kiln_kernels::unary::Function;
use kiln_kernels::{get_rows, soft_max};

use super::mlp::{Activation, Mlp, MlpSpec};
use crate::Error;
use crate::arch::Batch;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// The least sum that weights are divided by: 2^-14.
const LEAST_SUM: f32 = 6.103_515_6e-5;

/// How experts are read, and how they are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// Width inside an expert.
    pub width: usize,
    /// Number of experts.
    pub experts: usize,
    /// Experts of a token.
    pub used: usize,
    /// What becomes of the router's logits.
    pub gating: topk_moe::Gate,
    /// How gates become weights.
    pub shares: Shares,
    /// Factor of the weights.
    pub scale: f32,
    /// What happens inside an expert.
    pub activation: Gate,
    /// A function in the place of the gate, also in the shared experts: down(f(up x)).
    pub plain: Option<Function>,
    /// Whether a factor for each expert counts (`ffn_*_exps.scale`).
    pub scaled: bool,
    /// Width of the experts that all tokens share, if there are any.
    pub shared: Option<usize>,
    /// What happens inside the shared experts, where it is something else.
    pub shared_activation: Option<Gate>,
    /// Whether the file holds gate and up of the shared experts as one matrix.
    pub shared_fused: bool,
    /// Factor of the sum of chosen and shared experts.
    pub factor: f32,
    /// Whether the weight of an expert multiplies what it reads, not what it gives.
    pub weighs_input: bool,
    /// Experts live in a space of this width, between `ffn_latent_down` and `ffn_latent_up`.
    pub latent: Option<usize>,
    /// The same space is entered by `ffn_routed_down` and left by `ffn_routed_up`; what leaves is normed by `ffn_routed_norm` with this
    /// added, where the file has such a norm.
    pub routed: Option<f32>,
    /// A second choice among smaller experts, which read the result of the first.
    pub chunks: Option<Chunks>,
    /// The router norms what it reads with this added, times `ffn_gate_inp.scale` over the root of the width.
    pub router_norm: Option<f32>,
    /// Whether a table says which experts a token has (`ffn_gate_tid2eid`), and the router only how they are weighed: the size of the vocabulary
    /// then.
    pub by_token: Option<usize>,
}

/// Smaller experts (`ffn_*_chexps`), one for each group of neighbours among the experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunks {
    /// Width inside one.
    pub width: usize,
    /// Experts of a group.
    pub group: usize,
    /// Factor of their sum.
    pub scale: f32,
}

impl MoeSpec {
    /// Softmax over all experts, weights divided by their sum: what most models do.
    pub fn usual(hidden: usize, width: usize, [experts, used]: [usize; 2]) -> MoeSpec {
        MoeSpec {
            hidden,
            width,
            experts,
            used,
            gating: topk_moe::Gate::Softmax,
            shares: MoeSpec::of_sum(),
            scale: 1.0,
            activation: Gate::Swiglu,
            plain: None,
            scaled: false,
            shared: None,
            shared_activation: None,
            shared_fused: false,
            factor: 1.0,
            weighs_input: false,
            latent: None,
            routed: None,
            chunks: None,
            router_norm: None,
            by_token: None,
        }
    }

    /// Weights divided by their sum.
    pub fn of_sum() -> Shares {
        Shares::OfSum { least: LEAST_SUM, most: f32::INFINITY }
    }

    /// The same where the file must have experts.
    pub fn required_counts(l: &Loader<'_>) -> Result<[usize; 2], Error> {
        l.keys.count("expert_count", 1 << 12)?;
        Ok(MoeSpec::counts(l)?.unwrap_or([1, 1]))
    }

    /// Number of experts and of those a token has, where the file has experts.
    pub fn counts(l: &Loader<'_>) -> Result<Option<[usize; 2]>, Error> {
        let Some(experts) = l.keys.count_opt("expert_count", 1 << 12)? else { return Ok(None) };
        let used = l.keys.count("expert_used_count", experts)?;
        Ok(Some([experts, used]))
    }

    /// Groups of experts of which the router chooses the best first, where the file has them.
    fn groups(&self, l: &Loader<'_>) -> Result<Option<Groups>, Error> {
        let keys = l.keys;
        let count = keys.count_opt("expert_group_count", self.experts)?.unwrap_or(1);
        if count == 1 {
            return Ok(None);
        }
        let size = self.experts / count;
        let fits = self.experts.is_multiple_of(count) && size >= 2;
        keys.require(
            fits,
            "expert_group_count",
            count,
            &format!("a divisor of the {} experts, two in a group", self.experts),
        )?;
        if self.weighs_input || self.chunks.is_some() {
            // The best groups are found by other numbers than experts here, and no model has both.
            let what = format!("groups of experts in {}", keys.name("expert_group_count"));
            return Err(Error::NotSupported { what: format!("{what} for a router of this kind") });
        }
        let used = keys.count("expert_group_used_count", count)?;
        let enough = used * size >= self.used;
        keys.require(enough, "expert_group_used_count", used, &format!("enough groups of {size} for {}", self.used))?;
        Ok(Some(Groups { count, used }).filter(|_| used < count))
    }
}

/// A mixture of experts.
#[derive(Clone, Debug)]
pub struct Moe {
    spec: MoeSpec,
    router: Linear,
    router_norm: Option<Norm>,
    /// Added to the gates for the choice alone.
    choice_bias: Option<Tensor>,
    /// `[used, vocabulary]`: the experts of each token.
    by_token: Option<Tensor>,
    groups: Option<Groups>,
    matrices: Matrices,
    /// Into and out of the space that experts live in.
    latent: Option<[Linear; 2]>,
    /// Norm of what leaves that space.
    latent_norm: Option<Norm>,
    shared: Option<Mlp>,
    /// How much of the shared experts' result counts.
    shared_gate: Option<Linear>,
    chunks: Option<ChunkExperts>,
}

/// The three matrices of every expert.
#[derive(Clone, Debug)]
struct Matrices {
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    /// Factors of each expert's three products.
    scales: [Option<Tensor>; 3],
}

#[derive(Clone, Debug)]
struct ChunkExperts {
    matrices: Matrices,
    /// F32 `[1, experts]`: the number of each expert's chunk.
    chunk_of: Tensor,
    spec: Chunks,
}

/// Experts of a token and their weights.
#[derive(Clone, Copy)]
struct Chosen {
    ids: Tensor,
    weights: Tensor,
}

impl Moe {
    /// Reads it.
    pub fn load(l: &mut Loader<'_>, spec: &MoeSpec) -> Result<Moe, Error> {
        let MoeSpec { hidden, width, experts, .. } = *spec;
        let space = spec.latent.unwrap_or(hidden);
        let shared = spec.shared.map(|width| {
            let gate = spec.shared_activation.unwrap_or(spec.activation);
            let activation = match spec.plain {
                Some(function) => Activation::Plain(function),
                None if spec.shared_fused => Activation::GatedFused(gate),
                None => Activation::Gated(gate),
            };
            let plain = MlpSpec::plain(hidden, width, activation);
            Mlp::load(l, &MlpSpec { scaled: spec.scaled.into(), bias: true, suffix: "_shexp", ..plain })
        });
        // One architecture has no suffix here.
        let bias = if l.has("exp_probs_b") { "exp_probs_b" } else { "exp_probs_b.bias" };
        let (router, router_norm) = match spec.router_norm {
            Some(eps) => {
                let matrix = l.matrix("ffn_gate_inp", &[hidden, experts])?;
                let weight = Some(l.vector("ffn_gate_inp.scale", &[hidden])?);
                (Linear { scale: 1.0 / (hidden as f32).sqrt(), ..matrix }, Some(Norm::Rms { weight, eps }))
            }
            None => (l.linear("ffn_gate_inp", &[hidden, experts])?, None),
        };
        Ok(Moe {
            spec: *spec,
            router,
            router_norm,
            choice_bias: match spec.by_token {
                Some(_) => None,
                None => l.vector_opt(bias, &[experts])?,
            },
            by_token: match spec.by_token {
                Some(vocab) => Some(l.tensor("ffn_gate_tid2eid.weight", &[spec.used, vocab])?),
                None => None,
            },
            groups: spec.groups(l)?,
            matrices: Matrices::load(l, "exps", [space, width, experts], spec)?,
            latent: match (spec.latent, spec.routed) {
                (Some(space), None) => {
                    Some([l.linear("ffn_latent_down", &[hidden, space])?, l.linear("ffn_latent_up", &[space, hidden])?])
                }
                (Some(space), Some(_)) => Some([
                    l.unscaled("ffn_routed_down", &[hidden, space])?,
                    l.unscaled("ffn_routed_up", &[space, hidden])?,
                ]),
                (None, _) => None,
            },
            latent_norm: match spec.routed {
                Some(eps) => l
                    .vector_opt("ffn_routed_norm.weight", &[space])?
                    .map(|weight| Norm::Rms { weight: Some(weight), eps }),
                None => None,
            },
            shared: shared.transpose()?,
            shared_gate: l.linear_opt("ffn_gate_inp_shexp", &[hidden, 1])?,
            chunks: spec.chunks.map(|chunks| ChunkExperts::load(l, spec, chunks)).transpose()?,
        })
    }

    /// Adds the steps; gives what is added to the residual stream. The router reads `routed`, mostly `x` itself.
    pub fn build(&self, b: &mut Builder, batch: &Batch, x: Tensor, routed: Tensor) -> Tensor {
        let routed = self.router_norm.map_or(routed, |norm| b.norm("router.norm", routed, &norm));
        let logits = b.linear("router", routed, &self.router);
        let chosen = match self.by_token {
            Some(table) => self.looked_up(b, batch, table, logits),
            None => self.choose(b, logits),
        };
        let inner = match &self.latent {
            Some([down, _]) => b.linear("latent_down", x, down),
            None => x,
        };
        let mut sum = self.matrices.build(b, "", inner, chosen, &self.spec);
        if let Some(norm) = &self.latent_norm {
            sum = b.norm("latent_norm", sum, norm);
        }
        if let Some([_, up]) = &self.latent {
            sum = b.linear("latent_up", sum, up);
        }
        if let Some(chunks) = &self.chunks {
            sum = chunks.build(b, logits, chosen.ids, sum, &self.spec);
        }
        let Some(shared) = &self.shared else { return sum };
        let mut all = shared.build(b, x);
        if let Some(gate) = &self.shared_gate {
            let gate = b.linear("shared.gate", x, gate);
            let gate = b.function("shared.sigmoid", gate, Function::Sigmoid);
            all = b.multiply("shared.gated", all, gate);
        }
        let all = b.add("shared", all, sum);
        if self.spec.factor == 1.0 { all } else { b.scale("factor", all, self.spec.factor) }
    }

    fn choose(&self, b: &mut Builder, logits: Tensor) -> Chosen {
        let MoeSpec { used, gating: gate, shares, scale, .. } = self.spec;
        let call = topk_moe::Call {
            bias: self.choice_bias,
            groups: self.groups,
            gate,
            shares,
            scale,
            ..choice(b, logits, used)
        };
        b.step("choose", call);
        Chosen { ids: call.ids, weights: call.weights }
    }

    /// The experts that the table has for each token, weighed by the router.
    fn looked_up(&self, b: &mut Builder, batch: &Batch, table: Tensor, logits: Tensor) -> Chosen {
        let MoeSpec { used, experts, gating: gate, shares, scale, .. } = self.spec;
        let rows = logits.shape[1];
        let whole = |b: &mut Builder, name: &str, numbers: Tensor| {
            let ids = b.fresh(name, TensorType::I32, [used, rows, 1, 1]);
            b.copy(name, numbers.reshape([used, rows, 1, 1]), ids);
            ids
        };
        let numbers = b.rows("looked_up", table, batch.ports.tokens);
        let ids = whole(b, "looked_up.ids", numbers);
        let at = b.fresh("looked_up.logits", TensorType::F32, [1, used, rows, 1]);
        let src = logits.reshape([1, experts, rows, 1]);
        b.step("looked_up.logits", get_rows::Call { src, ids, dst: at });
        // A choice of all of them, which only weighs; they come in its order.
        let call = topk_moe::Call { gate, shares, scale, ..choice(b, at.reshape([used, rows, 1, 1]), used) };
        b.step("choose", call);
        let ordered = b.fresh("looked_up.ordered", TensorType::F32, [1, used, rows, 1]);
        let src = numbers.reshape([1, used, rows, 1]);
        b.step("looked_up.ordered", get_rows::Call { src, ids: call.ids, dst: ordered });
        Chosen { ids: whole(b, "looked_up.chosen", ordered), weights: call.weights }
    }
}

/// The choice of so many experts with fresh slots for its results.
fn choice(b: &mut Builder, logits: Tensor, used: usize) -> topk_moe::Call {
    let rows = logits.shape[1];
    topk_moe::Call {
        logits,
        router: None,
        bias: None,
        ids: b.fresh("chosen", TensorType::I32, [used, rows, 1, 1]),
        weights: b.fresh("weights", TensorType::F32, [used, rows, 1, 1]),
        groups: None,
        gate: topk_moe::Gate::Softmax,
        shares: Shares::Gates,
        scale: 1.0,
        shift: 0.0,
    }
}

/// The weighted sum over the experts of a token: `y [width, used, rows]`, `weights [used, rows]`.
pub(super) fn weighed_sum(b: &mut Builder, name: &str, y: Tensor, weights: Option<Tensor>) -> Tensor {
    let [width, used, rows, _] = y.shape;
    let weighed = match weights {
        Some(weights) => b.multiply(&format!("{name}weighed"), y, weights.reshape([1, used, rows, 1])),
        None => y,
    };
    let sum = if used == 1 { weighed } else { b.sum(&format!("{name}sum"), weighed.permute([1, 0, 2, 3])) };
    sum.reshape([width, rows, 1, 1])
}

impl Matrices {
    fn load(
        l: &mut Loader<'_>,
        kind: &str,
        [hidden, width, experts]: [usize; 3],
        spec: &MoeSpec,
    ) -> Result<Matrices, Error> {
        let fused = format!("ffn_gate_up_{kind}");
        let (gate, up) = if spec.plain.is_some() {
            (None, expert_matrix(l, &format!("ffn_up_{kind}"), [hidden, width, experts])?)
        } else if l.has(&format!("{fused}.weight")) {
            let both = expert_matrix(l, &fused, [hidden, 2 * width, experts])?;
            let half = |start| Linear { weight: both.weight.narrow(1, start, width), ..Linear::plain(both.weight) };
            if both.bias.is_some() {
                return Err(Error::NotSupported { what: "a bias of experts' gate and up in one tensor".into() });
            }
            l.ignore(&format!("{fused}.scale"));
            (Some(half(0)), half(width))
        } else {
            let gate = expert_matrix(l, &format!("ffn_gate_{kind}"), [hidden, width, experts])?;
            (Some(gate), expert_matrix(l, &format!("ffn_up_{kind}"), [hidden, width, experts])?)
        };
        let mut scale = |part: &str| l.vector_opt(&format!("ffn_{part}_{kind}.scale"), &[experts]);
        let scales = [scale("gate")?, scale("up")?, scale("down")?];
        let down = expert_matrix(l, &format!("ffn_down_{kind}"), [width, hidden, experts])?;
        Ok(Matrices { gate, up, down, scales: if spec.scaled { scales } else { [None; 3] } })
    }

    /// What the chosen experts make of `x [hidden, rows]`, weighed and added up.
    fn build(&self, b: &mut Builder, name: &str, x: Tensor, chosen: Chosen, spec: &MoeSpec) -> Tensor {
        let Chosen { ids, weights } = chosen;
        let [used, rows, ..] = ids.shape;
        let label = |part: &str| format!("{name}{part}");
        let column = x.reshape([x.shape[0], 1, rows, 1]);
        let gate = self.gate.as_ref().map(|gate| self.product(b, &label("gate"), column, gate, ids, 0));
        let up = self.product(b, &label("up"), column, &self.up, ids, 1);
        // Both products are linear, so the weight of the input is theirs.
        let weighed = |b: &mut Builder, part: &str, y: Tensor| match spec.weighs_input {
            true => b.multiply(&label(part), y, weights.reshape([1, used, rows, 1])),
            false => y,
        };
        let gate = gate.map(|gate| weighed(b, "gate.weighed", gate));
        let up = weighed(b, "up.weighed", up);
        let wide = match (gate, spec.plain) {
            (Some(gate), _) => b.gated(&label("gated"), spec.activation, gate, up),
            (None, Some(function)) => b.function(&label("function"), up, function),
            (None, None) => up,
        };
        let down = self.product(b, &label("down"), wide, &self.down, ids, 2);
        weighed_sum(b, name, down, (!spec.weighs_input).then_some(weights))
    }

    /// The products of the chosen experts, with the factor of each.
    fn product(&self, b: &mut Builder, name: &str, x: Tensor, matrix: &Linear, ids: Tensor, part: usize) -> Tensor {
        let y = b.experts(name, x, matrix, ids);
        let Some(scale) = self.scales[part] else { return y };
        // A factor for each chosen expert: rows of one element.
        let table = scale.reshape([1, scale.len(), 1, 1]);
        let factors = b.rows(&format!("{name}.scale"), table, ids.reshape([ids.len(), 1, 1, 1]));
        b.multiply(&format!("{name}.scaled"), y, factors.reshape([1, ids.shape[0], ids.shape[1], 1]))
    }
}

/// The matrices of all experts, with their biases.
fn expert_matrix(l: &mut Loader<'_>, name: &str, shape: [usize; 3]) -> Result<Linear, Error> {
    let weight = l.matrix(name, &shape)?.weight;
    let bias = l.vector_opt(&format!("{name}.bias"), &shape[1..])?;
    Ok(Linear { weight, bias, scale: 1.0 })
}

impl ChunkExperts {
    fn load(l: &mut Loader<'_>, spec: &MoeSpec, chunks: Chunks) -> Result<ChunkExperts, Error> {
        let count = spec.experts / chunks.group;
        let matrices =
            Matrices::load(l, "chexps", [spec.hidden, chunks.width, count], &MoeSpec { scaled: false, ..*spec })?;
        let table: Vec<f32> = (0..spec.experts).map(|expert| (expert / chunks.group) as f32).collect();
        let chunk_of = l.constant("chunk_of", &table, [1, spec.experts, 1, 1]);
        Ok(ChunkExperts { matrices, chunk_of, spec: chunks })
    }

    /// What the chunks of the chosen experts make of their result `m`, added to it.
    fn build(&self, b: &mut Builder, logits: Tensor, ids: Tensor, m: Tensor, spec: &MoeSpec) -> Tensor {
        let rows = logits.shape[1];
        let used = spec.used.min(spec.experts / self.spec.group);
        let ids = ids.narrow(0, 0, used);
        // The same table for every token: a stride of 0.
        let src = Tensor { shape: [1, spec.experts, rows, 1], stride: [4, 4, 0, 0], ..self.chunk_of };
        let numbers = b.fresh("chunk.numbers", TensorType::F32, [1, used, rows, 1]);
        b.step("chunk.numbers", get_rows::Call { src, ids, dst: numbers });
        let chunk = b.fresh("chunk.chosen", TensorType::I32, [1, used, rows, 1]);
        b.copy("chunk.chosen", numbers, chunk);
        let chunk = chunk.reshape([used, rows, 1, 1]);
        // Weighed by the router's gate at the number of the chunk, divided by the sum: a softmax over those logits.
        let at = b.fresh("chunk.logits", TensorType::F32, [1, used, rows, 1]);
        let src = logits.reshape([1, spec.experts, rows, 1]);
        b.step("chunk.logits", get_rows::Call { src, ids: chunk, dst: at });
        let x = at.reshape([used, rows, 1, 1]);
        let weights = b.like("chunk.weights", x);
        let call = soft_max::Call { x, mask: None, sinks: None, y: weights, scale: 1.0, max_bias: 0.0 };
        b.step("chunk.weights", call);
        let sum = self.matrices.build(b, "chunk.", m, Chosen { ids: chunk, weights }, spec);
        let sum = b.scale("chunk.scaled", sum, self.spec.scale);
        b.add("chunks", m, sum)
    }
}

/// How values are made by experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueSpec {
    /// Number of experts.
    pub experts: usize,
    /// Experts of a token.
    pub used: usize,
    /// What becomes of the router's logits.
    pub gating: topk_moe::Gate,
    /// How gates become weights.
    pub shares: Shares,
    /// Factor of the weights.
    pub scale: f32,
}

/// Values of attention made by experts, one matrix each: the weighted sum of silu(V x).
#[derive(Clone, Debug)]
pub struct Values {
    spec: ValueSpec,
    router: Linear,
    /// Added to the gates for the choice alone.
    choice_bias: Option<Tensor>,
    matrices: Linear,
}

impl Values {
    /// Reads them.
    pub fn load(l: &mut Loader<'_>, spec: &ValueSpec, [hidden, width]: [usize; 2]) -> Result<Values, Error> {
        Ok(Values {
            spec: *spec,
            router: l.matrix("attn_v_gate", &[hidden, spec.experts])?,
            choice_bias: l.vector_opt("attn_v_gate.bias", &[spec.experts])?,
            matrices: l.matrix("attn_v_exps", &[hidden, width, spec.experts])?,
        })
    }

    /// Adds the steps; gives the values `[width, rows]`.
    pub fn build(&self, b: &mut Builder, x: Tensor) -> Tensor {
        let ValueSpec { used, gating: gate, shares, scale, .. } = self.spec;
        let [hidden, rows, ..] = x.shape;
        let logits = b.linear("v.router", x, &self.router);
        let call = topk_moe::Call { bias: self.choice_bias, gate, shares, scale, ..choice(b, logits, used) };
        b.step("v.choose", call);
        let y = b.experts("v", x.reshape([hidden, 1, rows, 1]), &self.matrices, call.ids);
        let y = b.function("v.silu", y, Function::Silu);
        weighed_sum(b, "v.", y, Some(call.weights))
    }
}
