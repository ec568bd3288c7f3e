//! What becomes of each tensor: its name, its type, and what is done to its numbers on the way.

use std::collections::BTreeMap;

use kiln_gguf::{TensorType, quant};
use rayon::prelude::*;

use crate::config::Config;
use crate::encoders;
use crate::error::{Error, Result};
use crate::families::{Factors, Family};
use crate::names::{Place, place};
use crate::safetensors::Weights;

/// Values of a piece that is made at once.
const PIECE: usize = 16 << 20;

/// A tensor of the new file.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) name: String,
    /// Extents, innermost first.
    pub(crate) dims: Vec<usize>,
    pub(crate) ty: TensorType,
    from: From,
}

#[derive(Debug)]
enum From {
    /// Tensors of the folder, one behind the other.
    Stored(Vec<String>, Change),
    /// Numbers that were computed.
    Computed(Vec<f32>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    AddOne,
    /// Interleaves the two halves of each of this many heads.
    Pairs(usize),
}

/// Decides what becomes of every tensor of a folder, and adds those that were computed.
pub(crate) fn plan(
    weights: &Weights,
    config: &Config,
    family: &Family,
    ty: TensorType,
    computed: Factors,
) -> Result<Vec<Made>> {
    let mut stacks: BTreeMap<String, BTreeMap<usize, String>> = BTreeMap::new();
    let mut made = Vec::new();
    let tied = config.switch("tie_word_embeddings") || family.norms_add_one;
    for (name, stored) in &weights.tensors {
        let found = match family.encoder {
            true => encoders::place(name, &config.class),
            false => place(name, family.sandwich),
        };
        match found.ok_or_else(|| Error::UnknownTensor { name: name.clone() })? {
            Place::Nothing => {}
            Place::Stacked(stack, expert) => {
                stacks.entry(stack).or_default().insert(expert, name.clone());
            }
            // The output is the table of embeddings.
            Place::Own(own) if own == "output.weight" && tied => {}
            Place::Own(own) => {
                let dims: Vec<usize> = stored.shape.iter().rev().copied().collect();
                let change = change(&own, config, family)?;
                if let Change::Pairs(heads) = change
                    && !stored.shape.first().is_some_and(|rows| rows.is_multiple_of(2 * heads))
                {
                    let want = format!("rows for {heads} heads");
                    return Err(Error::Shape { name: name.clone(), got: stored.shape.clone(), want });
                }
                let ty = type_of(&own, &dims, ty);
                made.push(Made { name: own, dims, ty, from: From::Stored(vec![name.clone()], change) });
            }
        }
    }
    for (stack, experts) in stacks {
        made.push(stacked(weights, stack, &experts, ty)?);
    }
    for (name, values) in computed {
        let dims = vec![values.len()];
        made.push(Made { name: name.into(), dims, ty: TensorType::F32, from: From::Computed(values) });
    }
    check(config, family, &made)?;
    // By layer, as readers like it: what is needed first comes first.
    made.sort_by_key(|made| order(&made.name));
    Ok(made)
}

fn order(name: &str) -> (usize, usize, String) {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    match (layer, name) {
        (Some(layer), _) => (1, layer, name.to_owned()),
        (None, "output.weight" | "output_norm.weight") => (2, 0, name.to_owned()),
        (None, _) => (0, 0, name.to_owned()),
    }
}

/// Experts must be numbered without a gap and have the same type and shape.
fn stacked(weights: &Weights, stack: String, experts: &BTreeMap<usize, String>, ty: TensorType) -> Result<Made> {
    let names: Vec<String> = experts.values().cloned().collect();
    let shape = &weights.tensors[&names[0]].shape;
    if let Some((gap, _)) = experts.keys().enumerate().find(|(at, number)| at != *number) {
        return Err(Error::MissingTensor { name: format!("{stack}, expert {gap}") });
    }
    if let Some(other) = names.iter().find(|name| weights.tensors[*name].shape != *shape) {
        let got = weights.tensors[other].shape.clone();
        return Err(Error::Shape { name: other.clone(), got, want: format!("{shape:?} as the other experts") });
    }
    let dims: Vec<usize> = shape.iter().rev().copied().chain([names.len()]).collect();
    let ty = type_of(&stack, &dims, ty);
    Ok(Made { name: stack, dims, ty, from: From::Stored(names, Change::Nothing) })
}

fn change(name: &str, config: &Config, family: &Family) -> Result<Change> {
    let inside = |part: &str| name.contains(&format!(".{part}."));
    if family.norms_add_one && name.ends_with("norm.weight") {
        return Ok(Change::AddOne);
    }
    Ok(match (family.pairs, inside("attn_q"), inside("attn_k")) {
        (true, true, _) => Change::Pairs(config.count("num_attention_heads")?),
        (true, _, true) => Change::Pairs(config.kv_heads()?),
        _ => Change::Nothing,
    })
}

/// Vectors, routers and small tables keep all bits; a matrix whose rows are no whole number of blocks gets halves.
fn type_of(name: &str, dims: &[usize], wish: TensorType) -> TensorType {
    let small =
        dims.len() < 2 || ["ffn_gate_inp", "position_embd", "token_types"].iter().any(|part| name.contains(part));
    match dims.first() {
        _ if small => TensorType::F32,
        Some(columns) if wish.row_bytes(*columns).is_some() => wish,
        _ => TensorType::F16,
    }
}

/// Matrices that could not have the type that was asked for.
pub(crate) fn fallbacks(made: &[Made], wish: TensorType) -> Option<String> {
    let falls = |made: &&Made| made.ty == TensorType::F16 && made.dims.len() > 1;
    let count = made.iter().filter(falls).count();
    let block = wish.block_len();
    (wish != TensorType::F16 && count > 0)
        .then(|| format!("{count} matrices stay F16: {wish} wants rows of a multiple of {block} values"))
}

/// Every layer must be there, and the biases that the settings speak of.
fn check(config: &Config, family: &Family, made: &[Made]) -> Result<()> {
    let has = |name: &str| made.iter().any(|made| made.name == name);
    for (setting, part) in [("attention_bias", ".attn_"), ("mlp_bias", ".ffn_")] {
        let biased = made.iter().any(|made| made.name.contains(part) && made.name.ends_with(".bias"));
        if config.switch(setting) && !biased {
            let what = format!("{setting} is true, and the folder has no such biases");
            return Err(Error::Config { what });
        }
    }
    let (whole, of_layer) = match family.encoder {
        true => (&encoders::REQUIRED[..], encoders::OF_LAYER),
        false => (&["token_embd.weight", "output_norm.weight"][..], "attn_norm.weight"),
    };
    let layers = (0..config.count("num_hidden_layers")?).map(|layer| format!("blk.{layer}.{of_layer}"));
    match whole.iter().map(|name| (*name).to_owned()).chain(layers).find(|name| !has(name)) {
        Some(name) => Err(Error::MissingTensor { name }),
        None => Ok(()),
    }
}

impl Made {
    pub(crate) fn bytes(&self) -> u64 {
        let elements: usize = self.dims.iter().product();
        (elements / self.ty.block_len() * self.ty.block_bytes()) as u64
    }

    /// Makes the tensor, piece by piece.
    pub(crate) fn write(&self, weights: &Weights, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let columns = self.dims.first().copied().unwrap_or(1).max(1);
        let (names, change) = match &self.from {
            From::Computed(values) => return take(&self.pack(values, columns)?),
            From::Stored(names, change) => (names, *change),
        };
        for name in names {
            let shape = &weights.tensors[name].shape;
            let all: usize = shape.iter().product();
            if let Change::Pairs(heads) = change {
                // Rows change their places, so all of them are needed.
                let values = paired(&weights.read(name, 0, all)?, heads, shape.get(1).copied().unwrap_or(1));
                take(&self.pack(&values, columns)?)?;
                continue;
            }
            let step = (PIECE / columns).max(1) * columns;
            for from in (0..all).step_by(step) {
                let mut values = weights.read(name, from, (from + step).min(all))?;
                if change == Change::AddOne {
                    values.iter_mut().for_each(|value| *value += 1.0);
                }
                take(&self.pack(&values, columns)?)?;
            }
        }
        Ok(())
    }

    fn pack(&self, values: &[f32], columns: usize) -> Result<Vec<u8>> {
        let row = self.ty.row_bytes(columns).unwrap_or(0);
        let mut out = vec![0; values.len() / columns * row];
        let rows = (1 << 14) / columns + 1;
        let failed = |why: quant::QuantError| Error::Type { name: self.name.clone(), dtype: why.to_string() };
        let tasks = values.par_chunks(rows * columns).zip(out.par_chunks_mut(rows * row));
        tasks.try_for_each(|(values, out)| quant::quantise(self.ty, values, columns, None, out).map_err(failed))?;
        Ok(out)
    }
}

/// Rows of each head: the first half and the second become pairs.
fn paired(values: &[f32], heads: usize, columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    let half = rows / heads / 2;
    let mut out = Vec::with_capacity(values.len());
    for row in 0..rows {
        let (head, inside) = (row / (2 * half), row % (2 * half));
        let source = head * 2 * half + (inside % 2) * half + inside / 2;
        out.extend_from_slice(&values[source * columns..(source + 1) * columns]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_become_pairs() {
        // Two heads of four rows with one column.
        let values: Vec<f32> = (0..8).map(|row| row as f32).collect();
        assert_eq!(paired(&values, 2, 1), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }

    #[test]
    fn vectors_and_routers_keep_all_bits() {
        let q8 = TensorType::Q8_0;
        assert_eq!(type_of("blk.0.attn_norm.weight", &[64], q8), TensorType::F32);
        assert_eq!(type_of("blk.0.ffn_gate_inp.weight", &[64, 8], q8), TensorType::F32);
        assert_eq!(type_of("blk.0.ffn_up.weight", &[64, 8], q8), q8);
        assert_eq!(type_of("blk.0.ffn_up.weight", &[65, 8], q8), TensorType::F16);
    }
}
