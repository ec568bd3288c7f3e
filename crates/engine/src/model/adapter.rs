//! Low-rank adapters: small pairs of matrices that change a model while its weights stay as they are. The product of a weight W
//! becomes W x + scale * B (A x), with scale = alpha / rank * what the user asks for.
//!
//! The files are those that llama.cpp reads: GGUF with `general.type` "adapter", `adapter.type` "lora", `adapter.lora.alpha`, and
//! for each changed tensor X the two tensors `X.lora_a` and `X.lora_b`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kiln_gguf::{Gguf, TensorInfo, TensorType, quant};
use kiln_system::text::shown;

use super::Model;
use super::names::TOKEN_EMBEDDING;
use crate::{Error, weights};

const WRONG_BASE: &str = "an adapter changes the model that it was trained on, and no other";
const WRONG_FILE: &str = "--lora takes GGUF adapters, as llama.cpp's convert_lora_to_gguf.py writes them";
const DAMAGED: &str = "the file is damaged; fetch or convert it again";

/// One matrix of an adapter.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) ty: TensorType,
    pub(crate) shape: [usize; 4],
    pub(crate) bytes: Arc<[u8]>,
}

/// What an adapter does to one tensor of the model.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    /// The tensor's name.
    pub(crate) weight: String,
    /// `[in, rank]`, of experts one each. Of embeddings `[rank, vocab]`: rows are taken of it, as of the embeddings.
    pub(crate) a: Matrix,
    /// `[rank, out]`, of experts one each.
    pub(crate) b: Matrix,
    /// alpha / rank.
    pub(crate) scale: f32,
}

impl Pair {
    /// Whether rows of the tensor are taken by token, in the place of a product.
    pub(crate) fn embeds(&self) -> bool {
        self.weight == TOKEN_EMBEDDING
    }
}

/// An adapter that fits its model.
#[derive(Clone, Debug)]
pub struct Adapter {
    /// Where it came from.
    pub path: String,
    /// How strongly it counts where a request does not say.
    pub scale: f32,
    /// Tensors of the file that are not applied: vectors of norms, which llama.cpp leaves out as well.
    pub left_out: usize,
    pub(crate) pairs: Vec<Pair>,
}

impl Adapter {
    /// Reads an adapter of a model.
    pub fn open(path: &Path, scale: f32, base: &Model) -> Result<Adapter, Error> {
        Adapter::new(&Gguf::open(path)?, &path.display().to_string(), scale, base)
    }

    /// The same from a file that is already open; `path` is its name in messages.
    pub fn new(gguf: &Gguf, path: &str, scale: f32, base: &Model) -> Result<Adapter, Error> {
        let refuse = |why: String, hint| Error::Adapter { path: path.to_owned(), why, hint };
        check_kind(gguf, base).map_err(|(why, hint)| refuse(why, hint))?;
        let alpha = gguf.metadata().get_f32_opt("adapter.lora.alpha")?.unwrap_or(0.0);
        if !alpha.is_finite() {
            return Err(refuse(format!("its alpha is {alpha}"), DAMAGED));
        }
        let mut halves: BTreeMap<&str, [Option<&TensorInfo>; 2]> = BTreeMap::new();
        let mut left_out = 0;
        for info in gguf.tensors() {
            match info.name.rsplit_once('.') {
                Some((weight, "lora_a")) => halves.entry(weight).or_default()[0] = Some(info),
                Some((weight, "lora_b")) => halves.entry(weight).or_default()[1] = Some(info),
                _ if info.name.ends_with("_norm.weight") => left_out += 1,
                _ => {
                    let why =
                        format!("tensor `{}` is none of its kind: names end in .lora_a or .lora_b", shown(&info.name));
                    return Err(refuse(why, WRONG_FILE));
                }
            }
        }
        if halves.is_empty() {
            return Err(refuse("it changes no tensor".into(), DAMAGED));
        }
        let mut pairs = Vec::with_capacity(halves.len());
        for (weight, halves) in halves {
            let name = shown(weight);
            let [Some(a), Some(b)] = halves else {
                let (has, lacks) = if halves[0].is_some() { ("lora_a", "lora_b") } else { ("lora_b", "lora_a") };
                return Err(refuse(format!("`{name}.{has}` is there, `{name}.{lacks}` is missing"), DAMAGED));
            };
            let Some(info) = base.gguf.find(weight) else {
                return Err(refuse(format!("it changes `{name}`, which the model does not have"), WRONG_BASE));
            };
            let rank = rank(info, a, b).map_err(|(why, hint)| refuse(why, hint))?;
            let scale = if alpha == 0.0 { 1.0 } else { alpha / rank as f32 };
            pairs.push(Pair { weight: weight.to_owned(), a: matrix(gguf, a)?, b: matrix(gguf, b)?, scale });
        }
        Ok(Adapter { path: path.to_owned(), scale, left_out, pairs })
    }
}

/// Whether a file is an adapter of this model's kind.
fn check_kind(gguf: &Gguf, base: &Model) -> Result<(), (String, &'static str)> {
    let text = |key| shown(gguf.metadata().get_str_or(key, "missing").unwrap_or("no text"));
    let kind = text("general.type");
    if kind != "adapter" {
        return Err((format!("it is no adapter: its general.type is {kind}"), WRONG_FILE));
    }
    let kind = text("adapter.type");
    if kind != "lora" {
        return Err((format!("it is an adapter of type {kind}, and Kiln knows lora"), WRONG_FILE));
    }
    if gguf.metadata().contains("adapter.alora.invocation_tokens") {
        let hint = "merge it into its model and convert that";
        return Err(("it begins to count at certain words of a text (aLoRA), which Kiln does not do".into(), hint));
    }
    let (made_for, own) = (text("general.architecture"), base.config.architecture.name);
    if made_for != own {
        return Err((format!("it was made for architecture {made_for}, the model is {own}"), WRONG_BASE));
    }
    Ok(())
}

/// The rank of a pair, if it fits the tensor it changes.
fn rank(weight: &TensorInfo, a: &TensorInfo, b: &TensorInfo) -> Result<usize, (String, &'static str)> {
    let name = shown(&weight.name);
    let [input, output, experts, last] = weight.shape;
    let rank = b.shape[0];
    let wanted = match weight.name == TOKEN_EMBEDDING {
        true => [[rank, output, 1, 1], [rank, input, 1, 1]],
        false => [[input, rank, experts, 1], [rank, output, experts, 1]],
    };
    if [a.shape, b.shape] == wanted && last == 1 {
        return Ok(rank);
    }
    if a.shape == [input, a.shape[1], experts, 1] && b.shape == [output, a.shape[1], experts, 1] {
        let hint = "`lora_b` is not transposed, as files of llama.cpp's old finetune are: convert the adapter again";
        return Err((format!("`{name}.lora_b` has shape {:?}", b.dims()), hint));
    }
    let why =
        format!("`{name}` has shape {:?} in the model, its pair {:?} and {:?}", weight.dims(), a.dims(), b.dims());
    Err((why, WRONG_BASE))
}

/// A matrix as kernels read it: floats as they are, blocks as F32, because few ranks are whole blocks of a row on a GPU.
fn matrix(gguf: &Gguf, info: &TensorInfo) -> Result<Matrix, Error> {
    let bytes = weights::data(gguf, info)?;
    if matches!(info.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
        return Ok(Matrix { ty: info.ty, shape: info.shape, bytes: bytes.into() });
    }
    let mut values = vec![0.0; info.n_elements()];
    quant::dequantise(info.ty, bytes, &mut values)
        .map_err(|_| Error::TensorValues { name: info.name.clone(), ty: info.ty.to_string() })?;
    let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Ok(Matrix { ty: TensorType::F32, shape: info.shape, bytes })
}
