//! Socket options longer than an `int`, of TCP and UDP sockets alike: structures, headers, interfaces.

use holdfast_sys::socket_filter::{FilterError, SocketFilter};
use holdfast_sys::sockopt::numbers::{SO_TIMESTAMPING, SO_TXTIME};
use holdfast_sys::sockopt::{get_bytes, get_int, set_bytes, set_int, value_if_known};
use libc::{IPPROTO_IP, IPPROTO_IPV6, SOL_SOCKET};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::BorrowedFd;

/// Flags of `SO_TIMESTAMPING` for numbered timestamps and hardware clocks (`linux/net_tstamp.h`).
const TIMESTAMPING_OPT_ID: i32 = 1 << 7;
const TIMESTAMPING_BIND_PHC: i32 = 1 << 15;
/// Numbers of `linux/in.h` and `linux/in6.h`.
const IPV6_HOPOPTS: i32 = 54;
const IPV6_RTHDRDSTOPTS: i32 = 55;
const IPV6_RTHDR: i32 = 57;
const IPV6_DSTOPTS: i32 = 59;
const IP_UNICAST_IF: i32 = 50;
const IPV6_UNICAST_IF: i32 = 76;

/// Length of the longest value, an IPv6 extension header, bytes.
pub const VALUE_LEN_MAX: usize = 2048;

/// Options in the kernel's layout, by their number in the encoded state; numbers never change meaning.
const RAW_OPTIONS: &[(u8, i32, i32)] = &[
    (1, SOL_SOCKET, SO_TXTIME),
    (2, IPPROTO_IP, libc::IP_OPTIONS),
    (3, IPPROTO_IPV6, IPV6_HOPOPTS),
    (4, IPPROTO_IPV6, IPV6_RTHDRDSTOPTS),
    (5, IPPROTO_IPV6, IPV6_RTHDR),
    (6, IPPROTO_IPV6, IPV6_DSTOPTS),
    (7, SOL_SOCKET, libc::SO_LINGER),
    (8, SOL_SOCKET, libc::SO_MAX_PACING_RATE),
    (9, SOL_SOCKET, libc::SO_RCVTIMEO),
    (10, SOL_SOCKET, libc::SO_SNDTIMEO),
];
/// Options that name the outgoing interface of unicast packets, as an index in network byte order.
const UNICAST_INTERFACE_OPTIONS: [(i32, i32); 2] =
    [(IPPROTO_IP, IP_UNICAST_IF), (IPPROTO_IPV6, IPV6_UNICAST_IF)];

/// The options of one socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NonIntegerOptions {
    /// Values that are not empty, by option number.
    pub raw: Vec<(u8, Vec<u8>)>,
    /// Names of the interfaces of `IP_UNICAST_IF` and `IPV6_UNICAST_IF`, empty for none.
    pub unicast_interfaces: [String; 2],
    /// The packet filter (`SO_ATTACH_FILTER`).
    pub filter: SocketFilter,
}

/// Reason for a failure to read or set options.
#[derive(Debug)]
pub enum NonIntegerOptionsError {
    /// An eBPF program is attached.
    EbpfFilter,
    /// Timestamps are numbered, and the kernel does not tell the current number.
    NumberedTimestamps,
    /// Timestamps come from a hardware clock of this host.
    HardwareClock,
    /// The interface does not exist on this host.
    DeviceAbsent(String),
    /// The kernel refused the named step.
    Kernel(&'static str, io::Error),
}

impl NonIntegerOptions {
    /// Returns level and name of an option by its number in the encoded state.
    pub fn option_by_id(id: u8) -> Option<(i32, i32)> {
        let known = RAW_OPTIONS.iter().find(|(known, ..)| *known == id);
        known.map(|(_, level, name)| (*level, *name))
    }

    /// Reads the options without changing the socket.
    ///
    /// # Errors
    /// An option that cannot be moved, by name, or the kernel's error.
    pub fn read(fd: BorrowedFd<'_>, v6: bool) -> Result<Self, NonIntegerOptionsError> {
        let timestamping = get_int(fd, SOL_SOCKET, SO_TIMESTAMPING).unwrap_or(0);
        if timestamping & TIMESTAMPING_OPT_ID != 0 {
            return Err(NonIntegerOptionsError::NumberedTimestamps);
        }
        if timestamping & TIMESTAMPING_BIND_PHC != 0 {
            return Err(NonIntegerOptionsError::HardwareClock);
        }
        let filter = SocketFilter::read(fd).map_err(|error| match error {
            FilterError::Ebpf => NonIntegerOptionsError::EbpfFilter,
            FilterError::Kernel(source) => NonIntegerOptionsError::Kernel("SO_GET_FILTER", source),
        })?;
        let mut raw = Vec::new();
        let mut value = [0; VALUE_LEN_MAX];
        for (id, level, name) in RAW_OPTIONS {
            if *level == IPPROTO_IPV6 && !v6 {
                continue;
            }
            match value_if_known(get_bytes(fd, *level, *name, &mut value)) {
                Ok(Some(length)) if length > 0 => {
                    raw.push((*id, value[..length.min(VALUE_LEN_MAX)].to_vec()));
                }
                Ok(_) => {}
                Err(error) => {
                    return Err(NonIntegerOptionsError::Kernel(
                        "reading a socket option",
                        error,
                    ));
                }
            }
        }
        let mut unicast = <[String; 2]>::default();
        for ((level, name), found) in UNICAST_INTERFACE_OPTIONS.into_iter().zip(&mut unicast) {
            if level == IPPROTO_IPV6 && !v6 {
                continue;
            }
            let index = value_if_known(get_int(fd, level, name))
                .map_err(|error| NonIntegerOptionsError::Kernel("IP_UNICAST_IF", error))?
                .map_or(0, |index| u32::from_be(index.cast_unsigned()));
            if index != 0 {
                let name = holdfast_sys::net::interface_name(index);
                *found =
                    name.map_err(|error| NonIntegerOptionsError::Kernel("if_indextoname", error))?;
            }
        }
        Ok(Self {
            raw,
            unicast_interfaces: unicast,
            filter,
        })
    }

    /// Sets the options that differ from the socket's present ones. The caller attaches the filter
    /// ([`SocketFilter::attach`]).
    ///
    /// # Errors
    /// An interface that this host lacks, or the kernel's error.
    pub fn apply(&self, fd: BorrowedFd<'_>) -> Result<(), NonIntegerOptionsError> {
        let mut current = [0; VALUE_LEN_MAX];
        for (id, level, name) in RAW_OPTIONS {
            let Some((_, value)) = self.raw.iter().find(|(known, _)| known == id) else {
                continue;
            };
            let present = get_bytes(fd, *level, *name, &mut current);
            if present.is_ok_and(|length| current[..length.min(VALUE_LEN_MAX)] == value[..]) {
                continue;
            }
            set_bytes(fd, *level, *name, value).map_err(|error| {
                NonIntegerOptionsError::Kernel("setting a socket option", error)
            })?;
        }
        for ((level, name), device) in UNICAST_INTERFACE_OPTIONS
            .into_iter()
            .zip(&self.unicast_interfaces)
        {
            if device.is_empty() {
                continue;
            }
            let index = holdfast_sys::net::interface_index(device);
            let index = index.map_err(|_| NonIntegerOptionsError::DeviceAbsent(device.clone()))?;
            set_int(fd, level, name, index.to_be().cast_signed())
                .map_err(|error| NonIntegerOptionsError::Kernel("IP_UNICAST_IF", error))?;
        }
        Ok(())
    }
}
