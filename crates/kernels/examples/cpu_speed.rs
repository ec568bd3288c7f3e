//! Times the fast code of the CPU on the bench cases whose names contain every word given:
//!
//!     cargo run --release -p kiln-kernels --example cpu_speed -- mul_mat_vec Q4_0 k=4096 n=1
//!
//! One line each: microseconds of the best run, and the products of a matrix per nanosecond. `RAYON_NUM_THREADS` says how many threads.
//!
//! With `token` and tensor formats it times the matrix products of one token of a small model instead, whose weights lie in memory
//! and in no cache, as those of a real one do:
//!
//!     RAYON_NUM_THREADS=1 cargo run --release -p kiln-kernels --example cpu_speed -- token Q4_0 Q8_0
//!
//! With `times`, a tensor format, a number of columns and a number of times it multiplies a matrix of 1,024 x 64 so often and tells nothing:
//! for emulators that count instructions. What two runs of one and three times differ in is what two products take (`scripts/test-arm count`).

use std::time::{Duration, Instant};

use kiln_gguf::{TensorType, quant};
use kiln_kernels::KERNELS;
use kiln_kernels::case::Level;
use kiln_kernels::glu::Gate;
use kiln_kernels::host::HostMemory;
use kiln_kernels::mul_mat::Product;
use kiln_kernels::mul_mat_vec::{Call, FusedProduct, Gated};
use kiln_kernels::operation::Operation;
use kiln_kernels::tensor::{Slot, Tensor};

/// A case is run again until this has passed.
const LONG_ENOUGH: Duration = Duration::from_millis(300);

#[allow(clippy::print_stdout, reason = "what it times is data")]
fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "token") {
        return words[1..].iter().for_each(|name| token(name));
    }
    if words.first().is_some_and(|word| word == "times") {
        return times(&words[1..]);
    }
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

/// See above: format, columns, times.
fn times(words: &[String]) {
    let number = |i: usize| {
        words.get(i).and_then(|word| word.parse::<usize>().ok()).expect("a number of columns and one of times")
    };
    let ty = TensorType::ALL.iter().copied().find(|ty| Some(ty.name()) == words.first().map(String::as_str));
    let mut memory = HostMemory::default();
    let a = add(&mut memory, ty.expect("a tensor format"), [1024, 64]);
    let b = add(&mut memory, TensorType::F32, [1024, number(1)]);
    let d = add(&mut memory, TensorType::F32, [64, number(1)]);
    let call = Call::plain(Product { a, b, d });
    (0..number(2)).for_each(|_| call.cpu(&mut memory));
}

/// Layers of the small model, elements of its tokens, and of its feed-forward layers.
const LAYERS: usize = 30;
const WIDTH: usize = 576;
const HIDDEN: usize = 1536;
const VOCABULARY: usize = 49152;
/// A token is written so often.
const TOKENS: usize = 40;
/// Rows of a matrix that are made; the others are the same again.
const ROWS: usize = 16;

/// Adds a tensor to a memory.
fn add(memory: &mut HostMemory, ty: TensorType, [k, m]: [usize; 2]) -> Tensor {
    let tensor = Tensor::dense(Slot(memory.slots.len() as u32), ty, [k, m, 1, 1]);
    let values: Vec<f32> = (0..k * m.min(ROWS)).map(|i| (i * 7919 % 1009) as f32 / 504.5 - 1.0).collect();
    let mut some = vec![0; tensor.row_bytes() * m.min(ROWS)];
    quant::quantise(ty, &values, k, None, &mut some).expect("a type with a quantiser");
    let bytes = some.iter().copied().cycle().take(tensor.rows() * tensor.row_bytes()).collect();
    memory.slots.push(bytes);
    memory.interleave(tensor.slot, ty, k);
    tensor
}

/// The matrix products of a token, where all matrices have one format if its blocks fit them.
#[allow(clippy::print_stdout, reason = "what it times is data")]
fn token(name: &str) {
    let Some(ty) = TensorType::ALL.iter().copied().find(|ty| ty.name() == name) else {
        return println!("{name}: no such format");
    };
    let mut memory = HostMemory::default();
    let column = |memory: &mut HostMemory, k: usize| add(memory, TensorType::F32, [k, 1]);
    let (x, hidden, logits) =
        (column(&mut memory, WIDTH), column(&mut memory, HIDDEN), column(&mut memory, VOCABULARY));
    let (q, k, v) = (column(&mut memory, WIDTH), column(&mut memory, 192), column(&mut memory, 192));
    let (gated, out) = (column(&mut memory, HIDDEN), column(&mut memory, WIDTH));
    // Where rows are no whole blocks they have the format that recipes give them instead.
    let fits = |k: usize| if ty.row_bytes(k).is_some() { ty } else { TensorType::Q4_0 };
    let matrix = |memory: &mut HostMemory, k: usize, m: usize| add(memory, fits(k), [k, m]);
    let mut calls = Vec::new();
    for _ in 0..LAYERS {
        let a = [WIDTH, 192, 192].map(|m| matrix(&mut memory, WIDTH, m));
        let mut call = Call::plain(Product { a: a[0], b: x, d: q });
        call.others = vec![FusedProduct { a: a[1], d: k, bias: None }, FusedProduct { a: a[2], d: v, bias: None }];
        calls.push(("q, k, v", call));
        calls.push(("attention output", Call::plain(Product { a: matrix(&mut memory, WIDTH, WIDTH), b: x, d: out })));
        let [gate, up] = [0; 2].map(|_| matrix(&mut memory, WIDTH, HIDDEN));
        let mut call = Call::plain(Product { a: gate, b: x, d: gated });
        call.gate = Some(Gated { kind: Gate::Swiglu, up, bias: None });
        calls.push(("gate and up", call));
        calls.push(("down", Call::plain(Product { a: matrix(&mut memory, HIDDEN, WIDTH), b: hidden, d: out })));
    }
    calls.push(("output", Call::plain(Product { a: matrix(&mut memory, WIDTH, VOCABULARY), b: x, d: logits })));
    let mut best: Vec<(&str, Duration)> = Vec::new();
    let mut least = Duration::MAX;
    for _ in 0..TOKENS {
        let (mut times, began): (Vec<(&str, Duration)>, _) = (Vec::new(), Instant::now());
        for (name, call) in &calls {
            let start = Instant::now();
            call.cpu(&mut memory);
            let time = start.elapsed();
            match times.iter_mut().find(|(other, _)| other == name) {
                Some((_, sum)) => *sum += time,
                None => times.push((name, time)),
            }
        }
        least = least.min(began.elapsed());
        if best.is_empty() {
            best = times.clone();
        }
        best.iter_mut().zip(times).for_each(|(best, time)| best.1 = best.1.min(time.1));
    }
    let parts: Vec<String> =
        best.iter().map(|(name, time)| format!("{name} {:.0}", time.as_secs_f64() * 1e6)).collect();
    println!("{name:8} {:6.0} us a token: {}", least.as_secs_f64() * 1e6, parts.join(", "));
}
