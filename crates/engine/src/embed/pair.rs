//! A question and a text that may answer it, as rerankers read them.

use crate::Error;
use crate::model::Model;
use crate::text::template::Rendered;
use crate::tokenizer::{AddSpecial, ParseSpecial};

/// The tokens of a question and a text: in the words of the file's template `rerank` where it has one, else one behind the other, with
/// the vocabulary's own tokens around and between them.
pub fn pair(model: &Model, query: &str, text: &str) -> Result<Vec<u32>, Error> {
    let (metadata, tokenizer) = (model.gguf.metadata(), &model.tokenizer);
    if let Some(template) = metadata.get_str_opt("tokenizer.chat_template.rerank")? {
        let filled = Rendered::filled(template, &[("{query}", query), ("{document}", text)], tokenizer);
        return Ok(filled.encode(tokenizer)?);
    }
    let vocab = tokenizer.vocab();
    let encoded = |text: &str| tokenizer.encode(text, AddSpecial::No, ParseSpecial::No);
    let eos = || vocab.eos.or(vocab.sep).filter(|_| vocab.add_eos);
    let mut ids: Vec<u32> = vocab.bos.filter(|_| vocab.add_bos).into_iter().collect();
    ids.extend(encoded(query)?);
    ids.extend(eos());
    ids.extend(vocab.sep.filter(|_| vocab.add_sep));
    ids.extend(encoded(text)?);
    ids.extend(eos());
    Ok(ids)
}
