//! GBNF, llama.cpp's grammars, as Lark. A rule that does not lead back to itself is regular and becomes one terminal, so
//! that the lexer sees whole words; the others become rules.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// A grammar larger than this is refused.
const MAX_RULES: usize = 2000;
const MAX_DEPTH: usize = 64;

/// Alternatives of sequences.
type Choices = Vec<Vec<Item>>;

#[derive(Clone, Debug, PartialEq)]
struct Item {
    atom: Atom,
    min: u32,
    /// `None`: any number.
    max: Option<u32>,
}

#[derive(Clone, Debug, PartialEq)]
enum Atom {
    Literal(String),
    /// The inside of a regex class, with its brackets.
    Class(String),
    Any,
    Rule(String),
    Group(Choices),
}

/// Turns a GBNF grammar into a Lark grammar that begins at `start`.
pub(super) fn to_lark(source: &str) -> Result<String, String> {
    let rules = Parser::new(source).grammar()?;
    if !rules.contains_key("root") {
        return Err("the grammar has no rule `root`".into());
    }
    for (name, choices) in &rules {
        for used in references(choices) {
            if !rules.contains_key(&used) {
                return Err(format!("rule `{name}` uses `{used}`, which is not there"));
            }
        }
    }
    let terminals = terminals(&rules);
    let names = lark_names(&rules, &terminals);
    let mut out = String::from("start: ");
    let _ = writeln!(out, "{}", names["root"]);
    for (name, choices) in &rules {
        let mut body = String::new();
        write_choices(choices, &names, &mut body);
        let _ = writeln!(out, "{}: {body}", names[name]);
    }
    Ok(out)
}

/// The rules that do not lead back to themselves, nor to one that does.
fn terminals(rules: &BTreeMap<String, Choices>) -> BTreeSet<String> {
    let mut found: BTreeSet<String> = BTreeSet::new();
    loop {
        let before = found.len();
        for (name, choices) in rules {
            if references(choices).iter().all(|used| found.contains(used)) {
                found.insert(name.clone());
            }
        }
        if found.len() == before {
            return found;
        }
    }
}

fn references(choices: &Choices) -> Vec<String> {
    let mut found = Vec::new();
    for item in choices.iter().flatten() {
        match &item.atom {
            Atom::Rule(name) => found.push(name.clone()),
            Atom::Group(inner) => found.extend(references(inner)),
            Atom::Literal(_) | Atom::Class(_) | Atom::Any => {}
        }
    }
    found
}

/// Lark's names by GBNF's: capitals for terminals, small letters for rules.
type Names = BTreeMap<String, String>;

fn lark_names(rules: &BTreeMap<String, Choices>, terminals: &BTreeSet<String>) -> Names {
    let name = |(index, name): (usize, &String)| {
        let plain: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let lark = match terminals.contains(name) {
            true => format!("T{index}_{}", plain.to_ascii_uppercase()),
            false => format!("r{index}_{}", plain.to_ascii_lowercase()),
        };
        (name.clone(), lark)
    };
    rules.keys().enumerate().map(name).collect()
}

fn write_choices(choices: &Choices, names: &Names, out: &mut String) {
    for (at, sequence) in choices.iter().enumerate() {
        if at > 0 {
            out.push_str(" | ");
        }
        if sequence.is_empty() {
            out.push_str("\"\"");
        }
        for (at, item) in sequence.iter().enumerate() {
            if at > 0 {
                out.push(' ');
            }
            write_item(item, names, out);
        }
    }
}

fn write_item(item: &Item, names: &Names, out: &mut String) {
    match &item.atom {
        Atom::Literal(text) => out.push_str(&serde_json::Value::from(text.as_str()).to_string()),
        Atom::Class(class) => {
            let _ = write!(out, "/{class}/");
        }
        Atom::Any => out.push_str(r"/[\s\S]/"),
        Atom::Rule(name) => out.push_str(&names[name]),
        Atom::Group(inner) => {
            out.push('(');
            write_choices(inner, names, out);
            out.push(')');
        }
    }
    match (item.min, item.max) {
        (1, Some(1)) => {}
        (0, Some(1)) => out.push('?'),
        (0, None) => out.push('*'),
        (1, None) => out.push('+'),
        (min, None) => {
            let _ = write!(out, "{{{min},}}");
        }
        (min, Some(max)) => {
            let _ = write!(out, "{{{min},{max}}}");
        }
    }
}

struct Parser<'s> {
    source: &'s str,
    at: usize,
}

impl<'s> Parser<'s> {
    fn new(source: &'s str) -> Self {
        Self { source, at: 0 }
    }

    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn fail<T>(&self, what: &str) -> Result<T, String> {
        let line = self.source[..self.at].matches('\n').count() + 1;
        Err(format!("line {line}: {what}"))
    }

    /// Skips white space and comments; newlines only where a rule may go on.
    fn skip(&mut self, newlines: bool) {
        loop {
            let rest = self.rest();
            let blank = |c: char| c == ' ' || c == '\t' || (newlines && (c == '\n' || c == '\r'));
            let skipped = rest.len() - rest.trim_start_matches(blank).len();
            self.at += skipped;
            if self.rest().starts_with('#') {
                self.at += self.rest().find('\n').unwrap_or(self.rest().len());
            } else if skipped == 0 {
                return;
            }
        }
    }

    fn grammar(mut self) -> Result<BTreeMap<String, Choices>, String> {
        let mut rules = BTreeMap::new();
        self.skip(true);
        while !self.rest().is_empty() {
            let name = self.name()?;
            self.skip(false);
            if !self.rest().starts_with("::=") {
                return self.fail(&format!("`::=` is wanted after `{name}`"));
            }
            self.at += 3;
            self.skip(true);
            let choices = self.choices(0)?;
            if rules.insert(name.clone(), choices).is_some() {
                return self.fail(&format!("rule `{name}` is there twice"));
            }
            if rules.len() > MAX_RULES {
                return self.fail(&format!("more than {MAX_RULES} rules"));
            }
            if !self.rest().is_empty() && !self.rest().starts_with(['\n', '\r']) {
                return self.fail("something follows the rule that is no part of it");
            }
            self.skip(true);
        }
        Ok(rules)
    }

    fn name(&mut self) -> Result<String, String> {
        let rest = self.rest();
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let len = rest.find(|c| !fits(c)).unwrap_or(rest.len());
        if len == 0 {
            return self.fail("a name is wanted");
        }
        self.at += len;
        Ok(rest[..len].to_owned())
    }

    fn choices(&mut self, depth: usize) -> Result<Choices, String> {
        if depth > MAX_DEPTH {
            return self.fail(&format!("groups are nested more than {MAX_DEPTH} deep"));
        }
        let nested = depth > 0;
        let mut choices = vec![self.sequence(depth)?];
        while self.rest().starts_with('|') {
            self.at += 1;
            self.skip(true);
            choices.push(self.sequence(depth)?);
        }
        if nested {
            self.skip(true);
        }
        Ok(choices)
    }

    fn sequence(&mut self, depth: usize) -> Result<Vec<Item>, String> {
        let mut items = Vec::new();
        loop {
            self.skip(depth > 0);
            // A line that begins by `|` goes on with the rule.
            let ahead = self.rest().trim_start();
            if depth == 0 && self.rest().starts_with(['\n', '\r']) {
                if ahead.starts_with('|') {
                    self.skip(true);
                }
                return Ok(items);
            }
            let Some(first) = self.rest().chars().next() else { return Ok(items) };
            let atom = match first {
                '"' => Atom::Literal(self.literal()?),
                '[' => Atom::Class(self.class()?),
                '.' => {
                    self.at += 1;
                    Atom::Any
                }
                '(' => {
                    self.at += 1;
                    self.skip(true);
                    let inner = self.choices(depth + 1)?;
                    if !self.rest().starts_with(')') {
                        return self.fail("a group is not closed by `)`");
                    }
                    self.at += 1;
                    Atom::Group(inner)
                }
                c if c.is_ascii_alphanumeric() || c == '_' || c == '-' => Atom::Rule(self.name()?),
                '|' | ')' => return Ok(items),
                other => return self.fail(&format!("`{other}` is not expected here")),
            };
            let (min, max) = self.repetition()?;
            items.push(Item { atom, min, max });
        }
    }

    fn repetition(&mut self) -> Result<(u32, Option<u32>), String> {
        let found = match self.rest().chars().next() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                let Some(end) = self.rest().find('}') else { return self.fail("`{` is not closed by `}`") };
                let inner = self.rest()[1..end].to_owned();
                let number = |text: &str| text.trim().parse::<u32>().ok().filter(|number| *number <= 100_000);
                let range = match inner.split_once(',') {
                    None => number(&inner).map(|times| (times, Some(times))),
                    Some((min, "")) => number(min).map(|min| (min, None)),
                    Some((min, max)) => number(min).zip(number(max)).map(|(min, max)| (min, Some(max))),
                };
                let Some(range) = range.filter(|(min, max)| max.is_none_or(|max| *min <= max)) else {
                    return self.fail(&format!("`{{{inner}}}` is no repetition"));
                };
                self.at += end;
                range
            }
            _ => return Ok((1, Some(1))),
        };
        self.at += 1;
        Ok(found)
    }

    /// One character, with escapes.
    fn character(&mut self) -> Result<char, String> {
        let Some(c) = self.rest().chars().next() else { return self.fail("the text ends too early") };
        self.at += c.len_utf8();
        if c != '\\' {
            return Ok(c);
        }
        let Some(escape) = self.rest().chars().next() else { return self.fail("the text ends too early") };
        self.at += escape.len_utf8();
        let digits = match escape {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Ok(other),
        };
        let code = self.rest().get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok());
        let Some(c) = code.and_then(char::from_u32) else { return self.fail("an escape is no character") };
        self.at += digits;
        Ok(c)
    }

    fn literal(&mut self) -> Result<String, String> {
        self.at += 1;
        let mut text = String::new();
        while !self.rest().starts_with('"') {
            if self.rest().is_empty() {
                return self.fail("a text is not closed by `\"`");
            }
            text.push(self.character()?);
        }
        self.at += 1;
        Ok(text)
    }

    fn class(&mut self) -> Result<String, String> {
        self.at += 1;
        let mut class = String::from("[");
        if self.rest().starts_with('^') {
            self.at += 1;
            class.push('^');
        }
        while !self.rest().starts_with(']') {
            if self.rest().is_empty() {
                return self.fail("a class is not closed by `]`");
            }
            let low = self.character()?;
            push_escaped(low, &mut class);
            if self.rest().starts_with('-') && !self.rest().starts_with("-]") {
                self.at += 1;
                let high = self.character()?;
                if high < low {
                    return self.fail("a range of characters runs backwards");
                }
                class.push('-');
                push_escaped(high, &mut class);
            }
        }
        self.at += 1;
        if class.trim_start_matches(['[', '^']).is_empty() {
            return self.fail("a class is empty");
        }
        class.push(']');
        Ok(class)
    }
}

/// A character as it is written in a regex class between slashes.
fn push_escaped(c: char, out: &mut String) {
    match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | ' ' => out.push(c),
        _ => {
            let _ = write!(out, "\\x{{{:X}}}", u32::from(c));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_rules_become_terminals() {
        let lark =
            to_lark("root ::= \"a\" b # comment\nb ::= [a-z\\n]{2,3} |\n  \"x\"?\n | root\n").expect("it is sound");
        assert_eq!(lark, "start: r1_root\nr0_b: /[a-z\\x{A}]/{2,3} | \"x\"? | r1_root\nr1_root: \"a\" r0_b\n");
        let lark = to_lark("root ::= word (\" \" word)*\nword ::= [^a]+").expect("it is sound");
        assert_eq!(lark, "start: T0_ROOT\nT0_ROOT: T1_WORD (\" \" T1_WORD)*\nT1_WORD: /[^a]/+\n");
    }

    #[test]
    fn mistakes_name_the_line() {
        for (grammar, want) in [
            ("a ::= \"x\"", "no rule `root`"),
            ("root ::= nothing", "`nothing`"),
            ("root ::= \"x\"\nroot ::= \"y\"", "twice"),
            ("root ::=\n\"x", "line 2"),
            ("root ::= [z-a]", "backwards"),
            ("root ::= (\"a\"", "`)`"),
            ("root ::= \"a\"{3,1}", "repetition"),
            ("root ::= ]", "not expected"),
            ("root = \"a\"", "`::=`"),
        ] {
            let error = to_lark(grammar).expect_err("it is wrong");
            assert!(error.contains(want), "{grammar:?}: {error}");
        }
        assert!(to_lark(&format!("root ::= {}\"a\"{}", "(".repeat(100), ")".repeat(100))).is_err());
    }
}
