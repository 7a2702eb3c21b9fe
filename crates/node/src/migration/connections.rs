//! Sockets of a process moving away, in the three ways of paper 002 section V-B: followed while the program runs, and
//! sent when it is stopped.

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

/// Number of threads that extract the state of sockets.
const EXTRACTORS: usize = 1;

/// States of sockets as sent to the acceptor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct States {
    /// Time of the states in µs, by the donor's monotonic clock.
    pub(super) at_us: u64,
    pub(super) states: BTreeMap<FileId, SocketState>,
    /// Datagram flows of UDP sockets that share a port.
    pub(super) clients: BTreeMap<FileId, Vec<Flow>>,
    /// Instructions of the classic BPF programs by which groups of sockets select a member, each keyed by one socket of
    /// its group.
    pub(super) programs: BTreeMap<FileId, Vec<u64>>,
}

/// Options of a move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ways {
    pub(super) sockets: SocketStrategy,
    /// Tell the acceptor of no connection before its packets are held there. Needed if every node receives every
    /// packet, because a connection that is restored would accept its packets.
    pub(super) late: bool,
    /// Make a copy: the original stays with its connections, and the copy's are reset.
    pub(super) copy: bool,
    /// Send checksums after all other messages.
    pub(super) verify: bool,
    /// Ask the acceptor for its verdict only.
    pub(super) rehearsal: bool,
    /// Run the freeze at real-time priority.
    pub(super) hurries: bool,
}

/// Followed sockets of a process that moves away.
pub(super) struct Connections {
    ways: Ways,
    descriptors: Arc<Descriptors>,
    /// Snapshots of connections; `None` if the kernel does not support them or the move does not use them.
    sights: Option<Sights>,
    copier: Copier,
    /// Processes that have descriptors, as of the last round.
    pids: Vec<i32>,
    /// Sockets whose last snapshot should suffice in the freeze.
    expected: Arc<BTreeSet<FileId>>,
}

impl Connections {
    /// Starts without followed connections.
    pub(super) fn new(ways: Ways) -> Connections {
        // Timeouts capped after an earlier move are restored first, so that the options are read with their proper
        // values.
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

    /// Returns the descriptors as the tree will have them at the acceptor.
    pub(super) fn there(&self, mut found: Found) -> Found {
        if self.ways.copy {
            let sockets = found.sockets.into_iter();
            let of_a_copy = sockets.map(|(id, socket)| (id, socket.of_a_copy()));
            found.sockets = of_a_copy.collect();
        }
        found
    }

    /// Must be called before options are read again.
    pub(super) fn options_are_read(&mut self) {
        self.sights.iter_mut().for_each(Sights::options_are_read);
    }

    /// Follows connections found in a round. Returns the states that the acceptor does not know yet.
    pub(super) fn look(
        &mut self,
        tracker: &Tracker,
        found: &Found,
    ) -> Result<Option<States>, holdfast_bpf::Error> {
        if found.sockets.values().any(shares_port) {
            // Loaded before the freeze, which the loading would lengthen.
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
            // A connection that was closed meanwhile is reported as gone in the next round.
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

    /// Returns changed states of connections followed before this call. Called shortly before the freeze, so that the
    /// states are almost the final ones.
    pub(super) fn catch_up(&mut self) -> Option<States> {
        self.look_again(false);
        untold(self.sights.as_mut()?, false)
    }

    /// Returns true if connections are followed.
    pub(super) fn follows_some(&self) -> bool {
        self.sights.as_ref().is_some_and(Sights::follows_some)
    }

    /// Snapshots again and counts the connections that would have to be extracted; `None` if connections are not
    /// followed.
    pub(super) fn unseen(&mut self) -> Option<usize> {
        self.look_again(false);
        Some(self.sights.as_ref()?.unseen().len())
    }

    /// Returns the snapshots not yet sent to the acceptor, for connections whose options are known.
    pub(super) fn untold(&mut self) -> Option<States> {
        untold(self.sights.as_mut()?, false)
    }

    /// Snapshots again. If that fails, all connections have to be extracted from their sockets.
    fn look_again(&mut self, last: bool) {
        let pids = &self.pids;
        let looked = self.sights.as_mut().map(|sights| sights.look(pids, last));
        if let Some(Err(error)) = looked {
            tracing::warn!(%error, "connections are not seen any more: the freeze takes longer");
            self.sights = None;
        }
    }

    /// Prepares the descriptor listing for the freeze, after a round.
    pub(super) fn expect(&mut self, tracker: &Tracker) {
        let expected = self.sights.as_ref().map(Sights::sure);
        self.expected = Arc::new(expected.cloned().unwrap_or_default());
        let listings = self.descriptors.list(&tracker.pids());
        let ready = listings.is_some_and(|listings| tracker.expect(listings, &self.expected));
        tracing::debug!(ready, "descriptors are expected to stay");
    }

    /// Starts the thread that reads descriptors in a freeze, in the caller's network namespace.
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

    /// Snapshots the connections of a stopped tree, after the last packets have arrived.
    pub(super) fn see(&mut self, stopped: &StoppedTree) {
        self.pids = stopped.pids();
        self.look_again(true);
    }

    /// Returns the changed descriptors of a stopped tree. Uses the snapshots of its connections.
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

    /// Sends the socket states of a stopped tree that the acceptor does not know; `flows` are the tree's flows.
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

    /// Forgets descriptors that are gone or have changed.
    fn forget(&mut self, found: &Found) {
        let ids = found.gone.iter().chain(found.sockets.keys());
        let ids = ids.copied().collect();
        self.sights
            .iter_mut()
            .for_each(|sights| sights.forget(&ids));
    }
}

/// Returns the states not yet sent, if any: of `all` connections, or only of connections with known options.
fn untold(sights: &mut Sights, all: bool) -> Option<States> {
    let states = sights.tell(all);
    let at_us = sights.at_us();
    (!states.is_empty()).then_some(States {
        at_us,
        states,
        ..States::default()
    })
}

/// Returns true if other sockets may use the port of a listener or UDP socket.
pub(super) fn shares_port(fixed: &SocketStatic) -> bool {
    port_of(fixed).is_some()
}

/// Returns the protocol and address of a socket whose port others may share.
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

/// Returns the sockets that may share their port.
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

/// Returns the snapshots of connections in the stopped tree, with their unread data. The acceptor knows all other
/// states.
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

/// Result of reading descriptors; `None` if the kernel cannot list many descriptors at once.
type Read = Result<Option<Described>, Error>;

/// Thread that reads descriptors in a freeze. Started before the freeze, so that the freeze need not wait for a new
/// thread's processor.
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

    /// Starts reading a stopped tree; [`Reader::found`] returns the result.
    pub(super) fn begin(&self, describer: Describer) {
        // If the thread has ended, `found` returns an error.
        let _ = self.describers.send(describer);
    }

    /// Returns the result of reading.
    pub(super) fn found(&self) -> Read {
        let found = self.found.recv();
        found.unwrap_or_else(|_| Err(Error::Image("descriptors that nobody read")))
    }
}

/// Encodes states for sending.
pub(super) fn encode(states: &States) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(states).map_err(|error| error.to_string())
}

/// Decodes received states.
pub(super) fn decode(message: &[u8]) -> Result<States, String> {
    postcard::from_bytes(message)
        .map_err(|error| format!("the state of sockets cannot be read: {error}"))
}
