//! Templates for models whose file brings none: a vocabulary gives some forms away, and users may name one.

use super::Template;
use super::TemplateError;
use crate::tokenizer::Tokenizer;
use kiln_gguf::Metadata;

/// A way to write conversations that many models share.
struct Form {
    name: &'static str,
    /// The token that only models of this form have; empty where there is none.
    token: &'static str,
    source: &'static str,
}

/// Where one form's token is among another's tokens as well, it comes first.
const FORMS: &[Form] = &[
    Form {
        name: "phi4",
        token: "<|im_sep|>",
        source: "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}\
                 {% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
    },
    Form {
        name: "mistral-v7",
        token: "[SYSTEM_PROMPT]",
        source: "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT] {{ m.content }}[/SYSTEM_PROMPT]\
                 {% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}[INST] {{ m.content }}[/INST]{% endif %}\
                 {% endfor %}",
    },
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
    Form {
        name: "llama2",
        token: "",
        source: "{% for m in messages %}{% if m.role == 'system' %}{{ bos_token }}[INST] <<SYS>>\n{{ m.content }}\n<</SYS>>\n\n\
                 {% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}\
                 {% else %}{% if loop.first or messages[loop.index0 - 1].role != 'system' %}{{ bos_token }}[INST] {% endif %}\
                 {{ m.content }} [/INST]{% endif %}{% endfor %}",
    },
    Form {
        name: "llama4",
        token: "<|header_start|>",
        source: "{{ bos_token }}{% for m in messages %}<|header_start|>{{ m.role }}<|header_end|>\n\n{{ m.content | trim }}<|eot|>\
                 {% endfor %}{% if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}",
    },
    Form {
        name: "command-r",
        token: "<|START_OF_TURN_TOKEN|>",
        source: "{% for m in messages %}<|START_OF_TURN_TOKEN|>\
                 {{ {'system': '<|SYSTEM_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}.get(m.role, '<|USER_TOKEN|>') }}\
                 {{ m.content | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}\
                 {% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
    },
    Form {
        name: "granite",
        token: "<|start_of_role|>",
        source: "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}\
                 {% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    },
    Form {
        name: "deepseek3",
        token: "<｜User｜>",
        source: "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\
                 {% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>\
                 {% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
    },
    Form {
        name: "phi3",
        token: "",
        source: "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}\
                 {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    },
    Form {
        name: "zephyr",
        token: "",
        source: "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}\
                 {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    },
    Form {
        name: "vicuna",
        token: "",
        source: "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n\n\
                 {% elif m.role == 'assistant' %}ASSISTANT: {{ m.content }}{{ eos_token }}\n{% else %}USER: {{ m.content }}\n{% endif %}\
                 {% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
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
        let has = |form: &&Form| !form.token.is_empty() && tokenizer.token_id(form.token).is_some();
        FORMS.iter().find(has).map(|form| (form.name, form.source))
    }

    /// A template in the place of the one that a model file brings, with the file's special tokens.
    pub fn for_gguf(source: &str, metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        Self::with_tokens(source, super::named_tokens(metadata, tokenizer)?)
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
