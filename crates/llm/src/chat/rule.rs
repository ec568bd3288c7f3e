//! The rule that an answer is kept to: a shape that was asked for, calls that must come or must fit their schemas, behind reasoning where
//! the model reasons.

use kiln_engine::run::Constraint;
use kiln_engine::text::reasoning::Markers;
use kiln_engine::text::tools::as_regex;
use kiln_engine::text::{CallGrammar, Family, Rule, Tool, Words};
use serde_json::{Value, json};

use super::format::{Format, object};
use super::{ChatError, ChatSetup, Conversation, ToolChoice};

/// The rule for a conversation's answer; none where it may be anything.
pub(super) fn constraint(
    setup: &ChatSetup,
    chat: &Conversation,
    offered: &[Tool],
    source: &str,
    generation_prompt: &str,
) -> Result<Option<Box<dyn Constraint>>, ChatError> {
    let maker = Maker { setup, chat, source, generation_prompt };
    let forced = match &chat.tool_choice {
        ToolChoice::Required => Some(offered.iter().collect::<Vec<_>>()),
        ToolChoice::Named(name) => Some(offered.iter().filter(|tool| tool.name == *name).collect()),
        ToolChoice::Auto | ToolChoice::None => None,
    };
    match (forced, &chat.format) {
        (Some(tools), _) => maker.must_call(&tools).map(Some),
        (None, Some(shape)) if offered.is_empty() => maker.shaped(shape).map(Some),
        (None, Some(shape)) => maker.calls_or(&offered.iter().collect::<Vec<_>>(), shape).map(Some),
        (None, None) => maker.strict_calls(offered),
    }
}

/// Makes the rules of one conversation.
struct Maker<'a> {
    setup: &'a ChatSetup,
    chat: &'a Conversation,
    source: &'a str,
    generation_prompt: &'a str,
}

impl Maker<'_> {
    fn words(&self) -> Words {
        Words::new(&self.setup.tokenizer)
    }

    /// Rules of Lark for `answer`, behind reasoning.
    fn behind_thoughts(&self, words: &Words, answer: &str) -> Result<Box<dyn Constraint>, ChatError> {
        let kept = self.chat.keep_reasoning;
        let thoughts = if kept { None } else { thoughts(words, self.source, self.generation_prompt) };
        let start = thoughts.unwrap_or_else(|| "start: answer\n".to_owned());
        self.setup.compile(&Rule::Lark(format!("{start}{answer}")))
    }

    fn family(&self) -> &'static Family {
        Family::of_template(self.source)
    }

    /// A mistake in a schema is found by itself, where its place can be told.
    fn check(&self, tools: &[&Tool]) -> Result<(), ChatError> {
        for tool in tools.iter().filter(|tool| tool.parameters.as_object().is_some_and(|map| !map.is_empty())) {
            self.setup.compile(&Rule::JsonSchema(tool.parameters.clone()))?;
        }
        Ok(())
    }

    /// A grammar of calls.
    fn calls(&self, words: &Words, tools: &[&Tool]) -> Result<CallGrammar, ChatError> {
        self.check(tools)?;
        Ok(self.family().grammar(self.source, tools, self.chat.parallel_calls, &|text| words.write(text)))
    }

    /// A call must come.
    fn must_call(&self, tools: &[&Tool]) -> Result<Box<dyn Constraint>, ChatError> {
        let words = self.words();
        let calls = self.calls(&words, tools)?;
        let rules = format!("answer: {}\n{}", regions(&words, &calls), calls.rules);
        self.behind_thoughts(&words, &rules)
    }

    /// The answer has a shape.
    fn shaped(&self, shape: &Format) -> Result<Box<dyn Constraint>, ChatError> {
        // Mistakes are told of the shape alone, which is what the client knows.
        let alone = self.setup.compile(&shape.rule())?;
        let words = self.words();
        let thinks = thoughts(&words, self.source, self.generation_prompt).is_some();
        let kept = self.chat.keep_reasoning;
        match (shape_rules(shape), thinks && !kept) {
            (Some(rules), true) => self.behind_thoughts(&words, &format!("answer: shape\n{rules}")),
            // A grammar of the client's own says everything, reasoning as well.
            _ => Ok(alone),
        }
    }

    /// The answer has a shape, unless tools are called first.
    fn calls_or(&self, tools: &[&Tool], shape: &Format) -> Result<Box<dyn Constraint>, ChatError> {
        let Some(shaped) = shape_rules(shape) else {
            return Err(ChatError::GrammarAndTools);
        };
        self.setup.compile(&shape.rule())?;
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
            return self.setup.compile(&Rule::Lark(lines.join("\n") + "\n"));
        }
        let rules = format!("answer: {} | shape\n{shaped}{}", regions(&words, &calls), calls.rules);
        self.behind_thoughts(&words, &rules)
    }

    /// The model may write what it likes, but calls fit their schemas where a tool is `strict`.
    fn strict_calls(&self, offered: &[Tool]) -> Result<Option<Box<dyn Constraint>>, ChatError> {
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
            Some(_) => self.setup.compile(&Rule::Lark(format!("start: answer\n{rules}"))).map(Some),
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
fn shape_rules(shape: &Format) -> Option<String> {
    Some(match shape {
        Format::Schema(schema) => format!("shape: %json {}\n", own_schema(schema)),
        Format::Regex(regex) => format!("shape: SHAPE\nSHAPE: /{}/\n", regex.replace('/', "\\/")),
        Format::Choice(texts) => {
            let texts: Vec<String> = texts.iter().map(|text| json!(text).to_string()).collect();
            format!("shape: {}\n", texts.join(" | "))
        }
        Format::Grammar(_) => return None,
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
    use std::sync::Arc;

    use kiln_engine::model::Model;
    use kiln_engine::quantise_recipe::Recipe;
    use kiln_engine::synth::{Preset, Synth};
    use kiln_engine::text::constraint::Constraints;
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
                shape_rules(&Format::Schema(json!({}))).expect("rules")
            ));
            assert!(constraints.compile(&rule).is_ok(), "{source} {prompt:?}: {:?}", constraints.compile(&rule).err());
        }
        assert!(thoughts(&words, "<think>", "<think>\n\n</think>\n\n").is_none());
        assert!(thoughts(&words, "<|channel|>", "<|start|>assistant<|channel|>final<|message|>").is_none());
    }
}
