//! From the text that a model writes to reasoning, content and tool calls: the whole way out, in one place.

use super::reasoning::{Markers, Piece, Reasoning};
use super::tools::{Calls, Event, Family, Harmony, Tool};

/// What to look for in an output.
#[derive(Clone, Debug, Default)]
pub struct OutputOptions {
    /// Tools that were offered. Without any, calls are not looked for.
    pub tools: Vec<Tool>,
    /// Calls are looked for even though no tools are named; every name is then taken.
    pub any_tool: bool,
    /// Reasoning stays in the content, markers and all.
    pub keep_reasoning: bool,
}

/// Reads what a model writes. The text must be decoded with special tokens shown: some markers are such.
pub struct OutputParser {
    way: Way,
}

enum Way {
    Harmony(Box<Harmony>),
    Plain { reasoning: Option<Reasoning>, calls: Option<Box<Calls>> },
}

impl OutputParser {
    /// For a template's source and the end of the prompt that it rendered.
    pub fn new(template_source: &str, generation_prompt: &str, options: OutputOptions) -> Self {
        let family = Family::of_template(template_source);
        if family.is_harmony() {
            return Self { way: Way::Harmony(Box::new(Harmony::new(options.tools, generation_prompt))) };
        }
        let with_calls = !options.tools.is_empty() || options.any_tool;
        let openings = if with_calls { family.openings() } else { &[] };
        let markers = Markers::of_template(template_source).filter(|_| !options.keep_reasoning);
        let reasoning = markers.map(|markers| Reasoning::new(markers, generation_prompt, openings));
        let calls = with_calls.then(|| Box::new(Calls::new(family, options.tools)));
        Self { way: Way::Plain { reasoning, calls } }
    }

    /// Takes a piece of text.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        match &mut self.way {
            Way::Harmony(harmony) => harmony.push(text),
            Way::Plain { reasoning, calls } => {
                let pieces = match reasoning {
                    Some(reasoning) => reasoning.push(text),
                    None => vec![Piece::Content(text.to_owned())],
                };
                events(pieces, calls.as_deref_mut())
            }
        }
    }

    /// The text is over.
    pub fn finish(&mut self) -> Vec<Event> {
        match &mut self.way {
            Way::Harmony(harmony) => harmony.finish(),
            Way::Plain { reasoning, calls } => {
                let pieces = reasoning.as_mut().map(Reasoning::finish).unwrap_or_default();
                let mut events = events(pieces, calls.as_deref_mut());
                for event in calls.as_mut().map(|calls| calls.finish()).unwrap_or_default() {
                    super::tools::push_event(&mut events, event);
                }
                events
            }
        }
    }

    /// Whether the model is thinking at the moment.
    pub fn is_reasoning(&self) -> bool {
        match &self.way {
            Way::Harmony(harmony) => harmony.is_reasoning(),
            Way::Plain { reasoning, .. } => reasoning.as_ref().is_some_and(Reasoning::is_open),
        }
    }
}

fn events(pieces: Vec<Piece>, mut calls: Option<&mut Calls>) -> Vec<Event> {
    let mut events = Vec::new();
    for piece in pieces {
        let more = match (piece, &mut calls) {
            (Piece::Reasoning(text), _) => vec![Event::Reasoning(text)],
            (Piece::Content(text), Some(calls)) => calls.push(&text),
            (Piece::Content(text), None) => vec![Event::Content(text)],
        };
        for event in more {
            super::tools::push_event(&mut events, event);
        }
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN: &str = "<think> <tool_call>";

    fn run(source: &str, prompt: &str, text: &str, cut: usize) -> Vec<Event> {
        let options = OutputOptions { any_tool: true, ..OutputOptions::default() };
        let mut parser = OutputParser::new(source, prompt, options);
        let mut all = Vec::new();
        let more = [parser.push(&text[..cut]), parser.push(&text[cut..]), parser.finish()];
        more.into_iter().flatten().for_each(|event| super::super::tools::push_event(&mut all, event));
        all
    }

    #[test]
    fn thoughts_words_and_calls_at_every_cut() {
        let text = "<think>\nI call.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let want = vec![
            Event::Reasoning("I call.".into()),
            Event::Content("Let me see.\n".into()),
            Event::CallStart { index: 0, id: None, name: "f".into() },
            Event::CallArguments { index: 0, text: "{\"a\": 1}".into() },
            Event::CallEnd { index: 0 },
        ];
        for cut in 0..=text.len() {
            assert_eq!(run(QWEN, "", text, cut), want, "cut at {cut}");
        }
        // A call in open reasoning ends it.
        let text = "hm<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        for cut in 0..=text.len() {
            let events = run(QWEN, "<think>\n", text, cut);
            assert_eq!(events[0], Event::Reasoning("hm".into()));
            assert!(matches!(&events[1], Event::CallStart { name, .. } if name == "f"), "{events:?}");
        }
    }

    #[test]
    fn harmony_has_channels() {
        let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>\
                    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"<|\"}<|call|>";
        let want = vec![
            Event::Reasoning("hm".into()),
            Event::Content("One moment.".into()),
            Event::CallStart { index: 0, id: None, name: "f".into() },
            Event::CallArguments { index: 0, text: "{\"a\": \"<|\"}".into() },
            Event::CallEnd { index: 0 },
        ];
        for cut in 0..=text.len() {
            assert_eq!(run("<|channel|>", "<|start|>assistant", text, cut), want, "cut at {cut}");
        }
        let other = "<|channel|>final<|message|>Hello<|return|>";
        assert_eq!(run("<|channel|>", "<|start|>assistant", other, 5), [Event::Content("Hello".into())]);
        let role = " to=functions.g<|channel|>commentary json<|message|>{}<|call|>";
        assert_eq!(
            run("<|channel|>", "<|start|>assistant", role, 9)[0],
            Event::CallStart { index: 0, id: None, name: "g".into() }
        );
        assert_eq!(run("<|channel|>", "<|start|>assistant", "Just words.", 3), [Event::Content("Just words.".into())]);
        let open = "<|start|>assistant<|channel|>final<|message|>";
        assert_eq!(run("<|channel|>", open, "Hello", 2), [Event::Content("Hello".into())]);
    }

    #[test]
    fn without_tools_markup_is_content() {
        let mut parser = OutputParser::new(QWEN, "", OutputOptions::default());
        let text = "<tool_call>{}</tool_call>";
        let mut events = parser.push(text);
        events.extend(parser.finish());
        assert_eq!(events, [Event::Content(text.into())]);
        let keep = OutputOptions { keep_reasoning: true, ..OutputOptions::default() };
        let mut parser = OutputParser::new(QWEN, "", keep);
        assert_eq!(parser.push("<think>x"), [Event::Content("<think>x".into())]);
    }
}
