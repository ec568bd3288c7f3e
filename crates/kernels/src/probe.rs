//! Probes: small kernels that measure a device instead of computing anything. They say what the operations can hope
//! for: cost of a dispatch, bandwidth, arithmetic rates. How results are shown is up to `kiln bench device`.

use std::sync::Arc;
use std::time::Instant;

use kiln_gpu::{
    Address, Buffer, Caps, Commands, Component, CoopmatShape, Cost, Device, Dispatch, Error, Groups, MemoryKind,
    Recorder, Scope, Shader, Span, SubgroupRequest,
};

use rayon::prelude::*;

use crate::operation::grid;

/// Times are the median of this many runs, after one that warms up.
const RUNS: usize = 7;
/// Vectors of 16 bytes that one thread of the bandwidth probes may have in flight.
const LOADS: [u32; 3] = [4, 8, 16];
/// Chains of multiply-adds of one thread.
const CHAINS: u32 = 16;

kiln_gpu::params! {
    struct ReadParams { x: Address, sink: Address, groups: u32, never: u32 }
}

kiln_gpu::params! {
    struct CopyParams { x: Address, y: Address, groups: u32 }
}

kiln_gpu::params! {
    struct FmaParams { sink: Address, rounds: u32, factor: f32, never: f32 }
}

kiln_gpu::params! {
    struct MatrixParams { sink: Address, rounds: u32, factor: f32, store: u32 }
}

/// A kind of multiply-add that one thread does with one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fma {
    /// One of f32.
    F32,
    /// Two of f16.
    F16Pairs,
    /// Four of bytes, summed.
    PackedBytes,
}

impl Fma {
    const ALL: [Fma; 3] = [Fma::F32, Fma::F16Pairs, Fma::PackedBytes];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Fma::F32 => "f32 multiply-add",
            Fma::F16Pairs => "f16 multiply-add, in pairs",
            Fma::PackedBytes => "i8 dot product of four",
        }
    }

    fn operations(self) -> f64 {
        match self {
            Fma::F32 => 2.0,
            Fma::F16Pairs => 4.0,
            Fma::PackedBytes => 8.0,
        }
    }
}

fn fma_shader(kind: Fma, threads: u32) -> Shader {
    Shader::new("probe.fma", "probes/fma.comp", FmaParams::glsl())
        .define("WG", threads)
        .define("KIND", kind as u32)
        .define("CHAINS", CHAINS)
}

/// Sizes that fit a device: a software one gets little work, so that a whole bench takes seconds.
#[derive(Clone, Copy, Debug)]
struct Scale {
    threads: u32,
    /// Dispatches in a chain of empty ones.
    chain: usize,
    /// Bytes of the bandwidth probes.
    bytes: u64,
    /// The reads of one layer of a decoding model, and how many layers.
    layer: [u64; 4],
    layers: usize,
    /// Seconds an arithmetic probe should take.
    seconds: f64,
}

impl Scale {
    fn of(device: &Device) -> Scale {
        let caps = &device.adapter.caps;
        let threads = 256.min(caps.limits.max_workgroup_invocations);
        let free = device.adapter.memory_free.unwrap_or(device.adapter.memory_bytes);
        if caps.is_cpu {
            let layer = [14, 9, 66, 33].map(|n| n << 14);
            return Scale { threads, chain: 32, bytes: 64 << 20, layer, layers: 4, seconds: 0.05 };
        }
        // A quarter of what is free, so that other programs stay alive.
        let bytes = (free / 4).clamp(256 << 20, 8_000_000_000);
        // The matrices of an 8B model in four bits, or as large a part of it as there is memory for.
        let layer = [14_000_000, 9_400_000, 66_000_000, 33_000_000];
        let layers = (bytes / layer.iter().sum::<u64>()).clamp(1, 32) as usize;
        Scale { threads, chain: 1000, bytes, layer, layers, seconds: 0.02 }
    }
}

/// Bandwidth of a probe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Bytes moved.
    pub bytes: f64,
    /// Time of the move.
    pub seconds: f64,
    /// Vectors of 16 bytes in flight per thread, of the best variant; 0 where the driver did the work.
    pub loads: u32,
}

impl Bandwidth {
    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        self.bytes / self.seconds
    }
}

/// The chain of reads that a decoding model makes.
#[derive(Clone, Copy, Debug)]
pub struct Chain {
    /// How many reads.
    pub reads: usize,
    /// Each read waits for the one before.
    pub dependent: Bandwidth,
    /// No read waits.
    pub independent: Bandwidth,
}

/// The cost of an empty dispatch.
#[derive(Clone, Copy, Debug)]
pub struct DispatchCost {
    /// Workgroups of each dispatch.
    pub groups: u32,
    /// Seconds of one, with a barrier after it.
    pub with_barrier: f64,
    /// Seconds of one, without.
    pub without_barrier: f64,
}

/// The rate of one kind of matrix product.
#[derive(Clone, Debug)]
pub struct MatrixRate {
    /// The shape.
    pub shape: CoopmatShape,
    /// Operations per second, or why it could not be measured.
    pub rate: Result<f64, String>,
}

/// A device made ready for probing.
pub struct Probe {
    device: Arc<Device>,
    scale: Scale,
    /// Memory to move, in pieces the driver accepts.
    pieces: Vec<Buffer>,
    sink: Buffer,
}

/// The middle of several measurements.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Seconds of one run, by the GPU's clock where it has one.
fn run(commands: &Commands) -> Result<f64, Error> {
    let clock = std::time::Instant::now();
    commands.run()?;
    let wall = clock.elapsed();
    Ok(commands.gpu_time().filter(|t| !t.is_zero()).unwrap_or(wall).as_secs_f64())
}

/// The median of several runs, after one that warms up.
fn median_run(commands: &Commands) -> Result<f64, Error> {
    run(commands)?;
    Ok(median((0..RUNS).map(|_| run(commands)).collect::<Result<_, _>>()?))
}

impl Probe {
    /// Takes and fills the memory.
    pub fn new(device: &Arc<Device>) -> Result<Probe, Error> {
        let scale = Scale::of(device);
        let limits = &device.adapter.caps.limits;
        let most = limits.max_allocation_bytes.min(limits.max_buffer_bytes).min(2 << 30) & !0xf_ffff;
        let mut pieces = Vec::new();
        let mut left = scale.bytes;
        while left > 0 {
            let bytes = left.min(most);
            pieces.push(device.allocate(MemoryKind::Device, bytes)?);
            left -= bytes;
        }
        let sink = device.allocate(MemoryKind::Device, 1 << 20)?;
        let mut recorder = Recorder::new(device)?;
        for piece in &pieces {
            recorder.fill((piece, 0), piece.bytes() & !3, 0x3c01_2a3b)?;
        }
        recorder.finish()?.run()?;
        Ok(Probe { device: Arc::clone(device), scale, pieces, sink })
    }

    /// Bytes of memory it moves.
    pub fn bytes(&self) -> u64 {
        self.scale.bytes
    }

    /// The median time of what `record` records.
    fn time(&self, record: &dyn Fn(&mut Recorder) -> Result<(), Error>) -> Result<f64, Error> {
        let mut recorder = Recorder::new(&self.device)?.uncut();
        record(&mut recorder)?;
        median_run(&recorder.finish()?)
    }

    fn span(&self, bytes: u64) -> Span {
        Span { start: self.sink.address(), bytes }
    }

    /// What an empty dispatch costs, for several numbers of workgroups.
    pub fn dispatches(&self) -> Result<Vec<DispatchCost>, Error> {
        let shader = Shader::new("probe.empty", "probes/empty.comp", String::new()).define("WG", self.scale.threads);
        let pipeline = self.device.pipeline(&shader)?;
        let one = |groups: u32, writes: &[Span]| -> Result<f64, Error> {
            let seconds = self.time(&|recorder| {
                for _ in 0..self.scale.chain {
                    recorder.dispatch(Dispatch {
                        label: "empty",
                        pipeline: &pipeline,
                        params: &[],
                        groups: Groups::Direct([groups, 1, 1]),
                        reads: &[],
                        writes,
                        early: &[],
                        cost: Cost::default(),
                    })?;
                }
                Ok(())
            })?;
            Ok(seconds / self.scale.chain as f64)
        };
        [1, 132, 528, 2112]
            .into_iter()
            .map(|groups| {
                let without_barrier = one(groups, &[])?;
                Ok(DispatchCost { groups, with_barrier: one(groups, &[self.span(4)])?, without_barrier })
            })
            .collect()
    }

    fn bandwidth_shader(&self, name: &str, file: &'static str, params: String, loads: u32) -> Shader {
        Shader::new(format!("probe.{name}.{loads}"), file, params)
            .define("WG", self.scale.threads)
            .define("LOADS", loads)
    }

    /// Bytes one workgroup moves.
    fn stretch(&self, loads: u32) -> u64 {
        u64::from(self.scale.threads * loads * 16)
    }

    /// Records the read of the whole stretches of a range; gives the bytes read.
    fn read(&self, recorder: &mut Recorder, from: Span, loads: u32, writes: &[Span]) -> Result<u64, Error> {
        let shader = self.bandwidth_shader("read", "probes/read.comp", ReadParams::glsl(), loads);
        let groups = from.bytes / self.stretch(loads);
        let bytes = groups * self.stretch(loads);
        let count = u32::try_from(groups).expect("a piece has less than 2^32 stretches");
        let params = ReadParams { x: from.start, sink: self.sink.address(), groups: count, never: 0x1234_5678 };
        recorder.dispatch(Dispatch {
            label: "read",
            pipeline: &self.device.pipeline(&shader)?,
            params: &params.bytes(),
            groups: Groups::Direct(grid(groups as usize, &self.device.adapter.caps)),
            reads: &[from],
            writes,
            early: &[],
            cost: Cost { bytes: bytes as f64, flops: 0.0 },
        })?;
        Ok(bytes)
    }

    /// The best of the variants that differ in the loads in flight.
    fn best(&self, one: &dyn Fn(u32) -> Result<Bandwidth, Error>) -> Result<Bandwidth, Error> {
        let all = LOADS.into_iter().map(one).collect::<Result<Vec<_>, _>>()?;
        Ok(all.into_iter().max_by(|a, b| a.rate().total_cmp(&b.rate())).expect("there are several variants"))
    }

    /// Reads all the memory once.
    pub fn read_bandwidth(&self) -> Result<Bandwidth, Error> {
        self.best(&|loads| {
            let bytes: u64 = self.pieces.iter().map(|p| p.bytes() / self.stretch(loads) * self.stretch(loads)).sum();
            let seconds = self.time(&|recorder| {
                for piece in &self.pieces {
                    self.read(recorder, Span { start: piece.address(), bytes: piece.bytes() }, loads, &[])?;
                }
                Ok(())
            })?;
            Ok(Bandwidth { bytes: bytes as f64, seconds, loads })
        })
    }

    /// Copies one half of a piece to the other, by a kernel; read and written bytes both count.
    pub fn copy_bandwidth(&self) -> Result<Bandwidth, Error> {
        let piece = &self.pieces[0];
        self.best(&|loads| {
            let shader = self.bandwidth_shader("copy", "probes/copy.comp", CopyParams::glsl(), loads);
            let groups = piece.bytes() / 2 / self.stretch(loads);
            let bytes = groups * self.stretch(loads);
            let (x, y) = (piece.address(), piece.address().offset((piece.bytes() / 2) & !255));
            let count = u32::try_from(groups).expect("a piece has less than 2^32 stretches");
            let pipeline = self.device.pipeline(&shader)?;
            let seconds = self.time(&|recorder| {
                recorder.dispatch(Dispatch {
                    label: "copy",
                    pipeline: &pipeline,
                    params: &CopyParams { x, y, groups: count }.bytes(),
                    groups: Groups::Direct(grid(groups as usize, &self.device.adapter.caps)),
                    reads: &[Span { start: x, bytes }],
                    writes: &[Span { start: y, bytes }],
                    early: &[],
                    cost: Cost { bytes: 2.0 * bytes as f64, flops: 0.0 },
                })
            })?;
            Ok(Bandwidth { bytes: 2.0 * bytes as f64, seconds, loads })
        })
    }

    /// Copies one half of a piece to the other, by the driver's own copy.
    pub fn driver_copy_bandwidth(&self) -> Result<Bandwidth, Error> {
        let piece = &self.pieces[0];
        let half = (piece.bytes() / 2) & !255;
        let seconds = self.time(&|recorder| recorder.copy((piece, 0), (piece, half), half))?;
        Ok(Bandwidth { bytes: 2.0 * half as f64, seconds, loads: 0 })
    }

    /// The reads of a decoding model: many ranges one after the other, with and without waiting between them.
    pub fn decode_chain(&self) -> Result<Chain, Error> {
        let mut ranges = Vec::new();
        let (mut piece, mut at) = (0, 0);
        for bytes in (0..self.scale.layers).flat_map(|_| self.scale.layer) {
            if at + bytes > self.pieces[piece].bytes() {
                (piece, at) = ((piece + 1) % self.pieces.len(), 0);
            }
            let bytes = bytes.min(self.pieces[piece].bytes());
            ranges.push(Span { start: self.pieces[piece].address().offset(at), bytes });
            at = (at + bytes).next_multiple_of(256);
        }
        let run = |writes: &[Span]| {
            self.best(&|loads| {
                let bytes: u64 = ranges.iter().map(|r| r.bytes / self.stretch(loads) * self.stretch(loads)).sum();
                let seconds = self.time(&|recorder| {
                    ranges.iter().try_for_each(|range| self.read(recorder, *range, loads, writes).map(drop))
                })?;
                Ok(Bandwidth { bytes: bytes as f64, seconds, loads })
            })
        };
        Ok(Chain { reads: ranges.len(), dependent: run(&[self.span(4)])?, independent: run(&[])? })
    }

    /// Operations per second of a kernel that does `per_round` of them in every round: rounds are added until it takes
    /// long enough to be measured.
    fn rate(
        &self,
        pipeline: &Arc<kiln_gpu::Pipeline>,
        groups: u32,
        per_round: f64,
        params: &dyn Fn(u32) -> Vec<u8>,
    ) -> Result<f64, Error> {
        let record = |rounds: u32| {
            let mut recorder = Recorder::new(&self.device)?.uncut();
            recorder.dispatch(Dispatch {
                label: "rate",
                pipeline,
                params: &params(rounds),
                groups: Groups::Direct([groups, 1, 1]),
                reads: &[],
                writes: &[],
                early: &[],
                cost: Cost { bytes: 0.0, flops: per_round * f64::from(rounds) },
            })?;
            recorder.finish()
        };
        let mut rounds = 4;
        loop {
            let seconds = run(&record(rounds)?)?;
            if seconds > self.scale.seconds / 4.0 || rounds > 1 << 20 {
                let wanted = f64::from(rounds) * self.scale.seconds / seconds.max(1e-9);
                rounds = wanted.clamp(1.0, f64::from(1 << 22)) as u32;
                break;
            }
            rounds *= 4;
        }
        let seconds = median_run(&record(rounds)?)?;
        Ok(per_round * f64::from(rounds) / seconds)
    }

    /// Workgroups that keep every core busy.
    fn busy(&self) -> u32 {
        let caps = &self.device.adapter.caps;
        if caps.is_cpu { 16 } else { caps.cores.map_or(2048, |cores| cores * 16) }
    }

    /// Multiply-adds outside of matrices, of every kind the device has; each product and each sum counts as an operation.
    pub fn fma_rates(&self) -> Result<Vec<(Fma, f64)>, Error> {
        let caps = &self.device.adapter.caps;
        let has = |kind: &Fma| match kind {
            Fma::F32 => true,
            Fma::F16Pairs => caps.float16,
            Fma::PackedBytes => caps.int_dot != kiln_gpu::IntDot::None,
        };
        Fma::ALL.into_iter().filter(has).map(|kind| Ok((kind, self.fma_rate(kind)?))).collect()
    }

    fn fma_rate(&self, kind: Fma) -> Result<f64, Error> {
        let threads = self.scale.threads;
        let shader = fma_shader(kind, threads);
        let per_round = kind.operations() * f64::from(CHAINS) * f64::from(threads) * f64::from(self.busy());
        let sink = self.sink.address();
        let params = |rounds| FmaParams { sink, rounds, factor: 0.5, never: -1.0 }.bytes();
        self.rate(&self.device.pipeline(&shader)?, self.busy(), per_round, &params)
    }

    /// The rate of every kind of matrix product the driver lists.
    pub fn matrix_rates(&self, done: &dyn Fn()) -> Vec<MatrixRate> {
        let caps = &self.device.adapter.caps;
        let shapes = matrix_shapes(caps);
        let one = |shape: CoopmatShape| {
            let rate =
                self.matrix_rate(&shape).map_err(|e| e.to_string().lines().next().unwrap_or_default().to_owned());
            done();
            MatrixRate { shape, rate }
        };
        shapes.into_iter().map(one).collect()
    }

    fn matrix_rate(&self, shape: &CoopmatShape) -> Result<f64, Error> {
        let caps = &self.device.adapter.caps;
        let shader = matrix_shader(caps, shape);
        let subgroups = SUBGROUPS * self.busy();
        let product = 2.0 * f64::from(shape.m) * f64::from(shape.n) * f64::from(shape.k);
        let per_round = product * f64::from(ROWS * COLS) * f64::from(subgroups);
        let sink = self.sink.address();
        let params = |rounds| MatrixParams { sink, rounds, factor: 0.001, store: 0 }.bytes();
        self.rate(&self.device.pipeline(&shader)?, self.busy(), per_round, &params)
    }
}

/// Products each subgroup keeps in registers.
const ROWS: u32 = 2;
const COLS: u32 = 4;
/// Subgroups of a workgroup.
const SUBGROUPS: u32 = 4;

/// The types GLSL has for a component.
fn glsl_type(component: Component) -> Option<&'static str> {
    Some(match component {
        Component::F16 => "float16_t",
        Component::F32 => "float",
        Component::Bf16 => "bfloat16_t",
        Component::I8 => "int8_t",
        Component::U8 => "uint8_t",
        Component::I32 => "int32_t",
        Component::U32 => "uint32_t",
        _ => return None,
    })
}

/// The kinds of product worth measuring, each once.
pub fn matrix_shapes(caps: &Caps) -> Vec<CoopmatShape> {
    let plain = |s: &&CoopmatShape| {
        let types = [s.a, s.c].into_iter().all(|t| glsl_type(t).is_some());
        !s.saturating && s.scope == Scope::Subgroup && s.a == s.b && s.c == s.result && types
    };
    let mut shapes: Vec<CoopmatShape> = caps.coopmat.iter().filter(plain).copied().collect();
    shapes.sort_by_key(|s| (s.a, s.c, std::cmp::Reverse(s.m * s.n * s.k)));
    shapes.dedup();
    shapes
}

/// The kernel that measures a shape.
pub fn matrix_shader(caps: &Caps, shape: &CoopmatShape) -> Shader {
    let name = |component| glsl_type(component).unwrap_or("float");
    let (m, n, k) = (shape.m, shape.n, shape.k);
    Shader::new(format!("probe.matrix.{m}x{n}x{k}"), "probes/matrix.comp", MatrixParams::glsl())
        .define("WG", SUBGROUPS * caps.subgroups.size)
        .define("M", m)
        .define("N", n)
        .define("K", k)
        .define("A_TYPE", name(shape.a))
        .define("C_TYPE", name(shape.c))
        .define("BF16", u32::from(shape.a == Component::Bf16 || shape.c == Component::Bf16))
        .define("ROWS", ROWS)
        .define("COLS", COLS)
        .subgroup(SubgroupRequest::Full)
}

/// Bytes a second that all threads of the CPU read from memory together: the best of a few tries over a buffer that no cache holds.
pub fn host_read_rate() -> f64 {
    const WORDS: usize = 32 << 20;
    const TRIES: usize = 3;
    let data = vec![1u64; WORDS];
    let once = |_| {
        let start = Instant::now();
        let sum: u64 =
            data.par_chunks(1 << 16).map(|piece| piece.iter().fold(0, |sum: u64, x| sum.wrapping_add(*x))).sum();
        std::hint::black_box(sum);
        8.0 * WORDS as f64 / start.elapsed().as_secs_f64()
    };
    (0..TRIES).map(once).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use kiln_gpu::{Sources, compile_offline};

    use super::*;

    #[test]
    fn every_probe_compiles() {
        let sources = Sources::new(crate::SOURCES);
        let caps = Caps::example_nvidia();
        let mut shaders: Vec<Shader> = matrix_shapes(&caps).iter().map(|shape| matrix_shader(&caps, shape)).collect();
        assert_eq!(shaders.len(), caps.coopmat.len());
        let plain = |file, params: String| {
            Shader::new(file, file, params).define("WG", 256).define("LOADS", 8).define("CHAINS", CHAINS)
        };
        shaders.push(plain("probes/empty.comp", String::new()));
        shaders.push(plain("probes/read.comp", ReadParams::glsl()));
        shaders.push(plain("probes/copy.comp", CopyParams::glsl()));
        shaders.extend(Fma::ALL.map(|kind| fma_shader(kind, 256)));
        shaders.push(crate::fragment_layout::shader(&caps, &caps.coopmat[0]));
        for shader in shaders {
            if let Err(e) = compile_offline(&sources, &shader) {
                panic!("{:?}: {e}", shader.defines);
            }
        }
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(vec![5.0, 1.0, 100.0]), 5.0);
    }
}
