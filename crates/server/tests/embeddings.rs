//! Vectors of texts and ranks over real connections, in the words of each API.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod client;

use client::*;
use kiln_server::{Running, Server};
use serde_json::{Value, json};

fn start_embedder() -> Running {
    let server = Server::listen("127.0.0.1", 0, settings()).unwrap();
    server.ready(scheduler(&embedder()), SEQUENCES);
    server
}

/// A model that was made to talk makes vectors if the server is told how.
#[test]
fn the_server_says_how_tokens_become_a_vector() {
    use kiln_engine::embed::Pooling;
    let start = |pooling| start_with(kiln_server::Settings { pooling, ..settings() }, Some(CHATML));
    let body = json!({"input": "hello world"});
    let plain = start(None);
    assert_eq!(post(&plain, "/v1/embeddings", &body).status, 501, "it was not told");
    plain.stop().unwrap();
    let [mean, last] = [Pooling::Mean, Pooling::Last].map(|pooling| {
        let server = start(Some(pooling));
        let made = vector(&server, &body);
        let capabilities = post(&server, "/api/show", &json!({"model": "tiny"})).json()["capabilities"].clone();
        assert!(capabilities.as_array().unwrap().contains(&json!("embedding")), "{capabilities}");
        assert_eq!(post(&server, "/api/embed", &body).json()["embeddings"][0].as_array().unwrap().len(), 64);
        server.stop().unwrap();
        made
    });
    assert!(mean.len() == 64 && mean != last);
    // A vector for each token, as the model makes it; their mean has the direction of the mean.
    let server = start(Some(Pooling::None));
    let reply = post(&server, "/v1/embeddings", &body).json();
    let rows: Vec<Vec<f64>> = reply["data"][0]["embedding"].as_array().unwrap().iter().map(numbers).collect();
    assert_eq!(rows.len() as u64, reply["usage"]["prompt_tokens"].as_u64().unwrap());
    let sum: Vec<f64> = (0..64).map(|i| rows.iter().map(|row| row[i]).sum()).collect();
    let length = sum.iter().map(|v| v * v).sum::<f64>().sqrt();
    assert!(sum.iter().zip(&mean).all(|(a, b)| (a / length - b).abs() < 1e-4), "{sum:?} {mean:?}");
    let cut = post(&server, "/v1/embeddings", &with(body.clone(), json!({"dimensions": 8}))).json();
    assert_eq!(numbers(&cut["data"][0]["embedding"][0]), rows[0][..8]);
    assert_eq!(post(&server, "/api/embed", &body).status, 501, "one vector for a text is all it has words for");
    server.stop().unwrap();
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn vector(server: &Running, body: &Value) -> Vec<f64> {
    numbers(&post(server, "/v1/embeddings", body).json()["data"][0]["embedding"])
}

#[test]
fn openai_gets_vectors_of_length_one_in_both_encodings() {
    let server = start_embedder();
    let reply = post(&server, "/v1/embeddings", &json!({"model": "tiny", "input": ["hello world", "the thing", "a"]}));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let whole = reply.json();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("list"), &json!("tiny")));
    assert_eq!(whole["usage"]["prompt_tokens"], whole["usage"]["total_tokens"]);
    let data = whole["data"].as_array().unwrap();
    assert_eq!(data.iter().map(|d| d["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    for row in data {
        let length = numbers(&row["embedding"]).iter().map(|v| v * v).sum::<f64>();
        assert!((length - 1.0).abs() < 1e-5, "{length}");
    }
    // Texts beside each other are as each alone, and differ.
    let alone = vector(&server, &json!({"input": "the thing"}));
    let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(close(&alone, &numbers(&data[1]["embedding"])), "{alone:?}");
    assert!(!close(&alone, &numbers(&data[0]["embedding"])));

    let encoded = post(&server, "/v1/embeddings", &json!({"input": "the thing", "encoding_format": "base64"})).json();
    let text = encoded["data"][0]["embedding"].as_str().unwrap();
    // 64 floats are 256 bytes: 344 characters.
    assert_eq!((text.len(), alone.len()), (344, 64));

    // Cut vectors have the length 1 again; tokens in the place of a text mean the same.
    let cut = vector(&server, &json!({"input": "the thing", "dimensions": 16}));
    let length = alone[..16].iter().map(|v| v * v).sum::<f64>().sqrt();
    assert!(close(&cut, &alone[..16].iter().map(|v| v / length).collect::<Vec<_>>()), "{cut:?}");
    let ids = post(&server, "/tokenize", &json!({"content": "the thing", "add_special": true})).json();
    assert!(close(&alone, &vector(&server, &json!({"input": ids["tokens"]}))));
    assert!(close(&alone, &vector(&server, &json!({"input": [ids["tokens"]]}))));
    server.stop().unwrap();
}

#[test]
fn llama_server_and_ollama_get_the_same_vectors_in_their_words() {
    let server = start_embedder();
    let want = vector(&server, &json!({"input": "hello world"}));
    let close = |got: &Value| numbers(got).iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5);
    let llama = post(&server, "/embedding", &json!({"content": "hello world"})).json();
    assert!(llama[0]["index"] == 0 && close(&llama[0]["embedding"][0]), "{llama}");
    let ollama = post(&server, "/api/embed", &json!({"model": "tiny", "input": ["hello world", "a"]})).json();
    assert!(close(&ollama["embeddings"][0]) && ollama["embeddings"].as_array().unwrap().len() == 2, "{ollama}");
    assert!(ollama["prompt_eval_count"].as_u64().unwrap() > 4, "{ollama}");
    // The older call gives vectors as long as the model makes them.
    let one = numbers(&post(&server, "/api/embeddings", &json!({"prompt": "hello world"})).json()["embedding"]);
    let length = one.iter().map(|v| v * v).sum::<f64>().sqrt();
    assert!(length > 1.5 && one.iter().zip(&want).all(|(a, b)| (a / length - b).abs() < 1e-5), "{length}");
    // Ollama promises to cut what is too long, unless it is told not to.
    let long = "hello ".repeat(500);
    let cut = post(&server, "/api/embed", &json!({"input": long}));
    assert_eq!(cut.json()["prompt_eval_count"], 128, "{}", cut.body);
    assert_eq!(post(&server, "/api/embed", &json!({"input": long, "truncate": false})).status, 400);
    assert_eq!(post(&server, "/api/embed", &json!({"model": "tiny"})).json()["embeddings"], json!([]));
    let shown = post(&server, "/api/show", &json!({"model": "tiny"})).json();
    assert_eq!(shown["capabilities"], json!(["embedding"]));
    server.stop().unwrap();
}

#[test]
fn texts_are_ranked_best_first() {
    let server = start_embedder();
    let documents = json!(["the thing", "hello world", {"text": "and so on"}]);
    let body = json!({"query": "what is it?", "documents": documents, "return_documents": true});
    let reply = post(&server, "/v1/rerank", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let all = reply.json();
    let results = all["results"].as_array().unwrap();
    let scores: Vec<f64> = results.iter().map(|r| r["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.len() == 3 && scores.is_sorted_by(|a, b| a >= b) && scores[0] > scores[2], "{scores:?}");
    let texts = ["the thing", "hello world", "and so on"];
    for result in results {
        assert_eq!(result["document"]["text"], texts[result["index"].as_u64().unwrap() as usize]);
    }
    let best = post(&server, "/v2/rerank", &with(body.clone(), json!({"top_n": 1}))).json();
    assert_eq!((best["results"].as_array().unwrap().len(), &best["results"][0]), (1, &results[0]));
    let tei = post(&server, "/rerank", &json!({"query": "what is it?", "texts": texts})).json();
    assert_eq!((&tei[0]["index"], &tei[0]["score"]), (&results[0]["index"], &results[0]["relevance_score"]));
    server.stop().unwrap();
}

#[test]
fn bad_input_is_refused_and_named() {
    let server = start_embedder();
    let refused = |path: &str, body: Value| {
        let reply = post(&server, path, &body);
        (reply.status, reply.json()["error"].clone())
    };
    let (status, error) = refused("/v1/embeddings", json!({"input": "hello ".repeat(500)}));
    assert_eq!((status, &error["code"], &error["n_ctx"]), (400, &json!("context_length_exceeded"), &json!(128)));
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ["a", ""]}), "input[1]"),
        (json!({"input": ["a", 7.5]}), "input[1]"),
        (json!({"input": [[999_999]]}), "input[0][0]"),
        (json!({"input": "a", "dimensions": 65}), "dimensions"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "encoding_format": "int8"}), "encoding_format"),
        (json!({"input": vec!["a"; 2049]}), "input"),
    ] {
        let (status, error) = refused("/v1/embeddings", body.clone());
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{body}: {error}");
    }
    for (body, param) in [
        (json!({"documents": ["a"]}), "query"),
        (json!({"query": "a"}), "documents"),
        (json!({"query": "a", "documents": []}), "documents"),
        (json!({"query": "a", "documents": [1]}), "documents[0]"),
        (json!({"query": "a", "documents": ["a"], "top_n": 0}), "top_n"),
    ] {
        let (status, error) = refused("/v1/rerank", body.clone());
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{body}: {error}");
    }
    // It writes nothing, and a model that writes makes no vectors.
    let (status, error) = refused("/v1/completions", json!({"prompt": "hello"}));
    assert!(status == 501 && error["message"].as_str().unwrap().contains("vectors"), "{error}");
    server.stop().unwrap();
    let writes = start();
    for path in ["/v1/embeddings", "/api/embed", "/v1/rerank"] {
        let body = json!({"input": "a", "query": "a", "documents": ["b"]});
        assert_eq!(post(&writes, path, &body).status, 501, "{path}");
    }
    writes.stop().unwrap();
}
