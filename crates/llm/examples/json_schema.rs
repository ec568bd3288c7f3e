//! An answer that is read by a program: `cargo run --release --example json_schema -- smollm2.gguf`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln_llm::{Error, Llm};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "smollm2.gguf".into());
    let city = ask(&Llm::open(path)?)?;
    let city: Value = serde_json::from_str(&city)?;
    println!("{} has {} people", city["name"], city["people"]);
    Ok(())
}

fn ask(llm: &Llm) -> Result<String, Error> {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "people": {"type": "integer", "minimum": 0, "maximum": 50_000_000}},
        "required": ["name", "people"],
        "additionalProperties": false,
    });
    llm.chat("Name a large city and how many people live in it.").json_schema(schema).temperature(0.0).text()
}
