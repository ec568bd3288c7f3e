//! `kiln tokenize` and `kiln detokenize`: text to tokens and back, by the vocabulary of a model file.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial, Tokenizer};
use kiln_gguf::Gguf;
use serde_json::json;

use super::prompt::{stdin, whole_text};
use crate::model::resolve;
use crate::output::{print, print_piece};

/// Flags of `kiln tokenize`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln tokenize smollm2 \"Hello world\"
  kiln tokenize smollm2 -f book.txt --ids --no-bos
  kiln tokenize smollm2 -f book.txt --count")]
pub(crate) struct Arguments {
    /// GGUF file or a name, as `kiln pull` takes them
    model: PathBuf,
    /// The text; without it stdin, with its last newline
    #[arg(conflicts_with = "file")]
    text: Option<String>,
    /// The text is in this file; its last newline counts
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print the ids alone, as a list
    #[arg(long, conflicts_with_all = ["count", "json"])]
    ids: bool,
    /// Print the number of tokens alone
    #[arg(long, conflicts_with = "json")]
    count: bool,
    /// Do not add BOS/EOS tokens
    #[arg(long)]
    no_bos: bool,
    /// Take texts that are spelled like control tokens as texts
    #[arg(long)]
    no_parse_special: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Flags of `kiln detokenize`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln detokenize smollm2 98 36 54
  kiln tokenize smollm2 --ids --no-bos \"Hello\" | kiln detokenize smollm2")]
pub(crate) struct DetokenizeArguments {
    /// GGUF file or a name, as `kiln pull` takes them
    model: PathBuf,
    /// Ids; without them stdin, apart by commas or spaces
    ids: Vec<String>,
    /// Leave control tokens out
    #[arg(long)]
    hide_special: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn tokenizer(model: &Path) -> anyhow::Result<Tokenizer> {
    let path = resolve(Some(model))?;
    let gguf = Gguf::open(&path)?;
    Tokenizer::from_gguf(gguf.metadata()).with_context(|| format!("cannot use the vocabulary of {}", path.display()))
}

/// Runs `kiln tokenize`.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let tokenizer = tokenizer(&arguments.model)?;
    let text = match (&arguments.text, &arguments.file) {
        (Some(text), _) => text.clone(),
        (None, file) => whole_text(file.as_deref())?,
    };
    let add = if arguments.no_bos { AddSpecial::No } else { AddSpecial::Yes };
    let parse = if arguments.no_parse_special { ParseSpecial::No } else { ParseSpecial::Yes };
    let ids = tokenizer.encode(&text, add, parse)?;
    if arguments.count {
        print(&ids.len().to_string());
        return Ok(ExitCode::SUCCESS);
    }
    if arguments.ids {
        print(&format!("[{}]", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")));
        return Ok(ExitCode::SUCCESS);
    }
    let spelled = |id: u32| tokenizer.piece(id).map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    if arguments.json {
        let row = |&id: &u32| Ok(json!({"id": id, "text": spelled(id)?}));
        let rows = ids.iter().map(row).collect::<anyhow::Result<Vec<_>>>()?;
        print(&serde_json::to_string_pretty(&json!({"count": ids.len(), "tokens": rows}))?);
        return Ok(ExitCode::SUCCESS);
    }
    for id in ids {
        print(&format!("{id:6} -> {:?}", spelled(id)?));
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `kiln detokenize`.
pub(crate) fn detokenize(arguments: &DetokenizeArguments) -> anyhow::Result<ExitCode> {
    let tokenizer = tokenizer(&arguments.model)?;
    let said = if arguments.ids.is_empty() { stdin()? } else { arguments.ids.join(" ") };
    let words = said.split(|c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']')).filter(|word| !word.is_empty());
    let id = |word: &str| match word.parse::<u32>() {
        Ok(id) if (id as usize) < tokenizer.n_tokens() => Ok(id),
        _ => bail!(
            "{word:?} is no token: ids go from 0 to {}\nhint: ids stand apart by commas or spaces",
            tokenizer.n_tokens().saturating_sub(1)
        ),
    };
    let ids = words.map(id).collect::<anyhow::Result<Vec<u32>>>()?;
    let show = if arguments.hide_special { ShowSpecial::No } else { ShowSpecial::Yes };
    let text = tokenizer.decode(&ids, show)?;
    if arguments.json {
        print(&serde_json::to_string_pretty(&json!({"text": text}))?);
    } else {
        print_piece(&text);
        print_piece("\n");
    }
    Ok(ExitCode::SUCCESS)
}
