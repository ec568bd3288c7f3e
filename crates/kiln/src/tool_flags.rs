//! Tools that models may call: flags of the commands that talk with a model.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use kiln_tools::{Limits, ServerSpec, Setup, Toolbox};

use crate::commands::serve::{bytes, duration};

/// Flags of tools.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Tools")]
pub(crate) struct ToolFlags {
    /// MCP server whose tools the model may call: NAME=COMMAND is started and spoken to over its stdin and stdout, NAME=https://HOST/PATH is asked over HTTP,
    /// and a JSON file with "mcpServers" names several. May be given several times
    #[arg(long, value_name = "SERVER")]
    mcp: Vec<String>,
    /// Let the model compute with a calculator
    #[arg(long)]
    tool_calculator: bool,
    /// Let the model list and read the files of this folder; it reaches none outside and writes none
    #[arg(long, value_name = "FOLDER")]
    tool_folder: Option<PathBuf>,
    /// Whether somebody is asked before a tool of an MCP server is called: ask, or always for calls that nobody is asked about
    #[arg(long, value_name = "WORD", default_value = "ask", value_parser = ["ask", "always"])]
    tool_approval: String,
    /// Answers to one message that may call tools; then the model must answer without
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1000))]
    tool_turns: u16,
    /// How long one call may take, as 60s or 5m
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = call_time)]
    tool_timeout: Duration,
    /// How long one message may take with all its answers and calls
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = call_time)]
    tool_total_timeout: Duration,
    /// Bytes of a result that the model is given; what is more is cut, and that is said
    #[arg(long, value_name = "BYTES", default_value = "64K", value_parser = output)]
    tool_output: u64,
}

impl ToolFlags {
    /// The tools that were named; none where there are none. MCP servers are started when their tools are wanted for the first time.
    pub(crate) fn toolbox(&self) -> anyhow::Result<Option<Toolbox>> {
        let mut servers: Vec<ServerSpec> = Vec::new();
        for given in &self.mcp {
            for spec in ServerSpec::parse(given).context("--mcp")? {
                if servers.iter().any(|other| other.name == spec.name) {
                    bail!(
                        "--mcp names two servers {:?}\nhint: NAME=COMMAND and NAME=https://HOST/PATH give each its own name",
                        spec.name
                    );
                }
                servers.push(spec);
            }
        }
        let standard = Limits::default();
        let output = usize::try_from(self.tool_output).unwrap_or(usize::MAX);
        let limits = Limits {
            turns: usize::from(self.tool_turns),
            call_time: self.tool_timeout,
            total_time: self.tool_total_timeout,
            output,
            // What is cut has to come first.
            received: standard.received.max(output.saturating_mul(2)),
            ..standard
        };
        let always = self.tool_approval == "always";
        let folder = self.tool_folder.clone();
        let toolbox = Toolbox::new(Setup { servers, calculator: self.tool_calculator, folder, always, limits });
        let toolbox = toolbox.with_context(|| {
            let folder = self.tool_folder.as_deref().unwrap_or(std::path::Path::new(""));
            format!("--tool-folder: {} cannot be opened as a folder", folder.display())
        })?;
        Ok(Some(toolbox).filter(|toolbox| !toolbox.is_empty()))
    }
}

/// A time in which a call can come to something.
fn call_time(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    match time < Duration::from_millis(100) || time > Duration::from_secs(24 * 3600) {
        true => Err("a call takes at least 100ms, and nobody waits longer than 24h".to_owned()),
        false => Ok(time),
    }
}

/// Bytes that a model can be given.
fn output(text: &str) -> Result<u64, String> {
    match bytes(text)? {
        few @ 0..1024 => Err(format!("{few} bytes hold no result; give at least 1K")),
        many if many > 64 << 20 => Err("no model reads more than 64M at once".to_owned()),
        number => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        tools: ToolFlags,
    }

    fn toolbox(words: &[&str]) -> anyhow::Result<Option<Toolbox>> {
        Alone::try_parse_from([&["kiln"], words].concat())?.tools.toolbox()
    }

    #[test]
    fn there_are_no_tools_unless_some_are_named() {
        assert!(toolbox(&[]).unwrap().is_none());
        assert!(toolbox(&["--tool-approval", "always"]).unwrap().is_none());
        let some = toolbox(&["--tool-calculator", "--tool-folder", ".", "--tool-turns", "3", "--tool-output", "2K"]);
        let some = some.unwrap().unwrap();
        assert_eq!((some.limits().turns, some.limits().output), (3, 2048));
        let names: Vec<String> = some.tools().tools.into_iter().map(|tool| tool.name).collect();
        assert_eq!(names, ["calculator", "list_files", "read_file"]);
        let servers = toolbox(&["--mcp", "a=no-such-program x", "--mcp", "b=http://127.0.0.1:1/mcp"]).unwrap().unwrap();
        assert!(servers.has_server("a") && servers.url_of("b") == Some("http://127.0.0.1:1/mcp"));
    }

    #[test]
    fn what_is_wrong_with_a_flag_is_said() {
        for (words, said) in [
            (&["--mcp", "a=x", "--mcp", "a=y"][..], "two servers \"a\""),
            (&["--mcp", "npx -y x"], "has no name"),
            (&["--tool-folder", "no/such/folder"], "no/such/folder cannot be opened"),
            (&["--tool-folder", "Cargo.toml"], "Cargo.toml cannot be opened"),
            (&["--tool-timeout", "1ms"], "at least 100ms"),
            (&["--tool-output", "12"], "at least 1K"),
            (&["--tool-turns", "0"], "--tool-turns"),
            (&["--tool-approval", "never"], "--tool-approval"),
        ] {
            let Err(why) = toolbox(words) else { panic!("{words:?} was taken") };
            assert!(format!("{why:#}").contains(said), "{words:?}: {why:#}");
        }
    }
}
