//! The loop of a model and its tools: it answers, its calls are made, it reads what they gave, and answers again. Every program of Kiln that
//! makes calls does it here; what differs between them is a [`Host`].

use std::time::Instant;

use crate::limits::{Limits, Wait};
use crate::tool::{Output, Tool};
use crate::toolbox::{Listing, Toolbox};

/// A call that a model wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// What its result refers to.
    pub id: String,
    /// The tool, by the name that the model was told.
    pub name: String,
    /// The arguments, as JSON.
    pub arguments: String,
}

/// What the model said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answered {
    /// Calls of tools that are not somebody else's to make.
    pub calls: Vec<Call>,
    /// Nothing is to be answered any more: a person stopped it, or somebody else has to make a call first.
    pub is_last: bool,
}

/// What becomes of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is made.
    Run,
    /// It is not made, and the model is told why.
    Refuse(String),
    /// Somebody must be asked who is not there now: the loop ends, and the call has no result yet.
    Later,
}

/// How a loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With an answer.
    Answered,
    /// With calls that wait for somebody.
    Waiting,
    /// Somebody stopped it.
    Cancelled,
}

/// Whose loop it is: it has the model, the conversation, and the person who is asked.
pub trait Host {
    /// What keeps the model from answering.
    type Error;

    /// Lets the model answer what was said so far. It is offered tools where it `may_call`.
    fn answer(&mut self, may_call: bool) -> Result<Answered, Self::Error>;

    /// What becomes of a call.
    fn decide(&mut self, tool: &Tool, call: &Call) -> Decision;

    /// A call begins.
    fn begin(&mut self, tool: &Tool, call: &Call);

    /// A call is over, or will not be made. There is no tool where the model made up a name.
    fn done(&mut self, tool: Option<&Tool>, call: &Call, output: &Output);

    /// Whether somebody wants everything to end.
    fn is_cancelled(&self) -> bool;
}

/// Lets a model answer with tools, until it answers without calling one. `waiting` are calls of before that were allowed since.
pub fn converse<H: Host>(
    host: &mut H,
    toolbox: &Toolbox,
    listing: &Listing,
    waiting: Vec<Call>,
) -> Result<Ended, H::Error> {
    let rounds = Rounds { toolbox, listing, limits: toolbox.limits(), began: Instant::now() };
    for call in waiting {
        rounds.make(host, &call, Some(Decision::Run));
    }
    for turn in 0.. {
        if host.is_cancelled() {
            return Ok(Ended::Cancelled);
        }
        let spent = rounds.spent(turn);
        let answered = host.answer(spent.is_none())?;
        if spent.is_some() || answered.calls.is_empty() {
            return Ok(if host.is_cancelled() { Ended::Cancelled } else { Ended::Answered });
        }
        let mut waits = false;
        for (number, call) in answered.calls.iter().enumerate() {
            if host.is_cancelled() {
                return Ok(Ended::Cancelled);
            }
            let refused = (number >= rounds.limits.calls)
                .then(|| Decision::Refuse(format!("only {} calls of one answer are made", rounds.limits.calls)));
            waits |= !rounds.make(host, call, refused);
        }
        match (waits, answered.is_last) {
            (true, _) => return Ok(Ended::Waiting),
            (false, true) => return Ok(Ended::Answered),
            (false, false) => {}
        }
    }
    Ok(Ended::Answered)
}

struct Rounds<'a> {
    toolbox: &'a Toolbox,
    listing: &'a Listing,
    limits: Limits,
    began: Instant,
}

impl Rounds<'_> {
    /// Why no more calls are made, or nothing.
    fn spent(&self, turns: usize) -> Option<String> {
        if turns >= self.limits.turns {
            return Some(format!("{turns} answers in a row called tools, which is all that may"));
        }
        let seconds = self.limits.total_time.as_secs();
        (self.began.elapsed() >= self.limits.total_time)
            .then(|| format!("answers and calls took {seconds} s, which is all they may"))
    }

    /// Makes a call, or says why not; false where it waits for somebody.
    fn make<H: Host>(&self, host: &mut H, call: &Call, decided: Option<Decision>) -> bool {
        let Some(tool) = self.listing.tools.iter().find(|tool| tool.name == call.name) else {
            host.done(
                None,
                call,
                &Output::error(format!("there is no tool {:?}", kiln_system::text::shown(&call.name))),
            );
            return true;
        };
        let decision = decided.unwrap_or_else(|| host.decide(tool, call));
        let output = match decision {
            Decision::Later => return false,
            Decision::Refuse(why) => Output::error(why),
            Decision::Run => {
                host.begin(tool, call);
                let until = Instant::now() + self.limits.call_time;
                let until = until.min(self.began + self.limits.total_time);
                self.toolbox.call(tool, &call.arguments, &Wait { until, cancelled: &|| host.is_cancelled() })
            }
        };
        host.done(Some(tool), call, &output);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::*;
    use crate::toolbox::Setup;

    /// A model that says what a test wants it to.
    struct Script {
        answers: Vec<Answered>,
        decision: Decision,
        heard: Vec<String>,
        offered: Vec<bool>,
        stop_after: Cell<usize>,
    }

    impl Script {
        fn new(answers: Vec<Answered>) -> Script {
            let stop_after = Cell::new(usize::MAX);
            Script { answers, decision: Decision::Run, heard: Vec::new(), offered: Vec::new(), stop_after }
        }
    }

    impl Host for Script {
        type Error = String;

        fn answer(&mut self, may_call: bool) -> Result<Answered, String> {
            self.offered.push(may_call);
            // The last answer is said again and again.
            Ok(if self.answers.len() > 1 { self.answers.remove(0) } else { self.answers[0].clone() })
        }

        fn decide(&mut self, _: &Tool, _: &Call) -> Decision {
            self.decision.clone()
        }

        fn begin(&mut self, tool: &Tool, _: &Call) {
            self.heard.push(format!("begin {}", tool.name));
        }

        fn done(&mut self, _: Option<&Tool>, call: &Call, output: &Output) {
            self.heard.push(format!("{}: {}", call.id, output.for_model()));
        }

        fn is_cancelled(&self) -> bool {
            self.stop_after.get() <= self.heard.len()
        }
    }

    fn toolbox(limits: Limits) -> Toolbox {
        Toolbox::new(Setup { calculator: true, limits, ..Setup::default() }).unwrap()
    }

    fn calls(texts: &[&str]) -> Answered {
        let call = |(n, text): (usize, &&str)| Call {
            id: format!("c{n}"),
            name: "calculator".into(),
            arguments: format!("{{\"expression\": \"{text}\"}}"),
        };
        Answered { calls: texts.iter().enumerate().map(call).collect(), is_last: false }
    }

    fn run(host: &mut Script, limits: Limits, waiting: Vec<Call>) -> Ended {
        let toolbox = toolbox(limits);
        let listing = toolbox.tools();
        converse(host, &toolbox, &listing, waiting).unwrap()
    }

    #[test]
    fn calls_are_made_until_an_answer_has_none() {
        let mut host = Script::new(vec![calls(&["6*7", "1/"]), calls(&["2^10"]), Answered::default()]);
        assert_eq!(run(&mut host, Limits::default(), Vec::new()), Ended::Answered);
        assert_eq!(host.offered, [true; 3]);
        assert_eq!(host.heard[..2], ["begin calculator", "c0: 42"]);
        assert!(host.heard[3].starts_with("c1: Error:\n"), "{:?}", host.heard);
        assert_eq!(host.heard.last().unwrap(), "c0: 1024");
    }

    #[test]
    fn a_model_that_never_stops_calling_is_stopped() {
        let mut host = Script::new(vec![calls(&["1+1"])]);
        let limits = Limits { turns: 3, ..Limits::default() };
        assert_eq!(run(&mut host, limits, Vec::new()), Ended::Answered);
        assert_eq!(host.offered, [true, true, true, false], "the last answer is without tools");
        let mut host = Script::new(vec![calls(&["1+1"])]);
        let limits = Limits { total_time: Duration::ZERO, ..Limits::default() };
        assert_eq!(run(&mut host, limits, Vec::new()), Ended::Answered);
        assert_eq!(host.offered, [false]);
    }

    #[test]
    fn too_many_calls_of_one_answer_and_names_that_are_made_up_are_told_to_the_model() {
        let mut many = calls(&["1", "2", "3"]);
        many.calls[0].name = "no\u{1b}such".into();
        let mut host = Script::new(vec![many, Answered::default()]);
        run(&mut host, Limits { calls: 2, ..Limits::default() }, Vec::new());
        assert_eq!(host.heard[0], "c0: Error:\nthere is no tool \"no\\\\u{1b}such\"");
        assert_eq!(host.heard[1..3], ["begin calculator", "c1: 2"]);
        assert_eq!(host.heard[3], "c2: Error:\nonly 2 calls of one answer are made");
    }

    #[test]
    fn calls_wait_for_those_who_must_allow_them() {
        let mut host = Script::new(vec![calls(&["6*7"])]);
        host.decision = Decision::Later;
        assert_eq!(run(&mut host, Limits::default(), Vec::new()), Ended::Waiting);
        assert!(host.heard.is_empty());
        let waiting = calls(&["6*7"]).calls;
        let mut host = Script::new(vec![Answered::default()]);
        assert_eq!(run(&mut host, Limits::default(), waiting), Ended::Answered);
        assert_eq!(host.heard, ["begin calculator", "c0: 42"]);
        let mut host = Script::new(vec![calls(&["6*7"]), Answered::default()]);
        host.decision = Decision::Refuse("the user said no".into());
        run(&mut host, Limits::default(), Vec::new());
        assert_eq!(host.heard, ["c0: Error:\nthe user said no"]);
    }

    #[test]
    fn whoever_stops_it_is_heard_between_calls() {
        let mut host = Script::new(vec![calls(&["1", "2", "3"])]);
        host.stop_after.set(2);
        assert_eq!(run(&mut host, Limits::default(), Vec::new()), Ended::Cancelled);
        assert_eq!(host.heard.len(), 2, "{:?}", host.heard);
        let mut host = Script::new(vec![Answered { is_last: true, ..calls(&["1"]) }]);
        assert_eq!(run(&mut host, Limits::default(), Vec::new()), Ended::Answered);
        assert_eq!(host.offered.len(), 1, "somebody else has to act first");
    }
}
