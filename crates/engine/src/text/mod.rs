//! Between tokens and people: chat templates on the way in; on the way out stop strings, reasoning, tool calls; and the
//! constraints that keep an answer to a schema or a grammar.

mod budget;
pub mod constraint;
mod marker;
pub mod output;
pub mod reasoning;
pub mod stop;
pub mod template;
pub mod tools;

pub use budget::ThoughtBudget;
pub use constraint::{Constraint, ConstraintError, Constraints, Rule, Words};
pub use output::{OutputOptions, OutputParser};
pub use stop::StopStrings;
pub use template::{Capabilities, ChatInput, Content, Function, Message, Rendered, Template, TemplateError, ToolCall};
pub use tools::{CallGrammar, Event, Family, Tool};
