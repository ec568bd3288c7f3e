//! Keys that open the server: whose secret a request brings, and what each key has under way. Other keys may take their place while
//! requests run.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::api_error::{ApiError, Kind};

/// A key that clients prove themselves with.
#[derive(Clone, Default)]
pub struct Key {
    /// Shown in logs in place of the key.
    pub name: String,
    /// The secret.
    pub secret: String,
    /// Requests at once at most.
    pub at_once: Option<usize>,
    /// Requests in a minute at most.
    pub per_minute: Option<u32>,
}

/// A key that the server knows.
pub(crate) struct Holder {
    pub(crate) key: Key,
    /// Its cache scope ([`scope_of`]).
    pub(crate) owner: u64,
    account: Arc<Account>,
}

impl std::fmt::Debug for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Holder({:?})", self.key.name)
    }
}

/// What one key has under way, and what it has left of its minute.
struct Account {
    running: AtomicUsize,
    /// Requests that it may still begin, and when that was counted.
    left: Mutex<(f64, Instant)>,
}

/// A request that counts against its key until this is dropped.
pub(crate) struct Counted(Arc<Account>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Holder {
    /// A key that begins with nothing under way, or goes on with what there is.
    fn new(key: Key, owner: u64, account: Option<Arc<Account>>) -> Arc<Holder> {
        let account = account.unwrap_or_else(|| {
            let left = Mutex::new((f64::from(key.per_minute.unwrap_or(0)), Instant::now()));
            Arc::new(Account { running: AtomicUsize::new(0), left })
        });
        Arc::new(Holder { key, owner, account })
    }

    /// Counts one more request of this key, if its limits allow one.
    pub(crate) fn count(&self) -> Result<Counted, ApiError> {
        let running = self.account.running.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(Arc::clone(&self.account));
        if self.key.at_once.is_some_and(|most| running >= most) {
            let message =
                format!("the key {:?} has {running} requests under way, which is all it may have", self.key.name);
            return Err(ApiError::new(Kind::KeyLimit { seconds: 1 }, message));
        }
        self.take_one()?;
        Ok(counted)
    }

    /// Counts one request against the minute of the key.
    fn take_one(&self) -> Result<(), ApiError> {
        let Some(most) = self.key.per_minute else { return Ok(()) };
        let most = f64::from(most);
        let mut left = self.account.left.lock().unwrap_or_else(PoisonError::into_inner);
        // What was used comes back evenly over a minute.
        let now = (left.0 + left.1.elapsed().as_secs_f64() * most / 60.0).min(most);
        *left = (now, Instant::now());
        if now < 1.0 {
            let seconds = ((1.0 - now) * 60.0 / most).ceil() as u64;
            let message = format!("the key {:?} has had its {most} requests of this minute", self.key.name);
            return Err(ApiError::new(Kind::KeyLimit { seconds }, message));
        }
        left.0 -= 1.0;
        Ok(())
    }
}

/// The cache scope of a key. Keys may change their order and names; the secret is what makes a client the same, also after a restart.
/// Half of the numbers are left to those that say more ([`crate::params`]).
fn scope_of(secret: &str) -> u64 {
    scope(&[b"kiln cache scope ", secret.as_bytes()].concat())
}

/// The cache scope of a gateway's client.
fn tenant_scope(owner: u64, name: &str) -> u64 {
    scope(&[&b"kiln tenant "[..], &owner.to_le_bytes(), name.as_bytes()].concat())
}

fn scope(bytes: &[u8]) -> u64 {
    let hash = Sha256::digest(bytes);
    let number = hash.iter().take(8).fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    (number >> 1).max(1)
}

/// Clients of gateways that are remembered; those of them that have nothing under way are forgotten first.
const MOST_TENANTS: usize = 4096;

/// All keys.
pub(crate) struct Keys {
    known: RwLock<Arc<[Arc<Holder>]>>,
    /// Clients of trusted gateways, by the owner of the key that came with them and their name.
    tenants: Mutex<HashMap<(u64, String), Arc<Holder>>>,
}

impl Keys {
    pub(crate) fn new(keys: Vec<Key>) -> Keys {
        let all = Keys { known: RwLock::default(), tenants: Mutex::default() };
        all.replace(keys);
        all
    }

    fn known(&self) -> Arc<[Arc<Holder>]> {
        Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Without any key the server is open to all who reach it.
    pub(crate) fn is_empty(&self) -> bool {
        self.known().is_empty()
    }

    /// Only these keys open the server from now on. What a secret that stays has under way still counts.
    pub(crate) fn replace(&self, keys: Vec<Key>) {
        let before = self.known();
        let hold = |key: Key| {
            let same = before.iter().find(|holder| holder.key.secret == key.secret);
            let owner = scope_of(&key.secret);
            Holder::new(key, owner, same.map(|holder| Arc::clone(&holder.account)))
        };
        let now = keys.into_iter().map(hold).collect();
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = now;
    }

    /// The client of a trusted gateway: it has the limits of the gateway's key for itself, and shares nothing with other clients.
    pub(crate) fn tenant(&self, key: Option<&Arc<Holder>>, name: &str) -> Arc<Holder> {
        let (limits, owner) = key.map_or((Key::default(), 0), |holder| (holder.key.clone(), holder.owner));
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if tenants.len() >= MOST_TENANTS {
            tenants.retain(|_, tenant| tenant.account.running.load(Ordering::Relaxed) > 0);
        }
        let new = || Holder::new(Key { name: name.to_owned(), ..limits.clone() }, tenant_scope(owner, name), None);
        let tenant = tenants.entry((owner, name.to_owned())).or_insert_with(new);
        let Key { at_once, per_minute, .. } = tenant.key;
        if (at_once, per_minute) != (limits.at_once, limits.per_minute) {
            // The keys were read again: the limits are others, what is under way still counts.
            *tenant =
                Holder::new(Key { name: name.to_owned(), ..limits }, tenant.owner, Some(Arc::clone(&tenant.account)));
        }
        Arc::clone(tenant)
    }

    /// The key with this secret.
    pub(crate) fn find(&self, secret: &str) -> Option<Arc<Holder>> {
        // Every key is compared to its end, so that time tells nothing.
        let mut found = None;
        for holder in self.known().iter() {
            if bool::from(holder.key.secret.as_bytes().ct_eq(secret.as_bytes())) {
                found = Some(Arc::clone(holder));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(secret: &str, at_once: Option<usize>) -> Key {
        Key { name: secret.into(), secret: secret.into(), at_once, ..Key::default() }
    }

    #[test]
    fn a_secret_that_stays_keeps_its_owner_and_its_count() {
        let keys = Keys::new(vec![key("alice", Some(2)), key("bob", None)]);
        let (alice, bob) = (keys.find("alice").unwrap(), keys.find("bob").unwrap());
        assert!(alice.owner != bob.owner && alice.owner > 0 && bob.owner > 0);
        let first = alice.count().unwrap();
        keys.replace(vec![key("carol", None), key("alice", Some(1))]);
        assert!(keys.find("bob").is_none() && keys.find("").is_none());
        let (again, carol) = (keys.find("alice").unwrap(), keys.find("carol").unwrap());
        assert_eq!(again.owner, alice.owner);
        assert!(again.count().is_err(), "its request from before still runs");
        drop(first);
        drop(again.count().unwrap());
        // Another secret is another client; the same one finds what it left.
        assert!(![alice.owner, bob.owner].contains(&carol.owner));
        keys.replace(vec![key("bob", None)]);
        assert_eq!(keys.find("bob").unwrap().owner, bob.owner);
        assert!(
            [&alice, &bob, &carol].iter().all(|holder| holder.owner < 1 << 63),
            "half of the numbers are for salts"
        );
        assert!(
            !format!("{:?}", Keys::new(vec![Key { name: "n".into(), ..key("secret", None) }]).find("secret"))
                .contains("secret")
        );
    }
}
