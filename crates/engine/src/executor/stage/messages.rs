//! What a leader and a stage say to each other. Nothing here is an address or a graph, and no size is believed: each side knows from its own
//! copy of the model how long everything is.

use sha2::{Digest as _, Sha256};

use crate::Error;
use crate::arch::Room;
use crate::executor::Range;
use crate::placement::Placement;
use crate::plan::{Plan, SlotKind};
use crate::run::PlanKey;

/// Most bytes that one message carries of anything. What is longer comes in pieces.
pub const PIECE: usize = 8 << 20;
/// Devices of a model: holders of a slot are bits of a word.
const MOST_DEVICES: usize = 64;
const MOST_LAYERS: usize = 1 << 14;
const MOST_TOKENS: usize = 1 << 24;
const MOST_SEQUENCES: usize = 1 << 14;

/// What all plans of a stage stand on: the same numbers give the same plans on every host.
#[derive(Clone, Debug)]
pub struct Seat {
    /// Room for caches and states.
    pub room: Room,
    /// Which device has which layers.
    pub placement: Placement,
    /// The number of the stage among the devices.
    pub device: usize,
    /// Which devices have memory that stays as it is between parts.
    pub keeps: Vec<bool>,
    /// Whether every row goes the way that it would go alone.
    pub batch_invariant: bool,
}

impl Seat {
    /// That of an engine on one device; a pipeline executor gives each of its own another.
    pub(crate) fn of_one(room: Room, batch_invariant: bool) -> Seat {
        Seat { room, placement: Placement::whole(0, 0), device: 0, keeps: vec![false], batch_invariant }
    }

    /// The numbers are within what any model has. What they mean for this one is found when its plans are made.
    pub fn is_sound(&self) -> bool {
        let Seat { room, placement: Placement { input, layers, experts, output, rules }, device, keeps, .. } = self;
        let known = |at: &usize| *at < keeps.len();
        keeps.len() <= MOST_DEVICES
            && known(device)
            && [*input, *output].iter().chain(layers).chain(experts).all(known)
            && rules.is_empty()
            && layers.len() <= MOST_LAYERS
            && experts.len() == layers.len()
            && (1..=MOST_TOKENS).contains(&room.context)
            && room.pages <= MOST_TOKENS
            && room.window_pages <= room.pages
            && room.states <= MOST_SEQUENCES
            && (1..=MOST_SEQUENCES).contains(&room.sequences)
    }

    /// Whether the same weights and caches belong to both.
    pub(super) fn holds_as(&self, other: &Seat) -> bool {
        let words = |seat: &Seat| {
            let Placement { input, layers, experts, output, rules: _ } = seat.placement.clone();
            (seat.room, seat.device, seat.keeps.clone(), seat.batch_invariant, [input, output], layers, experts)
        };
        words(self) == words(other)
    }
}

/// A part of a plan: what the plan is made for, the number of the part, and a hash of what it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartKey {
    /// What the plan is made for.
    pub plan: PlanKey,
    /// The part, in the order in which they run.
    pub part: usize,
    /// What both sides must have made (`mark` of its plan).
    pub mark: [u8; 32],
}

impl PartKey {
    /// The whole of a plan.
    pub(crate) fn whole(plan: PlanKey) -> PartKey {
        PartKey { plan, part: 0, mark: [0; 32] }
    }
}

/// A hash of a part before it is lowered: equal where both sides have made the same.
pub(crate) fn mark(plan: &Plan) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(plan.print());
    for slot in &plan.slots {
        let kind = match &slot.kind {
            SlotKind::Constant(bytes) => format!("constant of {}", bytes.len()),
            kind => format!("{kind:?}"),
        };
        hash.update(format!("{} {kind} {} {} {:?}\n", slot.name, slot.bytes, slot.ty, slot.shape));
    }
    hash.finalize().into()
}

/// The slots of a part that come back with the end of each run, in their order: what others take, and what the host reads, where that is
/// little.
pub(crate) fn returned(plan: &Plan) -> Vec<usize> {
    const MOST: usize = 4 << 20;
    let wanted = |(_, slot): &(usize, &crate::plan::SlotInfo)| match slot.kind {
        SlotKind::Send => true,
        SlotKind::Output | SlotKind::Log | SlotKind::Control => slot.bytes <= MOST,
        _ => false,
    };
    plan.slots.iter().enumerate().skip(plan.n_fixed).filter(wanted).map(|(at, _)| at).collect()
}

/// A piece of a slot of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRange {
    /// The plan, as the leader numbers them.
    pub plan: usize,
    /// The slot.
    pub slot: usize,
    /// Its first byte.
    pub offset: usize,
}

/// What a leader says.
#[derive(Clone, Debug)]
pub enum ToStage {
    /// Takes its part of the model; answered by [`FromStage::Done`], with signs of life before.
    Open {
        /// What it stands on.
        seat: Box<Seat>,
        /// Which model it must be.
        fingerprint: [u8; 32],
    },
    /// Makes a part ready under this number; answered by [`FromStage::Done`].
    Prepare {
        /// The number.
        plan: usize,
        /// What it is.
        key: Box<PartKey>,
    },
    /// Gives a plan up.
    Forget {
        /// Its number.
        plan: usize,
    },
    /// Writes to a slot of a plan.
    Write(SlotRange, Vec<u8>),
    /// Runs a plan; answered by [`FromStage::Done`] and the returned slots in pieces.
    Run {
        /// Its number.
        plan: usize,
    },
    /// Reads from a slot of a plan; answered by its bytes in pieces.
    Read(SlotRange, usize),
    /// Reads pieces of shared slots; answered by their bytes, one after the other, in pieces.
    Gather(Vec<Range>),
    /// Writes a piece of a shared slot.
    Scatter(Range, Vec<u8>),
    /// Copies pieces of shared slots.
    Copy(Vec<(Range, Range)>),
    /// Fills pieces of shared slots with zeros.
    Zero(Vec<Range>),
    /// Gives back what only running takes.
    Rest,
}

/// What a stage says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromStage {
    /// It gets on with what it was told.
    Alive,
    /// What was asked for is done.
    Done,
    /// Bytes that were asked for.
    Bytes(Vec<u8>),
    /// What was asked for failed; everything else goes on.
    Failed(String),
    /// A run ended with results that are wrong, and the next one will go a slower way.
    Wrong(Wrong),
}

/// Why results are wrong. The engine of the leader runs such a step again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// [`Error::Stalled`].
    Stalled,
    /// [`Error::OutOfRange`]: the plan is to be made again.
    OutOfRange,
}

impl FromStage {
    /// What a run is answered by that failed.
    pub(super) fn of(why: &Error) -> FromStage {
        match why {
            Error::Stalled => FromStage::Wrong(Wrong::Stalled),
            Error::OutOfRange => FromStage::Wrong(Wrong::OutOfRange),
            other => FromStage::Failed(other.to_string()),
        }
    }
}

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Error {
        match wrong {
            Wrong::Stalled => Error::Stalled,
            Wrong::OutOfRange => Error::OutOfRange,
        }
    }
}

/// What a stage says of itself first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// The program's version: both must make the same plans.
    pub version: String,
    /// What it computes on, for people.
    pub name: String,
    /// Bytes that nobody uses there, and bytes in all; none where it cannot tell.
    pub memory: Option<[u64; 2]>,
    /// Tokens of a prompt that should go through at once.
    pub batch: usize,
    /// Whether no batch need be padded.
    pub any_shape: bool,
}
