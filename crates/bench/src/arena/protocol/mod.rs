//! Messages between OpenArena's server and its clients: protocol 71 of OpenArena, which is protocol 68 of Quake III
//! Arena on the wire.
//!
//! The module has no IO and no clock. Every parser is total: it returns a value or [`Malformed`], and never panics.
//!
//! A datagram is either *connectionless*, four bytes of ones and a text ([`connectionless`]), or a piece of a numbered
//! message ([`netchan`]). A message's bytes are scrambled ([`scramble`]) and hold a bit stream in which a fixed Huffman
//! code stands for most bytes ([`bits`], [`code`]).

pub mod adaptive;
pub mod bits;
pub mod code;
pub mod connectionless;
pub mod from_client;
pub mod from_server;
pub mod netchan;
pub mod scramble;

/// Commands that either side keeps until the other side has acknowledged them.
pub const COMMANDS_KEPT: usize = 64;

/// Invalid bytes, caused by the peer or by the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The message ends too early.
    Short,
    /// A text or a list is longer than the protocol allows.
    TooLong,
    /// The code, number or operation is unknown.
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
