//! Listening, loading, and going down without losing what is being written.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kiln_engine::run::Scheduler;
use kiln_engine::text::Template;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
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
    served: JoinHandle<Result<(), std::io::Error>>,
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
        let (stop, mut stopped) = watch::channel(false);
        let router = routes(Arc::clone(&app));
        let served = runtime.spawn(async move {
            axum::serve(listener, router)
                .with_graceful_shutdown(async move {
                    // An error means that the server itself is gone.
                    let _ = stopped.wait_for(|stop| *stop).await;
                })
                .await
        });
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
        self.app.set_loaded(Loaded { scheduler, template, ends, constraints, defaults, sequences, created: now() });
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
            None => Ok(()),
            Some(Ok(Ok(()))) => Ok(()),
            Some(Ok(Err(error))) => Err(Error::Serve(error.to_string())),
            Some(Err(error)) => Err(Error::Serve(error.to_string())),
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
