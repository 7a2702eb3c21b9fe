//! Snapshots of TCP connections that their programs are using.

use std::collections::{HashMap, HashSet};
use std::os::fd::BorrowedFd;

use foldhash::fast::RandomState;
use holdfast_bpf::Error;
use holdfast_bpf::observe::{MARKS_BYTES, Observed, Observer, flags};
use holdfast_sys::tcp_info::TcpState;
use holdfast_sys::tcp_repair::{Congestion, TcpDynamic, Window};

use super::{Sockets, monotonic_ns};

/// The kernel's value for a slow-start threshold that is not set.
const NO_THRESHOLD: u32 = 0x7fff_ffff;

/// Maximum number of passes of a snapshot that must miss nothing.
const PASSES_MAX: usize = 8;

/// Followed connections, by the caller's ids, until they are closed.
pub struct Followed {
    observer: Observer,
    namespace: u32,
    sockets: HashMap<u32, Socket>,
    next: u32,
}

/// A followed connection. The sequence number distinguishes it from earlier connections with the same id, which the
/// kernel may still report.
struct Socket {
    which: u32,
    /// The bytes in which the kernel keeps options, as of the first snapshot.
    marks: Option<[u8; MARKS_BYTES]>,
}

/// Result of one snapshot.
#[derive(Debug)]
pub struct Look {
    /// Time of the snapshot in µs, by this host's monotonic clock.
    pub at_us: u64,
    /// Connections that have changed since the previous snapshot, in the order of the iteration.
    pub changed: Vec<(u32, Sight)>,
    /// Connections of which the processes have no descriptor, so that nothing is known: closed ones, and those in
    /// transit through a Unix socket. Connections that wait for the next snapshot are not included.
    pub unmet: Vec<u32>,
}

/// Snapshot of one connection.
#[derive(Debug)]
pub enum Sight {
    /// The complete state: queues are empty, nothing is unusual, and the options are those of the first snapshot.
    Whole(TcpDynamic),
    /// The state without the given number of bytes that the program has not read.
    Unread(TcpDynamic, u32),
    /// Too little: the socket has to be asked.
    Little,
}

impl Followed {
    /// Loads the observer, without connections.
    ///
    /// # Errors
    /// The kernel does not accept the observer: no connection can be followed.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            observer: Observer::load()?,
            namespace: Sockets::namespace_inode(),
            sockets: HashMap::new(),
            next: 0,
        })
    }

    /// Starts following a connection. Its options should be read after the first snapshot, so that no change is missed.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn follow(&mut self, id: u32, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let which = self.next;
        self.next = self.next.wrapping_add(1) & (u32::MAX >> 1);
        let marks = None;
        self.sockets.insert(id, Socket { which, marks });
        self.observer.follow(socket, name(which, id))
    }

    /// Stops reporting a connection.
    pub fn forget(&mut self, id: u32) {
        self.sockets.remove(&id);
    }

    /// Snapshots all connections of which these processes have descriptors. If many have changed, some may wait for the
    /// next snapshot, unless `all` is set.
    ///
    /// # Errors
    /// The kernel's refusal, or endless changes; some changes are lost then.
    pub fn look(&mut self, pids: &[i32], all: bool) -> Result<Look, Error> {
        let at_us = monotonic_ns() / 1000;
        let mut changed = Vec::new();
        for _ in 0..PASSES_MAX {
            let changes = self.observer.changes(pids)?;
            changed.extend(changes.sockets.iter().filter_map(|seen| self.sight(seen)));
            if changes.complete || !all {
                let unmet = self.unmet(&changes.met);
                return Ok(Look {
                    at_us,
                    changed,
                    unmet,
                });
            }
        }
        Err(Error::Map {
            name: "observed_sockets",
            reason: format!("sockets still changed at look {PASSES_MAX}"),
        })
    }

    /// Returns the followed connections that the iteration did not meet.
    fn unmet(&self, met: &[u64]) -> Vec<u32> {
        let met: HashSet<u64, RandomState> = met.iter().copied().collect();
        let sockets = self.sockets.iter();
        let unmet = sockets.filter(|(id, socket)| !met.contains(&name(socket.which, **id)));
        unmet.map(|(id, _)| *id).collect()
    }

    /// Returns the snapshot of a socket that is still followed.
    fn sight(&mut self, seen: &Observed) -> Option<(u32, Sight)> {
        let (which, id) = ((seen.id >> 32) as u32, seen.id as u32);
        let socket = self.sockets.get_mut(&id)?;
        if socket.which != which {
            return None;
        }
        let as_before = *socket.marks.get_or_insert(seen.marks) == seen.marks;
        let here = seen.namespace == self.namespace;
        let state = state(seen).filter(|_| as_before && here);
        let sight = match (state, seen.rcv_nxt.wrapping_sub(seen.copied_seq)) {
            (Some(state), 0) => Sight::Whole(state),
            (Some(state), unread) => Sight::Unread(state, unread),
            (None, _) => Sight::Little,
        };
        Some((id, sight))
    }
}

/// Returns the observer's id of a connection.
fn name(which: u32, id: u32) -> u64 {
    u64::from(which) << 32 | u64::from(id)
}

/// Returns the state of an established connection with nothing to send, without its unread data. For other connections
/// a snapshot does not suffice.
fn state(socket: &Observed) -> Option<TcpDynamic> {
    let state = TcpState::from_kernel(socket.state)?;
    let plain = socket.flags & flags::PLAIN != 0 && socket.flags & flags::RECEIVE_SHUT == 0;
    let nothing_to_send = socket.write_seq == socket.snd_una;
    if state != TcpState::Established || !plain || !nothing_to_send {
        return None;
    }
    let timestamps = socket.flags & flags::TIMESTAMPS != 0;
    Some(TcpDynamic {
        state,
        write_seq: socket.write_seq,
        rcv_nxt: socket.rcv_nxt,
        mss: u16::try_from(socket.mss_clamp).ok()?,
        timestamp: if timestamps { socket.timestamp } else { 0 },
        window: Window {
            snd_wl1_back: socket.rcv_nxt.wrapping_sub(socket.snd_wl1),
            snd_wnd: socket.snd_wnd,
            max_window: socket.max_window,
            rcv_wnd: socket.rcv_wnd,
            rcv_wup_back: socket.rcv_nxt.wrapping_sub(socket.rcv_wup),
        },
        congestion: Congestion {
            window: socket.cwnd,
            threshold: (socket.ssthresh != NO_THRESHOLD).then_some(socket.ssthresh),
            srtt_us: socket.srtt_us,
            rttvar_us: socket.rttvar_us,
            min_rtt_us: socket.min_rtt_us,
            delivery_rate: super::observe::delivery_rate(socket),
        },
        ..TcpDynamic::default()
    })
}
