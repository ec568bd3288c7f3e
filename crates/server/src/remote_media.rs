//! Pictures of addresses: fetched from hosts that the operator named, and from nowhere else. A host's name must not lead into the network that the
//! server stands in: every connection, those of redirects too, goes to an address that was looked at, and private ones are refused unless the
//! operator named the very address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::Duration;

use kiln_system::text::shown;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Error};

/// Bytes of one picture: as many as an upload could have.
const MOST_BYTES: u64 = 20 << 20;
/// How long one picture may take, its redirects included.
const PATIENCE: Duration = Duration::from_secs(10);
/// Redirects that are followed.
const HOPS: usize = 3;

/// A host that pictures may be fetched from: `example.org`, `*.example.org`, either with `:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaHost {
    /// In small letters, without brackets.
    name: String,
    /// Whether hosts below it are meant.
    below: bool,
    port: Option<u16>,
}

impl FromStr for MediaHost {
    type Err = String;

    fn from_str(text: &str) -> Result<MediaHost, String> {
        let wrong =
            || "a host is a name or an address, such as example.org, *.example.org or 192.0.2.1:8080".to_owned();
        let (below, rest) = text.strip_prefix("*.").map_or((false, text), |rest| (true, rest));
        let uri: Uri = format!("http://{rest}/").parse().map_err(|_| wrong())?;
        let authority =
            uri.authority().filter(|a| a.as_str() == rest && !rest.contains(['@', '*'])).ok_or_else(wrong)?;
        let name = plain(authority.host());
        let is_name =
            name.parse::<IpAddr>().is_ok() || name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b));
        // Whatever stands behind a colon is a port.
        let is_whole = authority.host().len() == rest.len() || authority.port_u16().is_some();
        if name.is_empty() || !is_name || !is_whole {
            return Err(wrong());
        }
        Ok(MediaHost { name, below, port: authority.port_u16() })
    }
}

impl MediaHost {
    /// Whether this is the host of an address. Where no port was named, the usual one of its kind is meant.
    fn is_of(&self, uri: &Uri) -> bool {
        let host = plain(uri.host().unwrap_or_default());
        let fits = match self.below {
            true => host.strip_suffix(&self.name).is_some_and(|front| front.len() > 1 && front.ends_with('.')),
            false => host == self.name,
        };
        fits && uri.port_u16().filter(|port| Some(*port) != usual_port(uri))
            == self.port.filter(|p| Some(*p) != usual_port(uri))
    }
}

/// A host as it is compared: in small letters, without the brackets of IPv6 and the dot at the end.
fn plain(host: &str) -> String {
    host.trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase()
}

fn usual_port(uri: &Uri) -> Option<u16> {
    match uri.scheme_str() {
        Some("https") => Some(443),
        Some("http") => Some(80),
        _ => None,
    }
}

/// Whether an address is one of the open network.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let shared = a == 100 && (64..128).contains(&b);
    let special =
        (a, b, c) == (192, 0, 0) || (a, b, c) == (192, 88, 99) || (a == 198 && (b & 0xfe) == 18) || a == 0 || a >= 240;
    !(address.is_private() || address.is_loopback() || address.is_link_local() || address.is_multicast())
        && !(address.is_documentation() || shared || special)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let embedded = |high: u16, low: u16| {
        let [[one, two], [three, four]] = [high.to_be_bytes(), low.to_be_bytes()];
        is_public_v4(Ipv4Addr::new(one, two, three, four))
    };
    match (a, b) {
        // Addresses of IPv4 in other clothes: mapped, translated, tunnelled.
        _ if [a, b, c, d, e] == [0; 5] && f == 0xffff => embedded(g, h),
        (0x64, 0xff9b) if [c, d, e, f] == [0; 4] => embedded(g, h),
        (0x2002, _) => embedded(b, c),
        (0x2001, b) if b < 0x200 || b == 0xdb8 => false,
        // What was given out to be used in the open network, and nothing else.
        (0x2000..=0x3ffe, _) => true,
        _ => false,
    }
}

/// Finds the addresses of hosts, and refuses those of the server's own surroundings.
#[derive(Debug, Default)]
struct Outside(DefaultResolver);

impl Resolver for Outside {
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let found = self.0.resolve(uri, config, timeout)?;
        // An operator who names an address means it.
        let named = plain(uri.host().unwrap_or_default()).parse::<IpAddr>().is_ok();
        let mut kept = self.empty();
        found.iter().filter(|address| named || is_public(address.ip())).for_each(|address| kept.push(*address));
        match kept.is_empty() {
            true => Err(Error::Io(std::io::Error::other(PRIVATE))),
            false => Ok(kept),
        }
    }
}

const PRIVATE: &str = "its address is one of a private network";

/// Fetches pictures.
#[derive(Debug)]
pub(crate) struct RemoteMedia {
    hosts: Vec<MediaHost>,
    agent: Agent,
}

impl RemoteMedia {
    pub(crate) fn new(hosts: &[MediaHost]) -> RemoteMedia {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .accept("image/*")
            .accept_encoding("identity")
            .timeout_global(Some(PATIENCE))
            // A proxy would look for the host itself.
            .proxy(None)
            .max_idle_connections(0)
            .build();
        let agent = Agent::with_parts(config, DefaultConnector::default(), Outside::default());
        RemoteMedia { hosts: hosts.to_vec(), agent }
    }

    /// Whether no address is fetched at all.
    pub(crate) fn is_off(&self) -> bool {
        self.hosts.is_empty()
    }

    /// What lies at an address, or why that is not fetched: words behind the name of the field that it came in.
    pub(crate) fn fetch(&self, url: &str) -> Result<Vec<u8>, String> {
        let mut uri = self.allowed(url)?;
        for _ in 0..=HOPS {
            let host = shown(uri.host().unwrap_or_default());
            let failed = |why: Error| match why {
                Error::Io(why) if why.to_string() == PRIVATE => format!("names {host}, and {PRIVATE}"),
                why => format!("cannot be fetched from {host}: {}", shown(&why.to_string())),
            };
            let mut response = self.agent.get(uri.clone()).call().map_err(failed)?;
            let status = response.status().as_u16();
            match status {
                200 => {
                    let too_long = format!("has more than {} MB, which are fetched at most", MOST_BYTES >> 20);
                    if response.body().content_length().is_some_and(|bytes| bytes > MOST_BYTES) {
                        return Err(too_long);
                    }
                    let read = response.body_mut().with_config().limit(MOST_BYTES).read_to_vec();
                    return read.map_err(|why| match why {
                        Error::BodyExceedsLimit(_) => too_long,
                        why => failed(why),
                    });
                }
                301 | 302 | 303 | 307 | 308 => {
                    let target = response.headers().get("location").and_then(|value| value.to_str().ok());
                    let next = joined(&uri, target.unwrap_or_default());
                    let next = self.allowed(&next).map_err(|why| format!("is redirected to an address that {why}"))?;
                    if uri.scheme_str() == Some("https") && next.scheme_str() != Some("https") {
                        return Err(format!("is redirected by {host} to an address without encryption"));
                    }
                    uri = next;
                }
                _ => return Err(format!("cannot be fetched: {host} answers with status {status}")),
            }
        }
        Err(format!("is redirected more than {HOPS} times"))
    }

    /// An address of a host that was allowed.
    fn allowed(&self, url: &str) -> Result<Uri, String> {
        let other_form = || "is no address of the form https://HOST/PATH".to_owned();
        let uri: Uri = url.parse().map_err(|_| other_form())?;
        let plain = uri.authority().is_some_and(|authority| !authority.as_str().contains('@'));
        if !plain || usual_port(&uri).is_none() {
            return Err(other_form());
        }
        match self.hosts.iter().any(|host| host.is_of(&uri)) {
            true => Ok(uri),
            false => Err(format!(
                "names {}, which this server fetches nothing from; send the picture itself, as data:image/png;base64,...",
                shown(uri.authority().map_or("", |authority| authority.as_str()))
            )),
        }
    }
}

/// Where a redirect leads.
fn joined(from: &Uri, target: &str) -> String {
    let (scheme, authority) = (from.scheme_str().unwrap_or("https"), from.authority().map_or("", |a| a.as_str()));
    match target {
        whole if whole.contains("://") => whole.to_owned(),
        other if other.starts_with("//") => format!("{scheme}:{other}"),
        path if path.starts_with('/') => format!("{scheme}://{authority}{path}"),
        file => {
            let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{scheme}://{authority}{folder}/{file}")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;

    use super::*;

    fn host(text: &str) -> MediaHost {
        text.parse().expect("a host")
    }

    #[test]
    fn hosts_are_compared_whole() {
        let fits = |host: &str, url: &str| self::host(host).is_of(&url.parse().expect("an address"));
        for url in
            ["https://example.org/a", "http://EXAMPLE.org/a", "https://example.org:443/", "https://example.org./a"]
        {
            assert!(fits("example.org", url), "{url}");
        }
        for url in [
            "https://example.org.evil.net/",
            "https://notexample.org/",
            "https://a.example.org/",
            "https://example.org:8443/",
            "http://example.org:443/",
        ] {
            assert!(!fits("example.org", url), "{url}");
        }
        assert!(fits("*.example.org", "https://a.b.example.org/") && !fits("*.example.org", "https://example.org/"));
        assert!(!fits("*.example.org", "https://evilexample.org/") && !fits("*.example.org", "https://.example.org/"));
        assert!(
            fits("Example.org:8443", "https://example.org:8443/") && !fits("example.org:8443", "https://example.org/")
        );
        assert!(fits("[::1]:80", "http://[::1]/") && fits("192.0.2.1:8080", "http://192.0.2.1:8080/a"));
        for wrong in
            ["", "*", "*.", "https://example.org", "example.org/a", "a@b", "a b", "a:b", "a*.org", "example.org:"]
        {
            assert!(wrong.parse::<MediaHost>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_of_private_networks_are_known_in_all_their_clothes() {
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "255.255.255.255",
            "224.0.0.1",
            "192.0.0.8",
            "198.18.0.1",
            "203.0.113.9",
            "::1",
            "::",
            "fe80::1",
            "fc00::1",
            "fd12::1",
            "ff02::1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "2002:7f00:1::1",
            "2001::1",
            "2001:db8::1",
            "64:ff9b:1::1",
        ] {
            assert!(!is_public(private.parse().expect("an address")), "{private}");
        }
        for public in ["8.8.8.8", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"] {
            assert!(is_public(public.parse().expect("an address")), "{public}");
        }
    }

    /// A server that gives these answers, one for each connection; its port.
    fn serving(answers: Vec<String>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        std::thread::spawn(move || {
            for answer in answers {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let mut lines = BufReader::new(stream.try_clone().expect("a stream")).lines();
                while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
                // Who asks for too much is left in the middle of it.
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        port
    }

    fn redirect(to: &str) -> String {
        format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n")
    }

    #[test]
    fn only_what_was_allowed_is_fetched() {
        let ok = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc".to_owned();
        let far = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", MOST_BYTES + 1);
        let endless = format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(MOST_BYTES as usize + 4096));
        let gone = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_owned();
        let answers = vec![
            ok.clone(),
            redirect("/b"),
            ok,
            redirect("http://169.254.169.254/latest"),
            redirect("file:///etc/passwd"),
            far,
            endless,
            gone,
            redirect("/"),
            redirect("/"),
            redirect("/"),
            redirect("/"),
        ];
        let port = serving(answers);
        let media = RemoteMedia::new(&[host(&format!("127.0.0.1:{port}")), host(&format!("localhost:{port}"))]);
        let get = |path: &str| media.fetch(&format!("http://127.0.0.1:{port}{path}"));
        assert_eq!(get("/a.png"), Ok(b"abc".to_vec()));
        assert_eq!(get("/a.png"), Ok(b"abc".to_vec()), "a redirect within what is allowed");
        let refused = |got: Result<Vec<u8>, String>, words: &str| {
            let why = got.expect_err("refused");
            assert!(why.contains(words), "{why}");
        };
        refused(get("/a"), "redirected to an address that names 169.254.169.254");
        refused(get("/a"), "no address of the form");
        refused(get("/a"), "more than 20 MB");
        refused(get("/a"), "more than 20 MB");
        refused(get("/a"), "status 404");
        refused(get("/a"), "redirected more than 3 times");
        // A name that leads to this machine is not the address that was allowed.
        refused(media.fetch(&format!("http://localhost:{port}/")), "private network");
        refused(media.fetch("http://127.0.0.1/"), "fetches nothing from");
        refused(media.fetch(&format!("http://user@127.0.0.1:{port}/")), "no address of the form");
        refused(media.fetch("https://elsewhere.example/"), "names elsewhere.example");
        refused(media.fetch("ftp://127.0.0.1/"), "no address of the form");
        assert!(RemoteMedia::new(&[]).is_off());
    }
}
