//! The runtime on a real driver (the software GPU in CI): memory, caches, recording, timeouts, recovery. Without any
//! device these tests say so and pass: `scripts/test` always provides one.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test that cannot go on should stop")]

use std::sync::Arc;
use std::time::Duration;

use kiln_gpu::{
    Adapter, Address, Cache, Cost, Device, Dispatch, Error, Groups, Instance, MemoryKind, Recorder, Shader, Sources,
    Span, Uploader, adapters, choose,
};

const FILES: &[(&str, &str)] = &[
    (
        "add.comp",
        "#extension GL_EXT_buffer_reference : require\n#extension GL_EXT_buffer_reference_uvec2 : require\n\
         layout(local_size_x = 64) in;\n\
         layout(buffer_reference, std430, buffer_reference_align = 4) buffer U32 { uint v[]; };\n\
         #include \"params.glsl\"\n\
         void main() { uint i = gl_GlobalInvocationID.x; if (i < p.n) U32(p.y).v[i] = U32(p.x).v[i] + p.add; }\n",
    ),
    (
        "spin.comp",
        "#extension GL_EXT_buffer_reference : require\n#extension GL_EXT_buffer_reference_uvec2 : require\n\
         layout(local_size_x = 1) in;\n\
         layout(buffer_reference, std430, buffer_reference_align = 4) buffer U32 { uint v[]; };\n\
         #include \"params.glsl\"\n\
         void main() { uint h = p.add; for (uint i = 0; i < p.n; i++) h = h * 1664525u + 1013904223u; U32(p.y).v[0] = h; }\n",
    ),
    (
        "greedy.comp",
        "layout(local_size_x = 1) in;\nshared uint big[1000000];\nvoid main() { big[gl_WorkGroupID.x] = 1; }\n",
    ),
];

kiln_gpu::params! {
    struct Params { x: Address, y: Address, n: u32, add: u32 }
}

fn shader(file: &'static str) -> Shader {
    Shader::new(file, file, Params::glsl())
}

struct Machine {
    instance: Arc<Instance>,
    adapter: Adapter,
}

impl Machine {
    fn find() -> Option<Machine> {
        let wanted = std::env::var("KILN_DEVICE").ok();
        let found = Instance::new(&Cache::user()).and_then(|instance| {
            let all = adapters(&instance)?;
            let adapter = choose(&all, wanted.as_deref())?.clone();
            Ok(Machine { instance, adapter })
        });
        found
            .inspect_err(|e| {
                assert!(std::env::var_os("KILN_TESTS_NEED_DEVICE").is_none(), "no device: {e}");
                println!("no device, test passed over: {e}");
            })
            .ok()
    }

    fn open(&self, cache: Cache) -> Arc<Device> {
        Device::open(&self.instance, &self.adapter, Sources::with_folder(FILES, None), cache).unwrap()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let messages = self.instance.validation_messages();
        if !std::thread::panicking() {
            assert!(messages.is_empty(), "validation layer:\n{}", messages.join("\n"));
        }
    }
}

fn folder(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("kiln-gpu-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|w| u32::from_ne_bytes(w.try_into().unwrap())).collect()
}

#[test]
fn a_chain_of_dispatches_waits_where_it_must_and_can_run_again() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let n = 1000u32;
    let bytes = u64::from(n) * 4;
    let buffers: Vec<_> = (0..3).map(|_| device.allocate(MemoryKind::Device, bytes).unwrap()).collect();
    let start: Vec<u8> = (0..n).flat_map(u32::to_ne_bytes).collect();
    let mut uploader = Uploader::new(&device).unwrap();
    uploader.write(&buffers[0], 0, &start).unwrap();
    uploader.finish().unwrap();

    let pipeline = device.pipeline(&shader("add.comp")).unwrap();
    let mut recorder = Recorder::profiled(&device).unwrap();
    for (from, to) in [(0, 1), (1, 2), (0, 1)] {
        let (x, y) = (buffers[from].address(), buffers[to].address());
        let params = Params { x, y, n, add: 10 }.bytes();
        let step = Dispatch {
            label: "add",
            pipeline: &pipeline,
            params: &params,
            groups: Groups::Direct([n.div_ceil(64), 1, 1]),
            reads: &[Span { start: x, bytes }],
            writes: &[Span { start: y, bytes }],
            early: &[],
            cost: Cost::default(),
        };
        recorder.dispatch(step).unwrap();
    }
    let commands = recorder.finish().unwrap();
    assert_eq!((commands.counts().dispatches, commands.counts().barriers), (3, 2));
    for _ in 0..2 {
        commands.run().unwrap();
        let mut out = vec![0; bytes as usize];
        device.read(&buffers[2], 0, &mut out).unwrap();
        assert_eq!(words(&out), (0..n).map(|i| i + 20).collect::<Vec<_>>());
    }
    assert_eq!(commands.timings().len(), 3);
    assert!(commands.gpu_time().unwrap() > Duration::ZERO);
}

#[test]
fn uploads_larger_than_the_staging_ring_arrive_whole() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let data: Vec<u8> = (0..70u32 << 20).map(|i| (i ^ (i >> 11)) as u8).collect();
    let buffer = device.allocate(MemoryKind::Device, data.len() as u64).unwrap();
    let mut uploader = Uploader::new(&device).unwrap();
    uploader.write(&buffer, 0, &data).unwrap();
    uploader.finish().unwrap();
    let mut back = vec![0; data.len()];
    device.read(&buffer, 0, &mut back).unwrap();
    assert!(back == data);
}

#[test]
fn what_several_threads_write_to_host_memory_arrives_whole() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let data: Vec<u8> = (0..(21u32 << 20) + 5).map(|i| (i ^ (i >> 9)) as u8).collect();
    let buffer = device.allocate(MemoryKind::Upload, data.len() as u64 + 7).unwrap();
    buffer.write_many(7, &data);
    let mut back = vec![0; data.len()];
    buffer.read(7, &mut back);
    assert!(back == data);
}

#[test]
fn memory_given_back_is_used_again_and_too_much_is_an_error_with_numbers() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let keep = device.allocate(MemoryKind::Device, 1000).unwrap();
    let taken = device.allocated_bytes();
    for _ in 0..100 {
        let again = device.allocate(MemoryKind::Device, 1 << 20).unwrap();
        assert_ne!(again.address(), keep.address());
    }
    assert_eq!(device.allocated_bytes(), taken);
    let error = device.allocate(MemoryKind::Device, 1 << 50).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { asked, .. } if asked == 1 << 50), "{error}");
    assert!(error.to_string().contains("would fit"), "{error}");
    drop(keep);
    // One allocation is kept for later, but not where there is too little memory.
    assert_eq!(device.allocated_bytes(), taken);
    device.allocate(MemoryKind::Device, 1 << 50).unwrap_err();
    assert_eq!(device.allocated_bytes(), 0);
}

#[test]
fn a_second_start_compiles_nothing_and_damaged_caches_are_replaced() {
    let Some(machine) = Machine::find() else { return };
    let folder = folder("cache");
    let start = || {
        let device = machine.open(Cache::at(Some(folder.clone())));
        device.prepare(&[shader("add.comp"), shader("spin.comp")], &|| {}).unwrap();
        let counts = device.pipeline_counts();
        assert_eq!(counts.made, 2);
        counts
    };
    assert_eq!(start().glsl_compiled, 2);
    assert_eq!(start().glsl_compiled, 0);
    for entry in
        std::fs::read_dir(folder.join("pipelines")).unwrap().chain(std::fs::read_dir(folder.join("spirv")).unwrap())
    {
        std::fs::write(entry.unwrap().path(), b"damaged").unwrap();
    }
    assert_eq!(start().glsl_compiled, 2);
    assert_eq!(start().glsl_compiled, 0);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_kernel_over_the_shared_memory_limit_is_refused_before_the_driver_sees_it() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let error = device.pipeline(&shader("greedy.comp")).unwrap_err();
    assert!(matches!(error, Error::OverLimit { needs: 4_000_000, .. }), "{error}");
}

#[test]
fn a_device_that_does_not_finish_in_time_is_lost_and_what_it_uses_is_kept() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let buffer = device.allocate(MemoryKind::Device, 4).unwrap();
    let pipeline = device.pipeline(&shader("spin.comp")).unwrap();
    let params = Params { x: Address(0), y: buffer.address(), n: 300_000_000, add: 1 }.bytes();
    let writes = [Span { start: buffer.address(), bytes: 4 }];
    let mut recorder = Recorder::new(&device).unwrap();
    let step = Dispatch {
        label: "spin",
        pipeline: &pipeline,
        params: &params,
        groups: Groups::Direct([1, 1, 1]),
        reads: &[],
        writes: &writes,
        early: &[],
        cost: Cost::default(),
    };
    recorder.dispatch(step).unwrap();
    let commands = recorder.finish().unwrap();
    let submission = commands.submit().unwrap();
    let error = device.wait(submission, Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(device.is_lost() && device.is_hung());
    for error in [device.wait(submission, Duration::from_secs(60)).unwrap_err(), commands.run().unwrap_err()] {
        assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    }
    // Nothing waits and nothing that the kernel may still write to is given back.
    let (taken, start) = (device.allocated_bytes(), std::time::Instant::now());
    drop((commands, buffer));
    assert_eq!(device.allocated_bytes(), taken);
    drop((pipeline, device));
    assert!(start.elapsed() < Duration::from_millis(200), "{:?}", start.elapsed());
    // Another device of the same adapter works.
    let again = machine.open(Cache::at(None));
    let buffer = again.allocate(MemoryKind::Device, 64).unwrap();
    again.read(&buffer, 0, &mut [0; 64]).unwrap();
}

#[test]
fn a_lost_device_is_an_error_value_and_can_be_opened_again() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let buffer = device.allocate(MemoryKind::Device, 64).unwrap();
    device.pretend_lost();
    let mut out = [0u8; 64];
    let error = device.read(&buffer, 0, &mut out).unwrap_err();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    drop((buffer, device));
    let again = machine.open(Cache::at(None));
    let buffer = again.allocate(MemoryKind::Device, 64).unwrap();
    again.read(&buffer, 0, &mut out).unwrap();
}

#[test]
fn work_is_cut_into_several_submits_by_its_cost() {
    let Some(machine) = Machine::find() else { return };
    let device = machine.open(Cache::at(None));
    let buffer = device.allocate(MemoryKind::Device, 4096).unwrap();
    let pipeline = device.pipeline(&shader("add.comp")).unwrap();
    let params = Params { x: buffer.address(), y: buffer.address(), n: 1, add: 1 }.bytes();
    let span = [Span { start: buffer.address(), bytes: 4 }];
    let mut recorder = Recorder::new(&device).unwrap();
    recorder.fill((&buffer, 0), 4096, 0).unwrap();
    for _ in 0..20 {
        let step = Dispatch {
            label: "add",
            pipeline: &pipeline,
            params: &params,
            groups: Groups::Direct([1, 1, 1]),
            reads: &span,
            writes: &span,
            early: &[],
            cost: Cost { bytes: 1e12, flops: 0.0 },
        };
        recorder.dispatch(step).unwrap();
    }
    let commands = recorder.finish().unwrap();
    assert!(commands.submits() >= 20, "{} submits", commands.submits());
    commands.run().unwrap();
    let mut out = [0u8; 4];
    device.read(&buffer, 0, &mut out).unwrap();
    assert_eq!(u32::from_ne_bytes(out), 20, "order holds across submits");
}
