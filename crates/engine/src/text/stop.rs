//! Stop strings in text that comes piece by piece.

/// Finds the first of several texts, and holds back what may be the beginning of one.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    /// Looks for these; empty ones are never found.
    pub fn new(stops: &[String]) -> StopStrings {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopStrings { stops, held: String::new() }
    }

    /// More text came: gives what is certain not to belong to a stop string, and the stop string that was found behind it.
    pub fn push(&mut self, piece: &str) -> (String, Option<String>) {
        self.held.push_str(piece);
        let found = |stop: &String| self.held.find(stop.as_str()).map(|at| (at, stop.clone()));
        // The first one; of those at the same place the longest.
        let first = self.stops.iter().filter_map(found).min_by_key(|(at, stop)| (*at, std::cmp::Reverse(stop.len())));
        if let Some((at, stop)) = first {
            let mut text = std::mem::take(&mut self.held);
            text.truncate(at);
            return (text, Some(stop));
        }
        let begins = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let cut = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let kept = self.held.split_off(cut);
        (std::mem::replace(&mut self.held, kept), None)
    }

    /// What was held back, at the end.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the pieces, the same text comes out and the same stop is found.
    #[test]
    fn pieces_do_not_matter() {
        let stops = ["END".to_owned(), "é!".to_owned(), "E".repeat(3), String::new()];
        for (text, before, found) in [
            ("no stop here", "no stop here", None),
            ("EEND and more", "E", Some("END")),
            ("EN D EN", "EN D EN", None),
            ("caf\u{e9}\u{e9}! x", "caf\u{e9}", Some("é!")),
            ("ENEEE", "EN", Some("EEE")),
        ] {
            for cut in (0..=text.len()).filter(|cut| text.is_char_boundary(*cut)) {
                let mut finder = StopStrings::new(&stops);
                let (mut out, mut stop) = finder.push(&text[..cut]);
                if stop.is_none() {
                    let (more, later) = finder.push(&text[cut..]);
                    out += &more;
                    stop = later;
                }
                if stop.is_none() {
                    out += &finder.finish();
                }
                assert_eq!((out.as_str(), stop.as_deref()), (before, found), "{text:?} cut at {cut}");
            }
        }
    }
}
