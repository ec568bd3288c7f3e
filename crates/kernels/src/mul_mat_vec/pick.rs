//! How a call of `mul_mat_vec` runs on a device: its launches, their shaders and parameters. No arithmetic here.

use kiln_gguf::TensorType;
use kiln_gpu::{Address, Caps, IntDot, Shader, SubgroupRequest};

use super::block::Block;
use super::tuning::{RowGroup, Slice, Tuning, bounded, table};
use super::{Call, Experts, FusedProduct, NAME, activation_bytes, rounding};
use crate::formats::{self, row_strides};
use crate::glu::Gate;
use crate::mul_mat::{MAX_GEMV_N, Product};
use crate::operation::{Choice, Launch, Operation as _, Path, Touches, Unsupported, grid};
use crate::tensor::Tensor;

const PRODUCT: &str = "mul_mat_vec/mul_mat_vec.comp";
/// The tag of the launch that rounds activations.
const ROUND: u8 = 1;
/// Most matrices of a launch: their addresses must fit the parameters.
const MOST_MATRICES: usize = 3;
/// Most bytes of rounded activations in shared memory; more would leave room for too few workgroups on a core.
const MOST_STAGED: usize = 32 << 10;
/// Largest N that every workgroup rounds for itself, if there is scratch memory: rounding one takes about a tenth of the
/// instructions of multiplying it, and with each more a launch that does it once gets cheaper. Calculated.
const MAX_STAGED_N: usize = 3;

/// The largest team for which activations lie in the order of its slices: rows are rounded up to a slice for each thread.
const MOST_SLICED_TEAM: u32 = 64;
/// Threads of a workgroup that multiplies an expert's rows, at most.
const EXPERT_THREADS: u32 = 256;
/// Threads of a workgroup that has fewer of them so that all cores have one, at least.
const LEAST_SPREAD: u32 = 128;
/// Rows of a subgroup where one has no more slices than it has threads.
const SHORT_ROWS: u32 = 4;

/// Where the activations come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Columns {
    /// As floats.
    Floats,
    /// Rounded by every workgroup for itself, in shared memory.
    Staged,
    /// Rounded by the launch before.
    Scratch,
    /// Rounded by who made them, copied to shared memory.
    Given,
}

fn unsupported<T>(reason: String) -> Result<T, Unsupported> {
    Err(Unsupported { operation: NAME, reason })
}

/// Whether rows begin at multiples of `bytes`. Unlike `formats::is_aligned` it asks the strides of single rows too, so
/// that a part of a tensor is read as the whole one.
fn aligned(t: &Tensor, bytes: usize) -> bool {
    t.offset.is_multiple_of(bytes) && t.stride[1..].iter().all(|s| s.is_multiple_of(bytes))
}

/// Activations that a workgroup multiplies.
fn columns(call: &Call) -> usize {
    if call.experts.is_some() { 1 } else { call.product.b.shape[1] }
}

/// Elements of a row: those of all experts where their results are summed.
fn row_elements(call: &Call) -> usize {
    call.product.b.shape[0] * call.summands()
}

/// Activations that path and split are chosen for.
fn columns_to_choose_for(call: &Call) -> usize {
    if call.batch_invariant { 1 } else { columns(call) }
}

/// Elements that a load of a plain type takes: 8, 4 or 1. Slices of quads have 4: neighbouring threads read neighbouring bytes of
/// the activations then, too.
fn width(call: &Call, a: &Tensor, slice: Slice) -> usize {
    match slice {
        Slice::Quads { .. } => widest(call, a).min(4),
        Slice::Groups(_) => widest(call, a),
    }
}

fn widest(call: &Call, a: &Tensor) -> usize {
    let (k, b) = (a.shape[0], &call.product.b);
    let four = k.is_multiple_of(4) && aligned(b, 4 * b.ty.block_bytes()) && whole_weight(call);
    let two_bytes = a.ty.block_bytes() == 2;
    match four {
        true if two_bytes && k.is_multiple_of(8) && aligned(a, 16) => 8,
        true if aligned(a, 4 * a.ty.block_bytes()) => 4,
        _ => 1,
    }
}

fn whole_weight(call: &Call) -> bool {
    call.norm.and_then(|norm| norm.weight).is_none_or(|weight| aligned(&weight, 16))
}

/// Matrices of equal format share launches.
fn launches(call: &Call) -> Vec<Vec<FusedProduct>> {
    let mut groups: Vec<Vec<FusedProduct>> = Vec::new();
    for matrix in call.matrices() {
        let stride = |s: &FusedProduct| (s.a.ty, s.a.stride[1], s.bias.is_some(), widest(call, &s.a));
        match groups.iter_mut().find(|g| stride(&g[0]) == stride(&matrix) && g.len() < MOST_MATRICES) {
            Some(group) => group.push(matrix),
            None => groups.push(vec![matrix]),
        }
    }
    groups
}

fn readable(call: &Call) -> Result<(), Unsupported> {
    let b = call.product.b;
    for FusedProduct { a, d, .. } in call.matrices() {
        formats::readable(NAME, &a)?;
        formats::rows_reachable(NAME, &[b, d])?;
        if a.ty.is_quantised() && (!aligned(&b, 4 * b.ty.block_bytes()) || !whole_weight(call)) {
            return unsupported(format!("columns {b} and the norm's weight must lie at multiples of four elements"));
        }
    }
    if !matches!(b.ty, TensorType::F32 | TensorType::F16) {
        return unsupported(format!("columns of {}; F32 and F16 are read", b.ty));
    }
    Ok(())
}

/// The paths a call can take on a device and where its activations come from, or why not.
fn columns_for(call: &Call, path: Path, caps: &Caps) -> Result<Columns, Unsupported> {
    match path {
        Path::Scalar => Ok(Columns::Floats),
        Path::IntDot => {
            if caps.int_dot == IntDot::None {
                return unsupported("the device has no integer dot products".into());
            }
            if let Some(plain) = call.matrices().iter().find(|m| !m.a.ty.is_quantised()) {
                return unsupported(format!("{} has no integer codes", plain.a.ty));
            }
            // Rounded up to whole passes of a team of the device's subgroups with two groups for each thread.
            let pass = 64 * caps.subgroups.size.clamp(1, MOST_SLICED_TEAM) as usize;
            let elements = columns(call) * row_elements(call).next_multiple_of(pass);
            // Codes, and a factor for 32 elements.
            let staged = elements * if call.exact { 17 } else { 9 } / 8;
            // Tables, and sums of groups of an activation vector's codes.
            let more = |f: &formats::Format| {
                let sums = if f.has_min || f.bias > 0 { 4 * elements / f.group } else { 0 };
                f.shared_bytes + sums
            };
            let more = call.matrices().iter().filter_map(|m| formats::format(m.a.ty)).map(more).max();
            // The rest is for partial sums.
            let fits = staged + more.unwrap_or(0) + (8 << 10) <= caps.limits.max_shared_bytes as usize;
            // Activations of experts that are summed are one long activation vector, whatever their length: rounded in memory they lie by 128 elements.
            let scratch = call.scratch.filter(|_| call.summands() == 1 || call.product.b.shape[0].is_multiple_of(128));
            match scratch {
                _ if call.rounded.is_some() && fits && staged <= MOST_STAGED => Ok(Columns::Given),
                _ if call.rounded.is_some() => {
                    unsupported(format!("{staged} bytes of a rounded column do not fit a workgroup"))
                }
                // A software GPU runs every workgroup on a few cores: rounding once is cheaper than in each of them.
                // Norms of activations have other bits where each workgroup rounds for itself.
                Some(_) if call.batch_invariant || caps.is_cpu || !fits || columns(call) > MAX_STAGED_N => {
                    Ok(Columns::Scratch)
                }
                Some(_) if staged > MOST_STAGED => Ok(Columns::Scratch),
                _ if fits && staged <= MOST_STAGED => Ok(Columns::Staged),
                _ => unsupported(format!("{staged} bytes of rounded columns need scratch memory")),
            }
        }
        other => unsupported(format!("no {} path", other.name())),
    }
}

pub(super) fn pick(call: &Call, caps: &Caps, want: Option<Path>) -> Result<Choice, Unsupported> {
    // A row of 4096 elements is one pass of 64 lanes, and one of 14336 three and a half; 32 lanes take it in 1.5 to 1.8 times fewer
    // cycles by the estimate of AMD's compiler (docs/amd.md).
    let caps = &*caps.narrowed();
    readable(call)?;
    let n = columns(call);
    if n > MAX_GEMV_N {
        return unsupported(format!("{n} columns, at most {MAX_GEMV_N}: more are for mul_mm"));
    }
    let (path, columns) = match want {
        Some(path) => (path, columns_for(call, path, caps)?),
        None => preferred(call, caps)?,
    };
    let mut choice = Choice { path, launches: Vec::new() };
    if columns == Columns::Scratch {
        choice.launches.push(quantise(call, caps)?);
    }
    let launches = launches(call);
    for (matrices, share) in launches.iter().zip(shares(&launches)) {
        choice.launches.push(product(call, (path, columns), (matrices, share), caps)?);
    }
    Ok(choice)
}

/// The share of the device's cores for each launch, by the bytes it reads: launches do not wait for each other, and run side by
/// side where together they have as many workgroups as run at once.
fn shares(launches: &[Vec<FusedProduct>]) -> Vec<f64> {
    let bytes =
        |matrices: &Vec<FusedProduct>| matrices.iter().map(|m| m.a.rows() * m.a.row_bytes()).sum::<usize>() as f64;
    let all: f64 = launches.iter().map(bytes).sum();
    launches.iter().map(|matrices| bytes(matrices) / all).collect()
}

/// The first path of the table that the call can take.
fn preferred(call: &Call, caps: &Caps) -> Result<(Path, Columns), Unsupported> {
    let table = table(caps).map_err(|reason| Unsupported { operation: NAME, reason })?;
    // A software GPU emulates integer products: twice as many of them, for 16 bits, or rounding in every small workgroup cost as
    // much as the product. Others that emulate them gain nothing.
    let rounded_once = call.scratch.is_some() && !call.exact;
    let worth_rounding = if caps.is_cpu { rounded_once } else { caps.int_dot == IntDot::Accelerated };
    // What comes rounded it multiplies so, too: the way of GPUs can be tried there.
    if caps.is_cpu && call.rounded.is_some() {
        return Ok((Path::IntDot, columns_for(call, Path::IntDot, caps)?));
    }
    let paths = table.paths(call.product.a.ty, columns_to_choose_for(call), caps);
    let mut paths = paths.filter(|&path| path != Path::IntDot || worth_rounding);
    let found = paths.find_map(|path| columns_for(call, path, caps).ok().map(|columns| (path, columns)));
    Ok(found.unwrap_or((Path::Scalar, Columns::Floats)))
}

pub(super) fn params(call: &Call, choice: &Choice, launch: usize, at: &dyn Fn(&Tensor) -> Address) -> Vec<u8> {
    let scratch = choice.launches[0].tag == ROUND;
    if scratch && launch == 0 {
        return quantise_block(call, at).bytes();
    }
    let columns = match choice.path {
        Path::IntDot if scratch => Columns::Scratch,
        Path::IntDot if call.rounded.is_some() => Columns::Given,
        Path::IntDot => Columns::Staged,
        _ => Columns::Floats,
    };
    product_block(call, columns, &launches(call)[launch - usize::from(scratch)], at).bytes()
}

/// Launches of different formats do not wait for each other: fused products go with neither a gate nor a residual.
pub(super) fn touches(call: &Call, choice: &Choice, launch: usize) -> Touches {
    let scratch = choice.launches[0].tag == ROUND;
    let rounded: Vec<Tensor> = call.scratch.into_iter().collect();
    let mut reads = call.reads();
    if scratch && launch == 0 {
        return Touches { reads, writes: rounded };
    }
    let results = launches(call)[launch - usize::from(scratch)].iter().map(|matrix| matrix.d).collect::<Vec<_>>();
    let left = call.rounding.map(|rounding| rounding.writes(&call.product.d));
    let writes = results.into_iter().chain(left.into_iter().flatten()).collect();
    reads.extend(rounded.into_iter().filter(|_| scratch));
    Touches { reads, writes }
}

/// Where things lie does not matter for a declaration.
fn nowhere(_: &Tensor) -> Address {
    Address::default()
}

fn norm_defines(call: &Call, from: Columns, shader: Shader) -> Shader {
    // Activations that were rounded by who made them have the weight in them.
    let weight = call.norm.and_then(|norm| norm.weight).filter(|_| from != Columns::Given);
    shader.define("NORM", u32::from(call.norm.is_some())).define("NORM_WEIGHT", u32::from(weight.is_some()))
}

fn quantise(call: &Call, caps: &Caps) -> Result<Launch, Unsupported> {
    let b = call.product.b;
    let name = format!("{NAME}.{}.quantise", b.ty.name().to_lowercase());
    // Groups of 32 elements are rounded by themselves: where no norm wants the sum of all, small workgroups share a long activation vector.
    let groups = b.shape[0].div_ceil(32);
    let (threads, parts) = match call.norm {
        _ if caps.is_cpu => (8, 1),
        Some(_) => (256, 1),
        None => (64, groups.div_ceil(64).max(1)),
    };
    let threads = threads.min(caps.limits.max_workgroup_invocations);
    let shader = Shader::new(name, "mul_mat_vec/quantise.comp", quantise_block(call, &nowhere).glsl())
        .define("WG", threads)
        .define("PARTS", parts)
        .define("WIDE", u32::from(call.exact))
        .define("SUBGROUPS", u32::from(caps.subgroups.arithmetic));
    let shader = formats::define(norm_defines(call, Columns::Scratch, shader), "B", b.ty)?;
    Ok(Launch::new(shader, grid(parts * b.rows(), caps)).tagged(ROUND))
}

fn quantise_block(call: &Call, at: &dyn Fn(&Tensor) -> Address) -> Block {
    let b = call.product.b;
    let scratch = call.scratch.as_ref().map_or(Address::default(), at);
    let mut block = Block::default();
    block.add("b", at(&b));
    block.add("scratch", scratch);
    if let Some(norm) = call.norm {
        block.add("factors", scratch.offset((b.rows() * activation_bytes(&b, call.exact)) as u64));
        if let Some(weight) = norm.weight {
            block.add("norm_weight", at(&weight));
        }
        block.add("eps", norm.eps);
    }
    block.add("b_stride", row_strides(&b));
    for (name, n) in [("columns", b.rows()), ("b1", b.shape[1]), ("b2", b.shape[2]), ("k", b.shape[0])] {
        block.add(name, count(n));
    }
    block.add("activation_bytes", count(activation_bytes(&b, call.exact)));
    block
}

fn count(n: usize) -> u32 {
    u32::try_from(n).expect("`rows_reachable` should have refused what does not fit 32 bits")
}

fn product(
    call: &Call,
    (path, from): (Path, Columns),
    (matrices, share): (&[FusedProduct], f64),
    caps: &Caps,
) -> Result<Launch, Unsupported> {
    let Product { b, .. } = call.product;
    let a = matrices[0].a;
    let columns = columns(call);
    let tuning = spread(call, tuning_of(call, path, a.ty, caps)?, (matrices, share), caps);
    let block = product_block(call, from, matrices, &nowhere);
    let limit = caps.limits.max_push_bytes as usize;
    let glsl = block.glsl();
    let bytes = block.bytes().len();
    if bytes > limit {
        return unsupported(format!("{bytes} bytes of parameters, the device takes {limit}"));
    }
    let size = caps.subgroups.size.max(1);
    let full = caps.subgroups.full && tuning.threads.is_multiple_of(size);
    let part = part_of_subgroup(call, &a, tuning, caps).filter(|_| full);
    let tuning =
        if part.is_some() { Tuning { rows: 1, prefetch: 1, persistent: 0, ring: false, ..tuning } } else { tuning };
    let whole = match tuning.row_group {
        RowGroup::Subgroup => size,
        RowGroup::Workgroup | RowGroup::Shared => tuning.threads,
        RowGroup::Thread => 1,
    };
    let row_group = part.unwrap_or(whole);
    let uses_subgroups = !matches!(tuning.row_group, RowGroup::Shared | RowGroup::Thread);
    let eights = size >= 8 && size.is_power_of_two() && caps.subgroups.shuffle;
    let subgroups_most = if full { tuning.threads / size } else { tuning.threads };
    let (quads, step, groups) = match tuning.slice {
        Slice::Quads { count, step } => (count, step, 0),
        Slice::Groups(n) => (0, 4, n),
    };
    let width = width(call, &a, tuning.slice);
    let slice = match (a.ty.is_quantised(), tuning.slice) {
        (false, _) => width,
        (true, Slice::Quads { count, .. }) => 4 * count as usize,
        (true, Slice::Groups(_)) => tuning.slice.span(),
    };
    let full_passes = row_elements(call).is_multiple_of(slice * row_group as usize);
    let even = row_elements(call).is_multiple_of(slice * row_group as usize * tuning.prefetch as usize);
    let name = format!("{NAME}.{}.{}", a.ty.name().to_lowercase(), path.name());
    let batches = batches(call);
    // Several batches have activations of their own each. The experts of one token that share its activation vector are more rows of it.
    let turns = if tuning.persistent > 0 { turns_of_experts(call) } else { 1 };
    let batches = batches / turns;
    let looping = tuning.persistent > 0 && batches == 1 && (call.experts.is_none() || call.summands() > 1 || turns > 1);
    let at_once = f64::from(caps.cores_or_guess() * tuning.persistent);
    let persistent = looping.then(|| ((at_once * share) as usize).max(1));
    let units: usize = matrices.iter().map(|m| m.a.shape[1].div_ceil(tuning.rows as usize)).sum::<usize>() * turns;
    let teams = (tuning.threads / row_group) as usize;
    let all = units.div_ceil(teams);
    let groups_at_once = persistent.map_or(all, |most| all.min(most));
    let in_shared = matches!(from, Columns::Staged | Columns::Given);
    let shuffles = full && eights && uses_subgroups;
    if (from == Columns::Given || call.rounding.is_some()) && !shuffles {
        return unsupported("rounded columns of neighbouring rows need full subgroups that shuffle".into());
    }
    let flags = [
        ("WG", tuning.threads),
        ("ROW_GROUP", row_group),
        ("PART", u32::from(part.is_some())),
        ("ROWS", tuning.rows),
        ("COLS", count(columns)),
        ("PREFETCH", tuning.prefetch),
        ("QUADS", quads),
        ("STEP", step),
        ("GROUPS", groups),
        ("WIDTH", count(width)),
        ("EVEN", u32::from(even)),
        ("RING", u32::from(tuning.ring)),
        ("FULL", u32::from(tuning.ring && full_passes)),
        ("K", count(row_elements(call))),
        ("SUBGROUPS", u32::from(uses_subgroups)),
        ("SUBGROUPS_MOST", subgroups_most),
        // Conversion costs a software GPU nothing extra.
        ("CONVERT", u32::from(caps.is_cpu)),
        ("A_TWO_BYTES", u32::from(a.ty.block_bytes() == 2)),
        ("A_BRAIN", u32::from(a.ty == TensorType::BF16)),
        ("INT", u32::from(path == Path::IntDot)),
        ("STAGED", u32::from(in_shared)),
        ("GIVEN", u32::from(from == Columns::Given)),
        ("WIDE", u32::from(path == Path::IntDot && call.exact)),
        ("SHUFFLES", u32::from(shuffles)),
        ("MATRICES", count(matrices.len())),
        ("BIAS", u32::from(matrices[0].bias.is_some())),
        ("RESIDUAL", u32::from(call.epilogue.residual.is_some())),
        ("BATCHES", u32::from(batches > 1 && call.experts.is_none())),
        ("EXPERTS", u32::from(call.experts.is_some())),
        ("SUMMED", if call.summands() > 1 { count(call.summands()) } else { 0 }),
        ("SUMMAND", count(b.shape[0])),
        ("TURNS", count(turns)),
        ("ROUTER", u32::from(call.experts.is_some_and(|experts| experts.weights.is_some()))),
        ("GATE", u32::from(call.gate.is_some())),
        ("SLICED", u32::from(in_shared && quads == 0 && row_group <= MOST_SLICED_TEAM)),
        ("PERSISTENT", u32::from(persistent.is_some())),
        ("FUNCTION", u32::from(call.function.is_some())),
        ("FACTOR", u32::from(call.factor.is_some())),
        ("UP_BIAS", u32::from(call.gate.is_some_and(|gate| gate.bias.is_some()))),
        ("ROUNDING", u32::from(call.rounding.is_some())),
    ];
    let mut shader = Shader::new(name, PRODUCT, glsl);
    // Only staged activations need the length of a row when compiled; elsewhere it would only multiply pipelines.
    let needed = |name: &str| match name {
        "K" => in_shared,
        "SUMMAND" => call.summands() > 1,
        _ => true,
    };
    for (name, value) in flags.into_iter().filter(|(name, _)| needed(name)) {
        shader = shader.define(name, value);
    }
    if call.batch_invariant {
        shader = shader.define("BATCH_INVARIANT", 1);
    }
    if let Some(function) = call.function {
        shader = shader.define("FUNCTION_OF", function.glsl());
    }
    if let Some(factor) = call.factor {
        shader = shader.define("FACTOR_OF", factor.function.glsl());
    }
    if let Some(rounding) = call.rounding {
        let made = rounding::turns(tuning, teams * tuning.rows as usize, [all, groups_at_once])?;
        shader = shader.define("MADE", made).define("ROUNDING_WEIGHT", u32::from(rounding.weight.is_some()));
    }
    if let Some(gate) = call.gate {
        let function = gate.kind.function().map_or("silu", crate::unary::Function::glsl);
        let oai = matches!(gate.kind, Gate::SwigluOai { .. });
        shader = shader.define("GATE_FUNCTION", function).define("GATE_OAI", u32::from(oai));
    }
    shader = norm_defines(call, from, shader);
    if uses_subgroups && full {
        let narrowed = caps.subgroups.size_control && size < caps.subgroups.max_size;
        let sized = part.is_some() || narrowed;
        let request = if sized { SubgroupRequest::Size(size) } else { SubgroupRequest::Full };
        shader = shader.subgroup(request);
    }
    let shader = formats::define(formats::define(shader, "A", a.ty)?, "B", b.ty)?;
    Ok(Launch::new(shader, grid(groups_at_once * batches, caps)))
}

fn batches(call: &Call) -> usize {
    match call.experts {
        Some(experts) => experts.ids.len() / call.summands(),
        None => call.product.b.shape[2] * call.product.b.shape[3],
    }
}

fn tuning_of(call: &Call, path: Path, ty: TensorType, caps: &Caps) -> Result<Tuning, Unsupported> {
    // The two matrices of a gate share each read of the activations as rows do.
    let gated = |t: Tuning| {
        let rows = if t.ring && call.gate.is_some() { (t.rows / 2).max(1) } else { t.rows };
        Tuning { rows, ..t }
    };
    if let Some(split) = call.split {
        if ty.is_quantised() && !ty.block_len().is_multiple_of(split.slice.span()) {
            return unsupported(format!("slices of {} elements do not divide blocks of {ty}", split.slice.span()));
        }
        return Ok(gated(bounded(split, caps)));
    }
    let table = table(caps).map_err(|reason| Unsupported { operation: NAME, reason })?;
    let found = table.find(ty, path, columns_to_choose_for(call), caps);
    let found = found.map(|tuning| gated(fitted(call, ty, tuning, caps)));
    found.ok_or_else(|| Unsupported { operation: NAME, reason: format!("no split for {ty} {}", path.name()) })
}

/// A workgroup for a row of fewer slices than it has threads would mostly be idle: such rows are for subgroups, and where
/// most of those would be idle too, each has several rows under way.
fn fitted(call: &Call, ty: TensorType, tuning: Tuning, caps: &Caps) -> Tuning {
    let slices = row_elements(call) / if ty.is_quantised() { tuning.slice.span() } else { 4 };
    if tuning.row_group != RowGroup::Workgroup || slices >= tuning.threads as usize {
        return tuning;
    }
    let rows = if slices <= caps.subgroups.size as usize { SHORT_ROWS } else { tuning.rows };
    bounded(Tuning { row_group: RowGroup::Subgroup, rows, ..tuning }, caps)
}

/// Experts of one token that share its activation vector: workgroups that go from row to row go from expert to expert, too. 1 where there are none.
fn turns_of_experts(call: &Call) -> usize {
    let shared = |experts: &Experts| !experts.summed && experts.ids.shape[1] == 1 && call.product.b.shape[1] == 1;
    call.experts.filter(shared).map_or(1, |experts| experts.ids.shape[0])
}

/// A large workgroup has room for no other on a core. Experts of several tokens have one row of workgroups each, which fill cores more
/// evenly if they are small, and a matrix of few rows is for all cores. Not with a norm: its bits would depend on the number of rows.
fn spread(call: &Call, tuning: Tuning, (matrices, share): (&[FusedProduct], f64), caps: &Caps) -> Tuning {
    let size = caps.subgroups.size.max(1);
    if tuning.row_group != RowGroup::Subgroup || call.split.is_some() || tuning.persistent == 0 {
        return tuning;
    }
    if call.experts.is_some() && call.summands() == 1 && turns_of_experts(call) == 1 {
        return Tuning { threads: tuning.threads.min(EXPERT_THREADS.max(size)), ..tuning };
    }
    let units =
        matrices.iter().map(|m| m.a.shape[1].div_ceil(tuning.rows as usize)).sum::<usize>() * turns_of_experts(call);
    let at_once = (f64::from(caps.cores_or_guess() * tuning.persistent) * share) as usize;
    let mut threads = tuning.threads;
    while call.norm.is_none()
        && threads >= 2 * LEAST_SPREAD.max(size)
        && 2 * units.div_ceil((threads / size) as usize) <= at_once
    {
        threads /= 2;
    }
    Tuning { threads, ..tuning }
}

/// Threads that share a row of a plain type where half of a subgroup or more would be idle: the low ranks of RWKV have rows of
/// 32 elements, eight loads.
fn part_of_subgroup(call: &Call, a: &Tensor, tuning: Tuning, caps: &Caps) -> Option<u32> {
    let subgroups = &caps.subgroups;
    let sized = subgroups.size_control || caps.is_cpu;
    if call.split.is_some()
        || a.ty.is_quantised()
        || tuning.row_group != RowGroup::Subgroup
        || !subgroups.shuffle
        || !sized
    {
        return None;
    }
    let threads = row_elements(call).div_ceil(width(call, a, tuning.slice)).next_power_of_two() as u32;
    (2 * threads <= subgroups.size).then_some(threads)
}

fn product_block(call: &Call, from: Columns, matrices: &[FusedProduct], at: &dyn Fn(&Tensor) -> Address) -> Block {
    let Product { a, b, .. } = call.product;
    let rounded = match from {
        Columns::Scratch => call.scratch,
        Columns::Given => call.rounded,
        Columns::Floats | Columns::Staged => None,
    };
    let mut block = Block::default();
    block.add("b", at(&rounded.unwrap_or(b)));
    for (i, FusedProduct { a, d, bias }) in matrices.iter().enumerate() {
        let name = |field: &str| if i == 0 { field.to_owned() } else { format!("{field}{i}") };
        block.add(&name("a"), at(a));
        block.add(&name("d"), at(d));
        if let Some(bias) = bias {
            block.add(&name("bias"), at(bias));
        }
        block.add(&name("m"), count(a.shape[1]));
        block.add(&name("d_stride"), row_strides(d)[0]);
    }
    if let Some(residual) = call.epilogue.residual {
        block.add("residual", at(&residual));
        block.add("residual_stride", row_strides(&residual)[0]);
    }
    if let Some(norm) = call.norm {
        if let (Some(weight), None) = (norm.weight, rounded) {
            block.add("norm_weight", at(&weight));
        }
        match rounded.filter(|_| from == Columns::Scratch) {
            Some(rounded) => {
                block.add("norm_factors", at(&rounded).offset((b.rows() * activation_bytes(&b, call.exact)) as u64))
            }
            None => block.add("eps", norm.eps),
        }
    }
    if let Some(gate) = call.gate {
        block.add("up", at(&gate.up));
        if let Some(bias) = gate.bias {
            block.add("up_bias", at(&bias));
        }
        if let Gate::SwigluOai { alpha, limit } = gate.kind {
            block.add("alpha", alpha);
            block.add("limit", limit);
        }
    }
    if let Some(factor) = call.factor {
        block.add("factor", at(&factor.gate));
        block.add("factor_stride", row_strides(&factor.gate)[0]);
    }
    if let Some(rounding) = call.rounding {
        block.add("rounding", at(&rounding.to));
        if let Some(weight) = rounding.weight {
            block.add("rounding_weight", at(&weight));
        }
    }
    block.add("k", count(row_elements(call)));
    block.add("a_stride", row_strides(&matrices[0].a)[0]);
    block.add("scale", call.epilogue.scale);
    // Rounded activations lie one after the other, in the order of b's.
    let column = |d: usize| count(activation_bytes(&b, call.exact) * b.shape[1..d].iter().product::<usize>());
    let b_stride = if rounded.is_some() { [column(1), column(2), column(3)] } else { row_strides(&b) };
    block.add("batches", count(batches(call)));
    if call.experts.is_some() {
        experts_block(call, b_stride, at, &mut block);
        return block;
    }
    block.add("b_stride", b_stride[0]);
    if batches(call) > 1 {
        let outer = |t: &Tensor| [row_strides(t)[1], row_strides(t)[2]];
        block.add("a_batch", outer(&a));
        block.add("b_batch", [b_stride[1], b_stride[2]]);
        block.add("d_batch", outer(&call.product.d));
        block.add("share", [count(b.shape[2] / a.shape[2]), count(b.shape[3] / a.shape[3])]);
        block.add("b2", count(b.shape[2]));
        if let Some(residual) = call.epilogue.residual {
            block.add("residual_batch", outer(&residual));
        }
    }
    block
}

fn experts_block(call: &Call, b_stride: [u32; 3], at: &dyn Fn(&Tensor) -> Address, block: &mut Block) {
    let Some(experts) = call.experts else { return };
    let Product { a, b, d } = call.product;
    block.add("ids", at(&experts.ids));
    block.add("ids_stride", row_strides(&experts.ids)[0]);
    if let Some(weights) = experts.weights {
        block.add("router", at(&weights));
        block.add("router_stride", row_strides(&weights)[0]);
    }
    block.add("used", count(experts.ids.shape[0]));
    block.add("a_expert", row_strides(&a)[1]);
    block.add("b1", count(b.shape[1]));
    block.add("b_slot", if b.shape[1] > 1 { b_stride[0] } else { 0 });
    block.add("b_token", b_stride[1]);
    let token = usize::from(call.summands() == 1 && !experts.summed);
    block.add("d_token", row_strides(&d)[token]);
    if let Some(residual) = call.epilogue.residual {
        block.add("residual_token", row_strides(&residual)[token]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::Level;

    #[test]
    fn every_case_has_its_paths() {
        let software = Caps { is_cpu: true, ..Caps::example_nvidia() };
        for caps in [Caps::least(), Caps::example_nvidia(), software] {
            for case in super::super::cases::cases(Level::Small) {
                let crate::Call::MulMatVec(call) = case.build().0 else { unreachable!("cases of this operation") };
                // Splits that make no whole groups of rows leave nothing rounded, on any path.
                if call.rounding.is_some() {
                    continue;
                }
                let scalar = pick(&call, &caps, Some(Path::Scalar)).expect("every case runs with floats");
                assert!(params(&call, &scalar, 0, &nowhere).len() <= 128, "{}", case.name);
                let integers = call.matrices().iter().all(|m| m.a.ty.is_quantised()) && caps.int_dot != IntDot::None;
                let picked = pick(&call, &caps, Some(Path::IntDot)).is_ok();
                // Large N of 16 bits need not fit.
                assert!(picked == integers || (integers && call.exact), "{}", case.name);
            }
        }
    }

    #[test]
    fn rounded_columns_are_taken_and_left_by_the_built_in_split() {
        let tensor = |slot, ty, shape| Tensor::dense(crate::tensor::Slot(slot), ty, shape);
        let memory = |slot, len| tensor(slot, TensorType::I8, [crate::rounded::bytes(len), 1, 1, 1]);
        let product = |k, m| Product {
            a: tensor(0, TensorType::Q4_K, [k, m, 1, 1]),
            b: tensor(1, TensorType::F32, [k, 1, 1, 1]),
            d: tensor(2, TensorType::F32, [m, 1, 1, 1]),
        };
        let rounding = |m| Some(crate::rounded::Rounding { to: memory(4, m), weight: None });
        let of = |k, m| Call { rounded: Some(memory(3, k)), rounding: rounding(m), ..Call::plain(product(k, m)) };
        let defines = |call: &Call, name: &str| {
            let choice = pick(call, &Caps::example_nvidia(), None).expect("an ordinary call");
            assert_eq!((choice.path, choice.launches.len()), (Path::IntDot, 1));
            let shader = &choice.launches[0].shader;
            let found = shader.defines.iter().find(|(define, _)| define == name).map(|(_, value)| value.clone());
            (found.expect("a known define"), choice.launches[0].groups[0])
        };
        assert_eq!(defines(&of(4096, 14336), "GIVEN"), ("1".into(), 132));
        assert_eq!(defines(&of(4096, 14336), "MADE"), ("4".into(), 132), "448 blocks of 32 rows");
        assert_eq!(defines(&of(14336, 4096), "MADE"), ("1".into(), 128));
        // With fewer rows, smaller workgroups are for all cores.
        let few = pick(&of(4096, 1024), &Caps::example_nvidia(), None).expect_err("8 rows are no group");
        assert!(few.reason.contains("neighbouring rows at a time"), "{few}");
    }

    #[test]
    fn siblings_of_one_format_share_a_launch() {
        let tensor = |slot, ty, shape| Tensor::dense(crate::tensor::Slot(slot), ty, shape);
        let matrix = |slot, ty, m| FusedProduct {
            a: tensor(slot, ty, [256, m, 1, 1]),
            d: tensor(slot + 1, TensorType::F32, [m, 1, 1, 1]),
            bias: None,
        };
        let q = matrix(0, TensorType::Q4_K, 64);
        let b = tensor(9, TensorType::F32, [256, 1, 1, 1]);
        let others = vec![matrix(2, TensorType::Q4_K, 16), matrix(4, TensorType::Q6_K, 16)];
        let call = Call { others, ..Call::plain(Product { a: q.a, b, d: q.d }) };
        let choice = pick(&call, &Caps::example_nvidia(), None).expect("an ordinary call");
        assert_eq!((choice.path, choice.launches.len()), (Path::IntDot, 2), "Q4_K together, Q6_K alone");
        let exact = Call { exact: true, ..call };
        let software = Caps { is_cpu: true, ..Caps::example_nvidia() };
        for (caps, path) in [(Caps::example_nvidia(), Path::IntDot), (software, Path::Scalar)] {
            assert_eq!(pick(&exact, &caps, None).expect("an ordinary call").path, path);
        }
    }

    #[test]
    fn launches_of_different_formats_have_the_cores_together() {
        let tensor = |slot, ty, shape| Tensor::dense(crate::tensor::Slot(slot), ty, shape);
        let matrix = |slot, ty, m| FusedProduct {
            a: tensor(slot, ty, [4096, m, 1, 1]),
            d: tensor(slot + 1, TensorType::F32, [m, 1, 1, 1]),
            bias: None,
        };
        let (q, k) = (matrix(0, TensorType::Q4_K, 4096), matrix(2, TensorType::Q4_K, 1024));
        let v = matrix(4, TensorType::Q6_Kx8, 1024);
        let b = tensor(9, TensorType::F32, [4096, 1, 1, 1]);
        let alone = Call::plain(Product { a: q.a, b, d: q.d });
        let groups = |call: &Call| -> Vec<u32> {
            let choice = pick(call, &Caps::example_nvidia(), None).expect("an ordinary call");
            choice.launches.iter().map(|launch| launch.groups[0]).collect()
        };
        assert_eq!(groups(&alone), [128], "a workgroup for 32 rows");
        assert_eq!(groups(&Call { others: vec![k], ..alone.clone() }), [132], "one for each core");
        let [most, few] = groups(&Call { others: vec![k, v], ..alone })[..] else {
            panic!("two formats, two launches")
        };
        assert!(most + few <= 132 && 3 * few < most && few > 20, "{most} and {few}: by the bytes they read");
    }
}
