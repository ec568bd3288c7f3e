//! The rule that an answer is kept to: a shape that was asked for, calls that must come or must fit their schemas, behind reasoning where
//! the model reasons.

use std::sync::Arc;

use kiln_engine::run::Constraint;
use kiln_engine::text::constraint::{ConstraintError, Constraints, Rule};
use kiln_engine::text::reasoning::Markers;
use kiln_engine::text::tools::as_regex;
use kiln_engine::text::{CallGrammar, Family, Tool, Words};
use serde_json::{Value, json};

use crate::api_error::{ApiError, Kind};
use crate::chat::{Chat, ToolChoice};
use crate::registry::Loaded;
use crate::response_format::{ResponseFormat, object};

/// A rule of the engine, as it stands in the request.
fn rule(shape: &ResponseFormat) -> Rule {
    match shape {
        // Many clients mean an object by an empty schema.
        ResponseFormat::Schema(schema) if *schema == object() || *schema == json!({}) => Rule::JsonObject,
        ResponseFormat::Schema(schema) => Rule::JsonSchema(schema.clone()),
        ResponseFormat::Regex(regex) => Rule::Regex(regex.clone()),
        ResponseFormat::Choice(texts) => Rule::Choice(texts.clone()),
        ResponseFormat::Grammar(grammar) if grammar.contains("::=") => Rule::Gbnf(grammar.clone()),
        ResponseFormat::Grammar(grammar) => Rule::Lark(grammar.clone()),
    }
}

fn compile(loaded: &Loaded, rule: &Rule) -> Result<Box<dyn Constraint>, ApiError> {
    let constraints = loaded.constraints.get_or_init(|| {
        let model = loaded.scheduler.model();
        let made = Constraints::new(Arc::clone(&model.tokenizer), Some(model.config.vocab), &loaded.ends);
        made.map_err(|error| error.to_string())
    });
    let constraints = constraints.as_ref().map_err(|why| ApiError::new(Kind::CannotDo, why.clone()))?;
    let compiled = constraints.compile(rule).map_err(|error| match &error {
        ConstraintError::Schema { .. } => ApiError::new(Kind::Schema, error.to_string()),
        ConstraintError::Vocabulary(_) => ApiError::new(Kind::CannotDo, error.to_string()),
        ConstraintError::Broken(_) | ConstraintError::Tokenizer(_) => ApiError::internal(&error),
        _ => ApiError::new(Kind::Grammar, error.to_string()),
    })?;
    Ok(Box::new(compiled))
}

/// The rule for a plain text.
pub(crate) fn plain_constraint(loaded: &Loaded, shape: &ResponseFormat) -> Result<Box<dyn Constraint>, ApiError> {
    compile(loaded, &rule(shape))
}

/// The rule for a conversation's answer; none where it may be anything.
pub(crate) fn constraint(
    loaded: &Loaded,
    chat: &Chat,
    offered: &[Tool],
    source: &str,
    generation_prompt: &str,
) -> Result<Option<Box<dyn Constraint>>, ApiError> {
    let maker = Maker { loaded, chat, source, generation_prompt };
    let forced = match &chat.tool_choice {
        ToolChoice::Required => Some(offered.iter().collect::<Vec<_>>()),
        ToolChoice::Named(name) => Some(offered.iter().filter(|tool| tool.name == *name).collect()),
        ToolChoice::Auto | ToolChoice::None => None,
    };
    match (forced, &chat.shape) {
        (Some(tools), _) => maker.must_call(&tools).map(Some),
        (None, Some(shape)) if offered.is_empty() => maker.shaped(shape).map(Some),
        (None, Some(shape)) => maker.calls_or(&offered.iter().collect::<Vec<_>>(), shape).map(Some),
        (None, None) => maker.strict_calls(offered),
    }
}

/// Makes the rules of one conversation.
struct Maker<'a> {
    loaded: &'a Loaded,
    chat: &'a Chat,
    source: &'a str,
    generation_prompt: &'a str,
}

impl Maker<'_> {
    fn words(&self) -> Words {
        Words::new(&self.loaded.scheduler.model().tokenizer)
    }

    /// Rules of Lark for `answer`, behind reasoning.
    fn behind_thoughts(&self, words: &Words, answer: &str) -> Result<Box<dyn Constraint>, ApiError> {
        let kept = self.chat.keep_reasoning == Some(true);
        let thoughts = if kept { None } else { thoughts(words, self.source, self.generation_prompt) };
        let start = thoughts.unwrap_or_else(|| "start: answer\n".to_owned());
        compile(self.loaded, &Rule::Lark(format!("{start}{answer}")))
    }

    fn family(&self) -> &'static Family {
        Family::of_template(self.source)
    }

    /// A mistake in a schema is found by itself, where its place can be told.
    fn check(&self, tools: &[&Tool]) -> Result<(), ApiError> {
        for tool in tools.iter().filter(|tool| tool.parameters.as_object().is_some_and(|map| !map.is_empty())) {
            compile(self.loaded, &Rule::JsonSchema(tool.parameters.clone()))?;
        }
        Ok(())
    }

    /// A grammar of calls.
    fn calls(&self, words: &Words, tools: &[&Tool]) -> Result<CallGrammar, ApiError> {
        self.check(tools)?;
        Ok(self.family().grammar(self.source, tools, self.chat.parallel_calls, &|text| words.write(text)))
    }

    /// A call must come.
    fn must_call(&self, tools: &[&Tool]) -> Result<Box<dyn Constraint>, ApiError> {
        let words = self.words();
        let calls = self.calls(&words, tools)?;
        let rules = format!("answer: {}\n{}", regions(&words, &calls), calls.rules);
        self.behind_thoughts(&words, &rules)
    }

    /// The answer has a shape.
    fn shaped(&self, shape: &ResponseFormat) -> Result<Box<dyn Constraint>, ApiError> {
        // Mistakes are told of the shape alone, which is what the client knows.
        let alone = compile(self.loaded, &rule(shape))?;
        let words = self.words();
        let thinks = thoughts(&words, self.source, self.generation_prompt).is_some();
        let kept = self.chat.keep_reasoning == Some(true);
        match (shape_rules(shape), thinks && !kept) {
            (Some(rules), true) => self.behind_thoughts(&words, &format!("answer: shape\n{rules}")),
            // A grammar of the client's own says everything, reasoning as well.
            _ => Ok(alone),
        }
    }

    /// The answer has a shape, unless tools are called first.
    fn calls_or(&self, tools: &[&Tool], shape: &ResponseFormat) -> Result<Box<dyn Constraint>, ApiError> {
        let Some(shaped) = shape_rules(shape) else {
            let message = "tools and a grammar of the client's own exclude each other, unless tool_choice is none";
            return Err(ApiError::new(Kind::Invalid, message).with_param("grammar"));
        };
        compile(self.loaded, &rule(shape))?;
        let words = self.words();
        let calls = self.calls(&words, tools)?;
        if self.family().is_harmony() {
            // Calls have a channel of their own, and so has the answer.
            let answer = thoughts(&words, self.source, self.generation_prompt);
            let answer = answer.unwrap_or_else(|| "start: answer\n".to_owned()).replacen("start:", "said:", 1);
            let rules = format!("start: rest | said\nanswer: shape\n{answer}{shaped}{}", calls.rules);
            // The rule of a thought is written by both.
            let mut lines: Vec<&str> = Vec::new();
            rules.lines().for_each(|line| {
                if !lines.contains(&line) {
                    lines.push(line)
                }
            });
            return compile(self.loaded, &Rule::Lark(lines.join("\n") + "\n"));
        }
        let rules = format!("answer: {} | shape\n{shaped}{}", regions(&words, &calls), calls.rules);
        self.behind_thoughts(&words, &rules)
    }

    /// The model may write what it likes, but calls fit their schemas where a tool is `strict`.
    fn strict_calls(&self, offered: &[Tool]) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let strict = |tool: &Tool| {
            let named = |given: &&Value| given["function"]["name"] == tool.name.as_str();
            self.chat.tools.iter().find(named).is_some_and(|given| given["function"]["strict"] == true)
        };
        if !offered.iter().any(strict) {
            return Ok(None);
        }
        let free = |tool: &Tool| Tool { parameters: object(), ..tool.clone() };
        let tools: Vec<Tool> =
            offered.iter().map(|tool| if strict(tool) { tool.clone() } else { free(tool) }).collect();
        let tools: Vec<&Tool> = tools.iter().collect();
        self.check(&tools)?;
        let (family, words) = (self.family(), self.words());
        let rules = family.free_grammar(self.source, &tools, self.chat.parallel_calls, &|text| words.write(text));
        if !family.is_harmony() {
            return self.behind_thoughts(&words, &rules).map(Some);
        }
        // Its thoughts are part of the answer, unless the prompt has opened a channel already, where no call can come.
        match thoughts(&words, self.source, self.generation_prompt) {
            None => Ok(None),
            Some(_) => compile(self.loaded, &Rule::Lark(format!("start: answer\n{rules}"))).map(Some),
        }
    }
}

/// One region of calls, or several.
fn regions(words: &Words, calls: &CallGrammar) -> String {
    let open = if calls.open.is_empty() { String::new() } else { words.write(calls.open) };
    match calls.between {
        None => format!("{open} rest"),
        Some("") => format!("({open} rest)+"),
        Some(between) => format!("{open} rest ({} {open} rest)*", words.write(between)),
    }
}

/// Rules of Lark for `shape`; none for grammars, which are whole.
fn shape_rules(shape: &ResponseFormat) -> Option<String> {
    Some(match shape {
        ResponseFormat::Schema(schema) => format!("shape: %json {}\n", own_schema(schema)),
        ResponseFormat::Regex(regex) => format!("shape: SHAPE\nSHAPE: /{}/\n", regex.replace('/', "\\/")),
        ResponseFormat::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            format!("shape: {}\n", texts.join(" | "))
        }
        ResponseFormat::Grammar(_) => return None,
    })
}

/// A schema without what only we may say in it.
fn own_schema(schema: &Value) -> Value {
    let mut schema = if *schema == json!({}) { object() } else { schema.clone() };
    if let Some(schema) = schema.as_object_mut() {
        // Endless white space would let a weak model write nothing else.
        let options = json!({"whitespace_flexible": true, "whitespace_pattern": r"[ \t\n]{0,40}"});
        schema.insert("x-guidance".into(), options);
    }
    schema
}

/// The rule for reasoning before the answer; none where the model does not reason or has finished.
fn thoughts(words: &Words, source: &str, generation_prompt: &str) -> Option<String> {
    if Family::of_template(source).is_harmony() {
        return channels(words, generation_prompt);
    }
    let markers = Markers::of_template(source)?;
    let (open, close) = (words.write(markers.open.trim_end()), words.write(markers.close));
    let (opened, closed) = (generation_prompt.rfind(markers.open.trim_end()), generation_prompt.rfind(markers.close));
    let body = thought(&close, markers.close);
    match (opened, closed) {
        (Some(open), Some(close)) if close > open => None,
        (None, Some(_)) => None,
        (Some(_), _) => Some(format!("start: thought GAP? answer\nGAP: /\\n+/\n{body}")),
        (None, None) => Some(format!("start: ({open} thought GAP?)? answer\nGAP: /\\n+/\n{body}")),
    }
}

/// A thought up to and with its end.
fn thought(close: &str, text: &str) -> String {
    match close.starts_with('"') {
        true => format!("thought[lazy]: /(.|\\n)*{}/\n", as_regex(text)),
        false => format!("thought: TEXT? {close}\nTEXT: /(.|\\n)+/\n"),
    }
}

/// The channels before an answer of gpt-oss; none where the prompt has opened one.
fn channels(words: &Words, generation_prompt: &str) -> Option<String> {
    let begins = generation_prompt.rfind("<|start|>")?;
    if generation_prompt[begins..].contains("<|channel|>") {
        return None;
    }
    let [analysis, next, said, end] =
        ["<|channel|>analysis<|message|>", "<|start|>assistant", "<|channel|>final<|message|>", "<|end|>"]
            .map(|text| words.write(text));
    Some(format!("start: ({analysis} thought {next})? {said} answer\n{}", thought(&end, "<|end|>")))
}

#[cfg(test)]
mod tests {
    use kiln_engine::model::Model;
    use kiln_engine::quantise_recipe::Recipe;
    use kiln_engine::synth::{Preset, Synth};
    use kiln_engine::tokenizer::Tokenizer;

    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let preset = Preset::from_name("tiny-llama").expect("a preset");
        let synth = Synth::new(preset, Recipe::from_name("F32").expect("a recipe"), 11);
        let gguf = kiln_gguf::Gguf::from_bytes(synth.to_bytes().expect("bytes")).expect("a file");
        Arc::clone(&Model::new(gguf).expect("a model").tokenizer)
    }

    #[test]
    fn thoughts_come_before_the_answer_whatever_marks_them() {
        let tokenizer = tokenizer();
        let words = Words::new(&tokenizer);
        let constraints = Constraints::new(Arc::clone(&tokenizer), None, &[]).expect("the vocabulary fits");
        for (source, prompt) in [
            ("<think>", ""),
            ("<think>", "<think>\n"),
            ("[THINK]", ""),
            ("<|START_THINKING|>", ""),
            ("<seed:think>", ""),
            ("<|channel>", ""),
            ("Here is my thought process:", ""),
            ("<|channel|>", "<|start|>assistant"),
        ] {
            let start = thoughts(&words, source, prompt).expect("there is something to think");
            let rule = Rule::Lark(format!(
                "{start}answer: shape\n{}",
                shape_rules(&ResponseFormat::Schema(json!({}))).expect("rules")
            ));
            assert!(constraints.compile(&rule).is_ok(), "{source} {prompt:?}: {:?}", constraints.compile(&rule).err());
        }
        assert!(thoughts(&words, "<think>", "<think>\n\n</think>\n\n").is_none());
        assert!(thoughts(&words, "<|channel|>", "<|start|>assistant<|channel|>final<|message|>").is_none());
    }
}
