//! The packet that gives a restored socket what repair mode cannot: the peer's FIN, or its acknowledgement of ours.

use super::dynamic_state::TcpDynamic;
use super::static_state::TcpStatic;
use crate::packet::{Segment, flags, tcp_packet};
use crate::tcp_info::TcpState;

/// The packet to deliver to a restored socket before it is activated, as if the peer had sent it (again): the FIN for
/// CLOSE-WAIT, LAST-ACK and CLOSING, an acknowledgement of our FIN for FIN-WAIT-2; `None` for the other states. It is a
/// whole IP packet with checksums, to be written to a TUN device. The socket may answer a FIN with an acknowledgement.
///
/// It has no timestamp option: a receiver takes such a segment as it is and keeps its last timestamp.
#[must_use]
pub fn injection(fixed: &TcpStatic, state: &TcpDynamic) -> Option<Vec<u8>> {
    let (flag, acknowledgement) = match state.state {
        TcpState::CloseWait | TcpState::LastAck | TcpState::Closing => {
            (flags::FIN, state.first_outgoing())
        }
        TcpState::FinWait2 => (0, state.write_seq),
        _ => return None,
    };
    let scale = fixed.window_scale.map_or(0, |(send, _)| send.min(14));
    let segment = Segment {
        sequence: state.received_data_end(),
        acknowledgement,
        flags: flag | flags::ACK,
        window: u16::try_from(state.window.snd_wnd >> scale).unwrap_or(u16::MAX),
        timestamp: None,
    };
    tcp_packet(fixed.remote, fixed.local, &segment, &[])
}
