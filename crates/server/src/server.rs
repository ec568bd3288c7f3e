//! Listening, loading, and going down without losing what is being written.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use kiln_engine::run::Scheduler;
use kiln_system::os;
use kiln_system::os::tasks::HangUps;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::app::{App, Settings, Tls};
use crate::connections::Admitted;
use crate::half_close::{ConnectionState, HalfClose, TrackedBody};
use crate::keys::Key;
use crate::registry::{LoadedEngine, ModelRegistry, ModelSpec, Sharing};
use crate::routes::routes;
use crate::trace::Tracer;

/// What keeps a server from starting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error("cannot listen on {address}: {why}\nhint: another program may use that port; choose another one")]
    Listen { address: String, why: std::io::Error },
    #[error("cannot start the server's threads: {0}")]
    Threads(std::io::Error),
    #[error(
        "TLS cannot be set up: {0}\nhint: both files must be PEM: the certificates, and the private key of the first one"
    )]
    Tls(String),
    #[error(
        "there is no key any more, and without one the server would be open to all\nhint: write a key, or start the server again"
    )]
    NoKey,
    #[error("the server failed: {0}")]
    Serve(String),
    #[error(
        "{} ended before the answer was finished, and the client was told so\nhint: a longer time to drain lets more of them finish", requests(*.0)
    )]
    CutOff(usize),
}

/// So many requests, in words.
fn requests(count: usize) -> String {
    if count == 1 { "1 request was".to_owned() } else { format!("{count} requests were") }
}

/// A server that is being set up.
pub struct Server;

/// What a server proves itself with, and what its clients do; it can change while the server runs.
pub struct Secrets {
    /// The keys that open the server.
    pub keys: Vec<Key>,
    /// The certificate; a server that began without one goes on without.
    pub tls: Option<Tls>,
}

/// What a server does after SIGHUP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterHangUp {
    /// It stays.
    Stay,
    /// It goes down.
    End,
}

/// A server that listens. Dropping it ends everything at once.
pub struct Running {
    runtime: Runtime,
    app: Arc<App>,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    /// What answers clients that speak TLS from now on.
    tls: watch::Sender<Option<TlsAcceptor>>,
    served: JoinHandle<()>,
    /// Tells when the last traces have been sent.
    traced: Option<Receiver<()>>,
}

impl Server {
    /// Listens, for one model. Until it is handed over, requests are told to come back later.
    pub fn listen(host: &str, port: u16, settings: Settings) -> Result<Running, Error> {
        let registry = ModelRegistry::of_one(&settings.model, &settings.aliases);
        Server::listen_with(host, port, settings, registry)
    }

    /// Listens, for several models. Each is loaded when the first request for it comes.
    pub fn offer(
        host: &str,
        port: u16,
        settings: Settings,
        specs: Vec<ModelSpec>,
        sharing: Sharing,
    ) -> Result<Running, Error> {
        Server::listen_with(host, port, settings, ModelRegistry::new(specs, sharing))
    }

    /// The routes of all APIs for one model, for a program that listens by itself. What the settings say of connections and TLS is that
    /// program's business.
    pub fn router(settings: Settings, engine: LoadedEngine) -> axum::Router {
        let registry = ModelRegistry::of_one(&settings.model, &settings.aliases);
        let app = Arc::new(App::new(settings, registry, None));
        app.registry.put(engine);
        routes(app)
    }

    fn listen_with(host: &str, port: u16, settings: Settings, registry: ModelRegistry) -> Result<Running, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("kiln server")
            .enable_all()
            .build()
            .map_err(Error::Threads)?;
        let (listeners, address) = runtime.block_on(Listeners::bind(host, port))?;
        let tls = settings.tls.as_ref().map(acceptor).transpose()?;
        let tracing = settings.tracing.clone().map(Tracer::start).transpose().map_err(Error::Threads)?;
        let (tracer, traced) = tracing.unzip();
        let app = Arc::new(App::new(settings, registry, tracer));
        let (stop, stopped) = watch::channel(false);
        let (tls, now_tls) = watch::channel(tls);
        let served = runtime.spawn(accept(listeners, now_tls, Arc::clone(&app), stopped));
        if app.registry.is_tidied() {
            runtime.spawn(tidy(Arc::clone(&app)));
        }
        Ok(Running { runtime, app, address, stop, tls, served, traced })
    }
}

impl Running {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Hands the model over: from now on requests are served. `sequences` is how many texts the engine writes at once.
    pub fn ready(&self, scheduler: Scheduler, sequences: usize) {
        self.ready_with(LoadedEngine { scheduler: Arc::new(scheduler), sequences, encoder: None });
    }

    /// The same for a model that may be given pictures and sounds.
    pub fn ready_with(&self, opened: LoadedEngine) {
        self.app.registry.put(opened);
    }

    /// Waits until the program is asked to end (Ctrl-C, SIGTERM), then goes down as [`Running::stop`] does. SIGHUP is left to the
    /// system, or where there is a `hang_up`, to that.
    pub fn wait(self, hang_up: Option<&dyn Fn(&Running) -> AfterHangUp>) -> Result<(), Error> {
        self.runtime.block_on(async {
            let Some(hang_up) = hang_up else { return asked_to_end().await };
            let mut end = std::pin::pin!(asked_to_end());
            let mut hang_ups = hang_ups();
            loop {
                tokio::select! {
                    () = &mut end => return,
                    () = hang_ups.next() => if hang_up(&self) == AfterHangUp::End { return },
                }
            }
        });
        self.stop()
    }

    /// Takes other keys and another certificate. Requests that run go on, and so do connections; the next request needs one of
    /// these keys, the next connection gets this certificate. Where anything is wrong, nothing changes.
    pub fn renew(&self, secrets: Secrets) -> Result<(), Error> {
        if secrets.keys.is_empty() && !self.app.keys.is_empty() {
            return Err(Error::NoKey);
        }
        let tls = secrets.tls.as_ref().map(acceptor).transpose()?;
        self.app.keys.replace(secrets.keys);
        self.tls.send_if_modified(|now| {
            let renewed = now.is_some() && tls.is_some();
            if renewed {
                *now = tls;
            }
            renewed
        });
        Ok(())
    }

    /// Says that it goes down and serves on for as long as the settings say, then takes no new requests, lets those that run finish for as
    /// long as the settings allow, ends the others with an answer, and ends.
    pub fn stop(self) -> Result<(), Error> {
        let Running { runtime, app, stop, tls: _tls, mut served, traced, .. } = self;
        let ended = runtime.block_on(async {
            // A second wish to end is a wish to end now.
            let mut now = std::pin::pin!(asked_to_end());
            app.shutdown.leave();
            let delay = app.settings.drain_delay;
            let mut hurries = false;
            if !delay.is_zero() {
                tokio::select! {
                    () = tokio::time::sleep(delay) => {}
                    () = now.as_mut() => hurries = true,
                }
            }
            app.shutdown.drain();
            // The receiver is gone if the server has failed already.
            let _ = stop.send(true);
            if !hurries {
                tokio::select! {
                    ended = &mut served => return Some(ended),
                    () = tokio::time::sleep(app.settings.drain) => {}
                    () = now => {}
                }
            }
            app.shutdown.end();
            // Clients that read are told; those that do not have no more time.
            tokio::time::timeout(LAST_ANSWERS, &mut served).await.ok()
        });
        runtime.shutdown_timeout(Duration::from_millis(200));
        let cut_off = app.shutdown.cut_off();
        drop(app);
        if let Some(traced) = traced {
            // It never says anything: the channel ends with the thread.
            let _ = traced.recv_timeout(Duration::from_secs(2));
        }
        match ended {
            None | Some(Ok(())) if cut_off > 0 => Err(Error::CutOff(cut_off)),
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(Error::Serve(error.to_string())),
        }
    }
}

/// How long answers to requests that are ended may take.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Connections that the system holds until the server takes them; it may bound them further (`net.core.somaxconn` of Linux). A client that
/// comes when they are full believes that it is connected, and sees its connection reset after a minute.
const BACKLOG: u32 = 1 << 16;

/// Listens on the first address of a name that can be had.
async fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut failed = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    for address in lookup_host((host, port)).await? {
        let bound = || {
            let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            // A server that was ended and started again gets its port back at once.
            if os::REUSE_ADDRESSES {
                socket.set_reuseaddr(true)?;
            }
            socket.bind(address)?;
            socket.listen(BACKLOG)
        };
        match bound() {
            Ok(listener) => return Ok(listener),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// All addresses that the server listens on.
struct Listeners(Vec<TcpListener>);

impl Listeners {
    /// Binds to addresses with commas between, all with one port; tells the first.
    async fn bind(hosts: &str, port: u16) -> Result<(Listeners, SocketAddr), Error> {
        let mut listeners: Vec<TcpListener> = Vec::new();
        let mut first: Option<SocketAddr> = None;
        for host in hosts.split(',').map(str::trim) {
            let plain = host.trim_start_matches('[').trim_end_matches(']');
            // Where any port will do, the first one's does for all.
            let port = first.map_or(port, |address| address.port());
            let failed = |why| Error::Listen { address: format!("{host}:{port}"), why };
            let listener = bind(plain, port).await.map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            first.get_or_insert(address);
            listeners.push(listener);
        }
        let nothing = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let first = first.ok_or_else(|| Error::Listen { address: hosts.to_owned(), why: nothing() })?;
        Ok((Listeners(listeners), first))
    }

    /// The next connection to any of them, and who it comes from.
    async fn accept(&self) -> std::io::Result<(TcpStream, SocketAddr)> {
        let next = self.0.iter().map(|listener| Box::pin(listener.accept()));
        futures_util::future::select_all(next).await.0
    }
}

/// Takes connections until the server is told to stop, then waits for those that are open. Clients that come meanwhile still get an
/// answer: that the server is going down.
async fn accept(
    listener: Listeners,
    tls: watch::Receiver<Option<TlsAcceptor>>,
    app: Arc<App>,
    mut stopped: watch::Receiver<bool>,
) {
    let door = Door::new(&app, tls, stopped.clone());
    // Every connection holds a sender, so that the receivers are told when the last one has ended.
    let (open, mut over) = mpsc::channel(1);
    let (late, mut late_over) = mpsc::channel(1);
    loop {
        let (stream, address) = tokio::select! {
            next = door.next(&listener) => next,
            // An error means that the server itself is gone.
            _ = stopped.wait_for(|stop| *stop) => break,
        };
        door.serve(stream, address, open.clone());
    }
    drop(open);
    loop {
        tokio::select! {
            _ = over.recv() => break,
            (stream, address) = door.next(&listener) => door.serve(stream, address, late.clone()),
        }
    }
    drop((listener, late));
    // Their answers are short; a slow reader does not delay the shutdown.
    let _ = tokio::time::timeout(FIRST_REQUEST, late_over.recv()).await;
}

/// How long a server that is going down waits for the first request of a connection. A client may have sent it already where
/// the server has not read it yet, and would see its connection reset.
const FIRST_REQUEST: Duration = Duration::from_secs(1);

/// What every connection is served with.
struct Door {
    app: Arc<App>,
    builder: auto::Builder<TokioExecutor>,
    router: axum::Router,
    tls: watch::Receiver<Option<TlsAcceptor>>,
    stopped: watch::Receiver<bool>,
}

/// Requests of one HTTP/2 connection at once.
const STREAMS: u32 = 128;

impl Door {
    fn new(app: &Arc<App>, tls: watch::Receiver<Option<TlsAcceptor>>, stopped: watch::Receiver<bool>) -> Door {
        let (header_timeout, ping) = (app.settings.header_timeout, app.settings.http2_ping);
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(header_timeout);
        // A client that answers no ping has gone, whatever it has in flight.
        let mut http2 = builder.http2();
        http2.timer(TokioTimer::new()).keep_alive_interval(ping).keep_alive_timeout(ping);
        http2.max_concurrent_streams(STREAMS);
        Door { app: Arc::clone(app), builder, router: routes(Arc::clone(app)), tls, stopped }
    }

    /// The next connection.
    async fn next(&self, listener: &Listeners) -> (TcpStream, IpAddr) {
        loop {
            match listener.accept().await {
                Ok((stream, address)) => return (stream, address.ip()),
                Err(error) => {
                    // Too many open files, a client that is gone already: it passes.
                    log::warn!("a connection could not be taken: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Serves a connection on a task of its own, which holds its place, and `open`, until the end.
    fn serve(&self, stream: TcpStream, address: IpAddr, open: mpsc::Sender<()>) {
        // Where not even a reserved place is free, the connection ends here.
        let Some(admitted) = self.app.connections.admit(address) else { return };
        // Tokens are small; waiting to send more at once would only delay them.
        let _ = stream.set_nodelay(true);
        let Admitted { connection, .. } = &admitted;
        let (connection, settings) = (Arc::clone(connection), &self.app.settings);
        let tls = self.tls.borrow().clone();
        let (patience, write_timeout) = (settings.header_timeout, settings.write_timeout);
        let state = ConnectionState::of(&connection, [settings.header_timeout, settings.idle_timeout]);
        let (builder, router, stopped) = (self.builder.clone(), self.router.clone(), self.stopped.clone());
        let work = async move {
            if tls.is_some() && speaks_plainly(&stream, patience).await {
                return refuse_plain(stream).await;
            }
            // A client that reads nothing of its answer loses its slot.
            let mut stream = TimeoutStream::new(stream);
            stream.set_write_timeout(Some(write_timeout));
            let stream = Box::pin(stream);
            match tls {
                None => {
                    let stream = HalfClose::new(stream, Arc::clone(&state));
                    serve(stream, &builder, router, stopped, state).await;
                }
                // A client that ends TLS has gone: it could read nothing more over TLS.
                Some(tls) => match tokio::time::timeout(patience, tls.accept(stream)).await {
                    Ok(Ok(stream)) => serve(stream, &builder, router, stopped, state).await,
                    Ok(Err(error)) => log::debug!("a client did not agree on TLS: {error}"),
                    Err(_) => log::debug!("a client took too long to agree on TLS"),
                },
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = connection.closed() => log::debug!("an idle connection was closed: others need its place"),
                () = work => {}
            }
            drop((admitted, open));
        });
    }
}

/// Whether a client on a port for TLS begins with something else: a letter, as every method of HTTP does.
async fn speaks_plainly(stream: &TcpStream, patience: Duration) -> bool {
    let mut first = [0; 1];
    let seen = tokio::time::timeout(patience, stream.peek(&mut first)).await;
    matches!(seen, Ok(Ok(1))) && first[0].is_ascii_uppercase()
}

/// Tells a client that speaks plain HTTP what this port speaks.
async fn refuse_plain(mut stream: TcpStream) {
    let text = "This port speaks TLS: use https:// instead of http://\n";
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
    let tell = async {
        // What is not read would reset the connection, and the answer would be lost.
        let mut head = [0; 8192];
        let _ = stream.read(&mut head).await?;
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    };
    if let Ok(Err(error)) = tokio::time::timeout(FIRST_REQUEST, tell).await {
        log::debug!("a client that speaks plain HTTP on a port for TLS was not told so: {error}");
    }
}

/// How long a client may take to agree to the end of an idle connection.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves one connection to its end. Where the server goes down, that is the end of the request that it is at.
async fn serve<S>(
    stream: S,
    builder: &auto::Builder<TokioExecutor>,
    router: axum::Router,
    mut stopped: watch::Receiver<bool>,
    state: Arc<ConnectionState>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let asked = Notify::new();
    let router = TowerToHyperService::new(router);
    let service = service_fn(|mut request: hyper::Request<_>| {
        asked.notify_one();
        let begun = state.asked(request.version());
        request.extensions_mut().insert(Arc::clone(state.connection()));
        let (answer, state) = (router.call(request), Arc::clone(&state));
        async move {
            // A connection that was closed just before ends without an answer: it is dropped already.
            let Some(in_flight) = begun else { return std::future::pending().await };
            answer.await.map(|answer| answer.map(|body| TrackedBody { body, state, _in_flight: in_flight }))
        }
    });
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    let goes_down = async {
        // An error means that the server itself is gone.
        let _ = stopped.wait_for(|stop| *stop).await;
        let _ = tokio::time::timeout(FIRST_REQUEST, asked.notified()).await;
    };
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = goes_down => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = state.idle() => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(LAST_WORDS, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = ended {
        log::debug!("a connection ended: {error}");
    }
}

/// What answers clients that speak TLS.
fn acceptor(tls: &Tls) -> Result<TlsAcceptor, Error> {
    let wrong = |error: &dyn std::fmt::Display| Error::Tls(error.to_string());
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&tls.certificates).collect();
    let certificates = certificates.map_err(|error| wrong(&error))?;
    let key = PrivateKeyDer::from_pem_slice(&tls.key).map_err(|error| wrong(&error))?;
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.and_then(|config| config.with_no_client_auth().with_single_cert(certificates, key));
    let mut config = config.map_err(|error| wrong(&error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Lets idle models go.
async fn tidy(app: Arc<App>) {
    let mut pace = tokio::time::interval(Duration::from_secs(1));
    loop {
        pace.tick().await;
        let app = Arc::clone(&app);
        // The end of an engine waits for its last step.
        if let Err(error) = tokio::task::spawn_blocking(move || app.registry.tidy()).await {
            log::error!("idle models cannot be unloaded: {error}");
        }
    }
}

fn hang_ups() -> HangUps {
    let (hang_ups, failed) = HangUps::new();
    if let Some(why) = failed {
        log::warn!("SIGHUP cannot be seen: {why}");
    }
    hang_ups
}

async fn asked_to_end() {
    os::tasks::asked_to_end(|why| log::warn!("SIGTERM cannot be seen: {why}")).await;
}
