//! How a conversation becomes a prompt, and the model's output an answer: template, tokens that end a turn, the file's sampling settings,
//! tools, structured output. `kiln run`, `kiln chat`, `kiln serve` and [`Llm::chat`](crate::Llm::chat) all take this way.

mod conversation;
mod format;
mod reader;
mod rule;
mod sampling;

use std::sync::{Arc, OnceLock};

use kiln_engine::model::Model;
use kiln_engine::run::Constraint;
use kiln_engine::text::constraint::Constraints;
use kiln_engine::text::reasoning::Markers;
use kiln_engine::text::template::end_ids;
use kiln_engine::text::{
    ChatInput, ConstraintError, Family, OutputOptions, OutputParser, Rendered, Rule, Template, TemplateError,
    ThoughtBudget, Tool,
};
use kiln_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value};

pub use conversation::{Conversation, ToolChoice};
pub use format::Format;
pub use reader::{AnswerReader, Stop};
pub use sampling::file_sampling;

/// Why a conversation cannot be continued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The model has no template, or none that can be used.
    #[error("{0}")]
    NoTemplate(NoTemplate),
    /// The template refuses the conversation.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tool that must be called is not among those that are offered.
    #[error("there is no tool {0:?} among the tools")]
    NoSuchTool(String),
    /// The format or a tool's schema cannot be kept.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// The vocabulary cannot be constrained.
    #[error("{0}")]
    Vocabulary(String),
    /// A grammar says everything, so there is no place for calls in it.
    #[error("tools and a grammar exclude each other, unless no tool may be called")]
    GrammarAndTools,
    /// The engine.
    #[error(transparent)]
    Engine(#[from] kiln_engine::Error),
}

/// Why a model has no chat template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTemplate {
    /// The file brings none, and its vocabulary does not give one away.
    #[error("this model has no chat template, so it can only continue text")]
    Missing,
    /// The model gives vectors of texts.
    #[error("this model gives vectors of texts and writes none")]
    Encoder,
    /// The model fills in texts as a whole.
    #[error("this model fills in texts as a whole and holds no conversations")]
    Fills,
    /// The template cannot be used.
    #[error("{0}")]
    Broken(String),
}

/// How conversations with a model are written.
pub struct ChatSetup {
    /// The template that was asked for, the file's own, or the one that its vocabulary gives away; or why there is none.
    pub template: Result<Template, NoTemplate>,
    /// Tokens that end a turn, beside those that the vocabulary names.
    pub ends: Vec<u32>,
    /// How tokens are chosen where a request does not say: the file's settings.
    pub sampling: kiln_engine::sampler::Sampling,
    /// Values for the template where a conversation gives none.
    pub kwargs: Map<String, Value>,
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    /// Compiles schemas and grammars; made when the first one comes.
    constraints: OnceLock<Result<Constraints, String>>,
}

/// How an answer is made and read.
pub struct Form {
    /// The template's source.
    pub source: String,
    /// The end of the prompt.
    pub generation_prompt: String,
    /// What to look for in the output.
    pub options: OutputOptions,
    /// Calls that are told at most.
    pub most_calls: usize,
    /// Whether control tokens must be part of the text, because marks of reasoning or calls may be such.
    pub show_special: bool,
    /// What the output must look like.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Form {
    /// Reads the output. `ends` are the tokens that end a turn.
    pub fn reader(&self, ends: &[u32]) -> AnswerReader {
        let parser = OutputParser::new(&self.source, &self.generation_prompt, self.options.clone());
        AnswerReader::new(Some(parser), self.most_calls, ends.to_vec())
    }
}

/// What becomes of a model whose file brings no template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Without {
    /// It gets the template that its vocabulary gives away, if it does.
    Guess,
    /// It continues text.
    Continue,
}

/// The template that was asked for, the model's own, or a guess.
fn template(model: &Model, wanted: Option<&str>, without: Without) -> Result<Option<Template>, TemplateError> {
    let (metadata, tokenizer) = (model.gguf.metadata(), &model.tokenizer);
    if let Some(source) = wanted {
        return Template::for_gguf(source, metadata, tokenizer).map(Some);
    }
    if let Some(own) = Template::from_gguf(metadata, tokenizer)? {
        return Ok(Some(own));
    }
    if without == Without::Continue {
        return Ok(None);
    }
    let Some((name, source)) = Template::form_of(tokenizer) else { return Ok(None) };
    log::warn!("the model brings no chat template; its vocabulary looks like {name}, which is used");
    Template::for_gguf(source, metadata, tokenizer).map(Some)
}

impl ChatSetup {
    /// For a model, with another template than its own where one is given. A file without one gets the template that its vocabulary gives
    /// away.
    pub fn new(model: &Model, wanted: Option<&str>) -> ChatSetup {
        ChatSetup::choose(model, wanted, Without::Guess)
    }

    /// The same without a guess, for programs that can as well continue a text.
    pub fn as_told(model: &Model, wanted: Option<&str>) -> ChatSetup {
        ChatSetup::choose(model, wanted, Without::Continue)
    }

    fn choose(model: &Model, wanted: Option<&str>, without: Without) -> ChatSetup {
        let template = match template(model, wanted, without) {
            _ if model.facts.fills => Err(NoTemplate::Fills),
            Ok(Some(template)) => Ok(template),
            _ if model.facts.encodes => Err(NoTemplate::Encoder),
            Ok(None) => Err(NoTemplate::Missing),
            Err(error) => Err(NoTemplate::Broken(error.to_string())),
        };
        ChatSetup::with_template(model, template)
    }

    /// For texts that are continued as they are.
    pub fn without_template(model: &Model) -> ChatSetup {
        ChatSetup::with_template(model, Err(NoTemplate::Missing))
    }

    fn with_template(model: &Model, template: Result<Template, NoTemplate>) -> ChatSetup {
        let mut ends = match &template {
            Ok(template) => template.end_ids(&model.tokenizer).unwrap_or_default(),
            Err(_) => end_ids(&model.tokenizer),
        };
        // These end a text anyway.
        ends.retain(|id| !model.tokenizer.is_end(*id));
        ChatSetup {
            template,
            ends,
            sampling: file_sampling(model),
            kwargs: Map::new(),
            tokenizer: Arc::clone(&model.tokenizer),
            vocab: model.config.vocab,
            constraints: OnceLock::new(),
        }
    }

    /// A conversation as text, as the template has it.
    pub fn render(&self, conversation: &Conversation) -> Result<Rendered, ChatError> {
        let template = self.template.as_ref().map_err(|why| ChatError::NoTemplate(why.clone()))?;
        let mut messages = conversation.messages.clone();
        if !conversation.tools.is_empty() && !template.capabilities().tools {
            conversation::describe_tools(&mut messages, &conversation.tools);
        }
        let mut kwargs = self.kwargs.clone();
        kwargs.extend(conversation.kwargs.clone());
        let input = ChatInput {
            messages,
            tools: conversation.tools.clone(),
            add_generation_prompt: !conversation.continues && !conversation.no_generation_prompt,
            continue_final_message: conversation.continues,
            kwargs,
            ..ChatInput::default()
        };
        Ok(template.render_for(&input, Some(&self.tokenizer))?)
    }

    /// How the answer to a rendered conversation is made and read. `rule` takes the place of what the conversation says of its format.
    pub fn form(
        &self,
        conversation: &Conversation,
        rendered: &Rendered,
        rule: Option<Box<dyn Constraint>>,
    ) -> Result<Form, ChatError> {
        let source = match (&self.template, conversation.tools.is_empty()) {
            (Ok(template), true) => template.source(),
            (Ok(template), false) => template.tools_source(),
            (Err(_), _) => "",
        };
        let offered: Vec<Tool> = match conversation.tool_choice {
            ToolChoice::None => Vec::new(),
            _ => conversation.tools.iter().filter_map(Tool::from_json).collect(),
        };
        if let ToolChoice::Named(name) = &conversation.tool_choice
            && !offered.iter().any(|tool| tool.name == *name)
        {
            return Err(ChatError::NoSuchTool(name.clone()));
        }
        let generation_prompt = match conversation.continues {
            true => rendered.plain(),
            false => rendered.generation_prompt.clone(),
        };
        let constraint = match rule {
            Some(rule) => Some(rule),
            None => rule::constraint(self, conversation, &offered, source, &generation_prompt)?,
        };
        let constraint = self.bound_thoughts(conversation, constraint, source, &generation_prompt)?;
        // Some markers of reasoning and calls are control tokens, which are hidden otherwise.
        let marked = Markers::of_template(source).is_some() || Family::of_template(source).is_harmony();
        let only_calls = matches!(conversation.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
        let bare_calls = conversation.tool_choice == ToolChoice::Auto && conversation.format.is_none();
        let show_special = marked || !offered.is_empty();
        let keep_reasoning = conversation.keep_reasoning;
        Ok(Form {
            source: source.to_owned(),
            generation_prompt,
            options: OutputOptions { tools: offered, any_tool: false, keep_reasoning, bare_calls, only_calls },
            most_calls: if conversation.parallel_calls { usize::MAX } else { 1 },
            show_special,
            constraint,
        })
    }

    /// The constraint of a format for a plain text.
    pub fn constraint(&self, format: &Format) -> Result<Box<dyn Constraint>, ChatError> {
        self.compile(&format.rule())
    }

    /// The constraint of a rule.
    pub fn compile(&self, rule: &Rule) -> Result<Box<dyn Constraint>, ChatError> {
        let constraints = self.constraints.get_or_init(|| {
            let made = Constraints::new(Arc::clone(&self.tokenizer), Some(self.vocab), &self.ends);
            made.map_err(|error| error.to_string())
        });
        let constraints = constraints.as_ref().map_err(|why| ChatError::Vocabulary(why.clone()))?;
        Ok(Box::new(constraints.compile(rule)?))
    }

    /// Lets the model think no longer than it may, and keep to another rule beside.
    fn bound_thoughts(
        &self,
        conversation: &Conversation,
        rule: Option<Box<dyn Constraint>>,
        source: &str,
        generation_prompt: &str,
    ) -> Result<Option<Box<dyn Constraint>>, ChatError> {
        // A rule that has no place for thoughts bounds them by itself.
        let thoughtless = conversation.keep_reasoning || matches!(conversation.format, Some(Format::Grammar(_)));
        let (Some(most), Some(markers)) = (conversation.thinking_budget, Markers::of_template(source)) else {
            return Ok(rule);
        };
        if rule.is_some() && thoughtless {
            return Ok(rule);
        }
        let tokenizer = Arc::clone(&self.tokenizer);
        let bound = ThoughtBudget::new(tokenizer, self.vocab, markers, generation_prompt, most, rule);
        Ok(Some(Box::new(bound.map_err(kiln_engine::Error::from)?)))
    }
}
