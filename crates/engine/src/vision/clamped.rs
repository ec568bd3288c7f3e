//! A matrix whose input and output may be kept within limits, as Gemma 4 has them.

use kiln_kernels::tensor::Tensor;
use kiln_kernels::unary::Function;

use super::sheet::Sheet;
use crate::Error;
use crate::model::Loader;
use crate::plan::Linear;

/// Least and most.
type Limits = [Option<f32>; 2];

/// A matrix with its bias and limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clamped {
    linear: Linear,
    input: Limits,
    output: Limits,
}

impl Clamped {
    /// Reads the matrix `NAME` with what the file has beside it.
    pub(crate) fn load(l: &mut Loader<'_>, name: &str, shape: [usize; 2]) -> Result<Clamped, Error> {
        let linear = l.linear(name, &shape)?;
        let mut limit = |kind: &str| {
            let name = format!("{name}.{kind}");
            if l.has(&name) { l.number(&name).map(Some) } else { Ok(None) }
        };
        let input = [limit("input_min")?, limit("input_max")?];
        let output = [limit("output_min")?, limit("output_max")?];
        Ok(Clamped { linear, input, output })
    }

    /// Adds the product.
    pub(crate) fn build(&self, s: &mut Sheet, name: &str, x: Tensor) -> Tensor {
        let x = within(s, &format!("{name}.input"), x, self.input);
        let bare = Linear { bias: None, ..self.linear };
        // The limits are those of the product; the bias comes behind them.
        match (self.output, self.linear.bias) {
            ([None, None], _) => s.b.linear(name, x, &self.linear),
            (limits, bias) => {
                let y = s.b.linear(name, x, &bare);
                let y = within(s, &format!("{name}.output"), y, limits);
                bias.map_or(y, |bias| s.b.add(&format!("{name}.bias"), y, bias))
            }
        }
    }
}

/// x kept within limits: max(x, a) = relu(x - a) + a and min(x, b) = b - relu(b - x).
fn within(s: &mut Sheet, name: &str, x: Tensor, [least, most]: Limits) -> Tensor {
    let mut x = x;
    if let Some(least) = least {
        let above = s.b.affine(&format!("{name}.above"), x, 1.0, -least);
        let above = s.b.function(&format!("{name}.raised"), above, Function::Relu);
        x = s.b.affine(&format!("{name}.least"), above, 1.0, least);
    }
    if let Some(most) = most {
        let below = s.b.affine(&format!("{name}.below"), x, -1.0, most);
        let below = s.b.function(&format!("{name}.lowered"), below, Function::Relu);
        x = s.b.affine(&format!("{name}.most"), below, -1.0, most);
    }
    x
}
