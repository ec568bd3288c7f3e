//! From the plain plan of an architecture to the plan a device runs: named passes, each takes a plan and gives one. The
//! meaning stays the same: after every pass the reference executor gives the same logits. `kiln plan --after PASS` prints
//! each stage.
//!
//! What may be fused is not decided here: operations say it themselves ([`kiln_kernels::fuse`]), their `check` says whether
//! operands fit, their `pick` whether the device can run the result.

mod attention;
mod batch_invariant;
pub mod cut;
mod edit;
mod fuse;
mod memory;
mod packed_b;
mod prune;
mod rounding;
mod schedule;
mod scratch;
mod select_matmul;
mod sink_rows;
pub mod streams;
mod target;
mod weights;

pub(crate) use memory::place_added;
pub use packed_b::PackB;
pub use rounding::Rounds;
pub use target::Target;
pub use weights::{DequantCache, Packing, Weights};

use crate::Error;
use crate::plan::Plan;

/// One pass.
pub struct Pass {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    run: fn(&mut Plan, &Target),
}

/// Every pass, in order.
pub const PASSES: &[Pass] = &[
    Pass { name: "prune", summary: "steps whose results nobody reads go", run: prune::run },
    Pass { name: "sink-rows", summary: "only wanted tokens go through the end of the last layer", run: sink_rows::run },
    Pass { name: "select-matmul", summary: "products of many columns go to mul_mm", run: select_matmul::run },
    Pass { name: "epilogue", summary: "bias, function, factor and residual join the step before", run: fuse::epilogue },
    Pass { name: "gate", summary: "two products and the gate between them become one", run: fuse::gate },
    Pass { name: "fuse-products", summary: "products of the same columns become one", run: fuse::fused_products },
    Pass { name: "prologue", summary: "norms and gates join the step after", run: fuse::prologue },
    Pass { name: "router", summary: "the choice of experts takes in the router's product", run: fuse::router },
    Pass { name: "cache", summary: "rope and the writing of caches become one", run: attention::cache_write },
    Pass { name: "splits", summary: "attention of few tokens is split over keys", run: attention::splits },
    Pass { name: "kv-append", summary: "attention of single tokens writes its caches", run: attention::kv_append },
    Pass {
        name: "batch-invariant",
        summary: "products of rows that must not depend on others are cut",
        run: batch_invariant::run,
    },
    Pass { name: "weights", summary: "weights are read packed, or decoded once for all", run: weights::run },
    Pass {
        name: "rounding",
        summary: "results leave their step as products of integers want them",
        run: rounding::run,
    },
    Pass { name: "packed-b", summary: "results leave their step as matrix units take them", run: packed_b::run },
    Pass { name: "schedule", summary: "steps that do not wait for each other stand side by side", run: schedule::run },
    Pass { name: "scratch", summary: "steps get the memory they need between their dispatches", run: scratch::run },
    Pass { name: "memory", summary: "results that are needed at different times share memory", run: memory::run },
];

/// Passes that look at a plan as a whole: they come before it is cut into parts for several devices.
const WHOLE: &[&str] = &["prune", "sink-rows"];

/// The plan for a device.
pub fn lower(plan: Plan, target: &Target) -> Result<Plan, Error> {
    lower_until(plan, target, None)
}

/// The plan as it is after the pass of this name, or after all of them. The plan is checked after the last one; an unknown
/// name is an error that lists the known ones.
pub fn lower_until(mut plan: Plan, target: &Target, last: Option<&str>) -> Result<Plan, Error> {
    let end = match last {
        None => PASSES.len(),
        Some(name) => {
            let known = || PASSES.iter().map(|pass| pass.name).collect::<Vec<_>>().join(", ");
            let place = PASSES.iter().position(|pass| pass.name == name);
            1 + place.ok_or_else(|| Error::UnknownPass { name: name.to_owned(), known: known() })?
        }
    };
    for pass in &PASSES[..end] {
        if !target.in_parts || WHOLE.contains(&pass.name) {
            (pass.run)(&mut plan, target);
        }
    }
    if target.in_parts {
        plan.check()?;
        return Ok(plan);
    }
    // A plan can be run and checked after any pass: its steps have their memory.
    if end < PASSES.iter().position(|pass| pass.name == "scratch").map_or(0, |scratch| scratch + 1) {
        scratch::run(&mut plan, target);
    }
    plan.check()?;
    Ok(plan)
}
