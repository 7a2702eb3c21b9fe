//! Save and restore of TCP connections with the kernel's repair mode (`TCP_REPAIR`): a connection continues on another
//! host, and its peer notices nothing.
//!
//! The work is divided by the time at which each part can be done:
//!
//! | when | donor | acceptor |
//! | --- | --- | --- |
//! | before the freeze | [`read_static`], for many [`StaticReader::read_seen`] | [`prepare`] |
//! | in the freeze | [`extract`] | [`restore`], [`injection`] where there is one, [`activate`] |
//! | after the freeze | [`abandon`] (or [`resume`], when the handoff failed) | [`settle`] |
//!
//! A connection may be restored before the freeze, from a snapshot that was taken without stopping the process. If the
//! connection continues at the donor, it is restored again: [`RestoredSocket::take_back`],
//! [`RestoredSocket::keep_time`].
//!
//! [`extract`] switches the socket to repair mode. From then on, until [`resume`] or [`abandon`], the program must not
//! use the socket, and no packet may reach or leave it: ingress and egress of its flow must be shut first. The donor's
//! congestion window and threshold travel in [`TcpDynamic`], but the kernel has no socket option to set them.
//!
//! Repair mode cannot restore the timestamp last received (the first segment from the peer restores it; until then zero
//! is echoed, which receivers ignore, RFC 7323 section 3.2), segments received out of order (the hold replays them),
//! and ECN (see [`TcpDynamic::ecn`]).

mod again;
mod bulk;
mod closed;
mod closed_end;
mod donor;
mod dynamic_state;
mod ended;
mod error;
mod inject;
mod options;
mod queue;
mod queued;
mod reclaim;
mod restore;
mod seen;
mod sent_again;
mod settle;
mod static_state;
mod unconnected;

pub use bulk::{activate_all, each, extract_all, prepare_all, read_static_all, restore_all};
pub use closed::{Closing, Rest, TcpClosed, has_closed};
pub(crate) use closed_end::ClosedEnd;
pub use donor::{abandon, resume, shift_timestamp_clock, wake};
pub use dynamic_state::{Congestion, TcpDynamic, Window, extract, extract_into, unread};
pub use ended::ended;
pub use error::{RepairError, Unmovable};
pub use inject::injection;
pub use options::{Linger, SocketOptions};
pub use queue::{Queue, send_queue, set_congestion_control};
pub use queued::{Handshake, Queued, queued};
pub use reclaim::activate_again;
pub use restore::{
    PreparedSocket, Preparer, RestoredSocket, WindowProbe, activate, prepare, restore,
};
pub use seen::Seen;
pub(crate) use settle::settle_awake;
pub use settle::{Settled, Uncap, settle, settle_options, uncap_timeout};
pub use static_state::{StaticReader, TcpStatic, read_static};
pub use unconnected::{TcpUnconnected, Waiting};

/// `TCP_REPAIR` on.
const REPAIR_ON: i32 = 1;
/// `TCP_REPAIR` off, with a window probe.
const REPAIR_OFF: i32 = 0;
/// `TCP_REPAIR` off, nothing sent.
const REPAIR_OFF_QUIET: i32 = -1;
/// `TCP_REPAIR_QUEUE`: the receive queue.
const RECEIVE_QUEUE: i32 = 1;
/// `TCP_REPAIR_QUEUE`: the send queue.
const SEND_QUEUE: i32 = 2;
/// `TCP_REPAIR_WINDOW`: 5 words.
const TCP_REPAIR_WINDOW: i32 = 29;
