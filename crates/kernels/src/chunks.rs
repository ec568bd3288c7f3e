//! States that are passed on from chunk to chunk, the tokens of a chunk by products of matrices: how `ssm_scan` and `gated_delta_net` divide
//! that work, and when they do it. `glsl/tiles.glsl` is the other half. What only a measurement can choose is a table of lines such as
//! `ssm_scan gpu coopmat from=64 chunk=32 cols=32 threads=128`, which may come from a file (see [`crate::tuning`]). A number is that of the
//! first line that fits and names it.

use std::sync::OnceLock;

use kiln_gpu::{Caps, Component, CoopmatShape, Scope, Shader, SubgroupRequest};

#[cfg(test)]
use crate::host::HostMemory;
use crate::operation::{Choice, Path, Unsupported};
use crate::recurrence::Form;
use crate::tuning;

// Why these: `docs/ladder/states.md`.
const BUILT_IN: &str = "
# operation device path numbers
* gpu coopmat from=64 threads=256
* * * chunk=32 cols=32 threads=128
";

/// Operations that have such lines.
const OPERATIONS: [&str; 2] = ["ssm_scan", "gated_delta_net"];
/// Names that lines may set. Sequences of at least `from` tokens run in chunks, of at least `vectors` tokens where every key has its own
/// decay; 0 stands for none, as no number does.
const NAMES: [&str; 5] = ["from", "vectors", "chunk", "cols", "threads"];
/// Sizes of tiles of plain arithmetic, and what chunks and columns are multiples of on every path.
pub(crate) const UNIT: usize = 16;

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    operation: String,
    device: String,
    path: Option<Path>,
    numbers: Vec<(String, usize)>,
}

fn parse_line(operation: &str, words: &[&str]) -> Option<Line> {
    let [device, path, numbers @ ..] = words else { return None };
    let path = match *path {
        "*" => None,
        name => Some(Path::ALL.into_iter().find(|p| p.name() == name)?),
    };
    let number = |word: &&str| {
        let (name, number) = word.split_once('=')?;
        NAMES.contains(&name).then_some((name.to_owned(), number.parse().ok()?))
    };
    let numbers = numbers.iter().map(number).collect::<Option<Vec<_>>>()?;
    let known = tuning::DEVICES.contains(device) && !numbers.is_empty();
    known.then(|| Line { operation: operation.to_owned(), device: (*device).to_owned(), path, numbers })
}

fn parse(text: &str) -> Result<Vec<Line>, String> {
    let read = |operation: &'static str| {
        tuning::lines(text, operation).map(move |(number, words)| {
            parse_line(operation, &words).ok_or_else(|| {
                let line = kiln_system::text::shown(&words.join(" "));
                format!("line {number}: `{line}` is not `device path name=number ..`, names of {NAMES:?}")
            })
        })
    };
    OPERATIONS.into_iter().flat_map(read).collect()
}

/// Whether the lines of these operations in a file can be read.
pub(crate) fn check_tuning(text: &str) -> Result<(), String> {
    parse(text).map(drop)
}

/// The table of this process: the file of `KILN_TUNING`, if there is one, then the built-in lines.
fn table() -> Result<&'static [Line], String> {
    static TABLE: OnceLock<Result<Vec<Line>, String>> = OnceLock::new();
    let load = || {
        let mut table = tuning::of_file(parse)?;
        let built_in = BUILT_IN.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let words = built_in.map(|line| line.split_whitespace().collect::<Vec<_>>());
        table.extend(words.filter_map(|words| parse_line(words[0], &words[1..])));
        Ok(table)
    };
    TABLE.get_or_init(load).as_deref().map_err(Clone::clone)
}

/// The number of this name for an operation on a path of a device.
fn number(operation: &str, caps: &Caps, path: Path, name: &str) -> Result<Option<usize>, String> {
    let fits = |line: &&Line| {
        let here = tuning::names_device(&line.device, caps) && line.path.is_none_or(|of| of == path);
        here && (line.operation == "*" || line.operation == operation)
    };
    let find = |line: &Line| line.numbers.iter().find(|(n, _)| n == name).map(|(_, number)| *number);
    Ok(table()?.iter().filter(fits).find_map(find))
}

/// What a form in chunks has to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    /// The operation's name.
    pub(crate) operation: &'static str,
    /// Columns of a state that are independent of each other: channels, values.
    pub(crate) columns: usize,
    /// States of this many columns.
    pub(crate) states: usize,
    /// Tokens of the longest sequence.
    pub(crate) longest: usize,
    /// Most tokens of a chunk.
    pub(crate) most_chunk: usize,
    /// Which of the table's names says how long sequences must be: `from` or `vectors`.
    pub(crate) from: &'static str,
}

/// How a workgroup divides the chunks of a state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Division {
    /// Tokens of a chunk.
    pub(crate) chunk: usize,
    /// Columns of a workgroup.
    pub(crate) cols: usize,
    /// Its threads.
    threads: usize,
    /// Size of tiles, both ways.
    pub(crate) tile: usize,
    /// Threads of a subgroup, where a tile is a matrix of one.
    subgroup: Option<usize>,
}

impl Division {
    /// The division on a path, or what is missing. `shared_bytes` tells what a division needs.
    pub(crate) fn new(
        task: &Task,
        caps: &Caps,
        path: Path,
        shared_bytes: impl Fn(&Division) -> usize,
    ) -> Result<Division, String> {
        let (tile, subgroup) = match path {
            Path::Scalar => (UNIT, None),
            _ => matrices(caps).map(|(tile, subgroup)| (tile, Some(subgroup)))?,
        };
        let of_table = |name| number(task.operation, caps, path, name).map(|n| n.unwrap_or(UNIT));
        let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]) as usize;
        let threads = of_table("threads")?.min(limit);
        // Few states are spread over more workgroups, for the price of the products that all columns share.
        let cores = if caps.is_cpu { 1 } else { caps.cores_or_guess() as usize };
        let mut widest = of_table("cols")?.min(task.columns.next_power_of_two());
        while widest > UNIT && task.states * task.columns.div_ceil(widest) < cores / 2 {
            widest /= 2;
        }
        let longest = of_table("chunk")?.min(task.most_chunk);
        let sizes = |most: usize| std::iter::successors(Some(most), |n| (*n > UNIT).then_some(n / 2));
        let all = sizes(longest).flat_map(|chunk| sizes(widest).map(move |cols| (chunk, cols)));
        let mut all = all.map(|(chunk, cols)| Division { chunk, cols, threads, tile, subgroup });
        let shared = caps.limits.max_shared_bytes as usize;
        let fits = |d: &Division| {
            let whole = [d.chunk, d.cols].iter().all(|n| n.is_power_of_two() && *n >= UNIT) && d.chunk <= d.threads;
            whole && d.threads.is_multiple_of(d.team()) && d.threads >= d.team() && shared_bytes(d) <= shared
        };
        all.find(fits).ok_or_else(|| {
            format!("no chunk of states of {} fits {shared} shared bytes and {threads} threads", task.columns)
        })
    }

    /// Threads of a team.
    fn team(&self) -> usize {
        self.subgroup.unwrap_or(self.tile * self.tile / 16)
    }

    /// Bytes of an operand in shared memory: `rows` of `width` elements.
    pub(crate) fn operand(&self, rows: usize, width: usize) -> usize {
        if self.subgroup.is_some() { rows * (width / 4 + 2) * 8 } else { Division::floats(rows, width) }
    }

    /// Bytes of sums in shared memory: `rows` of `width` elements.
    pub(crate) fn floats(rows: usize, width: usize) -> usize {
        rows * (width / 4 + 1) * 16
    }

    /// The shader with what `tiles.glsl` wants to know.
    pub(crate) fn defines(&self, shader: Shader, caps: &Caps) -> Shader {
        let shader = shader
            .define("CHUNK", self.chunk)
            .define("COLS", self.cols)
            .define("WG", self.threads)
            .define("MM", self.tile)
            .define("MATRICES", u32::from(self.subgroup.is_some()));
        let Some(subgroup) = self.subgroup else { return shader };
        let size = u32::try_from(subgroup).unwrap_or(u32::MAX);
        let request = if caps.subgroups.size_control { SubgroupRequest::Size(size) } else { SubgroupRequest::Full };
        // A software GPU takes long to compile unrolled products.
        let unroll = if caps.is_cpu { "[[dont_unroll]]" } else { "[[unroll]]" };
        shader.subgroup(request).define("SG", subgroup).define("STEP_LOOP", unroll)
    }
}

/// Size of square matrices of F16 with sums of F32, and the threads that share one; or what is missing.
fn matrices(caps: &Caps) -> Result<(usize, usize), String> {
    let square = |s: &&CoopmatShape| {
        let types = s.a == Component::F16 && s.b == s.a && s.c == Component::F32 && s.result == s.c;
        types && s.m == s.n && s.n == s.k && matches!(s.m, 8 | 16) && !s.saturating && s.scope == Scope::Subgroup
    };
    // Sums become operands again, as matrices of F16 instead of sums.
    let halves =
        |s: &&CoopmatShape| s.c == Component::F16 && s.result == s.c && s.a == s.c && s.b == s.c && !s.saturating;
    let shape = caps
        .coopmat
        .iter()
        .filter(square)
        .find(|shape| caps.coopmat.iter().filter(halves).any(|s| s.m == shape.m && s.n == shape.n));
    let shape = shape.ok_or("no 16x16x16 or 8x8x8 matrices of F16 with sums of F32 and of F16")?;
    let s = &caps.subgroups;
    if !caps.float16 || !s.full || !s.arithmetic {
        return Err("matrices need F16 arithmetic and full subgroups with arithmetic".into());
    }
    Ok((shape.m as usize, s.size as usize))
}

/// The form of a call: in chunks where that was asked for or is known to be faster, else token after token. `chunked` makes the choice of a
/// path in chunks, or says what is missing.
pub(crate) fn choose(
    task: &Task,
    caps: &Caps,
    (form, want): (Form, Option<Path>),
    chunked: impl Fn(Path) -> Result<Choice, String>,
    sequential: impl FnOnce() -> Choice,
) -> Result<Choice, Unsupported> {
    let operation = task.operation;
    let refuse = |reason: String| Unsupported { operation, reason };
    let takes = |path: Path| match form {
        Form::Auto => {
            number(operation, caps, path, task.from).is_ok_and(|from| from.is_some_and(|n| n > 0 && task.longest >= n))
        }
        Form::Sequential => false,
        Form::Chunked => true,
    };
    let paths = match want {
        None if caps.is_cpu => vec![Path::Scalar],
        None => vec![Path::Coopmat, Path::Scalar],
        Some(Path::Scalar) => vec![Path::Scalar],
        Some(Path::Coopmat) if takes(Path::Coopmat) => return chunked(Path::Coopmat).map_err(refuse),
        Some(Path::Coopmat) => return Err(refuse("only the chunked form has matrices".into())),
        Some(other) => return Err(refuse(format!("no {} path", other.name()))),
    };
    let mut missing = None;
    for path in paths.into_iter().filter(|path| takes(*path)) {
        match chunked(path) {
            Ok(choice) => return Ok(choice),
            Err(reason) => missing = Some(reason),
        }
    }
    match missing {
        Some(reason) if form == Form::Chunked => Err(refuse(reason)),
        _ => Ok(sequential()),
    }
}

/// Fails unless another definition of a call gives what its reference gives, up to the rounding of f32 where results are stored.
#[cfg(test)]
pub(crate) fn assert_same(memory: &HostMemory, name: &str, call: &crate::Call, other: impl FnOnce(&mut HostMemory)) {
    let operation = call.operation();
    let (mut got, mut want) = (memory.clone(), memory.clone());
    other(&mut got);
    operation.reference(&mut want);
    for t in operation.writes() {
        let (got, want) = (got.read(&t), want.read(&t));
        let error: f64 = got.iter().zip(&want).map(|(g, w)| (g - w).powi(2)).sum();
        let norm: f64 = want.iter().map(|w| w * w).sum();
        assert!(error <= 1e-13 * norm, "{name}: error {:.1e}", error / norm);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_the_device_the_path_and_numbers() {
        let lines =
            parse("mul_mm anything\nssm_scan gpu coopmat chunk=16 # why\ngated_delta_net * * from=0\n").unwrap();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].numbers, [("chunk".to_owned(), 16)]);
        for wrong in ["ssm_scan gpu coopmat speed=1", "ssm_scan big * from=1", "gated_delta_net gpu *", "ssm_scan gpu"]
        {
            assert!(parse(wrong).unwrap_err().starts_with("line 1"), "{wrong}");
        }
    }

    #[test]
    fn every_built_in_line_is_read() {
        let lines = BUILT_IN.lines().filter(|line| line.contains('='));
        assert!(lines.clone().count() > 1);
        let known = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            parse_line(words[0], &words[1..]).is_some()
        };
        assert!(lines.clone().all(known), "{BUILT_IN}");
    }

    #[test]
    fn chunks_shrink_until_they_fit() {
        let task =
            Task { operation: "ssm_scan", columns: 64, states: 128, longest: 2048, most_chunk: 64, from: "from" };
        let caps = Caps::example_nvidia();
        let bytes = |d: &Division| 1000 * d.chunk + d.cols;
        let division = Division::new(&task, &caps, Path::Coopmat, bytes).unwrap();
        assert_eq!((division.chunk, division.cols), (32, 32));
        let division = Division::new(&task, &caps, Path::Scalar, |d| 2 * bytes(d)).unwrap();
        assert_eq!(division.chunk, 16);
        let few = Division::new(&Task { states: 4, ..task }, &caps, Path::Coopmat, bytes).unwrap();
        assert_eq!(few.cols, 16, "few states are spread over more workgroups");
        assert!(
            Division::new(&task, &caps, Path::Scalar, |_| usize::MAX).unwrap_err().contains("fits 49152 shared bytes")
        );
    }
}
