//! `head_mix` as the last part of a recurrence: inside its kernel where a workgroup has whole heads, else a launch of
//! `head_mix` after it.

use kiln_gpu::{Caps, Shader};

use super::{Bonus, Call, NAME};
use crate::operation::{Choice, Invalid, Operation, Path, Touches, Unsupported, require};
use crate::recurrence::Sequences;
use crate::tensor::Tensor;
use crate::unary::Function;

/// What becomes of the result of a recurrence, in its place. The fields are those of [`Call`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// Multiplied after the norm of each head, `[size * heads]`.
    pub weight: Tensor,
    /// Added after that, as `weight`.
    pub bias: Tensor,
    /// Added to the variance.
    pub eps: f32,
    /// The gate, as the result, and what is applied to it.
    pub gate: Option<(Tensor, Option<Function>)>,
}

impl Mix {
    /// The same as a call by itself, of the heads `y`.
    pub fn of(&self, y: Tensor, bonus: Option<Bonus>) -> Call {
        let Mix { weight, bias, eps, gate } = *self;
        Call { x: y, weight, bias, eps, bonus, gate, y }
    }

    /// Of other tokens.
    pub(crate) fn view(self, view: impl Fn(Tensor) -> Tensor) -> Mix {
        Mix { gate: self.gate.map(|(gate, function)| (view(gate), function)), ..self }
    }

    /// What it reads beside the recurrence.
    pub(crate) fn reads(&self) -> impl Iterator<Item = Tensor> + use<> {
        [self.weight, self.bias].into_iter().chain(self.gate.map(|(gate, _)| gate))
    }
}

impl Call {
    /// The macros of `glsl/head_mix.glsl`.
    pub(crate) fn defines(&self, shader: Shader) -> Shader {
        let function = self.gate.and_then(|(_, function)| function);
        shader
            .define("BONUS", u32::from(self.bonus.is_some()))
            .define("GATE", u32::from(self.gate.is_some()))
            .define("FUNCTION", function.map_or("", Function::glsl))
    }

    /// Whether it fits a recurrence over these sequences.
    pub(crate) fn check_within(&self, sequences: Sequences) -> Result<(), Invalid> {
        // Tokens of no sequence must stay as they are, and a launch of its own knows no sequences.
        require(matches!(sequences, Sequences::Equal(_)), NAME, || {
            "sequences of different lengths have no mix inside their recurrence, want a call of its own".into()
        })?;
        self.check()
    }

    /// The launches of a recurrence with those of the mix, unless the recurrence does it all.
    pub(crate) fn after(&self, mut choice: Choice, caps: &Caps) -> Result<Choice, Unsupported> {
        if !is_within(&choice) {
            choice.launches.extend(self.pick(caps, Some(Path::Scalar))?.launches);
        }
        Ok(choice)
    }
}

/// Whether the kernel of a recurrence mixes.
pub(crate) fn is_within(choice: &Choice) -> bool {
    choice.launches[0].shader.defines.iter().any(|(name, value)| name == "MIX" && value == "1")
}

/// Whether a launch of a recurrence is that of its mix.
pub(crate) fn is_mix(choice: &Choice, launch: usize) -> bool {
    choice.launches[launch].shader.name == NAME
}

/// What a launch of a recurrence with a mix touches: all there is, as ever, or what the mix does.
pub(crate) fn touches(recurrence: &dyn Operation, mix: Option<Call>, choice: &Choice, launch: usize) -> Touches {
    match mix.filter(|_| is_mix(choice, launch)) {
        Some(mix) => mix.touches(choice, launch),
        None => {
            let writes = recurrence.writes().into_iter().chain(recurrence.scratch()).collect();
            Touches { reads: recurrence.reads(), writes }
        }
    }
}
