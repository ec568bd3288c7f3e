//! `kiln bench`: how fast the device is, and how near the kernels come to that. One file for each thing to measure.

mod cold;
mod curve;
mod device;
mod load;
mod model;
mod ops;
mod plot;
mod sequences;
mod speculative;

use std::process::ExitCode;

/// Flags of `kiln bench`.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:
  kiln bench smollm2 -p 512 -n 128
  kiln bench -m smollm2 -p 128,512 -n 16,64 -r 1
  kiln bench smollm2 --plot speed.svg   # roofline, kernels, texts together
  kiln bench smollm2 --cold             # from empty caches to the first token
  kiln bench smollm2 --sequences 1,4,16
  kiln bench smollm2 --curve mine.json  # for deploy/simulate.py
  kiln bench smollm2 --speculative      # what drafts gain, by task
  kiln bench smollm2 --load 4x2:64+16   # 4 clients, 2 requests each
  kiln bench device
  kiln bench ops mul_mat_vec --device 0",
    args_conflicts_with_subcommands = true,
    subcommand_precedence_over_arg = true,
    arg_required_else_help = true
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: Option<What>,
    #[command(flatten)]
    model: model::ModelArguments,
}

#[derive(clap::Subcommand)]
enum What {
    /// Measure the device: cost of a dispatch, bandwidth, arithmetic and matrix rates
    Device(device::Arguments),
    /// Time the operations: bandwidth and arithmetic of each, against what the device can do
    Ops(ops::Arguments),
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    match &arguments.what {
        Some(What::Device(arguments)) => device::run(arguments),
        Some(What::Ops(arguments)) => ops::run(arguments),
        None => model::run(&arguments.model),
    }
}

/// Seconds as people read them.
pub(super) fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.2} us", s * 1e6),
        s if s < 1.0 => format!("{:.3} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

/// A rate with its unit: `4.62 TB/s`.
fn rate(per_second: f64, unit: &str) -> String {
    match per_second {
        r if r >= 1e12 => format!("{:.2} T{unit}/s", r / 1e12),
        r if r >= 1e9 => format!("{:.1} G{unit}/s", r / 1e9),
        r => format!("{:.1} M{unit}/s", r / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(time(1.86e-6), "1.86 us");
        assert_eq!(time(0.0012), "1.200 ms");
        assert_eq!(rate(4.62e12, "B"), "4.62 TB/s");
        assert_eq!(rate(12.34e9, "FLOP"), "12.3 GFLOP/s");
    }
}
