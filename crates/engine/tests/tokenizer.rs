//! The tokenizer against llama.cpp, on cut vocabularies of real models, and against hostile vocabularies.
//!
//! `tokenizer/plain.inp` are the texts of llama.cpp's own tokenizer test; `tokenizer/special.inp` are more, in which
//! special tokens are recognised. `scripts/goldens/tokenizer` made the vocabularies and ids.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_engine::tokenizer::{
    AddSpecial, LeadingSpace, ParseSpecial, ShowSpecial, TextStream, TokenType, Tokenizer, TokenizerError, Vocab,
};
use kiln_gguf::Gguf;

const FIXTURES: [&str; 10] = [
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "phi-3",
    "qwen2",
    "smollm2",
];

/// Encoders: they normalise a text, so that it does not come back as it was.
const ENCODERS: [&str; 2] = ["bert-bge", "nomic-bert-moe"];

/// Texts of `special.inp` where Kiln means to differ, and why.
const DIFFERENCES: [(&str, &str); 1] = [
    // This vocabulary has `</s>` as a normal token; llama.cpp takes it for an end token, the model's own tokenizer does not.
    ("qwen2", "<s>[INST] <<SYS>> </s><unk> <pad> <0x0A> <0x-1>"),
];

/// Names of pre-tokenizers under which Kiln means to cut some texts otherwise, and why.
const OTHER_CUTS: [(&str, &str); 4] = [
    // `XMLHttpRequest`: the models' own patterns end a word before an upper letter that follows a lower one, llama.cpp does not tell them apart.
    ("kimi-k2", "special"),
    ("tiny_aya", "special"),
    ("youtu", "special"),
    // `1314151` before a Chinese letter: to the model's own pattern no word ends there, to llama.cpp words are of ASCII alone.
    ("tiny_aya", "plain"),
];

/// Where llama.cpp does not do what BERT does: of a Korean syllable it keeps the first letter only, and it drops marks that
/// take space as well as those that take none.
fn is_unlike_bert(name: &str, text: &str) -> bool {
    name == "bert-bge" && text.contains(|c| matches!(c, '\u{AC00}'..='\u{D7A3}' | '\u{93F}'))
}

fn path(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "tokenizer", name].iter().collect()
}

fn vocab(name: &str) -> Vocab {
    let file = Gguf::open(path(&format!("{name}.gguf"))).expect("the fixture should open");
    Vocab::from_gguf(file.metadata()).expect("the fixture should hold a vocabulary")
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::new(vocab(name)).expect("the vocabulary should be good")
}

fn texts(kind: &str) -> Vec<String> {
    let all = std::fs::read_to_string(path(&format!("{kind}.inp"))).expect("the texts should be there");
    all.split("\n__ggml_vocab_test__\n").map(str::to_owned).collect()
}

fn expected(name: &str, kind: &str) -> Vec<Vec<u32>> {
    let all = std::fs::read_to_string(path(&format!("{name}.{kind}.ids"))).expect("the ids should be there");
    all.lines()
        .map(|line| line.split_whitespace().map(|id| id.parse().expect("an id should be a number")).collect())
        .collect()
}

#[test]
fn ids_are_those_of_llama_cpp() {
    for name in FIXTURES.into_iter().chain(ENCODERS) {
        let tokenizer = tokenizer(name);
        for (kind, parse, count) in [("plain", ParseSpecial::No, 47), ("special", ParseSpecial::Yes, 22)] {
            let (texts, expected) = (texts(kind), expected(name, kind));
            assert_eq!((texts.len(), expected.len()), (count, count), "{name} {kind}");
            for (text, expected) in texts.iter().zip(&expected) {
                let ids = tokenizer.encode(text, AddSpecial::No, parse).unwrap();
                if is_unlike_bert(name, text) {
                    continue;
                }
                if DIFFERENCES.contains(&(name, text)) {
                    assert_ne!(&ids, expected, "{name} should differ on {text:?}: remove it from the list");
                } else {
                    assert_eq!(&ids, expected, "{name} {kind} {text:?}");
                }
            }
        }
    }
}

/// Every name with the same vocabulary: how a text is cut depends on the name alone. `scripts/goldens/pre-tokenizers` made the ids.
#[test]
fn every_name_of_a_pre_tokenizer_cuts_as_in_llama_cpp() {
    let mut names = std::collections::HashSet::new();
    for (file, of) in [("pre-tokenizers.ids", "llama-bpe"), ("pre-tokenizers-of-lines.ids", "gemma-4")] {
        for line in std::fs::read_to_string(path(file)).expect("the ids should be there").lines() {
            let mut parts = line.splitn(3, ' ');
            let [same_names, kind, ids] = [(); 3].map(|()| parts.next().expect("a line should have three parts"));
            let text = std::fs::read_to_string(path(&format!("{kind}.inp"))).expect("the texts should be there");
            let expected: Vec<u32> = ids.split(' ').map(|id| id.parse().expect("an id should be a number")).collect();
            for name in same_names.split(',') {
                names.insert(name.to_owned());
                let tokenizer = Tokenizer::new(Vocab { pre: name.into(), ..vocab(of) }).unwrap();
                let got = tokenizer.encode(&text, AddSpecial::No, ParseSpecial::No).unwrap();
                let differs = OTHER_CUTS.contains(&(name, kind));
                assert_eq!(got != expected, differs, "{name} {kind}: differs as it should not, or no longer");
            }
        }
    }
    assert_eq!(names.len(), 85, "a name for each of the table's");
}

#[test]
fn text_comes_back_whole_and_piece_by_piece() {
    for name in FIXTURES {
        let tokenizer = Arc::new(tokenizer(name));
        // U+2581 stands for a space in some vocabularies, phi-3 drops spaces after special tokens and a byte without a
        // token is lost, so only the plain texts must survive everywhere.
        for text in texts("plain") {
            let ids = tokenizer.encode(&text, AddSpecial::Yes, ParseSpecial::No).unwrap();
            assert_eq!(tokenizer.decode(&ids, ShowSpecial::No).unwrap(), text, "{name}");
        }
        for text in texts("special") {
            let ids = tokenizer.encode(&text, AddSpecial::Yes, ParseSpecial::Yes).unwrap();
            for show in [ShowSpecial::Yes, ShowSpecial::No] {
                let mut stream = TextStream::new(tokenizer.clone(), show, LeadingSpace::Strip);
                let mut streamed: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
                streamed += &stream.finish();
                assert_eq!(streamed, tokenizer.decode(&ids, show).unwrap(), "{name} {text:?}");
            }
        }
    }
}

#[test]
fn encoders_put_their_special_tokens_around_a_text() {
    for (name, first, last) in [("bert-bge", "[CLS]", "[SEP]"), ("nomic-bert-moe", "<s>", "</s>")] {
        let tokenizer = tokenizer(name);
        let ids = tokenizer.encode("Hello World", AddSpecial::Yes, ParseSpecial::No).unwrap();
        assert_eq!(ids.first().copied(), tokenizer.token_id(first), "{name}");
        assert_eq!(ids.last().copied(), tokenizer.token_id(last), "{name}");
        assert_eq!(tokenizer.decode(&ids, ShowSpecial::No).unwrap().trim().to_lowercase(), "hello world", "{name}");
    }
}

#[test]
fn a_stream_never_gives_half_a_character() {
    for name in ["gpt-2", "llama-spm", "gemma-4"] {
        let tokenizer = Arc::new(tokenizer(name));
        let ids = tokenizer.encode("🫠𝄞𓀀", AddSpecial::No, ParseSpecial::No).unwrap();
        assert!(ids.len() > 3, "{name} should need several tokens a character");
        let mut stream = TextStream::new(tokenizer.clone(), ShowSpecial::No, LeadingSpace::Strip);
        let pushed: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert!(pushed.iter().all(|text| !text.contains('\u{FFFD}')), "{name} {pushed:?}");
        assert_eq!(pushed.concat(), "🫠𝄞𓀀", "{name}");
        assert_eq!(stream.finish(), "");

        // The same cut off inside the last character.
        let mut stream = TextStream::new(tokenizer, ShowSpecial::No, LeadingSpace::Strip);
        let pushed: String = ids[..ids.len() - 1].iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!((pushed.as_str(), stream.finish().as_str()), ("🫠𝄞", "\u{FFFD}"), "{name}");
        assert_eq!(stream.finish(), "");
    }
}

#[test]
fn bos_is_added_when_asked_and_specials_only_when_parsed() {
    let tokenizer = tokenizer("llama-spm");
    let encode = |add, parse| tokenizer.encode("</s>", add, parse).unwrap();
    assert_eq!(encode(AddSpecial::Yes, ParseSpecial::Yes), [1, 2]);
    assert_eq!(encode(AddSpecial::No, ParseSpecial::Yes), [2]);
    let plain = encode(AddSpecial::No, ParseSpecial::No);
    assert!(!plain.contains(&2) && plain.len() > 1);
    assert_eq!(tokenizer.decode(&plain, ShowSpecial::No).unwrap(), "</s>");
    assert_eq!(tokenizer.decode(&[1, 2], ShowSpecial::No).unwrap(), "");
    assert_eq!(tokenizer.decode(&[1, 2], ShowSpecial::Yes).unwrap(), "<s></s>");
    assert_eq!(tokenizer.encode("", AddSpecial::Yes, ParseSpecial::No).unwrap(), [1]);
    assert!(tokenizer.is_end(2) && !tokenizer.is_end(1));
}

#[test]
fn the_leading_space_of_a_continuation_stays() {
    let tokenizer = Arc::new(tokenizer("llama-spm"));
    let ids = tokenizer.encode("Hello", AddSpecial::No, ParseSpecial::No).unwrap();
    for (leading, expected) in [(LeadingSpace::Keep, " Hello"), (LeadingSpace::Strip, "Hello")] {
        let mut stream = TextStream::new(tokenizer.clone(), ShowSpecial::No, leading);
        let text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        assert_eq!(text, expected);
    }
}

#[test]
fn tokens_may_reach_over_spaces() {
    let vocab = Vocab {
        model: "llama".into(),
        tokens: ["<unk>", "▁", "a", "b", "a▁", "a▁b", "▁b"].into_iter().collect(),
        scores: vec![0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0],
        unk: Some(0),
        ..Vocab::default()
    };
    let tokenizer = Tokenizer::new(vocab).unwrap();
    let encode = |text| tokenizer.encode(text, AddSpecial::No, ParseSpecial::No).unwrap();
    assert_eq!(encode("a b"), [5]);
    assert_eq!(encode("b ba b a"), [3, 6, 5, 1, 2]);
    assert_eq!(encode("bxb"), [3, 0, 3]);
}

#[test]
fn chat_models_end_where_their_turns_end() {
    let tokenizer = tokenizer("smollm2");
    let ends: Vec<&[u8]> = tokenizer.end_ids().iter().map(|&id| tokenizer.piece(id).unwrap()).collect();
    assert!(ends.contains(&&b"<|im_end|>"[..]) && ends.contains(&&b"<|endoftext|>"[..]), "{ends:?}");
    assert_eq!(tokenizer.token_id("<|im_end|>").map(|id| tokenizer.is_end(id)), Some(true));
}

#[test]
fn long_words_take_no_quadratic_time() {
    for name in ["gpt-2", "llama-spm", "llama-bpe", "gemma-4"] {
        let tokenizer = tokenizer(name);
        for word in ["a", " ", "\n", "7", "你", "=-"] {
            let text = word.repeat((1 << 20) / word.len());
            let start = Instant::now();
            let ids = tokenizer.encode(&text, AddSpecial::No, ParseSpecial::Yes).unwrap();
            // Milliseconds if all is well, hours if not.
            assert!(start.elapsed() < Duration::from_secs(30), "{name} {word:?} took {:?}", start.elapsed());
            assert_eq!(tokenizer.decode(&ids, ShowSpecial::No).unwrap(), text, "{name} {word:?}");
        }
    }
}

fn rwkv() -> Vocab {
    let mut tokens: Vec<String> = vec!["<s>".into()];
    tokens.extend((0..=255).map(|byte| format!("\\x{byte:02x}")));
    tokens.extend(["ab", "abc", r"\n\n", r"\'s", r"\xe4\xbd\xa0\xe5\xa5\xbd", r"\\\\"].map(String::from));
    let mut token_types = vec![TokenType::Normal; tokens.len()];
    token_types[0] = TokenType::Control;
    Vocab { model: "rwkv".into(), tokens: tokens.into_iter().collect(), token_types, eos: Some(0), ..Vocab::default() }
}

#[test]
fn rwkv_takes_the_longest_token_at_every_place() {
    let tokenizer = Tokenizer::new(rwkv()).unwrap();
    let byte = |b: u8| u32::from(b) + 1;
    for (text, expected) in [
        ("abcab", vec![258, 257]),
        ("abd", vec![257, byte(b'd')]),
        ("\n\n\n", vec![259, byte(b'\n')]),
        ("a's\\\\", vec![byte(b'a'), 260, 262]),
        ("你好你", vec![261, byte(0xE4), byte(0xBD), byte(0xA0)]),
        ("<s>", vec![byte(b'<'), byte(b's'), byte(b'>')]),
    ] {
        let ids = tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::No).unwrap();
        assert_eq!(ids, expected, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, ShowSpecial::No).unwrap(), text);
    }
    assert_eq!(tokenizer.encode("a<s>", AddSpecial::Yes, ParseSpecial::Yes).unwrap(), [byte(b'a'), 0]);
}

fn error(vocab: Vocab) -> TokenizerError {
    Tokenizer::new(vocab).err().expect("the vocabulary should be refused")
}

#[test]
fn bad_vocabularies_are_refused_by_name() {
    let spm = || vocab("llama-spm");
    let bpe = || vocab("gpt-2");
    assert!(matches!(error(Vocab::default()), TokenizerError::Empty));
    assert!(matches!(
        error(Vocab { token_types: vec![TokenType::Normal; 5], ..spm() }),
        TokenizerError::ListLength { list: "tokenizer.ggml.token_type", got: 5, .. }
    ));
    assert!(matches!(
        error(Vocab { scores: vec![0.0; 7], ..spm() }),
        TokenizerError::ListLength { list: "tokenizer.ggml.scores", got: 7, .. }
    ));
    assert!(matches!(
        error(Vocab { eot: Some(1_000_000), ..spm() }),
        TokenizerError::SpecialOutOfRange { role: "EOT", id: 1_000_000, .. }
    ));
    assert!(matches!(error(Vocab { bos: None, ..spm() }), TokenizerError::NoSpecial { role: "BOS", .. }));
    assert!(matches!(error(Vocab { merges: Default::default(), ..bpe() }), TokenizerError::NoMerges { .. }));
    let merges = ["a b", "ab"].into_iter().collect();
    assert!(matches!(error(Vocab { merges, ..bpe() }), TokenizerError::BadMerge { index: 1, .. }));
    let message = error(Vocab { pre: "gpt-5".into(), ..bpe() }).to_string();
    assert!(
        message.contains("`gpt-5`") && message.contains("`tokenizer.ggml.pre`") && !message.contains("override"),
        "{message}"
    );
    assert!(matches!(error(Vocab { pre: String::new(), ..bpe() }), TokenizerError::MissingPre));
    assert!(error(Vocab { model: "plamo2".into(), ..spm() }).to_string().contains("`plamo2`"));
    let tokens = ["x".repeat(70_000)].into_iter().collect();
    assert!(matches!(
        error(Vocab { model: "rwkv".into(), tokens, ..Vocab::default() }),
        TokenizerError::TokenTooLong { id: 0, got: 70_000, .. }
    ));
}

#[test]
fn ids_outside_the_vocabulary_are_errors() {
    let tokenizer = Arc::new(tokenizer("gpt-2"));
    let n_tokens = tokenizer.n_tokens() as u32;
    for id in [n_tokens, u32::MAX] {
        assert!(matches!(tokenizer.decode(&[0, id], ShowSpecial::No), Err(TokenizerError::IdOutOfRange { .. })));
        let mut stream = TextStream::new(tokenizer.clone(), ShowSpecial::No, LeadingSpace::Keep);
        assert!(stream.push(id).is_err());
        assert!(!tokenizer.is_end(id));
    }
}

#[test]
fn merges_of_unknown_tokens_do_no_harm() {
    let vocab = Vocab {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        tokens: ["a", "b", "c", "abc"].into_iter().collect(),
        // `ab` is no token, `abc` is; `ca` and `\u{4000}` lead nowhere, and `d` is not even a byte of the vocabulary.
        merges: ["a b", "ab c", "c a", "\u{4000} a", "d a"].into_iter().collect(),
        ..Vocab::default()
    };
    let tokenizer = Tokenizer::new(vocab).unwrap();
    let encode = |text| tokenizer.encode(text, AddSpecial::Yes, ParseSpecial::Yes).unwrap();
    assert_eq!(encode("abc"), [3]);
    assert_eq!(encode("ab"), [0, 1]);
    assert_eq!(encode("cac"), [2, 0, 2]);
    assert_eq!(encode("dab"), [0, 1]);
}

/// A small random generator: the tests need no other.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn bytes(&mut self) -> Vec<u8> {
        const PARTS: [&[u8]; 16] = [
            b"a",
            b"b",
            b"<0x41>",
            b"<0x-1>",
            b"<0x",
            b"\\",
            b"\\x",
            b"\\x4",
            b"\xFF",
            b"\xE2\x96",
            "▁".as_bytes(),
            "Ġ".as_bytes(),
            b" ",
            b"\n",
            "😀".as_bytes(),
            b"</s>",
        ];
        (0..self.below(4)).flat_map(|_| PARTS[self.below(16) as usize].to_vec()).collect()
    }
}

#[test]
fn random_vocabularies_never_panic() {
    let mut random = Random(1);
    let mut built = 0;
    for _ in 0..4000 {
        let n_tokens = 1 + random.below(40);
        let id = |random: &mut Random| Some(random.below(n_tokens + 2) as u32).filter(|&id| id % 3 != 0);
        let vocab = Vocab {
            model: ["gpt2", "gemma4", "llama", "rwkv"][random.below(4) as usize].into(),
            pre: ["gpt-2", "llama-bpe", "superbpe", "tekken"][random.below(4) as usize].into(),
            tokens: (0..n_tokens).map(|_| random.bytes()).collect(),
            token_types: (0..n_tokens).map(|_| TokenType::from_number(random.below(8) as i32)).collect(),
            scores: (0..n_tokens).map(|_| [f32::NAN, 0.0, -1.0, f32::INFINITY][random.below(4) as usize]).collect(),
            merges: (0..random.below(20)).map(|_| [random.bytes(), random.bytes()].join(&b' ')).collect(),
            bos: id(&mut random),
            eos: id(&mut random),
            unk: id(&mut random),
            add_bos: random.below(2) == 0,
            add_space_prefix: random.below(2) == 0,
            trim_after_special: random.below(2) == 0,
            ..Vocab::default()
        };
        let Ok(tokenizer) = Tokenizer::new(vocab) else { continue };
        built += 1;
        let text = format!("ab😀 ▁</s>{}\n aab", String::from_utf8_lossy(&random.bytes()));
        for parse in [ParseSpecial::Yes, ParseSpecial::No] {
            let ids = tokenizer.encode(&text, AddSpecial::Yes, parse).unwrap();
            assert!(ids.iter().all(|&id| u64::from(id) < n_tokens));
            tokenizer.decode(&ids, ShowSpecial::Yes).unwrap();
        }
    }
    assert!(built > 500, "only {built} vocabularies were any use");
}
