//! Socket options as plain values. Each function makes one system call.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `SO_BUF_LOCK` (`asm-generic/socket.h`): buffer sizes that the program fixed (1 send, 2 receive).
pub const SO_BUF_LOCK: i32 = 72;
/// `SO_TXREHASH` (`asm-generic/socket.h`).
pub const SO_TXREHASH: i32 = 74;
/// `TCP_AO_INFO` (`linux/tcp.h`): reading fails unless the socket has TCP-AO keys.
pub const TCP_AO_INFO: i32 = 40;
/// `TCP_RTO_MAX_MS` (`linux/tcp.h`).
pub const TCP_RTO_MAX_MS: i32 = 44;
/// `TCP_RTO_MIN_US` (`linux/tcp.h`).
pub const TCP_RTO_MIN_US: i32 = 45;
/// `TCP_DELACK_MAX_US` (`linux/tcp.h`).
pub const TCP_DELACK_MAX_US: i32 = 46;

/// Numbers of `asm-generic/socket.h`, `linux/in.h`, `linux/in6.h` and `linux/tcp.h` that other modules use by name.
#[allow(missing_docs)]
pub mod numbers {
    pub const SO_TIMESTAMPING: i32 = 37;
    pub const SO_WIFI_STATUS: i32 = 41;
    pub const SO_NOFCS: i32 = 43;
    pub const SO_SELECT_ERR_QUEUE: i32 = 45;
    pub const SO_INCOMING_CPU: i32 = 49;
    pub const SO_TIMESTAMP_NEW: i32 = 63;
    pub const SO_TIMESTAMPNS_NEW: i32 = 64;
    pub const SO_TIMESTAMPING_NEW: i32 = 65;
    pub const SO_PREFER_BUSY_POLL: i32 = 69;
    pub const SO_BUSY_POLL_BUDGET: i32 = 70;
    pub const SO_RESERVE_MEM: i32 = 73;
    pub const SO_RCVMARK: i32 = 75;
    pub const SO_RCVPRIORITY: i32 = 82;
    pub const SO_INQ: i32 = 84;
    pub const SO_TXTIME: i32 = 61;
    pub const SO_PASSPIDFD: i32 = 76;
    pub const SO_PASSRIGHTS: i32 = 83;
    pub const IP_CHECKSUM: i32 = 23;
    pub const IP_RECVFRAGSIZE: i32 = 25;
    pub const IP_RECVERR_RFC4884: i32 = 26;
    pub const IP_LOCAL_PORT_RANGE: i32 = 51;
    pub const IPV6_2292PKTINFO: i32 = 2;
    pub const IPV6_2292HOPOPTS: i32 = 3;
    pub const IPV6_2292DSTOPTS: i32 = 4;
    pub const IPV6_2292RTHDR: i32 = 5;
    pub const IPV6_2292HOPLIMIT: i32 = 8;
    pub const IPV6_FLOWINFO: i32 = 11;
    pub const IPV6_ROUTER_ALERT_ISOLATE: i32 = 30;
    pub const IPV6_RECVERR_RFC4884: i32 = 31;
    pub const IPV6_FLOWINFO_SEND: i32 = 33;
    pub const IPV6_AUTOFLOWLABEL: i32 = 70;
    pub const IPV6_ADDR_PREFERENCES: i32 = 72;
    pub const IPV6_MINHOPCOUNT: i32 = 73;
    pub const IPV6_RECVFRAGSIZE: i32 = 77;
    pub const TCP_SAVE_SYN: i32 = 27;
    pub const TCP_FASTOPEN_CONNECT: i32 = 30;
    pub const TCP_FASTOPEN_KEY: i32 = 33;
    pub const TCP_FASTOPEN_NO_COOKIE: i32 = 34;
}

/// Reads an `int` option.
///
/// # Errors
/// Errors of `getsockopt(2)`; `ENOPROTOOPT` when the kernel or the protocol does not know the option.
pub fn get_int(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value = [0u8; 4];
    match get_bytes(fd, level, name, &mut value)? {
        4 => Ok(i32::from_ne_bytes(value)),
        1 => Ok(i32::from(value[0])),
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)),
    }
}

/// Returns the result of reading an option: `None` if this kernel or the socket's protocol does not have the option.
///
/// # Errors
/// Any other error of the read.
pub fn value_if_known<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP) => Ok(None),
            _ => Err(error),
        },
    }
}

/// Reads an option into `value` and returns the number of bytes that the kernel wrote.
///
/// # Errors
/// Errors of `getsockopt(2)`.
pub fn get_bytes(fd: BorrowedFd<'_>, level: i32, name: i32, value: &mut [u8]) -> io::Result<usize> {
    let mut length = value.len() as libc::socklen_t;
    // SAFETY: `value` is writable for `length` bytes and both pointers outlive the call.
    let outcome = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    check(outcome)?;
    Ok(length as usize)
}

/// Sets an `int` option.
///
/// # Errors
/// Errors of `setsockopt(2)`.
pub fn set_int(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    set_bytes(fd, level, name, &value.to_ne_bytes())
}

/// Sets an option from raw bytes in the kernel's layout.
///
/// # Errors
/// Errors of `setsockopt(2)`.
pub fn set_bytes(fd: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    // SAFETY: `value` is readable for its length and outlives the call.
    let outcome = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            value.as_ptr().cast(),
            value.len() as libc::socklen_t,
        )
    };
    check(outcome)
}

/// Makes an `ioctl` that writes one `int`, such as `SIOCINQ`.
pub fn ioctl_int(fd: BorrowedFd<'_>, request: libc::c_ulong) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    // SAFETY: the requests used here write one int to the pointer, which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut value) })?;
    Ok(value)
}

/// Turns the C convention (negative: see `errno`) into a `Result`.
pub fn check(outcome: libc::c_int) -> io::Result<()> {
    if outcome < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Does the same as [`check`] for calls that return a byte count.
pub fn check_length(outcome: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(outcome).map_err(|_| io::Error::last_os_error())
}
