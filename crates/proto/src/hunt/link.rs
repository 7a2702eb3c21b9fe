//! Links to registrars, pool elements and pool users.

use holdfast_wire::rserpool::Transport;
use holdfast_wire::rserpool::asap::Message;

/// An SCTP association or a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    /// Made by the machine ([`Output::Connect`]), which numbers them; a number is not used again.
    Ours(u64),
    /// Made by the other end, numbered by the daemon, which does not use a number again.
    Theirs(u64),
}

/// Something for the daemon to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output<E> {
    /// Make a link. `handle_connected` or `handle_lost` is to follow, unless it is closed before.
    Connect {
        /// Its name.
        link: Link,
        /// Where to.
        to: Transport,
    },
    /// Close a link, whether it is made already or not, after what was sent. It is not named again, and what comes from
    /// it is to be dropped.
    Close {
        /// Which.
        link: Link,
    },
    /// Send a message, with ASAP's payload protocol identifier where the transport has one. If the link is not made
    /// yet, it is to be sent as soon as the transport takes it; SCTP can carry it in its handshake.
    Send {
        /// Where.
        link: Link,
        /// What.
        message: Message,
    },
    /// Tell whoever is interested.
    Event(E),
}
