//! Snapshots of TCP connections that their programs are using.

use std::collections::{HashMap, HashSet};
use std::os::fd::BorrowedFd;

use foldhash::fast::RandomState;
use holdfast_bpf::Error;
use holdfast_bpf::socket_snapshots::{
    OPTION_FINGERPRINT_BYTES, SnapshotReader, SocketSnapshot, socket_flags,
};
use holdfast_sys::tcp_info::TcpState;
use holdfast_tcp_repair::{CongestionState, TcpDynamicState, TcpRepairWindow};

use super::{SocketObserver, monotonic_ns};

/// The kernel's value for a slow-start threshold that is not set.
const NO_THRESHOLD: u32 = 0x7fff_ffff;

/// Maximum number of passes of a snapshot that must miss nothing.
const PASSES_MAX: usize = 8;

/// Followed connections, by the caller's ids, until they are closed.
pub struct TcpObserver {
    observer: SnapshotReader,
    namespace: u32,
    connections: HashMap<u32, ObservedConnection>,
    next_sequence: u32,
}

/// A followed connection. The sequence number distinguishes it from earlier connections with the same id, which the
/// kernel may still report.
struct ObservedConnection {
    sequence: u32,
    /// The bytes in which the kernel keeps options, as of the first snapshot.
    option_bytes: Option<[u8; OPTION_FINGERPRINT_BYTES]>,
}

/// Result of one snapshot of all observed connections.
#[derive(Debug)]
pub struct SnapshotResult {
    /// Time of the snapshot in µs, by this host's monotonic clock.
    pub taken_at_us: u64,
    /// Connections that have changed since the previous snapshot, in the order of the iteration.
    pub changed: Vec<(u32, ConnectionSnapshot)>,
    /// Connections of which the processes have no descriptor, so that nothing is known: closed ones, and those in
    /// transit through a Unix socket. Connections that wait for the next snapshot are not included.
    pub not_visited: Vec<u32>,
}

/// Snapshot of one TCP connection's state.
#[derive(Debug)]
pub enum ConnectionSnapshot {
    /// The complete state: queues are empty, nothing is unusual, and the options are those of the first snapshot.
    Complete(TcpDynamicState),
    /// The state without the given number of bytes that the program has not read.
    WithUnread(TcpDynamicState, u32),
    /// The snapshot lacks state, which has to be read from the socket.
    Partial,
}

impl TcpObserver {
    /// Loads the observer, without connections.
    ///
    /// # Errors
    /// The kernel does not accept the observer: no connection can be followed.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            observer: SnapshotReader::load()?,
            namespace: SocketObserver::namespace_inode(),
            connections: HashMap::new(),
            next_sequence: 0,
        })
    }

    /// Starts following a connection. Its options should be read after the first snapshot, so that no change is missed.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn add(&mut self, id: u32, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let which = self.next_sequence;
        self.next_sequence = self.next_sequence.wrapping_add(1) & (u32::MAX >> 1);
        let marks = None;
        self.connections.insert(
            id,
            ObservedConnection {
                sequence: which,
                option_bytes: marks,
            },
        );
        self.observer.follow(socket, observer_id(which, id))
    }

    /// Stops reporting a connection.
    pub fn remove(&mut self, id: u32) {
        self.connections.remove(&id);
    }

    /// Snapshots all connections of which these processes have descriptors. If many have changed, some may wait for the
    /// next snapshot, unless `all` is set.
    ///
    /// # Errors
    /// The kernel's refusal, or endless changes; some changes are lost then.
    pub fn snapshot(&mut self, pids: &[i32], all: bool) -> Result<SnapshotResult, Error> {
        let at_us = monotonic_ns() / 1000;
        let mut changed = Vec::new();
        for _ in 0..PASSES_MAX {
            let changes = self.observer.changes(pids)?;
            changed.extend(
                changes
                    .sockets
                    .iter()
                    .filter_map(|seen| self.snapshot_of(seen)),
            );
            if changes.complete || !all {
                let unmet = self.not_visited(&changes.encountered);
                return Ok(SnapshotResult {
                    taken_at_us: at_us,
                    changed,
                    not_visited: unmet,
                });
            }
        }
        Err(Error::Map {
            name: "registered_sockets",
            reason: format!("sockets still changed in pass {PASSES_MAX}"),
        })
    }

    /// Returns the followed connections that the iteration did not meet.
    fn not_visited(&self, met: &[u64]) -> Vec<u32> {
        let met: HashSet<u64, RandomState> = met.iter().copied().collect();
        let sockets = self.connections.iter();
        let unmet =
            sockets.filter(|(id, socket)| !met.contains(&observer_id(socket.sequence, **id)));
        unmet.map(|(id, _)| *id).collect()
    }

    /// Returns the snapshot of a socket that is still followed.
    fn snapshot_of(&mut self, observed: &SocketSnapshot) -> Option<(u32, ConnectionSnapshot)> {
        let (which, id) = ((observed.id >> 32) as u32, observed.id as u32);
        let socket = self.connections.get_mut(&id)?;
        if socket.sequence != which {
            return None;
        }
        let are_options_unchanged = *socket
            .option_bytes
            .get_or_insert(observed.option_fingerprint)
            == observed.option_fingerprint;
        let is_in_namespace = observed.namespace == self.namespace;
        let state = tcp_state(observed).filter(|_| are_options_unchanged && is_in_namespace);
        let snapshot = match (state, observed.rcv_nxt.wrapping_sub(observed.copied_seq)) {
            (Some(state), 0) => ConnectionSnapshot::Complete(state),
            (Some(state), unread) => ConnectionSnapshot::WithUnread(state, unread),
            (None, _) => ConnectionSnapshot::Partial,
        };
        Some((id, snapshot))
    }
}

/// Returns the observer's id of a connection.
fn observer_id(sequence: u32, id: u32) -> u64 {
    u64::from(sequence) << 32 | u64::from(id)
}

/// Returns the state of an established connection with nothing to send, without its unread data. For other connections
/// a snapshot does not suffice.
fn tcp_state(socket: &SocketSnapshot) -> Option<TcpDynamicState> {
    let state = TcpState::from_kernel(socket.state)?;
    let is_plain =
        socket.flags & socket_flags::PLAIN != 0 && socket.flags & socket_flags::RECEIVE_SHUT == 0;
    let is_send_queue_empty = socket.write_seq == socket.snd_una;
    if state != TcpState::Established || !is_plain || !is_send_queue_empty {
        return None;
    }
    let timestamps = socket.flags & socket_flags::TIMESTAMPS != 0;
    Some(TcpDynamicState {
        state,
        write_seq: socket.write_seq,
        rcv_nxt: socket.rcv_nxt,
        mss: u16::try_from(socket.mss_clamp).ok()?,
        timestamp: if timestamps { socket.timestamp } else { 0 },
        window: TcpRepairWindow {
            snd_wl1_back: socket.rcv_nxt.wrapping_sub(socket.snd_wl1),
            snd_wnd: socket.snd_wnd,
            max_window: socket.max_window,
            rcv_wnd: socket.rcv_wnd,
            rcv_wup_back: socket.rcv_nxt.wrapping_sub(socket.rcv_wup),
        },
        congestion: CongestionState {
            window: socket.cwnd,
            threshold: (socket.ssthresh != NO_THRESHOLD).then_some(socket.ssthresh),
            srtt_us: socket.srtt_us,
            rttvar_us: socket.rttvar_us,
            min_rtt_us: socket.min_rtt_us,
            delivery_rate: super::socket_observer::delivery_rate(socket),
        },
        ..TcpDynamicState::default()
    })
}
