//! Cases: one call with its data and the tolerance it is judged by. Data is made when the case runs, from a seed
//! that is the case's name, so every run and every machine sees the same bits.

use kiln_gguf::TensorType;

use crate::Call;
use crate::host::HostMemory;
use crate::tensor::{Slot, Tensor};

/// Which set of cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Milliseconds each on a software GPU.
    Small,
    /// Everything `Small` has, and sizes that want a real GPU.
    Full,
    /// Sizes worth timing; not judged.
    Bench,
}

/// How the result is judged against the reference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tolerance {
    /// Bit for bit.
    Exact,
    /// Normalised mean squared error: sum (got - want)^2 / sum want^2.
    Nmse(f64),
    /// The same for every row by itself, so that rows of small numbers count beside those of large ones. Rows are those that
    /// [`Operation::judged`](crate::operation::Operation::judged) names.
    NmsePerRow(f64),
    /// The set of values of each row is the same, in any order (top_k).
    SameSetPerRow,
}

type Build = Box<dyn Fn(&mut Data) -> (Call, Tolerance) + Send + Sync>;

/// A named case. `build` makes the data and the call.
pub struct Case {
    /// Operation, variant and sizes.
    pub name: String,
    build: Build,
}

impl Case {
    /// A case; `build` declares its tensors on [`Data`] and returns the call and how to judge it.
    pub fn new(
        name: impl Into<String>,
        build: impl Fn(&mut Data) -> (Call, Tolerance) + Send + Sync + 'static,
    ) -> Case {
        Case { name: name.into(), build: Box::new(build) }
    }

    /// Makes the data and the call.
    pub fn build(&self) -> (Call, Tolerance, HostMemory) {
        let seed =
            self.name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let mut data = Data { memory: HostMemory::default(), random: Random(seed | 1), blank: false };
        let (call, tolerance) = (self.build)(&mut data);
        (call, tolerance, data.memory)
    }

    /// The call alone: without values, which take most of the time of large cases.
    pub fn call(&self) -> Call {
        let mut data = Data { memory: HostMemory::default(), random: Random::new(1), blank: true };
        (self.build)(&mut data).0
    }
}

/// A small deterministic generator (xorshift64*).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed | 1)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in [low, high).
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A whole number in 0 .. n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
}

/// Where a case declares its tensors.
pub struct Data {
    /// The slots made so far.
    pub memory: HostMemory,
    /// Random numbers for anything else.
    pub random: Random,
    blank: bool,
}

impl Data {
    /// Whether values stay zero because only the call is wanted.
    pub fn is_blank(&self) -> bool {
        self.blank
    }

    /// A new slot with these bytes.
    pub fn slot(&mut self, bytes: Vec<u8>) -> Slot {
        self.memory.slots.push(bytes);
        Slot(u32::try_from(self.memory.slots.len() - 1).expect("cases have few slots"))
    }

    /// A dense input, uniform in [-1, 1).
    pub fn input(&mut self, ty: TensorType, shape: [usize; 4]) -> Tensor {
        self.input_with(ty, shape, |random, _| random.uniform(-1.0, 1.0))
    }

    /// A dense input; `value` gets the generator and the flat index.
    pub fn input_with(
        &mut self,
        ty: TensorType,
        shape: [usize; 4],
        mut value: impl FnMut(&mut Random, usize) -> f64,
    ) -> Tensor {
        let tensor = self.output(ty, shape);
        if self.blank {
            return tensor;
        }
        let values: Vec<f64> = (0..tensor.len()).map(|i| value(&mut self.random, i)).collect();
        self.memory.write(&tensor, &values);
        tensor
    }

    /// Memory for a dense result, filled with a pattern that is NaN in every float type.
    pub fn output(&mut self, ty: TensorType, shape: [usize; 4]) -> Tensor {
        let tensor = Tensor::dense(Slot(0), ty, shape);
        // Zeros cost no time before somebody looks at them.
        let slot = self.slot(vec![if self.blank { 0 } else { POISON }; tensor.span().1]);
        Tensor { slot, ..tensor }
    }

    /// A strided input: a dense tensor of `outer` extents narrowed to `shape`, so that rows lie apart.
    pub fn strided_input(&mut self, ty: TensorType, shape: [usize; 4], outer: [usize; 4]) -> Tensor {
        let whole = self.input(ty, outer);
        (0..4).fold(whole, |t, d| t.narrow(d, 0, shape[d]))
    }

    /// Memory for a strided result.
    pub fn strided_output(&mut self, ty: TensorType, shape: [usize; 4], outer: [usize; 4]) -> Tensor {
        let whole = self.output(ty, outer);
        (0..4).fold(whole, |t, d| t.narrow(d, 0, shape[d]))
    }
}

/// Fills unwritten memory: 0xFFFF and 0xFFFFFFFF are NaN in f16, bf16 and f32.
pub const POISON: u8 = 0xFF;
