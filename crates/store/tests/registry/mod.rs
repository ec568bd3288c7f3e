//! A local HTTP server instead of a registry: files with ranges or without, redirects, keys, and every way to fail that
//! the tests want.

#![allow(clippy::unwrap_used, reason = "a test may fail by it")]
#![allow(dead_code, unreachable_pub, reason = "each test uses what it needs")]

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What goes wrong with a request; each happens once.
#[derive(Clone, Debug)]
pub enum Fault {
    /// This status, with a `Retry-After` where there is one.
    Status(u16, Option<u64>),
    /// The connection ends after this many bytes of the body.
    Cut(usize),
}

/// What lies under a path.
#[derive(Clone, Debug)]
pub struct File {
    pub body: Vec<u8>,
    pub etag: String,
    /// Whether parts can be asked for.
    pub ranges: bool,
    /// Where to go instead.
    pub redirect: Option<String>,
    /// The key that is wanted.
    pub token: Option<String>,
    /// The length that is told, where it is not the body's.
    pub pretend: Option<u64>,
    /// The body comes in small pieces, with a pause before each.
    pub slow: bool,
    /// What goes wrong first.
    pub faults: VecDeque<Fault>,
}

impl File {
    pub fn new(body: impl Into<Vec<u8>>) -> File {
        let (etag, token) = ("\"1\"".into(), None);
        let (ranges, redirect, pretend, slow, faults) = (true, None, None, false, VecDeque::new());
        File { body: body.into(), etag, ranges, redirect, token, pretend, slow, faults }
    }

    pub fn redirect(to: String) -> File {
        File { redirect: Some(to), ..File::new("") }
    }
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub range: Option<(u64, u64)>,
    pub authorization: Option<String>,
}

#[derive(Default)]
struct State {
    files: Mutex<BTreeMap<String, File>>,
    seen: Mutex<Vec<Seen>>,
    /// Answers on their way, and the most there ever were.
    busy: AtomicUsize,
    most: AtomicUsize,
}

/// The server; it ends with the test process.
#[derive(Clone)]
pub struct Registry {
    state: Arc<State>,
    pub address: String,
}

impl Registry {
    pub fn start() -> Registry {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                std::thread::spawn(move || serve(&state, stream));
            }
        });
        Registry { state, address }
    }

    /// Puts a file under a path (which may have a query).
    pub fn put(&self, path: &str, file: File) {
        self.state.files.lock().unwrap().insert(path.to_owned(), file);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    pub fn forget(&self) {
        self.state.seen.lock().unwrap().clear();
    }

    /// The most answers that were on their way at once.
    pub fn most_at_once(&self) -> usize {
        self.state.most.load(Ordering::SeqCst)
    }

    /// A repository of Hugging Face with these files.
    pub fn hub(&self, repo: &str, commit: &str, files: &[(&str, &[u8])]) {
        let siblings: Vec<serde_json::Value> = files
            .iter()
            .map(|(name, body)| {
                let digest = kiln_store::Digest::of(body);
                serde_json::json!({
                    "rfilename": name, "size": body.len(), "blobId": "0123456789abcdef0123456789abcdef01234567",
                    "lfs": {"sha256": digest.hex(), "size": body.len(), "pointerSize": 134},
                })
            })
            .collect();
        let listing = serde_json::json!({"id": repo, "sha": commit, "siblings": siblings});
        self.put(&format!("/api/models/{repo}/revision/main?blobs=true"), File::new(listing.to_string()));
        for (name, body) in files {
            self.put(&format!("/{repo}/resolve/{commit}/{name}"), File::new(*body));
        }
    }

    /// A model of Ollama's registry.
    pub fn ollama(&self, repo: &str, tag: &str, body: &[u8]) {
        let digest = kiln_store::Digest::of(body);
        let manifest = serde_json::json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": format!("sha256:{digest}"), "size": 1},
            "layers": [
                {"mediaType": "application/vnd.ollama.image.model", "digest": format!("sha256:{digest}"), "size": body.len()},
                {"mediaType": "application/vnd.ollama.image.license", "digest": format!("sha256:{digest}"), "size": 1},
            ],
        });
        self.put(&format!("/v2/{repo}/manifests/{tag}"), File::new(manifest.to_string()));
        self.put(&format!("/v2/{repo}/blobs/sha256:{digest}"), File::new(body));
    }

    /// Lets the next requests for a path go wrong.
    pub fn fail(&self, path: &str, faults: &[Fault]) {
        let mut files = self.state.files.lock().unwrap();
        files.get_mut(path).unwrap().faults.extend(faults.iter().cloned());
    }
}

fn serve(state: &State, stream: TcpStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut out = stream;
    loop {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            match reader.read_line(&mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) if line.trim().is_empty() => break,
                Ok(_) => lines.push(line.trim().to_owned()),
            }
        }
        let path = lines[0].split(' ').nth(1).unwrap().to_owned();
        let header = |name: &str| {
            let line = lines.iter().find(|line| line.to_lowercase().starts_with(&format!("{name}:")))?;
            Some(line.split_once(':').unwrap().1.trim().to_owned())
        };
        let range = header("range").map(|text| {
            let (from, to) = text.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            (from.parse().unwrap(), to.parse::<u64>().unwrap() + 1)
        });
        let authorization = header("authorization");
        state.seen.lock().unwrap().push(Seen { path: path.clone(), range, authorization: authorization.clone() });
        let now = state.busy.fetch_add(1, Ordering::SeqCst) + 1;
        state.most.fetch_max(now, Ordering::SeqCst);
        let stay = answer(state, &mut out, &path, range, authorization.as_deref());
        state.busy.fetch_sub(1, Ordering::SeqCst);
        if !stay {
            return;
        }
    }
}

/// Answers one request; false where the connection ends.
fn answer(state: &State, out: &mut TcpStream, path: &str, range: Option<(u64, u64)>, key: Option<&str>) -> bool {
    let (file, fault) = {
        let mut files = state.files.lock().unwrap();
        let Some(file) = files.get_mut(path) else { return plain(out, 404, "") };
        let fault = file.faults.pop_front();
        (file.clone(), fault)
    };
    if let Some(Fault::Status(status, wait)) = fault {
        return plain(out, status, &wait.map(|s| format!("Retry-After: {s}\r\n")).unwrap_or_default());
    }
    if let Some(token) = &file.token
        && key != Some(&format!("Bearer {token}"))
    {
        return plain(out, 401, "");
    }
    if let Some(to) = &file.redirect {
        return plain(out, 302, &format!("Location: {to}\r\n"));
    }
    let all = file.body.len() as u64;
    let (status, from, to) = match range.filter(|_| file.ranges) {
        Some((from, to)) if from < all => (206, from, to.min(all)),
        Some(_) => return plain(out, 416, ""),
        None => (200, 0, all),
    };
    let extra = if status == 206 {
        format!("Content-Range: bytes {from}-{}/{}\r\n", to - 1, file.pretend.unwrap_or(all))
    } else {
        String::new()
    };
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nETag: {}\r\n{extra}\r\n", to - from, file.etag);
    let mut body = &file.body[from as usize..to as usize];
    // Long answers take a while, so that several can be on their way.
    if body.len() > 1000 {
        std::thread::sleep(Duration::from_millis(20));
    }
    let cut = if let Some(Fault::Cut(after)) = fault { Some(after) } else { None };
    if let Some(after) = cut {
        body = &body[..after.min(body.len())];
    }
    let sent = out.write_all(head.as_bytes()).and_then(|()| {
        body.chunks(if file.slow { 1 << 16 } else { usize::MAX }).try_for_each(|piece| {
            std::thread::sleep(Duration::from_millis(if file.slow { 10 } else { 0 }));
            out.write_all(piece)
        })
    });
    let sent = sent.and_then(|()| out.flush());
    sent.is_ok() && cut.is_none()
}

fn plain(out: &mut TcpStream, status: u16, extra: &str) -> bool {
    out.write_all(format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n{extra}\r\n").as_bytes()).is_ok()
}
