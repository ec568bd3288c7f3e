//! Listening, loading, and going down without losing what is being written.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use kiln_engine::run::Scheduler;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::JoinHandle;
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::app::{App, Settings, Tls};
use crate::lingering::{Lingering, Spoken, Talk};
use crate::routes::routes;
use crate::shelf::{Offer, Opened, Sharing, Shelf};
use crate::trace::Tracer;

/// What keeps a server from starting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error("cannot listen on {address}: {source}\nhint: another program may be there; choose another --port")]
    Listen { address: String, source: std::io::Error },
    #[error("cannot start the server's threads: {0}")]
    Threads(std::io::Error),
    #[error(
        "TLS cannot be set up: {0}\nhint: both files must be PEM: the certificates, and the private key of the first one"
    )]
    Tls(String),
    #[error("the server failed: {0}")]
    Serve(String),
}

/// A server that is being set up.
pub struct Server;

/// A server that listens. Dropping it ends everything at once.
pub struct Running {
    runtime: Runtime,
    app: Arc<App>,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    served: JoinHandle<()>,
    /// Tells when the last traces have been sent.
    traced: Option<Receiver<()>>,
}

impl Server {
    /// Listens, for one model. Until it is handed over, requests are told to come back later.
    pub fn listen(host: &str, port: u16, settings: Settings) -> Result<Running, Error> {
        let shelf = Shelf::of_one(&settings.model, &settings.aliases);
        Server::listen_with(host, port, settings, shelf)
    }

    /// Listens, for several models. Each is loaded when the first request for it comes.
    pub fn offer(
        host: &str,
        port: u16,
        settings: Settings,
        offers: Vec<Offer>,
        sharing: Sharing,
    ) -> Result<Running, Error> {
        Server::listen_with(host, port, settings, Shelf::new(offers, sharing))
    }

    fn listen_with(host: &str, port: u16, settings: Settings, shelf: Shelf) -> Result<Running, Error> {
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
        let app = Arc::new(App::new(settings, shelf, tracer));
        let (stop, stopped) = watch::channel(false);
        let served = runtime.spawn(accept(listeners, tls, Arc::clone(&app), stopped));
        if app.shelf.is_tidied() {
            runtime.spawn(tidy(Arc::clone(&app)));
        }
        Ok(Running { runtime, app, address, stop, served, traced })
    }
}

impl Running {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Hands the model over: from now on requests are served. `sequences` is how many texts the engine writes at once.
    pub fn ready(&self, scheduler: Scheduler, sequences: usize) {
        self.app.shelf.put(Opened { scheduler, sequences });
    }

    /// Waits until the program is asked to end (Ctrl-C, SIGTERM), then goes down as [`Running::stop`] does.
    pub fn wait(self) -> Result<(), Error> {
        self.runtime.block_on(asked_to_end());
        self.stop()
    }

    /// Takes no new requests, lets those that run finish for as long as the settings allow, and ends.
    pub fn stop(self) -> Result<(), Error> {
        let Running { runtime, app, stop, mut served, traced, .. } = self;
        app.drain();
        // Nobody listens where the server has failed already.
        let _ = stop.send(true);
        let drain = app.settings.drain;
        let ended = runtime.block_on(async {
            tokio::select! {
                ended = &mut served => Some(ended),
                () = tokio::time::sleep(drain) => None,
                // A second wish to end is a wish to end now.
                () = asked_to_end() => None,
            }
        });
        runtime.shutdown_timeout(Duration::from_millis(200));
        drop(app);
        if let Some(traced) = traced {
            // It never says anything: the channel ends with the thread.
            let _ = traced.recv_timeout(Duration::from_secs(2));
        }
        match ended {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(Error::Serve(error.to_string())),
        }
    }
}

/// Connections that the system holds until the server takes them; it may bound them further (`net.core.somaxconn` of Linux). A client that
/// comes when they are full believes that it is connected, and sees its connection reset after a minute.
const BACKLOG: u32 = 1 << 16;

/// Listens on the first address of a name that can be had.
async fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut failed = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    for address in lookup_host((host, port)).await? {
        let bound = || {
            let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            // A server that was ended and started again gets its port back at once. On Windows the option means another thing.
            #[cfg(unix)]
            socket.set_reuseaddr(true)?;
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
            let failed = |source| Error::Listen { address: format!("{host}:{port}"), source };
            let listener = bind(plain, port).await.map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            first.get_or_insert(address);
            listeners.push(listener);
        }
        let nothing = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let first = first.ok_or_else(|| Error::Listen { address: hosts.to_owned(), source: nothing() })?;
        Ok((Listeners(listeners), first))
    }

    /// The next connection to any of them.
    async fn accept(&self) -> std::io::Result<TcpStream> {
        let next = self.0.iter().map(|listener| Box::pin(listener.accept()));
        futures_util::future::select_all(next).await.0.map(|(stream, _)| stream)
    }
}

/// Takes connections until the server is told to stop, then waits for those that are open. Whoever comes meanwhile still gets an
/// answer: that the server is going down.
async fn accept(listener: Listeners, tls: Option<TlsAcceptor>, app: Arc<App>, mut stopped: watch::Receiver<bool>) {
    let door = Door::new(&app, tls, stopped.clone());
    let places = Arc::new(Semaphore::new(app.settings.connections));
    // Every connection holds a sender, so that the receivers are told when the last one has ended.
    let (open, mut over) = mpsc::channel(1);
    let (late, mut late_over) = mpsc::channel(1);
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (door.next(&listener).await, place)
        };
        let (stream, place) = tokio::select! {
            next = next => next,
            // An error means that the server itself is gone.
            _ = stopped.wait_for(|stop| *stop) => break,
        };
        door.serve(stream, place.ok(), open.clone());
    }
    drop(open);
    loop {
        tokio::select! {
            _ = over.recv() => break,
            stream = door.next(&listener) => {
                if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
                    door.serve(stream, Some(place), late.clone());
                }
            }
        }
    }
    drop((listener, late));
    // Their answers are short; one who takes them slowly does not keep the server.
    let _ = tokio::time::timeout(FIRST_REQUEST, late_over.recv()).await;
}

/// How long a server that is going down waits for the first request of a connection. A client may have sent it already where
/// the server has not read it yet, and would see its connection reset.
const FIRST_REQUEST: Duration = Duration::from_secs(1);

/// What every connection is served with.
struct Door {
    builder: auto::Builder<TokioExecutor>,
    router: axum::Router,
    tls: Option<TlsAcceptor>,
    stopped: watch::Receiver<bool>,
    header_timeout: Duration,
    write_timeout: Duration,
}

impl Door {
    fn new(app: &Arc<App>, tls: Option<TlsAcceptor>, stopped: watch::Receiver<bool>) -> Door {
        let (header_timeout, write_timeout) = (app.settings.header_timeout, app.settings.write_timeout);
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(header_timeout);
        Door { builder, router: routes(Arc::clone(app)), tls, stopped, header_timeout, write_timeout }
    }

    /// The next connection.
    async fn next(&self, listener: &Listeners) -> TcpStream {
        loop {
            match listener.accept().await {
                Ok(stream) => return stream,
                Err(error) => {
                    // Too many open files, a client that is gone already: it passes.
                    log::warn!("a connection could not be taken: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Serves a connection on a task of its own, which holds its place, and `open`, until the end.
    fn serve(&self, stream: TcpStream, place: Option<OwnedSemaphorePermit>, open: mpsc::Sender<()>) {
        // Tokens are small; waiting to send more at once would only delay them.
        let _ = stream.set_nodelay(true);
        // Whoever takes nothing of an answer gives up its place among the requests.
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(self.write_timeout));
        let stream = Box::pin(stream);
        let (builder, router, stopped) = (self.builder.clone(), self.router.clone(), self.stopped.clone());
        let (tls, patience) = (self.tls.clone(), self.header_timeout);
        let talk = Arc::<Talk>::default();
        tokio::spawn(async move {
            match tls {
                None => {
                    let stream = Lingering::new(stream, Arc::clone(&talk));
                    serve(stream, &builder, router, stopped, talk).await;
                }
                // Whoever ends TLS has gone: what it could still read would be no TLS.
                Some(tls) => match tokio::time::timeout(patience, tls.accept(stream)).await {
                    Ok(Ok(stream)) => serve(stream, &builder, router, stopped, talk).await,
                    Ok(Err(error)) => log::debug!("a client did not agree on TLS: {error}"),
                    Err(_) => log::debug!("a client took too long to agree on TLS"),
                },
            }
            drop((place, open));
        });
    }
}

/// Serves one connection to its end. Where the server goes down, that is the end of the request that it is at.
async fn serve<S>(
    stream: S,
    builder: &auto::Builder<TokioExecutor>,
    router: axum::Router,
    mut stopped: watch::Receiver<bool>,
    talk: Arc<Talk>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let asked = Notify::new();
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request: hyper::Request<_>| {
        asked.notify_one();
        talk.asked(request.version());
        let (answer, talk) = (router.call(request), Arc::clone(&talk));
        async move { answer.await.map(|answer| answer.map(|body| Spoken { body, talk })) }
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
        if let Err(error) = tokio::task::spawn_blocking(move || app.shelf.tidy()).await {
            log::error!("idle models cannot be unloaded: {error}");
        }
    }
}

async fn asked_to_end() {
    let interrupted = tokio::signal::ctrl_c();
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut terminated) => {
                tokio::select! {
                    _ = interrupted => {}
                    _ = terminated.recv() => {}
                }
                return;
            }
            Err(error) => log::warn!("SIGTERM cannot be seen: {error}"),
        }
    }
    let _ = interrupted.await;
}
