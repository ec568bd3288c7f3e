//! Weights that were turned before they were rounded (`prism.hadamard.*`): what the file says of them, checked. Such a weight wants its
//! input turned the same way; read as if it were plain, it makes nonsense of every text.

use std::collections::HashMap;
use std::fmt::Display;

use kiln_gguf::{Gguf, TensorType};
use kiln_kernels::hadamard::MOST;
use kiln_kernels::tensor::{Slot, Tensor};

use super::Keys;
use super::names::TOKEN_EMBEDDING;
use crate::Error;
use crate::plan::{Fixed, SlotKind};

const PREFIX: &str = "prism.hadamard";
const TRANSFORM: &str = "normalized-sylvester-walsh-hadamard";
const AXIS: &str = "input-last-dimension";

/// Architectures whose files may have such weights.
const ARCHITECTURES: &[&str] = &["llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe"];
/// Those of them whose value heads lie tiled before the last product, where a file may want them grouped.
const TILED: &[&str] = &["qwen35", "qwen35moe"];
/// What of a layer may be turned.
const OF_LAYERS: &[&str] = &[
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "attn_qkv",
    "attn_gate",
    "ssm_out",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
];
const OUTPUT: &str = "output.weight";

/// The order in which a weight wants the heads of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Regroup {
    /// Heads of keys.
    pub(crate) groups: usize,
    /// Heads of values that share one of them: they lie `groups` apart in the input and side by side for the weight.
    pub(crate) ratio: usize,
}

/// What is done with the input of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Turn {
    /// A sign for each column.
    pub(crate) signs: Option<Tensor>,
    /// Heads are brought into another order first.
    pub(crate) regroup: Option<Regroup>,
}

/// The turned weights of a model, by their slots.
#[derive(Clone, Debug, Default)]
pub(crate) struct Turned {
    /// Elements of a block.
    pub(crate) block: usize,
    /// Weights whose inputs are turned.
    pub(crate) inputs: HashMap<Slot, Turn>,
    /// Tables whose rows are turned back.
    pub(crate) rows: HashMap<Slot, Option<Tensor>>,
}

impl Turned {
    /// Whether a weight is among them.
    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.inputs.contains_key(&slot) || self.rows.contains_key(&slot)
    }

    /// Reads what a file of this architecture says; none where it has no such weights. Signs become constants among `fixed`.
    pub(crate) fn read(gguf: &Gguf, architecture: &'static str, fixed: &mut Fixed) -> Result<Option<Turned>, Error> {
        let mentions = gguf.metadata().iter().find(|(key, _)| key.starts_with(PREFIX));
        let Some((first, _)) = mentions else { return Ok(None) };
        let first = first.to_owned();
        let reader = Reader { gguf, keys: Keys::new(gguf, PREFIX), architecture };
        if !ARCHITECTURES.contains(&architecture) {
            return refuse(first, format!("set in a file of architecture {architecture}"), of_architectures());
        }
        reader.read(fixed).map(Some)
    }
}

fn refuse<T>(key: String, value: impl Display, want: impl Display) -> Result<T, Error> {
    Err(Error::Hyperparameter { key, value: value.to_string(), want: want.to_string() })
}

fn of_architectures() -> String {
    format!("in a file of one of {}: Kiln does not know how weights of others were turned", ARCHITECTURES.join(", "))
}

struct Reader<'a> {
    gguf: &'a Gguf,
    keys: Keys<'a>,
    architecture: &'static str,
}

impl Reader<'_> {
    fn read(&self, fixed: &mut Fixed) -> Result<Turned, Error> {
        let keys = &self.keys;
        let version = keys.count("version", usize::MAX)?;
        keys.require(version <= 2, "version", version, "1 or 2: this file is newer than Kiln")?;
        self.word("transform", TRANSFORM)?;
        self.word("axis", AXIS)?;
        let block = keys.count("block_size", MOST)?;
        keys.require(block.is_power_of_two(), "block_size", block, "a power of two")?;
        let tied = keys.flag("tied_output", false)?;
        keys.require(tied == (version == 2), "tied_output", usize::from(tied), "1 with version 2, and 0 before")?;
        if tied && self.gguf.find(OUTPUT).is_some() {
            return refuse(keys.name("tied_output"), "true", format!("false in a file with a tensor `{OUTPUT}`"));
        }
        let mut signs = self.signs()?;
        let mut constants: HashMap<usize, Tensor> = HashMap::new();
        let mut of_width = |fixed: &mut Fixed, width: usize| -> Result<Option<Tensor>, Error> {
            if let Some(known) = constants.get(&width) {
                return Ok(Some(*known));
            }
            let Some(all) = &mut signs else { return Ok(None) };
            let Some(values) = all.remove(&width) else {
                return refuse(keys.name("sign_widths"), "without it", format!("a list with the width {width}"));
            };
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let name = format!("hadamard.signs.{width}");
            let tensor = fixed.add(name, SlotKind::Constant(bytes), TensorType::F32, [width, 1, 1, 1]);
            constants.insert(width, tensor);
            Ok(Some(tensor))
        };
        let mut turned = Turned { block, ..Turned::default() };
        let (inputs, rows) = (self.names("weight_names")?, self.names("inverse_weight_names")?);
        keys.require(!inputs.is_empty(), "weight_names", 0, "at least one name")?;
        for name in &inputs {
            if !may_be_turned(name) {
                return refuse(
                    keys.name("weight_names"),
                    name,
                    format!("names of {} and output", OF_LAYERS.join(", ")),
                );
            }
            let width = self.width(name, block)?;
            let turn = Turn { signs: of_width(fixed, width)?, regroup: self.regroup(name, width)? };
            // Weights of layers that are not run have no slot.
            if let Some(slot) = slot_of(fixed, name) {
                turned.inputs.insert(slot, turn);
            }
        }
        for name in &rows {
            if name != TOKEN_EMBEDDING {
                return refuse(keys.name("inverse_weight_names"), name, format!("`{TOKEN_EMBEDDING}`"));
            }
            let signs = of_width(fixed, self.width(name, block)?)?;
            turned.rows.extend(slot_of(fixed, name).map(|slot| (slot, signs)));
        }
        match (tied, slot_of(fixed, TOKEN_EMBEDDING)) {
            (true, Some(slot)) => {
                let signs = of_width(fixed, self.width(TOKEN_EMBEDDING, block)?)?;
                turned.inputs.insert(slot, Turn { signs, regroup: None });
            }
            (false, _) if !rows.is_empty() && self.gguf.find(OUTPUT).is_none() => {
                return refuse(
                    keys.name("tied_output"),
                    "false",
                    format!("true in a file without a tensor `{OUTPUT}`"),
                );
            }
            _ => {}
        }
        Ok(turned)
    }

    fn word(&self, suffix: &str, want: &str) -> Result<(), Error> {
        match self.keys.text(suffix)? {
            Some(word) if word == want => Ok(()),
            Some(word) => refuse(self.keys.name(suffix), format!("{word:?}"), format!("{want:?}: Kiln knows no other")),
            None => refuse(self.keys.name(suffix), "missing", format!("{want:?}")),
        }
    }

    fn names(&self, suffix: &str) -> Result<Vec<String>, Error> {
        let names = self.gguf.metadata().get_str_array_opt(&self.keys.name(suffix))?;
        Ok(names
            .map(|names| names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect())
            .unwrap_or_default())
    }

    /// The signs of each width, where the file has some.
    fn signs(&self) -> Result<Option<HashMap<usize, Vec<f32>>>, Error> {
        let keys = &self.keys;
        match keys.text("sign_mode")? {
            Some("identity") => return Ok(None),
            Some("explicit") => {}
            other => {
                let value = other.map_or_else(|| "missing".to_owned(), |mode| format!("{mode:?}"));
                return refuse(keys.name("sign_mode"), value, "\"identity\" or \"explicit\"");
            }
        }
        let widths = keys.list("sign_widths", 1 << 10)?;
        let all = self.gguf.metadata().get_i32_array(&keys.name("sign_values"))?;
        let total = widths.iter().try_fold(0usize, |sum, width| sum.checked_add(*width)).unwrap_or(usize::MAX);
        keys.require(
            all.len() == total,
            "sign_values",
            all.len(),
            &format!("{total} numbers, as sign_widths adds up to"),
        )?;
        if let Some(other) = all.iter().find(|sign| !matches!(sign, 1 | -1)) {
            return refuse(keys.name("sign_values"), other, "1 or -1");
        }
        let mut rest = &all[..];
        let mut signs = HashMap::new();
        for width in widths {
            let (mine, behind) = rest.split_at(width);
            signs.insert(width, mine.iter().map(|sign| *sign as f32).collect());
            rest = behind;
        }
        Ok(Some(signs))
    }

    /// Elements of the input of a weight, which are whole blocks.
    fn width(&self, name: &str, block: usize) -> Result<usize, Error> {
        let info = self.gguf.find(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })?;
        let width = info.shape[0];
        let fits = width.is_multiple_of(block);
        self.keys.require(fits, "block_size", block, &format!("a divisor of the {width} columns of `{name}`"))?;
        Ok(width)
    }

    fn regroup(&self, name: &str, width: usize) -> Result<Option<Regroup>, Error> {
        if !name.ends_with("ssm_out.weight") || !self.keys.flag("gdn_v_grouped", false)? {
            return Ok(None);
        }
        if !TILED.contains(&self.architecture) {
            let key = self.keys.name("gdn_v_grouped");
            return refuse(key, "true", format!("false in a file of architecture {}", self.architecture));
        }
        let own = Keys::new(self.gguf, self.architecture);
        let (groups, heads) = (own.count("ssm.group_count", 1 << 12)?, own.count("ssm.time_step_rank", 1 << 12)?);
        let fits = heads.is_multiple_of(groups) && width.is_multiple_of(heads);
        own.require(fits, "ssm.group_count", groups, &format!("a divisor of {heads} heads of {width} values"))?;
        Ok(Some(Regroup { groups, ratio: heads / groups }))
    }
}

fn may_be_turned(name: &str) -> bool {
    let of_layer = || {
        let (number, rest) = name.strip_prefix("blk.")?.split_once('.')?;
        let kind = rest.strip_suffix(".weight")?;
        Some(number.parse::<usize>().is_ok() && OF_LAYERS.contains(&kind))
    };
    name == OUTPUT || of_layer() == Some(true)
}

fn slot_of(fixed: &Fixed, name: &str) -> Option<Slot> {
    (0..).zip(&fixed.slots).find(|(_, slot)| slot.kind == SlotKind::Weight && slot.name == name).map(|(i, _)| Slot(i))
}
