//! Links to registrars, pool elements and pool users.

use holdfast_wire::rserpool::Transport;
use holdfast_wire::rserpool::asap::Message;

/// Identifies an SCTP association or a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkId {
    /// Made by the machine ([`Output::Connect`]), which numbers its links; a number is not used again.
    Initiated(u64),
    /// Made by the other end, and numbered by the daemon, which does not use a number again.
    Accepted(u64),
}

/// An action on links that a pool element or a pool user asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output<E> {
    /// Make a link. The daemon must call `handle_connected` or `handle_lost` afterwards, unless the link is closed
    /// before.
    Connect {
        /// Identifier of the link.
        link: LinkId,
        /// Address of the other end.
        to: Transport,
    },
    /// Close a link, established or not, after the messages sent on it. The machine does not name the link again, and
    /// the daemon drops messages that arrive on it.
    Close {
        /// Link to close.
        link: LinkId,
    },
    /// Send a message, with ASAP's payload protocol identifier if the transport has one. On a link that is not
    /// established yet, the daemon sends as soon as the transport accepts data; SCTP can carry it in its handshake.
    Send {
        /// Link on which the message is sent.
        link: LinkId,
        /// ASAP message to send.
        message: Message,
    },
    /// Report an event to its observers.
    Event(E),
}
