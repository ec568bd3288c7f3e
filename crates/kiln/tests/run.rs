//! `kiln run` and `kiln chat` as users meet them: where the prompt comes from, what is written where, what the flags do. Tiny
//! models with random weights, on the CPU.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use kiln_gguf::{Gguf, Writer};
use serde_json::Value;
use tempfile::TempDir;

/// Runs the binary with this text on stdin, on a machine without any Vulkan driver.
fn kiln(folder: &TempDir, arguments: &[&str], stdin: &[u8]) -> Output {
    let nowhere = folder.path().join("no-such-manifest.json");
    let mut child = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(arguments)
        .env("VK_DRIVER_FILES", &nowhere)
        .env("VK_ICD_FILENAMES", &nowhere)
        .env("XDG_DATA_HOME", folder.path())
        .env_remove("KILN_DEVICE")
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Whoever does not read stdin may have gone already.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    child.wait_with_output().unwrap()
}

/// A folder with a model that chats (`chat.gguf`) and the same model without its template (`base.gguf`).
fn models() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let chat = folder.path().join("chat.gguf");
    assert_eq!(kiln(&folder, &["synth", "tiny-llama", "F32", chat.to_str().unwrap()], b"").status.code(), Some(0));
    change(&chat, &folder.path().join("base.gguf"), None);
    folder
}

/// Copies a model with another chat template, or none.
fn change(from: &Path, to: &Path, template: Option<&str>) {
    let gguf = Gguf::open(from).unwrap();
    let mut metadata = gguf.metadata().clone();
    match template {
        Some(template) => metadata.set("tokenizer.chat_template", template),
        None => drop(metadata.remove("tokenizer.chat_template")),
    }
    let mut writer = Writer::new(metadata);
    for tensor in gguf.tensors() {
        writer.add(&tensor.name, tensor.dims(), tensor.ty, gguf.data(tensor)).unwrap();
    }
    writer.save(to).unwrap();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a run printed, which must have worked.
fn said(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn fails(output: &Output, code: i32, words: &[&str]) {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
}

fn json(output: &Output) -> Value {
    serde_json::from_str(&said(output)).unwrap()
}

/// The first flags of most runs.
const RUN: [&str; 6] = ["run", "--cpu", "-n", "12", "--seed", "7"];

#[test]
fn the_prompt_comes_from_anywhere_and_the_answer_alone_goes_out() {
    let folder = models();
    let run = |more: &[&str], stdin: &str| kiln(&folder, &[&RUN, more].concat(), stdin.as_bytes());
    let want = said(&run(&["chat.gguf", "hello world"], ""));
    assert!(want.len() > 4 && want.ends_with('\n') && !want.contains("hello world"), "{want}");
    std::fs::write(folder.path().join("prompt.txt"), "hello world\r\n").unwrap();
    for (arguments, stdin) in [
        (&["chat.gguf", "-p", "hello world"][..], ""),
        (&["chat.gguf", "-f", "prompt.txt"], ""),
        (&["chat.gguf"], "hello world\n"),
        (&["chat.gguf", "-"], "hello world\n"),
        (&["chat.gguf", "-f", "-"], "hello world"),
        (&["-m", "chat.gguf", "hello world"], ""),
        // Nothing is added by an empty stdin.
        (&["chat.gguf", "hello world"], "\n"),
    ] {
        let output = run(arguments, stdin);
        assert_eq!(said(&output), want, "{arguments:?}");
        assert!(!text(&output.stderr).contains("tokens/s"), "only -v and a terminal are told");
    }
    assert!(text(&run(&["chat.gguf", "hello world", "-v"], "").stderr).contains("generated: 12 tokens"));
    assert_ne!(said(&run(&["chat.gguf", "hello world", "--system", "the end"], "")), want);
    // What is piped comes behind the prompt, wherever that is from.
    let both = said(&run(&["chat.gguf", "hello world\n\nand more\nlines"], ""));
    assert_ne!(both, want);
    for arguments in
        [&["chat.gguf", "hello world"][..], &["chat.gguf", "-p", "hello world"], &["chat.gguf", "-f", "prompt.txt"]]
    {
        assert_eq!(said(&run(arguments, "and more\nlines\n")), both, "{arguments:?}");
    }
    fails(&kiln(&folder, &["run", "chat.gguf", "hello"], b"abc\xff"), 1, &["stdin", "UTF-8", "byte 3"]);
    fails(&run(&["chat.gguf"], ""), 1, &["there is no prompt", "kiln chat"]);
    fails(&kiln(&folder, &["run", "chat.gguf"], b"abc\xff"), 1, &["stdin", "UTF-8", "byte 3"]);
    fails(&run(&["chat.gguf", "x", "-p", "y"], ""), 1, &["more than once"]);
    fails(&run(&["chat.gguf", "-f", "none.txt"], ""), 1, &["none.txt"]);
    fails(&run(&["Hello"], ""), 1, &["Hello", "no such file", "-p"]);
    fails(&run(&["chat.gguf", "x", "--raw", "--system", "y"], ""), 2, &["--system"]);
}

#[test]
fn templates_are_used_if_there_are_some() {
    let folder = models();
    let run = |more: &[&str]| kiln(&folder, &[&RUN, more, &["--temp", "0"]].concat(), b"");
    let base = run(&["base.gguf", "hello"]);
    assert!(text(&base.stderr).contains("no chat template"));
    let raw = run(&["chat.gguf", "hello", "--raw"]);
    assert_eq!(said(&raw), said(&base));
    assert!(!text(&raw.stderr).contains("template"));
    let chat = said(&run(&["chat.gguf", "hello"]));
    assert_ne!(chat, said(&base));
    let written = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(said(&run(&["base.gguf", written])), chat, "what the template renders");
    fails(&run(&["base.gguf", "x", "--system", "y"]), 1, &["no chat template", "--system"]);
    let broken = folder.path().join("broken.gguf");
    change(&folder.path().join("base.gguf"), &broken, Some("{% for m in %}"));
    fails(&run(&["broken.gguf", "x"]), 1, &["template", "--raw"]);
    assert_eq!(said(&run(&["broken.gguf", "hello", "--raw"])), said(&base));
}

#[test]
fn json_tells_tokens_probabilities_and_times() {
    let folder = models();
    let run = |more: &[&str]| kiln(&folder, &[&RUN, &["chat.gguf", "hello world"][..], more].concat(), b"");
    let told = json(&run(&["--json", "--logprobs", "3"]));
    assert_eq!(format!("{}\n", told["text"].as_str().unwrap()), said(&run(&[])));
    assert_eq!(told["end"], "limit");
    let tokens = told["tokens"].as_array().unwrap();
    assert_eq!((tokens.len(), &told["usage"]["generated_tokens"]), (12, &Value::from(12)));
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        let of = |t: &Value| t["logprob"].as_f64().unwrap();
        assert!(top.len() == 3 && of(&top[0]) >= of(&top[1]) && of(&top[0]) >= of(token) && of(token) < 0.0);
    }
    assert!(told["usage"]["prompt_tokens"].as_u64().unwrap() > 10);
    assert!(told["timings"]["prompt_ms"].as_f64().unwrap() > 0.0);
    let none = json(&kiln(&folder, &["run", "--cpu", "chat.gguf", "hello", "--json", "-n", "0"], b""));
    assert_eq!((&none["text"], none["tokens"].as_array().unwrap().len()), (&Value::from(""), 0));
    assert!(none["tokens"][0]["logprob"].is_null());
    fails(&run(&["--logprobs", "3"]), 2, &["--json"]);
}

#[test]
fn seeds_samplers_and_stops_do_what_they_say() {
    let folder = models();
    let run = |more: &[&str]| kiln(&folder, &[&["run", "--cpu", "chat.gguf", "-p", "hello"], more].concat(), b"");
    let of = |more: &[&str]| said(&run(&[&["-n", "24"], more].concat()));
    let seven = of(&["--seed", "7"]);
    assert_eq!(of(&["-s", "7"]), seven);
    assert_ne!(of(&["--seed", "8"]), seven);
    // One candidate is left: no chance, whatever the seed.
    let greedy = of(&["--temp", "0", "--seed", "1"]);
    assert_eq!(of(&["--top-k", "1", "--temp", "2", "--seed", "2"]), greedy);
    assert_eq!(of(&["--sampling-seq", "k", "--top-k", "1"]), greedy);
    assert_eq!(of(&["--samplers", "top_k;temperature", "--top-k", "1"]), greedy);
    assert_ne!(of(&["--temp", "0", "--repeat-penalty", "5", "--repeat-last-n", "-1"]), greedy);
    let tokens = json(&run(&["-n", "24", "--temp", "0", "--json"]))["tokens"].clone();
    let first = tokens[0]["id"].as_u64().unwrap();
    let without = json(&run(&["-n", "4", "--temp", "0", "--json", "--logit-bias", &format!("{first}-inf")]));
    assert_ne!(without["tokens"][0]["id"].as_u64().unwrap(), first);
    // The text ends before the first stop that comes.
    let greedy = greedy.trim_end_matches('\n');
    let stop: String = greedy.chars().skip(5).take(2).collect();
    let told = json(&run(&["-n", "24", "--temp", "0", "--json", "--stop", &stop, "--stop", "never comes"]));
    assert_eq!(told["text"].as_str().unwrap(), &greedy[..greedy.find(&stop).unwrap()]);
    assert_eq!((&told["end"], &told["ended_by"]), (&Value::from("stop"), &Value::from(stop)));
    // The context bounds what has no other bound, and that is said.
    let full = run(&["--ignore-eos", "-c", "64", "-n", "-1"]);
    assert!(said(&full).len() > 20 && text(&full.stderr).contains("context of 64 tokens is full"));
    for (flags, words) in [
        (&["--top-k", "x"][..], &["--top-k"][..]),
        (&["--seed", "-2"], &["--seed"]),
        (&["--logit-bias", "7"], &["15043+1"]),
        (&["--grammar", "root ::= \"a\"", "--regex", "a"], &["--regex"]),
        (&["--choice", "a", "--lark", "start: \"a\""], &["--lark"]),
    ] {
        fails(&run(flags), 2, words);
    }
    for (flags, words) in [
        (&["--min-p", "2"][..], &["min_p", "0 to 1"][..]),
        (&["--samplers", "top_q"], &["top_q", "top_k"]),
        (&["--sampling-seq", "z"], &["`z`"]),
        (&["--logit-bias", "99999+1"], &["99999"]),
        (&["--json-schema", "{"], &["--json-schema"]),
        (&["--json-schema", r#"{"type": "nothing"}"#], &["schema"]),
        (&["--grammar", "root :="], &["grammar"]),
        (&["--lark", "start"], &["grammar"]),
        (&["--grammar-file", "none.gbnf"], &["none.gbnf"]),
        (&["-c", "0"], &["0 tokens"]),
    ] {
        fails(&run(flags), 1, words);
    }
    fails(&kiln(&folder, &["run", "--cpu", "chat.gguf", "-c", "8", &"long ".repeat(50)], b""), 1, &["context holds 8"]);
}

#[test]
fn rules_are_kept() {
    let folder = models();
    let run =
        |more: &[&str]| said(&kiln(&folder, &[&["run", "--cpu", "chat.gguf", "-p", "hello"], more].concat(), b""));
    assert!(["yes\n", "no\n"].contains(&run(&["--grammar", "root ::= \"yes\" | \"no\""]).as_str()));
    std::fs::write(folder.path().join("rule.gbnf"), "root ::= \"yes\"").unwrap();
    assert_eq!(run(&["--grammar-file", "rule.gbnf"]), "yes\n");
    assert!(["left\n", "right\n"].contains(&run(&["--choice", "left", "--choice", "right"]).as_str()));
    assert_eq!(run(&["--lark", "start: \"yes\""]), "yes\n");
    std::fs::write(folder.path().join("rule.lark"), "start: \"no\"").unwrap();
    assert_eq!(run(&["--lark", "rule.lark"]), "no\n");
    let number = run(&["--regex", "[0-9]{3}"]);
    assert!(number.len() == 4 && number.trim_end().parse::<u32>().is_ok(), "{number}");
    let schema = r#"{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}"#;
    let told: Value = serde_json::from_str(&run(&["--json-schema", schema])).unwrap();
    assert!(told["a"].is_boolean(), "{told}");
    std::fs::write(folder.path().join("schema.json"), schema).unwrap();
    let told: Value = serde_json::from_str(&run(&["-j", "schema.json"])).unwrap();
    assert!(told["a"].is_boolean(), "{told}");
}

#[test]
fn a_state_goes_on_with_and_without_a_prompt() {
    let folder = models();
    let recurrent = folder.path().join("rwkv.gguf");
    assert_eq!(kiln(&folder, &["synth", "tiny-rwkv6", "F32", recurrent.to_str().unwrap()], b"").status.code(), Some(0));
    for model in ["chat.gguf", "rwkv.gguf"] {
        let run = |more: &[&str]| said(&kiln(&folder, &[&["run", "--cpu", model, "--temp", "0"], more].concat(), b""));
        let whole = run(&["--raw", "ab cd", "-n", "12"]);
        // A state of the prompt is saved, whatever is written after it.
        assert_eq!(run(&["--raw", "ab cd", "-n", "12", "--save-state", "s", "--force"]), whole, "{model}");
        assert_eq!(run(&["-n", "12", "--load-state", "s"]), whole, "{model}: no prompt");
        assert_eq!(run(&["--raw", "ab", "-n", "0", "--save-state", "s", "--force"]), "", "{model}");
        assert_eq!(run(&["-p", " cd", "-n", "12", "--load-state", "s"]), whole, "{model}");
        let told = kiln(
            &folder,
            &["run", "--cpu", model, "--raw", "ab", "-n", "0", "--save-state", "s3", "--force", "--json"],
            b"",
        );
        assert_eq!(json(&told)["usage"]["generated_tokens"], 0);
        // A prompt that goes on from a state can be saved again.
        assert_eq!(run(&["-p", " cd", "-n", "0", "--load-state", "s", "--save-state", "s2", "--force"]), "");
        assert_eq!(run(&["-n", "12", "--load-state", "s2"]), whole, "{model}: twice saved");
        // The answer to a question that was read before.
        let answer = run(&["hello", "-n", "12"]);
        assert_eq!(run(&["hello", "-n", "0", "--save-state", "s", "--force"]), "");
        assert_eq!(run(&["-n", "12", "--load-state", "s"]), answer, "{model}: a question");
    }
}

#[test]
fn ctrl_c_ends_the_answer_with_what_there_is() {
    use std::io::Read as _;
    use std::os::unix::process::ExitStatusExt as _;
    let folder = models();
    // A recurrent model has no context to fill: it writes until somebody stops it.
    let model = folder.path().join("rwkv.gguf");
    assert_eq!(kiln(&folder, &["synth", "tiny-rwkv6", "F32", model.to_str().unwrap()], b"").status.code(), Some(0));
    let mut child = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["run", "--cpu", model.to_str().unwrap(), "--raw", "-p", "hello", "--ignore-eos"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    let mut beginning = [0; 64];
    out.read_exact(&mut beginning).unwrap();
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(2), "shells end a loop by it");
    assert_eq!(rest.last(), Some(&b'\n'), "the line is complete");
}

#[test]
fn templates_and_system_prompts_come_from_files_too() {
    let folder = models();
    let run = |more: &[&str]| said(&kiln(&folder, &[&RUN, more, &["--temp", "0"]].concat(), b""));
    let chat = run(&["chat.gguf", "hello"]);
    assert_eq!(run(&["base.gguf", "hello", "--chat-template", "chatml"]), chat);
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    std::fs::write(folder.path().join("plain.jinja"), template).unwrap();
    let plain = run(&["chat.gguf", "hello", "--chat-template", template]);
    assert_ne!(plain, chat);
    assert_eq!(run(&["chat.gguf", "hello", "--chat-template-file", "plain.jinja"]), plain);
    std::fs::write(folder.path().join("system.txt"), "the end\n").unwrap();
    let system = run(&["chat.gguf", "hello", "--system", "the end"]);
    assert_ne!(system, chat);
    assert_eq!(run(&["chat.gguf", "hello", "--system-file", "system.txt"]), system);
    assert_eq!(run(&["chat.gguf", "hello", "-sys", "the end"]), system);
    let talk = |more: &[&str]| {
        kiln(&folder, &[&["chat", "--cpu", "base.gguf", "--temp", "0", "-n", "12"], more].concat(), b"hello\n")
    };
    assert_eq!(said(&talk(&["--chat-template", "chatml"])), chat);
    assert_eq!(said(&talk(&["--chat-template", "chatml", "--system-file", "system.txt"])), system);
    fails(&talk(&[]), 1, &["no chat template", "--chat-template"]);
    fails(&talk(&["--chat-template", "nonsense"]), 1, &["nonsense", "chatml"]);
}

#[test]
fn thoughts_end_when_their_tokens_are_used_up() {
    let folder = models();
    // The prompt opens a thought that the model, which writes anything, would hardly ever close.
    let template =
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}";
    change(&folder.path().join("base.gguf"), &folder.path().join("thinks.gguf"), Some(template));
    let flags = ["--cpu", "--temp", "0", "-n", "24", "--ignore-eos", "--json"];
    let parts = |told: &Value| {
        let length = |field: &str| told[field].as_str().map_or(0, str::len);
        (length("reasoning"), length("text"))
    };
    let run = |more: &[&str]| {
        let words = [&["run", "thinks.gguf", "-p", "hello"], &flags[..], more].concat();
        parts(&json(&kiln(&folder, &words, b"")))
    };
    let [none, few, some] = ["0", "3", "10"].map(|tokens| run(&["--reasoning-budget", tokens]));
    assert!(none.0 == 0 && none.1 > 0, "{none:?}");
    assert!(few.0 > 0 && few.1 > 0 && some.0 > few.0 && some.1 > 0, "{few:?} {some:?}");
    // Without a bound all tokens are thoughts.
    for free in [run(&[]), run(&["--reasoning-budget", "-1"])] {
        assert!(free.0 > some.0 && free.1 == 0, "{free:?}");
    }
    let talk = [&["chat", "thinks.gguf", "--reasoning-budget", "3"], &flags[..]].concat();
    assert_eq!(parts(&json(&kiln(&folder, &talk, b"hello\n"))), few);
    // What must fit a rule is no thought.
    let words = [&["run", "thinks.gguf", "-p", "hello", "--regex", "[0-9]{3}", "--reasoning-budget", "3"], &flags[..]];
    assert_eq!(parts(&json(&kiln(&folder, &words.concat(), b""))), (0, 3));
    fails(&kiln(&folder, &["run", "thinks.gguf", "hi", "--reasoning-budget", "-2"], b""), 2, &["-2 is not in -1.."]);
}

/// A conversation through a pipe.
fn chat(folder: &TempDir, more: &[&str], lines: &str) -> Output {
    kiln(folder, &[&["chat", "--cpu", "chat.gguf", "--temp", "0", "-n", "8"], more].concat(), lines.as_bytes())
}

#[test]
fn a_piped_conversation_is_one_turn_a_line() {
    let folder = models();
    let run = |prompt: &str, more: &[&str]| {
        said(&kiln(
            &folder,
            &[&["run", "--cpu", "chat.gguf", "-p", prompt, "--temp", "0", "-n", "8"], more].concat(),
            b"",
        ))
    };
    let one = run("hello", &[]);
    let output = chat(&folder, &[], "hello\n");
    assert_eq!(said(&output), one, "the answer alone");
    assert!(!text(&output.stderr).contains("tokens"), "{}", text(&output.stderr));
    assert_eq!(said(&chat(&folder, &["--system", "the end"], "hello")), run("hello", &["--system", "the end"]));
    // The second turn knows the first.
    let two = said(&chat(&folder, &[], "hello\nand now\n"));
    assert!(two.starts_with(&one) && two[one.len()..] != run("and now", &[]), "{two}");
    assert_eq!(said(&chat(&folder, &[], "hello\n/clear\nhello\n/retry\n/edit hello\n")), one.repeat(4));
    // Several lines are one turn.
    assert_eq!(said(&chat(&folder, &[], "\"\"\"\nhello\nworld\n\"\"\"\n")), run("hello\nworld", &[]));
    assert_eq!(said(&chat(&folder, &[], "hello\\\nworld\n\n   \n")), run("hello\nworld", &[]));
    // Slashes begin messages, too.
    for (line, message) in [
        ("/* c comment */ int x;", "/* c comment */ int x;"),
        ("/usr/bin is what?", "/usr/bin is what?"),
        ("// comment", "// comment"),
        ("//help", "/help"),
        ("\"\"\"/quit\"\"\"", "/quit"),
    ] {
        assert_eq!(said(&chat(&folder, &[], &format!("{line}\n"))), run(message, &[]), "{line}");
    }
    let asked = chat(&folder, &[], "ask @someone\n");
    assert!(text(&asked.stderr).contains("there is no file someone"), "{}", text(&asked.stderr));
    assert_eq!(said(&asked), run("ask @someone", &[]));
    std::fs::write(folder.path().join("my notes.txt"), "of and to\n").unwrap();
    let spaced = run("see @\"my notes.txt\"\n\nmy notes.txt:\n```\nof and to\n```", &[]);
    assert_eq!(said(&chat(&folder, &[], "see @\"my notes.txt\"\n")), spaced);
    std::fs::write(folder.path().join("a.txt"), "of and to\n").unwrap();
    assert_eq!(said(&chat(&folder, &[], "see @a.txt\n")), run("see @a.txt\n\na.txt:\n```\nof and to\n```", &[]));
}

#[test]
fn commands_change_a_conversation() {
    let folder = models();
    let of = |lines: &str| said(&chat(&folder, &[], lines));
    // What commands say goes to stderr: the answers alone are data.
    let told = |lines: &str| {
        let output = chat(&folder, &[], lines);
        assert_eq!(said(&output), "", "{lines}");
        text(&output.stderr)
    };
    assert!(told("/help\n").contains("/retry"));
    assert!(told("/system the end\n/system\n").ends_with("\nthe end\n"));
    let settings = told("/set temp 0.5\n/set top-k 3\n/set seed 9\n/set limit none\n");
    for want in ["temperature 0.5", "top_k 3", "seed 9", "limit none"] {
        assert!(settings.lines().any(|line| line == want), "{want} is told when it is set: {settings}");
    }
    let settings = told("/set temp 0.5\n/set top-k 3\n/set seed 9\n/set limit none\n/set\n");
    for want in ["temperature 0.5", "top_k 3", "seed 9", "limit none", "think on", "top_p 0.95"] {
        assert!(settings.lines().any(|line| line == want), "{want}: {settings}");
    }
    // A conversation goes on from its file as it would have gone on.
    let whole = of("/system the end\nhello\nand now\n");
    let first = of("/system the end\nhello\n/save talk.json\n");
    assert_eq!(format!("{first}{}", of("/load talk.json\nand now\n")), whole);
    fails(&chat(&folder, &[], "/save talk.json\n"), 1, &["talk.json", "--force"]);
    said(&chat(&folder, &[], "/save --force talk.json\n"));
    assert_eq!(of("hello\n/model chat.gguf\n/clear\nhello\n"), of("hello\n").repeat(2));
    let stats = chat(&folder, &[], "hello\n/stats\n");
    assert!(text(&stats.stderr).contains("generated: 8 tokens") && said(&stats) == of("hello\n"));
    assert_eq!(of("/quit\nhello\n"), "");
    let (one, two) = (of("hello\n"), of("hello\nand now\n"));
    assert_eq!(of("hello\nand now\n/undo\nand now\n"), format!("{two}{}", &two[one.len()..]));
    // Under a name, among the saved ones.
    of("/system the end\nhello\n/save monday\n");
    assert!(folder.path().join("kiln/chats/monday.json").is_file());
    assert!(told("/list\n").contains("monday                2 messages"));
    assert_eq!(format!("{first}{}", of("/load monday\nand now\n")), whole);
    // A word that is no command does nothing, and what comes behind it is answered.
    let output = chat(&folder, &[], "/hlep\nhello\n");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), of("hello\n")));
    assert!(text(&output.stderr).contains("did you mean /help?"), "{}", text(&output.stderr));
    for (line, words) in [
        ("/nonsense", &["/nonsense", "/help"][..]),
        ("/set nonsense 1", &["nonsense", "/set"]),
        ("/set top_k many", &["top_k", "many"]),
        ("/set temp abc", &["temperature must be a number, such as 0.8"]),
        ("/set top_p 7", &["top_p", "0 to 1"]),
        ("/set temperature 5000", &["temperature", "-100 to 100"]),
        ("/copy", &["no answer yet"]),
        ("/undo", &["nothing was said"]),
        ("look @note.txtt", &["there is no file note.txtt", "\\@note.txtt"]),
        ("/set min_p 2", &["min_p", "0 to 1"]),
        ("/load none.json", &["none.json"]),
        ("/load chat.gguf", &["chat.gguf"]),
        ("/model none.gguf", &["none.gguf"]),
        ("/retry", &["nothing was said"]),
        ("/edit", &["nothing was said"]),
        ("\"\"\"\nhello", &["no end"]),
    ] {
        fails(&chat(&folder, &[], line), 1, words);
    }
}

#[test]
fn that_the_cpu_runs_a_model_is_said_once() {
    let folder = models();
    // Without --cpu, on a machine without a GPU: the model is opened three times.
    let lines = b"/model chat.gguf\n/model chat.gguf\n";
    let notes = |more: &[&str]| text(&kiln(&folder, &[&["chat", "chat.gguf"], more].concat(), lines).stderr);
    assert_eq!(notes(&[]).matches("running on the CPU").count(), 1, "{}", notes(&[]));
    assert!(!notes(&["--cpu"]).contains("running on the CPU"), "it was asked for");
}

#[test]
fn what_a_conversation_outgrows_is_said() {
    let folder = models();
    let lines = "hello world\nhello the world\nhello and the world\nhello to the world\n";
    let output = chat(&folder, &["-c", "96", "--system", "the system"], lines);
    assert!(said(&output).lines().count() >= 4, "{}", said(&output));
    let notes = text(&output.stderr);
    assert!(notes.contains("longer than the context of 96 tokens") && notes.contains("hello world"), "{notes}");
    assert!(!notes.contains("the system"), "never the system's message: {notes}");
    let long = format!("{}\n", "word ".repeat(100));
    fails(&chat(&folder, &["-c", "96"], &long), 1, &["the context holds 96"]);
    // What is refused is not announced before: nothing was left out.
    let refused = text(&chat(&folder, &["-c", "96"], &format!("hello\n{long}")).stderr);
    assert!(!refused.contains("no longer sees"), "{refused}");
    let base = kiln(&folder, &["chat", "--cpu", "base.gguf"], b"hello\n");
    fails(&base, 1, &["no chat template", "kiln run"]);
    // An answer that fills the context fills it and no more.
    let full = text(&chat(&folder, &["-c", "96", "-n", "-1", "--ignore-eos"], "hello\n/stats\n").stderr);
    assert!(full.contains("the context of 96 tokens is full") && full.contains("context: 96 of 96"), "{full}");
    // Lines of a message are shown as such in a quote.
    let lines = format!("\"\"\"\nhello\n\nworld\n\"\"\"\n{}", "hello and the world\n".repeat(6));
    let notes = text(&chat(&folder, &["-c", "96"], &lines).stderr);
    assert!(notes.contains(r#"from "hello\n\nworld" on"#), "{notes}");
}

#[test]
fn a_piped_conversation_is_told_as_lines_of_json() {
    let folder = models();
    let output = chat(&folder, &["--json"], "one\ntwo\n");
    let said = said(&output);
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "{said}");
    for line in lines {
        assert!(line["text"].is_string() && line["usage"]["prompt_tokens"].as_u64() > Some(0), "{line}");
    }
}
