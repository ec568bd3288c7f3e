//! Adapters that requests pick by name, as if each were a model, and which of them are in use: what gateways route by.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use crate::app::now;

/// An adapter that has a name of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedAdapter {
    /// What requests call it in `model`.
    pub name: String,
    /// Its number among the adapters of the model.
    pub number: usize,
}

/// Requests of one adapter.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    waiting: usize,
    running: usize,
}

/// Which adapters are in use.
#[derive(Debug, Default)]
pub(crate) struct AdapterUse {
    by_name: Mutex<BTreeMap<String, Counts>>,
}

/// A request with an adapter, from its arrival to its end.
#[derive(Debug)]
pub(crate) struct InUse {
    of: Arc<AdapterUse>,
    name: String,
    runs: bool,
}

impl AdapterUse {
    fn change(&self, name: &str, change: impl FnOnce(&mut Counts)) {
        let mut all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = all.entry(name.to_owned()).or_default();
        change(counts);
        if counts.waiting + counts.running == 0 {
            all.remove(name);
        }
    }

    /// A request with this adapter has come.
    pub(crate) fn begin(self: &Arc<Self>, name: &str) -> InUse {
        self.change(name, |counts| counts.waiting += 1);
        InUse { of: Arc::clone(self), name: name.to_owned(), runs: false }
    }

    /// vLLM's metric; `most` adapters may be in use at once.
    pub(crate) fn tell(&self, text: &mut String, labels: &str, most: usize) {
        let all = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let names = |wanted: fn(&Counts) -> bool| {
            let names = all.iter().filter(|(_, counts)| wanted(counts)).map(|(name, _)| name.as_str());
            crate::metrics::escaped(&names.collect::<Vec<_>>().join(","))
        };
        let (running, waiting) = (names(|counts| counts.running > 0), names(|counts| counts.waiting > 0));
        let name = "vllm:lora_requests_info";
        // Writing into a string does not fail.
        let _ = writeln!(text, "# HELP {name} Adapters of running and of waiting requests; the value is the time");
        let _ = writeln!(text, "# TYPE {name} gauge");
        let _ = writeln!(
            text,
            "{name}{{max_lora=\"{most}\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\",{labels}}} {}",
            now()
        );
    }
}

impl InUse {
    /// The request is begun.
    pub(crate) fn run(&mut self) {
        if !std::mem::replace(&mut self.runs, true) {
            self.of.change(&self.name, |counts| {
                (counts.waiting, counts.running) = (counts.waiting - 1, counts.running + 1)
            });
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let runs = self.runs;
        self.of.change(&self.name, |counts| match runs {
            true => counts.running -= 1,
            false => counts.waiting -= 1,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_in_use_are_told() {
        let uses = Arc::new(AdapterUse::default());
        let told = || {
            let mut text = String::new();
            uses.tell(&mut text, "model_name=\"m\"", 2);
            text.lines().last().unwrap().split_once(",model_name").unwrap().0.to_owned()
        };
        let line = |running: &str, waiting: &str| {
            format!(
                "vllm:lora_requests_info{{max_lora=\"2\",running_lora_adapters=\"{running}\",waiting_lora_adapters=\"{waiting}\""
            )
        };
        let (mut one, mut two) = (uses.begin("b"), uses.begin("a"));
        assert_eq!(told(), line("", "a,b"));
        one.run();
        one.run();
        let three = uses.begin("b");
        assert_eq!(told(), line("b", "a,b"));
        two.run();
        drop((one, three));
        assert_eq!(told(), line("a", ""));
        drop(two);
        assert_eq!(told(), line("", ""));
    }
}
