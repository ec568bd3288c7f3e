//! What an answer must look like: the ways in which APIs ask for schemas, grammars and choices, and the rule for the engine.

use std::sync::Arc;

use kiln_engine::run::Constraint;
use kiln_engine::text::constraint::{ConstraintError, Constraints, Rule};
use kiln_engine::text::reasoning::Markers;
use kiln_engine::text::{Family, Tool};
use kiln_engine::tokenizer::{TokenType, Tokenizer};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::chat::{Chat, ToolChoice};
use crate::refusal::{Kind, Refusal};
use crate::shelf::Loaded;

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Shape {
    /// JSON that fits a schema.
    Schema(Value),
    /// A regular expression.
    Regex(String),
    /// One of these.
    Choice(Vec<String>),
    /// A grammar in GBNF or Lark.
    Grammar(String),
}

/// The fields that ask for it, with the names of OpenAI, vLLM and llama.cpp.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Shape")]
pub(crate) struct ShapeFields {
    response_format: Option<Value>,
    structured_outputs: Option<Value>,
    grammar: Option<String>,
    json_schema: Option<Value>,
}

impl ShapeFields {
    /// What is asked for; at most one thing may be.
    pub(crate) fn shape(&self) -> Result<Option<Shape>, Refusal> {
        let mut found = Vec::new();
        if let Some(format) = &self.response_format {
            found.extend(response_format("response_format", format)?);
        }
        if let Some(outputs) = &self.structured_outputs {
            found.extend(structured_outputs(outputs)?);
        }
        found.extend(self.grammar.clone().filter(|g| !g.is_empty()).map(Shape::Grammar));
        found.extend(self.json_schema.clone().map(Shape::Schema));
        if found.len() > 1 {
            let message = "only one of response_format, structured_outputs, grammar and json_schema may be given";
            return Err(Refusal::new(Kind::Invalid, message));
        }
        Ok(found.pop())
    }
}

/// Any object.
pub(crate) fn object() -> Value {
    json!({"type": "object"})
}

/// OpenAI's `response_format`, and llama.cpp's `{"type": "json_object", "schema": ...}`.
pub(crate) fn response_format(param: &str, format: &Value) -> Result<Option<Shape>, Refusal> {
    let missing = || Refusal::invalid(format!("{param}.json_schema.schema"), format!("`{param}` has no schema"));
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => {
            Ok(Some(Shape::Schema(format.get("schema").filter(|s| !s.is_null()).cloned().unwrap_or_else(object))))
        }
        Some("json_schema") => {
            let schema = format.get("json_schema").and_then(|s| s.get("schema")).or_else(|| format.get("schema"));
            Ok(Some(Shape::Schema(schema.filter(|s| !s.is_null()).cloned().ok_or_else(missing)?)))
        }
        Some("grammar") => {
            let grammar = format.get("grammar").and_then(Value::as_str);
            let wrong = || Refusal::invalid(format!("{param}.grammar"), "the grammar must be a string");
            Ok(Some(Shape::Grammar(grammar.ok_or_else(wrong)?.to_owned())))
        }
        other => {
            let other = other.unwrap_or("nothing");
            let message = format!("`{param}.type` is {other:?}; it must be text, json_object or json_schema");
            Err(Refusal::invalid(format!("{param}.type"), message))
        }
    }
}

fn structured_outputs(outputs: &Value) -> Result<Option<Shape>, Refusal> {
    let wrong = |what: &str| Refusal::invalid("structured_outputs", format!("`structured_outputs` {what}"));
    let object = outputs.as_object().ok_or_else(|| wrong("must be an object"))?;
    let mut found = Vec::new();
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let text =
            || value.as_str().map(str::to_owned).ok_or_else(|| wrong(&format!("has a {name} that is no string")));
        match name.as_str() {
            "json" => found.push(Shape::Schema(match value {
                Value::String(text) => serde_json::from_str(text).map_err(|_| wrong("has a json that is no JSON"))?,
                other => other.clone(),
            })),
            "json_object" if value == &Value::Bool(true) => found.push(Shape::Schema(self::object())),
            "json_object" | "whitespace_pattern" | "disable_any_whitespace" | "disable_additional_properties" => {}
            "regex" => found.push(Shape::Regex(text()?)),
            "grammar" => found.push(Shape::Grammar(text()?)),
            "choice" => {
                let texts = value.as_array().and_then(|list| {
                    list.iter().map(|v| v.as_str().map(str::to_owned)).collect::<Option<Vec<String>>>()
                });
                let texts = texts.filter(|texts| !texts.is_empty());
                found.push(Shape::Choice(texts.ok_or_else(|| wrong("has a choice that is no list of strings"))?));
            }
            other => return Err(Refusal::unsupported("structured_outputs", format!("`{other}` is not served"))),
        }
    }
    if found.len() > 1 {
        return Err(wrong("must hold exactly one of json, regex, choice, grammar and json_object"));
    }
    Ok(found.pop())
}

/// A rule of the engine, as it stands in the request.
fn rule(shape: &Shape) -> Rule {
    match shape {
        // Many clients mean an object by an empty schema.
        Shape::Schema(schema) if *schema == object() || *schema == json!({}) => Rule::JsonObject,
        Shape::Schema(schema) => Rule::JsonSchema(schema.clone()),
        Shape::Regex(regex) => Rule::Regex(regex.clone()),
        Shape::Choice(texts) => Rule::Choice(texts.clone()),
        Shape::Grammar(grammar) if grammar.contains("::=") => Rule::Gbnf(grammar.clone()),
        Shape::Grammar(grammar) => Rule::Lark(grammar.clone()),
    }
}

fn compile(loaded: &Loaded, rule: &Rule) -> Result<Box<dyn Constraint>, Refusal> {
    let constraints = loaded.constraints.get_or_init(|| {
        let model = loaded.scheduler.model();
        let made = Constraints::new(Arc::clone(&model.tokenizer), Some(model.config.vocab), &loaded.ends);
        made.map_err(|error| error.to_string())
    });
    let constraints = constraints.as_ref().map_err(|why| Refusal::new(Kind::CannotDo, why.clone()))?;
    let compiled = constraints.compile(rule).map_err(|error| match &error {
        ConstraintError::Schema { .. } => Refusal::new(Kind::Schema, error.to_string()),
        ConstraintError::Vocabulary(_) => Refusal::new(Kind::CannotDo, error.to_string()),
        ConstraintError::Broken(_) | ConstraintError::Tokenizer(_) => Refusal::internal(&error),
        _ => Refusal::new(Kind::Grammar, error.to_string()),
    })?;
    Ok(Box::new(compiled))
}

/// The rule for a plain text.
pub(crate) fn plain_constraint(loaded: &Loaded, shape: &Shape) -> Result<Box<dyn Constraint>, Refusal> {
    compile(loaded, &rule(shape))
}

/// The rule for a conversation's answer: the shape that was asked for or a call that must come, behind reasoning where the
/// model reasons.
pub(crate) fn constraint(
    loaded: &Loaded,
    chat: &Chat,
    offered: &[Tool],
    source: &str,
    generation_prompt: &str,
) -> Result<Option<Box<dyn Constraint>>, Refusal> {
    let tokenizer = &loaded.scheduler.model().tokenizer;
    let thoughts =
        if chat.keep_reasoning == Some(true) { None } else { thoughts(tokenizer, source, generation_prompt) };
    let forced = match &chat.tool_choice {
        ToolChoice::Required => Some(offered.iter().collect::<Vec<_>>()),
        ToolChoice::Named(name) => Some(offered.iter().filter(|tool| tool.name == *name).collect()),
        ToolChoice::Auto | ToolChoice::None => None,
    };
    if let Some(tools) = forced {
        for tool in &tools {
            // A mistake in a schema is found by itself, where its place can be told.
            compile(loaded, &Rule::JsonSchema(arguments(tool)))?;
        }
        let grammar = calls(tokenizer, source, &tools, chat.parallel_calls)?;
        return compile(loaded, &Rule::Lark(behind(thoughts, &grammar))).map(Some);
    }
    let Some(shape) = &chat.shape else { return Ok(None) };
    let compiled = compile(loaded, &rule(shape))?;
    match (thoughts, shape) {
        (None, _) => Ok(Some(compiled)),
        (Some(thoughts), Shape::Schema(schema)) => {
            let grammar = format!("answer: %json {}\n", own_schema(schema));
            compile(loaded, &Rule::Lark(behind(Some(thoughts), &grammar))).map(Some)
        }
        (Some(thoughts), Shape::Regex(regex)) => {
            let grammar = format!("answer: ANSWER\nANSWER: /{}/\n", regex.replace('/', "\\/"));
            compile(loaded, &Rule::Lark(behind(Some(thoughts), &grammar))).map(Some)
        }
        (Some(thoughts), Shape::Choice(texts)) => {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            let grammar = format!("answer: {}\n", texts.join(" | "));
            compile(loaded, &Rule::Lark(behind(Some(thoughts), &grammar))).map(Some)
        }
        // A grammar of the client's own says everything, reasoning as well.
        (Some(_), Shape::Grammar(_)) => Ok(Some(compiled)),
    }
}

/// A schema without what only we may say in it.
fn own_schema(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Some(schema) = schema.as_object_mut() {
        // Endless white space would let a weak model write nothing else.
        let options = json!({"whitespace_flexible": true, "whitespace_pattern": r"[ \t\n]{0,40}"});
        schema.insert("x-guidance".into(), options);
    }
    schema
}

/// A text in a grammar: control tokens stand for themselves.
fn literal(tokenizer: &Tokenizer, text: &str) -> String {
    let control =
        tokenizer.token_id(text).filter(|id| tokenizer.vocab().token_types[*id as usize] == TokenType::Control);
    match control {
        Some(_) if text.starts_with('<') && text.ends_with('>') => text.to_owned(),
        Some(id) => format!("<[{id}]>"),
        None => json!(text).to_string(),
    }
}

/// The rule for reasoning before the answer; none where the model does not reason or has finished.
fn thoughts(tokenizer: &Tokenizer, source: &str, generation_prompt: &str) -> Option<String> {
    let markers = Markers::of_template(source)?;
    let (open, close) = (literal(tokenizer, markers.open.trim_end()), literal(tokenizer, markers.close));
    let (opened, closed) = (generation_prompt.rfind(markers.open.trim_end()), generation_prompt.rfind(markers.close));
    let body = match close.starts_with('"') {
        true => format!("thought[lazy]: /(.|\\n)*{}/\n", regex_literal(markers.close)),
        false => format!("thought: THOUGHT {close}\nTHOUGHT: /(.|\\n)*/\n"),
    };
    match (opened, closed) {
        (Some(open), Some(close)) if close > open => None,
        (None, Some(_)) => None,
        (Some(_), _) => Some(format!("start: thought GAP? answer\nGAP: /\\n+/\n{body}")),
        (None, None) => Some(format!("start: ({open} thought GAP?)? answer\nGAP: /\\n+/\n{body}")),
    }
}

fn regex_literal(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_alphanumeric() { vec![c] } else { vec!['\\', c] }).collect()
}

fn behind(thoughts: Option<String>, grammar: &str) -> String {
    format!("{}{grammar}", thoughts.unwrap_or_else(|| "start: answer\n".to_owned()))
}

fn arguments(tool: &Tool) -> Value {
    match &tool.parameters {
        schema @ Value::Object(map) if !map.is_empty() => schema.clone(),
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

/// A grammar of calls as the model's family writes them, for the families that write JSON.
fn calls(tokenizer: &Tokenizer, source: &str, tools: &[&Tool], parallel: bool) -> Result<String, Refusal> {
    let family = Family::of_template(source).name;
    let object = |arguments_name: &str| {
        let mut all = json!({
            "anyOf": [],
            "x-guidance": {"whitespace_flexible": false, "key_separator": ": ", "item_separator": ", "},
        });
        let mut any = Vec::new();
        for tool in tools {
            let mut arguments = arguments(tool);
            // References are looked up from the root of the whole schema.
            for place in ["$defs", "definitions"] {
                if let Some(Value::Object(found)) = arguments.as_object_mut().and_then(|map| map.remove(place)) {
                    found.into_iter().for_each(|(name, schema)| all[place][name] = schema);
                }
            }
            any.push(json!({
                "type": "object",
                "properties": {"name": {"const": tool.name}, (arguments_name): arguments},
                "required": ["name", arguments_name], "additionalProperties": false,
            }));
        }
        all["anyOf"] = Value::Array(any);
        all
    };
    let more = |rule: &str| if parallel { format!(" ({rule})*") } else { String::new() };
    Ok(match family {
        "hermes" | "other" => {
            let (open, close) = (literal(tokenizer, "<tool_call>"), literal(tokenizer, "</tool_call>"));
            let call = format!("call: {open} \"\\n\" body \"\\n\" {close}\nbody: %json {}\n", object("arguments"));
            format!("answer: call{}\n{call}", more("\"\\n\" call"))
        }
        "llama-3" => format!("answer: body\nbody: %json {}\n", object("parameters")),
        "mistral" => {
            let (open, body) = (literal(tokenizer, "[TOOL_CALLS]"), object("arguments"));
            format!("answer: {open} \"[\" body{} \"]\"\nbody: %json {body}\n", more("\", \" body"))
        }
        family => {
            let message =
                format!("calls of this model's kind ({family}) cannot be forced; only auto and none are served");
            return Err(Refusal::unsupported("tool_choice", message));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(value: Value) -> Result<Option<Shape>, Refusal> {
        serde_json::from_value::<ShapeFields>(value).expect("the fields parse").shape()
    }

    #[test]
    fn there_are_many_ways_to_ask_for_a_shape() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let want = Some(Shape::Schema(schema.clone()));
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        assert_eq!(shape(json!({"response_format": format})).expect("fine"), want);
        assert_eq!(shape(json!({"structured_outputs": {"json": schema.to_string()}})).expect("fine"), want);
        assert_eq!(shape(json!({"json_schema": schema})).expect("fine"), want);
        assert_eq!(shape(json!({"response_format": {"type": "text"}})).expect("fine"), None);
        let choice = shape(json!({"structured_outputs": {"choice": ["a", "b"]}})).expect("fine");
        assert_eq!(choice, Some(Shape::Choice(vec!["a".into(), "b".into()])));
        assert!(shape(json!({"response_format": {"type": "json_schema"}})).is_err());
        assert!(shape(json!({"response_format": {"type": "yaml"}})).is_err());
        assert!(shape(json!({"grammar": "root ::= \"a\"", "json_schema": {}})).is_err());
        assert!(shape(json!({"structured_outputs": {"regex": "a", "choice": ["b"]}})).is_err());
    }
}
