//! The word patterns of byte-level vocabularies, by their names in `tokenizer.ggml.pre`. Data only: `pre.rs` applies it.
//!
//! The patterns are those of the models' own tokenizers, with one change: they end in `\s+(?!\S)|\s+`, which needs
//! look-ahead, and here they end in `\s+` and a [`Tail`] rule, which is the same and lets a plain automaton run.

/// What becomes of a run of white space that is followed by something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// The match stands as it is.
    Keep,
    /// The last character of the run is left for the next word: `\s+(?!\S)|\s+`.
    LeaveOne,
    /// As `LeaveOne`, in a pattern that has its own alternative for white space up to a line end, which stays whole.
    LeaveOneInLine,
    /// As `LeaveOneInLine`, and the run is cut into pieces of 512, 256, 128, 64, 32, 16, 8, 4, 2 and 1 characters.
    Cascade,
}

/// One pass over the text. It cuts every piece that the pass before it made; what it does not match stays as pieces.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pass {
    /// Every match is a piece.
    Match(&'static str, Tail),
    /// Runs of `\p{N}` are cut into threes from the right.
    NumberTriples,
    /// Runs of `\p{Nd}` are cut into threes from the right, unless a word character follows.
    DigitTriplesAtWordEnd,
    /// Runs of `\p{Nd}` are cut into threes from the right.
    DigitTriples,
}

/// Whether a word that is itself a token is taken whole, without looking at the merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WholeWords {
    /// Words are always built by merges.
    Merge,
    /// A word that is a token needs no merges.
    Take,
}

/// How one family of vocabularies splits text into words.
pub(super) struct Family {
    /// The names in `tokenizer.ggml.pre`.
    pub(super) names: &'static [&'static str],
    /// The passes, in order.
    pub(super) passes: &'static [Pass],
    /// Whether words that are tokens skip the merges.
    pub(super) whole_words: WholeWords,
    /// Whether a text begins with BOS where the file does not say.
    pub(super) add_bos: bool,
}

const GPT2: Pass = Pass::Match(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+", Tail::LeaveOne);
const ONE_NUMBER: Pass = Pass::Match(r"\p{N}", Tail::Keep);
const NUMBERS: Pass = Pass::Match(r"\p{N}+", Tail::Keep);
const THREE_ASCII_DIGITS: Pass = Pass::Match(r"[0-9][0-9][0-9]", Tail::Keep);
const LINE_END: Pass = Pass::Match(r"[\r\n]", Tail::Keep);
const LINES: Pass = Pass::Match(r"[^\n]+|\n+", Tail::Keep);
const BLOOM: Pass = Pass::Match(r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+", Tail::Keep);
const DEEPSEEK_CJK: Pass = Pass::Match(r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+", Tail::Keep);

macro_rules! contraction {
    () => {
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    };
}

/// The pattern of Llama 3 with its number and white-space parts open.
macro_rules! llama3_like {
    ($number:literal, $tail:expr) => {
        Pass::Match(
            concat!(
                contraction!(),
                r"|[^\r\n\p{L}\p{N}]?\p{L}+|",
                $number,
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
            ),
            $tail,
        )
    };
}

const LLAMA3: Pass = llama3_like!(r"\p{N}{1,3}", Tail::LeaveOneInLine);
const QWEN2: Pass = llama3_like!(r"\p{N}", Tail::LeaveOneInLine);
const JAIS2: Pass = llama3_like!(r"\p{N}{1,3}", Tail::Cascade);

const QWEN35: Pass = Pass::Match(
    concat!(contraction!(), r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"),
    Tail::LeaveOneInLine,
);

/// Words that begin a new piece where lower case turns to upper, with the contraction and number parts open.
macro_rules! cased {
    ($contraction:expr, $number:literal, $line_end:literal) => {
        Pass::Match(
            concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
                $contraction,
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
                $contraction,
                "|",
                $number,
                r"| ?[^\s\p{L}\p{N}]+",
                $line_end,
                r"|\s*[\r\n]+|\s+"
            ),
            Tail::LeaveOneInLine,
        )
    };
}

const TEKKEN: Pass = cased!("", r"\p{N}", r"[\r\n/]*");
const GPT4O: Pass = cased!(concat!(contraction!(), "?"), r"\p{N}{1,3}", r"[\r\n/]*");
const YOUTU: Pass = cased!(concat!(contraction!(), "?"), r"\p{N}", r"[\r\n/]*");

const KIMI_K2: Pass = Pass::Match(
    concat!(
        r"\p{Han}+",
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
        contraction!(),
        r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        contraction!(),
        r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    ),
    Tail::LeaveOneInLine,
);

const DEEPSEEK3_WORDS: Pass = Pass::Match(
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"
    ),
    Tail::LeaveOneInLine,
);

const BAILING: Pass = Pass::Match(
    concat!(
        r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+"
    ),
    Tail::LeaveOneInLine,
);

const SEED_CODER: Pass = Pass::Match(
    concat!(contraction!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+"),
    Tail::LeaveOneInLine,
);

const EXAONE_MOE: Pass = Pass::Match(
    concat!(
        contraction!(),
        r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+"
    ),
    Tail::LeaveOneInLine,
);

const AFMOE_ASIAN: Pass = Pass::Match(
    concat!(
        r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}",
        r"\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}",
        r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
    ),
    Tail::Keep,
);

const YOUTU_CJK: Pass = Pass::Match(
    concat!(
        r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+",
        r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}",
        r"\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
    ),
    Tail::Keep,
);

/// The letters that DeepSeek LLM knows: an old list of cased letters.
const DEEPSEEK_LLM_LETTERS: &str = concat!(
    r"\s?[",
    r"\x{41}-\x{5A}\x{61}-\x{7A}\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}",
    r"\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}",
    r"\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}",
    r"\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}",
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}",
    r"\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}",
    r"\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}",
    r"\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}",
    r"\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}",
    r"\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}",
    r"\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}",
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}",
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}",
    r"]+"
);

const DEEPSEEK_LLM_PUNCTUATION: &str =
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";

const fn family(names: &'static [&'static str], passes: &'static [Pass]) -> Family {
    Family { names, passes, whole_words: WholeWords::Merge, add_bos: false }
}

/// Every known family.
pub(super) const FAMILIES: &[Family] = &[
    family(&["default"], &[Pass::Match(r"[\p{P}$+<=>^~|]+", Tail::Keep), GPT2, NUMBERS, THREE_ASCII_DIGITS]),
    Family {
        names: &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        passes: &[LLAMA3],
        whole_words: WholeWords::Take,
        add_bos: true,
    },
    family(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    Family { names: &["glm4", "glm5"], passes: &[LLAMA3], whole_words: WholeWords::Take, add_bos: false },
    family(&["jais-2"], &[JAIS2]),
    family(
        &["deepseek-llm"],
        &[
            LINE_END,
            Pass::Match(DEEPSEEK_LLM_LETTERS, Tail::Keep),
            Pass::Match(DEEPSEEK_LLM_PUNCTUATION, Tail::Keep),
            Pass::Match(r"\s+$", Tail::Keep),
            DEEPSEEK_CJK,
            NUMBERS,
        ],
    ),
    family(
        &["deepseek-coder"],
        &[
            LINE_END,
            Pass::Match(r"\s?\p{L}+", Tail::Keep),
            Pass::Match(r"\s?\p{P}+", Tail::Keep),
            DEEPSEEK_CJK,
            ONE_NUMBER,
        ],
    ),
    family(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        &[
            Pass::Match(r"\p{N}{1,3}", Tail::Keep),
            Pass::Match(r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", Tail::Keep),
            DEEPSEEK3_WORDS,
        ],
    ),
    Family { names: &["youtu"], passes: &[YOUTU_CJK, YOUTU], whole_words: WholeWords::Take, add_bos: false },
    family(&["falcon"], &[Pass::Match(r"[\p{P}$+<=>^~|`]+", Tail::Keep), GPT2, THREE_ASCII_DIGITS]),
    family(
        &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        &[ONE_NUMBER, GPT2],
    ),
    family(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v1-en",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v2-code",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "roberta-bpe",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
        &[GPT2],
    ),
    family(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
            "ufakzeka",
        ],
        &[QWEN2],
    ),
    family(&["qwen35"], &[QWEN35]),
    family(&["poro-chat", "bloom", "gpt3-finnish"], &[BLOOM]),
    family(&["viking"], &[BLOOM, ONE_NUMBER]),
    Family { names: &["tekken"], passes: &[TEKKEN], whole_words: WholeWords::Take, add_bos: true },
    Family {
        names: &["chameleon"],
        passes: &[
            Pass::Match(r"<sentinel:[0-9]+>", Tail::Keep),
            Pass::Match(r"IMGIMG[A-I]{1,4}Z", Tail::Keep),
            Pass::Match(r"[\t\n]|    |  ", Tail::Keep),
            ONE_NUMBER,
            Pass::Match(r"[\p{P}!-/:-@\[-`{-\x7E]", Tail::Keep),
            GPT2,
        ],
        whole_words: WholeWords::Merge,
        add_bos: true,
    },
    family(&["gpt-4o", "llama4", "kanana2", "minimax-m2"], &[GPT4O]),
    Family { names: &["granite-embed-multi-97m"], passes: &[GPT4O], whole_words: WholeWords::Take, add_bos: false },
    family(&["tiny_aya"], &[Pass::DigitTriplesAtWordEnd, GPT4O]),
    family(&["kimi-k2"], &[KIMI_K2]),
    family(&["superbpe"], &[NUMBERS, Pass::DigitTriples]),
    family(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    family(&["seed-coder"], &[SEED_CODER]),
    family(&["afmoe"], &[Pass::NumberTriples, AFMOE_ASIAN, DEEPSEEK3_WORDS]),
    family(&["exaone-moe"], &[EXAONE_MOE]),
    // Gemma 4 merges whole lines; only runs of line ends stand apart.
    family(&["mmbert", "sarvam-moe", "granite-embed-multi-311m"], &[LINES]),
    Family { names: &["gemma4"], passes: &[LINES], whole_words: WholeWords::Merge, add_bos: true },
];
