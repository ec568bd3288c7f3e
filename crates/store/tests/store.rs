//! The store against a local server that stands in for each registry and fails in every way they do.

#![allow(clippy::unwrap_used, reason = "a test may fail by it")]

mod registry;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use kiln_store::{Checked, Digest, Error, Left, Name, Record, Settings, Silent, Stays, Store, Watch};
use registry::{Fault, File, Registry};

const COMMIT: &str = "0123456789012345678901234567890123456789";

struct Test {
    registry: Registry,
    store: Store,
    folder: tempfile::TempDir,
}

/// A whole GGUF file of `bytes` bytes, hardly any of which is like its neighbour.
fn body(bytes: usize) -> Vec<u8> {
    let data = |len: usize| (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect::<Vec<u8>>();
    let whole = |elements: usize| {
        let mut writer = kiln_gguf::Writer::new(kiln_gguf::Metadata::new());
        writer.add("x", &[elements], kiln_gguf::TensorType::I8, data(elements)).unwrap();
        writer.to_bytes().unwrap()
    };
    let head = whole(32).len() - 32;
    let mut made = whole(bytes - head);
    // The padding behind the tensor may be missing.
    made.truncate(bytes);
    made
}

/// Another of the same length.
fn other_body(bytes: usize) -> Vec<u8> {
    let mut other = body(bytes);
    other[bytes - 1] ^= 1;
    other
}

/// A small whole GGUF file with this name.
fn tiny(name: &str) -> Vec<u8> {
    let mut metadata = kiln_gguf::Metadata::new();
    metadata.set("general.name", name);
    kiln_gguf::Writer::new(metadata).to_bytes().unwrap()
}

impl Test {
    fn new() -> Test {
        Test::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut Settings)) -> Test {
        let (registry, folder) = (Registry::start(), tempfile::tempdir().unwrap());
        let mut settings = Settings {
            hub_endpoint: registry.address.clone(),
            ollama_registry: registry.address.clone(),
            piece: Some(10_000),
            pause: Duration::from_millis(1),
            ..Settings::new(folder.path().join("store"), folder.path().join("hub"))
        };
        change(&mut settings);
        Test { registry, store: Store::new(settings), folder }
    }

    fn get(&self, name: &str) -> Result<PathBuf, Error> {
        self.store.get(name, &Silent)
    }

    fn pull(&self, name: &str) -> Result<Record, Error> {
        self.store.pull(&Name::parse(name).unwrap(), None, None, &Silent)
    }

    fn web(&self, bytes: &[u8]) -> String {
        self.registry.put("/x/model.gguf", File::new(bytes));
        format!("{}/x/model.gguf", self.registry.address)
    }

    /// Everything below the folder, without the records.
    fn files(&self) -> Vec<String> {
        let mut found = Vec::new();
        walk(self.folder.path(), &mut found);
        found.sort();
        found
    }
}

fn walk(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.file_name() == "records" {
            continue;
        }
        if entry.file_type().unwrap().is_dir() {
            walk(&entry.path(), found);
        } else {
            found.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
}

fn failed<T: std::fmt::Debug>(result: Result<T, Error>, words: &[&str]) {
    let error = result.unwrap_err().to_string();
    assert!(error.contains("\nhint: "), "{error}");
    words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
}

/// Notes what is said.
#[derive(Default)]
struct Said(Mutex<Vec<String>>);

impl Watch for Said {
    fn say(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }
    fn start(&self, _: &str, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}

#[test]
fn a_file_comes_in_pieces_side_by_side() {
    let (test, whole) = (Test::new(), body(123_456));
    let url = test.web(&whole);
    let path = test.get(&url).unwrap();
    assert_eq!(fs::read(&path).unwrap(), whole);
    assert!(test.registry.most_at_once() > 1, "one at a time");
    let mut ranges: Vec<_> = test.registry.seen().iter().skip(1).map(|seen| seen.range.unwrap()).collect();
    ranges.sort_unstable();
    assert_eq!(ranges.len(), 13);
    assert!(ranges.windows(2).all(|w| w[0].1 == w[1].0) && ranges[12].1 == 123_456, "{ranges:?}");
    assert_eq!(test.files(), ["model.gguf"]);
    // The next time nothing is asked.
    test.registry.forget();
    assert_eq!((test.get(&url).unwrap(), test.get("model").unwrap()), (path.clone(), path));
    assert!(test.registry.seen().is_empty());
}

#[test]
fn what_breaks_off_is_resumed_within_a_piece_and_by_the_next_process() {
    let (test, whole) = (Test::with(|s| (s.connections, s.tries) = (1, 2)), body(50_000));
    let url = test.web(&whole);
    // The first answer is the probe. Then one piece breaks three times, always after something came: no reason to give up.
    let cuts = [Fault::Cut(1), Fault::Cut(3000), Fault::Cut(3000), Fault::Cut(3000)];
    test.registry.fail("/x/model.gguf", &cuts);
    // Then two pieces come, and the server goes away.
    let path = "/x/model.gguf";
    assert_eq!(fs::read(test.get(&url).unwrap()).unwrap(), whole);
    let seen = test.registry.seen();
    assert_eq!(seen[2].range, Some((3000, 10_000)), "{seen:?}");

    let test = Test::with(|s| (s.connections, s.tries) = (1, 2));
    let url = test.web(&whole);
    let mut faults = vec![Fault::Cut(1), Fault::Cut(10_000), Fault::Cut(10_000)];
    faults.extend(vec![Fault::Status(503, None); 2]);
    test.registry.fail(path, &faults);
    failed(test.get(&url), &["model.gguf broke off at 19.5 KiB of 48.8 KiB", "503", "resumes there"]);
    assert_eq!(test.files(), ["model.gguf.kiln-part", "model.gguf.kiln-part.json"]);
    assert!(test.store.list().is_empty(), "half a model is no model");
    let left = test.store.incomplete();
    assert_eq!((left[0].done, left[0].total), (20_000, 50_000));
    test.registry.forget();
    assert_eq!(fs::read(test.get(&url).unwrap()).unwrap(), whole);
    let first = test.registry.seen()[1].range;
    assert_eq!(first, Some((20_000, 30_000)), "what was there is not fetched again");
    assert_eq!(test.files(), ["model.gguf"]);
}

#[test]
fn a_file_that_changed_is_begun_anew() {
    let (test, old, new) = (Test::with(|s| (s.connections, s.tries) = (1, 1)), body(30_000), other_body(30_000));
    let url = test.web(&old);
    test.registry.fail("/x/model.gguf", &[Fault::Cut(1), Fault::Cut(10_000), Fault::Status(500, None)]);
    failed(test.get(&url), &["broke off"]);
    test.registry.put("/x/model.gguf", File { etag: "\"2\"".into(), ..File::new(new.clone()) });
    assert_eq!(fs::read(test.get(&url).unwrap()).unwrap(), new);
}

#[test]
fn a_server_without_ranges_is_asked_from_the_beginning() {
    let (test, whole) = (Test::new(), body(40_000));
    let url = test.web(&whole);
    test.registry.put("/x/model.gguf", File { ranges: false, ..File::new(whole.clone()) });
    test.registry.fail("/x/model.gguf", &[Fault::Cut(20_000), Fault::Cut(100)]);
    assert_eq!(fs::read(test.get(&url).unwrap()).unwrap(), whole);
    assert_eq!(test.files(), ["model.gguf"]);
}

#[test]
fn a_wrong_checksum_leaves_nothing() {
    let (test, whole) = (Test::new(), body(30_000));
    let mut other = whole.clone();
    other[12_345] ^= 1;
    test.registry.hub("a/b", COMMIT, &[("m-Q4_0.gguf", &whole)]);
    test.registry.put(&format!("/a/b/resolve/{COMMIT}/m-Q4_0.gguf"), File::new(other.clone()));
    failed(
        test.get("hf:a/b"),
        &[
            "m-Q4_0.gguf: SHA-256 mismatch: expected",
            "Nothing was stored.",
            Digest::of(&other).hex(),
            Digest::of(&whole).hex(),
        ],
    );
    assert!(test.files().is_empty(), "{:?}", test.files());
    // A shorter file is not even begun.
    test.registry.put(&format!("/a/b/resolve/{COMMIT}/m-Q4_0.gguf"), File::new(&other[1..]));
    failed(test.get("hf:a/b"), &["29999 bytes where 30000 were announced"]);
    assert!(test.files().is_empty(), "{:?}", test.files());
    // And for an address the user says what it must be.
    let url = Name::parse(&test.web(&other)).unwrap();
    failed(test.store.pull(&url, None, Some(&Digest::of(&whole)), &Silent), &["mismatch"]);
    assert!(test.files().is_empty(), "{:?}", test.files());
    test.store.pull(&url, Some("mine"), Some(&Digest::of(&other)), &Silent).unwrap();
    assert_eq!(fs::read(test.get("mine").unwrap()).unwrap(), other);
}

#[test]
fn hugging_face_models_lie_in_the_cache_that_all_share() {
    let test = Test::new();
    let (small, first, second) = (body(20_000), body(11_000), body(12_000));
    let files: [(&str, &[u8]); 4] = [
        ("m-Q4_K_M.gguf", &small),
        ("big/m-Q8_0-00001-of-00002.gguf", &first),
        ("big/m-Q8_0-00002-of-00002.gguf", &second),
        ("../../evil.gguf", &small),
    ];
    test.registry.hub("own-er/re.po", COMMIT, &files);
    let path = test.get("hf:own-er/re.po").unwrap();
    let repo = test.folder.path().join("hub/models--own-er--re.po");
    assert_eq!(path, repo.join("snapshots").join(COMMIT).join("m-Q4_K_M.gguf"));
    assert_eq!(fs::read_link(&path).unwrap(), Path::new("../../blobs").join(Digest::of(&small).hex()));
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let path = test.get("hf:own-er/re.po:q8_0").unwrap();
    assert!(path.ends_with("big/m-Q8_0-00001-of-00002.gguf"));
    assert_eq!(fs::read(path.with_file_name("m-Q8_0-00002-of-00002.gguf")).unwrap(), second);
    failed(test.get("hf:own-er/re.po:Q5_K_M"), &["own-er/re.po has no Q5_K_M", "there is Q8_0, Q4_K_M"]);
    // What another program fetched is used, without a question to anybody and without a record.
    fs::remove_dir_all(test.folder.path().join("store")).unwrap();
    test.registry.forget();
    assert!(test.get("hf:own-er/re.po:Q4_K_M").is_ok() && test.get("m-q8_0").is_ok());
    assert!(test.registry.seen().is_empty());
    let record = test.store.record("m-Q4_K_M").unwrap();
    let removed = test.store.remove(&record).unwrap();
    assert!(removed.files.is_empty() && removed.left.len() == 1 && path.exists(), "it is another's");
    // A pull asks for news; blobs that are there are not fetched again.
    test.pull("hf:own-er/re.po:Q4_K_M").unwrap();
    assert_eq!(test.registry.seen().len(), 1);
}

#[test]
fn encoders_beside_a_model_are_named_and_fetched_by_name() {
    let (test, said) = (Test::new(), Said::default());
    let (model, encoder) = (tiny("model"), tiny("encoder"));
    let files: [(&str, &[u8]); 3] =
        [("m-Q8_0.gguf", &model), ("mmproj-m-BF16.gguf", &encoder), ("mmproj-m-F16.gguf", &encoder)];
    test.registry.hub("a/b", COMMIT, &files);
    let pull = |name: &str| test.store.pull(&Name::parse(name).unwrap(), None, None, &said).unwrap();
    pull("hf:a/b");
    let lines = said.0.lock().unwrap().join("\n");
    assert!(lines.contains("mmproj-m-F16.gguf, mmproj-m-BF16.gguf"), "{lines}");
    assert!(lines.contains("`kiln pull hf:a/b:mmproj-m-F16.gguf`"), "{lines}");
    said.0.lock().unwrap().clear();
    let record = pull("hf:a/b:mmproj-m-F16.gguf");
    assert_eq!(fs::read(record.path().unwrap()).unwrap(), encoder);
    assert!(said.0.lock().unwrap().is_empty(), "who has it need not be told of it");
}

#[test]
fn a_new_commit_is_fetched_by_pull_and_the_old_one_can_be_named() {
    let test = Test::new();
    let (first, second) = (tiny("old"), tiny("new"));
    test.registry.hub("a/b", COMMIT, &[("m.gguf", &first)]);
    let old = test.get("hf:a/b").unwrap();
    test.registry.hub("a/b", &COMMIT.replace('0', "f"), &[("m.gguf", &second)]);
    assert_eq!(test.get("hf:a/b").unwrap(), old, "what is there is good enough");
    test.pull("hf:a/b").unwrap();
    assert_eq!(fs::read(test.get("hf:a/b").unwrap()).unwrap(), second);
    assert_eq!(fs::read(test.get(&format!("hf:a/b@{COMMIT}")).unwrap()).unwrap(), first);
}

#[test]
fn keys_go_to_their_host_alone() {
    let elsewhere = Registry::start();
    let test = Test::with(|s| s.hub_token = Some("secret".into()));
    let whole = body(30_000);
    test.registry.hub("a/b", COMMIT, &[("m.gguf", &whole)]);
    let path = format!("/a/b/resolve/{COMMIT}/m.gguf");
    let to = format!("{}/blob?signature=1", elsewhere.address);
    test.registry.put(&path, File { token: Some("secret".into()), ..File::redirect(to) });
    elsewhere.put("/blob?signature=1", File::new(whole.clone()));
    assert_eq!(fs::read(test.get("hf:a/b").unwrap()).unwrap(), whole);
    let all = |registry: &Registry| registry.seen().iter().all(|seen| seen.authorization.is_some());
    assert!(all(&test.registry) && !elsewhere.seen().is_empty());
    assert!(elsewhere.seen().iter().all(|seen| seen.authorization.is_none()), "{:?}", elsewhere.seen());
}

#[test]
fn what_a_registry_does_not_show_is_told_with_what_to_do() {
    let test = Test::new();
    failed(test.get("hf:a/b"), &["has no repository a/b", "HF_TOKEN"]);
    failed(test.get("ollama:nothing"), &["has no library/nothing:latest"]);
    failed(test.get(&format!("{}/no.gguf", test.registry.address)), &["no.gguf answered with status 404"]);
    test.registry.hub("a/b", COMMIT, &[("m.gguf", b"x")]);
    test.registry.put(&format!("/a/b/resolve/{COMMIT}/m.gguf"), File { token: Some("t".into()), ..File::new("x") });
    failed(test.get("hf:a/b"), &["a/b", "HF_TOKEN", "terms"]);
    test.registry.hub("c/d", COMMIT, &[("model.safetensors", b"x")]);
    failed(test.get("hf:c/d"), &["c/d has no GGUF file"]);
    test.registry.put("/api/models/e/f/revision/main?blobs=true", File::new("<html>"));
    failed(test.get("hf:e/f"), &["makes no sense"]);
    failed(test.get("no-such-model"), &["neither a file nor a model of the store", "kiln list"]);
    assert!(test.files().is_empty(), "{:?}", test.files());
    let offline = Test::with(|s| s.offline = true);
    failed(offline.get("hf:a/b"), &["HF_HUB_OFFLINE"]);
    assert!(offline.registry.seen().is_empty());
    // Nothing listens there.
    let nowhere = Test::with(|s| (s.hub_endpoint, s.tries) = ("http://127.0.0.1:1".into(), 2));
    failed(nowhere.get("hf:a/b"), &["127.0.0.1:1 cannot be reached: Connection refused", "network"]);
}

#[test]
fn a_busy_server_is_waited_for_as_long_as_it_says() {
    let test = Test::new();
    test.registry.hub("a/b", COMMIT, &[("m.gguf", &tiny("x"))]);
    let listing = "/api/models/a/b/revision/main?blobs=true";
    test.registry.fail(listing, &[Fault::Status(429, Some(1)), Fault::Status(503, None)]);
    let start = std::time::Instant::now();
    test.get("hf:a/b").unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1));
    let url = test.web(&body(25_000));
    test.registry.fail("/x/model.gguf", &[Fault::Status(429, Some(0)), Fault::Cut(1), Fault::Status(429, Some(0))]);
    test.get(&url).unwrap();
    test.registry.fail(listing, &[const { Fault::Status(429, None) }; 6]);
    failed(test.pull("hf:a/b"), &["429"]);
}

#[test]
fn ollama_models_lie_as_ollama_puts_them() {
    let test = Test::new();
    let whole = body(33_333);
    test.registry.ollama("library/tiny", "1b", &whole);
    let path = test.get("ollama:tiny:1b").unwrap();
    let root = test.folder.path().join("store/ollama");
    assert_eq!(path, root.join("blobs").join(format!("sha256-{}", Digest::of(&whole))));
    assert!(root.join("manifests/registry.ollama.ai/library/tiny/1b").is_file());
    assert_eq!(test.get("tiny:1b").unwrap(), path);
    // A machine where Ollama has it already.
    let other = Test::with(|s| s.ollama_models = Some(root.clone()));
    assert_eq!(other.get("ollama:tiny:1b").unwrap(), path);
    assert!(other.registry.seen().is_empty());
    let removed = test.store.remove(&test.store.record("tiny:1b").unwrap()).unwrap();
    assert_eq!(removed.files.len(), 1);
    assert!(test.files().is_empty(), "{:?}", test.files());
    assert!(test.store.list().is_empty());
}

#[test]
fn verify_sees_one_wrong_bit_and_rm_leaves_what_others_need() {
    let test = Test::new();
    let whole = body(30_000);
    test.registry.hub("a/b", COMMIT, &[("m-Q4_0.gguf", &whole), ("m-Q8_0.gguf", b"other")]);
    let path = test.get("hf:a/b:Q4_0").unwrap();
    let record = test.store.record("hf:a/b:Q4_0").unwrap();
    let check = || test.store.verify(&record, &Silent).unwrap().remove(0).1;
    assert_eq!(check(), Checked::Good);
    let mut bad = whole.clone();
    bad[29_999] ^= 0x80;
    fs::write(&path, &bad).unwrap();
    assert!(matches!(check(), Checked::Damaged(why) if why.contains(Digest::of(&whole).hex())));
    fs::write(&path, &bad[1..]).unwrap();
    assert!(matches!(check(), Checked::Damaged(why) if why.contains("29999 bytes")));
    assert!(!test.store.list()[0].is_there() && test.store.find(&Name::Local("m-q4_0".into())).unwrap().is_none());
    fs::write(&path, &whole).unwrap();
    // Two names for the same file.
    test.get("hf:a/b").unwrap();
    test.pull("hf:a/b").unwrap();
    let left = test.store.remove(&record).unwrap().left;
    assert_eq!(left, [Left { path: path.clone(), why: Stays::Shared }]);
    let removed = test.store.remove(&test.store.record("hf:a/b").unwrap()).unwrap();
    assert!(removed.files.len() + removed.left.len() == 1);
}

#[test]
fn split_files_of_an_address_come_together() {
    let test = Test::new();
    let name = |no: u32| format!("/x/m-0000{no}-of-00002.gguf");
    test.registry.put(&name(1), File::new(tiny("one")));
    test.registry.put(&name(2), File::new(tiny("two")));
    let path = test.get(&format!("{}{}", test.registry.address, name(2))).unwrap();
    assert!(path.ends_with("m-00001-of-00002.gguf"));
    assert_eq!(test.files(), ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]);
    assert_eq!(test.get("m").unwrap(), path);
}

#[test]
fn two_processes_fetch_a_file_once() {
    let (test, whole) = (Test::new(), body(60_000));
    let url = test.web(&whole);
    let said = Said::default();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                assert_eq!(fs::read(test.store.get(&url, &said).unwrap()).unwrap(), whole);
            });
        }
    });
    assert_eq!(test.files(), ["model.gguf"]);
    assert_eq!(test.store.list().len(), 1);
}

#[test]
fn a_full_disk_is_told_before_anything_is_fetched() {
    let test = Test::new();
    // More than any disk has.
    let listing = serde_json::json!({"sha": COMMIT, "siblings": [
        {"rfilename": "m.gguf", "lfs": {"sha256": Digest::of(b"x").hex(), "size": 1u64 << 60}},
    ]});
    test.registry.put("/api/models/a/b/revision/main?blobs=true", File::new(listing.to_string()));
    let path = format!("/a/b/resolve/{COMMIT}/m.gguf");
    test.registry.put(&path, File { pretend: Some(1 << 60), ..File::new("x") });
    failed(test.get("hf:a/b"), &["not enough disk space", "m.gguf needs 1048576.0 TiB", "HF_HOME"]);
    assert!(test.files().is_empty(), "{:?}", test.files());
}

#[test]
fn what_is_there_is_hashed_and_a_damaged_file_is_fetched_again() {
    let test = Test::new();
    let whole = body(30_000);
    test.registry.hub("a/b", COMMIT, &[("m-Q4_0.gguf", &whole)]);
    test.registry.ollama("library/tiny", "1b", &whole);
    let hash = Digest::of(&whole);
    for source in [test.web(&whole).as_str(), "hf:a/b", "ollama:tiny:1b"] {
        let name = Name::parse(source).unwrap();
        for want in [None, Some(&hash)] {
            let path = test.get(source).unwrap();
            let mut bad = whole.clone();
            bad[20_000] ^= 4;
            for bad in [&bad[..], &bad[..29_000]] {
                fs::write(&path, bad).unwrap();
                let said = Said::default();
                let record = test.store.pull(&name, None, want, &said).unwrap();
                assert_eq!(fs::read(&path).unwrap(), whole, "{source}");
                assert_eq!(record.files[0].sha256.as_ref(), Some(&hash));
                let said = said.0.lock().unwrap().join("\n");
                assert!(said.contains("expected") && said.contains("fetching it again"), "{source}: {said}");
            }
            // What is good is not fetched again.
            test.registry.forget();
            let said = Said::default();
            test.store.pull(&name, None, want, &said).unwrap();
            assert!(said.0.lock().unwrap().is_empty());
            assert!(test.registry.seen().iter().all(|seen| seen.range.is_none()), "{source}");
        }
        // A hash that nothing has.
        let wrong = Digest::of(b"nothing");
        let words = ["SHA-256 mismatch: expected", wrong.hex(), hash.hex(), "Nothing was stored."];
        failed(test.store.pull(&name, None, Some(&wrong), &Silent), &words);
        assert_eq!(fs::read(test.get(source).unwrap()).unwrap(), whole, "what was there is still there");
    }
}

#[test]
fn only_whole_gguf_files_get_their_name() {
    let test = Test::new();
    let whole = body(30_000);
    for bad in [&b"<html>no model</html>"[..], &whole[..29_999], &whole[..20], b"GGUF", b""] {
        for ranges in [true, false] {
            let url = test.web(bad);
            test.registry.put("/x/model.gguf", File { ranges, ..File::new(bad) });
            let error = test.get(&url).unwrap_err().to_string();
            assert!(error.contains("hint:"), "{error}");
            assert!(error.contains("no whole GGUF file") || bad.is_empty(), "{error}");
            assert!(!error.contains("kiln-part"), "{error}");
            assert!(test.files().is_empty() && test.store.list().is_empty(), "{:?}", test.files());
            assert!(!test.folder.path().join("store/web").exists(), "no empty folders are left");
        }
    }
}

#[test]
fn records_are_relative_and_lead_nowhere_else() {
    let test = Test::new();
    let whole = body(30_000);
    let path = test.get(&test.web(&whole)).unwrap();
    let store = test.folder.path().join("store");
    let record = fs::read_dir(store.join("records")).unwrap().next().unwrap().unwrap().path();
    let text = fs::read_to_string(&record).unwrap();
    assert!(!text.contains(test.folder.path().to_str().unwrap()), "{text}");
    // A copy of the store is one by itself.
    let copy = test.folder.path().join("copy");
    let status = std::process::Command::new("cp").arg("-r").args([&store, &copy]).status().unwrap();
    assert!(status.success());
    let other = Store::new(Settings::new(&copy, test.folder.path().join("hub")));
    let removed = other.remove(&other.record("model").unwrap()).unwrap();
    assert_eq!(removed.files.len(), 1);
    assert!(path.exists() && removed.files[0].0.starts_with(&copy) && other.list().is_empty());
    // Absolute paths of earlier versions are read where they stay inside.
    let rewrite = |to: &Path| {
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["files"][0]["path"] = to.to_str().unwrap().into();
        fs::write(&record, json.to_string()).unwrap();
    };
    rewrite(&path);
    assert_eq!(test.get("model").unwrap(), path);
    // And what leads outside is never believed, nor deleted.
    let precious = test.folder.path().join("precious.gguf");
    fs::write(&precious, &whole).unwrap();
    for to in [precious.as_path(), Path::new("../precious.gguf"), Path::new("records/x.json"), Path::new("")] {
        rewrite(to);
        failed(test.store.record("model"), &["the record of model names", "does not touch"]);
        failed(test.get("model"), &["the record of model names"]);
        assert_eq!(test.store.refused().len(), 1);
    }
    let folder = path.parent().unwrap();
    rewrite(&path);
    // A link in the store, and a folder that is one.
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&precious, &path).unwrap();
    let removed = test.store.remove(&test.store.record("model").unwrap()).unwrap();
    assert_eq!(removed.left, [Left { path: path.clone(), why: Stays::Linked }]);
    fs::remove_file(&path).unwrap();
    fs::remove_dir(folder).unwrap();
    fs::rename(&precious, test.folder.path().join("model.gguf")).unwrap();
    std::os::unix::fs::symlink(test.folder.path(), folder).unwrap();
    rewrite(&path);
    let removed = test.store.remove(&test.store.record("model").unwrap()).unwrap();
    assert_eq!(removed.left.len(), 1);
    assert_eq!(fs::read(test.folder.path().join("model.gguf")).unwrap(), whole);
}

#[test]
fn a_link_in_the_shared_cache_goes_alone() {
    let test = Test::new();
    test.registry.hub("a/b", COMMIT, &[("m.gguf", &tiny("x"))]);
    let path = test.get("hf:a/b").unwrap();
    let precious = test.folder.path().join("precious.gguf");
    fs::write(&precious, tiny("x")).unwrap();
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&precious, &path).unwrap();
    test.store.remove(&test.store.record("hf:a/b").unwrap()).unwrap();
    assert!(precious.exists() && !path.exists());
}

#[test]
fn what_a_server_did_is_told() {
    let test = Test::with(|s| (s.connections, s.tries) = (1, 2));
    let url = test.web(&body(30_000));
    let path = "/x/model.gguf";
    test.registry.fail(path, &[const { Fault::Status(500, None) }; 2]);
    failed(test.get(&url), &["model.gguf answered with status 500", "try again later"]);
    test.registry.put(path, File::redirect("file:///etc/passwd".into()));
    failed(test.get(&url), &["redirects to file:///etc/passwd", "no HTTP address"]);
    test.registry.put(path, File { ranges: false, ..File::new(body(30_000)) });
    test.registry.fail(path, &[Fault::Cut(0), Fault::Cut(0)]);
    failed(test.get(&url), &["broke off at 0 B", "this server cannot resume", "nothing was kept; try again"]);
    assert!(test.files().is_empty(), "{:?}", test.files());
}
