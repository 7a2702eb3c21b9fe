//! Snapshots of a process's connections, taken without stopping the process, and the part not yet sent to the acceptor.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;

use holdfast_bpf::Error;
use holdfast_sys::process::files::image::FileId;
use holdfast_sys::process::sockets::{SocketState, Told};
use holdfast_sys::tcp_repair::TcpDynamic;

use crate::dataplane::{Followed, Look, Sight};

/// Snapshots of followed connections.
pub(super) struct Sights {
    followed: Followed,
    /// Connections followed since before the last reading of their options, so that no option change is missed.
    sure: BTreeSet<FileId>,
    /// Connections followed since that reading.
    young: BTreeSet<FileId>,
    told: Told,
    /// Latest snapshots that are not sent yet and that suffice.
    untold: BTreeMap<FileId, Untold>,
    /// Connections whose last snapshot does not suffice, so that the socket has to be asked.
    asked: BTreeSet<FileId>,
    /// Time of the last snapshot in µs.
    at_us: u64,
}

struct Untold {
    at_us: u64,
    state: TcpDynamic,
    /// Bytes that the program has not read.
    unread: u32,
}

impl Untold {
    /// Returns the state with its timestamp clock advanced to another time.
    fn at(mut self, at_us: u64) -> TcpDynamic {
        self.state.advance(at_us.saturating_sub(self.at_us));
        self.state
    }
}

impl Sights {
    /// Starts without connections.
    pub(super) fn new() -> Result<Sights, Error> {
        Ok(Sights {
            followed: Followed::new()?,
            sure: BTreeSet::new(),
            young: BTreeSet::new(),
            told: Told::default(),
            untold: BTreeMap::new(),
            asked: BTreeSet::new(),
            at_us: 0,
        })
    }

    /// Must be called before options are read again.
    pub(super) fn options_are_read(&mut self) {
        self.sure.append(&mut self.young);
    }

    /// Starts following a connection.
    pub(super) fn follow(&mut self, id: FileId, socket: BorrowedFd<'_>) -> Result<(), Error> {
        self.followed.follow(id, socket)?;
        self.young.insert(id);
        Ok(())
    }

    /// Returns true if connections with known options are followed.
    pub(super) fn follows_some(&self) -> bool {
        !self.sure.is_empty()
    }

    /// Snapshots all connections of which these processes have descriptors. `last` means that they are stopped and none
    /// may be missed.
    pub(super) fn look(&mut self, pids: &[i32], last: bool) -> Result<(), Error> {
        let Look {
            at_us,
            changed,
            unmet,
        } = self.followed.look(pids, last)?;
        self.at_us = at_us;
        for (id, sight) in changed {
            self.asked.remove(&id);
            let (state, unread) = match sight {
                Sight::Whole(state) => (state, 0),
                Sight::Unread(state, unread) => (state, unread),
                Sight::Little => {
                    self.untold.remove(&id);
                    self.asked.insert(id);
                    continue;
                }
            };
            let untold = Untold {
                at_us,
                state,
                unread,
            };
            self.untold.insert(id, untold);
        }
        for id in unmet {
            self.untold.remove(&id);
            self.asked.insert(id);
        }
        Ok(())
    }

    /// Returns the time of the last snapshot, by this host's monotonic clock.
    pub(super) fn at_us(&self) -> u64 {
        self.at_us
    }

    /// Returns unsent states of complete snapshots: of `all` connections, or only of connections with known options.
    pub(super) fn tell(&mut self, all: bool) -> BTreeMap<FileId, SocketState> {
        let seen = self.take(|id, untold, sure| untold.unread == 0 && (all || sure.contains(id)));
        let seen = seen.into_iter().map(|(id, state, _)| (id, state));
        self.told.changes(seen.collect())
    }

    /// Returns the connections with known options whose snapshots lack only unread data, with its length in bytes.
    pub(super) fn unread(&mut self) -> Vec<(FileId, TcpDynamic, u32)> {
        self.take(|id, untold, sure| untold.unread > 0 && sure.contains(id))
    }

    /// Takes the selected unsent states, with their clocks advanced to the last snapshot.
    fn take(
        &mut self,
        is_wanted: impl Fn(&FileId, &Untold, &BTreeSet<FileId>) -> bool,
    ) -> Vec<(FileId, TcpDynamic, u32)> {
        let (mut wanted, mut rest) = (Vec::new(), BTreeMap::new());
        for (id, untold) in std::mem::take(&mut self.untold) {
            if is_wanted(&id, &untold, &self.sure) {
                let unread = untold.unread;
                wanted.push((id, untold.at(self.at_us), unread));
            } else {
                rest.insert(id, untold);
            }
        }
        self.untold = rest;
        wanted
    }

    /// Returns the connections that presumably need no extraction in the freeze.
    pub(super) fn sure(&self) -> &BTreeSet<FileId> {
        &self.sure
    }

    /// Returns the connections that must be extracted after all, or hold unread data.
    pub(super) fn unseen(&self) -> Vec<FileId> {
        let unread = self.untold.iter().filter(|(_, untold)| untold.unread > 0);
        let unread = unread.map(|(id, _)| *id);
        unread.chain(self.asked.iter().copied()).collect()
    }

    /// Forgets connections that are gone or have changed.
    pub(super) fn forget(&mut self, ids: &BTreeSet<FileId>) {
        self.told.forget(ids);
        for id in ids {
            self.followed.forget(*id);
            self.sure.remove(id);
            self.young.remove(id);
            self.untold.remove(id);
            self.asked.remove(id);
        }
    }
}
