//! What `norm`, `rms_norm`, `l2_norm` and `group_norm` share: operands, parameter block, launch and the loop around
//! their definitions. Each of them adds its formula, here and in GLSL (`glsl/row_norm.glsl`).

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, Shader};

use crate::case::Tolerance;
use crate::floats::by_rows;
use crate::host::HostMemory;
use crate::operation::{
    Choice, Invalid, Operation, Path, Unsupported, Work, grid, only_scalar, reduce_defines, require, rows_apart,
};
use crate::rows::{cols_bound, float_functions, outer, require_whole_strides};
use crate::tensor::Tensor;

/// How weight and bias lie along the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channels {
    /// Element i of every row uses weight i.
    PerColumn,
    /// The rows of one (i2, i3) in a line are divided evenly among the weights.
    PerBatch,
}

/// The operands of a normalisation of rows.
#[derive(Clone, Copy, Debug)]
pub struct Operands {
    /// The operation's name.
    pub name: &'static str,
    /// Its shader.
    pub file: &'static str,
    /// Input `[cols, ..]`, dense rows.
    pub x: Tensor,
    /// Result with the extents of `x`.
    pub y: Tensor,
    /// Multiplied after the normalisation.
    pub weight: Option<Tensor>,
    /// Added after the weight.
    pub bias: Option<Tensor>,
    /// The formula's small number.
    pub eps: f32,
    /// Which weight an element uses.
    pub channels: Channels,
}

impl Operands {
    /// Elements in a row that share a weight.
    fn channel_len(&self) -> usize {
        let per_batch = self.x.shape[0] * self.x.shape[1];
        match self.weight.or(self.bias) {
            Some(w) if self.channels == Channels::PerBatch => (per_batch / w.len().max(1)).max(1),
            _ => 1,
        }
    }

    /// The weight of element `i` of row (i1, .., ..).
    fn channel(&self, i: usize, i1: usize) -> usize {
        match self.channels {
            Channels::PerColumn => i,
            Channels::PerBatch => (i1 * self.x.shape[0] + i) / self.channel_len(),
        }
    }

    fn check_channels(&self, what: &str, tensor: &Tensor) -> Result<(), Invalid> {
        let Operands { name, x, .. } = self;
        require(tensor.ty == TensorType::F32 && tensor.is_dense(), name, || {
            format!("{what} is {tensor}, want dense F32")
        })?;
        let (n, cols, per_batch) = (tensor.len(), x.shape[0], x.shape[0] * x.shape[1]);
        match self.channels {
            Channels::PerColumn => require(n == cols, name, || format!("{what} is {tensor}, want F32[{cols}]")),
            Channels::PerBatch => require(n > 0 && per_batch % n == 0, name, || {
                format!("{what} is {tensor}, which does not divide the {per_batch} elements of x {x} evenly")
            }),
        }
    }
}

/// A normalisation of rows. Implementing it makes the `Call` an [`Operation`].
pub trait RowNorm: std::fmt::Debug + Send + Sync {
    /// Its operands.
    fn operands(&self) -> Operands;

    /// The definition for one row, without weight and bias.
    fn normalise(&self, row: &mut [f64]);

    /// The same call for some of the rows.
    fn with_rows(&self, x: Tensor, y: Tensor) -> crate::Call;
}

kiln_gpu::params! {
    struct Params {
        x: Address,
        y: Address,
        weight: Address,
        bias: Address,
        shape: [u32; 3],
        x_stride: [u32; 3],
        y_stride: [u32; 3],
        cols: u32,
        rows: u32,
        channel_len: u32,
        eps: f32,
    }
}

impl<N: RowNorm> Operation for N {
    fn name(&self) -> &'static str {
        self.operands().name
    }

    fn reads(&self) -> Vec<Tensor> {
        let Operands { x, weight, bias, .. } = self.operands();
        [Some(x), weight, bias].into_iter().flatten().collect()
    }

    fn writes(&self) -> Vec<Tensor> {
        vec![self.operands().y]
    }

    fn check(&self) -> Result<(), Invalid> {
        let operands = self.operands();
        let Operands { name, x, y, weight, bias, eps, .. } = &operands;
        require(x.shape == y.shape, name, || format!("x is {x} but y is {y}"))?;
        require(!x.is_empty(), name, || format!("x is {x}: there is nothing to normalise"))?;
        require(x.has_dense_rows() && y.has_dense_rows(), name, || "rows of x and y must be dense".into())?;
        require_whole_strides(name, x)?;
        require_whole_strides(name, y)?;
        require(*eps >= 0.0, name, || format!("eps is {eps}, want 0 or more"))?;
        weight.iter().try_for_each(|w| operands.check_channels("weight", w))?;
        bias.iter().try_for_each(|b| operands.check_channels("bias", b))?;
        if let (Some(w), Some(b)) = (weight, bias) {
            require(w.len() == b.len(), name, || format!("weight is {w} but bias is {b}"))?;
        }
        Ok(())
    }

    fn pick(&self, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
        let Operands { name, file, x, y, weight, bias, .. } = self.operands();
        only_scalar(name, want)?;
        let (load_x, _) = float_functions(name, &x)?;
        let (_, store_y) = float_functions(name, &y)?;
        let shader = Shader::new(format!("{name}.{}", x.ty.name().to_lowercase()), file, Params::glsl())
            .define("LOAD_X", load_x)
            .define("STORE_Y", store_y)
            .define("COLS_BOUND", cols_bound(x.shape[0]))
            .define("WEIGHT", u32::from(weight.is_some()))
            .define("BIAS", u32::from(bias.is_some()));
        Ok(Choice::one(Path::Scalar, reduce_defines(shader, x.shape[0], caps), grid(x.rows(), caps)))
    }

    fn params(&self, _: &Choice, _: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
        let operands = self.operands();
        let Operands { x, y, weight, bias, eps, .. } = &operands;
        let narrow = |n: usize| u32::try_from(n).expect("pick refuses tensors past 32 bits");
        Params {
            x: at(x),
            y: at(y),
            weight: weight.as_ref().map_or(Address::default(), at),
            bias: bias.as_ref().map_or(Address::default(), at),
            shape: outer(x.extents()),
            x_stride: outer(x.element_strides()),
            y_stride: outer(y.element_strides()),
            cols: x.extents()[0],
            rows: narrow(x.rows()),
            channel_len: narrow(operands.channel_len()),
            eps: *eps,
        }
        .bytes()
    }

    fn reference(&self, memory: &mut HostMemory) {
        let operands = self.operands();
        let weight = operands.weight.map(|w| memory.read(&w));
        let bias = operands.bias.map(|b| memory.read(&b));
        let mut y = memory.read(&operands.x);
        for (row, [i1, ..]) in y.chunks_exact_mut(operands.x.shape[0]).zip(rows_apart(operands.x.shape)) {
            self.normalise(row);
            for (i, v) in row.iter_mut().enumerate() {
                let channel = operands.channel(i, i1);
                *v = *v * weight.as_ref().map_or(1.0, |w| w[channel]) + bias.as_ref().map_or(0.0, |b| b[channel]);
            }
        }
        memory.write(&operands.y, &y);
    }

    fn cpu(&self, memory: &mut HostMemory) {
        let operands = self.operands();
        let weight = operands.weight.map(|w| memory.read(&w));
        let bias = operands.bias.map(|b| memory.read(&b));
        by_rows(memory, &operands.y, |memory, i, out| {
            memory.float_row(&operands.x, i, out);
            // Long sums want f64, and one row of it costs little.
            let mut row: Vec<f64> = out.iter().map(|x| f64::from(*x)).collect();
            self.normalise(&mut row);
            for (j, (out, v)) in out.iter_mut().zip(row).enumerate() {
                let channel = operands.channel(j, i[0]);
                let v = v * weight.as_ref().map_or(1.0, |w| w[channel]) + bias.as_ref().map_or(0.0, |b| b[channel]);
                *out = v as f32;
            }
        });
    }

    fn work(&self) -> Work {
        let Operands { x, y, .. } = self.operands();
        let bytes = (x.rows() * (x.row_bytes() + y.row_bytes())) as f64;
        Work { bytes, flops: 4.0 * x.len() as f64 }
    }

    fn parts(&self) -> Vec<crate::Call> {
        let Operands { x, y, channels, .. } = self.operands();
        // Weights that lie over several rows need those rows together.
        let together = if channels == Channels::PerBatch { x.shape[1] } else { 1 };
        rows_apart([x.shape[0], x.shape[1] / together, x.shape[2], x.shape[3]])
            .map(|[i1, i2, i3]| {
                let rows = |t: Tensor| t.narrow(1, i1, together).narrow(2, i2, 1).narrow(3, i3, 1);
                self.with_rows(rows(x), rows(y))
            })
            .collect()
    }
}

/// How results of this type are judged: f32 sums of a hundred thousand terms, added by hundreds of threads, are right to
/// 1e-6 (NMSE 1e-12); f16 results are rounded to 11 bits, bf16 results to 8.
pub fn tolerance(result: TensorType) -> Tolerance {
    Tolerance::Nmse(match result {
        TensorType::F16 => 1e-6,
        TensorType::BF16 => 1e-4,
        _ => 1e-10,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;
    use crate::{group_norm, norm};

    fn tensor(slot: u32, ty: TensorType, shape: [usize; 4]) -> Tensor {
        Tensor::dense(Slot(slot), ty, shape)
    }

    #[test]
    fn the_parameter_block_fits_every_device() {
        let x = tensor(0, TensorType::F32, [8, 2, 1, 1]);
        let call = norm::Call { x, weight: None, bias: None, y: x, eps: 1e-5 };
        let choice = call.pick(&Caps::least(), None).unwrap();
        assert!(call.params(&choice, 0, &|_| Address(0)).len() <= 128);
    }

    #[test]
    fn operands_that_do_not_fit_are_named() {
        let x = tensor(0, TensorType::F32, [8, 2, 1, 1]);
        let good = norm::Call { x, weight: None, bias: None, y: x, eps: 1e-5 };
        assert_eq!(good.check(), Ok(()));
        let reason = |call: norm::Call| call.check().unwrap_err().reason;
        assert!(reason(norm::Call { y: x.narrow(0, 0, 7), ..good }).contains("F32[7, 2]"));
        assert!(reason(norm::Call { weight: Some(x), ..good }).contains("want F32[8]"));
        assert!(reason(norm::Call { bias: Some(tensor(1, TensorType::F16, [8, 1, 1, 1])), ..good }).contains("bias"));
        assert!(reason(norm::Call { eps: -1.0, ..good }).contains("eps"));
        assert!(
            reason(norm::Call { x: x.permute([1, 0, 2, 3]), y: x.permute([1, 0, 2, 3]), ..good }).contains("dense")
        );
        let uneven = tensor(1, TensorType::F32, [3, 1, 1, 1]);
        let groups = group_norm::Call { x, weight: Some(uneven), bias: None, y: x, eps: 1e-5 };
        assert!(groups.check().unwrap_err().reason.contains("16 elements"));
    }

    #[test]
    fn unsupported_types_and_paths_are_answers() {
        let x = tensor(0, TensorType::I32, [8, 2, 1, 1]);
        let call = norm::Call { x, weight: None, bias: None, y: x, eps: 1e-5 };
        assert!(call.pick(&Caps::least(), None).is_err());
        let x = tensor(0, TensorType::F32, [8, 2, 1, 1]);
        assert!(norm::Call { x, y: x, ..call }.pick(&Caps::least(), Some(Path::Coopmat)).is_err());
    }

    #[test]
    fn group_weights_lie_along_the_batch() {
        let x = tensor(0, TensorType::F32, [4, 3, 2, 1]);
        let with = |n: usize| Operands {
            weight: Some(tensor(1, TensorType::F32, [n, 1, 1, 1])),
            ..group_norm::Call { x, weight: None, bias: None, y: x, eps: 1e-5 }.operands()
        };
        // One weight per element of the batch, one per two elements, one per group and a half.
        assert_eq!(with(12).channel(1, 2), 9);
        assert_eq!(with(6).channel(1, 2), 4);
        assert_eq!((with(2).channel(1, 1), with(2).channel(2, 1)), (0, 1));
    }
}
