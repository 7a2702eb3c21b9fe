//! The static state of many sockets with few system calls: from snapshots taken without stopping the process, and with
//! one reading of options for all sockets with equal options.

use super::error::RepairError;
use super::options::SocketOptions;
use super::queue_levels::QueueLevels;
use super::static_state::{TcpStaticReader, TcpStaticState, check_host_addresses, segment_size};
use holdfast_sys::tcp_info::TcpState;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

/// Snapshot of a connection's socket, all fields at one instant: the contents of [`TcpStaticState`], under the same names,
/// and the fill levels of the queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpStaticSnapshot<'a> {
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
    pub is_plain: bool,
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
    pub queue: QueueLevels,
    /// Fingerprint of all other options: equal for equal options.
    pub option_fingerprint: &'a [u8],
}

impl TcpStaticSnapshot<'_> {
    /// Returns true if the socket itself need not be queried. Other states are rare, and each has its own meaning for
    /// queues and refusals.
    #[must_use]
    pub fn is_sufficient(&self) -> bool {
        self.is_plain && self.state == TcpState::Established
    }
}

/// Known options, by the marks of the socket that they were read from.
#[derive(Debug, Default)]
pub(super) struct SocketOptionsCache(HashMap<Box<[u8]>, SocketOptions>);

impl TcpStaticReader {
    /// Does the same as [`TcpStaticReader::read`] for a socket with a snapshot; queries its descriptor only if necessary.
    ///
    /// Options of sockets with equal marks are read once, until [`TcpStaticReader::forget_options`].
    ///
    /// # Errors
    /// As [`TcpStaticReader::read`].
    pub fn read_snapshot(
        &mut self,
        fd: BorrowedFd<'_>,
        snapshot: &TcpStaticSnapshot<'_>,
    ) -> Result<TcpStaticState, RepairError> {
        if !snapshot.is_sufficient() {
            return self.read(fd);
        }
        check_host_addresses(snapshot.local, snapshot.remote)?;
        let options = match self.known_options.0.get(snapshot.option_fingerprint) {
            Some(options) => options.clone(),
            None => {
                let read = SocketOptions::read(fd, snapshot.v6_socket)?;
                self.known_options
                    .0
                    .insert(snapshot.option_fingerprint.into(), read.clone());
                read
            }
        };
        Ok(TcpStaticState {
            local: snapshot.local,
            remote: snapshot.remote,
            v6_socket: snapshot.v6_socket,
            window_scale: snapshot.window_scale,
            sack: snapshot.sack,
            timestamps: snapshot.timestamps,
            ecn: false,
            segment_size: segment_size(snapshot.snd_mss, snapshot.timestamps),
            receive_shut: snapshot.receive_shut,
            options: options.with_tuned_sizes(snapshot),
        })
    }

    /// Discards the known options: the host determines some defaults, which may change.
    pub fn forget_options(&mut self) {
        self.known_options.0.clear();
    }
}
