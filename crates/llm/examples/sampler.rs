//! A sampler of one's own: `cargo run --release --example sampler -- smollm2.gguf`. This one writes without the letter e.
#![allow(clippy::print_stdout, reason = "an example")]

use kiln_llm::{Error, Llm};

fn main() -> Result<(), Error> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "smollm2.gguf".into());
    let llm = Llm::open(path)?;
    let tokenizer = llm.model().tokenizer.clone();
    let with_e =
        move |token: &u32| tokenizer.piece(*token).is_ok_and(|piece| piece.iter().any(|byte| b"eE".contains(byte)));
    let forbidden: Vec<u32> = (0..llm.model().tokenizer.n_tokens() as u32).filter(with_e).collect();
    let request = llm.generate("A cat is a small animal that").max_tokens(40).temperature(0.0);
    // The hook changes the logits, and the samplers go on from there; it could as well return a token.
    let text = request.sampler(move |_tokens, logits| {
        forbidden.iter().for_each(|token| logits[*token as usize] = f32::NEG_INFINITY);
        None
    });
    println!("{}", text.text()?);
    Ok(())
}
