//! Cases of `hadamard`.

use kiln_gguf::TensorType::F32;

use super::{Call, Direction};
use crate::case::{Case, Data, Level, Tolerance};
use crate::tensor::Tensor;

/// Sums of up to 4096 floats of both signs, in another order: each row is right to 1e-6.
const TOLERANCE: Tolerance = Tolerance::NmsePerRow(1e-11);

fn signs(data: &mut Data, cols: usize) -> Tensor {
    data.input_with(F32, [cols, 1, 1, 1], |random, _| if random.below(2) == 0 { 1.0 } else { -1.0 })
}

fn case(shape: [usize; 4], block: usize, direction: Direction, signed: bool) -> Case {
    Case::new(format!("hadamard {shape:?} block={block} {direction:?} signs={signed}"), move |data| {
        let x = data.input(F32, shape);
        let signs = signed.then(|| signs(data, shape[0]));
        let y = data.output(F32, shape);
        (Call { x, signs, y, block, direction }.into(), TOLERANCE)
    })
}

/// The cases of a level.
pub fn cases(level: Level) -> Vec<Case> {
    use Direction::{Back, Turn};
    if level == Level::Bench {
        return [1, 512].map(|rows| case([4096, rows, 1, 1], 1024, Turn, true)).into();
    }
    let mut cases = Vec::new();
    for (cols, block) in [(1, 1), (2, 2), (12, 4), (64, 32), (96, 32), (1024, 1024), (3072, 1024), (4096, 4096)] {
        cases.push(case([cols, 3, 1, 1], block, Turn, true));
        cases.push(case([cols, 2, 1, 1], block, Back, true));
    }
    cases.push(case([256, 5, 3, 2], 128, Turn, false));
    cases.push(case([256, 5, 3, 2], 64, Back, false));
    cases.push(Case::new("hadamard strided rows, in place", |data| {
        let x = data.strided_input(F32, [48, 3, 2, 1], [64, 4, 2, 1]);
        let signs = Some(signs(data, 48));
        (Call { x, signs, y: x, block: 16, direction: Turn }.into(), TOLERANCE)
    }));
    // A single large element is in every sum: what is lost of the others shows.
    cases.push(Case::new("hadamard one large element", |data| {
        let x = data.input_with(F32, [512, 2, 1, 1], |random, i| if i == 7 { 1e4 } else { random.uniform(-1.0, 1.0) });
        let y = data.output(F32, x.shape);
        (Call { x, signs: None, y, block: 256, direction: Turn }.into(), TOLERANCE)
    }));
    if level == Level::Full {
        cases.push(case([14336, 1000, 1, 1], 1024, Turn, true));
    }
    cases
}
