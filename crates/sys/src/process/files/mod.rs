//! The descriptors of a process tree, out of one host and into another.
//!
//! At the donor, [`inspect`] names what cannot move, [`Draft::save`] reads everything while the tree runs, and
//! [`Draft::save_frozen`] reads it again while it is stopped; only the difference ([`Frozen::changes`]) crosses in the freeze,
//! and only what differs is read where [`Draft::expect`] could look ahead. No copy of a descriptor is kept while the tree
//! runs: it would keep connections, locks and epoll sets alive that the program closes.
//!
//! At the acceptor, a [`Stock`] verifies the image, makes every open file once ([`Stock::prepare`]), brings it to its final
//! state ([`Stock::finish`]), and says for each descriptor table which numbers to give them ([`Stock::arrangement`]).
//!
//! What a program could notice, since the kernel does not show or take it: an edge-triggered or one-shot entry of epoll
//! may be reported once more; the PID in `SO_PEERCRED` and `F_GETLK` is the restorer's, and `SO_PEERGROUPS` are; of a stream, descriptors in flight
//! may come with bytes that were sent just before them without; a timer stands still during the freeze.
//!
//! TCP and UDP sockets are handed through: a copy at the donor ([`Frozen::sockets`]), a slot at the acceptor.

mod acceptor;
mod donor;
mod error;
mod fdinfo;
mod handover;
pub mod image;
mod inspect;
mod kept;
mod kinds;
mod listed;
mod lock_risks;
mod raw;
mod survey;
mod watches;

pub use acceptor::{Given, OwnWatch, Place, Step, Stock};
pub(crate) use donor::Outside;
pub use donor::{Address, Copier, Draft, Frozen, Limits, Places};
pub use error::{Blocker, FilesError, Reason, Refusal};
pub use fdinfo::{EpollLine, FdInfo, InotifyLine, Lease};
pub use handover::{FileIdentity, LOCKS_MAX, LockStep, WantedLock};
pub(crate) use handover::{LockChange, file_system, unless_excluded};
pub use image::Image;
pub use image::changes::Changes;
pub use inspect::inspect;
pub(in crate::process) use kinds::content::create as create_nameless;
pub(crate) use kinds::pipe::content as pipe_content;
pub(crate) use kinds::terminal::open_slave;
pub(crate) use kinds::unix::peek as unix_queue;
pub use listed::{Listed, Listing};
pub use lock_risks::RiskyLock;
pub(crate) use lock_risks::{is_readable, risk, waiting};
pub(crate) use raw::{close_all, compare_files as compare_open_files};
pub(crate) use survey::shared_tables;
pub use watches::Watches;
