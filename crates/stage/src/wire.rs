//! The messages as they travel. A message that is not whole is refused before the engine sees it; that its numbers make sense is for the
//! engine to judge, which knows the model.

use kiln_engine::arch::Room;
use kiln_engine::executor::{About, FromStage, PIECE, PartKey, Range, Seat, SlotRange, ToStage, Wrong};
use kiln_engine::placement::Placement;
use kiln_engine::run::PlanKey;
use kiln_gguf::TensorType;
use prost::{Message, Oneof};

/// Bytes of the longest message: a piece, and what is said about it.
pub const MOST_MESSAGE: usize = PIECE + (64 << 10);

/// What a leader says.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Up {
    #[prost(oneof = "UpKind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11")]
    kind: Option<UpKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum UpKind {
    #[prost(message, tag = "1")]
    Open(OpenWire),
    #[prost(message, tag = "2")]
    Prepare(PrepareWire),
    #[prost(uint64, tag = "3")]
    Forget(u64),
    #[prost(message, tag = "4")]
    Write(PieceWire),
    #[prost(uint64, tag = "5")]
    Run(u64),
    #[prost(message, tag = "6")]
    Read(PieceWire),
    #[prost(message, tag = "7")]
    Gather(RangesWire),
    #[prost(message, tag = "8")]
    Scatter(ScatterWire),
    #[prost(message, tag = "9")]
    Copy(RangesWire),
    #[prost(message, tag = "10")]
    Zero(RangesWire),
    #[prost(bool, tag = "11")]
    Rest(bool),
}

#[derive(Clone, PartialEq, Message)]
struct OpenWire {
    #[prost(bytes = "vec", tag = "1")]
    fingerprint: Vec<u8>,
    /// Context, pages, pages of windows, states, sequences.
    #[prost(uint64, repeated, tag = "2")]
    room: Vec<u64>,
    #[prost(string, tag = "3")]
    k_type: String,
    #[prost(string, tag = "4")]
    v_type: String,
    #[prost(uint32, tag = "5")]
    input: u32,
    #[prost(uint32, tag = "6")]
    output: u32,
    #[prost(uint32, repeated, tag = "7")]
    layers: Vec<u32>,
    #[prost(uint32, repeated, tag = "8")]
    experts: Vec<u32>,
    #[prost(uint32, tag = "9")]
    device: u32,
    #[prost(bool, repeated, tag = "10")]
    keeps: Vec<bool>,
    #[prost(bool, tag = "11")]
    batch_invariant: bool,
}

#[derive(Clone, PartialEq, Message)]
struct PrepareWire {
    #[prost(uint64, tag = "1")]
    plan: u64,
    #[prost(uint64, repeated, tag = "2")]
    key: Vec<u64>,
    #[prost(uint64, tag = "3")]
    part: u64,
    #[prost(bytes = "vec", tag = "4")]
    mark: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct PieceWire {
    #[prost(uint64, tag = "1")]
    plan: u64,
    #[prost(uint64, tag = "2")]
    slot: u64,
    #[prost(uint64, tag = "3")]
    offset: u64,
    /// Of what is read; what is written is as long as it is.
    #[prost(uint64, tag = "4")]
    length: u64,
    #[prost(bytes = "vec", tag = "5")]
    bytes: Vec<u8>,
}

/// Ranges, three numbers each: slot, first byte, bytes. Those of copies come in pairs.
#[derive(Clone, PartialEq, Message)]
struct RangesWire {
    #[prost(uint64, repeated, tag = "1")]
    numbers: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct ScatterWire {
    #[prost(uint64, repeated, tag = "1")]
    range: Vec<u64>,
    #[prost(bytes = "vec", tag = "2")]
    bytes: Vec<u8>,
}

/// What a stage says.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Down {
    #[prost(oneof = "DownKind", tags = "1, 2, 3, 4, 5, 6, 7")]
    kind: Option<DownKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum DownKind {
    #[prost(message, tag = "1")]
    About(AboutWire),
    #[prost(bool, tag = "2")]
    Alive(bool),
    #[prost(bool, tag = "3")]
    Done(bool),
    #[prost(bytes = "vec", tag = "4")]
    Bytes(Vec<u8>),
    #[prost(string, tag = "5")]
    Failed(String),
    #[prost(bool, tag = "6")]
    Stalled(bool),
    #[prost(bool, tag = "7")]
    OutOfRange(bool),
}

#[derive(Clone, PartialEq, Message)]
struct AboutWire {
    #[prost(string, tag = "1")]
    version: String,
    #[prost(string, tag = "2")]
    name: String,
    /// Free and all bytes, where it can tell.
    #[prost(uint64, repeated, tag = "3")]
    memory: Vec<u64>,
    #[prost(uint64, tag = "4")]
    batch: u64,
    #[prost(bool, tag = "5")]
    any_shape: bool,
}

/// A number as this machine counts.
fn index(n: u64) -> Option<usize> {
    usize::try_from(n).ok().filter(|n| *n < 1 << 48)
}

fn ranges(numbers: &[u64]) -> Option<Vec<Range>> {
    let (triples, rest) = numbers.as_chunks::<3>();
    if !rest.is_empty() {
        return None;
    }
    let range = |[slot, offset, bytes]: &[u64; 3]| {
        Some(Range::new(u32::try_from(*slot).ok()?, index(*offset)?, index(*bytes)?))
    };
    triples.iter().map(range).collect()
}

fn numbers<'r>(ranges: impl IntoIterator<Item = &'r Range>) -> Vec<u64> {
    let of = |range: &Range| [u64::from(range.slot.0), range.offset as u64, range.bytes as u64];
    ranges.into_iter().flat_map(of).collect()
}

fn devices(list: &[u32]) -> Vec<usize> {
    list.iter().map(|device| *device as usize).collect()
}

/// Numbers of devices, which are few.
fn few(list: &[usize]) -> Vec<u32> {
    list.iter().map(|n| u32::try_from(*n).unwrap_or(u32::MAX)).collect()
}

impl OpenWire {
    fn of(seat: &Seat, fingerprint: [u8; 32]) -> OpenWire {
        let Room { context, pages, window_pages, states, sequences, k_type, v_type } = seat.room;
        let Placement { input, layers, experts, output, rules: _ } = &seat.placement;
        let [input, output, device] = [*input, *output, seat.device].map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        OpenWire {
            fingerprint: fingerprint.to_vec(),
            room: [context, pages, window_pages, states, sequences].map(|n| n as u64).to_vec(),
            k_type: k_type.name().to_owned(),
            v_type: v_type.name().to_owned(),
            input,
            output,
            layers: few(layers),
            experts: few(experts),
            device,
            keeps: seat.keeps.clone(),
            batch_invariant: seat.batch_invariant,
        }
    }

    fn read(self) -> Option<ToStage> {
        let &[context, pages, window_pages, states, sequences] = &self.room[..] else { return None };
        let [k_type, v_type] = [TensorType::from_name(&self.k_type)?, TensorType::from_name(&self.v_type)?];
        let room = Room {
            context: index(context)?,
            pages: index(pages)?,
            window_pages: index(window_pages)?,
            states: index(states)?,
            sequences: index(sequences)?,
            k_type,
            v_type,
        };
        let placement = Placement {
            input: self.input as usize,
            layers: devices(&self.layers),
            experts: devices(&self.experts),
            output: self.output as usize,
            rules: Vec::new(),
        };
        let (device, batch_invariant) = (self.device as usize, self.batch_invariant);
        let seat = Box::new(Seat { room, placement, device, keeps: self.keeps, batch_invariant });
        Some(ToStage::Open { seat, fingerprint: self.fingerprint.try_into().ok()? })
    }
}

impl PieceWire {
    fn of(piece: SlotRange, length: usize, bytes: Vec<u8>) -> PieceWire {
        let [plan, slot, offset, length] = [piece.plan, piece.slot, piece.offset, length].map(|n| n as u64);
        PieceWire { plan, slot, offset, length, bytes }
    }

    fn piece(&self) -> Option<SlotRange> {
        Some(SlotRange { plan: index(self.plan)?, slot: index(self.slot)?, offset: index(self.offset)? })
    }
}

impl Up {
    pub(crate) fn of(message: ToStage) -> Up {
        let kind = match message {
            ToStage::Open { seat, fingerprint } => UpKind::Open(OpenWire::of(&seat, fingerprint)),
            ToStage::Prepare { plan, key } => {
                let PartKey { plan: key, part, mark } = *key;
                let [plan, part] = [plan, part].map(|n| n as u64);
                UpKind::Prepare(PrepareWire { plan, key: key.numbers().to_vec(), part, mark: mark.to_vec() })
            }
            ToStage::Forget { plan } => UpKind::Forget(plan as u64),
            ToStage::Write(piece, bytes) => UpKind::Write(PieceWire::of(piece, 0, bytes)),
            ToStage::Run { plan } => UpKind::Run(plan as u64),
            ToStage::Read(piece, length) => UpKind::Read(PieceWire::of(piece, length, Vec::new())),
            ToStage::Gather(ranges) => UpKind::Gather(RangesWire { numbers: numbers(&ranges) }),
            ToStage::Scatter(range, bytes) => UpKind::Scatter(ScatterWire { range: numbers([&range]), bytes }),
            ToStage::Copy(pairs) => {
                let both = pairs.iter().flat_map(|(from, to)| [from, to]);
                UpKind::Copy(RangesWire { numbers: numbers(both) })
            }
            ToStage::Zero(ranges) => UpKind::Zero(RangesWire { numbers: numbers(&ranges) }),
            ToStage::Rest => UpKind::Rest(true),
        };
        Up { kind: Some(kind) }
    }

    /// What it says; nothing where it is not whole.
    pub(crate) fn read(self) -> Option<ToStage> {
        Some(match self.kind? {
            UpKind::Open(open) => open.read()?,
            UpKind::Prepare(PrepareWire { plan, key, part, mark }) => {
                let key = PlanKey::from_numbers(&key)?;
                let key = PartKey { plan: key, part: index(part)?, mark: mark.try_into().ok()? };
                ToStage::Prepare { plan: index(plan)?, key: Box::new(key) }
            }
            UpKind::Forget(plan) => ToStage::Forget { plan: index(plan)? },
            UpKind::Write(piece) => ToStage::Write(piece.piece()?, piece.bytes),
            UpKind::Run(plan) => ToStage::Run { plan: index(plan)? },
            UpKind::Read(piece) => ToStage::Read(piece.piece()?, index(piece.length)?),
            UpKind::Gather(list) => ToStage::Gather(ranges(&list.numbers)?),
            UpKind::Scatter(ScatterWire { range, bytes }) => match ranges(&range)?[..] {
                [range] => ToStage::Scatter(range, bytes),
                _ => return None,
            },
            UpKind::Copy(list) => {
                let all = ranges(&list.numbers)?;
                let (pairs, rest) = all.as_chunks::<2>();
                if !rest.is_empty() {
                    return None;
                }
                ToStage::Copy(pairs.iter().map(|[from, to]| (*from, *to)).collect())
            }
            UpKind::Zero(list) => ToStage::Zero(ranges(&list.numbers)?),
            UpKind::Rest(_) => ToStage::Rest,
        })
    }
}

/// A message of a leader as a stage reads it: for tests of what it believes.
pub fn read_up(bytes: &[u8]) -> Option<ToStage> {
    Up::decode(bytes).ok()?.read()
}

/// What a stage sends: first what it is, then answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    About(About),
    Answer(FromStage),
}

impl Down {
    pub(crate) fn of(said: Said) -> Down {
        let kind = match said {
            Said::About(About { version, name, memory, batch, any_shape }) => {
                let memory = memory.map_or_else(Vec::new, Vec::from);
                DownKind::About(AboutWire { version, name, memory, batch: batch as u64, any_shape })
            }
            Said::Answer(FromStage::Alive) => DownKind::Alive(true),
            Said::Answer(FromStage::Done) => DownKind::Done(true),
            Said::Answer(FromStage::Bytes(bytes)) => DownKind::Bytes(bytes),
            Said::Answer(FromStage::Failed(why)) => DownKind::Failed(why),
            Said::Answer(FromStage::Wrong(Wrong::Stalled)) => DownKind::Stalled(true),
            Said::Answer(FromStage::Wrong(Wrong::OutOfRange)) => DownKind::OutOfRange(true),
        };
        Down { kind: Some(kind) }
    }

    /// What it says; nothing where it is not whole.
    pub(crate) fn read(self) -> Option<Said> {
        Some(match self.kind? {
            DownKind::About(AboutWire { version, name, memory, batch, any_shape }) => {
                let memory = match memory[..] {
                    [] => None,
                    [free, total] => Some([free, total]),
                    _ => return None,
                };
                let batch = index(batch).filter(|batch| *batch > 0)?;
                Said::About(About { version, name, memory, batch, any_shape })
            }
            DownKind::Alive(_) => Said::Answer(FromStage::Alive),
            DownKind::Done(_) => Said::Answer(FromStage::Done),
            DownKind::Bytes(bytes) => Said::Answer(FromStage::Bytes(bytes)),
            DownKind::Failed(why) => Said::Answer(FromStage::Failed(why)),
            DownKind::Stalled(_) => Said::Answer(FromStage::Wrong(Wrong::Stalled)),
            DownKind::OutOfRange(_) => Said::Answer(FromStage::Wrong(Wrong::OutOfRange)),
        })
    }
}
