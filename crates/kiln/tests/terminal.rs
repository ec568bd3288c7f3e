//! `kiln chat` and `kiln top` at a terminal: what is typed or pasted is not lost, whenever it comes. Python's `pty` is the terminal.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// Runs a program in a terminal. Each step waits until a text is on the screen, counted from the end of the step before, and types
/// another. What was on the screen is printed at the end.
const DRIVE: &str = r#"
import fcntl, json, os, pty, select, struct, sys, termios, time
steps, words = json.loads(sys.argv[1]), sys.argv[2:]
child, screen = pty.fork()
if child == 0:
    os.execvp(words[0], words)
fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
seen, at, limit = b"", 0, time.time() + 60
def read():
    global seen
    if select.select([screen], [], [], 0.05)[0]:
        try:
            more = os.read(screen, 65536)
        except OSError:
            return False
        seen += more
        return bool(more)
    return True
for wait, keys in steps:
    while seen.find(wait.encode(), at) < 0:
        if time.time() > limit or not read():
            sys.exit(f"{wait!r} did not come: {seen!r}")
    at = seen.find(wait.encode(), at) + len(wait.encode())
    os.write(screen, keys.encode())
while time.time() < limit and read():
    pass
_, status = os.waitpid(child, 0)
print(json.dumps({"screen": seen.decode(errors="replace"), "code": os.waitstatus_to_exitcode(status)}))
"#;

/// What was on the screen.
fn at_terminal(folder: &TempDir, steps: &[(&str, &str)], arguments: &[&str]) -> String {
    let output = Command::new("python3")
        .args(["-c", DRIVE, &serde_json::to_string(steps).unwrap(), env!("CARGO_BIN_EXE_kiln")])
        .args(arguments)
        .env("TERM", "xterm")
        .env("NO_COLOR", "1")
        .env("XDG_DATA_HOME", folder.path())
        .env_remove("KILN_DEVICE")
        .env_remove("KILN_CONFIG")
        .current_dir(folder.path())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    assert_eq!(told["code"], 0, "{told}");
    told["screen"].as_str().unwrap().to_owned()
}

fn model() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    let made =
        Command::new(env!("CARGO_BIN_EXE_kiln")).args(["synth", "tiny-rwkv6", "F32", path.to_str().unwrap()]).output();
    assert!(made.unwrap().status.success());
    folder
}

const CHAT: [&str; 7] = ["chat", "m.gguf", "--cpu", "--temp", "0", "--json", "--ignore-eos"];

#[test]
fn lines_that_come_at_once_are_one_message_each() {
    let folder = model();
    let screen = at_terminal(&folder, &[(">>> ", "one\rtwo\rthree\r/quit\r")], &[&CHAT[..], &["-n", "8"]].concat());
    assert_eq!(screen.matches("\"usage\"").count(), 3, "{screen:?}");
}

#[test]
fn what_is_typed_during_an_answer_is_the_next_message() {
    let folder = model();
    // Each answer runs until Ctrl-C. Pastes are marked when the terminal grows quiet: the answer has begun.
    let plain: Vec<&str> = CHAT.into_iter().filter(|word| *word != "--json").collect();
    let quiet = "\u{1b}[?2004h";
    let steps = [
        (">>> ", "first\r"),
        (quiet, "zebra\rgiraffe"),
        ("", "\u{3}"),
        ("zebra", ""),
        (quiet, "\u{3}"),
        ("giraffe", "\r"),
        (quiet, "\u{3}"),
        (">>> ", "/quit\r"),
    ];
    let screen = at_terminal(&folder, &steps, &plain);
    for word in ["zebra", "giraffe"] {
        // Only the line editor shows it, behind its prompt.
        let before = screen.split(word).next().unwrap();
        assert!(before.rfind(">>> ") > before.rfind("stopped"), "{word}: {screen:?}");
    }
}

#[test]
fn pasted_text_is_a_message_whatever_it_begins_with() {
    let folder = model();
    let pasted = "\u{1b}[200~/quit is a word\n/* and */ more\n\u{1b}[201~\r";
    let steps = [
        (">>> ", pasted),
        ("\"usage\"", ""),
        (">>> ", "\u{1b}[200~/quit\u{1b}[201~\r"),
        ("\"usage\"", ""),
        (">>> ", "/quit\r"),
    ];
    let screen = at_terminal(&folder, &steps, &[&CHAT[..], &["-n", "4"]].concat());
    assert_eq!(screen.matches("\"usage\"").count(), 2, "{screen:?}");
}

#[test]
fn notes_are_cut_at_words() {
    let folder = model();
    let screen = at_terminal(&folder, &[(">>> ", "/help\r/quit\r")], &[&CHAT[..], &["-n", "4"]].concat());
    let help = screen.split("/help  ").nth(1).unwrap();
    let lines: Vec<&str> = help.split("\r\n").take_while(|line| !line.contains(">>>")).collect();
    assert!(lines.len() > 15 && lines.iter().all(|line| line.chars().count() <= 60), "{lines:?}");
}

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_view_of_a_server_ends_with_q_and_says_so() {
    let folder = model();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
    command.args(["serve", "m.gguf", "--cpu", "--port", "0"]).current_dir(folder.path());
    command.env_remove("KILN_CONFIG").env_remove("KILN_API_KEY").stdin(Stdio::null()).stderr(Stdio::piped());
    let mut server = Server(command.spawn().unwrap());
    let mut log = BufReader::new(server.0.stderr.take().unwrap()).lines().map_while(Result::ok);
    let line = log.find(|line| line.contains("listening on http://")).unwrap();
    let address = line.split("://").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    std::thread::spawn(move || log.for_each(drop));
    for key in ["q", "\u{3}"] {
        let screen = at_terminal(&folder, &[("q quits", ""), ("memory", key)], &["top", &address]);
        assert!(screen.contains("generation tok/s") && !screen.contains("error"), "{screen:?}");
        // Nothing is cut off by the edge of the terminal and goes on in the next row.
        let wide = screen.split(['\r', '\n']).find(|line| !line.contains('\u{1b}') && line.chars().count() > 60);
        assert_eq!(wide, None, "{screen:?}");
    }
}

/// Shows tools, calls and what they gave.
const TEMPLATE: &str = "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";
/// A model that knows nothing can say nothing but this.
const CALL: &str = r#"root ::= "<tool_call>{\"name\": \"oven__heat\", \"arguments\": {\"unit\": \"C\"}}</tool_call>""#;
/// An MCP server of which Python's standard library is enough.
const MCP_SERVER: &str = r#"
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == "tools/call" and "slow" in sys.argv:
        time.sleep(3600)
    result = {
        "initialize": {"protocolVersion": (asked.get("params") or {}).get("protocolVersion"), "capabilities": {}, "serverInfo": {"name": "o", "version": "1"}},
        "tools/list": {"tools": [{"name": "heat", "description": "How hot \u001b[2J it is.", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": "1300 \u001b[2J degrees"}]},
    }[asked["method"]]
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"#;

const TOOLS: [&str; 14] = [
    "chat",
    "m.gguf",
    "--cpu",
    "--temp",
    "0",
    "-n",
    "120",
    "--chat-template",
    "template.jinja",
    "--grammar-file",
    "call.gbnf",
    "--tool-turns",
    "1",
    "--mcp",
];

/// A model that calls one tool in every answer.
fn caller() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(["synth", "tiny-llama", "F32", "m.gguf"])
        .current_dir(folder.path())
        .output();
    assert!(made.unwrap().status.success());
    for (name, text) in [("template.jinja", TEMPLATE), ("call.gbnf", CALL), ("mcp.py", MCP_SERVER)] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

#[test]
fn the_user_is_asked_before_a_tool_is_called() {
    let folder = caller();
    let question = "allow this call of oven? once, always (this tool), or no: ";
    let steps = [
        (">>> ", "/tools\r"),
        ("oven__heat  (asks) How hot", ""),
        (">>> ", "first\r"),
        ("\"unit\": \"C\"", ""),
        // What is no answer is the beginning of the next message.
        (question, "zebra\r"),
        (question, "no\r"),
        ("does not allow this call", ""),
        ("called enough", ""),
        (">>> ", ""),
        ("zebra", "\r"),
        (question, "once\r"),
        ("1300 ", ""),
        (">>> ", "third\r"),
        (question, "always\r"),
        ("1300 ", ""),
        (">>> ", "fourth\r"),
        ("[calls heat of the MCP server oven]", ""),
        ("1300 ", ""),
        (">>> ", "/tools\r"),
        ("oven__heat  (allowed)", ""),
        (">>> ", "/quit\r"),
    ];
    let screen = at_terminal(&folder, &steps, &[&TOOLS[..], &["oven=python3 mcp.py"]].concat());
    assert!(!screen.contains("\u{1b}[2J"), "a server does not clear the screen: {screen:?}");
}

#[test]
fn ctrl_c_ends_a_call_and_not_the_conversation() {
    let folder = caller();
    let steps = [
        (">>> ", "first\r"),
        ("allow this call", ""),
        ("or no: ", "once\r"),
        // Pastes are marked when the terminal grows quiet: the call has begun.
        ("\u{1b}[?2004h", "\u{3}"),
        ("the calls were stopped", ""),
        (">>> ", "/quit\r"),
    ];
    at_terminal(&folder, &steps, &[&TOOLS[..], &["oven=python3 mcp.py slow"]].concat());
}

#[test]
fn through_a_pipe_only_calls_that_need_no_approval_are_made() {
    let folder = caller();
    let say = |more: &[&str]| {
        std::fs::write(folder.path().join("input"), "first\n").unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_kiln"))
            .args([&TOOLS[..], &["oven=python3 mcp.py", "--json"], more].concat())
            .env_remove("KILN_CONFIG")
            .current_dir(folder.path())
            .stdin(std::fs::File::open(folder.path().join("input")).unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (_, said) = say(&[]);
    assert!(said.contains("nobody can be asked here") && !said.contains("1300"), "{said}");
    let (answers, said) = say(&["--tool-approval", "always"]);
    assert!(said.contains("[calls heat of the MCP server oven]") && said.contains("1300 "), "{said}");
    let answers: Vec<serde_json::Value> = answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 2, "{answers:?}");
    assert_eq!(answers[0]["tool_calls"], serde_json::json!([{"name": "oven__heat", "arguments": "{\"unit\": \"C\"}"}]));
    assert!(answers[1].get("tool_calls").is_none(), "after one turn no more calls are made");
}
