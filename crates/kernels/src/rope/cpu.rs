//! `rope` at the speed of the CPU: the angles of a token are found once, in f64, for all of its heads.

use std::sync::Arc;

use fearless_simd::dispatch;
use rayon::prelude::*;

use super::reference::angle;
use super::{Call, RopeStyle};
use crate::floats::by_rows;
use crate::host::HostMemory;
use crate::simd::level;

/// Tokens whose angles one task finds.
const TASK_TOKENS: usize = 16;

/// Sines and cosines of every token and pair, with everything they are multiplied by.
#[derive(Debug)]
pub(crate) struct Angles {
    of: Inputs,
    pairs: usize,
    sines: Vec<f32>,
    cosines: Vec<f32>,
}

/// All that angles depend on.
#[derive(Debug, PartialEq)]
struct Inputs {
    positions: Vec<f64>,
    freqs: Vec<f64>,
    tokens: usize,
    style: RopeStyle,
    sections: [usize; 4],
    magnitude: f32,
    backward: bool,
}

impl Angles {
    /// Those of a call. All layers of a model have the same as a rule: those of the last call are kept.
    pub(crate) fn of(call: &Call, memory: &mut HostMemory) -> Arc<Angles> {
        let (positions, freqs) = (memory.read(&call.positions), memory.read(&call.freqs));
        let Call { style, sections, magnitude, backward, .. } = *call;
        let of = Inputs { positions, freqs, tokens: call.x.shape[2], style, sections, magnitude, backward };
        match &memory.angles.0 {
            Some(kept) if kept.of == of => Arc::clone(kept),
            _ => {
                let found = Arc::new(Angles::new(call, of));
                memory.angles.0 = Some(Arc::clone(&found));
                found
            }
        }
    }

    fn new(call: &Call, of: Inputs) -> Angles {
        let (tokens, pairs) = (of.tokens, call.pairs());
        let Inputs { positions, freqs, .. } = &of;
        let (mut sines, mut cosines) = (vec![0.0; tokens * pairs], vec![0.0; tokens * pairs]);
        let find = |(token, (sines, cosines)): (usize, (&mut [f32], &mut [f32]))| {
            for (p, (to_sine, to_cosine)) in sines.iter_mut().zip(cosines).enumerate() {
                let position = positions[call.style.position_row(p, call.sections) * tokens + token];
                let (sin, cos) = angle(position as i64, freqs[2 * p] as i32, freqs[2 * p + 1] as i32).sin_cos();
                let sin = if call.backward { -sin } else { sin };
                [*to_sine, *to_cosine] = [sin, cos].map(|x| (x * f64::from(call.magnitude)) as f32);
            }
        };
        if tokens <= TASK_TOKENS {
            sines.chunks_mut(pairs).zip(cosines.chunks_mut(pairs)).enumerate().for_each(find);
        } else {
            let both = sines.par_chunks_mut(pairs).zip(cosines.par_chunks_mut(pairs));
            both.with_min_len(TASK_TOKENS).enumerate().for_each(find);
        }
        Angles { of, pairs, sines, cosines }
    }

    /// Turns a head of a token.
    pub(crate) fn turn(&self, call: &Call, token: usize, head: &mut [f32]) {
        let sines = &self.sines[token * self.pairs..][..self.pairs];
        let cosines = &self.cosines[token * self.pairs..][..self.pairs];
        let turned = |a: f32, b: f32, sin: f32, cos: f32| (a * cos - b * sin, a * sin + b * cos);
        dispatch!(level(), _ => {
            let head = &mut head[call.offset..][..2 * self.pairs];
            if call.style == RopeStyle::Normal {
                for (pair, (sin, cos)) in head.as_chunks_mut::<2>().0.iter_mut().zip(sines.iter().zip(cosines)) {
                    (pair[0], pair[1]) = turned(pair[0], pair[1], *sin, *cos);
                }
            } else {
                let (first, second) = head.split_at_mut(self.pairs);
                for ((a, b), (sin, cos)) in first.iter_mut().zip(second).zip(sines.iter().zip(cosines)) {
                    (*a, *b) = turned(*a, *b, *sin, *cos);
                }
            }
        });
    }
}

/// Turns the pairs of every head, and copies what is in no pair.
pub(super) fn compute(call: &Call, memory: &mut HostMemory) {
    let angles = Angles::of(call, memory);
    by_rows(memory, &call.y, |memory, i, head| {
        memory.float_row(&call.x, i, head);
        angles.turn(call, i[1], head);
    });
}
