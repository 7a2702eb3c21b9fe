//! Handshakes that clients never complete: a lost client, or a scan of ports. No packet tells of their end.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_bpf::replication::Replicator;
use holdfast_bpf::replication::shared_with_c::{Connection, ConnectionKey, HalfOpen};

/// Time after which a handshake is given up: servers have repeated their answers for about as long.
const HANDSHAKE_MAX: Duration = Duration::from_secs(70);
/// Time between two searches. A connection is in neither map for a moment while it is established.
const SEARCH_INTERVAL: Duration = Duration::from_secs(5);

/// Entries of a map.
type Entries<'a, V> = &'a [(ConnectionKey, V)];

/// A client with the index of its service.
type Client = (u16, SocketAddr);

/// Clients that the machines know and that the maps did not have at the last search.
#[derive(Debug, Default)]
pub(super) struct AbandonedHandshakes {
    searched_at: Option<Duration>,
    absent: HashSet<Client>,
}

impl AbandonedHandshakes {
    /// Removes handshakes that are too old from the maps, and returns the clients of `known` that were in neither map in two
    /// searches. `now` is a time of `CLOCK_MONOTONIC`, as are the times of the handshakes.
    pub fn find(
        &mut self,
        now: Duration,
        replicator: &Replicator,
        (connections, handshakes): (Entries<'_, Connection>, Entries<'_, HalfOpen>),
        known: impl Iterator<Item = Client>,
    ) -> Vec<Client> {
        let is_due = |at: Duration| now >= at + SEARCH_INTERVAL;
        if !self.searched_at.is_none_or(is_due) {
            return Vec::new();
        }
        self.searched_at = Some(now);
        let client = |key: &ConnectionKey| (key.service, key.client());
        let mut present: HashSet<Client> = connections.iter().map(|(key, _)| client(key)).collect();
        for (key, handshake) in handshakes {
            if now < Duration::from_nanos(handshake.since_ns) + HANDSHAKE_MAX {
                present.insert(client(key));
            } else if let Err(error) = replicator.half_open.remove(key) {
                tracing::debug!(%error, "a handshake that was given up has gone");
            }
        }
        self.find_absent(&present, known)
    }

    fn find_absent(
        &mut self,
        present: &HashSet<Client>,
        known: impl Iterator<Item = Client>,
    ) -> Vec<Client> {
        let absent: HashSet<Client> = known.filter(|client| !present.contains(client)).collect();
        let before = std::mem::replace(&mut self.absent, absent);
        before.intersection(&self.absent).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_is_given_up_when_two_searches_do_not_find_it() {
        let client = |port| (0, SocketAddr::from(([192, 0, 2, 1], port)));
        let (one, other) = (client(1), client(2));
        let mut handshakes = AbandonedHandshakes::default();
        let mut find = |present: &[Client]| {
            let present = present.iter().copied().collect();
            handshakes.find_absent(&present, [one, other].into_iter())
        };
        assert_eq!(find(&[one, other]), []);
        assert_eq!(find(&[other]), []);
        assert_eq!(find(&[one]), []);
        assert_eq!(find(&[one]), [other]);
    }
}
