//! Listening, loading, and going down without losing what is being written.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use kiln_engine::run::Scheduler;
use kiln_engine::text::Template;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use crate::app::{App, Loaded, Settings, now};
use crate::params;
use crate::routes::routes;

/// What keeps a server from starting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
pub enum Error {
    #[error("cannot listen on {address}: {source}\nhint: another program may be there; choose another --port")]
    Listen { address: String, source: std::io::Error },
    #[error("cannot start the server's threads: {0}")]
    Threads(std::io::Error),
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
}

impl Server {
    /// Listens. Until a model is handed over, requests are told to come back later.
    pub fn listen(host: &str, port: u16, settings: Settings) -> Result<Running, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("kiln server")
            .enable_all()
            .build()
            .map_err(Error::Threads)?;
        let plain = host.trim_start_matches('[').trim_end_matches(']');
        let failed = |source| Error::Listen { address: format!("{host}:{port}"), source };
        let listener = runtime.block_on(TcpListener::bind((plain, port))).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let app = Arc::new(App::new(settings));
        let (stop, stopped) = watch::channel(false);
        let served = runtime.spawn(accept(listener, Arc::clone(&app), stopped));
        Ok(Running { runtime, app, address, stop, served })
    }
}

impl Running {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Hands the model over: from now on requests are served. `sequences` is how many texts the engine writes at once.
    pub fn ready(&self, scheduler: Scheduler, sequences: usize) {
        let model = Arc::clone(scheduler.model());
        let template = match Template::from_gguf(model.gguf.metadata()) {
            Ok(Some(template)) => Ok(template),
            Ok(None) => Err("this model has no chat template, so it can only continue text\n\
                             hint: use /v1/completions, or a model that was trained to chat"
                .to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let own = |id: &u32| !model.tokenizer.is_end(*id);
        let ends = match &template {
            Ok(template) => template.end_ids(&model.tokenizer).unwrap_or_default().into_iter().filter(own).collect(),
            Err(why) => {
                log::warn!("chat is not served: {}", why.lines().next().unwrap_or_default());
                Vec::new()
            }
        };
        let defaults = params::defaults(&model);
        let constraints = OnceLock::new();
        let (created, memory) = (now(), Mutex::new(None));
        self.app.set_loaded(Loaded { scheduler, template, ends, constraints, defaults, sequences, created, memory });
    }

    /// Waits until the program is asked to end (Ctrl-C, SIGTERM), then goes down as [`Running::stop`] does.
    pub fn wait(self) -> Result<(), Error> {
        self.runtime.block_on(asked_to_end());
        self.stop()
    }

    /// Takes no new requests, lets those that run finish for as long as the settings allow, and ends.
    pub fn stop(self) -> Result<(), Error> {
        let Running { runtime, app, stop, mut served, .. } = self;
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
        match ended {
            None | Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(Error::Serve(error.to_string())),
        }
    }
}

/// Takes connections until the server is told to stop, then waits for those that are open.
async fn accept(listener: TcpListener, app: Arc<App>, mut stopped: watch::Receiver<bool>) {
    let router = routes(Arc::clone(&app));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(app.settings.header_timeout);
    let open = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(app.settings.connections));
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            next = next => next,
            // An error means that the server itself is gone.
            _ = stopped.wait_for(|stop| *stop) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Too many open files, a client that is gone already: it passes.
                log::warn!("a connection could not be taken: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        // Tokens are small; waiting to send more at once would only delay them.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = open.watch(builder.serve_connection(TokioIo::new(stream), service).into_owned());
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                log::debug!("a connection ended: {error}");
            }
            drop(place);
        });
    }
    drop(listener);
    open.shutdown().await;
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
