//! Feed-forward layers: gated (down(f(gate x) * up x)) or plain (down(f(up x))).

use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;
use kiln_kernels::xielu::{self, Curve};

use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear, Norm};

/// What happens between the matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// f(gate x) * up x, with a matrix for each.
    Gated(Gate),
    /// The same; the file holds both matrices as one, the gate first.
    GatedFused(Gate),
    /// f(up x).
    Plain(Function),
    /// The same with a function that has numbers of its own.
    Xielu(Curve),
}

/// Which matrices of a feed-forward layer have factors that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaled {
    /// None; files may hold such factors all the same.
    None,
    /// All.
    All,
    /// The last one.
    Down,
}

impl From<bool> for Scaled {
    fn from(all: bool) -> Scaled {
        if all { Scaled::All } else { Scaled::None }
    }
}

/// How a feed-forward layer is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlpSpec {
    /// Width of the tokens.
    pub hidden: usize,
    /// Width between the matrices.
    pub width: usize,
    /// What happens there.
    pub activation: Activation,
    /// Which factors `ffn_*.scale` of the file count.
    pub scaled: Scaled,
    /// Whether biases of the file count.
    pub bias: bool,
    /// What is behind `ffn_gate` in names: `_shexp` for experts that all tokens share.
    pub suffix: &'static str,
    /// What stands before the last matrix is normed (`ffn_sub_norm`), with this added.
    pub inner_norm: Option<f32>,
    /// Number of standard deviations above the mean from which on elements of the gate are kept; the others become 0.
    pub sparsity: Option<f32>,
}

impl MlpSpec {
    /// One without factors, biases and anything unusual.
    pub fn plain(hidden: usize, width: usize, activation: Activation) -> MlpSpec {
        MlpSpec {
            hidden,
            width,
            activation,
            scaled: Scaled::None,
            bias: false,
            suffix: "",
            inner_norm: None,
            sparsity: None,
        }
    }
}

/// A feed-forward layer.
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Up,
    inner_norm: Option<Norm>,
    down: Matrix,
}

/// factor * (weight x + bias): here the factor is the bias's too.
#[derive(Clone, Debug)]
struct Matrix {
    linear: Linear,
    factor: f32,
}

impl Matrix {
    fn rows(&self, start: usize, len: usize) -> Matrix {
        Matrix { linear: self.linear.rows(start, len), factor: self.factor }
    }

    fn build(&self, b: &mut Builder, name: &str, x: Tensor) -> Tensor {
        let y = b.linear(name, x, &self.linear);
        if self.factor == 1.0 { y } else { b.scale(&format!("{name}.scale"), y, self.factor) }
    }
}

#[derive(Clone, Debug)]
enum Up {
    Gated {
        kind: Gate,
        gate: Matrix,
        up: Matrix,
        sparsity: Option<f32>,
    },
    /// With what the results are divided by, where the file has it.
    Plain {
        function: Function,
        up: Matrix,
        scales: Option<Tensor>,
    },
    Xielu {
        curve: Curve,
        up: Matrix,
    },
}

impl Mlp {
    /// Reads it.
    pub fn load(l: &mut Loader<'_>, spec: &MlpSpec) -> Result<Mlp, Error> {
        let MlpSpec { hidden, width, activation, .. } = *spec;
        let mut linear = |part: &str, shape: &[usize]| -> Result<Matrix, Error> {
            let name = format!("ffn_{part}{}", spec.suffix);
            let weight = l.matrix(&name, shape)?.weight;
            let bias = l.vector_opt(&format!("{name}.bias"), &shape[1..])?.filter(|_| spec.bias);
            let scale = l.scale(&name)?;
            let counts = spec.scaled == Scaled::All || (spec.scaled == Scaled::Down && part == "down");
            let factor = if counts { scale } else { 1.0 };
            Ok(Matrix { linear: Linear { weight, bias, scale: 1.0 }, factor })
        };
        let down = linear("down", &[width, hidden])?;
        let up = match activation {
            Activation::Gated(kind) => {
                let (gate, up) = (linear("gate", &[hidden, width])?, linear("up", &[hidden, width])?);
                Up::Gated { kind, gate, up, sparsity: spec.sparsity }
            }
            Activation::GatedFused(kind) => {
                let both = linear("up", &[hidden, 2 * width])?;
                let (gate, up) = (both.rows(0, width), both.rows(width, width));
                Up::Gated { kind, gate, up, sparsity: spec.sparsity }
            }
            Activation::Xielu(curve) => Up::Xielu { curve, up: linear("up", &[hidden, width])? },
            Activation::Plain(function) => {
                let up = linear("up", &[hidden, width])?;
                Up::Plain { function, up, scales: l.vector_opt("ffn.act.scales", &[width])? }
            }
        };
        let inner_norm = match spec.inner_norm {
            Some(eps) => Some(Norm::Rms { weight: Some(l.vector("ffn_sub_norm.weight", &[width])?), eps }),
            None => None,
        };
        Ok(Mlp { up, inner_norm, down })
    }

    /// Adds the steps; gives what is added to the residual stream.
    pub fn build(&self, b: &mut Builder, x: Tensor) -> Tensor {
        let wide = match &self.up {
            Up::Gated { kind, gate, up, sparsity } => {
                let gate = gate.build(b, "gate", x);
                let up = up.build(b, "up", x);
                let gate = sparsity.map_or(gate, |deviations| sparse(b, gate, deviations));
                b.gated("gated", *kind, gate, up)
            }
            Up::Xielu { curve, up } => {
                let up = up.build(b, "up", x);
                let dst = b.like("function", up);
                b.step("function", xielu::Call { curve: *curve, x: up, dst });
                dst
            }
            Up::Plain { function, up, scales } => {
                let up = up.build(b, "up", x);
                let wide = b.function("function", up, *function);
                scales.map_or(wide, |scales| b.divide("act_scales", wide, scales))
            }
        };
        let wide = self.inner_norm.map_or(wide, |norm| b.norm("inner_norm", wide, &norm));
        self.down.build(b, "down", wide)
    }
}

/// max(0, x - mean - deviations * standard deviation) of each column `x [width, rows]`.
fn sparse(b: &mut Builder, x: Tensor, deviations: f32) -> Tensor {
    let width = x.shape[0] as f32;
    let sum = b.sum("gate.sum", x);
    let mean = b.scale("gate.mean", sum, 1.0 / width);
    let away = b.subtract("gate.away", x, mean);
    let squares = b.function("gate.squares", away, Function::Sqr);
    let variance = b.sum("gate.variance", squares);
    let variance = b.scale("gate.variance.scale", variance, deviations * deviations / (width - 1.0).max(1.0));
    let least = b.function("gate.least", variance, Function::Sqrt);
    let above = b.subtract("gate.above", away, least);
    b.function("gate.sparse", above, Function::Relu)
}
