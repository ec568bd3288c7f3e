//! What a model thinks, told from what it says, while it writes. The families differ in their markers; whether the prompt
//! has already opened the reasoning is told by its end.

use super::marker::{find_first, hold_from};

/// How a family marks reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct Markers {
    /// The family.
    pub name: &'static str,
    /// What its templates contain.
    seen: &'static str,
    /// Opens reasoning.
    pub open: &'static str,
    /// Closes it.
    pub close: &'static str,
    /// Marks around the answer, which are not shown.
    hidden: &'static [&'static str],
    /// Whether a closing marker may stand behind an answer without reasoning.
    ends_alone: bool,
}

const fn row(seen: &'static str, name: &'static str, open: &'static str, close: &'static str) -> Markers {
    Markers { name, seen, open, close, hidden: &[], ends_alone: false }
}

/// Every family; the first whose mark a template contains is taken.
static FAMILIES: &[Markers] = &[
    row("[THINK]", "mistral", "[THINK]", "[/THINK]"),
    row("<seed:think>", "seed", "<seed:think>", "</seed:think>"),
    row("<mm:think>", "minimax-m1", "<mm:think>", "</mm:think>"),
    Markers {
        hidden: &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
        ..row("<|START_THINKING|>", "cohere", "<|START_THINKING|>", "<|END_THINKING|>")
    },
    // An answer may end with an empty thought, or with its closing marker alone.
    Markers {
        hidden: &["<|channel>thought\n"],
        ends_alone: true,
        ..row("<|channel>", "gemma-4", "<|channel>thought\n", "<channel|>")
    },
    row("Here is my thought process:", "granite-3", "Here is my thought process:", "Here is my response:"),
    Markers {
        hidden: &["[END FINAL RESPONSE]"],
        ..row("[BEGIN FINAL RESPONSE]", "apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
    },
    row("<think>", "think", "<think>", "</think>"),
    row("</think>", "think", "<think>", "</think>"),
];

impl Markers {
    /// The markers that a template knows; `None` where its model does not reason, or in channels.
    pub fn of_template(source: &str) -> Option<&'static Markers> {
        FAMILIES.iter().find(|family| source.contains(family.seen))
    }

    /// The markers of a family by name.
    pub fn by_name(name: &str) -> Option<&'static Markers> {
        FAMILIES.iter().find(|family| family.name == name)
    }
}

/// A piece of what a model writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// What it thinks.
    Reasoning(String),
    /// What it says.
    Content(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far: reasoning may open.
    Start,
    /// After the opening; newlines are dropped.
    Opened,
    Reasoning,
    /// After the closing; newlines are dropped.
    Closed,
    Content,
}

/// Splits text that arrives in pieces.
#[derive(Clone, Debug)]
pub struct Reasoning {
    markers: &'static Markers,
    /// Texts that begin a tool call: they end reasoning that is open.
    calls: &'static [&'static str],
    state: State,
    buffer: String,
}

impl Reasoning {
    /// `generation_prompt` is the end of the prompt, which may have opened or closed the reasoning; `calls` are the texts
    /// that tool calls begin with.
    pub fn new(markers: &'static Markers, generation_prompt: &str, calls: &'static [&'static str]) -> Self {
        let (open, close) = (markers.open.trim_end(), markers.close);
        let state = match (generation_prompt.rfind(open), generation_prompt.rfind(close)) {
            (Some(open), Some(close)) if open > close => State::Opened,
            (Some(_), None) => State::Opened,
            (_, Some(_)) => State::Closed,
            (None, None) => State::Start,
        };
        Self { markers, calls, state, buffer: String::new() }
    }

    /// Whether the model is thinking.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Opened | State::Reasoning)
    }

    /// Takes a piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        self.run(false)
    }

    /// The text is over.
    pub fn finish(&mut self) -> Vec<Piece> {
        self.run(true)
    }

    fn run(&mut self, last: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        while self.advance(last, &mut pieces) {}
        pieces
    }

    fn give(&mut self, len: usize, pieces: &mut Vec<Piece>) {
        let text: String = self.buffer.drain(..len).collect();
        if text.is_empty() {
            return;
        }
        let is_reasoning = self.state == State::Reasoning;
        match (pieces.last_mut(), is_reasoning) {
            (Some(Piece::Reasoning(last)), true) | (Some(Piece::Content(last)), false) => last.push_str(&text),
            (_, true) => pieces.push(Piece::Reasoning(text)),
            (_, false) => pieces.push(Piece::Content(text)),
        }
    }

    fn advance(&mut self, last: bool, pieces: &mut Vec<Piece>) -> bool {
        match self.state {
            State::Start => {
                let rest = self.buffer.trim_start();
                let open = self.markers.open;
                if rest.starts_with(open) {
                    let taken = self.buffer.len() - rest.len() + open.len();
                    self.buffer.drain(..taken);
                    self.state = State::Opened;
                    return true;
                }
                if open.starts_with(rest) && !last {
                    return false;
                }
                self.state = State::Content;
                true
            }
            State::Opened | State::Closed => {
                let newlines = self.buffer.len() - self.buffer.trim_start_matches('\n').len();
                self.buffer.drain(..newlines);
                if self.buffer.is_empty() {
                    return false;
                }
                self.state = if self.state == State::Opened { State::Reasoning } else { State::Content };
                true
            }
            State::Reasoning => {
                let ends = || [self.markers.close].into_iter().chain(self.calls.iter().copied());
                if let Some((at, index)) = find_first(&self.buffer, ends()) {
                    let close = self.markers.close.len();
                    let thought = self.buffer[..at].trim_end_matches('\n').len();
                    self.give(thought, pieces);
                    // The newlines go, and the marker, but not the beginning of a call.
                    self.buffer.drain(..at - thought + if index == 0 { close } else { 0 });
                    self.state = State::Closed;
                    return true;
                }
                let upto = if last { self.buffer.len() } else { hold_from(&self.buffer, ends()) };
                // Newlines before the closing marker are no part of the thought.
                let upto = self.buffer[..upto].trim_end_matches('\n').len();
                self.give(upto, pieces);
                if last {
                    self.buffer.clear();
                }
                false
            }
            State::Content => {
                // A closing marker alone, and marks around the answer, are not shown.
                let hidden = || [self.markers.close].into_iter().chain(self.markers.hidden.iter().copied());
                if let Some((at, index)) = find_first(&self.buffer, hidden()) {
                    let len = hidden().nth(index).map_or(0, str::len);
                    self.give(at, pieces);
                    self.buffer.drain(..len);
                    return true;
                }
                let upto = if last { self.buffer.len() } else { hold_from(&self.buffer, hidden()) };
                self.give(upto, pieces);
                false
            }
        }
    }
}

/// Splits a whole text. Here a closing marker alone makes all before it reasoning, which a stream cannot know in time.
pub fn split(markers: &'static Markers, generation_prompt: &str, text: &str) -> (String, String) {
    let mut splitter = Reasoning::new(markers, generation_prompt, &[]);
    let behind = text.split_once(markers.close).map(|(_, behind)| behind.trim());
    let closes = behind.is_some_and(|behind| !markers.ends_alone || !behind.is_empty());
    if splitter.state == State::Start && !text.trim_start().starts_with(markers.open) && closes {
        splitter.state = State::Opened;
    }
    let (mut reasoning, mut content) = (String::new(), String::new());
    for piece in splitter.push(text).into_iter().chain(splitter.finish()) {
        match piece {
            Piece::Reasoning(text) => reasoning.push_str(&text),
            Piece::Content(text) => content.push_str(&text),
        }
    }
    (reasoning, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, prompt: &str, pieces: &[&str]) -> (String, String) {
        let markers = Markers::by_name(name).expect("the family exists");
        let mut splitter = Reasoning::new(markers, prompt, &["<tool_call>"]);
        let (mut reasoning, mut content) = (String::new(), String::new());
        let mut all: Vec<Piece> = pieces.iter().flat_map(|piece| splitter.push(piece)).collect();
        all.extend(splitter.finish());
        for piece in all {
            match piece {
                Piece::Reasoning(text) => reasoning.push_str(&text),
                Piece::Content(text) => content.push_str(&text),
            }
        }
        (reasoning, content)
    }

    #[test]
    fn every_family_at_every_cut() {
        for (name, prompt, text, reasoning, content) in [
            ("think", "", "<think>\nhm\n\nok\n</think>\n\nHello <b>", "hm\n\nok", "Hello <b>"),
            ("think", "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nHello", "hm", "Hello"),
            ("think", "<think>\n\n</think>\n\n", "Hello </thinker", "", "Hello </thinker"),
            ("think", "assistant\n", "\nHello", "", "\nHello"),
            ("think", "", "Hello <think> no", "", "Hello <think> no"),
            ("think", "", "<think>never closed\n", "never closed", ""),
            ("think", "<think>", "hm <tool_call>\n{}", "hm ", "<tool_call>\n{}"),
            ("mistral", "", "[THINK]hm[/THINK]Hello", "hm", "Hello"),
            ("seed", "", "<seed:think>hm</seed:think>Hello", "hm", "Hello"),
            ("minimax-m1", "", "<mm:think>hm</mm:think>Hello", "hm", "Hello"),
            (
                "cohere",
                "",
                "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hello<|END_RESPONSE|>",
                "hm",
                "Hello",
            ),
            ("gemma-4", "", "<|channel>thought\nhm\n<channel|>Hello", "hm", "Hello"),
            ("gemma-4", "", "<|channel>thought\n<channel|>Hello", "", "Hello"),
            ("gemma-4", "", "Hello<channel|>", "", "Hello"),
            ("gemma-4", "", "Hello<|channel>thought\n<channel|>", "", "Hello"),
            // DeepSeek V4 without thinking: the prompt has closed it.
            ("think", "<｜Assistant｜></think>", "Hello", "", "Hello"),
            ("granite-3", "", "Here is my thought process:\nhm\nHere is my response:\nHello", "hm", "Hello"),
            ("apriel", "Here are my reasoning steps:\n", "hm\n[BEGIN FINAL RESPONSE]\nHello", "hm", "Hello"),
        ] {
            let want = (reasoning.to_owned(), content.to_owned());
            assert_eq!(run(name, prompt, &[text]), want, "{name} {text:?}");
            for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
                let (a, b) = text.split_at(cut);
                assert_eq!(run(name, prompt, &[a, b]), want, "{name} {a:?} {b:?}");
            }
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            assert_eq!(run(name, prompt, &letters), want, "{name} {text:?} by letters");
        }
    }

    #[test]
    fn a_lone_closing_marker_makes_a_whole_text_reasoning() {
        let think = Markers::by_name("think").expect("it exists");
        assert_eq!(split(think, "", "hm\n</think>\n\nHello"), ("hm".into(), "Hello".into()));
        assert_eq!(split(think, "", "Hello"), (String::new(), "Hello".into()));
        assert_eq!(run("think", "", &["hm", "</think>Hello"]), (String::new(), "hmHello".into()));
        let gemma = Markers::by_name("gemma-4").expect("it exists");
        assert_eq!(split(gemma, "", "hm<channel|>Hello"), ("hm".into(), "Hello".into()));
        assert_eq!(split(gemma, "", "Hello<channel|>\n"), (String::new(), "Hello\n".into()));
        assert_eq!(split(gemma, "", "Hello<|channel>thought\n<channel|>"), (String::new(), "Hello".into()));
    }

    #[test]
    fn templates_tell_their_family() {
        let name = |source: &str| Markers::of_template(source).map(|markers| markers.name);
        assert_eq!(name("x <think> y"), Some("think"));
        assert_eq!(name("[THINK] and <think>"), Some("mistral"));
        assert_eq!(name("plain"), None);
    }
}
