//! Draws at the end of a plan: the settings of each text, and steps that the host makes whose tokens are drawn on the device, so
//! that no logits come back.

use kiln_gguf::TensorType;
use kiln_kernels::Call;
use kiln_kernels::sample::{self, Row, WORDS};
use kiln_kernels::tensor::Tensor;

use super::decode::MOST_BIASES;
use super::engine::{Engine, Entered, Entry, Wanted};
use super::writer::Draw;
use crate::Error;
use crate::executor::{Executor, PlanId};
use crate::lower::place_added;
use crate::plan::{Plan, SlotKind, Step};

/// What a plan ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum End {
    /// Logits for the host.
    Logits,
    /// Vectors for the host.
    Vectors,
    /// What caches keep of a text that another is written for.
    Source,
    /// A token for each wanted row. With `cuts` rows may ask for top-k and the like.
    Tokens { cuts: bool },
    /// The same, and the inputs of the next step.
    NextStep { cuts: bool },
    /// Logits of the model's draft head for the host.
    Draft,
    /// A token for each row, by the draft head.
    DraftTokens { cuts: bool },
}

/// The inputs of a draw that say how each row is drawn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    settings: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
}

impl Settings {
    /// The inputs for so many rows.
    pub(crate) fn add(plan: &mut Plan, rows: usize) -> Settings {
        let mut input = |name: &str, ty, n| plan.add(name, SlotKind::Input, ty, [n, rows, 1, 1]);
        Settings {
            settings: input("sample.settings", TensorType::I32, WORDS),
            bias_ids: input("sample.bias.ids", TensorType::I32, MOST_BIASES),
            bias_values: input("sample.bias.values", TensorType::F32, MOST_BIASES),
        }
    }

    /// The draw of every row of logits, for texts at these positions.
    pub(crate) fn draw(&self, plan: &mut Plan, positions: Tensor, token: Tensor, cuts: bool) -> Step {
        let logits = plan.ports.logits;
        let [vocab, rows, ..] = logits.shape;
        plan.slots[logits.slot.0 as usize].kind = SlotKind::Scratch;
        let words = [sample::scratch_words(vocab), rows, 1, 1];
        let scratch = plan.add("sample.scratch", SlotKind::Scratch, TensorType::I32, words);
        let bias = Some(sample::Bias { ids: self.bias_ids, values: self.bias_values });
        let draw = sample::Call {
            logits,
            settings: self.settings,
            positions,
            recent: None,
            bias,
            mask: None,
            token,
            logprobs: None,
            scratch,
            cuts,
        };
        Step { label: "sample".into(), call: Call::from(draw) }
    }

    /// Says how rows are drawn, each by its number; the likeliest token is taken in all others.
    pub(crate) fn write<'a>(
        &self,
        executor: &mut dyn Executor,
        plan: PlanId,
        draws: impl Iterator<Item = (usize, &'a Row, &'a [(u32, f32)])>,
    ) -> Result<(), Error> {
        let rows = self.settings.shape[1];
        let mut settings = vec![0i32; WORDS * rows];
        let mut ids = vec![-1i32; MOST_BIASES * rows];
        let mut values = vec![0f32; MOST_BIASES * rows];
        for (at, row, bias) in draws {
            let row = Row { biases: u32::try_from(bias.len()).unwrap_or(0), ..*row };
            settings[at * WORDS..(at + 1) * WORDS].copy_from_slice(&row.encode());
            for (k, (id, value)) in bias.iter().take(MOST_BIASES).enumerate() {
                ids[at * MOST_BIASES + k] = i32::try_from(*id).unwrap_or(-1);
                values[at * MOST_BIASES + k] = *value;
            }
        }
        executor.write(plan, &self.settings, bytemuck::cast_slice(&settings))?;
        executor.write(plan, &self.bias_ids, bytemuck::cast_slice(&ids))?;
        executor.write(plan, &self.bias_values, bytemuck::cast_slice(&values))
    }
}

/// The tensors at the end of a plan that gives tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens {
    pub(super) settings: Settings,
    pub(super) positions: Tensor,
    pub(super) token: Tensor,
}

/// Lets a plan end with tokens instead of logits.
pub(crate) fn add_tokens(plan: &mut Plan, cuts: bool) -> Result<Tokens, Error> {
    let rows = plan.ports.logits.shape[1];
    let ints = |plan: &mut Plan, name: &str, kind| plan.add(name, kind, TensorType::I32, [rows, 1, 1, 1]);
    let tokens = Tokens {
        settings: Settings::add(plan, rows),
        positions: ints(plan, "sample.positions", SlotKind::Input),
        token: ints(plan, "sampled", SlotKind::Output),
    };
    let step = tokens.settings.draw(plan, tokens.positions, tokens.token, cuts);
    plan.steps.push(step);
    place_added(plan);
    plan.check()?;
    Ok(tokens)
}

impl Engine {
    /// Whether [`Engine::feed_drawing`] gives the bits that [`Engine::feed`] gives.
    pub(crate) fn draws_beside_prompts(&self) -> bool {
        !self.batch_invariant
    }

    /// Feeds tokens of several sequences at once, as [`Engine::feed`] does, and gives the token that the device draws for each entry
    /// that has a draw; `None` where it has none, or the logits were no numbers.
    pub(crate) fn feed_drawing(
        &mut self,
        entries: &[Entry<'_>],
        draws: &[Option<Draw>],
    ) -> Result<Vec<Option<u32>>, Error> {
        debug_assert!(entries.iter().all(|e| e.wanted != Wanted::All), "one token is drawn of each sequence");
        let cuts = draws.iter().flatten().any(|draw| draw.row.cuts());
        let result = self.again_if_wrong(entries, |engine| {
            let entered = engine.enter(entries, End::Tokens { cuts })?;
            Ok(engine.run_drawing(entries, draws, &entered))
        })?;
        self.leave(entries, result.is_ok());
        result
    }

    fn run_drawing(
        &mut self,
        entries: &[Entry<'_>],
        draws: &[Option<Draw>],
        entered: &Entered,
    ) -> Result<Vec<Option<u32>>, Error> {
        let (plan, tokens) = (entered.plan, entered.tokens.expect("a plan that draws should have been asked for"));
        let outputs = self.outputs(entries, entered);
        let mut positions = vec![-1i32; tokens.positions.len()];
        for (entry, output) in entries.iter().zip(&outputs) {
            let last = self.length(entry.sequence) + entry.tokens.len() - 1;
            positions[*output] = super::batch::position(last);
        }
        let rows = draws.iter().zip(&outputs);
        let rows = rows.filter_map(|(draw, at)| draw.as_ref().map(|draw| (*at, &draw.row, &draw.bias[..])));
        self.executor.write(plan, &tokens.positions, bytemuck::cast_slice(&positions))?;
        tokens.settings.write(&mut *self.executor, plan, rows)?;
        self.executor.run(plan)?;
        let mut drawn = vec![-1i32; tokens.token.len()];
        self.executor.read(plan, &tokens.token, bytemuck::cast_slice_mut(&mut drawn))?;
        let of = |(draw, at): (&Option<Draw>, &usize)| draw.as_ref().and_then(|_| u32::try_from(drawn[*at]).ok());
        Ok(draws.iter().zip(&outputs).map(of).collect())
    }
}
