//! Connections that have ended. Their entries remain for a while, for the client's repeated last segments.

use std::collections::HashMap;
use std::time::Duration;

use holdfast_bpf::replication::Replicator;
use holdfast_bpf::replication::shared_with_c::{CONNECTION_CLOSED, Connection, ConnectionKey};

/// Time for which the entry of an ended connection remains: TIME_WAIT of Linux.
const KEPT: Duration = Duration::from_secs(60);

/// Ended connections with the time at which they were first seen.
#[derive(Debug, Default)]
pub(super) struct ClosedConnections {
    since: HashMap<ConnectionKey, Duration>,
}

impl ClosedConnections {
    /// Removes the entries that have remained long enough. Returns the connections that have ended since the last call.
    pub fn update(
        &mut self,
        now: Duration,
        replicator: &Replicator,
        connections: &[(ConnectionKey, Connection)],
    ) -> Vec<ConnectionKey> {
        let mut since = HashMap::with_capacity(self.since.len());
        let mut ended = Vec::new();
        for (key, connection) in connections {
            if connection.flags & CONNECTION_CLOSED == 0 {
                continue;
            }
            match self.since.get(key) {
                Some(at) if now >= *at + KEPT => {
                    // The client may have opened the connection anew meanwhile.
                    let present = replicator.connections.get(key).ok().flatten();
                    let is_ended = present.is_some_and(|now| now.flags & CONNECTION_CLOSED != 0);
                    if is_ended && let Err(error) = replicator.forget(*key) {
                        tracing::warn!(%error, "cannot remove the entry of an ended connection");
                    }
                }
                Some(at) => drop(since.insert(*key, *at)),
                None => {
                    since.insert(*key, now);
                    ended.push(*key);
                }
            }
        }
        self.since = since;
        ended
    }
}
