//! The C interface of `kiln-llm`. `include/kiln.h` is its documentation; a test keeps it and this file in agreement.
//!
//! What every function with a pointer demands of its caller stands in the header: texts end with a zero byte, a model comes from `kiln_open`
//! and is not closed while a call uses it, memory has the room that is said.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kiln_llm::{Builder, Cancel, Llm, Request};

/// A loaded model, and the answers that may be cancelled.
pub struct Model {
    llm: Llm,
    running: Mutex<Vec<Running>>,
    calls: AtomicU64,
}

/// An answer that is being made.
struct Running {
    /// Which call makes it.
    call: u64,
    /// The caller's number for it.
    id: u64,
    cancel: Cancel,
}

impl Model {
    fn running(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gets each piece of an answer as JSON.
pub type Piece = Option<unsafe extern "C" fn(piece: *const c_char, user: *mut c_void) -> c_int>;

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

/// A text for C: one with a zero byte ends there.
fn c_text(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

/// Runs a call. What goes wrong, a panic too, is kept for `kiln_error`, and `failed` is returned.
fn guarded<T>(failed: T, call: impl FnOnce() -> Result<T, String>) -> T {
    ERROR.with_borrow_mut(|error| *error = CString::default());
    let done = catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err("the library panicked".to_owned()));
    done.unwrap_or_else(|why| {
        ERROR.with_borrow_mut(|error| *error = c_text(&why));
        failed
    })
}

/// A text of the caller.
///
/// # Safety
/// `text` is NULL or ends with a zero byte, and stays as it is as long as the result is used.
unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str, String> {
    if text.is_null() {
        return Err(format!("`{name}` is NULL"));
    }
    // SAFETY: it is not NULL, and the caller promises the rest.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| format!("`{name}` is not UTF-8"))
}

/// A model of the caller.
///
/// # Safety
/// `model` is NULL or comes from `kiln_open` and is not closed as long as the result is used.
unsafe fn model<'a>(model: *mut Model) -> Result<&'a Model, String> {
    // SAFETY: the caller promises that it is NULL or points to a model that is open. It is only read: what changes is behind a lock.
    unsafe { model.as_ref() }.ok_or_else(|| "the model is NULL".to_owned())
}

/// Writes as many items as there is room for. Returns how many there are.
///
/// # Safety
/// `to` is NULL or has room for `room` items.
unsafe fn write<T: Copy>(items: &[T], to: *mut T, room: usize) -> i64 {
    if !to.is_null() {
        // SAFETY: `to` has room for `room` items and no more are written; the items are the library's own, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(items.as_ptr(), to, items.len().min(room)) };
    }
    i64::try_from(items.len()).unwrap_or(i64::MAX)
}

/// The version of the library.
// SAFETY: the name is the library's own: the header reserves `kiln_`.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Why the last call of this thread failed.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_error() -> *const c_char {
    ERROR.with_borrow(|error| error.as_ptr())
}

/// Opens a model file.
///
/// # Safety
/// See kiln.h: `path` and `options` are texts; `options` may be NULL.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_open(path: *const c_char, options: *const c_char) -> *mut Model {
    guarded(std::ptr::null_mut(), || {
        // SAFETY: the caller promises that it is a text.
        let path = unsafe { text("path", path) }?;
        let builder = if options.is_null() {
            Llm::builder()
        } else {
            // SAFETY: the caller promises that it is a text, and it is not NULL.
            Builder::from_json(unsafe { text("options", options) }?).map_err(|why| why.to_string())?
        };
        let llm = builder.open(path).map_err(|why| why.to_string())?;
        Ok(Box::into_raw(Box::new(Model { llm, running: Mutex::default(), calls: AtomicU64::new(0) })))
    })
}

/// Closes a model.
///
/// # Safety
/// See kiln.h: `model` is NULL or comes from `kiln_open`, is closed once, and no call uses it.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_close(model: *mut Model) {
    guarded((), || {
        if !model.is_null() {
            // SAFETY: `kiln_open` made it with `Box::into_raw`, and the caller promises that nobody uses it any more.
            drop(unsafe { Box::from_raw(model) });
        }
        Ok(())
    });
}

/// Answers a request.
///
/// # Safety
/// See kiln.h: `model` is open, `request` is a text, `piece` is a function that may be called with `user`.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_generate(
    model: *mut Model,
    id: u64,
    request: *const c_char,
    piece: Piece,
    user: *mut c_void,
) -> c_int {
    guarded(-1, || {
        // SAFETY: the caller promises that the model is open.
        let model = unsafe { self::model(model) }?;
        // SAFETY: the caller promises that it is a text.
        let request = unsafe { text("request", request) }?;
        let tell = piece.ok_or_else(|| "`piece` is NULL".to_owned())?;
        let stream = Request::from_json(&model.llm, request).and_then(Request::stream);
        let mut stream = stream.map_err(|why| why.to_string())?;
        let cancel = stream.canceller();
        let call = model.calls.fetch_add(1, Ordering::Relaxed);
        model.running().push(Running { call, id, cancel: cancel.clone() });
        let done = stream.try_for_each(|next| {
            let said = c_text(&next.map_err(|why| why.to_string())?.to_json(&model.llm).to_string());
            // SAFETY: the caller promises that the function may be called with `user`; the text lives until it returns.
            if unsafe { tell(said.as_ptr(), user) } != 0 {
                cancel.cancel();
            }
            Ok(())
        });
        drop(stream);
        model.running().retain(|one| one.call != call);
        done.map(|()| 0)
    })
}

/// Ends answers.
///
/// # Safety
/// See kiln.h: `model` is open.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_cancel(model: *mut Model, id: u64) -> c_int {
    guarded(-1, || {
        // SAFETY: the caller promises that the model is open.
        let running = unsafe { self::model(model) }?.running();
        let meant = running.iter().filter(|one| one.id == id);
        let count = meant.inspect(|one| one.cancel.cancel()).count();
        Ok(c_int::try_from(count).unwrap_or(c_int::MAX))
    })
}

/// The vector of a text.
///
/// # Safety
/// See kiln.h: `model` is open, `text` is a text, `vector` has room for `room` numbers.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_embed(model: *mut Model, text: *const c_char, vector: *mut f32, room: usize) -> i64 {
    guarded(-1, || {
        // SAFETY: the caller promises that the model is open.
        let model = unsafe { self::model(model) }?;
        // SAFETY: the caller promises that it is a text.
        let text = unsafe { self::text("text", text) }?;
        let mut vectors = model.llm.embed(&[text]).map_err(|why| why.to_string())?;
        // SAFETY: the caller promises the room.
        Ok(unsafe { write(&vectors.pop().unwrap_or_default(), vector, room) })
    })
}

/// The tokens of a text.
///
/// # Safety
/// See kiln.h: `model` is open, `text` is a text, `tokens` has room for `room` tokens.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_tokenize(model: *mut Model, text: *const c_char, tokens: *mut u32, room: usize) -> i64 {
    guarded(-1, || {
        // SAFETY: the caller promises that the model is open.
        let model = unsafe { self::model(model) }?;
        // SAFETY: the caller promises that it is a text.
        let text = unsafe { self::text("text", text) }?;
        let found = model.llm.tokenize(text).map_err(|why| why.to_string())?;
        // SAFETY: the caller promises the room.
        Ok(unsafe { write(&found, tokens, room) })
    })
}

/// The text of tokens.
///
/// # Safety
/// See kiln.h: `model` is open, `tokens` holds `count` tokens, `text` has room for `room` bytes.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_detokenize(
    model: *mut Model,
    tokens: *const u32,
    count: usize,
    text: *mut c_char,
    room: usize,
) -> i64 {
    guarded(-1, || {
        // SAFETY: the caller promises that the model is open.
        let model = unsafe { self::model(model) }?;
        let tokens = match (tokens.is_null(), count) {
            (_, 0) => &[],
            (true, _) => return Err("`tokens` is NULL".to_owned()),
            // SAFETY: it is not NULL, and the caller promises that it holds `count` tokens.
            (false, _) => unsafe { std::slice::from_raw_parts(tokens, count) },
        };
        let found = model.llm.detokenize(tokens).map_err(|why| why.to_string())?;
        if !text.is_null() && room > 0 {
            let mut kept = found.len().min(room - 1);
            // A character is not cut in two.
            while !found.is_char_boundary(kept) {
                kept -= 1;
            }
            // SAFETY: the caller promises the room, and `kept` bytes and the zero byte are no more.
            unsafe {
                std::ptr::copy_nonoverlapping(found.as_ptr(), text.cast(), kept);
                text.add(kept).write(0);
            }
        }
        Ok(i64::try_from(found.len()).unwrap_or(i64::MAX))
    })
}

/// Most tokens of one sequence; 0 where the model is NULL.
///
/// # Safety
/// See kiln.h: `model` is open.
// SAFETY: the name is the library's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_context(model: *mut Model) -> usize {
    // SAFETY: the caller promises that the model is open.
    guarded(0, || unsafe { self::model(model) }.map(|model| model.llm.context()))
}
