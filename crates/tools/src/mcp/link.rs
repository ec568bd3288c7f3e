//! A connection to an MCP server, over whatever it speaks.

use serde_json::Value;

use super::rpc::{Answer, Failure};
use crate::limits::Wait;

/// What can be said to a server.
pub(crate) trait Link: Send + Sync {
    /// Asks, and waits for the answer.
    fn ask(&self, method: &str, params: &Value, wait: &Wait<'_>) -> Answer;

    /// Says something that has no answer.
    fn tell(&self, method: &str, params: &Value) -> Result<(), Failure>;

    /// Which version of the protocol is spoken from now on.
    fn speaks(&self, version: &str);

    /// Why nothing more comes of it, where that is so.
    fn end(&self) -> Option<String>;

    /// Whether the server has said that its tools are others now; asked once, it is no longer so.
    fn take_changed(&self) -> bool;
}
