//! What a user may set, under the names and with the defaults that users know from llama.cpp, and the check of it.

use serde::{Deserialize, Serialize};

use super::SampleError;

/// One sampler of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names are those of the samplers")]
pub enum Kind {
    Penalties,
    Dry,
    TopNSigma,
    TopK,
    TypP,
    TopP,
    MinP,
    Xtc,
    Temperature,
}

/// Every sampler with its name, its letter and the other names it goes by.
const KINDS: [(Kind, &str, char, &[&str]); 9] = [
    (Kind::Penalties, "penalties", 'e', &[]),
    (Kind::Dry, "dry", 'd', &[]),
    (Kind::TopNSigma, "top_n_sigma", 's', &[]),
    (Kind::TopK, "top_k", 'k', &[]),
    (Kind::TypP, "typ_p", 'y', &["typical_p", "typical", "typ"]),
    (Kind::TopP, "top_p", 'p', &["nucleus"]),
    (Kind::MinP, "min_p", 'm', &[]),
    (Kind::Xtc, "xtc", 'x', &[]),
    (Kind::Temperature, "temperature", 't', &["temp"]),
];

impl Kind {
    /// The default order.
    pub const DEFAULT_ORDER: [Kind; 9] = [
        Kind::Penalties,
        Kind::Dry,
        Kind::TopNSigma,
        Kind::TopK,
        Kind::TypP,
        Kind::TopP,
        Kind::MinP,
        Kind::Xtc,
        Kind::Temperature,
    ];

    /// The name.
    pub fn name(self) -> &'static str {
        KINDS[self as usize].1
    }

    /// The letter of `--sampling-seq`.
    pub fn letter(self) -> char {
        KINDS[self as usize].2
    }

    /// The sampler of a name; hyphens count as underscores.
    pub fn from_name(name: &str) -> Result<Self, SampleError> {
        let plain = name.trim().to_ascii_lowercase().replace('-', "_");
        let found = KINDS.iter().find(|(_, known, _, others)| *known == plain || others.contains(&plain.as_str()));
        found.map(|(kind, ..)| *kind).ok_or_else(|| SampleError::UnknownSampler {
            name: name.trim().to_owned(),
            known: KINDS.map(|(_, name, ..)| name).join(", "),
        })
    }

    /// The order that names like `top_k;temperature` say.
    pub fn parse_names(names: &str) -> Result<Vec<Self>, SampleError> {
        names.split(';').filter(|name| !name.trim().is_empty()).map(Self::from_name).collect()
    }

    /// The order that letters like `kt` say.
    pub fn parse_letters(letters: &str) -> Result<Vec<Self>, SampleError> {
        let find = |letter: char| {
            let found = KINDS.iter().find(|(.., known, _)| *known == letter.to_ascii_lowercase());
            found.map(|(kind, ..)| *kind).ok_or_else(|| SampleError::UnknownLetter {
                letter,
                known: KINDS.map(|(_, name, letter, _)| format!("{letter} ({name})")).join(", "),
            })
        };
        letters.chars().filter(|letter| !letter.is_whitespace()).map(find).collect()
    }

    /// Whether a GPU can do this part.
    fn on_device(self) -> bool {
        !matches!(self, Self::Dry | Self::TopNSigma | Self::Xtc)
    }
}

/// How a token is chosen. [`Sampling::default`] has llama.cpp's values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Starts the random numbers; the same seed gives the same text. `None`: another one each time.
    pub seed: Option<u64>,
    /// The chain, in order. What is not named does nothing.
    pub samplers: Vec<Kind>,
    /// Candidates that every truncating sampler leaves.
    pub min_keep: u32,

    /// Divides the logits; 0 or less always takes the best token.
    #[serde(alias = "temp")]
    pub temperature: f32,
    /// The temperature moves this far either way, by the entropy; 0 does not move it.
    pub dynatemp_range: f32,
    /// Bends the way from the coldest to the hottest.
    pub dynatemp_exponent: f32,

    /// Keeps so many of the best; 0 or less keeps all.
    pub top_k: i32,
    /// Keeps the best up to this sum of probabilities; 1 keeps all.
    pub top_p: f32,
    /// Keeps what is at least this part as likely as the best; 0 keeps all.
    pub min_p: f32,
    /// Keeps typical tokens up to this sum of probabilities; 1 keeps all.
    #[serde(alias = "typ_p")]
    pub typical_p: f32,
    /// Keeps what is within so many standard deviations of the best logit; 0 or less keeps all.
    pub top_n_sigma: f32,
    /// How often XTC leaves out the likely tokens.
    pub xtc_probability: f32,
    /// What XTC takes for likely; more than 0.5 does nothing.
    pub xtc_threshold: f32,

    /// How far back penalties look; 0 nowhere, -1 over everything.
    pub repeat_last_n: i32,
    /// Divides positive logits of tokens that occurred, multiplies others; 1 does nothing.
    #[serde(alias = "repetition_penalty")]
    pub repeat_penalty: f32,
    /// Taken off for each time that the model wrote the token.
    pub frequency_penalty: f32,
    /// Taken off once if the model wrote the token.
    pub presence_penalty: f32,

    /// How strong DRY is; 0 does nothing.
    pub dry_multiplier: f32,
    /// By how much DRY grows with each token of a repetition.
    pub dry_base: f32,
    /// Repetitions shorter than this are free.
    pub dry_allowed_length: u32,
    /// How far back DRY looks; 0 nowhere, -1 over everything.
    pub dry_penalty_last_n: i32,
    /// Texts that end a repetition.
    pub dry_sequence_breakers: Vec<String>,

    /// 0 for the chain, 2 for Mirostat 2 in its place.
    pub mirostat: u8,
    /// The surprise that Mirostat steers to, in bits.
    pub mirostat_tau: f32,
    /// How fast Mirostat learns.
    pub mirostat_eta: f32,

    /// Added to the logits of tokens before anything else; -100 or less forbids the token.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            seed: None,
            samplers: Kind::DEFAULT_ORDER.to_vec(),
            min_keep: 0,
            temperature: 0.8,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repeat_last_n: 64,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: -1,
            dry_sequence_breakers: ["\n", ":", "\"", "*"].map(str::to_owned).to_vec(),
            mirostat: 0,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            logit_bias: Vec::new(),
        }
    }
}

/// Biases from here down forbid a token.
pub(super) const FORBIDDING_BIAS: f32 = -100.0;

impl Sampling {
    /// Always the best token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Whether the best token is taken without a draw: nothing after the temperature can bring chance back.
    pub fn is_greedy(&self) -> bool {
        self.temperature <= 0.0 && self.dynatemp_range <= 0.0 && self.uses(Kind::Temperature)
    }

    /// Whether this sampler is in the chain; under Mirostat only the temperature is.
    pub fn uses(&self, kind: Kind) -> bool {
        match self.mirostat {
            0 => self.samplers.contains(&kind),
            _ => kind == Kind::Temperature,
        }
    }

    pub(super) fn has_penalties(&self) -> bool {
        let strength = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty);
        self.repeat_last_n != 0 && strength != (1.0, 0.0, 0.0)
    }

    pub(super) fn has_dry(&self) -> bool {
        self.dry_multiplier != 0.0 && self.dry_base >= 1.0 && self.dry_penalty_last_n != 0
    }

    /// Whether DRY works with these values, so that [`Breakers`](super::Breakers) are wanted.
    pub fn uses_dry(&self) -> bool {
        self.uses(Kind::Dry) && self.has_dry()
    }

    /// Whether a GPU can do all of it: penalties, bias, mask, top-k, typical, top-p, min-p, temperature and greedy, in
    /// the default order. What it cannot do is in [`Sampling::host_reasons`].
    pub fn on_device(&self) -> bool {
        self.host_reasons().is_empty()
    }

    /// Whether tokens are ranked before one is drawn: top-k and the like.
    pub fn cuts(&self) -> bool {
        let top = (self.uses(Kind::TopK) && self.top_k > 0) || (self.uses(Kind::TopP) && self.top_p < 1.0);
        let least = (self.uses(Kind::MinP) && self.min_p > 0.0) || (self.uses(Kind::TypP) && self.typical_p < 1.0);
        self.temperature > 0.0 && (top || least)
    }

    /// The settings that keep sampling on the host.
    pub fn host_reasons(&self) -> Vec<&'static str> {
        let mut reasons = Vec::new();
        if self.mirostat != 0 {
            return vec!["mirostat"];
        }
        let works = |kind: Kind| match kind {
            Kind::Dry => self.has_dry(),
            Kind::TopNSigma => self.top_n_sigma > 0.0,
            Kind::Xtc => self.xtc_probability > 0.0 && self.xtc_threshold <= 0.5,
            Kind::TopK => self.top_k > 0,
            Kind::TopP => self.top_p < 1.0,
            Kind::MinP => self.min_p > 0.0,
            Kind::TypP => self.typical_p < 1.0,
            Kind::Penalties => self.has_penalties(),
            Kind::Temperature => self.temperature != 1.0 || self.dynatemp_range > 0.0,
        };
        let working: Vec<Kind> = self.samplers.iter().copied().filter(|kind| works(*kind)).collect();
        reasons.extend(working.iter().filter(|kind| !kind.on_device()).map(|kind| kind.name()));
        if self.dynatemp_range > 0.0 && self.uses(Kind::Temperature) {
            reasons.push("dynatemp_range");
        }
        if self.min_keep > 1 {
            reasons.push("min_keep");
        }
        if !working.is_sorted_by_key(|kind| *kind as u8) {
            reasons.push("samplers (their order)");
        }
        reasons
    }

    /// Checks the numbers: those that are no number, and those that no one can mean.
    pub fn check(&self, n_vocab: usize) -> Result<(), SampleError> {
        let wrong = |name, value, want| Err(SampleError::Setting { name, value, want });
        let between = |name, value: f32, low: f32, high: f32, want| match (low..=high).contains(&value) {
            true => Ok(()),
            false => wrong(name, f64::from(value), want),
        };
        const BIG: f32 = 1e6;
        between("temperature", self.temperature, -100.0, 100.0, "-100 to 100; 0 is greedy")?;
        between("dynatemp_range", self.dynatemp_range, 0.0, BIG, "0 or more")?;
        between("dynatemp_exponent", self.dynatemp_exponent, 0.0, BIG, "0 or more")?;
        between("top_p", self.top_p, 0.0, 1.0, "0 to 1; 1 keeps all")?;
        between("min_p", self.min_p, 0.0, 1.0, "0 to 1; 0 keeps all")?;
        between("typical_p", self.typical_p, 0.0, 1.0, "0 to 1; 1 keeps all")?;
        between("top_n_sigma", self.top_n_sigma, -BIG, BIG, "a number; -1 keeps all")?;
        between("xtc_probability", self.xtc_probability, 0.0, 1.0, "0 to 1")?;
        between("xtc_threshold", self.xtc_threshold, 0.0, BIG, "0 or more")?;
        between("repeat_penalty", self.repeat_penalty, f32::MIN_POSITIVE, BIG, "more than 0; 1 turns it off")?;
        between("frequency_penalty", self.frequency_penalty, -BIG, BIG, "-1000000 to 1000000; 0 turns it off")?;
        between("presence_penalty", self.presence_penalty, -BIG, BIG, "-1000000 to 1000000; 0 turns it off")?;
        between("dry_multiplier", self.dry_multiplier, 0.0, BIG, "0 or more; 0 turns it off")?;
        between("dry_base", self.dry_base, 1.0, BIG, "1 or more")?;
        between("mirostat_tau", self.mirostat_tau, 0.0, BIG, "0 or more")?;
        between("mirostat_eta", self.mirostat_eta, 0.0, BIG, "0 or more")?;
        for (name, tokens) in [("repeat_last_n", self.repeat_last_n), ("dry_penalty_last_n", self.dry_penalty_last_n)] {
            if tokens < -1 {
                return wrong(name, f64::from(tokens), "0 or more, or -1 for all tokens");
            }
        }
        if !matches!(self.mirostat, 0 | 2) {
            return wrong("mirostat", f64::from(self.mirostat), "0 or 2; Mirostat 1 is not supported");
        }
        if self.samplers.len() > 64 {
            return wrong("samplers", self.samplers.len() as f64, "at most 64 names");
        }
        for &(id, bias) in &self.logit_bias {
            if id as usize >= n_vocab {
                return Err(SampleError::BiasOutOfRange { id, n_vocab });
            }
            if bias.is_nan() || bias > BIG {
                return wrong("logit_bias", f64::from(bias), "a number; -100 forbids the token");
            }
        }
        Ok(())
    }
}
