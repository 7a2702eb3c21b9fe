//! Save and restore of the file descriptors of a process tree.
//!
//! At the donor, [`inspect`] names the descriptors that cannot move, [`Draft::save`] reads everything while the tree
//! runs, and [`Draft::save_frozen`] reads it again while the tree is stopped. Only the difference ([`Frozen::changes`])
//! is sent during the freeze, and only files that differ are read again where [`Draft::expect`] could predict the
//! result. No copy of a descriptor is kept while the tree runs: a copy would keep connections, locks and epoll sets
//! alive after the program closes them.
//!
//! At the acceptor, a [`Stock`] verifies the image, creates every open file once ([`Stock::prepare`]), brings each file
//! to its final state ([`Stock::finish`]), and assigns file descriptor numbers for each descriptor table
//! ([`Stock::arrangement`]).
//!
//! Differences that a program could notice, because the kernel neither shows nor accepts the state in question: an
//! edge-triggered or one-shot entry of epoll may be reported once more; the PIDs in `SO_PEERCRED` and `F_GETLK`, and
//! the groups in `SO_PEERGROUPS`, are the restorer's; descriptors in flight on a stream may arrive with bytes that were
//! sent just before them without descriptors; timers do not run during the freeze.
//!
//! TCP and UDP sockets are saved elsewhere: the donor's side returns a copy of each descriptor ([`Frozen::sockets`]),
//! and the acceptor's side reserves a slot.

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
