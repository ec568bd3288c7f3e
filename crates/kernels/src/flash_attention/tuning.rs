//! Sizes that only a measurement can choose, as a table: by kind of device, format of K and path. Lines look like
//! `flash_attention gpu f16 scalar threads=256 prefetch=4` and may come from a file (see [`crate::tuning`]). A number is that
//! of the first line that fits and names it.

use std::sync::OnceLock;

use kiln_gguf::TensorType;
use kiln_gpu::Caps;

use super::NAME;
use crate::operation::Path;
use crate::tuning;

// Why these: `docs/ladder/flash_attention.md`; `wide`: `docs/amd.md`.
const BUILT_IN: &str = "
# operation device format path numbers
flash_attention wide * scalar  prefetch=2 combine=4
flash_attention wide * int_dot prefetch=2 combine=4
flash_attention * * scalar     combine=16 arrive=4096
flash_attention * * int_dot    combine=16
flash_attention * * coopmat    combine=16
flash_attention * * coopmat2   combine=16
flash_attention * * fragment      combine=16
flash_attention * * fragment_prefill  combine=16
flash_attention cpu f16 scalar threads=64
flash_attention cpu * scalar   threads=8 prefetch=4 rows=8 ahead=0
flash_attention cpu * int_dot  threads=8 prefetch=4 rows=8 ahead=0
flash_attention cpu * fragment    threads=16 least=0 sequences=0
flash_attention cpu * fragment_prefill widest=128 stage=3
flash_attention cpu * fragment_prefill subgroups=2 blocks=1 keys=16 stage=0 queries=0 least=0
flash_attention gpu f16 fragment_prefill widest=64 blocks=1 keys=64
flash_attention gpu * fragment_prefill widest=64 blocks=2 least=4096
flash_attention gpu * fragment_prefill subgroups=8 blocks=1 keys=32 stage=3 queries=0 least=0
flash_attention gpu q4_0 fragment least=4096
flash_attention gpu * fragment    threads=128 least=16384 sequences=8
flash_attention gpu * scalar   widest=128 prefetch=4
flash_attention gpu f16 scalar widest=256 prefetch=8
flash_attention gpu * scalar   threads=256 prefetch=4 rows=4 ahead=1
flash_attention gpu * int_dot  threads=256 prefetch=4 rows=8 ahead=1
flash_attention gpu * coopmat2 subgroups=8 blocks=1 keys=64 rows=64 threads=128 early=1
";

/// Names that lines may set.
const NAMES: [&str; 15] = [
    "threads",
    "prefetch",
    "ahead",
    "subgroups",
    "blocks",
    "keys",
    "rows",
    "early",
    "combine",
    "arrive",
    "least",
    "sequences",
    "stage",
    "queries",
    WIDEST,
];

/// A line with this number is for heads of at most this many elements.
const WIDEST: &str = "widest";

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    device: String,
    format: String,
    path: Path,
    numbers: Vec<(String, usize)>,
}

impl Line {
    fn number(&self, name: &str) -> Option<usize> {
        self.numbers.iter().find(|(n, _)| n == name).map(|(_, number)| *number)
    }
}

/// Lines, first one first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table(Vec<Line>);

impl Table {
    fn parse(text: &str) -> Result<Table, String> {
        let read = |(number, words): (usize, Vec<&str>)| {
            parse_line(&words).ok_or_else(|| {
                let line = kiln_system::text::shown(&words.join(" "));
                format!("line {number}: `{line}` is not `device format path name=number ..`, names of {NAMES:?}")
            })
        };
        tuning::lines(text, NAME).map(read).collect::<Result<_, _>>().map(Table)
    }

    /// The number of this name for a call with keys of such a type and heads of this many elements on a path.
    pub(super) fn find(&self, caps: &Caps, (keys, head): (TensorType, usize), path: Path, name: &str) -> Option<usize> {
        let fits = |line: &&Line| {
            let here = tuning::names_device(&line.device, caps) && tuning::names_format(&line.format, keys);
            here && line.path == path && line.number(WIDEST).is_none_or(|widest| head <= widest)
        };
        self.0.iter().filter(fits).find_map(|line| line.number(name))
    }
}

fn parse_line(words: &[&str]) -> Option<Line> {
    let [device, format, path, numbers @ ..] = words else { return None };
    let path = Path::ALL.into_iter().find(|p| p.name() == *path)?;
    let number = |word: &&str| {
        let (name, number) = word.split_once('=')?;
        NAMES.contains(&name).then_some((name.to_owned(), number.parse().ok()?))
    };
    let numbers = numbers.iter().map(number).collect::<Option<Vec<_>>>()?;
    Some(Line { device: (*device).to_owned(), format: (*format).to_owned(), path, numbers })
}

/// Whether the lines of this operation in a file can be read.
pub(crate) fn check(text: &str) -> Result<(), String> {
    Table::parse(text).map(drop)
}

/// The table of this process: the file of `KILN_TUNING`, if there is one, then the built-in lines.
pub(super) fn table() -> Result<&'static Table, String> {
    static TABLE: OnceLock<Result<Table, String>> = OnceLock::new();
    let load = || {
        let mut table = tuning::of_file(Table::parse)?;
        table.0.extend(Table::parse(BUILT_IN)?.0);
        Ok(table)
    };
    TABLE.get_or_init(load).as_ref().map_err(Clone::clone)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_names_a_number_gives_it() {
        let caps = Caps::example_nvidia();
        let mut table = Table::parse("mul_mm anything\nflash_attention gpu q8_0 scalar prefetch=8 # why\n").unwrap();
        table.0.extend(Table::parse(BUILT_IN).unwrap().0);
        let find = |ty, name| table.find(&caps, (ty, 128), Path::Scalar, name);
        assert_eq!(find(TensorType::Q8_0, "prefetch"), Some(8));
        assert_eq!(find(TensorType::F16, "prefetch"), Some(4));
        assert_eq!(find(TensorType::Q8_0, "threads"), Some(256));
        let narrow = Table::parse(
            "flash_attention * * fragment_prefill widest=64 keys=64\nflash_attention * * fragment_prefill keys=32",
        )
        .unwrap();
        let keys = |head| narrow.find(&caps, (TensorType::F16, head), Path::FragmentPrefill, "keys");
        assert_eq!([64, 65].map(keys), [Some(64), Some(32)]);
        assert!(Table::parse("flash_attention gpu q8_0 scalar speed=8").unwrap_err().starts_with("line 1"));
    }
}
