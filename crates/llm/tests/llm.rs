//! The library as other programs use it, on the CPU and a tiny model with random weights.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt as _;
use kiln_engine::quantise_recipe::Recipe;
use kiln_engine::synth::{Preset, Synth};
use kiln_llm::chat::{Format, Stop};
use kiln_llm::{
    Builder, EmbedOptions, Error, Llm, LoadError, Note, Piece, PlaceRule, Placing, PlacingError, Pooling, Request,
    RequestError, user,
};
use tempfile::TempDir;

struct Model {
    folder: TempDir,
}

impl Model {
    fn new() -> Model {
        let folder = tempfile::tempdir().unwrap();
        let synth = Synth::new(Preset::from_name("tiny-llama").unwrap(), Recipe::from_name("Q8_0").unwrap(), 3);
        std::fs::write(folder.path().join("tiny.gguf"), synth.to_bytes().unwrap()).unwrap();
        Model { folder }
    }

    fn open(&self, builder: Builder) -> Result<Llm, Error> {
        builder.open(self.folder.path().join("tiny.gguf"))
    }
}

fn cpu() -> Builder {
    Llm::builder().cpu().context(512).chat_template("chatml")
}

fn open() -> Llm {
    Model::new().open(cpu().parallel(4)).unwrap()
}

#[test]
fn answers_come_in_pieces_or_as_a_whole() {
    let llm = open();
    let request = || llm.generate("Once upon a time").max_tokens(12).temperature(0.0);
    let (mut text, mut ends) = (String::new(), 0);
    for piece in request().stream().unwrap() {
        match piece.unwrap() {
            Piece::Text(more) => text += &more,
            Piece::End { stop, usage } => {
                assert_eq!((stop, usage.generated_tokens), (Stop::Limit, 12));
                ends += 1;
            }
            _ => {}
        }
    }
    assert_eq!(ends, 1);
    let answer = request().tokens().answer().unwrap();
    assert_eq!((answer.text.as_str(), answer.tokens.len()), (text.as_str(), 12));
    assert_eq!(futures_executor(request()), text, "a task reads the same as a thread");
    let chat = llm.chat("Hi").max_tokens(3).answer().unwrap();
    assert!(chat.usage.prompt_tokens > llm.tokenize("Hi").unwrap().len(), "the template is in the prompt");
    // The prompt alone is read.
    let nothing = llm.chat([user("Hi")]).max_tokens(0).answer().unwrap();
    assert_eq!((nothing.text.as_str(), nothing.usage.generated_tokens), ("", 0));
}

/// Reads a stream as a task does.
fn futures_executor(request: Request) -> String {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut stream = request.stream().unwrap().into_async();
    let mut text = String::new();
    loop {
        match stream.poll_next_unpin(&mut context) {
            std::task::Poll::Ready(Some(piece)) => text += piece.unwrap().text(),
            std::task::Poll::Ready(None) => return text,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn threads_are_served_together_and_cancelled_alone() {
    let llm = open();
    let alone = llm.generate("One two three").max_tokens(40).temperature(0.0).text().unwrap();
    let mut endless = llm.generate("Nine").stop_rule(|rule| rule.ignore_end = true).stream().unwrap();
    let at_once = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let (llm, at_once) = (llm.clone(), Arc::clone(&at_once));
            std::thread::spawn(move || {
                let stream = llm.generate("One two three").max_tokens(40).temperature(0.0).stream().unwrap();
                let mut text = String::new();
                for piece in stream {
                    text += piece.unwrap().text();
                    at_once.fetch_max(llm.scheduler().load().writing, Ordering::Relaxed);
                }
                text
            })
        })
        .collect();
    let texts: Vec<String> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(texts.iter().all(|text| text.len() == alone.len()), "{texts:?} {alone:?}");
    assert!(at_once.load(Ordering::Relaxed) >= 2, "{at_once:?}");
    endless.canceller().cancel();
    let last = endless.by_ref().last().unwrap().unwrap();
    assert!(matches!(last, Piece::End { stop: Stop::Cancelled, .. }), "{last:?}");
    assert!(endless.next().is_none() && endless.is_over());
}

#[test]
fn a_sampler_of_the_callers_changes_logits_or_takes_the_token() {
    let llm = open();
    let first = llm.generate("abc").max_tokens(5).temperature(0.0).tokens().answer().unwrap();
    let ids: Vec<u32> = first.tokens.iter().map(|token| token.id).collect();
    let told = Arc::new(Mutex::new(Vec::new()));
    let (seen, forbidden) = (Arc::clone(&told), ids[0]);
    let other = llm.generate("abc").max_tokens(5).temperature(0.0).tokens().sampler(move |tokens, logits| {
        seen.lock().unwrap().push(tokens.len());
        logits[forbidden as usize] = f32::NEG_INFINITY;
        None
    });
    let other = other.answer().unwrap();
    assert!(other.tokens.iter().all(|token| token.id != forbidden), "{:?} {ids:?}", other.tokens);
    let prompt = llm.tokenize("abc").unwrap().len();
    assert_eq!(*told.lock().unwrap(), (prompt..prompt + 5).collect::<Vec<_>>());
    let taken = llm.generate("abc").max_tokens(3).tokens().sampler(|tokens, _| Some(tokens.len() as u32 + 60));
    let taken: Vec<u32> = taken.answer().unwrap().tokens.iter().map(|token| token.id).collect();
    assert_eq!(taken, (0..3).map(|n| (prompt + n) as u32 + 60).collect::<Vec<_>>());
    let outside = llm.generate("abc").sampler(|_, logits| Some(logits.len() as u32)).answer();
    assert!(outside.unwrap_err().to_string().contains("vocabulary"));
}

#[test]
fn formats_are_kept() {
    let llm = open();
    let schema = serde_json::json!({"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["n"], "additionalProperties": false});
    let text = llm.chat("A number").json_schema(schema).max_tokens(200).text().unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(value["n"].as_u64().is_some_and(|n| n <= 99), "{text}");
    let choice = Format::Choice(vec!["left".into(), "right".into()]);
    let text = llm.generate("Which way?").format(choice).text().unwrap();
    assert!(["left", "right"].contains(&text.as_str()), "{text:?}");
    let wrong = llm.chat("x").format(Format::Regex("(".into())).text().unwrap_err();
    assert!(matches!(wrong, Error::Request(RequestError::Chat(_))), "{wrong:?}");
}

#[test]
fn tokens_vectors_and_logits_fit_together() {
    let llm = open();
    let tokens = llm.tokenize("Hello there").unwrap();
    assert_eq!(llm.detokenize(&tokens).unwrap(), "Hello there");
    let rows = llm.logits(&tokens).unwrap();
    assert_eq!((rows.len(), rows[0].len()), (tokens.len(), llm.model().config.vocab));
    let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
    let answer = llm.generate(tokens.clone()).max_tokens(1).temperature(0.0).tokens().answer().unwrap();
    assert_eq!(answer.tokens[0].id, best(rows.last().unwrap()));
    let options = EmbedOptions { pooling: Some(Pooling::Mean), ..EmbedOptions::default() };
    let vectors = llm.embed_with(&["one text", "another", "one text"], options).unwrap();
    let length = vectors[1].iter().map(|x| x * x).sum::<f32>();
    assert!((length - 1.0).abs() < 1e-4 && vectors[0] == vectors[2] && vectors[0] != vectors[1], "{length}");
    // The file does not say how it would embed.
    assert!(llm.embed(&["x"]).is_err());
}

#[test]
fn json_asks_for_the_same() {
    let llm = open();
    let asked = |json: &str| Request::from_json(&llm, json).and_then(Request::answer);
    let answer = asked(r#"{"prompt": "Once", "max_tokens": 4, "temperature": 0, "logprobs": 2}"#).unwrap();
    let same = llm.generate("Once").max_tokens(4).temperature(0.0).text().unwrap();
    assert_eq!(answer.text, same);
    assert_eq!(answer.tokens[0].logprobs.as_ref().unwrap().top.len(), 2);
    let chat = r#"{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f",
        "parameters": {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": false}}}],
        "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 300}"#;
    let call = asked(chat).unwrap();
    assert_eq!(call.calls.len(), 1, "{call:?}");
    assert_eq!(call.calls[0].name, "f");
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&call.calls[0].arguments).unwrap(),
        serde_json::json!({"a": "b"})
    );
    for (json, word) in [
        ("{", "not understood"),
        (r#"{"promt": "x"}"#, "promt"),
        (r#"{"prompt": 5}"#, "`prompt`"),
        (r#"{}"#, "`messages`"),
        (r#"{"messages": []}"#, "no messages"),
        (r#"{"prompt": "x", "regex": "a", "choice": ["b"]}"#, "exclude"),
        (r#"{"prompt": "x", "logit_bias": {"9999999": 1}}"#, "9999999"),
    ] {
        let error = asked(json).unwrap_err().to_string();
        assert!(error.contains(word), "{json}: {error}");
    }
    assert!(Builder::from_json(r#"{"contxt": 5}"#).unwrap_err().to_string().contains("contxt"));
    assert!(Builder::from_json(r#"{"cache_type_k": "q9"}"#).unwrap_err().to_string().contains("q8_0"));
}

#[test]
fn what_is_wrong_is_told_by_whom_it_concerns() {
    let model = Model::new();
    let missing = cpu().open("no-such.gguf").unwrap_err();
    assert!(matches!(missing, Error::Load(LoadError::File(_))) && missing.to_string().contains("no-such.gguf"));
    let placing = Placing { rules: vec![PlaceRule::parse("blk.0=1").unwrap()], ..Placing::default() };
    let no_gpu = model.open(cpu().placing(placing)).unwrap_err();
    let is_rule =
        |why: &Error| matches!(why, Error::Device(kiln_llm::DeviceError::Placing(PlacingError::RuleNeedsGpu { .. })));
    assert!(is_rule(&no_gpu) && !no_gpu.to_string().contains("--"), "{no_gpu}");
    let notes = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notes);
    let llm = model.open(cpu().gpu_layers(3).on_note(move |note| heard.lock().unwrap().push(note))).unwrap();
    assert_eq!(*notes.lock().unwrap(), [Note::LayersIgnored { asked: 3 }]);
    let long = llm.generate(vec![65; 600]).text().unwrap_err();
    assert!(matches!(long, Error::Engine(kiln_llm::EngineError::PromptTooLong { tokens: 600, .. })), "{long:?}");
    let broken = model.open(cpu().chat_template("{% for")).unwrap();
    let no_template = broken.chat("x").text().unwrap_err();
    assert!(matches!(no_template, Error::Request(RequestError::Chat(_))), "{no_template:?}");
    assert!(broken.generate("x").max_tokens(1).text().is_ok(), "texts are continued without one");
}

/// The programs of docs/library.md, word by word: that they compile is the test.
mod book {
    use kiln_llm::{Error, Llm, TensorType};

    #[allow(clippy::print_stdout, reason = "the book's reader wants to see something")]
    pub(super) fn chat() -> Result<(), Error> {
        use kiln_llm::Llm;

        let llm = Llm::open("model.gguf")?;
        for piece in llm.chat("What is a kiln?").max_tokens(200).stream()? {
            print!("{}", piece?.text());
        }
        Ok(())
    }

    #[allow(clippy::print_stderr, reason = "likewise")]
    pub(super) fn build() -> Result<Llm, Error> {
        let llm = Llm::builder()
            .device("0,1") // or .cpu(); KILN_DEVICE is heeded where nothing is said
            .context(16_384)
            .parallel(8) // sequences at once; more requests wait for their turn
            .cache_types(TensorType::Q8_0, TensorType::Q8_0)
            .adapter("style.gguf", 0.8)
            .fallback(true) // a lost device's layers move to what is left
            .on_note(|note| eprintln!("{note}"))
            .open("model.gguf")?;
        Ok(llm)
    }
}

#[test]
fn programs_of_the_book_are_those_that_compile_here() {
    // Without a model they end by an error.
    let ends: [bool; 2] = [book::chat().is_err(), book::build().is_err()];
    assert_eq!(ends, [true; 2]);
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/library.md")).unwrap();
    let here = words(include_str!("llm.rs"));
    let programs: Vec<&str> =
        page.split("```rust\n").skip(1).filter_map(|rest| rest.split_once("```")).map(|(code, _)| code).collect();
    assert_eq!(programs.len(), 2);
    for program in programs {
        assert!(here.contains(&words(program)), "docs/library.md has a program that is not in `book`:\n{program}");
    }
}
