//! A device that goes away in the middle of its work, as users see it: a Vulkan layer (`scripts/gpu/lost-layer`) over the software GPU, which from
//! one moment on answers as drivers do whose device was unplugged. Requests end with one clear error, `kiln serve` waits for the device to come
//! back, or moves to what is left if it may.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test may fail by it, in its helping functions too")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kiln_gguf::{Gguf, Writer};
use serde_json::Value;
use tempfile::TempDir;

/// A folder with a model and the layer.
struct Place {
    folder: TempDir,
    software_gpu: PathBuf,
}

impl Place {
    /// `None` without a software GPU or a C compiler.
    fn new() -> Option<Place> {
        let software_gpu = std::env::var_os("KILN_SOFTWARE_GPU_RUN");
        let Some(software_gpu) = software_gpu.map(PathBuf::from) else {
            println!("no software GPU, test passed over: run it by scripts/software-gpu");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/gpu/lost-layer/layer.c");
        let flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wl,-z,nodelete", "-o"];
        let built = Command::new("cc").args(flags).arg(folder.path().join("liblost_layer.so")).arg(source).output();
        let Ok(built) = built else {
            println!("no C compiler, test passed over");
            return None;
        };
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let layer = serde_json::json!({
            "file_format_version": "1.2.0",
            "layer": {
                "name": "VK_LAYER_KILN_lost", "type": "GLOBAL", "library_path": "./liblost_layer.so", "api_version": "1.4.0",
                "implementation_version": "1", "description": "a device that goes away",
            },
        });
        std::fs::write(folder.path().join("lost_layer.json"), layer.to_string()).unwrap();
        let place = Place { folder, software_gpu };
        let short = place.folder.path().join("short.gguf");
        let made = place.kiln(&["synth", "tiny-llama", "F32", &short.to_string_lossy()]).output().unwrap();
        assert!(made.status.success());
        // A sequence must still be running when the device goes away, however fast the machine is.
        let short = Gguf::open(short).unwrap();
        let mut metadata = short.metadata().clone();
        metadata.set("llama.context_length", 1u32 << 17);
        let mut writer = Writer::new(metadata);
        for info in short.tensors() {
            writer.add(&info.name, info.dims(), info.ty, short.data(info)).unwrap();
        }
        std::fs::write(place.model(), writer.to_bytes().unwrap()).unwrap();
        Some(place)
    }

    fn model(&self) -> String {
        self.folder.path().join("model.gguf").to_string_lossy().into_owned()
    }

    fn kiln(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.software_gpu);
        command.arg(env!("CARGO_BIN_EXE_kiln")).args(arguments);
        command.env("KILN_LAYER_PATH", self.folder.path()).env("VK_INSTANCE_LAYERS", "VK_LAYER_KILN_lost");
        command.env("LOST_LAYER_FILE", self.unplugged()).env("XDG_DATA_HOME", self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn unplugged(&self) -> PathBuf {
        self.folder.path().join("unplugged")
    }

    fn unplug(&self) {
        std::fs::write(self.unplugged(), "").unwrap();
    }

    fn plug_in(&self) {
        std::fs::remove_file(self.unplugged()).unwrap();
    }

    fn beside(&self, what: &str) -> PathBuf {
        self.folder.path().join(format!("unplugged-{what}"))
    }

    /// Has a fault come: `number` counts the calls from now on until it does.
    fn inject(&self, fault: &str, number: usize) {
        // Under its name it is whole.
        let whole = self.beside("new");
        std::fs::write(&whole, number.to_string()).unwrap();
        std::fs::rename(whole, self.beside(fault)).unwrap();
    }

    /// How many faults have come since somebody asked.
    fn injected(&self) -> usize {
        let log = std::fs::read(self.beside("log")).unwrap_or_default();
        // There is none where nothing has come.
        let _ = std::fs::remove_file(self.beside("log"));
        log.len()
    }
}

/// The lines of a stream as they come.
fn lines(from: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (to, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            // The test may have ended already.
            let _ = to.send(line);
        }
    });
    lines
}

/// Status and body of an answer.
fn ask(port: u16, head: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    let head = format!("{head} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n");
    write!(stream, "{head}Content-Length: {length}\r\n\r\n{body}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{answer}"));
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}

/// A server that ends with the test.
struct Server {
    child: Child,
    port: u16,
    log: Receiver<String>,
    said: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself, which the test has seen then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(place: &Place, more: &[&str]) -> Server {
        let model = place.model();
        let arguments = [&["serve", &model, "--port", "0", "--json", "--parallel", "2"][..], more].concat();
        let mut child = place.kiln(&arguments).spawn().unwrap();
        let (out, log) = (lines(child.stdout.take().unwrap()), lines(child.stderr.take().unwrap()));
        let mut server = Server { child, port: 0, log, said: String::new() };
        let Ok(line) = out.recv_timeout(Duration::from_secs(60)) else { panic!("no server: {}", server.said()) };
        let ready: Value = serde_json::from_str(&line).unwrap();
        let address = ready["url"].as_str().unwrap_or_else(|| panic!("{line}"));
        server.port = address.rsplit(':').next().unwrap().trim_end_matches('/').parse().unwrap();
        server
    }

    /// All that it has said so far.
    fn said(&mut self) -> &str {
        while let Ok(line) = self.log.try_recv() {
            self.said += &line;
            self.said.push('\n');
        }
        &self.said
    }

    fn ask(&self, head: &str, body: &str) -> (u16, String) {
        ask(self.port, head, body)
    }

    /// The text of a short request, or what was answered in its place.
    fn write(&self) -> Result<String, (u16, String)> {
        let body = r#"{"prompt": "The", "max_tokens": 8, "temperature": 0, "ignore_eos": true}"#;
        let (status, answer) = self.ask("POST /v1/completions", body);
        let value: Value = serde_json::from_str(&answer).unwrap_or(Value::Null);
        match value["choices"][0]["text"].as_str().filter(|_| status == 200) {
            Some(text) => Ok(text.to_owned()),
            None => Err((status, answer)),
        }
    }

    /// Asks until there is an answer.
    fn write_again(&mut self) -> String {
        let start = Instant::now();
        loop {
            match self.write() {
                Ok(text) => return text,
                Err(why) if start.elapsed() > Duration::from_secs(30) => panic!("{why:?}: {}", self.said()),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Takes the device away while a long text is written; gives what comes of that text.
    fn lose(&self, place: &Place) -> (u16, String) {
        let body = r#"{"prompt": "The", "max_tokens": 120000, "temperature": 0, "ignore_eos": true}"#;
        let port = self.port;
        let answer = std::thread::spawn(move || ask(port, "POST /v1/completions", body));
        std::thread::sleep(Duration::from_millis(300));
        place.unplug();
        answer.join().unwrap()
    }
}

#[test]
fn a_server_waits_for_its_device_to_come_back() {
    let Some(place) = Place::new() else { return };
    let mut server = Server::start(&place, &[]);
    let text = server.write().unwrap();
    let (status, answer) = server.lose(&place);
    assert!(status >= 500 && answer.contains("lost"), "{status}: {answer}");
    let (status, answer) = server.write().unwrap_err();
    assert!(status >= 500 && answer.contains("lost"), "{status}: {answer}");
    let (status, answer) = server.ask("GET /readyz", "");
    assert!(status == 503 && answer.contains("lost its device"), "{status}: {answer}");
    assert_eq!(server.ask("GET /livez", "").0, 200);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(server.write().is_err(), "{}", server.said());
    place.plug_in();
    assert_eq!(server.write_again(), text);
    assert_eq!(server.ask("GET /readyz", "").0, 200);
    let said = server.said();
    assert!(said.matches("model on llvmpipe").count() == 2 && !said.contains("model on CPU"), "{said}");
}

#[test]
fn a_server_that_may_moves_to_what_is_left() {
    let Some(place) = Place::new() else { return };
    let mut server = Server::start(&place, &["--fallback"]);
    let text = server.write().unwrap();
    let (status, answer) = server.lose(&place);
    assert!(status >= 500 && answer.contains("lost"), "{status}: {answer}");
    assert_eq!(server.write_again(), text);
    let said = server.said();
    assert!(said.contains("model on llvmpipe") && said.contains("model on CPU"), "{said}");
}

#[test]
fn a_text_that_is_written_ends_with_one_error() {
    let Some(place) = Place::new() else { return };
    let model = place.model();
    let run = ["run", &model, "--raw", "The", "-n", "100000", "--temp", "0", "--ignore-eos", "--device", "0"];
    let mut child = place.kiln(&run).spawn().unwrap();
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    place.unplug();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("lost") && !error.contains("panicked"), "{error}");
    // Nobody finds the device now.
    let output = place.kiln(&run).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("hint:"), "{error}");
}

/// A program whose n-th allocation or pipeline fails says so once, or gets on without: it never panics, and never writes anything else.
#[test]
fn a_program_whose_memory_or_pipelines_fail_says_so() {
    let Some(place) = Place::new() else { return };
    let model = place.model();
    let run = ["run", &model, "--raw", "The", "-n", "6", "--temp", "0", "--ignore-eos", "--device", "0", "-c", "256"];
    let whole = place.kiln(&run).output().unwrap();
    assert!(whole.status.success(), "{}", String::from_utf8_lossy(&whole.stderr));
    for (fault, numbers) in [("alloc", &[1, 2, 3, 5, 8, 12, 17][..]), ("pipeline", &[1, 2, 5, 11])] {
        let mut came = 0;
        for number in numbers {
            place.inject(fault, *number);
            let output = place.kiln(&run).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            let injected = place.injected();
            came += injected;
            match output.status.success() {
                true => assert_eq!(output.stdout, whole.stdout, "{fault} {number}: {said}"),
                false => {
                    assert_eq!(injected, 1, "{fault} {number}: {said}");
                    let is_told = said.matches("error:").count() == 1 && !said.contains("panicked");
                    assert!(
                        output.status.code() == Some(1) && is_told,
                        "{fault} {number}: {:?}: {said}",
                        output.status
                    );
                }
            }
        }
        // Later ones may find a program that has all it wants.
        assert!(came >= 3, "{fault}: {came} faults came");
        let _ = std::fs::remove_file(place.beside(fault));
    }
}

/// A server of which a request fails for want of memory, of a pipeline or of its device answers the next one as ever.
#[test]
fn a_server_survives_single_faults() {
    let Some(place) = Place::new() else { return };
    let mut server = Server::start(&place, &["--ctx-size", "4096"]);
    let text = server.write().unwrap();
    let (mut came, mut failed) = (0, 0);
    let faults =
        [("alloc", 1), ("pipeline", 1), ("submit", 1), ("alloc", 2), ("submit", 3), ("alloc", 3), ("submit", 9)];
    for (round, (fault, number)) in faults.into_iter().enumerate() {
        place.inject(fault, number);
        // Prompts of other lengths want other plans.
        let prompt = "The end of it ".repeat(3 << round);
        let body = serde_json::json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        let (status, answer) = server.ask("POST /v1/completions", &body.to_string());
        let injected = place.injected();
        // What did not come must not come later.
        let _ = std::fs::remove_file(place.beside(fault));
        came += injected;
        if status != 200 {
            failed += 1;
            let error: Value = serde_json::from_str(&answer).unwrap_or_else(|_| panic!("{answer}"));
            assert!(
                status >= 500 && injected == 1 && error["error"]["message"].is_string(),
                "{fault}: {status}: {answer}"
            );
        }
        assert_eq!(server.write_again(), text, "{fault} {number}: {}", server.said());
        assert_eq!(server.ask("GET /readyz", "").0, 200);
    }
    // A request that has all the memory and kernels it wants meets the faults of submits alone.
    assert!(came >= 3 && failed >= 2, "{came} faults came, {failed} requests failed");
    assert!(!server.said().contains("panicked"), "{}", server.said());
    // A device that takes its time is no lost one.
    place.inject("slow", 20);
    assert_eq!(server.write().unwrap(), text);
}

/// What a killed program leaves of its caches is right, or as if it were not there.
#[test]
fn caches_of_a_program_that_was_killed_are_right() {
    let Some(place) = Place::new() else { return };
    let (model, cache) = (place.model(), place.folder.path().join("cache"));
    let run = ["run", &model, "--raw", "The", "-n", "6", "--temp", "0", "--ignore-eos", "--device", "0", "-c", "256"];
    let kiln = || {
        let mut command = place.kiln(&run);
        command.env("KILN_CACHE_DIR", &cache);
        command
    };
    let other = place.folder.path().join("other");
    let began = std::time::Instant::now();
    let clean = place.kiln(&run).env("KILN_CACHE_DIR", other).output().unwrap();
    let whole = began.elapsed();
    let mut killed = 0;
    for tenths in [1, 2, 3, 5, 7, 9] {
        let mut child = kiln().spawn().unwrap();
        std::thread::sleep(whole * tenths / 10);
        killed += usize::from(child.try_wait().unwrap().is_none());
        // The runner becomes the program, so this is the program. It may have ended.
        let _ = child.kill();
        child.wait().unwrap();
    }
    // The later ones find in their cache what earlier ones have left there, and may be done before.
    assert!(killed >= 2, "{killed} were killed");
    for _ in 0..2 {
        let output = kiln().output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("warning"), "{said}");
        assert_eq!(output.stdout, clean.stdout, "{said}");
    }
}
