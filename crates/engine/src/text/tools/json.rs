//! Calls as JSON objects with a name and arguments, alone between tags or in an array: Hermes and Qwen, Mistral's first
//! forms, Cohere, Granite, Nemotron, Llama 3 and many more.

use super::driver::{Region, Sink};
use super::python;
use super::scan::{Status, ValueScan, blank, whole_string};

/// One way to write them.
#[derive(Debug)]
pub(super) struct Form {
    /// What comes before.
    pub(super) opens: &'static [&'static str],
    /// What may come between that and the JSON.
    fence: &'static str,
    /// What comes after; empty where nothing does.
    pub(super) close: &'static str,
    /// What stands between two objects that are in no array.
    pub(super) between: &'static str,
    /// The object's only key is the name.
    pub(super) name_is_key: bool,
    /// Calls stand only at the beginning, and an object with other keys is none.
    pub(super) at_start: bool,
    /// What name and arguments are called where the model is made to write them.
    pub(super) keys: [&'static str; 2],
    /// What stands before the name.
    pub(super) numbered: &'static str,
    pub(super) written: Written,
}

/// What stands around calls where the model is made to write them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    pub(super) before: &'static str,
    /// Between two; empty where each has a region of its own.
    pub(super) between: &'static str,
    pub(super) after: &'static str,
}

const LIST: Written = Written { before: "[", between: ", ", after: "]" };

const FORM: Form = Form {
    opens: &[],
    fence: "",
    close: "",
    between: "",
    name_is_key: false,
    at_start: false,
    keys: ["name", "arguments"],
    numbered: "",
    written: LIST,
};

pub(super) static HERMES: Form = Form {
    opens: &["<tool_call>"],
    close: "</tool_call>",
    written: Written { before: "\n", between: "", after: "\n" },
    ..FORM
};
pub(super) static COHERE: Form = Form {
    opens: &["<|START_ACTION|>"],
    close: "<|END_ACTION|>",
    keys: ["tool_name", "parameters"],
    numbered: "\"tool_call_id\": \"{digits}\", ",
    written: Written { before: "[\n    ", between: ",\n    ", after: "\n]" },
    ..FORM
};
pub(super) static COMMAND_R: Form = Form {
    opens: &["Action:"],
    fence: "```json",
    close: "```",
    keys: ["tool_name", "parameters"],
    written: Written { before: "\n```json\n[", ..LIST },
    ..FORM
};
pub(super) static MISTRAL: Form = Form { opens: &["[TOOL_CALLS]"], ..FORM };
pub(super) static TOOLCALL: Form = Form { opens: &["<TOOLCALL>"], close: "</TOOLCALL>", ..FORM };
pub(super) static TOOL_CALLS: Form = Form { opens: &["<tool_calls>"], close: "</tool_calls>", ..FORM };
pub(super) static APERTUS: Form =
    Form { opens: &["<|tools_prefix|>"], close: "<|tools_suffix|>", name_is_key: true, ..FORM };
pub(super) static GRANITE: Form = Form { opens: &["<|tool_call|>"], ..FORM };
pub(super) static FUNCTOOLS: Form = Form { opens: &["functools", "<|tool_call|>"], close: "<|/tool_call|>", ..FORM };
/// An object without any marks, at the beginning of an answer.
pub(super) static BARE: Form = Form { opens: &["{"], at_start: true, ..FORM };
pub(super) static LLAMA3: Form = Form {
    opens: &["<|python_tag|>", "{"],
    between: ";",
    at_start: true,
    keys: ["name", "parameters"],
    // Its template takes one call an answer.
    written: Written { before: "", between: "", after: "" },
    ..FORM
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before the JSON.
    Before,
    /// Before an object.
    Object,
    /// Inside an object, before a key or the end.
    Key,
    Colon,
    Value,
    /// Inside the arguments.
    Arguments,
    /// Inside a value that does not matter.
    Skip,
    /// After an object.
    After,
}

/// Reads a region.
pub(super) struct Reader {
    form: &'static Form,
    stage: Stage,
    in_array: bool,
    /// How many objects of one call are open; some wrap name and arguments in `function`.
    depth: usize,
    key: String,
    name: Option<String>,
    id: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    started: bool,
    scan: ValueScan,
    calls: usize,
    /// Llama 3 calls its builtin tools as Python does.
    python: Option<python::Reader>,
}

impl Reader {
    pub(super) fn new(form: &'static Form, open: &str) -> Self {
        let mut reader = Self {
            form,
            stage: Stage::Before,
            in_array: false,
            depth: 0,
            key: String::new(),
            name: None,
            id: None,
            early: None,
            started: false,
            scan: ValueScan::default(),
            calls: 0,
            python: None,
        };
        if open == "{" {
            reader.stage = Stage::Key;
            reader.depth = 1;
        }
        reader
    }

    /// One step; `None` where more text is wanted.
    fn advance(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        let skipped = match self.stage {
            Stage::Arguments | Stage::Skip => 0,
            _ => blank(text),
        };
        let rest = &text[skipped..];
        let go = |len: usize| Some((skipped + len, Status::More));
        let broken = Some((skipped, Status::Broken));
        let Some(first) = rest.bytes().next() else {
            return (self.stage == Stage::After && last).then_some((skipped, Status::Done));
        };
        match self.stage {
            Stage::Before => {
                if !self.form.fence.is_empty() && rest.starts_with(self.form.fence) {
                    return go(self.form.fence.len());
                }
                if self.form.fence.starts_with(rest) && !last {
                    return None;
                }
                match first {
                    b'[' => {
                        self.in_array = true;
                        self.stage = Stage::Object;
                        go(1)
                    }
                    b'{' => {
                        self.stage = Stage::Object;
                        go(0)
                    }
                    _ if self.form.at_start => {
                        self.python = Some(python::Reader::new(&python::BARE, ""));
                        None
                    }
                    _ => broken,
                }
            }
            Stage::Object => match first {
                b'{' => {
                    (self.stage, self.depth, self.started) = (Stage::Key, 1, false);
                    (self.name, self.id, self.early) = (None, None, None);
                    go(1)
                }
                b']' if self.in_array => {
                    self.in_array = false;
                    self.stage = Stage::After;
                    go(1)
                }
                _ => broken,
            },
            Stage::Key => match first {
                b',' => go(1),
                b'}' => {
                    self.depth -= 1;
                    if self.depth == 0 && !self.finish_call(sink) {
                        return broken;
                    }
                    go(1)
                }
                _ => match whole_string(rest)? {
                    Ok((key, len)) => {
                        self.key = key;
                        self.stage = Stage::Colon;
                        go(len)
                    }
                    Err(()) => broken,
                },
            },
            Stage::Colon if first == b':' => {
                self.stage = Stage::Value;
                go(1)
            }
            Stage::Colon => broken,
            Stage::Value => self.value(rest, skipped, sink),
            Stage::Arguments | Stage::Skip => {
                let (len, status) = self.scan.feed(rest);
                if self.stage == Stage::Arguments {
                    self.pass(&rest[..len], sink);
                }
                match status {
                    Status::More if len == 0 => None,
                    Status::More => go(len),
                    Status::Done => {
                        self.stage = Stage::Key;
                        go(len)
                    }
                    Status::Broken => Some((len, Status::Broken)),
                }
            }
            Stage::After => self.after(rest, skipped, last),
        }
    }

    fn value(&mut self, rest: &str, skipped: usize, sink: &mut Sink) -> Option<(usize, Status)> {
        let go = |len: usize| Some((skipped + len, Status::More));
        let broken = Some((skipped, Status::Broken));
        let is_object = rest.starts_with('{');
        if self.form.name_is_key && self.name.is_none() {
            self.name = Some(std::mem::take(&mut self.key));
            return self.begin_arguments(rest, sink).map(|(len, status)| (skipped + len, status));
        }
        match self.key.as_str() {
            "function" if is_object => {
                self.depth += 1;
                self.stage = Stage::Key;
                go(1)
            }
            "name" | "tool_name" | "function" => match whole_string(rest)? {
                Ok((name, len)) => {
                    self.name = Some(name);
                    self.stage = Stage::Key;
                    go(len)
                }
                Err(()) => broken,
            },
            "arguments" | "parameters" => self.begin_arguments(rest, sink).map(|(len, status)| (skipped + len, status)),
            "id" | "tool_call_id" if rest.starts_with('"') => match whole_string(rest)? {
                Ok((id, len)) => {
                    self.id = Some(id);
                    self.stage = Stage::Key;
                    go(len)
                }
                Err(()) => broken,
            },
            "id" | "tool_call_id" | "type" => {
                (self.scan, self.stage) = (ValueScan::default(), Stage::Skip);
                go(0)
            }
            _ if self.form.at_start => broken,
            _ => {
                (self.scan, self.stage) = (ValueScan::default(), Stage::Skip);
                go(0)
            }
        }
    }

    fn begin_arguments(&mut self, rest: &str, sink: &mut Sink) -> Option<(usize, Status)> {
        // Some models write the object as a text.
        if rest.starts_with('"') {
            let Ok((text, len)) = whole_string(rest)? else { return Some((0, Status::Broken)) };
            let is_object = serde_json::from_str::<serde_json::Value>(&text).is_ok_and(|value| value.is_object());
            if !self.pass(if is_object { &text } else { &rest[..len] }, sink) {
                return Some((0, Status::Broken));
            }
            self.stage = Stage::Key;
            return Some((len, Status::More));
        }
        if !self.pass("", sink) {
            return Some((0, Status::Broken));
        }
        (self.scan, self.stage) = (ValueScan::default(), Stage::Arguments);
        Some((0, Status::More))
    }

    /// Gives arguments on, or keeps them where the name is not known yet; `false` where there is no such tool.
    fn pass(&mut self, text: &str, sink: &mut Sink) -> bool {
        match &self.name {
            None => self.early.get_or_insert_default().push_str(text),
            Some(name) => {
                if !self.started {
                    self.started = sink.start(name, self.id.take());
                }
                if self.started {
                    sink.arguments(text);
                }
                return self.started;
            }
        }
        true
    }

    /// The object is over; `false` where it was no call.
    fn finish_call(&mut self, sink: &mut Sink) -> bool {
        if self.name.is_none() {
            return false;
        }
        if !self.started {
            let arguments = self.early.take().unwrap_or_else(|| "{}".to_owned());
            if !self.pass(&arguments, sink) {
                return false;
            }
        }
        sink.end();
        self.calls += 1;
        self.started = false;
        self.stage = Stage::After;
        true
    }

    fn after(&mut self, rest: &str, skipped: usize, last: bool) -> Option<(usize, Status)> {
        let close = self.form.close;
        if self.in_array {
            return match rest.as_bytes()[0] {
                b',' => {
                    self.stage = Stage::Object;
                    Some((skipped + 1, Status::More))
                }
                b']' => {
                    self.in_array = false;
                    Some((skipped + 1, Status::More))
                }
                _ => Some((0, Status::Done)),
            };
        }
        if !close.is_empty() && rest.starts_with(close) {
            return Some((skipped + close.len(), Status::Done));
        }
        let between = self.form.between;
        if !between.is_empty() && rest.starts_with(between) {
            self.stage = Stage::Object;
            return Some((skipped + between.len(), Status::More));
        }
        // One object a line, in one pair of tags.
        if !close.is_empty() && rest.starts_with('{') {
            self.stage = Stage::Object;
            return Some((skipped, Status::More));
        }
        if close.starts_with(rest) && !close.is_empty() && !last {
            return None;
        }
        Some((0, Status::Done))
    }
}

impl Region for Reader {
    fn cut(&mut self, sink: &mut Sink) {
        let inside = matches!(self.stage, Stage::Key | Stage::Colon | Stage::Value | Stage::Skip);
        if let Some(name) = self.name.clone().filter(|_| inside && !self.started) {
            self.started = sink.start(&name, self.id.take());
        }
    }

    fn step(&mut self, text: &str, last: bool, sink: &mut Sink) -> (usize, Status) {
        let mut taken = 0;
        loop {
            if let Some(python) = &mut self.python {
                let (len, status) = python.step(&text[taken..], last, sink);
                return (taken + len, status);
            }
            let before = self.calls;
            match self.advance(&text[taken..], last, sink) {
                None if self.python.is_some() => {}
                None => return (taken, Status::More),
                Some((len, Status::More)) => taken += len,
                // What follows the last call is no part of it.
                Some((_, Status::Broken)) if before > 0 && self.stage == Stage::Object => return (taken, Status::Done),
                Some((len, status)) => return (taken + len, status),
            }
        }
    }
}
