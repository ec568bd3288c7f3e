//! Chat templates of real models, byte for byte as the `transformers` package renders them. `scripts/goldens/templates`
//! made the file and prints what is expected where a test fails.

use std::collections::BTreeMap;

use kiln_engine::text::{ChatInput, Message, Template};
use serde::Deserialize;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

#[derive(Deserialize)]
struct Goldens {
    now: String,
    cases: BTreeMap<String, Case>,
    templates: Vec<Entry>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Value>,
    #[serde(default)]
    tools: Vec<Value>,
    #[serde(default)]
    add_generation_prompt: bool,
    #[serde(default)]
    kwargs: Map<String, Value>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    tokens: Map<String, Value>,
    source: String,
    renders: BTreeMap<String, String>,
}

fn goldens() -> Goldens {
    serde_json::from_str(include_str!("templates.json")).expect("the goldens should be JSON")
}

/// `length hash` of a text, as the goldens have it.
fn digest(text: &str) -> String {
    let hash = Sha256::digest(text.as_bytes());
    let hex: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{} {hex}", text.len())
}

/// Templates whose renders may differ, and why. All their other renders are compared.
const EXCEPTIONS: &[(&str, &str)] = &[
    // They loop over tools or documents that are not given, at which Python stops and Kiln goes on with none.
    ("CohereForAI-c4ai-command-r-plus-tool_use", "error"),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "error"),
    ("command_r_plus.rag", "error"),
    ("command_r_plus.tool_use", "error"),
    // It puts a filter's result through `tojson`, which Python's lazy results do not allow.
    ("llama-cpp-deepseek-r1", "error"),
    // It marks a text as safe HTML, after which Python escapes what is added to it: `&#34;` for each quotation mark. No
    // model was trained on that.
    ("meetkai-functionary-medium-v3.1", "2102 0508024d9e7f6ba9"),
    ("meetkai-functionary-medium-v3.1", "1935 501a0aeffb4e3ed1"),
    ("meetkai-functionary-medium-v3.1", "2306 4b9f5970e95bc3d8"),
];

#[test]
fn templates_render_as_transformers_renders_them() {
    let goldens = goldens();
    let now = goldens.now.parse().expect("the time should be one");
    let (mut same, mut refused, mut excepted, mut problems) = (0, 0, 0, Vec::new());
    for entry in &goldens.templates {
        let template = match Template::new(&entry.source) {
            Ok(template) => template,
            Err(error) => {
                problems.push(format!("{}: {error}", entry.name));
                continue;
            }
        };
        for (name, want) in &entry.renders {
            let case = &goldens.cases[name];
            let mut context = entry.tokens.clone();
            context.insert("add_generation_prompt".into(), case.add_generation_prompt.into());
            if !case.tools.is_empty() {
                context.insert("tools".into(), Value::Array(case.tools.clone()));
            }
            context.extend(case.kwargs.clone());
            let got = template.render_at(&case.messages, &context, Some(now));
            match (got, want.as_str()) {
                (Err(_), "error") => refused += 1,
                (Ok(text), want) if digest(&text) == want => same += 1,
                (Ok(_), want) if EXCEPTIONS.contains(&(entry.name.as_str(), want)) => excepted += 1,
                (Ok(text), want) => problems.push(format!("{} {name}: {want} is wanted, not:\n{text}", entry.name)),
                (Err(error), _) => problems.push(format!("{} {name}: {error}", entry.name)),
            }
        }
    }
    assert!(problems.is_empty(), "{same} the same, {} not:\n{}", problems.len(), problems.join("\n-----\n"));
    assert!(same > 500 && refused < 100 && excepted < 40, "{same} the same, {refused} refused, {excepted} excepted");
}

#[test]
fn families_are_told_by_what_templates_can_do() {
    let goldens = goldens();
    let capabilities = |name: &str| {
        let entry = goldens.templates.iter().find(|entry| entry.name == name).expect("it is among the goldens");
        Template::new(&entry.source).expect("it compiles").capabilities().clone()
    };
    let qwen = capabilities("qwen3");
    assert!(qwen.system && qwen.tools && qwen.tool_calls && qwen.parallel_calls && qwen.reasoning && qwen.tool_results);
    assert!(!qwen.string_arguments);
    assert!(!capabilities("google-gemma-2-2b-it").system);
    assert!(capabilities("gemma3").part_content);
    assert!(!capabilities("HuggingFaceTB-SmolLM3-3B").tool_calls);
    assert!(!capabilities("microsoft-Phi-3.5-mini-instruct").tools);
    assert!(capabilities("meetkai-functionary-medium-v3.2").string_arguments);
    assert!(!capabilities("meta-llama-Llama-3.1-8B-Instruct").parallel_calls);
}

/// Conversations as agents have them, that templates of real models refuse: what was said is in the prompt all the same.
#[test]
fn orders_of_roles_that_templates_refuse_are_worked_around() {
    let goldens = goldens();
    let template = |name: &str| {
        let entry = goldens.templates.iter().find(|entry| entry.name == name).expect("the template is there");
        Template::new(&entry.source).expect("it compiles")
    };
    let said = |role: &str, content: &str| Message::new(role, content);
    let answer = Message { tool_call_id: Some("abcdefghi".into()), ..said("tool", "21 degrees") };
    let render = |name: &str, messages: Vec<Message>| {
        let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
        template(name).render(&input)
    };
    let middle = || vec![said("system", "one"), said("user", "two"), said("system", "three"), said("user", "four")];
    for (name, messages, words) in [
        ("mistral_nemo", middle(), &["one\n\nthree", "two\n\nfour"][..]),
        ("mistralai-Mistral-Nemo-Instruct-2407", middle(), &["one\n\nthree", "two\n\nfour"]),
        // Its template takes a system message in an even place, and shows it.
        ("gemma3", middle(), &["one", "two", "three", "four"]),
        ("google-gemma-2-2b-it", middle(), &["one", "three", "two\n\nfour"]),
        ("Qwen3.5-4B", middle(), &["one\n\nthree", "two", "four"]),
        ("Mistral-Small-3.2-24B-Instruct-2506", vec![said("user", "two"), said("user", "four")], &["two\n\nfour"]),
        ("openai-gpt-oss-120b", vec![said("user", "warm?"), answer.clone()], &["warm?", "Result of tool:\n21 degrees"]),
        ("MiniMax-M2", vec![said("user", "warm?"), answer.clone()], &["warm?", "Result of tool:\n21 degrees"]),
    ] {
        let text = render(name, messages).unwrap_or_else(|why| panic!("{name}: {why}")).text;
        let mut rest = text.as_str();
        for word in words {
            let (_, after) = rest.split_once(word).unwrap_or_else(|| panic!("{name}: {word:?} is not in {text}"));
            rest = after;
        }
    }
    // What a template takes as it is, it gets as it is.
    let plain = vec![said("user", "two"), said("user", "four")];
    let text = render("Qwen3.5-4B", plain).expect("it renders").text;
    assert!(!text.contains("two\n\nfour"), "{text}");
    // A refusal that has nothing to do with roles stands.
    let why = render("Mistral-Small-3.2-24B-Instruct-2506", vec![said("nobody", "x")]).expect_err("no such role");
    assert!(why.to_string().contains("refuses"), "{why}");
}
