//! What a donor says of a TCP socket: the acceptor decodes it, and makes a packet of it.

use holdfast_sys::tcp_repair::{TcpDynamic, TcpStatic, injection};
use serde::{Deserialize, Serialize};

/// Both parts, as the blobs between nodes have them.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Ahead of the freeze.
    pub fixed: TcpStatic,
    /// In it.
    pub dynamic: TcpDynamic,
}

/// What is decoded is encoded and decoded again as the same; what follows from it does not panic.
pub fn run(data: &[u8]) -> bool {
    let Ok(state) = postcard::from_bytes::<State>(data) else {
        return false;
    };
    let bytes = postcard::to_stdvec(&state).expect("it came so");
    let again: State = postcard::from_bytes(&bytes).expect("it was encoded");
    assert_eq!(again, state);
    let State { fixed, dynamic } = &state;
    if let Ok((sent, unsent)) = dynamic.outgoing_parts() {
        assert_eq!(sent.len() + unsent.len(), dynamic.outgoing.len());
    }
    let end = dynamic
        .first_outgoing()
        .wrapping_add(dynamic.outgoing.len() as u32);
    assert!(dynamic.write_seq.wrapping_sub(end) <= 1);
    assert!(dynamic.rcv_nxt.wrapping_sub(dynamic.received_data_end()) <= 1);
    if let Some(packet) = injection(fixed, dynamic) {
        assert!(packet.len() >= 40);
    }
    true
}
