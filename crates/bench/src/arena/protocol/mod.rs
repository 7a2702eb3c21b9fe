//! What a client of OpenArena's server says and hears: protocol 71 of OpenArena, which is protocol 68 of Quake III Arena
//! on the wire.
//!
//! Bytes in and out, no IO and no clock. Every parser is total: a value or [`Malformed`], never a panic.
//!
//! A datagram is either *connectionless*, four bytes of ones and a text ([`connectionless`]), or a piece of a numbered
//! message ([`netchan`]). A message's bytes are scrambled ([`scramble`]) and hold a stream of bits in which most bytes stand by a
//! fixed Huffman code ([`bits`], [`code`]).

pub mod adaptive;
pub mod bits;
pub mod code;
pub mod connectionless;
pub mod from_client;
pub mod from_server;
pub mod netchan;
pub mod scramble;

/// Commands that either side keeps until the other has acknowledged them.
pub const COMMANDS_KEPT: usize = 64;

/// Bytes that are not what they should be: the peer's fault, or the network's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The message ends before what it began.
    Short,
    /// A text or a list is longer than the protocol allows.
    TooLong,
    /// There is no such code, number or operation.
    Unknown,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Short => "a message that ends early",
            Self::TooLong => "a message with too long a part",
            Self::Unknown => "a message with an unknown part",
        })
    }
}

impl std::error::Error for Malformed {}
