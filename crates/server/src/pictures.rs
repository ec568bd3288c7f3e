//! Pictures in a conversation: every API's way of sending one becomes one kind of part, and the parts become a marker in the text and
//! vectors in its place. All of it is done where prompts are prepared, off the threads that serve connections and beside the engine's.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kiln_engine::text::{Content, Message};
use kiln_engine::vision::prompt::Marker;
use kiln_engine::vision::{Arranged, Encoder, Joined, Shown, Vision};
use serde_json::{Value, json};

use crate::api_error::{AT_LEAST, ApiError, Kind};
use crate::prep_pool::client_gone;
use crate::registry::Loaded;
use crate::remote_media::{MediaHost, RemoteMedia};

/// The type of parts that hold a picture: `data` is base64, `param` the field that it came in.
const PART: &str = "kiln_picture";

/// The encoder of a model.
pub(crate) struct Pictures {
    vision: Arc<Vision>,
    /// One input is encoded at a time; texts are written meanwhile.
    encoder: Mutex<Encoder>,
    /// One picture is decoded at a time, since a large one takes much memory.
    decoding: Mutex<()>,
    /// Fetches those that come as addresses.
    remote: RemoteMedia,
}

impl Pictures {
    pub(crate) fn new(encoder: Encoder, hosts: &[MediaHost]) -> Pictures {
        let (vision, remote) = (Arc::clone(encoder.vision()), RemoteMedia::new(hosts));
        Pictures { vision, encoder: Mutex::new(encoder), decoding: Mutex::new(()), remote }
    }

    /// The bytes of a part.
    fn bytes(&self, param: &str, part: &Value) -> Result<Vec<u8>, ApiError> {
        let refused = |why: String| ApiError::invalid(param, format!("`{param}` {why}"));
        if let Some(url) = part["url"].as_str() {
            return match self.remote.is_off() {
                true => Err(refused(FETCHES_NONE.to_owned())),
                false => self.remote.fetch(url).map_err(refused),
            };
        }
        let data: String = part["data"].as_str().unwrap_or_default().split_ascii_whitespace().collect();
        STANDARD.decode(data).map_err(|why| refused(format!("is not base64: {why}")))
    }
}

const FETCHES_NONE: &str =
    "is an address, and this server fetches none; send the picture itself, as data:image/png;base64,...";

/// A picture of base64, as a part of a message.
pub(crate) fn of_base64(param: &str, data: &str) -> Value {
    json!({"type": PART, "param": param, "data": data})
}

/// A picture of an address, as a part of a message.
pub(crate) fn of_url(param: &str, url: &str) -> Result<Value, ApiError> {
    let refused = |why: &str| Err(ApiError::invalid(param, format!("`{param}` {why}")));
    if let Some(rest) = url.strip_prefix("data:") {
        let Some((kind, data)) = rest.split_once(";base64,") else {
            return refused("is a data URL without base64; it has to be data:image/png;base64,...");
        };
        if !kind.starts_with("image/") {
            return refused("is a data URL of something else than a picture; it has to be data:image/png;base64,...");
        }
        return Ok(of_base64(param, data));
    }
    let is_web = ["http://", "https://"]
        .iter()
        .any(|scheme| url.get(..scheme.len()).is_some_and(|s| s.eq_ignore_ascii_case(scheme)));
    match url.contains("://") {
        // Whether it is fetched is the business of who serves the model.
        true if is_web => Ok(json!({"type": PART, "param": param, "url": url})),
        true => refused(FETCHES_NONE),
        false => Ok(of_base64(param, url)),
    }
}

/// The picture in a part of a message, whichever API it came by; none where the part is something else.
pub(crate) fn part(param: &str, part: &Value) -> Option<Result<Value, ApiError>> {
    let kind = part.get("type").and_then(Value::as_str)?;
    let missing = |field: String, what: &str| ApiError::invalid(field.clone(), format!("`{field}` must be {what}"));
    match kind {
        "image_url" | "input_image" => {
            let field = format!("{param}.image_url");
            let image = part.get("image_url");
            let url = image.and_then(|image| image.as_str().or_else(|| image.get("url")?.as_str()));
            Some(url.ok_or_else(|| missing(field.clone(), "a data URL")).and_then(|url| of_url(&field, url)))
        }
        "image" => {
            let field = format!("{param}.source");
            let source = part.get("source");
            let text = |name: &str| source.and_then(|source| source.get(name)?.as_str());
            Some(match (text("type"), text("data"), text("url")) {
                (Some("base64"), Some(data), _) => Ok(of_base64(&field, data)),
                (Some("url"), _, Some(url)) => of_url(&field, url),
                _ => Err(missing(field, "of type base64, with data")),
            })
        }
        _ => None,
    }
}

/// Whether a message shows a picture.
pub(crate) fn are_in(content: &Content) -> bool {
    matches!(content, Content::Parts(parts) if parts.iter().any(|part| part["type"] == PART))
}

/// A conversation whose pictures were taken out.
pub(crate) struct Taken {
    /// The messages, with the marker where pictures were.
    pub(crate) messages: Vec<Message>,
    /// The pictures, in order.
    pictures: Vec<Value>,
    /// What stands for them. It is drawn for each request, so that nobody can write it.
    pub(crate) marker: Marker,
}

impl Taken {
    pub(crate) fn from(messages: &[Message]) -> Taken {
        let mut taken = Taken { messages: messages.to_vec(), pictures: Vec::new(), marker: Marker::default() };
        for message in taken.messages.iter_mut().filter(|message| are_in(&message.content)) {
            let Content::Parts(parts) = std::mem::take(&mut message.content) else { continue };
            // Texts stand on lines of their own; nothing stands beside a picture.
            let (mut text, mut follows_text) = (String::new(), false);
            for part in parts {
                if part["type"] == PART {
                    text += taken.marker.text();
                    taken.pictures.push(part);
                    follows_text = false;
                    continue;
                }
                if std::mem::replace(&mut follows_text, true) {
                    text.push('\n');
                }
                text += part["text"].as_str().unwrap_or_default();
            }
            message.content = Content::Text(text);
        }
        taken
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.pictures.is_empty()
    }

    /// The pictures, ready to be encoded, which take so many rows at most.
    pub(crate) fn shown(&self, loaded: &Loaded, most: usize) -> Result<Vec<Shown>, ApiError> {
        let (mut shown, mut rows) = (Vec::with_capacity(self.pictures.len()), 0);
        for (number, part) in self.pictures.iter().enumerate() {
            let param = part["param"].as_str().unwrap_or_default();
            let Some(pictures) = &loaded.pictures else {
                let message = format!(
                    "`{param}` is a picture, and the model `{}` is served without an encoder of pictures; leave it out, or start the server with the mmproj file that belongs to the model",
                    loaded.name
                );
                return Err(ApiError { kind: Kind::UnsupportedValue, message, param: Some(param.to_owned()) });
            };
            let bytes = pictures.bytes(param, part)?;
            go_on()?;
            let one = {
                let _one = pictures.decoding.lock().unwrap_or_else(PoisonError::into_inner);
                pictures.vision.show(&bytes, number)
            };
            let one = one.map_err(|why| match why {
                kiln_engine::Error::Media(why) => ApiError::invalid(param, format!("`{param}`: {why}")),
                other => other.into(),
            })?;
            rows += one.rows();
            if rows > most {
                let context = loaded.scheduler.context();
                return Err(ApiError::new(Kind::TooLong { prompt: rows, context }, AT_LEAST));
            }
            shown.push(one);
        }
        Ok(shown)
    }
}

/// Ends the work for a client that has gone.
fn go_on() -> Result<(), ApiError> {
    match client_gone() {
        Some(gone) if gone.load(Ordering::Relaxed) => Err(ApiError::new(Kind::Unavailable, "the client has gone")),
        _ => Ok(()),
    }
}

/// Encodes the pictures of a prompt. Others take turns after each input.
pub(crate) fn join(loaded: &Loaded, arranged: Arranged) -> Result<Joined, ApiError> {
    arranged.join(|picture, input| {
        go_on()?;
        let Some(pictures) = &loaded.pictures else { return Err(ApiError::internal(&"a picture without an encoder")) };
        let mut encoder = pictures.encoder.lock().unwrap_or_else(PoisonError::into_inner);
        encoder.vectors(picture, input).map_err(|why| ApiError::internal(&why))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_come_in_the_forms_of_all_apis() {
        let data = |value: Value| part("p", &value).expect("a picture").map(|part| part["data"].clone());
        for value in [
            json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD", "detail": "low"}}),
            json!({"type": "image_url", "image_url": {"url": "QUJD"}}),
            json!({"type": "input_image", "image_url": "data:image/jpeg;base64,QUJD"}),
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}),
        ] {
            assert_eq!(data(value.clone()).expect("it is taken"), "QUJD", "{value}");
        }
        for (value, words) in [
            (json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), "fetches none"),
            (json!({"type": "image_url", "image_url": {"url": "data:text/plain;base64,QUJD"}}), "something else"),
            (json!({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}), "without base64"),
            (json!({"type": "input_image", "file_id": "file_1"}), "must be a data URL"),
            (json!({"type": "image", "source": {"type": "file"}}), "must be of type base64"),
        ] {
            let refused = data(value.clone()).expect_err("refused").message;
            assert!(refused.contains(words), "{value}: {refused}");
        }
        assert!(part("p", &json!({"type": "text", "text": "a"})).is_none());
        for value in [
            json!({"type": "image_url", "image_url": {"url": "HTTPS://a.b/c.png"}}),
            json!({"type": "image", "source": {"type": "url", "url": "http://a.b/c"}}),
        ] {
            let taken = part("p", &value).expect("a picture").expect("one that may be fetched");
            assert!(taken["url"].is_string() && taken["data"].is_null(), "{taken}");
        }
    }

    #[test]
    fn a_marker_takes_the_place_of_a_picture() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let parts = vec![text("hi"), of_base64("p", "QUJD"), text("what"), text("more")];
        let message = Message { content: Content::Parts(parts), ..Message::new("user", "") };
        let taken = Taken::from(&[message, Message::new("user", "<__media__>")]);
        assert_eq!(taken.messages[0].content, Content::Text(format!("hi{}what\nmore", taken.marker.text())));
        assert_eq!(taken.messages[1].content, Content::Text("<__media__>".to_owned()));
        assert_eq!(taken.pictures.len(), 1);
    }
}
