//! Which requests are refused when they come.

use super::media::unknown;
use super::request::Request;
use super::schedule::Schedule;
use crate::Error;

impl Schedule {
    /// Whether a request can ever begin.
    pub(super) fn admit(&self, request: &Request) -> Result<(), Error> {
        let (config, context) = (&self.engine.model().config, self.engine.context());
        let (tokens, vocab) = (request.prompt.len(), config.vocab);
        if let Some(why) = &self.lost {
            return Err(Error::Lost { why: why.clone() });
        }
        if self.engine.model().facts.encodes {
            return Err(Error::NoText);
        }
        if self.engine.model().facts.fills {
            return Err(Error::Fills);
        }
        if tokens == 0 {
            return Err(Error::EmptyPrompt);
        }
        if tokens > context {
            return Err(Error::PromptTooLong { tokens, context, trained: config.context });
        }
        if let Some(token) = unknown(&request.prompt, 0, &request.spans, vocab) {
            return Err(Error::TokenOutOfRange { token, vocab });
        }
        let most = self.engine.room().sequences;
        if request.choices == 0 || request.choices > most {
            return Err(Error::NoRoom { what: "texts at once", needed: request.choices, free: most, all: most });
        }
        if self.waiting.len() >= self.policy.queue {
            return Err(Error::Busy { waiting: self.waiting.len() });
        }
        Ok(())
    }
}
