//! The engine as a service: requests come from any thread, one thread runs the model, events go back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::embed::{EmbedJob, EmbedRequest};
use super::engine::Engine;
use super::job::Job;
use super::load::Load;
use super::policy::Policy;
use super::pulse::Pulse;
use super::request::{Event, Request};
use super::schedule::Schedule;
use crate::Error;
use crate::model::Model;

/// A loaded model that serves many requests at once.
///
/// ```
/// use std::sync::Arc;
/// use kiln_engine::arch::Room;
/// use kiln_engine::executor::{Arithmetic, CpuExecutor};
/// use kiln_engine::model::Model;
/// use kiln_engine::quantise_recipe::Recipe;
/// use kiln_engine::run::{Engine, Event, Policy, Request, Scheduler};
/// use kiln_engine::synth::{Preset, Synth};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // A tiny model with random weights stands for a file: `Model::open("model.gguf")`.
/// let preset = Preset::from_name("tiny-llama").ok_or("no such preset")?;
/// let recipe = Recipe::from_name("Q8_0").ok_or("no such recipe")?;
/// let bytes = Synth::new(preset, recipe, 1).to_bytes()?;
/// let model = Arc::new(Model::new(kiln_gguf::Gguf::from_bytes(bytes)?)?);
///
/// let executor = Box::new(CpuExecutor::new(Arithmetic::Fast));
/// let engine = Engine::new(model, executor, Room::for_sequences(4, 256), &mut |_, _| {})?;
/// let scheduler = Scheduler::start(engine, Policy::default());
///
/// let mut text = String::new();
/// for event in scheduler.generate(Request { limit: Some(8), ..Request::new(vec![72, 101, 108]) }) {
///     match event {
///         Event::Token { text: piece, .. } => text += &piece,
///         Event::End { text: rest, reason, .. } => println!("{text}{rest} ({reason:?})"),
///         Event::Failed(error) => return Err(error.into()),
///         Event::Started { .. } | Event::Read { .. } => {}
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct Scheduler {
    to: Sender<Message>,
    thread: Option<JoinHandle<()>>,
    model: Arc<Model>,
    device: String,
    gpu_bytes: u64,
    context: usize,
    load: Arc<Mutex<Load>>,
    pulse: Arc<Pulse>,
}

enum Message {
    Job(Box<Job>),
    Embed(Box<EmbedJob>),
    Call(Box<dyn FnOnce(&mut Engine) + Send>),
    Quit,
}

/// The events of one request. Dropping it cancels the request.
pub struct Events {
    from: Receiver<Event>,
    cancel: Cancel,
    over: usize,
}

/// Ends a request early.
#[derive(Clone, Debug)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// The request ends within one step.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Events {
    /// A way to end the request while somebody waits for its events.
    pub fn canceller(&self) -> Cancel {
        self.cancel.clone()
    }
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        if self.over == 0 {
            return None;
        }
        let event = self.from.recv().unwrap_or(Event::Failed(Error::Stopped));
        match &event {
            Event::End { .. } => self.over -= 1,
            Event::Failed(_) => self.over = 0,
            _ => {}
        }
        Some(event)
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// Makes an engine again that failed or whose device was lost. It is told how often that was tried before.
pub type Rebuild = Box<dyn FnMut(usize) -> Result<Engine, Error> + Send>;

/// Waits between attempts to build an engine again: the first comes at once, each takes twice as long as the one before.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// How long an idle engine keeps the memory that it computed in: whoever types the next question is often back before.
const RESTLESS: Duration = Duration::from_secs(10);

impl Scheduler {
    /// Runs an engine on a thread of its own. If its device is lost or the engine panics, requests fail from then on.
    pub fn start(engine: Engine, policy: Policy) -> Scheduler {
        Scheduler::launch(engine, policy, None)
    }

    /// The same, but then the engine is given up and built again: requests that were running fail, and so do those
    /// that come before it is there.
    pub fn start_lasting(engine: Engine, policy: Policy, rebuild: Rebuild) -> Scheduler {
        Scheduler::launch(engine, policy, Some(rebuild))
    }

    fn launch(engine: Engine, policy: Policy, rebuild: Option<Rebuild>) -> Scheduler {
        let (to, from) = channel();
        let (model, device, context) = (Arc::clone(engine.model()), engine.describe(), engine.context());
        let gpu_bytes = engine.gpu_bytes();
        let schedule = Schedule::new(engine, policy);
        let (load, pulse) = (Arc::new(Mutex::new(schedule.load())), Arc::default());
        let seen = Seen { load: Arc::clone(&load), pulse: Arc::clone(&pulse) };
        let work = move || match rebuild {
            None => {
                if let Some(why) = run(schedule, &from, &seen, false) {
                    seen.tell(Load { lost: true, ..Load::default() });
                    seen.pulse.rest();
                    while refuse_for(LONGEST_WAIT, &why, &from) {}
                }
            }
            Some(rebuild) => run_lasting(schedule, policy, rebuild, &from, &seen),
        };
        let thread = std::thread::Builder::new().name("kiln engine".into()).spawn(work);
        // Without the thread every request ends with `Error::Stopped`.
        let thread = thread.inspect_err(|error| log::error!("cannot start the engine's thread: {error}")).ok();
        Scheduler { to, thread, model, device, gpu_bytes, context, load, pulse }
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Where it runs.
    pub fn describe(&self) -> &str {
        &self.device
    }

    /// Bytes of weights on GPUs, as it was started.
    pub fn gpu_bytes(&self) -> u64 {
        self.gpu_bytes
    }

    /// Most tokens of one sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether its thread and its device are there to serve requests.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && !self.load().lost
    }

    /// Why it cannot serve requests now, if it cannot.
    pub fn why_not(&self) -> &'static str {
        match self.load().rebuilding {
            true => "The engine failed or lost its device; it is being built again",
            false => "The engine has stopped",
        }
    }

    /// What it is doing.
    pub fn load(&self) -> Load {
        *self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For how long its thread has not got on with the work that it has; none where it has none, or is being built again.
    pub fn silent(&self) -> Option<Duration> {
        self.pulse.silent()
    }

    /// Hands a request in. Its events go to `sink` on the engine's thread, which must not block; `false` from it cancels.
    pub fn submit(&self, request: Request, sink: impl FnMut(Event) -> bool + Send + 'static) -> Cancel {
        let cancelled = Arc::new(AtomicBool::new(false));
        let job = Job::new(request, Box::new(sink), Arc::clone(&cancelled));
        if let Err(refused) = self.to.send(Message::Job(Box::new(job)))
            && let Message::Job(mut job) = refused.0
        {
            (job.sink)(Event::Failed(Error::Stopped));
        }
        Cancel(cancelled)
    }

    /// Hands a request in and gives its events as they come.
    pub fn generate(&self, request: Request) -> Events {
        let (to, from) = channel();
        let over = request.choices.max(1);
        let cancel = self.submit(request, move |event| to.send(event).is_ok());
        Events { from, cancel, over }
    }

    /// Hands in texts whose vectors are wanted. They go to `sink` on the engine's thread, which must not block.
    pub fn submit_embed(
        &self,
        request: EmbedRequest,
        sink: impl FnOnce(Result<Vec<Vec<f32>>, Error>) + Send + 'static,
    ) -> Cancel {
        let cancelled = Arc::new(AtomicBool::new(false));
        let job = EmbedJob::new(request, Box::new(sink), Arc::clone(&cancelled));
        if let Err(refused) = self.to.send(Message::Embed(Box::new(job)))
            && let Message::Embed(job) = refused.0
        {
            (job.sink)(Err(Error::Stopped));
        }
        Cancel(cancelled)
    }

    /// The vectors of texts, in their order; where nothing is pooled those of all tokens of a text, one after the other; where
    /// texts are ranked their scores.
    pub fn embed(&self, request: EmbedRequest) -> Result<Vec<Vec<f32>>, Error> {
        let (to, from) = channel();
        self.submit_embed(request, move |result| {
            // Whoever asked may have gone.
            let _ = to.send(result);
        });
        from.recv().map_err(|_| Error::Stopped)?
    }

    /// Runs something on the engine between two steps, and waits for it: for tools that need the engine itself.
    pub fn with_engine<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Engine) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let (to, from) = channel();
        let call = Box::new(move |engine: &mut Engine| {
            // Whoever asked may have gone.
            let _ = to.send(work(engine));
        });
        self.to.send(Message::Call(call)).map_err(|_| Error::Stopped)?;
        from.recv().map_err(|_| Error::Stopped)
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // The thread may be gone already.
        let _ = self.to.send(Message::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What others see of the engine's thread.
struct Seen {
    load: Arc<Mutex<Load>>,
    pulse: Arc<Pulse>,
}

impl Seen {
    fn tell(&self, load: Load) {
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = load;
    }
}

/// The engine's thread, where an engine that was lost is built again.
fn run_lasting(mut schedule: Schedule, policy: Policy, mut rebuild: Rebuild, from: &Receiver<Message>, seen: &Seen) {
    while let Some(why) = run(schedule, from, seen, true) {
        seen.tell(Load { lost: true, rebuilding: true, ..Load::default() });
        // How long weights take to load again, nobody knows.
        seen.pulse.rest();
        log::warn!("{}; the engine is built again", why.lines().next().unwrap_or_default());
        let (mut tries, mut wait) = (0, FIRST_WAIT);
        let engine = loop {
            // Memory that a failed engine left in disorder may be met again here.
            let built = catch_unwind(AssertUnwindSafe(|| rebuild(tries)));
            match built.unwrap_or_else(|_| Err(Error::Run { why: "building it panicked".to_owned() })) {
                Ok(engine) => break engine,
                Err(error) => log::warn!("the engine cannot be built again yet: {error}"),
            }
            if !refuse_for(wait, &why, from) {
                return;
            }
            (tries, wait) = (tries + 1, (2 * wait).min(LONGEST_WAIT));
        };
        log::info!("the engine runs again on {}", engine.describe());
        schedule = Schedule::new(engine, policy);
        seen.tell(schedule.load());
    }
}

/// Refuses whatever comes in this time. `false`: it was said to end.
fn refuse_for(time: Duration, why: &str, from: &Receiver<Message>) -> bool {
    let end = Instant::now() + time;
    loop {
        match from.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Message::Job(mut job)) => {
                (job.sink)(Event::Failed(Error::Lost { why: why.to_owned() }));
            }
            Ok(Message::Embed(job)) => (job.sink)(Err(Error::Lost { why: why.to_owned() })),
            // Whoever asked learns that there is no engine.
            Ok(Message::Call(_)) => {}
            Ok(Message::Quit) | Err(RecvTimeoutError::Disconnected) => return false,
            Err(RecvTimeoutError::Timeout) => return true,
        }
    }
}

/// The next message, however long it takes. An engine that nobody asks for some seconds rests.
fn wait(schedule: &mut Schedule, from: &Receiver<Message>, pulse: &Pulse) -> Option<Message> {
    pulse.rest();
    let message = match from.recv_timeout(RESTLESS) {
        Err(RecvTimeoutError::Timeout) => {
            pulse.beat();
            schedule.engine().rest();
            pulse.rest();
            from.recv().ok()
        }
        message => message.ok(),
    };
    pulse.beat();
    message
}

/// The engine's thread. It ends where it was told to, or with a reason: by a panic, or, if wanted, once a device was lost and everybody knows.
fn run(mut schedule: Schedule, from: &Receiver<Message>, seen: &Seen, until_lost: bool) -> Option<String> {
    let ended = catch_unwind(AssertUnwindSafe(|| run_until(&mut schedule, from, seen, until_lost)));
    ended.unwrap_or_else(|_| {
        let why = "the engine panicked, which is a mistake in Kiln; standard error says where\nhint: send the request again; report what standard error says";
        log::error!("the engine panicked and is given up");
        seen.tell(Load { lost: true, rebuilding: until_lost, ..Load::default() });
        // Giving up what is half changed may panic as well.
        let given_up = catch_unwind(AssertUnwindSafe(move || schedule.give_up(why)));
        if given_up.is_err() {
            log::error!("giving the engine up panicked, too: some of its memory may not come back");
        }
        Some(why.to_owned())
    })
}

fn run_until(schedule: &mut Schedule, from: &Receiver<Message>, seen: &Seen, until_lost: bool) -> Option<String> {
    schedule.engine().watch(&seen.pulse);
    loop {
        seen.pulse.beat();
        // While there is work, only what has come already is taken in.
        let mut message = if schedule.is_idle() { wait(schedule, from, &seen.pulse) } else { from.try_recv().ok() };
        while let Some(next) = message {
            match next {
                Message::Job(job) => schedule.add(*job),
                Message::Embed(job) => schedule.embed(*job),
                Message::Call(call) => call(schedule.engine()),
                Message::Quit => {
                    schedule.fail_all(|| Error::Stopped);
                    return None;
                }
            }
            message = from.try_recv().ok();
        }
        schedule.step();
        schedule.tell_cache_events();
        let load = schedule.load();
        // Whoever asks from now on learns that the engine will be there again.
        seen.tell(Load { rebuilding: until_lost && load.lost, ..load });
        if until_lost && let Some(why) = schedule.lost() {
            return Some(why.to_owned());
        }
    }
}
