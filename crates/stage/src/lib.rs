//! Layers of a model on other hosts. The engine knows what a leader and a stage say to each other ([`kiln_engine::executor::ToStage`]); here
//! it goes over the network: one stream of gRPC for each stage, with certificates on both sides wherever it leaves the machine.

mod client;
mod codec;
mod server;
mod wire;

use std::net::IpAddr;
use std::path::PathBuf;

pub use client::StageAddress;
pub use server::{Listening, Stage};
pub use wire::{MOST_MESSAGE, read_up};

/// What a host proves itself with, and whom it believes: PEM.
#[derive(Clone)]
pub struct Keys {
    /// Its certificate, with those that vouch for it.
    pub certificate: Vec<u8>,
    /// The certificate's private key.
    pub key: Vec<u8>,
    /// The authority that certificates of other hosts must come from.
    pub authority: Vec<u8>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys")
    }
}

/// What keeps hosts from working together.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error(
        "{address} can be reached by other machines, and a stage does what it is told\nhint: a certificate, its key and the authority of the other hosts keep others out; without them stages listen on 127.0.0.1 alone"
    )]
    Unprotected { address: String },
    #[error(
        "the stage {address} is on another machine, and nothing proves who it is\nhint: a certificate, its key and the authority of the other hosts do"
    )]
    Unproven { address: String },
    #[error("{address:?} is no address of a stage\nhint: it is a host and a port, as host-b:9100")]
    Address { address: String },
    #[error("cannot listen on {address}: {why}\nhint: another program may use that port; choose another one")]
    Listen { address: String, why: std::io::Error },
    #[error("cannot start the threads of the network: {0}")]
    Threads(std::io::Error),
    #[error("certificates cannot be used: {0}\nhint: all three files must be PEM")]
    Tls(String),
    #[error("cannot reach the stage {address}: {why}\nhint: `kiln stage` runs there, with the same file and version")]
    Unreachable { address: String, why: String },
    #[error("the stage {address} runs Kiln {theirs}, this is {own}\nhint: run the same version on all hosts")]
    Version { address: String, theirs: String, own: &'static str },
    #[error("cannot read {path}: {why}", path = .path.display())]
    File { path: PathBuf, why: std::io::Error },
}

/// Whether a host is this machine by its loopback interface.
fn is_loopback(host: &str) -> bool {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    plain == "localhost" || plain.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}
