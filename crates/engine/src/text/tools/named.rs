//! Calls as a name between markers and then the arguments as JSON: Kimi, DeepSeek, Mistral's later forms, Functionary 3.1.

use super::driver::{Region, Sink};
use super::scan::{Status, ValueScan, blank};

/// The name of a call, and the id that the model gave it.
type Head = (String, Option<String>);

/// One way to write them.
#[derive(Debug)]
pub(super) struct Form {
    /// What a region begins with; one call, or a list of them.
    pub(super) opens: &'static [&'static str],
    /// What each call of a list begins with; empty where the opening itself does.
    pub(super) call: &'static str,
    /// What may follow the arguments of a call.
    call_close: &'static [&'static str],
    /// What ends a list.
    pub(super) close: &'static str,
    /// Name and id from what stands before the arguments.
    head: fn(&str) -> Option<Head>,
    pub(super) written: Written,
}

/// What stands around the arguments where the model is made to write them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    /// Before them: `{name}` stands for the name, `{digits}` for a number, `{id}` for nine letters.
    pub(super) head: &'static str,
    pub(super) tail: &'static str,
    /// Between two calls.
    pub(super) between: &'static str,
}

pub(super) static KIMI: Form = Form {
    opens: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    call: "<|tool_call_begin|>",
    call_close: &["<|tool_call_end|>"],
    close: "<|tool_calls_section_end|>",
    head: kimi,
    written: Written {
        head: "functions.{name}:{digits}<|tool_call_argument_begin|>",
        tail: "<|tool_call_end|>",
        between: "",
    },
};

pub(super) static DEEPSEEK_V3: Form = Form {
    opens: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    call: "<｜tool▁call▁begin｜>",
    call_close: &[FENCE, "<｜tool▁call▁end｜>"],
    close: "<｜tool▁calls▁end｜>",
    head: deepseek,
    written: Written {
        head: "function<｜tool▁sep｜>{name}\n```json\n",
        tail: "\n```<｜tool▁call▁end｜>",
        between: "\n",
    },
};

pub(super) static DEEPSEEK_V31: Form = Form {
    written: Written { head: "{name}<｜tool▁sep｜>", tail: "<｜tool▁call▁end｜>", between: "" },
    ..DEEPSEEK_V3
};

pub(super) static MISTRAL: Form = Form {
    opens: &["[TOOL_CALLS]"],
    call: "",
    call_close: &[],
    close: "",
    head: mistral,
    written: Written { head: "{name}[ARGS]", tail: "", between: "" },
};

pub(super) static MISTRAL_V11: Form =
    Form { written: Written { head: "{name}[CALL_ID]{id}[ARGS]", tail: "", between: "" }, ..MISTRAL };

pub(super) static FUNCTIONARY_31: Form = Form {
    opens: &["<function="],
    call: "",
    call_close: &["</function>"],
    close: "",
    head: functionary,
    written: Written { head: "{name}>", tail: "</function>", between: "" },
};

/// A name that can be one.
pub(super) fn name(text: &str) -> Option<String> {
    let text = text.trim();
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    (!text.is_empty() && text.len() <= 256 && text.chars().all(fits)).then(|| text.to_owned())
}

/// `functions.N:0<|tool_call_argument_begin|>`; the whole is the id.
fn kimi(head: &str) -> Option<Head> {
    let id = head.strip_suffix("<|tool_call_argument_begin|>")?.trim();
    let plain = id.strip_prefix("functions.").unwrap_or(id);
    let plain = plain.rsplit_once(':').map_or(plain, |(plain, _)| plain);
    Some((name(plain)?, Some(id.to_owned())))
}

/// `function<｜tool▁sep｜>N⏎```json⏎` or `N<｜tool▁sep｜>`.
fn deepseek(head: &str) -> Option<Head> {
    let (before, after) = head.split_once("<｜tool▁sep｜>")?;
    let after = after.trim().trim_end_matches("json").trim_end_matches('`').trim();
    Some((name(if after.is_empty() { before } else { after })?, None))
}

/// `N[ARGS]`, `N[CALL_ID]abcdefghi[ARGS]` or `N`.
fn mistral(head: &str) -> Option<Head> {
    let head = head.trim();
    let head = head.strip_suffix("[ARGS]").unwrap_or(head);
    match head.split_once("[CALL_ID]") {
        Some((plain, id)) => Some((name(plain)?, Some(id.trim().to_owned()))),
        None => Some((name(head)?, None)),
    }
}

/// `N>`.
fn functionary(head: &str) -> Option<Head> {
    Some((name(head.trim().strip_suffix('>')?)?, None))
}

/// Stands around arguments in some forms, and so before them as well.
const FENCE: &str = "```";
/// Heads longer than this are none.
const MAX_HEAD: usize = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before a call of a list.
    Call,
    Head,
    Arguments,
    After,
}

/// Reads a region.
pub(super) struct Reader {
    form: &'static Form,
    stage: Stage,
    scan: ValueScan,
    calls: usize,
}

impl Reader {
    pub(super) fn new(form: &'static Form, open: &str) -> Self {
        let stage = if form.call.is_empty() || open == form.call { Stage::Head } else { Stage::Call };
        Self { form, stage, scan: ValueScan::default(), calls: 0 }
    }

    /// One of `markers` at the beginning of `rest`: its length; `None` where more text could make one.
    fn marker(rest: &str, markers: &[&str], last: bool) -> Option<Option<usize>> {
        if let Some(marker) = markers.iter().find(|marker| !marker.is_empty() && rest.starts_with(**marker)) {
            return Some(Some(marker.len()));
        }
        let may_come = markers.iter().any(|marker| marker.starts_with(rest) && !marker.is_empty());
        (last || !may_come).then_some(None)
    }

    fn advance(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        match self.stage {
            Stage::Call => {
                let skipped = blank(text);
                let rest = &text[skipped..];
                if rest.is_empty() {
                    return (last && self.calls > 0).then_some((skipped, Status::Done));
                }
                if let Some(len) = Self::marker(rest, &[self.form.call], last)? {
                    self.stage = Stage::Head;
                    return Some((skipped + len, Status::More));
                }
                match Self::marker(rest, &[self.form.close], last)? {
                    Some(len) => Some((skipped + len, Status::Done)),
                    None if self.calls > 0 => Some((0, Status::Done)),
                    None => Some((0, Status::Broken)),
                }
            }
            Stage::Head => {
                let end = text.find('{');
                // A call without arguments goes straight to its end.
                let closes = self.form.call_close.iter().filter(|close| **close != FENCE);
                let early = closes.filter_map(|close| Some((text.find(close)?, *close))).min();
                match (end, early) {
                    (Some(end), early) if early.is_none_or(|(at, _)| at > end) => {
                        let Some((name, id)) = (self.form.head)(&text[..end]) else { return Some((0, Status::Broken)) };
                        if !sink.start(&name, id) {
                            return Some((0, Status::Broken));
                        }
                        (self.stage, self.scan) = (Stage::Arguments, ValueScan::default());
                        Some((end, Status::More))
                    }
                    (_, Some((at, _))) => self.without_arguments(&text[..at], at, sink),
                    (_, None) if last => self.without_arguments(text, text.len(), sink),
                    (_, None) if text.len() > MAX_HEAD => Some((0, Status::Broken)),
                    (_, None) => None,
                }
            }
            Stage::Arguments => {
                let (len, status) = self.scan.feed(text);
                sink.arguments(&text[..len]);
                match status {
                    Status::More if len == 0 => None,
                    Status::More => Some((len, Status::More)),
                    Status::Done => {
                        sink.end();
                        self.calls += 1;
                        self.stage = Stage::After;
                        Some((len, Status::More))
                    }
                    Status::Broken => Some((len, Status::Broken)),
                }
            }
            Stage::After => {
                let skipped = blank(text);
                let rest = &text[skipped..];
                if rest.is_empty() && !self.form.call_close.is_empty() {
                    return last.then_some((skipped, Status::Done));
                }
                match Self::marker(rest, self.form.call_close, last)? {
                    Some(len) => Some((skipped + len, Status::More)),
                    None if self.form.call.is_empty() => Some((0, Status::Done)),
                    None => {
                        self.stage = Stage::Call;
                        Some((skipped, Status::More))
                    }
                }
            }
        }
    }

    fn without_arguments(&mut self, head: &str, taken: usize, sink: &mut Sink) -> Option<(usize, Status)> {
        let found = (self.form.head)(head).filter(|(name, id)| sink.start(name, id.clone()));
        if found.is_none() {
            return Some((0, Status::Broken));
        }
        sink.arguments("{}");
        sink.end();
        self.calls += 1;
        self.stage = Stage::After;
        Some((taken, Status::More))
    }
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
