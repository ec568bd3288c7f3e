//! What the prefix cache holds, told to routers by ZeroMQ in vLLM's format: a publisher, and a socket that sends again what a subscriber has missed.

mod batch;
mod zmtp;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, select};
use kiln_engine::run::{CacheEvent, CacheSink};
use tokio::io::AsyncWrite;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Semaphore, broadcast, mpsc};

use self::zmtp::Incoming;

/// Batches that wait for a slow subscriber; it misses what is older, and sees so by the numbers.
const WAITING: usize = 4096;

/// Batches that are kept for subscribers that have missed some, and their bytes.
const KEPT: usize = 10_000;
const KEPT_BYTES: usize = 64 << 20;

/// Connections at once to each socket, and subscriptions of one.
const PEERS: usize = 64;
const SUBSCRIPTIONS: usize = 64;

/// What ends a replay.
const END: [u8; 8] = [0xff; 8];

/// Where events are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvEndpoint(SocketAddr);

impl KvEndpoint {
    /// Whether only this machine reaches it.
    pub fn is_loopback(&self) -> bool {
        self.0.ip().is_loopback()
    }
}

impl std::str::FromStr for KvEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<KvEndpoint, String> {
        let wrong = || format!("{text:?} is no address to publish at; it looks like tcp://127.0.0.1:5557");
        let (host, port) = text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
        let ip = match host {
            "*" => IpAddr::from([0, 0, 0, 0]),
            "localhost" => IpAddr::from([127, 0, 0, 1]),
            host => host.trim_start_matches('[').trim_end_matches(']').parse().map_err(|_| wrong())?,
        };
        Ok(KvEndpoint(SocketAddr::new(ip, port.parse().map_err(|_| wrong())?)))
    }
}

impl std::fmt::Display for KvEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "tcp://{}", self.0)
    }
}

/// One message of the publisher.
#[derive(Debug)]
struct Numbered {
    topic: String,
    number: u64,
    payload: Vec<u8>,
}

/// What was published last.
#[derive(Debug, Default)]
struct History {
    next: u64,
    batches: VecDeque<Arc<Numbered>>,
    bytes: usize,
}

impl History {
    fn add(&mut self, topic: String, payload: Vec<u8>) -> Arc<Numbered> {
        let batch = Arc::new(Numbered { topic, number: self.next, payload });
        self.next += 1;
        self.bytes += batch.payload.len();
        self.batches.push_back(Arc::clone(&batch));
        while self.batches.len() > KEPT || self.bytes > KEPT_BYTES {
            let Some(oldest) = self.batches.pop_front() else { break };
            self.bytes -= oldest.payload.len();
        }
        batch
    }
}

#[derive(Debug)]
struct Shared {
    history: Mutex<History>,
    subscribers: broadcast::Sender<Arc<Numbered>>,
}

impl Shared {
    /// Numbers a batch and hands it to all subscribers, in this order also where several models publish at once.
    fn publish(&self, topic: String, payload: Vec<u8>) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        // Where nobody listens there is nobody to be told.
        let _ = self.subscribers.send(history.add(topic, payload));
    }

    fn since(&self, number: u64) -> Vec<Arc<Numbered>> {
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.batches.iter().filter(|batch| batch.number >= number).cloned().collect()
    }
}

/// A publisher of what caches hold. It runs on a thread of its own as long as the process.
#[derive(Clone, Debug)]
pub struct KvEvents {
    shared: Arc<Shared>,
    address: SocketAddr,
    replay: Option<SocketAddr>,
}

impl KvEvents {
    /// Listens at these addresses: for subscribers, and for those who ask again for what they have missed.
    pub fn listen(endpoint: KvEndpoint, replay: Option<KvEndpoint>) -> std::io::Result<KvEvents> {
        let listen = |endpoint: KvEndpoint| {
            let listener = StdListener::bind(endpoint.0)
                .map_err(|why| std::io::Error::new(why.kind(), format!("cannot publish at {endpoint}: {why}")))?;
            listener.set_nonblocking(true)?;
            Ok::<_, std::io::Error>(listener)
        };
        let publisher = listen(endpoint)?;
        let router = replay.map(listen).transpose()?;
        let address = publisher.local_addr()?;
        let replay = router.as_ref().map(StdListener::local_addr).transpose()?;
        let shared = Arc::new(Shared { history: Mutex::default(), subscribers: broadcast::channel(WAITING).0 });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let both = Arc::clone(&shared);
        std::thread::Builder::new().name("kiln kv events".into()).spawn(move || {
            runtime.block_on(async move {
                let publisher = TcpListener::from_std(publisher);
                let router = router.map(TcpListener::from_std).transpose();
                if let (Ok(publisher), Ok(router)) = (publisher, router) {
                    if let Some(router) = router {
                        tokio::spawn(accept(router, Arc::clone(&both), answer));
                    }
                    accept(publisher, both, subscribe).await;
                }
            });
        })?;
        Ok(KvEvents { shared, address, replay })
    }

    /// The address for subscribers.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address for those who have missed something.
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.replay
    }

    /// Publishes what becomes of the pages of one engine.
    pub fn sink(&self, topic: String) -> CacheSink {
        let shared = Arc::clone(&self.shared);
        Box::new(move |events: Vec<CacheEvent>| shared.publish(topic.clone(), batch::encode(&events)))
    }
}

/// Serves each connection, so many at once.
async fn accept<F>(listener: TcpListener, shared: Arc<Shared>, serve: fn(TcpStream, Arc<Shared>) -> F)
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let room = Arc::new(Semaphore::new(PEERS));
    loop {
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, from)) => {
                let served = serve(stream, Arc::clone(&shared));
                tokio::spawn(async move {
                    if let Err(why) = served.await {
                        log::debug!("the subscriber {from} has gone: {why}");
                    }
                    drop(place);
                });
            }
            Err(why) => {
                log::debug!("a subscriber was not let in: {why}");
                // No file is left for it; the next one may find one.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// A subscriber: it says which topics it wants, and gets them.
async fn subscribe(mut stream: TcpStream, shared: Arc<Shared>) -> std::io::Result<()> {
    let mut batches = shared.subscribers.subscribe();
    stream.set_nodelay(true)?;
    zmtp::introduce(&mut stream, "PUB").await?;
    let (mut from, mut to) = stream.into_split();
    // Reading a frame must not be given up in its middle, so a task of its own does that.
    let (heard, mut hear) = mpsc::channel(16);
    let reader = tokio::spawn(async move {
        while let Ok(incoming) = zmtp::receive(&mut from).await {
            if heard.send(incoming).await.is_err() {
                break;
            }
        }
    });
    let served = hand_out(&mut to, &mut hear, &mut batches).await;
    reader.abort();
    served
}

async fn hand_out(
    to: &mut (impl AsyncWrite + Unpin),
    hear: &mut mpsc::Receiver<Incoming>,
    batches: &mut broadcast::Receiver<Arc<Numbered>>,
) -> std::io::Result<()> {
    let mut topics: Vec<Vec<u8>> = Vec::new();
    loop {
        match select(pin!(hear.recv()), pin!(batches.recv())).await {
            Either::Left((None, _)) | Either::Right((Err(RecvError::Closed), _)) => return Ok(()),
            Either::Left((Some(Incoming::Command(name, ping)), _)) if name == b"PING" => zmtp::pong(to, &ping).await?,
            Either::Left((Some(incoming), _)) => change_topics(&mut topics, incoming),
            Either::Right((Err(RecvError::Lagged(missed)), _)) => {
                log::debug!("a subscriber is too slow and missed {missed} batches");
            }
            Either::Right((Ok(batch), _)) => {
                if topics.iter().any(|topic| batch.topic.as_bytes().starts_with(topic)) {
                    let frames = [batch.topic.as_bytes(), &batch.number.to_be_bytes(), &batch.payload];
                    zmtp::send(to, &frames).await?;
                }
            }
        }
    }
}

/// Subscriptions come as messages in ZMTP 3.0 and as commands in 3.1.
fn change_topics(topics: &mut Vec<Vec<u8>>, incoming: Incoming) {
    let (is_wanted, topic) = match incoming {
        Incoming::Command(name, topic) if name == b"SUBSCRIBE" => (true, topic),
        Incoming::Command(name, topic) if name == b"CANCEL" => (false, topic),
        Incoming::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
            Some((1, topic)) => (true, topic.to_vec()),
            Some((0, topic)) => (false, topic.to_vec()),
            _ => return,
        },
        Incoming::Command(..) => return,
    };
    if !is_wanted {
        if let Some(at) = topics.iter().position(|other| *other == topic) {
            topics.swap_remove(at);
        }
    } else if topics.len() < SUBSCRIPTIONS {
        topics.push(topic);
    }
}

/// Sends again what was published from a number on, to whoever asks: an empty frame, the number and the batch each, and at the end one without a batch.
async fn answer(mut stream: TcpStream, shared: Arc<Shared>) -> std::io::Result<()> {
    zmtp::introduce(&mut stream, "ROUTER").await?;
    loop {
        let frames = match zmtp::receive(&mut stream).await? {
            Incoming::Command(name, ping) if name == b"PING" => {
                zmtp::pong(&mut stream, &ping).await?;
                continue;
            }
            Incoming::Command(..) => continue,
            Incoming::Message(frames) => frames,
        };
        let Some(number) = frames.last().and_then(|frame| frame.as_slice().try_into().ok()).map(u64::from_be_bytes)
        else {
            continue;
        };
        for batch in shared.since(number) {
            zmtp::send(&mut stream, &[b"", &batch.number.to_be_bytes(), &batch.payload]).await?;
        }
        zmtp::send(&mut stream, &[b"", &END, b""]).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_those_of_zeromq() {
        let parsed = |text: &str| text.parse::<KvEndpoint>().map(|endpoint| endpoint.to_string());
        assert_eq!(parsed("tcp://127.0.0.1:5557").as_deref(), Ok("tcp://127.0.0.1:5557"));
        assert_eq!(parsed("tcp://*:5557").as_deref(), Ok("tcp://0.0.0.0:5557"));
        assert_eq!(parsed("tcp://[::1]:1").as_deref(), Ok("tcp://[::1]:1"));
        for wrong in ["", "5557", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://a b:1", "ipc:///tmp/x", "tcp://*:x"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
        let loopback = |text: &str| text.parse::<KvEndpoint>().unwrap().is_loopback();
        assert!(loopback("tcp://localhost:1") && loopback("tcp://[::1]:1") && !loopback("tcp://*:1"));
    }

    #[test]
    fn old_batches_make_room() {
        let mut history = History::default();
        for _ in 0..KEPT + 10 {
            history.add(String::new(), vec![0; 4]);
        }
        assert_eq!((history.batches.len(), history.batches[0].number, history.bytes), (KEPT, 10, KEPT * 4));
        history.add(String::new(), vec![0; KEPT_BYTES - 8]);
        assert_eq!(history.batches.len(), 3, "bytes are bounded as well");
    }

    #[test]
    fn topics_are_wanted_and_no_longer() {
        let mut topics = Vec::new();
        change_topics(&mut topics, Incoming::Message(vec![b"\x01kv@".to_vec()]));
        change_topics(&mut topics, Incoming::Command(b"SUBSCRIBE".to_vec(), b"x".to_vec()));
        change_topics(&mut topics, Incoming::Message(vec![]));
        change_topics(&mut topics, Incoming::Message(vec![b"\x07".to_vec()]));
        assert_eq!(topics, [b"kv@".to_vec(), b"x".to_vec()]);
        change_topics(&mut topics, Incoming::Message(vec![b"\x00kv@".to_vec()]));
        change_topics(&mut topics, Incoming::Command(b"CANCEL".to_vec(), b"x".to_vec()));
        assert!(topics.is_empty());
        (0..1000).for_each(|_| change_topics(&mut topics, Incoming::Message(vec![vec![1]])));
        assert_eq!(topics.len(), SUBSCRIPTIONS);
    }
}
