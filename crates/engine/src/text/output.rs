//! From the text that a model writes to reasoning, content and tool calls: the whole way out, in one place.

use super::reasoning::{Markers, Piece, Reasoning};
use super::tools::{Bare, Calls, Event, Family, Harmony, Tool};

/// What to look for in an output.
#[derive(Clone, Debug, Default)]
pub struct OutputOptions {
    /// Tools that were offered. Without any, calls are not looked for.
    pub tools: Vec<Tool>,
    /// Calls are looked for even though no tools are named; every name is then taken.
    pub any_tool: bool,
    /// Reasoning stays in the content, markers and all.
    pub keep_reasoning: bool,
    /// An answer that is nothing but a JSON object which names a tool is a call, though it lacks the family's marks.
    pub bare_calls: bool,
    /// The answer can be nothing but calls.
    pub only_calls: bool,
}

/// Reads what a model writes. The text must be decoded with special tokens shown: some markers are such.
pub struct OutputParser {
    way: Way,
}

enum Way {
    Harmony(Box<Harmony>),
    Plain { reasoning: Option<Reasoning>, calls: Option<Box<Finder>> },
}

/// Finds calls in content: those with marks, and before them one that is all of the content and has none.
struct Finder {
    bare: Option<Bare>,
    calls: Calls,
    only_calls: bool,
}

impl Finder {
    fn push(&mut self, text: &str) -> Vec<Event> {
        match &mut self.bare {
            None => self.calls.push(text),
            Some(bare) => match bare.push(text) {
                None => Vec::new(),
                Some(released) => {
                    self.bare = None;
                    self.calls.push(&released)
                }
            },
        }
    }

    fn finish(&mut self, cut: bool) -> Vec<Event> {
        match self.bare.take().map(Bare::finish) {
            Some(Ok(call)) => call,
            bare => {
                let mut events = bare.and_then(Result::err).map(|text| self.calls.push(&text)).unwrap_or_default();
                let rest = if cut { self.calls.finish_cut(self.only_calls) } else { self.calls.finish() };
                rest.into_iter().for_each(|event| super::tools::push_event(&mut events, event));
                events
            }
        }
    }
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
        let bare = options.bare_calls && family.has_marks() && !options.tools.is_empty();
        let bare = bare.then(|| Bare::new(options.tools.clone()));
        let only_calls = options.only_calls;
        let calls = with_calls.then(|| Box::new(Finder { bare, calls: Calls::new(family, options.tools), only_calls }));
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
        self.end(false)
    }

    /// The text is over because it was cut off: marks of a call that was on its way are no content.
    pub fn finish_cut(&mut self) -> Vec<Event> {
        self.end(true)
    }

    fn end(&mut self, cut: bool) -> Vec<Event> {
        match &mut self.way {
            Way::Harmony(harmony) => harmony.finish(),
            Way::Plain { reasoning, calls } => {
                let pieces = reasoning.as_mut().map(Reasoning::finish).unwrap_or_default();
                let mut events = events(pieces, calls.as_deref_mut());
                for event in calls.as_mut().map(|calls| calls.finish(cut)).unwrap_or_default() {
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

fn events(pieces: Vec<Piece>, mut calls: Option<&mut Finder>) -> Vec<Event> {
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

    /// What becomes of a text that comes in two pieces, where `f` is the only tool.
    fn with_tool(source: &str, options: OutputOptions, text: &str, at: usize, cut_off: bool) -> Vec<Event> {
        let tools = vec![Tool { name: "f".into(), ..Tool::default() }];
        let mut parser = OutputParser::new(source, "", OutputOptions { tools, ..options });
        let mut all = Vec::new();
        let mut more = vec![parser.push(&text[..at]), parser.push(&text[at..])];
        more.push(if cut_off { parser.finish_cut() } else { parser.finish() });
        more.into_iter().flatten().for_each(|event| super::super::tools::push_event(&mut all, event));
        all
    }

    fn call(arguments: &str) -> Vec<Event> {
        let mut events = vec![Event::CallStart { index: 0, id: None, name: "f".into() }];
        if !arguments.is_empty() {
            events.push(Event::CallArguments { index: 0, text: arguments.into() });
        }
        events.push(Event::CallEnd { index: 0 });
        events
    }

    #[test]
    fn an_answer_that_is_one_object_without_marks_is_a_call_at_every_cut() {
        let bare = || OutputOptions { bare_calls: true, ..OutputOptions::default() };
        for (text, arguments) in [
            (r#"{"name": "f", "arguments": {"a": "x\n```\n}"}}"#, r#"{"a": "x\n```\n}"}"#),
            ("\n {\"arguments\": {\"a\": 1}, \"name\": \"f\"} \n", "{\"a\": 1}"),
            ("```json\n{\"name\": \"f\", \"arguments\": {\"a\": {}}}\n```\n", "{\"a\": {}}"),
            ("```\n{\"name\": \"f\",\n \"arguments\": {}\n}\n```", "{}"),
            // The model has ended without closing the fence.
            ("```json\n{\"name\": \"f\", \"arguments\": {}}", "{}"),
            ("{\"name\": \"f\", \"parameters\": {\"a\": \"ä\"}}", "{\"a\": \"ä\"}"),
        ] {
            for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
                assert_eq!(with_tool(QWEN, bare(), text, at, false), call(arguments), "{text} cut at {at}");
            }
            // Not where the request does not allow it.
            let events = with_tool(QWEN, OutputOptions::default(), text, 3, false);
            assert_eq!(events, [Event::Content(text.into())], "{text}");
        }
    }

    #[test]
    fn an_answer_with_anything_else_is_no_bare_call_at_every_cut() {
        let bare = || OutputOptions { bare_calls: true, ..OutputOptions::default() };
        for text in [
            "{\"name\": \"g\", \"arguments\": {}}",
            "{\"name\": \"f\", \"arguments\": {}} That is it.",
            "See: {\"name\": \"f\", \"arguments\": {}}",
            "{\"city\": \"Oslo\"}",
            "{\"name\": \"f\"}x",
            "{\"name\": \"f\", \"arguments\": [1]}",
            "{\"name\": \"f\", \"arguments\": {\"a\": ",
            "```python\nprint(1)\n```",
            "```json\n{\"name\": \"f\", \"arguments\": {}}\n```\nDone.",
            "``",
            "{",
            "",
        ] {
            for at in 0..=text.len() {
                let events = with_tool(QWEN, bare(), text, at, false);
                let want = if text.is_empty() { vec![] } else { vec![Event::Content(text.into())] };
                assert_eq!(events, want, "{text} cut at {at}");
            }
        }
        // What cannot be a call is not held back to the end, and a call with marks is found behind it.
        let tools = vec![Tool { name: "f".into(), ..Tool::default() }];
        let mut parser = OutputParser::new(QWEN, "", OutputOptions { tools, ..bare() });
        assert_eq!(parser.push("{\"name"), []);
        assert_eq!(parser.push("d\": 1"), [Event::Content("{\"named\": 1".into())]);
        let marked = "Now. <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        for at in 0..=marked.len() {
            let events = with_tool(QWEN, bare(), marked, at, false);
            assert_eq!(events[1..], call("{}"), "cut at {at}");
        }
    }

    #[test]
    fn a_call_that_is_cut_off_leaves_no_marks() {
        let only = || OutputOptions { only_calls: true, ..OutputOptions::default() };
        let whole = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        let named = whole.find("\"f\"").expect("it is there") + 3;
        for end in 0..=whole.len() {
            for at in 0..=end {
                let events = with_tool(QWEN, only(), &whole[..end], at, true);
                let content = events.iter().any(|event| matches!(event, Event::Content(_)));
                assert!(!content, "{:?}: {events:?}", &whole[..end]);
                let called = matches!(events.first(), Some(Event::CallStart { name, .. }) if name == "f");
                assert_eq!(called, end >= named, "{:?}: {events:?}", &whole[..end]);
                assert!(!called || matches!(events.last(), Some(Event::CallEnd { index: 0 })), "{events:?}");
            }
        }
        assert_eq!(with_tool(QWEN, only(), &whole[..named + 14], 5, true), call(""));
        // Words before it stay, and so does what only looks like the beginning of a mark where words may come.
        let said = with_tool(QWEN, OutputOptions::default(), "Hm. <tool_call>{\"na", 6, true);
        assert_eq!(said, [Event::Content("Hm. ".into())]);
        let less = with_tool(QWEN, OutputOptions::default(), "a <", 1, true);
        assert_eq!(less, [Event::Content("a <".into())]);
        // Llama 3 has no marks: an object that is cut off may be what was asked for.
        let llama = "<|start_header_id|> \"parameters\"";
        let json = "{\"name\": \"Bob\"";
        assert_eq!(with_tool(llama, OutputOptions::default(), json, 4, true), [Event::Content(json.into())]);
        assert_eq!(with_tool(llama, OutputOptions::default(), "{\"name\": \"f\",", 4, true), call(""));
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
