//! How a conversation is put before the model: system prompt, chat template, thinking. The same flags in every command that talks.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use kiln_engine::model::Model;
use kiln_engine::text::Template;
use kiln_llm::chat::{ChatSetup, NoTemplate};

use super::prompt::file_text;
use crate::generate::Thinking;

/// Flags of commands that talk with a model.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct TalkFlags {
    /// System prompt (also -sys)
    #[arg(long, alias = "system-prompt", value_name = "TEXT", conflicts_with = "system_file")]
    system: Option<String>,
    /// Read the system prompt from a file
    #[arg(long, alias = "system-prompt-file", value_name = "FILE")]
    system_file: Option<PathBuf>,
    /// Chat template to use instead of the model's own: a name (chatml, command-r, deepseek3, gemma, granite, llama2, llama3, llama4, mistral,
    /// mistral-v7, phi3, phi4, vicuna, zephyr), a file with a Jinja template, or the template itself
    #[arg(long, alias = "chat-template-file", value_name = "TEMPLATE")]
    chat_template: Option<String>,
    /// Ask the model not to think before it answers, if its template allows it
    #[arg(long)]
    no_think: bool,
    /// Tokens that the model may think before it answers; then its thought is closed. -1 for as many as it likes
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    reasoning_budget: Option<i64>,
}

impl TalkFlags {
    /// The system prompt.
    pub(crate) fn system(&self) -> anyhow::Result<Option<String>> {
        match &self.system_file {
            Some(path) => file_text(path).map(Some),
            None => Ok(self.system.clone()),
        }
    }

    /// How the model may think before it answers.
    pub(crate) fn thinking(&self) -> Thinking {
        Thinking { on: !self.no_think, budget: self.reasoning_budget.and_then(|most| usize::try_from(most).ok()) }
    }

    /// How conversations with the model are written, by the template that was named, else by the model's own; one clear line where it
    /// cannot be used. A model may have none.
    pub(crate) fn setup(&self, model: &Model) -> anyhow::Result<ChatSetup> {
        let source = self.chat_template.as_deref().map(template_source).transpose()?;
        let setup = ChatSetup::as_told(model, source.as_deref());
        match (&setup.template, &self.chat_template) {
            (Err(NoTemplate::Broken(why)), Some(_)) => bail!("--chat-template: {why}"),
            (Err(NoTemplate::Broken(why)), None) => bail!(
                "{why}\nhint: --chat-template names another one, such as chatml; `kiln run --raw` continues a text without one"
            ),
            _ => Ok(setup),
        }
    }
}

/// The Jinja text that `--chat-template` means.
pub(crate) fn template_source(given: &str) -> anyhow::Result<String> {
    let source = match Template::form(given) {
        Some(form) => form.to_owned(),
        None if given.contains(['{', '\n']) => given.to_owned(),
        None => std::fs::read_to_string(given).with_context(|| {
            let names: Vec<&str> = Template::forms().collect();
            format!(
                "--chat-template {given} is none of {}, no template, and no file that can be read",
                names.join(", ")
            )
        })?,
    };
    Template::new(&source).context("--chat-template")?;
    Ok(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_have_names_or_are_written_out() {
        assert!(template_source("chatml").unwrap().contains("<|im_start|>"));
        assert_eq!(template_source("{{ messages[0].content }}").unwrap(), "{{ messages[0].content }}");
        assert!(template_source("{% for").is_err() && template_source("no/such/file").is_err());
    }
}
