//! Vectors that were made of pictures and sounds, kept by what they were made of: the oldest go when there are too many.

use std::sync::Arc;

use super::Rows;

/// Bytes of vectors that are kept: about a hundred pictures of a large model.
const MOST_BYTES: usize = 256 << 20;

/// The vectors, those that were used last at the end.
#[derive(Debug, Default)]
pub(super) struct Kept {
    all: Vec<([u8; 32], Arc<Rows>)>,
}

fn bytes(rows: &Rows) -> usize {
    size_of_val(&rows.values[..])
}

impl Kept {
    /// The vectors of this content.
    pub(super) fn find(&mut self, key: &[u8; 32]) -> Option<Arc<Rows>> {
        let at = self.all.iter().position(|(known, _)| known == key)?;
        let found = self.all.remove(at);
        let rows = Arc::clone(&found.1);
        self.all.push(found);
        Some(rows)
    }

    /// Keeps vectors, and lets the oldest go where there are too many.
    pub(super) fn keep(&mut self, key: [u8; 32], rows: Arc<Rows>) {
        self.keep_within(MOST_BYTES, key, rows);
    }

    fn keep_within(&mut self, most: usize, key: [u8; 32], rows: Arc<Rows>) {
        self.all.push((key, rows));
        let mut held: usize = self.all.iter().map(|(_, rows)| bytes(rows)).sum();
        while held > most && !self.all.is_empty() {
            held -= bytes(&self.all.remove(0).1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_stays() {
        let (mut kept, rows) = (Kept::default(), |value| Arc::new(Rows { width: 2, values: vec![value; 2] }));
        let key = |number: u8| [number; 32];
        kept.keep_within(16, key(1), rows(1.0));
        kept.keep_within(16, key(2), rows(2.0));
        assert_eq!(kept.find(&key(1)).map(|rows| rows.values[0]), Some(1.0));
        kept.keep_within(16, key(3), rows(3.0));
        assert!(kept.find(&key(2)).is_none() && kept.find(&key(1)).is_some() && kept.find(&key(3)).is_some());
        kept.keep_within(4, key(4), rows(4.0));
        assert!(kept.all.is_empty(), "what is larger than all may be is not kept");
    }
}
