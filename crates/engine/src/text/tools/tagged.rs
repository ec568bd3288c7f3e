//! Calls whose arguments are written value by value between tags: Qwen3-Coder, GLM, Seed, MiniMax, DeepSeek V3.2. The JSON
//! of the arguments is made here: strings as they arrive, other values when they are whole.

use serde_json::Value as Json;

use super::driver::{Region, Sink};
use super::named::name;
use super::scan::{Status, blank};

/// One way to write them.
#[derive(Debug)]
pub(super) struct Form {
    /// What a region begins with.
    pub(super) opens: &'static [&'static str],
    /// What ends it.
    pub(super) close: &'static [&'static str],
    /// What comes before the name of a call, and after it.
    pub(super) call: (&'static str, &'static str),
    /// What ends a call; empty where the region ends with it.
    pub(super) call_close: &'static str,
    /// What comes before the name of an argument, and after it.
    pub(super) key: (&'static str, &'static str),
    /// What comes between the name and the value; empty where nothing does.
    pub(super) value: &'static str,
    /// What ends a value.
    pub(super) value_close: &'static str,
    /// Whether a newline on either side of a value is no part of it.
    pub(super) trim: bool,
    /// A region holds all calls, and not one.
    pub(super) in_list: bool,
    /// What stands between two regions.
    pub(super) between: &'static str,
    /// An argument says whether it is a string.
    pub(super) says_kind: bool,
    /// Line ends between the parts may be missing.
    pub(super) loose: bool,
}

pub(super) static QWEN3_CODER: Form = Form {
    opens: &["<tool_call>", "<function="],
    close: &["</tool_call>"],
    call: ("<function=", ">"),
    call_close: "</function>",
    key: ("<parameter=", ">"),
    value: "",
    value_close: "</parameter>",
    trim: true,
    in_list: false,
    between: "\n",
    says_kind: false,
    loose: false,
};

pub(super) static SEED: Form =
    Form { opens: &["<seed:tool_call>"], close: &["</seed:tool_call>"], trim: false, between: "", ..QWEN3_CODER };

pub(super) static MINIMAX: Form = Form {
    opens: &["<minimax:tool_call>"],
    close: &["</minimax:tool_call>"],
    call: ("<invoke name=\"", "\">"),
    call_close: "</invoke>",
    key: ("<parameter name=\"", "\">"),
    trim: false,
    in_list: true,
    ..QWEN3_CODER
};

pub(super) static DSML: Form = Form {
    opens: &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"],
    close: &["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"],
    call: ("<｜DSML｜invoke name=\"", "\">"),
    call_close: "</｜DSML｜invoke>",
    key: ("<｜DSML｜parameter name=\"", ">"),
    value_close: "</｜DSML｜parameter>",
    trim: false,
    in_list: true,
    says_kind: true,
    ..QWEN3_CODER
};

pub(super) static GLM: Form = Form {
    opens: &["<tool_call>"],
    close: &["</tool_call>"],
    call: ("", ""),
    call_close: "",
    key: ("<arg_key>", "</arg_key>"),
    value: "<arg_value>",
    value_close: "</arg_value>",
    trim: false,
    loose: true,
    ..QWEN3_CODER
};

/// Names longer than this are none.
const MAX_NAME: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before a call or the end of the region.
    Call,
    /// Inside the name of a call.
    Name,
    /// Before an argument or the end of the call.
    Key,
    /// Inside the name of an argument.
    KeyName,
    /// Before the value.
    BeforeValue,
    Value,
}

/// How a value is written as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A string, passed on as it comes.
    Text,
    /// Anything; known when it is whole.
    Any,
    /// JSON, if it is any.
    Json,
}

/// Reads a region.
pub(super) struct Reader {
    form: &'static Form,
    stage: Stage,
    tool: Json,
    kind: Kind,
    schema: Json,
    /// How many arguments the call has so far.
    arguments: usize,
    /// A string has begun.
    begun: bool,
    calls: usize,
}

impl Reader {
    pub(super) fn new(form: &'static Form, open: &str) -> Self {
        let stage = match form.call.0 == open || form.call.0.is_empty() {
            true => Stage::Name,
            false => Stage::Call,
        };
        Self {
            form,
            stage,
            tool: Json::Null,
            kind: Kind::Any,
            schema: Json::Null,
            arguments: 0,
            begun: false,
            calls: 0,
        }
    }

    fn advance(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        let form = self.form;
        match self.stage {
            Stage::Call => {
                let skipped = blank(text);
                let rest = &text[skipped..];
                if let Some(close) = form.close.iter().find(|close| rest.starts_with(**close)) {
                    return Some((skipped + close.len(), Status::Done));
                }
                if rest.starts_with(form.call.0) && !form.call.0.is_empty() {
                    self.stage = Stage::Name;
                    return Some((skipped + form.call.0.len(), Status::More));
                }
                let may_come = form.close.iter().chain([&form.call.0]).any(|marker| marker.starts_with(rest));
                match (may_come && !last, self.calls) {
                    (true, _) => None,
                    (false, 0) => Some((0, Status::Broken)),
                    (false, _) => Some((if rest.is_empty() { skipped } else { 0 }, Status::Done)),
                }
            }
            Stage::Name => {
                let ends: &[&str] = match form.call.1 {
                    // The name stands alone: a new line, an argument or the end comes after it.
                    "" => &["\n", "<arg_key>", "</tool_call>"],
                    _ => &[form.call.1],
                };
                // White space before a name that stands alone is no end of it.
                let skipped = if form.call.1.is_empty() { blank(text) } else { 0 };
                let rest = &text[skipped..];
                let end = ends.iter().filter_map(|end| Some((rest.find(end)?, *end))).min();
                let Some((at, end)) = end else {
                    return (last || rest.len() > MAX_NAME).then_some((0, Status::Broken));
                };
                let found = name(&rest[..at]).filter(|name| sink.start(name, None));
                let Some(found) = found else { return Some((0, Status::Broken)) };
                self.tool = sink.tool(&found).map_or(Json::Null, |tool| tool.parameters.clone());
                sink.arguments("{");
                (self.stage, self.arguments) = (Stage::Key, 0);
                let after = if form.call.1.is_empty() { 0 } else { end.len() };
                Some((skipped + at + after, Status::More))
            }
            Stage::Key => self.key(text, last, sink),
            Stage::KeyName => {
                let Some(end) = text.find(form.key.1) else {
                    return (last || text.len() > MAX_NAME).then_some((0, Status::Broken));
                };
                self.begin_value(&text[..end], sink);
                Some((end + form.key.1.len(), Status::More))
            }
            Stage::BeforeValue => {
                let skipped = blank(text);
                let rest = &text[skipped..];
                if rest.starts_with(form.value) {
                    self.stage = Stage::Value;
                    return Some((skipped + form.value.len(), Status::More));
                }
                match form.value.starts_with(rest) && !last {
                    true => None,
                    false => Some((0, Status::Broken)),
                }
            }
            Stage::Value => self.value(text, last, sink),
        }
    }

    fn key(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        let form = self.form;
        let skipped = blank(text);
        let rest = &text[skipped..];
        if rest.starts_with(form.key.0) {
            self.stage = Stage::KeyName;
            return Some((skipped + form.key.0.len(), Status::More));
        }
        // A region that ends takes its call with it.
        let ends = form.close.iter().filter(|_| true).chain([&form.call_close]).filter(|end| !end.is_empty());
        if let Some(end) = ends.clone().find(|end| rest.starts_with(**end)) {
            sink.arguments("}");
            sink.end();
            self.calls += 1;
            self.stage = Stage::Call;
            let region_over = form.call_close.is_empty() || *end != form.call_close;
            return Some((skipped + end.len(), if region_over { Status::Done } else { Status::More }));
        }
        let may_come = ends.chain([&form.key.0]).any(|marker| marker.starts_with(rest));
        match may_come && !last {
            true => None,
            false => {
                sink.arguments("}");
                Some((skipped, Status::Broken))
            }
        }
    }

    /// Begins an argument: `head` is its name, with attributes in some forms.
    fn begin_value(&mut self, head: &str, sink: &mut Sink) {
        let (key, attributes) = head.split_once('"').unwrap_or((head, ""));
        let key = key.trim();
        self.schema = self.tool["properties"][key].clone();
        self.kind = match self.schema["type"].as_str() {
            _ if attributes.contains("string=\"true\"") => Kind::Text,
            _ if attributes.contains("string=\"false\"") => Kind::Json,
            Some("string") => Kind::Text,
            _ => Kind::Any,
        };
        let comma = if self.arguments > 0 { ", " } else { "" };
        sink.arguments(&format!("{comma}{}: ", Json::String(key.to_owned())));
        self.arguments += 1;
        self.begun = false;
        self.stage = if self.form.value.is_empty() { Stage::Value } else { Stage::BeforeValue };
    }

    fn value(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        let close = self.form.value_close;
        let end = text.find(close);
        if self.kind != Kind::Text {
            return match end {
                Some(end) => {
                    sink.arguments(&self.write(self.trimmed(&text[..end])));
                    self.stage = Stage::Key;
                    Some((end + close.len(), Status::More))
                }
                None if last => {
                    sink.arguments(&self.write(self.trimmed(text)));
                    sink.arguments("}");
                    Some((text.len(), Status::Broken))
                }
                None => None,
            };
        }
        let mut skipped = 0;
        if !self.begun {
            // Whether the first character is a newline to drop is known when it is there.
            if text.is_empty() && !last {
                return None;
            }
            skipped = usize::from(self.form.trim && text.starts_with('\n'));
            sink.arguments("\"");
            self.begun = true;
        }
        match end {
            Some(end) => {
                let inner = &text[skipped.min(end)..end];
                let inner = if self.form.trim { inner.strip_suffix('\n').unwrap_or(inner) } else { inner };
                sink.arguments(&escaped(inner));
                sink.arguments("\"");
                self.stage = Stage::Key;
                Some((end + close.len(), Status::More))
            }
            None if last => {
                sink.arguments(&escaped(&text[skipped..]));
                sink.arguments("\"}");
                Some((text.len(), Status::Broken))
            }
            None => {
                let mut keep = crate::text::marker::hold_from(text, [close]);
                if self.form.trim {
                    keep -= usize::from(text[..keep].ends_with('\n') && keep > skipped);
                }
                let keep = keep.max(skipped);
                sink.arguments(&escaped(&text[skipped..keep]));
                (keep > 0).then_some((keep, Status::More))
            }
        }
    }

    fn trimmed<'t>(&self, text: &'t str) -> &'t str {
        match self.form.trim {
            true => {
                let text = text.strip_prefix('\n').unwrap_or(text);
                text.strip_suffix('\n').unwrap_or(text)
            }
            false => text,
        }
    }

    /// A value that is no string by its schema: JSON if it is any, words of Python, else a string.
    fn write(&self, text: &str) -> String {
        let plain = text.trim();
        let json = serde_json::from_str::<Json>(plain).ok();
        let word = match plain {
            "True" => Some(Json::Bool(true)),
            "False" => Some(Json::Bool(false)),
            "None" => Some(Json::Null),
            _ => None,
        };
        let value = json.or(word).unwrap_or_else(|| Json::String(text.to_owned()));
        // A bare text in quotation marks stays as it is written where any type fits.
        match (&value, self.kind) {
            (Json::String(_), Kind::Any) => Json::String(text.to_owned()).to_string(),
            _ => value.to_string(),
        }
    }
}

/// The inside of a JSON string.
fn escaped(text: &str) -> String {
    let json = Json::String(text.to_owned()).to_string();
    json[1..json.len() - 1].to_owned()
}

impl Region for Reader {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink) -> (usize, Status) {
        let mut taken = 0;
        loop {
            match self.advance(&text[taken..], last, sink) {
                None => return (taken, Status::More),
                Some((len, Status::More)) => taken += len,
                Some((len, status)) => return (taken + len, status),
            }
        }
    }
}
