//! Tools in a conversation: the model's calls are shown, allowed or not, made, and what they gave is shown and told to the model.

use std::collections::HashSet;
use std::sync::Arc;

use anyhow::bail;
use kiln_engine::text::{Function, Message, ToolCall};
use kiln_system::interrupt::Catch;
use kiln_system::terminal::Quiet;
use kiln_system::text::shown;
use kiln_tools::{Answered, Approval, Call, Decision, Ended, Host, Listing, Output, Problem, Tool, Toolbox, converse};
use serde_json::Value;

use super::Chat;
use crate::commands::run::interrupted;
use crate::output::{is_watched, say};

/// Lines of a result that are shown, and characters of one. The model is told all of it.
const SHOWN_LINES: usize = 8;
const SHOWN_WIDTH: usize = 300;
/// Characters of a line of arguments. None is left out of what somebody is asked about: long lines are cut into several.
const ARGUMENT_WIDTH: usize = 4000;

/// The tools of a conversation.
pub(super) struct Tools {
    toolbox: Arc<Toolbox>,
    listing: Listing,
    /// What is wrong and was said.
    told: Vec<Problem>,
    /// What the user allowed for the rest of the conversation, by what they saw of it: a tool that its server changes is asked about again.
    allowed: HashSet<String>,
}

impl Tools {
    /// Starts servers and asks them what they have.
    pub(super) fn new(toolbox: Toolbox) -> Tools {
        let (listing, told) = (Listing::default(), Vec::new());
        let mut tools = Tools { toolbox: Arc::new(toolbox), listing, told, allowed: HashSet::new() };
        tools.refresh();
        if is_watched() {
            let names: Vec<String> = tools.listing.tools.iter().map(|tool| tool.name.clone()).collect();
            match names.as_slice() {
                [] => say("there are no tools"),
                names => say(&format!("tools: {} (/tools tells more)", names.join(", "))),
            }
        }
        tools
    }

    /// Looks what there is now. What has gone wrong is said once.
    fn refresh(&mut self) {
        self.listing = self.toolbox.tools();
        for problem in self.listing.problems.iter().filter(|problem| !self.told.contains(problem)) {
            say(&format!("note: the MCP server {} {}", problem.server, problem.why));
        }
        self.told.clone_from(&self.listing.problems);
    }

    /// The tools as templates have them.
    pub(super) fn schemas(&self) -> Vec<Value> {
        self.listing.tools.iter().map(Tool::schema).collect()
    }

    fn asks(&self, tool: &Tool) -> bool {
        tool.approval == Approval::Ask && !self.allowed.contains(&tool.fingerprint())
    }
}

/// What a user says about a call.
#[derive(Debug, PartialEq, Eq)]
enum Word {
    Once,
    Always,
    No,
}

impl Word {
    fn of(text: &str) -> Option<Word> {
        match text.trim().to_ascii_lowercase().as_str() {
            "once" | "o" => Some(Word::Once),
            "always" | "a" => Some(Word::Always),
            "no" | "n" => Some(Word::No),
            _ => None,
        }
    }
}

impl Chat<'_> {
    /// Has the last message answered, with tools where there are some.
    pub(super) fn answer(&mut self) -> anyhow::Result<()> {
        let Some(tools) = &mut self.tools else { return self.one_answer(false).map(drop) };
        tools.refresh();
        let (toolbox, listing) = (Arc::clone(&tools.toolbox), tools.listing.clone());
        let mut table = Table { chat: self, call: None, is_stopped: false };
        let ended = converse(&mut table, &toolbox, &listing, Vec::new())?;
        if ended != Ended::Cancelled {
            return Ok(());
        }
        table.leave_no_call_open();
        if !self.input.is_terminal() {
            // Input has ended.
            return Err(interrupted().into());
        }
        say("note: the calls were stopped; /retry asks again");
        Ok(())
    }

    /// Adds the calls of an answer to the conversation. Those that have no name of their own get one.
    pub(super) fn named(&self, calls: &mut [Call]) -> Vec<ToolCall> {
        let number = self.messages.len();
        let named = calls.iter_mut().enumerate().map(|(at, call)| {
            if call.id.is_empty() {
                call.id = format!("call_{number}_{at}");
            }
            let function = Function { name: call.name.clone(), arguments: call.arguments.clone().into() };
            ToolCall { id: Some(call.id.clone()), kind: "function".into(), function }
        });
        named.collect()
    }

    /// `/tools`: what the model may call.
    pub(super) fn list_tools(&mut self) -> anyhow::Result<()> {
        let Some(tools) = &mut self.tools else {
            bail!(
                "this conversation has no tools\nhint: --mcp, --tool-calculator and --tool-folder of `kiln chat` give it some"
            );
        };
        tools.refresh();
        for tool in &tools.listing.tools {
            let asked = if tools.asks(tool) { "asks" } else { "allowed" };
            say(&format!("{}  ({asked}) {}", tool.name, shown(&tool.description)));
        }
        for problem in &tools.listing.problems {
            say(&format!("the MCP server {} {}", problem.server, problem.why));
        }
        if tools.listing.tools.is_empty() {
            say("there are no tools");
        }
        Ok(())
    }

    /// Asks the user about a call, who has seen it.
    fn approval(&mut self, tool: &Tool) -> anyhow::Result<Option<Word>> {
        self.input.set_aside();
        let server = &tool.server;
        let question = format!("allow this call of {server}? once, always (this tool), or no: ");
        loop {
            match self.input.ask(&question)? {
                None => return Ok(None),
                Some(text) => match Word::of(&text) {
                    Some(word) => return Ok(Some(word)),
                    // It was typed before the question was there.
                    None if !text.trim().is_empty() => {
                        self.input.keep(&text);
                        say("note: that is no answer; it is kept for the next message");
                    }
                    None => {}
                },
            }
        }
    }
}

/// A text in lines that can be read at a terminal, with nothing left out.
fn lines_of(text: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for line in text.lines() {
        let letters: Vec<char> = line.chars().collect();
        lines.extend(letters.chunks(ARGUMENT_WIDTH).map(|part| {
            let part: String = part.iter().collect();
            format!("  {}", kiln_system::text::shown_within(&part, ARGUMENT_WIDTH))
        }));
    }
    lines
}

/// What a call is, for a person: all of it.
fn told(tool: &Tool, call: &Call) -> String {
    let arguments = match serde_json::from_str::<Value>(&call.arguments) {
        Ok(Value::Object(fields)) if fields.is_empty() => String::new(),
        Ok(value) => serde_json::to_string_pretty(&value).unwrap_or_else(|_| call.arguments.clone()),
        Err(_) => call.arguments.clone(),
    };
    let whose = if tool.server.is_empty() { String::new() } else { format!(" of the MCP server {}", tool.server) };
    let head = format!("[calls {}{whose}]", shown(&tool.own_name));
    std::iter::once(head).chain(lines_of(&arguments)).collect::<Vec<_>>().join("\n")
}

/// The beginning of a result, for a person.
fn beginning(output: &Output) -> String {
    let text = output.for_model();
    let all = text.lines().count();
    let mut lines: Vec<String> = text
        .lines()
        .take(SHOWN_LINES)
        .map(|line| format!("  {}", kiln_system::text::shown_within(line, SHOWN_WIDTH)))
        .collect();
    if all > SHOWN_LINES {
        lines.push(format!("  ({} more lines, which the model reads)", all - SHOWN_LINES));
    }
    lines.join("\n")
}

/// A call under way: Ctrl-C ends it, and what is typed waits.
struct Under {
    catch: Catch,
    _typing: Option<Quiet>,
}

/// The model, its user and their tools.
struct Table<'a, 'b> {
    chat: &'a mut Chat<'b>,
    call: Option<Under>,
    is_stopped: bool,
}

impl Table<'_, '_> {
    /// Calls that were not made any more have an answer, too: templates want one for each.
    fn leave_no_call_open(&mut self) {
        let messages = &self.chat.messages;
        let Some(at) = messages.iter().rposition(|message| !message.tool_calls.is_empty()) else { return };
        let answered: Vec<Option<String>> =
            messages[at + 1..].iter().map(|message| message.tool_call_id.clone()).collect();
        let open: Vec<String> = messages[at].tool_calls.iter().filter_map(|call| call.id.clone()).collect();
        for id in open.into_iter().filter(|id| !answered.contains(&Some(id.clone()))) {
            self.hear(&id, "Error:\nthe user stopped before this call was made");
        }
    }

    /// Tells the model what a call gave.
    fn hear(&mut self, id: &str, text: &str) {
        self.chat.messages.push(Message { tool_call_id: Some(id.to_owned()), ..Message::new("tool", text) });
    }
}

impl Host for Table<'_, '_> {
    type Error = anyhow::Error;

    fn answer(&mut self, may_call: bool) -> anyhow::Result<Answered> {
        if !may_call {
            say("note: the model has called enough and answers now (--tool-turns, --tool-total-timeout)");
        }
        let said = self.chat.one_answer(!may_call)?;
        self.is_stopped |= said.is_last;
        Ok(said)
    }

    fn decide(&mut self, tool: &Tool, call: &Call) -> Decision {
        say(&told(tool, call));
        let asks = self.chat.tools.as_ref().is_none_or(|tools| tools.asks(tool));
        if !asks {
            return Decision::Run;
        }
        if !self.chat.input.is_terminal() {
            say("note: the call is not made: nobody can be asked here\nhint: --tool-approval always allows all calls");
            return Decision::Refuse("there is nobody who can allow this call".to_owned());
        }
        match self.chat.approval(tool) {
            Ok(Some(Word::Once)) => Decision::Run,
            Ok(Some(Word::Always)) => {
                if let Some(tools) = &mut self.chat.tools {
                    tools.allowed.insert(tool.fingerprint());
                }
                Decision::Run
            }
            Ok(Some(Word::No)) => Decision::Refuse("the user does not allow this call".to_owned()),
            Ok(None) | Err(_) => {
                self.is_stopped = true;
                Decision::Refuse("the user stopped".to_owned())
            }
        }
    }

    fn begin(&mut self, _: &Tool, _: &Call) {
        let catch = Catch::new();
        let typing = self.chat.input.is_terminal().then(Quiet::begin).flatten();
        self.call = Some(Under { catch, _typing: typing });
    }

    fn done(&mut self, tool: Option<&Tool>, call: &Call, output: &Output) {
        if let Some(under) = self.call.take() {
            self.is_stopped |= under.catch.happened();
        }
        if tool.is_none() {
            say(&format!("[calls {}, which is no tool]", shown(&call.name)));
        }
        say(&beginning(output));
        self.hear(&call.id, &output.for_model());
    }

    fn is_cancelled(&self) -> bool {
        self.is_stopped || self.call.as_ref().is_some_and(|under| under.catch.happened())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(own: &str) -> Tool {
        Tool {
            name: "s__t".into(),
            server: "files".into(),
            own_name: own.into(),
            description: String::new(),
            parameters: Value::Null,
            approval: Approval::Ask,
        }
    }

    fn call(arguments: &str) -> Call {
        Call { id: "c".into(), name: "s__t".into(), arguments: arguments.into() }
    }

    #[test]
    fn all_of_a_call_is_seen_before_it_is_allowed() {
        let long = "z".repeat(3 * ARGUMENT_WIDTH);
        let text =
            told(&tool("write\u{1b}[2J"), &call(&format!("{{\"path\": \"a\\u001b]0;b\", \"text\": \"{long}\"}}")));
        assert!(text.starts_with("[calls write\\u{1b}[2J of the MCP server files]\n  {\n"), "{}", &text[..80]);
        assert_eq!(text.matches('z').count(), long.len(), "nothing is cut");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()));
        assert_eq!(told(&tool("t"), &call("")), "[calls t of the MCP server files]");
        assert_eq!(
            told(&tool("t"), &call("{\"a")),
            "[calls t of the MCP server files]\n  {\"a",
            "no JSON is shown as it is"
        );
    }

    #[test]
    fn results_are_shown_from_their_beginning() {
        let text = beginning(&Output::text("a\u{1b}[2J\n".to_owned() + &"b\n".repeat(20)));
        assert_eq!(text.lines().count(), SHOWN_LINES + 1, "{text}");
        assert!(
            text.starts_with("  a\\u{1b}[2J\n") && text.ends_with("(13 more lines, which the model reads)"),
            "{text}"
        );
        assert_eq!(beginning(&Output::error("why")), "  Error:\n  why");
    }

    #[test]
    fn only_its_words_are_an_answer() {
        assert_eq!(
            (Word::of("o"), Word::of(" ALWAYS "), Word::of("no")),
            (Some(Word::Once), Some(Word::Always), Some(Word::No))
        );
        assert!(["", "y", "yes", "ok", "one", "another"].iter().all(|text| Word::of(text).is_none()));
    }
}
