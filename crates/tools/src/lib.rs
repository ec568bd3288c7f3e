//! Tools that a model may call: those of MCP servers ([`ServerSpec`]), a calculator, and the files of one folder. A [`Toolbox`] holds them under
//! names of its own, makes calls within [`Limits`], and gives results as data. [`converse`] is the loop of a model and its tools, for
//! every program that has one. Nothing here knows models or HTTP servers.
//!
//! The MCP client is Kiln's own. The official SDK (`rmcp`) drops a message that is too long without telling the call that waits for it, reads
//! a JSON answer of any length over HTTP, and needs an asynchronous runtime and a second HTTP stack; here every byte of a server is counted,
//! and a call ends with a word that says why.

mod builtin;
mod limits;
mod mcp;
mod names;
mod rounds;
mod tool;
mod toolbox;

pub use limits::{Limits, Wait};
pub use mcp::{Location, ServerSpec, SpecError};
pub use names::offered_name;
pub use rounds::{Answered, Call, Decision, Ended, Host, converse};
pub use tool::{Approval, Output, OutputPart, Tool};
pub use toolbox::{Listing, Problem, Setup, Toolbox};
