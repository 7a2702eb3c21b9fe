//! Scrambling of messages with a key that changes from byte to byte along a text known to both sides.

use super::bits::sanitize;

/// Unscrambled bytes at the beginning of a client's message.
pub const CLIENT_CLEAR_BYTES: usize = 12;
/// Unscrambled bytes at the beginning of a server's message.
pub const SERVER_CLEAR_BYTES: usize = 4;

/// Scrambles a message's bytes from `clear` on, or makes them readable again.
pub fn scramble(message: &mut [u8], clear: usize, key: i32, text: &str) {
    let mut key = key as u8;
    let mut letters = text.bytes().map(sanitize).cycle();
    for (index, byte) in message.iter_mut().enumerate().skip(clear) {
        key ^= letters.next().unwrap_or(0) << (index & 1);
        *byte ^= key;
    }
}
