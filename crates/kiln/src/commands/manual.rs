//! `kiln completions` and `kiln man`: what the binary knows of its own commands, for shells and for `man`.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Command;
use clap_complete::Shell;
use kiln_engine::quantise_recipe::RECIPES;
use kiln_system::files::{Output, Overwrite};

use crate::model::CACHE_TYPES;
use crate::output::{print_piece, say};

/// Flags of `kiln completions`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  source <(kiln completions bash)           # in ~/.bashrc
  source <(kiln completions zsh)            # in ~/.zshrc
  kiln completions fish | source            # in ~/.config/fish/config.fish")]
pub(crate) struct CompletionsArguments {
    /// The shell
    shell: Shell,
}

/// Flags of `kiln man`.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  kiln man | man -l -                       # read the page of kiln
  kiln man run | man -l -                   # of one command
  kiln man --out ~/.local/share/man/man1")]
pub(crate) struct ManArguments {
    /// The command; without it kiln itself
    command: Vec<String>,
    /// Write the pages of all commands into this folder
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    out: Option<PathBuf>,
}

/// Runs `kiln completions`; `command` is the program's.
pub(crate) fn completions(arguments: &CompletionsArguments, command: Command) -> anyhow::Result<ExitCode> {
    let mut text = Vec::new();
    let mut command = with_types(command);
    clap_complete::generate(arguments.shell, &mut command, "kiln", &mut text);
    print_piece(&String::from_utf8_lossy(&text));
    Ok(ExitCode::SUCCESS)
}

/// The commands with the tensor types that a shell can offer. The commands themselves read them in any case, so that they are no
/// possible values to the parser.
fn with_types(command: Command) -> Command {
    let offers = |command: Command, arg: &'static str| {
        let is_cache = arg.starts_with("cache");
        command.mut_arg(arg, |arg| match is_cache {
            true => arg.value_parser(CACHE_TYPES.map(|ty| ty.name())),
            false => arg.value_parser(RECIPES.iter().map(|recipe| recipe.name).collect::<Vec<_>>()),
        })
    };
    let names: Vec<String> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, |inner| {
            let has = |id: &str| inner.get_arguments().any(|arg| arg.get_id() == id);
            let known = ["recipe", "cache_type_k", "cache_type_v"].into_iter().filter(|id| has(id)).collect::<Vec<_>>();
            known.into_iter().fold(inner, offers)
        })
    })
}

/// Runs `kiln man`; `command` is the program's.
pub(crate) fn man(arguments: &ManArguments, mut command: Command) -> anyhow::Result<ExitCode> {
    command.build();
    if let Some(folder) = &arguments.out {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut pages = 0;
        write_all(&command, "kiln", &mut |name, text| {
            let mut output = Output::create(&folder.join(format!("{name}.1")), Overwrite::Yes, &[])?;
            output.write_all(text).map_err(|why| output.failed(why))?;
            pages += 1;
            Ok(output.finish()?)
        })?;
        say(&format!("{pages} pages in {}", folder.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let (mut found, mut name) = (&command, "kiln".to_owned());
    for word in &arguments.command {
        let Some(next) = found.find_subcommand(word) else {
            bail!("there is no command {word:?}\nhint: `kiln help` lists them");
        };
        name = format!("{name}-{}", next.get_name());
        found = next;
    }
    print_piece(&String::from_utf8_lossy(&page(found, &name)?));
    Ok(ExitCode::SUCCESS)
}

fn page(command: &Command, name: &str) -> anyhow::Result<Vec<u8>> {
    let mut text = Vec::new();
    let titled = command.clone().display_name(name.to_owned());
    clap_mangen::Man::new(titled).title(name.to_uppercase()).render(&mut text)?;
    Ok(text)
}

fn write_all(
    command: &Command,
    name: &str,
    write: &mut dyn FnMut(&str, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    write(name, &page(command, name)?)?;
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        write_all(below, &format!("{name}-{}", below.get_name()), write)?;
    }
    Ok(())
}
