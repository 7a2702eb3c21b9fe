//! Size of a channel's receive buffer, which bounds the bytes of a peer that are on their way to this node.
//!
//! The memory of a process that moves arrives in bursts, as fast as the donor can send, beside the packets of clients that are
//! held here. Without a bound the kernel lets the buffer grow to megabytes, bursts overflow the queue of the network
//! interface (256 packets of a virtual one, some 512 of many others), and a client whose packet is lost there waits at
//! least 200 ms until its kernel sends the packet again (RFC 6298, section 2.4; Linux's least retransmission timeout).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use holdfast_sys::tcp_info::TcpInfo;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};

/// Smallest and largest receive buffer, in bytes. The kernel doubles the value and offers between half and nine tenths of
/// the result as window: at least 88 packets, at most 160 of the smallest buffer.
const BUFFER_BYTES_MIN: usize = 128 * 1024;
const BUFFER_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Rate at which a peer may send on any path: 10 Gbit/s.
const BYTES_PER_SECOND: u64 = 1_250_000_000;

/// Gives the receive buffer of a connected socket a fixed size: that of the data under way at 10 Gbit/s.
///
/// # Errors
/// getsockopt(2) or setsockopt(2) fails.
pub(super) fn fix_size(socket: impl AsFd) -> io::Result<()> {
    let socket: BorrowedFd<'_> = socket.as_fd();
    let round_trip = Duration::from_micros(TcpInfo::read(socket)?.min_rtt_us.into());
    let bytes = bytes_for(round_trip);
    // More than `net.core.rmem_max` needs CAP_NET_ADMIN.
    set_socket_recv_buffer_size_force(socket, bytes)
        .or_else(|_| set_socket_recv_buffer_size(socket, bytes))?;
    Ok(())
}

/// Returns the size for a path with a round trip. A round trip that the kernel has not measured is no reason for a large buffer.
fn bytes_for(round_trip: Duration) -> usize {
    if round_trip >= Duration::from_micros(u32::MAX.into()) {
        return BUFFER_BYTES_MIN;
    }
    let under_way = u128::from(BYTES_PER_SECOND) * round_trip.as_micros() / 1_000_000;
    usize::try_from(under_way)
        .unwrap_or(BUFFER_BYTES_MAX)
        .clamp(BUFFER_BYTES_MIN, BUFFER_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_has_the_data_under_way_within_bounds() {
        assert_eq!(bytes_for(Duration::ZERO), BUFFER_BYTES_MIN);
        assert_eq!(bytes_for(Duration::from_micros(50)), BUFFER_BYTES_MIN);
        assert_eq!(bytes_for(Duration::from_millis(1)), 1_250_000);
        assert_eq!(bytes_for(Duration::from_secs(3)), BUFFER_BYTES_MAX);
        let unmeasured = Duration::from_micros(u32::MAX.into());
        assert_eq!(bytes_for(unmeasured), BUFFER_BYTES_MIN);
    }
}
