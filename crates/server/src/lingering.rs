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

/// How often it is looked whether a client has gone after all.
const TICK: Duration = Duration::from_millis(25);
/// A client that nothing was written to for so long after it closed its side is taken to be gone.
const FAREWELL: Duration = Duration::from_millis(100);
const PROBE: &[u8] = b"HTTP/1.1 102 Processing\r\n\r\n";

/// What a connection is at, as its requests tell it.
#[derive(Default)]
pub(crate) struct Talk {
    /// A request is being answered.
    busy: AtomicBool,
    /// It was asked in HTTP/1.1: an answer may have interim ones before it.
    interim: AtomicBool,
    /// Something of its answer is written.
    begun: AtomicBool,
}

impl Talk {
    /// A request has come.
    pub(crate) fn asked(&self, version: Version) {
        self.begun.store(false, Ordering::Relaxed);
        self.interim.store(version == Version::HTTP_11, Ordering::Relaxed);
        self.busy.store(true, Ordering::Relaxed);
    }
}

/// The body of an answer; when it is over, so is the request.
pub(crate) struct Spoken {
    pub(crate) body: axum::body::Body,
    pub(crate) talk: Arc<Talk>,
}

impl Body for Spoken {
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

impl Drop for Spoken {
    fn drop(&mut self) {
        self.talk.busy.store(false, Ordering::Relaxed);
    }
}

/// Since a client has closed its side while it is being answered.
struct Farewell {
    since: Instant,
    tick: Pin<Box<Sleep>>,
    /// Something was written to it since.
    wrote: bool,
}

/// A connection that does not end with what its client sends, where the client still listens.
pub(crate) struct Lingering {
    stream: Pin<Box<TimeoutStream<TcpStream>>>,
    talk: Arc<Talk>,
    farewell: Option<Farewell>,
}

impl Lingering {
    pub(crate) fn new(stream: Pin<Box<TimeoutStream<TcpStream>>>, talk: Arc<Talk>) -> Lingering {
        Lingering { stream, talk, farewell: None }
    }

    /// Finds out whether the client is there, where nothing else will be written soon. `false`: it takes nothing.
    fn probe(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.talk.interim.load(Ordering::Relaxed) || self.talk.begun.load(Ordering::Relaxed) {
            return true;
        }
        let wrote = matches!(self.stream.as_mut().poll_write(cx, PROBE), Poll::Ready(Ok(n)) if n == PROBE.len());
        if let Some(farewell) = &mut self.farewell {
            farewell.wrote = wrote;
        }
        wrote
    }

    /// Whether the client has gone, or has got all that it waited for.
    fn is_over(&self, farewell: &Farewell) -> bool {
        let refused = !matches!(self.stream.get_ref().take_error(), Ok(None));
        let unheard = !farewell.wrote && farewell.since.elapsed() >= FAREWELL;
        refused || unheard || !self.talk.busy.load(Ordering::Relaxed)
    }

    fn wrote(&mut self) {
        self.talk.begun.store(true, Ordering::Relaxed);
        if let Some(farewell) = &mut self.farewell {
            farewell.wrote = true;
        }
    }
}

impl AsyncRead for Lingering {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.farewell.is_none() {
            let before = buf.filled().len();
            ready!(self.stream.as_mut().poll_read(cx, buf))?;
            let ended = buf.filled().len() == before && buf.remaining() > 0;
            if !ended || !self.talk.busy.load(Ordering::Relaxed) {
                return Poll::Ready(Ok(()));
            }
            self.farewell = Some(Farewell { since: Instant::now(), tick: Box::pin(sleep(TICK)), wrote: false });
            if !self.probe(cx) {
                return Poll::Ready(Ok(()));
            }
        }
        loop {
            let Some(mut farewell) = self.farewell.take() else { return Poll::Ready(Ok(())) };
            let ticked = farewell.tick.as_mut().poll(cx).is_ready();
            let over = ticked && self.is_over(&farewell);
            if ticked {
                farewell.tick.as_mut().reset(Instant::now() + TICK);
            }
            self.farewell = Some(farewell);
            match (ticked, over) {
                (false, _) => return Poll::Pending,
                (true, true) => return Poll::Ready(Ok(())),
                (true, false) => {}
            }
        }
    }
}

impl AsyncWrite for Lingering {
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
