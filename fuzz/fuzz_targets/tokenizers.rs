//! Any vocabulary is refused or cuts any text into tokens that exist, and puts them together again. The input is a GGUF header; the text stands
//! in its key `text`.

#![no_main]

use kiln_engine::tokenizer::{AddSpecial, ParseSpecial, ShowSpecial, Tokenizer};
use kiln_gguf::Header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(header) = Header::parse(bytes) else { return };
    let Ok(tokenizer) = Tokenizer::from_gguf(&header.metadata) else { return };
    let own = header.metadata.get_str_or("text", "").unwrap_or_default();
    for text in [own, "Hello  world\n\u{e9}\u{1F600} 123 <|im_start|>\u{0}", ""] {
        for parse in [ParseSpecial::Yes, ParseSpecial::No] {
            let Ok(ids) = tokenizer.encode(text, AddSpecial::Yes, parse) else { continue };
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.n_tokens()), "a token that does not exist");
            tokenizer.decode_bytes(&ids, ShowSpecial::Yes).expect("tokens that exist have text");
        }
    }
});
