//! Authenticated datagrams between nodes.

use holdfast_wire::authenticated_datagram::{DatagramError, DatagramReceiver};
use holdfast_wire::group_data::GroupKey;

/// The key that corpus and receiver share.
pub const KEY: GroupKey = GroupKey {
    number: 3,
    bytes: [7; 32],
};

/// Opens any bytes at node n2 twice: the second time, an authentic datagram must count as a repetition. Returns true if
/// the bytes have the form of a datagram.
pub fn run(data: &[u8]) -> bool {
    let mut receiver = DatagramReceiver::new("n2".parse().expect("a short name"));
    let first = receiver.open(&[KEY], data);
    let second = receiver.open(&[KEY], data);
    match first {
        Ok(_) => assert_eq!(second, Err(DatagramError::Replayed)),
        Err(error) => assert_eq!(second, Err(error)),
    }
    first != Err(DatagramError::Malformed)
}
