//! A function of Python that takes part in sampling. The engine's thread calls it, so all requests wait for it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// What a hook of one request raised.
pub(crate) type Raised = Arc<Mutex<Option<PyErr>>>;

/// Makes a hook of a function that gets the tokens so far (`uint32`) and the logits of the next one (`float32`), both as bytes, and returns
/// `None`, other logits as bytes, or a token. After it has raised something it is called no more.
pub(crate) fn hook(call: Py<PyAny>) -> (impl FnMut(&[u32], &mut [f32]) -> Option<u32> + Send + 'static, Raised) {
    let raised = Raised::default();
    let told = Arc::clone(&raised);
    let hook = move |tokens: &[u32], logits: &mut [f32]| {
        let mut raised = told.lock().unwrap_or_else(PoisonError::into_inner);
        if raised.is_some() {
            return None;
        }
        // Without an interpreter, as at the end of the program, samplers choose as they would without a hook.
        Python::try_attach(|py| {
            ask(py, &call, tokens, logits).unwrap_or_else(|why| {
                *raised = Some(why);
                None
            })
        })
        .flatten()
    };
    (hook, raised)
}

/// The bytes of numbers, as the machine has them.
pub(crate) fn bytes_of<const N: usize, T: Copy>(numbers: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    numbers.iter().flat_map(|number| bytes(*number)).collect()
}

fn ask(py: Python<'_>, call: &Py<PyAny>, tokens: &[u32], logits: &mut [f32]) -> PyResult<Option<u32>> {
    let given =
        (PyBytes::new(py, &bytes_of(tokens, u32::to_ne_bytes)), PyBytes::new(py, &bytes_of(logits, f32::to_ne_bytes)));
    let said = call.bind(py).call1(given)?;
    if said.is_none() {
        return Ok(None);
    }
    let Ok(bytes) = said.cast::<PyBytes>() else { return said.extract().map(Some) };
    for (logit, bytes) in logits.iter_mut().zip(bytes.as_bytes().chunks_exact(size_of::<f32>())) {
        *logit = bytes.try_into().map_or(*logit, f32::from_ne_bytes);
    }
    Ok(None)
}
