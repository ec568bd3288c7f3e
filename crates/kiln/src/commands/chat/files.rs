//! Files that a message names as `@path`.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use kiln_engine::media::Medium;

use super::media::Attached;

/// A path as people type it: no shell replaces `~` by the home folder here.
pub(super) fn at_home(name: &str) -> PathBuf {
    let home = name.strip_prefix("~/").and_then(|rest| Some(etcetera::home_dir().ok()?.join(rest)));
    home.unwrap_or_else(|| name.into())
}

/// A message with the files that it names.
#[derive(Debug, Default)]
pub(super) struct WithFiles {
    /// The message, and the content of its files behind it.
    pub(super) text: String,
    /// The files, as they were named.
    pub(super) names: Vec<String>,
    /// Those that are pictures or sounds.
    pub(super) media: Vec<Attached>,
    /// Names without a file.
    pub(super) missing: Vec<Missing>,
}

/// A word behind an `@` that names no file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) name: String,
    /// Whether it looks like nothing but a file: quoted, with a folder before it or an extension behind it. Names of people and packages
    /// begin with the same sign.
    pub(super) surely: bool,
}

/// Characters that end a sentence and seldom a file's name.
const PUNCTUATION: [char; 8] = [',', '.', ':', ';', '?', '!', ')', ']'];

/// Puts the files that a message names behind it. `@"a b.txt"` and `@a\ b.txt` name files with spaces, `@a.txt:1-200` lines of one; `\@` is a
/// plain `@`.
pub(super) fn with_files(message: &str) -> anyhow::Result<WithFiles> {
    let mut found = WithFiles::default();
    let (mut contents, mut rest, mut at_start) = (String::new(), message, true);
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        if at_start && rest.starts_with("\\@") {
            found.text.push('@');
            (rest, at_start) = (&rest[2..], false);
            continue;
        }
        found.text.push(c);
        if !(at_start && c == '@') {
            (rest, at_start) = (after, c.is_whitespace() || "([{".contains(c));
            continue;
        }
        let word = Word::read(after);
        found.text.push_str(&after[..word.bytes]);
        (rest, at_start) = (&after[word.bytes..], false);
        let Some(name) = word.name() else { continue };
        if found.names.contains(&name) || found.missing.iter().any(|missing| missing.name == name) {
            continue;
        }
        let (file, lines) = part_of(&name);
        let path = at_home(file);
        if !path.is_file() {
            if path.is_dir() && word.is_path(file) {
                bail!("{name} is a folder\nhint: name the files in it");
            }
            found.missing.push(Missing { surely: word.is_path(file), name });
            continue;
        }
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {name}"))?;
        if let Some(medium) = Medium::of(&bytes) {
            if lines.is_some() {
                bail!("{file} is a picture or a sound, which has no lines");
            }
            found.media.push(Attached::of(medium, &name, bytes)?);
            found.names.push(name);
            continue;
        }
        let Ok(content) = String::from_utf8(bytes) else {
            bail!("{name} is neither UTF-8 text nor a picture nor a sound, so it cannot be attached")
        };
        let content = match lines {
            Some(lines) => lines_of(&content, file, lines)?,
            None => &content,
        };
        // More backticks than the file has in a row.
        let most = content.split(|c| c != '`').map(str::len).max().unwrap_or(0);
        let fence = "`".repeat(most.max(2) + 1);
        contents += &format!("\n\n{name}:\n{fence}\n{}\n{fence}", content.trim_end_matches('\n'));
        found.names.push(name);
    }
    found.text += &contents;
    Ok(found)
}

/// The file that a name means, and its lines where it names some: `a.txt:1-200`, `a.txt:7`.
fn part_of(name: &str) -> (&str, Option<RangeInclusive<usize>>) {
    let part = || {
        let (file, lines) = name.rsplit_once(':')?;
        let (first, last) = lines.split_once('-').unwrap_or((lines, lines));
        Some((file, first.parse().ok()?..=last.parse().ok()?))
    };
    match part() {
        Some((file, lines)) if !at_home(name).is_file() => (file, Some(lines)),
        _ => (name, None),
    }
}

/// Lines of a text, counted from 1.
fn lines_of<'a>(text: &'a str, file: &str, lines: RangeInclusive<usize>) -> anyhow::Result<&'a str> {
    let (first, last) = lines.into_inner();
    let ends =
        || std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).filter(|at| *at < text.len());
    let count = ends().count();
    if first == 0 || last < first || first > count {
        bail!("{file} has {count} lines, which lines {first} to {last} are not among");
    }
    let start = ends().nth(first - 1).unwrap_or_default();
    Ok(&text[start..ends().nth(last).unwrap_or(text.len())])
}

/// What stands behind an `@`.
struct Word {
    /// Without quotes and backslashes.
    text: String,
    /// Bytes of the message that it takes.
    bytes: usize,
    quoted: bool,
}

impl Word {
    fn read(text: &str) -> Word {
        if let Some(quote @ ('"' | '\'')) = text.chars().next()
            && let Some(end) = text[1..].find(quote)
        {
            return Word { text: text[1..=end].to_owned(), bytes: end + 2, quoted: true };
        }
        let (mut word, mut bytes, mut chars) = (String::new(), 0, text.chars().peekable());
        while let Some(c) = chars.next() {
            match c {
                '\\' if chars.peek() == Some(&' ') => {
                    chars.next();
                    word.push(' ');
                    bytes += 1;
                }
                c if c.is_whitespace() => break,
                c => word.push(c),
            }
            bytes += c.len_utf8();
        }
        Word { text: word, bytes, quoted: false }
    }

    /// The name that is meant: without what ends a sentence, unless a file is called so.
    fn name(&self) -> Option<String> {
        let whole = self.quoted || at_home(&self.text).is_file();
        let name = if whole { &self.text[..] } else { self.text.trim_end_matches(PUNCTUATION) };
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// Whether a word looks like a path and like nothing else.
    fn is_path(&self, name: &str) -> bool {
        let extension = name.rsplit_once('.').filter(|(stem, _)| !stem.is_empty()).map(|(_, extension)| extension);
        let is_short = |end: &str| (1..=5).contains(&end.len()) && end.bytes().all(|b| b.is_ascii_alphanumeric());
        self.quoted
            || ["/", "./", "../", "~/"].iter().any(|start| name.starts_with(start))
            || extension.is_some_and(is_short)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_put_behind_the_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("a.txt"), "a ``` b\n").unwrap();
        std::fs::write(path("my notes.txt"), "n").unwrap();
        let name = path("a.txt");
        let message = format!("What is in @{name}, and (@{name})? Ask @nobody");
        let found = with_files(&message).unwrap();
        assert_eq!(found.names, [name.as_str()]);
        assert_eq!(found.text, format!("{message}\n\n{name}:\n````\na ``` b\n````"));
        assert_eq!(found.missing, [Missing { name: "nobody".into(), surely: false }]);
        // Spaces, by quotes and by backslashes.
        let spaced = path("my notes.txt");
        for word in [format!("@\"{spaced}\""), format!("@'{spaced}'"), format!("@{}", spaced.replace(' ', "\\ "))] {
            let found = with_files(&format!("see {word}!")).unwrap();
            assert_eq!((found.names, found.missing), (vec![spaced.clone()], vec![]), "{word}");
            assert!(found.text.starts_with(&format!("see {word}!\n\n{spaced}:\n")), "{}", found.text);
        }
        // Some of its lines; a name that is a file's as it stands is that file.
        std::fs::write(path("long.txt"), "one\ntwo\nthree\nfour").unwrap();
        let long = path("long.txt");
        for (lines, content) in [("1-2", "one\ntwo"), ("2", "two"), ("3-99", "three\nfour")] {
            let found = with_files(&format!("see @{long}:{lines}.")).unwrap();
            assert_eq!(found.text, format!("see @{long}:{lines}.\n\n{long}:{lines}:\n```\n{content}\n```"));
        }
        for lines in ["0-1", "5", "3-2"] {
            let why = with_files(&format!("see @{long}:{lines}")).unwrap_err().to_string();
            assert!(why.contains("has 4 lines"), "{why}");
        }
        std::fs::write(path("long.txt:2"), "another").unwrap();
        assert!(with_files(&format!("@{long}:2")).unwrap().text.ends_with("```\nanother\n```"));
        std::fs::write(path("a.txt"), b"\xff").unwrap();
        assert!(with_files(&message).unwrap_err().to_string().contains("UTF-8"));
        // Pictures and sounds stand beside the text, and are looked at at once.
        let bmp = {
            let mut bytes = b"BM".to_vec();
            bytes.extend([58u32, 0, 54, 40, 1, 1, 24 << 16 | 1, 0, 4, 0, 0, 0, 0].iter().flat_map(|n| n.to_le_bytes()));
            bytes.extend([1, 2, 3, 0]);
            bytes
        };
        std::fs::write(path("a.txt"), &bmp).unwrap();
        let found = with_files(&message).unwrap();
        assert_eq!((found.text.as_str(), found.media.len()), (message.as_str(), 1));
        assert_eq!((&found.media[0].name, &**found.media[0].bytes), (&name, &bmp[..]));
        std::fs::write(path("a.txt"), &bmp[..40]).unwrap();
        assert!(format!("{:#}", with_files(&message).unwrap_err()).contains("BMP"));
        std::fs::write(path("a.txt"), "BM is how bitmaps begin").unwrap();
        assert!(with_files(&message).unwrap().media.is_empty());
    }

    #[test]
    fn names_without_a_file_are_told() {
        for (message, name, surely) in [
            ("see @./nowhere.txt", "./nowhere.txt", true),
            ("look @note.txtt", "note.txtt", true),
            ("look @note.txtt:1-20", "note.txtt:1-20", true),
            ("look @\"my note\"", "my note", true),
            ("ask @types/node", "types/node", false),
            ("and @me.", "me", false),
        ] {
            let found = with_files(message).unwrap();
            assert_eq!((found.text.as_str(), found.names.len()), (message, 0));
            assert_eq!(found.missing, [Missing { name: name.into(), surely }], "{message}");
        }
        for plain in ["mail me@example.org", "a @ b", "3 @, 4"] {
            let found = with_files(plain).unwrap();
            assert_eq!((&*found.text, found.names.len(), found.missing.len()), (plain, 0, 0));
        }
        assert_eq!(with_files("\\@a.txt").unwrap().text, "@a.txt");
        assert!(with_files("@/").unwrap_err().to_string().contains("folder"));
        assert_eq!(at_home("~/x/y"), etcetera::home_dir().unwrap().join("x/y"));
        assert_eq!([at_home("~x"), at_home("a/~/b")], [PathBuf::from("~x"), PathBuf::from("a/~/b")]);
    }
}
