//! Authenticated datagrams between nodes.

use holdfast_wire::authenticated_datagram::{
    DATAGRAM_KEY_BYTES, DatagramAuthenticationKey, DatagramError, DatagramReceiver, PairKeys,
};

/// Start number of the sender's daemon, which is any node but n2.
pub const SENDER_BOOT: u64 = 1;
/// Start number of the daemon of the receiver n2.
pub const RECEIVER_BOOT: u64 = 4;
/// The key that corpus and receiver share.
pub const KEY: DatagramAuthenticationKey = DatagramAuthenticationKey([7; DATAGRAM_KEY_BYTES]);

/// Opens any bytes at node n2 twice: the second time, an authentic datagram must count as a repetition. Returns true if
/// the bytes have the form of a datagram.
pub fn run(data: &[u8]) -> bool {
    let name = "n2".parse().expect("a short name");
    let mut receiver = DatagramReceiver::new(name, RECEIVER_BOOT);
    let keys = PairKeys {
        boot: SENDER_BOOT,
        inbound: KEY,
        outbound: None,
    };
    let first = receiver.open(|_| Some(keys), data);
    let second = receiver.open(|_| Some(keys), data);
    match first {
        Ok(_) => assert_eq!(second, Err(DatagramError::Replayed)),
        Err(error) => assert_eq!(second, Err(error)),
    }
    first != Err(DatagramError::Malformed)
}
