//! Retransmission of the segment that a restored socket's peer waits for: the socket itself would send it only after
//! 1 s.

use super::dynamic_state::TcpDynamicState;
use super::error::{RepairError, StepContext};
use super::static_state::TcpStaticState;
use holdfast_sys::packet::{TIMESTAMP_OPTION_LEN, TcpSegmentHeader, tcp_flags, tcp_packet};
use holdfast_sys::sockopt::get_int;
use libc::IPPROTO_TCP;
use std::os::fd::BorrowedFd;

/// Number of data bytes that any peer accepts in a segment (RFC 9293 section 3.7.1).
const MSS_MIN: usize = 536;

/// Builds the first unacknowledged segment as the socket would retransmit it: a whole IP packet, to be sent at once.
/// Its acknowledgement gives the socket a round trip measurement, and so the right timeout. Returns `None` if the bytes
/// make no packet.
///
/// # Errors
/// The kernel's error.
pub(super) fn first_retransmission(
    socket: BorrowedFd<'_>,
    fixed: &TcpStaticState,
    state: &TcpDynamicState,
) -> Result<Option<Vec<u8>>, RepairError> {
    let (sent, _) = state.outgoing_parts()?;
    let (timestamp, options) = match fixed.timestamps {
        true => {
            let clock =
                get_int(socket, IPPROTO_TCP, libc::TCP_TIMESTAMP).at_step("TCP_TIMESTAMP")?;
            (Some(clock as u32), TIMESTAMP_OPTION_LEN)
        }
        false => (None, 0),
    };
    let payload_max = usize::from(fixed.segment_size).saturating_sub(options);
    let payload = &sent[..sent.len().min(payload_max.max(MSS_MIN - options))];
    let fin = match state.has_sent_fin() && payload.len() == sent.len() {
        true => tcp_flags::FIN,
        false => 0,
    };
    let window = &state.window;
    let advertised_window = window.rcv_wnd.saturating_sub(window.rcv_wup_back);
    let scale = fixed.window_scale.map_or(0, |(_, receive)| receive.min(14));
    let segment = TcpSegmentHeader {
        sequence: state.first_outgoing(),
        acknowledgement: state.rcv_nxt,
        flags: tcp_flags::ACK | tcp_flags::PSH | fin,
        window: u16::try_from(advertised_window >> scale).unwrap_or(u16::MAX),
        timestamp,
    };
    Ok(tcp_packet(fixed.local, fixed.remote, &segment, payload))
}
