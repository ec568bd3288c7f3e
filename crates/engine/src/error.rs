//! What can go wrong between a model file and its text.

use kiln_system::memory::{Available, size};
use kiln_system::text::shown;

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error(transparent)]
    Gguf(#[from] kiln_gguf::Error),
    #[error(transparent)]
    Tokenizer(#[from] crate::tokenizer::TokenizerError),
    #[error(transparent)]
    Kernel(#[from] kiln_kernels::record::Error),
    #[error(transparent)]
    Gpu(#[from] kiln_gpu::Error),

    #[error(
        "a step waited for the one before it in vain\nhint: KILN_DISABLE=dependent_launch lets barriers order them; it was noted for the next start"
    )]
    Stalled,
    #[error(
        "activations left the range of an f16 in a step that packs them for matrix units\nhint: run it again; Kiln has stopped packing them for this model"
    )]
    OutOfRange,

    #[error(
        "architecture \"{name}\" is not supported; Kiln knows {known}\nhint: `kiln inspect` says which of them is nearest and what differs; --as NAME reads the file as that one", name = shown(name)
    )]
    Architecture { name: String, known: String },
    #[error(
        "architecture \"{name}\" is known, but not run: {why}\nhint: docs/architectures.md lists what runs", name = shown(name)
    )]
    Refused { name: String, why: &'static str },
    #[error(
        "the model reads a text as a whole: {more} tokens cannot be added to the {read} it has read\nhint: such models fill in texts or give vectors of them; `kiln run` and `kiln embed` do so"
    )]
    WholeText { read: usize, more: usize },
    #[error(
        "metadata key `{key}` is {value}, which must be {want}\nhint: the file is damaged or not a model of its kind", key = shown(key), value = shown(value), want = shown(want)
    )]
    Hyperparameter { key: String, value: String, want: String },
    #[error(
        "tensor `{name}` is missing\nhint: the file is not a complete model of its architecture; fetch or convert it again", name = shown(name)
    )]
    MissingTensor { name: String },
    #[error(
        "tensor `{name}` has shape {got:?}, the model's configuration wants {want:?}\nhint: convert the model again", name = shown(name)
    )]
    TensorShape { name: String, got: Vec<usize>, want: Vec<usize> },
    #[error(
        "tensor `{name}` of type {ty} does not hold finite numbers that can be read\nhint: the file is damaged; fetch or convert it again", name = shown(name)
    )]
    TensorValues { name: String, ty: String },
    #[error(
        "unexpected tensor `{name}`{}: this file does not match its architecture, so Kiln will not run it\nhint: the file may be damaged, mislabelled, or newer than this version of Kiln", more(*others), name = shown(name)
    )]
    UnreadTensor { name: String, others: usize },
    #[error(transparent)]
    Media(#[from] kiln_media::Error),
    #[error(
        "the file is no encoder of pictures or sounds: {why}\nhint: the file beside a model that sees or hears is usually called mmproj-*.gguf; `kiln inspect` shows what a file holds"
    )]
    NoEncoder { why: String },
    #[error(
        "the file encodes no {of}\nhint: `kiln inspect` shows what it encodes; a model that takes {of} has a file that does"
    )]
    LacksEncoder { of: &'static str },
    #[error(
        "{of} of {projector} cannot be put before a model of architecture \"{architecture}\": {why}\nhint: the model itself runs without {of}"
    )]
    Misplaced { of: &'static str, architecture: &'static str, projector: &'static str, why: &'static str },
    #[error(
        "{given} pictures and sounds were given, {found} have a place in the prompt\nhint: the chat template drops or repeats what a message says; another one can be named"
    )]
    LostMedia { found: usize, given: usize },
    #[error(
        "the vectors have {width} numbers each, the model takes {hidden}\nhint: the encoder belongs to another model; each has its own"
    )]
    VectorWidth { width: usize, hidden: usize },
    #[error(
        "encoders with the projector \"{}\" are not run; Kiln knows {known}\nhint: the model itself runs without pictures and sounds",
        shown(name)
    )]
    Projector { name: String, known: String },
    #[error("{} is not supported by Kiln yet\nhint: `kiln inspect` shows what the file holds", shown(what))]
    NotSupported { what: String },
    #[error("adapter {path} cannot be used: {why}\nhint: {hint}", path = shown(path))]
    Adapter { path: String, why: String, hint: &'static str },
    #[error(
        "{got} scales of adapters were given, the model has {have} adapters\nhint: one scale for each --lora, in their order"
    )]
    Scales { got: usize, have: usize },
    #[error(
        "a cache of {ty} takes rows of whole blocks of {block}, the heads of the model have {width} elements\nhint: choose F16 for this cache"
    )]
    CacheType { ty: String, width: usize, block: usize },
    #[error("there is no pass {name:?}; the passes are {known}")]
    UnknownPass { name: String, known: String },
    #[error(
        "this model cannot be run: step {step} of it does not fit together ({why})\nhint: its file has a tensor of an unusual type or shape; `kiln inspect --tensors` lists them"
    )]
    Plan { step: String, why: String },
    #[error(
        "this model cannot be run on {device}: step {step} needs what its kernels do not do ({why})\nhint: the CPU runs it: --cpu"
    )]
    OnDevice { device: String, step: String, why: String },
    #[error(
        "the prompt has {tokens} tokens, the context holds {context}\nhint: shorten the prompt or raise --ctx-size (the model was trained with {trained})"
    )]
    PromptTooLong { tokens: usize, context: usize, trained: usize },
    #[error("a context of {asked} tokens was asked for; it must be 1 to {most}")]
    Context { asked: usize, most: usize },
    #[error(
        "the sequence has {length} tokens and cannot go back to {asked}: {why}\nhint: save the state where you want to return, or start over"
    )]
    NoWayBack { length: usize, asked: usize, why: &'static str },
    #[error("the saved state cannot be used: {why}\nhint: {hint}")]
    SavedState { why: String, hint: &'static str },
    #[error(
        "{needed} {what} are needed, {free} of {all} are free\nhint: end other sequences, or give the engine more room"
    )]
    NoRoom { what: &'static str, needed: usize, free: usize, all: usize },
    #[error(
        "a context of {context} tokens needs {} in all, {} are there {place}\nhint: {}",
        bytes(*needed), bytes(*free), largest_context(*largest)
    )]
    DoesNotFit { context: usize, needed: u64, free: u64, place: &'static str, largest: usize },
    #[error(
        "{} more are needed on the device, {} of the limit of {} are taken\nhint: raise --memory-limit, or leave more on the CPU with --gpu-layers",
        size(*needed), size(*held), size(*limit)
    )]
    MemoryLimit { needed: u64, held: u64, limit: u64 },
    #[error("{why}")]
    Placement { why: String },
    #[error("{waiting} requests are waiting already\nhint: try again later")]
    Busy { waiting: usize },
    #[error("the engine was stopped")]
    Stopped,
    #[error("{why}")]
    Run { why: String },
    /// The device was lost before, as `why` says.
    #[error("{why}")]
    Lost { why: String },
    #[error("the rule for the text cannot be kept: {why}")]
    Constraint { why: String },
    #[error(transparent)]
    Sample(#[from] crate::sampler::SampleError),
    #[error("the sequence cannot be used: {why}")]
    NoSequence { why: &'static str },
    #[error(
        "tensor `{}` holds NaN or infinity (element {element}), where a model has finite numbers\nhint: the file is damaged or its conversion failed; fetch or convert it again",
        shown(tensor)
    )]
    NotFinite { tensor: String, element: usize },
    #[error("{what} needs {} of memory, {} are left {}\nhint: a lower --ctx-size or a smaller model (`kiln inspect` tells how much each needs)", size(*needed), size(available.bytes), available.bound.name())]
    Memory { what: &'static str, needed: u64, available: Available },
    #[error("cannot start {threads} threads: {why}")]
    Threads { threads: usize, why: String },
    #[error(
        "this model gives vectors of texts and writes none\nhint: `kiln embed` and the server's /v1/embeddings give them; to write, take a model that was trained to"
    )]
    NoText,
    #[error(
        "a model of architecture \"{architecture}\" writes text; this file does not say how it would embed some\nhint: --pooling mean or --pooling last makes vectors of what it computes all the same; models made for it serve better"
    )]
    NoEmbedder { architecture: &'static str },
    #[error(
        "this model has no layers that make scores\nhint: take a reranker (bge-reranker, jina-reranker, Qwen3-Reranker)"
    )]
    NoRanking,
    #[error(
        "text {nth} has {tokens} tokens, the model takes {context} at once\nhint: {}",
        text_hint(*context, *trained)
    )]
    TextTooLong { nth: usize, tokens: usize, context: usize, trained: usize },
    #[error("text {nth} is empty: it has no tokens\nhint: leave it out")]
    EmptyText { nth: usize },
    #[error(
        "this model fills in texts as a whole and does not write them token by token\nhint: `kiln run MODEL PROMPT` fills in an answer"
    )]
    Fills,
    #[error(
        "the draft head of the file cannot be read: {why}\nhint: the model runs without its head; fetch or convert the file again to have it draft"
    )]
    Head { why: String },
    #[error("the draft model cannot draft for this model: {why}\nhint: {hint}")]
    Draft { why: String, hint: &'static str },
    #[error("a model of architecture \"{architecture}\" fills in nothing: it writes token by token")]
    FillsNothing { architecture: &'static str },
    #[error("the {what} is {value}; it must be {want}")]
    Diffusion { what: &'static str, value: String, want: String },
    #[error(
        "the model reads one text and writes another, and nothing was read yet\nhint: `kiln run` gives it the prompt to read; in a program, `Engine::read_source` does"
    )]
    NoSource,
    #[error(
        "a model of architecture \"{architecture}\" runs on one device, not on several\nhint: name one with --device, or --cpu"
    )]
    SeveralDevices { architecture: &'static str },
    #[error("the prompt is empty\nhint: give at least one token of text")]
    EmptyPrompt,
    #[error("token {token} is not in the vocabulary of {vocab} tokens")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error(
        "the model gave logits that are not numbers (token {token} of the context)\nhint: the file may be damaged; `kiln selftest` checks the kernels, `kiln plan --diff` finds the step"
    )]
    NotANumber { token: usize },
}

impl Error {
    /// Whether the device is gone for good: it was lost, or it finishes nothing any more.
    pub fn is_lost(&self) -> bool {
        use kiln_gpu::Error::{DeviceLost, Timeout};
        use kiln_kernels::record::Error::Gpu;
        matches!(
            self,
            Error::Lost { .. }
                | Error::Gpu(DeviceLost { .. } | Timeout { .. })
                | Error::Kernel(Gpu(DeviceLost { .. } | Timeout { .. }))
        )
    }

    /// The same for everybody else who was concerned.
    pub(crate) fn again(&self) -> Error {
        let why = self.to_string();
        if self.is_lost() { Error::Lost { why } } else { Error::Run { why } }
    }
}

/// Bytes as people read them.
/// How many others there are, where there are any.
fn more(others: usize) -> String {
    if others == 0 { String::new() } else { format!(" and {others} more") }
}

fn bytes(n: u64) -> String {
    let n = n as f64;
    if n >= (1u64 << 30) as f64 {
        format!("{:.1} GiB", n / (1u64 << 30) as f64)
    } else {
        format!("{:.0} MiB", n / 1048576.0)
    }
}

/// The way out where a text to embed is too long: a larger context only helps as far as the model was trained.
fn text_hint(context: usize, trained: usize) -> String {
    if context < trained {
        format!("shorten or truncate the text, or raise the context size (the model was trained with {trained})")
    } else {
        format!("shorten or truncate the text: the model was trained with {trained} tokens")
    }
}

/// The way out where a context does not fit.
fn largest_context(tokens: usize) -> String {
    match tokens {
        0 => "the model itself does not fit; take a smaller one, or a smaller quantisation of it".to_owned(),
        n => format!("--ctx-size {n} fits; caches of other types (-ctk q8_0 -ctv q8_0) take less"),
    }
}
