//! All tools that there are, under names of their own, and how a call finds its tool.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde_json::json;

use crate::builtin::Builtin;
use crate::limits::{Limits, Wait};
use crate::mcp::{Client, ServerSpec};
use crate::names::Names;
use crate::tool::{Approval, Output, Tool, arguments};

/// Tools of all servers together: what models and APIs take.
const MOST_TOOLS: usize = 128;
/// Calls at once; one more is refused.
const MOST_RUNNING: usize = 32;

/// What a toolbox is made of.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// MCP servers.
    pub servers: Vec<ServerSpec>,
    /// There is a calculator.
    pub calculator: bool,
    /// The files of this folder may be listed and read.
    pub folder: Option<PathBuf>,
    /// Nobody is asked before any tool is called.
    pub always: bool,
    /// How much calls may take.
    pub limits: Limits,
}

/// A server whose tools are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The server.
    pub server: String,
    /// Why, or which of its tools are left out.
    pub why: String,
}

/// The tools that there are now.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// Those that can be called.
    pub tools: Vec<Tool>,
    /// What is not there.
    pub problems: Vec<Problem>,
}

impl Listing {
    /// The tool of a name.
    pub fn find(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

/// All tools.
pub struct Toolbox {
    clients: Vec<Client>,
    builtin: Builtin,
    always: bool,
    limits: Limits,
    running: AtomicUsize,
}

/// A call under way.
struct Running<'a>(&'a AtomicUsize);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Toolbox {
    /// Servers are started, or asked, when their tools are wanted for the first time.
    pub fn new(setup: Setup) -> std::io::Result<Toolbox> {
        let Setup { servers, calculator, folder, always, limits } = setup;
        let builtin = Builtin::new(calculator, folder.as_deref(), limits.output)?;
        let clients = servers.into_iter().map(|spec| Client::new(spec, limits)).collect();
        Ok(Toolbox { clients, builtin, always, limits, running: AtomicUsize::new(0) })
    }

    /// Whether there can be no tools.
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty() && self.builtin.is_empty()
    }

    /// How much calls may take.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether there is an MCP server of this name.
    pub fn has_server(&self, name: &str) -> bool {
        self.clients.iter().any(|client| client.name() == name)
    }

    /// The address of an MCP server, where it is one over HTTP.
    pub fn url_of(&self, name: &str) -> Option<&str> {
        self.clients.iter().find(|client| client.name() == name)?.url()
    }

    /// The tools that there are now. Servers that are not up yet are asked side by side, each for as long as a call may take.
    pub fn tools(&self) -> Listing {
        let mut listing = Listing { tools: self.builtin.tools(), problems: Vec::new() };
        let asked: Vec<_> = std::thread::scope(|scope| {
            let asks: Vec<_> = self.clients.iter().map(|client| scope.spawn(|| client.tools())).collect();
            asks.into_iter().map(|ask| ask.join().unwrap_or_else(|_| Err("failed".to_owned()))).collect()
        });
        let mut names = Names::default();
        for (client, asked) in self.clients.iter().zip(asked) {
            let mut problem = |why: String| listing.problems.push(Problem { server: client.name().to_owned(), why });
            let listed = match asked {
                Ok(listed) => listed,
                Err(why) => {
                    problem(why);
                    continue;
                }
            };
            listed.left_out.iter().for_each(|why| problem(why.clone()));
            for tool in listed.tools.iter() {
                if listing.tools.len() >= MOST_TOOLS {
                    problem(format!("has more tools than can be offered: {MOST_TOOLS} in all"));
                    break;
                }
                match names.give(client.name(), &tool.own_name) {
                    Some(name) => listing.tools.push(Tool { name, ..tool.clone() }),
                    None => problem(format!("names two tools {:?}; the first one counts", tool.own_name)),
                }
            }
        }
        if self.always {
            listing.tools.iter_mut().for_each(|tool| tool.approval = Approval::Always);
        }
        listing
    }

    /// Calls a tool. What goes wrong is a result, too: the model and the person hear of it.
    pub fn call(&self, tool: &Tool, given: &str, wait: &Wait<'_>) -> Output {
        let began = Instant::now();
        let output = match self.made(tool, given, wait) {
            Ok(output) | Err(output) => output.within(self.limits.output),
        };
        let seconds = (began.elapsed().as_secs_f64() * 1e6).round() / 1e6;
        // What was asked and what came of it stays out of the log, as all that is said in conversations.
        let facts = json!({
            "server": tool.server, "tool": tool.own_name, "arguments_bytes": given.len(), "result_bytes": output.bytes(),
            "error": output.is_error, "cut": output.cut.is_some(), "seconds": seconds,
        });
        log::info!(target: "kiln::facts", "tool {facts}");
        output
    }

    fn made(&self, tool: &Tool, given: &str, wait: &Wait<'_>) -> Result<Output, Output> {
        let arguments = arguments(given).map_err(Output::error)?;
        let before = self.running.fetch_add(1, Ordering::Relaxed);
        let _running = Running(&self.running);
        if before >= MOST_RUNNING {
            return Err(Output::error(format!(
                "{before} calls are under way, which is all there may be; try again later"
            )));
        }
        if tool.server.is_empty() {
            return Ok(self.builtin.call(&tool.own_name, &arguments));
        }
        let client = self.clients.iter().find(|client| client.name() == tool.server);
        let client = client.ok_or_else(|| Output::error(format!("there is no MCP server {}", tool.server)))?;
        client.call(&tool.own_name, &arguments, wait).map_err(Output::error)
    }
}
