//! Which files of a repository are one model, and which of its models was meant.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// Tried in this order if the name has no quantisation: small, and hardly worse than the original.
const USUAL: [&str; 14] = [
    "Q4_K_M", "Q4_K_XL", "Q4_K_S", "Q4_K", "Q4_0", "IQ4_XS", "IQ4_NL", "MXFP4", "Q5_K_M", "Q6_K", "Q8_0", "BF16",
    "F16", "F32",
];

/// The number of a part and how many there are, with the name before both: `m-00001-of-00003.gguf`.
pub(crate) fn part_of(path: &str) -> Option<(&str, u32, u32)> {
    let stem = path.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, no) = rest.rsplit_once('-')?;
    let number = |text: &str| if text.len() == 5 { text.parse().ok() } else { None };
    let (no, count): (u32, u32) = (number(no)?, number(count)?);
    (no >= 1 && no <= count && count <= 1000).then_some((prefix, no, count))
}

/// The path of another part of the same model.
pub(crate) fn part_path(prefix: &str, no: u32, count: u32) -> String {
    format!("{prefix}-{no:05}-of-{count:05}.gguf")
}

/// The quantisation that the name of a model speaks of, in capitals.
fn quant(stem: &str) -> Option<String> {
    let stem = stem.rsplit('/').next().unwrap_or(stem).to_uppercase();
    let words: Vec<&str> = stem.split(['-', '.']).collect();
    let is_quant = |word: &&str| {
        let bits = word.trim_start_matches(['I', 'T']);
        let numbered = bits.strip_prefix('Q').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        numbered || matches!(*word, "F32" | "F16" | "BF16" | "FP16" | "FP32") || word.starts_with("MXFP4")
    };
    let at = words.iter().rposition(is_quant)?;
    let unsloth = at > 0 && words[at - 1] == "UD";
    Some(if unsloth { format!("UD-{}", words[at]) } else { words[at].to_owned() })
}

/// Whether a file is an encoder of pictures or sound, which stands beside a model.
fn is_projector(path: &str) -> bool {
    path.ends_with(".gguf") && path.rsplit('/').next().unwrap_or(path).to_lowercase().starts_with("mmproj")
}

/// The encoders among the files of a repository: first those of half precision, which are what most people take.
pub(crate) fn encoders<'a>(files: &[&'a str]) -> Vec<&'a str> {
    let mut found: Vec<&str> = files.iter().copied().filter(|path| is_projector(path)).collect();
    found.sort_by_key(|path| (quant(path.trim_end_matches(".gguf")).as_deref() != Some("F16"), *path));
    found
}

/// Models among the files of a repository, each with its files in order. Projectors and incomplete sets are none.
pub(crate) fn models<'a>(files: &[&'a str]) -> BTreeMap<&'a str, Vec<String>> {
    let mut found = BTreeMap::new();
    for path in files.iter().filter(|path| path.ends_with(".gguf") && !is_projector(path)) {
        match part_of(path) {
            None => {
                found.insert(path.trim_end_matches(".gguf"), vec![(*path).to_owned()]);
            }
            Some((prefix, 1, count)) => {
                let parts: Vec<String> = (1..=count).map(|no| part_path(prefix, no, count)).collect();
                if parts.iter().all(|part| files.contains(&part.as_str())) {
                    found.insert(prefix, parts);
                }
            }
            Some(_) => {}
        }
    }
    found
}

/// The files of the model that was meant. `repo` is for messages.
pub(crate) fn choose(repo: &str, files: &[&str], wish: Option<&str>) -> Result<Vec<String>> {
    if let Some(encoder) = wish.filter(|wish| is_projector(wish) && files.contains(wish)) {
        return Ok(vec![encoder.to_owned()]);
    }
    let models = models(files);
    let hint = |list: Vec<String>| format!("there is {}", list.join(", "));
    if models.is_empty() {
        let what = format!("{repo} has no GGUF file");
        let hint = "look for a repository whose name ends with -GGUF, or `kiln convert` the original".into();
        return Err(Error::Refused { what, hint });
    }
    let list = || hint(models.keys().map(|stem| quant(stem).unwrap_or_else(|| format!("{stem}.gguf"))).collect());
    let Some(wish) = wish else {
        if let [only] = models.values().collect::<Vec<_>>()[..] {
            return Ok(only.clone());
        }
        let usual = USUAL.iter().find_map(|usual| models.iter().find(|(stem, _)| fits(stem, usual)));
        return usual.map(|(_, parts)| parts.clone()).ok_or_else(|| Error::Refused {
            what: format!("{repo} has several models, and none in a usual quantisation"),
            hint: list(),
        });
    };
    let named = models.values().find(|parts| parts.iter().any(|part| part == wish));
    let mut fitting = models.iter().filter(|(stem, _)| fits(stem, wish));
    match (named, fitting.next(), fitting.next()) {
        (Some(parts), ..) | (None, Some((_, parts)), None) => Ok(parts.clone()),
        (None, Some((first, parts)), Some((second, _))) => {
            // `Q4_K_M` and `UD-Q4_K_M` both fit: what was said to the letter is meant.
            match models.iter().filter(|(stem, _)| quant(stem).as_deref() == Some(&wish.to_uppercase())).count() {
                1 if quant(first).as_deref() == Some(&wish.to_uppercase()) => Ok(parts.clone()),
                _ => Err(Error::Refused {
                    what: format!("{repo} has several models that {wish} fits"),
                    hint: format!("name the file, as in hf:{repo}:{first}.gguf or :{second}.gguf"),
                }),
            }
        }
        (None, None, _) => Err(Error::Refused { what: format!("{repo} has no {wish}"), hint: list() }),
    }
}

fn fits(stem: &str, wish: &str) -> bool {
    let wish = wish.to_uppercase();
    quant(stem).is_some_and(|quant| quant == wish || quant.strip_prefix("UD-") == Some(&wish))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [&str; 9] = [
        "README.md",
        "mmproj-model-f16.gguf",
        "Model-1.5B-Q4_K_M.gguf",
        "Model-1.5B-Q4_K_S.gguf",
        "Model-1.5B-UD-Q4_K_M.gguf",
        "Q8_0/Model-1.5B-Q8_0-00001-of-00002.gguf",
        "Q8_0/Model-1.5B-Q8_0-00002-of-00002.gguf",
        "Model-1.5B-F16-00001-of-00003.gguf",
        "model.iq2_xxs.gguf",
    ];

    #[test]
    fn the_model_that_was_meant_is_found() {
        let get = |wish| choose("a/b", &FILES, wish);
        assert_eq!(get(None).unwrap(), ["Model-1.5B-Q4_K_M.gguf"]);
        assert_eq!(get(Some("q4_k_s")).unwrap(), ["Model-1.5B-Q4_K_S.gguf"]);
        assert_eq!(get(Some("Q4_K_M")).unwrap(), ["Model-1.5B-Q4_K_M.gguf"]);
        assert_eq!(get(Some("UD-Q4_K_M")).unwrap(), ["Model-1.5B-UD-Q4_K_M.gguf"]);
        assert_eq!(get(Some("IQ2_XXS")).unwrap(), ["model.iq2_xxs.gguf"]);
        assert_eq!(get(Some("Q8_0")).unwrap(), FILES[5..7]);
        assert_eq!(get(Some("Q8_0/Model-1.5B-Q8_0-00002-of-00002.gguf")).unwrap(), FILES[5..7]);
        assert_eq!(choose("a/b", &["x.gguf", "mmproj.gguf"], None).unwrap(), ["x.gguf"]);
        // An encoder is what somebody meant who names its file.
        assert_eq!(choose("a/b", &["x.gguf", "mmproj.gguf"], Some("mmproj.gguf")).unwrap(), ["mmproj.gguf"]);
        let files = ["mmproj-a-BF16.gguf", "mmproj-a-f16.gguf", "a-F16.gguf", "b/mmproj-a-Q8_0.gguf", "mmproj.txt"];
        assert_eq!(encoders(&files), ["mmproj-a-f16.gguf", "b/mmproj-a-Q8_0.gguf", "mmproj-a-BF16.gguf"]);
        assert!(choose("a/b", &files, Some("mmproj-a-F32.gguf")).is_err());
    }

    #[test]
    fn what_is_not_there_is_answered_with_what_is() {
        // A set that lacks parts is none; a quantisation must be named whole.
        for wish in ["F16", "Q4_K", "Q5_K_M", "nothing.gguf"] {
            let error = choose("a/b", &FILES, Some(wish)).unwrap_err().to_string();
            assert!(error.contains(wish) && error.contains("Q8_0") && error.contains("IQ2_XXS"), "{error}");
        }
        assert!(choose("a/b", &["x.bin"], None).unwrap_err().to_string().contains("no GGUF"));
        assert!(choose("a/b", &["x.gguf", "y.gguf"], None).unwrap_err().to_string().contains("x.gguf, y.gguf"));
    }
}
