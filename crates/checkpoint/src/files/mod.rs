//! Save and restore of the file descriptors of a process tree.
//!
//! At the donor, [`find_descriptor_blockers`] names the descriptors that cannot move, [`FilesSnapshot::save`] reads everything while the tree
//! runs, and [`FilesSnapshot::save_frozen`] reads it again while the tree is stopped. Only the difference ([`FrozenFiles::changes`])
//! is sent during the freeze, and only files that differ are read again where [`FilesSnapshot::predict_freeze`] could predict the
//! result. No copy of a descriptor is kept while the tree runs: a copy would keep connections, locks and epoll sets
//! alive after the program closes them.
//!
//! At the acceptor, a [`FdStore`] verifies the image, creates every open file once ([`FdStore::prepare`]), brings each file
//! to its final state ([`FdStore::apply_final`]), and assigns file descriptor numbers for each descriptor table
//! ([`FdStore::table_steps`]).
//!
//! Differences that a program could notice, because the kernel neither shows nor accepts the state in question: an
//! edge-triggered or one-shot entry of epoll may be reported once more; the PIDs in `SO_PEERCRED` and `F_GETLK`, and
//! the groups in `SO_PEERGROUPS`, are the restorer's; descriptors in flight on a stream may arrive with bytes that were
//! sent just before them without descriptors; timers do not run during the freeze.
//!
//! TCP and UDP sockets are saved elsewhere: the donor's side returns a copy of each descriptor ([`FrozenFiles::sockets`]),
//! and the acceptor's side reserves a slot.

mod acceptor;
mod descriptor_listings;
mod descriptor_survey;
mod donor;
mod epoll_digest;
mod error;
mod fdinfo;
mod fdinfo_cache;
pub mod image;
mod inspect;
mod kinds;
mod lock_handover;
mod lock_risks;
mod syscalls;

pub use acceptor::{
    DescriptorTableSlot, DescriptorTableStep, FdStore, InProcessWatch, ProvidedFiles,
};
pub use descriptor_listings::{DescriptorListing, ListedDescriptor};
pub(crate) use descriptor_survey::shared_tables;
pub(crate) use donor::OutsideHolders;
pub use donor::{DescriptorCopier, FilesSnapshot, FrozenFiles, ProcessFd, SaveLimits, SocketFds};
pub use epoll_digest::EpollDigest;
pub use error::{BlockReason, DescriptorBlocker, FilesError, FilesRefusal};
pub use fdinfo::{EpollLine, FdInfo, FileLeaseError, InotifyLine};
pub use image::FilesImage;
pub use image::changes::FilesImageChanges;
pub use inspect::find_descriptor_blockers;
pub(crate) use kinds::nameless_content::create as create_nameless;
pub(crate) use kinds::pipe::read_content as pipe_content;
pub(crate) use kinds::terminal::open_slave;
pub(crate) use kinds::unix::peek as unix_queue;
pub use lock_handover::{ContendedLock, LOCKS_MAX, LockHandoverStep, LockedFileIdentity};
pub(crate) use lock_handover::{LockChange, file_system, is_lock_taken};
pub use lock_risks::RiskyLock;
pub(crate) use lock_risks::{handover_risk, is_readable, waiting_requests};
pub(crate) use syscalls::{close_all, compare_files as compare_open_files};
