//! Functionary 3.2: everything has a recipient on a line of its own. The prompt ends in `>>>`, so that the first recipient
//! comes at once: `all` for content, the name of a tool for its arguments; the next ones follow `>>>`.

use super::driver::{Region, Sink};
use super::named::name;
use super::scan::{Status, ValueScan, blank};
use crate::text::marker::hold_from;

const NEXT: &str = ">>>";
const MAX_HEAD: usize = 256;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Recipient,
    Content,
    Arguments,
    After,
}

/// Reads the whole output.
#[derive(Default)]
pub(super) struct Reader {
    stage: Stage,
    scan: ValueScan,
}

impl Reader {
    fn advance(&mut self, text: &str, last: bool, sink: &mut Sink) -> Option<(usize, Status)> {
        match self.stage {
            Stage::Recipient => {
                let Some(end) = text.find('\n') else {
                    if !last && text.len() <= MAX_HEAD {
                        return None;
                    }
                    self.stage = Stage::Content;
                    return Some((0, Status::More));
                };
                let recipient = text[..end].trim();
                if recipient == "all" {
                    self.stage = Stage::Content;
                    return Some((end + 1, Status::More));
                }
                let body = end + 1 + blank(&text[end + 1..]);
                match text[body..].chars().next() {
                    None if !last => None,
                    Some('{') if name(recipient).is_some_and(|name| sink.start(&name, None)) => {
                        (self.stage, self.scan) = (Stage::Arguments, ValueScan::default());
                        Some((body, Status::More))
                    }
                    // No recipient at all: the model just speaks.
                    _ => {
                        self.stage = Stage::Content;
                        Some((0, Status::More))
                    }
                }
            }
            Stage::Content => {
                if let Some(at) = text.find(NEXT) {
                    sink.content(&text[..at]);
                    self.stage = Stage::Recipient;
                    return Some((at + NEXT.len(), Status::More));
                }
                let keep = if last { text.len() } else { hold_from(text, [NEXT]) };
                sink.content(&text[..keep]);
                (keep > 0).then_some((keep, Status::More))
            }
            Stage::Arguments => {
                let (len, status) = self.scan.feed(text);
                sink.arguments(&text[..len]);
                match status {
                    Status::More if len == 0 => None,
                    Status::More => Some((len, Status::More)),
                    Status::Done | Status::Broken => {
                        sink.end();
                        self.stage = Stage::After;
                        Some((len, Status::More))
                    }
                }
            }
            Stage::After => {
                let rest = text.trim_start();
                if rest.starts_with(NEXT) {
                    self.stage = Stage::Recipient;
                    return Some((text.len() - rest.len() + NEXT.len(), Status::More));
                }
                if NEXT.starts_with(rest) && !last {
                    return None;
                }
                self.stage = Stage::Content;
                Some((0, Status::More))
            }
        }
    }
}

impl Region for Reader {
    fn step(&mut self, text: &str, last: bool, sink: &mut Sink) -> (usize, Status) {
        let mut taken = 0;
        while let Some((len, _)) = self.advance(&text[taken..], last, sink) {
            taken += len;
        }
        (taken, Status::More)
    }
}
