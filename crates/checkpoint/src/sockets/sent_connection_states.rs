//! States of connections that the donor sends while the programs use the connections.

use super::SocketState;
use crate::files::image::FileId;
use holdfast_tcp_repair::TcpDynamicState;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Way in which the connections of a tree move (paper 002 section V-B).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnectionTransferMode {
    /// In the freeze, one after the other: each connection is read, sent and restored before the next.
    Iterative,
    /// In the freeze, all together in one message.
    Collective,
    /// While the tree runs, and again after changes; in the freeze only the latest changes, in one message.
    #[default]
    Incremental,
}

/// States of connections that the acceptor has.
#[derive(Debug, Default)]
pub struct SentConnectionStates {
    states: BTreeMap<FileId, TcpDynamicState>,
}

impl SentConnectionStates {
    /// Returns the states in `current` that the acceptor lacks, or has differently. The caller must send them: they count
    /// as sent.
    pub fn take_changes(
        &mut self,
        current: BTreeMap<FileId, TcpDynamicState>,
    ) -> BTreeMap<FileId, SocketState> {
        let mut changes = BTreeMap::new();
        for (id, state) in current {
            let sent = self.states.get(&id);
            if sent.is_some_and(|known| is_same_except_clock(known, &state)) {
                continue;
            }
            changes.insert(id, SocketState::Connection(Box::new(state.clone())));
            self.states.insert(id, state);
        }
        changes
    }

    /// Forgets sockets that the acceptor has dropped, or has created anew.
    pub fn forget(&mut self, ids: &BTreeSet<FileId>) {
        self.states.retain(|id, _| !ids.contains(id));
    }
}

/// Returns true if nothing was sent or received between two states, so that only the clock has advanced.
fn is_same_except_clock(before: &TcpDynamicState, now: &TcpDynamicState) -> bool {
    let timeless = |state: &TcpDynamicState| TcpDynamicState {
        timestamp: 0,
        ..state.clone()
    };
    before.rcv_nxt == now.rcv_nxt
        && before.write_seq == now.write_seq
        && timeless(before) == timeless(now)
}
