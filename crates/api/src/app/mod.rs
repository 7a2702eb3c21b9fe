//! The protocol between a server program and the daemon of its host.
//!
//! A program connects a Unix `SOCK_SEQPACKET` socket to the daemon's `app.sock`. Every packet is one message: a version
//! byte ([`PROTOCOL_VERSION`]), then a [`ToDaemon`] or [`FromDaemon`] encoded by postcard, at most
//! [`MESSAGE_BYTES_MAX`] in all, with at most [`DESCRIPTORS_MAX`] descriptors (SCM_RIGHTS, unix(7)). Larger content is
//! split over several messages, see [`split`]. Parsing is total: [`decode`] gives a value or an error.
//!
//! # A session
//! ```text
//! program                                daemon
//!   Open{name}                      ──►
//!                                   ◄──  Opened{node}
//!   Serve{service, pool, addresses} ──►            the program has a listener, and takes connections handed to it
//!   Accepted{service, flows}        ──►            connections that came by that listener
//!   Closed{flows}                   ──►            the program is done with them
//! ```
//! # A connection moves away
//! ```text
//!                                   ◄──  HandoffRequested{flows, to, drain}
//!                                                  (omitted if the program itself starts the handoff)
//!   HandOff{items, to, drain} + fds ──►            a duplicate of each socket; the program does not touch its own
//!                                   ◄──  Collect{flows}               UDP: requests the shared socket's datagrams
//!   Collected{..}                   ──►
//!                                   ◄──  Moved{flows, to}             the program closes its descriptor; or
//!                                   ◄──  Kept{flows, reason}          the program continues on the unchanged socket
//! ```
//! # A connection arrives
//! ```text
//!                                   ◄──  Incoming{items} + fds        prepared, not usable
//!                                   ◄──  State{id, ..}                application state from the donor's program
//!                                        (or States{items}, of several)
//!   Received{ids}                   ──►            the program has descriptor and state: the daemon may commit
//!                                                  (or Refused{ids, reason}, at any time before)
//!                                   ◄──  Activate{ids}                the connection is this program's; or
//!                                   ◄──  Cancel{ids, reason}          it is not, the program closes its descriptor
//! ```
//! `Received` precedes the commit, so that everything that the connection needs is outside the daemon when the commit
//! happens. If the daemon crashes afterwards, it asks the holder after its restart and answers the program's `Reclaim`
//! with `Activate`.
//!
//! # The daemon crashes
//! The program keeps every descriptor, reconnects with a growing delay, and sends `Open`, `Serve`, `Accepted` again,
//! then `Reclaim` (with descriptors) for the flows in transit. The daemon asks the holder of the steering table and
//! answers each flow: `Moved` or `Kept` for a donated flow, `Activate` or `Cancel` for an incoming one. Other
//! connections are served without interruption.

mod channel;
mod codec;
mod listener;
mod message;
mod pieces;

pub use channel::{Channel, ChannelMessage};
pub use codec::{DecodeError, EncodeError, decode, encode, split};
pub use listener::Listener;
pub use message::{
    FromDaemon, HandOffItem, IncomingItem, ReclaimItem, ReclaimedFlowState, StateItem, ToDaemon,
};
pub use pieces::{DatagramPiece, PieceError, join_pieces, split_pieces};

/// The version byte at the start of every message.
pub const PROTOCOL_VERSION: u8 = 2;
/// Maximum length of a message in bytes, version byte included.
pub const MESSAGE_BYTES_MAX: usize = 60 * 1024;
/// Maximum number of descriptors with one message. (The kernel's limit is 253, SCM_MAX_FD.)
pub const DESCRIPTORS_MAX: usize = 64;
/// Maximum length of one connection's application state, in bytes.
pub const APPLICATION_STATE_BYTES_MAX: usize = 48 * 1024;
/// Default path of the daemon's socket for programs.
pub const SOCKET_PATH: &str = "/run/holdfast/app.sock";
