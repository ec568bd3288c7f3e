//! Whatever a model writes is content, reasoning or calls, in an order that holds, and how it is cut into pieces makes no difference to the calls. The
//! first byte chooses the family, the second where texts are cut.

#![no_main]

use kiln_engine::text::tools::Calls;
use kiln_engine::text::{Event, Family, Tool};
use libfuzzer_sys::fuzz_target;

const FAMILIES: [&str; 28] = [
    "functionary-3.2",
    "kimi-k2",
    "deepseek-v3.2",
    "deepseek-v3",
    "deepseek-v3.1",
    "cohere-r7b",
    "command-r",
    "minimax-m2",
    "gemma-4",
    "function-gemma",
    "lfm2",
    "mistral-v11",
    "mistral-v13",
    "mistral",
    "seed-oss",
    "glm-4",
    "qwen3-coder",
    "functionary-3.1",
    "nemotron-2",
    "apriel",
    "apertus",
    "granite-3",
    "hermes",
    "phi-4-mini",
    "llama-4",
    "llama-3",
    "pythonic",
    "other",
];

/// What pieces come to: content, and names and arguments of calls.
fn read(family: &str, pieces: &[&str]) -> (String, Vec<(String, String)>) {
    let schema =
        serde_json::json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}});
    let tools = ["f", "get_weather"].map(|name| Tool { name: name.into(), parameters: schema.clone() });
    let mut calls = Calls::new(Family::by_name(family).expect("the family exists"), tools.into());
    let mut events: Vec<Event> = pieces.iter().flat_map(|piece| calls.push(piece)).collect();
    events.extend(calls.finish());
    let (mut content, mut found, mut open) = (String::new(), Vec::<(String, String)>::new(), None);
    for event in events {
        match event {
            Event::Content(text) | Event::Reasoning(text) => {
                assert_eq!(open, None, "content inside a call");
                content += &text;
            }
            Event::CallStart { index, name, .. } => {
                assert_eq!((open, index), (None, found.len()));
                open = Some(index);
                found.push((name, String::new()));
            }
            Event::CallArguments { index, text } => {
                assert_eq!(open, Some(index));
                found[index].1 += &text;
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

fuzz_target!(|bytes: &[u8]| {
    let [family, cut, text @ ..] = bytes else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let family = FAMILIES[usize::from(*family) % FAMILIES.len()];
    let whole = read(family, &[text]);
    let mut at = (usize::from(*cut) * text.len()) / 256;
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    // Content beside calls may differ: the beginning of a call that breaks off behind a whole one is content only where a piece ended between them.
    assert_eq!(read(family, &[&text[..at], &text[at..]]).1, whole.1, "{family}, cut at {at}");
});
