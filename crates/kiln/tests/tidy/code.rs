//! Rust code without its comments and literals, for the checks that look for words in code.

/// Rust text with comments and the insides of literals blanked out; every line keeps its number.
pub(crate) fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let word_before = code.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment_length(rest)
        } else if next == '"' {
            string_length(rest)
        } else if let Some(length) = raw_string_length(rest).filter(|_| !word_before) {
            length
        } else if let Some(length) = char_length(rest) {
            length
        } else {
            code.push(next);
            rest = &rest[next.len_utf8()..];
            continue;
        };
        let (blanked, after) = rest.split_at(length);
        code.push(' ');
        code.extend(blanked.chars().filter(|&c| c == '\n'));
        rest = after;
    }
    code
}

/// Block comments nest.
fn block_comment_length(text: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < text.len() {
        let tail = &text.as_bytes()[at..];
        if tail.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

fn string_length(text: &str) -> usize {
    let mut escaped = true; // The opening quote does not close the string.
    for (at, c) in text.char_indices() {
        if c == '"' && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}

/// `r"…"`, `r#"…"#` and so on; a `b` or `c` before them stays in the code, which does no harm.
fn raw_string_length(text: &str) -> Option<usize> {
    let hashes = text.strip_prefix('r')?;
    let inside = hashes.trim_start_matches('#');
    let count = hashes.len() - inside.len();
    let inside = inside.strip_prefix('"')?;
    let start = 1 + count + 1;
    let end = format!("\"{}", "#".repeat(count));
    Some(inside.find(&end).map_or(text.len(), |at| start + at + end.len()))
}

/// A character literal, told from a lifetime by its closing quote.
fn char_length(text: &str) -> Option<usize> {
    let inside = text.strip_prefix('\'')?;
    if let Some(escape) = inside.strip_prefix('\\') {
        return escape.char_indices().skip(1).find(|&(_, c)| c == '\'').map(|(at, _)| at + 3);
    }
    let length = inside.chars().next()?.len_utf8();
    inside[length..].starts_with('\'').then_some(length + 2)
}
