//! Requests: redirects, keys that stay with the host they are for, and patience with servers that are busy.

use std::time::Duration;

use kiln_system::environment;
use kiln_system::text::shown;
use ureq::http::{HeaderMap, Uri};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::error::{Error, Result};
use crate::settings::Settings;

/// Redirects that are followed.
const HOPS: u32 = 10;
/// Bytes of an answer that is no model: a list of files, a manifest.
const LARGEST: u64 = 16 << 20;
/// The longest that a server may make us wait before the next try.
const LONGEST: Duration = Duration::from_secs(60);

/// Makes requests.
pub(crate) struct Client {
    agent: Agent,
    tries: u32,
    pause: Duration,
}

/// What to get.
#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) url: &'a str,
    /// A key; it goes to the host of the address and to no other.
    pub(crate) token: Option<&'a str>,
    pub(crate) accept: Option<&'a str>,
    /// First byte, and the one behind the last.
    pub(crate) range: Option<(u64, u64)>,
}

impl<'a> Request<'a> {
    pub(crate) fn new(url: &'a str) -> Request<'a> {
        Request { url, token: None, accept: None, range: None }
    }
}

/// What came of it: a status of 200 or 206.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Body,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// Why nothing came of it.
pub(crate) enum Failure {
    /// It may go better another time, after as long as the server says.
    Passing(Error, Option<Duration>),
    /// It will not.
    Lasting(Error),
}

impl Client {
    pub(crate) fn new(settings: &Settings) -> Result<Client> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(Duration::from_secs(20)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(30)))
            .tls_config(TlsConfig::builder().root_certs(roots()?).build());
        Ok(Client { agent: config.build().into(), tries: settings.tries.max(1), pause: settings.pause })
    }

    /// One request, with its redirects.
    pub(crate) fn once(&self, request: &Request<'_>) -> Result<Answer, Failure> {
        let mut url = request.url.to_owned();
        let first = origin(&url);
        for _ in 0..HOPS {
            let mut call = self.agent.get(&url);
            let is_safe = url.starts_with("https://") || is_loopback(&url);
            if let Some(token) = request.token.filter(|_| origin(&url) == first && is_safe) {
                call = call.header("Authorization", format!("Bearer {token}"));
            }
            if let Some(accept) = request.accept {
                call = call.header("Accept", accept);
            }
            if let Some((from, to)) = request.range {
                call = call.header("Range", format!("bytes={from}-{}", to.saturating_sub(1)));
            }
            let response = call.call().map_err(|why| passing_or_not(&url, why))?;
            let (parts, body) = response.into_parts();
            let answer = Answer { status: parts.status.as_u16(), headers: parts.headers, body };
            match answer.status {
                200 | 206 => return Ok(answer),
                301 | 302 | 303 | 307 | 308 => {
                    let target = answer.header("location").unwrap_or_default();
                    let next = join(&url, target);
                    if url.starts_with("https://") && !next.starts_with("https://") {
                        let what = format!("{} sends on to {}, which is not encrypted", host(&url), shown(&next));
                        return Err(Failure::Lasting(Error::Refused { what, hint: "name the address itself".into() }));
                    }
                    if !next.starts_with("https://") && !next.starts_with("http://") {
                        let what = format!("{} redirects to {}, which is no HTTP address", host(&url), shown(&next));
                        return Err(Failure::Lasting(Error::Refused {
                            what,
                            hint: "name the file's own address".into(),
                        }));
                    }
                    url = next;
                }
                408 | 425 | 429 | 500..=599 => {
                    let wait = answer.header("retry-after").and_then(|text| text.trim().parse().ok());
                    let why = Error::Status { url: bare(&url), status: answer.status };
                    return Err(Failure::Passing(why, wait.map(Duration::from_secs)));
                }
                status => return Err(Failure::Lasting(Error::Status { url: bare(&url), status })),
            }
        }
        let why = format!("more than {HOPS} redirects");
        Err(Failure::Lasting(Error::Nonsense { host: host(request.url), why }))
    }

    /// The same, tried again while that may help.
    pub(crate) fn get(&self, request: &Request<'_>) -> Result<Answer> {
        let mut tried = 0;
        loop {
            match self.once(request) {
                Ok(answer) => return Ok(answer),
                Err(Failure::Lasting(why)) => return Err(why),
                Err(Failure::Passing(why, wait)) => {
                    tried += 1;
                    if !self.rest(tried, wait) {
                        return Err(why);
                    }
                }
            }
        }
    }

    /// Waits before the next try; false where there is none.
    pub(crate) fn rest(&self, tried: u32, wait: Option<Duration>) -> bool {
        if tried >= self.tries {
            return false;
        }
        let own = self.pause.saturating_mul(1 << (tried - 1).min(8));
        std::thread::sleep(wait.unwrap_or(own).min(LONGEST));
        true
    }

    /// A short answer as text.
    pub(crate) fn text(&self, request: &Request<'_>) -> Result<String> {
        let answer = self.get(request)?;
        let text = answer.body.into_with_config().limit(LARGEST).read_to_string();
        text.map_err(|why| Error::Nonsense { host: host(request.url), why: why.to_string() })
    }
}

/// The roots that certificates are checked against: those of `SSL_CERT_FILE` where a network has its own, else Mozilla's.
fn roots() -> Result<RootCerts> {
    let Some(path) = environment::path("SSL_CERT_FILE") else { return Ok(RootCerts::WebPki) };
    let text = std::fs::read(&path).map_err(Error::io(&path))?;
    let certificates: Vec<_> = parse_pem(&text)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        let what = format!("{} (SSL_CERT_FILE) holds no certificate", path.display());
        return Err(Error::Refused { what, hint: "unset SSL_CERT_FILE, or name a PEM file".into() });
    }
    Ok(RootCerts::new_with_certs(&certificates))
}

fn passing_or_not(url: &str, why: ureq::Error) -> Failure {
    use ureq::Error as E;
    let words = match &why {
        // Without the library's own word before it.
        E::Io(why) => why.to_string(),
        why => why.to_string(),
    };
    let error = Error::Unreachable { host: host(url), why: words };
    match why {
        E::BadUri(_) | E::Http(_) | E::InvalidProxyUrl | E::Tls(_) | E::Rustls(_) | E::Pem(_) => {
            Failure::Lasting(error)
        }
        _ => Failure::Passing(error, None),
    }
}

/// Scheme, host and port of an address.
fn origin(url: &str) -> String {
    let end = url.find("://").map_or(0, |at| at + 3);
    let path = url[end..].find(['/', '?', '#']).map_or(url.len(), |at| end + at);
    url[..path].to_lowercase()
}

/// The host, for messages: an address may hold keys.
pub(crate) fn host(url: &str) -> String {
    let origin = origin(url);
    let host = origin.rsplit('/').next().unwrap_or_default();
    shown(host.rsplit('@').next().unwrap_or_default())
}

/// The address without what stands behind `?`, which may be a key.
pub(crate) fn bare(url: &str) -> String {
    shown(url.split(['?', '#']).next().unwrap_or_default())
}

fn is_loopback(url: &str) -> bool {
    let uri: Option<Uri> = url.parse().ok();
    uri.and_then(|uri| uri.host().map(|host| matches!(host, "localhost" | "127.0.0.1" | "[::1]"))).unwrap_or(false)
}

/// Where a redirect leads.
fn join(from: &str, to: &str) -> String {
    if to.contains("://") {
        return to.to_owned();
    }
    let scheme = from.split("//").next().unwrap_or_default();
    if to.starts_with("//") {
        return format!("{scheme}{to}");
    }
    if to.starts_with('/') {
        return format!("{}{to}", origin(from));
    }
    let path = from.split(['?', '#']).next().unwrap_or_default();
    let folder = path.rsplit_once('/').map_or(path, |(folder, _)| folder);
    format!("{folder}/{to}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_relative_or_not() {
        let from = "https://a.example:1/x/y?key=1";
        for (to, want) in [
            ("https://b.example/z", "https://b.example/z"),
            ("//b.example/z", "https://b.example/z"),
            ("/z", "https://a.example:1/z"),
            ("z", "https://a.example:1/x/z"),
        ] {
            assert_eq!(join(from, to), want);
        }
        assert_eq!((origin(from).as_str(), host(from).as_str()), ("https://a.example:1", "a.example:1"));
        assert_eq!(host("https://user:key@b.example/z"), "b.example");
        assert_eq!(bare(from), "https://a.example:1/x/y");
        assert!(is_loopback("http://127.0.0.1:9/x") && !is_loopback("http://127.0.0.1.example/x"));
    }
}
