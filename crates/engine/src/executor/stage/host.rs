//! The stage's side: does what a leader says with its own copy of the model. What a message names is looked up among what this host has
//! made itself, and every length is held against its own: a message that does not fit ends the connection, and changes nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_gguf::TensorType;
use kiln_kernels::tensor::{Slot, Tensor};

use super::messages::{About, FromStage, PIECE, PartKey, Seat, SlotRange, ToStage, mark, returned};
use super::remote::{is_read, is_written};
use crate::Error;
use crate::arch::{BatchShape, Graph, Room};
use crate::executor::pipeline::repeats;
use crate::executor::{Executor, PlanId, Range};
use crate::lower::cut::{Part, cut, holders};
use crate::lower::{Target, lower};
use crate::model::Model;
use crate::plan::{Fixed, Plan, SlotInfo, SlotKind};
use crate::run::{Pulse, arena_of_part, made_for};
use crate::state::of_model;

/// Makes the executor of a stage; `true` where every row must go the way that it would go alone.
pub type Make = Box<dyn FnMut(bool) -> Result<Box<dyn Executor>, Error> + Send>;

/// Plans that a leader may have ready at once; engines keep fewer.
const MOST_PLANS: usize = 1024;
/// How often a stage that loads says that it gets on.
const SIGN_OF_LIFE: Duration = Duration::from_millis(500);

/// A model on this host, and what a leader has made of it.
pub struct StageHost {
    model: Arc<Model>,
    make: Make,
    about: About,
    opened: Option<Opened>,
    pulse: Arc<Pulse>,
}

/// A part of the model, loaded.
struct Opened {
    seat: Seat,
    graph: Graph,
    executor: Box<dyn Executor>,
    /// The shared slots; those of other devices have no bytes.
    shared: Fixed,
    plans: Vec<Option<Ready>>,
}

/// A part of a plan that is ready.
struct Ready {
    id: PlanId,
    slots: Vec<(SlotKind, usize)>,
    returned: Vec<usize>,
    /// Whether it may run again from the same inputs.
    repeats: bool,
}

fn refuse<T>(why: impl Into<String>) -> Result<T, Error> {
    Err(Error::Run { why: why.into() })
}

/// A slot, or a piece of one, as bytes.
fn bytes_of(slot: usize, offset: usize, bytes: usize) -> Tensor {
    let slot = Slot(u32::try_from(slot).expect("slots are numbered with 32 bits"));
    Tensor::dense(slot, TensorType::I8, [bytes, 1, 1, 1]).at(offset)
}

/// Whether a piece lies in something of this length.
fn lies_in(offset: usize, bytes: usize, length: usize) -> bool {
    bytes > 0 && offset.checked_add(bytes).is_some_and(|end| end <= length)
}

/// Whether these are caches and states: what lasts from run to run.
fn lasts(kind: &SlotKind) -> bool {
    matches!(kind, SlotKind::Cache | SlotKind::WindowCache | SlotKind::State | SlotKind::Carried)
}

/// Tells bytes in pieces.
fn tell_bytes(bytes: &[u8], answer: &mut dyn FnMut(FromStage)) {
    bytes.chunks(PIECE).for_each(|piece| answer(FromStage::Bytes(piece.to_vec())));
}

impl StageHost {
    /// A stage of this model, which computes on what `make` gives.
    pub fn new(model: Arc<Model>, mut make: Make) -> Result<StageHost, Error> {
        let executor = make(false)?;
        let about = About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            name: executor.describe(),
            memory: executor.memory().map(|memory| [memory.free, memory.total]),
            batch: executor.batch(),
            any_shape: executor.takes_any_shape(),
        };
        Ok(StageHost { model, make, about, opened: None, pulse: Arc::default() })
    }

    /// What it says of itself. The memory that its own part of the model takes counts as free: the next leader has it back.
    pub fn about(&self) -> About {
        self.about.clone()
    }

    /// Beats while work gets on.
    pub fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }

    /// The layers it has, for people; nothing before a leader has said so.
    pub fn describe(&self) -> Option<String> {
        self.opened.as_ref().map(|opened| opened.seat.placement.describe(opened.seat.device))
    }

    /// Does what a message says. An error ends the connection: the leader speaks of something that is not there.
    pub fn handle(&mut self, message: ToStage, answer: &mut dyn FnMut(FromStage)) -> Result<(), Error> {
        let worked = catch_unwind(AssertUnwindSafe(|| match message {
            ToStage::Open { seat, fingerprint } => self.open(*seat, fingerprint, answer),
            message => match &mut self.opened {
                Some(opened) => opened.handle(message, answer),
                None => refuse("a leader says first what it wants of the model"),
            },
        }));
        worked.unwrap_or_else(|_| {
            // What was being done is in no known state.
            self.opened = None;
            refuse("the stage met a defect, and begins anew")
        })
    }

    fn open(&mut self, seat: Seat, of: [u8; 32], answer: &mut dyn FnMut(FromStage)) -> Result<(), Error> {
        if !seat.is_sound() {
            return refuse("the leader's numbers are beyond what any model has");
        }
        if of != of_model(&self.model) {
            let why = "the leader has another model file, or other adapters\nhint: give both hosts copies of one file";
            answer(FromStage::Failed(why.into()));
            return Ok(());
        }
        match self.opened_for(seat, answer) {
            Ok(()) => answer(FromStage::Done),
            Err(why) => {
                self.opened = None;
                answer(FromStage::Failed(why.to_string()));
            }
        }
        Ok(())
    }

    /// Takes its part of the model. A leader that comes back finds the weights loaded, and everything else empty.
    fn opened_for(&mut self, seat: Seat, answer: &mut dyn FnMut(FromStage)) -> Result<(), Error> {
        if let Some(opened) = self.opened.as_mut().filter(|opened| opened.seat.holds_as(&seat)) {
            return opened.begin_anew();
        }
        // Two parts of a model need not fit beside each other.
        self.opened = None;
        let plain = plain_plans(&self.model)?;
        let holders = holders(&plain, &seat.placement);
        let graph = self.model.graph(&seat.room)?;
        if holders.len() != graph.fixed().slots.len() {
            return refuse("plans of one model do not agree on its tensors");
        }
        let here = |(slot, holders): (&SlotInfo, &u64)| match holders >> seat.device & 1 {
            1 => slot.clone(),
            _ => SlotInfo { kind: SlotKind::Remote, bytes: 0, ..slot.clone() },
        };
        let shared = Fixed { slots: graph.fixed().slots.iter().zip(&holders).map(here).collect() };
        let mut executor = (self.make)(seat.batch_invariant)?;
        if executor.shares().len() != 1 {
            return refuse(
                "a stage computes on one device\nhint: name one with --device; another stage can have the next",
            );
        }
        let arena = arena_of_part(&graph, &*executor, &seat.room, &|plan| part_of(plan, &seat))?;
        let mut told = Instant::now();
        executor.watch(&self.pulse);
        executor.load(&shared, &self.model.gguf, &mut |_, _| {
            if told.elapsed() >= SIGN_OF_LIFE {
                told = Instant::now();
                answer(FromStage::Alive);
            }
        })?;
        executor.reserve(arena)?;
        self.opened = Some(Opened { seat, graph, executor, shared, plans: Vec::new() });
        Ok(())
    }
}

/// Plain plans of a model, of one token and of several, as a leader cuts them.
fn plain_plans(model: &Model) -> Result<Vec<Plan>, Error> {
    let graph = model.graph(&Room::one(64))?;
    [1, 9].map(|tokens| graph.plan(BatchShape::new(tokens, 1))).into_iter().collect()
}

/// The target of whole plans, before they are cut.
fn whole_target(seat: &Seat) -> Target {
    Target { batch_invariant: seat.batch_invariant, in_parts: true, ..Target::cpu() }
}

/// The parts of a plan that this stage has, by their numbers.
fn part_of(plan: Plan, seat: &Seat) -> Result<Vec<(usize, Plan)>, Error> {
    let plan = lower(plan, &whole_target(seat))?;
    let parts = cut(&plan, &seat.placement, None, &seat.keeps)?.into_iter().enumerate();
    let here = |(number, Part { device, plan }): (usize, Part)| (device == seat.device).then_some((number, plan));
    Ok(parts.filter_map(here).collect())
}

impl Opened {
    /// Forgets everything but the weights.
    fn begin_anew(&mut self) -> Result<(), Error> {
        for ready in std::mem::take(&mut self.plans).into_iter().flatten() {
            self.executor.forget(ready.id);
        }
        let slots = (0..).zip(&self.shared.slots).filter(|(_, slot)| lasts(&slot.kind) && slot.bytes > 0);
        let all: Vec<Range> = slots.map(|(at, slot)| Range::new(at, 0, slot.bytes)).collect();
        if all.is_empty() { Ok(()) } else { self.executor.zero(&all) }
    }

    fn ready(&self, plan: usize) -> Result<&Ready, Error> {
        let found = self.plans.get(plan).and_then(Option::as_ref);
        found.ok_or_else(|| Error::Run { why: format!("there is no plan {plan}") })
    }

    /// A piece of a slot of a plan that may be touched so.
    fn piece(&self, piece: SlotRange, bytes: usize, may: fn(&SlotKind) -> bool) -> Result<(PlanId, Tensor), Error> {
        let SlotRange { plan, slot, offset } = piece;
        let ready = self.ready(plan)?;
        match ready.slots.get(slot) {
            Some((kind, length)) if may(kind) && lies_in(offset, bytes, *length) => {
                Ok((ready.id, bytes_of(slot, offset, bytes)))
            }
            _ => refuse(format!("plan {plan} has no {bytes} bytes at {offset} of slot {slot} for that")),
        }
    }

    /// Whether all of these are pieces of caches and states that this stage has.
    fn check(&self, ranges: &[Range]) -> Result<(), Error> {
        for range in ranges {
            let slot = self.shared.slots.get(range.slot.0 as usize);
            let whole = range.offset % 4 == 0 && range.bytes % 4 == 0;
            let lies = |slot: &SlotInfo| lasts(&slot.kind) && lies_in(range.offset, range.bytes, slot.bytes);
            if !whole || !slot.is_some_and(lies) {
                let Range { slot, offset, bytes } = range;
                return refuse(format!("no cache of this stage has {bytes} bytes at {offset} of slot {}", slot.0));
            }
        }
        Ok(())
    }

    fn handle(&mut self, message: ToStage, answer: &mut dyn FnMut(FromStage)) -> Result<(), Error> {
        match message {
            ToStage::Open { .. } => refuse("the part of the model is there already"),
            ToStage::Prepare { plan, key } => {
                if plan >= MOST_PLANS || self.plans.get(plan).is_some_and(Option::is_some) {
                    return refuse(format!("plan {plan} is ready already, or one too many"));
                }
                match self.prepare(&key) {
                    Ok(ready) => {
                        if self.plans.len() <= plan {
                            self.plans.resize_with(plan + 1, || None);
                        }
                        self.plans[plan] = Some(ready);
                        answer(FromStage::Done);
                    }
                    Err(why) => answer(FromStage::Failed(why.to_string())),
                }
                Ok(())
            }
            ToStage::Forget { plan } => {
                let id = self.ready(plan)?.id;
                self.executor.forget(id);
                self.plans[plan] = None;
                Ok(())
            }
            ToStage::Write(piece, bytes) => {
                let (id, tensor) = self.piece(piece, bytes.len(), is_written)?;
                self.executor.write(id, &tensor, &bytes)
            }
            ToStage::Run { plan } => self.run(plan, answer),
            ToStage::Read(piece, bytes) => {
                let (id, tensor) = self.piece(piece, bytes, is_read)?;
                let mut found = vec![0; bytes];
                self.executor.read(id, &tensor, &mut found)?;
                tell_bytes(&found, answer);
                Ok(())
            }
            ToStage::Gather(ranges) => {
                self.check(&ranges)?;
                let all = ranges.iter().try_fold(0usize, |all, range| all.checked_add(range.bytes));
                let most = self.shared.here().map(|slot| slot.bytes).sum::<usize>();
                let Some(all) = all.filter(|all| (1..=most).contains(all)) else {
                    return refuse("more was asked for than there is");
                };
                let mut found = vec![0; all];
                self.executor.gather(&ranges, &mut found)?;
                tell_bytes(&found, answer);
                Ok(())
            }
            ToStage::Scatter(range, bytes) => {
                self.check(&[range])?;
                if bytes.len() != range.bytes {
                    return refuse(format!("{} bytes came for {}", bytes.len(), range.bytes));
                }
                self.executor.scatter(&[range], &bytes)
            }
            ToStage::Copy(pairs) => {
                let apart = |(from, to): &(Range, Range)| {
                    let disjoint = from.offset + from.bytes <= to.offset || to.offset + to.bytes <= from.offset;
                    from.bytes == to.bytes && (from.slot != to.slot || disjoint)
                };
                pairs.iter().try_for_each(|(from, to)| self.check(&[*from, *to]))?;
                match pairs.iter().all(apart) {
                    true => self.executor.copy(&pairs),
                    false => refuse("pieces that are copied lie apart and are of one length"),
                }
            }
            ToStage::Zero(ranges) => {
                self.check(&ranges)?;
                if ranges.is_empty() { Ok(()) } else { self.executor.zero(&ranges) }
            }
            ToStage::Rest => {
                self.executor.rest();
                Ok(())
            }
        }
    }

    /// Makes the part that a key means, and the same one as the leader.
    fn prepare(&mut self, key: &PartKey) -> Result<Ready, Error> {
        let most = 2 * self.seat.room.context.max(self.executor.batch()) + self.seat.room.sequences;
        let plan = made_for(&self.graph, &whole_target(&self.seat), &key.plan, most)?;
        let found = part_of(plan, &self.seat)?.into_iter().find(|(number, _)| *number == key.part);
        let Some((_, part)) = found else { return refuse("the part that the leader means is not this stage's") };
        if mark(&part) != key.mark {
            return refuse(
                "leader and stage make different plans of this model\nhint: run the same version on all hosts",
            );
        }
        let returned = returned(&part);
        let bounded = part.slots.len();
        let plan = lower(part, &self.executor.target())?;
        let slots = plan.slots[..bounded].iter().map(|slot| (slot.kind.clone(), slot.bytes));
        let slots = slots.enumerate().map(|(at, slot)| if at < plan.n_fixed { (SlotKind::Remote, 0) } else { slot });
        let slots = slots.collect();
        let repeats = repeats(&plan);
        self.executor.reserve(plan.arena)?;
        Ok(Ready { id: self.executor.prepare(plan)?, slots, returned, repeats })
    }

    fn run(&mut self, plan: usize, answer: &mut dyn FnMut(FromStage)) -> Result<(), Error> {
        let Ready { id, repeats, .. } = *self.ready(plan)?;
        let worked = match self.executor.run(id) {
            Err(Error::Stalled) if repeats => self.executor.run(id),
            worked => worked,
        };
        match worked {
            Ok(()) => {}
            // A device that is gone takes the stage's part with it.
            Err(why) if why.is_lost() => return Err(why),
            Err(why) => {
                answer(FromStage::of(&why));
                return Ok(());
            }
        }
        answer(FromStage::Done);
        let ready = self.ready(plan)?;
        let wanted: Vec<Tensor> = ready.returned.iter().map(|at| bytes_of(*at, 0, ready.slots[*at].1)).collect();
        for tensor in wanted.iter().filter(|tensor| tensor.shape[0] > 0) {
            let mut bytes = vec![0; tensor.shape[0]];
            self.executor.read(id, tensor, &mut bytes)?;
            tell_bytes(&bytes, answer);
        }
        Ok(())
    }
}
