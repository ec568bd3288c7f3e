//! Wakes tasks of Python. The engine's thread must not wait for Python's lock, so another thread takes it and calls.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Wake, Waker};

use pyo3::prelude::*;

/// A function that wakes a task; it is called once.
struct Callback(Mutex<Option<Py<PyAny>>>);

impl Wake for Callback {
    fn wake(self: Arc<Self>) {
        let call = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let (Some(call), Some(caller)) = (call, caller()) {
            // Where the thread has ended, so has the program.
            let _ = caller.send(call);
        }
    }
}

/// The way to the thread that calls.
fn caller() -> Option<Sender<Py<PyAny>>> {
    static CALLER: OnceLock<Option<Sender<Py<PyAny>>>> = OnceLock::new();
    let start = || {
        let (sender, calls) = channel::<Py<PyAny>>();
        let work = move || {
            for call in calls {
                // A loop that was closed meanwhile raises an error, and has no task left to wake.
                let called = Python::try_attach(|py| drop(call.call0(py)));
                if called.is_none() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("wake tasks".into()).spawn(work).ok().map(|_| sender)
    };
    CALLER.get_or_init(start).clone()
}

/// A waker that calls a function of Python.
pub(crate) fn waker(call: Py<PyAny>) -> Waker {
    Arc::new(Callback(Mutex::new(Some(call)))).into()
}
