//! How tokens are chosen and when a text ends: flags under the names that users know from llama.cpp, with its defaults.

use std::path::PathBuf;

use anyhow::Context as _;
use kiln_engine::model::Model;
use kiln_engine::run::{Constraint, Request, StopRule};
use kiln_engine::sampler::{Kind, Sampling};
use kiln_engine::text::Rule;
use kiln_llm::chat::ChatSetup;

/// How tokens are chosen, in every command that writes text.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplerFlags {
    /// Temperature; 0 always picks the most likely token [default: 0.8]
    #[arg(long, alias = "temperature", value_name = "N", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Keep the N most likely tokens (0 = off) [default: 40]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    top_k: Option<i32>,
    /// Keep the most likely tokens up to this total probability (1 = off) [default: 0.95]
    #[arg(long, value_name = "N")]
    top_p: Option<f32>,
    /// Drop tokens less likely than this fraction of the top token's probability (0 = off) [default: 0.05]
    #[arg(long, value_name = "N")]
    min_p: Option<f32>,
    /// Keep locally typical tokens up to this total probability (1 = off) [default: 1]
    #[arg(long, alias = "typical-p", value_name = "N")]
    typical: Option<f32>,
    /// Keep tokens whose logit is within N standard deviations of the top one (-1 = off) [default: -1]
    #[arg(long, alias = "top-n-sigma", value_name = "N", allow_negative_numbers = true)]
    top_nsigma: Option<f32>,
    /// XTC: chance of removing the most likely tokens (0 = off) [default: 0]
    #[arg(long, value_name = "N")]
    xtc_probability: Option<f32>,
    /// XTC: probability from which tokens may be removed [default: 0.1]
    #[arg(long, value_name = "N")]
    xtc_threshold: Option<f32>,
    /// Number of last tokens that penalties apply to (0 = off, -1 = all) [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    repeat_last_n: Option<i32>,
    /// Divide the logits of repeated tokens by this (1 = off) [default: 1]
    #[arg(long, value_name = "N")]
    repeat_penalty: Option<f32>,
    /// Subtract this from the logit of every token generated so far (0 = off) [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtract this from the logit of a token for each time it was generated (0 = off) [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// DRY: strength of the penalty on repeated sequences (0 = off) [default: 0]
    #[arg(long, value_name = "N")]
    dry_multiplier: Option<f32>,
    /// DRY: growth of the penalty per repeated token, at least 1 [default: 1.75]
    #[arg(long, value_name = "N")]
    dry_base: Option<f32>,
    /// DRY: longest repetition without a penalty [default: 2]
    #[arg(long, value_name = "N")]
    dry_allowed_length: Option<u32>,
    /// DRY: number of last tokens to search (0 = off, -1 = all) [default: -1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    dry_penalty_last_n: Option<i32>,
    /// DRY: text that ends a repetition, instead of newline, colon, quote and star; may be given several times; `none` for none
    #[arg(long, value_name = "TEXT")]
    dry_sequence_breaker: Vec<String>,
    /// Dynamic temperature: range around --temp, by entropy (0 = off) [default: 0]
    #[arg(long, value_name = "N")]
    dynatemp_range: Option<f32>,
    /// Dynamic temperature: exponent of the curve [default: 1]
    #[arg(long, value_name = "N")]
    dynatemp_exp: Option<f32>,
    /// 2 uses Mirostat 2 instead of the other samplers (0 = off) [default: 0]
    #[arg(long, value_name = "N")]
    mirostat: Option<u8>,
    /// Mirostat learning rate [default: 0.1]
    #[arg(long, value_name = "N")]
    mirostat_lr: Option<f32>,
    /// Mirostat target entropy [default: 5]
    #[arg(long, value_name = "N")]
    mirostat_ent: Option<f32>,
    /// Samplers, in the order they run [default: penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature]
    #[arg(long, value_name = "NAMES", conflicts_with = "sampling_seq")]
    samplers: Option<String>,
    /// Samplers, one letter each [default: edskypmxt]
    #[arg(long, alias = "sampler-seq", value_name = "LETTERS")]
    sampling_seq: Option<String>,
    /// Random seed; -1 picks a new one each time [default: -1]
    #[arg(short, long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    seed: Option<Seed>,
    /// Add to the logit of a token: 15043+1 or 15043-1; may be given several times
    #[arg(short, long, value_name = "ID+BIAS", value_parser = bias)]
    logit_bias: Vec<(u32, f32)>,
}

/// Flags of every command that writes one text.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct SamplingFlags {
    #[command(flatten)]
    sampler: SamplerFlags,

    /// Maximum number of tokens to generate; -1 until the model ends or the context is full [default: -1]
    #[arg(
        short = 'n',
        long,
        alias = "predict",
        value_name = "N",
        allow_negative_numbers = true,
        help_heading = "Output"
    )]
    pub(crate) n_predict: Option<i64>,
    /// Stop before this text; may be given several times
    #[arg(long, alias = "reverse-prompt", value_name = "TEXT", help_heading = "Output")]
    stop: Vec<String>,
    /// Ignore end-of-text tokens and keep generating
    #[arg(long, help_heading = "Output")]
    ignore_eos: bool,
    /// Constrain the output by a grammar in llama.cpp's GBNF
    #[arg(long, value_name = "GBNF", help_heading = "Output", group = "rule")]
    grammar: Option<String>,
    /// Read the GBNF grammar from a file
    #[arg(long, value_name = "FILE", help_heading = "Output", group = "rule")]
    grammar_file: Option<PathBuf>,
    /// Constrain the output to JSON that fits this schema: the schema itself, or a file. not, uniqueItems, if/then/else,
    /// contains, dependentRequired and unevaluatedProperties are not supported
    #[arg(short = 'j', long, value_name = "SCHEMA", help_heading = "Output", group = "rule")]
    json_schema: Option<String>,
    /// Constrain the output to match this regular expression
    #[arg(long, value_name = "REGEX", help_heading = "Output", group = "rule")]
    regex: Option<String>,
    /// Constrain the output to one of these texts; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "Output", group = "rule")]
    choice: Vec<String>,
    /// Constrain the output by a grammar in llguidance's Lark: the grammar itself, or a file
    #[arg(long, value_name = "LARK", help_heading = "Output", group = "rule")]
    lark: Option<String>,
}

/// A seed; `None` for another one each time.
type Seed = Option<u64>;

fn seed(text: &str) -> Result<Seed, String> {
    if text == "-1" {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| "a seed is a number from 0 on, or -1".into())
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let wrong = || format!("{text:?} is no bias; it looks like 15043+1 or 15043-0.5, or 15043-inf to forbid the token");
    let at = text.find(['+', '-']).ok_or_else(wrong)?;
    let id = text[..at].parse().map_err(|_| wrong())?;
    Ok((id, text[at..].parse().map_err(|_| wrong())?))
}

impl SamplerFlags {
    /// Changes the settings as the flags say; what they do not name stays.
    pub(crate) fn apply(&self, s: &mut Sampling) -> anyhow::Result<()> {
        let set = |to: &mut f32, from: Option<f32>| *to = from.unwrap_or(*to);
        set(&mut s.temperature, self.temp);
        set(&mut s.top_p, self.top_p);
        set(&mut s.min_p, self.min_p);
        set(&mut s.typical_p, self.typical);
        set(&mut s.top_n_sigma, self.top_nsigma);
        set(&mut s.xtc_probability, self.xtc_probability);
        set(&mut s.xtc_threshold, self.xtc_threshold);
        set(&mut s.repeat_penalty, self.repeat_penalty);
        set(&mut s.presence_penalty, self.presence_penalty);
        set(&mut s.frequency_penalty, self.frequency_penalty);
        set(&mut s.dry_multiplier, self.dry_multiplier);
        set(&mut s.dry_base, self.dry_base);
        set(&mut s.dynatemp_range, self.dynatemp_range);
        set(&mut s.dynatemp_exponent, self.dynatemp_exp);
        set(&mut s.mirostat_eta, self.mirostat_lr);
        set(&mut s.mirostat_tau, self.mirostat_ent);
        s.top_k = self.top_k.unwrap_or(s.top_k);
        s.repeat_last_n = self.repeat_last_n.unwrap_or(s.repeat_last_n);
        s.dry_allowed_length = self.dry_allowed_length.unwrap_or(s.dry_allowed_length);
        s.dry_penalty_last_n = self.dry_penalty_last_n.unwrap_or(s.dry_penalty_last_n);
        s.mirostat = self.mirostat.unwrap_or(s.mirostat);
        s.seed = self.seed.unwrap_or(s.seed);
        if !self.logit_bias.is_empty() {
            s.logit_bias.clone_from(&self.logit_bias);
        }
        match self.dry_sequence_breaker.as_slice() {
            [] => {}
            [none] if none == "none" => s.dry_sequence_breakers.clear(),
            breakers => s.dry_sequence_breakers = breakers.to_vec(),
        }
        if let Some(names) = &self.samplers {
            s.samplers = Kind::parse_names(names).context("--samplers")?;
        }
        if let Some(letters) = &self.sampling_seq {
            s.samplers = Kind::parse_letters(letters).context("--sampling-seq")?;
        }
        Ok(())
    }
}

impl SamplingFlags {
    /// The settings: the file's where no flag says otherwise, checked for this model.
    pub(crate) fn sampling(&self, model: &Model, setup: &ChatSetup) -> anyhow::Result<Sampling> {
        let mut s = setup.sampling.clone();
        self.sampler.apply(&mut s)?;
        s.check(model.config.vocab)?;
        Ok(s)
    }

    /// Texts that end what is generated.
    pub(crate) fn stops(&self) -> &[String] {
        &self.stop
    }

    /// Tokens to generate at most.
    pub(crate) fn limit(&self) -> Option<usize> {
        self.n_predict.and_then(|n| usize::try_from(n).ok())
    }

    /// What the text must look like, if anything was said.
    pub(crate) fn constraint(&self, setup: &ChatSetup) -> anyhow::Result<Option<Box<dyn Constraint>>> {
        let read =
            |path: &PathBuf| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
        let rule = if let Some(grammar) = &self.grammar {
            Rule::Gbnf(grammar.clone())
        } else if let Some(path) = &self.grammar_file {
            Rule::Gbnf(read(path)?)
        } else if let Some(schema) = &self.json_schema {
            let is_json =
                schema.trim_start().starts_with(['{', '[', 't', 'f']) && !std::path::Path::new(schema).exists();
            let text = if is_json { schema.clone() } else { read(&PathBuf::from(schema))? };
            Rule::JsonSchema(serde_json::from_str(&text).context("--json-schema is no JSON")?)
        } else if let Some(regex) = &self.regex {
            Rule::Regex(regex.clone())
        } else if let Some(lark) = &self.lark {
            let is_file = std::path::Path::new(lark).exists();
            Rule::Lark(if is_file { read(&PathBuf::from(lark))? } else { lark.clone() })
        } else if !self.choice.is_empty() {
            Rule::Choice(self.choice.clone())
        } else {
            return Ok(None);
        };
        Ok(Some(setup.compile(&rule)?))
    }

    /// Whether the text must look like something.
    pub(crate) fn has_rule(&self) -> bool {
        let one = [&self.grammar, &self.json_schema, &self.regex, &self.lark];
        one.iter().any(|rule| rule.is_some()) || self.grammar_file.is_some() || !self.choice.is_empty()
    }

    /// A request for this prompt. `ends` are tokens that end a turn beside the model's own.
    pub(crate) fn request(&self, prompt: Vec<u32>, sampling: Sampling, ends: &[u32]) -> Request {
        let stop = StopRule {
            strings: self.stop.clone(),
            tokens: ends.to_vec(),
            ignore_end: self.ignore_eos,
            ..StopRule::default()
        };
        Request { limit: self.limit(), sampling, stop, ..Request::new(prompt) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_and_biases_are_read_as_users_write_them() {
        assert_eq!((seed("-1"), seed("7")), (Ok(None), Ok(Some(7))));
        assert!(seed("-2").is_err() && seed("x").is_err());
        assert_eq!(bias("15043+1"), Ok((15043, 1.0)));
        assert_eq!(bias("7-0.5"), Ok((7, -0.5)));
        assert_eq!(bias("7-inf"), Ok((7, f32::NEG_INFINITY)));
        for wrong in ["7", "+1", "x+1", "7+y", ""] {
            assert!(bias(wrong).is_err(), "{wrong}");
        }
    }
}
