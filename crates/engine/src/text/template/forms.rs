//! Templates for models whose file brings none: a vocabulary gives some forms away, and users may name one.

use super::Template;
use super::TemplateError;
use crate::tokenizer::Tokenizer;
use kiln_gguf::Metadata;

/// A way to write conversations that many models share.
struct Form {
    name: &'static str,
    /// The token that only models of this form have.
    token: &'static str,
    source: &'static str,
}

const FORMS: [Form; 4] = [
    Form {
        name: "chatml",
        token: "<|im_start|>",
        source: "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                 {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    },
    Form {
        name: "llama3",
        token: "<|start_header_id|>",
        source: "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n\
                 {{ m.content | trim }}<|eot_id|>{% endfor %}\
                 {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    },
    Form {
        name: "gemma",
        token: "<start_of_turn>",
        source: "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
                 <start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n\
                 {% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    },
    Form {
        name: "mistral",
        token: "[INST]",
        source: "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
                 {% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}\
                 {% endfor %}",
    },
];

impl Template {
    /// Names that [`Template::form`] knows.
    pub fn forms() -> impl Iterator<Item = &'static str> {
        FORMS.iter().map(|form| form.name)
    }

    /// The Jinja text of a form by its name, like `chatml`.
    pub fn form(name: &str) -> Option<&'static str> {
        FORMS.iter().find(|form| form.name == name).map(|form| form.source)
    }

    /// The form that a vocabulary gives away: its name and its Jinja text.
    pub fn form_of(tokenizer: &Tokenizer) -> Option<(&'static str, &'static str)> {
        FORMS.iter().find(|form| tokenizer.token_id(form.token).is_some()).map(|form| (form.name, form.source))
    }

    /// A template in the place of the one that a model file brings, with the file's special tokens.
    pub fn for_gguf(source: &str, metadata: &Metadata) -> Result<Self, TemplateError> {
        Self::with_tokens(source, super::named_tokens(metadata)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{ChatInput, Message};

    #[test]
    fn every_form_writes_a_conversation_and_opens_the_answer() {
        let said = ["You help.", "Hi", "Hello", "Again"];
        let roles = ["system", "user", "assistant", "user"];
        let messages = roles.iter().zip(said).map(|(role, text)| Message::new(role, text)).collect();
        let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
        for name in Template::forms() {
            let mut template = Template::new(Template::form(name).unwrap()).unwrap();
            template.set_tokens(Some("<s>"), Some("</s>"));
            // A form without a system role says it with the first user's words.
            let text = template.render_for(&input, None).unwrap().text;
            let at: Vec<usize> =
                said.iter().map(|said| text.find(said).unwrap_or_else(|| panic!("{name}: {text}"))).collect();
            assert!(at.is_sorted(), "{name}: {text}");
            assert!(!text.ends_with("Again"), "{name}: {text}");
        }
        assert!(Template::form("none").is_none());
    }
}
