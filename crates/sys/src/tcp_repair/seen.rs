//! The static state of many sockets with few system calls: what somebody saw of each from beside it, and one reading of
//! options for all sockets that have the same.

use super::error::RepairError;
use super::options::SocketOptions;
use super::queue::Queue;
use super::static_state::{StaticReader, TcpStatic, check_host_addresses, segment_size};
use crate::tcp_info::TcpState;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// A connection's socket as it was seen, all fields at one instant: what [`TcpStatic`] needs, under the names it has
/// there, and what its queues held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen<'a> {
    /// Own address; IPv4 even on an IPv6 socket where the flow is IPv4.
    pub local: SocketAddr,
    /// The peer's address, likewise.
    pub remote: SocketAddr,
    /// Whether the socket is an IPv6 one.
    pub v6_socket: bool,
    /// Window scales, if negotiated.
    pub window_scale: Option<(u8, u8)>,
    /// Selective acknowledgements negotiated.
    pub sack: bool,
    /// Timestamps negotiated.
    pub timestamps: bool,
    /// Payload of the largest segment sent (`tcpi_snd_mss`).
    pub snd_mss: u32,
    /// Connection state.
    pub state: TcpState,
    /// It has nothing that has to be asked for by name: no urgent data, filter, upper layer protocol, keys or ECN.
    pub plain: bool,
    /// The program shut its receiving direction (or the peer's FIN came).
    pub receive_shut: bool,
    /// `SO_SNDBUF`.
    pub send_buffer: u32,
    /// `SO_RCVBUF`.
    pub receive_buffer: u32,
    /// `SO_RCVLOWAT`.
    pub receive_low_water: u32,
    /// `TCP_WINDOW_CLAMP`.
    pub window_clamp: u32,
    /// What the queues hold.
    pub queue: Queue,
    /// What tells sockets with other options apart, but for those above: equal for equal options.
    pub marks: &'a [u8],
}

impl Seen<'_> {
    /// Whether nothing has to be asked of the socket itself. The states in which one side has closed are rare, and each
    /// has a meaning of its own for queues and refusals.
    #[must_use]
    pub fn is_enough(&self) -> bool {
        self.plain && self.state == TcpState::Established
    }
}

/// Options that were read, by the marks of the socket they were read from.
#[derive(Debug, Default)]
pub(super) struct Known(HashMap<Box<[u8]>, SocketOptions>);

impl StaticReader {
    /// [`StaticReader::read`] of a socket that was seen; its descriptor is asked only where it must be.
    ///
    /// Options of sockets with the same marks are read once, until [`StaticReader::forget`].
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

    /// Reads options anew from here on: what a socket leaves open is the host's to say, and that may change.
    pub fn forget(&mut self) {
        self.known.0.clear();
    }
}
