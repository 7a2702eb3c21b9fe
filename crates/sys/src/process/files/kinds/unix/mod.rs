//! Unix sockets.

mod address;
mod list;
mod naming;
mod peer;
mod queue;
mod restore;
mod save;
mod stage;

pub use list::Listed;
pub use queue::peek;
pub use restore::{fill, make, settle};
pub use save::save;
pub use stage::Stage;

/// Options that travel, all of `SOL_SOCKET`: out-of-band data inline, priority, `SO_PASSCRED`, `SO_RCVLOWAT`, time-outs,
/// `SO_TIMESTAMP`, `SO_PASSSEC`, `SO_TIMESTAMPNS`, `SO_PEEK_OFF`, `SO_PASSPIDFD`, `SO_PASSRIGHTS`.
const OPTIONS: [(i32, i32); 12] = [
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_PASSCRED),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    (libc::SOL_SOCKET, libc::SO_PASSSEC),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF),
    (libc::SOL_SOCKET, 76),
    (libc::SOL_SOCKET, 83),
];
/// Sizes of buffers as they are asked for; the kernel doubles them.
const BUFFERS: [(i32, i32); 2] = [
    (libc::SO_SNDBUF, libc::SO_SNDBUFFORCE),
    (libc::SO_RCVBUF, libc::SO_RCVBUFFORCE),
];
