//! Clients behind a gateway that all use one key: a gateway that is trusted says who asks, and each is then counted and cached apart.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use axum::http::HeaderMap;

/// Headers in which a trusted gateway says who asks; the first that is there counts.
const HEADERS: [&str; 2] = ["x-kiln-tenant", "x-forwarded-user"];
/// Bytes of a name at most.
const LONGEST: usize = 256;

/// Addresses of gateways that are believed: one, or a network as 10.0.0.0/8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustedProxy {
    network: u128,
    bits: u32,
}

/// An address as all are compared: IPv4 in the form of IPv6.
fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_ipv6_mapped()),
        IpAddr::V6(v6) => u128::from(v6),
    }
}

impl FromStr for TrustedProxy {
    type Err = String;

    fn from_str(text: &str) -> Result<TrustedProxy, String> {
        let wrong = || format!("{text:?} is no address; write one as 10.0.0.7, or a network as 10.0.0.0/8");
        let (address, bits) = text.split_once('/').map_or((text, None), |(address, bits)| (address, Some(bits)));
        let (first, most) = match address.trim_matches(['[', ']']).parse::<IpAddr>().map_err(|_| wrong())? {
            IpAddr::V4(v4) => (v4.to_ipv6_mapped(), Ipv4Addr::BITS),
            IpAddr::V6(v6) => (v6, Ipv6Addr::BITS),
        };
        let bits = bits.map_or(Ok(most), |bits| bits.parse().map_err(|_| wrong()))?;
        if bits > most {
            return Err(wrong());
        }
        let bits = bits + Ipv6Addr::BITS - most;
        Ok(TrustedProxy { network: u128::from(first), bits })
    }
}

impl TrustedProxy {
    /// Whether an address is among these.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        let mask = u128::MAX.checked_shl(u128::BITS - self.bits).unwrap_or(0);
        number(address) & mask == self.network & mask
    }
}

/// Who asks, by the word of a gateway.
pub(crate) fn tenant(headers: &HeaderMap) -> Option<&str> {
    let said = HEADERS.iter().find_map(|name| headers.get(*name))?.to_str().ok()?.trim();
    (!said.is_empty() && said.len() <= LONGEST).then_some(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_have_their_addresses_and_no_others() {
        let has = |network: &str, address: &str| network.parse::<TrustedProxy>().unwrap().has(address.parse().unwrap());
        assert!(has("10.0.0.7", "10.0.0.7") && !has("10.0.0.7", "10.0.0.8"));
        assert!(has("10.0.0.0/8", "10.255.1.2") && !has("10.0.0.0/8", "11.0.0.1"));
        assert!(has("0.0.0.0/0", "1.2.3.4") && !has("0.0.0.0/0", "2001:db8::1"));
        assert!(has("::/0", "2001:db8::1") && has("2001:db8::/32", "2001:db8:5::1"));
        assert!(has("127.0.0.1", "::ffff:127.0.0.1"), "the same address in both forms");
        for wrong in ["", "a", "10.0.0.0/33", "10.0.0.0/x", "::/129", "10.0.0"] {
            assert!(wrong.parse::<TrustedProxy>().is_err(), "{wrong}");
        }
    }
}
