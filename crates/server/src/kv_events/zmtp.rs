//! ZeroMQ's wire protocol (ZMTP 3), as far as a publisher needs it: greeting, NULL mechanism, frames. Written here because the crates for it reserve
//! whatever length a peer claims that a frame has, so that one message ends the server.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// Bytes of a frame that a peer may send: subscriptions and sequence numbers are short.
const MOST_BYTES: usize = 4096;

/// Frames of a message that a peer may send.
const MOST_FRAMES: usize = 8;

/// How long a peer may take to introduce itself.
const HANDSHAKE: Duration = Duration::from_secs(10);

const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What a peer sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// A message of one or several frames.
    Message(Vec<Vec<u8>>),
    /// A command's name and what follows it.
    Command(Vec<u8>, Vec<u8>),
}

/// A peer that does not keep to the protocol, or has gone.
fn wrong(why: &str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, why.to_owned())
}

/// Introduces this side as a socket of this type; gives the peer's type.
pub(super) async fn introduce(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    socket: &str,
) -> std::io::Result<String> {
    timeout(HANDSHAKE, greet(stream, socket)).await.map_err(|_| wrong("no handshake"))?
}

async fn greet(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), socket: &str) -> std::io::Result<String> {
    let mut ours = [0; GREETING];
    (ours[0], ours[9], ours[10]) = (0xff, 0x7f, 3);
    ours[12..16].copy_from_slice(b"NULL");
    stream.write_all(&ours).await?;
    let mut theirs = [0; GREETING];
    stream.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
        return Err(wrong("no greeting of ZMTP 3"));
    }
    if theirs[12..32] != ours[12..32] {
        return Err(wrong("another mechanism than NULL"));
    }
    let mut ready = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", socket), ("Identity", "")] {
        ready.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
        ready.extend(name.as_bytes());
        ready.extend(u32::try_from(value.len()).unwrap_or(u32::MAX).to_be_bytes());
        ready.extend(value.as_bytes());
    }
    send_frame(stream, COMMAND, &ready).await?;
    match receive(stream).await? {
        Incoming::Command(name, properties) if name == b"READY" => {
            property(&properties, "socket-type").ok_or(wrong("no socket type"))
        }
        _ => Err(wrong("no READY")),
    }
}

/// The value of a property of a READY command; names have no case.
fn property(mut rest: &[u8], wanted: &str) -> Option<String> {
    while let Some((&length, behind)) = rest.split_first() {
        let (name, behind) = behind.split_at_checked(usize::from(length))?;
        let (length, behind) = behind.split_first_chunk::<4>()?;
        let (value, behind) = behind.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        if name.eq_ignore_ascii_case(wanted.as_bytes()) {
            return String::from_utf8(value.to_vec()).ok();
        }
        rest = behind;
    }
    None
}

/// Reads one message or command. What is longer than a subscriber has to say is an error before anything is reserved for it.
pub(super) async fn receive(stream: &mut (impl AsyncRead + Unpin)) -> std::io::Result<Incoming> {
    let mut frames = Vec::new();
    loop {
        let flags = stream.read_u8().await?;
        let length = match flags & LONG {
            0 => u64::from(stream.read_u8().await?),
            _ => stream.read_u64().await?,
        };
        let length = usize::try_from(length).ok().filter(|length| *length <= MOST_BYTES);
        let mut body = vec![0; length.ok_or(wrong("a frame is too long"))?];
        stream.read_exact(&mut body).await?;
        if flags & COMMAND != 0 {
            let (&length, behind) = body.split_first().ok_or(wrong("a command without a name"))?;
            let split = behind.split_at_checked(usize::from(length));
            let (name, behind) = split.ok_or(wrong("a command without a name"))?;
            return Ok(Incoming::Command(name.to_vec(), behind.to_vec()));
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Incoming::Message(frames));
        }
        if frames.len() == MOST_FRAMES {
            return Err(wrong("a message has too many frames"));
        }
    }
}

/// Sends the frames of one message.
pub(super) async fn send(stream: &mut (impl AsyncWrite + Unpin), frames: &[&[u8]]) -> std::io::Result<()> {
    for (at, frame) in frames.iter().enumerate() {
        send_frame(stream, if at + 1 < frames.len() { MORE } else { 0 }, frame).await?;
    }
    stream.flush().await
}

/// Answers a peer that wants to know whether this side is there: with the bytes that it gave, behind a time that is of no interest.
pub(super) async fn pong(stream: &mut (impl AsyncWrite + Unpin), ping: &[u8]) -> std::io::Result<()> {
    let mut body = b"\x04PONG".to_vec();
    body.extend(ping.get(2..).unwrap_or_default());
    send_frame(stream, COMMAND, &body).await
}

async fn send_frame(stream: &mut (impl AsyncWrite + Unpin), flags: u8, body: &[u8]) -> std::io::Result<()> {
    match u8::try_from(body.len()) {
        Ok(length) => stream.write_all(&[flags, length]).await?,
        Err(_) => {
            stream.write_u8(flags | LONG).await?;
            stream.write_u64(body.len() as u64).await?;
        }
    }
    stream.write_all(body).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> std::io::Result<Incoming> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut bytes = bytes;
        runtime.block_on(receive(&mut bytes))
    }

    #[test]
    fn frames_are_read_within_bounds() {
        assert_eq!(read(b"\x00\x02\x01a").unwrap(), Incoming::Message(vec![b"\x01a".to_vec()]));
        assert_eq!(read(b"\x01\x00\x00\x01x").unwrap(), Incoming::Message(vec![vec![], b"x".to_vec()]));
        assert_eq!(read(b"\x04\x06\x04PINGx").unwrap(), Incoming::Command(b"PING".to_vec(), b"x".to_vec()));
        let long = [&b"\x02\x00\x00\x00\x00\x00\x00\x01\x00"[..], &[7; 256]].concat();
        assert_eq!(read(&long).unwrap(), Incoming::Message(vec![vec![7; 256]]));
        for wrong in [&b"\x02\x7f\xff\xff\xff\xff\xff\xff\xff"[..], b"\x04\x00", b"\x04\x02\x09a", b"\x00\x05ab", b""] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
        assert!(read(&b"\x01\x00".repeat(100)).is_err(), "a message without an end");
    }

    #[test]
    fn bytes_without_a_meaning_are_read_within_bounds() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut state = 0x2545_F491_4F6C_DD1Du64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let (mut messages, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let bytes: Vec<u8> =
                (0..next() % 40).map(|at| if at % 3 == 0 { next() % 8 } else { next() } as u8).collect();
            let mut rest = &bytes[..];
            loop {
                match runtime.block_on(receive(&mut rest)) {
                    Ok(Incoming::Message(frames)) => messages += usize::from(frames.len() <= MOST_FRAMES),
                    Ok(Incoming::Command(_, properties)) => drop(property(&properties, "socket-type")),
                    Err(_) => break,
                }
            }
            refused += 1;
        }
        assert!(messages > 100 && refused == 20_000, "{messages} messages");
    }

    #[test]
    fn properties_are_found_whatever_they_claim() {
        let ready = b"\x08identity\x00\x00\x00\x00\x0bSocket-Type\x00\x00\x00\x03SUB";
        assert_eq!(property(ready, "socket-type").as_deref(), Some("SUB"));
        for length in 0..ready.len() {
            assert_eq!(property(&ready[..length], "socket-type"), None, "{length}");
        }
        assert_eq!(property(b"\x01a\xff\xff\xff\xffx", "a"), None);
    }
}
