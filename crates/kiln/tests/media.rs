//! Pictures and sounds on the command line: given to a model, told of by `kiln inspect`, and refused in one sentence where they cannot be used. No
//! GPU is needed.

#![allow(clippy::unwrap_used, reason = "a test may fail by it, in its helping functions too")]

#[path = "../../store/tests/registry/mod.rs"]
mod registry;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use kiln_gguf::{Gguf, Metadata, TensorType, Writer};
use registry::Registry;
use serde_json::Value;

fn kiln(arguments: &[&str]) -> Output {
    kiln_reading(arguments, "")
}

/// The same with something on stdin.
fn kiln_reading(arguments: &[&str], input: &str) -> Output {
    let nowhere = std::env::temp_dir().join("kiln-pictures-no-such-manifest.json");
    let mut running = Command::new(env!("CARGO_BIN_EXE_kiln"))
        .args(arguments)
        .env("VK_DRIVER_FILES", &nowhere)
        .env("VK_ICD_FILENAMES", &nowhere)
        .env_remove("KILN_DEVICE")
        .env_remove("KILN_VALIDATION")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Who has refused everything reads nothing.
    let _ = running.stdin.take().unwrap().write_all(input.as_bytes());
    running.wait_with_output().unwrap()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", told(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A picture whose pixels depend on `salt`.
fn bmp(width: u32, height: u32, salt: u32) -> Vec<u8> {
    let row = (3 * width).next_multiple_of(4);
    let mut bytes = b"BM".to_vec();
    for word in [54 + row * height, 0, 54, 40, width, height, 1 | 24 << 16, 0, row * height, 2835, 2835, 0, 0] {
        bytes.extend(word.to_le_bytes());
    }
    for y in 0..height {
        let pixel = |x: u32| [(x * salt) as u8, (y * 9 + salt) as u8, ((x ^ y) * salt) as u8];
        let mut line: Vec<u8> = (0..width).flat_map(pixel).collect();
        line.resize(row as usize, 0);
        bytes.extend(line);
    }
    bytes
}

/// A sound of so many samples.
fn wav(samples: u32, salt: u32) -> Vec<u8> {
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + 2 * samples).to_le_bytes());
    bytes.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    bytes.extend([16_000_u32, 32_000].iter().flat_map(|rate| rate.to_le_bytes()));
    bytes.extend(b"\x02\0\x10\0data");
    bytes.extend((2 * samples).to_le_bytes());
    bytes.extend((0..samples).flat_map(|i| ((i * i * salt / 7) as i16 / 4).to_le_bytes()));
    bytes
}

/// `<|audio>` and `<audio|>`, which stand around a sound for this family of encoders: the test's vocabulary has bytes alone.
const AROUND: u64 = 16;

/// What an encoder of a test makes rows of.
#[derive(Clone, Copy, PartialEq)]
enum Of {
    Pictures,
    Both,
}

/// A small LLaVA whose rows have this width, which may hear as well: a row for 640 samples.
fn encoder(width: usize, of: Of, path: &Path) {
    let mut m = Metadata::new();
    m.set("general.architecture", "clip");
    m.set("clip.has_vision_encoder", true);
    m.set("clip.vision.projector_type", "mlp");
    m.set("clip.has_audio_encoder", of == Of::Both);
    m.set("clip.audio.projector_type", "gemma4ua");
    m.set("clip.audio.num_mel_bins", 128_u32);
    m.set("clip.use_gelu", true);
    let keys = [("image_size", 8_u32), ("patch_size", 4), ("embedding_length", 16), ("feed_forward_length", 24)];
    let more = [("block_count", 2), ("attention.head_count", 2), ("projection_dim", width as u32)];
    keys.iter().chain(&more).for_each(|(key, value)| m.set(format!("clip.vision.{key}"), *value));
    m.set("clip.vision.attention.layer_norm_epsilon", 1e-5_f32);
    m.set("clip.vision.image_mean", vec![0.5_f32; 3]);
    m.set("clip.vision.image_std", vec![0.5_f32; 3]);
    let mut writer = Writer::new(m);
    let mut put = |name: &str, shape: &[usize]| {
        let count: usize = shape.iter().product();
        let seed = name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(byte)));
        let value = |i: u32| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 16) as f32 / 65536.0 - 0.5;
        let bytes: Vec<u8> = (0..count as u32).flat_map(|i| value(i).to_le_bytes()).collect();
        writer.add(name, shape, TensorType::F32, bytes).unwrap();
    };
    put("v.patch_embd.weight", &[4, 4, 3, 16]);
    put("v.position_embd.weight", &[16, 4]);
    for norm in ["ln1", "ln2"] {
        put(&format!("v.blk.0.{norm}.weight"), &[16]);
    }
    for matrix in ["attn_q", "attn_k", "attn_v", "attn_out"] {
        put(&format!("v.blk.0.{matrix}.weight"), &[16, 16]);
    }
    put("v.blk.0.ffn_up.weight", &[16, 24]);
    put("v.blk.0.ffn_down.weight", &[24, 16]);
    put("mm.0.weight", &[16, 24]);
    put("mm.0.bias", &[24]);
    put("mm.2.weight", &[24, width]);
    put("mm.2.bias", &[width]);
    if of == Of::Both {
        put("mm.a.input_projection.weight", &[640, width]);
    }
    std::fs::write(path, writer.to_bytes().unwrap()).unwrap();
}

/// A folder with a model, an encoder that belongs to it, and pictures.
struct Scene {
    folder: tempfile::TempDir,
}

impl Scene {
    fn new() -> Scene {
        let scene = Scene { folder: tempfile::tempdir().unwrap() };
        let model = scene.file("model.gguf");
        let made = kiln(&["synth", "tiny-llama", "F32", &model]);
        assert_eq!(made.status.code(), Some(0), "{}", told(&made));
        let width = Gguf::open(&model).unwrap().metadata().get_usize("llama.embedding_length").unwrap();
        encoder(width, Of::Both, Path::new(&scene.file("mmproj.gguf")));
        encoder(width, Of::Pictures, Path::new(&scene.file("deaf.gguf")));
        encoder(width + 8, Of::Both, Path::new(&scene.file("other.gguf")));
        for (name, bytes) in [("a.bmp", bmp(20, 14, 5)), ("b.bmp", bmp(40, 9, 11)), ("long.bmp", bmp(1, 300, 3))] {
            std::fs::write(scene.file(name), bytes).unwrap();
        }
        std::fs::write(scene.file("cut.bmp"), &bmp(20, 14, 5)[..70]).unwrap();
        std::fs::write(scene.file("a.wav"), wav(3_200, 3)).unwrap();
        std::fs::write(scene.file("b.wav"), wav(1_700, 5)).unwrap();
        std::fs::write(scene.file("cut.wav"), &wav(3_200, 3)[..30]).unwrap();
        std::fs::write(scene.file("words.png"), "these are words").unwrap();
        std::fs::write(scene.file("empty.png"), "").unwrap();
        scene
    }

    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).to_string_lossy().into_owned()
    }

    /// Asks about pictures.
    fn run(&self, mmproj: Option<&str>, pictures: &[&str], more: &[&str]) -> Output {
        let (model, mmproj) = (self.file("model.gguf"), mmproj.map(|name| self.file(name)));
        let pictures: Vec<String> = pictures.iter().map(|name| self.file(name)).collect();
        let mut words = vec!["run", &model, "What is this?", "--cpu", "--temp", "0", "-n", "4"];
        mmproj.iter().for_each(|path| words.extend(["--mmproj", path]));
        let flag = |path: &str| if path.ends_with(".wav") { "--audio" } else { "--image" };
        pictures.iter().for_each(|path| words.extend([flag(path), path]));
        kiln(&[&words, more].concat())
    }

    fn refused(&self, mmproj: Option<&str>, pictures: &[&str], more: &[&str], words: &[&str]) {
        let output = self.run(mmproj, pictures, more);
        let error = told(&output);
        assert!(matches!(output.status.code(), Some(1 | 2)) && output.stdout.is_empty(), "{error}");
        assert!(!error.contains("panicked"), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
    }
}

#[test]
fn pictures_are_part_of_the_prompt() {
    let scene = Scene::new();
    let answered = |pictures: &[&str], more: &[&str]| {
        let mmproj = Some("mmproj.gguf").filter(|_| !pictures.is_empty());
        json(&scene.run(mmproj, pictures, &[&["--json", "--logprobs", "3"], more].concat()))
    };
    for more in [&[][..], &["--raw"]] {
        let counts = [&[][..], &["a.bmp"], &["a.bmp", "b.bmp"]].map(|pictures| answered(pictures, more));
        let tokens = counts.each_ref().map(|told| told["usage"]["prompt_tokens"].as_u64().unwrap());
        // Four patches each; the text is cut where they stand.
        assert_eq!(tokens.map(|n| n - tokens[0]), [0, 4, 8], "{more:?}");
        let first = |told: &Value| told["tokens"][0]["top_logprobs"].clone();
        assert_eq!(first(&answered(&["a.bmp"], more)), first(&counts[1]), "the same picture says the same");
        assert_ne!(first(&answered(&["b.bmp"], more)), first(&counts[1]), "another picture says something else");
    }
}

/// An encoder is fetched by the name that `kiln pull` says, and found again by it.
#[test]
fn an_encoder_is_named_as_models_are() {
    let (scene, registry) = (Scene::new(), Registry::start());
    let bytes = std::fs::read(scene.file("mmproj.gguf")).unwrap();
    registry.hub("owner/repo", &"c".repeat(40), &[("mmproj-F16.gguf", &bytes)]);
    let run = |mmproj: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command.args(["run", &scene.file("model.gguf"), "What is this?", "--cpu", "--temp", "0", "-n", "4"]);
        command.args(["--mmproj", mmproj, "--image", &scene.file("a.bmp")]);
        command
            .env("HF_ENDPOINT", &registry.address)
            .env("KILN_MODELS", scene.file("store"))
            .env("HF_HOME", scene.file("hf"));
        command.envs(["ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"].map(|name| (name, "")));
        command.stdin(Stdio::null()).output().unwrap()
    };
    let want = scene.run(Some("mmproj.gguf"), &["a.bmp"], &[]);
    for _ in 0..2 {
        let got = run("hf:owner/repo:mmproj-F16.gguf");
        assert_eq!(got.status.code(), Some(0), "{}", told(&got));
        assert_eq!(got.stdout, want.stdout);
    }
    let fetched = registry.seen().iter().filter(|seen| seen.path.ends_with("mmproj-F16.gguf")).count();
    assert!(fetched >= 1);
    let missing = run("no-such-encoder");
    assert!(missing.status.code() == Some(1) && told(&missing).contains("no-such-encoder"), "{}", told(&missing));
}

#[test]
fn sounds_are_part_of_the_prompt() {
    let scene = Scene::new();
    let answered = |files: &[&str]| {
        let mmproj = Some("mmproj.gguf").filter(|_| !files.is_empty());
        json(&scene.run(mmproj, files, &["--json", "--logprobs", "3"]))
    };
    let all = [&[][..], &["a.wav"], &["a.wav", "b.wav"], &["a.bmp", "a.wav"]].map(answered);
    let tokens = all.each_ref().map(|told| told["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!(tokens.map(|n| n - tokens[0]), [0, 5 + AROUND, 5 + 3 + 2 * AROUND, 4 + 5 + AROUND]);
    let first = |told: &Value| told["tokens"][0]["top_logprobs"].clone();
    assert_eq!(first(&answered(&["a.wav"])), first(&all[1]), "the same sound says the same");
    assert_ne!(first(&answered(&["b.wav"])), first(&all[1]), "another sound says something else");
}

#[test]
fn what_cannot_be_heard_is_refused_in_one_sentence() {
    let scene = Scene::new();
    scene.refused(None, &["a.wav"], &[], &["--audio needs", "--mmproj"]);
    scene.refused(Some("deaf.gguf"), &["a.wav"], &[], &["deaf.gguf", "encodes no sounds"]);
    scene.refused(Some("mmproj.gguf"), &["missing.wav"], &[], &["missing.wav"]);
    scene.refused(Some("mmproj.gguf"), &["cut.wav"], &[], &["cut.wav", "cannot be decoded"]);
    let words = scene.file("words.png");
    scene.refused(Some("mmproj.gguf"), &[], &["--audio", &words], &["words.png", "WAV, MP3"]);
    let picture = scene.file("a.bmp");
    scene.refused(Some("mmproj.gguf"), &[], &["--audio", &picture], &["a.bmp", "no sound"]);
}

#[test]
fn what_cannot_be_shown_is_refused_in_one_sentence() {
    let scene = Scene::new();
    scene.refused(None, &["a.bmp"], &[], &["--mmproj"]);
    scene.refused(Some("mmproj.gguf"), &["a.bmp"], &["--no-mmproj"], &["--mmproj"]);
    scene.refused(Some("mmproj.gguf"), &[], &[], &["--image"]);
    scene.refused(Some("missing.gguf"), &["a.bmp"], &[], &["missing.gguf"]);
    scene.refused(Some("model.gguf"), &["a.bmp"], &[], &["model.gguf", "architecture is llama"]);
    scene.refused(Some("other.gguf"), &["a.bmp"], &[], &["other.gguf", "belongs to another model"]);
    scene.refused(Some("mmproj.gguf"), &["missing.png"], &[], &["missing.png"]);
    scene.refused(Some("mmproj.gguf"), &["empty.png"], &[], &["empty.png", "no bytes"]);
    scene.refused(Some("mmproj.gguf"), &["words.png"], &[], &["words.png", "PNG, JPEG"]);
    scene.refused(Some("mmproj.gguf"), &["a.bmp", "cut.bmp"], &[], &["cut.bmp", "cannot be decoded"]);
    scene.refused(Some("mmproj.gguf"), &["long.bmp"], &[], &["1 x 300", "200 times"]);
    scene.refused(Some("mmproj.gguf"), &["a.bmp"], &["--save-state", "x"], &["--save-state"]);
    scene.refused(Some("mmproj.gguf"), &["a.bmp"], &["-c", "10", "--raw"], &["tokens", "10"]);
}

#[test]
fn conversations_show_pictures() {
    let scene = Scene::new();
    let (model, mmproj, [a, b]) =
        (scene.file("model.gguf"), scene.file("mmproj.gguf"), ["a.bmp", "b.bmp"].map(|n| scene.file(n)));
    let chat = |more: &[&str], lines: &str| {
        let words = ["chat", &model, "--cpu", "--temp", "0", "-n", "6", "--json", "--mmproj", &mmproj];
        kiln_reading(&[&words[..], more].concat(), lines)
    };
    let answers = |more: &[&str], lines: &str| -> Vec<Value> {
        let output = chat(more, lines);
        assert_eq!(output.status.code(), Some(0), "{}", told(&output));
        let lines = String::from_utf8(output.stdout).unwrap();
        let answer = |line: &str| -> Value {
            let all: Value = serde_json::from_str(line).unwrap();
            serde_json::json!({"text": all["text"], "usage": all["usage"]})
        };
        lines.lines().map(answer).collect()
    };
    let tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let words = "what is it?";
    let plain = answers(&[], &format!("{words}\nand now?\n"));
    let shown = answers(&[], &format!("/image {a}\n{words}\nand now?\n"));
    assert_eq!(tokens(&shown[0]) - tokens(&plain[0]), 4);
    // A turn that is taken back takes its picture along.
    let first_turn = format!("{words}\n/undo\n{words}\n/retry\n");
    let again = answers(&["--image", &a], &first_turn);
    assert_eq!([0, 1, 2].map(|turn| tokens(&again[turn])), [tokens(&shown[0]), tokens(&plain[0]), tokens(&plain[0])]);
    assert_eq!(answers(&["--image", &a], &format!("{words}\nand now?\n")), shown, "the flag says the same");
    // Named in the message, it stands before that.
    let named = answers(&[], &format!("what is @\"{a}\" beside @\"{b}\"?\n/retry\n/undo\n{words}\n"));
    assert_eq!(
        (&named[0]["text"], tokens(&named[0])),
        (&named[1]["text"], tokens(&named[1])),
        "asked again with its pictures"
    );
    assert_eq!(
        (&named[2]["text"], tokens(&named[2])),
        (&plain[0]["text"], tokens(&plain[0])),
        "taken back with its pictures"
    );
    // Sounds are heard by the command, by the flag and where a message names them.
    let sound = scene.file("a.wav");
    let heard = answers(&[], &format!("/audio {sound}\n{words}\n/undo\n{words}\n"));
    assert_eq!([tokens(&heard[0]) - tokens(&plain[0]), tokens(&heard[1])], [5 + AROUND, tokens(&plain[0])]);
    assert_eq!(answers(&["--audio", &sound], &format!("{words}\n"))[0], heard[0]);
    let named = answers(&[], &format!("what is @\"{sound}\"?\n/undo\n{words}\n"));
    assert_eq!(tokens(&named[1]), tokens(&plain[0]));
    let both = answers(&["--audio", &sound, "--image", &a], &format!("{words}\n"));
    assert_eq!(tokens(&both[0]) - tokens(&plain[0]), 4 + 5 + AROUND);
    // What is saved names the pictures, and does not hold them.
    let saved = scene.file("talk.json");
    answers(&["--image", &a], &format!("{words}\n/save {saved}\n"));
    let saved = std::fs::read_to_string(saved).unwrap();
    assert!(saved.contains("[picture: ") && saved.contains("a.bmp") && !saved.contains("__media_"), "{saved}");

    let refused = |output: Output, words: &[&str]| {
        let error = told(&output);
        assert!(output.status.code() != Some(0) && !error.contains("panicked"), "{error}");
        words.iter().for_each(|word| assert!(error.contains(word), "{word:?} is not in: {error}"));
    };
    let ask = format!("what is @{a}?\n");
    refused(chat(&["--no-mmproj"], &ask), &["a.bmp is a picture", "--mmproj"]);
    refused(chat(&["--no-mmproj"], &format!("/audio {sound}\n")), &["a.wav is a sound", "--mmproj"]);
    let deaf = scene.file("deaf.gguf");
    refused(chat(&["--mmproj", &deaf], &format!("what is @{sound}?\n")), &["a.wav", "encodes no sounds"]);
    refused(chat(&[], &format!("/audio {a}\n")), &["a.bmp", "no sound"]);
    refused(chat(&[], &format!("what is @{}?\n", scene.file("cut.bmp"))), &["cut.bmp", "cannot be decoded"]);
    refused(chat(&[], &format!("/image {}\n", scene.file("words.png"))), &["words.png", "PNG, JPEG"]);
    refused(chat(&["--mmproj", &scene.file("other.gguf")], &ask), &["other.gguf", "belongs to another model"]);
    refused(kiln_reading(&["chat", &model, "--cpu", "--image", &a], &ask), &["--mmproj"]);
}

#[test]
fn inspect_tells_what_an_encoder_makes_of_pictures() {
    let scene = Scene::new();
    let path = scene.file("mmproj.gguf");
    let encoder = &json(&kiln(&["inspect", &path, "--json"]))["encoder"];
    assert_eq!((&encoder["runs"], &encoder["projector"]), (&Value::from(true), &Value::from("mlp")));
    assert_eq!(encoder["pictures"][1]["rows"], serde_json::json!([4]));
    assert_eq!(encoder["audio"]["projector"], Value::from("gemma4ua"));
    assert_eq!(encoder["audio"]["sounds"][0], serde_json::json!({"seconds": 5, "rows": [125]}));
    let plain = kiln(&["inspect", &path]);
    assert!(String::from_utf8_lossy(&plain.stdout).contains("encoder of pictures: mlp (LLaVA"));
    assert!(String::from_utf8_lossy(&plain.stdout).contains("encoder of sounds: gemma4ua (Gemma 4"));
    let told = json(&kiln(&["inspect", &scene.file("model.gguf"), "--json"]));
    assert!(told.get("encoder").is_none());
}
