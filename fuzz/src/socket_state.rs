//! State of a TCP socket from a donor: the acceptor decodes it, and builds a packet from it.

use holdfast_tcp_repair::{TcpDynamicState, TcpStaticState, injected_peer_packet};
use serde::{Deserialize, Serialize};

/// Both parts of a socket's state, encoded like the blobs between nodes.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The part transferred before the freeze.
    pub static_state: TcpStaticState,
    /// The part transferred in the freeze.
    pub dynamic: TcpDynamicState,
}

/// Decoded state survives encoding and decoding, and computations on it do not panic.
pub fn run(data: &[u8]) -> bool {
    let Ok(state) = postcard::from_bytes::<State>(data) else {
        return false;
    };
    let bytes = postcard::to_stdvec(&state).expect("it came so");
    let again: State = postcard::from_bytes(&bytes).expect("it was encoded");
    assert_eq!(again, state);
    let State {
        static_state: fixed,
        dynamic,
    } = &state;
    if let Ok((sent, unsent)) = dynamic.outgoing_parts() {
        assert_eq!(sent.len() + unsent.len(), dynamic.outgoing.len());
    }
    let end = dynamic
        .first_outgoing()
        .wrapping_add(dynamic.outgoing.len() as u32);
    assert!(dynamic.write_seq.wrapping_sub(end) <= 1);
    assert!(dynamic.rcv_nxt.wrapping_sub(dynamic.received_data_end()) <= 1);
    if let Some(packet) = injected_peer_packet(fixed, dynamic) {
        assert!(packet.len() >= 40);
    }
    true
}
