//! [`Llm`], a loaded model that any thread may ask, and the [`Builder`] that opens one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::embed::{Length, Pooling};
use kiln_engine::model::Model;
use kiln_engine::placement::GpuLayers;
use kiln_engine::run::{EmbedRequest, Engine, Entry, Lookup, Policy, Scheduler, Wanted};
use kiln_engine::text::{Message, Template};
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial};
use kiln_gguf::TensorType;

use crate::chat::{ChatSetup, Conversation};
use crate::request::{Prompt, Request};
use crate::{AdapterFile, DeviceChoice, Error, Job, Note, Opening, Placing, Watch};

/// A loaded model. It may be cloned and asked from any number of threads; what they ask at the same time is computed together, in one
/// batch.
#[derive(Clone)]
pub struct Llm(Arc<Inner>);

struct Inner {
    scheduler: Arc<Scheduler>,
    setup: ChatSetup,
    sequences: usize,
}

/// How a model is opened; see [`Llm::builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    opening: Opening,
    sequences: usize,
    template: Option<String>,
    lookup: Lookup,
    fallback: bool,
    host_cache: Option<usize>,
    disk_cache: Option<DiskCache>,
}

/// A folder that finished prefixes are kept in.
#[derive(Clone, Debug)]
struct DiskCache {
    folder: PathBuf,
    bytes: u64,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            opening: Opening { device: DeviceChoice::from_word_or_environment(None), ..Opening::default() },
            sequences: 1,
            template: None,
            lookup: Lookup::default(),
            fallback: false,
            host_cache: None,
            disk_cache: None,
        }
    }
}

impl Builder {
    /// The device: a GPU by index, part of its name, PCI address or UUID, several with commas between, or `cpu`. Without one, what the
    /// variable `KILN_DEVICE` says, else the best GPU, else the CPU.
    pub fn device(mut self, device: &str) -> Builder {
        self.opening.device = DeviceChoice::from_word(device);
        self
    }

    /// Runs on the CPU alone.
    pub fn cpu(mut self) -> Builder {
        self.opening.device = DeviceChoice::Cpu;
        self
    }

    /// CPU threads; without a number one for each physical core.
    pub fn threads(mut self, threads: usize) -> Builder {
        self.opening.threads = Some(threads);
        self
    }

    /// Tokens of context; without a number the model's own as far as memory allows.
    pub fn context(mut self, tokens: usize) -> Builder {
        self.opening.context = Some(tokens);
        self
    }

    /// Sequences that run at once. More requests may come: they wait for their turn. One without a number.
    pub fn parallel(mut self, sequences: usize) -> Builder {
        self.sequences = sequences.max(1);
        self
    }

    /// Layers on GPUs, counted from the end; the rest stays on the CPU. Without a number as many as fit.
    pub fn gpu_layers(mut self, layers: usize) -> Builder {
        self.opening.placing.gpu_layers = GpuLayers::Count(layers);
        self
    }

    /// Which device holds what: layers, experts, shares of several GPUs, single tensors, a memory limit.
    pub fn placing(mut self, placing: Placing) -> Builder {
        self.opening.placing = placing;
        self
    }

    /// KV cache types of keys and of values; F16 without them.
    pub fn cache_types(mut self, keys: TensorType, values: TensorType) -> Builder {
        self.opening.caches = [keys, values];
        self
    }

    /// Host memory for prefixes that the device has no room for.
    pub fn host_cache(mut self, bytes: usize) -> Builder {
        self.host_cache = Some(bytes);
        self
    }

    /// A folder that finished prefixes are kept in, with this many bytes at most, so that they need not be computed again in another
    /// process. It holds what users wrote.
    pub fn disk_cache(mut self, folder: impl Into<PathBuf>, bytes: u64) -> Builder {
        self.disk_cache = Some(DiskCache { folder: folder.into(), bytes });
        self
    }

    /// Puts a LoRA adapter on the model. May be called several times.
    pub fn adapter(mut self, path: impl Into<PathBuf>, scale: f32) -> Builder {
        self.opening.adapters.push(AdapterFile { path: path.into(), scale });
        self
    }

    /// Bit-identical output whatever else is in the batch; prompts are processed more slowly.
    pub fn reproducible(mut self, reproducible: bool) -> Builder {
        self.opening.reproducible = reproducible;
        self
    }

    /// Whether tokens are drafted by lookup in the sequence's own text.
    pub fn lookup(mut self, lookup: Lookup) -> Builder {
        self.lookup = lookup;
        self
    }

    /// If a device is lost and cannot be opened again, moves its layers to what is left. A lost device is opened again in any case.
    pub fn fallback(mut self, fallback: bool) -> Builder {
        self.fallback = fallback;
        self
    }

    /// A chat template in place of the model's own: Jinja, or the name of a well-known one, such as `chatml`.
    pub fn chat_template(mut self, template: impl Into<String>) -> Builder {
        let template = template.into();
        self.template = Some(Template::form(&template).map_or(template, str::to_owned));
        self
    }

    /// Hears what there is to tell of the opening, such as that the CPU runs the model. Without it notes go to the log.
    pub fn on_note(mut self, hear: impl Fn(Note) + Send + Sync + 'static) -> Builder {
        self.opening.watch = Watch::new(hear);
        self
    }

    /// Opens a model file.
    pub fn open(self, path: impl AsRef<Path>) -> Result<Llm, Error> {
        self.open_with_progress(path, &mut |_, _| {})
    }

    /// The same, and tells how many bytes of weights of how many are loaded.
    pub fn open_with_progress(self, path: impl AsRef<Path>, progress: &mut dyn FnMut(u64, u64)) -> Result<Llm, Error> {
        // GPUs are opened while the file is read: both take tenths of a second.
        self.opening.open_early();
        let model = self.opening.model(path.as_ref())?;
        self.load(model, progress)
    }

    /// Loads a model that is open already.
    pub fn load(self, model: Arc<Model>, progress: &mut dyn FnMut(u64, u64)) -> Result<Llm, Error> {
        let setup = ChatSetup::new(&model, self.template.as_deref());
        let engine = self.engine(&self.opening, &model, progress)?;
        let sequences = self.sequences;
        let defaults = Policy::default();
        // Requests of other threads should not wait for a whole piece of a long prompt.
        let alone = if sequences > 1 { Some(defaults.stutter) } else { defaults.alone };
        let policy = Policy { queue: usize::MAX, alone, lookup: self.lookup, ..defaults };
        let rebuild = move |tries: usize| {
            let built = self.engine(&self.opening, &model, &mut |_, _| {});
            let built = match built {
                Err(why) if self.fallback && tries > 0 => {
                    log::warn!("{why}");
                    self.engine(&self.opening.without_lost(), &model, &mut |_, _| {})
                }
                built => built,
            };
            built.map_err(|why| kiln_engine::Error::Run { why: why.to_string() })
        };
        let scheduler = Scheduler::start_lasting(engine, policy, Box::new(rebuild));
        Ok(Llm(Arc::new(Inner { scheduler: Arc::new(scheduler), setup, sequences })))
    }

    fn engine(
        &self,
        opening: &Opening,
        model: &Arc<Model>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine, Error> {
        let mut engine = opening.engine(model, Job { sequences: self.sequences, ..Job::default() }, progress)?;
        if let Some(bytes) = self.host_cache {
            engine.limit_host_cache(bytes);
        }
        if let Some(DiskCache { folder, bytes }) = &self.disk_cache
            && let Err(why) = engine.open_disk_cache(folder, *bytes)
        {
            log::warn!("nothing is kept on disk: {why}");
        }
        Ok(engine)
    }
}

/// How vectors of texts are made; see [`Llm::embed_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct EmbedOptions {
    /// How the vectors of tokens become one; none for what the model was made for.
    pub pooling: Option<Pooling>,
    /// The norm that vectors are brought to; none for the Euclidean one, or as they are where nothing is pooled.
    pub length: Option<Length>,
    /// Whether texts that are longer than the context are truncated; else they are an error.
    pub truncate: bool,
}

impl Llm {
    /// Opens a model file on the best device that there is, with room for as much context as memory allows.
    pub fn open(path: impl AsRef<Path>) -> Result<Llm, Error> {
        Llm::builder().open(path)
    }

    /// A builder, for everything that [`Llm::open`] chooses by itself.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Continues a text, or tokens. Nothing happens before one of [`Request`]'s last methods is called.
    pub fn generate(&self, prompt: impl Into<Prompt>) -> Request {
        Request::new(self.clone(), prompt.into())
    }

    /// Answers a message or a conversation.
    pub fn chat(&self, messages: impl Into<Messages>) -> Request {
        let conversation = Conversation { messages: messages.into().0, ..Conversation::default() };
        self.generate(Prompt::Chat(Box::new(conversation)))
    }

    /// The vectors of texts, in their order, each of the length 1.
    pub fn embed<T: AsRef<str>>(&self, texts: &[T]) -> Result<Vec<Vec<f32>>, Error> {
        self.embed_with(texts, EmbedOptions::default())
    }

    /// The vectors of texts. Without a pooling those of a text's tokens lie one after the other.
    pub fn embed_with<T: AsRef<str>>(&self, texts: &[T], options: EmbedOptions) -> Result<Vec<Vec<f32>>, Error> {
        let tokenizer = &self.model().tokenizer;
        let encode = |text: &T| tokenizer.encode(text.as_ref(), AddSpecial::Yes, ParseSpecial::No);
        let mut tokens = texts.iter().map(encode).collect::<Result<Vec<_>, _>>().map_err(kiln_engine::Error::from)?;
        if options.truncate {
            let (context, vocab) = (self.context(), tokenizer.vocab());
            for text in tokens.iter_mut().filter(|text| text.len() > context) {
                text.truncate(context);
                // The token that ends a text stays.
                if let (Some(last), Some(eos)) = (text.last_mut(), vocab.eos.filter(|_| vocab.add_eos)) {
                    *last = eos;
                }
            }
        }
        let pooling = Pooling::choose(self.model(), options.pooling)?;
        let mut vectors = self.0.scheduler.embed(EmbedRequest { texts: tokens, pooling })?;
        let raw = matches!(pooling, Pooling::None | Pooling::Rank);
        let length = options.length.unwrap_or(Length::from_number(if raw { -1 } else { 2 }));
        if !raw {
            vectors.iter_mut().for_each(|vector| length.apply(vector));
        }
        Ok(vectors)
    }

    /// The tokens of a text, with the special ones that the model wants around it. Spellings of control tokens stay text.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.tokenize_with(text, AddSpecial::Yes, ParseSpecial::No)
    }

    /// The tokens of a text: whether special ones are added around it, and whether spellings of them become such.
    pub fn tokenize_with(&self, text: &str, add: AddSpecial, parse: ParseSpecial) -> Result<Vec<u32>, Error> {
        Ok(self.model().tokenizer.encode(text, add, parse).map_err(kiln_engine::Error::from)?)
    }

    /// The bytes of tokens; control tokens have none.
    pub fn detokenize_bytes(&self, tokens: &[u32]) -> Result<Vec<u8>, Error> {
        self.detokenize_bytes_with(tokens, ShowSpecial::No)
    }

    /// The bytes of tokens, with the spellings of control tokens or without them.
    pub fn detokenize_bytes_with(&self, tokens: &[u32], show: ShowSpecial) -> Result<Vec<u8>, Error> {
        Ok(self.model().tokenizer.decode_bytes(tokens, show).map_err(kiln_engine::Error::from)?)
    }

    /// The text of tokens; control tokens have none. Bytes that are no characters become U+FFFD.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<String, Error> {
        Ok(String::from_utf8_lossy(&self.detokenize_bytes(tokens)?).into_owned())
    }

    /// The logits behind each of these tokens: a row of the vocabulary's size for each.
    pub fn logits(&self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, Error> {
        let (tokens, vocab) = (tokens.to_vec(), self.model().config.vocab);
        let rows = self.0.scheduler.with_engine(move |engine| {
            let sequence = engine.open(u64::MAX)?;
            let mut rows = Vec::with_capacity(tokens.len());
            let fed = tokens.chunks(engine.batch().max(1)).try_for_each(|piece| {
                let logits = engine.feed(&[Entry { sequence, tokens: piece, wanted: Wanted::All }])?;
                rows.extend(logits.iter().flat_map(|rows| rows.chunks_exact(vocab)).map(<[f32]>::to_vec));
                Ok::<_, kiln_engine::Error>(())
            });
            engine.close(sequence);
            fed.map(|()| rows)
        })?;
        Ok(rows?)
    }

    /// The model: its sizes, its file, its tokenizer.
    pub fn model(&self) -> &Arc<Model> {
        self.0.scheduler.model()
    }

    /// How conversations with the model are written.
    pub fn chat_setup(&self) -> &ChatSetup {
        &self.0.setup
    }

    /// The name in the model's file.
    pub fn name(&self) -> String {
        let name = self.model().gguf.metadata().get_str_or("general.name", "model").unwrap_or("model");
        kiln_system::text::shown(name)
    }

    /// Where it runs, for people.
    pub fn device(&self) -> &str {
        self.0.scheduler.describe()
    }

    /// Most tokens of one sequence.
    pub fn context(&self) -> usize {
        self.0.scheduler.context()
    }

    /// Sequences that run at once.
    pub fn parallel(&self) -> usize {
        self.0.sequences
    }

    /// The scheduler below, for tools and for a server.
    pub fn scheduler(&self) -> &Arc<Scheduler> {
        &self.0.scheduler
    }
}

impl std::fmt::Debug for Llm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Llm").field("name", &self.name()).field("device", &self.device()).finish_non_exhaustive()
    }
}

/// Messages of a conversation: a text is one of the user.
pub struct Messages(pub(crate) Vec<Message>);

impl From<&str> for Messages {
    fn from(text: &str) -> Messages {
        Messages(vec![Message::new("user", text)])
    }
}

impl From<String> for Messages {
    fn from(text: String) -> Messages {
        Messages(vec![Message::new("user", text)])
    }
}

impl From<Message> for Messages {
    fn from(message: Message) -> Messages {
        Messages(vec![message])
    }
}

impl From<Vec<Message>> for Messages {
    fn from(messages: Vec<Message>) -> Messages {
        Messages(messages)
    }
}

impl From<&[Message]> for Messages {
    fn from(messages: &[Message]) -> Messages {
        Messages(messages.to_vec())
    }
}

impl<const N: usize> From<[Message; N]> for Messages {
    fn from(messages: [Message; N]) -> Messages {
        Messages(messages.to_vec())
    }
}
