//! The page at `/`: files that are part of the program, plain modules of JavaScript without a build step. They live in
//! `crates/server/page` and ask this server alone.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::api_error::{ApiError, Kind};

/// Name, kind and content of each file.
macro_rules! files {
    ($($kind:literal: $($name:literal)+;)+) => {
        &[$($(($name, $kind, include_bytes!(concat!("../../page/", $name)).as_slice())),+),+]
    };
}

const FILES: &[(&str, &str, &[u8])] = files! {
    "text/html; charset=utf-8": "index.html" "preview.html";
    "application/manifest+json": "kiln.webmanifest";
    "text/css; charset=utf-8": "page.css";
    "image/svg+xml": "icon.svg";
    // The font of formulas, and the licence that it comes under. scripts/server/math-font.py makes it.
    "font/woff2": "math.woff2";
    "text/plain; charset=utf-8": "math.OFL.txt";
    "text/javascript; charset=utf-8": "main.js" "again.js" "answers.js" "api.js" "calls.js" "composer.js" "dom.js" "engine.js"
        "entities.js" "events.js" "highlight.js" "inline.js" "library.js" "list.js" "markdown.js" "math.js"
        "menu.js" "messages.js" "model_list.js" "models.js" "panels.js" "pdf.js" "pdf_objects.js" "pictures.js"
        "presets.js" "preview.js" "remote.js" "route.js" "settings.js" "state.js" "store.js" "titles.js" "tokens.js"
        "tool_list.js" "transfer.js" "tree.js" "welcome.js";
};

/// The page may load and ask what is here, and nothing else; text can never become a program. Pictures that the reader chose have addresses
/// within the page (`blob:`). Frames stay on this server: one that shows a document of the model's cannot be led elsewhere.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; font-src 'self'; \
                      connect-src 'self'; frame-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'; require-trusted-types-for 'script'";

/// A document that a model wrote runs in `preview.html`: its scripts and styles are its own, it has no origin (`sandbox`), and nothing can
/// be asked for or sent.
const PREVIEW_POLICY: &str = "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; \
                              img-src data: blob:; font-src data:; media-src data: blob:; base-uri 'none'; form-action 'none'; \
                              frame-ancestors 'self'";

/// `GET /`: the page for browsers. Ollama's clients ask here, too, to find out that somebody is there.
pub(crate) async fn root(headers: HeaderMap) -> Response {
    let wants_page = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).is_some_and(|a| a.contains("text/html"));
    let mut response = match wants_page {
        true => file("index.html", &headers).unwrap_or_else(IntoResponse::into_response),
        false => "Ollama is running".into_response(),
    };
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept"));
    response
}

/// `GET /page/NAME`: what the page is made of.
pub(crate) async fn part(Path(name): Path<String>, headers: HeaderMap) -> Result<Response, ApiError> {
    file(&name, &headers)
}

fn file(name: &str, headers: &HeaderMap) -> Result<Response, ApiError> {
    let found = FILES.iter().find(|(known, ..)| *known == name);
    let &(_, kind, content) = found.ok_or_else(|| ApiError::new(Kind::Route, "there is nothing at this path"))?;
    let mut hash = DefaultHasher::new();
    content.hash(&mut hash);
    let tag = format!("\"{:016x}\"", hash.finish());
    let known = headers.get(header::IF_NONE_MATCH).is_some_and(|given| given.as_bytes() == tag.as_bytes());
    let mut response = if known { StatusCode::NOT_MODIFIED.into_response() } else { content.into_response() };
    let policy = if name == "preview.html" { PREVIEW_POLICY } else { POLICY };
    let told = [
        (header::CONTENT_TYPE, kind),
        // Asked for each time and rarely sent: another version of the program never meets old parts.
        (header::CACHE_CONTROL, "no-cache"),
        (header::ETAG, tag.as_str()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in told {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.headers_mut().insert(name, value);
        }
    }
    Ok(response)
}
