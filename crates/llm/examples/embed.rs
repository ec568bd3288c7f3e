//! How near texts are to each other: `cargo run --release --example embed -- minilm.gguf "A cat sits" "A dog runs"`
#![allow(clippy::print_stdout, reason = "an example")]

use kiln_llm::{EmbedOptions, Error, Llm, Pooling};

fn main() -> Result<(), Error> {
    let mut words = std::env::args().skip(1);
    let llm = Llm::open(words.next().unwrap_or_else(|| "minilm.gguf".into()))?;
    let texts: Vec<String> = words.collect();
    // Models that were made for embeddings name a pooling in their file; others are given one.
    let pooling = Pooling::of(llm.model())?.or(Some(Pooling::Mean));
    let vectors = llm.embed_with(&texts, EmbedOptions { pooling, ..EmbedOptions::default() })?;
    for (text, vector) in texts.iter().zip(&vectors) {
        // The vectors have the length 1, so that their product is the cosine.
        let near: f32 = vector.iter().zip(&vectors[0]).map(|(a, b)| a * b).sum();
        println!("{near:6.3}  {text}");
    }
    Ok(())
}
