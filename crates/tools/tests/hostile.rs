//! MCP servers that misbehave in every way, over stdio and over HTTP (`hostile_server.py`): each is survived, and said in a clear word.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use kiln_tools::{Approval, Limits, Listing, Output, OutputPart, ServerSpec, Setup, Tool, Toolbox, Wait};

const SERVER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hostile_server.py");

/// A server over HTTP; it ends with its stdin.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Over {
    Stdio,
    Http,
}

const BOTH: [Over; 2] = [Over::Stdio, Over::Http];

fn spec(behaviour: &str, over: Over) -> (ServerSpec, Option<Served>) {
    let (given, served) = match over {
        Over::Stdio => (format!("{behaviour}=python3 '{SERVER}' {behaviour}"), None),
        Over::Http => {
            let mut command = Command::new("python3");
            command.args([SERVER, behaviour, "--http"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut port = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut port).unwrap();
            (format!("{behaviour}=http://127.0.0.1:{}/mcp", port.trim()), Some(Served(child)))
        }
    };
    (ServerSpec::parse(&given).unwrap().remove(0), served)
}

fn limits() -> Limits {
    Limits { call_time: Duration::from_secs(20), received: 4 << 20, ..Limits::default() }
}

fn toolbox(behaviour: &str, over: Over, limits: Limits) -> (Toolbox, Option<Served>) {
    let (spec, served) = spec(behaviour, over);
    (Toolbox::new(Setup { servers: vec![spec], limits, ..Setup::default() }).unwrap(), served)
}

fn find<'l>(listing: &'l Listing, own: &str) -> &'l Tool {
    let found = listing.tools.iter().find(|tool| tool.own_name == own);
    found.unwrap_or_else(|| panic!("{own}: {:?}", listing.problems))
}

fn call_for(toolbox: &Toolbox, tool: &Tool, arguments: &str, time: Duration) -> Output {
    toolbox.call(tool, arguments, &Wait { until: Instant::now() + time, cancelled: &|| false })
}

fn call(toolbox: &Toolbox, tool: &Tool, arguments: &str) -> Output {
    call_for(toolbox, tool, arguments, Duration::from_secs(20))
}

#[test]
fn a_good_server_is_called_over_both_transports() {
    for over in BOTH {
        let (toolbox, _served) = toolbox("good", over, limits());
        let listing = toolbox.tools();
        assert_eq!(listing.problems, []);
        assert!(listing.tools.iter().all(|tool| tool.approval == Approval::Ask && tool.name.starts_with("good__")));
        let said = call(&toolbox, find(&listing, "echo"), "{\"text\": \"wörds\"}");
        assert_eq!(said, Output::text("wörds"), "{over:?}");
        let broken = call(&toolbox, find(&listing, "fail"), "");
        assert_eq!(broken.for_model(), "Error:\nit broke");
        let picture = call(&toolbox, find(&listing, "picture"), "{}");
        assert!(matches!(&picture.parts[0], OutputPart::Picture { mime, .. } if mime == "image/png"));
        assert!(picture.parts[1..].iter().all(|part| matches!(part, OutputPart::Text { .. })), "{picture:?}");
        let link = call(&toolbox, find(&listing, "link"), "{}");
        assert!(matches!(&link.parts[0], OutputPart::Link { url, .. } if url == "https://a.example/page"));
        assert!(link.parts[1..].iter().all(|part| matches!(part, OutputPart::Text { .. })), "{link:?}");
        let wrong = call(&toolbox, find(&listing, "echo"), "[1, 2]");
        assert!(wrong.is_error && wrong.for_model().contains("must be a JSON object"));
    }
}

#[test]
fn a_program_gets_no_keys_of_the_environment() {
    let (toolbox, _served) = toolbox("good", Over::Stdio, limits());
    let listing = toolbox.tools();
    let said = call(&toolbox, find(&listing, "environment"), "{}").for_model();
    assert!(said.contains("PATH"), "{said}");
    // Cargo sets this one for tests.
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some() && !said.contains("CARGO"), "{said}");
}

#[test]
fn too_much_is_cut_with_a_word() {
    for over in BOTH {
        for behaviour in ["huge", "endless"] {
            let (toolbox, _served) = toolbox(behaviour, over, limits());
            let listing = toolbox.tools();
            let began = Instant::now();
            let output = call(&toolbox, find(&listing, "echo"), "{}");
            let said = output.for_model();
            assert!(output.is_error && said.contains("sent more than 4194304 bytes"), "{behaviour} {over:?}: {said}");
            assert!(began.elapsed() < Duration::from_secs(15), "{behaviour} {over:?}: {:?}", began.elapsed());
            // The next call finds a server again.
            assert!(!toolbox.tools().tools.is_empty(), "{behaviour} {over:?}");
        }
    }
    // A server that writes without being asked is ended, too.
    let (toolbox, _served) = toolbox("chatter", Over::Stdio, limits());
    let listing = toolbox.tools();
    assert!(listing.problems[0].why.contains("sent more than"), "{listing:?}");
    let (toolbox, _served) = self::toolbox("good", Over::Stdio, Limits { output: 10, ..limits() });
    let listing = toolbox.tools();
    let long = call(&toolbox, find(&listing, "echo"), "{\"text\": \"0123456789abcdef\"}").for_model();
    assert_eq!(long, "0123456789\n[cut: the result has 16 bytes of text, the first 10 are given]");
}

#[test]
fn who_is_late_is_given_up_and_who_stops_waiting_is_heard() {
    for over in BOTH {
        let (toolbox, _served) = toolbox("slow", over, limits());
        let listing = toolbox.tools();
        let tool = find(&listing, "echo");
        let late = call_for(&toolbox, tool, "{}", Duration::from_millis(300)).for_model();
        assert!(late.contains("did not answer in time"), "{over:?}: {late}");
        let began = Instant::now();
        let cancelled = || began.elapsed() > Duration::from_millis(200);
        let wait = Wait { until: Instant::now() + Duration::from_secs(60), cancelled: &cancelled };
        let said = toolbox.call(tool, "{}", &wait).for_model();
        assert!(said.contains("not waited for") && began.elapsed() < Duration::from_secs(5), "{over:?}: {said}");
    }
    let short = Limits { call_time: Duration::from_secs(2), ..limits() };
    for (behaviour, over) in [("silent", Over::Stdio), ("silent", Over::Http), ("deaf", Over::Stdio)] {
        let (toolbox, _served) = toolbox(behaviour, over, short);
        let listing = toolbox.tools();
        let why = &listing.problems[0].why;
        assert!(
            ["did not answer", "without an answer"].iter().any(|word| why.contains(word)),
            "{behaviour} {over:?}: {why}"
        );
        let began = Instant::now();
        assert_eq!(&toolbox.tools().problems[0].why, why, "it is left alone for a while");
        assert!(began.elapsed() < Duration::from_millis(500));
    }
}

#[test]
fn broken_servers_say_what_is_wrong() {
    let (ends, _served) = toolbox("ends", Over::Stdio, limits());
    let listing = ends.tools();
    let said = call(&ends, find(&listing, "echo"), "{}").for_model();
    assert!(said.contains("has ended with status 3: I have had enough \\u{1b}[31m"), "{said}");
    assert!(!ends.tools().tools.is_empty(), "it is started again");
    let (refuses, _served) = toolbox("refuses", Over::Stdio, limits());
    let listing = refuses.tools();
    let said = call(&refuses, find(&listing, "echo"), "{}").for_model();
    assert!(said.contains("refused: No\\u{1b}[2J. (-1)"), "{said}");
    let (redirects, _served) = toolbox("refuses", Over::Http, limits());
    let listing = redirects.tools();
    let said = call(&redirects, find(&listing, "echo"), "{}").for_model();
    assert!(said.contains("it redirects (302), which is not followed"), "{said}");
    for over in BOTH {
        let (old, _served) = toolbox("old", over, limits());
        assert!(old.tools().problems[0].why.contains("speaks version \"1999-01-01\""));
        let (garbage, _served) = toolbox("garbage", over, limits());
        let listing = garbage.tools();
        assert_eq!(call(&garbage, find(&listing, "echo"), "{\"text\": \"a\"}"), Output::text("a"), "{over:?}");
        let (asks, _served) = toolbox("asks", over, limits());
        let listing = asks.tools();
        assert_eq!(call(&asks, find(&listing, "echo"), "{\"text\": \"a\"}"), Output::text("a"), "{over:?}");
        let (lies, _served) = toolbox("lies", over, limits());
        let listing = lies.tools();
        assert_eq!(call(&lies, find(&listing, "echo"), "{}"), Output::text("[1,{\"a\":null}]"), "{over:?}");
        let (pages, _served) = toolbox("pages", over, limits());
        assert!(pages.tools().problems[0].why.contains("more than 32 pages"));
    }
    let missing = ServerSpec::parse("gone=/no/such/program").unwrap();
    let gone = Toolbox::new(Setup { servers: missing, ..Setup::default() }).unwrap();
    assert!(gone.tools().problems[0].why.contains("/no/such/program cannot be started"));
    let nobody = ServerSpec::parse("nobody=http://127.0.0.1:9/mcp").unwrap();
    let nobody = Toolbox::new(Setup { servers: nobody, ..Setup::default() }).unwrap();
    assert!(nobody.tools().problems[0].why.contains("cannot be reached"));
}

#[test]
fn names_are_unique_across_servers_and_nothing_of_kiln_can_be_taken() {
    let servers = [spec("collisions", Over::Stdio).0, spec("good", Over::Stdio).0].to_vec();
    let toolbox = Toolbox::new(Setup { servers, calculator: true, limits: limits(), ..Setup::default() }).unwrap();
    let listing = toolbox.tools();
    let mut names: Vec<&str> = listing.tools.iter().map(|tool| tool.name.as_str()).collect();
    assert_eq!(names[0], "calculator");
    assert!(listing.tools[0].server.is_empty(), "the calculator is Kiln's");
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), listing.tools.len(), "{names:?}");
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    assert!(names.iter().all(|name| name.len() <= 64 && name.chars().all(plain)), "{names:?}");
    let told: Vec<String> = listing.problems.iter().map(|problem| problem.why.clone()).collect();
    assert!(told.iter().any(|why| why.contains("two tools \"echo\"")), "{told:?}");
    assert!(told.iter().any(|why| why.contains("describes the arguments of wide")), "{told:?}");
    let theirs = listing.find("collisions__good__echo").unwrap();
    assert_eq!((theirs.server.as_str(), theirs.own_name.as_str()), ("collisions", "good__echo"));
    assert_eq!(listing.find("good__echo").unwrap().server, "good");
    assert_eq!(call(&toolbox, listing.find("calculator").unwrap(), "{\"expression\": \"6*7\"}"), Output::text("42"));
    let many = [spec("many", Over::Stdio).0].to_vec();
    let many =
        Toolbox::new(Setup { servers: many, limits: Limits { received: 32 << 20, ..limits() }, ..Setup::default() })
            .unwrap();
    let listing = many.tools();
    assert_eq!(listing.tools.len(), 128);
    assert!(listing.tools.iter().all(|tool| tool.description.len() < 5000));
    assert!(listing.problems[0].why.contains("more than 128 tools"));
}

#[test]
fn escapes_and_control_tokens_are_data_and_a_changed_tool_is_another_one() {
    let (toolbox, _served) = toolbox("escapes", Over::Http, limits());
    let listing = toolbox.tools();
    assert!(listing.tools.iter().all(|tool| !tool.name.contains('\u{1b}')));
    let output = call(&toolbox, find(&listing, "plain"), "{}");
    assert!(output.for_model().contains("<|im_end|>"), "what becomes of it is for those to say who show it");
    for over in BOTH {
        let (rug, _served) = self::toolbox("rug", over, limits());
        let before = find(&rug.tools(), "echo").clone();
        assert_eq!(call(&rug, &before, "{\"text\": \"a\"}"), Output::text("a"));
        let after = find(&rug.tools(), "echo").clone();
        assert_eq!(after.description, "Deletes everything.", "{over:?}");
        assert_ne!(before.fingerprint(), after.fingerprint());
    }
}

#[test]
fn what_a_program_started_ends_with_it() {
    // The number of its child is the last that it says on stderr before it is ended.
    let folder = tempfile::tempdir().unwrap();
    let note = folder.path().join("pid");
    let given = format!("forks=sh -c 'python3 \"{SERVER}\" forks 2> \"{}\"'", note.display());
    let servers = ServerSpec::parse(&given).unwrap();
    let toolbox = Toolbox::new(Setup { servers, limits: limits(), ..Setup::default() }).unwrap();
    assert!(!toolbox.tools().tools.is_empty());
    let pid = std::fs::read_to_string(&note).unwrap().trim().to_owned();
    let is_alive = || {
        let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A zombie waits for its new parent alone.
        !status.is_empty() && !status.contains(") Z ")
    };
    assert!(is_alive(), "{pid}");
    drop(toolbox);
    let until = Instant::now() + Duration::from_secs(5);
    while is_alive() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!is_alive(), "{pid} is left");
}
