//! Constraints over real vocabularies: what is allowed, what is refused, what hostile rules meet.

use std::time::{Duration, Instant};

use serde_json::json;

use super::*;
use crate::tokenizer::ShowSpecial;

fn vocabulary(name: &str) -> Arc<Tokenizer> {
    let path = format!("{}/tests/tokenizer/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
    let file = kiln_gguf::Gguf::open(path).expect("the vocabulary should open");
    Arc::new(Tokenizer::from_gguf(file.metadata()).expect("the vocabulary should be sound"))
}

fn smollm2() -> (Arc<Tokenizer>, Constraints) {
    let tokenizer = vocabulary("smollm2");
    let constraints = Constraints::new(Arc::clone(&tokenizer), None, &[]).expect("the vocabulary should fit");
    (tokenizer, constraints)
}

fn allows(mask: &[u32], token: u32) -> bool {
    mask[token as usize / 32] >> (token % 32) & 1 == 1
}

/// Whether a text passes token by token, and an end token after it. The masks are asked at each step.
fn passes(tokenizer: &Tokenizer, constraint: &Constraint, text: &str) -> bool {
    let mut constraint = constraint.fork();
    for token in tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).expect("it encodes") {
        let mask = constraint.mask().expect("a mask should come");
        if !allows(&mask, token) || constraint.is_done() {
            return false;
        }
        constraint.accept(token).expect("the mask allowed it");
    }
    let mask = constraint.mask().expect("a mask should come");
    tokenizer.end_ids().iter().any(|end| allows(&mask, *end))
}

/// Writes by taking allowed tokens by a fixed rule, and gives the text.
fn written(tokenizer: &Tokenizer, constraint: &Constraint, seed: u32, most: usize) -> (String, bool) {
    let mut constraint = constraint.fork();
    let (mut ids, mut state) = (Vec::new(), seed);
    for _ in 0..most {
        let mask = constraint.mask().expect("a mask should come");
        let allowed: Vec<u32> = (0..tokenizer.n_tokens() as u32).filter(|id| allows(&mask, *id)).collect();
        if let Some(end) = allowed.iter().find(|id| tokenizer.is_end(**id)) {
            constraint.accept(*end).expect("it may end");
            return (tokenizer.decode(&ids, ShowSpecial::Yes).expect("it decodes"), true);
        }
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let token = allowed[(state >> 8) as usize % allowed.len()];
        constraint.accept(token).expect("the mask allowed it");
        ids.push(token);
    }
    (tokenizer.decode(&ids, ShowSpecial::Yes).expect("it decodes"), false)
}

#[test]
fn dates_and_times_are_those_that_parsers_take() {
    let (tokenizer, constraints) = smollm2();
    for (format, good, bad) in [
        (
            "date-time",
            &["2024-02-29T23:59:59Z", "1999-12-31T00:00:00.5+01:00"][..],
            &[
                "2024-01-01t00:00:00Z",
                "2024-01-01T00:00:00z",
                "2024-01-01T23:59:60Z",
                "2023-02-29T00:00:00Z",
                "0000-01-01T00:00:00Z",
            ][..],
        ),
        ("date", &["2000-02-29", "0476-09-04"], &["1900-02-29", "2024-04-31"]),
        ("time", &["12:30:00Z"], &["12:30:60Z", "24:00:00Z"]),
    ] {
        let schema =
            json!({"type": "object", "properties": {"at": {"type": "string", "format": format}}, "required": ["at"]});
        let constraint = constraints.compile(&Rule::JsonSchema(schema)).expect("it compiles");
        let fits = |text: &str| passes(&tokenizer, &constraint, &format!("{{\"at\": \"{text}\"}}"));
        good.iter().for_each(|text| assert!(fits(text), "{text}"));
        bad.iter().for_each(|text| assert!(!fits(text), "{text}"));
    }
    // What only looks like a schema stays as it is.
    let data = constraints.compile(&Rule::JsonSchema(json!({"const": {"format": "date"}}))).expect("it compiles");
    assert!(passes(&tokenizer, &data, "{\"format\": \"date\"}"));
}

#[test]
fn errors_say_what_cannot_be_enforced() {
    let (_, constraints) = smollm2();
    let why = |rule: Rule| constraints.compile(&rule).err().expect("it is refused").to_string();
    let not = why(Rule::JsonSchema(json!({"not": {"type": "string"}})));
    assert!(
        not.contains("cannot enforce this JSON schema") && not.contains("the keyword `not` is not supported"),
        "{not}"
    );
    let regex = why(Rule::Regex("(".into()));
    assert_eq!(regex, "Kiln cannot enforce this regex: unclosed group");
}

#[test]
fn every_kind_of_rule_accepts_and_rejects() {
    let (tokenizer, constraints) = smollm2();
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
                        "required": ["name"], "additionalProperties": false});
    let gbnf = "root ::= \"(\" (root | [a-z]+) \")\"";
    for (rule, good, bad) in [
        (Rule::JsonObject, vec!["{}", "{\"a\": [1, {}]}"], vec!["[]", "1", "{\"a\"", "x"]),
        (
            Rule::JsonSchema(schema),
            vec!["{\"name\": \"x\"}", "{\"name\":\"é\",\"n\":3}"],
            vec!["{}", "{\"name\": 3}", "{\"x\": 1}"],
        ),
        (Rule::JsonSchema(json!({})), vec!["{\"a\": 1}"], vec!["[]"]),
        (Rule::Regex("[a-c]{2}\\d+".into()), vec!["ab1", "cc123"], vec!["a1", "ab", "abc1"]),
        (Rule::Lark("start: \"a\" B\nB: /b+/".into()), vec!["ab", "abbb"], vec!["a", "b"]),
        (Rule::Gbnf(gbnf.into()), vec!["(a)", "((abc))"], vec!["()", "(a", "a"]),
        (Rule::Choice(vec!["yes".into(), "no\"".into()]), vec!["yes", "no\""], vec!["no", "maybe", "yesno\""]),
    ] {
        let constraint = constraints.compile(&rule).expect("the rule should compile");
        for text in good {
            assert!(passes(&tokenizer, &constraint, text), "{rule:?} should allow {text}");
        }
        for text in bad {
            assert!(!passes(&tokenizer, &constraint, text), "{rule:?} should refuse {text}");
        }
    }
}

#[test]
fn whatever_is_drawn_fits_in_every_vocabulary() {
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x", "y\n"]}, "b": {"type": "boolean"}},
                        "required": ["a", "b"], "additionalProperties": false});
    for name in ["smollm2", "llama-spm", "qwen2", "gemma-4", "phi-3", "gpt-2", "llama-bpe", "falcon"] {
        let tokenizer = vocabulary(name);
        if tokenizer.end_ids().is_empty() {
            assert!(Constraints::new(tokenizer, None, &[]).is_err());
            continue;
        }
        // More logits than tokens, as models with padded vocabularies have.
        let padded = tokenizer.n_tokens() + 37;
        let constraints =
            Constraints::new(Arc::clone(&tokenizer), Some(padded), &[]).expect("the vocabulary should fit");
        let mut constraint = constraints.compile(&Rule::JsonSchema(schema.clone())).expect("it should compile");
        assert_eq!(constraint.mask().expect("a mask should come").len(), padded.div_ceil(32), "{name}");
        for seed in 0..8 {
            let (text, ended) = written(&tokenizer, &constraint, seed, 400);
            assert!(ended, "{name}: {text}");
            let value: Json = serde_json::from_str(&text).expect("it should be JSON");
            assert!(
                value["b"].is_boolean() && ["x", "y\n"].contains(&value["a"].as_str().expect("a text")),
                "{name}: {text}"
            );
        }
    }
}

#[test]
fn a_choice_ends_by_itself_and_forces_what_is_certain() {
    let (tokenizer, constraints) = smollm2();
    let mut constraint = constraints.compile(&Rule::Choice(vec!["the answer".into()])).expect("it should compile");
    let forced = constraint.forced();
    let text = tokenizer.decode(&forced, ShowSpecial::No).expect("it decodes");
    assert!(!forced.is_empty() && "the answer".starts_with(&text), "{text}");
    assert_eq!(constraint.check(&forced).expect("they fit"), forced.len());
    for token in tokenizer.encode("the answer", AddSpecial::No, ParseSpecial::No).expect("it encodes") {
        assert!(!constraint.is_done());
        constraint.accept(token).expect("it fits");
    }
    assert!(constraint.is_done() && constraint.may_end());
    let mask = constraint.mask().expect("a mask should come");
    let allowed: Vec<u32> = (0..tokenizer.n_tokens() as u32).filter(|id| allows(&mask, *id)).collect();
    assert_eq!(allowed, tokenizer.end_ids());
}

#[test]
fn what_does_not_fit_breaks_the_constraint() {
    let (tokenizer, constraints) = smollm2();
    let mut constraint = constraints.compile(&Rule::Choice(vec!["yes".into()])).expect("it should compile");
    let wrong = tokenizer.encode("no", AddSpecial::No, ParseSpecial::No).expect("it encodes")[0];
    assert!(constraint.accept(wrong).is_err());
    assert!(constraint.mask().is_err());
}

#[test]
fn control_tokens_are_no_text() {
    let (tokenizer, constraints) = smollm2();
    let mut constraint = constraints.compile(&Rule::Regex("(.|\\n)*".into())).expect("it should compile");
    let mask = constraint.mask().expect("a mask should come");
    let start = tokenizer.token_id("<|im_start|>").expect("it is there");
    assert!(!allows(&mask, start));
}

#[test]
fn bad_schemas_say_where() {
    let (_, constraints) = smollm2();
    let pointer = |schema: Json| match constraints.compile(&Rule::JsonSchema(schema)) {
        Err(ConstraintError::Schema { pointer, .. }) => pointer,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it compiles"),
    };
    let bad = json!({"type": "string", "pattern": "(?=x)"});
    assert_eq!(
        pointer(json!({"type": "object", "properties": {"a": {"type": "string"}, "b/c": bad}})),
        "/properties/b~1c"
    );
    assert_eq!(pointer(json!({"type": "array", "items": {"anyOf": [{"type": "null"}, bad]}})), "/items/anyOf/1");
    let not = json!({"$defs": {"x": {"not": {"type": "null"}}}, "type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}});
    assert_eq!(pointer(not), "/properties/y");
    assert_eq!(pointer(json!([1])), "");
    assert_eq!(pointer(json!({"type": "object", "properties": {"a": {"type": "nonsense"}}})), "/properties/a");
}

#[test]
fn hostile_rules_meet_limits_in_time() {
    let (_, constraints) = smollm2();
    let mut deep = json!({"type": "integer"});
    for _ in 0..80 {
        deep = json!({"type": "array", "items": deep});
    }
    let many: Vec<String> = (0..20_000).map(|n| format!("v{n}")).collect();
    let nested = format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000));
    let guidance = json!({"type": "object", "x-guidance": {"nonsense": 1}});
    assert!(constraints.compile(&Rule::JsonSchema(guidance)).is_ok(), "options of the compiler are not the client's");
    for rule in [
        Rule::JsonSchema(deep),
        Rule::JsonSchema(json!({"enum": many})),
        Rule::JsonSchema(json!({"type": "string", "pattern": "x".repeat(2 << 20)})),
        Rule::JsonSchema(json!({"$ref": "https://example.com/schema"})),
        Rule::Regex("x".repeat(100_000)),
        Rule::Regex("(".into()),
        Rule::Lark(nested),
        Rule::Lark("start: nothing".into()),
        Rule::Gbnf("root ::= root".into()),
        Rule::Choice(Vec::new()),
        Rule::Choice(many.clone()),
    ] {
        let started = Instant::now();
        let shown: String = format!("{rule:?}").chars().take(60).collect();
        assert!(constraints.compile(&rule).is_err(), "{shown} should be refused");
        assert!(started.elapsed() < Duration::from_secs(5), "{shown} took {:?}", started.elapsed());
    }
}

#[test]
fn rules_that_cost_much_at_each_step_are_stopped_or_quick() {
    let (_, constraints) = smollm2();
    let bomb = "(a|aa|aaa)".repeat(40) + &"{1,900}".repeat(3);
    let ambiguous = "root ::= a*\na ::= \"a\" | \"aa\" | a a | \"\"";
    for rule in [Rule::Regex(bomb), Rule::Gbnf(ambiguous.into())] {
        let started = Instant::now();
        let Ok(mut constraint) = constraints.compile(&rule) else { continue };
        for _ in 0..50 {
            let Ok(mask) = constraint.mask() else { break };
            let Some(token) = (3..1000).find(|token| allows(&mask, *token)) else { break };
            if constraint.accept(token).is_err() {
                break;
            }
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{rule:?} took {:?}", started.elapsed());
    }
}

#[test]
fn grammars_of_llama_cpp_keep_their_meaning() {
    let (tokenizer, constraints) = smollm2();
    let lists = r#"
        # White space may be missing, and a rule may go on in the next line.
        root ::= value
        value ::= "[" ws (value ("," ws value)*)? "]" ws
            | number | string
        number ::= "-"? [0-9]{1,3} ws
        string ::= "\"" ([^"\\] | "\\" ["\\n])* "\"" ws
        ws ::= [ \n]*
    "#;
    let words = "root ::= (\"ab\" | [a-z]+) \".\"";
    let moves = "root ::= \"1. \" move \" \" move\nmove ::= (pawn | castle) [+#]?\npawn ::= ([a-h] \"x\")? [a-h] [1-8]\ncastle ::= \"O-O\" \"-O\"?";
    for (grammar, good, bad) in [
        (lists, vec!["[]", "[1, [-22 ,\"a\\n\"]] ", "7\n"], vec!["[1,]", "[1 2]", "1234", " 1", "[\"a]"]),
        (words, vec!["ab.", "abc.", "a."], vec!["ab", ".", "aB."]),
        (moves, vec!["1. e4 O-O-O", "1. exd5 O-O+"], vec!["1. e9 e5", "1. e4"]),
    ] {
        let constraint = constraints.compile(&Rule::Gbnf(grammar.into())).expect("the grammar should compile");
        for text in good {
            assert!(passes(&tokenizer, &constraint, text), "{grammar} should allow {text}");
        }
        for text in bad {
            assert!(!passes(&tokenizer, &constraint, text), "{grammar} should refuse {text}");
        }
    }
}

#[test]
fn control_tokens_in_words_are_found_in_any_number() {
    let (tokenizer, _) = smollm2();
    let words = Words::new(&tokenizer);
    let end = tokenizer.token_id("<|im_end|>").expect("the vocabulary has it");
    assert_eq!(words.write(""), "\"\"");
    assert_eq!(words.write("a \"b\""), r#""a \"b\"""#);
    assert_eq!(words.write("ä<|im_end|><|im_end|>b"), format!("\"ä\" <[{end}]> <[{end}]> \"b\""));
    // More than a stack has room for, were each a call of its own.
    let many = words.write(&"<|im_end|>".repeat(200_000));
    assert_eq!(many.matches("<[").count(), 200_000);
}

#[test]
fn schemas_have_as_many_optional_keys_as_can_be_written() {
    let (tokenizer, constraints) = smollm2();
    let schema = |keys: usize| {
        let properties: serde_json::Map<String, Json> =
            (0..keys).map(|key| (format!("key{key}"), json!({"type": "integer"}))).collect();
        Rule::JsonSchema(json!({"type": "object", "properties": properties, "additionalProperties": false}))
    };
    let constraint = constraints.compile(&schema(schema::MAX_KEYS)).expect("as many as are allowed");
    let last = schema::MAX_KEYS - 1;
    assert!(passes(&tokenizer, &constraint, &format!("{{\"key0\": 1, \"key{last}\": 2}}")));
    let error = constraints.compile(&schema(schema::MAX_KEYS + 1)).err().expect("one too many").to_string();
    assert!(error.contains("/properties") && error.contains("1000 are allowed"), "{error}");
    let long = json!({"type": "object", "properties": {"x".repeat(2000): {"type": "integer"}}});
    let error = constraints.compile(&Rule::JsonSchema(long)).err().expect("too long").to_string();
    assert!(error.contains("a key of 2000 bytes"), "{error}");
}
