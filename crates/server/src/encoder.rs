//! Answers on the wire: server-sent events and lines of JSON, with signs of life while nothing else is to be said.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::mpsc::Receiver;

use crate::api_error::ApiError;
use crate::app::App;
use crate::generate::{Generation, Part};

/// How one API writes what happens. Everything it says is a pure function of the parts it sees.
pub(crate) trait ResponseEncoder: Send + 'static {
    /// What is said before anything has happened.
    fn begin(&mut self, out: &mut Frames);
    /// What is said of a part; a failure comes last.
    fn part(&mut self, part: Part, out: &mut Frames);
    /// What is said after all texts have ended well.
    fn finish(&mut self, out: &mut Frames);
}

/// How frames are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// `data: {...}` and an empty line; comments are signs of life.
    Events,
    /// One JSON value a line.
    Lines,
}

/// What goes out next.
#[derive(Debug)]
pub(crate) struct Frames {
    framing: Framing,
    bytes: Vec<u8>,
}

impl Frames {
    pub(crate) fn new(framing: Framing) -> Frames {
        Frames { framing, bytes: Vec::new() }
    }

    /// A value.
    pub(crate) fn data(&mut self, value: &Value) {
        if self.framing == Framing::Events {
            self.bytes.extend_from_slice(b"data: ");
        }
        // JSON has no line ends of its own: serde_json escapes those in strings.
        self.bytes.extend_from_slice(value.to_string().as_bytes());
        self.bytes.extend_from_slice(if self.framing == Framing::Events { b"\n\n" } else { b"\n" });
    }

    /// A value with the name of its event.
    pub(crate) fn event(&mut self, name: &str, value: &Value) {
        self.bytes.extend_from_slice(format!("event: {name}\n").as_bytes());
        self.data(value);
    }

    /// The end of OpenAI's streams.
    pub(crate) fn done(&mut self) {
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// What was said so far.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// What was said, as all of an answer.
    pub(crate) fn whole(self) -> Response {
        with_headers(self.bytes.into_response(), self.framing)
    }

    #[cfg(test)]
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

struct Streaming<W> {
    app: Arc<App>,
    generation: Generation,
    encoder: W,
    frames: Frames,
    over: bool,
}

impl<W: ResponseEncoder> Streaming<W> {
    /// The next bytes: all that has happened so far goes out at once.
    async fn next(mut self) -> Option<(Result<Vec<u8>, Infallible>, Self)> {
        while self.frames.bytes.is_empty() {
            if self.over {
                return None;
            }
            let next = tokio::time::timeout(self.app.settings.keep_alive, self.generation.next());
            let next = tokio::select! {
                biased;
                next = next => next,
                refusal = self.app.shutdown.over() => Ok(Some(Part::Failed(refusal))),
            };
            match next {
                Ok(part) => {
                    self.take(part);
                    while let Some(part) = self.generation.try_next() {
                        self.take(Some(part));
                    }
                }
                Err(_) if self.frames.framing == Framing::Events => self.frames.bytes.extend_from_slice(b":\n\n"),
                Err(_) => {}
            }
        }
        let bytes = std::mem::take(&mut self.frames.bytes);
        Some((Ok(bytes), self))
    }

    fn take(&mut self, part: Option<Part>) {
        match part {
            Some(part) => {
                self.over |= matches!(part, Part::Failed(_));
                self.encoder.part(part, &mut self.frames);
            }
            None if !self.over => {
                self.over = true;
                self.encoder.finish(&mut self.frames);
            }
            None => {}
        }
    }
}

/// What happens up to the first token, or its time is over: a gateway may still ask another server. A failure within is a plain answer.
async fn before_headers(generation: &mut Generation, most: Duration) -> Result<Vec<Part>, ApiError> {
    let (mut early, end) = (Vec::new(), tokio::time::Instant::now() + most);
    while !most.is_zero()
        && let Ok(Some(part)) = tokio::time::timeout_at(end, generation.next()).await
    {
        if let Part::Failed(refusal) = part {
            return Err(refusal);
        }
        let waits = matches!(part, Part::Progress { .. });
        early.push(part);
        if !waits {
            break;
        }
    }
    Ok(early)
}

/// An answer that is written while it is made. The generation ends when the client goes.
pub(crate) async fn stream(
    app: &Arc<App>,
    mut generation: Generation,
    mut encoder: impl ResponseEncoder,
    framing: Framing,
) -> Result<Response, ApiError> {
    let early = before_headers(&mut generation, app.settings.late_headers).await?;
    let mut frames = Frames::new(framing);
    encoder.begin(&mut frames);
    early.into_iter().for_each(|part| encoder.part(part, &mut frames));
    let streaming = Streaming { app: Arc::clone(app), generation, encoder, frames, over: false };
    let body = Body::from_stream(futures_util::stream::unfold(streaming, Streaming::next));
    Ok(with_headers(body.into_response(), framing))
}

/// Bytes that a thread makes, with signs of life while it has nothing to say.
pub(crate) fn relay(from: Receiver<Vec<u8>>, framing: Framing, keep_alive: Duration) -> Response {
    let next = move |mut from: Receiver<Vec<u8>>| async move {
        let bytes = match tokio::time::timeout(keep_alive, from.recv()).await {
            Ok(bytes) => bytes?,
            Err(_) => b":\n\n".to_vec(),
        };
        Some((Ok::<_, Infallible>(bytes), from))
    };
    with_headers(Body::from_stream(futures_util::stream::unfold(from, next)).into_response(), framing)
}

/// The headers of a stream.
fn with_headers(mut response: Response, framing: Framing) -> Response {
    let kind = match framing {
        Framing::Events => "text/event-stream",
        Framing::Lines => "application/x-ndjson",
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies would hold the pieces back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A value as the whole answer.
pub(crate) fn json(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}
