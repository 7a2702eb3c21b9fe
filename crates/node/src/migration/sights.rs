//! What is seen of a process's connections from beside them, and what of it the acceptor has not been told.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;

use holdfast_bpf::Error;
use holdfast_sys::process::files::image::FileId;
use holdfast_sys::process::sockets::{SocketState, Told};
use holdfast_sys::tcp_repair::TcpDynamic;

use crate::dataplane::{Followed, Look, Sight};

/// See the module's text.
pub(super) struct Sights {
    followed: Followed,
    /// Followed since before their options were read last, so that no change of these is missed.
    sure: BTreeSet<FileId>,
    /// Followed since then.
    young: BTreeSet<FileId>,
    told: Told,
    /// The last sight of a connection, unless it was told, or is such that the connection has to be asked.
    untold: BTreeMap<FileId, Untold>,
    /// The last sight showed too little.
    asked: BTreeSet<FileId>,
    /// Of the last look.
    at_us: u64,
}

struct Untold {
    at_us: u64,
    state: TcpDynamic,
    /// Bytes that the program has not read.
    unread: u32,
}

impl Untold {
    /// Its clock as it is at another time.
    fn at(mut self, at_us: u64) -> TcpDynamic {
        self.state.advance(at_us.saturating_sub(self.at_us));
        self.state
    }
}

impl Sights {
    /// None yet.
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

    /// Options are about to be read again.
    pub(super) fn options_are_read(&mut self) {
        self.sure.append(&mut self.young);
    }

    /// Follows a connection from here on.
    pub(super) fn follow(&mut self, id: FileId, socket: BorrowedFd<'_>) -> Result<(), Error> {
        self.followed.follow(id, socket)?;
        self.young.insert(id);
        Ok(())
    }

    /// Whether there are any.
    pub(super) fn follows_some(&self) -> bool {
        !self.sure.is_empty()
    }

    /// Looks at all of which these processes have descriptors; `last` when they stand still: then nothing may be missed.
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

    /// When the last look was, by the clock of this host that does not jump.
    pub(super) fn at_us(&self) -> u64 {
        self.at_us
    }

    /// What the acceptor is to be told of connections that are seen whole: of `all`, or of those whose options are known.
    pub(super) fn tell(&mut self, all: bool) -> BTreeMap<FileId, SocketState> {
        let seen = self.take(|id, untold, sure| untold.unread == 0 && (all || sure.contains(id)));
        let seen = seen.into_iter().map(|(id, state, _)| (id, state));
        self.told.changes(seen.collect())
    }

    /// Connections whose options are known and that are seen whole but for so many bytes that were not read.
    pub(super) fn unread(&mut self) -> Vec<(FileId, TcpDynamic, u32)> {
        self.take(|id, untold, sure| untold.unread > 0 && sure.contains(id))
    }

    /// Takes what was not told of some connections, with the clocks of the last look.
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

    /// Connections that need not be asked, as far as can be told before they stand still.
    pub(super) fn sure(&self) -> &BTreeSet<FileId> {
        &self.sure
    }

    /// Those of them that have to be asked after all, or hold what was not read.
    pub(super) fn unseen(&self) -> Vec<FileId> {
        let unread = self.untold.iter().filter(|(_, untold)| untold.unread > 0);
        let unread = unread.map(|(id, _)| *id);
        unread.chain(self.asked.iter().copied()).collect()
    }

    /// What is gone, or another than before, is not known any more.
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
