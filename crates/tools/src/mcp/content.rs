//! What a call gave, as MCP has it: texts, pictures, links.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kiln_system::text::shown;
use serde_json::Value;

use crate::tool::{Output, OutputPart};

/// Pictures of a result that are kept, and bytes of one.
const MOST_PICTURES: usize = 8;
const MOST_PICTURE_BYTES: usize = 6 << 20;
/// Pieces of a result that are looked at.
const MOST_PARTS: usize = 1000;
/// What browsers show without running anything in it.
const PICTURES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/// A result.
pub(crate) fn output(result: &Value) -> Output {
    let mut output = Output { is_error: result.get("isError") == Some(&Value::Bool(true)), ..Output::default() };
    let content = result.get("content").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if content.len() > MOST_PARTS {
        output.cut = Some(format!("the result has {} parts, the first {MOST_PARTS} are given", content.len()));
    }
    let mut pictures = 0;
    for value in content.iter().take(MOST_PARTS) {
        let part = part(value);
        if let OutputPart::Picture { .. } = part {
            pictures += 1;
            if pictures > MOST_PICTURES {
                output.cut = Some(format!("the result has more than {MOST_PICTURES} pictures"));
                continue;
            }
        }
        output.parts.push(part);
    }
    // The same again as JSON stands beside the text; it is read where there is no text.
    if let (true, Some(structured)) =
        (output.parts.is_empty(), result.get("structuredContent").filter(|v| !v.is_null()))
    {
        output.parts.push(OutputPart::Text { text: structured.to_string() });
    }
    output
}

fn part(value: &Value) -> OutputPart {
    let text = |name: &str| value.get(name).and_then(Value::as_str).unwrap_or_default();
    let words = |text: String| OutputPart::Text { text };
    match text("type") {
        "text" => words(text("text").to_owned()),
        "image" => picture(text("mimeType"), text("data")),
        "resource_link" => link(text("uri"), if text("title").is_empty() { text("name") } else { text("title") }),
        "resource" => {
            let resource = value.get("resource").unwrap_or(&Value::Null);
            let text = |name: &str| resource.get(name).and_then(Value::as_str);
            let kind = text("mimeType").unwrap_or("no type");
            match (text("text"), text("blob")) {
                (Some(text), _) => words(text.to_owned()),
                (None, Some(blob)) if PICTURES.contains(&kind) => picture(kind, blob),
                (None, Some(blob)) => words(format!("[{} bytes of {}]", blob.len() / 4 * 3, shown(kind))),
                (None, None) => link(text("uri").unwrap_or_default(), ""),
            }
        }
        "audio" => words(format!("[a sound, {}, which is not played]", shown(text("mimeType")))),
        other => words(format!("[a part of the type {:?}, which is not known]", shown(other))),
    }
}

fn picture(mime: &str, data: &str) -> OutputPart {
    let words = |why: &str| OutputPart::Text { text: format!("[a picture, {}, {why}]", shown(mime)) };
    if !PICTURES.contains(&mime) {
        return words("which is not shown");
    }
    if data.len() > MOST_PICTURE_BYTES / 3 * 4 {
        return words("which is too large to be shown");
    }
    match STANDARD.decode(data) {
        // Written anew, it holds nothing but base64.
        Ok(bytes) => OutputPart::Picture { mime: mime.to_owned(), data: STANDARD.encode(bytes) },
        Err(_) => words("which is damaged"),
    }
}

/// An address that can be followed; any other is a text.
fn link(uri: &str, name: &str) -> OutputPart {
    let is_plain = uri.starts_with("https://") || uri.starts_with("http://");
    match is_plain && uri.len() <= 2000 && !uri.chars().any(|c| c.is_control() || c.is_whitespace()) {
        true => OutputPart::Link { url: uri.to_owned(), name: shown(name) },
        false => OutputPart::Text { text: format!("{} {}", shown(name), shown(uri)).trim().to_owned() },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parts(content: Value) -> Vec<OutputPart> {
        output(&json!({"content": content})).parts
    }

    #[test]
    fn results_are_texts_pictures_and_links() {
        let got = parts(json!([
            {"type": "text", "text": "<|im_end|>\u{1b}[2J"},
            {"type": "image", "mimeType": "image/png", "data": "AAAA"},
            {"type": "resource_link", "uri": "https://a.example/x", "name": "x"},
            {"type": "resource", "resource": {"uri": "file:///x", "text": "inside"}},
        ]));
        assert_eq!(got[0], OutputPart::Text { text: "<|im_end|>\u{1b}[2J".into() }, "data stays what it is");
        assert_eq!(got[1], OutputPart::Picture { mime: "image/png".into(), data: "AAAA".into() });
        assert_eq!(got[2], OutputPart::Link { url: "https://a.example/x".into(), name: "x".into() });
        assert_eq!(got[3], OutputPart::Text { text: "inside".into() });
        let only = output(&json!({"content": [], "structuredContent": {"a": 1}, "isError": true}));
        assert_eq!((only.for_model().as_str(), only.is_error), ("Error:\n{\"a\":1}", true));
    }

    #[test]
    fn what_could_run_or_lead_astray_is_text() {
        for odd in [
            json!({"type": "image", "mimeType": "image/svg+xml", "data": "PHN2Zz4="}),
            json!({"type": "image", "mimeType": "image/png\" onload=x", "data": "AAAA"}),
            json!({"type": "image", "mimeType": "image/png", "data": "\"><script>"}),
            json!({"type": "resource_link", "uri": "javascript:alert(1)", "name": "x"}),
            json!({"type": "resource_link", "uri": "https://a.example/\u{1b}]0;x\u{7}", "name": "x"}),
            json!({"type": "audio", "mimeType": "audio/wav", "data": "AAAA"}),
            json!({"type": "resource", "resource": {"uri": "data:text/html,x"}}),
            json!({"type": "resource", "resource": {"blob": "AAAA", "mimeType": "text/html"}}),
            json!({"type": "no\u{1b}such"}),
            json!(7),
        ] {
            let got = parts(json!([odd]));
            assert!(matches!(&got[..], [OutputPart::Text { text }] if !text.contains('\u{1b}')), "{odd}: {got:?}");
        }
        let many: Vec<Value> =
            (0..20).map(|_| json!({"type": "image", "mimeType": "image/png", "data": "AAAA"})).collect();
        let got = output(&json!({"content": many}));
        assert_eq!(got.parts.len(), MOST_PICTURES);
        assert!(got.cut.unwrap().contains("more than 8 pictures"));
        assert!(output(&json!({"content": "no list"})).parts.is_empty() && output(&json!(null)).parts.is_empty());
    }
}
