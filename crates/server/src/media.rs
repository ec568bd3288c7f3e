//! Pictures and sounds in a conversation: every API's way of sending one becomes one kind of part, and the parts become a marker in the text
//! and vectors in its place. All of it is done where prompts are prepared, off the threads that serve connections and beside the engine's.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kiln_engine::media::{Arranged, Encoder, Joined, Marker, Medium, Mmproj, Shown};
use kiln_engine::text::{Content, Message};
use serde_json::{Value, json};

use crate::api_error::{AT_LEAST, ApiError, Kind};
use crate::prep_pool::client_gone;
use crate::registry::Loaded;
use crate::remote_media::{MediaHost, RemoteMedia};

/// The type of parts that hold a picture or a sound, as `medium` says: `data` is base64, `param` the field that it came in.
const PART: &str = "kiln_media";

/// Bytes of pictures that are fetched for one request. Those that come with it are counted as its body is.
const MOST_FETCHED: usize = 100 << 20;

/// The encoders of a model.
pub(crate) struct Media {
    mmproj: Arc<Mmproj>,
    /// One input is encoded at a time; texts are written meanwhile.
    encoder: Mutex<Encoder>,
    /// One picture or sound is decoded at a time, since a large one takes much memory.
    decoding: Mutex<()>,
    /// Fetches those that come as addresses.
    remote: RemoteMedia,
}

impl Media {
    pub(crate) fn new(encoder: Encoder, hosts: &[MediaHost]) -> Media {
        let (mmproj, remote) = (Arc::clone(encoder.mmproj()), RemoteMedia::new(hosts));
        Media { mmproj, encoder: Mutex::new(encoder), decoding: Mutex::new(()), remote }
    }

    /// Whether it encodes this.
    pub(crate) fn takes(&self, medium: Medium) -> bool {
        match medium {
            Medium::Picture => self.mmproj.vision().is_some(),
            Medium::Sound => self.mmproj.audio().is_some(),
        }
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

impl Loaded {
    /// Whether conversations may have pictures, or sounds, in them.
    pub(crate) fn takes(&self, medium: Medium) -> bool {
        self.media.as_ref().is_some_and(|media| media.takes(medium))
    }
}

const FETCHES_NONE: &str =
    "is an address, and this server fetches none; send the picture itself, as data:image/png;base64,...";

/// What the field `medium` of a part says.
fn medium_of(part: &Value) -> Medium {
    let is_sound = part["medium"] == Medium::Sound.name();
    if is_sound { Medium::Sound } else { Medium::Picture }
}

/// A picture or a sound of base64, as a part of a message.
fn of_base64(medium: Medium, param: &str, data: &str) -> Value {
    json!({"type": PART, "medium": medium.name(), "param": param, "data": data})
}

/// A sound as OpenAI's clients send it: base64, whose format is seen in the bytes; data URLs are taken as well.
fn of_sound(param: &str, sound: Option<&Value>) -> Result<Value, ApiError> {
    let data = sound.and_then(|sound| sound.get("data")?.as_str());
    let field = format!("{param}.input_audio.data");
    let refused = |why: &str| ApiError::invalid(field.clone(), format!("`{field}` {why}"));
    let data = data.ok_or_else(|| refused("must be base64 of a sound"))?;
    let Some(rest) = data.strip_prefix("data:") else { return Ok(of_base64(Medium::Sound, &field, data)) };
    match rest.split_once(";base64,") {
        Some((kind, data)) if kind.starts_with("audio/") => Ok(of_base64(Medium::Sound, &field, data)),
        Some(_) => Err(refused("is a data URL of something else than a sound; it has to be data:audio/wav;base64,...")),
        None => Err(refused("is a data URL without base64; it has to be data:audio/wav;base64,...")),
    }
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
        return Ok(of_base64(Medium::Picture, param, data));
    }
    let is_web = ["http://", "https://"]
        .iter()
        .any(|scheme| url.get(..scheme.len()).is_some_and(|s| s.eq_ignore_ascii_case(scheme)));
    match url.contains("://") {
        // Whether it is fetched is the business of who serves the model.
        true if is_web => Ok(json!({"type": PART, "medium": Medium::Picture.name(), "param": param, "url": url})),
        true => refused(FETCHES_NONE),
        false => Ok(of_base64(Medium::Picture, param, url)),
    }
}

/// The picture or sound in a part of a message, whichever API it came by; none where the part is something else.
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
        "input_audio" => Some(of_sound(param, part.get("input_audio"))),
        "image" => {
            let field = format!("{param}.source");
            let source = part.get("source");
            let text = |name: &str| source.and_then(|source| source.get(name)?.as_str());
            Some(match (text("type"), text("data"), text("url")) {
                (Some("base64"), Some(data), _) => Ok(of_base64(Medium::Picture, &field, data)),
                (Some("url"), _, Some(url)) => of_url(&field, url),
                _ => Err(missing(field, "of type base64, with data")),
            })
        }
        _ => None,
    }
}

/// Whether a message has a picture or a sound.
pub(crate) fn are_in(content: &Content) -> bool {
    matches!(content, Content::Parts(parts) if parts.iter().any(|part| part["type"] == PART))
}

/// A conversation whose pictures and sounds were taken out.
pub(crate) struct Taken {
    /// The messages, with the marker where they were.
    pub(crate) messages: Vec<Message>,
    /// The pictures and sounds, in order.
    media: Vec<Value>,
    /// What stands for them. It is drawn for each request, so that nobody can write it.
    pub(crate) marker: Marker,
}

impl Taken {
    pub(crate) fn from(messages: &[Message]) -> Taken {
        let mut taken = Taken { messages: messages.to_vec(), media: Vec::new(), marker: Marker::default() };
        for message in taken.messages.iter_mut().filter(|message| are_in(&message.content)) {
            let Content::Parts(parts) = std::mem::take(&mut message.content) else { continue };
            // Texts stand on lines of their own; nothing stands beside a picture or a sound.
            let (mut text, mut follows_text) = (String::new(), false);
            for part in parts {
                if part["type"] == PART {
                    text += taken.marker.text();
                    taken.media.push(part);
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
        self.media.is_empty()
    }

    /// The pictures and sounds, ready to be encoded, which take so many rows at most.
    pub(crate) fn shown(&self, loaded: &Loaded, most: usize) -> Result<Vec<Shown>, ApiError> {
        let (mut shown, mut rows, mut fetched) = (Vec::with_capacity(self.media.len()), 0, 0);
        // Pictures are counted: a family may write which one it is.
        let mut pictures = 0;
        for part in &self.media {
            let (param, medium) = (part["param"].as_str().unwrap_or_default(), medium_of(part));
            let media = loaded.media.as_ref().filter(|media| media.takes(medium));
            let media = media.ok_or_else(|| lacking(loaded, param, medium))?;
            let bytes = media.bytes(param, part)?;
            if part["url"].is_string() {
                fetched += bytes.len();
            }
            if fetched > MOST_FETCHED {
                let most = MOST_FETCHED >> 20;
                let message =
                    format!("`{param}`: the pictures that a request names by addresses have {most} MB at most");
                return Err(ApiError::invalid(param, message));
            }
            go_on()?;
            let one = {
                let _one = media.decoding.lock().unwrap_or_else(PoisonError::into_inner);
                media.mmproj.take(medium, &bytes, pictures)
            };
            let one = one.map_err(|why| match why {
                kiln_engine::Error::Media(why) => ApiError::invalid(param, format!("`{param}`: {why}")),
                other => other.into(),
            })?;
            pictures += usize::from(medium == Medium::Picture);
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

/// Why a picture or a sound is not taken by a model.
fn lacking(loaded: &Loaded, param: &str, medium: Medium) -> ApiError {
    let message = format!(
        "`{param}` is a {}, and the model `{}` is served without an encoder of {}; leave it out, or start the server with the mmproj file that belongs to the model",
        medium.name(),
        loaded.name,
        medium.plural()
    );
    ApiError { kind: Kind::UnsupportedValue, message, param: Some(param.to_owned()) }
}

/// Ends the work for a client that has gone.
fn go_on() -> Result<(), ApiError> {
    match client_gone() {
        Some(gone) if gone.load(Ordering::Relaxed) => Err(ApiError::new(Kind::Unavailable, "the client has gone")),
        _ => Ok(()),
    }
}

/// Encodes the pictures and sounds of a prompt. Others take turns after each input.
pub(crate) fn join(loaded: &Loaded, arranged: Arranged) -> Result<Joined, ApiError> {
    arranged.join(|shown, input| {
        go_on()?;
        let Some(media) = &loaded.media else { return Err(ApiError::internal(&"a picture without an encoder")) };
        let mut encoder = media.encoder.lock().unwrap_or_else(PoisonError::into_inner);
        encoder.vectors(shown, input).map_err(|why| match why.is_lost() {
            // It will be there again, as the engine will.
            true => why.into(),
            false => ApiError::internal(&why),
        })
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
    fn sounds_come_as_base64_and_as_data_urls() {
        for data in ["QUJD", "data:audio/wav;base64,QUJD"] {
            let value = json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}});
            let taken = part("p", &value).expect("a sound").expect("it is taken");
            assert_eq!((&taken["data"], medium_of(&taken)), (&json!("QUJD"), Medium::Sound));
        }
        for (sound, words) in [
            (json!({"format": "wav"}), "must be base64"),
            (json!({"data": "data:image/png;base64,QUJD"}), "something else than a sound"),
            (json!({"data": "data:audio/wav,abc"}), "without base64"),
        ] {
            let refused = part("p", &json!({"type": "input_audio", "input_audio": sound})).expect("a sound");
            let refused = refused.expect_err("refused");
            assert!(refused.message.contains(words), "{}", refused.message);
            assert_eq!(refused.param.as_deref(), Some("p.input_audio.data"));
        }
    }

    #[test]
    fn a_marker_takes_the_place_of_a_picture() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let parts = vec![text("hi"), of_base64(Medium::Picture, "p", "QUJD"), text("what"), text("more")];
        let message = Message { content: Content::Parts(parts), ..Message::new("user", "") };
        let taken = Taken::from(&[message, Message::new("user", "<__media__>")]);
        assert_eq!(taken.messages[0].content, Content::Text(format!("hi{}what\nmore", taken.marker.text())));
        assert_eq!(taken.messages[1].content, Content::Text("<__media__>".to_owned()));
        assert_eq!(taken.media.len(), 1);
    }
}
