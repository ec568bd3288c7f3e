//! The models of a server: which there are, which are loaded, and which make room. A model is loaded when the first request for it
//! comes, and is unloaded when it has been idle for a while, or when another one needs its memory.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kiln_engine::executor::Memory;
use kiln_engine::media::Encoder;
use kiln_engine::run::Scheduler;
use kiln_llm::Llm;
use kiln_llm::chat::ChatSetup;
use tokio::sync::watch;

use crate::adapters::NamedAdapter;
use crate::api_error::{ApiError, Kind};
use crate::app::{RequestDefaults, now};
use crate::chat::{ThinkingBudget, no_template};
use crate::media::Media;
use crate::metrics::Metrics;
use crate::prep_pool::{Queue, release};
use crate::slots::Slots;

/// A model that runs, and how many texts it writes at once.
pub struct LoadedEngine {
    /// The engine. Others may ask it as well.
    pub scheduler: Arc<Scheduler>,
    /// Texts at once at most.
    pub sequences: usize,
    /// What pictures and sounds are encoded with, where the model takes some.
    pub encoder: Option<Encoder>,
}

impl LoadedEngine {
    /// The engine of a model that the program has opened, and goes on using beside the server.
    pub fn of(llm: &Llm) -> LoadedEngine {
        LoadedEngine { scheduler: Arc::clone(llm.scheduler()), sequences: llm.parallel(), encoder: None }
    }
}

/// Brings a model in. What it says on failure goes to the log, its first line to clients.
pub type LoadEngine = Box<dyn Fn() -> Result<LoadedEngine, String> + Send + Sync>;

/// A model that can be had.
pub struct ModelSpec {
    /// The name that it is served under.
    pub name: String,
    /// Further names that mean it.
    pub aliases: Vec<String>,
    /// Bytes that it takes when it is loaded, as far as that is known before.
    pub bytes: u64,
    /// Loads it.
    pub load: LoadEngine,
}

/// How models share the memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sharing {
    /// How long an idle model stays loaded; none for always.
    pub keep: Option<Duration>,
    /// Bytes that all loaded models may take together; none for as much as there is.
    pub budget: Option<u64>,
}

/// A model that is ready.
pub(crate) struct Loaded {
    /// The name that it is served under.
    pub(crate) name: String,
    pub(crate) scheduler: Arc<Scheduler>,
    /// Encodes pictures and sounds, where the model takes some.
    pub(crate) media: Option<Media>,
    /// How its conversations are written, and what is not said in a request.
    pub(crate) setup: ChatSetup,
    /// Tokens of an answer where a request does not say.
    pub(crate) limit: Option<usize>,
    /// Whether reasoning stays in the content where a request does not say.
    pub(crate) keep_reasoning: bool,
    /// How long the model may think where a request does not say.
    pub(crate) thinking_budget: Option<ThinkingBudget>,
    /// Texts at once at most.
    pub(crate) sequences: usize,
    /// Since when it is there, in seconds.
    pub(crate) created: u64,
    /// The executor's memory, and when somebody looked.
    pub(crate) memory: Mutex<Option<(Instant, Option<Memory>)>>,
    pub(crate) metrics: Arc<Metrics>,
    /// Requests that run or wait.
    pub(crate) in_flight: AtomicUsize,
    /// The last texts, by number.
    pub(crate) slots: Slots,
    /// How strongly adapters count where a request does not say, if that was changed since the model was loaded.
    pub(crate) scales: Mutex<Option<Vec<f32>>>,
    /// Adapters with names of their own.
    pub(crate) adapters: Vec<NamedAdapter>,
}

impl Loaded {
    fn new(name: &str, opened: LoadedEngine, metrics: Arc<Metrics>, request_defaults: &RequestDefaults) -> Loaded {
        let LoadedEngine { scheduler, sequences, encoder } = opened;
        let model = Arc::clone(scheduler.model());
        let mut setup = ChatSetup::new(&model, request_defaults.template.as_deref());
        setup.kwargs.clone_from(&request_defaults.kwargs);
        if let Err(why) = &setup.template {
            let why = no_template(why);
            log::warn!("chat is not served: {}", why.lines().next().unwrap_or_default());
        }
        metrics.model_is_there(&scheduler, request_defaults.adapters.len());
        if let Some(change) = &request_defaults.sampling {
            change(&mut setup.sampling);
        }
        Loaded {
            name: name.to_owned(),
            setup,
            limit: request_defaults.limit,
            keep_reasoning: request_defaults.keep_reasoning,
            thinking_budget: request_defaults.thinking_budget,
            sequences,
            created: now(),
            memory: Mutex::new(None),
            metrics,
            in_flight: AtomicUsize::new(0),
            slots: Slots::new(sequences),
            scales: Mutex::new(None),
            adapters: request_defaults.adapters.clone(),
            media: encoder.map(|encoder| Media::new(encoder, &request_defaults.media_hosts)),
            scheduler,
        }
    }
}

impl Loaded {
    /// The adapter that this name means.
    pub(crate) fn adapter(&self, name: Option<&str>) -> Option<&NamedAdapter> {
        self.adapters.iter().find(|adapter| Some(adapter.name.as_str()) == name)
    }

    /// The named adapter that counts with these scales.
    pub(crate) fn adapter_of(&self, scales: Option<&[f32]>) -> Option<&NamedAdapter> {
        let counts = |adapter: &&NamedAdapter| scales.is_some_and(|s| s.get(adapter.number).is_some_and(|s| *s != 0.0));
        self.adapters.iter().find(counts)
    }

    /// Requests that run or wait.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }
}

/// Where a model is.
enum State {
    Away,
    Loading,
    Here(Arc<Loaded>),
}

/// The place of one model.
pub(crate) struct ModelEntry {
    pub(crate) name: String,
    aliases: Vec<String>,
    bytes: u64,
    load: Option<LoadEngine>,
    state: Mutex<(State, Instant)>,
    changed: Condvar,
    /// Whether it is being loaded, for those who must not block.
    loading: watch::Sender<bool>,
    /// Requests that wait until it is loaded.
    awaiting: Queue,
    /// A client asked to unload it once it is idle.
    dismissed: AtomicBool,
    pub(crate) metrics: Arc<Metrics>,
}

/// Ollama's clients add the tag.
fn plain(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

impl ModelEntry {
    fn state(&self) -> MutexGuard<'_, (State, Instant)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the model can be had again when it is gone.
    pub(crate) fn can_load(&self) -> bool {
        self.load.is_some()
    }

    /// Bytes of the model, as far as they are known.
    pub(crate) fn bytes(&self) -> u64 {
        self.peek().map_or(self.bytes, |loaded| loaded.scheduler.model().gguf.data_bytes())
    }

    /// The model, where it is loaded. Looking keeps no model awake.
    pub(crate) fn peek(&self) -> Option<Arc<Loaded>> {
        match &self.state().0 {
            State::Here(loaded) => Some(Arc::clone(loaded)),
            _ => None,
        }
    }

    /// Requests that wait until it is loaded.
    pub(crate) fn awaiting(&self) -> usize {
        self.awaiting.len()
    }

    /// All names that mean the model, the one that it is served under first.
    pub(crate) fn names(&self) -> Vec<&str> {
        std::iter::once(&self.name).chain(&self.aliases).map(String::as_str).collect()
    }

    fn answers_to(&self, name: &str) -> bool {
        plain(&self.name) == plain(name) || self.aliases.iter().any(|alias| plain(alias) == plain(name))
    }

    fn set(&self, state: State) -> State {
        self.dismissed.store(false, Ordering::Relaxed);
        let mut now = self.state();
        self.loading.send_replace(self.load.is_some() && matches!(state, State::Loading));
        let before = std::mem::replace(&mut *now, (state, Instant::now())).0;
        drop(now);
        self.changed.notify_all();
        before
    }

    /// The model, or `None`: then the caller must load it. What was there before is dropped outside of the lock, since the
    /// end of an engine waits for its last step.
    fn claim(&self) -> Result<Option<Arc<Loaded>>, ApiError> {
        let mut state = self.state();
        // Requests do not wait for a model that is put in from outside: clients come back.
        while matches!(state.0, State::Loading) && self.load.is_some() {
            release();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &mut *state {
            (State::Here(loaded), _) if !loaded.scheduler.is_running() && self.load.is_some() => {
                log::warn!("the engine of {} has stopped; the model is loaded again", self.name);
            }
            (State::Here(loaded), used) => {
                *used = Instant::now();
                return Ok(Some(Arc::clone(loaded)));
            }
            _ if self.load.is_none() => return Err(ApiError::new(Kind::Unavailable, "Loading model")),
            _ => {}
        }
        let before = std::mem::replace(&mut state.0, State::Loading);
        self.loading.send_replace(true);
        drop(state);
        drop(before);
        Ok(None)
    }

    /// Since when the model is idle; `None` if it is not loaded or in use.
    fn idle(&self) -> Option<Instant> {
        match &*self.state() {
            // The place itself holds one.
            (State::Here(loaded), since) if Arc::strong_count(loaded) == 1 => Some(*since),
            _ => None,
        }
    }

    /// Unloads the model as soon as it is idle, if it can be loaded again; tells whether it can.
    pub(crate) fn dismiss(&self) -> bool {
        if self.can_load() && !self.unload("a client wished it") {
            self.dismissed.store(true, Ordering::Relaxed);
        }
        self.can_load()
    }

    /// Unloads the model, if it is idle.
    fn unload(&self, why: &str) -> bool {
        let mut state = self.state();
        match std::mem::replace(&mut state.0, State::Away) {
            State::Here(loaded) if Arc::strong_count(&loaded) == 1 => {
                drop(state);
                // The engine's thread ends here, and its memory is given back.
                drop(loaded);
                log::info!("{} was unloaded: {why}", self.name);
                true
            }
            other => {
                state.0 = other;
                false
            }
        }
    }
}

/// All models.
pub(crate) struct ModelRegistry {
    places: Vec<ModelEntry>,
    sharing: Sharing,
    /// What holds where a request says nothing.
    pub(crate) request_defaults: RequestDefaults,
    /// Only the names of the model mean it, even where there is one.
    pub(crate) strict_names: bool,
    /// One model is loaded at a time, so that the memory is counted truly.
    loading: Mutex<()>,
}

impl ModelRegistry {
    pub(crate) fn new(specs: Vec<ModelSpec>, sharing: Sharing) -> ModelRegistry {
        let place = |offer: ModelSpec| ModelEntry {
            metrics: Arc::new(Metrics::new(&offer.name)),
            name: offer.name,
            aliases: offer.aliases,
            bytes: offer.bytes,
            load: Some(offer.load),
            state: Mutex::new((State::Away, Instant::now())),
            changed: Condvar::new(),
            loading: watch::Sender::new(false),
            awaiting: Queue::default(),
            dismissed: AtomicBool::new(false),
        };
        let places = specs.into_iter().map(place).collect();
        ModelRegistry {
            places,
            sharing,
            request_defaults: RequestDefaults::default(),
            strict_names: false,
            loading: Mutex::new(()),
        }
    }

    /// One model, which is handed over later and stays.
    pub(crate) fn of_one(name: &str, aliases: &[String]) -> ModelRegistry {
        let place = ModelEntry {
            metrics: Arc::new(Metrics::new(name)),
            name: name.to_owned(),
            aliases: aliases.to_vec(),
            bytes: 0,
            load: None,
            state: Mutex::new((State::Loading, Instant::now())),
            changed: Condvar::new(),
            loading: watch::Sender::new(false),
            awaiting: Queue::default(),
            dismissed: AtomicBool::new(false),
        };
        ModelRegistry {
            places: vec![place],
            sharing: Sharing::default(),
            request_defaults: RequestDefaults::default(),
            strict_names: false,
            loading: Mutex::new(()),
        }
    }

    pub(crate) fn places(&self) -> &[ModelEntry] {
        &self.places
    }

    /// Hands the first model over.
    pub(crate) fn put(&self, opened: LoadedEngine) {
        if let Some(place) = self.places.first() {
            let loaded = Loaded::new(&place.name, opened, Arc::clone(&place.metrics), &self.request_defaults);
            place.set(State::Here(Arc::new(loaded)));
        }
    }

    /// The place of the model that a request is for: by any of its names, the first one where none is said. Clients have names of their own
    /// for what they ask, so where there is one model, every name means it, unless the server is strict.
    pub(crate) fn place(&self, named: Option<&str>) -> Result<&ModelEntry, ApiError> {
        match self.places.as_slice() {
            [one] if !self.strict_names || self.names_adapter(named) => Ok(one),
            _ => self.place_named(named),
        }
    }

    /// Whether an adapter is meant, which belongs to the only model.
    fn names_adapter(&self, named: Option<&str>) -> bool {
        self.request_defaults.adapters.iter().any(|adapter| Some(adapter.name.as_str()) == named)
    }

    /// The place of a model by any of its names; the first one where none is said.
    pub(crate) fn place_named(&self, named: Option<&str>) -> Result<&ModelEntry, ApiError> {
        let found = match named.filter(|name| !name.is_empty()) {
            Some(name) => self.places.iter().find(|place| place.answers_to(name)).ok_or_else(|| {
                let names: Vec<String> = self.places.iter().map(|place| format!("`{}`", place.name)).collect();
                format!("The model `{name}` does not exist; this server has {}", names.join(", "))
            }),
            None => self.places.first().ok_or_else(|| "this server has no model".to_owned()),
        };
        found.map_err(|message| ApiError::new(Kind::Model, message).with_param("model"))
    }

    /// A model, loaded now if need be: this may take long, and belongs off the threads that serve connections.
    pub(crate) fn get(&self, named: Option<&str>) -> Result<Arc<Loaded>, ApiError> {
        let place = self.place(named)?;
        if let Some(loaded) = place.claim()? {
            return Ok(loaded);
        }
        // Requests that come meanwhile wait for this one.
        release();
        let loaded = self.load(place);
        place.set(match &loaded {
            Ok(loaded) => State::Here(Arc::clone(loaded)),
            Err(_) => State::Away,
        });
        loaded
    }

    fn load(&self, place: &ModelEntry) -> Result<Arc<Loaded>, ApiError> {
        let _one = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        self.make_room(place)?;
        let Some(load) = &place.load else { return Err(ApiError::new(Kind::Unavailable, "Loading model")) };
        let start = Instant::now();
        // A panic must not leave others waiting for this model for ever.
        let open = || {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(load)).unwrap_or(Err("loading it panicked".into()))
        };
        let mut opened = open();
        // Memory may be short even without a budget: idle models are unloaded.
        while opened.is_err() && self.let_oldest_go(place) {
            opened = open();
        }
        let opened = opened.map_err(|why| {
            log::error!("{} could not be loaded: {why}", place.name);
            ApiError::new(
                Kind::Unavailable,
                format!("the model `{}` could not be loaded; the log says why", place.name),
            )
        })?;
        log::info!("{} was loaded in {:.1} s", place.name, start.elapsed().as_secs_f64());
        Ok(Arc::new(Loaded::new(&place.name, opened, Arc::clone(&place.metrics), &self.request_defaults)))
    }

    /// Lets idle models go, the longest unused first, until one more fits into the budget.
    fn make_room(&self, wanted: &ModelEntry) -> Result<(), ApiError> {
        let Some(budget) = self.sharing.budget else { return Ok(()) };
        loop {
            let here = self.places.iter().filter(|place| place.name != wanted.name && place.peek().is_some());
            let taken: u64 = here.map(|place| place.bytes).sum();
            if taken == 0 || taken.saturating_add(wanted.bytes) <= budget {
                return Ok(());
            }
            if !self.let_oldest_go(wanted) {
                let message = format!("there is no memory for `{}` while other models are in use", wanted.name);
                return Err(ApiError::new(Kind::Unavailable, message));
            }
        }
    }

    /// Unloads the model that has been idle longest; tells whether there was one.
    fn let_oldest_go(&self, wanted: &ModelEntry) -> bool {
        let idle =
            self.places.iter().filter(|place| place.load.is_some()).filter_map(|place| Some((place.idle()?, place)));
        let oldest = idle.min_by_key(|(since, _)| *since);
        oldest.is_some_and(|(_, place)| place.unload(&format!("{} needs its memory", wanted.name)))
    }

    /// Whether a model is being loaded.
    pub(crate) fn is_loading(&self, named: Option<&str>) -> bool {
        self.place(named).is_ok_and(|place| *place.loading.borrow())
    }

    /// Waits as long as a model is being loaded, beside at most so many others, without keeping a thread. Requests for other models are
    /// not counted: one that takes long to load keeps nobody from them.
    pub(crate) async fn until_loaded(&self, named: Option<&str>, most: usize) -> Result<(), ApiError> {
        if let Ok(place) = self.place(named)
            && *place.loading.borrow()
        {
            let _waiting = place.awaiting.enter(most, "wait for the model to be loaded")?;
            // The sender is not dropped before the server.
            let _ = place.loading.subscribe().wait_for(|loading| !loading).await;
        }
        Ok(())
    }

    /// Unloads models that have been idle too long.
    pub(crate) fn tidy(&self) {
        let Some(keep) = self.sharing.keep else { return };
        for place in self.places.iter().filter(|place| place.load.is_some()) {
            if let (State::Here(loaded), used) = &mut *place.state()
                && Arc::strong_count(loaded) > 1
            {
                // A long answer keeps its model, and the time runs from its end.
                *used = Instant::now();
            }
            let dismissed = place.dismissed.load(Ordering::Relaxed);
            if place.idle().is_some_and(|since| dismissed || since.elapsed() >= keep) {
                place.unload(if dismissed { "a client wished it" } else { "it was idle" });
            }
        }
    }

    /// When the model would be unloaded if it stays idle, in seconds since 1970; `None` if it stays.
    pub(crate) fn expires(&self, place: &ModelEntry) -> Option<u64> {
        let keep = self.sharing.keep.filter(|_| place.load.is_some())?;
        let left = keep.saturating_sub(place.state().1.elapsed());
        Some(now() + left.as_secs())
    }

    /// Whether idle models are ever let go.
    pub(crate) fn is_tidied(&self) -> bool {
        self.sharing.keep.is_some()
    }

    /// Whether any model is loaded, or can be without further ado.
    pub(crate) fn is_ready(&self) -> Result<(), &'static str> {
        let mut why = "Loading model";
        for place in &self.places {
            match &place.state().0 {
                State::Here(loaded) if loaded.scheduler.is_running() => return Ok(()),
                State::Here(loaded) => why = loaded.scheduler.why_not(),
                // It would be loaded for the next request.
                State::Away => return Ok(()),
                State::Loading => {}
            }
        }
        Err(why)
    }
}
