//! Messages between server programs and the daemon.

use holdfast_api::app::{FromDaemon, ToDaemon, decode, encode, join_pieces};

/// Decodes any packet in both directions to a message or an error with a text; a message survives encoding and
/// decoding.
pub fn run(data: &[u8]) -> bool {
    let to_daemon = match decode::<ToDaemon>(data) {
        Ok(message) => {
            let again = encode(&message).expect("it came so");
            assert_eq!(decode::<ToDaemon>(&again).as_ref().ok(), Some(&message));
            if let ToDaemon::Collected { unread, .. } = message {
                let _ = join_pieces(unread);
            }
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    };
    let from_daemon = match decode::<FromDaemon>(data) {
        Ok(message) => {
            let again = encode(&message).expect("it came so");
            assert_eq!(decode::<FromDaemon>(&again).as_ref().ok(), Some(&message));
            true
        }
        Err(_) => false,
    };
    to_daemon || from_daemon
}
