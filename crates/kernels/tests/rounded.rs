//! What must hold between steps that leave columns rounded and products that take them, on a real driver: the same bits as where every
//! workgroup rounds for itself, but for the order in which a norm's squares are added. Without any device these tests say so and pass.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may panic and print, in its helpers as well")]

use std::sync::{Arc, Mutex};

use kiln_gguf::TensorType::{self, F16, F32, I8, Q4_K, Q8_0};
use kiln_gpu::{Address, Cache, Device, Instance, MemoryKind, Recorder, Uploader, adapters, choose};
use kiln_kernels::case::{Case, Data, Level, Tolerance};
use kiln_kernels::glu::Gate;
use kiln_kernels::harness::Prepared;
use kiln_kernels::host::HostMemory;
use kiln_kernels::mul_mat::{Norm, Product};
use kiln_kernels::mul_mat_vec::Gated;
use kiln_kernels::operation::Path;
use kiln_kernels::record::record;
use kiln_kernels::rounded::{Rounding, bytes};
use kiln_kernels::tensor::Tensor;
use kiln_kernels::{Call, KERNELS, flash_attention, mul_mat_vec};

fn find() -> Option<(Arc<Device>, Arc<Instance>)> {
    let open = || {
        let instance = Instance::new(&Cache::user())?;
        let all = adapters(&instance)?;
        let adapter = choose(&all, std::env::var("KILN_DEVICE").ok().as_deref())?;
        Ok::<_, kiln_gpu::Error>((kiln_kernels::open(&instance, adapter, Cache::user())?, instance))
    };
    open()
        .inspect_err(|e| {
            assert!(std::env::var_os("KILN_TESTS_NEED_DEVICE").is_none(), "no device: {e}");
            println!("no device, test passed over: {e}");
        })
        .ok()
}

/// Cases that no path of a device takes would be passed over without a word: here it is known how many it has to be.
#[test]
fn cases_are_taken_and_right() {
    let Some((device, instance)) = find() else { return };
    for (name, least) in [("mul_mat_vec", 55), ("flash_attention", 8)] {
        let kernel = KERNELS.iter().find(|kernel| kernel.name == name).unwrap();
        let mut ran = 0;
        for case in (kernel.cases)(Level::Small)
            .into_iter()
            .filter(|case| case.name.contains("rounded") && !case.name.contains("rounded: false"))
        {
            for prepared in Prepared::all(&case, &device).unwrap() {
                let outcome = prepared.run(&device).unwrap();
                assert!(outcome.failures.is_empty(), "{} {:?}: {:?}", case.name, prepared.path, outcome.failures);
                ran += 1;
            }
        }
        println!("{name}: {ran}");
        assert!(!device.adapter.caps.is_cpu || ran >= least, "{name}: {ran} ran, at least {least} could");
    }
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
}

/// The steps of a layer behind its first products. What is rounded by one step for the next, each product rounds for itself in its twin.
struct Layer {
    steps: Vec<Call>,
    /// Results, and those of their twins.
    same: Vec<(Tensor, Tensor)>,
    near: (Tensor, Tensor),
}

fn layer(data: &mut Data) -> Layer {
    let (hidden, ff, heads) = (512, 1024, 4);
    let rounding = |data: &mut Data, len, weight| Rounding { to: data.output(I8, [bytes(len), 1, 1, 1]), weight };
    let column = |data: &mut Data, len| data.output(F32, [len, 1, 1, 1]);
    let matrix = |data: &mut Data, ty: TensorType, k, m| data.input(ty, [k, m, 1, 1]);
    let keys = |data: &mut Data| data.input(F16, [64, heads, 77, 1]).permute([0, 2, 1, 3]);
    let (q, k, v) = (data.input(F32, [64, 1, heads, 1]), keys(data), keys(data));
    let attended = data.output(F32, [64, heads, 1, 1]);
    let left = rounding(data, 64 * heads, None);
    let attention =
        flash_attention::Call { rounding: Some(left), ..flash_attention::Call::plain(q, k, v, attended, 0.125) };
    let b = attended.reshape([64 * heads, 1, 1, 1]);
    let weight = Some(data.input_with(F32, [hidden, 1, 1, 1], |r, _| r.uniform(0.5, 2.0)));
    let between = rounding(data, hidden, weight);
    let mut output =
        mul_mat_vec::Call::plain(Product { a: matrix(data, Q8_0, 64 * heads, hidden), b, d: column(data, hidden) });
    output.epilogue.residual = Some(data.input(F32, [hidden, 1, 1, 1]));
    let plain_output =
        mul_mat_vec::Call { product: Product { d: column(data, hidden), ..output.product }, ..output.clone() };
    let output = mul_mat_vec::Call { rounded: Some(left.to), rounding: Some(between), ..output };
    let product = Product { a: matrix(data, Q4_K, hidden, ff), b: output.product.d, d: column(data, ff) };
    let up = matrix(data, Q4_K, hidden, ff);
    let gated = mul_mat_vec::Call {
        gate: Some(Gated { kind: Gate::Swiglu, up, bias: None }),
        norm: Some(Norm { weight, eps: 1e-5 }),
        ..mul_mat_vec::Call::plain(product)
    };
    let plain_gated = mul_mat_vec::Call { product: Product { d: column(data, ff), ..product }, ..gated.clone() };
    let last = rounding(data, ff, None);
    let gated = mul_mat_vec::Call { rounded: Some(between.to), rounding: Some(last), ..gated };
    let down = Product { a: matrix(data, Q4_K, ff, 96), b: product.d, d: column(data, 96) };
    let plain_down = mul_mat_vec::Call::plain(Product { d: column(data, 96), ..down });
    let down = mul_mat_vec::Call { rounded: Some(last.to), ..mul_mat_vec::Call::plain(down) };
    Layer {
        same: vec![(output.product.d, plain_output.product.d), (down.product.d, plain_down.product.d)],
        near: (gated.product.d, plain_gated.product.d),
        steps: vec![
            attention.into(),
            output.into(),
            plain_output.into(),
            gated.into(),
            plain_gated.into(),
            down.into(),
            plain_down.into(),
        ],
    }
}

#[test]
fn a_layer_has_the_bits_of_one_whose_products_round_for_themselves() {
    let Some((device, instance)) = find() else { return };
    // A case makes the data; what it is judged by is not asked here.
    let made = Arc::new(Mutex::new(None));
    let to = Arc::clone(&made);
    let case = Case::new("a layer", move |data| {
        let layer = layer(data);
        let first = layer.steps[0].clone();
        *to.lock().unwrap() = Some(layer);
        (first, Tolerance::Exact)
    });
    let (_, _, memory) = case.build();
    let Layer { steps, same, near } = made.lock().unwrap().take().unwrap();
    let after = run(&device, &steps, &memory);
    for (one, twin) in same {
        let (one, twin) = (after.read(&one), after.read(&twin));
        assert!(one.iter().any(|x| *x != 0.0) && one == twin, "{} of {} differ", count(&one, &twin), one.len());
    }
    let (one, twin) = (after.read(&near.0), after.read(&near.1));
    let sum = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let error = sum(&mut one.iter().zip(&twin).map(|(a, b)| a - b)) / sum(&mut twin.iter().copied());
    assert!(error < 1e-12, "behind the norm: {error:.1e}");
    assert_eq!(instance.validation_messages(), Vec::<String>::new());
}

fn count(one: &[f64], twin: &[f64]) -> usize {
    one.iter().zip(twin).filter(|(a, b)| a != b).count()
}

/// Runs the steps one after the other, products as integers.
fn run(device: &Arc<Device>, steps: &[Call], memory: &HostMemory) -> HostMemory {
    let (mut bytes, mut offsets) = (Vec::new(), Vec::new());
    for slot in &memory.slots {
        offsets.push(bytes.len());
        bytes.extend_from_slice(slot);
        bytes.resize(bytes.len().next_multiple_of(256), 0);
    }
    let buffer = device.allocate(MemoryKind::Device, bytes.len() as u64).unwrap();
    let mut uploader = Uploader::new(device).unwrap();
    uploader.write(&buffer, 0, &bytes).unwrap();
    uploader.finish().unwrap();
    let at = |t: &Tensor| -> Address { buffer.address().offset((offsets[t.slot.0 as usize] + t.offset) as u64) };
    let mut recorder = Recorder::new(device).unwrap();
    for call in steps {
        call.operation().check().unwrap();
        let path = matches!(call, Call::MulMatVec(_)).then_some(Path::IntDot);
        let choice = call.operation().pick(&device.adapter.caps, path).unwrap();
        record(&mut recorder, device, call.operation().name(), (call, &choice), &at).unwrap();
    }
    recorder.finish().unwrap().run().unwrap();
    device.read(&buffer, 0, &mut bytes).unwrap();
    let slots = offsets.iter().zip(&memory.slots).map(|(&o, slot)| bytes[o..o + slot.len()].to_vec()).collect();
    HostMemory { slots, ..HostMemory::default() }
}
