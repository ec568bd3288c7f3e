//! Conversations that a template refuses though agents have them: a system message in the middle, several of them, answers of tools that
//! nobody called, two messages of one speaker in a row. What such a template takes is made of them, one change after the other, until it
//! renders. A conversation that renders as it is stays as it is.

use std::sync::Once;

use super::{ChatInput, Content, Message, TemplateError};

/// Changes, in the order in which they are tried. Each is made on top of those before it.
const CHANGES: [Change; 3] = [
    Change { note: "system messages were joined at the beginning", of: systems_first },
    Change { note: "answers of tools that no message called became messages of the user", of: answers_as_text },
    Change { note: "messages of one speaker in a row were joined", of: joined },
];

struct Change {
    note: &'static str,
    /// None where there is nothing to change.
    of: fn(&[Message]) -> Option<Vec<Message>>,
}

/// Which changes of a template were told already: once each is enough.
pub(super) struct Told([Once; CHANGES.len()]);

impl Default for Told {
    fn default() -> Told {
        Told([const { Once::new() }; CHANGES.len()])
    }
}

/// Renders a conversation, changed where the template refuses it. If nothing helps, the first refusal stands.
pub(super) fn render<R>(
    input: &ChatInput,
    told: &Told,
    render: impl Fn(&ChatInput) -> Result<R, TemplateError>,
) -> Result<R, TemplateError> {
    let refused = match render(input) {
        Err(refused @ TemplateError::Raised { .. }) => refused,
        other => return other,
    };
    // What is to be continued must stay the last message.
    let last = input.messages.last().map(|message| message.role.as_str());
    if input.continue_final_message && last != Some("assistant") {
        return Err(refused);
    }
    let mut changed = input.clone();
    let mut made = Vec::new();
    for (i, change) in CHANGES.iter().enumerate() {
        let Some(messages) = (change.of)(&changed.messages) else { continue };
        changed.messages = messages;
        made.push(i);
        if let Ok(rendered) = render(&changed) {
            for i in made {
                told.0[i].call_once(|| log::warn!("the chat template refuses a conversation: {}", CHANGES[i].note));
            }
            return Ok(rendered);
        }
    }
    Err(refused)
}

fn is_system(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// One message of what several say: texts stay texts, parts stay parts.
fn with_text_of(first: &Message, second: &Message) -> Message {
    let parts = |content: &Content| match content {
        Content::Parts(parts) => parts.clone(),
        other => vec![serde_json::json!({"type": "text", "text": other.to_text()})],
    };
    let content = match (&first.content, &second.content) {
        (content, Content::None) | (Content::None, content) => content.clone(),
        (Content::Text(a), Content::Text(b)) => Content::Text(format!("{a}\n\n{b}")),
        (a, b) => Content::Parts([parts(a), parts(b)].concat()),
    };
    Message { content, ..first.clone() }
}

fn systems_first(messages: &[Message]) -> Option<Vec<Message>> {
    messages.iter().skip(1).any(is_system).then_some(())?;
    let (systems, others): (Vec<&Message>, Vec<&Message>) = messages.iter().partition(|message| is_system(message));
    let first = systems.into_iter().cloned().reduce(|all, next| with_text_of(&all, &next));
    Some(first.into_iter().chain(others.into_iter().cloned()).collect())
}

fn answers_as_text(messages: &[Message]) -> Option<Vec<Message>> {
    let is_answer = |message: &Message| matches!(message.role.as_str(), "tool" | "function");
    // An answer follows the message that called, or other answers to it.
    let called = |at: usize| {
        let before = messages[..at].iter().rev().find(|message| !is_answer(message));
        before.is_some_and(|message| {
            let ids: Vec<&String> = message.tool_calls.iter().filter_map(|call| call.id.as_ref()).collect();
            let known = |id: &String| ids.is_empty() || ids.contains(&id);
            !message.tool_calls.is_empty() && messages[at].tool_call_id.as_ref().is_none_or(known)
        })
    };
    let alone: Vec<bool> = (0..messages.len()).map(|at| is_answer(&messages[at]) && !called(at)).collect();
    alone.contains(&true).then_some(())?;
    let of = |(message, alone): (&Message, bool)| {
        if !alone {
            return message.clone();
        }
        let name = message.name.as_deref().map_or_else(String::new, |name| format!(" {name}"));
        Message::new("user", format!("Result of tool{name}:\n{}", message.content.to_text()))
    };
    Some(messages.iter().zip(alone).map(of).collect())
}

fn joined(messages: &[Message]) -> Option<Vec<Message>> {
    let speaks = |message: &Message| matches!(message.role.as_str(), "user" | "assistant");
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        match out.last_mut() {
            Some(last) if speaks(last) && last.role == message.role && last.tool_calls.is_empty() => {
                let calls = message.tool_calls.clone();
                *last = Message { tool_calls: calls, ..with_text_of(last, message) };
            }
            _ => out.push(message.clone()),
        }
    }
    (out.len() < messages.len()).then_some(out)
}
