//! Messages between OpenArena's server and its clients: protocol 71 of OpenArena, which is protocol 68 of Quake III
//! Arena on the wire.
//!
//! The module has no IO and no clock. Every parser is total: it returns a value or [`Malformed`], and never panics.
//!
//! A datagram is either *connectionless*, four bytes of ones and a text ([`connectionless`]), or a piece of a numbered
//! message ([`netchan`]). A message's bytes are scrambled ([`scramble`]) and hold a bit stream in which a fixed Huffman
//! code stands for most bytes ([`bits`], [`fixed_huffman`]).

pub mod adaptive_huffman;
pub mod bits;
pub mod client_message;
pub mod connectionless;
pub mod fixed_huffman;
pub mod netchan;
pub mod scramble;
pub mod server_message;

/// Commands that either side keeps until the other side has acknowledged them.
pub const COMMANDS_RETAINED: usize = 64;

/// Invalid bytes, caused by the peer or by the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The message ends too early.
    Truncated,
    /// A text or a list is longer than the protocol allows.
    TooLong,
    /// The code, number or operation is unknown.
    Unknown,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Truncated => "the message is truncated",
            Self::TooLong => "a text or list in the message is too long",
            Self::Unknown => "the message has an unknown code, number or operation",
        })
    }
}

impl std::error::Error for Malformed {}
