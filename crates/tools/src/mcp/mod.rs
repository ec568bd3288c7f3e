//! The client of MCP, the protocol by which programs offer tools to models. A server is a program that is started and spoken to over its stdin
//! and stdout, or an address. Nothing of what it sends is trusted: not its length, not its form, not its words.

mod client;
mod content;
mod http;
mod link;
mod rpc;
mod spec;
mod stdio;
mod words;

pub(crate) use client::Client;
pub use spec::{Location, ServerSpec, SpecError};
