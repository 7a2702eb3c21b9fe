//! Sockets of a process moving away, in the three ways of paper 002 section V-B: followed while the program runs, and
//! sent when it is stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use holdfast_checkpoint::donor::{DescriptorReader, FrozenDescriptors, StoppedTree, TreeTracker};
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::files::DescriptorCopier;
use holdfast_checkpoint::files::image::FileId;
use holdfast_checkpoint::image::DescriptorUpdate as Found;
use holdfast_checkpoint::sockets::{SocketState, SocketStaticState};
use holdfast_sys::priority::RealtimeGuard;
use holdfast_wire::failure::{Failure, NodeFault, ProtocolViolation, Text};
use holdfast_wire::move_frames::SocketStrategy;
use holdfast_wire::{Flow, Protocol};
use serde::{Deserialize, Serialize};

use super::image_messages::{ImageSender, MessageKind};
use super::tcp_snapshots::TcpSnapshots;
use crate::dataplane::shared_ports::{self, SharedPortSocket, SharedPortState};
use crate::dataplane::{ProcessDescriptorLister, monotonic_ns, retransmission_timeouts};
use crate::failure_conversion::{IntoFailure, thread_failure};

/// Number of threads that extract the state of sockets.
const EXTRACT_THREADS: usize = 1;

/// States of sockets as sent to the acceptor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct SocketStates {
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
pub(super) struct MoveOptions {
    pub(super) sockets: SocketStrategy,
    /// Tell the acceptor of no connection before its packets are held there. Needed if every node receives every
    /// packet, because a connection that is restored would accept its packets.
    pub(super) after_hold: bool,
    /// Make a copy: the original stays with its connections, and the copy's are reset.
    pub(super) is_clone: bool,
    /// Send checksums after all other messages.
    pub(super) verify: bool,
    /// Ask the acceptor for its verdict only.
    pub(super) rehearsal: bool,
    /// Run the freeze at real-time priority.
    pub(super) realtime: bool,
}

/// Followed sockets of a process that moves away.
pub(super) struct MovingConnections {
    options: MoveOptions,
    descriptors: Arc<ProcessDescriptorLister>,
    /// Snapshots of connections; `None` if the kernel does not support them or the move does not use them.
    snapshots: Option<TcpSnapshots>,
    copier: DescriptorCopier,
    /// Processes that have descriptors, as of the last round.
    pids: Vec<i32>,
    /// Sockets whose last snapshot should suffice in the freeze.
    expected_sockets: Arc<BTreeSet<FileId>>,
}

impl MovingConnections {
    /// Starts without followed connections.
    pub(super) fn new(options: MoveOptions) -> MovingConnections {
        // Timeouts capped after an earlier move are restored first, so that the options are read with their proper
        // values.
        retransmission_timeouts::restore_recorded();
        let snapshots = match options.sockets {
            SocketStrategy::Incremental if !options.is_clone => TcpSnapshots::new()
                .inspect_err(|error| {
                    tracing::warn!(%error, "cannot track connections: freezes take longer");
                })
                .ok(),
            _ => None,
        };
        MovingConnections {
            options,
            descriptors: Arc::new(ProcessDescriptorLister::new()),
            snapshots,
            copier: DescriptorCopier::default(),
            pids: Vec::new(),
            expected_sockets: Arc::default(),
        }
    }

    /// Returns the descriptors as the tree will have them at the acceptor.
    pub(super) fn descriptors_at_acceptor(&self, mut found: Found) -> Found {
        if self.options.is_clone {
            let sockets = found.sockets.into_iter();
            let clone_sockets = sockets.map(|(id, socket)| (id, socket.for_clone()));
            found.sockets = clone_sockets.collect();
        }
        found
    }

    /// Must be called before options are read again.
    pub(super) fn before_options_read(&mut self) {
        self.snapshots
            .iter_mut()
            .for_each(TcpSnapshots::before_options_read);
    }

    /// Follows connections found in a round. Returns the states that the acceptor does not know yet.
    pub(super) fn snapshot_round(
        &mut self,
        tracker: &TreeTracker,
        found: &Found,
    ) -> Result<Option<SocketStates>, holdfast_bpf::Error> {
        if found.sockets.values().any(shares_port) {
            // Loaded before the freeze, which the loading would lengthen.
            shared_ports::load();
        }
        self.forget_changed(found);
        let Some(snapshots) = &mut self.snapshots else {
            return Ok(None);
        };
        let new_connections = tracker.sockets().filter(|(id, _, static_state)| {
            found.sockets.contains_key(id)
                && matches!(static_state, SocketStaticState::Connection(_))
        });
        for (id, place, _) in new_connections {
            // A connection that was closed meanwhile is reported as gone in the next round.
            if let Ok(copy) = self.copier.copy(place) {
                snapshots.track(id, copy.as_fd())?;
            }
        }
        self.pids = tracker.pids();
        snapshots.snapshot_all(&self.pids, false)?;
        Ok(match self.options.after_hold {
            true => None,
            false => take_unsent(snapshots, true),
        })
    }

    /// Returns changed states of connections followed before this call. Called shortly before the freeze, so that the
    /// states are almost the final ones.
    pub(super) fn changed_states(&mut self) -> Option<SocketStates> {
        self.snapshot_again(false);
        take_unsent(self.snapshots.as_mut()?, false)
    }

    /// Returns true if connections are followed.
    pub(super) fn has_tracked(&self) -> bool {
        self.snapshots
            .as_ref()
            .is_some_and(TcpSnapshots::has_tracked)
    }

    /// Snapshots again and counts the connections that would have to be extracted; `None` if connections are not
    /// followed.
    pub(super) fn count_unseen(&mut self) -> Option<usize> {
        self.snapshot_again(false);
        Some(self.snapshots.as_ref()?.needing_extraction().len())
    }

    /// Returns the snapshots not yet sent to the acceptor, for connections whose options are known.
    pub(super) fn unsent_states(&mut self) -> Option<SocketStates> {
        take_unsent(self.snapshots.as_mut()?, false)
    }

    /// Snapshots again. If that fails, all connections have to be extracted from their sockets.
    fn snapshot_again(&mut self, last: bool) {
        let pids = &self.pids;
        let result = self
            .snapshots
            .as_mut()
            .map(|snapshots| snapshots.snapshot_all(pids, last));
        if let Some(Err(error)) = result {
            tracing::warn!(%error, "cannot take snapshots of connections: the freeze takes longer");
            self.snapshots = None;
        }
    }

    /// Prepares the descriptor listing for the freeze, after a round.
    pub(super) fn prepare_listing(&mut self, tracker: &TreeTracker) {
        let expected = self
            .snapshots
            .as_ref()
            .map(TcpSnapshots::with_known_options);
        self.expected_sockets = Arc::new(expected.cloned().unwrap_or_default());
        let listings = self.descriptors.list(&tracker.pids());
        let is_ready = listings
            .is_some_and(|listings| tracker.prepare_freeze(listings, &self.expected_sockets));
        tracing::debug!(is_ready, "recorded the expected descriptors");
    }

    /// Starts the thread that reads descriptors in a freeze, in the caller's network namespace.
    pub(super) fn start_reader(&self) -> Result<DescriptorReaderThread, Failure> {
        let descriptors = Arc::clone(&self.descriptors);
        let expected = Arc::clone(&self.expected_sockets);
        DescriptorReaderThread::start(self.options.realtime, move |reader| {
            let Some(listings) = descriptors.list(reader.pids()) else {
                return Ok(None);
            };
            reader.read(listings, &expected).map(Some)
        })
    }

    /// Snapshots the connections of a stopped tree, after the last packets have arrived.
    pub(super) fn snapshot_stopped(&mut self, stopped: &StoppedTree) {
        self.pids = stopped.pids();
        self.snapshot_again(true);
    }

    /// Returns the changed descriptors of a stopped tree. Uses the snapshots of its connections.
    pub(super) fn stopped_descriptors(
        &mut self,
        stopped: &mut StoppedTree,
        described: Option<FrozenDescriptors>,
    ) -> Result<Found, Error> {
        let found = match described {
            Some(described) => {
                let unseen = match &self.snapshots {
                    Some(snapshots) => snapshots.needing_extraction(),
                    None => self.expected_sockets.iter().copied().collect(),
                };
                stopped.finish_reading_descriptors(described, &unseen)?
            }
            None => {
                self.snapshots = None;
                stopped.read_descriptors()?
            }
        };
        self.forget_changed(&found);
        Ok(self.descriptors_at_acceptor(found))
    }

    /// Sends the socket states of a stopped tree that the acceptor does not know; `flows` are the tree's flows.
    pub(super) fn send_states<'a>(
        &mut self,
        stopped: &mut StoppedTree,
        flows: impl Iterator<Item = &'a Flow>,
        outgoing: &mut ImageSender,
    ) -> Result<(), Failure> {
        let at_us = match &self.snapshots {
            Some(snapshots) => snapshots.at_us(),
            None => monotonic_ns() / 1000,
        };
        let mut states = BTreeMap::new();
        let port_sharing = match self.options.is_clone {
            true => SharedPortState::default(),
            false => shared_ports::extract(port_members(stopped.sockets()), &self.pids, flows)?,
        };
        if self.options.is_clone {
            let state =
                |(id, _, socket): (_, _, &SocketStaticState)| Some((id, socket.clone_state()?));
            states.extend(stopped.sockets().filter_map(state));
        } else if self.options.sockets == SocketStrategy::Iterative {
            let ids: Vec<FileId> = stopped.sockets().map(|(id, ..)| id).collect();
            for id in ids {
                let states = stopped
                    .extract_socket(id)
                    .map_err(IntoFailure::into_own_failure)?;
                let single = SocketStates {
                    at_us,
                    states,
                    ..SocketStates::default()
                };
                outgoing.send(MessageKind::Sockets, encode(&single)?)?;
                outgoing.wait_until_taken()?;
            }
        } else {
            states = self
                .snapshots
                .as_mut()
                .map_or(states, |snapshots| take_final_snapshots(snapshots, stopped));
            let snapshot_count = states.len();
            let extracted_states =
                stopped.extract_sockets(EXTRACT_THREADS, |id| states.contains_key(&id));
            states.extend(extracted_states.map_err(IntoFailure::into_own_failure)?);
            tracing::debug!(
                snapshot_count,
                extracted = states.len() - snapshot_count,
                "read socket states"
            );
        }
        let last_states = SocketStates {
            at_us,
            states,
            clients: port_sharing.clients,
            programs: port_sharing.programs,
        };
        outgoing.send(MessageKind::LastSockets, encode(&last_states)?)
    }

    /// Forgets descriptors that are gone or have changed.
    fn forget_changed(&mut self, found: &Found) {
        let ids = found.removed.iter().chain(found.sockets.keys());
        let ids = ids.copied().collect();
        self.snapshots
            .iter_mut()
            .for_each(|snapshots| snapshots.forget(&ids));
    }
}

/// Returns the states not yet sent, if any: of `all` connections, or only of connections with known options.
fn take_unsent(snapshots: &mut TcpSnapshots, all: bool) -> Option<SocketStates> {
    let states = snapshots.take_complete(all);
    let at_us = snapshots.at_us();
    (!states.is_empty()).then_some(SocketStates {
        at_us,
        states,
        ..SocketStates::default()
    })
}

/// Returns true if other sockets may use the port of a listener or UDP socket.
pub(super) fn shares_port(static_state: &SocketStaticState) -> bool {
    shared_port(static_state).is_some()
}

/// Returns the protocol and address of a socket whose port others may share.
fn shared_port(static_state: &SocketStaticState) -> Option<(Protocol, SocketAddr)> {
    match static_state {
        SocketStaticState::Datagrams(static_state) if static_state.may_share_port() => {
            Some((Protocol::Udp, static_state.local))
        }
        SocketStaticState::Unconnected(static_state) if static_state.options.reuse_port => {
            Some((Protocol::Tcp, static_state.local?))
        }
        _ => None,
    }
}

/// Returns the sockets that may share their port.
pub(super) fn port_members<'a>(
    sockets: impl Iterator<Item = (FileId, BorrowedFd<'a>, &'a SocketStaticState)>,
) -> Vec<SharedPortSocket<'a, FileId>> {
    let to_member = |(id, socket, static_state): (_, _, &SocketStaticState)| {
        let (protocol, local) = shared_port(static_state)?;
        Some(SharedPortSocket {
            id,
            socket,
            protocol,
            local,
        })
    };
    sockets.filter_map(to_member).collect()
}

/// Returns the snapshots of connections in the stopped tree, with their unread data. The acceptor knows all other
/// states.
fn take_final_snapshots(
    snapshots: &mut TcpSnapshots,
    stopped: &StoppedTree,
) -> BTreeMap<FileId, SocketState> {
    let mut states = snapshots.take_complete(false);
    for (id, mut state, unread_bytes) in snapshots.take_with_unread_data() {
        if let Some(unread) = stopped.unread_socket_bytes(id, unread_bytes) {
            state.unread = unread;
            states.insert(id, SocketState::Connection(Box::new(state)));
        }
    }
    states
}

/// Result of reading descriptors; `None` if the kernel cannot list many descriptors at once.
type DescriptorReadResult = Result<Option<FrozenDescriptors>, Error>;

/// Thread that reads descriptors in a freeze. Started before the freeze, so that the freeze need not wait for a new
/// thread's processor.
pub(super) struct DescriptorReaderThread {
    requests: Sender<DescriptorReader>,
    results: Receiver<DescriptorReadResult>,
}

impl DescriptorReaderThread {
    fn start(
        realtime: bool,
        read: impl Fn(&DescriptorReader) -> DescriptorReadResult + Send + 'static,
    ) -> Result<DescriptorReaderThread, Failure> {
        let (requests, inbox) = mpsc::channel::<DescriptorReader>();
        let (results_sender, found) = mpsc::channel();
        let run = move || {
            let _priority_boost = realtime.then(RealtimeGuard::begin);
            while let Ok(reader) = inbox.recv() {
                if results_sender.send(read(&reader)).is_err() {
                    return;
                }
            }
        };
        let builder = std::thread::Builder::new().name("fd-reader".to_owned());
        let started = builder.spawn(run);
        started.map_err(|error| thread_failure(&error))?;
        Ok(DescriptorReaderThread {
            requests,
            results: found,
        })
    }

    /// Starts reading a stopped tree; [`DescriptorReaderThread::wait`] returns the result.
    pub(super) fn start_reading(&self, reader: DescriptorReader) {
        // If the thread has ended, `found` returns an error.
        let _ = self.requests.send(reader);
    }

    /// Waits until the descriptors are read, and returns the result.
    pub(super) fn wait(&self) -> DescriptorReadResult {
        let found = self.results.recv();
        found.unwrap_or_else(|_| Err(Error::Image("descriptors were not read")))
    }
}

/// Encodes the states of sockets for the acceptor.
pub(super) fn encode(states: &SocketStates) -> Result<Vec<u8>, Failure> {
    postcard::to_stdvec(states).map_err(|error| NodeFault::NotEncoded(Text::of(error)).into())
}

/// Decodes the states of sockets from the donor.
pub(super) fn decode(message: &[u8]) -> Result<SocketStates, Failure> {
    postcard::from_bytes(message)
        .map_err(|error| ProtocolViolation::SocketStatesUnreadable(Text::of(error)).into())
}
