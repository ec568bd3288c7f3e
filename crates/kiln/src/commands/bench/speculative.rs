//! `kiln bench MODEL --speculative`: what drafts gain, by task: answers with and without them, in turn.

use std::process::ExitCode;
use std::sync::Arc;

use kiln_engine::model::Model;
use kiln_engine::run::{DRAFT_SOURCES, DraftTally, Event, Policy, Request, Scheduler, StopRule, Usage};
use kiln_engine::sampler::Sampling;
use kiln_engine::text::Message;
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial};
use kiln_llm::Job;
use kiln_llm::chat::ChatSetup;
use serde_json::{Value, json};

use super::model::ModelArguments;
use crate::generate::{Talk, chat_prompt, name};
use crate::output::{print, progress};

/// How often each answer is timed.
const RUNS: usize = 3;

/// A file of code that is to be edited.
const CODE: &str = r#"class Account:
    """Money of one customer, with a record of what came and went."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("an amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("an amount must be positive")
        if amount > self.balance:
            raise ValueError("the balance is too low")
        self.balance -= amount
        self.history.append(("withdraw", amount))
        return self.balance

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)

    def statement(self):
        lines = [f"{kind}: {amount}" for kind, amount in self.history]
        return "\n".join(lines + [f"balance: {self.balance}"])
"#;

/// What is asked for, by the name of the task.
fn tasks() -> [(&'static str, String); 3] {
    let file = format!("```python\n{CODE}```\n\n");
    [
        (
            "edit",
            format!("{file}Rename the method `withdraw` to `take_out`. Answer with the whole file and nothing else."),
        ),
        ("question", format!("{file}What does the method `transfer` do, and which errors can it raise?")),
        ("story", "Tell a short story about a lighthouse keeper who finds a map in a bottle.".to_owned()),
    ]
}

/// The times of one task.
struct Row {
    task: &'static str,
    /// Tokens a second without and with drafts, by run.
    rates: Vec<[f64; 2]>,
    drafts: DraftTally,
    same: bool,
}

impl Row {
    /// The middle of what the runs gained.
    fn gain(&self) -> f64 {
        let mut gains: Vec<f64> = self.rates.iter().map(|[plain, drafted]| drafted / plain).collect();
        gains.sort_by(f64::total_cmp);
        gains[gains.len() / 2]
    }

    fn mean(&self, which: usize) -> f64 {
        self.rates.iter().map(|rates| rates[which]).sum::<f64>() / self.rates.len() as f64
    }

    /// Tokens that a step with a draft gave.
    fn by_round(&self) -> f64 {
        1.0 + self.drafts.accepted as f64 / self.drafts.rounds.max(1) as f64
    }

    /// Who made drafts, with how many of them.
    fn sources(&self) -> impl Iterator<Item = (&'static str, u64)> {
        DRAFT_SOURCES.into_iter().zip(self.drafts.rounds_of).filter(|(_, rounds)| *rounds > 0)
    }

    fn line(&self) -> String {
        let DraftTally { rounds, drafted, accepted, .. } = self.drafts;
        let sources: Vec<String> = self.sources().map(|(name, rounds)| format!("{name} {rounds}")).collect();
        let sources = if sources.is_empty() { "none".to_owned() } else { sources.join(", ") };
        format!(
            "{:>9} {:>10.1} {:>10.1} {:>8.2}x {rounds:>7} {drafted:>8} {accepted:>9} {:>10.2} {:>5}  {sources}",
            self.task,
            self.mean(0),
            self.mean(1),
            self.gain(),
            self.by_round(),
            if self.same { "yes" } else { "no" }
        )
    }

    fn json(&self) -> Value {
        let DraftTally { rounds, drafted, accepted, accepted_at, .. } = self.drafts;
        json!({
            "task": self.task, "tokens_per_second": self.rates, "gain": self.gain(), "rounds": rounds, "drafted": drafted,
            "accepted": accepted, "tokens_per_round": self.by_round(), "accepted_by_place": accepted_at, "same_text": self.same,
            "rounds_by_source": self.sources().collect::<std::collections::BTreeMap<_, _>>(),
        })
    }
}

/// Runs the command.
pub(super) fn run(arguments: &ModelArguments, model: &Arc<Model>) -> anyhow::Result<ExitCode> {
    let tokens = arguments.one_gen("--speculative")?.max(2);
    let drafting = arguments.draft.open(model)?;
    let prompts = tasks().map(|(task, text)| prompt(model, &text).map(|prompt| (task, prompt)));
    let prompts = prompts.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let longest = prompts.iter().map(|(_, prompt)| prompt.len()).max().unwrap_or(0);
    let mut flags = arguments.flags.clone();
    flags.ctx_size = flags.ctx_size.or(Some((longest + tokens).min(model.usual_context())));
    let engine = drafting.engine(&flags.opening()?, model, Job { sequences: 1, ..Job::default() })?;
    let device = engine.describe();
    let scheduler = Scheduler::start(engine, drafting.policy(Policy::default()));
    let runs = arguments.repetitions.unwrap_or(RUNS);
    let bar = progress((prompts.len() * (runs + 1)) as u64, "bench");
    let mut rows = Vec::new();
    for (task, prompt) in &prompts {
        let mut row = Row { task, rates: Vec::new(), drafts: DraftTally::default(), same: true };
        // The first run compiles, and learns how long steps take.
        for number in 0..=runs {
            let (plain, plain_usage) = answer(&scheduler, prompt, tokens, 0)?;
            let before = scheduler.load().tally.drafts;
            let (drafted, usage) = answer(&scheduler, prompt, tokens, usize::MAX)?;
            row.same &= plain == drafted;
            if number > 0 {
                row.rates.push([plain_usage, usage].map(|usage| rate(&usage)));
                row.drafts = row.drafts + (scheduler.load().tally.drafts - before);
            }
            bar.inc(1);
        }
        rows.push(row);
    }
    bar.finish_and_clear();
    if arguments.json {
        let rows: Vec<Value> = rows.iter().map(Row::json).collect();
        let version = env!("CARGO_PKG_VERSION");
        let all = json!({ "model": name(model), "device": device, "version": version, "tasks": rows });
        print(&serde_json::to_string_pretty(&all)?);
        return Ok(ExitCode::SUCCESS);
    }
    print(&format!("{} on {device}", name(model)));
    print(&format!(
        "{:>9} {:>10} {:>10} {:>9} {:>7} {:>8} {:>9} {:>10} {:>5}  {}",
        "task",
        "plain/s",
        "drafted/s",
        "gain",
        "rounds",
        "drafted",
        "accepted",
        "per round",
        "same",
        "rounds by source"
    ));
    rows.iter().for_each(|row| print(&row.line()));
    print(
        "gain: the middle of the runs; per round: tokens that a step with a draft gave; same: whether the text is the same without drafts",
    );
    Ok(ExitCode::SUCCESS)
}

/// The tokens that ask for something.
fn prompt(model: &Model, text: &str) -> anyhow::Result<Vec<u32>> {
    let setup = ChatSetup::new(model, None);
    match setup.template {
        Ok(_) => {
            let message = [Message::new("user", text)];
            Ok(chat_prompt(model, &setup, Talk { messages: &message, ..Talk::default() })?.parts.concat())
        }
        Err(_) => Ok(model.tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::No)?),
    }
}

/// The greedy answer of so many tokens.
fn answer(
    scheduler: &Scheduler,
    prompt: &[u32],
    tokens: usize,
    most_drafted: usize,
) -> anyhow::Result<(Vec<u32>, Usage)> {
    let stop = StopRule { ignore_end: true, ..StopRule::default() };
    let request = Request {
        limit: Some(tokens),
        sampling: Sampling::greedy(),
        stop,
        most_drafted,
        ..Request::new(prompt.to_vec())
    };
    let mut answer = Vec::new();
    for event in scheduler.generate(request) {
        match event {
            Event::Token { token, .. } => answer.push(token),
            Event::End { usage, .. } => return Ok((answer, usage)),
            Event::Failed(error) => return Err(error.into()),
            Event::Started { .. } | Event::Read { .. } => {}
        }
    }
    anyhow::bail!("the engine has stopped")
}

fn rate(usage: &Usage) -> f64 {
    (usage.generated_tokens - 1) as f64 / usage.writing.as_secs_f64().max(1e-9)
}
