//! A connection that no program has accepted yet, in the form that recreates it in a listener's queue: the results of
//! its handshake, and packets as if from the peer.

use super::dynamic_state::TcpDynamicState;
use super::error::RepairError;
use super::static_state::TcpStaticState;
use holdfast_sys::packet::{TcpSegmentHeader, tcp_flags, tcp_packet};
use holdfast_sys::tcp_info::TcpState;

/// Bytes of unread data per packet, small enough for every path.
const CHUNK_LEN: usize = 1200;

/// Most unread bytes that certainly fit the window of a new connection.
const UNREAD_MAX: usize = 48 * 1024;

/// Smallest MSS that the kernel accepts here, for IPv6 and IPv4.
const MSS_MIN: u16 = 1220;
const MSS_MIN_V4: u16 = 536;

/// Results of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeResult {
    /// Sequence number of the packet that ends the handshake.
    pub sequence: u32,
    /// Next timestamp of this side.
    pub timestamp: u32,
    /// The peer's MSS.
    pub mss: u16,
    /// Window scales, if negotiated, as [`TcpStaticState::window_scale`].
    pub window_scale: Option<(u8, u8)>,
    /// True if selective acknowledgements were negotiated.
    pub sack: bool,
    /// True if timestamps were negotiated.
    pub timestamps: bool,
    /// True if the timestamps of this side count microseconds.
    pub microseconds: bool,
    /// True if ECN was negotiated.
    pub ecn: bool,
}

/// Connection that waits to be accepted: see the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnacceptedConnection {
    /// Handshake results that the listener's host must know before the packets arrive.
    pub handshake: HandshakeResult,
    /// Whole IP packets, to be delivered in this order: the end of the handshake, unread data, the peer's FIN.
    pub packets: Vec<Vec<u8>>,
}

/// Builds the queued form from a connection's state.
///
/// # Errors
/// [`RepairError::Inconsistent`] if a program has used the connection, or it cannot wait in a queue.
pub fn unaccepted_connection(
    fixed: &TcpStaticState,
    state: &TcpDynamicState,
) -> Result<UnacceptedConnection, RepairError> {
    let inconsistent = |why| Err(RepairError::Inconsistent(why));
    if !matches!(state.state, TcpState::Established | TcpState::CloseWait) {
        return inconsistent("a connection that waits to be accepted has ended");
    }
    if !state.outgoing.is_empty() || state.fin_unsent {
        return inconsistent("a program has used a connection that waits to be accepted");
    }
    if state.unread.len() > UNREAD_MAX {
        return inconsistent(
            "a connection that waits to be accepted has more than 48 KiB of unread data",
        );
    }
    let first = (state.received_data_end()).wrapping_sub(state.unread.len() as u32);
    let scale = fixed.window_scale.map_or(0, |(send, _)| send.min(14));
    let mut packets = Vec::with_capacity(2 + state.unread.len() / CHUNK_LEN);
    let mut sequence = first;
    let mut add_packet = |flag: u8, payload: &[u8]| {
        let segment = TcpSegmentHeader {
            sequence,
            acknowledgement: state.write_seq,
            flags: flag | tcp_flags::ACK,
            window: u16::try_from(state.window.snd_wnd >> scale).unwrap_or(u16::MAX),
            timestamp: None,
        };
        packets.extend(tcp_packet(fixed.remote, fixed.local, &segment, payload));
        sequence = sequence.wrapping_add(payload.len() as u32);
    };
    add_packet(0, &[]);
    for chunk in state.unread.chunks(CHUNK_LEN) {
        add_packet(tcp_flags::PSH, chunk);
    }
    if state.state.has_received_fin() {
        add_packet(tcp_flags::FIN, &[]);
    }
    let mss_min = if fixed.local.is_ipv4() {
        MSS_MIN_V4
    } else {
        MSS_MIN
    };
    let handshake = HandshakeResult {
        sequence: first,
        // Two ticks are added, as in `restore`: certainly not less than the peer has seen.
        timestamp: state.timestamp.wrapping_add(2),
        mss: state.mss.max(mss_min),
        window_scale: fixed.window_scale,
        sack: fixed.sack,
        timestamps: fixed.timestamps,
        microseconds: state.timestamp & 1 != 0,
        ecn: fixed.ecn,
    };
    Ok(UnacceptedConnection { handshake, packets })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SocketOptions;

    fn fixed(local: &str, remote: &str) -> TcpStaticState {
        TcpStaticState {
            local: local.parse().expect("an address"),
            remote: remote.parse().expect("an address"),
            v6_socket: false,
            window_scale: Some((7, 8)),
            sack: true,
            timestamps: true,
            ecn: false,
            segment_size: 1460,
            receive_shut: false,
            options: SocketOptions::default(),
        }
    }

    fn state(unread: usize) -> TcpDynamicState {
        TcpDynamicState {
            state: TcpState::CloseWait,
            write_seq: 77,
            // The unread bytes begin just before sequence numbers wrap around, and the FIN counts.
            rcv_nxt: (unread as u32).wrapping_sub(9),
            mss: 100,
            timestamp: 1001,
            unread: vec![7; unread],
            ..TcpDynamicState::default()
        }
    }

    #[test]
    fn packets_have_consecutive_sequence_numbers() {
        for unread in [0, 1, CHUNK_LEN, CHUNK_LEN + 1, UNREAD_MAX] {
            let (static_state, state) = (fixed("10.0.0.1:80", "10.0.1.2:4242"), state(unread));
            let connection = unaccepted_connection(&static_state, &state).expect("it can wait");
            let mut next_sequence = connection.handshake.sequence;
            assert_eq!(next_sequence, 10u32.wrapping_neg());
            for packet in &connection.packets {
                let number = |at: usize| u32::from_be_bytes(packet[at..at + 4].try_into().unwrap());
                assert_eq!((number(24), number(28)), (next_sequence, 77));
                next_sequence = next_sequence.wrapping_add((packet.len() - 40) as u32);
            }
            assert_eq!(next_sequence, state.received_data_end());
            let fin = connection.packets.last().expect("a packet")[33] & tcp_flags::FIN;
            assert_eq!(fin, tcp_flags::FIN);
            let handshake = connection.handshake;
            assert_eq!((handshake.mss, handshake.timestamp), (MSS_MIN_V4, 1003));
            assert!(handshake.microseconds);
        }
    }

    #[test]
    fn used_or_oversized_connection_is_refused() {
        let static_state = fixed("[fd00::1]:80", "[fd00::2]:4242");
        assert!(unaccepted_connection(&static_state, &state(UNREAD_MAX)).is_ok());
        assert!(unaccepted_connection(&static_state, &state(UNREAD_MAX + 1)).is_err());
        let used = TcpDynamicState {
            outgoing: vec![1],
            ..state(0)
        };
        assert!(unaccepted_connection(&static_state, &used).is_err());
        let ended = TcpDynamicState {
            state: TcpState::FinWait2,
            ..state(0)
        };
        assert!(unaccepted_connection(&static_state, &ended).is_err());
    }
}
