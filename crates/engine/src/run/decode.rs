//! Writing without waiting: a decode step ends with a draw and makes the inputs of the next one on the device, so that steps are
//! submitted ahead and the host reads tokens behind.

use std::collections::VecDeque;

use kiln_gguf::TensorType;
use kiln_kernels::advance::Places;
use kiln_kernels::sample::Row;
use kiln_kernels::tensor::Tensor;
use kiln_kernels::{Call, advance};

use super::cache::AddedPage;
use super::draw::{End, Settings};
use super::engine::{Engine, SequenceId};
use super::stall::MOST_REPEATS;
use crate::Error;
use crate::executor::{PlanId, Ticket};
use crate::lower::place_added;
use crate::plan::{Plan, Ports, SlotKind, Step};

/// Steps whose tokens the device keeps: more than are ever on their way.
const HISTORY: usize = 4;
/// Steps on their way at once: while one runs the next one waits, so the device is never idle.
pub(crate) const AHEAD: usize = 2;
/// Tokens of each text that a draw on the device may favour or forbid.
pub(crate) const MOST_BIASES: usize = 16;

/// The tensors at the end of a plan whose steps draw tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tail {
    settings: Settings,
    history: Tensor,
    step: Tensor,
}

/// A text that goes on by itself.
#[derive(Clone, Debug)]
pub(crate) struct Going {
    pub(crate) sequence: SequenceId,
    /// The token that goes into the model first.
    pub(crate) token: u32,
    /// How tokens are drawn.
    pub(crate) row: Row,
    /// Numbers added to single logits, at most [`MOST_BIASES`].
    pub(crate) bias: Vec<(u32, f32)>,
}

/// Texts that go on by themselves, and the steps on their way.
pub(crate) struct Decoding {
    plan: PlanId,
    ports: Ports,
    tail: Tail,
    /// Those with pages in common side by side.
    going: Vec<Going>,
    /// The number that each was begun with.
    begun: Vec<usize>,
    on_their_way: VecDeque<Ticket>,
    submitted: usize,
    collected: usize,
}

fn add(plan: &mut Plan, name: &str, kind: SlotKind, ty: TensorType, [n, m]: [usize; 2]) -> Tensor {
    plan.add(name, kind, ty, [n, m, 1, 1])
}

/// Lets a plan of texts that go on end with a draw instead of logits. With `cuts` rows may ask for top-k and the like.
/// `page` is the number of tokens of a page.
pub(crate) fn add_tail(plan: &mut Plan, cuts: bool, page: usize) -> Result<Tail, Error> {
    let ports = plan.ports;
    let rows = ports.logits.shape[1];
    let slot = |t: &Tensor| t.slot.0 as usize;
    let written = [ports.tokens, ports.positions, ports.lengths, ports.rows];
    let more = ports.windows.map(|windows| windows.rows).into_iter().chain(ports.coordinates);
    for written in written.into_iter().chain(more) {
        plan.slots[slot(&written)].kind = SlotKind::Control;
    }
    let ints = TensorType::I32;
    let tail = Tail {
        settings: Settings::add(plan, rows),
        history: add(plan, "history", SlotKind::Log, ints, [HISTORY, rows]),
        step: add(plan, "step", SlotKind::Control, ints, [1, 1]),
    };
    let token = add(plan, "sampled", SlotKind::Scratch, ints, [rows, 1]);
    let draw = tail.settings.draw(plan, ports.positions, token, cuts);
    let advance = advance::Call {
        sampled: token,
        places: Places { table: ports.table, rows: ports.rows },
        others: ports.windows,
        tokens: ports.tokens,
        positions: ports.positions,
        lengths: ports.lengths,
        coordinates: ports.coordinates,
        recent: None,
        history: tail.history,
        step: tail.step,
        page,
    };
    plan.steps.extend([draw, Step { label: "advance".into(), call: Call::from(advance) }]);
    place_added(plan);
    plan.check()?;
    Ok(tail)
}

impl Engine {
    /// Lets texts go on by themselves, until [`Engine::end_decoding`]. None of their sequences may be used meanwhile.
    pub(crate) fn begin_decoding(&mut self, going: Vec<Going>) -> Result<(), Error> {
        debug_assert!(self.decoding.is_none(), "texts that went on should have been ended");
        let begun = self.side_by_side(&going.iter().map(|text| text.sequence).collect::<Vec<_>>());
        let going: Vec<Going> = begun.iter().map(|at| going[*at].clone()).collect();
        let (plan, ports, tail) = self.enter_decoding(&going, 0)?;
        let on_their_way = VecDeque::new();
        self.decoding = Some(Decoding { plan, ports, tail, going, begun, on_their_way, submitted: 0, collected: 0 });
        Ok(())
    }

    /// Sends one more step on its way. `false`: there are no pages for it.
    pub(crate) fn submit_decoding(&mut self) -> Result<bool, Error> {
        let Some(mut decoding) = self.decoding.take() else { return Ok(false) };
        let result = self.submit_step(&mut decoding);
        self.decoding = Some(decoding);
        result
    }

    fn submit_step(&mut self, decoding: &mut Decoding) -> Result<bool, Error> {
        // The step writes one token, and makes the row of the next one.
        let ahead = decoding.submitted - decoding.collected + 2;
        let sequences = decoding.going.iter().map(|g| g.sequence);
        if self.room_for(sequences.clone().map(|id| self.pages_ahead(id, ahead)).sum()).is_err() {
            return Ok(false);
        }
        let ports = decoding.ports;
        let tables = [Some(ports.table), ports.windows.map(|windows| windows.table)];
        for (i, id) in sequences.enumerate() {
            for AddedPage { kind, at, page } in self.take_pages_ahead(id, ahead)? {
                let Some(table) = tables[kind as usize] else { continue };
                // Steps on their way do not read this entry: their tokens lie in pages before it.
                let entry = table.reshape([table.len(), 1, 1, 1]);
                let entry = entry.narrow(0, i * table.shape[0] + at, 1);
                let page = i32::try_from(page).expect("pages fit 31 bits");
                self.executor.write(decoding.plan, &entry, &page.to_le_bytes())?;
            }
        }
        self.count_run(false);
        decoding.on_their_way.push_back(self.executor.submit(decoding.plan)?);
        decoding.submitted += 1;
        Ok(true)
    }

    /// Steps on their way.
    pub(crate) fn decoding_ahead(&self) -> usize {
        self.decoding.as_ref().map_or(0, |d| d.on_their_way.len())
    }

    /// Waits for the oldest step on its way: the token of each text, in the order in which they began; `None` where the logits
    /// were no numbers. Without a step on its way there are none.
    pub(crate) fn collect_decoding(&mut self) -> Result<Vec<Option<u32>>, Error> {
        let Some(mut decoding) = self.decoding.take() else { return Ok(Vec::new()) };
        let result = self.collect_step(&mut decoding);
        self.decoding = Some(decoding);
        result
    }

    fn collect_step(&mut self, decoding: &mut Decoding) -> Result<Vec<Option<u32>>, Error> {
        let Some(ticket) = decoding.on_their_way.pop_front() else { return Ok(Vec::new()) };
        match self.executor.wait(ticket) {
            Err(wrong @ (Error::Stalled | Error::OutOfRange)) => self.repeat(decoding, &wrong)?,
            waited => waited?,
        }
        let mut history = vec![0i32; decoding.tail.history.len()];
        self.executor.read(decoding.plan, &decoding.tail.history, bytemuck::cast_slice_mut(&mut history))?;
        let at = decoding.collected % HISTORY;
        decoding.collected += 1;
        let mut tokens = vec![None; decoding.going.len()];
        for (i, text) in decoding.going.iter_mut().enumerate() {
            self.append_ahead(text.sequence, text.token);
            let token = u32::try_from(history[i * HISTORY + at]).ok();
            text.token = token.unwrap_or(text.token);
            tokens[decoding.begun[i]] = token;
        }
        Ok(tokens)
    }

    /// Runs the oldest step again, whose results are wrong. Those behind it are forgotten: they went on from these.
    fn repeat(&mut self, decoding: &mut Decoding, wrong: &Error) -> Result<(), Error> {
        for ticket in decoding.on_their_way.drain(..) {
            match self.executor.wait(ticket) {
                Ok(()) | Err(Error::Stalled | Error::OutOfRange) => {}
                Err(error) => return Err(error),
            }
        }
        let mut result = self.repeat_once(decoding, wrong);
        // Another device of a pipeline may be the next to say so.
        for _ in 1..MOST_REPEATS {
            match result {
                Err(wrong @ (Error::Stalled | Error::OutOfRange)) => result = self.repeat_once(decoding, &wrong),
                result => return result,
            }
        }
        result
    }

    fn repeat_once(&mut self, decoding: &mut Decoding, wrong: &Error) -> Result<(), Error> {
        decoding.submitted = decoding.collected;
        self.recover(wrong, decoding.going.iter().map(|g| g.sequence))?;
        // Sequences have grown since they began, so this may be another plan.
        let (plan, ports, tail) = self.enter_decoding(&decoding.going, decoding.collected)?;
        (decoding.plan, decoding.ports, decoding.tail) = (plan, ports, tail);
        self.submit_step(decoding)?;
        let again = decoding.on_their_way.pop_front();
        again.map_or(Ok(()), |ticket| self.executor.wait(ticket))
    }

    /// Ends what [`Engine::begin_decoding`] began; steps whose tokens nobody collected are waited for, and forgotten.
    pub(crate) fn end_decoding(&mut self, worked: bool) {
        let Some(decoding) = self.decoding.take() else { return };
        let mut worked = worked;
        for ticket in decoding.on_their_way {
            worked &= self.executor.wait(ticket).is_ok();
        }
        if !worked {
            let sequences: Vec<SequenceId> = decoding.going.iter().map(|g| g.sequence).collect();
            self.break_all(&sequences);
        }
    }

    /// Writes so many tokens of several texts, each from its sequence and its next token on: what benches and tools need.
    pub fn go_on(&mut self, texts: &[(SequenceId, u32)], tokens: usize, row: Row) -> Result<Vec<Vec<u32>>, Error> {
        let going =
            |(sequence, token): &(SequenceId, u32)| Going { sequence: *sequence, token: *token, row, bias: Vec::new() };
        self.begin_decoding(texts.iter().map(going).collect())?;
        let written = self.steps(texts, tokens);
        self.end_decoding(written.is_ok());
        written
    }

    fn steps(&mut self, texts: &[(SequenceId, u32)], tokens: usize) -> Result<Vec<Vec<u32>>, Error> {
        let mut written = vec![Vec::with_capacity(tokens); texts.len()];
        for step in 0..tokens {
            while self.decoding_ahead() < AHEAD.min(tokens - step) {
                if !self.submit_decoding()? {
                    let (free, all) = self.pages();
                    return Err(Error::NoRoom { what: "pages of the cache", needed: texts.len(), free, all });
                }
            }
            for (text, token) in written.iter_mut().zip(self.collect_decoding()?) {
                text.push(token.ok_or(Error::NotANumber { token: step })?);
            }
        }
        Ok(written)
    }

    /// Binds sequences to a plan that draws tokens and makes the inputs of the next step; so many steps of them were collected before.
    fn enter_decoding(&mut self, going: &[Going], collected: usize) -> Result<(PlanId, Ports, Tail), Error> {
        let cuts = going.iter().any(|g| g.row.cuts());
        let entries: Vec<super::Entry<'_>> = going
            .iter()
            .map(|g| super::Entry {
                sequence: g.sequence,
                tokens: std::slice::from_ref(&g.token),
                wanted: super::Wanted::Last,
            })
            .collect();
        let entered = self.enter(&entries, End::NextStep { cuts })?;
        let tail = entered.tail.expect("a plan that draws should have been asked for");
        let rows = going.iter().enumerate().map(|(at, text)| (at, &text.row, &text.bias[..]));
        tail.settings.write(&mut *self.executor, entered.plan, rows)?;
        let step = i32::try_from(collected % HISTORY).expect("the history is short");
        self.executor.write(entered.plan, &tail.step, &step.to_le_bytes())?;
        Ok((entered.plan, entered.ports, tail))
    }
}
