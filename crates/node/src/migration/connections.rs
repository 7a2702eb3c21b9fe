//! The sockets of a process on its way from here, in the three ways of paper 002 section V-B: what of them is followed while
//! the program uses them, and what is sent when it stands still.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use holdfast_sys::priority::Hurry;
use holdfast_sys::process::donor::{Described, Describer, StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::files::Copier;
use holdfast_sys::process::files::image::FileId;
use holdfast_sys::process::image::Descriptors as Found;
use holdfast_sys::process::sockets::{SocketState, SocketStatic, Told};
use holdfast_sys::tcp_repair::TcpDynamic;
use holdfast_wire::migration::SocketStrategy;
use serde::{Deserialize, Serialize};

use super::pieces::{Kind, Outgoing};
use crate::dataplane::{Descriptors, Followed, Look, monotonic_ns};

/// Threads that read the state of sockets.
const EXTRACTORS: usize = 1;

/// States of sockets as they go to the acceptor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct States {
    /// When, by the donor's clock that does not jump.
    pub(super) at_us: u64,
    pub(super) states: BTreeMap<FileId, SocketState>,
}

/// How a process moves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ways {
    pub(super) sockets: SocketStrategy,
    /// The acceptor is told of no connection before its packets wait there: where every node gets every packet, a connection
    /// that is restored takes what comes.
    pub(super) late: bool,
    /// It stays, with its connections: where it has some, the copy has some that were reset.
    pub(super) copy: bool,
    /// Checksums follow all else.
    pub(super) verify: bool,
    /// Its freeze goes ahead of ordinary threads.
    pub(super) hurries: bool,
}

/// See the module's text.
pub(super) struct Connections {
    ways: Ways,
    descriptors: Arc<Descriptors>,
    /// None where the kernel does not take it, and for the ways that do not look.
    followed: Option<Followed>,
    copier: Copier,
    /// Followed since before their options were read last, so that no change of these is missed.
    sure: BTreeSet<FileId>,
    /// Followed since then.
    young: BTreeSet<FileId>,
    told: Told,
    /// What the last look saw of connections that stand still.
    last: BTreeMap<FileId, TcpDynamic>,
    last_us: u64,
}

impl Connections {
    /// None is followed yet.
    pub(super) fn new(ways: Ways) -> Connections {
        let followed = match ways.sockets {
            SocketStrategy::Incremental if !ways.copy => Followed::new()
                .inspect_err(|error| {
                    tracing::warn!(%error, "connections cannot be followed: freezes take longer");
                })
                .ok(),
            _ => None,
        };
        Connections {
            ways,
            descriptors: Arc::new(Descriptors::new()),
            followed,
            copier: Copier::default(),
            sure: BTreeSet::new(),
            young: BTreeSet::new(),
            told: Told::default(),
            last: BTreeMap::new(),
            last_us: 0,
        }
    }

    /// What the tree will have at the acceptor of what it has here.
    pub(super) fn there(&self, mut found: Found) -> Found {
        if self.ways.copy {
            let sockets = found.sockets.into_iter();
            let of_a_copy = sockets.map(|(id, socket)| (id, socket.of_a_copy()));
            found.sockets = of_a_copy.collect();
        }
        found
    }

    /// Options are about to be read again.
    pub(super) fn options_are_read(&mut self) {
        self.sure.append(&mut self.young);
    }

    /// Follows what a round found, and gives what the acceptor does not know yet.
    pub(super) fn look(
        &mut self,
        tracker: &Tracker,
        found: &Found,
    ) -> Result<Option<States>, holdfast_bpf::Error> {
        self.forget(found);
        let Some(followed) = &mut self.followed else {
            return Ok(None);
        };
        let fresh = tracker.sockets().filter(|(id, _, fixed)| {
            found.sockets.contains_key(id) && matches!(fixed, SocketStatic::Connection(_))
        });
        for (id, place, _) in fresh {
            // What was closed meanwhile is gone with the next round.
            if let Ok(copy) = self.copier.copy(place) {
                followed.follow(id, copy.as_fd())?;
                self.young.insert(id);
            }
        }
        let mut look = followed.look()?;
        if self.ways.late {
            return Ok(None);
        }
        let known = |id: &FileId| self.sure.contains(id) || self.young.contains(id);
        look.states.retain(|id, _| known(id));
        Ok(self.untold(look))
    }

    /// What the acceptor does not know of connections that were followed before: packets of them come no more, so that what is
    /// seen now is all but what they will be when their program stands still.
    pub(super) fn catch_up(&mut self) -> Option<States> {
        let look = self.look_at_sure()?;
        self.untold(look)
    }

    /// Those whose options are known are seen; none where that cannot be.
    fn look_at_sure(&mut self) -> Option<Look> {
        let mut look = self.followed.as_mut()?.look().ok()?;
        look.states.retain(|id, _| self.sure.contains(id));
        Some(look)
    }

    /// What the acceptor does not know of what was seen, if there is anything.
    fn untold(&mut self, look: Look) -> Option<States> {
        let (at_us, states) = (look.at_us, self.told.changes(look.states));
        (!states.is_empty()).then_some(States { at_us, states })
    }

    /// Starts the thread that reads descriptors in a freeze, in the network namespace of the caller.
    pub(super) fn reader(&self) -> Result<Reader, String> {
        let descriptors = Arc::clone(&self.descriptors);
        // Connections whose state will be seen, as far as can be told before.
        let expected = self.sure.clone();
        Reader::start(self.ways.hurries, move |describer| {
            let Some(listings) = descriptors.list(describer.pids()) else {
                return Ok(None);
            };
            describer.read(listings, &expected).map(Some)
        })
    }

    /// Sees connections of a tree that stands still, when nothing comes to them any more.
    pub(super) fn see(&mut self) {
        let nothing = || Look {
            at_us: monotonic_ns() / 1000,
            ..Look::default()
        };
        let look = self.look_at_sure().unwrap_or_else(nothing);
        (self.last_us, self.last) = (look.at_us, look.states);
    }

    /// What changed of the descriptors of a tree that stands still, and of its connections, which were seen.
    pub(super) fn stopped(
        &mut self,
        stopped: &mut StoppedTree,
        described: Option<Described>,
    ) -> Result<Found, Error> {
        let found = match described {
            Some(described) => {
                let seen = self.last.keys().copied().collect();
                stopped.described(described, &seen)?
            }
            None => {
                self.last.clear();
                stopped.descriptors()?
            }
        };
        self.forget(&found);
        Ok(self.there(found))
    }

    /// Sends what the acceptor does not know of the sockets of a tree that stands still.
    pub(super) fn send(
        &mut self,
        stopped: &mut StoppedTree,
        outgoing: &mut Outgoing,
    ) -> Result<(), String> {
        let at_us = self.last_us;
        let mut states = self.told.changes(std::mem::take(&mut self.last));
        if self.ways.copy {
            let state =
                |(id, _, socket): (_, _, &SocketStatic)| Some((id, socket.state_of_a_copy()?));
            states.extend(stopped.sockets().filter_map(state));
        } else if self.ways.sockets == SocketStrategy::Iterative {
            let ids: Vec<FileId> = stopped.sockets().map(|(id, ..)| id).collect();
            for id in ids {
                let states = stopped.extract_one(id).map_err(|error| error.to_string())?;
                outgoing.send(Kind::Sockets, encode(&States { at_us, states })?)?;
                outgoing.taken()?;
            }
        } else {
            let seen = states.len();
            let extracted = stopped.extract(EXTRACTORS);
            states.extend(extracted.map_err(|error| error.to_string())?);
            tracing::debug!(seen, extracted = states.len() - seen, "states of sockets");
        }
        outgoing.send(Kind::LastSockets, encode(&States { at_us, states })?)
    }

    /// What is gone, or another than before, is not known any more.
    fn forget(&mut self, found: &Found) {
        let ids: BTreeSet<FileId> = found
            .gone
            .iter()
            .chain(found.sockets.keys())
            .copied()
            .collect();
        self.told.forget(&ids);
        for id in &ids {
            self.sure.remove(id);
            self.young.remove(id);
            self.last.remove(id);
        }
    }
}

/// What came of reading; none where descriptors cannot be listed many at once.
type Read = Result<Option<Described>, Error>;

/// The thread that reads descriptors in a freeze. It waits for one, so that it needs no processor that others have then.
pub(super) struct Reader {
    describers: Sender<Describer>,
    found: Receiver<Read>,
}

impl Reader {
    fn start(
        hurries: bool,
        read: impl Fn(&Describer) -> Read + Send + 'static,
    ) -> Result<Reader, String> {
        let (describers, inbox) = mpsc::channel::<Describer>();
        let (outbox, found) = mpsc::channel();
        let run = move || {
            let _hurry = hurries.then(Hurry::begin);
            while let Ok(describer) = inbox.recv() {
                if outbox.send(read(&describer)).is_err() {
                    return;
                }
            }
        };
        let named = std::thread::Builder::new().name("read".to_owned());
        let started = named.spawn(run);
        started.map_err(|error| format!("no thread for it: {error}"))?;
        Ok(Reader { describers, found })
    }

    /// Has it read a tree that stands still, see [`Reader::found`].
    pub(super) fn begin(&self, describer: Describer) {
        // Where it has ended nothing is found.
        let _ = self.describers.send(describer);
    }

    /// What it has found.
    pub(super) fn found(&self) -> Read {
        let found = self.found.recv();
        found.unwrap_or_else(|_| Err(Error::Image("descriptors that nobody read")))
    }
}

/// As it is sent.
pub(super) fn encode(states: &States) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(states).map_err(|error| error.to_string())
}

/// What was sent.
pub(super) fn decode(message: &[u8]) -> Result<States, String> {
    postcard::from_bytes(message)
        .map_err(|error| format!("the state of sockets cannot be read: {error}"))
}
