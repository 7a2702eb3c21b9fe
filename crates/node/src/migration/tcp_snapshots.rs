//! Snapshots of a process's connections, taken without stopping the process, and the part not yet sent to the acceptor.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;

use holdfast_bpf::Error;
use holdfast_checkpoint::files::image::FileId;
use holdfast_checkpoint::sockets::{SentConnectionStates, SocketState};
use holdfast_tcp_repair::TcpDynamicState;

use crate::dataplane::{ConnectionSnapshot, SnapshotResult, TcpObserver};

/// Snapshots of followed connections.
pub(super) struct TcpSnapshots {
    tracked: TcpObserver,
    /// Connections followed since before the last reading of their options, so that no option change is missed.
    known_options: BTreeSet<FileId>,
    /// Connections followed since that reading.
    new_connections: BTreeSet<FileId>,
    sent: SentConnectionStates,
    /// Latest snapshots that are not sent yet and that suffice.
    unsent: BTreeMap<FileId, UnsentSnapshot>,
    /// Connections whose last snapshot does not suffice, so that the socket has to be asked.
    insufficient: BTreeSet<FileId>,
    /// Time of the last snapshot in µs.
    at_us: u64,
}

struct UnsentSnapshot {
    at_us: u64,
    state: TcpDynamicState,
    /// Bytes that the program has not read.
    unread_bytes: u32,
}

impl UnsentSnapshot {
    /// Returns the state with its timestamp clock advanced to another time.
    fn advanced_to(mut self, at_us: u64) -> TcpDynamicState {
        self.state.advance_clock(at_us.saturating_sub(self.at_us));
        self.state
    }
}

impl TcpSnapshots {
    /// Starts the observer, without followed connections.
    pub(super) fn new() -> Result<TcpSnapshots, Error> {
        Ok(TcpSnapshots {
            tracked: TcpObserver::new()?,
            known_options: BTreeSet::new(),
            new_connections: BTreeSet::new(),
            sent: SentConnectionStates::default(),
            unsent: BTreeMap::new(),
            insufficient: BTreeSet::new(),
            at_us: 0,
        })
    }

    /// Must be called before options are read again.
    pub(super) fn before_options_read(&mut self) {
        self.known_options.append(&mut self.new_connections);
    }

    /// Starts following a connection.
    pub(super) fn track(&mut self, id: FileId, socket: BorrowedFd<'_>) -> Result<(), Error> {
        self.tracked.add(id, socket)?;
        self.new_connections.insert(id);
        Ok(())
    }

    /// Returns true if connections with known options are followed.
    pub(super) fn has_tracked(&self) -> bool {
        !self.known_options.is_empty()
    }

    /// Snapshots all connections of which these processes have descriptors. `last` means that they are stopped and none
    /// may be missed.
    pub(super) fn snapshot_all(&mut self, pids: &[i32], last: bool) -> Result<(), Error> {
        let SnapshotResult {
            taken_at_us: at_us,
            changed,
            not_visited: unmet,
        } = self.tracked.snapshot(pids, last)?;
        self.at_us = at_us;
        for (id, snapshot) in changed {
            self.insufficient.remove(&id);
            let (state, unread_bytes) = match snapshot {
                ConnectionSnapshot::Complete(state) => (state, 0),
                ConnectionSnapshot::WithUnread(state, unread) => (state, unread),
                ConnectionSnapshot::Partial => {
                    self.unsent.remove(&id);
                    self.insufficient.insert(id);
                    continue;
                }
            };
            let entry = UnsentSnapshot {
                at_us,
                state,
                unread_bytes,
            };
            self.unsent.insert(id, entry);
        }
        for id in unmet {
            self.unsent.remove(&id);
            self.insufficient.insert(id);
        }
        Ok(())
    }

    /// Returns the time of the last snapshot, by this host's monotonic clock.
    pub(super) fn at_us(&self) -> u64 {
        self.at_us
    }

    /// Returns unsent states of complete snapshots: of `all` connections, or only of connections with known options.
    pub(super) fn take_complete(&mut self, all: bool) -> BTreeMap<FileId, SocketState> {
        let complete = self.take_selected(|id, untold, sure| {
            untold.unread_bytes == 0 && (all || sure.contains(id))
        });
        let complete = complete.into_iter().map(|(id, state, _)| (id, state));
        self.sent.take_changes(complete.collect())
    }

    /// Returns the connections with known options whose snapshots lack only unread data, with its length in bytes.
    pub(super) fn take_with_unread_data(&mut self) -> Vec<(FileId, TcpDynamicState, u32)> {
        self.take_selected(|id, untold, sure| untold.unread_bytes > 0 && sure.contains(id))
    }

    /// Takes the selected unsent states, with their clocks advanced to the last snapshot.
    fn take_selected(
        &mut self,
        is_selected: impl Fn(&FileId, &UnsentSnapshot, &BTreeSet<FileId>) -> bool,
    ) -> Vec<(FileId, TcpDynamicState, u32)> {
        let (mut selected, mut remaining) = (Vec::new(), BTreeMap::new());
        for (id, entry) in std::mem::take(&mut self.unsent) {
            if is_selected(&id, &entry, &self.known_options) {
                let unread = entry.unread_bytes;
                selected.push((id, entry.advanced_to(self.at_us), unread));
            } else {
                remaining.insert(id, entry);
            }
        }
        self.unsent = remaining;
        selected
    }

    /// Returns the connections that presumably need no extraction in the freeze.
    pub(super) fn with_known_options(&self) -> &BTreeSet<FileId> {
        &self.known_options
    }

    /// Returns the connections that must be extracted after all, or hold unread data.
    pub(super) fn needing_extraction(&self) -> Vec<FileId> {
        let unread = self
            .unsent
            .iter()
            .filter(|(_, untold)| untold.unread_bytes > 0);
        let unread = unread.map(|(id, _)| *id);
        unread.chain(self.insufficient.iter().copied()).collect()
    }

    /// Forgets connections that are gone or have changed.
    pub(super) fn forget(&mut self, ids: &BTreeSet<FileId>) {
        self.sent.forget(ids);
        for id in ids {
            self.tracked.remove(*id);
            self.known_options.remove(id);
            self.new_connections.remove(id);
            self.unsent.remove(id);
            self.insufficient.remove(id);
        }
    }
}
