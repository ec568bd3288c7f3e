//! Vectors of texts, made between the steps of those who write: texts of all requests that wait go through the model together, as
//! many as it likes at once. Nothing is kept of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::cache::PageCount;
use super::engine::{Engine, Entry, SequenceId, Wanted};
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
    number: u64,
}

impl EmbedJob {
    pub(crate) fn new(request: EmbedRequest, sink: VectorSink, cancelled: Arc<AtomicBool>) -> EmbedJob {
        EmbedJob { request, sink, cancelled, done: Vec::new(), number: 0 }
    }
}

/// Requests for vectors that wait.
#[derive(Default)]
pub(crate) struct Embeds {
    jobs: VecDeque<EmbedJob>,
    layers: Option<Arc<Layers>>,
    /// The next text of the first request, where it is too long for one step.
    partial: Option<Partial>,
    /// Other sequences hold the pages that the next text needs.
    short_of_room: bool,
    steps: u64,
    added: u64,
}

/// A text of which some tokens have been read.
struct Partial {
    job: u64,
    sequence: SequenceId,
    read: usize,
    /// The vectors of its tokens, as far as they are wanted.
    vectors: Vec<f32>,
}

impl Embeds {
    pub(crate) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Steps that have been run.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// Whether the first request waits for pages that other sequences hold, and its client for it.
    pub(crate) fn is_short_of_room(&self) -> bool {
        let is_wanted = |job: &EmbedJob| !job.cancelled.load(Ordering::Relaxed);
        self.short_of_room && self.jobs.front().is_some_and(is_wanted)
    }

    /// Takes a request in, or refuses it.
    pub(crate) fn add(&mut self, engine: &Engine, mut job: EmbedJob) {
        match admit(engine, &job.request) {
            Ok(()) if job.request.texts.is_empty() => (job.sink)(Ok(Vec::new())),
            Ok(()) => {
                self.added += 1;
                job.number = self.added;
                self.jobs.push_back(job);
            }
            Err(error) => (job.sink)(Err(error)),
        }
    }

    /// Ends all requests with an error.
    pub(crate) fn fail_all(&mut self, error: impl Fn() -> Error) {
        self.jobs.drain(..).for_each(|job| (job.sink)(Err(error())));
    }

    /// Runs one step of at most `budget` tokens: several texts, or a piece of a long one. `alone` if no others run, who may give pages
    /// back. An error belongs to the requests of the step; it is given back where nobody else can be served either.
    pub(crate) fn step(&mut self, engine: &mut Engine, budget: usize, alone: bool) -> Option<Error> {
        self.jobs.retain(|job| !job.cancelled.load(Ordering::Relaxed));
        let first = self.jobs.front().map(|job| job.number);
        if let Some(partial) = self.partial.take_if(|partial| Some(partial.job) != first) {
            engine.close(partial.sequence);
        }
        let job = self.jobs.front()?;
        let most = budget.min(engine.batch()).max(1);
        let next = job.request.texts[job.done.len()].len();
        // Where tokens see those behind them, a text goes through the model as a whole.
        let result = if self.partial.is_some() || (next > most && !engine.reads_whole()) {
            self.piece(engine, most)
        } else {
            self.texts(engine, most)
        };
        self.short_of_room = matches!(result, Ok(false));
        match result {
            Ok(true) => {
                self.steps += 1;
                self.deliver();
                None
            }
            // Sequences that are being decoded hold the pages: once they end, there is room.
            Ok(false) if !alone => None,
            Ok(false) => {
                let needed = pages_of(engine, next);
                let error = engine.room_for(needed).err();
                let error = error.unwrap_or(Error::NoSequence { why: "there is no state for one more text" });
                if let Some(job) = self.jobs.pop_front() {
                    (job.sink)(Err(error));
                }
                None
            }
            Err(failed) => self.fail(failed),
        }
    }

    /// Several texts of at most so many tokens together. `false`: there is no room for any.
    fn texts(&mut self, engine: &mut Engine, most: usize) -> Result<bool, Failed> {
        let batch = self.batch(engine, most);
        if batch.is_empty() {
            return Ok(false);
        }
        let layers = match self.layers(engine) {
            Ok(layers) => layers,
            Err(error) => return Err(Failed { batch, error }),
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
                Ok(true)
            }
            Err(error) => Err(Failed { batch, error }),
        }
    }

    /// The next tokens of the first text, which is longer than a step may be. `false`: there is no room for them, and what was read of
    /// the text is given up, so that nobody waits for its pages.
    fn piece(&mut self, engine: &mut Engine, most: usize) -> Result<bool, Failed> {
        let job = &self.jobs[0];
        let (at, number, pooling) = (job.done.len(), job.number, job.request.pooling);
        let failed = |error| Failed { batch: vec![(0, at)], error };
        let text = &job.request.texts[at];
        let mut partial = match self.partial.take() {
            Some(partial) => partial,
            None if engine.room_for(pages_of(engine, text.len())).is_err() => return Ok(false),
            None if engine.cache.has_states() && engine.cache.free_states() == 0 => return Ok(false),
            None => {
                let sequence = engine.open(0).map_err(failed)?;
                Partial { job: number, sequence, read: 0, vectors: Vec::new() }
            }
        };
        let (sequence, end) = (partial.sequence, (partial.read + most).min(text.len()));
        if engine.room_for(engine.pages_to_feed(sequence, end - partial.read)).is_err() {
            engine.close(sequence);
            return Ok(false);
        }
        let all = wanted(engine, pooling);
        let wanted = match all {
            Wanted::Last if end < text.len() => Wanted::Nothing,
            wanted => wanted,
        };
        match engine.vectors(&[Entry { sequence, tokens: &text[partial.read..end], wanted }]) {
            Ok(vectors) => partial.vectors.extend(vectors.into_iter().flatten()),
            Err(error) => {
                engine.close(sequence);
                return Err(failed(error));
            }
        }
        partial.read = end;
        if end < text.len() && all != Wanted::First {
            self.partial = Some(partial);
            return Ok(true);
        }
        engine.close(sequence);
        let layers = self.layers(engine).map_err(failed)?;
        let vector = finished(engine, &layers, partial.vectors, end, pooling).map_err(failed)?;
        self.jobs[0].done.push(vector);
        Ok(true)
    }

    fn layers(&mut self, engine: &Engine) -> Result<Arc<Layers>, Error> {
        if let Some(layers) = &self.layers {
            return Ok(Arc::clone(layers));
        }
        let layers = Arc::new(Layers::read(engine.model())?);
        self.layers = Some(Arc::clone(&layers));
        Ok(layers)
    }

    /// The next texts, by request and number: at most so many tokens, as far as there are pages and states.
    fn batch(&self, engine: &Engine, most: usize) -> Vec<(usize, usize)> {
        let (mut tokens, mut pages) = (most, PageCount::default());
        let mut texts = if engine.cache.has_states() { engine.cache.free_states() } else { usize::MAX };
        if engine.batch_invariant {
            // Where a text must not depend on others, each is alone.
            texts = texts.min(1);
        }
        let mut batch = Vec::new();
        for (job, waiting) in self.jobs.iter().enumerate() {
            for (text, ids) in waiting.request.texts.iter().enumerate().skip(waiting.done.len()) {
                pages = pages + pages_of(engine, ids.len());
                // A text that is longer than a step goes alone.
                let too_many = ids.len() > tokens && (!batch.is_empty() || !engine.reads_whole());
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

    /// The requests of a step failed.
    fn fail(&mut self, Failed { mut batch, error }: Failed) -> Option<Error> {
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

/// A step that failed: its texts, by request and number, and why.
struct Failed {
    batch: Vec<(usize, usize)>,
    error: Error,
}

/// Pages that a text of so many tokens takes. Of one that is read in pieces, a window needs only the last.
fn pages_of(engine: &Engine, tokens: usize) -> PageCount {
    if tokens > engine.batch() && !engine.reads_whole() {
        engine.pages_of_prompt(tokens, 0)
    } else {
        PageCount::each(tokens.div_ceil(crate::arch::PAGE))
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

/// Which tokens' vectors are needed for a pooling.
fn wanted(engine: &Engine, pooling: Pooling) -> Wanted {
    match pooling.of_tokens(engine.model().config.architecture.name) {
        Pooling::Cls => Wanted::First,
        Pooling::Last => Wanted::Last,
        _ => Wanted::All,
    }
}

/// The vectors of texts that go through the model together.
fn vectors(engine: &mut Engine, layers: &Layers, texts: &[(&[u32], Pooling)]) -> Result<Vec<Vec<f32>>, Error> {
    let mut ids = Vec::with_capacity(texts.len());
    let opened = texts.iter().try_for_each(|_| engine.open(0).map(|id| ids.push(id)));
    let entries: Vec<Entry<'_>> = texts
        .iter()
        .zip(&ids)
        .map(|((tokens, pooling), id)| Entry { sequence: *id, tokens, wanted: wanted(engine, *pooling) })
        .collect();
    let result = opened.and_then(|()| engine.vectors(&entries));
    ids.into_iter().for_each(|id| engine.close(id));
    let finish = |(vectors, (tokens, pooling)): (Vec<f32>, &(&[u32], Pooling))| {
        finished(engine, layers, vectors, tokens.len(), *pooling)
    };
    result?.into_iter().zip(texts).map(finish).collect()
}

/// What becomes of the vectors of a text's tokens.
fn finished(
    engine: &Engine,
    layers: &Layers,
    vectors: Vec<f32>,
    tokens: usize,
    pooling: Pooling,
) -> Result<Vec<f32>, Error> {
    if vectors.iter().any(|v| !v.is_finite()) {
        return Err(Error::NotANumber { token: tokens });
    }
    let config = &engine.model().config;
    let one = match pooling.of_tokens(config.architecture.name) {
        Pooling::Mean => mean(&vectors, config.hidden),
        _ => vectors,
    };
    Ok(match pooling {
        Pooling::None => one,
        Pooling::Rank => layers.scores(one),
        _ => layers.vector(one),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;
    use crate::arch::Room;
    use crate::executor::{Arithmetic, CpuExecutor};
    use crate::model::Model;
    use crate::quantise_recipe::Recipe;
    use crate::run::job::Job;
    use crate::run::policy::Policy;
    use crate::run::request::{Event, Request};
    use crate::run::schedule::Schedule;
    use crate::synth::{Preset, Synth};

    fn schedule(sequences: usize, context: usize, stutter: Duration) -> Schedule {
        let (preset, recipe) = (Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("F32").unwrap());
        let bytes = Synth::new(preset, recipe, 1).to_bytes().unwrap();
        let model = Arc::new(Model::new(kiln_gguf::Gguf::from_bytes(bytes).unwrap()).unwrap());
        let room = Room::for_sequences(sequences, context);
        let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
        let engine = Engine::new(model, executor, room, &mut |_, _| {}).unwrap();
        Schedule::new(engine, Policy { stutter, alone: Some(stutter), ..Policy::default() })
    }

    /// Hands a request in; what it becomes goes to the list.
    fn embed(schedule: &mut Schedule, texts: &[usize]) -> Arc<Mutex<Option<Vec<Vec<f32>>>>> {
        let texts = texts.iter().map(|length| (0..*length).map(|i| 40 + (i % 50) as u32).collect()).collect();
        let made = Arc::new(Mutex::new(None));
        let sink = Arc::clone(&made);
        let sink = Box::new(move |result: Result<_, Error>| *sink.lock().unwrap() = Some(result.unwrap()));
        schedule.embed(EmbedJob::new(EmbedRequest { texts, pooling: Pooling::Mean }, sink, Arc::default()));
        made
    }

    fn generate(schedule: &mut Schedule, limit: usize) -> Arc<Mutex<usize>> {
        let tokens = Arc::new(Mutex::new(0));
        let seen = Arc::clone(&tokens);
        let sink = Box::new(move |event| {
            *seen.lock().unwrap() += usize::from(matches!(event, Event::Token { .. }));
            true
        });
        let mut request = Request { limit: Some(limit), ..Request::new(vec![40, 41, 42]) };
        request.stop.ignore_end = true;
        schedule.add(Job::new(request, sink, Arc::default()));
        tokens
    }

    #[test]
    fn decode_steps_come_between_the_steps_of_embeddings() {
        // A budget of no time is 32 tokens a step.
        let mut schedule = schedule(2, 512, Duration::ZERO);
        let alone = embed(&mut schedule, &[20, 300, 7]);
        while !schedule.is_idle() {
            schedule.step();
        }
        let tokens = generate(&mut schedule, 400);
        while *tokens.lock().unwrap() < 8 {
            schedule.step();
        }
        let (made, before) = (embed(&mut schedule, &[20, 300, 7]), schedule.load().tally.embed_steps);
        let (mut last, mut between) = (before, 0);
        let mut seen = *tokens.lock().unwrap();
        while made.lock().unwrap().is_none() {
            schedule.step();
            let (steps, now) = (schedule.load().tally.embed_steps, *tokens.lock().unwrap());
            between += steps - last;
            last = steps;
            if now > seen {
                (seen, between) = (now, 0);
            }
            assert!(between <= 1, "{between} steps of embeddings without a token of the sequence beside them");
        }
        // 20 tokens, 300 in pieces of 32, 7.
        assert!(last - before >= 11, "{} steps", last - before);
        // Pieces beside others give the same vectors, up to the order of sums.
        let [made, alone] = [made, alone].map(|vectors| vectors.lock().unwrap().take().unwrap().concat());
        assert_eq!(made.len(), alone.len());
        assert!(made.iter().zip(&alone).all(|(a, b)| (a - b).abs() < 1e-4));
    }

    #[test]
    fn texts_get_pages_although_sequences_keep_coming() {
        // One context of pages for two sequences.
        let mut schedule = schedule(2, 128, Duration::from_secs(1));
        let (_, pages) = schedule.engine().pages();
        let held: Vec<_> = (0..6).map(|_| generate(&mut schedule, 100)).collect();
        while *held[1].lock().unwrap() == 0 {
            schedule.step();
        }
        let made = embed(&mut schedule, &[120; 2]);
        while made.lock().unwrap().is_none() {
            assert!(!schedule.is_idle(), "{pages} pages");
            schedule.step();
        }
        assert_eq!(*held[5].lock().unwrap(), 0, "the last sequence waits until the texts had their pages");
        while !schedule.is_idle() {
            schedule.step();
        }
        assert_eq!(*held[5].lock().unwrap(), 100);
    }
}
