//! Names of tools: letters, digits, `_` and `-`, 64 at most, as APIs have them, and each one once.

use std::collections::HashSet;

use sha2::{Digest as _, Sha256};

/// Letters of a name at most.
const LONGEST: usize = 64;
/// Between the name of a server and the name of its tool. No tool of Kiln has it in its name, and no server.
const BETWEEN: &str = "__";

/// Names that are given out.
#[derive(Default)]
pub(crate) struct Names(HashSet<String>);

impl Names {
    /// The name of a server's tool. The server's own stands before it, so that no server can take the name of another one's tool; nothing
    /// where the server has named two tools the same.
    pub(crate) fn give(&mut self, server: &str, own: &str) -> Option<String> {
        let plain: String = own.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        let whole = format!("{server}{BETWEEN}{plain}");
        let is_same = plain == own && whole.len() <= LONGEST;
        let name = match is_same && !self.0.contains(&whole) {
            true => whole,
            // Another tool may be called the same in plain letters, or begin the same.
            false if is_same => return None,
            false => {
                let hash = Sha256::digest(own.as_bytes());
                let mark = format!("_{:02x}{:02x}{:02x}{:02x}", hash[0], hash[1], hash[2], hash[3]);
                format!("{}{mark}", &whole[..whole.len().min(LONGEST - mark.len())])
            }
        };
        self.0.insert(name.clone()).then_some(name)
    }
}

/// The name that a tool is offered under, where no other tool has it: that of a server, or of Kiln, whose `server` is empty.
pub fn offered_name(server: &str, own: &str) -> String {
    match server {
        "" => own.to_owned(),
        server => Names::default().give(server, own).unwrap_or_default(),
    }
}

pub(crate) fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

/// Whether a server may be called so: short, so that there is room for its tools, without what stands between, and not as Kiln itself.
pub(crate) fn is_server_name(name: &str) -> bool {
    name != "kiln" && (1..=24).contains(&name.len()) && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_plain_and_its_own() {
        let mut names = Names::default();
        assert_eq!(names.give("files", "read").as_deref(), Some("files__read"));
        assert_eq!(names.give("web", "read").as_deref(), Some("web__read"));
        assert_eq!(names.give("files", "read"), None, "a server that names two tools the same");
        let long = "x".repeat(500);
        let odd = ["re ad", "re\tad", "re<|im_end|>ad", "", "\u{1b}[2J", "réad", long.as_str()];
        let given: HashSet<String> = odd.iter().map(|own| names.give("files", own).unwrap()).collect();
        assert_eq!(given.len(), odd.len());
        assert!(given.iter().all(|name| name.len() <= LONGEST && name.chars().all(is_plain)), "{given:?}");
        assert!(given.iter().all(|name| name.starts_with("files__")));
    }

    #[test]
    fn servers_have_short_names() {
        assert!(["a", "files-2", "Web"].iter().all(|name| is_server_name(name)));
        assert!(!["", "kiln", "a_b", "a b", "a/b", &"x".repeat(25)].iter().any(|name| is_server_name(name)));
    }
}
