//! The pieces of an answer: for threads, which wait for each, and for tasks, which are woken.

use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use kiln_llm::{AsyncStream, Cancel, Llm, Stream};
use pyo3::prelude::*;

use crate::hook::Raised;
use crate::{PATIENCE, error};

/// The pieces of an answer, each a JSON object. Iterating waits for the next one.
#[pyclass(frozen)]
pub(crate) struct Pieces {
    stream: Mutex<Option<Stream>>,
    cancel: Cancel,
    raised: Raised,
    llm: Llm,
}

impl Pieces {
    pub(crate) fn new(llm: Llm, stream: Stream, raised: Raised) -> Pieces {
        Pieces { cancel: stream.canceller(), stream: Mutex::new(Some(stream)), raised, llm }
    }
}

/// Raises what a hook has raised.
fn check(raised: &Raised, cancel: &Cancel) -> PyResult<()> {
    match raised.lock().unwrap_or_else(PoisonError::into_inner).take() {
        None => Ok(()),
        Some(why) => {
            cancel.cancel();
            Err(why)
        }
    }
}

#[pymethods]
impl Pieces {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        loop {
            // Ctrl-C raises `KeyboardInterrupt` here. Whoever catches it may go on reading.
            py.check_signals()?;
            let waited = py.detach(|| {
                let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(open) = stream.as_mut() else { return (None, true) };
                let piece = open.next_within(PATIENCE);
                let over = piece.is_none() && open.is_over();
                (piece.map(|piece| piece.map(|piece| piece.to_json(&self.llm).to_string())), over)
            });
            check(&self.raised, &self.cancel)?;
            match waited {
                (Some(Ok(piece)), _) => return Ok(Some(piece)),
                (Some(Err(why)), _) => return Err(error(&why)),
                (None, true) => return Ok(None),
                (None, false) => {}
            }
        }
    }

    /// Ends the answer early, from any thread: its last piece says so.
    fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Ends the answer, and nothing comes any more.
    fn close(&self, py: Python<'_>) {
        self.cancel.cancel();
        py.detach(|| drop(self.stream.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

impl Drop for Pieces {
    fn drop(&mut self) {
        let stream = self.stream.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        leave(stream);
    }
}

/// Drops what may wait for the engine's thread, which may be waiting for Python's lock in a hook.
pub(crate) fn leave<T: Send>(what: T) {
    let mut what = Some(what);
    Python::try_attach(|py| py.detach(|| drop(what.take())));
    drop(what);
}

/// The pieces of an answer for a task.
#[pyclass(frozen)]
pub(crate) struct AsyncPieces {
    stream: Mutex<Option<AsyncStream>>,
    cancel: Cancel,
    raised: Raised,
    llm: Llm,
}

impl AsyncPieces {
    pub(crate) fn new(llm: Llm, stream: Stream, raised: Raised) -> AsyncPieces {
        let cancel = stream.canceller();
        AsyncPieces { cancel, stream: Mutex::new(Some(stream.into_async())), raised, llm }
    }
}

#[pymethods]
impl AsyncPieces {
    /// The pieces that are there, each a JSON object; `None` after the last. Where there is none yet, the list is empty, and `wake` is called
    /// once when there is, on another thread.
    fn poll(&self, py: Python<'_>, wake: Py<PyAny>) -> PyResult<Option<Vec<String>>> {
        let waker = crate::wake::waker(wake);
        let polled = py.detach(|| {
            let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(open) = stream.as_mut() else { return Ok(None) };
            let mut context = Context::from_waker(&waker);
            let mut pieces = Vec::new();
            loop {
                match futures_core::Stream::poll_next(Pin::new(&mut *open), &mut context) {
                    Poll::Ready(Some(Ok(piece))) => pieces.push(piece.to_json(&self.llm).to_string()),
                    Poll::Ready(Some(Err(why))) => return Err(why),
                    Poll::Ready(None) if pieces.is_empty() => return Ok(None),
                    Poll::Ready(None) | Poll::Pending => return Ok(Some(pieces)),
                }
            }
        });
        check(&self.raised, &self.cancel)?;
        polled.map_err(|why| error(&why))
    }

    /// Ends the answer early.
    fn cancel(&self) {
        self.cancel.cancel();
    }

    /// Ends the answer, and nothing comes any more.
    fn close(&self, py: Python<'_>) {
        self.cancel.cancel();
        py.detach(|| drop(self.stream.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

impl Drop for AsyncPieces {
    fn drop(&mut self) {
        let stream = self.stream.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        leave(stream);
    }
}
