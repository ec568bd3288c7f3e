//! Flags as users of llama.cpp, Ollama and vLLM type them: one table that rewrites the command line before it is parsed. What Kiln has
//! under another name is renamed, what it does anyway or does not need is dropped with a note, and what it cannot do is refused in one
//! sentence that names what to use. Flags that a command has itself are not in the table's hands.

use std::ffi::{OsStr, OsString};

use clap::{Arg, Command};

/// How a flag is followed by its value.
#[derive(Clone, Copy)]
enum Takes {
    Nothing,
    Value,
    /// A value only if the next word is one of these.
    Maybe(&'static [&'static str]),
}

/// What becomes of a flag.
#[derive(Clone, Copy)]
enum Meaning {
    /// This flag of Kiln's; its value stays.
    Is(&'static str),
    /// The model, named by the value with this before it.
    Model(&'static str),
    /// The file in the repository that another flag names.
    ModelFile,
    /// Kiln always does so: told with `-v`.
    Always(&'static str),
    /// Left out with a note.
    Ignored(&'static str),
    /// An error with this sentence.
    Refused(&'static str),
}

/// A line of the table.
struct Row {
    names: &'static [&'static str],
    takes: Takes,
    /// The commands it is for; all that run models where it is empty.
    commands: &'static [&'static str],
    meaning: Meaning,
}

const fn row(names: &'static [&'static str], takes: Takes, meaning: Meaning) -> Row {
    Row { names, takes, commands: &[], meaning }
}

const fn only(
    commands: &'static [&'static str],
    names: &'static [&'static str],
    takes: Takes,
    meaning: Meaning,
) -> Row {
    Row { names, takes, commands, meaning }
}

use Meaning::{Always, Ignored, Is, Model, ModelFile, Refused};
use Takes::{Maybe, Nothing, Value};

const SWITCH: Takes = Maybe(&["on", "off", "auto", "0", "1", "true", "false"]);
const DRAFTS_ITSELF: Meaning =
    Ignored("the draft model runs where the model does, with its settings; the output is the same");
const OWN_BATCHES: Meaning = Ignored("Kiln chooses batch sizes itself");
const NO_PINNING: Meaning = Ignored("Kiln leaves scheduling to the system; -t sets the number of threads");
const NO_GROUPS: Meaning = Refused("Kiln has no grouped self-attention; --rope-scaling yarn stretches contexts");
const TEXT_ONLY: Meaning = Refused(
    "`kiln run` and `kiln chat` take pictures and sounds (--mmproj, --image and --audio) and `kiln serve` takes --mmproj; no command takes addresses of such files",
);
const NO_CONTROL: Meaning = Refused("Kiln has no control vectors; --lora applies adapters");

/// Commands that generate text with drafts.
const DRAFTING: &[&str] = &["run", "chat", "serve", "bench"];

/// The first row that fits a command counts.
#[rustfmt::skip]
const TABLE: &[Row] = &[
    // The model.
    row(&["-hf", "-hfr", "--hf-repo"], Value, Model("hf:")),
    row(&["-hff", "--hf-file"], Value, ModelFile),
    row(&["-mu", "--model-url"], Value, Model("")),
    row(&["-m", "--model"], Value, Model("")),
    row(&["-hft", "--hf-token"], Value, Refused("set HF_TOKEN in the environment instead")),
    row(&["--offline"], Nothing, Refused("set HF_HUB_OFFLINE=1 in the environment instead")),
    only(&["run", "chat", "serve"], &["-mm"], Value, Is("--mmproj")),
    row(&["--mmproj", "-mm", "--mmproj-url", "-mmu", "--image", "--audio"], Value, TEXT_ONLY),
    row(&["--no-mmproj", "--no-mmproj-offload"], Nothing, Always("no multimodal projector is loaded")),
    // Devices and memory.
    row(&["-ngl", "--n-gpu-layers"], Value, Is("--gpu-layers")),
    row(&["-ctk"], Value, Is("--cache-type-k")),
    row(&["-ctv"], Value, Is("--cache-type-v")),
    row(&["-ncmoe"], Value, Is("--n-cpu-moe")),
    row(&["-cmoe"], Nothing, Is("--cpu-moe")),
    row(&["-ts"], Value, Is("--tensor-split")),
    row(&["-ot"], Value, Is("--place")),
    row(&["-dev"], Value, Is("--device")),
    row(&["-mg", "--main-gpu"], Value, Ignored("--device N names the GPU")),
    row(&["-sm", "--split-mode"], Value, Ignored("Kiln splits by layers over the GPUs of --device 0,1; one device is not split")),
    row(&["-fa", "--flash-attn"], SWITCH, Always("Kiln always uses flash attention")),
    row(&["-fit", "--fit"], SWITCH, Always("Kiln fits layers and context to memory")),
    row(&["-fitt", "--fit-target", "-fitc", "--fit-ctx"], Value, Ignored("--memory-limit bounds the memory of each GPU")),
    row(&["-nkvo", "--no-kv-offload", "-nopo", "--no-op-offload"], Nothing, Ignored("the KV cache stays with its layers; --gpu-layers moves both")),
    row(&["-kvo", "--kv-offload", "-kvu", "--kv-unified", "--repack"], Nothing, Always("Kiln does so")),
    row(&["-nr", "--no-repack", "--no-host"], Nothing, Ignored("Kiln chooses weight layouts itself")),
    row(&["--mlock"], Nothing, Ignored("Kiln does not lock memory")),
    row(&["--no-mmap", "-dio", "--direct-io"], Nothing, Ignored("Kiln always maps model files")),
    row(&["--mmap"], Nothing, Always("Kiln always maps model files")),
    row(&["-mmp"], Value, Ignored("Kiln always maps model files")),
    row(&["-b", "--batch-size", "-ub", "--ubatch-size"], Value, OWN_BATCHES),
    row(&["-tb", "--threads-batch"], Value, Ignored("-t sets the threads of prompt processing and of generation")),
    row(&["--numa", "--prio", "--prio-batch", "--poll", "--poll-batch", "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict",
        "-Cb", "--cpu-mask-batch", "-Crb", "--cpu-range-batch", "--cpu-strict-batch"], Value, NO_PINNING),
    row(&["--check-tensors"], Nothing, Ignored("`kiln verify` compares a stored model with what was fetched")),
    row(&["--warmup", "--no-warmup", "--no-perf", "--perf"], Nothing, Ignored("Kiln has no such step")),
    only(&["serve", "chat"], &["-cram"], Value, Is("--cache-ram")),
    row(&["--swa-full", "-dt", "--defrag-thold", "-ctxcp", "--ctx-checkpoints", "-cram", "--cache-ram"], Maybe(&[]), Ignored("Kiln manages the KV cache itself")),
    row(&["--list-devices"], Nothing, Refused("`kiln devices` lists them")),
    row(&["-gan", "--grp-attn-n", "-gaw", "--grp-attn-w"], Value, NO_GROUPS),
    row(&["--control-vector", "--control-vector-scaled", "--control-vector-layer-range"], Value, NO_CONTROL),
    // Drafts.
    only(DRAFTING, &["-md", "--model-draft", "--spec-draft-model"], Value, Is("--draft-model")),
    only(DRAFTING, &["-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"], Value, Refused("--draft-model hf:OWNER/REPO names it")),
    only(DRAFTING, &["--draft", "--draft-n", "--spec-draft-n-max"], Value, Is("--draft-max")),
    only(DRAFTING, &["--draft-n-min", "--spec-draft-n-min"], Value, Is("--draft-min")),
    only(DRAFTING, &["--spec-draft-p-min"], Value, Is("--draft-p-min")),
    row(&["--spec-type"], Value, Ignored("--lookup, --mtp and --draft-model say who drafts; without them Kiln measures what pays")),
    row(&["-md", "--model-draft", "--spec-draft-model", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf", "--draft-model", "--draft", "--draft-n",
        "--spec-draft-n-max", "--draft-max", "--draft-n-min", "--spec-draft-n-min", "--draft-min", "--spec-draft-p-min", "--draft-p-min"],
        Value, Ignored("drafts are for commands that generate text")),
    row(&["-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl", "-devd", "--device-draft", "--spec-draft-device", "-cd",
        "--ctx-size-draft", "-ctkd", "-ctvd", "-td", "--threads-draft", "--draft-p-split", "-lcs", "--lookup-cache-static", "-lcd",
        "--lookup-cache-dynamic"], Value, DRAFTS_ITSELF),
    // Prompts and templates.
    row(&["-sys"], Value, Is("--system")),
    row(&["-sysf"], Value, Is("--system-file")),
    row(&["--jinja"], Nothing, Always("chat templates are always Jinja")),
    row(&["--no-jinja"], Nothing, Ignored("chat templates are always Jinja")),
    row(&["-jf", "--json-schema-file"], Value, Is("--json-schema")),
    row(&["-bf", "--binary-file"], Value, Is("--file")),
    only(&["run", "chat"], &["-r"], Value, Is("--stop")),
    only(&["run"], &["-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"], Nothing, Refused("`kiln chat` holds a conversation")),
    only(&["run"], &["-no-cnv", "--no-conversation"], Nothing, Is("--raw")),
    only(&["chat"], &["-no-cnv", "--no-conversation", "-st", "--single-turn"], Nothing, Refused("`kiln run` answers one prompt, and `kiln run --raw` continues a text")),
    row(&["-cnv", "--conversation", "-no-cnv", "--no-conversation", "-st", "--single-turn", "-i", "--interactive", "-if", "--interactive-first"], Nothing, Always("the command says it")),
    only(&["chat"], &["-p", "--prompt", "-f", "--file"], Value, Refused("`kiln run` takes a prompt; `kiln chat` reads messages from the terminal or stdin")),
    row(&["-e", "--escape"], Nothing, Ignored("Kiln takes prompts as they are; the shell writes a newline as $'\\n'")),
    row(&["--no-escape"], Nothing, Always("Kiln takes prompts as they are")),
    row(&["--in-prefix", "--in-suffix", "--in-prefix-bos"], Maybe(&[]), Refused("the chat template frames messages: --chat-template changes it")),
    row(&["--keep", "--context-shift", "--no-context-shift", "-ptc", "--print-token-count"], Maybe(&[]), Ignored("Kiln does not shift contexts; `kiln chat` leaves out the oldest messages")),
    row(&["--prompt-cache"], Value, Refused("--save-state and --load-state keep what was computed of a prompt")),
    row(&["-bs", "--backend-sampling"], Nothing, Always("Kiln samples on the GPU where it can")),
    only(&["run", "chat"], &["--format"], Value, Refused("--json-schema '{}' asks for JSON")),
    // What is shown.
    row(&["-co", "--color", "--no-display-prompt", "--display-prompt", "--simple-io", "--verbose-prompt", "-sp", "--special", "--log-disable",
        "--log-colors", "--log-prefix", "--log-timestamps", "--log-verbose", "--nowordwrap", "--progress"], SWITCH, Ignored("Kiln writes the answer alone to stdout; -v says more")),
    row(&["-lv", "--verbosity", "--log-verbosity", "--log-file"], Value, Ignored("-v and -vv say more on stderr; `2> FILE` keeps it")),
    only(&["bench"], &["-o", "--output", "-oe", "--output-err"], Value, Refused("--json prints JSON")),
    // The server.
    only(&["serve"], &["-np"], Value, Is("--parallel")),
    only(&["serve"], &["-a", "--served-model-name"], Value, Is("--alias")),
    only(&["serve"], &["--ssl-cert-file", "--ssl-certfile"], Value, Is("--tls-cert")),
    only(&["serve"], &["--ssl-key-file", "--ssl-keyfile"], Value, Is("--tls-key")),
    only(&["serve"], &["--max-model-len"], Value, Is("--ctx-size")),
    only(&["serve"], &["--max-num-seqs"], Value, Is("--parallel")),
    only(&["serve"], &["-cb", "--cont-batching", "--metrics", "--slots", "--props", "--embedding", "--embeddings", "--rerank", "--reranking",
        "--webui", "--cache-prompt", "--enable-prefix-caching"], Nothing, Always("the server always does so")),
    only(&["serve"], &["-nocb", "--no-cont-batching", "--no-cache-prompt"], Nothing, Ignored("Kiln always batches continuously and reuses prompts")),
    only(&["serve"], &["--cache-reuse", "-sps", "--slot-prompt-similarity", "--threads-http"], Value, Ignored("Kiln chooses it itself")),
    only(&["serve"], &["-to", "--timeout"], Value, Ignored("--request-timeout bounds a request")),
    only(&["serve"], &["--gpu-memory-utilization"], Value, Ignored("--memory-limit bounds the memory of each GPU")),
    only(&["serve"], &["--tensor-parallel-size", "-tp"], Value, Ignored("--device 0,1 splits a model by layers")),
    only(&["serve"], &["--dtype"], Value, Ignored("a GGUF file has its types; `kiln quantize` makes others")),
    only(&["serve"], &["--api-prefix", "--path"], Value, Refused("Kiln serves at / alone; a reverse proxy adds a prefix")),
];

/// Something to say when the log is there.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) text: String,
    /// Only with `-v`: nothing is different from what was asked for.
    pub(crate) quiet: bool,
}

/// A command line as Kiln's own flags have it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Rewritten {
    pub(crate) words: Vec<OsString>,
    pub(crate) notes: Vec<Note>,
}

/// Rewrites a command line. `Err` is what to say of a flag that is refused.
pub(crate) fn rewrite(words: Vec<OsString>, program: &Command) -> Result<Rewritten, String> {
    let name = words.iter().skip(1).position(|word| !word.as_encoded_bytes().starts_with(b"-")).map(|at| at + 1);
    let command = name.and_then(|at| Some((at, program.find_subcommand(&words[at])?)));
    let Some((at, command)) = command.filter(|(_, command)| runs_models(command)) else {
        return Ok(Rewritten { words, notes: Vec::new() });
    };
    let mut words = words;
    let mut rest = words.split_off(at + 1).into_iter();
    let mut line = Line { command, words, notes: Vec::new(), repository: None, file: None };
    while let Some(word) = rest.next() {
        if word == "--" {
            line.words.push(word);
            line.words.extend(rest.by_ref());
        } else {
            line.take(word, &mut rest)?;
        }
    }
    line.finish()
}

/// Whether a command has the flags of models, or fetches one.
fn runs_models(command: &Command) -> bool {
    command.get_name() == "pull" || command.get_arguments().any(|arg| arg.get_long() == Some("ctx-size"))
}

/// The flag of a command that a word names.
fn own<'c>(command: &'c Command, word: &str) -> Option<&'c Arg> {
    let is = |arg: &&Arg| match word.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long) || arg.get_all_aliases().is_some_and(|all| all.contains(&long)),
        None => {
            let mut letters = word.chars().skip(1);
            let (first, second) = (letters.next(), letters.next());
            second.is_none() && first.is_some() && arg.get_short() == first
        }
    };
    command.get_arguments().find(is)
}

/// A command line on the way.
struct Line<'c> {
    command: &'c Command,
    words: Vec<OsString>,
    notes: Vec<Note>,
    /// Where the name of a Hugging Face repository stands in `words`, and the file in it.
    repository: Option<usize>,
    file: Option<String>,
}

impl Line<'_> {
    fn take(&mut self, word: OsString, rest: &mut std::vec::IntoIter<OsString>) -> Result<(), String> {
        let Some(text) = word.to_str().filter(|text| text.starts_with('-') && text.len() > 1) else {
            self.words.push(word);
            return Ok(());
        };
        let (name, glued) = match text.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name.to_owned(), Some(OsString::from(value))),
            _ => (text.to_owned(), None),
        };
        if let Some(arg) = own(self.command, &name) {
            // Its value is copied unread, whatever it looks like.
            let value = if arg.get_action().takes_values() && glued.is_none() { rest.next() } else { None };
            self.words.extend([Some(word), value].into_iter().flatten());
            return Ok(());
        }
        let row = TABLE.iter().find(|row| {
            row.names.contains(&name.as_str())
                && (row.commands.is_empty() || row.commands.contains(&self.command.get_name()))
        });
        let Some(row) = row else {
            self.words.push(word);
            return Ok(());
        };
        let next_is = |known: &[&str]| {
            let next = rest.as_slice().first().and_then(|next| next.to_str());
            next.is_some_and(|next| known.contains(&next) || (known.is_empty() && next.parse::<f64>().is_ok()))
        };
        let value = match row.takes {
            _ if glued.is_some() => glued,
            Takes::Nothing => None,
            Takes::Maybe(known) if !next_is(known) => None,
            Takes::Value | Takes::Maybe(_) => rest.next(),
        };
        if matches!(row.takes, Takes::Value) && value.is_none() {
            return Err(format!("{name} needs a value"));
        }
        self.apply(row.meaning, &name, value)
    }

    fn apply(&mut self, meaning: Meaning, name: &str, value: Option<OsString>) -> Result<(), String> {
        let shown = |value: &Option<OsString>| {
            value.as_ref().map(|value| format!(" {}", value.to_string_lossy())).unwrap_or_default()
        };
        match meaning {
            Meaning::Is(flag) => self.words.extend([Some(flag.into()), value].into_iter().flatten()),
            Meaning::Model(start) => {
                let value = value.unwrap_or_default();
                let known = value.as_encoded_bytes().starts_with(start.as_bytes());
                let model = if known { value } else { [OsStr::new(start), &value].into_iter().collect() };
                if own(self.command, "--model").is_some() {
                    self.words.push("--model".into());
                }
                self.repository = if start.is_empty() { self.repository } else { Some(self.words.len()) };
                self.words.push(model);
            }
            Meaning::ModelFile => self.file = value.map(|value| value.to_string_lossy().into_owned()),
            Meaning::Always(why) => {
                // What was switched off is on all the same.
                let off = value.as_deref().is_some_and(|value| value == "off" || value == "0" || value == "false");
                self.notes.push(Note { text: format!("{name}{} is ignored: {why}", shown(&value)), quiet: !off });
            }
            Meaning::Ignored(why) => {
                let text = format!("{name}{} is ignored: {why}", shown(&value));
                self.notes.push(Note { text, quiet: false });
            }
            Meaning::Refused(why) => return Err(format!("kiln {} has no {name}: {why}", self.command.get_name())),
        }
        Ok(())
    }

    /// Appends the file of a repository to its name instead of a quantisation.
    fn finish(mut self) -> Result<Rewritten, String> {
        if let Some(file) = self.file {
            let Some(at) = self.repository else { return Err("--hf-file needs --hf-repo OWNER/REPO".to_owned()) };
            let name = self.words[at].to_string_lossy();
            let repository = name.split(':').take(2).collect::<Vec<_>>().join(":");
            self.words[at] = format!("{repository}:{file}").into();
        }
        Ok(Rewritten { words: self.words, notes: self.notes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<(String, Vec<Note>), String> {
        let words = line.split_whitespace().map(OsString::from).collect();
        let done = rewrite(words, &crate::program())?;
        let words: Vec<String> = done.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        Ok((words.join(" "), done.notes))
    }

    #[test]
    fn flags_of_others_become_kilns_own() {
        for (line, want) in [
            ("kiln run m.gguf hi -ngl 99 -t 8", "kiln run m.gguf hi --gpu-layers 99 -t 8"),
            ("kiln run -m m.gguf -p hi", "kiln run -m m.gguf -p hi"),
            ("kiln run -hf a/b:Q4_K_M -p hi", "kiln run --model hf:a/b:Q4_K_M -p hi"),
            ("kiln run -hf hf:a/b hi", "kiln run --model hf:a/b hi"),
            ("kiln chat -hf a/b", "kiln chat hf:a/b"),
            ("kiln chat -m m.gguf", "kiln chat m.gguf"),
            ("kiln serve --hf-repo a/b --hf-file x/y.gguf -np 4", "kiln serve hf:a/b:x/y.gguf --parallel 4"),
            ("kiln serve -hff y.gguf -hf a/b:Q8_0", "kiln serve hf:a/b:y.gguf"),
            ("kiln serve m.gguf -md d.gguf --draft 8", "kiln serve m.gguf --draft-model d.gguf --draft-max 8"),
            ("kiln run m.gguf hi --spec-draft-p-min 0.5", "kiln run m.gguf hi --draft-p-min 0.5"),
            ("kiln bench -m m.gguf -ngl 99 -p 64 -r 2", "kiln bench -m m.gguf --gpu-layers 99 -p 64 -r 2"),
            ("kiln serve m --yarn-ext-factor -1", "kiln serve m --yarn-ext-factor -1"),
            ("kiln run m -sys hi -no-cnv x", "kiln run m --system hi --raw x"),
            ("kiln chat m -sysf s.txt -r stop", "kiln chat m --system-file s.txt --stop stop"),
            ("kiln -v run m -ctk q8_0 -ctv q8_0 x", "kiln -v run m --cache-type-k q8_0 --cache-type-v q8_0 x"),
            // What is a value, or stands behind two hyphens, is not read.
            ("kiln run m -p -fa", "kiln run m -p -fa"),
            ("kiln run m -- -fa", "kiln run m -- -fa"),
            ("kiln list -hf", "kiln list -hf"),
            ("kiln", "kiln"),
        ] {
            let (words, notes) = of(line).unwrap();
            assert_eq!((words.as_str(), notes), (want, vec![]), "{line}");
        }
    }

    #[test]
    fn what_is_not_needed_is_left_out_with_a_note() {
        for command in ["run", "chat", "serve", "bench"] {
            for (flags, note, quiet) in [
                ("-fa on", "flash attention", true),
                ("-fa", "flash attention", true),
                ("--flash-attn off", "flash attention", false),
                ("-sm none", "--device 0,1", false),
                ("-mg 0", "--device N", false),
                ("-ngld 99", "draft model", false),
                ("--mlock", "lock", false),
                ("--no-mmap", "map", false),
                ("-b 2048", "batch", false),
                ("--batch-size=512", "batch", false),
                ("-tb 8", "-t", false),
                ("--numa distribute", "-t", false),
                ("--keep -1", "oldest", false),
                ("--jinja", "Jinja", true),
            ] {
                let (words, notes) = of(&format!("kiln {command} m.gguf {flags} -c 64")).unwrap();
                assert_eq!(words, format!("kiln {command} m.gguf -c 64"), "{flags}");
                assert!(notes.len() == 1 && notes[0].text.contains(note) && notes[0].quiet == quiet, "{notes:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_done_says_what_to_use() {
        for (line, words) in [
            ("kiln run m -cnv", &["-cnv", "kiln chat"][..]),
            ("kiln chat m -no-cnv", &["kiln run"]),
            ("kiln serve m --image x", &["--image", "kiln run"]),
            ("kiln serve m --audio x.wav", &["--audio", "sound", "kiln run"]),
            ("kiln serve m -gan 4", &["--rope-scaling yarn"]),
            ("kiln chat m -p hi", &["kiln run"]),
            ("kiln run m -hf", &["-hf needs a value"]),
            ("kiln run m -hff x", &["--hf-repo"]),
        ] {
            let why = of(line).unwrap_err();
            words.iter().for_each(|word| assert!(why.contains(word), "{why}"));
        }
    }

    #[test]
    fn every_row_leads_somewhere() {
        let program = crate::program();
        let commands = ["run", "chat", "serve", "bench"];
        for row in TABLE {
            if let Meaning::Is(flag) = row.meaning {
                let known =
                    |name: &&str| program.find_subcommand(name).is_some_and(|command| own(command, flag).is_some());
                let of: Vec<&&str> = commands.iter().filter(|name| row.commands.contains(name)).collect();
                assert!(of.iter().all(|name| known(name)) && commands.iter().any(known), "{flag}");
            }
            assert!(row.names.iter().all(|name| name.starts_with('-')));
        }
    }
}
