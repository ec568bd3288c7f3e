//! Vocabularies for synthetic models: every byte, a few merges, the special tokens, and filler up to the wanted size.
//! Text goes in and comes out unharmed; the filler is only ever made by sampling.

use kiln_gguf::{Metadata, Strings};

use super::presets::{Family, Preset};

/// Numbers of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const BYTE: i32 = 6;

/// Merges of byte-level vocabularies, best first; each makes one token. `Ġ` is the space.
const MERGES: &[(&str, &str)] = &[
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("a", "n"),
    ("e", "r"),
    ("o", "n"),
    ("an", "d"),
    ("Ġ", "and"),
    ("in", "g"),
    ("l", "l"),
    ("e", "ll"),
    ("h", "ell"),
    ("hell", "o"),
    ("Ġ", "a"),
    ("Ġ", "o"),
    ("Ġo", "f"),
    ("Ġ", "t"),
    ("Ġt", "o"),
    ("o", "r"),
    ("Ġ", "w"),
    ("Ġw", "or"),
    ("l", "d"),
    ("Ġwor", "ld"),
];

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
    '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
const TURNS: &str = "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\\n' + \
    message['content'] + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";
const WORLD: &str = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n\\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}";

/// Tokens with their types and scores.
#[derive(Default)]
struct Tokens {
    texts: Strings,
    types: Vec<i32>,
    scores: Vec<f32>,
}

impl Tokens {
    fn add(&mut self, text: &str, kind: i32, score: f32) -> u32 {
        self.texts.push(text.as_bytes());
        self.types.push(kind);
        self.scores.push(score);
        u32::try_from(self.types.len() - 1).expect("vocabularies have less than 2^32 tokens")
    }

    /// Unreachable tokens up to `size`; at least what there is.
    fn fill(&mut self, size: usize, spelling: impl Fn(usize) -> String) {
        for number in self.types.len()..size {
            self.add(&spelling(number), NORMAL, -1e6 - number as f32);
        }
    }
}

/// Sets the keys of a preset's tokenizer and gives the number of tokens.
pub(super) fn set(preset: &Preset, m: &mut Metadata) -> usize {
    let sentencepiece =
        matches!(preset.family, Family::Gemma2 { .. } | Family::Gemma4(_)) || preset.name == "mixtral-8x7b";
    match preset.family {
        Family::Rwkv6 { .. } | Family::Rwkv7 { .. } => world(preset, m),
        Family::Bert => words(m),
        _ if sentencepiece => pieces(preset, m),
        _ => bytes(preset, m),
    }
}

fn put(tokens: Tokens, model: &str, template: &str, m: &mut Metadata) -> usize {
    let count = tokens.types.len();
    m.set("tokenizer.ggml.model", model);
    m.set("tokenizer.ggml.tokens", tokens.texts);
    if model == "llama" {
        m.set("tokenizer.ggml.scores", tokens.scores);
    }
    m.set("tokenizer.ggml.token_type", tokens.types);
    m.set("tokenizer.chat_template", template);
    count
}

/// The characters that stand for the 256 bytes in byte-level vocabularies: printable ones for themselves, the others
/// for those from U+0100 on.
fn byte_characters() -> [char; 256] {
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut next = 256;
    std::array::from_fn(|b| {
        let code = b as u32;
        let code = if printable(code) {
            code
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).expect("these code points are characters")
    })
}

/// A byte-level vocabulary.
fn bytes(preset: &Preset, m: &mut Metadata) -> usize {
    let mut tokens = Tokens::default();
    for character in byte_characters() {
        tokens.add(&character.to_string(), NORMAL, 0.0);
    }
    let mut merges = Strings::default();
    for (left, right) in MERGES {
        merges.push(format!("{left} {right}").as_bytes());
        tokens.add(&format!("{left}{right}"), NORMAL, 0.0);
    }
    let size = preset.vocab.max(tokens.types.len() + 3);
    tokens.fill(size - 3, |number| format!("Ġw{number}"));
    let end = tokens.add("<|endoftext|>", CONTROL, 0.0);
    tokens.add("<|im_start|>", CONTROL, 0.0);
    let turn = tokens.add("<|im_end|>", CONTROL, 0.0);
    let llama = preset.family == Family::Llama;
    m.set("tokenizer.ggml.pre", if llama { "llama-bpe" } else { "qwen2" });
    m.set("tokenizer.ggml.merges", merges);
    m.set("tokenizer.ggml.bos_token_id", end);
    m.set("tokenizer.ggml.eos_token_id", end);
    m.set("tokenizer.ggml.eot_token_id", turn);
    m.set("tokenizer.ggml.add_bos_token", llama);
    put(tokens, "gpt2", CHATML, m)
}

/// A SentencePiece vocabulary with byte tokens.
fn pieces(preset: &Preset, m: &mut Metadata) -> usize {
    let mut tokens = Tokens::default();
    tokens.add("<pad>", CONTROL, 0.0);
    let eos = tokens.add("<eos>", CONTROL, 0.0);
    let bos = tokens.add("<bos>", CONTROL, 0.0);
    let unknown = tokens.add("<unk>", UNKNOWN, 0.0);
    tokens.add("<start_of_turn>", CONTROL, 0.0);
    let turn = tokens.add("<end_of_turn>", CONTROL, 0.0);
    for byte in 0..=255u8 {
        tokens.add(&format!("<0x{byte:02X}>"), BYTE, 0.0);
    }
    // Single characters, then the words that merges can reach; the better the score, the earlier it is made.
    let letters: Vec<String> = (33..127u8).map(|b| char::from(b).to_string()).chain(["▁".to_owned()]).collect();
    for letter in &letters {
        tokens.add(letter, NORMAL, -1000.0);
    }
    for (rank, (left, right)) in MERGES.iter().enumerate() {
        tokens.add(&format!("{left}{right}").replace('Ġ', "▁"), NORMAL, -(rank as f32));
    }
    tokens.fill(preset.vocab, |number| format!("▁w{number}"));
    let gemma = matches!(preset.family, Family::Gemma2 { .. } | Family::Gemma4(_));
    m.set("tokenizer.ggml.pre", "default");
    m.set("tokenizer.ggml.bos_token_id", bos);
    m.set("tokenizer.ggml.eos_token_id", eos);
    m.set("tokenizer.ggml.eot_token_id", turn);
    m.set("tokenizer.ggml.unknown_token_id", unknown);
    m.set("tokenizer.ggml.padding_token_id", 0u32);
    m.set("tokenizer.ggml.add_bos_token", true);
    m.set("tokenizer.ggml.add_eos_token", false);
    m.set("tokenizer.ggml.add_space_prefix", !gemma);
    put(tokens, "llama", TURNS, m)
}

/// A WordPiece vocabulary: letters, digits and signs at the beginning of a word and inside one, and some words.
fn words(m: &mut Metadata) -> usize {
    let mut tokens = Tokens::default();
    let special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
    let ids = special.map(|text| tokens.add(text, CONTROL, 0.0));
    for character in (33..127u8).map(char::from).filter(|c| !c.is_ascii_uppercase()) {
        tokens.add(&format!("▁{character}"), NORMAL, 0.0);
        tokens.add(&character.to_string(), NORMAL, 0.0);
    }
    for (left, right) in MERGES {
        let text = format!("{left}{right}");
        let inside = text.strip_prefix('Ġ').unwrap_or(&text);
        // Two letters and more; single ones are there already.
        if inside.len() > 1 {
            tokens.add(&format!("▁{inside}"), NORMAL, 0.0);
        }
    }
    m.set("tokenizer.ggml.pre", "bert-bge");
    for (role, id) in ["padding", "unknown", "cls", "seperator", "mask"].iter().zip(ids) {
        m.set(format!("tokenizer.ggml.{role}_token_id"), id);
    }
    m.set("tokenizer.ggml.model", "bert");
    let count = tokens.types.len();
    m.set("tokenizer.ggml.tokens", tokens.texts);
    m.set("tokenizer.ggml.token_type", tokens.types);
    count
}

/// An RWKV World vocabulary: bytes and words, spelled with escapes.
fn world(preset: &Preset, m: &mut Metadata) -> usize {
    let mut tokens = Tokens::default();
    let end = tokens.add("<s>", CONTROL, 0.0);
    for byte in 0..=255u8 {
        tokens.add(&format!("\\x{byte:02x}"), NORMAL, 0.0);
    }
    for (left, right) in MERGES {
        tokens.add(&format!("{left}{right}").replace('Ġ', " "), NORMAL, 0.0);
    }
    let turn = tokens.add("\\n\\n", NORMAL, 0.0);
    tokens.fill(preset.vocab, |number| format!(" w{number}"));
    m.set("tokenizer.ggml.bos_token_id", end);
    m.set("tokenizer.ggml.eos_token_id", end);
    m.set("tokenizer.ggml.eot_token_id", turn);
    m.set("tokenizer.ggml.add_bos_token", false);
    put(tokens, "rwkv", WORLD, m)
}
