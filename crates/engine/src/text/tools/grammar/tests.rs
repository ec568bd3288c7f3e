//! What the grammars allow is what the readers read, and what families write is allowed.

use std::sync::Arc;

use super::*;
use crate::text::constraint::{Constraint, Constraints, Rule, Words};
use crate::text::tools::tests::{WRITTEN, run};
use crate::tokenizer::{AddSpecial, ParseSpecial, Tokenizer};

fn vocabulary() -> (Arc<Tokenizer>, Constraints) {
    let path = format!("{}/tests/tokenizer/smollm2.gguf", env!("CARGO_MANIFEST_DIR"));
    let file = kiln_gguf::Gguf::open(path).expect("the vocabulary should open");
    let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata()).expect("the vocabulary should be sound"));
    let constraints = Constraints::new(Arc::clone(&tokenizer), None, &[]).expect("the vocabulary should fit");
    (tokenizer, constraints)
}

fn weather() -> Tool {
    let parameters = json!({
        "type": "object", "required": ["place"],
        "properties": {
            "place": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]},
            "deep": {"$ref": "#/$defs/deep"}, "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
        "$defs": {"deep": {"type": "object", "required": ["list"], "properties": {"list": {"type": "array", "items": {"type": "boolean"}}}}},
    });
    Tool { name: "weather".into(), parameters }
}

fn grammar(family: &str, tools: &[&Tool], parallel: bool, word: &dyn Fn(&str) -> String) -> Rule {
    // A template that shows the first of all ways to write a region.
    grammar_of("function_calls", family, tools, parallel, word)
}

fn grammar_of(template: &str, family: &str, tools: &[&Tool], parallel: bool, word: &dyn Fn(&str) -> String) -> Rule {
    let family = Family::by_name(family).expect("the family exists");
    let CallGrammar { open, between, rules } = family.grammar(template, tools, parallel, word);
    let open = if open.is_empty() { String::new() } else { word(open) };
    let start = match between {
        None => format!("{open} rest"),
        Some("") => format!("({open} rest)+"),
        Some(between) => format!("{open} rest ({} {open} rest)*", word(between)),
    };
    Rule::Lark(format!("start: {start}\n{rules}"))
}

fn plain(text: &str) -> String {
    Json::from(text).to_string()
}

fn allows(mask: &[u32], token: u32) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}

/// Whether a text fits, and may end. Masks are not asked: where the text is certain they allow one way to cut it into tokens.
fn passes(tokenizer: &Tokenizer, constraint: &Constraint, text: &str) -> bool {
    let mut constraint = constraint.fork();
    let tokens = tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).expect("it encodes");
    let fits = constraint.check(&tokens).is_ok_and(|fitting| fitting == tokens.len());
    fits && tokens.iter().all(|token| constraint.accept(*token).is_ok()) && constraint.may_end()
}

#[test]
fn what_families_write_is_what_they_may_write() {
    let (tokenizer, constraints) = vocabulary();
    let (weather, now) = (weather(), Tool { name: "now".into(), parameters: Json::Null });
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for (family, text) in WRITTEN {
        let text = text.strip_prefix("all\nSure.>>>").or(text.strip_prefix("Sure.")).unwrap_or(text);
        // Other ways than the one that a template shows, which models fall into.
        let odd = ["\"type\": \"function\"", "{\"arguments\"", "\"id\": \"abc", "},{", "}\n{", "\n    {\n", "; {"];
        let starts = ["<function=weather>\n", "<|python_start|>"];
        if odd.iter().any(|odd| text.contains(odd)) || starts.iter().any(|start| text.starts_with(start)) {
            continue;
        }
        // Gemma's template sorts arguments.
        let text = text.replace("place:<|\"|>Zürich<|\"|>,days:2", "days:2,place:<|\"|>Zürich<|\"|>");
        let text = &text.replace("place:<escape>Zürich<escape>,days:2", "days:2,place:<escape>Zürich<escape>");
        seen += 1;
        // DeepSeek V4 writes its regions in the other way.
        let template = if text.starts_with("<｜DSML｜tool_calls>") { "tool_calls" } else { "function_calls" };
        let rule = grammar_of(template, family, &[&weather, &now], true, &plain);
        let constraint = constraints.compile(&rule).unwrap_or_else(|error| panic!("{family}: {error}\n{rule:?}"));
        if !passes(&tokenizer, &constraint, text) {
            wrong.push(format!("{family} should allow {text:?} by {rule:?}"));
        }
        assert!(!passes(&tokenizer, &constraint, "Sure."), "{family} should not allow words");
        let alone = constraints.compile(&grammar(family, &[&now], true, &plain)).expect("it compiles");
        assert!(!passes(&tokenizer, &alone, text), "{family} should not allow a tool that is not offered");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 20, "only {seen} were tried");
}

/// Writes by taking allowed tokens by a fixed rule; ends as soon as it may.
fn written(tokenizer: &Tokenizer, constraint: &Constraint, seed: u32) -> Option<String> {
    let mut constraint = constraint.fork();
    let (mut bytes, mut state) = (Vec::new(), seed);
    for _ in 0..600 {
        if constraint.is_done() || constraint.may_end() {
            return String::from_utf8(bytes).ok();
        }
        let mask = constraint.mask().expect("a mask should come");
        let allowed: Vec<u32> =
            (0..tokenizer.n_tokens() as u32).filter(|id| allows(&mask, *id) && !tokenizer.is_end(*id)).collect();
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Short pieces, and those that end something, so that texts come to an end.
        let short: Vec<u32> = allowed
            .iter()
            .copied()
            .filter(|id| tokenizer.piece(*id).is_ok_and(|p| p.len() == 1 && p.is_ascii()))
            .collect();
        let closing = short
            .iter()
            .copied()
            .find(|id| tokenizer.piece(*id).is_ok_and(|p| matches!(p, b"\"" | b"<" | b"}" | b"'")));
        let pool = if short.is_empty() { &allowed } else { &short };
        let token = match closing {
            Some(token) if state >> 30 != 0 => token,
            _ => pool[(state >> 8) as usize % pool.len()],
        };
        constraint.accept(token).expect("the mask allowed it");
        bytes.extend_from_slice(tokenizer.piece(token).expect("it is a token"));
    }
    None
}

#[test]
fn what_may_be_written_is_read_as_calls() {
    let (tokenizer, constraints) = vocabulary();
    let weather = weather();
    let mut ended = 0;
    let families: std::collections::BTreeSet<&str> = WRITTEN.iter().map(|(family, _)| *family).collect();
    for family in families {
        let constraint = constraints.compile(&grammar(family, &[&weather], false, &plain)).expect("it compiles");
        for seed in 1..6 {
            let Some(text) = written(&tokenizer, &constraint, seed) else { continue };
            ended += 1;
            let (content, calls) = run(family, vec![weather.clone()], &[&text]);
            assert_eq!((content.trim(), calls.len()), ("", 1), "{family}: {text:?}");
            assert_eq!(calls[0].0, "weather", "{family}: {text:?}");
            let arguments: Json =
                serde_json::from_str(&calls[0].1).unwrap_or_else(|e| panic!("{family}: {e}: {text:?} {calls:?}"));
            assert!(arguments["place"].is_string(), "{family}: {text:?} {arguments}");
            assert!(arguments.get("days").is_none_or(Json::is_i64), "{family}: {text:?} {arguments}");
            assert!(arguments.get("deep").is_none_or(|deep| deep["list"].is_array()), "{family}: {text:?} {arguments}");
        }
    }
    assert!(ended > 60, "only {ended} texts came to an end");
}

/// A call of the only tool with `{"n": 1}`, and how it looks with other arguments.
const CALLS: &[(&str, &str)] = &[
    ("hermes", "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call> Done."),
    ("llama-3", "{\"name\": \"f\", \"parameters\": {\"n\": 1}}"),
    ("llama-3", "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {\"n\": 1}}"),
    ("llama-3", "\n{ \"name\":\"f\",\n \"arguments\" : {\"n\": 1} }; {\"name\": \"f\", \"parameters\": {\"n\": 1}}"),
    ("llama-4", "[f(n=1)]"),
    ("llama-4", "<|python_start|>[f(n=1), f(n=1)]<|python_end|>"),
    ("pythonic", "[f(n=1), f(n=1)]"),
    ("lfm2", "Well, <|tool_call_start|>[f(n=1)]<|tool_call_end|> there."),
    ("functionary-3.2", "f\n{\"n\": 1}"),
    ("functionary-3.2", "all\nLet me see.>>>f\n{\"n\": 1}\n>>>f\n{\"n\": 1}"),
    ("gpt-oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"n\": 1}"),
    ("gpt-oss", " to=functions.f<|channel|>commentary json<|message|>{\"n\": 1}"),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"n\": 1}",
    ),
];

/// Answers that are no calls.
const WORDS: &[(&str, &str)] = &[
    ("hermes", "Just words, {\"n\": \"x\"} and <tool"),
    ("llama-3", "Just words, {\"name\": \"f\", \"parameters\": {}}"),
    ("llama-3", "{\"answer\": 42, \"name\": \"g\"}"),
    ("llama-3", "{\"name\": \"free\"}"),
    ("llama-4", "[1, 2, f(n=0)]"),
    ("llama-4", "f(n=0) is [f(x)"),
    ("pythonic", "[see here](http://x)"),
    ("functionary-3.2", "all\nf(n) > 1 >> 2"),
    ("gpt-oss", "<|channel|>final<|message|>to=functions.f it is"),
    ("gpt-oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{\"n\": 2}"),
];

#[test]
fn what_is_a_call_fits_and_all_else_is_free() {
    let (tokenizer, constraints) = vocabulary();
    let parameters = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
    let f = Tool { name: "f".into(), parameters };
    let compiled = |family: &str, tools: &[&Tool]| {
        let family = Family::by_name(family).expect("the family exists");
        let rule = Rule::Lark(format!("start: answer\n{}", family.free_grammar("", tools, true, &plain)));
        constraints.compile(&rule).unwrap_or_else(|error| panic!("{}: {error}\n{rule:?}", family.name))
    };
    for (family, call) in CALLS {
        let rule = compiled(family, &[&f]);
        assert!(passes(&tokenizer, &rule, call), "{family} should allow {call:?}");
        for (right, wrong) in
            [("1", "\"x\""), ("1", "None"), ("1", "1.5"), ("{\"n\": 1}", "{}"), ("n=1", ""), ("n=1", "n=1, m=1")]
        {
            let wrong = call.replace(right, wrong);
            assert!(wrong == *call || !passes(&tokenizer, &rule, &wrong), "{family} should not allow {wrong:?}");
        }
        // What the grammar takes for a call is one for the reader, and nothing else of it is.
        if *family != "gpt-oss" {
            let (_, calls) = run(family, vec![f.clone()], &[call]);
            assert_eq!(
                calls.len(),
                call.matches("n=1").count() + call.matches("\"n\": 1").count(),
                "{family}: {call:?}"
            );
            assert!(calls.iter().all(|(_, arguments, _)| arguments == "{\"n\": 1}"), "{family}: {calls:?}");
        }
        // One that is not strict beside it takes what it likes, in whatever order.
        let free = Tool { name: "g".into(), parameters: json!({"type": "object"}) };
        let both = compiled(family, &[&f, &free]);
        assert!(passes(&tokenizer, &both, call), "{family} should allow {call:?}");
        let other = call
            .replace("\"f\"", "\"g\"")
            .replace("f(", "g(")
            .replace("functions.f", "functions.g")
            .replace("f\n{", "g\n{");
        let other =
            other.replace("{\"n\": 1}", "{\"a\": [\"b\", null]}").replace("n=1", "a=[\"b\", None], c={\"d\": 2}");
        assert!(passes(&tokenizer, &both, &other), "{family} should allow {other:?}");
    }
    for (family, words) in WORDS {
        let rule = compiled(family, &[&f]);
        assert!(passes(&tokenizer, &rule, words), "{family} should allow {words:?}");
        if *family != "gpt-oss" {
            assert!(run(family, vec![f.clone()], &[words]).1.is_empty(), "{family}: {words:?}");
        }
    }
}

#[test]
fn arguments_without_a_schema_are_free_in_every_form() {
    let (tokenizer, constraints) = vocabulary();
    let tool = Tool { name: "weather".into(), parameters: json!({"type": "object"}) };
    let now = Tool { name: "now".into(), parameters: Json::Null };
    let (mut seen, mut wrong) = (0, Vec::new());
    for (family, text) in WRITTEN {
        let text = text.strip_prefix("all\nSure.>>>").or(text.strip_prefix("Sure.")).unwrap_or(text);
        let rule =
            |tool: &Tool| constraints.compile(&grammar(family, &[tool, &now], true, &plain)).expect("it compiles");
        if !passes(&tokenizer, &rule(&weather()), text) {
            continue; // Another way to write calls than the one that models are made to.
        }
        seen += 1;
        // Whether a value is a text cannot be known, and tags tell it.
        let text = text.replace("string=\"false\"", "string=\"true\"");
        if !passes(&tokenizer, &rule(&tool), &text) {
            wrong.push(format!("{family}: {text:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(seen > 20, "only {seen} were tried");
}

#[test]
fn channels_and_control_tokens_are_tokens() {
    let (tokenizer, constraints) = vocabulary();
    let words = Words::new(&tokenizer);
    let start = tokenizer.token_id("<|im_start|>").expect("it is there");
    assert_eq!(words.write("a<|im_start|>\nb"), format!("\"a\" <[{start}]> \"\\nb\""));
    assert_eq!(words.write("<|im_start|>"), format!("<[{start}]>"));
    // gpt-oss, with another vocabulary's tokens for its marks.
    let end = tokenizer.token_id("<|im_end|>").expect("it is there");
    let mark = |text: &str| words.write(&text.replace("<|end|>", "<|im_start|>"));
    let weather = weather();
    let rule = grammar("gpt-oss", &[&weather], true, &mark);
    let constraint = constraints.compile(&rule).unwrap_or_else(|error| panic!("{error}: {rule:?}"));
    let call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"place\": \"x\"}";
    assert!(passes(&tokenizer, &constraint, call));
    let mut thinks = constraint.fork();
    let thought =
        tokenizer.encode("<|channel|>analysis<|message|>hm", AddSpecial::No, ParseSpecial::No).expect("it encodes");
    for token in thought.into_iter().chain([start]) {
        assert!(allows(&thinks.mask().expect("a mask should come"), token));
        thinks.accept(token).expect("it is allowed");
    }
    assert!(passes(&tokenizer, &thinks, &format!("<|start|>assistant{call}")));
    assert!(!allows(&thinks.mask().expect("a mask should come"), end));
    // The same where it need not call, and where a call comes behind a mark that is a token.
    let family = Family::by_name("gpt-oss").expect("it is one");
    let rule = Rule::Lark(format!("start: answer\n{}", family.free_grammar("", &[&weather], true, &mark)));
    let mut free = constraints.compile(&rule).unwrap_or_else(|error| panic!("{error}: {rule:?}"));
    for token in
        tokenizer.encode("<|channel|>analysis<|message|>hm", AddSpecial::No, ParseSpecial::No).expect("it encodes")
    {
        free.accept(token).expect("it is allowed");
    }
    assert!(!free.may_end() && allows(&free.mask().expect("a mask should come"), start));
    free.accept(start).expect("it is allowed");
    assert!(passes(&tokenizer, &free, &format!("<|start|>assistant{call}")));
    assert!(!passes(&tokenizer, &free, &format!("<|start|>assistant{}", call.replace("\"x\"", "1"))));
    assert!(passes(&tokenizer, &free, "<|start|>assistant<|channel|>final<|message|>Well."));
    let mark = |text: &str| words.write(&text.replace("<|python_tag|>", "<|im_start|>"));
    let family = Family::by_name("llama-3").expect("it is one");
    let rule = Rule::Lark(format!("start: answer\n{}", family.free_grammar("", &[&weather], true, &mark)));
    let mut tagged = constraints.compile(&rule).unwrap_or_else(|error| panic!("{error}: {rule:?}"));
    assert!(passes(&tokenizer, &tagged, "Well."));
    tagged.accept(start).expect("it is allowed");
    assert!(passes(&tokenizer, &tagged, "{\"name\": \"weather\", \"parameters\": {\"place\": \"x\"}}"));
    assert!(!passes(&tokenizer, &tagged, "Well."), "behind the mark a call must come");
}

#[test]
fn regular_expressions_match_the_text_alone() {
    assert_eq!(as_regex("</a.b>\n"), "<\\/a\\.b>\\n");
    assert_eq!(as_regex("[/THINK]"), "\\[\\/THINK\\]");
    assert_eq!(as_regex("<｜end▁｜>"), "<｜end▁｜>");
}
