//! Text to tokens for a request, with bounds: a text that cannot fit is refused by its length before it is tokenised, tokenising ends at
//! the context's end, and it ends when the client has gone.

use kiln_engine::text::{Content, Message, Rendered};
use kiln_engine::tokenizer::{AddSpecial, EncodeLimit, ParseSpecial, TokenizerError};

use crate::api_error::{AT_LEAST, ApiError, Kind};
use crate::media::Taken;
use crate::prep_pool::client_gone;
use crate::registry::Loaded;

/// What is tokenised but not read by the model may have this many bytes, and as many as several contexts.
const COUNTED_BYTES: usize = 8 << 20;
const COUNTED_CONTEXTS: usize = 4;
/// Templates may leave out what messages hold, so messages may be this many times as long as what a prompt can be.
const LEFT_OUT: usize = 4;

/// What the tokens are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The model reads them: they must fit into the context.
    Prompt,
    /// The model reads those that fit into the context; the caller cuts off the others.
    Cut,
    /// The client wants to know them.
    Count,
}

/// How far a text is encoded for some purpose.
struct Bound {
    limit: EncodeLimit,
    bytes: usize,
    context: usize,
    longest: usize,
}

impl Bound {
    fn of(loaded: &Loaded, purpose: Purpose) -> Bound {
        let (context, tokenizer) = (loaded.scheduler.context(), &loaded.scheduler.model().tokenizer);
        let (tokens, bytes) = match purpose {
            Purpose::Prompt => (Some(context), tokenizer.most_bytes(context)),
            Purpose::Cut => (None, usize::MAX),
            Purpose::Count => (None, tokenizer.most_bytes(context * COUNTED_CONTEXTS).max(COUNTED_BYTES)),
        };
        let limit = EncodeLimit { tokens, cancelled: client_gone() };
        Bound { limit, bytes, context, longest: tokenizer.most_bytes(1) }
    }

    fn too_long(&self, tokens: usize) -> ApiError {
        ApiError::new(Kind::TooLong { prompt: tokens, context: self.context }, AT_LEAST)
    }

    fn check(&self, bytes: usize, spare: usize) -> Result<(), ApiError> {
        if bytes > self.bytes.saturating_mul(spare) {
            return Err(self.too_long(bytes.div_ceil(self.longest * spare)));
        }
        Ok(())
    }

    fn tokens<T>(&self, tokens: Result<T, TokenizerError>) -> Result<T, ApiError> {
        tokens.map_err(|error| match error {
            TokenizerError::OverLimit { tokens, .. } => self.too_long(tokens),
            other => kiln_engine::Error::from(other).into(),
        })
    }
}

/// The tokens of a text.
pub(crate) fn encode(
    loaded: &Loaded,
    purpose: Purpose,
    text: &str,
    add: AddSpecial,
    parse: ParseSpecial,
) -> Result<Vec<u32>, ApiError> {
    let bound = Bound::of(loaded, purpose);
    bound.check(text.len(), 1)?;
    let text = if purpose == Purpose::Cut { beginning(loaded, text, bound.context) } else { text };
    bound.tokens(loaded.scheduler.model().tokenizer.encode_within(text, add, parse, &bound.limit))
}

/// The tokens of a prompt that a template has made: its parts, which pictures and sounds stand between.
pub(crate) fn encode_rendered(
    loaded: &Loaded,
    purpose: Purpose,
    rendered: &Rendered,
    taken: &Taken,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let bound = Bound::of(loaded, purpose);
    bound.check(rendered.length(), 1)?;
    let tokenizer = &loaded.scheduler.model().tokenizer;
    if taken.is_empty() {
        return Ok(vec![bound.tokens(rendered.encode_within(tokenizer, &bound.limit))?]);
    }
    bound.tokens(rendered.encode_parts(tokenizer, taken.marker.text(), &bound.limit))
}

/// Rows that the pictures and sounds of a prompt may take.
pub(crate) fn most_rows(loaded: &Loaded, purpose: Purpose) -> usize {
    let context = loaded.scheduler.context();
    if purpose == Purpose::Count { context.saturating_mul(COUNTED_CONTEXTS) } else { context }
}

/// Refuses a text whose bytes cannot fit the context.
pub(crate) fn check_bytes(loaded: &Loaded, bytes: usize) -> Result<(), ApiError> {
    Bound::of(loaded, Purpose::Prompt).check(bytes, 1)
}

/// Refuses messages that no template could make a prompt of that fits.
pub(crate) fn check_messages(loaded: &Loaded, purpose: Purpose, messages: &[Message]) -> Result<(), ApiError> {
    let length = |content: &Content| match content {
        Content::None => 0,
        Content::Text(text) => text.len(),
        Content::Parts(parts) => parts.iter().filter_map(|part| Some(part.get("text")?.as_str()?.len())).sum(),
    };
    let bytes = messages.iter().map(|message| length(&message.content)).sum();
    Bound::of(loaded, purpose).check(bytes, LEFT_OUT)
}

/// The beginning of a text that holds the first tokens that are wanted of it, and more.
pub(crate) fn beginning<'a>(loaded: &Loaded, text: &'a str, tokens: usize) -> &'a str {
    let most = loaded.scheduler.model().tokenizer.most_bytes(tokens + 1);
    kiln_system::text::beginning(text, most)
}

/// The end of a text that holds the last tokens that are wanted of it, and more.
pub(crate) fn end<'a>(loaded: &Loaded, text: &'a str, tokens: usize) -> &'a str {
    let most = loaded.scheduler.model().tokenizer.most_bytes(tokens + 1);
    let start = (text.len().saturating_sub(most)..text.len()).find(|at| text.is_char_boundary(*at));
    &text[start.unwrap_or(text.len())..]
}
