//! Only wanted tokens go through the end of the last layer. Rows are taken just before the output; what was computed row by
//! row before that is computed for those rows alone, back to the last step that mixes tokens.

use std::collections::HashMap;

use kiln_kernels::mul_mat::{Epilogue, MAX_GEMV_N, Product};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::{Call, binary, gated_add, get_rows, glu, mul_mat_vec, norm, rms_norm, scale, unary};

use super::Target;
use crate::plan::def_use::DefUse;
use crate::plan::{Plan, SlotKind, Step};

pub(super) fn run(plan: &mut Plan, target: &Target) {
    // Whether it is worth it depends on how many rows there are, and what is fused then may depend on it.
    if target.batch_invariant {
        return;
    }
    while let Some((writer, taker)) = find(plan) {
        if !hoist(plan, writer, taker) {
            return;
        }
    }
}

/// A step whose result is read by nothing but a step that takes a few of its many rows, and that step.
fn find(plan: &Plan) -> Option<(usize, usize)> {
    let steps: Vec<Option<Step>> = plan.steps.iter().cloned().map(Some).collect();
    let def_use = DefUse::of(plan.slots.len(), &steps);
    let candidate = |(taker, step): (usize, &Step)| {
        let Call::GetRows(call) = &step.call else { return None };
        // Taking rows earlier may take a step more: worth it where it saves products of large N.
        let saves = call.src.shape[1] > MAX_GEMV_N && 2 * call.ids.shape[0] <= call.src.shape[1];
        let result = *plan.kind(&call.src) == SlotKind::Scratch && def_use.reader(call.src.slot) == Some(taker);
        let writer = def_use.writer(call.src.slot).filter(|_| saves && result)?;
        let whole = plan.steps[writer].call.operation().writes() == [call.src];
        let new = whole && by_rows(&plan.steps[writer].call, call.dst, &mut |t| *t).is_some();
        new.then_some((writer, taker))
    };
    plan.steps.iter().enumerate().rev().find_map(candidate)
}

/// Takes the rows of the operands instead of those of the result.
fn hoist(plan: &mut Plan, writer: usize, taker: usize) -> bool {
    let Call::GetRows(taken) = plan.steps[taker].call else { return false };
    let Step { label, call: whole } = plan.steps[writer].clone();
    // Rows that are taken already are taken once: earlier if need be.
    let mut known: HashMap<(u32, usize), (usize, Tensor)> = HashMap::new();
    for (at, step) in plan.steps.iter().enumerate() {
        if let Call::GetRows(call) = &step.call
            && call.ids == taken.ids
        {
            known.insert((call.src.slot.0, call.src.offset), (at, call.dst));
        }
    }
    let mut new: HashMap<(u32, usize), Tensor> = HashMap::new();
    let (mut steps, mut moved) = (Vec::new(), Vec::new());
    let mut rows = |t: &Tensor| {
        let key = (t.slot.0, t.offset);
        match known.get(&key) {
            Some((at, dst)) if *at < taker => return *dst,
            Some((at, dst)) if !new.contains_key(&key) => {
                moved.push(*at);
                new.insert(key, *dst);
                return *dst;
            }
            _ => {}
        }
        *new.entry(key).or_insert_with(|| {
            let name = format!("{}.rows", plan.slots[t.slot.0 as usize].name);
            let shape = [t.shape[0], taken.ids.shape[0], 1, 1];
            let dst = plan.add(&name, SlotKind::Scratch, t.ty, shape);
            steps.push(Step { label: name, call: get_rows::Call { src: *t, ids: taken.ids, dst }.into() });
            dst
        })
    };
    let Some(call) = by_rows(&whole, taken.dst, &mut rows) else { return false };
    steps.extend(moved.iter().map(|at| plan.steps[*at].clone()));
    steps.push(Step { label, call });
    moved.sort_unstable_by(|a, b| b.cmp(a));
    moved.iter().for_each(|at| drop(plan.steps.remove(*at)));
    plan.steps.splice(taker..=taker, steps);
    plan.steps.remove(writer);
    true
}

/// The call for some of the rows: `rows` gives those of an operand, `to` is where they go. `None` where rows depend on each
/// other.
fn by_rows(call: &Call, to: Tensor, rows: &mut dyn FnMut(&Tensor) -> Tensor) -> Option<Call> {
    let tokens = call.operation().writes().first()?.shape[1];
    let flat = |t: &Tensor| t.shape[1..] == [tokens, 1, 1] && t.is_dense();
    match call {
        Call::MulMatVec(call) => {
            let Epilogue { scale, bias, residual } = call.epilogue;
            let bare = mul_mat_vec::Call { epilogue: Epilogue::default(), ..call.clone() }
                == mul_mat_vec::Call::plain(call.product);
            let fits = bare && flat(&call.product.b) && residual.iter().all(flat);
            let product = Product { b: fits.then(|| rows(&call.product.b))?, d: to, ..call.product };
            let epilogue = Epilogue { scale, bias, residual: residual.map(|t| rows(&t)) };
            Some(mul_mat_vec::Call { epilogue, ..mul_mat_vec::Call::plain(product) }.into())
        }
        Call::RmsNorm(c) if flat(&c.x) => Some(rms_norm::Call { x: rows(&c.x), y: to, ..*c }.into()),
        Call::Norm(c) if flat(&c.x) => Some(norm::Call { x: rows(&c.x), y: to, ..*c }.into()),
        Call::Unary(c) if flat(&c.x) => Some(unary::Call { x: rows(&c.x), dst: to, ..*c }.into()),
        Call::Scale(c) if flat(&c.x) => Some(scale::Call { x: rows(&c.x), dst: to, ..*c }.into()),
        Call::Glu(c) if flat(&c.gate) && flat(&c.up) => {
            Some(glu::Call { gate: rows(&c.gate), up: rows(&c.up), dst: to, ..*c }.into())
        }
        Call::GatedAdd(c) if [c.gate, c.x, c.y].iter().all(flat) => {
            Some(gated_add::Call { gate: rows(&c.gate), x: rows(&c.x), y: rows(&c.y), dst: to, ..*c }.into())
        }
        Call::Binary(c) if flat(&c.a) && (flat(&c.b) || c.b.rows() == 1) => {
            let b = if flat(&c.b) { rows(&c.b) } else { c.b };
            Some(binary::Call { a: rows(&c.a), b, dst: to, ..*c }.into())
        }
        _ => None,
    }
}
