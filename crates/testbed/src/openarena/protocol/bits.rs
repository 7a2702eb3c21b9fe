//! Bit streams: a number's bits beyond whole bytes come first and uncoded, then its whole bytes by the fixed code.

use super::{Malformed, fixed_huffman};

/// Bytes of the longest text, including its end.
const TEXT_MAX: usize = 8192;

/// Reads a bit stream.
#[derive(Clone, Debug)]
pub struct BitReader<'a> {
    bytes: &'a [u8],
    /// Bits that were read.
    position: usize,
}

impl<'a> BitReader<'a> {
    /// Creates a reader at the first bit.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    /// Reads one uncoded bit.
    ///
    /// # Errors
    /// No bit is left.
    pub fn read_bit(&mut self) -> Result<bool, Malformed> {
        let byte = self
            .bytes
            .get(self.position / 8)
            .ok_or(Malformed::Truncated)?;
        let bit = byte >> (self.position % 8) & 1;
        self.position += 1;
        Ok(bit == 1)
    }

    /// Reads a number of 1 to 32 bits.
    ///
    /// # Errors
    /// The stream ends too early, or has bits that are no code.
    pub fn read_bits(&mut self, bits: u32) -> Result<u32, Malformed> {
        let raw = bits % 8;
        let mut value = 0;
        for place in 0..raw {
            value |= u32::from(self.read_bit()?) << place;
        }
        for place in (raw..bits).step_by(8) {
            value |= u32::from(self.read_byte()?) << place;
        }
        Ok(value)
    }

    /// Reads a byte by its code.
    ///
    /// # Errors
    /// As [`read_bits`](Self::read_bits).
    pub fn read_byte(&mut self) -> Result<u8, Malformed> {
        let left = self.bytes.len() * 8 - self.position;
        let (byte, count) = fixed_huffman::decode(self.peek_bits()).ok_or(Malformed::Unknown)?;
        if count as usize > left {
            return Err(Malformed::Truncated);
        }
        self.position += count as usize;
        Ok(byte)
    }

    /// Reads a signed number of 32 bits.
    ///
    /// # Errors
    /// As [`read_bits`](Self::read_bits).
    pub fn read_i32(&mut self) -> Result<i32, Malformed> {
        Ok(self.read_bits(32)? as i32)
    }

    /// Reads a text up to its zero byte. Non-ASCII bytes and percent signs become full stops, as on both sides of the
    /// protocol.
    ///
    /// # Errors
    /// As [`read_bits`](Self::read_bits), or the text is too long.
    pub fn read_string(&mut self) -> Result<String, Malformed> {
        let mut text = String::new();
        loop {
            match self.read_byte()? {
                0 => return Ok(text),
                _ if text.len() + 1 >= TEXT_MAX => return Err(Malformed::TooLong),
                byte => text.push(char::from(sanitize(byte))),
            }
        }
    }

    /// Returns at least the next 11 bits, with zeros behind the last.
    fn peek_bits(&self) -> u32 {
        let mut bytes = [0; 4];
        let rest = self.bytes.get(self.position / 8..).unwrap_or_default();
        let count = rest.len().min(bytes.len());
        bytes[..count].copy_from_slice(&rest[..count]);
        u32::from_le_bytes(bytes) >> (self.position % 8)
    }
}

/// Writes a bit stream.
#[derive(Clone, Debug, Default)]
pub struct BitWriter {
    bytes: Vec<u8>,
    /// Bits that were written.
    position: usize,
}

impl BitWriter {
    /// Writes the lowest `bits` bits of a number, 1 to 32.
    pub fn write_bits(&mut self, value: u32, bits: u32) {
        let raw = bits % 8;
        self.write_raw(value, raw);
        for place in (raw..bits).step_by(8) {
            self.write_byte((value >> place) as u8);
        }
    }

    /// Writes a byte by its code.
    pub fn write_byte(&mut self, byte: u8) {
        let (bits, count) = fixed_huffman::encode(byte);
        self.write_raw(bits, count);
    }

    /// Writes a signed number of 32 bits.
    pub fn write_i32(&mut self, value: i32) {
        self.write_bits(value as u32, 32);
    }

    /// Writes a text and its end.
    pub fn write_string(&mut self, text: &str) {
        let bytes = text.bytes().filter(|byte| *byte != 0);
        for byte in bytes.take(TEXT_MAX - 1) {
            self.write_byte(sanitize(byte));
        }
        self.write_byte(0);
    }

    /// Returns the stream. The protocol counts one byte more if the last byte is full.
    #[must_use]
    pub fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.resize(self.position / 8 + 1, 0);
        self.bytes
    }

    /// Writes uncoded bits, the lowest first.
    fn write_raw(&mut self, value: u32, count: u32) {
        for place in 0..count {
            if self.position.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if let Some(last) = self.bytes.last_mut() {
                *last |= ((value >> place & 1) as u8) << (self.position % 8);
            }
            self.position += 1;
        }
    }
}

/// Returns the byte that both sides use for a byte of a text.
pub(super) fn sanitize(byte: u8) -> u8 {
    if byte.is_ascii() && byte != b'%' {
        byte
    } else {
        b'.'
    }
}
