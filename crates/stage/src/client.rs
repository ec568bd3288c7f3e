//! The leader's end of the stream: a link that the engine's thread writes to and waits at, and tasks that carry messages beneath it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kiln_engine::executor::{About, FromStage, Link, RemoteExecutor, ToStage};
use kiln_system::text::shown;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tonic::Status;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::codec::Frames;
use crate::wire::{Down, MOST_MESSAGE, Said, Up};
use crate::{Error, Keys, is_loopback};

/// The one call that stages answer.
const PATH: &str = "/kiln.Stage/Run";
/// How long a host may take to be reached and to say what it is.
const TO_JOIN: Duration = Duration::from_secs(10);
/// How often a host is asked whether it is there, and how long it may take to say so: one that was stopped or cut off is lost after both.
const PING: Duration = Duration::from_secs(5);
/// Bytes on their way that nobody has taken yet.
const WINDOW: u32 = 16 << 20;

/// Where a stage is, and how it is reached.
#[derive(Clone, Debug)]
pub struct StageAddress {
    /// Host and port.
    pub address: String,
    /// What leader and stage prove themselves with; only on this machine they may do without.
    pub keys: Option<Keys>,
    /// How long a stage with work may say nothing.
    pub patience: Duration,
}

impl StageAddress {
    /// A stage at `host:port`. Beyond this machine there must be keys.
    pub fn new(address: &str, keys: Option<Keys>) -> Result<StageAddress, Error> {
        let wrong = || Error::Address { address: address.to_owned() };
        let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        if host.is_empty() || port.parse::<u16>().is_err() {
            return Err(wrong());
        }
        if keys.is_none() && !is_loopback(host) {
            return Err(Error::Unproven { address: address.to_owned() });
        }
        Ok(StageAddress { address: address.to_owned(), keys, patience: Duration::from_secs(30) })
    }

    fn unreachable(&self, why: impl std::fmt::Display) -> Error {
        Error::Unreachable { address: self.address.clone(), why: why.to_string() }
    }

    async fn connect(&self) -> Result<Channel, Error> {
        let scheme = if self.keys.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{}", self.address));
        let mut endpoint = endpoint
            .map_err(|_| Error::Address { address: self.address.clone() })?
            .connect_timeout(TO_JOIN)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PING)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        if let Some(Keys { certificate, key, authority }) = &self.keys {
            let tls = ClientTlsConfig::new()
                .ca_certificate(Certificate::from_pem(authority))
                .identity(Identity::from_pem(certificate, key));
            endpoint = endpoint.tls_config(tls).map_err(|why| Error::Tls(reason(&why)))?;
        }
        endpoint.connect().await.map_err(|why| self.unreachable(reason(&why)))
    }

    async fn open(&self, from: UnboundedReceiver<Up>) -> Result<tonic::Streaming<Down>, Error> {
        let mut grpc = tonic::client::Grpc::new(self.connect().await?).max_decoding_message_size(MOST_MESSAGE);
        grpc.ready().await.map_err(|why| self.unreachable(reason(&why)))?;
        let path = http::uri::PathAndQuery::from_static(PATH);
        let mut from = from;
        let up = futures_util::stream::poll_fn(move |cx| from.poll_recv(cx));
        let answer = grpc.streaming(tonic::Request::new(up), path, Frames::<Up, Down>::default()).await;
        answer.map(tonic::Response::into_inner).map_err(|why| self.unreachable(shown(why.message())))
    }

    /// Connects, and learns what the stage is.
    pub fn join(&self) -> Result<(About, Box<dyn Link>), Error> {
        let runtime = runtime()?;
        let (to, from) = unbounded_channel();
        let (told, heard) = channel();
        let joined = runtime.block_on(async { tokio::time::timeout(TO_JOIN, self.open(from)).await });
        let down = joined.map_err(|_| self.unreachable("it did not answer in time"))??;
        runtime.spawn(async move {
            let mut down = down;
            loop {
                let next = down.message().await;
                let over = !matches!(next, Ok(Some(_)));
                if told.send(next).is_err() || over {
                    return;
                }
            }
        });
        let mut connection =
            Connection { place: self.address.clone(), to, heard, patience: TO_JOIN, _runtime: runtime };
        let about = match connection.said() {
            Ok(Said::About(about)) => about,
            Ok(_) => return Err(self.unreachable("it does not say what it is")),
            Err(why) => return Err(self.unreachable(why)),
        };
        let own = env!("CARGO_PKG_VERSION");
        if about.version != own {
            return Err(Error::Version {
                address: self.address.clone(),
                theirs: shown(&about.version).to_string(),
                own,
            });
        }
        let about = About { name: shown(&about.name).to_string(), ..about };
        connection.patience = self.patience;
        Ok((about, Box::new(connection)))
    }

    /// Connects; the executor of the stage, which must have the model with this fingerprint.
    pub fn executor(&self, fingerprint: [u8; 32]) -> Result<RemoteExecutor, Error> {
        let (about, link) = self.join()?;
        Ok(RemoteExecutor::new(link, about, fingerprint))
    }
}

/// The innermost reason: what tonic says itself is "transport error".
fn reason(why: &dyn std::error::Error) -> String {
    let mut why = why;
    while let Some(source) = why.source() {
        why = source;
    }
    shown(&why.to_string()).to_string()
}

/// The threads beneath all links of the process.
fn runtime() -> Result<Arc<Runtime>, Error> {
    static RUNTIME: OnceLock<Arc<Runtime>> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(Arc::clone(runtime));
    }
    let built = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("kiln stages")
        .enable_all()
        .build()
        .map_err(Error::Threads)?;
    Ok(Arc::clone(RUNTIME.get_or_init(|| Arc::new(built))))
}

/// A stream to a stage.
struct Connection {
    place: String,
    to: UnboundedSender<Up>,
    heard: Receiver<Result<Option<Down>, Status>>,
    patience: Duration,
    _runtime: Arc<Runtime>,
}

fn lost(why: impl Into<String>) -> kiln_engine::Error {
    kiln_engine::Error::Run { why: why.into() }
}

impl Connection {
    fn said(&mut self) -> Result<Said, kiln_engine::Error> {
        match self.heard.recv_timeout(self.patience) {
            Ok(Ok(Some(down))) => down.read().ok_or_else(|| lost("it sent a message that is not whole")),
            Ok(Ok(None)) | Err(RecvTimeoutError::Disconnected) => Err(lost("it ended the connection")),
            Ok(Err(status)) => Err(lost(shown(status.message()).to_string())),
            Err(RecvTimeoutError::Timeout) => {
                Err(lost(format!("it has said nothing for {} s", self.patience.as_secs_f64())))
            }
        }
    }
}

impl Link for Connection {
    fn place(&self) -> String {
        self.place.clone()
    }

    fn send(&mut self, message: ToStage) -> Result<(), kiln_engine::Error> {
        self.to.send(Up::of(message)).map_err(|_| lost("it ended the connection"))
    }

    fn receive(&mut self) -> Result<FromStage, kiln_engine::Error> {
        match self.said()? {
            Said::Answer(answer) => Ok(answer),
            Said::About(_) => Err(lost("it says anew what it is")),
        }
    }
}
