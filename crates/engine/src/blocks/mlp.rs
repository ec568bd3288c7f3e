//! Feed-forward layers: gated (down(f(gate x) * up x)) or plain (down(f(up x))).

use kiln_kernels::glu::Gate;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use crate::Error;
use crate::model::Loader;
use crate::plan::{Builder, Linear};

/// What happens between the matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// f(gate x) * up x, with a matrix for each.
    Gated(Gate),
    /// The same; the file holds both matrices as one, the gate first.
    GatedFused(Gate),
    /// f(up x).
    Plain(Function),
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
}

/// A feed-forward layer.
#[derive(Clone, Debug)]
pub struct Mlp {
    up: Up,
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
    },
    /// With what the results are divided by, where the file has it.
    Plain {
        function: Function,
        up: Matrix,
        scales: Option<Tensor>,
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
                Up::Gated { kind, gate: linear("gate", &[hidden, width])?, up: linear("up", &[hidden, width])? }
            }
            Activation::GatedFused(kind) => {
                let both = linear("up", &[hidden, 2 * width])?;
                Up::Gated { kind, gate: both.rows(0, width), up: both.rows(width, width) }
            }
            Activation::Plain(function) => {
                let up = linear("up", &[hidden, width])?;
                Up::Plain { function, up, scales: l.vector_opt("ffn.act.scales", &[width])? }
            }
        };
        Ok(Mlp { up, down })
    }

    /// Adds the steps; gives what is added to the residual stream.
    pub fn build(&self, b: &mut Builder, x: Tensor) -> Tensor {
        let wide = match &self.up {
            Up::Gated { kind, gate, up } => {
                let gate = gate.build(b, "gate", x);
                let up = up.build(b, "up", x);
                b.gated("gated", *kind, gate, up)
            }
            Up::Plain { function, up, scales } => {
                let up = up.build(b, "up", x);
                let wide = b.function("function", up, *function);
                scales.map_or(wide, |scales| b.divide("act_scales", wide, scales))
            }
        };
        self.down.build(b, "down", wide)
    }
}
