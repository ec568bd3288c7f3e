//! Cases of `glu`.

use kiln_gguf::TensorType::{self, BF16, F16, F32};

use super::{Call, Gate};
use crate::case::{Case, Level};
use crate::elementwise::tolerance;

const GATES: [Gate; 9] = [
    Gate::Swiglu,
    Gate::Geglu,
    Gate::GegluErf,
    Gate::GegluQuick,
    Gate::Reglu,
    Gate::SwigluOai { alpha: 1.702, limit: 7.0 },
    Gate::SwigluLimited { limit: 3.0 },
    Gate::SwigluBounded { limit: 3.0 },
    Gate::Situ { beta: 4.0, linear: 2.5 },
];

/// Two tensors.
fn apart(kind: Gate, x_ty: TensorType, ty: TensorType, shape: [usize; 4]) -> Case {
    Case::new(format!("glu {} {x_ty} to {ty} {shape:?}", kind.name()), move |data| {
        let gate = data.input_with(x_ty, shape, |random, _| random.uniform(-10.0, 10.0));
        let up = data.input_with(x_ty, shape, |random, _| random.uniform(-10.0, 10.0));
        let dst = data.output(ty, shape);
        (Call { kind, gate, up, dst }.into(), tolerance(ty))
    })
}

/// The halves of one tensor, gate first or up first.
fn halves(kind: Gate, x_ty: TensorType, ty: TensorType, [cols, rows]: [usize; 2], swapped: bool) -> Case {
    let name = format!("glu {} {x_ty} to {ty} halves of [{cols}, {rows}] swapped={swapped}", kind.name());
    Case::new(name, move |data| {
        let both = data.input_with(x_ty, [2 * cols, rows, 1, 1], |random, _| random.uniform(-10.0, 10.0));
        let (first, second) = (both.narrow(0, 0, cols), both.narrow(0, cols, cols));
        let (gate, up) = if swapped { (second, first) } else { (first, second) };
        let dst = data.output(ty, [cols, rows, 1, 1]);
        (Call { kind, gate, up, dst }.into(), tolerance(ty))
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    if level == Level::Bench {
        return [1, 1024].map(|rows| halves(Gate::Swiglu, F32, F32, [14336, rows], false)).into();
    }
    let mut cases = Vec::new();
    for kind in GATES {
        cases.push(apart(kind, F32, F32, [64, 3, 2, 1]));
        cases.push(apart(kind, F16, F16, [13, 5, 1, 1]));
        cases.push(halves(kind, F32, F32, [32, 3], false));
        cases.push(halves(kind, F32, F32, [31, 3], true));
    }
    for (x_ty, ty) in [(F32, F16), (F16, F32), (BF16, F32), (BF16, BF16)] {
        cases.push(apart(Gate::Swiglu, x_ty, ty, [20, 3, 1, 1]));
        cases.push(halves(Gate::Swiglu, x_ty, ty, [10, 3], false));
    }
    cases.push(apart(Gate::Swiglu, F32, F32, [6, 0, 1, 1]));
    cases.push(Case::new("glu swiglu_oai beyond its limit", |data| {
        let gate = data.input_with(F32, [256, 1, 1, 1], |random, _| random.uniform(-300.0, 300.0));
        let up = data.input_with(F32, [256, 1, 1, 1], |random, _| random.uniform(-20.0, 20.0));
        let dst = data.output(F32, [256, 1, 1, 1]);
        (Call { kind: Gate::SwigluOai { alpha: 1.5, limit: 3.25 }, gate, up, dst }.into(), tolerance(F32))
    }));
    cases.push(Case::new("glu situ without a bound of up", |data| {
        let gate = data.input_with(F32, [64, 3, 1, 1], |random, _| random.uniform(-300.0, 300.0));
        let up = data.input_with(F32, [64, 3, 1, 1], |random, _| random.uniform(-20.0, 20.0));
        let dst = data.output(F32, [64, 3, 1, 1]);
        (Call { kind: Gate::Situ { beta: 0.5, linear: 0.0 }, gate, up, dst }.into(), tolerance(F32))
    }));
    cases.push(Case::new("glu swiglu of gates up to 1e4", |data| {
        let gate = data.input_with(F32, [64, 3, 1, 1], |random, _| random.uniform(-1e4, 1e4));
        let up = data.input(F32, [64, 3, 1, 1]);
        let dst = data.output(F32, [64, 3, 1, 1]);
        (Call { kind: Gate::Swiglu, gate, up, dst }.into(), tolerance(F32))
    }));
    cases.push(Case::new("glu geglu in place of the gate, strided rows", |data| {
        let gate = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        let up = data.input(F32, [48, 3, 2, 1]);
        (Call { kind: Gate::Geglu, gate, up, dst: gate }.into(), tolerance(F32))
    }));
    cases.push(Case::new("glu reglu in place of up, permuted gate", |data| {
        let gate = data.input(F16, [3, 10, 2, 1]).permute([1, 0, 2, 3]);
        let up = data.input(F32, [10, 3, 2, 1]);
        (Call { kind: Gate::Reglu, gate, up, dst: up }.into(), tolerance(F32))
    }));
    if level == Level::Full {
        cases.push(halves(Gate::Swiglu, F32, F32, [14336, 501], false));
        cases.push(apart(Gate::Geglu, F16, F16, [14337, 501, 1, 1]));
    }
    cases
}
