//! Times the fast code of the CPU on the bench cases whose names contain every word given:
//!
//!     cargo run --release -p kiln-kernels --example cpu_speed -- mul_mat_vec Q4_0 k=4096 n=1
//!
//! One line each: microseconds of the best run, and the products of a matrix per nanosecond. `RAYON_NUM_THREADS` says how many threads.

use std::time::{Duration, Instant};

use kiln_kernels::KERNELS;
use kiln_kernels::case::Level;

/// A case is run again until this has passed.
const LONG_ENOUGH: Duration = Duration::from_millis(300);

#[allow(clippy::print_stdout, reason = "what it times is data")]
fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    for case in KERNELS.iter().flat_map(|kernel| (kernel.cases)(Level::Bench)) {
        if !words.iter().all(|word| case.name.split([' ', ',']).any(|part| part == word)) {
            continue;
        }
        let (call, _, mut memory) = case.build();
        let operation = call.operation();
        let (began, mut best) = (Instant::now(), Duration::MAX);
        while began.elapsed() < LONG_ENOUGH {
            let start = Instant::now();
            operation.cpu(&mut memory);
            best = best.min(start.elapsed());
        }
        let rate = operation.work().flops / 2.0 / best.as_nanos() as f64;
        println!("{:60} {:10.1} us {rate:8.1} per ns", case.name, best.as_secs_f64() * 1e6);
    }
}
