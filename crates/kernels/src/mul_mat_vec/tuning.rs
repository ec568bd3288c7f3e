//! How a call's work is split among threads, as a table: by format, path, N and kind of device. The first
//! line that fits is taken, and where a call can take several paths its path too. A file named by `KILN_TUNING` in the
//! same form goes before the lines that `kiln tune` kept for the device, and those before the built-in ones.

use std::fmt;

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

/// Which threads share a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowGroup {
    /// A subgroup: several of them in a workgroup have rows of their own.
    Subgroup,
    /// The whole workgroup: subgroups add, then shared memory.
    Workgroup,
    /// The whole workgroup, by shared memory alone: for devices without subgroup arithmetic.
    Shared,
    /// Each thread has rows of its own. All threads read the same activations at once, which a software GPU loads once for all of
    /// them.
    Thread,
}

/// One way to split the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Threads of a workgroup, a power of two.
    pub threads: u32,
    /// Which of them share a row.
    pub row_group: RowGroup,
    /// Rows of a team.
    pub rows: u32,
    /// Prefetch depth: slices of each row that are loaded before the first is multiplied.
    pub prefetch: u32,
    /// What a slice is.
    pub slice: Slice,
    /// Persistent workgroups per core, which loop over rows; 0 launches one workgroup for every few rows.
    pub persistent: u32,
    /// Loads stand behind no condition: a thread with nothing left to load loads its last slice again. With a gate, whose two matrices
    /// share each read of the activations, `rows` are those of both.
    pub ring: bool,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// `cpu`, `gpu`, `wide`, `mma` or `*` ([`tuning::names_device`]).
    pub device: String,
    /// The format's name in small letters, or several formats as [`tuning::names_format`] has them: `*` is every one.
    pub format: String,
    /// The path.
    pub path: Path,
    /// the largest N the line is for.
    pub columns: usize,
    /// The split.
    pub tuning: Tuning,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Line { device, format, path, columns, tuning } = self;
        let Tuning { threads, row_group, rows, prefetch, slice, persistent, ring } = tuning;
        let row_group = match row_group {
            RowGroup::Subgroup => "subgroup",
            RowGroup::Workgroup => "workgroup",
            RowGroup::Shared => "shared",
            RowGroup::Thread => "thread",
        };
        write!(f, "{device} {format} {} {columns} {threads} {row_group} {rows} {prefetch} ", path.name())?;
        match slice {
            Slice::Quads { count, step } => write!(f, "quads:{count}x{step}")?,
            Slice::Groups(n) => write!(f, "groups:{n}")?,
        }
        if *persistent > 0 {
            write!(f, " persistent:{persistent}")?;
        }
        if *ring { write!(f, " ring") } else { Ok(()) }
    }
}

// Why these: `docs/ladder/mul_mat_vec.md`; `wide`: `docs/amd.md`. Numbers of threads are bounded by the device; a slice whose span does not
// divide the format's block, and `subgroup` where a device cannot promise full subgroups, are passed over.
const BUILT_IN: &str = "
# device format path columns threads row_group rows prefetch slice [persistent] [ring]
cpu *    scalar  2   16 thread   1 1 groups:1
cpu *    int_dot 4   64 subgroup  4 1 groups:1
cpu *    int_dot 16  64 subgroup  2 1 groups:1
cpu *    scalar  8   8 subgroup  8 1 groups:1
cpu *    scalar  16  8 subgroup  4 1 groups:1
wide q4_k int_dot 3  1024 subgroup 1 1 groups:1 persistent:1
wide q5_k int_dot 3  1024 subgroup 1 1 groups:1 persistent:1
wide packed int_dot 3 1024 subgroup 1 1 groups:1 persistent:1
wide q4_k scalar 1   128 subgroup 2 1 groups:1
wide q5_k scalar 1   128 subgroup 2 1 groups:1
gpu f32  scalar  16  256 workgroup 1 4 groups:1
gpu f16  scalar  1   256 subgroup 1 8 quads:1x4 persistent:4
gpu f16  scalar  16  128 subgroup 4 4 quads:1x4
gpu bf16 scalar  1   256 subgroup 1 8 quads:1x4 persistent:4
gpu bf16 scalar  16  128 subgroup 4 4 quads:1x4
mma q4_k int_dot 1   1024 subgroup 1 1 groups:2 persistent:1 ring
gpu q4_k int_dot 3   1024 subgroup 1 1 groups:2 persistent:1
gpu q4_k int_dot 5   128 subgroup 4 1 groups:1
gpu q4_k int_dot 16  128 subgroup 2 1 groups:1
gpu q5_k int_dot 3   1024 subgroup 1 1 groups:2 persistent:1
gpu q5_k int_dot 16  128 subgroup 2 1 groups:1
gpu q6_k int_dot 1   256 subgroup 2 2 quads:4x32
gpu q6_k int_dot 16  128 subgroup 1 2 quads:4x32
gpu mxfp4x30 int_dot 3 1024 subgroup 1 2 groups:1 persistent:1
mma q4_0x8 int_dot 1 1024 subgroup 1 1 groups:2 persistent:1 ring
gpu packed int_dot 3  1024 subgroup 1 1 groups:2 persistent:1
gpu packed int_dot 16 128 subgroup 2 1 groups:1
gpu k/*  int_dot 3   1024 subgroup 1 1 groups:1 persistent:1
gpu nvfp4 int_dot 3  1024 subgroup 1 2 groups:1 persistent:1
gpu nvfp4 int_dot 4  256 subgroup 2 1 groups:1
gpu nvfp4 int_dot 16 128 subgroup 1 1 groups:1
gpu *    int_dot 3   1024 subgroup 1 2 quads:2x16 persistent:1
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
    /// Reads lines of `device format path activations threads row_group rows prefetch slice [persistent] [ring]`; `#` begins a comment.
    pub fn parse(text: &str) -> Result<Table, String> {
        let mut lines = Vec::new();
        for (number, words) in tuning::lines(text, NAME).filter(|(_, words)| !rounding::is_switch(words)) {
            let line = parse_line(&words).map_err(|why| {
                let line = shown(&words.join(" "));
                format!("line {number}: `{line}`: {why}; a line is `device format path columns threads row_group rows flight slice [persistent:N] [ring]`")
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

    /// The lines for a format and N.
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
    let (row_group, threads) = match tuning.row_group {
        RowGroup::Subgroup if caps.subgroups.arithmetic && full => (RowGroup::Subgroup, tuning.threads.max(size)),
        // Without full subgroups a team is a workgroup, and then a small one: it has as few rows as a subgroup would.
        RowGroup::Subgroup => (RowGroup::Workgroup, tuning.threads.min(32)),
        other => (other, tuning.threads),
    };
    let row_group =
        if caps.subgroups.arithmetic || row_group == RowGroup::Thread { row_group } else { RowGroup::Shared };
    Tuning { threads: threads.min(limit), row_group, ..tuning }
}

fn parse_line(words: &[&str]) -> Result<Line, String> {
    let [device, format, path, columns, threads, row_group, rows, prefetch, slice, rest @ ..] = words else {
        return Err(format!("{} words, at least 9 belong there", words.len()));
    };
    let wrong = |what: &'static str, word: &str, want: &str| format!("{what} is `{}`, want {want}", shown(word));
    if !tuning::DEVICES.contains(device) {
        return Err(wrong("device", device, "cpu, gpu, wide, mma or *"));
    }
    let names = || Path::ALL.map(Path::name).join(", ");
    let path = Path::ALL.into_iter().find(|p| p.name() == *path).ok_or_else(|| wrong("path", path, &names()))?;
    let row_group = match *row_group {
        "subgroup" => RowGroup::Subgroup,
        "workgroup" => RowGroup::Workgroup,
        "shared" => RowGroup::Shared,
        "thread" => RowGroup::Thread,
        other => return Err(wrong("row_group", other, "subgroup, workgroup, shared or thread")),
    };
    let count = |what: &'static str, word: &str| -> Result<u32, String> {
        let number = word.parse().ok().filter(|n| (1..=1024u32).contains(n));
        number.ok_or_else(|| wrong(what, word, "1 to 1024"))
    };
    let (kind, numbers) = slice.split_once(':').unwrap_or((slice, ""));
    let slice_of = match (kind, numbers.split_once('x')) {
        ("quads", Some((number, step))) => Slice::Quads { count: count("slice", number)?, step: count("slice", step)? },
        ("groups", None) if !numbers.is_empty() => Slice::Groups(count("slice", numbers)?),
        _ => return Err(wrong("slice", slice, "groups:N or quads:NxN")),
    };
    let (ring, rest) = match rest {
        [rest @ .., "ring"] => (true, rest),
        rest => (false, rest),
    };
    let persistent = match rest {
        [] => 0,
        [word] => count(
            "persistent",
            word.strip_prefix("persistent:").ok_or_else(|| wrong("persistent", word, "persistent:N or ring"))?,
        )?,
        _ => return Err(format!("{} words, at most 11 belong there", words.len())),
    };
    let (rows, prefetch) = (count("rows", rows)?, count("prefetch", prefetch)?);
    let threads_of = count("threads", threads)?;
    if !threads_of.is_power_of_two() {
        return Err(wrong("threads", threads, "a power of two"));
    }
    let tuning = Tuning { threads: threads_of, row_group, rows, prefetch, slice: slice_of, persistent, ring };
    let columns = columns.parse().map_err(|_| wrong("columns", columns, "a number"))?;
    Ok(Line { device: (*device).to_owned(), format: (*format).to_owned(), path, columns, tuning })
}

/// Whether the lines of this operation in a file can be read.
pub(crate) fn check(text: &str) -> Result<(), String> {
    Table::parse(text)?;
    rounding::check(text)
}

/// The table of a device: the file of `KILN_TUNING`, if there is one, then what was found on the device, then the
/// built-in lines.
pub fn table(caps: &Caps) -> Result<&'static Table, String> {
    static TABLES: tuning::Tables<Table> = tuning::Tables::new();
    TABLES.with(caps.tuned.as_ref(), |tuned| {
        let mut table = tuning::of_file(Table::parse)?;
        table.0.extend(tuning::found(tuned, Table::parse).0);
        table.0.extend(Table::parse(BUILT_IN)?.0);
        Ok(table)
    })
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
    fn every_device_has_the_lines_that_were_found_on_it() {
        let with = |text: &str| Caps { tuned: Some(text.into()), ..Caps::example_nvidia() };
        let [first, second, spoilt] = [
            with("gpu q4_k int_dot 1 64 subgroup 3 1 groups:1"),
            with("gpu q4_k int_dot 1 64 subgroup 5 1 groups:1"),
            with("gpu q4_k int_dot what"),
        ];
        let plain = Caps::example_nvidia();
        let rows = |caps: &Caps| table(caps).unwrap().find(TensorType::Q4_K, Path::IntDot, 1, caps).unwrap().rows;
        // In one process, whichever is asked for first.
        assert_eq!([&plain, &first, &second, &first, &spoilt, &plain].map(rows), [1, 3, 5, 3, 1, 1]);
        assert!(std::ptr::eq(table(&first).unwrap(), table(&with(first.tuned.as_deref().unwrap())).unwrap()));
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
            ("gpu q4_k int_dot 1 64 crowd 2 1 groups:1", "row_group is `crowd`"),
            ("gpu q4_k int_dot 1 64 subgroup 0 1 groups:1", "rows is `0`"),
            ("gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 persistent", "persistent is `persistent`"),
            ("gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 ring persistent:1 ring", "at most 11"),
            ("gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 rings", "persistent is `rings`"),
            ("gpu q4_k int_dot 1 64 subgroup 1 1 groups:1 persistent:1 more", "at most 11"),
            ("gpu q4_k \x1b[2J", "words"),
        ] {
            let error = Table::parse(line).unwrap_err();
            assert!(error.starts_with("line 1") && error.contains(word), "{error}");
            assert!(!error.contains('\x1b'));
        }
        let line = &Table::parse("cpu * scalar 4 64 workgroup 2 1 quads:2x16").unwrap().0[0];
        assert_eq!(line.tuning.slice, Slice::Quads { count: 2, step: 16 });
        assert_eq!((line.tuning.row_group, line.tuning.ring), (RowGroup::Workgroup, false));
        for text in [
            "gpu q4_k int_dot 1 512 subgroup 2 2 groups:2 ring",
            "* f16 scalar 1 64 subgroup 1 2 groups:1 persistent:4 ring",
        ] {
            let line = &Table::parse(text).unwrap().0[0];
            assert!(line.tuning.ring);
            assert_eq!(line.to_string(), text);
        }
    }
}
