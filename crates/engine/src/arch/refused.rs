//! What Kiln knows of and does not run, and where architectures that it runs end sooner than their papers say.

/// Names of architectures in files, and what is missing.
pub const REFUSED: &[(&str, &str)] = &[
    ("clip", "it makes vectors of pictures or sounds for another model; `kiln run` takes it beside that one"),
    ("clef", "it decides fields of a form with a head of its own, whose formulas nobody has published"),
    ("dflash", "it guesses tokens for another model and says nothing alone"),
    ("eagle3", "it guesses tokens for another model and says nothing alone"),
    ("gemma4-assistant", "it guesses tokens for another model and says nothing alone"),
    ("gptj", "llama.cpp has its name and no graph of it, so no such files are made"),
    ("vllm-decision2", "it scores options with a head of its own, whose formulas nobody has published"),
    ("wavtokenizer-dec", "it makes sound of codes; convolutions over time and the inverse of a spectrum are missing"),
];

/// Architectures that run up to some bound.
pub const LIMITS: &[(&str, &str)] = &[
    ("dream", "`kiln run` fills in texts; it is not served"),
    ("llada", "`kiln run` fills in texts; it is not served"),
    ("llada-moe", "`kiln run` fills in texts; it is not served"),
    ("pockettts", "its language model; sound is not made"),
    ("qwen3tts", "its language model; sound is not made"),
    ("rnd1", "`kiln run` fills in texts; it is not served"),
];
