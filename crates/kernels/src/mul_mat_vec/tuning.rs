//! How a call's work is split among threads, as a table: by format, path, number of columns and kind of device. The first
//! line that fits is taken, and where a call can take several paths its path too. A file named by `KILN_TUNING` in the
//! same form goes before the lines that `kiln tune` kept for the device, and those before the built-in ones.

use std::fmt;
use std::sync::OnceLock;

use kiln_gguf::TensorType;
use kiln_gpu::Caps;
use kiln_system::text::shown;

use super::{NAME, rounding};
use crate::operation::Path;
use crate::tuning;
pub use crate::tuning::FILE as TUNING_FILE;

/// What a thread loads and multiplies at once (`slices.glsl`). Plain types have slices of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slice {
    /// `count` quads of four elements, `step` elements apart.
    Quads {
        /// How many.
        count: u32,
        /// Elements from one to the next.
        step: u32,
    },
    /// This many groups of 32 elements.
    Groups(u32),
}

impl Slice {
    /// Elements after which the pattern begins anew; a row must be a whole number of them.
    pub fn span(self) -> usize {
        match self {
            Slice::Quads { count, step } => (count * step) as usize,
            Slice::Groups(n) => 32 * n as usize,
        }
    }
}

/// Which threads share the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Team {
    /// A subgroup: several of them in a workgroup have rows of their own.
    Subgroup,
    /// The whole workgroup: subgroups add, then shared memory.
    Workgroup,
    /// The whole workgroup, by shared memory alone: for devices without subgroup arithmetic.
    Shared,
    /// Nobody shares: every thread has rows of its own. All threads read the same elements of a column at once, which a software
    /// GPU loads once for all of them.
    Thread,
}

/// One way to split the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Threads of a workgroup, a power of two.
    pub threads: u32,
    /// Which of them share a row.
    pub team: Team,
    /// Rows of a team.
    pub rows: u32,
    /// Slices of each row that are loaded before the first is multiplied.
    pub flight: u32,
    /// What a slice is.
    pub slice: Slice,
    /// Workgroups for each core of the device that go from row to row; 0 for as many as there are rows.
    pub loops: u32,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// `cpu`, `gpu`, `wide` or `*` ([`tuning::names_device`]).
    pub device: String,
    /// The format's name in small letters, or several formats as [`tuning::names_format`] has them: `*` is every one.
    pub format: String,
    /// The path.
    pub path: Path,
    /// The most columns the line is for.
    pub columns: usize,
    /// The split.
    pub tuning: Tuning,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line { device, format, path, columns, tuning } = self;
        let Tuning { threads, team, rows, flight, slice, loops } = tuning;
        let team = match team {
            Team::Subgroup => "subgroup",
            Team::Workgroup => "workgroup",
            Team::Shared => "shared",
            Team::Thread => "thread",
        };
        write!(f, "{device} {format} {} {columns} {threads} {team} {rows} {flight} ", path.name())?;
        match slice {
            Slice::Quads { count, step } => write!(f, "quads:{count}x{step}")?,
            Slice::Groups(n) => write!(f, "groups:{n}")?,
        }
        if *loops > 0 { write!(f, " loop:{loops}") } else { Ok(()) }
    }
}

// Why these: `docs/ladder/mul_mat_vec.md`; `wide`: `docs/amd.md`. Numbers of threads are bounded by the device; a slice whose span does not
// divide the format's block, and `subgroup` where a device cannot promise full subgroups, are passed over.
const BUILT_IN: &str = "
# device format path columns threads team rows flight slice [loop]
cpu *    scalar  2   16 thread   1 1 groups:1
cpu *    int_dot 4   64 subgroup  4 1 groups:1
cpu *    int_dot 16  64 subgroup  2 1 groups:1
cpu *    scalar  8   8 subgroup  8 1 groups:1
cpu *    scalar  16  8 subgroup  4 1 groups:1
wide q4_k int_dot 3  1024 subgroup 1 1 groups:1 loop:1
wide q5_k int_dot 3  1024 subgroup 1 1 groups:1 loop:1
wide packed int_dot 3 1024 subgroup 1 1 groups:1 loop:1
wide q4_k scalar 1   128 subgroup 2 1 groups:1
wide q5_k scalar 1   128 subgroup 2 1 groups:1
gpu f32  scalar  16  256 workgroup 1 4 groups:1
gpu f16  scalar  1   256 subgroup 1 8 quads:1x4 loop:4
gpu f16  scalar  16  128 subgroup 4 4 quads:1x4
gpu bf16 scalar  1   256 subgroup 1 8 quads:1x4 loop:4
gpu bf16 scalar  16  128 subgroup 4 4 quads:1x4
gpu q4_k int_dot 3   1024 subgroup 1 1 groups:2 loop:1
gpu q4_k int_dot 5   128 subgroup 4 1 groups:1
gpu q4_k int_dot 16  128 subgroup 2 1 groups:1
gpu q5_k int_dot 3   1024 subgroup 1 1 groups:2 loop:1
gpu q5_k int_dot 16  128 subgroup 2 1 groups:1
gpu q6_k int_dot 1   256 subgroup 2 2 quads:4x32
gpu q6_k int_dot 16  128 subgroup 1 2 quads:4x32
gpu mxfp4x30 int_dot 3 1024 subgroup 1 2 groups:1 loop:1
gpu packed int_dot 3  1024 subgroup 1 1 groups:2 loop:1
gpu packed int_dot 16 128 subgroup 2 1 groups:1
gpu k/*  int_dot 3   1024 subgroup 1 1 groups:1 loop:1
gpu nvfp4 int_dot 3  1024 subgroup 1 2 groups:1 loop:1
gpu nvfp4 int_dot 4  256 subgroup 2 1 groups:1
gpu nvfp4 int_dot 16 128 subgroup 1 1 groups:1
gpu *    int_dot 3   1024 subgroup 1 2 quads:2x16 loop:1
gpu *    int_dot 4   256 subgroup 2 2 quads:2x16
gpu *    int_dot 16  128 subgroup 1 2 quads:2x16
gpu q4_k scalar  1   128 subgroup 2 1 groups:2
gpu q5_k scalar  1   128 subgroup 2 1 groups:2
gpu q6_k scalar  1   128 subgroup 2 1 quads:4x32
gpu packed scalar 4   128 subgroup 2 1 groups:1
gpu packed scalar 16  128 subgroup 1 1 groups:1
gpu k/*  scalar  4   128 subgroup 2 1 groups:1
gpu nvfp4 scalar 4   128 subgroup 2 1 groups:1
gpu nvfp4 scalar 16  128 subgroup 1 1 groups:1
gpu *    scalar  1   128 subgroup 4 2 quads:2x16
gpu *    scalar  4   128 subgroup 2 1 quads:2x16
gpu *    scalar  16  128 subgroup 1 1 quads:2x16
";

/// Lines, first one first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table(pub Vec<Line>);

impl Table {
    /// Reads lines of `device format path columns threads team rows flight slice [loop]`; `#` begins a comment.
    pub fn parse(text: &str) -> Result<Table, String> {
        let mut lines = Vec::new();
        for (number, words) in tuning::lines(text, NAME).filter(|(_, words)| !rounding::is_switch(words)) {
            let line = parse_line(&words).map_err(|why| {
                let line = shown(&words.join(" "));
                format!("line {number}: `{line}`: {why}; a line is `device format path columns threads team rows flight slice [loop:N]`")
            })?;
            lines.push(line);
        }
        Ok(Table(lines))
    }

    /// The split for a format on a path, from the first line that fits a device.
    pub fn find(&self, ty: TensorType, path: Path, columns: usize, caps: &Caps) -> Option<Tuning> {
        self.fitting(ty, columns, caps).find(|line| line.path == path).map(|line| bounded(line.tuning, caps))
    }

    /// The paths for a format, best first; a path may come twice.
    pub fn paths(&self, ty: TensorType, columns: usize, caps: &Caps) -> impl Iterator<Item = Path> {
        self.fitting(ty, columns, caps).map(|line| line.path)
    }

    /// The lines for a format and a number of columns.
    fn fitting(&self, ty: TensorType, columns: usize, caps: &Caps) -> impl Iterator<Item = &Line> {
        let fits = move |line: &&Line| {
            let named = tuning::names_format(&line.format, ty);
            let whole = !ty.is_quantised() || ty.block_len().is_multiple_of(line.tuning.slice.span());
            named && whole && tuning::names_device(&line.device, caps) && columns <= line.columns
        };
        self.0.iter().filter(fits)
    }
}

/// Within what the device can do.
pub(super) fn bounded(tuning: Tuning, caps: &Caps) -> Tuning {
    let limit = caps.limits.max_workgroup_invocations.min(caps.limits.max_workgroup_size[0]);
    let power = |n: u32| if n.is_power_of_two() { n } else { n.next_power_of_two() / 2 };
    let (size, limit) = (caps.subgroups.size.max(1), power(limit));
    let full = caps.subgroups.full && size.is_power_of_two();
    let (team, threads) = match tuning.team {
        Team::Subgroup if caps.subgroups.arithmetic && full => (Team::Subgroup, tuning.threads.max(size)),
        // Without full subgroups a team is a workgroup, and then a small one: it has as few rows as a subgroup would.
        Team::Subgroup => (Team::Workgroup, tuning.threads.min(32)),
        other => (other, tuning.threads),
    };
    let team = if caps.subgroups.arithmetic || team == Team::Thread { team } else { Team::Shared };
    Tuning { threads: threads.min(limit), team, ..tuning }
}

fn parse_line(words: &[&str]) -> Result<Line, String> {
    let [device, format, path, columns, threads, team, rows, flight, slice, rest @ ..] = words else {
        return Err(format!("{} words, at least 9 belong there", words.len()));
    };
    let wrong = |what: &'static str, word: &str, want: &str| format!("{what} is `{}`, want {want}", shown(word));
    if !tuning::DEVICES.contains(device) {
        return Err(wrong("device", device, "cpu, gpu, wide or *"));
    }
    let names = || Path::ALL.map(Path::name).join(", ");
    let path = Path::ALL.into_iter().find(|p| p.name() == *path).ok_or_else(|| wrong("path", path, &names()))?;
    let team = match *team {
        "subgroup" => Team::Subgroup,
        "workgroup" => Team::Workgroup,
        "shared" => Team::Shared,
        "thread" => Team::Thread,
        other => return Err(wrong("team", other, "subgroup, workgroup, shared or thread")),
    };
    let count = |what: &'static str, word: &str| -> Result<u32, String> {
        let number = word.parse().ok().filter(|n| (1..=1024u32).contains(n));
        number.ok_or_else(|| wrong(what, word, "1 to 1024"))
    };
    let (kind, numbers) = slice.split_once(':').unwrap_or((slice, ""));
    let slice_of = match (kind, numbers.split_once('x')) {
        ("quads", Some((number, step))) => {
            Slice::Quads { count: count("slice", number)?, step: count("slice", step)? }
        }
        ("groups", None) if !numbers.is_empty() => Slice::Groups(count("slice", numbers)?),
        _ => return Err(wrong("slice", slice, "groups:N or quads:NxN")),
    };
    let loops = match rest {
        [] => 0,
        [word] => count("loop", word.strip_prefix("loop:").ok_or_else(|| wrong("loop", word, "loop:N"))?)?,
        _ => return Err(format!("{} words, at most 10 belong there", words.len())),
    };
    let (rows, flight) = (count("rows", rows)?, count("flight", flight)?);
    let threads_of = count("threads", threads)?;
    if !threads_of.is_power_of_two() {
        return Err(wrong("threads", threads, "a power of two"));
    }
    let tuning = Tuning { threads: threads_of, team, rows, flight, slice: slice_of, loops };
    let columns = columns.parse().map_err(|_| wrong("columns", columns, "a number"))?;
    Ok(Line { device: (*device).to_owned(), format: (*format).to_owned(), path, columns, tuning })
}

/// Whether the lines of this operation in a file can be read.
pub(crate) fn check(text: &str) -> Result<(), String> {
    Table::parse(text)?;
    rounding::check(text)
}

/// The table of this process: the file of `KILN_TUNING`, if there is one, then what was found on the device, then the
/// built-in lines.
pub fn table() -> Result<&'static Table, String> {
    static TABLE: OnceLock<Result<Table, String>> = OnceLock::new();
    let load = || {
        let mut table = tuning::of_file(Table::parse)?;
        table.0.extend(tuning::kept(Table::parse).unwrap_or_default().0);
        table.0.extend(Table::parse(BUILT_IN)?.0);
        Ok(table)
    };
    TABLE.get_or_init(load).as_ref().map_err(Clone::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_lines_serve_every_format_path_and_width() {
        let table = Table::parse(BUILT_IN).unwrap();
        for caps in [Caps::least(), Caps::example_nvidia(), Caps { is_cpu: true, ..Caps::example_nvidia() }] {
            for format in crate::formats::FORMATS {
                for columns in 1..=16 {
                    let tuning = table.find(format.ty, Path::Scalar, columns, &caps).unwrap();
                    assert!(tuning.threads <= caps.limits.max_workgroup_invocations);
                    if format.group > 0 {
                        assert!(table.find(format.ty, Path::IntDot, columns, &caps).is_some(), "{}", format.ty);
                        assert!(format.ty.block_len().is_multiple_of(tuning.slice.span()));
                    }
                }
            }
        }
    }

    #[test]
    fn lines_are_written_as_they_are_read() {
        let table = Table::parse(BUILT_IN).unwrap();
        let text: String = table.0.iter().map(|line| format!("{line}\n")).collect();
        assert_eq!(Table::parse(&text), Ok(table));
    }

    #[test]
    fn the_order_of_lines_is_that_of_preference() {
        let text = "gpu q4_k scalar 1 64 subgroup 1 1 groups:1\ngpu q4_k int_dot 16 64 subgroup 1 1 groups:1";
        let table = Table::parse(text).unwrap();
        let first = |columns| table.paths(TensorType::Q4_K, columns, &Caps::example_nvidia()).next();
        assert_eq!((first(1), first(2)), (Some(Path::Scalar), Some(Path::IntDot)));
        assert_eq!(table.paths(TensorType::Q8_0, 1, &Caps::example_nvidia()).next(), None);
    }

    #[test]
    fn lines_that_say_nothing_are_refused() {
        assert_eq!(Table::parse("# only a comment\n\n").unwrap(), Table::default());
        let wrong = "gpu q4_k int_dot 1 100 subgroup 2 1 groups:2";
        assert!(Table::parse(wrong).unwrap_err().contains("threads is `100`"), "100 threads are no power of two");
        // Every message says which word is wrong.
        for (line, word) in [
            ("gpu q4_k int_dot 1 64 subgroup 2 1 groups", "slice is `groups`"),
            ("gpu q4_k fast 1 64 subgroup 2 1 groups:1", "path is `fast`"),
            ("fpu q4_k int_dot 1 64 subgroup 2 1 groups:1", "device is `fpu`"),
            ("gpu q4_k int_dot x 64 subgroup 2 1 groups:1", "columns is `x`"),
            ("gpu q4_k int_dot 1 64 crowd 2 1 groups:1", "team is `crowd`"),
            ("gpu q4_k int_dot 1 64 subgroup 0 1 groups:1", "rows is `0`"),
            ("gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 loop", "loop is `loop`"),
            ("gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 loop:1 more", "at most 10"),
            ("gpu q4_k \x1b[2J", "words"),
        ] {
            let error = Table::parse(line).unwrap_err();
            assert!(error.starts_with("line 1") && error.contains(word), "{error}");
            assert!(!error.contains('\x1b'));
        }
        let line = &Table::parse("cpu * scalar 4 64 workgroup 2 1 quads:2x16").unwrap().0[0];
        assert_eq!(line.tuning.slice, Slice::Quads { count: 2, step: 16 });
        assert_eq!(line.tuning.team, Team::Workgroup);
    }
}
