//! What Kiln knows of and does not run, and where architectures that it runs end sooner than their papers say.

/// Names of architectures in files, and what is missing.
pub const REFUSED: &[(&str, &str)] = &[
    ("apertus", "its activation (xIELU) is missing"),
    ("bitnet", "norms inside its halves of layers are missing"),
    ("chameleon", "its norms with biases for each head are missing"),
    ("clip", "it makes vectors of images or sound for another model, of which Kiln runs the text alone"),
    ("deepseek2-ocr", "nothing it could be judged by exists"),
    ("deepseek4", "attention over compressed keys and its residual streams are missing"),
    ("dflash", "it guesses tokens for another model and says nothing alone"),
    ("eagle3", "it guesses tokens for another model and says nothing alone"),
    ("gemma3n", "its alternating streams and embeddings of each layer are missing"),
    ("gemma4", "keys that layers share and embeddings of each layer are missing"),
    ("gemma4-assistant", "it guesses tokens for another model and says nothing alone"),
    ("graniteswitch", "adapters chosen for each token are missing"),
    ("plm", "nothing it could be judged by exists"),
    ("qwen4exp", "its residual streams, n-grams and choice of blocks are missing"),
    ("step35", "nothing it could be judged by exists"),
    ("wavtokenizer-dec", "it makes sound of codes; convolutions over time and the inverse of a spectrum are missing"),
];

/// Architectures that run up to some bound.
pub const LIMITS: &[(&str, &str)] = &[
    ("dream", "`kiln run` fills in texts; it is not served"),
    ("glm5-next", "contexts up to the number of keys that layers choose"),
    ("llada", "`kiln run` fills in texts; it is not served"),
    ("llada-moe", "`kiln run` fills in texts; it is not served"),
    ("llama4", "contexts up to 8192 tokens, the size of a chunk"),
    ("pockettts", "its language model; sound is not made"),
    ("qwen3tts", "its language model; sound is not made"),
    ("rnd1", "`kiln run` fills in texts; it is not served"),
];
