//! The pieces of an answer as they come: an iterator for threads, and a `futures` stream for tasks.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kiln_engine::run::{self, Cancel, Event, Usage};
use kiln_engine::sampler::Logprobs;
use kiln_engine::text;

use crate::Error;
use crate::chat::{AnswerReader, Stop};
use crate::llm::Llm;

/// A piece of an answer.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Piece {
    /// Tokens of the prompt processed so far.
    Prompt(usize),
    /// A token was chosen, where the request asked for tokens. Its text comes with a later piece, as soon as it is certain.
    Token(Token),
    /// Text for the reader.
    Text(String),
    /// What the model thinks.
    Reasoning(String),
    /// A tool call begins.
    CallStart {
        /// Its number in the answer.
        index: usize,
        /// Its id, where the model writes one.
        id: Option<String>,
        /// The tool.
        name: String,
    },
    /// A piece of a call's arguments, which are JSON.
    CallArguments {
        /// The call's number.
        index: usize,
        /// The piece.
        text: String,
    },
    /// A call is complete.
    CallEnd {
        /// The call's number.
        index: usize,
    },
    /// The answer is over; nothing comes after it.
    End {
        /// Why.
        stop: Stop,
        /// Counts and times.
        usage: Usage,
    },
}

impl Piece {
    /// The text for the reader, if it is such a piece.
    pub fn text(&self) -> &str {
        if let Piece::Text(text) = self { text } else { "" }
    }
}

/// A token of an answer.
#[derive(Clone, Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Logarithms of probability, where they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Its id, where the model writes one.
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// The arguments, as JSON.
    pub arguments: String,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The text for the reader.
    pub text: String,
    /// What the model thought.
    pub reasoning: String,
    /// The tools that it calls.
    pub calls: Vec<Call>,
    /// The tokens, where the request asked for them.
    pub tokens: Vec<Token>,
    /// Why it ended.
    pub stop: Stop,
    /// Counts and times.
    pub usage: Usage,
}

/// Events on their way from the engine's thread.
#[derive(Default)]
struct Queue {
    state: Mutex<Pending>,
    came: Condvar,
}

#[derive(Default)]
struct Pending {
    events: VecDeque<Event>,
    waker: Option<Waker>,
    /// The engine holds no sender any more.
    closed: bool,
}

impl Queue {
    fn change(&self, change: impl FnOnce(&mut Pending)) {
        let mut pending = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut pending);
        let waker = pending.waker.take();
        drop(pending);
        self.came.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The engine's end of a queue.
struct Sender(Arc<Queue>);

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.change(|pending| pending.closed = true);
    }
}

/// The pieces of one answer: an [`Iterator`] that waits for each. Dropping it ends the request. Tasks take [`Stream::into_async`].
pub struct Stream {
    queue: Arc<Queue>,
    cancel: Cancel,
    reader: AnswerReader,
    ready: VecDeque<Result<Piece, Error>>,
    tokens: bool,
    silent: bool,
    over: bool,
    /// The model stays as long as somebody listens.
    _llm: Llm,
}

impl Stream {
    pub(crate) fn start(llm: Llm, request: run::Request, reader: AnswerReader, tokens: bool, silent: bool) -> Stream {
        let queue = Arc::<Queue>::default();
        let sender = Sender(Arc::clone(&queue));
        let cancel = llm.scheduler().submit(request, move |event| {
            sender.0.change(|pending| pending.events.push_back(event));
            true
        });
        Stream { queue, cancel, reader, ready: VecDeque::new(), tokens, silent, over: false, _llm: llm }
    }

    /// Ends the answer early, from any thread: its last piece says [`Stop::Cancelled`].
    pub fn canceller(&self) -> Cancel {
        self.cancel.clone()
    }

    /// The next piece, if one comes within this time. `None` means that none came; see [`Stream::is_over`].
    pub fn next_within(&mut self, time: Duration) -> Option<Result<Piece, Error>> {
        let end = Instant::now() + time;
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(piece);
            }
            let left = end.saturating_duration_since(Instant::now());
            if self.over || left.is_zero() {
                return None;
            }
            let pending = self.queue.state.lock().unwrap_or_else(PoisonError::into_inner);
            let idle = |pending: &mut Pending| pending.events.is_empty() && !pending.closed;
            let waited = self.queue.came.wait_timeout_while(pending, left, idle);
            let (pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
            drop(pending);
            self.take_events();
        }
    }

    /// Whether the last piece was taken.
    pub fn is_over(&self) -> bool {
        self.over && self.ready.is_empty()
    }

    /// The same for tasks.
    pub fn into_async(self) -> AsyncStream {
        AsyncStream(self)
    }

    /// Waits for the whole answer.
    pub fn collect_answer(mut self) -> Result<Answer, Error> {
        let mut answer = Answer {
            text: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            tokens: Vec::new(),
            stop: Stop::Cancelled,
            usage: Usage::default(),
        };
        for piece in &mut self {
            match piece? {
                Piece::Prompt(_) | Piece::CallEnd { .. } => {}
                Piece::Token(token) => answer.tokens.push(token),
                Piece::Text(text) => answer.text += &text,
                Piece::Reasoning(text) => answer.reasoning += &text,
                Piece::CallStart { id, name, .. } => {
                    answer.calls.push(Call { id, name, arguments: String::new() });
                }
                Piece::CallArguments { index, text } => {
                    if let Some(call) = answer.calls.get_mut(index) {
                        call.arguments += &text;
                    }
                }
                Piece::End { stop, usage } => (answer.stop, answer.usage) = (stop, usage),
            }
        }
        Ok(answer)
    }

    /// Makes pieces of all events that are there.
    fn take_events(&mut self) {
        let (events, closed) = {
            let mut pending = self.queue.state.lock().unwrap_or_else(PoisonError::into_inner);
            (std::mem::take(&mut pending.events), pending.closed)
        };
        for event in events {
            self.read(event);
        }
        if closed && !self.over {
            self.over = true;
            self.ready.push_back(Err(kiln_engine::Error::Stopped.into()));
        }
    }

    fn read(&mut self, event: Event) {
        match event {
            Event::Started { cached_tokens } => self.ready.push_back(Ok(Piece::Prompt(cached_tokens))),
            Event::Read { tokens } => self.ready.push_back(Ok(Piece::Prompt(tokens))),
            Event::Token { .. } if self.silent => {}
            Event::Token { token, text, logprobs, .. } => {
                if self.tokens {
                    self.ready.push_back(Ok(Piece::Token(Token { id: token, logprobs })));
                }
                let events = self.reader.push(&text);
                self.tell(events);
            }
            Event::End { usage, .. } if self.silent => {
                let usage = Usage { generated_tokens: 0, ..usage };
                self.ready.push_back(Ok(Piece::End { stop: Stop::Limit, usage }));
                self.over = true;
            }
            Event::End { text, reason, usage, .. } => {
                let events = self.reader.end(&text, &reason);
                self.tell(events);
                self.ready.push_back(Ok(Piece::End { stop: self.reader.stop(reason), usage }));
                self.over = true;
            }
            Event::Failed(why) => {
                self.ready.push_back(Err(why.into()));
                self.over = true;
            }
        }
    }

    fn tell(&mut self, events: Vec<text::Event>) {
        self.ready.extend(events.into_iter().map(|event| {
            Ok(match event {
                text::Event::Content(text) => Piece::Text(text),
                text::Event::Reasoning(text) => Piece::Reasoning(text),
                text::Event::CallStart { index, id, name } => Piece::CallStart { index, id, name },
                text::Event::CallArguments { index, text } => Piece::CallArguments { index, text },
                text::Event::CallEnd { index } => Piece::CallEnd { index },
            })
        }));
    }
}

impl Iterator for Stream {
    type Item = Result<Piece, Error>;

    fn next(&mut self) -> Option<Result<Piece, Error>> {
        loop {
            let piece = self.next_within(Duration::from_secs(3600));
            if piece.is_some() || self.over {
                return piece;
            }
        }
    }
}

/// The pieces of one answer, for tasks of any runtime. Dropping it ends the request.
pub struct AsyncStream(Stream);

impl AsyncStream {
    /// Ends the answer early, from any thread: its last piece says [`Stop::Cancelled`].
    pub fn canceller(&self) -> Cancel {
        self.0.canceller()
    }
}

impl futures_core::Stream for AsyncStream {
    type Item = Result<Piece, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Piece, Error>>> {
        let stream = &mut self.0;
        if stream.ready.is_empty() && !stream.over {
            // Before events are taken: one that comes afterwards wakes the task.
            let mut pending = stream.queue.state.lock().unwrap_or_else(PoisonError::into_inner);
            pending.waker = Some(context.waker().clone());
            drop(pending);
            stream.take_events();
        }
        match stream.ready.pop_front() {
            Some(piece) => Poll::Ready(Some(piece)),
            None if stream.over => Poll::Ready(None),
            None => Poll::Pending,
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}
