//! The static state of many sockets with few system calls: from snapshots taken without stopping the process, and with
//! one reading of options for all sockets with equal options.

use super::error::RepairError;
use super::options::SocketOptions;
use super::queue::Queue;
use super::static_state::{StaticReader, TcpStatic, check_host_addresses, segment_size};
use crate::tcp_info::TcpState;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// Snapshot of a connection's socket, all fields at one instant: the contents of [`TcpStatic`], under the same names,
/// and the fill levels of the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen<'a> {
    /// Own address; IPv4 even on an IPv6 socket if the flow is IPv4.
    pub local: SocketAddr,
    /// The peer's address, in the same form.
    pub remote: SocketAddr,
    /// True for an IPv6 socket.
    pub v6_socket: bool,
    /// Window scales, if negotiated.
    pub window_scale: Option<(u8, u8)>,
    /// True if selective acknowledgements were negotiated.
    pub sack: bool,
    /// True if timestamps were negotiated.
    pub timestamps: bool,
    /// Payload of the largest segment sent (`tcpi_snd_mss`).
    pub snd_mss: u32,
    /// Connection state.
    pub state: TcpState,
    /// True if nothing needs a query of the socket itself: no urgent data, filter, upper layer protocol, keys or ECN.
    pub plain: bool,
    /// True if the program shut its receiving direction (or the peer's FIN arrived).
    pub receive_shut: bool,
    /// `SO_SNDBUF`.
    pub send_buffer: u32,
    /// `SO_RCVBUF`.
    pub receive_buffer: u32,
    /// `SO_RCVLOWAT`.
    pub receive_low_water: u32,
    /// `TCP_WINDOW_CLAMP`.
    pub window_clamp: u32,
    /// Fill levels of the queues.
    pub queue: Queue,
    /// Fingerprint of all other options: equal for equal options.
    pub marks: &'a [u8],
}

impl Seen<'_> {
    /// Returns true if the socket itself need not be queried. Other states are rare, and each has its own meaning for
    /// queues and refusals.
    #[must_use]
    pub fn is_enough(&self) -> bool {
        self.plain && self.state == TcpState::Established
    }
}

/// Known options, by the marks of the socket that they were read from.
#[derive(Debug, Default)]
pub(super) struct Known(HashMap<Box<[u8]>, SocketOptions>);

impl StaticReader {
    /// Does the same as [`StaticReader::read`] for a socket with a snapshot; queries its descriptor only if necessary.
    ///
    /// Options of sockets with equal marks are read once, until [`StaticReader::forget`].
    ///
    /// # Errors
    /// As [`StaticReader::read`].
    pub fn read_seen(
        &mut self,
        fd: BorrowedFd<'_>,
        seen: &Seen<'_>,
    ) -> Result<TcpStatic, RepairError> {
        if !seen.is_enough() {
            return self.read(fd);
        }
        check_host_addresses(seen.local, seen.remote)?;
        let read = match self.known.0.get(seen.marks) {
            Some(known) => known.clone(),
            None => {
                let read = SocketOptions::read(fd, seen.v6_socket)?;
                self.known.0.insert(seen.marks.into(), read.clone());
                read
            }
        };
        Ok(TcpStatic {
            local: seen.local,
            remote: seen.remote,
            v6_socket: seen.v6_socket,
            window_scale: seen.window_scale,
            sack: seen.sack,
            timestamps: seen.timestamps,
            ecn: false,
            segment_size: segment_size(seen.snd_mss, seen.timestamps),
            receive_shut: seen.receive_shut,
            options: read.with_sizes(seen),
        })
    }

    /// Discards the known options: the host determines some defaults, which may change.
    pub fn forget(&mut self) {
        self.known.0.clear();
    }
}
