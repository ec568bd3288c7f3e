//! A loaded model.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};

use kiln_gguf::Value;
use kiln_llm::{AddSpecial, Builder, EmbedOptions, Length, Llm, ParseSpecial, Pooling, Request, ShowSpecial};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::{Map, json};

use crate::hook::{Raised, bytes_of, hook};
use crate::pieces::{AsyncPieces, Pieces, leave};
use crate::{PATIENCE, error};

/// A loaded model, which threads may share.
#[pyclass(frozen)]
pub(crate) struct Model(Mutex<Option<Llm>>);

/// Works on another thread and looks for Ctrl-C meanwhile. Work that is given up ends by itself.
fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> Result<T, kiln_llm::Error> + Send + 'static,
) -> PyResult<T> {
    let (sender, done) = channel();
    let run = move || drop(sender.send(work()));
    let started = std::thread::Builder::new().name("kiln".into()).spawn(run);
    started.map_err(|why| PyRuntimeError::new_err(format!("cannot start a thread: {why}")))?;
    // A receiver stays on its thread, so it is lent behind a lock.
    let done = Mutex::new(done);
    loop {
        let waited = py.detach(|| done.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(PATIENCE));
        match waited {
            Ok(done) => return done.map_err(|why| error(&why)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Err(PyRuntimeError::new_err("the library panicked")),
        }
    }
}

impl Model {
    fn llm(&self) -> PyResult<Llm> {
        let llm = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        llm.clone().ok_or_else(|| PyValueError::new_err("the model is closed"))
    }

    /// Sends a request.
    fn send(
        &self,
        py: Python<'_>,
        request: &str,
        call: Option<Py<PyAny>>,
    ) -> PyResult<(Llm, kiln_llm::Stream, Raised)> {
        let llm = self.llm()?;
        let sent = py.detach(|| {
            let mut request = Request::from_json(&llm, request)?;
            let mut raised = Raised::default();
            if let Some(call) = call {
                let (hook, told) = hook(call);
                (request, raised) = (request.sampler(hook), told);
            }
            Ok((request.stream()?, raised))
        });
        let (stream, raised) = sent.map_err(|why: kiln_llm::Error| error(&why))?;
        Ok((llm, stream, raised))
    }
}

#[pymethods]
impl Model {
    /// Opens a model file. `options` are JSON; `note` is called with each thing that there is to tell, as a text.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf, options: String, note: Option<Py<PyAny>>) -> PyResult<Model> {
        let llm = interruptible(py, move || {
            let mut builder = Builder::from_json(&options)?;
            if let Some(call) = note {
                builder = builder.on_note(move |said| {
                    Python::try_attach(|py| drop(call.call1(py, (said.to_string(),))));
                });
            }
            builder.open(path)
        })?;
        Ok(Model(Mutex::new(Some(llm))))
    }

    /// What there is to know of the model, as JSON.
    fn facts(&self) -> PyResult<String> {
        let llm = self.llm()?;
        let (model, vocab) = (llm.model(), llm.model().tokenizer.vocab());
        let metadata = model.gguf.metadata();
        let mut said = Map::new();
        for (key, value) in metadata.iter() {
            let text = match value {
                Value::Array(_) => continue,
                Value::Str(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                other => other.to_string(),
            };
            said.insert(key.to_owned(), text.into());
        }
        let facts = json!({
            "name": llm.name(),
            "device": llm.device(),
            "context": llm.context(),
            "trained_context": model.config.context,
            "parallel": llm.parallel(),
            "vocab": model.config.vocab,
            "hidden": model.config.hidden,
            "layers": model.config.layers,
            "bos": vocab.bos,
            "eos": vocab.eos,
            "eot": vocab.eot,
            "template": llm.chat_setup().template.as_ref().map(|template| template.source()).ok(),
            "metadata": said,
        });
        Ok(facts.to_string())
    }

    /// Sends a request, which is JSON. `call` takes part in sampling.
    #[pyo3(signature = (request, call=None))]
    fn generate(&self, py: Python<'_>, request: &str, call: Option<Py<PyAny>>) -> PyResult<Pieces> {
        let (llm, stream, raised) = self.send(py, request, call)?;
        Ok(Pieces::new(llm, stream, raised))
    }

    /// The same for a task.
    #[pyo3(signature = (request, call=None))]
    fn generate_async(&self, py: Python<'_>, request: &str, call: Option<Py<PyAny>>) -> PyResult<AsyncPieces> {
        let (llm, stream, raised) = self.send(py, request, call)?;
        Ok(AsyncPieces::new(llm, stream, raised))
    }

    /// The vectors of texts as bytes of `float32`, of length 1 where `normalize` says so.
    fn embed<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<String>,
        pooling: Option<&str>,
        normalize: bool,
        truncate: bool,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let named = |name| {
            let known = Pooling::from_name(name);
            known.ok_or_else(|| PyValueError::new_err(format!("pooling must be one of {}", Pooling::names())))
        };
        let pooling = pooling.map(named).transpose()?;
        let length = Some(Length::from_number(if normalize { 2 } else { -1 }));
        let llm = self.llm()?;
        let options = EmbedOptions { pooling, length, truncate };
        let vectors = interruptible(py, move || llm.embed_with(&texts, options))?;
        Ok(vectors.iter().map(|vector| PyBytes::new(py, &bytes_of(vector, f32::to_ne_bytes))).collect())
    }

    /// The tokens of a text: whether special ones are added around it, and whether spellings of such become them.
    fn tokenize(&self, py: Python<'_>, text: &str, add: bool, special: bool) -> PyResult<Vec<u32>> {
        let llm = self.llm()?;
        let add = if add { AddSpecial::Yes } else { AddSpecial::No };
        let parse = if special { ParseSpecial::Yes } else { ParseSpecial::No };
        py.detach(|| llm.tokenize_with(text, add, parse)).map_err(|why| error(&why))
    }

    /// The bytes of tokens.
    fn detokenize<'py>(&self, py: Python<'py>, tokens: Vec<u32>, special: bool) -> PyResult<Bound<'py, PyBytes>> {
        let show = if special { ShowSpecial::Yes } else { ShowSpecial::No };
        let bytes = self.llm()?.detokenize_bytes_with(&tokens, show);
        Ok(PyBytes::new(py, &bytes.map_err(|why| error(&why))?))
    }

    /// The logits behind each token as bytes of `float32`, row by row.
    fn logits<'py>(&self, py: Python<'py>, tokens: Vec<u32>) -> PyResult<Bound<'py, PyBytes>> {
        let llm = self.llm()?;
        let rows = interruptible(py, move || llm.logits(&tokens))?;
        Ok(PyBytes::new(py, &bytes_of(&rows.concat(), f32::to_ne_bytes)))
    }

    /// Gives back what the model takes, as soon as its last answer has ended.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.0.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        let llm = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        leave(llm);
    }
}
