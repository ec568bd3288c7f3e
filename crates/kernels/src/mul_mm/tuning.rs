//! Tile configurations and preferred paths, as a table of lines by kind of device, format and N. Lines of the file `KILN_TUNING` names (see [`crate::tuning`]) go before the built-in ones.

use std::sync::Arc;

use kiln_gguf::TensorType;
use kiln_gpu::Caps;

use super::NAME;
use crate::operation::Path;
use crate::tuning;

/// Tile configuration of a workgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TileConfig {
    /// Rows and columns of the workgroup.
    pub tile: [usize; 2],
    /// Elements of k at a time.
    pub depth: usize,
    /// Rows and columns of a subgroup (`coopmat`) or of a thread (`scalar`).
    pub warp: [usize; 2],
    /// Tiles in shared memory (`coopmat`): 2, or 1, which can be deeper.
    pub stages: usize,
    /// Threads of the workgroup (`coopmat2`).
    pub threads: u32,
    /// Steps of k in one round (`coopmat2`).
    pub unroll: usize,
    /// Tiles prefetched into registers (`coopmat`): 1, or 2 where loads take longer than a product.
    pub prefetch: usize,
    /// Split-K inside a workgroup: fewest and most subgroups that share the k of a tile (`fragment`).
    pub split_k: [usize; 2],
    /// Subgroups that fit a core at once. Decides split-K (`fragment`) and the rows of the tail (`coopmat`); 0 if not known.
    pub occupancy: usize,
    /// Address activations by offsets (`fragment`): fewer registers, more instructions.
    pub offsets: bool,
    /// Swizzle: rows of tiles that are walked together before the next column of tiles; 0 is all of them.
    pub swizzle: usize,
    /// Use only if tiles >= 0.75 * min_waves * cores and at least half of tile N is used; 0 is no condition.
    pub min_waves: usize,
    /// Only for GEMMs of experts; N is what an expert gets on average.
    pub experts: bool,
    /// Only for the tail: rows of the last partial wave of larger tiles (`coopmat`).
    pub tail: bool,
}

/// What a line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    /// A cut of this path.
    Tile(Path, TileConfig),
    /// The path that is tried first.
    Prefer(Preference),
    /// Most workgroups of a path that share a tile over k.
    Split(Path, usize),
}

/// The path that is tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Preference {
    path: Path,
    /// Whether it gets weights that were decoded beforehand.
    decode: bool,
    /// Only for products without experts.
    dense: bool,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    device: String,
    format: String,
    /// the largest N it is for.
    columns: usize,
    setting: Setting,
}

// Why these: `docs/ladder/mul_mm.md`; `wide`: `docs/amd.md`. A cut that a device cannot have is passed over; where no cut is `min_waves`, the last
// one that fits is taken. Software GPUs multiply faster without matrix units: their lines are for tests, and between them
// reach every part of the kernel; the fewest threads are best there, and little is unrolled, as it compiles for long. Block
// formats on coopmat2 are never unrolled: their callback stands in a step as often as a thread has elements, and four steps in a
// row took a driver 10 to 30 s for each variant (`kiln selftest -v mul_mm`).
const BUILT_IN: &str = "
# device format path columns settings
cpu * scalar   40 tile=32x32x16 thread=4x4
cpu * scalar   * tile=64x32x32  thread=8x4
wide * scalar  * tile=128x64x16 thread=8x4 min_waves
wide * scalar  * tile=64x64x16  thread=4x4
gpu * scalar   * tile=64x64x32  thread=8x4
gpu * scalar   * tile=64x64x16  thread=8x4
cpu q4_k coopmat 20 tile=16x16x32 warp=8x8
cpu * coopmat  20 tile=16x16x32 warp=8x8 stages=1
cpu * coopmat  40 tile=16x16x128 warp=8x8 stages=1 prefetch=2
cpu blocks coopmat * tile=16x16x64 warp=8x8 stages=1 swizzle=2
cpu * coopmat  * tile=8x16x16   warp=8x8 swizzle=2 occupancy=4 tail
cpu * coopmat  * tile=16x16x16  warp=8x8 swizzle=2 occupancy=4
gpu * coopmat  16 tile=64x16x64 warp=32x16 stages=1 prefetch=2
gpu k/* coopmat 32 tile=128x32x64 warp=32x32 min_waves
gpu * coopmat  32 tile=128x32x128 warp=32x32 stages=1 min_waves
gpu * coopmat  32 tile=64x32x64 warp=32x16 stages=1
gpu * coopmat  64 tile=128x64x64 warp=64x32 stages=1 min_waves
gpu f16 coopmat 144 tile=128x160x64 warp=32x80 stages=1 min_waves experts
gpu * coopmat  144 tile=128x160x64 warp=64x32 stages=1 min_waves experts
gpu * coopmat  256 tile=128x128x64 warp=64x32 stages=1 min_waves
gpu * coopmat  256 tile=64x64x64 warp=32x32 stages=1
gpu * coopmat  * tile=96x128x32 warp=48x64 stages=1 prefetch=2 swizzle=16 occupancy=8 tail
gpu * coopmat  * tile=128x128x32 warp=64x64 stages=1 prefetch=2 swizzle=16 occupancy=8 min_waves=2
gpu * coopmat  * tile=128x256x32 warp=64x64 stages=1 prefetch=2 swizzle=16 min_waves
gpu * coopmat  * tile=128x128x64 warp=64x32 stages=1 swizzle=16 min_waves
gpu * coopmat  * tile=128x64x64 warp=64x32 stages=1 min_waves
gpu * coopmat  * tile=64x64x64  warp=32x32 stages=1 min_waves
gpu * coopmat  * tile=64x32x32  warp=32x16 min_waves
gpu * coopmat  * tile=32x32x32  warp=16x16
cpu f16 fragment * tile=16x16 split_k=2x2 prefetch=1
cpu q4_k fragment 20 tile=8x16 split_k=2x2 prefetch=1
cpu q4_k fragment * tile=8x24 split_k=1x5 occupancy=6 offsets prefetch=2
cpu * fragment * tile=8x8 split_k=2x2 prefetch=1
gpu * fragment 16 tile=16x128 split_k=4x8 prefetch=1
gpu q4_k fragment 32 tile=16x128 split_k=2x8 prefetch=1
gpu q6_k fragment 32 tile=16x128 split_k=2x8 offsets prefetch=1
gpu q8_0 fragment 32 tile=16x128 split_k=4x8 offsets prefetch=1
gpu f16  fragment 32 tile=16x128 split_k=3x10 occupancy=25 offsets prefetch=1
gpu bf16 fragment 32 tile=16x128 split_k=3x10 occupancy=25 offsets prefetch=1
gpu q4_k fragment 48 tile=16x128 split_k=4x8 offsets prefetch=1
gpu q6_k fragment 48 tile=16x128 split_k=4x8 offsets prefetch=1
gpu q4_k fragment 64 tile=16x128 split_k=3x8 prefetch=1
gpu * fragment 64 tile=16x128 split_k=4x8 prefetch=1
gpu q4_k fragment 80 tile=16x128 split_k=4x8 offsets prefetch=1
gpu q4_k fragment 96 tile=16x128 split_k=3x8 occupancy=12 offsets prefetch=1
gpu q6_k fragment 96 tile=16x128 split_k=4x8 prefetch=1
gpu * fragment *  tile=16x128 split_k=2x8 prefetch=1
gpu blocks coopmat2 * tile=128x128x32 threads=256 swizzle=16 min_waves
gpu blocks coopmat2 * tile=64x64x32 threads=128 min_waves
gpu blocks coopmat2 * tile=64x32x32 threads=128
gpu * coopmat2 * tile=128x256x32 threads=256 unroll=8 swizzle=16 min_waves
gpu * coopmat2 * tile=128x128x64 threads=256 swizzle=16 min_waves
gpu * coopmat2 * tile=128x64x64 threads=128 min_waves
gpu * coopmat2 * tile=64x64x64  threads=128 min_waves
gpu * coopmat2 * tile=64x32x64  threads=128
* *      split 256  8
* *      split *    32 scalar
* q4_k   prefer 128 fragment dense
* q6_k   prefer 96 fragment dense
* blocks prefer 64 fragment
* f16    prefer 64 fragment
* bf16   prefer 64 fragment
* *      prefer 128 coopmat
* blocks prefer 255 coopmat
* blocks prefer *   coopmat decode
* *      prefer *   coopmat
";

/// Lines, first one first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Table(Vec<Line>);

impl Table {
    /// Reads the lines of this operation.
    fn parse(text: &str) -> Result<Table, String> {
        let read = |(number, words): (usize, Vec<&str>)| {
            parse_line(&words)
                .map_err(|reason| format!("line {number}: `{}`: {reason}", kiln_system::text::shown(&words.join(" "))))
        };
        tuning::lines(text, NAME).map(read).collect::<Result<_, _>>().map(Table)
    }

    /// Packed types take the lines of their base: memory is counted before a type is packed.
    fn fitting(&self, ty: TensorType, columns: usize) -> impl Iterator<Item = &Line> {
        let ty = ty.base();
        self.0.iter().filter(move |line| tuning::names_format(&line.format, ty) && columns <= line.columns)
    }

    /// The cuts of a path for a device, best first.
    pub(super) fn configs(
        &self,
        path: Path,
        ty: TensorType,
        columns: usize,
        caps: &Caps,
    ) -> impl Iterator<Item = TileConfig> {
        let of_device = |line: &&Line| tuning::names_device(&line.device, caps);
        self.fitting(ty, columns).filter(of_device).filter_map(move |line| match line.setting {
            Setting::Tile(of, config) if of == path => Some(config),
            _ => None,
        })
    }

    /// The path a format prefers without experts, and whether its weights are decoded beforehand: the same on every device, as the
    /// memory for it is asked for before the device is known.
    pub(super) fn preferred(&self, ty: TensorType, columns: usize) -> (Path, bool) {
        let first = self.preferences(ty, columns, false).next();
        first.map_or((Path::Coopmat2, false), |Preference { path, decode, .. }| (path, decode && ty.is_quantised()))
    }

    /// The paths that a device may have, best first.
    pub(super) fn paths(&self, ty: TensorType, columns: usize, experts: bool) -> impl Iterator<Item = Path> {
        self.preferences(ty, columns, experts).map(|preference| preference.path)
    }

    fn preferences(&self, ty: TensorType, columns: usize, experts: bool) -> impl Iterator<Item = Preference> {
        self.fitting(ty, columns).filter_map(move |line| match line.setting {
            Setting::Prefer(preference) if !(experts && preference.dense) => Some(preference),
            _ => None,
        })
    }

    /// Most workgroups of a path that share a tile of a product of N activations. The same for every format: memory for
    /// it is counted before weights are decoded.
    fn most_splits(&self, path: Path, columns: usize) -> usize {
        let splits = |line: &Line| match line.setting {
            Setting::Split(of, n) if of == path && columns <= line.columns => Some(n),
            _ => None,
        };
        self.0.iter().find_map(splits).unwrap_or(1)
    }
}

fn parse_line(words: &[&str]) -> Result<Line, String> {
    let [device, format, path, columns, settings @ ..] = words else {
        return Err("want `device format path columns settings`".into());
    };
    if !tuning::DEVICES.contains(device) {
        return Err(format!("`{device}` is not `cpu`, `gpu`, `wide`, `mma` or `*`"));
    }
    let columns = match *columns {
        "*" => usize::MAX,
        word => word.parse().map_err(|_| format!("`{word}` is no number of columns"))?,
    };
    let setting = match *path {
        "prefer" => parse_preference(settings)?,
        "split" => match settings {
            [_] | [_, "scalar"] if [*device, *format] != ["*", "*"] => {
                return Err("splits are the same for every device and format: `* *`".into());
            }
            [n] => Setting::Split(Path::Coopmat, sizes::<1>(n)?[0]),
            [n, "scalar"] => Setting::Split(Path::Scalar, sizes::<1>(n)?[0]),
            _ => return Err("want a number of workgroups, or one and `scalar`".into()),
        },
        "coopmat" => Setting::Tile(Path::Coopmat, parse_config(Path::Coopmat, settings)?),
        "fragment" => Setting::Tile(Path::Fragment, parse_fragment(settings)?),
        "coopmat2" => Setting::Tile(Path::Coopmat2, parse_config(Path::Coopmat2, settings)?),
        "scalar" => Setting::Tile(Path::Scalar, parse_config(Path::Scalar, settings)?),
        other => {
            return Err(format!("`{other}` is not `scalar`, `coopmat`, `fragment`, `coopmat2`, `prefer` or `split`"));
        }
    };
    Ok(Line { device: (*device).to_owned(), format: (*format).to_owned(), columns, setting })
}

fn parse_preference(settings: &[&str]) -> Result<Setting, String> {
    let path = |word: &str| {
        let found = Path::ALL.into_iter().find(|p| p.name() == word);
        found.ok_or_else(|| format!("`{word}` is no path"))
    };
    let [word, how @ ..] = settings else { return Err("no path".into()) };
    let mut preference = Preference { path: path(word)?, decode: false, dense: false };
    for word in how {
        match *word {
            "decode" => preference.decode = true,
            "dense" => preference.dense = true,
            other => return Err(format!("prefer takes no `{other}`, want `decode` or `dense` behind the path")),
        }
    }
    Ok(Setting::Prefer(preference))
}

/// Numbers with an x between them, each from 1 to 1024.
fn sizes<const N: usize>(text: &str) -> Result<[usize; N], String> {
    let numbers: Option<Vec<usize>> =
        text.split('x').map(|n| n.parse().ok().filter(|n| (1..=1024).contains(n))).collect();
    let numbers = numbers.and_then(|n| <[usize; N]>::try_from(n).ok());
    numbers.ok_or_else(|| format!("`{text}` is not {N} numbers from 1 to 1024 with an x between them"))
}

fn parse_config(path: Path, settings: &[&str]) -> Result<TileConfig, String> {
    let (mut tile, mut warp, mut threads) = (None, None, None);
    let (mut stages, mut unroll, mut swizzle, mut prefetch, mut min_waves, mut occupancy) = (2, 4, 0, 1, 0, 0);
    let (mut experts, mut tail) = (false, false);
    let (plain, first, second) = (path == Path::Scalar, path == Path::Coopmat, path == Path::Coopmat2);
    for setting in settings {
        match setting.split_once('=') {
            Some(("tile", text)) => tile = Some(sizes::<3>(text)?),
            Some(("swizzle", text)) => [swizzle] = sizes(text)?,
            Some(("thread", text)) if plain => warp = Some(sizes::<2>(text)?),
            Some(("warp", text)) if first => warp = Some(sizes::<2>(text)?),
            Some(("stages", text)) if first => [stages] = sizes(text)?,
            Some(("prefetch", text)) if first => [prefetch] = sizes(text)?,
            Some(("occupancy", text)) if first => [occupancy] = sizes(text)?,
            Some(("threads", text)) if second => threads = Some(sizes::<1>(text)?[0]),
            Some(("unroll", text)) if second => [unroll] = sizes(text)?,
            Some(("min_waves", text)) => [min_waves] = sizes(text)?,
            None if *setting == "min_waves" => min_waves = 1,
            None if *setting == "experts" => experts = true,
            None if *setting == "tail" && first => tail = true,
            _ => return Err(format!("{} takes no `{setting}`", path.name())),
        }
    }
    let Some([m, n, depth]) = tile else { return Err("no `tile=MxNxK`".into()) };
    let deepest = if first {
        256
    } else if second {
        128
    } else {
        64
    };
    if !depth.is_power_of_two() || !(16..=deepest).contains(&depth) {
        return Err(format!("a depth of {depth}"));
    }
    for (n, what) in [(stages, "stages"), (prefetch, "tiles ahead")] {
        if !(1..=2).contains(&n) {
            return Err(format!("{n} {what}, want 1 or 2"));
        }
    }
    let warp = match warp {
        Some([wm, wn]) if m % wm == 0 && n % wn == 0 => [wm, wn],
        Some([wm, wn]) => return Err(format!("{wm}x{wn} does not divide {m}x{n}")),
        None if first => return Err("no `warp=MxN`".into()),
        None if plain => return Err("no `thread=MxN`".into()),
        None => [0; 2],
    };
    let threads = match threads {
        Some(n) => n as u32,
        None if !second => 0,
        None => return Err("no `threads=N`".into()),
    };
    if plain {
        check_plain([m, n], depth, warp)?;
    }
    let (split_k, offsets) = ([1; 2], false);
    Ok(TileConfig {
        tile: [m, n],
        depth,
        warp,
        stages,
        threads,
        unroll,
        prefetch,
        split_k,
        occupancy,
        offsets,
        swizzle,
        min_waves,
        experts,
        tail,
    })
}

fn parse_fragment(settings: &[&str]) -> Result<TileConfig, String> {
    let (mut tile, mut split_k, mut prefetch, mut occupancy, mut offsets) = (None, [4, 16], 1, 0, false);
    for setting in settings {
        match setting.split_once('=') {
            Some(("tile", text)) => tile = Some(sizes::<2>(text)?),
            Some(("split_k", text)) => split_k = sizes(text)?,
            Some(("prefetch", text)) => [prefetch] = sizes(text)?,
            Some(("occupancy", text)) => [occupancy] = sizes(text)?,
            None if *setting == "offsets" => offsets = true,
            _ => return Err(format!("fragment takes no `{setting}`")),
        }
    }
    let Some(tile) = tile else { return Err("no `tile=MxN`".into()) };
    if split_k[0] > split_k[1] || split_k[1] > 32 {
        return Err(format!("share={}x{}, want the fewest and the most, up to 32", split_k[0], split_k[1]));
    }
    if !(1..=4).contains(&prefetch) {
        return Err(format!("{prefetch} pieces ahead, want 1 to 4"));
    }
    Ok(TileConfig {
        tile,
        depth: 64,
        warp: tile,
        stages: 1,
        threads: 0,
        unroll: 1,
        prefetch,
        split_k,
        occupancy,
        offsets,
        swizzle: 0,
        min_waves: 0,
        experts: false,
        tail: false,
    })
}

/// What `tile.comp` asks of a cut: threads compute fours, tiles are turned by eights of fours, and each thread loads as many
/// fours of k of both.
fn check_plain(tile: [usize; 2], depth: usize, thread: [usize; 2]) -> Result<(), String> {
    let ([m, n], [rows, columns]) = (tile, thread);
    if [rows, columns].iter().any(|n| ![4, 8].contains(n)) {
        return Err(format!("{rows}x{columns} for a thread, want 4 or 8 of each"));
    }
    if [m, n].iter().any(|n| !n.is_multiple_of(32)) {
        return Err(format!("a tile of {m}x{n}, want multiples of 32"));
    }
    let threads = m / rows * (n / columns);
    if [m, n].iter().any(|lines| !(lines * depth / 4).is_multiple_of(threads)) {
        return Err(format!("{threads} threads cannot load {m} and {n} rows of {depth} evenly"));
    }
    Ok(())
}

/// A cut of a path from what a line says of it.
pub(super) fn config_of(path: Path, settings: &str) -> Result<TileConfig, String> {
    let words: Vec<&str> = settings.split_whitespace().collect();
    if path == Path::Fragment { parse_fragment(&words) } else { parse_config(path, &words) }
}

/// Whether the lines of this operation in a file can be read.
pub(crate) fn check(text: &str) -> Result<(), String> {
    Table::parse(text).map(drop)
}

/// The table of a device: the file of `KILN_TUNING`, if there is one, then what `kiln tune` kept for the device, then the built-in
/// lines.
pub(super) fn table(caps: &Caps) -> Result<&'static Table, String> {
    with_found(caps.tuned.as_ref())
}

/// The same without what was found on a device, for what is the same on all of them: memory is counted before a device is known.
pub(super) fn of_all_devices() -> Result<&'static Table, String> {
    with_found(None)
}

fn with_found(tuned: Option<&Arc<str>>) -> Result<&'static Table, String> {
    static TABLES: tuning::Tables<Table> = tuning::Tables::new();
    TABLES.with(tuned, |tuned| {
        let mut table = tuning::of_file(Table::parse)?;
        table.0.extend(tuning::found(tuned, Table::parse).0);
        table.0.extend(built_in()?.0);
        Ok(table)
    })
}

/// Most workgroups of a path that share a tile of a product of N activations; 1 where the table cannot be read, which
/// `check` tells.
pub(super) fn most_splits(path: Path, columns: usize) -> usize {
    of_all_devices().map_or(1, |table| table.most_splits(path, columns))
}

fn built_in() -> Result<Table, String> {
    let named: Vec<String> = BUILT_IN.lines().map(|line| format!("{NAME} {line}")).collect();
    Table::parse(&named.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_lines_serve_every_format_and_width() {
        let table = built_in().unwrap();
        for caps in [Caps::example_nvidia(), Caps { is_cpu: true, ..Caps::example_nvidia() }] {
            for format in crate::formats::FORMATS {
                for columns in [1, 16, 512, 1 << 20] {
                    for path in [Path::Scalar, Path::Coopmat] {
                        let last = table.configs(path, format.ty, columns, &caps).last().unwrap();
                        assert!(last.min_waves == 0, "a cut without conditions comes last");
                    }
                }
            }
        }
        assert_eq!(table.preferred(TensorType::F16, 4096), (Path::Coopmat, false));
        // Tiles for what an expert gets are wider than lanes take at once.
        let first = |experts| table.paths(TensorType::Q4_K, 128, experts).next();
        assert_eq!([first(false), first(true)], [Some(Path::Fragment), Some(Path::Coopmat)]);
        assert!(table.most_splits(Path::Coopmat, 32) > 1 && table.most_splits(Path::Coopmat, 2048) == 1);
        assert!(table.most_splits(Path::Scalar, 2048) > 1);
        assert!(!table.preferred(TensorType::Q4_K, 16).1 && table.preferred(TensorType::Q4_K, 4096).1);
    }

    #[test]
    fn every_device_has_the_lines_that_were_found_on_it() {
        let with = |text: &str| Caps { tuned: Some(text.into()), ..Caps::example_nvidia() };
        let [first, second] =
            [with("mul_mm * q4_k prefer 512 coopmat2"), with("mul_mm * q4_k prefer 512 scalar decode")];
        let preferred = |table: &Table| table.preferred(TensorType::Q4_K, 512);
        let of = |caps: &Caps| preferred(table(caps).unwrap()).0;
        let plain = preferred(of_all_devices().unwrap());
        assert_eq!([of(&first), of(&second), of(&first)], [Path::Coopmat2, Path::Scalar, Path::Coopmat2]);
        assert_eq!(of(&Caps::example_nvidia()), plain.0);
        // Memory is counted the same way for all devices.
        assert_eq!(preferred(of_all_devices().unwrap()), plain);
    }

    #[test]
    fn lines_say_what_they_lack() {
        let fault = |line: &str| Table::parse(&format!("mul_mm gpu f16 {line}")).unwrap_err();
        for (line, lacks) in [
            ("coopmat * tile=64x64x16", "no `warp=MxN`"),
            ("coopmat * tile=64x64x16 warp=48x32", "48x32 does not divide 64x64"),
            ("coopmat * tile=64x64x16 warp=32x32 stages=3", "3 stages"),
            ("coopmat * tile=64x64x16 warp=32x32 prefetch=3", "3 tiles ahead"),
            ("coopmat2 * tile=64x64", "not 3 numbers"),
            ("coopmat2 * tile=64x64x48 threads=128", "a depth of 48"),
            ("coopmat2 * tile=64x64x32", "no `threads=N`"),
            ("coopmat2 x tile=64x64x32 threads=128", "no number of columns"),
            ("coopmat2 * tile=64x64x32 threads=128 warp=8x8", "takes no `warp=8x8`"),
            ("fragment * split_k=2x4", "no `tile=MxN`"),
            ("fragment * tile=16x64 split_k=4x2", "split_k=4x2"),
            ("fragment * tile=16x64 split_k=3x64", "up to 32"),
            ("fragment * tile=16x64 prefetch=5", "5 pieces ahead"),
            ("fragment * tile=16x64 swizzle=4", "fragment takes no `swizzle=4`"),
            ("prefer 63 warp", "`warp` is no path"),
            ("prefer 63", "no path"),
            ("prefer 63 fragment experts", "takes no `experts`"),
            ("split 128 4", "`* *`"),
            ("split 128 4 scalar", "`* *`"),
            ("scalar * tile=64x64x32", "no `thread=MxN`"),
            ("scalar * tile=64x64x32 thread=8x2", "8x2 for a thread"),
            ("scalar * tile=64x48x32 thread=8x4", "multiples of 32"),
            ("scalar * tile=32x256x16 thread=4x4", "512 threads cannot load 32 and 256 rows of 16 evenly"),
            ("scalar * tile=64x64x32 thread=8x4 threads=128", "takes no `threads=128`"),
            ("tile *", "`tile` is not"),
        ] {
            let fault = fault(line);
            assert!(fault.starts_with("line 1: ") && fault.contains(lacks), "{line}: {fault}");
        }
    }

    #[test]
    fn lines_of_a_file_go_first() {
        let text = "mul_mm gpu f16 coopmat2 * tile=64x64x32 threads=128 unroll=2 swizzle=8\n\
                    mul_mm * q4_k prefer 100 coopmat decode";
        let table = Table::parse(text).unwrap();
        let config = table.configs(Path::Coopmat2, TensorType::F16, 1000, &Caps::example_nvidia()).next().unwrap();
        assert_eq!((config.tile, config.depth, config.threads, config.unroll), ([64, 64], 32, 128, 2));
        assert!(config.swizzle == 8 && config.min_waves == 0);
        assert_eq!(table.preferred(TensorType::Q4_K, 100), (Path::Coopmat, true));
        assert_eq!(table.preferred(TensorType::Q4_K, 101), (Path::Coopmat2, false));
    }
}
