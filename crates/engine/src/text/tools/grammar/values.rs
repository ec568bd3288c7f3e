//! Values of arguments where they are not written as JSON: as Python has them, and as Gemma does.

use serde_json::{Map, Value as Json};

use super::Rules;

/// Schemas within schemas further than this are taken for anything.
const MAX_DEPTH: usize = 24;

/// How values are written.
pub(super) struct Style {
    words: [&'static str; 3],
    /// What stands around a string; none for quotation marks.
    quote: Option<&'static str>,
    between: &'static str,
    colon: &'static str,
}

impl Style {
    pub(super) fn python() -> Style {
        Style { words: ["True", "False", "None"], quote: None, between: ", ", colon: ": " }
    }

    pub(super) fn gemma(quote: &'static str) -> Style {
        Style { words: ["true", "false", "null"], quote: Some(quote), between: ",", colon: ":" }
    }
}

/// What a schema refers to, if it does.
pub(super) fn resolved<'s>(schema: &'s Json, root: &'s Json) -> &'s Json {
    let mut schema = schema;
    for _ in 0..MAX_DEPTH {
        let Some(path) = schema.get("$ref").and_then(Json::as_str) else { break };
        let found = path.strip_prefix('#').and_then(|path| root.pointer(path));
        let Some(found) = found else { break };
        schema = found;
    }
    schema
}

/// A part of a schema that can still refer to the definitions of the whole.
pub(super) fn with_definitions(schema: &Json, root: &Json) -> Json {
    let mut schema = schema.clone();
    if let Json::Object(map) = &mut schema {
        for key in ["$defs", "definitions"] {
            if let Some(found) = root.get(key) {
                map.entry(key).or_insert_with(|| found.clone());
            }
        }
    }
    schema
}

/// Whether a schema says nothing of the arguments that may come: then all may.
pub(super) fn takes_anything(root: &Json) -> bool {
    root["properties"].as_object().is_none_or(Map::is_empty) && root["additionalProperties"] != false
}

/// The texts that a value can be, where there are only some.
pub(super) fn texts(schema: &Json) -> Option<Vec<&str>> {
    let listed: Vec<&Json> = match (schema.get("enum").and_then(Json::as_array), schema.get("const")) {
        (Some(list), _) => list.iter().collect(),
        (None, Some(one)) => vec![one],
        (None, None) => return None,
    };
    listed.into_iter().map(Json::as_str).collect::<Option<Vec<_>>>().filter(|list| !list.is_empty())
}

/// Whether a value may be a text: then all that is written is one.
pub(super) fn may_be_text(schema: &Json) -> bool {
    let is_text = |kind: &Json| kind == "string";
    match schema.get("type") {
        Some(Json::Array(kinds)) => kinds.iter().any(is_text),
        Some(kind) => is_text(kind),
        None => {
            let any = ["anyOf", "oneOf"].into_iter().find_map(|key| schema.get(key)?.as_array());
            any.is_some_and(|any| any.iter().any(may_be_text))
        }
    }
}

impl Rules<'_> {
    /// The arguments of a call: those that are wanted, and those that may come, in the order of the schema.
    pub(super) fn arguments(
        &mut self,
        root: &Json,
        style: &Style,
        key: impl Fn(&str) -> String,
        number: usize,
    ) -> String {
        if takes_anything(root) {
            let (value, name, colon) = (self.anything(style), self.once("KEY", KEY), self.word(&key("")));
            let (comma, pair) = (self.word(style.between), format!("{name} {colon} {value}"));
            return format!("({pair} ({comma} {pair})*)?");
        }
        self.members(root, root, style, &key, &format!("m_{number}"), 0)
    }

    /// The members of an object. Whether one more needs a comma depends on whether any came before: there is a rule for each.
    fn members(
        &mut self,
        schema: &Json,
        root: &Json,
        style: &Style,
        key: &dyn Fn(&str) -> String,
        name: &str,
        depth: usize,
    ) -> String {
        let empty = Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&empty);
        let required = |key: &String| schema["required"].as_array().is_some_and(|names| names.iter().any(|n| n == key));
        let (mut first, mut more) = (String::new(), String::new());
        for (n, (own, value)) in properties.iter().enumerate().rev() {
            let value = self.value(value, root, style, &format!("{name}_{n}"), depth + 1);
            let member = format!("{} {value}", self.word(&key(own)));
            let comma = self.word(style.between);
            let (a, b) = (format!("{name}_first_{n}"), format!("{name}_more_{n}"));
            if required(own) {
                self.add(&a, &format!("{member} {more}"));
                self.add(&b, &format!("{comma} {member} {more}"));
            } else {
                let otherwise =
                    if first.is_empty() { format!("({member})?") } else { format!("{member} {more} | {first}") };
                self.add(&a, &otherwise);
                self.add(&b, &format!("({comma} {member})? {more}"));
            }
            (first, more) = (a, b);
        }
        first
    }

    /// A value that fits a schema.
    fn value(&mut self, schema: &Json, root: &Json, style: &Style, name: &str, depth: usize) -> String {
        let schema = resolved(schema, root);
        if depth > MAX_DEPTH {
            return self.anything(style);
        }
        let listed = schema.get("enum").and_then(Json::as_array).cloned();
        if let Some(listed) = listed.or_else(|| Some(vec![schema.get("const")?.clone()])) {
            let any: Vec<String> = listed.iter().map(|value| self.written(value, style)).collect();
            return format!("({})", any.join(" | "));
        }
        let any = ["anyOf", "oneOf"].into_iter().find_map(|key| schema.get(key)?.as_array());
        if let Some(any) = any {
            let any: Vec<String> = any
                .iter()
                .enumerate()
                .map(|(n, schema)| self.value(schema, root, style, &format!("{name}_{n}"), depth + 1))
                .collect();
            return format!("({})", any.join(" | "));
        }
        let kinds: Vec<&str> = match schema.get("type") {
            Some(Json::String(kind)) => vec![kind],
            Some(Json::Array(kinds)) => kinds.iter().filter_map(Json::as_str).collect(),
            _ => return self.anything(style),
        };
        let any: Vec<String> = kinds.iter().map(|kind| self.kind(kind, schema, root, style, name, depth)).collect();
        if any.is_empty() { self.anything(style) } else { format!("({})", any.join(" | ")) }
    }

    fn kind(&mut self, kind: &str, schema: &Json, root: &Json, style: &Style, name: &str, depth: usize) -> String {
        match kind {
            "string" => self.text(style),
            "integer" => self.once("INTEGER", "INTEGER: /-?(0|[1-9][0-9]{0,18})/").to_owned(),
            "number" => self.once("NUMBER", NUMBER).to_owned(),
            "boolean" => format!("({} | {})", self.word(style.words[0]), self.word(style.words[1])),
            "null" => self.word(style.words[2]),
            "array" => {
                let item = match schema.get("items") {
                    Some(items) => self.value(items, root, style, &format!("{name}_i"), depth + 1),
                    None => self.anything(style),
                };
                let (open, comma, close) = (self.word("["), self.word(style.between), self.word("]"));
                format!("({open} ({item} ({comma} {item})*)? {close})")
            }
            "object" if schema["properties"].as_object().is_some_and(|map| !map.is_empty()) => {
                let quoted = style.quote.is_none();
                let key = |key: &str| match quoted {
                    true => format!("{}{}", Json::from(key), style.colon),
                    false => format!("{key}{}", style.colon),
                };
                let members = self.members(schema, root, style, &key, &format!("{name}_o"), depth + 1);
                format!("({} {members} {})", self.word("{"), self.word("}"))
            }
            "object" => {
                self.anything(style);
                "object".to_owned()
            }
            _ => self.anything(style),
        }
    }

    /// A value as it is.
    fn written(&self, value: &Json, style: &Style) -> String {
        match (value, style.quote) {
            (Json::Bool(true), _) => self.word(style.words[0]),
            (Json::Bool(false), _) => self.word(style.words[1]),
            (Json::Null, _) => self.word(style.words[2]),
            (Json::String(text), Some(quote)) => self.word(&format!("{quote}{text}{quote}")),
            (Json::String(text), None) if !text.contains(['\'', '"', '\\', '\n']) => {
                format!("({} | {})", self.word(&format!("\"{text}\"")), self.word(&format!("'{text}'")))
            }
            (other, _) => self.word(&other.to_string()),
        }
    }

    fn text(&mut self, style: &Style) -> String {
        match style.quote {
            None => {
                let rule = r#"STRING: /"([^"\\\n]|\\["\\nt])*"/ | /'([^'\\\n]|\\['\\nt])*'/"#;
                self.once("STRING", rule).to_owned()
            }
            Some(quote) => {
                let (open, end) = (self.word(quote), self.until("quoted", quote));
                format!("({open} {end})")
            }
        }
    }

    /// Any value at all.
    fn anything(&mut self, style: &Style) -> String {
        if self.known.contains(&"anything") {
            return "anything".to_owned();
        }
        self.known.push("anything");
        let (text, number) = (self.text(style), self.once("NUMBER", NUMBER));
        let words: Vec<String> = style.words.iter().map(|word| self.word(word)).collect();
        let (comma, colon) = (self.word(style.between), self.word(style.colon));
        let key = match style.quote {
            None => text.clone(),
            Some(_) => self.once("KEY", KEY).to_owned(),
        };
        let [a, b, c, d] = ["[", "]", "{", "}"].map(|bracket| self.word(bracket));
        self.add("anything", &format!("{text} | {number} | {} | array | object", words.join(" | ")));
        self.add("array", &format!("{a} (anything ({comma} anything)*)? {b}"));
        self.add("object", &format!("{c} (member ({comma} member)*)? {d}"));
        self.add("member", &format!("{key} {colon} anything"));
        "anything".to_owned()
    }
}

pub(super) const KEY: &str = "KEY: /[A-Za-z_][A-Za-z0-9_]*/";
const NUMBER: &str = r"NUMBER: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][-+]?[0-9]{1,2})?/";
