//! What can be said of a plan before it runs: what each kernel moves and computes, what the driver's compiler tells of it, and
//! what the model takes of memory. For `kiln plan` on devices without hardware, and for `--estimates` on all others.

use std::collections::HashMap;

use kiln_engine::executor::{Memory, batch_on};
use kiln_engine::lower::Target;
use kiln_engine::model::Model;
use kiln_engine::plan::Plan;
use kiln_engine::run::{Fit, Place, fit_in};
use kiln_gpu::{Adapter, Told};
use kiln_kernels::operation::Work;
use serde_json::json;

use crate::model::ModelFlags;
use crate::output::size;

/// What the user says of a device that cannot be asked.
#[derive(Clone, Copy)]
pub(super) struct Assumed {
    /// Bytes of memory.
    pub memory: Option<u64>,
    /// Bytes that it moves in a second.
    pub bandwidth: Option<u64>,
}

/// All steps with the same kernels.
struct Row {
    kernels: String,
    steps: usize,
    work: Work,
    /// The first step with them.
    label: String,
    /// What the driver tells of each kernel.
    told: Vec<Told>,
}

/// The estimates of a plan.
pub(super) struct Estimates {
    rows: Vec<Row>,
    fit: Option<Fit>,
    bandwidth: Option<u64>,
}

impl Estimates {
    /// Compiles the kernels of a plan for a device, and adds up what they move.
    pub(super) fn new(
        model: &Model,
        plan: &Plan,
        adapter: &Adapter,
        flags: &ModelFlags,
        Assumed { memory, bandwidth }: Assumed,
    ) -> anyhow::Result<Estimates> {
        let caps = &adapter.caps;
        let device = flags.device.choice().open_to_compile()?;
        let mut rows: Vec<Row> = Vec::new();
        let mut places: HashMap<Vec<kiln_gpu::Shader>, usize> = HashMap::new();
        for step in &plan.steps {
            let choice = step.call.operation().pick(caps, None)?;
            let shaders: Vec<_> = choice.launches.into_iter().map(|launch| launch.shader).collect();
            let work = step.call.operation().work();
            if let Some(&at) = places.get(&shaders) {
                rows[at].steps += 1;
                rows[at].work.bytes += work.bytes;
                rows[at].work.flops += work.flops;
                continue;
            }
            let told = shaders.iter().map(|shader| Ok(Told::of(&device.pipeline(shader)?.statistics)));
            let told = told.collect::<Result<Vec<_>, kiln_gpu::Error>>()?;
            let kernels = shaders.iter().map(|shader| shader.name.as_str()).collect::<Vec<_>>().join(" + ");
            places.insert(shaders, rows.len());
            rows.push(Row { kernels, steps: 1, work, label: step.label.clone(), told });
        }
        rows.sort_by(|a, b| b.work.bytes.total_cmp(&a.work.bytes));
        let bytes = memory.unwrap_or(adapter.memory_bytes);
        let known = (bytes > 0).then(|| {
            let free = if memory.is_some() { bytes } else { adapter.memory_free.unwrap_or(bytes) };
            let memory = Memory { free, total: bytes, place: "on the device" };
            Place::thought(Target::gpu(caps), batch_on(bytes, caps.is_cpu), Some(memory))
        });
        let fit = known.map(|place| fit_in(model, &place, &flags.wish(1))).transpose()?;
        Ok(Estimates { rows, fit, bandwidth })
    }

    fn total(&self) -> Work {
        self.rows.iter().fold(Work::default(), |sum, row| Work {
            bytes: sum.bytes + row.work.bytes,
            flops: sum.flops + row.work.flops,
        })
    }

    /// Milliseconds that moving the bytes takes at least.
    fn least_ms(&self) -> Option<f64> {
        self.bandwidth.map(|bandwidth| 1e3 * self.total().bytes / bandwidth as f64)
    }

    /// For people.
    pub(super) fn lines(&self) -> Vec<String> {
        let Work { bytes, flops } = self.total();
        let share = |part: f64, whole: f64| 100.0 * part / whole.max(1.0);
        let mut lines = vec![format!(
            "{:40} {:>5} {:>12} {:>7} {:>7} {:>5} {:>7} {:>7}",
            "kernels", "steps", "bytes", "of all", "flops", "regs", "spilled", "at once"
        )];
        for row in &self.rows {
            let worst = |of: fn(&Told) -> Option<f64>, pick: fn(f64, f64) -> f64| {
                let value = row.told.iter().filter_map(of).reduce(pick);
                value.map_or("-".to_owned(), |n| n.to_string())
            };
            lines.push(format!(
                "{:40} {:>5} {:>12} {:>6.1}% {:>6.1}% {:>5} {:>7} {:>7}",
                row.kernels,
                row.steps,
                size(row.work.bytes as u64),
                share(row.work.bytes, bytes),
                share(row.work.flops, flops),
                worst(|t| t.registers, f64::max),
                worst(|t| t.spilled, f64::max),
                worst(|t| t.subgroups, f64::min),
            ));
        }
        if let Some(row) = self.rows.first() {
            let time = self.least_ms().map_or(String::new(), |ms| format!(", at least {ms:.2} ms"));
            lines.push(format!(
                "{} and {:.2} GFLOP in all{time}; bound by {} ({}): {:.1} % of the bytes",
                size(bytes as u64),
                flops / 1e9,
                row.kernels,
                row.label,
                share(row.work.bytes, bytes)
            ));
        }
        match &self.fit {
            Some(fit) => lines.extend(super::fit::lines(fit)),
            None => lines.push("the device has no memory; --memory 16GiB counts as if it had".to_owned()),
        }
        lines
    }

    /// For programs.
    pub(super) fn as_value(&self) -> serde_json::Value {
        let told = |t: &Told| {
            json!({
                "registers": t.registers, "scalar_registers": t.scalar_registers, "spilled": t.spilled,
                "scratch_bytes": t.scratch, "shared_bytes": t.shared, "code_bytes": t.code, "subgroups_at_once": t.subgroups,
                "latency": t.latency, "inverse_throughput": t.busy,
            })
        };
        let row = |row: &Row| {
            json!({
                "kernels": row.kernels, "steps": row.steps, "first_step": row.label, "bytes": row.work.bytes,
                "flops": row.work.flops, "told": row.told.iter().map(told).collect::<Vec<_>>(),
            })
        };
        let Work { bytes, flops } = self.total();
        json!({
            "bytes": bytes,
            "flops": flops,
            "least_ms": self.least_ms(),
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "memory": self.fit.as_ref().map(|fit| super::fit::as_value(fit, "assumed")),
        })
    }
}
