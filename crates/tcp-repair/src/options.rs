//! Socket options that travel with a connection: read at the donor, applied at the acceptor where they differ from a
//! fresh socket's.

use super::error::{RepairError, StepContext, UnmovableReason};
use super::snapshot::TcpStaticSnapshot;
use crate::non_integer_options::NonIntegerOptions;
use holdfast_sys::sockopt::numbers::{
    IP_CHECKSUM, IP_LOCAL_PORT_RANGE, IP_RECVERR_RFC4884, IP_RECVFRAGSIZE, IPV6_2292DSTOPTS,
    IPV6_2292HOPLIMIT, IPV6_2292HOPOPTS, IPV6_2292PKTINFO, IPV6_2292RTHDR, IPV6_ADDR_PREFERENCES,
    IPV6_AUTOFLOWLABEL, IPV6_FLOWINFO, IPV6_FLOWINFO_SEND, IPV6_MINHOPCOUNT, IPV6_RECVERR_RFC4884,
    IPV6_RECVFRAGSIZE, IPV6_ROUTER_ALERT_ISOLATE, SO_BUSY_POLL_BUDGET, SO_INCOMING_CPU, SO_NOFCS,
    SO_PREFER_BUSY_POLL, SO_RCVMARK, SO_RCVPRIORITY, SO_RESERVE_MEM, SO_SELECT_ERR_QUEUE,
    SO_TIMESTAMP_NEW, SO_TIMESTAMPING, SO_TIMESTAMPING_NEW, SO_TIMESTAMPNS_NEW, SO_WIFI_STATUS,
    TCP_FASTOPEN_CONNECT, TCP_FASTOPEN_NO_COOKIE, TCP_SAVE_SYN,
};
use holdfast_sys::sockopt::{
    SO_BUF_LOCK, SO_TXREHASH, TCP_DELACK_MAX_US, TCP_RTO_MAX_MS, TCP_RTO_MIN_US, get_bytes,
    get_int, set_bytes, set_int, value_if_known,
};
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::BorrowedFd;

/// One `int` option: its number in the encoded state, and the kernel's level and name.
struct IntOption {
    id: u8,
    level: i32,
    name: i32,
    /// The option is set only if its value is not zero, because the kernel gives zero another meaning or refuses it.
    only_nonzero: bool,
    /// The option is read only from sockets without a connection: in a connection its value has another meaning, or
    /// changes with traffic.
    unconnected: bool,
}

const fn int_option(id: u8, level: i32, name: i32) -> IntOption {
    IntOption {
        id,
        level,
        name,
        only_nonzero: false,
        unconnected: false,
    }
}

const fn nonzero_option(id: u8, level: i32, name: i32) -> IntOption {
    IntOption {
        only_nonzero: true,
        ..int_option(id, level, name)
    }
}

const fn unconnected_option(id: u8, level: i32, name: i32) -> IntOption {
    IntOption {
        unconnected: true,
        ..int_option(id, level, name)
    }
}

/// Options `TCP_INQ` and `TCP_TX_DELAY` (`linux/tcp.h`).
const TCP_INQ: i32 = 36;
const TCP_TX_DELAY: i32 = 37;

const QUICK_ACK_ID: u8 = 20;
const RCVLOWAT_ID: u8 = 36;
const WINDOW_CLAMP_ID: u8 = 37;

/// All `int` options. Numbers never change meaning, because hosts of different versions read each other's state.
/// Options are set in this order: TOS also changes the priority, and `SO_RCVLOWAT` may raise the receive buffer.
const INT_OPTIONS: &[IntOption] = &[
    nonzero_option(1, IPPROTO_IP, libc::IP_TRANSPARENT),
    int_option(2, IPPROTO_IP, libc::IP_TOS),
    int_option(3, IPPROTO_IPV6, libc::IPV6_TCLASS),
    int_option(4, SOL_SOCKET, libc::SO_PRIORITY),
    int_option(5, SOL_SOCKET, libc::SO_MARK),
    int_option(6, IPPROTO_IP, libc::IP_TTL),
    int_option(7, IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
    int_option(8, IPPROTO_IP, libc::IP_MTU_DISCOVER),
    int_option(9, IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER),
    int_option(10, IPPROTO_IP, libc::IP_MINTTL),
    int_option(11, IPPROTO_IPV6, IPV6_MINHOPCOUNT),
    int_option(12, IPPROTO_IPV6, libc::IPV6_DONTFRAG),
    int_option(13, IPPROTO_IPV6, IPV6_AUTOFLOWLABEL),
    int_option(14, IPPROTO_TCP, libc::TCP_KEEPIDLE),
    int_option(15, IPPROTO_TCP, libc::TCP_KEEPINTVL),
    int_option(16, IPPROTO_TCP, libc::TCP_KEEPCNT),
    int_option(17, SOL_SOCKET, libc::SO_KEEPALIVE),
    int_option(18, IPPROTO_TCP, libc::TCP_NODELAY),
    int_option(19, IPPROTO_TCP, libc::TCP_CORK),
    int_option(QUICK_ACK_ID, IPPROTO_TCP, libc::TCP_QUICKACK),
    int_option(21, IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    int_option(22, IPPROTO_TCP, libc::TCP_LINGER2),
    int_option(23, IPPROTO_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS),
    int_option(24, IPPROTO_TCP, TCP_INQ),
    int_option(25, IPPROTO_TCP, TCP_TX_DELAY),
    int_option(26, IPPROTO_TCP, TCP_RTO_MAX_MS),
    int_option(27, IPPROTO_TCP, TCP_RTO_MIN_US),
    int_option(28, IPPROTO_TCP, TCP_DELACK_MAX_US),
    int_option(29, SOL_SOCKET, libc::SO_OOBINLINE),
    int_option(30, SOL_SOCKET, libc::SO_DONTROUTE),
    int_option(31, SOL_SOCKET, libc::SO_BUSY_POLL),
    // Each of the timestamp options changes the values of the following ones.
    int_option(40, SOL_SOCKET, SO_TIMESTAMPING),
    nonzero_option(41, SOL_SOCKET, SO_TIMESTAMPING_NEW),
    nonzero_option(32, SOL_SOCKET, libc::SO_TIMESTAMP),
    nonzero_option(33, SOL_SOCKET, libc::SO_TIMESTAMPNS),
    nonzero_option(42, SOL_SOCKET, SO_TIMESTAMP_NEW),
    nonzero_option(43, SOL_SOCKET, SO_TIMESTAMPNS_NEW),
    int_option(34, SOL_SOCKET, libc::SO_ZEROCOPY),
    int_option(35, SOL_SOCKET, SO_TXREHASH),
    int_option(RCVLOWAT_ID, SOL_SOCKET, libc::SO_RCVLOWAT),
    nonzero_option(WINDOW_CLAMP_ID, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP),
    int_option(38, IPPROTO_IPV6, libc::IPV6_V6ONLY),
    int_option(39, IPPROTO_TCP, libc::TCP_SYNCNT),
    int_option(44, SOL_SOCKET, libc::SO_DEBUG),
    int_option(45, SOL_SOCKET, libc::SO_BROADCAST),
    int_option(46, SOL_SOCKET, libc::SO_NO_CHECK),
    int_option(47, SOL_SOCKET, libc::SO_RXQ_OVFL),
    int_option(48, SOL_SOCKET, SO_WIFI_STATUS),
    int_option(49, SOL_SOCKET, SO_NOFCS),
    int_option(50, SOL_SOCKET, SO_SELECT_ERR_QUEUE),
    int_option(51, SOL_SOCKET, SO_PREFER_BUSY_POLL),
    int_option(52, SOL_SOCKET, SO_BUSY_POLL_BUDGET),
    int_option(53, SOL_SOCKET, SO_RCVMARK),
    int_option(54, SOL_SOCKET, SO_RCVPRIORITY),
    int_option(55, SOL_SOCKET, SO_RESERVE_MEM),
    unconnected_option(57, SOL_SOCKET, SO_INCOMING_CPU),
    unconnected_option(58, IPPROTO_TCP, libc::TCP_MAXSEG),
    unconnected_option(59, IPPROTO_TCP, TCP_FASTOPEN_CONNECT),
    int_option(61, IPPROTO_TCP, TCP_SAVE_SYN),
    int_option(62, IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE),
    int_option(63, IPPROTO_IP, libc::IP_RECVERR),
    int_option(64, IPPROTO_IP, libc::IP_RECVTTL),
    int_option(65, IPPROTO_IP, libc::IP_RECVTOS),
    int_option(66, IPPROTO_IP, libc::IP_PKTINFO),
    int_option(67, IPPROTO_IP, libc::IP_RECVOPTS),
    int_option(68, IPPROTO_IP, libc::IP_RETOPTS),
    int_option(69, IPPROTO_IP, libc::IP_PASSSEC),
    int_option(70, IPPROTO_IP, libc::IP_RECVORIGDSTADDR),
    int_option(71, IPPROTO_IP, IP_CHECKSUM),
    int_option(72, IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    int_option(73, IPPROTO_IP, IP_RECVFRAGSIZE),
    int_option(74, IPPROTO_IP, IP_RECVERR_RFC4884),
    int_option(76, IPPROTO_IP, libc::IP_MULTICAST_LOOP),
    int_option(77, IPPROTO_IP, libc::IP_MULTICAST_ALL),
    int_option(78, IPPROTO_IP, IP_LOCAL_PORT_RANGE),
    int_option(80, IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
    int_option(81, IPPROTO_IPV6, IPV6_2292PKTINFO),
    int_option(82, IPPROTO_IPV6, libc::IPV6_RECVHOPLIMIT),
    int_option(83, IPPROTO_IPV6, IPV6_2292HOPLIMIT),
    int_option(84, IPPROTO_IPV6, libc::IPV6_RECVRTHDR),
    int_option(85, IPPROTO_IPV6, IPV6_2292RTHDR),
    int_option(86, IPPROTO_IPV6, libc::IPV6_RECVHOPOPTS),
    int_option(87, IPPROTO_IPV6, IPV6_2292HOPOPTS),
    int_option(88, IPPROTO_IPV6, libc::IPV6_RECVDSTOPTS),
    int_option(89, IPPROTO_IPV6, IPV6_2292DSTOPTS),
    int_option(90, IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
    int_option(91, IPPROTO_IPV6, IPV6_FLOWINFO),
    int_option(92, IPPROTO_IPV6, libc::IPV6_RECVPATHMTU),
    int_option(93, IPPROTO_IPV6, libc::IPV6_RECVORIGDSTADDR),
    int_option(94, IPPROTO_IPV6, IPV6_RECVFRAGSIZE),
    int_option(96, IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP),
    int_option(97, IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL),
    int_option(98, IPPROTO_IPV6, libc::IPV6_RECVERR),
    int_option(99, IPPROTO_IPV6, IPV6_RECVERR_RFC4884),
    int_option(100, IPPROTO_IPV6, IPV6_FLOWINFO_SEND),
    int_option(101, IPPROTO_IPV6, IPV6_ROUTER_ALERT_ISOLATE),
    int_option(102, IPPROTO_IPV6, IPV6_ADDR_PREFERENCES),
];

/// `SO_LINGER`: treatment of unsent data by `close`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Linger {
    /// True if `close` waits.
    pub on: bool,
    /// Longest wait, seconds; zero with `on` resets the connection.
    pub seconds: i32,
}

/// The options of a connection's socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOptions {
    /// `int` options by their number in the table of this module.
    pub ints: Vec<(u8, i32)>,
    /// `SO_LINGER`.
    pub linger: Linger,
    /// `SO_SNDBUF`, bytes as the kernel counts them (twice the size that a program requested).
    pub send_buffer: i32,
    /// `SO_RCVBUF`, counted like `send_buffer`.
    pub receive_buffer: i32,
    /// `SO_BUF_LOCK`: 1 the program fixed the send buffer's size, 2 the receive buffer's; the kernel tunes the others.
    pub buffer_lock: i32,
    /// `SO_MAX_PACING_RATE`, bytes per second, all ones for none.
    pub max_pacing_rate: u64,
    /// `SO_RCVTIMEO`, microseconds, 0 for none.
    pub receive_timeout_us: u64,
    /// `SO_SNDTIMEO`, microseconds, 0 for none.
    pub send_timeout_us: u64,
    /// `TCP_CONGESTION`.
    pub congestion_control: String,
    /// `SO_BINDTODEVICE`, empty for none.
    pub device: String,
    /// `TCP_NOTSENT_LOWAT`, bytes; applied last, because it would keep the queue from being filled.
    pub notsent_lowat: i32,
    /// `SO_REUSEADDR`; applied after repair mode, because leaving repair mode clears it.
    pub reuse_address: bool,
    /// `SO_REUSEPORT`.
    pub reuse_port: bool,
    /// `IP_FREEBIND`.
    pub free_bind: bool,
    /// `O_NONBLOCK` of the descriptor.
    pub nonblocking: bool,
    /// Options longer than an `int`.
    pub wide: NonIntegerOptions,
}

impl SocketOptions {
    /// Reads all options of a connection's socket; omits options that the kernel does not know.
    pub(super) fn read(fd: BorrowedFd<'_>, v6: bool) -> Result<Self, RepairError> {
        Self::read_all(fd, v6, false)
    }

    /// Does the same as [`SocketOptions::read`] for a socket without a connection.
    pub(super) fn read_unconnected(fd: BorrowedFd<'_>, v6: bool) -> Result<Self, RepairError> {
        Self::read_all(fd, v6, true)
    }

    fn read_all(fd: BorrowedFd<'_>, v6: bool, unconnected: bool) -> Result<Self, RepairError> {
        let flag =
            |name, step| Ok::<_, RepairError>(get_int(fd, SOL_SOCKET, name).at_step(step)? != 0);
        Ok(Self {
            ints: read_ints(fd, v6, unconnected)?,
            linger: read_linger(fd).at_step("SO_LINGER")?,
            send_buffer: get_int(fd, SOL_SOCKET, libc::SO_SNDBUF).at_step("SO_SNDBUF")?,
            receive_buffer: get_int(fd, SOL_SOCKET, libc::SO_RCVBUF).at_step("SO_RCVBUF")?,
            buffer_lock: get_int(fd, SOL_SOCKET, SO_BUF_LOCK).at_step("SO_BUF_LOCK")?,
            max_pacing_rate: read_pacing(fd).at_step("SO_MAX_PACING_RATE")?,
            receive_timeout_us: read_timeout(fd, libc::SO_RCVTIMEO).at_step("SO_RCVTIMEO")?,
            send_timeout_us: read_timeout(fd, libc::SO_SNDTIMEO).at_step("SO_SNDTIMEO")?,
            congestion_control: read_text(fd, IPPROTO_TCP, libc::TCP_CONGESTION)
                .at_step("TCP_CONGESTION")?,
            device: read_text(fd, SOL_SOCKET, libc::SO_BINDTODEVICE).at_step("SO_BINDTODEVICE")?,
            notsent_lowat: get_int(fd, IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT)
                .at_step("TCP_NOTSENT_LOWAT")?,
            reuse_address: flag(libc::SO_REUSEADDR, "SO_REUSEADDR")?,
            reuse_port: flag(libc::SO_REUSEPORT, "SO_REUSEPORT")?,
            free_bind: get_int(fd, IPPROTO_IP, libc::IP_FREEBIND).at_step("IP_FREEBIND")? != 0,
            nonblocking: is_nonblocking(fd).at_step("F_GETFL")?,
            wide: NonIntegerOptions::read(fd, v6)?,
        })
    }

    /// Returns level and name of an `int` option by its number.
    pub fn option_by_id(id: u8) -> Option<(i32, i32)> {
        let known = INT_OPTIONS.iter().find(|known| known.id == id)?;
        Some((known.level, known.name))
    }

    /// Returns the value of an `int` option by its kernel name, if it was read.
    #[must_use]
    pub fn int(&self, level: i32, name: i32) -> Option<i32> {
        let id = INT_OPTIONS
            .iter()
            .find(|known| known.level == level && known.name == name)?
            .id;
        value_by_id(&self.ints, id)
    }

    /// Returns true if the connection is probed while it is idle (`SO_KEEPALIVE`).
    pub(super) fn has_keepalive(&self) -> bool {
        let on = self.int(SOL_SOCKET, libc::SO_KEEPALIVE);
        on.is_some_and(|on| on != 0)
    }

    /// Returns these options with the values of `snapshot` that change by themselves, for another socket with equal
    /// options.
    pub(super) fn with_tuned_sizes(mut self, snapshot: &TcpStaticSnapshot<'_>) -> Self {
        self.send_buffer = snapshot.send_buffer.cast_signed();
        self.receive_buffer = snapshot.receive_buffer.cast_signed();
        for (id, value) in &mut self.ints {
            match *id {
                RCVLOWAT_ID => *value = snapshot.receive_low_water.cast_signed(),
                WINDOW_CLAMP_ID => *value = snapshot.window_clamp.cast_signed(),
                _ => {}
            }
        }
        self
    }

    /// Copies from another socket's options the values that the kernel tunes by itself, and `TCP_QUICKACK`, which
    /// changes with traffic.
    pub(super) fn copy_tuned(&mut self, from: &Self) {
        self.copy_int(QUICK_ACK_ID, from);
        if self.buffer_lock & 1 == 0 {
            self.send_buffer = from.send_buffer;
        }
        if self.buffer_lock & 2 == 0 {
            self.receive_buffer = from.receive_buffer;
            self.copy_int(WINDOW_CLAMP_ID, from);
        }
    }

    fn copy_int(&mut self, wanted: u8, from: &Self) {
        let ours = self.ints.iter_mut().find(|(id, _)| *id == wanted);
        if let (Some((_, ours)), Some(theirs)) = (ours, value_by_id(&from.ints, wanted)) {
            *ours = theirs;
        }
    }

    /// Sets the options that differ from `fresh`, a new socket's options, on an unconnected socket. Must precede
    /// `bind`, as `IP_TRANSPARENT` and `IPV6_V6ONLY` require.
    pub(super) fn apply(&self, fd: BorrowedFd<'_>, fresh: &Self) -> Result<(), RepairError> {
        if !self.device.is_empty() {
            set_bytes(
                fd,
                SOL_SOCKET,
                libc::SO_BINDTODEVICE,
                self.device.as_bytes(),
            )
            .map_err(|source| match source.raw_os_error() {
                Some(libc::ENODEV) => UnmovableReason::DeviceAbsent(self.device.clone()).into(),
                _ => RepairError::Kernel {
                    step: "SO_BINDTODEVICE",
                    source,
                },
            })?;
        }
        if self.congestion_control != fresh.congestion_control {
            self.apply_congestion_control(fd)?;
        }
        self.apply_ints(fd, fresh)?;
        self.apply_structures(fd, fresh)?;
        if self.wide != fresh.wide {
            self.wide.apply(fd)?;
            if self.wide.filter != fresh.wide.filter {
                self.wide.filter.attach(fd).at_step("SO_ATTACH_FILTER")?;
            }
        }
        self.apply_buffers(fd, fresh)
    }

    fn apply_congestion_control(&self, fd: BorrowedFd<'_>) -> Result<(), RepairError> {
        let name = self.congestion_control.as_bytes();
        set_bytes(fd, IPPROTO_TCP, libc::TCP_CONGESTION, name).map_err(|source| {
            match source.raw_os_error() {
                Some(libc::ENOENT) => {
                    UnmovableReason::CongestionControlAbsent(self.congestion_control.clone()).into()
                }
                _ => RepairError::Kernel {
                    step: "TCP_CONGESTION",
                    source,
                },
            }
        })
    }

    fn apply_ints(&self, fd: BorrowedFd<'_>, fresh: &Self) -> Result<(), RepairError> {
        let mut priority_changed = false;
        for known in INT_OPTIONS {
            let Some(value) = value_by_id(&self.ints, known.id) else {
                continue;
            };
            let is_unchanged = value_by_id(&fresh.ints, known.id) == Some(value);
            let is_priority = known.level == SOL_SOCKET && known.name == libc::SO_PRIORITY;
            let is_forced = is_priority && priority_changed;
            if (is_unchanged && !is_forced) || (known.only_nonzero && value == 0) {
                continue;
            }
            set_int(fd, known.level, known.name, value).at_step("setting a socket option")?;
            priority_changed |= known.name == libc::IP_TOS && known.level == IPPROTO_IP;
        }
        Ok(())
    }

    fn apply_structures(&self, fd: BorrowedFd<'_>, fresh: &Self) -> Result<(), RepairError> {
        if self.linger != fresh.linger {
            let mut raw = [0u8; 8];
            raw[..4].copy_from_slice(&i32::from(self.linger.on).to_ne_bytes());
            raw[4..].copy_from_slice(&self.linger.seconds.to_ne_bytes());
            set_bytes(fd, SOL_SOCKET, libc::SO_LINGER, &raw).at_step("SO_LINGER")?;
        }
        if self.max_pacing_rate != fresh.max_pacing_rate {
            let raw = self.max_pacing_rate.to_ne_bytes();
            set_bytes(fd, SOL_SOCKET, libc::SO_MAX_PACING_RATE, &raw)
                .at_step("SO_MAX_PACING_RATE")?;
        }
        if self.receive_timeout_us != 0 {
            let raw = timeval(self.receive_timeout_us);
            set_bytes(fd, SOL_SOCKET, libc::SO_RCVTIMEO, &raw).at_step("SO_RCVTIMEO")?;
        }
        if self.send_timeout_us != 0 {
            let raw = timeval(self.send_timeout_us);
            set_bytes(fd, SOL_SOCKET, libc::SO_SNDTIMEO, &raw).at_step("SO_SNDTIMEO")?;
        }
        if self.reuse_port {
            set_int(fd, SOL_SOCKET, libc::SO_REUSEPORT, 1).at_step("SO_REUSEPORT")?;
        }
        Ok(())
    }

    /// Sets buffer sizes without locking sizes that were not locked. The kernel doubles a given size.
    fn apply_buffers(&self, fd: BorrowedFd<'_>, fresh: &Self) -> Result<(), RepairError> {
        let send = self.send_buffer != fresh.send_buffer;
        let receive = self.receive_buffer != fresh.receive_buffer;
        if send {
            set_int(fd, SOL_SOCKET, libc::SO_SNDBUFFORCE, self.send_buffer / 2)
                .at_step("SO_SNDBUFFORCE")?;
        }
        if receive {
            set_int(
                fd,
                SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                self.receive_buffer / 2,
            )
            .at_step("SO_RCVBUFFORCE")?;
        }
        if send || receive || self.buffer_lock != fresh.buffer_lock {
            self.apply_buffer_lock(fd)?;
        }
        Ok(())
    }

    /// Restores `SO_BUF_LOCK` after a size was set, which locks that size.
    pub(super) fn apply_buffer_lock(&self, fd: BorrowedFd<'_>) -> Result<(), RepairError> {
        set_int(fd, SOL_SOCKET, SO_BUF_LOCK, self.buffer_lock & 3).at_step("SO_BUF_LOCK")
    }
}

/// Returns the value of an `int` option by its number, if it was read.
pub(crate) fn value_by_id(ints: &[(u8, i32)], id: u8) -> Option<i32> {
    let found = ints.iter().find(|(known, _)| *known == id);
    found.map(|(_, value)| *value)
}

fn read_ints(
    fd: BorrowedFd<'_>,
    v6: bool,
    unconnected: bool,
) -> Result<Vec<(u8, i32)>, RepairError> {
    let mut ints = Vec::with_capacity(INT_OPTIONS.len());
    for known in INT_OPTIONS {
        if known.level == IPPROTO_IPV6 && !v6 || known.unconnected && !unconnected {
            continue;
        }
        let value = value_if_known(get_int(fd, known.level, known.name));
        let value = value.at_step("reading a socket option")?;
        ints.extend(value.map(|value| (known.id, value)));
    }
    Ok(ints)
}

fn read_linger(fd: BorrowedFd<'_>) -> io::Result<Linger> {
    let mut raw = [0u8; 8];
    get_bytes(fd, SOL_SOCKET, libc::SO_LINGER, &mut raw)?;
    let word = |at: usize| i32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    Ok(Linger {
        on: word(0) != 0,
        seconds: word(4),
    })
}

fn read_pacing(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut raw = [0u8; 8];
    get_bytes(fd, SOL_SOCKET, libc::SO_MAX_PACING_RATE, &mut raw)?;
    Ok(u64::from_ne_bytes(raw))
}

fn read_timeout(fd: BorrowedFd<'_>, name: i32) -> io::Result<u64> {
    let mut raw = [0u8; 16];
    get_bytes(fd, SOL_SOCKET, name, &mut raw)?;
    let (seconds, micros) = raw.split_at(8);
    let number = |half: &[u8]| half.try_into().map_or(0, u64::from_ne_bytes);
    Ok(number(seconds)
        .saturating_mul(1_000_000)
        .saturating_add(number(micros)))
}

fn timeval(microseconds: u64) -> [u8; 16] {
    let mut raw = [0u8; 16];
    raw[..8].copy_from_slice(&(microseconds / 1_000_000).to_ne_bytes());
    raw[8..].copy_from_slice(&(microseconds % 1_000_000).to_ne_bytes());
    raw
}

/// Reads a text option, without its terminating zero.
pub(super) fn read_text(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<String> {
    let mut raw = [0u8; 32];
    let length = get_bytes(fd, level, name, &mut raw)?.min(raw.len());
    let text = raw[..length].split(|byte| *byte == 0).next().unwrap_or(&[]);
    Ok(String::from_utf8_lossy(text).into_owned())
}

fn is_nonblocking(fd: BorrowedFd<'_>) -> io::Result<bool> {
    use std::os::fd::AsRawFd;
    // SAFETY: F_GETFL takes no argument and touches no memory.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    holdfast_sys::sockopt::check(flags)?;
    Ok(flags & libc::O_NONBLOCK != 0)
}
