//! Grammars of calls: what a model may write where it must call a tool, in the form that its family writes calls in. They are in
//! `llguidance`'s Lark; what they allow, the readers of this folder read.

mod free;
mod values;

use std::fmt::Write as _;

use serde_json::{Value as Json, json};

use super::{Family, Format, Tool, gemma, json as objects, named, python, tagged};
use values::Style;

/// What a region of calls looks like.
#[derive(Debug)]
pub struct CallGrammar {
    /// What a region begins with; empty where calls stand only at the beginning of an answer.
    pub open: &'static str,
    /// What stands between two regions; none where there can be one only.
    pub between: Option<&'static str>,
    /// Rules, of which `rest` is what follows `open`.
    pub rules: String,
}

impl Family {
    /// A grammar of calls of these tools: several where `parallel` says so and the family can. `source` is the template, and `word` writes
    /// a text as a grammar has it, control tokens as such.
    pub fn grammar(&self, source: &str, tools: &[&Tool], parallel: bool, word: &dyn Fn(&str) -> String) -> CallGrammar {
        let mut rules = Rules { tools, parallel, word, text: String::new(), known: Vec::new() };
        let (open, between) = match self.format {
            Format::Json(form) => rules.objects(form),
            Format::Named(form) => rules.named(form),
            Format::Tagged(form) => rules.tagged(form, source),
            Format::Python(form) => rules.python(form),
            Format::Gemma(form) => rules.gemma(form),
            Format::Functionary => rules.functionary(),
            Format::Harmony => rules.harmony(),
        };
        CallGrammar { open, between: between.filter(|_| parallel), rules: rules.text }
    }
}

/// What a region begins with, and what stands between two.
type Frame = (&'static str, Option<&'static str>);

/// Rules as they are collected.
struct Rules<'a> {
    tools: &'a [&'a Tool],
    parallel: bool,
    word: &'a dyn Fn(&str) -> String,
    text: String,
    /// Names of rules that are written once.
    known: Vec<&'static str>,
}

/// The name of an argument: one of a schema, or any, by a rule.
enum Key<'k> {
    Own(&'k str),
    Any(String),
}

/// The schema of a tool's arguments; a tool without one takes none.
fn schema(tool: &Tool) -> Json {
    match &tool.parameters {
        Json::Object(map) if !map.is_empty() => tool.parameters.clone(),
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

impl Rules<'_> {
    fn add(&mut self, name: &str, body: &str) {
        // Writing into a string does not fail.
        let _ = writeln!(self.text, "{name}: {body}");
    }

    /// A rule that several others use.
    fn once(&mut self, name: &'static str, rule: &str) -> &'static str {
        if !self.known.contains(&name) {
            self.known.push(name);
            self.text.push_str(rule);
            self.text.push('\n');
        }
        name
    }

    /// A text; nothing for an empty one.
    fn word(&self, text: &str) -> String {
        if text.is_empty() { String::new() } else { (self.word)(text) }
    }

    /// An item, or several of them.
    fn list(&self, item: &str, between: &str) -> String {
        match self.parallel {
            true => format!("{item} ({} {item})*", self.word(between)),
            false => item.to_owned(),
        }
    }

    /// JSON by a schema, written as models are shown it.
    fn json(&mut self, name: &str, schema: &Json) {
        let mut schema = schema.clone();
        if let Some(schema) = schema.as_object_mut() {
            let options = json!({"whitespace_flexible": false, "key_separator": ": ", "item_separator": ", "});
            schema.insert("x-guidance".into(), options);
        }
        self.add(name, &format!("%json {schema}"));
    }

    /// `call` is one of all tools: what stands around the arguments is told by `around`, which are JSON.
    fn calls(&mut self, around: impl Fn(&mut Self, &Tool) -> (String, String)) {
        let mut any = Vec::new();
        for (i, tool) in self.tools.iter().enumerate() {
            let (before, after) = around(self, tool);
            self.json(&format!("arguments_{i}"), &schema(tool));
            self.add(&format!("call_{i}"), &format!("{before} arguments_{i} {after}"));
            any.push(format!("call_{i}"));
        }
        self.add("call", &any.join(" | "));
    }

    /// A text with a name in the place of `{name}`, a number in that of `{digits}` and nine letters in that of `{id}`.
    fn pattern(&mut self, pattern: &str, name: &str) -> String {
        let text = pattern.replace("{name}", name);
        for (mark, terminal, rule) in
            [("{digits}", "DIGITS", "DIGITS: /[0-9]{1,3}/"), ("{id}", "NINE", "NINE: /[A-Za-z0-9]{9}/")]
        {
            if let Some((before, after)) = text.split_once(mark) {
                let terminal = self.once(terminal, rule);
                return format!("{} {terminal} {}", self.word(before), self.word(after));
            }
        }
        self.word(&text)
    }

    /// Objects with a name and arguments, alone or in a list.
    fn objects(&mut self, form: &'static objects::Form) -> Frame {
        let open = form.opens.first().copied().unwrap_or_default();
        // Of two ways to begin, the first one has no end of its own.
        let close = if form.opens.len() == 1 { form.close } else { "" };
        let [name_key, arguments_key] = form.keys;
        self.calls(|rules, tool| {
            let name = Json::from(tool.name.as_str());
            let head = match form.name_is_key {
                true => format!("{{{name}: "),
                false => format!("{{{}\"{name_key}\": {name}, \"{arguments_key}\": ", form.numbered),
            };
            (rules.pattern(&head, ""), rules.word("}"))
        });
        let objects::Written { before, between, after } = form.written;
        let calls = if between.is_empty() { "call".to_owned() } else { self.list("call", between) };
        // What is no word of its own ends behind the list.
        let rest = format!("{} {calls} {} {}", self.word(before), self.word(after), self.word(close));
        self.add("rest", &rest);
        match form.at_start {
            true => ("", None),
            false => (open, Some("\n").filter(|_| between.is_empty())),
        }
    }

    /// A name between marks, and arguments as JSON.
    fn named(&mut self, form: &'static named::Form) -> Frame {
        let open = form.opens.first().copied().unwrap_or_default();
        let named::Written { head, tail, between } = form.written;
        self.calls(|rules, tool| (rules.pattern(&format!("{}{head}", form.call), &tool.name), rules.word(tail)));
        if form.call.is_empty() {
            self.add("rest", "call");
            return (open, Some(between));
        }
        let calls = self.list("call", between);
        let rest = format!("{calls} {}", self.word(form.close));
        self.add("rest", &rest);
        (open, None)
    }

    /// Everything up to and with a text.
    fn until(&mut self, name: &'static str, end: &str) -> &'static str {
        let written = self.word(end);
        // A text that is written letter by letter is looked for; control tokens are no letters.
        let quoted = Json::from(end).to_string();
        let rule = match written == quoted {
            true => format!("{name}[lazy]: /(.|\\n)*{}/", as_regex(end)),
            false => format!("{name}: {}? {written}", self.once("TEXT", "TEXT: /(.|\\n)+/")),
        };
        self.once(name, &rule)
    }

    /// Arguments value by value between tags. Strings are as they are, other values JSON.
    fn tagged(&mut self, form: &'static tagged::Form, source: &str) -> Frame {
        // Where a region has one of several names, the template shows which.
        let named = form.opens.len() == form.close.len();
        let at = form.opens.iter().position(|open| named && source.contains(inner(open))).unwrap_or_default();
        let (open, close) = (form.opens[at], form.close.get(at).copied().unwrap_or_default());
        let line = if form.loose { format!("{}?", self.word("\n")) } else { self.word("\n") };
        let mut any = Vec::new();
        for (i, tool) in self.tools.iter().enumerate() {
            let root = schema(tool);
            let mut parameters = Vec::new();
            if values::takes_anything(&root) {
                let name = self.once("KEY", values::KEY).to_owned();
                let any = json!({"type": "string"});
                parameters.push(format!("({})*", self.tagged_value(form, "any", &Key::Any(name), &any, &root, &line)));
            }
            for (n, (key, own)) in root["properties"].as_object().into_iter().flatten().enumerate() {
                let value = self.tagged_value(form, &format!("value_{i}_{n}"), &Key::Own(key), own, &root, &line);
                let required = root["required"].as_array().is_some_and(|names| names.iter().any(|name| name == key));
                parameters.push(if required { value } else { format!("({value})?") });
            }
            let head = format!("{}{}{}", form.call.0, tool.name, form.call.1);
            let rule = format!("{} {line} {} {}", self.word(&head), parameters.join(" "), self.word(form.call_close));
            self.add(&format!("call_{i}"), &rule);
            any.push(format!("call_{i}"));
        }
        self.add("call", &any.join(" | "));
        // Where a region is one call, its end is the call's.
        let (one, many) = (form.call_close.is_empty(), form.in_list);
        let calls = if many { self.list("call", "\n") } else { "call".to_owned() };
        let inside = if one { "" } else { line.as_str() };
        // Where line ends may be missing, they may be between regions as well.
        let (behind, between) = if form.loose { (line.as_str(), "") } else { ("", form.between) };
        let rest = format!("{inside} {calls} {inside} {} {behind}", self.word(close));
        self.add("rest", &rest);
        (open, if many { None } else { Some(between) })
    }

    /// One argument between tags, with the line end behind it.
    fn tagged_value(
        &mut self,
        form: &'static tagged::Form,
        name: &str,
        key: &Key,
        own: &Json,
        root: &Json,
        line: &str,
    ) -> String {
        let own = values::resolved(own, root);
        let texts = values::texts(own);
        let is_text = texts.is_some() || values::may_be_text(own);
        let attribute = match form.says_kind {
            true if is_text => "\" string=\"true\"",
            true => "\" string=\"false\"",
            false => "",
        };
        let edge = if form.trim { "\n" } else { "" };
        let head = match key {
            Key::Own(key) => self.word(&format!("{}{key}{attribute}{}", form.key.0, form.key.1)),
            Key::Any(rule) => {
                format!("{} {rule} {}", self.word(form.key.0), self.word(&format!("{attribute}{}", form.key.1)))
            }
        };
        let head = match form.value {
            "" => format!("{head} {}", self.word(edge)),
            value => format!("{head} {line} {}", self.word(value)),
        };
        let close = format!("{edge}{}", form.value_close);
        let value = if let Some(texts) = texts {
            let any: Vec<String> = texts.iter().map(|text| self.word(&format!("{text}{close}"))).collect();
            format!("({})", any.join(" | "))
        } else if is_text {
            self.until("text", &close).to_owned()
        } else {
            self.json(name, &values::with_definitions(own, root));
            format!("{name} {}", self.word(&close))
        };
        format!("{head} {value} {line}")
    }

    /// Calls as Python writes them.
    fn python(&mut self, form: &'static python::Form) -> Frame {
        let any: Vec<String> = (0..self.tools.len()).map(|i| self.python_call(i).0).collect();
        self.add("call", &any.join(" | "));
        // At the beginning the bracket itself is what opens.
        let (open, close) = match form.at_start {
            true => ("", ""),
            false => (form.opens.first().copied().unwrap_or_default(), form.close.first().copied().unwrap_or_default()),
        };
        let calls = self.list("call", ", ");
        let rest = format!("{} {calls} {} {}", self.word("["), self.word("]"), self.word(close));
        self.add("rest", &rest);
        (open, None)
    }

    /// The rule of a call, and its arguments.
    fn python_call(&mut self, i: usize) -> (String, String) {
        let tool = self.tools[i];
        let arguments = self.arguments(&schema(tool), &Style::python(), |key| format!("{key}="), i);
        let name = format!("call_{i}");
        let rule = format!("{} {arguments} {}", self.word(&format!("{}(", tool.name)), self.word(")"));
        self.add(&name, &rule);
        (name, arguments)
    }

    fn gemma(&mut self, form: &'static gemma::Form) -> Frame {
        let mut any = Vec::new();
        for (i, tool) in self.tools.iter().enumerate() {
            let mut root = schema(tool);
            if let Some(Json::Object(properties)) = root.get_mut("properties") {
                // Its template writes them by the alphabet.
                properties.sort_keys();
            }
            let style = Style::gemma(form.quote);
            let arguments = self.arguments(&root, &style, |key| format!("{key}:"), i);
            let head = self.word(&format!("call:{}{{", tool.name));
            let rule = format!("{head} {arguments} {}", self.word("}"));
            self.add(&format!("call_{i}"), &rule);
            any.push(format!("call_{i}"));
        }
        self.add("call", &any.join(" | "));
        let rest = format!("call {}", self.word(form.close));
        self.add("rest", &rest);
        (form.opens.first().copied().unwrap_or_default(), Some(""))
    }

    /// The prompt ends in `>>>`, behind which the name of a tool stands on a line of its own.
    fn functionary(&mut self) -> Frame {
        self.calls(|rules, tool| (rules.word(&format!("{}\n", tool.name)), String::new()));
        let (line, next) = (self.word("\n"), self.word(">>>"));
        let rest = if self.parallel { format!("call ({line}? {next} call)*") } else { "call".to_owned() };
        self.add("rest", &rest);
        ("", None)
    }

    /// A call in a channel of its own, behind thoughts in theirs. The token that ends it ends the text as well.
    fn harmony(&mut self) -> Frame {
        self.calls(|rules, tool| {
            let head = format!("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", tool.name);
            (rules.word(&head), String::new())
        });
        let thought = self.until("thought", "<|end|>");
        let (open, next) = (self.word("<|channel|>analysis<|message|>"), self.word("<|start|>assistant"));
        self.add("rest", &format!("({open} {thought} {next})? call"));
        ("", None)
    }
}

/// The word of a tag.
fn inner(tag: &str) -> &str {
    tag.trim_matches(|c: char| !c.is_ascii_lowercase())
}

/// A text as a regular expression that matches it alone.
pub fn as_regex(text: &str) -> String {
    let meta = |c: char| {
        c.is_ascii_punctuation()
            && !matches!(c, '<' | '>' | '_' | '"' | '\'' | '=' | ':' | ',' | '!' | '@' | '%' | ';' | '`')
    };
    text.chars()
        .flat_map(|c| match c {
            '\n' => vec!['\\', 'n'],
            c if meta(c) => vec!['\\', c],
            c => vec![c],
        })
        .collect()
}

#[cfg(test)]
mod tests;
