//! Snapshots of many TCP sockets in use: a BPF iterator over the descriptors of processes inspects the registered
//! sockets (`c/socket_snapshots.bpf.c`). A socket costs one system call to register it, and its share of a read; with
//! `getsockopt` each field would cost a call.

use std::collections::HashSet;
use std::os::fd::{AsRawFd, BorrowedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::bpf_iterator::{BpfIterator, drain};
use crate::mapped_array::MappedArray;
use crate::{Error, map_handle};

/// Length of [`SocketSnapshot::option_fingerprint`], bytes.
pub const OPTION_FINGERPRINT_BYTES: usize = 176;

/// Bits of [`SocketSnapshot::flags`].
pub mod socket_flags {
    /// The socket is an IPv6 socket, whose flow may be IPv4.
    pub const V6: u8 = 1;
    /// The socket has no filter, upper layer protocol, keys, urgent data, ECN, headers or peek offset.
    pub const PLAIN: u8 = 2;
    /// The program shut the receiving direction, or the peer's FIN arrived.
    pub const RECEIVE_SHUT: u8 = 4;
    /// Windows are scaled.
    pub const WINDOW_SCALE: u8 = 8;
    /// Selective acknowledgements are in use.
    pub const SACK: u8 = 16;
    /// Timestamps are in use.
    pub const TIMESTAMPS: u8 = 32;
}

/// Snapshot of a TCP socket: fields of the kernel's `struct tcp_sock` under their names, times in microseconds. The
/// fields are read without a lock, so while packets arrive one may be a packet newer than another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SocketSnapshot {
    /// ID under which the socket was registered.
    pub id: u64,
    /// Own address, IPv4 as mapped IPv6.
    pub local: [u8; 16],
    /// The peer's address, IPv4 as mapped IPv6.
    pub remote: [u8; 16],
    /// Own port, network order.
    pub local_port: [u8; 2],
    /// The peer's port, network order.
    pub remote_port: [u8; 2],
    /// `sk_state`, as in `TCP_INFO`.
    pub state: u8,
    /// Bits of [`socket_flags`].
    pub flags: u8,
    /// Shift of received windows.
    pub snd_wscale: u8,
    /// Shift of sent windows.
    pub rcv_wscale: u8,
    /// Sequence number of the next byte that the program writes.
    pub write_seq: u32,
    /// Sequence number of the oldest unacknowledged byte.
    pub snd_una: u32,
    /// Sequence number of the next byte to be sent.
    pub snd_nxt: u32,
    /// Sequence number of the segment that last updated the peer's window.
    pub snd_wl1: u32,
    /// The peer's receive window, bytes.
    pub snd_wnd: u32,
    /// Largest window that the peer has advertised, bytes.
    pub max_window: u32,
    /// Sequence number of the next byte expected.
    pub rcv_nxt: u32,
    /// Sequence number of the next byte that the program reads.
    pub copied_seq: u32,
    /// Own receive window as last advertised, bytes.
    pub rcv_wnd: u32,
    /// `rcv_nxt` at that advertisement.
    pub rcv_wup: u32,
    /// Largest segment sent, options deducted, bytes.
    pub mss_cache: u32,
    /// The peer's MSS option.
    pub mss_clamp: u32,
    /// Offset between the host's TCP clock and the timestamps.
    pub tsoffset: u32,
    /// Congestion window, segments.
    pub cwnd: u32,
    /// Slow start threshold, segments.
    pub ssthresh: u32,
    /// Smoothed round-trip time.
    pub srtt_us: u32,
    /// Variation of the round-trip time.
    pub rttvar_us: u32,
    /// Smallest round-trip time.
    pub min_rtt_us: u32,
    /// Segments of the last rate sample.
    pub rate_delivered: u32,
    /// Interval of the last rate sample.
    pub rate_interval_us: u32,
    /// `SO_SNDBUF`.
    pub send_buffer: u32,
    /// `SO_RCVBUF`.
    pub receive_buffer: u32,
    /// `SO_RCVLOWAT`.
    pub receive_low_water: u32,
    /// `TCP_WINDOW_CLAMP`.
    pub window_clamp: u32,
    /// Inode number of the socket's network namespace.
    pub namespace: u32,
    /// The socket's TCP clock, as `TCP_TIMESTAMP` reports it: the lowest bit says if it counts microseconds (set) or
    /// milliseconds.
    pub timestamp: u32,
    /// Raw fields with all other socket options: two sockets of a namespace with equal marks have equal options.
    pub option_fingerprint: [u8; OPTION_FINGERPRINT_BYTES],
}

/// Value stored with a registered socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct FollowedSocket {
    /// ID copied to the socket's record.
    id: u64,
    /// Nonzero: the socket is unregistered once it has been read; otherwise it is reported again only after a change.
    once: u32,
    /// Number of the last pass that encountered the socket.
    pass: u32,
    /// The socket as last reported, without its clock; zeros before.
    last_reported: [u8; size_of::<SocketSnapshot>()],
}

/// One pass over the descriptors of some processes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DescriptorPass {
    /// Number of records; if more than fit, some were left out.
    record_count: u64,
    /// Number of IDs of encountered sockets; if more than fit, some were left out.
    encountered_count: u64,
    /// Number of the pass; not 0.
    number: u32,
    pad: u32,
}

const _: () = assert!(size_of::<FollowedSocket>() == 344 && size_of::<SocketSnapshot>() == 328);
const _: () = assert!(size_of::<DescriptorPass>() == 24);

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/socket_snapshots.bpf.o"));

/// Result of [`SnapshotReader::changes`].
#[derive(Debug)]
pub struct ChangedSockets {
    /// Followed sockets that have changed, in their present state.
    pub sockets: Vec<SocketSnapshot>,
    /// IDs of followed sockets that were encountered, changed or not, as far as they fit. The state of other sockets is
    /// unknown: the processes have no descriptor of them, for example while one is in transit through a Unix socket.
    pub encountered: Vec<u64>,
    /// True if all changed sockets are included; otherwise the next call returns the rest.
    pub complete: bool,
}

/// Reader of socket snapshots.
pub struct SnapshotReader {
    iterator: BpfIterator,
    sockets: MapHandle,
    /// Socket records of the last pass of the iterator.
    records: MappedArray<SocketSnapshot>,
    encountered: MappedArray<u64>,
    pass: MappedArray<DescriptorPass>,
    pass_number: u32,
}

impl SnapshotReader {
    /// Loads the BPF iterator that reads followed sockets.
    ///
    /// # Errors
    /// The kernel refuses the iterator: it is too old, or has no BTF.
    pub fn load() -> Result<Self, Error> {
        let (iterator, object) = BpfIterator::load(OBJECT, "snapshot_sockets", "sockets")?;
        Ok(Self {
            iterator,
            sockets: map_handle(&object, MAP_NAME)?,
            records: MappedArray::map(&map_handle(&object, "records")?, "records")?,
            encountered: MappedArray::map(&map_handle(&object, "encountered")?, "encountered")?,
            pass: MappedArray::map(&map_handle(&object, "passes")?, "passes")?,
            pass_number: 0,
        })
    }

    /// Follows a socket until it is closed or [`SnapshotReader::unfollow`] is called: [`SnapshotReader::changes`] reports it under
    /// `id`.
    ///
    /// # Errors
    /// The kernel's error, such as for a descriptor that is not a socket.
    pub fn follow(&self, socket: BorrowedFd<'_>, id: u64) -> Result<(), Error> {
        self.register(socket, id, 0)
    }

    /// Ends [`SnapshotReader::follow`]. A socket that was not followed is no error.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unfollow(&self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        match self.sockets.delete(&socket.as_raw_fd().to_ne_bytes()) {
            Err(e) if e.kind() != libbpf_rs::ErrorKind::NotFound => Err(map_error(&e)),
            _ => Ok(()),
        }
    }

    fn register(&self, socket: BorrowedFd<'_>, id: u64, once: u32) -> Result<(), Error> {
        let registration = FollowedSocket {
            id,
            once,
            pass: 0,
            last_reported: [0; size_of::<SocketSnapshot>()],
        };
        let key = socket.as_raw_fd().to_ne_bytes();
        self.sockets
            .update(&key, registration.as_bytes(), MapFlags::ANY)
            .map_err(|e| map_error(&e))
    }

    /// Returns the followed sockets in descriptors of the processes `pids` (numbers in the caller's PID namespace) that
    /// have changed since they were last returned; at first, all of them. Their marks exclude `TCP_QUICKACK`, which
    /// changes with traffic.
    ///
    /// # Errors
    /// The kernel's error; sockets read before the error count as returned.
    pub fn changes(&mut self, pids: &[i32]) -> Result<ChangedSockets, Error> {
        self.pass_number = self.pass_number.wrapping_add(1).max(1);
        let new = DescriptorPass {
            record_count: 0,
            encountered_count: 0,
            number: self.pass_number,
            pad: 0,
        };
        // SAFETY: the mapping lives as long as self; the program writes only in a pass, during which self is borrowed
        // exclusively.
        unsafe { self.pass.value_ptr(0).as_ptr().write_volatile(new) };
        for pid in pids {
            let iter = self.iterator.over_process(*pid)?;
            drain(iter).map_err(|error| self.iterator.error(error))?;
        }
        // SAFETY: as above.
        let pass = unsafe { self.pass.value_ptr(0).as_ptr().read_volatile() };
        let to_count = |found: u64| usize::try_from(found).unwrap_or(usize::MAX);
        let (record_count, encountered_count) = (
            to_count(pass.record_count),
            to_count(pass.encountered_count),
        );
        let sockets = 0..record_count.min(self.records.len());
        // SAFETY: the program has written them in this pass.
        let sockets = sockets.map(|at| unsafe { self.records.value_ptr(at).read_volatile() });
        let ids = 0..encountered_count.min(self.encountered.len());
        // SAFETY: as above.
        let ids = ids.map(|at| unsafe { self.encountered.value_ptr(at).read_volatile() });
        Ok(ChangedSockets {
            sockets: sockets.collect(),
            encountered: ids.collect(),
            complete: record_count <= self.records.len(),
        })
    }

    /// Reads the given sockets of the caller once, in their order; `None` for a descriptor that is not a TCP socket.
    /// The reader must not follow any sockets.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read_once(
        &mut self,
        sockets: &[BorrowedFd<'_>],
    ) -> Result<Vec<Option<SocketSnapshot>>, Error> {
        for (id, socket) in sockets.iter().enumerate() {
            self.register(*socket, ONE_TIME_READ | id as u64, 1)?;
        }
        let own_pid = [std::process::id().cast_signed()];
        let mut found = vec![None; sockets.len()];
        let mut missing: HashSet<usize> = (0..sockets.len()).collect();
        // The capacity of a pass is limited, so several may be needed.
        while !missing.is_empty() {
            let before = missing.len();
            for record in self.changes(&own_pid)?.sockets {
                let index = (record.id ^ ONE_TIME_READ) as usize;
                if missing.remove(&index) {
                    found[index] = Some(record);
                }
            }
            if missing.len() == before {
                break;
            }
        }
        for index in missing {
            self.unfollow(sockets[index])?;
        }
        Ok(found)
    }
}

/// Bit that distinguishes the IDs of one-time reads from the IDs of followed sockets.
const ONE_TIME_READ: u64 = 1 << 63;

const MAP_NAME: &str = "registered_sockets";

fn map_error(source: &libbpf_rs::Error) -> Error {
    Error::Map {
        name: MAP_NAME,
        reason: source.to_string(),
    }
}
