//! Numbered messages in datagrams: a message of 1300 bytes or more is sent in fragments, and the last fragment is
//! shorter.
//!
//! Lost datagrams are not sent again. A gap in the numbers means a lost message.

use super::Malformed;

/// Flag in the number of a fragment.
const FRAGMENT_FLAG: u32 = 1 << 31;
/// Bytes of each fragment but the last.
pub const FRAGMENT_BYTES: usize = 1300;
/// Bytes of the longest message.
pub const MESSAGE_MAX: usize = 16384;

/// Returns a datagram of a client: the message's number, the number of the client behind its address, the message.
#[must_use]
pub fn client_datagram(sequence: u32, client: u16, message: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::with_capacity(6 + message.len());
    datagram.extend(sequence.to_le_bytes());
    datagram.extend(client.to_le_bytes());
    datagram.extend(message);
    datagram
}

/// Receiver of the server's messages.
#[derive(Clone, Debug, Default)]
pub struct Reassembly {
    /// Number of the newest whole message.
    sequence: u32,
    fragments: Vec<u8>,
    /// Number of the message that the fragments belong to.
    fragments_of: u32,
    /// Messages that never arrived whole.
    pub lost: u64,
    /// Datagrams that arrived twice, or after a later one.
    pub duplicate_or_late: u64,
}

impl Reassembly {
    /// Returns the number of the newest whole message.
    #[must_use]
    pub fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Handles a datagram; returns the number and bytes of a message that is complete with it.
    ///
    /// # Errors
    /// The datagram is shorter than its header says, or the message is too long.
    pub fn handle(&mut self, datagram: &[u8]) -> Result<Option<(u32, Vec<u8>)>, Malformed> {
        let (head, rest) = datagram.split_first_chunk().ok_or(Malformed::Truncated)?;
        let number = u32::from_le_bytes(*head);
        let sequence = number & !FRAGMENT_FLAG;
        if sequence <= self.sequence {
            self.duplicate_or_late += 1;
            return Ok(None);
        }
        let message = if number & FRAGMENT_FLAG == 0 {
            rest.to_vec()
        } else if let Some(message) = self.add_fragment(sequence, rest)? {
            message
        } else {
            return Ok(None);
        };
        self.lost += u64::from(sequence - self.sequence - 1);
        self.sequence = sequence;
        self.fragments.clear();
        Ok(Some((sequence, message)))
    }

    fn add_fragment(&mut self, sequence: u32, rest: &[u8]) -> Result<Option<Vec<u8>>, Malformed> {
        let (start, rest) = rest.split_first_chunk().ok_or(Malformed::Truncated)?;
        let (length, bytes) = rest.split_first_chunk().ok_or(Malformed::Truncated)?;
        let start = usize::from(u16::from_le_bytes(*start));
        let length = usize::from(u16::from_le_bytes(*length));
        let bytes = bytes.get(..length).ok_or(Malformed::Truncated)?;
        if self.fragments_of != sequence {
            self.fragments_of = sequence;
            self.fragments.clear();
        }
        if start + length > MESSAGE_MAX {
            return Err(Malformed::TooLong);
        }
        // A fragment in between was lost: the message stays incomplete, and counts as lost when the next one arrives.
        if start != self.fragments.len() {
            return Ok(None);
        }
        self.fragments.extend(bytes);
        Ok((length < FRAGMENT_BYTES).then(|| std::mem::take(&mut self.fragments)))
    }
}
