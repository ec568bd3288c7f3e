//! The small layers behind a pooling: they read one vector of a text, so the host computes them.

use kiln_gguf::quant;

use crate::Error;
use crate::model::Model;

/// A matrix with its bias, as floats.
struct Dense {
    /// Rows of `width` elements.
    weight: Vec<f32>,
    width: usize,
    bias: Option<Vec<f32>>,
}

impl Dense {
    /// Reads `NAME.weight` of columns of this width, and `NAME.bias`, where the file has them.
    fn read(model: &Model, name: &str, width: usize) -> Result<Option<Dense>, Error> {
        let Some((weight, shape)) = values(model, &format!("{name}.weight"))? else { return Ok(None) };
        // Matrices of one row may be stored as vectors.
        if shape[0] != width || shape[2..] != [1, 1] {
            let (got, want) = (shape.to_vec(), vec![width, shape[1]]);
            return Err(Error::TensorShape { name: format!("{name}.weight"), got, want });
        }
        let bias = match values(model, &format!("{name}.bias"))? {
            Some((bias, shape)) if bias.len() != weight.len() / width => {
                let (got, want) = (shape.to_vec(), vec![weight.len() / width]);
                return Err(Error::TensorShape { name: format!("{name}.bias"), got, want });
            }
            bias => bias.map(|(bias, _)| bias),
        };
        Ok(Some(Dense { weight, width, bias }))
    }

    fn rows(&self) -> usize {
        self.weight.len() / self.width
    }

    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let row = |(i, row): (usize, &[f32])| {
            let product: f64 = row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
            product as f32 + self.bias.as_ref().map_or(0.0, |bias| bias[i])
        };
        self.weight.chunks_exact(self.width).enumerate().map(row).collect()
    }
}

/// Values of a tensor, and its extents.
type Values = (Vec<f32>, [usize; 4]);

/// Those of a tensor, where the file has it.
fn values(model: &Model, name: &str) -> Result<Option<Values>, Error> {
    let Some(info) = model.gguf.find(name) else { return Ok(None) };
    let mut values = vec![0.0; info.shape.iter().product()];
    let decoded = quant::dequantise(info.ty, model.gguf.data(info), &mut values);
    if decoded.is_err() || values.iter().any(|v| !v.is_finite()) {
        return Err(Error::TensorValues { name: name.to_owned(), ty: info.ty.to_string() });
    }
    Ok(Some((values, info.shape)))
}

/// The layers of a model.
pub struct Layers {
    /// Vectors of texts go through these, one after the other.
    dense: Vec<Dense>,
    /// Scores: a layer with an activation, its norm, and what makes scores.
    hidden: Option<Dense>,
    norm: Option<(Vec<f32>, f32)>,
    scores: Option<Dense>,
    /// ModernBERT's activation is GELU, that of all others a hyperbolic tangent.
    gelu: bool,
    /// Whether scores are shares of each other.
    shares: bool,
}

impl Layers {
    /// Whether the file has layers that make scores.
    pub fn can_rank(model: &Model) -> bool {
        ["cls.weight", "cls.output.weight"].iter().any(|name| model.gguf.find(name).is_some())
    }

    /// Reads those of a file; they may be missing.
    pub fn read(model: &Model) -> Result<Layers, Error> {
        let hidden_width = model.config.hidden;
        let architecture = model.config.architecture.name;
        let mut dense = Vec::new();
        let mut width = hidden_width;
        for name in ["dense_2", "dense_3"] {
            if let Some(layer) = Dense::read(model, name, width)? {
                width = layer.rows();
                dense.push(layer);
            }
        }
        let hidden = Dense::read(model, "cls", hidden_width)?;
        let read = hidden.as_ref().map_or(hidden_width, Dense::rows);
        let norm = values(model, "cls.norm.weight")?;
        if let Some((weight, shape)) = norm.as_ref().filter(|(weight, _)| weight.len() != read) {
            let (got, want) = (shape.to_vec(), vec![read]);
            debug_assert!(!weight.is_empty());
            return Err(Error::TensorShape { name: "cls.norm.weight".into(), got, want });
        }
        let eps = crate::model::Keys::new(&model.gguf, architecture);
        let eps = eps.float("attention.layer_norm_epsilon", 1e-5, [0.0, 1.0])?;
        Ok(Layers {
            dense,
            scores: Dense::read(model, "cls.output", read)?,
            hidden,
            norm: norm.map(|(weight, _)| (weight, eps)),
            gelu: architecture == "modern-bert",
            shares: matches!(architecture, "qwen3" | "qwen3vl"),
        })
    }

    /// What a vector of a text becomes.
    pub fn vector(&self, vector: Vec<f32>) -> Vec<f32> {
        self.dense.iter().fold(vector, |x, layer| layer.apply(&x))
    }

    /// The scores that are made of a vector. The first one says how well a text answers.
    pub fn scores(&self, vector: Vec<f32>) -> Vec<f32> {
        let mut x = vector;
        if let Some(hidden) = &self.hidden {
            x = hidden.apply(&x);
            x.iter_mut().for_each(|v| *v = if self.gelu { gelu(*v) } else { v.tanh() });
        }
        if let Some((weight, eps)) = &self.norm {
            normed(&mut x, weight, *eps);
        }
        if let Some(scores) = &self.scores {
            x = scores.apply(&x);
        }
        if self.shares {
            let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            x.iter_mut().for_each(|v| *v = (*v - top).exp());
            let sum: f32 = x.iter().sum();
            x.iter_mut().for_each(|v| *v /= sum);
        }
        x
    }
}

/// The tanh form, as models were trained with it.
fn gelu(x: f32) -> f32 {
    let inner = 0.797_884_6 * x * (1.0 + 0.044_715 * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

/// Mean 0, variance 1, times the weight.
fn normed(x: &mut [f32], weight: &[f32], eps: f32) {
    let count = x.len() as f64;
    let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / count;
    let variance = x.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / count;
    let factor = 1.0 / (variance + f64::from(eps)).sqrt();
    x.iter_mut().zip(weight).for_each(|(v, w)| *v = ((f64::from(*v) - mean) * factor) as f32 * w);
}
