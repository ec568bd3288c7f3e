//! The functions of `unary` and their names.

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// x sigmoid(x)
    Silu,
    /// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    Gelu,
    /// x sigmoid(1.702 x)
    GeluQuick,
    /// 0.5 x (1 + erf(x / sqrt(2)))
    GeluErf,
    /// max(x, 0)
    Relu,
    /// max(x, 0)^2
    Relu2,
    /// 1 / (1 + e^-x)
    Sigmoid,
    /// tanh(x)
    Tanh,
    /// e^x
    Exp,
    /// log(1 + e^x)
    Softplus,
    /// x where positive, e^x - 1 elsewhere
    Elu,
    /// clamp(x/6 + 1/2, 0, 1)
    HardSigmoid,
    /// x hard_sigmoid(x)
    HardSwish,
    /// -x
    Neg,
    /// |x|
    Abs,
    /// x^2
    Sqr,
    /// Square root.
    Sqrt,
    /// Natural logarithm.
    Log,
    /// -1, 0 or 1
    Sign,
    /// 1 where positive, else 0
    Step,
    /// e^(-e^x), the decay of RWKV-6
    ExpNegExp,
    /// e^(-sigmoid(x) / sqrt(e)), the decay of RWKV-7
    ExpNegSigmoid,
}

impl Function {
    /// Every function.
    pub const ALL: [Function; 22] = [
        Function::Silu,
        Function::Gelu,
        Function::GeluQuick,
        Function::GeluErf,
        Function::Relu,
        Function::Relu2,
        Function::Sigmoid,
        Function::Tanh,
        Function::Exp,
        Function::Softplus,
        Function::Elu,
        Function::HardSigmoid,
        Function::HardSwish,
        Function::Neg,
        Function::Abs,
        Function::Sqr,
        Function::Sqrt,
        Function::Log,
        Function::Sign,
        Function::Step,
        Function::ExpNegExp,
        Function::ExpNegSigmoid,
    ];

    /// The name in variant ids.
    pub fn name(self) -> &'static str {
        match self {
            Function::Silu => "silu",
            Function::Gelu => "gelu",
            Function::GeluQuick => "gelu_quick",
            Function::GeluErf => "gelu_erf",
            Function::Relu => "relu",
            Function::Relu2 => "relu2",
            Function::Sigmoid => "sigmoid",
            Function::Tanh => "tanh",
            Function::Exp => "exp",
            Function::Softplus => "softplus",
            Function::Elu => "elu",
            Function::HardSigmoid => "hard_sigmoid",
            Function::HardSwish => "hard_swish",
            Function::Neg => "neg",
            Function::Abs => "abs",
            Function::Sqr => "sqr",
            Function::Sqrt => "sqrt",
            Function::Log => "log",
            Function::Sign => "sign",
            Function::Step => "step",
            Function::ExpNegExp => "exp_neg_exp",
            Function::ExpNegSigmoid => "exp_neg_sigmoid",
        }
    }

    /// The name of the function in GLSL: built in, or in `glsl/activations.glsl`.
    pub(crate) fn glsl(self) -> &'static str {
        match self {
            Function::Tanh => "tanh_of",
            Function::Neg => "negative",
            Function::Sqr => "square",
            Function::Step => "above_zero",
            other => other.name(),
        }
    }

    /// The definition.
    pub(crate) fn of(self, x: f64) -> f64 {
        use super::reference::{erfc, sigmoid};
        match self {
            Function::Silu => x * sigmoid(x),
            // 1 + tanh(u) is 2 sigmoid(2u), which keeps its digits where u is negative.
            Function::Gelu => x * sigmoid((8.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)),
            Function::GeluQuick => x * sigmoid(1.702 * x),
            Function::GeluErf => 0.5 * x * erfc(-x / std::f64::consts::SQRT_2),
            Function::Relu => x.max(0.0),
            Function::Relu2 => x.max(0.0) * x.max(0.0),
            Function::Sigmoid => sigmoid(x),
            Function::Tanh => x.tanh(),
            Function::Exp => x.exp(),
            Function::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
            Function::Elu => {
                if x >= 0.0 {
                    x
                } else {
                    x.exp_m1()
                }
            }
            Function::HardSigmoid => (x / 6.0 + 0.5).clamp(0.0, 1.0),
            Function::HardSwish => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
            Function::Neg => -x,
            Function::Abs => x.abs(),
            Function::Sqr => x * x,
            Function::Sqrt => x.sqrt(),
            Function::Log => x.ln(),
            Function::Sign => {
                if x == 0.0 {
                    0.0
                } else {
                    x.signum()
                }
            }
            Function::Step => {
                if x > 0.0 {
                    1.0
                } else {
                    0.0
                }
            }
            Function::ExpNegExp => (-x.exp()).exp(),
            // The factor of models is rounded to six digits.
            Function::ExpNegSigmoid => (-0.606_531 * sigmoid(x)).exp(),
        }
    }
}
