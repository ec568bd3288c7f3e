//! Activations that leave one step rounded for the product that reads them ([`crate::rounded`]): which products can take one, which splits of
//! the work can leave one, and whether the table wants it. The table's lines are
//! `mul_mat_vec device format path rounded=1`, of the format of the product that takes the activation vector; the first one that fits counts.

use std::sync::OnceLock;

use kiln_gguf::TensorType;
use kiln_gpu::Caps;
use kiln_system::text::shown;

use super::tuning::{RowGroup, Tuning};
use super::{Call, NAME};
use crate::operation::{Operation as _, Path, Unsupported};
use crate::rounded::{GROUP, Rounding};
use crate::tensor::Tensor;
use crate::tuning;

/// Most bytes of results that a workgroup keeps until all of them are rounded: the room that is left beside activations is 8 KiB.
const MOST_KEPT: usize = 4 << 10;

// It loses on the GPU it was timed on (`docs/ladder/decode.md`).
const BUILT_IN: &str = "
mul_mat_vec * * int_dot rounded=0
";

const WORD: &str = "rounded=";

/// One line: whether products of a format take rounded activations on a path.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    device: String,
    format: String,
    path: Path,
    on: bool,
}

/// Whether a line of the tuning file is one of these, and not a split of the work.
pub(super) fn is_switch(words: &[&str]) -> bool {
    words.get(3).is_some_and(|word| word.starts_with(WORD))
}

fn parse(text: &str) -> Result<Vec<Line>, String> {
    let read = |(number, words): (usize, Vec<&str>)| {
        parse_line(&words).ok_or_else(|| {
            let line = shown(&words.join(" "));
            format!("line {number}: `{line}` is not `device format path {WORD}0` or `{WORD}1`")
        })
    };
    tuning::lines(text, NAME).filter(|(_, words)| is_switch(words)).map(read).collect()
}

fn parse_line(words: &[&str]) -> Option<Line> {
    let [device, format, path, word] = words else { return None };
    let path = Path::ALL.into_iter().find(|p| p.name() == *path)?;
    let on = match word.strip_prefix(WORD)? {
        "0" => false,
        "1" => true,
        _ => return None,
    };
    let known = tuning::DEVICES.contains(device);
    known.then(|| Line { device: (*device).to_owned(), format: (*format).to_owned(), path, on })
}

/// Whether the lines of a file can be read.
pub(super) fn check(text: &str) -> Result<(), String> {
    parse(text).map(drop)
}

fn find(lines: &[Line], ty: TensorType, path: Path, caps: &Caps) -> bool {
    let fits = |line: &&Line| {
        let here = tuning::names_device(&line.device, caps) && tuning::names_format(&line.format, ty);
        here && line.path == path
    };
    lines.iter().find(fits).is_some_and(|line| line.on)
}

fn table() -> Result<&'static Vec<Line>, String> {
    static TABLE: OnceLock<Result<Vec<Line>, String>> = OnceLock::new();
    let load = || {
        let mut lines = tuning::of_file(parse)?;
        lines.extend(parse(BUILT_IN)?);
        Ok(lines)
    };
    TABLE.get_or_init(load).as_ref().map_err(Clone::clone)
}

impl Call {
    /// Whether the table wants this product to take its activation vector rounded. A file that cannot be read wants nothing here; it is told of where
    /// splits are looked up.
    pub fn wants_rounded(&self, caps: &Caps) -> bool {
        table().is_ok_and(|lines| find(lines, self.product.a.ty, Path::IntDot, caps))
    }

    /// This product with its activation vector taken from where `rounding` leaves it, if `activation vector`, the one dense activation vector that is rounded so, is what
    /// this product multiplies, and if products of integers are its way on this device. A software GPU, which multiplies floats faster, takes
    /// what is rounded already.
    pub fn taking(&self, column: &Tensor, rounding: &Rounding, caps: &Caps) -> Option<Call> {
        let b = self.product.b;
        let same = (b.slot, b.offset, b.ty, b.len()) == (column.slot, column.offset, column.ty, column.len());
        let whole = b.is_dense() && b.rows() == 1 && column.is_dense();
        let weight = self.norm.and_then(|norm| norm.weight);
        if !(same && whole && weight == rounding.weight) {
            return None;
        }
        let call = Call { rounded: Some(rounding.to), ..self.clone() };
        let integers = |call: &Call| call.pick(caps, None).is_ok_and(|choice| choice.path == Path::IntDot);
        let fits = call.check().is_ok() && (caps.is_cpu || integers(self)) && integers(&call);
        fits.then_some(call)
    }

    /// This product with its result left rounded besides.
    pub(crate) fn leaving(&self, rounding: Rounding) -> Option<Call> {
        let call = Call { rounding: Some(rounding), ..self.clone() };
        (self.rounding.is_none() && call.check().is_ok()).then_some(call)
    }
}

/// Turns of the workgroup's teams, each of which makes as many neighbouring rows as `at_a_time`, if these are whole groups and can be kept.
pub(super) fn turns(tuning: Tuning, at_a_time: usize, [all, groups]: [usize; 2]) -> Result<usize, Unsupported> {
    let turns = all.div_ceil(groups.max(1));
    let kept = 4 * turns * at_a_time;
    let refuse = |reason: String| Err(Unsupported { operation: NAME, reason });
    match tuning.row_group {
        RowGroup::Subgroup if at_a_time.is_multiple_of(GROUP) && kept <= MOST_KEPT => Ok(turns),
        RowGroup::Subgroup if at_a_time.is_multiple_of(GROUP) => {
            refuse(format!("a workgroup would keep {kept} bytes of neighbouring rows, {MOST_KEPT} at most"))
        }
        _ => refuse(format!("a workgroup makes {at_a_time} neighbouring rows at a time, no whole groups of {GROUP}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_that_fits_counts_and_none_is_off() {
        let caps = Caps::example_nvidia();
        let text = "mul_mat_vec gpu q4_k int_dot rounded=0\nmul_mat_vec * blocks int_dot rounded=1\n\
                    gpu q4_k int_dot 3 1024 subgroup 1 1 groups:2 persistent:1\n";
        let lines = parse(text).unwrap();
        assert_eq!(lines.len(), 2);
        let on = |ty| find(&lines, ty, Path::IntDot, &caps);
        assert!(!on(TensorType::Q4_K) && on(TensorType::Q6_Kx8) && !on(TensorType::F16));
        assert!(!find(&parse(BUILT_IN).unwrap(), TensorType::Q4_K, Path::IntDot, &caps));
        for wrong in
            ["gpu q4_k int_dot rounded=2", "tpu q4_k int_dot rounded=1", "gpu q4_k int_dot rounded=1 persistent:1"]
        {
            assert!(parse(wrong).unwrap_err().starts_with("line 1"), "{wrong}");
        }
    }
}
