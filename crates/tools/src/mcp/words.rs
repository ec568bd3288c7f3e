//! A command line as people write it, cut into words without a shell.

/// The words of a line: quotes hold them together, a backslash takes the meaning from what follows. Nothing is expanded.
pub(crate) fn words(line: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None | Some('"'), '\\') => match chars.next() {
                Some(next) => word.get_or_insert_default().push(next),
                None => return Err("a backslash stands at the end".to_owned()),
            },
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if let Some(quote) = quote {
        return Err(format!("a {quote} has no end"));
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn lines_are_cut_as_shells_do() {
        assert_eq!(words(" npx -y  'a b'\"c\\\"d\" e\\ f '' ").unwrap(), ["npx", "-y", "a bc\"d", "e f", ""]);
        assert_eq!(words("$HOME `x` ; rm").unwrap(), ["$HOME", "`x`", ";", "rm"], "there is no shell");
        assert!(words("'a").is_err() && words("a\\").is_err());
        assert!(words("  ").unwrap().is_empty());
    }
}
