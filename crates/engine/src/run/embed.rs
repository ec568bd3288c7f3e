//! Vectors of texts, made between the steps of those who write: texts of all requests that wait go through the model together, as
//! many as it likes at once. Nothing is kept of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::engine::{Engine, Entry, Wanted};
use super::memory::Count;
use crate::Error;
use crate::embed::{Layers, Pooling, mean};

/// Texts as tokens, and what is wanted of them.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    /// The texts.
    pub texts: Vec<Vec<u32>>,
    /// How the vectors of their tokens become one ([`Pooling::choose`]).
    pub pooling: Pooling,
}

/// Where the vectors of a request go: one for each text; all of its tokens', one after the other, where nothing is pooled; its
/// scores where it is ranked.
pub(crate) type VectorSink = Box<dyn FnOnce(Result<Vec<Vec<f32>>, Error>) + Send>;

/// A request on its way.
pub(crate) struct EmbedJob {
    pub(crate) request: EmbedRequest,
    pub(crate) sink: VectorSink,
    pub(crate) cancelled: Arc<AtomicBool>,
    /// The vectors of the first texts.
    done: Vec<Vec<f32>>,
}

impl EmbedJob {
    pub(crate) fn new(request: EmbedRequest, sink: VectorSink, cancelled: Arc<AtomicBool>) -> EmbedJob {
        EmbedJob { request, sink, cancelled, done: Vec::new() }
    }
}

/// Requests for vectors that wait.
#[derive(Default)]
pub(crate) struct Embeds {
    jobs: VecDeque<EmbedJob>,
    layers: Option<Arc<Layers>>,
}

impl Embeds {
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Takes a request in, or refuses it.
    pub(crate) fn add(&mut self, engine: &Engine, job: EmbedJob) {
        match admit(engine, &job.request) {
            Ok(()) if job.request.texts.is_empty() => (job.sink)(Ok(Vec::new())),
            Ok(()) => self.jobs.push_back(job),
            Err(error) => (job.sink)(Err(error)),
        }
    }

    /// Ends all requests with an error.
    pub(crate) fn fail_all(&mut self, error: impl Fn() -> Error) {
        self.jobs.drain(..).for_each(|job| (job.sink)(Err(error())));
    }

    /// Runs one batch of texts; `alone` if no others run, who may give pages back. An error belongs to the requests of the batch;
    /// it is given back where nobody else can be served either.
    pub(crate) fn step(&mut self, engine: &mut Engine, alone: bool) -> Option<Error> {
        self.jobs.retain(|job| !job.cancelled.load(Ordering::Relaxed));
        let mut batch = self.batch(engine);
        if batch.is_empty() {
            // Texts that are being written hold the pages: once they are over, there is room.
            if let Some(job) = if alone { self.jobs.pop_front() } else { None } {
                let needed = pages_of(engine, job.request.texts[job.done.len()].len());
                let error = engine.room_for(needed).err();
                (job.sink)(Err(error.unwrap_or(Error::NoSequence { why: "there is no state for one more text" })));
            }
            return None;
        }
        let layers = match self.layers(engine) {
            Ok(layers) => layers,
            Err(error) => return self.fail(&mut batch, error),
        };
        let texts: Vec<(&[u32], Pooling)> = batch
            .iter()
            .map(|(job, text)| (&self.jobs[*job].request.texts[*text][..], self.jobs[*job].request.pooling))
            .collect();
        match vectors(engine, &layers, &texts) {
            Ok(vectors) => {
                for ((job, _), vector) in batch.iter().zip(vectors) {
                    self.jobs[*job].done.push(vector);
                }
                self.deliver();
                None
            }
            Err(error) => self.fail(&mut batch, error),
        }
    }

    fn layers(&mut self, engine: &Engine) -> Result<Arc<Layers>, Error> {
        if let Some(layers) = &self.layers {
            return Ok(Arc::clone(layers));
        }
        let layers = Arc::new(Layers::read(engine.model())?);
        self.layers = Some(Arc::clone(&layers));
        Ok(layers)
    }

    /// The next texts, by request and number: as many tokens as the engine likes at once, as far as there are pages and states.
    fn batch(&self, engine: &Engine) -> Vec<(usize, usize)> {
        let (mut tokens, mut pages) = (engine.batch(), Count::default());
        let mut texts = if engine.has_states { engine.free_states() } else { usize::MAX };
        if engine.alike {
            // Where a text must not depend on others, each is alone.
            texts = texts.min(1);
        }
        let mut batch = Vec::new();
        for (job, waiting) in self.jobs.iter().enumerate() {
            for (text, ids) in waiting.request.texts.iter().enumerate().skip(waiting.done.len()) {
                pages = pages + pages_of(engine, ids.len());
                // A text that is longer than a batch goes alone.
                let too_many = ids.len() > tokens && !batch.is_empty();
                if too_many || engine.room_for(pages).is_err() || batch.len() >= texts {
                    return batch;
                }
                tokens = tokens.saturating_sub(ids.len());
                batch.push((job, text));
            }
        }
        batch
    }

    /// Hands over requests whose texts are all done.
    fn deliver(&mut self) {
        while self.jobs.front().is_some_and(|job| job.done.len() == job.request.texts.len()) {
            if let Some(job) = self.jobs.pop_front() {
                (job.sink)(Ok(job.done));
            }
        }
    }

    /// The requests of a batch failed.
    fn fail(&mut self, batch: &mut Vec<(usize, usize)>, error: Error) -> Option<Error> {
        batch.dedup_by_key(|(job, _)| *job);
        let (why, lost) = (error.to_string(), error.is_lost());
        let again = || if lost { Error::Lost { why: why.clone() } } else { Error::Run { why: why.clone() } };
        let mut first = Some(error).filter(|error| !error.is_lost());
        for (job, _) in batch.iter().rev() {
            if let Some(job) = self.jobs.remove(*job) {
                (job.sink)(Err(first.take().unwrap_or_else(again)));
            }
        }
        lost.then(again)
    }
}

/// Pages that a text of so many tokens takes. Of one that is read in pieces, a window needs only the last.
fn pages_of(engine: &Engine, tokens: usize) -> Count {
    if tokens > engine.batch() && !engine.reads_whole() {
        engine.pages_of_text(tokens, 0)
    } else {
        Count::each(tokens.div_ceil(crate::arch::PAGE))
    }
}

/// Whether every text of a request can be read.
fn admit(engine: &Engine, request: &EmbedRequest) -> Result<(), Error> {
    let (config, context) = (&engine.model().config, engine.context());
    for (nth, text) in request.texts.iter().enumerate() {
        if text.is_empty() {
            return Err(Error::EmptyText { nth: nth + 1 });
        }
        if text.len() > context {
            return Err(Error::TextTooLong { nth: nth + 1, tokens: text.len(), context, trained: config.context });
        }
        if let Some(&token) = text.iter().find(|t| **t as usize >= config.vocab) {
            return Err(Error::TokenOutOfRange { token, vocab: config.vocab });
        }
    }
    Ok(())
}

/// The vectors of texts that go through the model together.
fn vectors(engine: &mut Engine, layers: &Layers, texts: &[(&[u32], Pooling)]) -> Result<Vec<Vec<f32>>, Error> {
    let architecture = engine.model().config.architecture.name;
    let wanted = |pooling: Pooling| match pooling.of_tokens(architecture) {
        Pooling::Cls => Wanted::First,
        Pooling::Last => Wanted::Last,
        _ => Wanted::All,
    };
    let mut ids = Vec::with_capacity(texts.len());
    let opened = texts.iter().try_for_each(|_| engine.open(0).map(|id| ids.push(id)));
    let entries: Vec<Entry<'_>> = texts
        .iter()
        .zip(&ids)
        .map(|((tokens, pooling), id)| Entry { sequence: *id, tokens, wanted: wanted(*pooling) })
        .collect();
    let result = opened.and_then(|()| match entries[..] {
        [long] if long.tokens.len() > engine.batch() && !engine.reads_whole() => {
            in_pieces(engine, long).map(|v| vec![v])
        }
        _ => engine.vectors(&entries),
    });
    ids.into_iter().for_each(|id| engine.close(id));
    let width = engine.model().config.hidden;
    let finished = |(vectors, (tokens, pooling)): (Vec<f32>, &(&[u32], Pooling))| {
        if vectors.iter().any(|v| !v.is_finite()) {
            return Err(Error::NotANumber { token: tokens.len() });
        }
        let one = match pooling.of_tokens(architecture) {
            Pooling::Mean => mean(&vectors, width),
            _ => vectors,
        };
        Ok(match pooling {
            Pooling::None => one,
            Pooling::Rank => layers.scores(one),
            _ => layers.vector(one),
        })
    };
    result?.into_iter().zip(texts).map(finished).collect()
}

/// A text that is longer than a batch, where tokens see only those before them.
fn in_pieces(engine: &mut Engine, text: Entry<'_>) -> Result<Vec<f32>, Error> {
    let mut all = Vec::new();
    let pieces = text.tokens.len().div_ceil(engine.batch());
    for (nth, tokens) in text.tokens.chunks(engine.batch()).enumerate() {
        let wanted = match text.wanted {
            Wanted::First if nth > 0 => break,
            Wanted::Last if nth + 1 < pieces => Wanted::Nothing,
            wanted => wanted,
        };
        let vectors = engine.vectors(&[Entry { tokens, wanted, ..text }])?;
        all.extend(vectors.into_iter().flatten());
    }
    Ok(all)
}
