//! The sockets of a process on its way from here, in the three ways of paper 002 section V-B: what of them is followed while
//! the program uses them, and what is sent when it stands still.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use holdfast_sys::priority::Hurry;
use holdfast_sys::process::donor::{Described, Describer, StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::files::Copier;
use holdfast_sys::process::files::image::FileId;
use holdfast_sys::process::image::Descriptors as Found;
use holdfast_sys::process::sockets::{SocketState, SocketStatic};
use holdfast_wire::migration::SocketStrategy;
use holdfast_wire::{Flow, Protocol};
use serde::{Deserialize, Serialize};

use super::pieces::{Kind, Outgoing};
use super::sights::Sights;
use crate::dataplane::shared_ports::{self, Member, Shared};
use crate::dataplane::{Descriptors, monotonic_ns, timeouts};

/// Threads that read the state of sockets.
const EXTRACTORS: usize = 1;

/// States of sockets as they go to the acceptor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct States {
    /// When, by the donor's clock that does not jump.
    pub(super) at_us: u64,
    pub(super) states: BTreeMap<FileId, SocketState>,
    /// The datagram flows of UDP sockets that share a port.
    pub(super) clients: BTreeMap<FileId, Vec<Flow>>,
    /// Instructions of classic programs by which groups of sockets choose, each of one socket of its group.
    pub(super) programs: BTreeMap<FileId, Vec<u64>>,
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
    /// The acceptor is asked whether it takes the process, and no more.
    pub(super) rehearsal: bool,
    /// Its freeze goes ahead of ordinary threads.
    pub(super) hurries: bool,
}

/// See the module's text.
pub(super) struct Connections {
    ways: Ways,
    descriptors: Arc<Descriptors>,
    /// None where the kernel does not take it, and for the ways that do not look.
    sights: Option<Sights>,
    copier: Copier,
    /// Processes that have descriptors, as they were found last.
    pids: Vec<i32>,
    /// Of which the freeze reads nothing but what is seen, as far as the last round could tell.
    expected: Arc<BTreeSet<FileId>>,
}

impl Connections {
    /// None is followed yet.
    pub(super) fn new(ways: Ways) -> Connections {
        // Connections that came a moment ago are to be read as they are to be.
        timeouts::give_back();
        let sights = match ways.sockets {
            SocketStrategy::Incremental if !ways.copy => Sights::new()
                .inspect_err(|error| {
                    tracing::warn!(%error, "connections cannot be followed: freezes take longer");
                })
                .ok(),
            _ => None,
        };
        Connections {
            ways,
            descriptors: Arc::new(Descriptors::new()),
            sights,
            copier: Copier::default(),
            pids: Vec::new(),
            expected: Arc::default(),
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
        self.sights.iter_mut().for_each(Sights::options_are_read);
    }

    /// Follows what a round found, and gives what the acceptor does not know yet.
    pub(super) fn look(
        &mut self,
        tracker: &Tracker,
        found: &Found,
    ) -> Result<Option<States>, holdfast_bpf::Error> {
        if found.sockets.values().any(shares_port) {
            // Not in the freeze.
            shared_ports::load();
        }
        self.forget(found);
        let Some(sights) = &mut self.sights else {
            return Ok(None);
        };
        let fresh = tracker.sockets().filter(|(id, _, fixed)| {
            found.sockets.contains_key(id) && matches!(fixed, SocketStatic::Connection(_))
        });
        for (id, place, _) in fresh {
            // What was closed meanwhile is gone with the next round.
            if let Ok(copy) = self.copier.copy(place) {
                sights.follow(id, copy.as_fd())?;
            }
        }
        self.pids = tracker.pids();
        sights.look(&self.pids, false)?;
        Ok(match self.ways.late {
            true => None,
            false => untold(sights, true),
        })
    }

    /// What the acceptor does not know of connections that were followed before: packets of them come no more, so that what is
    /// seen now is all but what they will be when their program stands still.
    pub(super) fn catch_up(&mut self) -> Option<States> {
        self.look_again(false);
        untold(self.sights.as_mut()?, false)
    }

    /// Whether connections are followed.
    pub(super) fn follows_some(&self) -> bool {
        self.sights.as_ref().is_some_and(Sights::follows_some)
    }

    /// Looks again, and counts connections that would have to be asked; none where they are not followed.
    pub(super) fn unseen(&mut self) -> Option<usize> {
        self.look_again(false);
        Some(self.sights.as_ref()?.unseen().len())
    }

    /// What the acceptor has not been told of what was seen, of connections whose options are known.
    pub(super) fn untold(&mut self) -> Option<States> {
        untold(self.sights.as_mut()?, false)
    }

    /// Where that cannot be, connections have to be asked, all of them.
    fn look_again(&mut self, last: bool) {
        let pids = &self.pids;
        let looked = self.sights.as_mut().map(|sights| sights.look(pids, last));
        if let Some(Err(error)) = looked {
            tracing::warn!(%error, "connections are not seen any more: the freeze takes longer");
            self.sights = None;
        }
    }

    /// Makes ready what the freeze will read, after a look at the tree.
    pub(super) fn expect(&mut self, tracker: &Tracker) {
        let expected = self.sights.as_ref().map(Sights::sure);
        self.expected = Arc::new(expected.cloned().unwrap_or_default());
        let listings = self.descriptors.list(&tracker.pids());
        let ready = listings.is_some_and(|listings| tracker.expect(listings, &self.expected));
        tracing::debug!(ready, "descriptors are expected to stay");
    }

    /// Starts the thread that reads descriptors in a freeze, in the network namespace of the caller.
    pub(super) fn reader(&self) -> Result<Reader, String> {
        let descriptors = Arc::clone(&self.descriptors);
        let expected = Arc::clone(&self.expected);
        Reader::start(self.ways.hurries, move |describer| {
            let Some(listings) = descriptors.list(describer.pids()) else {
                return Ok(None);
            };
            describer.read(listings, &expected).map(Some)
        })
    }

    /// Sees connections of a tree that stands still, when nothing comes to them any more.
    pub(super) fn see(&mut self, stopped: &StoppedTree) {
        self.pids = stopped.pids();
        self.look_again(true);
    }

    /// What changed of the descriptors of a tree that stands still, and of its connections, which were seen.
    pub(super) fn stopped(
        &mut self,
        stopped: &mut StoppedTree,
        described: Option<Described>,
    ) -> Result<Found, Error> {
        let found = match described {
            Some(described) => {
                let unseen = match &self.sights {
                    Some(sights) => sights.unseen(),
                    None => self.expected.iter().copied().collect(),
                };
                stopped.described(described, &unseen)?
            }
            None => {
                self.sights = None;
                stopped.descriptors()?
            }
        };
        self.forget(&found);
        Ok(self.there(found))
    }

    /// Sends what the acceptor does not know of the sockets of a tree that stands still, whose flows are these.
    pub(super) fn send<'a>(
        &mut self,
        stopped: &mut StoppedTree,
        flows: impl Iterator<Item = &'a Flow>,
        outgoing: &mut Outgoing,
    ) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let at_us = match &self.sights {
            Some(sights) => sights.at_us(),
            None => monotonic_ns() / 1000,
        };
        let mut states = BTreeMap::new();
        let shared = match self.ways.copy {
            true => Shared::default(),
            false => shared_ports::read(members(stopped.sockets()), &self.pids, flows)?,
        };
        if self.ways.copy {
            let state =
                |(id, _, socket): (_, _, &SocketStatic)| Some((id, socket.state_of_a_copy()?));
            states.extend(stopped.sockets().filter_map(state));
        } else if self.ways.sockets == SocketStrategy::Iterative {
            let ids: Vec<FileId> = stopped.sockets().map(|(id, ..)| id).collect();
            for id in ids {
                let states = stopped.extract_one(id).map_err(text)?;
                let one = States {
                    at_us,
                    states,
                    ..States::default()
                };
                outgoing.send(Kind::Sockets, encode(&one)?)?;
                outgoing.taken()?;
            }
        } else {
            states = self
                .sights
                .as_mut()
                .map_or(states, |sights| seen(sights, stopped));
            let seen = states.len();
            let others = stopped.extract(EXTRACTORS, |id| states.contains_key(&id));
            states.extend(others.map_err(text)?);
            tracing::debug!(seen, extracted = states.len() - seen, "states of sockets");
        }
        let last = States {
            at_us,
            states,
            clients: shared.clients,
            programs: shared.programs,
        };
        outgoing.send(Kind::LastSockets, encode(&last)?)
    }

    /// What is gone, or another than before, is not known any more.
    fn forget(&mut self, found: &Found) {
        let ids = found.gone.iter().chain(found.sockets.keys());
        let ids = ids.copied().collect();
        self.sights
            .iter_mut()
            .for_each(|sights| sights.forget(&ids));
    }
}

/// What the acceptor does not know, if there is anything: of `all` connections, or of those whose options are known.
fn untold(sights: &mut Sights, all: bool) -> Option<States> {
    let states = sights.tell(all);
    let at_us = sights.at_us();
    (!states.is_empty()).then_some(States {
        at_us,
        states,
        ..States::default()
    })
}

/// Whether others may have the same port as a listener or UDP socket.
pub(super) fn shares_port(fixed: &SocketStatic) -> bool {
    port_of(fixed).is_some()
}

/// What a socket is bound to that others may be bound to beside it.
fn port_of(fixed: &SocketStatic) -> Option<(Protocol, SocketAddr)> {
    match fixed {
        SocketStatic::Datagrams(fixed) if fixed.may_share_port() => {
            Some((Protocol::Udp, fixed.local))
        }
        SocketStatic::Unconnected(fixed) if fixed.options.reuse_port => {
            Some((Protocol::Tcp, fixed.local?))
        }
        _ => None,
    }
}

/// The sockets of which that is so.
pub(super) fn members<'a>(
    sockets: impl Iterator<Item = (FileId, BorrowedFd<'a>, &'a SocketStatic)>,
) -> Vec<Member<'a, FileId>> {
    let member = |(id, socket, fixed): (_, _, &SocketStatic)| {
        let (protocol, local) = port_of(fixed)?;
        Some(Member {
            id,
            socket,
            protocol,
            local,
        })
    };
    sockets.filter_map(member).collect()
}

/// The states of connections that were seen when they stood still, with what was not read; the acceptor knows others.
fn seen(sights: &mut Sights, stopped: &StoppedTree) -> BTreeMap<FileId, SocketState> {
    let mut states = sights.tell(false);
    for (id, mut state, length) in sights.unread() {
        if let Some(unread) = stopped.unread(id, length) {
            state.unread = unread;
            states.insert(id, SocketState::Connection(Box::new(state)));
        }
    }
    states
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
