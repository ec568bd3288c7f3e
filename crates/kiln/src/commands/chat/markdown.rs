//! Markdown made readable on a terminal while it is written: headings and bold words bold, code coloured, lists with bullets.
//! Everything else stays as it is. What may be the beginning of a mark waits for the next piece.

const BOLD: &str = "1";
const CODE: &str = "36";
const DIM: &str = "2";

/// Where in a text the reader is.
#[derive(Debug)]
pub(super) struct Markdown {
    held: String,
    line_start: bool,
    /// Between two lines of three backticks.
    fenced: bool,
    heading: bool,
    bold: bool,
    code: bool,
}

/// A piece of text and its style.
pub(super) type Styled = (String, &'static str);

/// What the beginning of a line turned out to be.
enum Start {
    /// More must come before it is known.
    Unknown,
    /// A line of backticks, of this many bytes.
    Fence(usize),
    /// A marker of this many bytes that is replaced by a string.
    Mark(usize, String),
    Plain,
}

impl Markdown {
    pub(super) fn new() -> Markdown {
        Markdown { held: String::new(), line_start: true, fenced: false, heading: false, bold: false, code: false }
    }

    /// Takes a piece of text.
    pub(super) fn push(&mut self, text: &str) -> Vec<Styled> {
        self.held.push_str(text);
        self.read(false)
    }

    /// The text is over.
    pub(super) fn finish(&mut self) -> Vec<Styled> {
        self.read(true)
    }

    fn read(&mut self, last: bool) -> Vec<Styled> {
        let mut out: Vec<Styled> = Vec::new();
        while !self.held.is_empty() {
            if self.line_start {
                match self.start(last) {
                    Start::Unknown => break,
                    Start::Fence(bytes) => {
                        self.fenced = !self.fenced;
                        give(&mut out, self.held.drain(..bytes).collect(), DIM);
                        continue;
                    }
                    Start::Mark(bytes, shown) => {
                        self.held.drain(..bytes);
                        give(&mut out, shown, "");
                    }
                    Start::Plain => {}
                }
                self.line_start = false;
            }
            if !self.inside(last, &mut out) {
                break;
            }
        }
        out
    }

    fn start(&mut self, last: bool) -> Start {
        let line_end = self.held.find('\n');
        let line = &self.held[..line_end.unwrap_or(self.held.len())];
        let complete = last || line_end.is_some();
        let rest = line.trim_start_matches(' ');
        let indent = line.len() - rest.len();
        if rest.starts_with("```") {
            let whole = line_end.map_or(self.held.len(), |at| at + 1);
            return if complete { Start::Fence(whole) } else { Start::Unknown };
        }
        if !complete && "```".starts_with(rest) {
            return Start::Unknown;
        }
        if self.fenced {
            return Start::Plain;
        }
        let hashes = rest.bytes().take_while(|b| *b == b'#').count();
        if !complete && (matches!(rest, "-" | "*" | "+") || ((1..=6).contains(&hashes) && hashes == rest.len())) {
            return Start::Unknown;
        }
        if (1..=6).contains(&hashes) && rest[hashes..].starts_with(' ') {
            self.heading = true;
            return Start::Mark(indent + hashes + 1, String::new());
        }
        if ["- ", "* ", "+ "].iter().any(|mark| rest.starts_with(mark)) {
            return Start::Mark(indent + 2, format!("{}• ", &line[..indent]));
        }
        Start::Plain
    }

    /// Gives the text up to the next mark, and passes over the mark. `false`: nothing can be said before more comes.
    fn inside(&mut self, last: bool, out: &mut Vec<Styled>) -> bool {
        let marks: &[char] = match (self.fenced, self.code) {
            (true, _) => &['\n'],
            (_, true) => &['\n', '`'],
            _ => &['\n', '`', '*'],
        };
        let at = self.held.find(marks).unwrap_or(self.held.len());
        let style = match () {
            () if self.fenced || self.code => CODE,
            () if self.bold || self.heading => BOLD,
            () => "",
        };
        give(out, self.held.drain(..at).collect(), style);
        let Some(mark) = self.held.chars().next() else { return false };
        match mark {
            '\n' => {
                (self.line_start, self.heading, self.bold, self.code) = (true, false, false, false);
                give(out, "\n".into(), "");
            }
            '`' => self.code = !self.code,
            _ if self.held.starts_with("**") => {
                self.bold = !self.bold;
                self.held.remove(0);
            }
            _ if self.held.len() == 1 && !last => return false,
            _ => give(out, "*".into(), style),
        }
        self.held.remove(0);
        true
    }
}

fn give(out: &mut Vec<Styled>, text: String, style: &'static str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some((last, of)) if *of == style => last.push_str(&text),
        _ => out.push((text, style)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(pieces: Vec<Styled>) -> Vec<Styled> {
        let mut out = Vec::new();
        pieces.into_iter().for_each(|(text, style)| give(&mut out, text, style));
        out
    }

    #[test]
    fn marks_become_styles_wherever_the_text_is_cut() {
        let text = "# Title\nSome **bold** and `code *x*` 2*3\n- one\n  * two\n```rust\nlet **x** = 1; # no\n```\n**open\nend *";
        let want: Vec<Styled> = [
            ("Title", BOLD),
            ("\nSome ", ""),
            ("bold", BOLD),
            (" and ", ""),
            ("code *x*", CODE),
            (" 2*3\n• one\n  • two\n", ""),
            ("```rust\n", DIM),
            ("let **x** = 1; # no", CODE),
            ("\n", ""),
            ("```\n", DIM),
            ("open", BOLD),
            ("\nend *", ""),
        ]
        .map(|(text, style)| (text.to_owned(), style))
        .to_vec();
        for cut in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
            let mut markdown = Markdown::new();
            let mut got = markdown.push(&text[..cut]);
            got.extend(markdown.push(&text[cut..]));
            got.extend(markdown.finish());
            assert_eq!(merged(got), want, "cut at {cut}");
        }
    }

    #[test]
    fn what_only_looks_like_a_mark_stays() {
        for text in ["#hash", "####### seven", "-dash", "*", "``", "a * b", "   ", "1. one"] {
            let mut markdown = Markdown::new();
            let mut got = markdown.push(text);
            got.extend(markdown.finish());
            let plain: String = got.into_iter().map(|(text, _)| text).collect();
            assert_eq!(plain, if text == "``" { "" } else { text });
        }
    }
}
