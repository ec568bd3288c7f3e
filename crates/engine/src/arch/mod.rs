//! Architectures: one table, one row and one short file each, put together from [`crate::blocks`]. A file reads the model's
//! keys and tensors and builds plain plans; it reads like its paper. No device and no tensor format is named here.

mod apertus;
mod bert;
mod chameleon;
mod cohere;
mod deepseek4;
mod diffusion;
mod encoders;
mod expert_windows;
mod experts;
mod falcon;
mod gemma;
mod gemma3n;
mod gemma4;
mod glm;
mod glm5_next;
mod gpt;
mod gpt_oss;
mod granite;
mod graniteswitch;
mod grok;
mod hrm_text;
mod hy_v4;
mod hybrids;
mod k2_horizon;
mod kimi;
mod kimi_k3;
mod latent;
mod lfm2;
mod llama;
mod llama4;
mod mamba;
mod minimax;
mod mistral3;
mod nearest;
mod olmo;
mod olmoe;
mod phi;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen3next;
mod qwen4exp;
mod refused;
mod rwkv;
mod rwkv6;
mod rwkv7;
mod stablelm;
mod step35;
mod streamed;
mod t5;
mod variants;

pub use nearest::{Likeness, nearest};
pub use refused::{LIMITS, REFUSED};

use std::collections::{HashMap, HashSet};

use kiln_gguf::{Gguf, TensorType};

use crate::Error;
use crate::lower::Target;
use crate::model::adapter::{Matrix, Pair};
use crate::model::names::TOKEN_EMBEDDING;
use crate::model::turned::Turned;
use crate::model::{Adapter, Config, Facts, Loader, MOST_LAYERS};
use crate::plan::adapt::{Change, Changes, Scales, adapt};
use crate::plan::turn::turn;
use crate::plan::{Builder, Fixed, Plan, Ports, SlotKind};
use kiln_kernels::advance::Places;
use kiln_kernels::recurrence::Sequences;
use kiln_kernels::tensor::{Slot, Tensor};

/// One architecture.
pub struct ArchEntry {
    /// The name in files, which its keys begin with.
    pub name: &'static str,
    /// Which models are of this kind.
    pub models: &'static str,
    /// Reads a file.
    load: Load,
}

/// Reads the keys and tensors of a file.
type Load = fn(&mut Loader<'_>) -> Result<Box<dyn Architecture>, Error>;

impl std::fmt::Debug for ArchEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Every architecture Kiln can run.
pub const TABLE: &[ArchEntry] = &[
    row("afmoe", "Arcee Trinity", expert_windows::afmoe),
    row("apertus", "Apertus", apertus::load),
    row("arcee", "Arcee AFM", variants::arcee),
    row("arctic", "Snowflake Arctic", experts::arctic),
    row("arwkv7", "ARWKV", rwkv7::load_hybrid),
    row("baichuan", "Baichuan 1 and 2", variants::baichuan),
    row("bailingmoe", "Ling 1", experts::bailing),
    row("bailingmoe2", "Ling 2, Ring 2", experts::bailing2),
    row("bailingmoe3", "Ling 3", kimi::ling3),
    row("bert", "BERT, MiniLM, BGE, E5", bert::load),
    row("bitnet", "BitNet b1.58", variants::bitnet),
    row("bloom", "BLOOM", gpt::load_bloom),
    row("chameleon", "Chameleon (text)", chameleon::load),
    row("chatglm", "ChatGLM 3, GLM 4", glm::load),
    row("codeshell", "CodeShell", gpt::load_rotary),
    row("cogvlm", "CogVLM (text)", variants::cogvlm),
    row("cohere2", "Command R7B", cohere::load2),
    row("cohere2moe", "Cohere with experts", cohere::load_moe),
    row("command-r", "Command R", cohere::load),
    row("dbrx", "DBRX", experts::dbrx),
    row("deci", "DeciLM, Nemotron Super and Ultra", variants::deci),
    row("deepseek", "DeepSeek 1", experts::deepseek),
    row("deepseek2", "DeepSeek 2, 3 and R1, Kimi K2, GLM 4.7 Flash", latent::deepseek2),
    row("deepseek2-ocr", "DeepSeek OCR (text)", experts::deepseek_ocr),
    row("deepseek32", "DeepSeek 3.2", latent::deepseek32),
    row("deepseek4", "DeepSeek 4", deepseek4::load),
    row("dots1", "dots.llm1", experts::dots1),
    row("dots3note", "dots3", latent::dots3),
    row("dream", "Dream", diffusion::dream),
    row("ernie4_5", "Ernie 4.5", variants::ernie),
    row("ernie4_5-moe", "Ernie 4.5 with experts", experts::ernie),
    row("eurobert", "EuroBERT", encoders::eurobert),
    row("exaone", "EXAONE 3", variants::exaone),
    row("exaone-moe", "EXAONE with experts", expert_windows::exaone),
    row("exaone4", "EXAONE 4", variants::exaone4),
    row("falcon", "Falcon", falcon::load),
    row("falcon-h1", "Falcon H1", hybrids::falcon_h1),
    row("gemma", "Gemma 1", gemma::load),
    row("gemma2", "Gemma 2", gemma::load2),
    row("gemma3", "Gemma 3", gemma::load3),
    row("gemma3n", "Gemma 3n", gemma3n::load),
    row("gemma4", "Gemma 4", gemma4::load),
    row("gemma-embedding", "EmbeddingGemma", gemma::load_embedding),
    row("glm-dsa", "GLM 5", latent::glm_dsa),
    row("glm4", "GLM 4 of 2025", glm::load4),
    row("glm4moe", "GLM 4.5 and 4.6", experts::glm4),
    row("glm5-next", "GLM 5 Next", glm5_next::load),
    row("gpt-oss", "gpt-oss", gpt_oss::load),
    row("gpt2", "GPT-2", gpt::load_learnt),
    row("gptneox", "GPT-NeoX, Pythia", gpt::load_neox),
    row("granite", "Granite 3 and 4", granite::load),
    row("granite_swa", "Granite with windows", granite::load_windows),
    row("granitehybrid", "Granite 4 hybrids", hybrids::granite),
    row("granitemoe", "Granite with experts", granite::load_moe),
    row("graniteswitch", "Granite Switch", graniteswitch::load),
    row("grok", "Grok 1 and 2", grok::load),
    row("grovemoe", "GroveMoE", experts::grove),
    row("hrm_text", "HRM", hrm_text::load),
    row("hunyuan-dense", "Hunyuan", variants::hunyuan),
    row("hunyuan-moe", "Hunyuan with experts", experts::hunyuan),
    row("hunyuan_vl", "Hunyuan VL (text)", variants::hunyuan_vl),
    row("hy_v3", "Hunyuan 3", experts::hunyuan3),
    row("hy_v4", "Hunyuan 4", hy_v4::load),
    row("internlm2", "InternLM 2 and 3", variants::normal),
    row("jais", "Jais 1", variants::jais),
    row("jais2", "Jais 2", variants::nemotron),
    row("jamba", "Jamba", hybrids::jamba),
    row("jina-bert-v2", "Jina embeddings 2", bert::jina2),
    row("jina-bert-v3", "Jina embeddings 3", bert::rotary),
    row("k2-horizon", "K2 Horizon", k2_horizon::load),
    row("kimi-k3", "Kimi K3", kimi_k3::load),
    row("kimi-linear", "Kimi Linear", kimi::load),
    row("laguna", "Laguna", expert_windows::laguna),
    row("lfm2", "LFM 2", lfm2::load),
    row("lfm2moe", "LFM 2 with experts", lfm2::load_moe),
    row("llada", "LLaDA", diffusion::llada),
    row("llada-moe", "LLaDA with experts", diffusion::llada_moe),
    row("llama", "Llama, Mistral, Mixtral, SmolLM2, TinyLlama", llama::load),
    row("llama-embed", "Llama as an embedder", encoders::llama),
    row("llama4", "Llama 4", llama4::load),
    row("maincoder", "Maincoder", variants::maincoder),
    row("maion-coder", "Maion Coder", expert_windows::maion),
    row("mamba", "Mamba, Falcon Mamba", mamba::load),
    row("mamba2", "Mamba 2", mamba::load2),
    row("maple", "Maple", expert_windows::maple),
    row("mellum", "Mellum", expert_windows::mellum),
    row("mimo2", "MiMo 2", expert_windows::mimo2),
    row("minicpm", "MiniCPM 1 and 2", granite::load_minicpm),
    row("minicpm3", "MiniCPM 3", latent::minicpm3),
    row("minimax-01", "MiniMax 01", minimax::load),
    row("minimax-m2", "MiniMax M2", experts::minimax2),
    row("minimax-m3", "MiniMax M3", expert_windows::minimax3),
    row("mistral3", "Mistral 3, Ministral", mistral3::load),
    row("mistral4", "Mistral 4", latent::mistral4),
    row("modern-bert", "ModernBERT", encoders::modern),
    row("mpt", "MPT", gpt::load_mpt),
    row("muse-glimmer", "Muse Glimmer", variants::muse_glimmer),
    row("nanbeige", "Nanbeige", variants::nanbeige),
    row("nemotron", "Nemotron 3", variants::nemotron),
    row("nemotron_h", "Nemotron H", hybrids::nemotron),
    row("nemotron_h_moe", "Nemotron H with experts", hybrids::nemotron),
    row("neo-bert", "NeoBERT", encoders::neo),
    row("nomic-bert", "Nomic Embed 1", bert::nomic),
    row("nomic-bert-moe", "Nomic Embed 2", bert::nomic_moe),
    row("olmo", "OLMo 1", olmo::load),
    row("olmo2", "OLMo 2 and 3", olmo::load2),
    row("olmoe", "OLMoE", olmoe::load),
    row("openelm", "OpenELM", variants::openelm),
    row("orion", "Orion", variants::orion),
    row("paddleocr", "PaddleOCR (text)", variants::paddleocr),
    row("pangu-embedded", "openPangu", qwen2::load),
    row("phi2", "Phi 1 and 2", phi::load2),
    row("phi3", "Phi 3 and 4", phi::load3),
    row("phimoe", "Phi 3.5 with experts", phi::load_moe),
    row("plamo", "PLaMo", variants::plamo),
    row("plamo2", "PLaMo 2", hybrids::plamo2),
    row("plamo3", "PLaMo 3", variants::plamo3),
    row("plm", "PLM", latent::plm),
    row("pockettts", "Pocket TTS (language model)", variants::pocket_tts),
    row("qwen", "Qwen 1", variants::qwen),
    row("qwen2", "Qwen 2 and 2.5", qwen2::load),
    row("qwen2moe", "Qwen 2 with experts", qwen2moe::load),
    row("qwen2vl", "Qwen 2 VL (text)", qwen2::load_vl),
    row("qwen3", "Qwen 3", qwen3::load),
    row("qwen35", "Qwen 3.5", qwen3next::load35),
    row("qwen35moe", "Qwen 3.5 with experts", qwen3next::load35_moe),
    row("qwen3moe", "Qwen 3 with experts", qwen3::load_moe),
    row("qwen3next", "Qwen 3 Next", qwen3next::load),
    row("qwen3tts", "Qwen 3 TTS (language model)", qwen3::load_tts),
    row("qwen3vl", "Qwen 3 VL (text)", qwen3::load_vl),
    row("qwen3vlmoe", "Qwen 3 VL with experts (text)", qwen3::load_vl_moe),
    row("qwen4exp", "Qwen 3.8 Flash Next", qwen4exp::load),
    row("refact", "Refact", variants::refact),
    row("rnd1", "RND1", diffusion::rnd1),
    row("rwkv6", "RWKV-6", rwkv6::load),
    row("rwkv6qwen2", "QRWKV", rwkv6::load_hybrid),
    row("rwkv7", "RWKV-7", rwkv7::load),
    row("seed_oss", "Seed-OSS", variants::seed_oss),
    row("smallthinker", "SmallThinker", expert_windows::smallthinker),
    row("smollm3", "SmolLM 3", variants::smollm3),
    row("spark2_5", "Spark 2.5", variants::spark),
    row("stablelm", "StableLM", stablelm::load),
    row("starcoder", "StarCoder", gpt::load_learnt),
    row("starcoder2", "StarCoder 2", gpt::load_rotary),
    row("step35", "Step 3.5", step35::load),
    row("t5", "T5, Flan-T5, mT5, UMT5", t5::load),
    row("t5encoder", "Encoders of T5", t5::load_encoder),
    row("talkie", "Talkie", variants::talkie),
    row("xverse", "XVERSE", variants::normal),
];

/// Tensors of single architectures that Kiln leaves unread, by parts of their names.
const HARMLESS: &[(&str, &[&str])] = &[
    // Matrices of images, which text does not go through.
    ("cogvlm", &[".vis_"]),
    // What chooses among keys: where contexts have no more than are chosen, nobody needs to ask, nor where a layer sees what another chose.
    ("deepseek32", &[".indexer."]),
    ("dots3note", &[".indexer."]),
    ("glm-dsa", &[".indexer."]),
    ("glm5-next", &[".indexer.", ".indexer_compressor_"]),
    ("hy_v4", &[".indexer."]),
    ("minimax-m3", &[".indexer."]),
    // Norms of keys without those of queries do not count.
    ("mpt", &["attn_k_norm"]),
    // Scores lean by distance; nothing is turned.
    ("refact", &["rope_freqs"]),
];

const fn row(name: &'static str, models: &'static str, load: Load) -> ArchEntry {
    ArchEntry { name, models, load }
}

/// Which layers are recurrent: those of a list of the file, or all but every so many.
fn recurrent_layers(l: &Loader<'_>, layers: usize, interval: usize) -> Result<Vec<bool>, Error> {
    let (list, every) = ("attention.recurrent_layers", "full_attention_interval");
    if !l.keys.is_array(list) {
        let interval = l.keys.count_opt(every, MOST_LAYERS)?.unwrap_or(interval);
        return Ok((0..layers).map(|i| !(i + 1).is_multiple_of(interval)).collect());
    }
    let flags = l.keys.flags(list)?;
    l.keys.require(flags.len() >= layers, list, flags.len(), &format!("one flag for each of {layers} layers"))?;
    Ok(flags)
}

/// The architecture of this name.
pub fn find(name: &str) -> Result<&'static ArchEntry, Error> {
    if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
        return Err(Error::Refused { name: name.to_owned(), why });
    }
    TABLE.iter().find(|row| row.name == name).ok_or_else(|| Error::Architecture {
        name: name.to_owned(),
        known: TABLE.iter().map(|row| row.name).collect::<Vec<_>>().join(", "),
    })
}

/// A model of some architecture with its slots: builds the steps of a batch.
pub trait Architecture: Send + Sync {
    /// Adds the steps of a batch and gives its logits, F32 `[vocab, outputs]`.
    fn build(&self, b: &mut Builder, batch: &Batch) -> Tensor;
}

/// What a plan is built for.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Its sizes.
    pub shape: BatchShape,
    /// Where the host writes.
    pub ports: Ports,
    /// What is wanted of the last rows.
    pub results: Results,
}

/// What a plan gives of each wanted token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Results {
    /// Its logits. Models without a vocabulary to write in give vectors all the same.
    Logits,
    /// Its vector: what would be multiplied by the output matrix. Models that read one text and write another give the vectors of
    /// the text that they read.
    Vectors,
    /// Nothing: the text is one that another is written for, and caches keep what that needs of it.
    Source,
    /// What the draft head of the model guesses for the token behind it.
    Draft,
}

impl Results {
    /// Whether they are logits.
    pub fn are_logits(self) -> bool {
        matches!(self, Results::Logits | Results::Draft)
    }
}

impl Batch {
    /// Which rows belong together, and where the state of each sequence lies: for recurrent layers. Prompts of one sequence
    /// must not be padded.
    pub fn recurrence(&self) -> (Sequences, Option<Tensor>) {
        let BatchShape { decode, prompt, pieces, .. } = self.shape;
        let sequences = match (decode, pieces) {
            (_, 0) => Sequences::Equal(decode),
            (0, 1) => Sequences::Equal(1),
            _ => Sequences::Ragged { starts: self.ports.firsts, longest: prompt },
        };
        (sequences, Some(self.ports.states))
    }

    /// Where tokens lie in the caches of a layer that sees so many of the last ones, or all.
    pub fn places(&self, window: Option<usize>) -> Places {
        let all = Places { table: self.ports.table, rows: self.ports.rows };
        self.ports.windows.filter(|_| window.is_some()).unwrap_or(all)
    }
}

/// Rows of a page of the key-value caches.
pub const PAGE: usize = 64;

/// States of the last tokens of a sequence that are kept for a draft head: those of a draft that is verified, of what goes in before it, and
/// of the token before that.
pub const CARRIED_TOKENS: usize = 32;
/// Rows that these take, with one for the state that the head itself handed on last.
pub const CARRIED: usize = CARRIED_TOKENS + 1;

/// Sizes of one plan. A batch holds `decode` rows of one token each, row i of sequence i, and behind them `prompt` rows: pieces
/// of the prompts of `pieces` more sequences, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchShape {
    /// Sequences that go on by one token.
    pub decode: usize,
    /// Tokens of prompts.
    pub prompt: usize,
    /// Sequences whose prompts these are.
    pub pieces: usize,
    /// Tokens whose logits are wanted. If all are, logits come in the order of the rows.
    pub outputs: usize,
    /// Whether latent attention makes keys and values of all heads for the prompt, which is one and begins its text: all keys that it sees are
    /// in the batch then ([`Graph::expanding`]).
    pub expands: bool,
    /// Whether neighbours among the sequences that go on have enough pages in common to read these once for several of them.
    pub shares: bool,
    /// What rows of pictures ask for.
    pub pictures: Pictures,
}

/// What rows that are vectors of pictures, or stand behind some, ask of the plan of their batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pictures {
    /// Whether rows may be vectors that the host writes, in the place of embeddings of tokens ([`Ports::vectors`]).
    pub vectors: bool,
    /// Whether rows of prompts may see others behind them ([`Ports::seen`]).
    pub sees_ahead: bool,
    /// By what heads are turned.
    pub coordinates: Coordinates,
}

/// By what heads of a batch are turned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Coordinates {
    /// Positions in the sequence.
    #[default]
    Positions,
    /// A number for each row, which is smaller than its position behind a picture.
    Each,
    /// Time, height, width and an extra number for each row: some rows are patches of a picture.
    Four,
}

impl BatchShape {
    /// So many tokens of one sequence.
    pub fn new(tokens: usize, outputs: usize) -> BatchShape {
        let (decode, prompt, pieces) = if tokens == 1 { (1, 0, 0) } else { (0, tokens, 1) };
        BatchShape { decode, prompt, pieces, outputs, expands: false, shares: false, pictures: Pictures::default() }
    }

    /// Whether a batch of another shape can be padded to this one: nothing but sizes differs, and there are rows of the same kinds.
    pub fn holds(&self, other: &BatchShape) -> bool {
        let all = |shape: &BatchShape| shape.outputs == shape.rows();
        let sizes = |shape: &BatchShape| [shape.decode, shape.prompt, shape.pieces, shape.outputs];
        let fits = |(mine, others): (usize, usize)| mine >= others && (mine == 0) == (others == 0);
        let kinds = |shape: &BatchShape| (shape.expands, shape.shares, shape.pictures);
        kinds(self) == kinds(other)
            && (all(self) == all(other) || other.prompt == 0)
            && sizes(self).into_iter().zip(sizes(other)).all(fits)
    }

    /// Tokens of the batch.
    pub fn rows(&self) -> usize {
        self.decode + self.prompt
    }

    /// Sequences of the batch: those that go on, then those whose prompts are read.
    pub fn sequences(&self) -> usize {
        self.decode + self.pieces
    }
}

/// What a model has to remember with: all sequences share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Most tokens of one sequence.
    pub context: usize,
    /// Pages of the key-value caches, [`PAGE`] rows each.
    pub pages: usize,
    /// Pages of the caches of layers with a window ([`Room::with_windows`]); 0 where those lie in the pages of all others.
    pub window_pages: usize,
    /// States of recurrent layers, one for each sequence.
    pub states: usize,
    /// Most sequences that go on at once.
    pub sequences: usize,
    /// Type of cached keys.
    pub k_type: TensorType,
    /// Type of cached values.
    pub v_type: TensorType,
}

impl Room {
    /// Room for one sequence.
    pub fn one(context: usize) -> Room {
        let pages = context.div_ceil(PAGE);
        let [k_type, v_type] = [TensorType::F16; 2];
        Room { context, pages, window_pages: 0, states: 1, sequences: 1, k_type, v_type }
    }

    /// Room for so many sequences, each as long as the context.
    pub fn for_sequences(sequences: usize, context: usize) -> Room {
        let one = Room::one(context);
        Room { pages: one.pages * sequences, states: sequences, sequences, ..one }
    }

    /// The same with pages of their own for layers that see so many of the last tokens. So many tokens are read at once at most.
    #[must_use]
    pub fn with_windows(self, window: Option<usize>, batch: usize) -> Room {
        // Each text twice: the end of the one before it can be found for as long as it is not in anybody's way.
        let texts = |window| 2 * self.sequences * pages_of_window(window);
        let needed = window.map_or(0, |window| texts(window) + batch.div_ceil(PAGE));
        Room { window_pages: needed.min(self.pages), ..self }
    }

    /// The same with so many more sequences, which are held beside those that go on, and which those go on from.
    #[must_use]
    pub fn with_spare(self, spare: usize, window: Option<usize>) -> Room {
        // A sequence that goes on from another one has a copy of the page that both end in; of a window each has its own pages.
        let window_pages = match (self.window_pages, window) {
            (0, _) | (_, None) => 0,
            (pages, Some(window)) => pages + spare * pages_of_window(window),
        };
        Room { pages: self.pages + spare, states: self.states + spare, window_pages, ..self }
    }

    /// Pages of a sequence that is as long as it may be.
    pub fn pages_of_a_sequence(&self) -> usize {
        self.context.div_ceil(PAGE)
    }
}

/// Pages that hold what a text sees through a window of so many tokens, while steps of single tokens are on their way.
pub fn pages_of_window(window: usize) -> usize {
    // The window and what is written ahead of it may begin and end anywhere in a page.
    (window + MOST_AHEAD).div_ceil(PAGE) + 1
}

/// Most tokens of a text that steps on their way write.
const MOST_AHEAD: usize = 8;

/// What an architecture makes of a model file: shared slots, and plans on them.
pub struct Graph {
    architecture: Box<dyn Architecture>,
    fixed: Fixed,
    facts: Facts,
    room: Room,
    /// What adapters change, and how strongly each of them counts.
    changes: Changes,
    scales: Vec<f32>,
    /// Weights whose inputs are turned first.
    turned: Option<Turned>,
}

impl Graph {
    /// Weights, constants, caches and states.
    pub fn fixed(&self) -> &Fixed {
        &self.fixed
    }

    /// What the model asks of the rest of the engine.
    pub fn facts(&self) -> Facts {
        self.facts
    }

    /// The shape of a batch whose prompt begins its text. Where a model has latent attention and the device gains by it, keys and values of
    /// all heads are made of the latents: scores and sums over short heads take a third of the arithmetic that those over latents take.
    #[must_use]
    pub fn expanding(&self, shape: BatchShape, target: &Target) -> BatchShape {
        // Adapters change products with the matrices of the keys, of which there are none then; so does looking at such products.
        let can = self.facts.latents && self.changes.is_empty() && target.fuses;
        // A row that goes the way of one alone knows nothing of the others.
        let gains = !target.batch_invariant && shape.pieces == 1 && shape.prompt >= target.expands_from;
        BatchShape { expands: can && gains, ..shape }
    }

    /// The plain plan for a batch shape, to be lowered for a device ([`crate::lower::lower`]).
    pub fn plan(&self, shape: BatchShape) -> Result<Plan, Error> {
        self.plan_of(shape, Results::Logits)
    }

    /// The same with what it gives.
    pub fn plan_of(&self, shape: BatchShape, results: Results) -> Result<Plan, Error> {
        self.adapted((shape, results), Scales::Same(&self.scales)).map(|(plan, _)| plan)
    }

    /// The same where each token says by itself how strongly adapters count ([`Ports::scales`]).
    pub fn plan_by_row(&self, shape: BatchShape, results: Results) -> Result<Plan, Error> {
        self.adapted((shape, results), Scales::ByRow(self.scales.len())).map(|(plan, _)| plan)
    }

    fn adapted(
        &self,
        (shape, results): (BatchShape, Results),
        scales: Scales<'_>,
    ) -> Result<(Plan, HashSet<Slot>), Error> {
        let mut plan = self.unchanged(shape, results)?;
        if self.changes.is_empty() {
            return Ok((plan, HashSet::new()));
        }
        let changed = adapt(&mut plan, &self.changes, scales);
        plan.check()?;
        Ok((plan, changed))
    }

    /// The slots of these adapters stand behind those of the model.
    pub(crate) fn with_adapters(mut self, adapters: &[Adapter]) -> Graph {
        let weights = (0..).zip(&self.fixed.slots).filter(|(_, slot)| slot.kind == SlotKind::Weight);
        let slots: HashMap<String, Slot> = weights.map(|(i, slot)| (slot.name.clone(), Slot(i))).collect();
        for (adapter, from) in adapters.iter().enumerate() {
            self.scales.push(from.scale);
            for pair in &from.pairs {
                let Some(slot) = slots.get(&pair.weight) else { continue };
                let mut add = |matrix: &Matrix, end| {
                    let name = format!("{}.lora{adapter}.{end}", pair.weight);
                    self.fixed.add(name, SlotKind::Constant(matrix.bytes.clone()), matrix.ty, matrix.shape)
                };
                let (a, b) = (add(&pair.a, "a"), add(&pair.b, "b"));
                let change = Change { adapter, a, b, scale: pair.scale, embeds: pair.embeds() };
                self.changes.entry(*slot).or_default().push(change);
            }
        }
        self
    }

    /// Whether every change of these adapters has steps in plans.
    pub(crate) fn check_adapters(&self, shape: BatchShape, adapters: &[Adapter]) -> Result<(), Error> {
        for adapter in adapters {
            let of_turned =
                |pair: &&Pair| self.turned.as_ref().is_some_and(|turned| self.has_turned(turned, &pair.weight));
            if let Some(pair) = adapter.pairs.iter().find(of_turned) {
                let why =
                    format!("it changes `{}`, which was turned before it was rounded (prism.hadamard)", pair.weight);
                let hint = "apply it to a file of the model without such weights";
                return Err(Error::Adapter { path: adapter.path.clone(), why, hint });
            }
        }
        let (_, changed) = self.adapted((shape, Results::Logits), Scales::ByRow(self.scales.len()))?;
        let names: HashSet<&str> = changed.iter().map(|slot| &*self.fixed.slots[slot.0 as usize].name).collect();
        for adapter in adapters {
            if let Some(pair) = adapter.pairs.iter().find(|pair| !names.contains(&*pair.weight)) {
                let why =
                    format!("it changes `{}`, which this architecture does not multiply as adapters need", pair.weight);
                let hint = "merge the adapter into its model and convert that";
                return Err(Error::Adapter { path: adapter.path.clone(), why, hint });
            }
        }
        Ok(())
    }

    fn has_turned(&self, turned: &Turned, name: &str) -> bool {
        (0..).zip(&self.fixed.slots).any(|(i, slot)| slot.name == name && turned.has(Slot(i)))
    }

    fn unchanged(&self, shape: BatchShape, results: Results) -> Result<Plan, Error> {
        let mut b = Builder::new(&self.fixed);
        let ports = Ports::new(&mut b, &shape, &self.room);
        let answers = self.facts.start.is_some() && results == Results::Logits;
        let ports = if answers { ports.with_source(&mut b) } else { ports };
        let embeddings = self.fixed.slots.iter().find(|slot| slot.name == TOKEN_EMBEDDING);
        let ports = match embeddings.filter(|_| shape.pictures.vectors) {
            Some(slot) => ports.with_vectors(&mut b, slot.shape[0] * (1 + self.facts.deepstack)),
            None => ports,
        };
        let ports = if self.facts.drafts { ports.with_carried(&mut b) } else { ports };
        let ports = ports.with_places(&mut b, &shape);
        let logits = self.architecture.build(&mut b, &Batch { shape, ports, results });
        let mut plan = b.finish(ports, logits)?;
        if let Some(turned) = &self.turned {
            turn(&mut plan, turned)?;
        }
        Ok(plan)
    }
}

/// The graph of a model with this much room in its caches, where it has some.
pub fn graph(config: &Config, gguf: &Gguf, room: &Room) -> Result<Graph, Error> {
    graph_with(config, gguf, room, false)
}

/// The same with the draft head of the file, where it has one and that is wanted.
pub(crate) fn graph_with(config: &Config, gguf: &Gguf, room: &Room, wants_head: bool) -> Result<Graph, Error> {
    let row = config.architecture;
    let mut loader = Loader::new(gguf, row.name, room);
    loader.wants_head = wants_head;
    let architecture = (row.load)(&mut loader)?;
    let harmless = HARMLESS.iter().find(|(name, _)| *name == row.name).map_or(&[][..], |(_, parts)| parts);
    // What makes vectors of texts out of vectors of tokens is read elsewhere.
    let harmless: Vec<&str> = harmless.iter().copied().chain(crate::embed::TENSORS).collect();
    let (mut fixed, facts) = loader.finish(&harmless)?;
    let turned = Turned::read(gguf, row.name, &mut fixed)?;
    Ok(Graph { architecture, fixed, facts, room: *room, changes: Changes::new(), scales: Vec::new(), turned })
}
