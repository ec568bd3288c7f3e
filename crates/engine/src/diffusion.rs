//! Texts that are filled in: a prompt with an answer of masks behind it goes through the model again and again, and each time some of
//! the masks become tokens, until none is left. Which ones is up to an [`Algorithm`], how many to a [`Schedule`].

use std::ops::Range;

use crate::Error;
use crate::model::Model;
use crate::run::Session;
use crate::sampler::{Drawn, Sampler, Sampling};

/// Which masks become tokens first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Each by chance alone, as often as the schedule has it.
    Origin,
    /// Those with the least entropy.
    Entropy,
    /// Those whose best token is furthest ahead of the next.
    Margin,
    /// Any, as many as the schedule has.
    Random,
    /// Those whose token is likeliest.
    Confidence,
}

/// Every algorithm by its name.
const ALGORITHMS: [(&str, Algorithm); 5] = [
    ("origin", Algorithm::Origin),
    ("entropy", Algorithm::Entropy),
    ("margin", Algorithm::Margin),
    ("random", Algorithm::Random),
    ("confidence", Algorithm::Confidence),
];

impl Algorithm {
    /// The names, for messages.
    pub fn names() -> String {
        ALGORITHMS.map(|(name, _)| name).join(", ")
    }

    /// The algorithm of this name, or of this number as other tools count them.
    pub fn from_name(name: &str) -> Option<Algorithm> {
        let number = name.parse::<usize>().ok().and_then(|number| ALGORITHMS.get(number));
        number.or_else(|| ALGORITHMS.iter().find(|(known, _)| *known == name)).map(|(_, algorithm)| *algorithm)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        ALGORITHMS.iter().find(|(_, algorithm)| *algorithm == self).map_or("", |(name, _)| name)
    }
}

/// How many masks become tokens in each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Schedule {
    /// Of all masks, as time runs evenly from 1 to this small number.
    Timesteps(f32),
    /// As many in each step, block by block of so many tokens from left to right.
    Blocks(usize),
}

/// How an answer is filled in.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Tokens of the answer.
    pub length: usize,
    /// Times that the text goes through the model at most.
    pub steps: usize,
    /// Which masks become tokens first.
    pub algorithm: Algorithm,
    /// How many; none for what models like this one were made with.
    pub schedule: Option<Schedule>,
    /// Above 0, masks are drawn by how sure their tokens are, divided by this; else the surest are taken.
    pub place_temperature: f32,
    /// How tokens are drawn.
    pub sampling: Sampling,
}

/// Steps where nobody says how many.
pub const USUAL_STEPS: usize = 128;
/// Tokens of an answer where nobody says how many.
pub const USUAL_LENGTH: usize = 128;
/// Most steps.
const MOST_STEPS: usize = 1 << 16;

impl Settings {
    /// The usual ones, with draws like these.
    pub fn new(sampling: Sampling) -> Settings {
        Settings {
            length: USUAL_LENGTH,
            steps: USUAL_STEPS,
            algorithm: Algorithm::Confidence,
            schedule: None,
            place_temperature: 0.0,
            sampling,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let wrong = |what: &'static str, value: String, want: String| Err(Error::Diffusion { what, value, want });
        if !(1..=MOST_STEPS).contains(&self.steps) {
            return wrong("number of steps", self.steps.to_string(), format!("1 to {MOST_STEPS}"));
        }
        if self.length == 0 {
            return wrong("number of tokens", "0".to_owned(), "1 or more".to_owned());
        }
        match self.schedule {
            Some(Schedule::Timesteps(eps)) if !(eps > 0.0 && eps < 1.0) => {
                return wrong("epsilon", eps.to_string(), "above 0 and below 1".to_owned());
            }
            Some(Schedule::Blocks(0)) => return wrong("block length", "0".to_owned(), "1 or more".to_owned()),
            _ => {}
        }
        if !(self.place_temperature.is_finite() && self.place_temperature >= 0.0) {
            return wrong("temperature of places", self.place_temperature.to_string(), "0 or more".to_owned());
        }
        Ok(())
    }
}

/// What a file says of how its model fills in texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Filler {
    /// The token that stands where none is yet.
    mask: u32,
    /// Whether the logits of a place stand at the place before it.
    shifts: bool,
}

impl Filler {
    fn of(model: &Model) -> Result<Filler, Error> {
        if !model.facts.fills {
            return Err(Error::FillsNothing { architecture: model.config.architecture.name });
        }
        let (metadata, key) = (model.gguf.metadata(), "tokenizer.ggml.mask_token_id");
        let mask = metadata.get_usize(key)?;
        let vocab = model.config.vocab;
        let fits = u32::try_from(mask).ok().filter(|_| mask < vocab);
        let wrong = || {
            let (value, want) = (mask.to_string(), format!("a token of the {vocab} there are"));
            Error::Hyperparameter { key: key.to_owned(), value, want }
        };
        Ok(Filler { mask: fits.ok_or_else(wrong)?, shifts: metadata.get_bool_or("diffusion.shift_logits", true)? })
    }

    /// The row whose logits are those of a place.
    fn row(&self, place: usize) -> usize {
        if self.shifts { place.saturating_sub(1) } else { place }
    }
}

/// A step that was made.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Its number, from 1 on.
    pub number: usize,
    /// Steps in all.
    pub steps: usize,
    /// The answer so far; `None` where a mask stands.
    pub answer: &'a [Option<u32>],
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filled {
    /// Its tokens, with what stands behind the first that ends a text; those of masks that are left if it was broken off.
    pub tokens: Vec<u32>,
    /// Times that the text went through the model.
    pub runs: usize,
    /// The seed in use.
    pub seed: u64,
    /// Whether all masks became tokens.
    pub complete: bool,
}

/// One step of a plan of steps: the places that it looks at, and how many steps these still have, itself included.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Turn {
    places: Range<usize>,
    step: usize,
    of: usize,
}

/// The steps of an answer of so many tokens.
fn turns(schedule: Schedule, steps: usize, length: usize) -> Vec<Turn> {
    let block = match schedule {
        Schedule::Timesteps(_) => length,
        Schedule::Blocks(block) => block.min(length),
    };
    let of = (steps / length.div_ceil(block)).max(1);
    let blocks = (0..length).step_by(block).map(|first| first..length.min(first + block));
    blocks.flat_map(|places| (0..of).map(move |step| Turn { places: places.clone(), step, of })).collect()
}

/// How many of so many masks become tokens in a step.
fn count(schedule: Schedule, turn: &Turn, masks: usize) -> usize {
    let (step, of) = (turn.step as f64, turn.of as f64);
    match schedule {
        _ if turn.step + 1 == turn.of => masks,
        Schedule::Timesteps(eps) => {
            let time = |step: f64| 1.0 - step / of * (1.0 - f64::from(eps));
            (masks as f64 * (1.0 - time(step + 1.0) / time(step))) as usize
        }
        // What does not divide goes to the first steps.
        Schedule::Blocks(_) => masks.div_ceil(turn.of - turn.step),
    }
}

/// Fills in an answer to a prompt. After each step `tell` hears of it; where it says `false`, the answer is left as it is.
pub fn fill(
    session: &mut Session,
    prompt: &[u32],
    settings: &Settings,
    tell: &mut dyn FnMut(Step<'_>) -> bool,
) -> Result<Filled, Error> {
    settings.check()?;
    let model = std::sync::Arc::clone(session.model());
    let filler = Filler::of(&model)?;
    let sampler = Sampler::new(settings.sampling.clone(), model.config.vocab, None)?;
    let usual = if filler.shifts { Schedule::Timesteps(1e-3) } else { Schedule::Blocks(32) };
    let schedule = settings.schedule.unwrap_or(usual);
    let turns = turns(schedule, settings.steps, settings.length);
    let mut text = prompt.to_vec();
    text.resize(prompt.len() + settings.length, filler.mask);
    if prompt.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    let mut answer: Vec<Option<u32>> = vec![None; settings.length];
    let mut filled = Filled { tokens: Vec::new(), runs: 0, seed: sampler.seed(), complete: true };
    for (round, turn) in turns.iter().enumerate() {
        let masks: Vec<usize> = turn.places.clone().filter(|place| answer[*place].is_none()).collect();
        let count = count(schedule, turn, masks.len());
        // A text of which nothing becomes a token would be the same text again.
        if count > 0 {
            let rows: Vec<usize> = masks.iter().map(|place| filler.row(prompt.len() + place)).collect();
            let logits = session.rows(&text, &rows)?;
            filled.runs += 1;
            let draw = |(row, place): (&[f32], &usize)| sampler.draw_at(row, filler.mask, [round, *place]);
            let drawn: Vec<Drawn> =
                logits.chunks_exact(model.config.vocab).zip(&masks).map(draw).collect::<Result<_, _>>()?;
            for at in chosen(&sampler, settings, (&masks, &drawn), count, round) {
                answer[masks[at]] = Some(drawn[at].token);
                text[prompt.len() + masks[at]] = drawn[at].token;
            }
        }
        if !tell(Step { number: round + 1, steps: turns.len(), answer: &answer }) {
            break;
        }
    }
    filled.complete = answer.iter().all(Option::is_some);
    filled.tokens = text.split_off(prompt.len());
    Ok(filled)
}

/// Which of the masks become tokens, by number.
fn chosen(
    sampler: &Sampler,
    settings: &Settings,
    (masks, drawn): (&[usize], &[Drawn]),
    count: usize,
    round: usize,
) -> Vec<usize> {
    let chance = |at: usize| sampler.chance_at([round, masks[at]]);
    if settings.algorithm == Algorithm::Origin {
        let share = count as f64 / masks.len() as f64;
        return (0..masks.len()).filter(|at| chance(*at) < share).collect();
    }
    let sureness = |at: usize| match settings.algorithm {
        Algorithm::Entropy => -drawn[at].entropy,
        Algorithm::Margin => drawn[at].margin,
        Algorithm::Confidence => drawn[at].probability,
        Algorithm::Random | Algorithm::Origin => chance(at),
    };
    let by = f64::from(settings.place_temperature);
    let score = |at: usize| match by > 0.0 {
        true => sureness(at) / by + sampler.noise_at([round, masks[at]]),
        false => sureness(at),
    };
    let mut order: Vec<(f64, usize)> = (0..masks.len()).map(|at| (score(at), at)).collect();
    // The first of several that are as sure.
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    order.into_iter().take(count).map(|(_, at)| at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many tokens each step makes of an answer of so many masks.
    fn counts(schedule: Schedule, steps: usize, length: usize) -> Vec<usize> {
        let mut open = vec![true; length];
        turns(schedule, steps, length)
            .iter()
            .map(|turn| {
                let masks: Vec<usize> = turn.places.clone().filter(|place| open[*place]).collect();
                let count = count(schedule, turn, masks.len());
                masks[..count].iter().for_each(|place| open[*place] = false);
                count
            })
            .collect()
    }

    #[test]
    fn blocks_share_the_steps_and_the_first_steps_have_what_is_left_over() {
        assert_eq!(counts(Schedule::Blocks(4), 6, 8), [2, 1, 1, 2, 1, 1]);
        assert_eq!(counts(Schedule::Blocks(4), 4, 10), [4, 4, 2], "a step for each block at least");
        assert_eq!(counts(Schedule::Blocks(100), 2, 3), [2, 1]);
        assert_eq!(counts(Schedule::Blocks(1), 3, 3), [1, 1, 1]);
    }

    #[test]
    fn time_runs_evenly_and_all_masks_are_gone_in_the_end() {
        // t = 1, 0.75025, 0.5005, 0.25075, 0.001: of 16 masks a quarter, of 12 a third of them and so on.
        assert_eq!(counts(Schedule::Timesteps(1e-3), 4, 16), [3, 4, 4, 5]);
        assert_eq!(counts(Schedule::Timesteps(1e-3), 1, 5), [5]);
        let many = counts(Schedule::Timesteps(0.5), 64, 10);
        assert_eq!((many.iter().sum::<usize>(), many.len()), (10, 64));
    }
}
