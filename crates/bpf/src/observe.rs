//! What there is to know of many TCP sockets, read at once while they are in use: a BPF iterator over the descriptors of processes
//! that looks at the sockets asked for (`c/observe.bpf.c`). One socket costs a system call to name it, and its share of a read;
//! the same by `getsockopt` is a call for each field.

use std::collections::HashSet;
use std::os::fd::{AsRawFd, BorrowedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::iterator::{Iterator, run_through};
use crate::mapped::Mapped;
use crate::{Error, handle};

/// Bytes of [`Observed::marks`].
pub const MARKS_BYTES: usize = 176;

/// Bits of [`Observed::flags`].
pub mod flags {
    /// An IPv6 socket, whose flow may be IPv4.
    pub const V6: u8 = 1;
    /// No filter, upper layer protocol, keys, urgent data, ECN, headers or place to peek at of its own.
    pub const PLAIN: u8 = 2;
    /// The program shut the receiving direction, or the peer's FIN came.
    pub const RECEIVE_SHUT: u8 = 4;
    /// Windows are scaled.
    pub const WINDOW_SCALE: u8 = 8;
    /// Selective acknowledgements.
    pub const SACK: u8 = 16;
    /// Timestamps.
    pub const TIMESTAMPS: u8 = 32;
}

/// A TCP socket at one instant: fields of the kernel's `struct tcp_sock` under its names, times in microseconds.
/// They are read without a lock, so while packets arrive one may be a packet younger than another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Observed {
    /// As it was named.
    pub id: u64,
    /// Own address, IPv4 as mapped IPv6.
    pub local: [u8; 16],
    /// The peer's.
    pub remote: [u8; 16],
    /// Own port, network order.
    pub local_port: [u8; 2],
    /// The peer's, likewise.
    pub remote_port: [u8; 2],
    /// `sk_state`, as in `TCP_INFO`.
    pub state: u8,
    /// See [`flags`].
    pub flags: u8,
    /// Shift of windows received.
    pub snd_wscale: u8,
    /// Shift of windows sent.
    pub rcv_wscale: u8,
    /// Where the program writes next.
    pub write_seq: u32,
    /// Oldest byte without acknowledgement.
    pub snd_una: u32,
    /// Next byte to be sent.
    pub snd_nxt: u32,
    /// Sequence number of the segment that last updated the peer's window.
    pub snd_wl1: u32,
    /// The peer's window, bytes.
    pub snd_wnd: u32,
    /// The largest it was.
    pub max_window: u32,
    /// Next byte expected.
    pub rcv_nxt: u32,
    /// Next byte that the program reads.
    pub copied_seq: u32,
    /// Own window as last told, bytes.
    pub rcv_wnd: u32,
    /// `rcv_nxt` when it was.
    pub rcv_wup: u32,
    /// Largest segment sent, options deducted.
    pub mss_cache: u32,
    /// What the peer's MSS option said.
    pub mss_clamp: u32,
    /// What is added to the host's TCP clock for timestamps.
    pub tsoffset: u32,
    /// Congestion window, segments.
    pub cwnd: u32,
    /// Slow start threshold, segments.
    pub ssthresh: u32,
    /// Smoothed round-trip time.
    pub srtt_us: u32,
    /// Its variation.
    pub rttvar_us: u32,
    /// Smallest round-trip time.
    pub min_rtt_us: u32,
    /// Segments of the last rate sample.
    pub rate_delivered: u32,
    /// Its interval.
    pub rate_interval_us: u32,
    /// `SO_SNDBUF`.
    pub send_buffer: u32,
    /// `SO_RCVBUF`.
    pub receive_buffer: u32,
    /// `SO_RCVLOWAT`.
    pub receive_low_water: u32,
    /// `TCP_WINDOW_CLAMP`.
    pub window_clamp: u32,
    /// Inode number of its network namespace.
    pub namespace: u32,
    /// Its TCP clock, as `TCP_TIMESTAMP` has it: the lowest bit says whether it counts microseconds (set) or
    /// milliseconds.
    pub timestamp: u32,
    /// The raw fields that all other socket options are kept in: two sockets of a namespace whose marks are equal
    /// have equal options.
    pub marks: [u8; MARKS_BYTES],
}

/// What is stored with a socket that is observed.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Order {
    /// Goes into its record.
    id: u64,
    /// Not 0: the socket is let go once it has been read; otherwise it is told again only when it has changed.
    once: u32,
    /// The last pass that met it.
    pass: u32,
    /// As it was told, but for its clock; zeros before.
    last: [u8; size_of::<Observed>()],
}

/// One pass over the descriptors of some processes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Pass {
    /// Records; more than there is room for where some were left out.
    seen: u64,
    /// Ids of sockets that were met, likewise.
    met: u64,
    /// Of the pass; not 0.
    number: u32,
    pad: u32,
}

const _: () = assert!(size_of::<Order>() == 344 && size_of::<Observed>() == 328);
const _: () = assert!(size_of::<Pass>() == 24);

static OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/observe.bpf.o"));

/// What [`Observer::changes`] gives.
#[derive(Debug)]
pub struct Changes {
    /// Followed sockets that have changed, as they are now.
    pub sockets: Vec<Observed>,
    /// The ids of followed sockets that were met, changed or not, as far as there was room. Of others nothing is known: the processes
    /// have no descriptor of them, such as of one that is on its way through a Unix socket.
    pub met: Vec<u64>,
    /// All that had changed; otherwise there was no room for more, which the next look has.
    pub complete: bool,
}

/// Reads sockets.
pub struct Observer {
    iterator: Iterator,
    sockets: MapHandle,
    /// Of the last pass.
    seen: Mapped<Observed>,
    met: Mapped<u64>,
    pass: Mapped<Pass>,
    number: u32,
}

impl Observer {
    /// Loads the iterator.
    ///
    /// # Errors
    /// The kernel does not take it: it is too old, or has no BTF.
    pub fn load() -> Result<Self, Error> {
        let (iterator, object) = Iterator::load(OBJECT, "observe", "sockets")?;
        Ok(Self {
            iterator,
            sockets: handle(&object, MAP)?,
            seen: Mapped::map(&handle(&object, "seen")?, "seen")?,
            met: Mapped::map(&handle(&object, "met")?, "met")?,
            pass: Mapped::map(&handle(&object, "passes")?, "passes")?,
            number: 0,
        })
    }

    /// Observes a socket until it is closed or [`Observer::let_go`] is called: [`Observer::changes`] has it under `id`.
    ///
    /// # Errors
    /// The kernel's refusal, such as for a descriptor that is no socket.
    pub fn follow(&self, socket: BorrowedFd<'_>, id: u64) -> Result<(), Error> {
        self.order(socket, id, 0)
    }

    /// Ends [`Observer::follow`]; that the socket was not followed is no error.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn let_go(&self, socket: BorrowedFd<'_>) -> Result<(), Error> {
        match self.sockets.delete(&socket.as_raw_fd().to_ne_bytes()) {
            Err(e) if e.kind() != libbpf_rs::ErrorKind::NotFound => Err(error(&e)),
            _ => Ok(()),
        }
    }

    fn order(&self, socket: BorrowedFd<'_>, id: u64, once: u32) -> Result<(), Error> {
        let order = Order {
            id,
            once,
            pass: 0,
            last: [0; size_of::<Observed>()],
        };
        let key = socket.as_raw_fd().to_ne_bytes();
        self.sockets
            .update(&key, order.as_bytes(), MapFlags::ANY)
            .map_err(|e| error(&e))
    }

    /// Sockets that are followed, of which the processes `pids` (the caller's numbers) have descriptors, and that have changed since they
    /// were given last; at first all. What `TCP_QUICKACK` says is left out of their marks: it changes with traffic.
    ///
    /// # Errors
    /// The kernel's refusal; what was seen until then counts as given.
    pub fn changes(&mut self, pids: &[i32]) -> Result<Changes, Error> {
        self.number = self.number.wrapping_add(1).max(1);
        let new = Pass {
            seen: 0,
            met: 0,
            number: self.number,
            pad: 0,
        };
        // SAFETY: the mapping lives as long as self; the program writes only in a pass, for which self is borrowed alone.
        unsafe { self.pass.at(0).as_ptr().write_volatile(new) };
        for pid in pids {
            let iter = self.iterator.over_process(*pid)?;
            run_through(iter).map_err(|error| self.iterator.refused(error))?;
        }
        // SAFETY: as above.
        let Pass { seen, met, .. } = unsafe { self.pass.at(0).as_ptr().read_volatile() };
        let count = |found: u64| usize::try_from(found).unwrap_or(usize::MAX);
        let (seen, met) = (count(seen), count(met));
        let sockets = 0..seen.min(self.seen.len());
        // SAFETY: the program has written them in this pass.
        let sockets = sockets.map(|at| unsafe { self.seen.at(at).read_volatile() });
        let ids = 0..met.min(self.met.len());
        // SAFETY: likewise.
        let ids = ids.map(|at| unsafe { self.met.at(at).read_volatile() });
        Ok(Changes {
            sockets: sockets.collect(),
            met: ids.collect(),
            complete: seen <= self.seen.len(),
        })
    }

    /// Reads these sockets of the caller's once, in their order; `None` for what is no TCP socket. For an observer that follows none.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn read_once(
        &mut self,
        sockets: &[BorrowedFd<'_>],
    ) -> Result<Vec<Option<Observed>>, Error> {
        for (id, socket) in sockets.iter().enumerate() {
            self.order(*socket, ONCE | id as u64, 1)?;
        }
        let own = [std::process::id().cast_signed()];
        let mut found = vec![None; sockets.len()];
        let mut missing: HashSet<usize> = (0..sockets.len()).collect();
        // A pass has room for so many.
        while !missing.is_empty() {
            let before = missing.len();
            for record in self.changes(&own)?.sockets {
                let place = (record.id ^ ONCE) as usize;
                if missing.remove(&place) {
                    found[place] = Some(record);
                }
            }
            if missing.len() == before {
                break;
            }
        }
        for place in missing {
            self.let_go(sockets[place])?;
        }
        Ok(found)
    }
}

/// Ids that do not meet those of followed sockets.
const ONCE: u64 = 1 << 63;

const MAP: &str = "observed_sockets";

fn error(source: &libbpf_rs::Error) -> Error {
    Error::Map {
        name: MAP,
        reason: source.to_string(),
    }
}
