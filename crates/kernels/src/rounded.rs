//! Columns that leave their producer ready to be multiplied by integers: beside a result of floats, codes of 16 bits with a factor
//! for each group of 32, so that no workgroup of the product that reads it rounds the column for itself. Where a norm stands between
//! the two, codes are of elements times the norm's weights, and the sums of the groups' squares make its factor, which the product
//! multiplies behind its sums. `glsl/rounded.glsl` is the other half.
//!
//! The references write such columns as they are defined here, and read the floats.

use kiln_gguf::TensorType;

use crate::host::HostMemory;
use crate::operation::{Invalid, require};
use crate::tensor::Tensor;

/// Elements with a factor of their own.
pub const GROUP: usize = 32;
/// What the largest magnitude of a group becomes.
const LEVELS: f64 = 32512.0;
/// What codes are stored with too much: their upper bytes are rounded then.
const BIAS: f64 = 128.0;
/// Elements 0 to 3 of four in the order in which their codes lie: two words of two codes each.
const ORDER: [usize; 4] = [0, 2, 1, 3];

/// A rounded column in its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounded {
    /// I16: codes plus 128; of four, the first and third, then the second and fourth.
    pub codes: Tensor,
    /// F32: what the codes of a group are multiplied by.
    pub scales: Tensor,
    /// F32: sums of the squares of the floats of each group, which no weight was multiplied with.
    pub squares: Tensor,
}

/// Bytes of a rounded column of `len` elements.
pub fn bytes(len: usize) -> usize {
    2 * len + 2 * 4 * (len / GROUP)
}

impl Rounded {
    /// The column of `len` elements, whole groups, that lies in this memory.
    pub fn new(memory: &Tensor, len: usize) -> Rounded {
        let part = |ty, n, first: usize| Tensor {
            offset: memory.offset + first,
            ..Tensor::dense(memory.slot, ty, [n, 1, 1, 1])
        };
        let groups = len / GROUP;
        Rounded {
            codes: part(TensorType::I16, len, 0),
            scales: part(TensorType::F32, groups, 2 * len),
            squares: part(TensorType::F32, groups, 2 * len + 4 * groups),
        }
    }

    /// All of it.
    pub fn all(&self) -> [Tensor; 3] {
        [self.codes, self.scales, self.squares]
    }

    /// Whether memory has room for a column of `len` elements and lies where kernels can read it.
    pub fn check(memory: &Tensor, len: usize, operation: &'static str) -> Result<(), Invalid> {
        require(len.is_multiple_of(GROUP), operation, || format!("{len} elements are no whole groups of {GROUP}"))?;
        let want = bytes(len);
        let fits = memory.ty == TensorType::I8 && memory.is_dense() && memory.len() >= want;
        require(fits && memory.offset.is_multiple_of(16), operation, || {
            format!("a rounded column of {len} is {memory}, want I8[{want}], aligned to 16")
        })
    }

    /// Writes the column of these floats.
    pub(crate) fn write(&self, floats: &[f64], weight: Option<&[f64]>, memory: &mut HostMemory) {
        let weighed: Vec<f64> = floats.iter().enumerate().map(|(i, x)| x * weight.map_or(1.0, |w| w[i])).collect();
        let most = |group: &[f64]| group.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let tops: Vec<f64> = weighed.chunks_exact(GROUP).map(most).collect();
        let code = |i: usize| {
            let top = tops[i / GROUP];
            BIAS + if top > 0.0 { (weighed[i] * LEVELS / top).round_ties_even() } else { 0.0 }
        };
        let codes: Vec<f64> = (0..weighed.len()).map(|i| code(i / 4 * 4 + ORDER[i % 4])).collect();
        let squares = |group: &[f64]| group.iter().map(|x| x * x).sum();
        memory.write(&self.codes, &codes);
        memory.write(&self.scales, &tops.iter().map(|top| top / LEVELS).collect::<Vec<_>>());
        memory.write(&self.squares, &floats.chunks_exact(GROUP).map(squares).collect::<Vec<_>>());
    }
}

/// A result that is left rounded besides: by whom and for whom.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounding {
    /// I8, dense, at least [`bytes`]: where the rounded column goes.
    pub to: Tensor,
    /// F32, dense: what the elements are multiplied by before they are rounded.
    pub weight: Option<Tensor>,
}

impl Rounding {
    /// Whether `d`, one dense column, can be left so.
    pub(crate) fn check(&self, d: &Tensor, operation: &'static str) -> Result<(), Invalid> {
        let len = d.len();
        require(d.is_dense(), operation, || format!("d is {d}: one dense column is left rounded"))?;
        if let Some(weight) = self.weight {
            let fits = weight.ty == TensorType::F32 && weight.is_dense() && weight.len() == len;
            let fits = fits && weight.offset.is_multiple_of(16);
            require(fits, operation, || {
                format!("a rounded column's weight is {weight}, want F32[{len}], aligned to 16")
            })?;
        }
        Rounded::check(&self.to, len, operation)
    }

    /// What is written of `d`.
    pub(crate) fn writes(&self, d: &Tensor) -> [Tensor; 3] {
        Rounded::new(&self.to, d.len()).all()
    }

    /// Writes it, when `d` is there.
    pub(crate) fn reference(&self, d: &Tensor, memory: &mut HostMemory) {
        let weight = self.weight.map(|weight| memory.read(&weight));
        Rounded::new(&self.to, d.len()).write(&memory.read(d), weight.as_deref(), memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Slot;

    /// A column that is read back is what was written, to 16 bits.
    #[test]
    fn codes_times_factors_are_the_weighed_elements() {
        let len = 96;
        let floats: Vec<f64> = (0..len).map(|i| (i as f64 * 0.7).sin() * if i < 32 { 1e-3 } else { 5.0 }).collect();
        let weight: Vec<f64> = (0..len).map(|i| 0.5 + i as f64 / 64.0).collect();
        let mut memory = HostMemory { slots: vec![vec![0xff; bytes(len) + 16]], ..HostMemory::default() };
        let whole = Tensor::dense(Slot(0), TensorType::I8, [bytes(len), 1, 1, 1]).at(16);
        let rounded = Rounded::new(&whole, len);
        assert_eq!(rounded.squares.span().0 + rounded.squares.span().1, whole.span().0 + whole.span().1);
        rounded.write(&floats, Some(&weight), &mut memory);
        let [codes, scales, squares] = rounded.all().map(|t| memory.read(&t));
        for i in 0..len {
            let at = i / 4 * 4 + ORDER.iter().position(|&o| o == i % 4).unwrap();
            let value = (codes[at] - BIAS) * scales[i / GROUP];
            assert!((value - floats[i] * weight[i]).abs() <= scales[i / GROUP], "element {i}: {value}");
        }
        let sum: f64 = floats[32..64].iter().map(|x| x * x).sum();
        assert!((squares[1] - sum).abs() < 1e-5 * sum);
        assert_eq!(&memory.slots[0][..16], [0xff; 16]);
    }

    #[test]
    fn memory_that_does_not_fit_is_named() {
        let memory = Tensor::dense(Slot(0), TensorType::I8, [bytes(64), 1, 1, 1]);
        assert_eq!(Rounded::check(&memory, 64, "op"), Ok(()));
        let reason = |memory: Tensor, len| Rounded::check(&memory, len, "op").unwrap_err().reason;
        assert!(reason(memory, 48).contains("48 elements are no whole groups of 32"));
        assert!(reason(memory, 96).contains("want I8[216]"));
        assert!(reason(memory.at(8), 64).contains("aligned to 16"));
    }
}
