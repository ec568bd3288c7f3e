//! Pictures and sounds by every API: the same text for the same picture, other texts for others, pages found again, and refusals.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use client::{CHATML, SEQUENCES, get, model, post, scheduler, settings, start, text_of, with};
use kiln_engine::executor::{Arithmetic, CpuExecutor};
use kiln_engine::media::{Arranged, Encoder, Marker, Medium, Mmproj};
use kiln_engine::run::{Event, Request};
use kiln_engine::text::{ChatInput, Message, Template};
use kiln_engine::tokenizer::EncodeLimit;
use kiln_gguf::{Gguf, Metadata, TensorType, Writer};
use kiln_server::{LoadedEngine, RequestDefaults, Running, Server, Settings};
use serde_json::{Value, json};

/// Rows of a picture: it has 8 patches a side.
const ROWS: u64 = 64;

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

/// Tokens of a sound: rows of 640 bare samples, and the family's words around them in a vocabulary of bytes.
const HEARD: u64 = 5 + 16;

/// A sound of two tenths of a second whose samples depend on `salt`.
fn wav(salt: u32) -> Vec<u8> {
    let samples: Vec<u8> = (0..3_200_u32).flat_map(|i| ((i * i * salt / 7) as i16 / 4).to_le_bytes()).collect();
    let mut bytes = b"RIFF".to_vec();
    bytes.extend((36 + samples.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    bytes.extend([16_000_u32, 32_000].iter().flat_map(|rate| rate.to_le_bytes()));
    bytes.extend(b"\x02\0\x10\0data");
    bytes.extend((samples.len() as u32).to_le_bytes());
    bytes.extend(samples);
    bytes
}

/// A small LLaVA whose rows have this width, with ears beside its eyes.
fn encoder(width: usize) -> Encoder {
    let mut m = Metadata::new();
    m.set("general.architecture", "clip");
    m.set("clip.has_vision_encoder", true);
    m.set("clip.vision.projector_type", "mlp");
    m.set("clip.has_audio_encoder", true);
    m.set("clip.audio.projector_type", "gemma4ua");
    m.set("clip.audio.num_mel_bins", 128_u32);
    m.set("clip.use_gelu", true);
    let keys = [("image_size", 32_u32), ("patch_size", 4), ("embedding_length", 16), ("feed_forward_length", 24)];
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
    put("v.position_embd.weight", &[16, 64]);
    ["ln1", "ln2"].iter().for_each(|norm| put(&format!("v.blk.0.{norm}.weight"), &[16]));
    for matrix in ["attn_q", "attn_k", "attn_v", "attn_out"] {
        put(&format!("v.blk.0.{matrix}.weight"), &[16, 16]);
    }
    put("v.blk.0.ffn_up.weight", &[16, 24]);
    put("v.blk.0.ffn_down.weight", &[24, 16]);
    put("mm.0.weight", &[16, 24]);
    put("mm.0.bias", &[24]);
    put("mm.2.weight", &[24, width]);
    put("mm.2.bias", &[width]);
    put("mm.a.input_projection.weight", &[640, width]);
    let mmproj = Mmproj::new(Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()).unwrap();
    Encoder::new(Arc::new(mmproj), Box::new(CpuExecutor::new(Arithmetic::Fast)), &mut |_, _| {}).unwrap()
}

fn seeing() -> Running {
    seeing_from(&[])
}

/// The same that fetches pictures from these hosts.
fn seeing_from(hosts: &[String]) -> Running {
    let media_hosts = hosts.iter().map(|host| host.parse().unwrap()).collect();
    let settings = settings();
    let request_defaults = RequestDefaults { media_hosts, ..settings.request_defaults.clone() };
    let settings = Settings { request_defaults, ..settings };
    let (server, model) = (Server::listen("127.0.0.1", 0, settings).unwrap(), model(Some(CHATML)));
    let encoder = Some(encoder(model.config.hidden));
    server.ready_with(LoadedEngine { scheduler: scheduler(&model).into(), sequences: SEQUENCES, encoder });
    server
}

const QUESTION: &str = "What is this?";

fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn url(bytes: &[u8]) -> String {
    format!("data:image/bmp;base64,{}", base64(bytes))
}

/// A question about pictures in OpenAI's words.
fn asked(pictures: &[Vec<u8>], question: &str) -> Value {
    let mut parts: Vec<Value> =
        pictures.iter().map(|bytes| json!({"type": "image_url", "image_url": {"url": url(bytes)}})).collect();
    parts.push(json!({"type": "text", "text": question}));
    let messages = json!([{"role": "user", "content": parts}]);
    json!({"messages": messages, "max_tokens": 12, "temperature": 0})
}

/// What the engine says without a server, by the way that `kiln run` takes.
fn directly(pictures: &[Vec<u8>]) -> String {
    let pictures: Vec<(Medium, Vec<u8>)> = pictures.iter().map(|bytes| (Medium::Picture, bytes.clone())).collect();
    directly_of(&pictures)
}

/// The same with sounds.
fn directly_of(media: &[(Medium, Vec<u8>)]) -> String {
    let model = model(Some(CHATML));
    let (mut encoder, marker) = (encoder(model.config.hidden), Marker::default());
    let template = Template::from_gguf(model.gguf.metadata(), &model.tokenizer).unwrap().unwrap();
    let text = marker.text().repeat(media.len()) + QUESTION;
    let messages = vec![Message::new("user", text)];
    let input = ChatInput { messages, add_generation_prompt: true, ..ChatInput::default() };
    let rendered = template.render_for(&input, Some(&model.tokenizer)).unwrap();
    let parts = rendered.encode_parts(&model.tokenizer, marker.text(), &EncodeLimit::default()).unwrap();
    let mmproj = Arc::clone(encoder.mmproj());
    let shown = media.iter().enumerate().map(|(number, (medium, bytes))| mmproj.take(*medium, bytes, number).unwrap());
    let shown = shown.collect();
    let arranged = Arranged::new(&model.tokenizer, parts, shown).unwrap();
    let joined = arranged.join(|picture, input| encoder.vectors(picture, input)).unwrap();
    let mut request = Request { limit: Some(12), spans: joined.spans, ..Request::new(joined.tokens) };
    request.sampling.temperature = 0.0;
    let scheduler = scheduler(&model);
    let (to, from) = std::sync::mpsc::channel();
    let _cancel = scheduler.submit(request, move |event| to.send(event).is_ok());
    let mut text = String::new();
    for event in from {
        match event {
            Event::Token { text: piece, .. } => text += &piece,
            Event::End { text: rest, .. } => {
                text += &rest;
                break;
            }
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    text
}

#[test]
fn every_api_says_what_the_engine_says() {
    let server = seeing();
    for pictures in [vec![bmp(40, 32, 3)], vec![bmp(40, 32, 5)], vec![bmp(40, 32, 3), bmp(20, 50, 7)]] {
        let want = directly(&pictures);
        assert_eq!(text_of(&post(&server, "/v1/chat/completions", &asked(&pictures, QUESTION)).json()), want);
        let mut parts: Vec<Value> =
            pictures.iter().map(|bytes| json!({"type": "input_image", "image_url": url(bytes)})).collect();
        parts.push(json!({"type": "input_text", "text": QUESTION}));
        let body = json!({"input": [{"role": "user", "content": parts}], "max_output_tokens": 12, "temperature": 0});
        let told = post(&server, "/v1/responses", &body).json();
        let message = told["output"].as_array().unwrap().last().unwrap();
        assert_eq!(message["content"][0]["text"], json!(want), "{told}");
        let source = |bytes: &Vec<u8>| json!({"type": "base64", "media_type": "image/bmp", "data": base64(bytes)});
        let mut blocks: Vec<Value> =
            pictures.iter().map(|bytes| json!({"type": "image", "source": source(bytes)})).collect();
        blocks.push(json!({"type": "text", "text": QUESTION}));
        let body = json!({"messages": [{"role": "user", "content": blocks}], "max_tokens": 12, "temperature": 0, "model": "tiny"});
        let told = post(&server, "/v1/messages", &body).json();
        assert_eq!(told["content"][0]["text"], json!(want), "{told}");
        let images: Vec<String> = pictures.iter().map(|bytes| base64(bytes)).collect();
        let options = json!({"temperature": 0, "num_predict": 12});
        let message = json!({"role": "user", "content": QUESTION, "images": images});
        let body = json!({"model": "tiny", "messages": [message], "stream": false, "options": options});
        let told = post(&server, "/api/chat", &body).json();
        assert_eq!(told["message"]["content"], json!(want), "{told}");
        let body = json!({"model": "tiny", "prompt": QUESTION, "images": images, "stream": false, "options": options});
        let told = post(&server, "/api/generate", &body).json();
        assert_eq!(told["response"], json!(want), "{told}");
    }
    let texts = [3, 5].map(|salt| directly(&[bmp(40, 32, salt)]));
    assert_ne!(texts[0], texts[1], "two pictures should say different things, or nothing is tested");
    server.stop().unwrap();
}

/// A question about sounds, and pictures before them, in OpenAI's words.
fn asked_of(media: &[(Medium, Vec<u8>)]) -> Value {
    let part = |(medium, bytes): &(Medium, Vec<u8>)| match medium {
        Medium::Picture => json!({"type": "image_url", "image_url": {"url": url(bytes)}}),
        Medium::Sound => json!({"type": "input_audio", "input_audio": {"data": base64(bytes), "format": "wav"}}),
    };
    let mut parts: Vec<Value> = media.iter().map(part).collect();
    parts.push(json!({"type": "text", "text": QUESTION}));
    json!([{"role": "user", "content": parts}])
}

#[test]
fn sounds_are_heard_and_found_again() {
    let server = seeing();
    let both = vec![(Medium::Picture, bmp(40, 32, 3)), (Medium::Sound, wav(5))];
    let sounds = |salts: &[u32]| salts.iter().map(|salt| (Medium::Sound, wav(*salt))).collect::<Vec<_>>();
    for media in [sounds(&[3]), sounds(&[5, 3]), both] {
        let want = directly_of(&media);
        let body = json!({"messages": asked_of(&media), "max_tokens": 12, "temperature": 0});
        assert_eq!(text_of(&post(&server, "/v1/chat/completions", &body).json()), want);
        let body = json!({"input": asked_of(&media), "max_output_tokens": 12, "temperature": 0});
        let told = post(&server, "/v1/responses", &body).json();
        let message = told["output"].as_array().unwrap().last().unwrap();
        assert_eq!(message["content"][0]["text"], json!(want), "{told}");
    }
    // Enough rows for a page: the same sounds are not read again, another one is.
    let ask = |salts: &[u32]| {
        let body = json!({"messages": asked_of(&sounds(salts)), "max_tokens": 2, "logprobs": true, "top_logprobs": 3});
        let told = post(&server, "/v1/chat/completions", &with(body, json!({"temperature": 0}))).json();
        let usage = told["usage"].clone();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{told}"));
        (usage["prompt_tokens"].as_u64().unwrap(), cached, told["choices"][0]["logprobs"]["content"][0].clone())
    };
    let many = [7; 16];
    let (tokens, cached, first) = ask(&many);
    assert_eq!((tokens - ask(&many[..15]).0, cached), (HEARD, 0));
    let (_, cached, again) = ask(&many);
    assert!(cached >= 64 && again == first, "{cached} rows are found again");
    let (_, cached, other) = ask(&[9; 16]);
    assert!(cached == 0 && other != first, "another sound shares nothing");
    server.stop().unwrap();
}

#[test]
fn what_cannot_be_heard_is_refused() {
    let (server, deaf) = (seeing(), start());
    let refused = |server: &Running, data: &str, words: &[&str]| {
        let part = json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}});
        let body = json!({"messages": [{"role": "user", "content": [part]}], "max_tokens": 4});
        let reply = post(server, "/v1/chat/completions", &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        words.iter().for_each(|word| assert!(message.contains(word), "{word:?} is not in: {message}"));
    };
    refused(
        &deaf,
        &base64(&wav(3)),
        &["messages[0].content[0].input_audio", "is a sound", "without an encoder of sounds"],
    );
    refused(&server, "%%%", &["not base64"]);
    refused(&server, "", &["no bytes"]);
    refused(&server, &base64(b"no sound"), &["WAV, MP3, FLAC or OGG"]);
    refused(&server, &base64(&bmp(8, 8, 1)), &["WAV, MP3, FLAC or OGG"]);
    refused(&server, &base64(&wav(3)[..30]), &["WAV sound cannot be decoded"]);
    let mut loud = wav(3);
    loud.truncate(44 + 64);
    loud[20] = 3;
    loud[32..36].copy_from_slice(&[4, 0, 32, 0]);
    loud[44..48].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&server, &base64(&loud), &["sample 0 of the sound is NaN"]);
    assert_eq!(get(&deaf, "/props").json()["modalities"]["audio"], json!(false));
    server.stop().unwrap();
    deaf.stop().unwrap();
}

#[test]
fn pages_are_found_again_by_the_picture() {
    let server = seeing();
    let ask = |salt, question| {
        // Greedy texts of a tiny model may be the same for two pictures; its probabilities are not.
        let body = with(asked(&[bmp(32, 32, salt)], question), json!({"logprobs": true, "top_logprobs": 3}));
        let told = post(&server, "/v1/chat/completions", &body).json();
        let usage = &told["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{told}"));
        (usage["prompt_tokens"].as_u64().unwrap(), cached, told["choices"][0]["logprobs"]["content"][0].clone())
    };
    let plain = post(&server, "/v1/chat/completions", &asked(&[], QUESTION)).json();
    let (tokens, cached, first) = ask(3, QUESTION);
    assert_eq!((tokens, cached), (plain["usage"]["prompt_tokens"].as_u64().unwrap() + ROWS, 0));
    assert!(ask(3, "Which colour has it, and why?").1 >= 64, "the picture is not read again");
    let (_, cached, other) = ask(5, QUESTION);
    assert_eq!(cached, 0, "another picture shares nothing");
    assert!(first["logprob"].is_number(), "{first}");
    assert_ne!(first, other);
    assert_eq!(ask(3, QUESTION).2, first, "the same picture says the same");
    server.stop().unwrap();
}

#[test]
fn pictures_count_and_are_told_of() {
    let server = seeing();
    let blocks = |n: usize| {
        let source = json!({"type": "base64", "media_type": "image/bmp", "data": base64(&bmp(32, 32, 3))});
        let mut blocks = vec![json!({"type": "image", "source": source}); n];
        blocks.push(json!({"type": "text", "text": QUESTION}));
        json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": blocks}]})
    };
    let counts = [0, 1, 3].map(|n| {
        let told = post(&server, "/v1/messages/count_tokens", &blocks(n)).json();
        told["input_tokens"].as_u64().unwrap_or_else(|| panic!("{told}"))
    });
    assert_eq!([counts[1] - counts[0], counts[2] - counts[0]], [ROWS, 3 * ROWS]);
    let long = post(&server, "/v1/messages", &blocks(9));
    assert!(long.status == 400 && long.body.contains("512"), "{}", long.body);
    assert_eq!(get(&server, "/props").json()["modalities"], json!({"vision": true, "audio": true}));
    let models = get(&server, "/v1/models").json();
    assert_eq!(models["data"][0]["architecture"]["input_modalities"], json!(["text", "image", "audio"]));
    let shown = post(&server, "/api/show", &json!({"model": "tiny"})).json();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("vision")), "{shown}");
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("audio")), "{shown}");
    // What a user writes is text, whatever stands for pictures elsewhere.
    let written = post(&server, "/v1/chat/completions", &asked(&[], "<__media__> <image>"));
    assert_eq!(written.status, 200, "{}", written.body);
    server.stop().unwrap();
}

#[test]
fn pictures_are_fetched_from_hosts_that_were_allowed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let picture = bmp(24, 18, 5);
    let answered = picture.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().unwrap().unwrap();
            while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
            let body: &[u8] = if first.contains("/a.bmp") { &answered } else { b"no picture" };
            let mut stream = stream;
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).unwrap();
            stream.write_all(body).unwrap();
        }
    });
    let server = seeing_from(std::slice::from_ref(&host));
    let asked = |url: &str| {
        let parts = json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]);
        post(
            &server,
            "/v1/chat/completions",
            &json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "temperature": 0}),
        )
    };
    let (fetched, sent) = (asked(&format!("http://{host}/a.bmp")), asked(&url(&picture)));
    assert_eq!((fetched.status, sent.status), (200, 200), "{}", fetched.body);
    assert_eq!(text_of(&fetched.json()), text_of(&sent.json()));
    for (url, words) in [
        (format!("http://{host}/b"), "PNG, JPEG"),
        ("http://169.254.169.254/latest".to_owned(), "169.254.169.254"),
        (format!("http://localhost:{}/a.bmp", host.rsplit_once(':').unwrap().1), "fetches nothing from"),
    ] {
        let reply = asked(&url);
        assert!(reply.status == 400 && reply.body.contains(words), "{url}: {}", reply.body);
        assert!(reply.body.contains("messages[0].content[0].image_url"), "{}", reply.body);
    }
    server.stop().unwrap();
}

#[test]
fn what_cannot_be_shown_is_refused() {
    let (server, blind) = (seeing(), start());
    let refused = |server: &Running, url: &str, words: &[&str]| {
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        let body = json!({"messages": [{"role": "user", "content": [part]}], "max_tokens": 4});
        let reply = post(server, "/v1/chat/completions", &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        words.iter().for_each(|word| assert!(message.contains(word), "{word:?} is not in: {message}"));
    };
    refused(&blind, &url(&bmp(8, 8, 1)), &["messages[0].content[0]", "without an encoder", "mmproj"]);
    refused(&server, "https://example.com/a.png", &["fetches none", "data:image/png;base64"]);
    refused(&server, "data:image/png;base64,%%%", &["not base64"]);
    refused(&server, "data:image/png;base64,", &["no bytes"]);
    refused(&server, &url(b"no picture"), &["PNG, JPEG"]);
    refused(&server, &url(&bmp(8, 8, 1)[..60]), &["cannot be decoded"]);
    refused(&server, &url(&bmp(1, 300, 1)), &["1 x 300", "200 times"]);
    let mut huge = bmp(8, 8, 1);
    huge[18..26].copy_from_slice(&[0, 64, 0, 0, 0, 64, 0, 0]);
    refused(&server, &url(&huge), &["16384 x 16384", "67108864"]);
    let images =
        json!({"model": "tiny", "prompt": "a", "raw": true, "images": [base64(&bmp(8, 8, 1))], "stream": false});
    let raw = post(&server, "/api/generate", &images);
    assert!(raw.status == 400 && raw.body.contains("chat template"), "{}", raw.body);
    assert_eq!(get(&blind, "/props").json()["modalities"]["vision"], json!(false));
    server.stop().unwrap();
    blind.stop().unwrap();
}
