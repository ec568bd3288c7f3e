//! Clients that close their side of a connection after they have asked. Some have gone, and their requests should end; some still
//! listen, as `nc -N` does. To the server both look the same, until it writes: a machine whose client has gone refuses what comes.
//!
//! So something is written. Where nothing of the answer is out yet, that is an interim answer, which HTTP/1.1 allows at any time and
//! clients pass over; where the answer has begun, it is what the answer says next.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::Version;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};
use tokio_io_timeout::TimeoutStream;

use crate::connections::{Connection, InFlight};

/// How often it is looked whether a client has gone after all.
const TICK: Duration = Duration::from_millis(25);
/// A client that nothing was written to for so long after it closed its side is taken to be gone.
const FAREWELL: Duration = Duration::from_millis(100);
const PROBE: &[u8] = b"HTTP/1.1 102 Processing\r\n\r\n";

/// What a connection is at, as its requests tell it.
pub(crate) struct ConnectionState {
    connection: Arc<Connection>,
    /// How long it may have no request in flight: before the first one, and after others.
    patience: [Duration; 2],
    /// A request is being answered.
    busy: AtomicBool,
    /// It was asked in HTTP/1.1: an answer may have interim ones before it.
    interim: AtomicBool,
    /// Something of its answer is written.
    begun: AtomicBool,
}

impl ConnectionState {
    pub(crate) fn of(connection: &Arc<Connection>, patience: [Duration; 2]) -> Arc<ConnectionState> {
        let [busy, interim, begun] = [false; 3].map(AtomicBool::new);
        Arc::new(ConnectionState { connection: Arc::clone(connection), patience, busy, interim, begun })
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// A request has come; none where its connection was closed just before.
    pub(crate) fn asked(&self, version: Version) -> Option<InFlight> {
        self.begun.store(false, Ordering::Relaxed);
        self.interim.store(version == Version::HTTP_11, Ordering::Relaxed);
        self.busy.store(true, Ordering::Relaxed);
        self.connection.begin()
    }

    /// Ends when the connection has been idle for too long.
    pub(crate) async fn idle(&self) {
        let [first, later] = self.patience;
        self.connection.idle_for(first, later).await;
    }
}

/// The body of an answer; when it is over, so is the request.
pub(crate) struct TrackedBody {
    pub(crate) body: axum::body::Body,
    pub(crate) state: Arc<ConnectionState>,
    pub(crate) _in_flight: InFlight,
}

impl Body for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.state.busy.store(false, Ordering::Relaxed);
    }
}

/// Since a client has closed its side while it is being answered.
struct Probe {
    since: Instant,
    tick: Pin<Box<Sleep>>,
    /// Something was written to it since.
    wrote: bool,
}

/// A connection that does not end with what its client sends, where the client still listens.
pub(crate) struct HalfClose {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    state: Arc<ConnectionState>,
    probe: Option<Probe>,
}

impl HalfClose {
    pub(crate) fn new(stream: Pin<Box<TimeoutStream<TcpStream>>>, state: Arc<ConnectionState>) -> HalfClose {
        HalfClose { stream, state, probe: None }
    }

    /// Finds out whether the client is there, where nothing else will be written soon. `false`: it takes nothing.
    fn probe(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.state.interim.load(Ordering::Relaxed) || self.state.begun.load(Ordering::Relaxed) {
            return true;
        }
        let wrote = matches!(self.stream.as_mut().poll_write(cx, PROBE), Poll::Ready(Ok(n)) if n == PROBE.len());
        if let Some(probe) = &mut self.probe {
            probe.wrote = wrote;
        }
        wrote
    }

    /// Whether the client has gone, or has got all that it waited for.
    fn is_over(&self, probe: &Probe) -> bool {
        let refused = !matches!(self.stream.get_ref().take_error(), Ok(None));
        let unheard = !probe.wrote && probe.since.elapsed() >= FAREWELL;
        refused || unheard || !self.state.busy.load(Ordering::Relaxed)
    }

    fn wrote(&mut self) {
        self.state.begun.store(true, Ordering::Relaxed);
        if let Some(probe) = &mut self.probe {
            probe.wrote = true;
        }
    }
}

impl AsyncRead for HalfClose {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.probe.is_none() {
            let before = buf.filled().len();
            ready!(self.stream.as_mut().poll_read(cx, buf))?;
            let ended = buf.filled().len() == before && buf.remaining() > 0;
            if !ended || !self.state.busy.load(Ordering::Relaxed) {
                return Poll::Ready(Ok(()));
            }
            self.probe = Some(Probe { since: Instant::now(), tick: Box::pin(sleep(TICK)), wrote: false });
            if !self.probe(cx) {
                return Poll::Ready(Ok(()));
            }
        }
        loop {
            let Some(mut probe) = self.probe.take() else { return Poll::Ready(Ok(())) };
            let ticked = probe.tick.as_mut().poll(cx).is_ready();
            let over = ticked && self.is_over(&probe);
            if ticked {
                probe.tick.as_mut().reset(Instant::now() + TICK);
            }
            self.probe = Some(probe);
            match (ticked, over) {
                (false, _) => return Poll::Pending,
                (true, true) => return Poll::Ready(Ok(())),
                (true, false) => {}
            }
        }
    }
}

impl AsyncWrite for HalfClose {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(self.stream.as_mut().poll_write(cx, bytes));
        self.wrote();
        Poll::Ready(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.stream.as_mut().poll_write_vectored(cx, pieces));
        self.wrote();
        Poll::Ready(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
