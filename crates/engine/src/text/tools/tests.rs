//! Every family: what it writes, whole and cut anywhere; and what is broken.

use serde_json::json;

use super::*;

/// A call as it comes out: name, arguments, id.
pub(super) type Call = (String, String, Option<String>);

/// All content and all calls of some pieces of text. Checks the order of events.
pub(super) fn run(family: &str, tools: Vec<Tool>, pieces: &[&str]) -> (String, Vec<Call>) {
    let family = Family::by_name(family).expect("the family exists");
    let mut calls = Calls::new(family, tools);
    let mut events: Vec<Event> = pieces.iter().flat_map(|piece| calls.push(piece)).collect();
    events.extend(calls.finish());
    let (mut content, mut found, mut open) = (String::new(), Vec::<Call>::new(), None);
    for event in events {
        match event {
            Event::Content(text) => {
                assert_eq!(open, None, "content inside a call");
                content.push_str(&text);
            }
            Event::Reasoning(text) => panic!("no family here reasons: {text}"),
            Event::CallStart { index, id, name } => {
                assert_eq!((open, index), (None, found.len()));
                open = Some(index);
                found.push((name, String::new(), id));
            }
            Event::CallArguments { index, text } => {
                assert_eq!(open, Some(index));
                found[index].1.push_str(&text);
            }
            Event::CallEnd { index } => {
                assert_eq!(open, Some(index));
                open = None;
            }
        }
    }
    assert_eq!(open, None, "a call stays open");
    (content, found)
}

fn call(name: &str, arguments: &str) -> Call {
    (name.into(), arguments.into(), None)
}

fn weather() -> Tool {
    let parameters = json!({"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "deep": {"type": "object"}}});
    Tool { name: "weather".into(), parameters }
}

fn tools() -> Vec<Tool> {
    vec![weather(), Tool { name: "now".into(), parameters: Json::Null }]
}

/// Two calls as each family writes them, after some content where it can have any.
pub(super) const WRITTEN: &[(&str, &str)] = &[
    ("functionary-3.2", "all\nSure.>>>weather\n{\"place\": \"Zürich\", \"days\": 2}\n>>>now\n{}"),
    (
        "kimi-k2",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"place\": \"Zürich\", \"days\": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "deepseek-v3.2",
        "Sure.<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"place\" string=\"true\">Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "deepseek-v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"place\": \"Zürich\", \"days\": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek-v3.1",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"place\": \"Zürich\", \"days\": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "cohere-r7b",
        "Sure.<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"weather\", \"parameters\": {\"place\": \"Zürich\", \"days\": 2}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"now\", \"parameters\": {}}\n]<|END_ACTION|>",
    ),
    (
        "command-r",
        "Sure.Action:\n```json\n[\n    {\n        \"tool_name\": \"weather\",\n        \"parameters\": {\"place\": \"Zürich\", \"days\": 2}\n    },\n {\"tool_name\": \"now\", \"parameters\": {}}\n]```",
    ),
    (
        "minimax-m2",
        "Sure.<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"place\">Zürich</parameter>\n<parameter name=\"days\">2</parameter>\n</invoke>\n<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>",
    ),
    (
        "gemma-4",
        "Sure.<|tool_call>call:weather{place:<|\"|>Zürich<|\"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>",
    ),
    (
        "function-gemma",
        "Sure.<start_function_call>call:weather{place:<escape>Zürich<escape>,days:2}<end_function_call><start_function_call>call:now{}<end_function_call>",
    ),
    ("lfm2", "Sure.<|tool_call_start|>[weather(place='Zürich', days=2), now()]<|tool_call_end|>"),
    (
        "mistral-v11",
        "Sure.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"place\": \"Zürich\", \"days\": 2}[TOOL_CALLS]now[CALL_ID]bcdefghij[ARGS]{}",
    ),
    ("mistral-v13", "Sure.[TOOL_CALLS]weather[ARGS]{\"place\": \"Zürich\", \"days\": 2}[TOOL_CALLS]now[ARGS]{}"),
    (
        "mistral",
        "Sure.[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}, \"id\": \"abcdefghi\"}, {\"name\": \"now\", \"arguments\": {}, \"id\": \"bcdefghij\"}]",
    ),
    (
        "seed-oss",
        "Sure.<seed:tool_call>\n<function=weather>\n<parameter=place>Zürich</parameter>\n<parameter=days>2</parameter>\n</function>\n</seed:tool_call><seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ),
    (
        "deepseek-v3.2",
        "Sure.<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"weather\">\n<｜DSML｜parameter name=\"place\" string=\"true\">Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    (
        "glm-4",
        "Sure.<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    ),
    (
        "glm-4",
        "Sure.<tool_call>weather<arg_key>place</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now</tool_call>",
    ),
    (
        "qwen3-coder",
        "Sure.<tool_call>\n<function=weather>\n<parameter=place>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    (
        "qwen3-coder",
        "Sure.<function=weather>\n<parameter=place>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><function=now>\n</function>\n</tool_call>",
    ),
    (
        "functionary-3.1",
        "Sure.<function=weather>{\"place\": \"Zürich\", \"days\": 2}</function><function=now>{}</function>",
    ),
    (
        "nemotron-2",
        "Sure.<TOOLCALL>[{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}}]</TOOLCALL>",
    ),
    (
        "apriel",
        "Sure.<tool_calls>[{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}},{\"name\": \"now\", \"arguments\": {}}]</tool_calls>",
    ),
    (
        "apriel",
        "Sure.<tool_calls>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}}\n{\"name\": \"now\", \"arguments\": {}}\n</tool_calls>",
    ),
    (
        "apertus",
        "Sure.<|tools_prefix|>[{\"weather\": {\"place\": \"Zürich\", \"days\": 2}}, {\"now\": {}}]<|tools_suffix|>",
    ),
    (
        "granite-3",
        "Sure.<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}}]",
    ),
    (
        "hermes",
        "Sure.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"arguments\": {}, \"name\": \"now\"}\n</tool_call>",
    ),
    (
        "phi-4-mini",
        "Sure.functools[{\"name\": \"weather\", \"arguments\": {\"place\": \"Zürich\", \"days\": 2}}, {\"name\": \"now\", \"arguments\": {}}]",
    ),
    ("llama-4", "<|python_start|>[weather(place=\"Zürich\", days=2), now()]<|python_end|>"),
    ("llama-4", "[weather(place=\"Zürich\", days=2), now()]"),
    (
        "llama-3",
        "{\"name\": \"weather\", \"parameters\": {\"place\": \"Zürich\", \"days\": 2}}; {\"name\": \"now\", \"parameters\": {}}",
    ),
    (
        "llama-3",
        "<|python_tag|>{\"type\": \"function\", \"name\": \"weather\", \"parameters\": {\"place\": \"Zürich\", \"days\": 2}}; {\"name\": \"now\"}",
    ),
    ("pythonic", "[weather(place='Zürich', days=2), now()]"),
];

#[test]
fn every_family_is_read_whole_and_at_every_cut() {
    for (family, text) in WRITTEN {
        let at_start = matches!(*family, "llama-3" | "llama-4" | "pythonic");
        let content = if at_start { "" } else { "Sure." };
        let check = |pieces: &[&str]| {
            for offered in [tools(), Vec::new()] {
                let (got_content, calls) = run(family, offered, pieces);
                assert_eq!(got_content, content, "{family}: {pieces:?}");
                assert_eq!(calls.len(), 2, "{family}: {pieces:?} {calls:?}");
                let arguments: Json = serde_json::from_str(&calls[0].1).expect("arguments are JSON");
                assert_eq!(
                    (calls[0].0.as_str(), arguments),
                    ("weather", json!({"place": "Zürich", "days": 2})),
                    "{family}"
                );
                assert_eq!((calls[1].0.as_str(), calls[1].1.as_str()), ("now", "{}"), "{family}");
            }
        };
        check(&[text]);
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            check(&[&text[..cut], &text[cut..]]);
        }
        let letters: Vec<String> = text.chars().map(String::from).collect();
        check(&letters.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

#[test]
fn every_prefix_gives_sound_events() {
    for (family, text) in WRITTEN {
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            // `run` checks the order; the arguments of a call are a beginning of the whole ones.
            let (_, calls) = run(family, tools(), &[&text[..cut]]);
            assert!(calls.len() <= 2, "{family} {:?}", &text[..cut]);
            let whole = r#"{"place": "Zürich", "days": 2}"#;
            if let Some((_, arguments, _)) = calls.first() {
                let plain = arguments.trim_end_matches(['}', '"']);
                let is_beginning = whole.starts_with(plain) || serde_json::from_str::<Json>(arguments).is_ok();
                assert!(is_beginning, "{family} {:?}: {arguments}", &text[..cut]);
            }
        }
    }
}

#[test]
fn plain_words_pass_every_family() {
    for (family, _) in WRITTEN {
        for text in ["Hello there, {world} [1, 2] <b> \"x\" '.", "  \n two lines \n", "", "x"] {
            let (content, calls) = run(family, tools(), &[text]);
            assert_eq!((content.as_str(), calls.len()), (text, 0), "{family}");
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let (content, _) = run(family, tools(), &letters.iter().map(String::as_str).collect::<Vec<_>>());
            assert_eq!(content, text, "{family} by letters");
        }
    }
}

#[test]
fn broken_calls_become_content() {
    for (family, text) in [
        ("hermes", "a<tool_call>\nnot json\n</tool_call>b"),
        ("hermes", "a<tool_call>{\"name\": 5}</tool_call>"),
        ("hermes", "a<tool_call>{\"nothing\": {}}</tool_call>"),
        ("hermes", "a<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>"),
        ("hermes", "a<tool_call>"),
        ("hermes", "a<tool_call"),
        ("llama-3", "{\"answer\": 42}"),
        ("llama-3", "{\"name\": \"unknown\", \"parameters\": {}}"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral-v13", "[TOOL_CALLS]what is this"),
        ("kimi-k2", "<|tool_calls_section_begin|>what"),
        ("qwen3-coder", "<tool_call>\nwhat</tool_call>"),
        ("glm-4", "<tool_call>what is this\n</tool_call>"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[see here](http://x)"),
        ("lfm2", "<|tool_call_start|>[unknown()]<|tool_call_end|>"),
        ("gemma-4", "<|tool_call>what<tool_call|>"),
        ("functionary-3.2", "Just words\nand more"),
    ] {
        let (content, calls) = run(family, tools(), &[text]);
        assert_eq!((content.as_str(), calls.len()), (text, 0), "{family}");
    }
}

#[test]
fn values_between_tags_take_the_type_of_the_schema() {
    let read = |family: &str, text: &str| run(family, tools(), &[text]).1;
    let coder = |value: &str, key: &str| {
        format!("<tool_call>\n<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>")
    };
    assert_eq!(read("qwen3-coder", &coder("42", "place")), [call("weather", r#"{"place": "42"}"#)]);
    assert_eq!(read("qwen3-coder", &coder("a\n\"b\"\n", "place")), [call("weather", r#"{"place": "a\n\"b\"\n"}"#)]);
    assert_eq!(read("qwen3-coder", &coder("True", "x")), [call("weather", r#"{"x": true}"#)]);
    assert_eq!(read("qwen3-coder", &coder("{\"a\": [1]}", "deep")), [call("weather", r#"{"deep": {"a":[1]}}"#)]);
    assert_eq!(read("qwen3-coder", &coder("words here", "x")), [call("weather", r#"{"x": "words here"}"#)]);
    // Strings are passed on as they arrive.
    let family = Family::by_name("qwen3-coder").expect("it exists");
    let mut calls = Calls::new(family, tools());
    calls.push("<tool_call>\n<function=weather>\n<parameter=place>\nSan Fra");
    let events = calls.push("nci");
    assert_eq!(events, [Event::CallArguments { index: 0, text: "nci".into() }]);
}

#[test]
fn ids_and_odd_forms() {
    let (_, calls) = run("kimi-k2", Vec::new(), &[WRITTEN[1].1]);
    assert_eq!(calls[0].2.as_deref(), Some("functions.weather:0"));
    let (_, calls) = run("mistral-v11", Vec::new(), &["[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}"]);
    assert_eq!(calls[0].2.as_deref(), Some("abcdefghi"));
    // The object as a text; name and arguments inside `function`.
    let text = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>"#;
    assert_eq!(run("hermes", Vec::new(), &[text]).1, [call("f", r#"{"a": 1}"#)]);
    let text = r#"<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>"#;
    assert_eq!(run("hermes", Vec::new(), &[text]).1, [call("f", r#"{"a": 1}"#)]);
    // Builtin tools of Llama 3.
    assert_eq!(
        run("llama-3", Vec::new(), &["<|python_tag|>brave_search.call(query=\"x\")"]).1,
        [call("brave_search", r#"{"query": "x"}"#)]
    );
    // Command-R's way to call nothing.
    let text = "Action: ```json\n[{\"tool_name\": \"directly-answer\", \"parameters\": {}}]```";
    assert_eq!(run("command-r", tools(), &[text]), (String::new(), Vec::new()));
    // Content goes on after a call.
    let text = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>\n\nDone.";
    assert_eq!(run("hermes", tools(), &[text]), ("\n\nDone.".into(), vec![call("now", "{}")]));
}

#[test]
fn templates_tell_their_family() {
    let goldens: Json = serde_json::from_str(include_str!("../../../tests/templates.json")).expect("it is JSON");
    let family = |name: &str| {
        let templates = goldens["templates"].as_array().expect("a list");
        let found = templates.iter().find(|template| template["name"] == name).expect("it is among the goldens");
        Family::of_template(found["source"].as_str().expect("a text")).name
    };
    for (template, want) in [
        ("openai-gpt-oss-120b", "gpt-oss"),
        ("meetkai-functionary-medium-v3.2", "functionary-3.2"),
        ("meetkai-functionary-medium-v3.1", "functionary-3.1"),
        ("Kimi-K2-Instruct", "kimi-k2"),
        ("deepseek-ai-DeepSeek-V3.2", "deepseek-v3.2"),
        ("deepseek-ai-DeepSeek-V3.1", "deepseek-v3.1"),
        ("llama-cpp-deepseek-r1", "deepseek-v3"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "cohere-r7b"),
        ("CohereForAI-c4ai-command-r-plus-tool_use", "command-r"),
        ("MiniMax-M2", "minimax-m2"),
        ("google-gemma-4-31B-it", "gemma-4"),
        ("LFM2-8B-A1B", "lfm2"),
        ("Mistral-Small-3.2-24B-Instruct-2506", "mistral-v11"),
        ("unsloth-mistral-Devstral-Small-2507", "mistral-v13"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
        ("ByteDance-Seed-OSS", "seed-oss"),
        ("GLM-4.6", "glm-4"),
        ("Qwen3-Coder", "qwen3-coder"),
        ("NVIDIA-Nemotron-Nano-v2", "nemotron-2"),
        ("unsloth-Apriel-1.5", "apriel"),
        ("Apertus-8B-Instruct", "apertus"),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite-3"),
        ("qwen3", "hermes"),
        ("fireworks-ai-llama-3-firefunction-v2", "phi-4-mini"),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama-3"),
        ("google-gemma-2-2b-it", "other"),
    ] {
        assert_eq!(family(template), want, "{template}");
    }
}

/// Pieces of markup from every family, well and badly placed.
fn markup() -> impl proptest::strategy::Strategy<Value = String> {
    let mut pieces: Vec<String> = WRITTEN.iter().flat_map(|(_, text)| cut_up(text)).collect();
    pieces
        .extend(["{", "}", "[", "]", "\"", "\\", "'", "(", ")", ",", ":", "<", "é", "\n", " ", "x"].map(str::to_owned));
    pieces.sort();
    pieces.dedup();
    proptest::strategy::Strategy::prop_map(
        proptest::collection::vec(proptest::sample::select(pieces), 0..14),
        |pieces| pieces.concat(),
    )
}

/// A text cut where markup begins or ends.
fn cut_up(text: &str) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for c in text.chars() {
        let starts = matches!(c, '<' | '[' | '{' | '"');
        if starts {
            pieces.push(String::new());
        }
        if let Some(last) = pieces.last_mut() {
            last.push(c);
        }
        if matches!(c, '>' | ']' | '}' | ',' | '\n' | '(') {
            pieces.push(String::new());
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(150))]

    #[test]
    fn no_output_breaks_a_reader_and_cuts_make_no_difference(
        text in markup(),
        cuts in proptest::collection::vec(0usize..400, 0..4),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| cut <= text.len() && text.is_char_boundary(cut)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        for family in FAMILIES.iter().filter(|family| !family.is_harmony()) {
            for offered in [tools(), Vec::new()] {
                // `run` checks the order of events and that no call stays open.
                let whole = run(family.name, offered.clone(), &[&text]);
                proptest::prop_assert_eq!(run(family.name, offered, &pieces), whole, "{} {:?}", family.name, &pieces);
            }
        }
    }
}

/// Marks that templates of newer models have, as far as they are published: the table knows their families.
#[test]
fn newer_templates_are_of_known_families() {
    for (model, marks, family) in [
        (
            "Step 3.5",
            "<tools>{}</tools> <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>",
            "qwen3-coder",
        ),
        ("DeepSeek V4", "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"NAME\">", "deepseek-v3.2"),
        ("Gemma 4", "<|tool_call>call:", "gemma-4"),
    ] {
        assert_eq!(Family::of_template(marks).name, family, "{model}");
    }
}
