//! Tool calls in what a model writes, found while it writes. Each way of writing calls has a file; which of them a model
//! uses is told by its template, with one row a family in `FAMILIES`.
//!
//! What does not become a call becomes content: nothing that a model writes is an error.

mod bare;
mod driver;
mod functionary;
mod gemma;
mod grammar;
mod harmony;
mod json;
mod named;
mod python;
mod scan;
mod tagged;

pub(super) use bare::Bare;
pub use driver::Calls;
pub(super) use driver::push_event;
pub use grammar::{CallGrammar, as_regex};
pub(super) use harmony::Harmony;

use serde_json::Value as Json;

/// What happens in a stream of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Text for the reader.
    Content(String),
    /// Text that the model thinks.
    Reasoning(String),
    /// A call begins; its name is whole.
    CallStart {
        /// Counts the calls from 0.
        index: usize,
        /// The model's own id for it, if it writes one.
        id: Option<String>,
        /// The tool.
        name: String,
    },
    /// A piece of the JSON text of the arguments.
    CallArguments {
        /// The call.
        index: usize,
        /// The piece.
        text: String,
    },
    /// The call is over.
    CallEnd {
        /// The call.
        index: usize,
    },
}

/// A tool that may be called.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments; types of values that are not written as JSON are taken from here.
    pub parameters: Json,
}

impl Tool {
    /// From `{"type": "function", "function": {"name", "parameters"}}`, or the inner object alone.
    pub fn from_json(tool: &Json) -> Option<Self> {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name")?.as_str()?.to_owned();
        let parameters = function.get("parameters").or(function.get("input_schema")).cloned().unwrap_or(Json::Null);
        Some(Self { name, parameters })
    }
}

/// How a model writes calls.
#[derive(Clone, Copy, Debug)]
enum Format {
    Json(&'static json::Form),
    Named(&'static named::Form),
    Tagged(&'static tagged::Form),
    Python(&'static python::Form),
    Gemma(&'static gemma::Form),
    Functionary,
    Harmony,
}

/// A family of models that write calls alike.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// What its templates contain: all of these.
    contains: &'static [&'static str],
    /// What its templates do not contain.
    lacks: &'static [&'static str],
    format: Format,
}

const fn row(
    name: &'static str,
    contains: &'static [&'static str],
    lacks: &'static [&'static str],
    format: Format,
) -> Family {
    Family { name, contains, lacks, format }
}

/// Every family; the first whose texts a template contains is taken.
static FAMILIES: &[Family] = &[
    row("gpt-oss", &["<|channel|>"], &[], Format::Harmony),
    row("functionary-3.2", &[">>>all"], &[], Format::Functionary),
    row("kimi-k2", &["<|tool_calls_section_begin|>"], &[], Format::Named(&named::KIMI)),
    row("deepseek-v3.2", &["DSML"], &[], Format::Tagged(&tagged::DSML)),
    row("deepseek-v3", &["<｜tool▁calls▁begin｜>", "```json"], &[], Format::Named(&named::DEEPSEEK_V3)),
    row("deepseek-v3.1", &["<｜tool▁calls▁begin｜>"], &[], Format::Named(&named::DEEPSEEK_V31)),
    row("cohere-r7b", &["<|START_ACTION|>"], &[], Format::Json(&json::COHERE)),
    row("command-r", &["<|START_OF_TURN_TOKEN|>", "Action:"], &[], Format::Json(&json::COMMAND_R)),
    row("minimax-m2", &["<minimax:tool_call>"], &["]<]minimax[>["], Format::Tagged(&tagged::MINIMAX)),
    row("gemma-4", &["<|tool_call>call:"], &[], Format::Gemma(&gemma::GEMMA)),
    row("function-gemma", &["<start_function_call>"], &[], Format::Gemma(&gemma::FUNCTION_GEMMA)),
    row("lfm2", &["<|tool_call_start|>"], &[], Format::Python(&python::LFM2)),
    row("lfm2", &["<|tool_list_start|>"], &[], Format::Python(&python::LFM2)),
    row("lfm2", &["List of tools: ["], &[], Format::Python(&python::LFM2)),
    row("mistral-v11", &["[TOOL_CALLS]", "[CALL_ID]"], &[], Format::Named(&named::MISTRAL_V11)),
    row("mistral-v13", &["[TOOL_CALLS]", "[ARGS]"], &[], Format::Named(&named::MISTRAL)),
    row("mistral", &["[TOOL_CALLS]"], &[], Format::Json(&json::MISTRAL)),
    row("seed-oss", &["<seed:tool_call>"], &[], Format::Tagged(&tagged::SEED)),
    row("glm-4", &["<arg_key"], &[], Format::Tagged(&tagged::GLM)),
    row("qwen3-coder", &["<function=", "<parameter="], &[], Format::Tagged(&tagged::QWEN3_CODER)),
    row("functionary-3.1", &["<function=", "</function>"], &[], Format::Named(&named::FUNCTIONARY_31)),
    row("nemotron-2", &["<TOOLCALL>"], &[], Format::Json(&json::TOOLCALL)),
    row("apriel", &["<tool_calls>"], &[], Format::Json(&json::TOOL_CALLS)),
    row("apertus", &["<|tools_prefix|>"], &[], Format::Json(&json::APERTUS)),
    row("granite-3", &["<|tool_call|>"], &["functools"], Format::Json(&json::GRANITE)),
    row("hermes", &["<tool_call>"], &[], Format::Json(&json::HERMES)),
    row("phi-4-mini", &["functools"], &[], Format::Json(&json::FUNCTOOLS)),
    row("llama-4", &["<|header_start|>"], &[], Format::Python(&python::LLAMA4)),
    row("llama-3", &["<|start_header_id|>", "\"parameters\""], &[], Format::Json(&json::LLAMA3)),
    row("pythonic", &["func_name1("], &[], Format::Python(&python::PLAIN)),
];

/// For templates that no row fits: tools are then described in the system message, and the model answers in JSON.
static OTHER: Family = row("other", &[], &[], Format::Json(&json::HERMES));

impl Family {
    /// The family that a template belongs to.
    pub fn of_template(source: &str) -> &'static Family {
        let fits = |family: &&Family| {
            family.contains.iter().all(|text| source.contains(text))
                && !family.lacks.iter().any(|text| source.contains(text))
        };
        FAMILIES.iter().find(fits).unwrap_or(&OTHER)
    }

    /// The family of a name.
    pub fn by_name(name: &str) -> Option<&'static Family> {
        FAMILIES.iter().chain([&OTHER]).find(|family| family.name == name)
    }

    /// Whether the family has reasoning, content and calls in channels of their own.
    pub fn is_harmony(&self) -> bool {
        matches!(self.format, Format::Harmony)
    }

    /// Whether calls have marks of their own, without which a call is read as content.
    pub(super) fn has_marks(&self) -> bool {
        match self.format {
            Format::Json(form) => !form.at_start,
            Format::Python(form) => !form.at_start,
            Format::Named(_) | Format::Tagged(_) | Format::Gemma(_) => true,
            Format::Functionary | Format::Harmony => false,
        }
    }

    /// The texts that a call begins with. In open reasoning, one of them ends it.
    pub fn openings(&self) -> &'static [&'static str] {
        match self.format {
            Format::Json(form) if !form.at_start => form.opens,
            Format::Python(form) => form.opens,
            Format::Named(form) => form.opens,
            Format::Tagged(form) => form.opens,
            Format::Gemma(form) => form.opens,
            Format::Json(_) | Format::Functionary | Format::Harmony => &[],
        }
    }
}

#[cfg(test)]
mod tests;
