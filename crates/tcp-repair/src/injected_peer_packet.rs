//! The packet that gives a restored socket a state which repair mode cannot: the peer's FIN, or its acknowledgement of
//! the own FIN.

use super::dynamic_state::TcpDynamicState;
use super::static_state::TcpStaticState;
use holdfast_sys::packet::{TcpSegmentHeader, tcp_flags, tcp_packet};
use holdfast_sys::tcp_info::TcpState;

/// Returns the packet to deliver to a restored socket before activation, as if the peer had sent it (again): the FIN
/// for CLOSE-WAIT, LAST-ACK and CLOSING, an acknowledgement of the own FIN for FIN-WAIT-2; `None` for other states. The
/// packet is a whole IP packet with checksums, for a TUN device. The socket may answer a FIN with an acknowledgement.
///
/// The packet has no timestamp option: a receiver accepts such a segment and keeps its last timestamp.
#[must_use]
pub fn injected_peer_packet(fixed: &TcpStaticState, state: &TcpDynamicState) -> Option<Vec<u8>> {
    let (flag, acknowledgement) = match state.state {
        TcpState::CloseWait | TcpState::LastAck | TcpState::Closing => {
            (tcp_flags::FIN, state.first_outgoing())
        }
        TcpState::FinWait2 => (0, state.write_seq),
        _ => return None,
    };
    let scale = fixed.window_scale.map_or(0, |(send, _)| send.min(14));
    let segment = TcpSegmentHeader {
        sequence: state.received_data_end(),
        acknowledgement,
        flags: flag | tcp_flags::ACK,
        window: u16::try_from(state.window.snd_wnd >> scale).unwrap_or(u16::MAX),
        timestamp: None,
    };
    tcp_packet(fixed.remote, fixed.local, &segment, &[])
}
