//! A chat with a model: `cargo run --release --example chat -- smollm2.gguf`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln_llm::{Error, Llm, assistant, user};

fn main() -> Result<(), Error> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "smollm2.gguf".into());
    let llm = Llm::open(path)?;
    let mut messages = Vec::new();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        messages.push(user(line));
        let mut said = String::new();
        for piece in llm.chat(&messages[..]).max_tokens(200).stream()? {
            said += piece?.text();
        }
        println!("{said}");
        messages.push(assistant(said));
    }
    Ok(())
}
