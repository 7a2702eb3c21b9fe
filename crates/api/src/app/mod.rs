//! The protocol between a server program and the daemon of its host.
//!
//! A program connects a Unix `SOCK_SEQPACKET` socket to the daemon's `app.sock`. Every packet is one message: a version
//! byte ([`PROTOCOL_VERSION`]), then a [`ToDaemon`] or [`FromDaemon`] in postcard's form, at most
//! [`MESSAGE_BYTES_MAX`] in all, with at most [`DESCRIPTORS_MAX`] descriptors (SCM_RIGHTS, unix(7)). What is bigger is
//! split over messages, see [`split`]. Parsing is total: [`decode`] gives a value or an error.
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
//! # A connection leaves
//! ```text
//!                                   ◄──  Asked{flows, to, drain}      the operator's wish; or the program's own:
//!   HandOff{items, to, drain} + fds ──►            a duplicate of each socket; the program keeps its own, and is quiet
//!                                   ◄──  Collect{flows}               UDP: what is in the shared socket's queue?
//!   Collected{..}                   ──►
//!                                   ◄──  Gone{flows, to}              the program closes its descriptor; or
//!                                   ◄──  Kept{flows, reason}          it goes on as if nothing had been
//! ```
//! # A connection arrives
//! ```text
//!                                   ◄──  Incoming{items} + fds        prepared, not usable
//!                                   ◄──  State{id, ..}                what the donor's program said about it
//!                                        (or States{items}, of several)
//!   Received{ids}                   ──►            the program has descriptor and state: the daemon may commit
//!                                                  (or Refused{ids, reason}, at any time before)
//!                                   ◄──  Go{ids}                      the connection is this program's; or
//!                                   ◄──  Cancel{ids, reason}          it is not, the program closes its descriptor
//! ```
//! `Received` comes before commit, so that from commit on all that the connection needs is outside the daemon: if the
//! daemon dies then, it asks the holder after its restart and answers the program's `Reclaim` with `Go`.
//!
//! # The daemon dies
//! The program keeps every descriptor, connects again with a growing delay, and sends `Open`, `Serve`, `Accepted` anew,
//! then `Reclaim` (with descriptors) for what was on its way. The daemon asks the holder of the steering table and
//! answers each: `Gone` or `Kept` to what was donated, `Go` or `Cancel` to what was incoming. Connections that were
//! not on their way are served on, untouched.

mod channel;
mod codec;
mod listener;
mod message;
mod pieces;

pub use channel::{Channel, Packet};
pub use codec::{DecodeError, EncodeError, decode, encode, split};
pub use listener::Listener;
pub use message::{
    FromDaemon, HandOffItem, IncomingItem, ReclaimItem, StateItem, StillWaiting, ToDaemon,
};
pub use pieces::{Piece, PieceError, join_pieces, split_pieces};

/// The version byte that every message begins with.
pub const PROTOCOL_VERSION: u8 = 2;
/// The longest message, version byte included.
pub const MESSAGE_BYTES_MAX: usize = 60 * 1024;
/// The most descriptors with one message. (The kernel's limit is 253, SCM_MAX_FD.)
pub const DESCRIPTORS_MAX: usize = 64;
/// The longest application state of one connection.
pub const APPLICATION_STATE_BYTES_MAX: usize = 48 * 1024;
/// Where the daemon listens unless its configuration says otherwise.
pub const SOCKET_PATH: &str = "/run/holdfast/app.sock";
