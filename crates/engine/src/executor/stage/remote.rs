//! The leader's side of a stage: an executor that has others do the work. Writes and runs are sent and not waited for; what a run makes
//! for others comes back with its end, so that a step costs one way there and one back.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use kiln_gguf::Gguf;
use kiln_gpu::StepTime;
use kiln_kernels::tensor::Tensor;

use super::messages::{About, FromStage, PIECE, PartKey, Seat, SlotRange, ToStage, returned};
use crate::Error;
use crate::executor::{Executor, FORGOTTEN, Memory, PlanId, Progress, Range, Ticket, keep};
use crate::lower::Target;
use crate::plan::{Fixed, Plan, SlotKind};
use crate::run::Pulse;

/// Carries messages to a stage and back. An error means that the stage is lost.
pub trait Link: Send {
    /// Where the stage is, for people.
    fn place(&self) -> String;

    /// Sends a message behind all before it, and does not wait.
    fn send(&mut self, message: ToStage) -> Result<(), Error>;

    /// The next message. One that does not come within a time counts as lost.
    fn receive(&mut self) -> Result<FromStage, Error>;
}

/// A stage as a device of a model.
pub struct RemoteExecutor {
    link: Box<dyn Link>,
    about: About,
    fingerprint: [u8; 32],
    seat: Option<Seat>,
    plans: Vec<Option<Sent>>,
    /// The plans that were sent to run and have not ended.
    running: VecDeque<PlanId>,
    pulse: Arc<Pulse>,
    /// Why nothing can be asked any more.
    lost: Option<String>,
}

/// A plan that the stage has made ready.
struct Sent {
    steps: usize,
    /// Bytes of what comes back with the end of a run, by slot, in order.
    returned: Vec<(u32, usize)>,
    /// What has come back with the last one.
    held: HashMap<u32, Vec<u8>>,
    /// Why its last run failed.
    failed: Option<Error>,
}

impl RemoteExecutor {
    /// The executor of a stage that said this of itself; it must have the model with this fingerprint.
    pub fn new(link: Box<dyn Link>, about: About, fingerprint: [u8; 32]) -> RemoteExecutor {
        let (plans, running) = (Vec::new(), VecDeque::new());
        RemoteExecutor { link, about, fingerprint, seat: None, plans, running, pulse: Arc::default(), lost: None }
    }

    /// Whatever came of the link: an error ends everything.
    fn seen<T>(&mut self, result: Result<T, Error>) -> Result<T, Error> {
        result.map_err(|why| {
            let place = self.link.place();
            let why = format!("the stage {place} was lost: {why}\nhint: it is asked again until it is back");
            self.lost = Some(why.clone());
            Error::Lost { why }
        })
    }

    fn tell(&mut self, message: ToStage) -> Result<(), Error> {
        if let Some(why) = &self.lost {
            return Err(Error::Lost { why: why.clone() });
        }
        let sent = self.link.send(message);
        self.seen(sent)
    }

    /// The next answer; signs of life are none.
    fn answer(&mut self) -> Result<FromStage, Error> {
        if let Some(why) = &self.lost {
            return Err(Error::Lost { why: why.clone() });
        }
        loop {
            let next = self.link.receive();
            match self.seen(next)? {
                FromStage::Alive => self.pulse.beat(),
                answer => return Ok(answer),
            }
        }
    }

    /// An answer that makes no sense.
    fn astray<T>(&mut self, what: &str) -> Result<T, Error> {
        let why = format!("it sent {what}, which was not asked for");
        self.seen(Err(Error::Run { why }))
    }

    /// What the stage says of something that failed.
    fn failed(&self, why: &str) -> Error {
        Error::Run { why: format!("{}: {why}", self.link.place()) }
    }

    /// Waits for the end of what was asked for; why it failed, if it did.
    fn done(&mut self) -> Result<Result<(), Error>, Error> {
        match self.answer()? {
            FromStage::Done => Ok(Ok(())),
            FromStage::Failed(why) => Ok(Err(self.failed(&why))),
            FromStage::Wrong(wrong) => Ok(Err(wrong.into())),
            _ => self.astray("bytes"),
        }
    }

    /// Exactly as many bytes as there is room for.
    fn bytes(&mut self, to: &mut [u8]) -> Result<Result<(), Error>, Error> {
        for piece in to.chunks_mut(PIECE) {
            match self.answer()? {
                FromStage::Bytes(bytes) if bytes.len() == piece.len() => piece.copy_from_slice(&bytes),
                FromStage::Failed(why) => return Ok(Err(self.failed(&why))),
                FromStage::Bytes(bytes) => return self.astray(&format!("{} bytes for {}", bytes.len(), piece.len())),
                _ => return self.astray("no bytes"),
            }
        }
        Ok(Ok(()))
    }

    /// Waits for the oldest run on its way, and takes what it made.
    fn finish_one(&mut self) -> Result<(), Error> {
        let Some(plan) = self.running.pop_front() else { return Ok(()) };
        let mut failed = self.done()?.err();
        let made = self.plans[plan.0].as_ref().map(|sent| sent.returned.clone()).unwrap_or_default();
        let mut held = HashMap::new();
        for (slot, bytes) in made {
            let mut found = vec![0; bytes];
            if failed.is_none() {
                failed = self.bytes(&mut found)?.err();
                held.insert(slot, found);
            }
        }
        if let Some(sent) = &mut self.plans[plan.0] {
            (sent.held, sent.failed) = (held, failed);
        }
        Ok(())
    }

    fn finish_all(&mut self) -> Result<(), Error> {
        while !self.running.is_empty() {
            self.finish_one()?;
        }
        Ok(())
    }

    /// What a run ended with, told once.
    fn end_of(&mut self, plan: PlanId) -> Result<(), Error> {
        match self.plans[plan.0].as_mut().and_then(|sent| sent.failed.take()) {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }
}

impl Executor for RemoteExecutor {
    fn describe(&self) -> String {
        format!("{} on {}", self.about.name, self.link.place())
    }

    fn seat(&mut self, seat: &Seat) {
        self.seat = Some(seat.clone());
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn load(&mut self, fixed: &Fixed, _gguf: &Gguf, progress: Progress<'_>) -> Result<(), Error> {
        let seat = self.seat.clone().ok_or_else(|| Error::Run {
            why: "a stage has its place among the devices of a model, and this one was given none".into(),
        })?;
        let total: u64 = fixed.here().map(|slot| slot.bytes as u64).sum();
        progress(0, total);
        self.tell(ToStage::Open { seat: Box::new(seat), fingerprint: self.fingerprint })?;
        self.done()??;
        progress(total, total);
        Ok(())
    }

    fn reserve(&mut self, _bytes: usize) -> Result<(), Error> {
        // The stage knows by itself how much its plans take.
        Ok(())
    }

    fn prepare(&mut self, _plan: Plan) -> Result<PlanId, Error> {
        Err(Error::Run { why: "a stage makes its plans by itself, and was not told what this one is for".into() })
    }

    fn prepare_keyed(&mut self, plan: Plan, key: &PartKey) -> Result<PlanId, Error> {
        self.finish_all()?;
        let returned = returned(&plan).into_iter().map(|at| (at as u32, plan.slots[at].bytes)).collect();
        let sent = Sent { steps: plan.len(), returned, held: HashMap::new(), failed: None };
        let id = keep(&mut self.plans, sent);
        let asked = self.tell(ToStage::Prepare { plan: id.0, key: Box::new(*key) });
        match asked.and_then(|()| self.done()) {
            Ok(Ok(())) => Ok(id),
            failed => {
                self.plans[id.0] = None;
                failed??;
                Ok(id)
            }
        }
    }

    fn write(&mut self, plan: PlanId, tensor: &Tensor, bytes: &[u8]) -> Result<(), Error> {
        let slot = tensor.slot.0;
        self.plans[plan.0].as_mut().expect(FORGOTTEN).held.remove(&slot);
        for (number, piece) in bytes.chunks(PIECE).enumerate() {
            let piece_at = SlotRange { plan: plan.0, slot: slot as usize, offset: tensor.offset + number * PIECE };
            self.tell(ToStage::Write(piece_at, piece.to_vec()))?;
        }
        Ok(())
    }

    fn run(&mut self, plan: PlanId) -> Result<(), Error> {
        let ticket = self.submit(plan)?;
        self.wait(ticket)
    }

    fn submit(&mut self, plan: PlanId) -> Result<Ticket, Error> {
        self.tell(ToStage::Run { plan: plan.0 })?;
        self.running.push_back(plan);
        Ok(Ticket { plan, submission: None })
    }

    fn wait(&mut self, ticket: Ticket) -> Result<(), Error> {
        if let Some(last) = self.running.iter().rposition(|plan| *plan == ticket.plan) {
            for _ in 0..=last {
                self.finish_one()?;
            }
        }
        self.end_of(ticket.plan)
    }

    fn read(&mut self, plan: PlanId, tensor: &Tensor, bytes: &mut [u8]) -> Result<(), Error> {
        self.finish_all()?;
        let slot = tensor.slot.0;
        let held = self.plans[plan.0].as_ref().expect(FORGOTTEN).held.get(&slot);
        if let Some(held) = held.and_then(|held| held.get(tensor.offset..tensor.offset + bytes.len())) {
            bytes.copy_from_slice(held);
            return Ok(());
        }
        let piece = SlotRange { plan: plan.0, slot: slot as usize, offset: tensor.offset };
        self.tell(ToStage::Read(piece, bytes.len()))?;
        self.bytes(bytes)?
    }

    fn forget(&mut self, plan: PlanId) {
        // A stage that is lost has forgotten everything.
        let told = self.finish_all().and_then(|()| self.tell(ToStage::Forget { plan: plan.0 }));
        if let Err(why) = told {
            log::debug!("{why}");
        }
        self.plans[plan.0] = None;
    }

    fn rest(&mut self) {
        if let Err(why) = self.finish_all().and_then(|()| self.tell(ToStage::Rest)) {
            log::debug!("{why}");
        }
    }

    fn watch(&mut self, pulse: &Arc<Pulse>) {
        self.pulse = Arc::clone(pulse);
    }

    fn gather(&mut self, from: &[Range], bytes: &mut [u8]) -> Result<(), Error> {
        self.finish_all()?;
        self.tell(ToStage::Gather(from.to_vec()))?;
        self.bytes(bytes)?
    }

    fn scatter(&mut self, to: &[Range], bytes: &[u8]) -> Result<(), Error> {
        let mut rest = bytes;
        for range in to {
            let (own, others) = rest.split_at(range.bytes);
            for (number, piece) in own.chunks(PIECE).enumerate() {
                let offset = range.offset + number * PIECE;
                self.tell(ToStage::Scatter(Range { offset, bytes: piece.len(), ..*range }, piece.to_vec()))?;
            }
            rest = others;
        }
        Ok(())
    }

    fn copy(&mut self, pairs: &[(Range, Range)]) -> Result<(), Error> {
        self.tell(ToStage::Copy(pairs.to_vec()))
    }

    fn zero(&mut self, ranges: &[Range]) -> Result<(), Error> {
        self.tell(ToStage::Zero(ranges.to_vec()))
    }

    fn run_step(&mut self, _plan: PlanId, _step: usize) -> Result<(), Error> {
        Err(Error::Run { why: "a stage runs its part of a model as a whole, not single steps".into() })
    }

    fn profile(&mut self, plan: PlanId) -> Result<Vec<StepTime>, Error> {
        let start = std::time::Instant::now();
        self.run(plan)?;
        let steps = self.plans[plan.0].as_ref().expect(FORGOTTEN).steps;
        let label = format!("{steps} steps on {}", self.link.place());
        Ok(vec![StepTime { label, time: start.elapsed(), bytes: 0.0 }])
    }

    fn batch(&self) -> usize {
        self.about.batch
    }

    fn target(&self) -> Target {
        // Only what is the same for all devices is asked of it: the stage lowers its parts for what it has.
        let batch_invariant = self.seat.as_ref().is_some_and(|seat| seat.batch_invariant);
        Target { batch_invariant, ..Target::cpu() }
    }

    fn memory(&self) -> Option<Memory> {
        let [free, total] = self.about.memory?;
        Some(Memory { free, total, place: "on its host" })
    }

    fn takes_any_shape(&self) -> bool {
        self.about.any_shape
    }

    fn choices(&self, plan: PlanId) -> Vec<String> {
        let sent = self.plans[plan.0].as_ref().expect(FORGOTTEN);
        vec![format!("on {}", self.link.place()); sent.steps]
    }
}

/// Which kinds of slots a leader may write.
pub(super) fn is_written(kind: &SlotKind) -> bool {
    matches!(kind, SlotKind::Input | SlotKind::Control | SlotKind::Log | SlotKind::Recv)
}

/// Which kinds of slots a leader may read.
pub(super) fn is_read(kind: &SlotKind) -> bool {
    matches!(kind, SlotKind::Output | SlotKind::Control | SlotKind::Log | SlotKind::Send | SlotKind::Input)
}
