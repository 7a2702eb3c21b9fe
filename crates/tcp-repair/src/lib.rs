//! Save and restore of TCP connections with the kernel's repair mode (`TCP_REPAIR`): a connection continues on another
//! host, and its peer notices nothing.
//!
//! The work is divided by the time at which each part can be done:
//!
//! | when | donor | acceptor |
//! | --- | --- | --- |
//! | before the freeze | [`read_static`], for many [`TcpStaticReader::read_snapshot`] | [`prepare`] |
//! | in the freeze | [`extract`] | [`restore`], [`injected_peer_packet`] where there is one, [`activate`] |
//! | after the freeze | [`abandon`] (or [`resume`], when the handoff failed) | [`set_deferred_options_and_timeout`] |
//!
//! A connection may be restored before the freeze, from a snapshot that was taken without stopping the process. If the
//! connection continues at the donor, it is restored again: [`RestoredSocket::reset_to_prepared`],
//! [`RestoredSocket::sync_clock`].
//!
//! [`extract`] switches the socket to repair mode. From then on, until [`resume`] or [`abandon`], the program must not
//! use the socket, and no packet may reach or leave it: ingress and egress of its flow must be shut first. The donor's
//! congestion window and threshold travel in [`TcpDynamicState`], but the kernel has no socket option to set them.
//!
//! Repair mode cannot restore the timestamp last received (the first segment from the peer restores it; until then zero
//! is echoed, which receivers ignore, RFC 7323 section 3.2), segments received out of order (the hold replays them),
//! and ECN (see [`TcpDynamicState::ecn`]).

mod activate_again;
mod bulk;
mod closed_end;
mod closed_socket;
mod deferred_options;
mod donor;
mod dynamic_state;
mod early_restored_socket;
mod error;
mod injected_peer_packet;
pub mod non_integer_options;
mod options;
mod queue_levels;
mod reset_socket;
mod restore;
mod retransmission;
mod snapshot;
mod static_state;
pub mod udp;
mod unaccepted;
mod unconnected;

pub use activate_again::activate_again;
pub use bulk::{
    activate_all, extract_all, map_on_threads, prepare_all, read_static_all, restore_all,
};
pub use closed_end::ClosedLoopbackEnd;
pub use closed_socket::{ClosingSocket, EndedTcpSocket, PendingInput, has_closed};
pub use deferred_options::set_deferred_options_of_early_restored;
pub use deferred_options::{
    DeferredOptionsOutcome, TimeoutUncapCondition, set_deferred_options,
    set_deferred_options_and_timeout, uncap_timeout,
};
pub use donor::{abandon, resume, resume_without_state, shift_timestamp_clock};
pub use dynamic_state::{
    CongestionState, TcpDynamicState, TcpRepairWindow, extract, extract_into, peek_unread,
};
pub use error::{RepairError, UnmovableReason};
pub use injected_peer_packet::injected_peer_packet;
pub use options::{Linger, SocketOptions};
pub use queue_levels::{QueueLevels, queue_levels, set_congestion_control};
pub use reset_socket::reset_socket;
pub use restore::{
    PreparedSocket, RestoredSocket, SocketPreparer, WindowProbe, activate, prepare, restore,
};
pub use snapshot::TcpStaticSnapshot;
pub use static_state::{TcpStaticReader, TcpStaticState, read_static};
pub use unaccepted::{HandshakeResult, UnacceptedConnection, unaccepted_connection};
pub use unconnected::{ListenParameters, UnconnectedTcpSocket};

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
