//! Declares the slots of a model while its architecture asks for them: weights by name and shape, checked against the file,
//! caches and states. It counts what was read: a tensor that nobody asked for is an error, because a bias left out in
//! silence is the commonest way to be wrong.

use std::collections::HashMap;

use kiln_gguf::{Gguf, TensorType, quant};
use kiln_kernels::rope::RopeParams;
use kiln_kernels::tensor::Tensor;

use super::Keys;
use crate::Error;
use crate::arch::{CARRIED, PAGE, Room};
use crate::plan::{Fixed, Linear, SlotKind};

/// Endings of tensors that no architecture reads: factors of activations for formats that Kiln does not round to.
const HARMLESS: &[&str] = &[".input_scale"];

/// What a model asks of the rest of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Elements of keys that a token takes in the caches of all layers.
    pub key_elements: usize,
    /// Elements of values that a token takes in the caches of all layers.
    pub value_elements: usize,
    /// Bytes that recurrent layers keep of a sequence.
    pub state_bytes: usize,
    /// Whether every token sees the whole text: it is read at once, and nothing can be added to it.
    pub sees_all: bool,
    /// The largest window of layers that see the last tokens alone; none where all layers see everything.
    pub window: Option<usize>,
    /// Whether the model gives a vector for each token, and no logits: it writes nothing.
    pub encodes: bool,
    /// Whether caches hold latents, of which keys and values of all heads can be made.
    pub latents: bool,
    /// Whether the model fills in masks of a text, in any order ([`crate::diffusion`]).
    pub fills: bool,
    /// For models that read one text and write another: the token that every text begins with. The text that is read is seen as a
    /// whole, the one that is written up to each token.
    pub start: Option<u32>,
    /// Whether positions mean nothing but distances, all far ones alike: a text may be longer than those that the model has learnt from.
    pub any_length: bool,
    /// Tokens of context that options of YaRN stretch it to, where they do.
    pub stretched: Option<usize>,
    /// Whether tokens have several positions: those of a picture are its rows and columns.
    pub several_positions: bool,
    /// Layers behind which vectors of pictures have further parts that are added.
    pub deepstack: usize,
    /// Whether the file has a head that drafts tokens, and it is read.
    pub drafts: bool,
}

impl Facts {
    /// Whether the model remembers every token, so that its context ends somewhere.
    pub fn has_cache(&self) -> bool {
        self.key_elements > 0
    }

    /// Whether the model keeps states: a sequence cannot go back to an earlier token then.
    pub fn has_state(&self) -> bool {
        self.state_bytes > 0
    }
}

/// Which of the two caches of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cached {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

/// Reads a model file for its architecture.
pub struct Loader<'a> {
    /// The hyper-parameters.
    pub keys: Keys<'a>,
    /// Room of the caches and states.
    pub room: Room,
    gguf: &'a Gguf,
    fixed: Fixed,
    facts: Facts,
    place: String,
    /// Where factors of matrices are looked up, if not at the same place.
    scale_place: Option<String>,
    /// What was read, with its slot where it has one: asked for twice, it is loaded once.
    read: HashMap<String, Option<Tensor>>,
    freqs: Vec<(RopeParams, Option<Vec<f32>>, Tensor)>,
    /// Layers that are not run, and whose tensors nobody reads.
    ignored: Vec<usize>,
    /// Constants by name: asked for twice, they are made once.
    constants: HashMap<String, Tensor>,
    /// Caches by name: other layers may read them.
    caches: HashMap<String, Tensor>,
    /// Whether a draft head is read.
    pub wants_head: bool,
}

impl<'a> Loader<'a> {
    /// A loader for a file whose architecture is called `name`.
    pub fn new(gguf: &'a Gguf, name: &'a str, room: &Room) -> Loader<'a> {
        Loader {
            keys: Keys::new(gguf, name),
            room: *room,
            gguf,
            fixed: Fixed::default(),
            facts: Facts::default(),
            place: String::new(),
            scale_place: None,
            read: HashMap::new(),
            freqs: Vec::new(),
            ignored: Vec::new(),
            constants: HashMap::new(),
            caches: HashMap::new(),
            wants_head: false,
        }
    }

    /// Whether a tensor was asked for so far.
    pub(crate) fn has_read(&self, name: &str) -> bool {
        self.read.contains_key(name)
    }

    /// From now on names are those of layer `i`: `attn_q` means `blk.i.attn_q`.
    pub fn layer(&mut self, i: usize) {
        self.place = format!("blk.{i}.");
        self.scale_place = None;
    }

    /// Until names are those of another layer, factors of matrices are those of layer `i`.
    pub fn scales_of(&mut self, i: usize) {
        self.scale_place = Some(format!("blk.{i}."));
    }

    /// From now on names begin like this.
    pub fn part(&mut self, place: String) {
        self.place = place;
        self.scale_place = None;
    }

    /// From now on names are those of the whole model.
    pub fn whole(&mut self) {
        self.place.clear();
    }

    /// The whole name of a tensor at this place.
    pub fn full(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }

    /// Whether the file has a tensor.
    pub fn has(&self, name: &str) -> bool {
        self.gguf.find(&self.full(name)).is_some()
    }

    /// The extents of a tensor, where the file has it.
    pub fn shape(&self, name: &str) -> Option<[usize; 4]> {
        self.gguf.find(&self.full(name)).map(|info| info.shape)
    }

    /// The names of all tensors.
    pub fn names(&self) -> Vec<String> {
        self.gguf.tensors().iter().map(|info| info.name.clone()).collect()
    }

    /// Tokens in the vocabulary: rows of the embeddings.
    pub fn vocab(&self) -> Result<usize, Error> {
        let name = super::names::TOKEN_EMBEDDING;
        let info = self.gguf.find(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })?;
        Ok(info.shape[1])
    }

    /// A tensor that must be there with exactly these extents.
    pub fn tensor(&mut self, name: &str, want: &[usize]) -> Result<Tensor, Error> {
        self.tensor_opt(name, want)?.ok_or_else(|| Error::MissingTensor { name: self.full(name) })
    }

    /// A tensor that may be there.
    pub fn tensor_opt(&mut self, name: &str, want: &[usize]) -> Result<Option<Tensor>, Error> {
        let name = self.full(name);
        let Some(info) = self.gguf.find(&name) else { return Ok(None) };
        let mut padded = [1; 4];
        padded[..want.len()].copy_from_slice(want);
        // Vectors may be stored as rows of a matrix with one row each: the elements lie the same.
        let flat = info.shape[0] == 1 && info.shape.iter().product::<usize>() == want.iter().product::<usize>();
        if info.shape != padded && !(flat && want.len() == 1) {
            let (got, want) = (info.dims().to_vec(), want.to_vec());
            return Err(Error::TensorShape { name, got, want });
        }
        let tensor = match self.read.get(&name) {
            Some(Some(known)) => *known,
            _ => {
                let tensor = self.fixed.add(name.clone(), SlotKind::Weight, info.ty, info.shape);
                self.read.insert(name, Some(tensor));
                tensor
            }
        };
        Ok(Some(tensor.reshape(padded)))
    }

    /// A vector of floats that kernels read as F32: other types are decoded here.
    pub fn vector_opt(&mut self, name: &str, want: &[usize]) -> Result<Option<Tensor>, Error> {
        let full = self.full(name);
        let plain = self.gguf.find(&full).is_none_or(|info| info.ty == TensorType::F32);
        if plain {
            return self.tensor_opt(name, want);
        }
        let Some(values) = self.values(name)? else { return Ok(None) };
        let n: usize = want.iter().product();
        if values.len() != n {
            return Err(Error::TensorShape { name: full, got: vec![values.len()], want: want.to_vec() });
        }
        let mut shape = [1; 4];
        shape[..want.len()].copy_from_slice(want);
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(Some(self.fixed.add(full, SlotKind::Constant(bytes), TensorType::F32, shape)))
    }

    /// A vector that must be there.
    pub fn vector(&mut self, name: &str, want: &[usize]) -> Result<Tensor, Error> {
        self.vector_opt(name, want)?.ok_or_else(|| Error::MissingTensor { name: self.full(name) })
    }

    /// The values of a small tensor of any type, on the host.
    pub fn values(&mut self, name: &str) -> Result<Option<Vec<f32>>, Error> {
        self.values_of(self.full(name))
    }

    fn values_of(&mut self, name: String) -> Result<Option<Vec<f32>>, Error> {
        let Some(info) = self.gguf.find(&name) else { return Ok(None) };
        let mut values = vec![0.0; info.shape.iter().product()];
        let decoded = quant::dequantise(info.ty, self.gguf.data(info), &mut values);
        if decoded.is_err() || values.iter().any(|v| !v.is_finite()) {
            return Err(Error::TensorValues { name, ty: info.ty.to_string() });
        }
        self.read.entry(name).or_insert(None);
        Ok(Some(values))
    }

    /// The value of a tensor of one element.
    pub fn number(&mut self, name: &str) -> Result<f32, Error> {
        let values = self.values(name)?.ok_or_else(|| Error::MissingTensor { name: self.full(name) })?;
        match values[..] {
            [one] => Ok(one),
            _ => Err(Error::TensorShape { name: self.full(name), got: vec![values.len()], want: vec![1] }),
        }
    }

    /// Every token sees the whole text.
    pub fn sees_all(&mut self) {
        self.facts.sees_all = true;
    }

    /// The model fills in texts.
    pub fn fills(&mut self) {
        self.facts.fills = true;
    }

    /// The model reads one text and writes another, which begins with this token.
    pub fn answers(&mut self, start: u32) {
        self.facts.start = Some(start);
    }

    /// Positions mean nothing but distances.
    pub fn any_length(&mut self) {
        self.facts.any_length = true;
    }

    /// Tokens have several positions, which differ in pictures.
    pub fn several_positions(&mut self) {
        self.facts.several_positions = true;
    }

    /// Vectors of pictures have so many further parts, which are added behind the first layers.
    pub fn deepstack(&mut self, layers: usize) {
        self.facts.deepstack = layers;
    }

    /// Options of YaRN stretch the context to so many tokens.
    pub fn stretched(&mut self, context: usize) {
        self.facts.stretched = Some(context);
    }

    /// The model gives vectors and no logits.
    pub fn encodes(&mut self) {
        self.facts.encodes = true;
    }

    /// Caches hold latents, of which keys and values of all heads can be made.
    pub fn caches_latents(&mut self) {
        self.facts.latents = true;
    }

    /// A tensor that this architecture does not use: it may be there.
    pub fn ignore(&mut self, name: &str) {
        let name = self.full(name);
        self.read.entry(name).or_insert(None);
    }

    /// These layers are not run, and nobody reads their tensors.
    pub fn ignore_layers(&mut self, layers: std::ops::Range<usize>) {
        self.ignored.extend(layers);
    }

    /// A layer that was to be ignored is read after all.
    pub fn reads_layer(&mut self, layer: usize) {
        self.ignored.retain(|ignored| *ignored != layer);
    }

    /// F32 numbers that no file holds. Every layer that asks for a name gets the same tensor.
    pub fn constant(&mut self, name: &str, values: &[f32], shape: [usize; 4]) -> Tensor {
        if let Some(known) = self.constants.get(name) {
            return *known;
        }
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor = self.fixed.add(name, SlotKind::Constant(bytes), TensorType::F32, shape);
        self.constants.insert(name.to_owned(), tensor);
        tensor
    }

    /// The same of I32 numbers.
    pub fn whole_constant(&mut self, name: &str, values: &[i32], shape: [usize; 4]) -> Tensor {
        if let Some(known) = self.constants.get(name) {
            return *known;
        }
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let tensor = self.fixed.add(name, SlotKind::Constant(bytes), TensorType::I32, shape);
        self.constants.insert(name.to_owned(), tensor);
        tensor
    }

    /// The matrix `NAME.weight` with its optional `NAME.bias` and `NAME.scale`.
    pub fn linear(&mut self, name: &str, shape: &[usize]) -> Result<Linear, Error> {
        let weight = self.tensor(&format!("{name}.weight"), shape)?;
        self.with_extras(name, weight, shape)
    }

    /// The same where the file has it.
    pub fn linear_opt(&mut self, name: &str, shape: &[usize]) -> Result<Option<Linear>, Error> {
        match self.tensor_opt(&format!("{name}.weight"), shape)? {
            Some(weight) => self.with_extras(name, weight, shape).map(Some),
            None => Ok(None),
        }
    }

    /// The matrix alone: a bias or a scale in the file is left to whoever asks for it.
    pub fn matrix(&mut self, name: &str, shape: &[usize]) -> Result<Linear, Error> {
        Ok(Linear::plain(self.tensor(&format!("{name}.weight"), shape)?))
    }

    /// The matrix alone: a bias or a scale that the file has does not count.
    pub fn unscaled(&mut self, name: &str, shape: &[usize]) -> Result<Linear, Error> {
        [".bias", ".scale"].iter().for_each(|end| self.ignore(&format!("{name}{end}")));
        self.matrix(name, shape)
    }

    /// A matrix that this architecture does not use, with its bias and scale: it may be there.
    pub fn ignore_matrix(&mut self, name: &str) {
        [".weight", ".bias", ".scale"].iter().for_each(|end| self.ignore(&format!("{name}{end}")));
    }

    fn with_extras(&mut self, name: &str, weight: Tensor, shape: &[usize]) -> Result<Linear, Error> {
        // Matrices of experts have a bias each.
        let bias = self.vector_opt(&format!("{name}.bias"), &shape[1..])?;
        Ok(Linear { weight, bias, scale: self.scale(name)? })
    }

    /// The factor `NAME.scale` of a matrix, 1 where there is none.
    pub fn scale(&mut self, name: &str) -> Result<f32, Error> {
        let place = self.scale_place.as_ref().unwrap_or(&self.place);
        let full = format!("{place}{name}.scale");
        match self.values_of(full.clone())?.as_deref() {
            None => Ok(1.0),
            Some([one]) => Ok(*one),
            Some(more) => Err(Error::TensorShape { name: full, got: vec![more.len()], want: vec![1] }),
        }
    }

    /// The table of frequencies of a rotary embedding. Layers with the same one share it.
    pub fn freqs(&mut self, rope: &RopeParams, factors: Option<&[f32]>) -> Result<Tensor, Error> {
        let known = self.freqs.iter().find(|(known, by, _)| known == rope && by.as_deref() == factors);
        if let Some((.., freqs)) = known {
            return Ok(*freqs);
        }
        let values = rope.freqs(factors).map_err(|e| Error::Kernel(e.into()))?;
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let name = match self.freqs.len() {
            0 => "rope.freqs".to_owned(),
            n => format!("rope.freqs.{n}"),
        };
        let freqs = self.fixed.add(name, SlotKind::Constant(bytes), TensorType::I32, [2, rope.pairs(), 1, 1]);
        self.freqs.push((*rope, factors.map(<[f32]>::to_vec), freqs));
        Ok(freqs)
    }

    /// A cache of rows of this width, one for each token, in a layer that sees so many of the last ones, or all.
    pub fn cache(&mut self, name: &str, which: Cached, width: usize, window: Option<usize>) -> Result<Tensor, Error> {
        let (ty, count) = match which {
            Cached::Keys => (self.room.k_type, &mut self.facts.key_elements),
            Cached::Values => (self.room.v_type, &mut self.facts.value_elements),
        };
        *count += width;
        if !width.is_multiple_of(ty.block_len()) {
            return Err(Error::CacheType { ty: ty.to_string(), width, block: ty.block_len() });
        }
        self.facts.window = self.facts.window.max(window);
        let (kind, pages) = match (window, self.room.window_pages) {
            (None, _) | (_, 0) => (SlotKind::Cache, self.room.pages),
            (Some(_), pages) => (SlotKind::WindowCache, pages),
        };
        let cache = self.fixed.add(name, kind, ty, [width, pages * PAGE, 1, 1]);
        self.caches.insert(name.to_owned(), cache);
        Ok(cache)
    }

    /// The same for heads of a width each, which must be whole blocks of the cache's type.
    pub fn heads_cache(
        &mut self,
        name: &str,
        which: Cached,
        [width, heads]: [usize; 2],
        window: Option<usize>,
    ) -> Result<Tensor, Error> {
        let ty = match which {
            Cached::Keys => self.room.k_type,
            Cached::Values => self.room.v_type,
        };
        if !width.is_multiple_of(ty.block_len()) {
            return Err(Error::CacheType { ty: ty.to_string(), width, block: ty.block_len() });
        }
        self.cache(name, which, width * heads, window)
    }

    /// The cache of this name, which an earlier layer owns: heads of this width and number.
    pub fn shared_cache(&self, name: &str, [width, heads]: [usize; 2]) -> Result<Tensor, Error> {
        let missing = || Error::MissingTensor { name: name.to_owned() };
        let cache = *self.caches.get(name).ok_or_else(missing)?;
        if cache.shape[0] != width * heads {
            let (got, want) = (vec![cache.shape[0]], vec![width * heads]);
            return Err(Error::TensorShape { name: name.to_owned(), got, want });
        }
        Ok(cache)
    }

    /// What a recurrent layer keeps of each sequence: states of this shape side by side, in one more dimension.
    pub fn state(&mut self, name: &str, one: &[usize]) -> Tensor {
        let mut shape = [1; 4];
        shape[..one.len()].copy_from_slice(one);
        shape[one.len()] = self.room.states.max(1);
        self.facts.state_bytes += 4 * one.iter().product::<usize>();
        self.fixed.add(name, SlotKind::State, TensorType::F32, shape)
    }

    /// Kept states of this width, for a draft head: [`CARRIED`] rows for each sequence.
    pub fn carried(&mut self, name: &str, width: usize) -> Tensor {
        self.facts.drafts = true;
        self.fixed.add(name, SlotKind::Carried, TensorType::F32, [width, CARRIED * self.room.states.max(1), 1, 1])
    }

    /// The slots, if every tensor of the file was read or is known to be harmless: one of `harmless`, a part of the name.
    pub fn finish(self, harmless: &[&str]) -> Result<(Fixed, Facts), Error> {
        let not_run = |name: &str| {
            let layer = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            layer.is_some_and(|layer| self.ignored.contains(&layer))
        };
        let known = |name: &str| {
            not_run(name)
                || HARMLESS.iter().any(|end| name.ends_with(end))
                || harmless.iter().any(|part| name.contains(part))
        };
        let unread: Vec<&str> = self
            .gguf
            .tensors()
            .iter()
            .map(|info| info.name.as_str())
            .filter(|name| !self.read.contains_key(*name) && !known(name))
            .collect();
        match unread.first() {
            None => Ok((self.fixed, self.facts)),
            Some(first) => Err(Error::UnreadTensor { name: (*first).to_owned(), others: unread.len() - 1 }),
        }
    }
}
