//! What an answer must look like: the ways in which APIs ask for schemas, grammars and choices. The library makes rules for the engine of it.

use kiln_llm::chat::Format;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_error::{ApiError, Kind};

/// The fields that ask for it, with the names of OpenAI, vLLM and llama.cpp.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Shape")]
pub(crate) struct ResponseFormatFields {
    response_format: Option<Value>,
    structured_outputs: Option<Value>,
    grammar: Option<String>,
    json_schema: Option<Value>,
}

impl ResponseFormatFields {
    /// What is asked for; at most one thing may be.
    pub(crate) fn shape(&self) -> Result<Option<Format>, ApiError> {
        let mut found = Vec::new();
        if let Some(format) = &self.response_format {
            found.extend(response_format("response_format", format)?);
        }
        if let Some(outputs) = &self.structured_outputs {
            found.extend(structured_outputs(outputs)?);
        }
        found.extend(self.grammar.clone().filter(|g| !g.is_empty()).map(Format::Grammar));
        found.extend(self.json_schema.clone().map(Format::Schema));
        if found.len() > 1 {
            let message = "only one of response_format, structured_outputs, grammar and json_schema may be given";
            return Err(ApiError::new(Kind::Invalid, message));
        }
        Ok(found.pop())
    }
}

/// Any object.
pub(crate) fn object() -> Value {
    json!({"type": "object"})
}

/// OpenAI's `response_format`, and llama.cpp's `{"type": "json_object", "schema": ...}`.
pub(crate) fn response_format(param: &str, format: &Value) -> Result<Option<Format>, ApiError> {
    let missing = || ApiError::invalid(format!("{param}.json_schema.schema"), format!("`{param}` has no schema"));
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => {
            Ok(Some(Format::Schema(format.get("schema").filter(|s| !s.is_null()).cloned().unwrap_or_else(object))))
        }
        Some("json_schema") => {
            let schema = format.get("json_schema").and_then(|s| s.get("schema")).or_else(|| format.get("schema"));
            Ok(Some(Format::Schema(schema.filter(|s| !s.is_null()).cloned().ok_or_else(missing)?)))
        }
        Some("grammar") => {
            let grammar = format.get("grammar").and_then(Value::as_str);
            let wrong = || ApiError::invalid(format!("{param}.grammar"), "the grammar must be a string");
            Ok(Some(Format::Grammar(grammar.ok_or_else(wrong)?.to_owned())))
        }
        other => {
            let other = other.unwrap_or("nothing");
            let message = format!("`{param}.type` is {other:?}; it must be text, json_object or json_schema");
            Err(ApiError::invalid(format!("{param}.type"), message))
        }
    }
}

fn structured_outputs(outputs: &Value) -> Result<Option<Format>, ApiError> {
    let wrong = |what: &str| ApiError::invalid("structured_outputs", format!("`structured_outputs` {what}"));
    let object = outputs.as_object().ok_or_else(|| wrong("must be an object"))?;
    let mut found = Vec::new();
    for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let text =
            || value.as_str().map(str::to_owned).ok_or_else(|| wrong(&format!("has a {name} that is no string")));
        match name.as_str() {
            "json" => found.push(Format::Schema(match value {
                Value::String(text) => serde_json::from_str(text).map_err(|_| wrong("has a json that is no JSON"))?,
                other => other.clone(),
            })),
            "json_object" if value == &Value::Bool(true) => found.push(Format::json()),
            "json_object" | "whitespace_pattern" | "disable_any_whitespace" | "disable_additional_properties" => {}
            "regex" => found.push(Format::Regex(text()?)),
            "grammar" => found.push(Format::Grammar(text()?)),
            "choice" => {
                let texts = value.as_array().and_then(|list| {
                    list.iter().map(|v| v.as_str().map(str::to_owned)).collect::<Option<Vec<String>>>()
                });
                let texts = texts.filter(|texts| !texts.is_empty());
                found.push(Format::Choice(texts.ok_or_else(|| wrong("has a choice that is no list of strings"))?));
            }
            other => return Err(ApiError::unsupported("structured_outputs", format!("`{other}` is not served"))),
        }
    }
    if found.len() > 1 {
        return Err(wrong("must hold exactly one of json, regex, choice, grammar and json_object"));
    }
    Ok(found.pop())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(value: Value) -> Result<Option<Format>, ApiError> {
        serde_json::from_value::<ResponseFormatFields>(value).expect("the fields parse").shape()
    }

    #[test]
    fn there_are_many_ways_to_ask_for_a_shape() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let want = Some(Format::Schema(schema.clone()));
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        assert_eq!(shape(json!({"response_format": format})).expect("fine"), want);
        assert_eq!(shape(json!({"structured_outputs": {"json": schema.to_string()}})).expect("fine"), want);
        assert_eq!(shape(json!({"json_schema": schema})).expect("fine"), want);
        assert_eq!(shape(json!({"response_format": {"type": "text"}})).expect("fine"), None);
        let choice = shape(json!({"structured_outputs": {"choice": ["a", "b"]}})).expect("fine");
        assert_eq!(choice, Some(Format::Choice(vec!["a".into(), "b".into()])));
        assert!(shape(json!({"response_format": {"type": "json_schema"}})).is_err());
        assert!(shape(json!({"response_format": {"type": "yaml"}})).is_err());
        assert!(shape(json!({"grammar": "root ::= \"a\"", "json_schema": {}})).is_err());
        assert!(shape(json!({"structured_outputs": {"regex": "a", "choice": ["b"]}})).is_err());
    }
}
