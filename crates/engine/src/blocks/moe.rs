//! A mixture of experts: a router chooses some feed-forward layers for each token and weighs their results. Experts that all
//! tokens share may stand beside them.

use kiln_gguf::TensorType;
use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::topk_moe::{self, Shares};
use kiln_kernels::unary::Function;

use super::mlp::{Activation, Mlp, MlpSpec};
use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear};

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
    /// Whether a factor for each expert counts (`ffn_*_exps.scale`).
    pub scaled: bool,
    /// Width of the experts that all tokens share, if there are any.
    pub shared: Option<usize>,
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
            scaled: false,
            shared: None,
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
        if l.keys.count_opt("expert_group_count", experts)?.unwrap_or(1) > 1 {
            return Err(Error::NotSupported { what: "a router that chooses groups of experts first".into() });
        }
        Ok(Some([experts, used]))
    }
}

/// A mixture of experts.
#[derive(Clone, Debug)]
pub struct Moe {
    spec: MoeSpec,
    router: Linear,
    /// Added to the gates for the choice alone.
    choice_bias: Option<Tensor>,
    gate: Linear,
    up: Linear,
    down: Linear,
    /// Factors of each expert's three products.
    scales: [Option<Tensor>; 3],
    shared: Option<Mlp>,
    /// How much of the shared experts' result counts.
    shared_gate: Option<Linear>,
}

impl Moe {
    /// Reads it.
    pub fn load(l: &mut Loader<'_>, spec: &MoeSpec) -> Result<Moe, Error> {
        let MoeSpec { hidden, width, experts, .. } = *spec;
        let (gate, up) = if l.has("ffn_gate_up_exps.weight") {
            let both = expert_matrix(l, "ffn_gate_up_exps", [hidden, 2 * width, experts])?;
            let half = |start| Linear { weight: both.weight.narrow(1, start, width), ..Linear::plain(both.weight) };
            if both.bias.is_some() {
                return Err(Error::NotSupported { what: "a bias of experts' gate and up in one tensor".into() });
            }
            (half(0), half(width))
        } else {
            let gate = expert_matrix(l, "ffn_gate_exps", [hidden, width, experts])?;
            (gate, expert_matrix(l, "ffn_up_exps", [hidden, width, experts])?)
        };
        let mut scale = |part: &str| l.vector_opt(&format!("ffn_{part}_exps.scale"), &[experts]);
        let scales = [scale("gate")?, scale("up")?, scale("down")?];
        let shared = spec.shared.map(|width| {
            let activation = Activation::Gated(spec.activation);
            Mlp::load(l, &MlpSpec { hidden, width, activation, scaled: spec.scaled, bias: true, suffix: "_shexp" })
        });
        Ok(Moe {
            spec: *spec,
            router: l.linear("ffn_gate_inp", &[hidden, experts])?,
            choice_bias: l.vector_opt("exp_probs_b.bias", &[experts])?,
            gate,
            up,
            down: expert_matrix(l, "ffn_down_exps", [width, hidden, experts])?,
            scales: if spec.scaled { scales } else { [None; 3] },
            shared: shared.transpose()?,
            shared_gate: l.linear_opt("ffn_gate_inp_shexp", &[hidden, 1])?,
        })
    }

    /// Adds the steps; gives what is added to the residual stream.
    pub fn build(&self, b: &mut Builder, x: Tensor) -> Tensor {
        let MoeSpec { hidden, used, .. } = self.spec;
        let rows = x.shape[1];
        let logits = b.linear("router", x, &self.router);
        let ids = b.fresh("chosen", TensorType::I32, [used, rows, 1, 1]);
        let weights = b.fresh("weights", TensorType::F32, [used, rows, 1, 1]);
        let MoeSpec { gating: gate, shares, scale, .. } = self.spec;
        let bias = self.choice_bias;
        b.step("choose", topk_moe::Call { logits, bias, ids, weights, groups: None, gate, shares, scale, shift: 0.0 });
        let column = x.reshape([hidden, 1, rows, 1]);
        let gate = self.product(b, "gate", column, &self.gate, ids, 0);
        let up = self.product(b, "up", column, &self.up, ids, 1);
        let wide = b.gated("gated", self.spec.activation, gate, up);
        let down = self.product(b, "down", wide, &self.down, ids, 2);
        let weighed = b.multiply("weighed", down, weights.reshape([1, used, rows, 1]));
        let sum = if used == 1 { weighed } else { b.sum("sum", weighed.permute([1, 0, 2, 3])) };
        let sum = sum.reshape([hidden, rows, 1, 1]);
        let Some(shared) = &self.shared else { return sum };
        let mut all = shared.build(b, x);
        if let Some(gate) = &self.shared_gate {
            let gate = b.linear("shared.gate", x, gate);
            let gate = b.function("shared.sigmoid", gate, Function::Sigmoid);
            all = b.multiply("shared.gated", all, gate);
        }
        b.add("shared", all, sum)
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
