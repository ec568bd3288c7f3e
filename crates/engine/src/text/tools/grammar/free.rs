//! Grammars of answers that may be anything, but whose calls fit the schemas of their tools: what a model may write where it is left to
//! the model whether it calls, and tools are strict.
//!
//! Where calls stand between marks of their own, a mark is what tells a call. Where they stand at the beginning of an answer, an answer
//! that begins as a call of an offered tool must be one, and every other is free: a list of numbers, or an object with other keys.

use super::super::{Family, Format, Tool, json as objects, python};
use super::{CallGrammar, Rules, as_regex};

/// White space before and between the parts of a call.
const BLANK: &str = r"[ \t\r\n]{0,20}";

impl Family {
    /// Rules for an `answer` that is anything, but what is a call of these tools fits; the arguments are those of `grammar`. Channels,
    /// where a family has any, are part of the answer, and thoughts are among them.
    pub fn free_grammar(&self, source: &str, tools: &[&Tool], parallel: bool, word: &dyn Fn(&str) -> String) -> String {
        let mut rules = Rules { tools, parallel, word, text: String::new(), known: Vec::new() };
        match self.format {
            Format::Json(form) if form.at_start => rules.free_object(form),
            Format::Python(form) if form.at_start => rules.free_python(form),
            Format::Functionary => rules.free_functionary(),
            Format::Harmony => rules.free_harmony(),
            _ => return between_marks(&self.grammar(source, tools, parallel, word), word),
        }
        rules.text
    }
}

/// What a region of calls begins with is known: all up to it is free, and so is all behind the region.
fn between_marks(calls: &CallGrammar, word: &dyn Fn(&str) -> String) -> String {
    let open = word(calls.open);
    let answer = match open.starts_with('"') {
        true => format!("answer: (head rest)* FREE?\nhead[lazy]: /(.|\\n)*{}/\n", as_regex(calls.open)),
        // A control token is no letter of the free text.
        false => format!("answer: (FREE? {open} rest)* FREE?\n"),
    };
    format!("{answer}FREE: /(.|\\n)+/\n{}", calls.rules)
}

impl Rules<'_> {
    /// The names of all tools, of which one is to be matched.
    fn names(&self) -> String {
        let names: Vec<String> = self.tools.iter().map(|tool| as_regex(&tool.name)).collect();
        format!("({})", names.join("|"))
    }

    /// Any text but those that one of these matches the beginning of.
    fn free(&mut self, but: &[String]) {
        let but: Vec<String> = but.iter().map(|begins| format!("/\\s*{begins}(.|\\n)*/")).collect();
        self.add("FREE", &format!("/(.|\\n)*/ & ~({})", but.join(" | ")));
    }

    /// The mark that may stand before a call at the beginning, as a part of a rule and as what free text does not begin with.
    fn mark(&self, opens: &[&'static str]) -> (String, Vec<String>) {
        // The last one is the bracket of the call itself.
        let marks = &opens[..opens.len() - 1];
        let written: Vec<String> = marks.iter().map(|mark| format!("({})?", self.word(mark))).collect();
        (written.join(" "), marks.iter().map(|mark| as_regex(mark)).collect())
    }

    /// An object at the beginning whose name is one of the tools is a call.
    fn free_object(&mut self, form: &'static objects::Form) {
        let mut any = Vec::new();
        for i in 0..self.tools.len() {
            let tool = self.tools[i];
            self.json(&format!("arguments_{i}"), &super::schema(tool));
            let name = as_regex(&tool.name);
            let kind = format!("(\"type\"{BLANK}:{BLANK}\"function\"{BLANK},{BLANK})?");
            let keys = format!("{kind}\"name\"{BLANK}:{BLANK}\"{name}\"{BLANK},{BLANK}\"(parameters|arguments)\"");
            self.add(&format!("HEAD_{i}"), &format!("/{BLANK}\\{{{BLANK}{keys}{BLANK}:{BLANK}/"));
            self.add(&format!("call_{i}"), &format!("HEAD_{i} arguments_{i} TAIL"));
            any.push(format!("call_{i}"));
        }
        self.add("TAIL", &format!("/{BLANK}\\}}/"));
        self.add("call", &any.join(" | "));
        let (mark, mut but) = self.mark(form.opens);
        // Wherever in an object the name stands, its reader takes it for a call's.
        but.push(format!("\\{{(.|\\n)*\"(name|tool_name|function)\"\\s*:\\s*\"{}\"", self.names()));
        self.free(&but);
        let calls = match self.parallel {
            true => format!("call ({} call)*", self.word(form.between)),
            false => "call".to_owned(),
        };
        self.add("answer", &format!("{mark} {calls} | FREE"));
    }

    /// A list at the beginning whose first item calls one of the tools is a list of calls.
    fn free_python(&mut self, form: &'static python::Form) {
        let mut any = Vec::new();
        for i in 0..self.tools.len() {
            // The first call's head is one word with the bracket: free text goes as far as the name, and no word may end before it.
            let name = as_regex(&self.tools[i].name);
            self.add(&format!("FIRST_{i}"), &format!("/{BLANK}\\[{BLANK}{name}(\\.call)?\\(/"));
            let (call, arguments) = self.python_call(i);
            any.push((format!("FIRST_{i} {arguments} {}", self.word(")")), call));
        }
        let (first, calls): (Vec<String>, Vec<String>) = any.into_iter().unzip();
        self.add("first", &first.join(" | "));
        self.add("call", &calls.join(" | "));
        let (mark, mut but) = self.mark(form.opens);
        but.push(format!("\\[\\s*{}(\\.call)?\\(", self.names()));
        self.free(&but);
        let more = if self.parallel { format!("({} call)*", self.word(", ")) } else { String::new() };
        let close: Vec<String> = form.close.iter().map(|close| format!("({})?", self.word(close))).collect();
        self.add("answer", &format!("{mark} first {more} {} {} | FREE", self.word("]"), close.join(" ")));
    }

    /// Everything has a recipient: `all`, or a tool.
    fn free_functionary(&mut self) {
        self.calls(|rules, tool| (rules.word(&format!("{}\n", tool.name)), String::new()));
        let (line, next) = (self.word("\n"), self.word(">>>"));
        self.add("said[lazy]", "/all\\n(.|\\n)*>>>/");
        self.add("SAID", "/all\\n(.|\\n)*/");
        let more = if self.parallel { format!("({line}? {next} call)*") } else { String::new() };
        self.add("answer", &format!("said? call {more} | SAID"));
    }

    /// Thoughts and words before a call have channels of their own, and so has the answer.
    fn free_harmony(&mut self) {
        self.calls(|rules, tool| {
            let name = &tool.name;
            let json = ["", " <|constrain|>json", "<|constrain|>json", " json"];
            let named = json.map(|json| format!("<|channel|>commentary to=functions.{name}{json}<|message|>"));
            // The recipient may stand with the role as well.
            let role = json.map(|json| format!(" to=functions.{name}<|channel|>commentary{json}<|message|>"));
            let heads: Vec<String> = named.iter().chain(&role).map(|head| rules.word(head)).collect();
            (format!("({})", heads.join(" | ")), String::new())
        });
        let thought = self.until("thought", "<|end|>");
        let text = self.once("TEXT", "TEXT: /(.|\\n)+/");
        let [analysis, aside, last, next] = [
            "<|channel|>analysis<|message|>",
            "<|channel|>commentary<|message|>",
            "<|channel|>final<|message|>",
            "<|start|>assistant",
        ]
        .map(|mark| self.word(mark));
        self.add("answer", &format!("(({analysis} | {aside}) {thought} {next})* (call | {last} {text}?)"));
    }
}
