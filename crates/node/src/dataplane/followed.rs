//! TCP connections that are followed while their programs use them.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;

use holdfast_bpf::Error;
use holdfast_bpf::observe::{MARKS_BYTES, MARKS_QUICK_ACK, Observed, Observer, flags};
use holdfast_sys::tcp_info::TcpState;
use holdfast_sys::tcp_repair::{Congestion, TcpDynamic, Window};

use super::{Sockets, monotonic_ns};

/// The kernel's "no threshold yet".
const NO_THRESHOLD: u32 = 0x7fff_ffff;

/// Connections by numbers of the caller's, until they are closed.
pub struct Followed {
    observer: Observer,
    namespace: u32,
    /// What options are kept in, as the first look found it.
    marks: HashMap<u64, [u8; MARKS_BYTES]>,
}

/// What one look has seen.
#[derive(Debug, Default)]
pub struct Look {
    /// When, by the clock of this host that does not jump.
    pub at_us: u64,
    /// States of connections with empty queues and nothing out of the ordinary, whose options are as they were at the first
    /// look. The others have to be asked.
    pub states: BTreeMap<u32, TcpDynamic>,
}

impl Followed {
    /// None yet.
    ///
    /// # Errors
    /// The kernel does not take the observer: no connection can be followed.
    pub fn new() -> Result<Self, Error> {
        Ok(Self {
            observer: Observer::load()?,
            namespace: Sockets::namespace_inode(),
            marks: HashMap::new(),
        })
    }

    /// Follows a connection from here on. Its options should be read after the first look, so that no change is missed.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn follow(&mut self, id: u32, socket: BorrowedFd<'_>) -> Result<(), Error> {
        self.marks.remove(&u64::from(id));
        self.observer.follow(socket, u64::from(id))
    }

    /// Looks at all of them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn look(&mut self) -> Result<Look, Error> {
        let at_us = monotonic_ns() / 1000;
        let seen = self.observer.read()?;
        let mut states = BTreeMap::new();
        for socket in &seen {
            let mut now = socket.marks;
            now[MARKS_QUICK_ACK] = 0;
            let marks = self.marks.entry(socket.id).or_insert(now);
            if *marks == now
                && socket.namespace == self.namespace
                && let Ok(id) = u32::try_from(socket.id)
                && let Some(state) = state(socket)
            {
                states.insert(id, state);
            }
        }
        Ok(Look { at_us, states })
    }
}

/// The state of an established connection with empty queues; for others it takes more than can be seen.
fn state(socket: &Observed) -> Option<TcpDynamic> {
    let state = TcpState::from_kernel(socket.state)?;
    let plain = socket.flags & flags::PLAIN != 0 && socket.flags & flags::RECEIVE_SHUT == 0;
    let drained = socket.write_seq == socket.snd_una && socket.rcv_nxt == socket.copied_seq;
    if state != TcpState::Established || !plain || !drained {
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
