//! No name of a model leaves a folder or becomes a flag.

#![no_main]

use kiln_store::Name;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let harmless = |part: &str| {
        assert!(!part.starts_with('-') && !part.contains('\\') && !part.chars().any(char::is_control), "{part:?}");
        assert!(part.split('/').all(|piece| piece != ".." && piece != "."), "{part:?}");
    };
    match Name::parse(text) {
        Ok(Name::Hub { repo, revision, wish }) => [repo, revision].iter().chain(&wish).for_each(|part| harmless(part)),
        Ok(Name::Ollama { repo, tag }) => [repo, tag].iter().for_each(|part| harmless(part)),
        Ok(_) | Err(_) => {}
    }
});
