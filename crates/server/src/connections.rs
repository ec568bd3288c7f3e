//! The open connections: how many there may be, in all and from one address, and which one is closed when a new one needs its place.
//!
//! A connection that costs its client nothing must not keep others out. So a full server closes the connection that has been idle the
//! longest; one with a request in flight stays. If none is idle, a few reserved places still let health probes in, and tell everybody else
//! to come back.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Connections beyond the limit that are answered at once and closed: probes get their answer, all others a 503.
const RESERVED: usize = 64;

/// A client that stops in the middle of a request body counts as idle after this time, where its place is needed.
const STALLED: Duration = Duration::from_secs(5);

/// How often it is looked at most whether a connection is idle.
const SHORTEST: Duration = Duration::from_millis(10);

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) all: usize,
    /// From one IPv4 address, or one IPv6 network of 64 bits.
    pub(crate) per_address: usize,
}

/// What a connection may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Any requests.
    Regular,
    /// Health probes: the server is full.
    Reserved,
}

/// What a connection is doing.
#[derive(Debug)]
struct Activity {
    /// Requests that came and are not answered to their end.
    in_flight: usize,
    /// Those of them whose bodies are still coming.
    receiving: usize,
    /// When a request last began, got a part of its body, or ended.
    since: Instant,
    has_asked: bool,
    is_closed: bool,
}

/// One open connection.
#[derive(Debug)]
pub(crate) struct Connection {
    number: u64,
    address: IpAddr,
    place: Place,
    activity: Mutex<Activity>,
    closed: Notify,
}

/// Counts a request as in flight until it is dropped.
pub(crate) struct InFlight(Arc<Connection>);

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut activity = self.0.activity();
        activity.in_flight -= 1;
        activity.since = Instant::now();
    }
}

/// Counts a request as one whose body is coming until it is dropped.
pub(crate) struct Receiving(Arc<Connection>);

impl Receiving {
    /// A part of the body came.
    pub(crate) fn progress(&self) {
        self.0.activity().since = Instant::now();
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        let mut activity = self.0.activity();
        activity.receiving -= 1;
        activity.since = Instant::now();
    }
}

impl Connection {
    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where it comes from.
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    pub(crate) fn is_reserved(&self) -> bool {
        self.place == Place::Reserved
    }

    /// A request begins; none where the connection was closed just before.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<InFlight> {
        let mut activity = self.activity();
        if activity.is_closed {
            return None;
        }
        (activity.in_flight, activity.since, activity.has_asked) = (activity.in_flight + 1, Instant::now(), true);
        drop(activity);
        Some(InFlight(Arc::clone(self)))
    }

    /// The body of a request begins to come.
    pub(crate) fn receive(self: &Arc<Self>) -> Receiving {
        self.activity().receiving += 1;
        Receiving(Arc::clone(self))
    }

    /// Ends when the connection has had no request in flight for `first` since it was opened, or for `later` since the last one.
    pub(crate) async fn idle_for(&self, first: Duration, later: Duration) {
        loop {
            let left = {
                let activity = self.activity();
                let limit = if activity.has_asked { later } else { first };
                match activity.in_flight {
                    0 => limit.saturating_sub(activity.since.elapsed()),
                    // It cannot be idle for longer than the limit before then.
                    _ => limit,
                }
            };
            if left.is_zero() {
                return;
            }
            // The first request may come meanwhile, and the other limit holds from then on.
            tokio::time::sleep(left.min(later.max(SHORTEST))).await;
        }
    }

    /// Ends when the connection must give up its place.
    pub(crate) async fn closed(&self) {
        self.closed.notified().await;
    }

    /// Since when the connection does nothing that its client or the server would miss.
    fn idle_since(&self) -> Option<Instant> {
        let activity = self.activity();
        let stalled = activity.receiving == activity.in_flight && activity.since.elapsed() >= STALLED;
        (activity.in_flight == 0 || stalled).then_some(activity.since)
    }

    /// Closes the connection, unless a request has begun meanwhile.
    fn close(&self, idle_since: Instant) -> bool {
        let mut activity = self.activity();
        if activity.since != idle_since {
            return false;
        }
        activity.is_closed = true;
        self.closed.notify_one();
        true
    }
}

#[derive(Default)]
struct Open {
    connections: HashMap<u64, Arc<Connection>>,
    by_address: HashMap<IpAddr, usize>,
    reserved: usize,
    opened: u64,
}

impl Open {
    fn regular(&self) -> usize {
        self.connections.len() - self.reserved
    }

    fn remove(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        if connection.is_reserved() {
            self.reserved -= 1;
        } else if let Some(count) = self.by_address.get_mut(&connection.address) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&connection.address);
            }
        }
    }

    /// Closes the connection that has been idle the longest among those that `may` be closed; tells whether there was one.
    fn close_idlest(&mut self, may: impl Fn(&Connection) -> bool) -> bool {
        loop {
            let idle = self.connections.values().filter(|connection| may(connection));
            let idle = idle.filter_map(|connection| Some((connection.idle_since()?, connection)));
            let Some((since, connection)) = idle.min_by_key(|(since, _)| *since) else { return false };
            let (closed, number) = (connection.close(since), connection.number);
            if closed {
                self.remove(number);
                return true;
            }
        }
    }
}

/// All open connections of a server.
pub(crate) struct Connections {
    limits: Limits,
    open: Mutex<Open>,
    /// Closed because others needed their places.
    displaced: AtomicU64,
    /// Not served because no place could be made.
    refused: AtomicU64,
}

/// What Prometheus is told of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) open: usize,
    pub(crate) opened: u64,
    pub(crate) displaced: u64,
    pub(crate) refused: u64,
}

/// A connection in its place, which it leaves when this is dropped.
pub(crate) struct Admitted {
    pub(crate) connection: Arc<Connection>,
    all: Arc<Connections>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.all.open().remove(self.connection.number);
    }
}

/// The key that connections are counted by: an IPv6 client controls its whole network, so that counts as one.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) >> 64 << 64).into(),
    }
}

impl Connections {
    pub(crate) fn new(limits: Limits) -> Connections {
        let (open, displaced, refused) = (Mutex::default(), AtomicU64::new(0), AtomicU64::new(0));
        Connections { limits, open, displaced, refused }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn counts(&self) -> Counts {
        let open = self.open();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            open: open.connections.len(),
            opened: open.opened,
            displaced: count(&self.displaced),
            refused: count(&self.refused),
        }
    }

    /// A place for a new connection; none where every place is taken, the reserved ones too.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Admitted> {
        let address = network(address);
        let mut open = self.open();
        let Some(place) = self.place(&mut open, address) else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        open.opened += 1;
        let activity =
            Activity { in_flight: 0, receiving: 0, since: Instant::now(), has_asked: false, is_closed: false };
        let number = open.opened;
        let connection = Connection { number, address, place, activity: Mutex::new(activity), closed: Notify::new() };
        let connection = Arc::new(connection);
        open.connections.insert(number, Arc::clone(&connection));
        match place {
            Place::Regular => *open.by_address.entry(address).or_default() += 1,
            Place::Reserved => open.reserved += 1,
        }
        Some(Admitted { connection, all: Arc::clone(self) })
    }

    fn place(&self, open: &mut Open, address: IpAddr) -> Option<Place> {
        let same = open.by_address.get(&address).copied().unwrap_or(0);
        let is_regular = |connection: &Connection| !connection.is_reserved();
        let has_room = if same >= self.limits.per_address {
            self.displace(open, |connection| is_regular(connection) && connection.address == address)
        } else {
            open.regular() < self.limits.all || self.displace(open, is_regular)
        };
        if has_room {
            return Some(Place::Regular);
        }
        let has_room = open.reserved < RESERVED || self.displace(open, Connection::is_reserved);
        has_room.then_some(Place::Reserved)
    }

    fn displace(&self, open: &mut Open, may: impl Fn(&Connection) -> bool) -> bool {
        let closed = open.close_idlest(may);
        self.displaced.fetch_add(u64::from(closed), Ordering::Relaxed);
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(all: usize, per_address: usize) -> Arc<Connections> {
        Arc::new(Connections::new(Limits { all, per_address }))
    }

    fn is_closed(admitted: &Admitted) -> bool {
        admitted.connection.activity().is_closed
    }

    const ONE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const TWO: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    #[test]
    fn the_longest_idle_connection_makes_room_and_none_with_a_request() {
        let all = connections(2, 2);
        let (first, second) = (all.admit(ONE).unwrap(), all.admit(ONE).unwrap());
        let request = first.connection.begin().unwrap();
        let third = all.admit(TWO).unwrap();
        assert_eq!((is_closed(&first), is_closed(&second), is_closed(&third)), (false, true, false));
        assert!(second.connection.begin().is_none(), "it was closed");
        // The request is over: the first one has been idle for a shorter time than the third.
        drop(request);
        let fourth = all.admit(TWO).unwrap();
        assert_eq!((is_closed(&first), is_closed(&third), is_closed(&fourth)), (false, true, false));
        assert_eq!(all.counts(), Counts { open: 2, opened: 4, displaced: 2, refused: 0 });
        drop((first, second, third, fourth));
        assert_eq!(all.counts().open, 0);
        assert!(all.open().by_address.is_empty());
    }

    #[test]
    fn an_address_has_a_limit_of_its_own() {
        let all = connections(4, 2);
        let other = all.admit(TWO).unwrap();
        let own: Vec<Admitted> = (0..3).map(|_| all.admit(ONE).unwrap()).collect();
        assert_eq!(own.iter().map(is_closed).collect::<Vec<_>>(), [true, false, false]);
        assert!(!is_closed(&other), "it is older, but of another address");
        let same = |a: &str, b: &str| network(a.parse().unwrap()) == network(b.parse().unwrap());
        assert!(same("2001:db8::1", "2001:db8::ffff:0:0:1") && !same("2001:db8::1", "2001:db8:0:1::1"));
        assert!(same("::ffff:10.0.0.1", "10.0.0.1") && !same("10.0.0.1", "10.0.0.2"));
    }

    #[test]
    fn a_full_server_has_reserved_places_and_no_more() {
        let all = connections(1, 1);
        let busy = all.admit(ONE).unwrap();
        let _request = busy.connection.begin().unwrap();
        let reserved: Vec<Admitted> = (0..RESERVED).map(|_| all.admit(TWO).unwrap()).collect();
        assert!(reserved.iter().all(|admitted| admitted.connection.is_reserved() && !is_closed(admitted)));
        let requests: Vec<_> = reserved.iter().skip(1).map(|admitted| admitted.connection.begin()).collect();
        let next = all.admit(TWO).unwrap();
        assert!(is_closed(&reserved[0]) && !is_closed(&busy));
        let last = next.connection.begin();
        assert!(all.admit(TWO).is_none(), "every place has a request in flight");
        assert_eq!(all.counts().refused, 1);
        drop((requests, last));
    }

    #[test]
    fn a_body_that_stopped_coming_is_no_reason_to_stay() {
        let all = connections(1, 1);
        let slow = all.admit(ONE).unwrap();
        let _request = slow.connection.begin().unwrap();
        let receiving = slow.connection.receive();
        let since = Instant::now().checked_sub(STALLED).unwrap();
        slow.connection.activity().since = since;
        receiving.progress();
        assert!(slow.connection.idle_since().is_none(), "something came just now");
        slow.connection.activity().since = since;
        assert_eq!(slow.connection.idle_since(), Some(since));
        assert!(!all.admit(ONE).unwrap().connection.is_reserved());
        assert!(is_closed(&slow));
    }
}
