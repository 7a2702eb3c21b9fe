//! Connections followed while their programs use them: what the acceptor has been told of each.

use super::SocketState;
use crate::process::files::image::FileId;
use crate::tcp_repair::TcpDynamic;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// How the connections of a tree move (paper 002 section V-B).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// In the freeze, one after the other: each is read, sent and restored before the next.
    Iterative,
    /// In the freeze, all together: one message.
    Collective,
    /// While the tree runs, and again as they change; in the freeze only what changed since, in one message.
    #[default]
    Incremental,
}

/// The states of connections that the acceptor has.
#[derive(Debug, Default)]
pub struct Told {
    states: BTreeMap<FileId, TcpDynamic>,
}

impl Told {
    /// Of what was seen now, that which the acceptor has not or has otherwise. It is to be told so: it counts as told.
    pub fn changes(&mut self, seen: BTreeMap<FileId, TcpDynamic>) -> BTreeMap<FileId, SocketState> {
        let mut changes = BTreeMap::new();
        for (id, state) in seen {
            let known = self.states.get(&id);
            if known.is_some_and(|known| is_same(known, &state)) {
                continue;
            }
            changes.insert(id, SocketState::Connection(Box::new(state.clone())));
            self.states.insert(id, state);
        }
        changes
    }

    /// Sockets that the acceptor has not any more, or has made anew.
    pub fn forget(&mut self, ids: &BTreeSet<FileId>) {
        self.states.retain(|id, _| !ids.contains(id));
    }
}

/// Whether nothing was sent or received in between: then only the clock went on.
fn is_same(before: &TcpDynamic, now: &TcpDynamic) -> bool {
    let timeless = |state: &TcpDynamic| TcpDynamic {
        timestamp: 0,
        ..state.clone()
    };
    before.rcv_nxt == now.rcv_nxt
        && before.write_seq == now.write_seq
        && timeless(before) == timeless(now)
}
