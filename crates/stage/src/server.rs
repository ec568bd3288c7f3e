//! The stage's end of the stream: listens, lets one leader in at a time, and does what it says on a thread of its own.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::Stream;
use kiln_engine::executor::{FromStage, StageHost, ToStage};
use kiln_engine::run::Pulse;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::server::{Grpc, StreamingService};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use crate::codec::Frames;
use crate::wire::{Down, MOST_MESSAGE, Said, Up};
use crate::{Error, Keys, is_loopback};

/// How often a leader is asked whether it is there, and how long it may take: then the stage is free for the next one.
const PING: Duration = Duration::from_secs(5);
/// How often a stage that works says that it gets on.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);
/// Without a sign of the work itself for this long, it says nothing any more.
const HANGS: Duration = Duration::from_secs(20);
/// Messages and answers that wait to be taken.
const WAITING: usize = 64;
const WINDOW: u32 = 16 << 20;

/// A stage that is being set up.
pub struct Stage;

/// A stage that listens. Dropping it ends everything at once.
pub struct Listening {
    runtime: Runtime,
    address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
}

impl Stage {
    /// Listens at `host:port`. Beyond this machine there must be keys.
    pub fn listen(address: &str, keys: Option<Keys>, host: StageHost) -> Result<Listening, Error> {
        let wrong = || Error::Address { address: address.to_owned() };
        let (name, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        let port: u16 = port.parse().map_err(|_| wrong())?;
        let name = name.trim_start_matches('[').trim_end_matches(']');
        if keys.is_none() && !is_loopback(name) {
            return Err(Error::Unprotected { address: address.to_owned() });
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kiln stage")
            .enable_all()
            .build()
            .map_err(Error::Threads)?;
        let failed = |why| Error::Listen { address: address.to_owned(), why };
        let listener = runtime.block_on(TcpListener::bind((name, port))).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let mut server = Server::builder()
            .tcp_nodelay(true)
            .http2_keepalive_interval(Some(PING))
            .http2_keepalive_timeout(Some(PING))
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW);
        if let Some(Keys { certificate, key, authority }) = keys {
            let tls = ServerTlsConfig::new()
                .identity(Identity::from_pem(certificate, key))
                .client_ca_root(Certificate::from_pem(authority));
            server = server.tls_config(tls).map_err(|why| Error::Tls(why.to_string()))?;
        }
        let pulse = host.pulse();
        let service = Service { host: Arc::new(Mutex::new(host)), pulse };
        let (end, ended) = oneshot::channel();
        let over = async {
            // An error means that nobody can say so any more.
            let _ = ended.await;
        };
        let connections = Nodelay(TcpListenerStream::new(listener));
        let serve = server.serve_with_incoming_shutdown(service, connections, over);
        runtime.spawn(async move {
            if let Err(why) = serve.await {
                log::error!("the stage has ended: {why}");
            }
        });
        Ok(Listening { runtime, address, end: Some(end) })
    }
}

impl Listening {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for Ctrl-C or SIGTERM, and ends.
    pub fn wait(self) {
        let failed = |why| log::warn!("SIGTERM cannot be seen: {why}");
        self.runtime.block_on(kiln_system::os::tasks::asked_to_end(failed));
        self.stop();
    }

    /// Ends at once: leaders see that it is lost.
    pub fn stop(mut self) {
        drop(self.end.take());
        self.runtime.shutdown_timeout(Duration::from_millis(200));
    }
}

/// Connections that send small messages at once.
struct Nodelay(TcpListenerStream);

impl Stream for Nodelay {
    type Item = std::io::Result<tokio::net::TcpStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = Pin::new(&mut self.0).poll_next(cx);
        if let Poll::Ready(Some(Ok(stream))) = &next {
            let _ = stream.set_nodelay(true);
        }
        next
    }
}

/// The one call that stages answer.
#[derive(Clone)]
struct Service {
    host: Arc<Mutex<StageHost>>,
    pulse: Arc<Pulse>,
}

type Answers = Pin<Box<dyn Stream<Item = Result<Down, Status>> + Send>>;
type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl tower_service::Service<http::Request<tonic::body::Body>> for Service {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Later<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            if request.uri().path() != "/kiln.Stage/Run" {
                return Ok(Status::unimplemented("stages answer one call").into_http());
            }
            let frames = Frames::<Down, Up>::default();
            let mut grpc = Grpc::new(frames).max_decoding_message_size(MOST_MESSAGE);
            Ok(grpc.streaming(service, request).await)
        })
    }
}

impl StreamingService<Up> for Service {
    type Response = Down;
    type ResponseStream = Answers;
    type Future = Later<Result<Response<Answers>, Status>>;

    fn call(&mut self, request: Request<Streaming<Up>>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(Response::new(service.begin(request.into_inner()).await?)) })
    }
}

impl Service {
    /// Lets a leader in, if there is none.
    async fn begin(self, mut up: Streaming<Up>) -> Result<Answers, Status> {
        let (to, from) = mpsc::channel(WAITING);
        let (answers, mut told) = mpsc::channel(WAITING);
        let (entered, has_entered) = oneshot::channel();
        let busy = Arc::new(AtomicBool::new(false));
        let Service { host, pulse } = self;
        let (works, tells) = (Arc::clone(&busy), answers.clone());
        let session = move || match host.try_lock() {
            Ok(mut host) => {
                // The leader may have gone already.
                let _ = entered.send(true);
                lead(&mut host, from, &tells, &works);
            }
            Err(TryLockError::WouldBlock) => drop(entered.send(false)),
            Err(TryLockError::Poisoned(host)) => {
                let _ = entered.send(true);
                lead(&mut host.into_inner(), from, &tells, &works);
            }
        };
        std::thread::Builder::new()
            .name("kiln layers".into())
            .spawn(session)
            .map_err(|why| Status::internal(why.to_string()))?;
        if has_entered.await != Ok(true) {
            return Err(Status::resource_exhausted("another leader has this stage"));
        }
        tokio::spawn(async move {
            // Ends with the stream: then the session knows that its leader has gone.
            while let Ok(Some(message)) = up.message().await {
                let Some(message) = message.read() else {
                    log::warn!("a leader sent a message that is not whole");
                    return;
                };
                if to.send(message).await.is_err() {
                    return;
                }
            }
        });
        let live = answers.downgrade();
        drop(answers);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(SIGN_OF_LIFE).await;
                let Some(answers) = live.upgrade() else { return };
                if busy.load(Ordering::Relaxed) && pulse.got_on_within(HANGS) {
                    // Where many answers wait, they are sign enough.
                    let _ = answers.try_send(Ok(Down::of(Said::Answer(FromStage::Alive))));
                }
            }
        });
        Ok(Box::pin(futures_util::stream::poll_fn(move |cx| told.poll_recv(cx))))
    }
}

/// Does what one leader says until it has gone.
fn lead(
    host: &mut StageHost,
    mut from: mpsc::Receiver<ToStage>,
    answers: &mpsc::Sender<Result<Down, Status>>,
    busy: &AtomicBool,
) {
    // An error means that the leader has gone: the next message tells.
    let tell = |said| drop(answers.blocking_send(Ok(Down::of(said))));
    tell(Said::About(host.about()));
    log::info!("a leader has come");
    while let Some(message) = from.blocking_recv() {
        let opens = matches!(message, ToStage::Open { .. });
        busy.store(true, Ordering::Relaxed);
        let done = host.handle(message, &mut |answer| tell(Said::Answer(answer)));
        busy.store(false, Ordering::Relaxed);
        if let Err(why) = done {
            log::warn!("the connection ends: {why}");
            let _ = answers.blocking_send(Err(Status::failed_precondition(why.to_string())));
            return;
        }
        if let Some(part) = host.describe().filter(|_| opens) {
            log::info!("this stage has {part}");
        }
    }
    log::info!("the leader has gone");
}
