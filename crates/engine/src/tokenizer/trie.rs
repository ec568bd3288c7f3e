//! A trie over byte strings for longest-match search: special tokens in a prompt, and the whole RWKV vocabulary.

/// Values by byte string. The children of a node are sorted by their byte; those of the root are in a table.
pub(super) struct Trie<V> {
    root: Box<[u32; 256]>,
    nodes: Vec<Node<V>>,
}

struct Node<V> {
    value: Option<V>,
    children: Vec<(u8, u32)>,
}

const ABSENT: u32 = u32::MAX;

impl<V: Copy> Trie<V> {
    /// An empty trie.
    pub(super) fn new() -> Self {
        Self { root: Box::new([ABSENT; 256]), nodes: Vec::new() }
    }

    /// Adds a key. The empty key is ignored, and of equal keys the first stays.
    pub(super) fn insert(&mut self, key: &[u8], value: V) {
        let Some((&first, rest)) = key.split_first() else { return };
        let mut at = self.root[usize::from(first)];
        if at == ABSENT {
            at = self.add_node();
            self.root[usize::from(first)] = at;
        }
        for &byte in rest {
            let children = &self.nodes[at as usize].children;
            at = match children.binary_search_by_key(&byte, |child| child.0) {
                Ok(found) => children[found].1,
                Err(place) => {
                    let new = self.add_node();
                    self.nodes[at as usize].children.insert(place, (byte, new));
                    new
                }
            };
        }
        self.nodes[at as usize].value.get_or_insert(value);
    }

    fn add_node(&mut self) -> u32 {
        self.nodes.push(Node { value: None, children: Vec::new() });
        (self.nodes.len() - 1) as u32
    }

    /// Whether any key begins with this byte.
    pub(super) fn may_start(&self, byte: u8) -> bool {
        self.root[usize::from(byte)] != ABSENT
    }

    /// Every key at the beginning of `text`, the shortest first, as its length and value.
    pub(super) fn each_prefix(&self, text: &[u8], mut found: impl FnMut(usize, V)) {
        let Some((&first, rest)) = text.split_first() else { return };
        let mut at = self.root[usize::from(first)];
        let mut len = 1;
        let mut bytes = rest.iter();
        while at != ABSENT {
            let node = &self.nodes[at as usize];
            if let Some(value) = node.value {
                found(len, value);
            }
            let Some(byte) = bytes.next() else { return };
            let Ok(child) = node.children.binary_search_by_key(byte, |child| child.0) else { return };
            at = node.children[child].1;
            len += 1;
        }
    }

    /// Whether all of `text` begins a key that is longer.
    pub(super) fn begins_longer(&self, text: &[u8]) -> bool {
        let Some((&first, rest)) = text.split_first() else { return false };
        let mut at = self.root[usize::from(first)];
        for byte in rest {
            if at == ABSENT {
                return false;
            }
            let children = &self.nodes[at as usize].children;
            at = children.binary_search_by_key(byte, |child| child.0).map_or(ABSENT, |child| children[child].1);
        }
        at != ABSENT && !self.nodes[at as usize].children.is_empty()
    }

    /// The longest key at the beginning of `text` whose length and value are accepted.
    pub(super) fn longest(&self, text: &[u8], accept: impl Fn(usize, V) -> bool) -> Option<(usize, V)> {
        let (&first, rest) = text.split_first()?;
        let mut at = self.root[usize::from(first)];
        if at == ABSENT {
            return None;
        }
        let mut found = None;
        let mut len = 1;
        let mut bytes = rest.iter();
        loop {
            let node = &self.nodes[at as usize];
            if let Some(value) = node.value.filter(|&value| accept(len, value)) {
                found = Some((len, value));
            }
            let Some(byte) = bytes.next() else { return found };
            let Ok(child) = node.children.binary_search_by_key(byte, |child| child.0) else { return found };
            at = node.children[child].1;
            len += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_accepted_key_wins() {
        let mut trie = Trie::new();
        for (key, value) in [("ab", 1), ("abcd", 2), ("b", 3), ("", 4), ("ab", 5)] {
            trie.insert(key.as_bytes(), value);
        }
        let longest = |text: &str| trie.longest(text.as_bytes(), |_, _| true);
        assert_eq!(longest("abcde"), Some((4, 2)));
        assert_eq!(longest("abce"), Some((2, 1)));
        assert_eq!(longest("a"), None);
        assert_eq!(longest(""), None);
        assert_eq!(trie.longest(b"abcd", |_, value| value != 2), Some((2, 1)));
        assert_eq!(trie.longest(b"abcd", |len, _| len < 4), Some((2, 1)));
        let begins = ["a", "ab", "abc", "abcd", "b", "x", ""].map(|text| trie.begins_longer(text.as_bytes()));
        assert_eq!(begins, [true, true, true, false, false, false, false]);
        assert!(trie.may_start(b'a') && !trie.may_start(b'c'));
    }
}
