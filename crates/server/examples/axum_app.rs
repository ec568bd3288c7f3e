//! Kiln's APIs beside the routes of an application of one's own: `cargo run --release -p kiln-server --example axum_app -- smollm2.gguf`.
//! Then `curl localhost:3000/haiku/rain` and, for clients of OpenAI's API, `http://localhost:3000/v1`.
#![allow(clippy::print_stdout, reason = "an example")]

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::get;
use kiln_llm::Llm;
use kiln_server::{LoadedEngine, Server, Settings};

async fn haiku(State(llm): State<Llm>, Path(about): Path<String>) -> Result<String, String> {
    let poem = llm.chat(format!("Write a haiku about {about}.")).max_tokens(60);
    // `Stream::into_async` gives pieces to a task; a short answer may as well keep a thread.
    tokio::task::spawn_blocking(|| poem.text()).await.map_err(|why| why.to_string())?.map_err(|why| why.to_string())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "smollm2.gguf".into());
    let address = std::env::args().nth(2).unwrap_or_else(|| "127.0.0.1:3000".into());
    let llm = Llm::builder().parallel(4).open(path)?;
    let apis = Server::router(Settings::new("smollm2"), LoadedEngine::of(&llm));
    let app = Router::new().route("/haiku/{about}", get(haiku)).with_state(llm).merge(apis);
    println!("http://{address}");
    tokio::runtime::Runtime::new()?
        .block_on(async { axum::serve(tokio::net::TcpListener::bind(address).await?, app).await })?;
    Ok(())
}
