//! Requests and events of other threads for the event loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use holdfast_api::app::encode;
use holdfast_api::control::{
    ErrorBody, OwnElementList, PoolDaemonStatus, ReportAccepted, Resolution, ResolveQuery,
    UnreachableReport,
};
use holdfast_api::pool::{FromPool, ToPool};
use holdfast_sctp::TlsSecurity;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};

use crate::mailbox::ReplySender;

/// Maximum number of bytes queued for a program, beyond which its channel is closed. Streams stop far below this limit.
const QUEUED_BYTES_MAX: usize = 16 << 20;

/// A request or event for the event loop.
pub(super) enum PoolRequest {
    /// A program opened a channel, identified by this number.
    ProgramConnected(u64, ProgramHandle),
    /// A program sent a message, with the permit for its data.
    ProgramMessage(u64, ToPool, Option<OwnedSemaphorePermit>),
    /// A program's channel has ended.
    ProgramClosed(u64),
    /// Event of a session's stream, by number.
    Stream(u64, StreamEvent),
    /// Return the daemon's status.
    Status(ReplySender<PoolDaemonStatus>),
    /// List the elements of this host's programs.
    Elements(ReplySender<OwnElementList>),
    /// Return the elements of a pool.
    Resolve(String, ResolveQuery, ReplySender<Resolution>),
    /// Select one element by the pool's policy.
    Select(String, ReplySender<Resolution>),
    /// Report an unreachable element.
    Unreachable(UnreachableReport, ReplySender<ReportAccepted>),
    /// Use reloaded certificates.
    ReloadTls(Arc<dyn TlsSecurity>),
    /// Stop in order.
    Stop,
}

/// An event of a session's stream or UDP socket.
pub(super) enum StreamEvent {
    /// The session's TCP connection is established, or the UDP socket is open.
    Up,
    /// Data arrived from the session's element.
    Data(Vec<u8>),
    /// The connection could not be made, or has ended.
    Down {
        /// True if the other side ended it in order.
        in_order: bool,
    },
}

/// Number of bytes queued for a program.
#[derive(Default)]
pub(super) struct ByteGauge {
    bytes: AtomicUsize,
    decreased: Notify,
}

impl ByteGauge {
    /// Waits until at most `bytes` bytes are queued.
    pub(super) async fn wait_at_most(&self, bytes: usize) {
        loop {
            // Registered before the check, so that a decrease in between is not missed.
            let less = self.decreased.notified();
            if self.bytes.load(Ordering::Relaxed) <= bytes {
                return;
            }
            less.await;
        }
    }

    /// Adds bytes. Returns the previous number.
    fn add(&self, bytes: usize) -> usize {
        self.bytes.fetch_add(bytes, Ordering::Relaxed)
    }

    fn subtract(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.decreased.notify_waiters();
    }
}

/// Handle of a program's channel. Dropping it closes the channel once the queued messages are written.
pub(super) struct ProgramHandle {
    messages: mpsc::UnboundedSender<Vec<u8>>,
    queued: Arc<ByteGauge>,
}

/// The writer's end of a [`ProgramHandle`].
pub(super) struct ProgramQueue {
    messages: mpsc::UnboundedReceiver<Vec<u8>>,
    queued: Arc<ByteGauge>,
}

/// Creates both ends of a queue of messages to a program.
pub(super) fn program_queue() -> (ProgramHandle, ProgramQueue) {
    let (sender, said) = mpsc::unbounded_channel();
    let queued = Arc::new(ByteGauge::default());
    let handle = ProgramHandle {
        messages: sender,
        queued: queued.clone(),
    };
    (
        handle,
        ProgramQueue {
            messages: said,
            queued,
        },
    )
}

impl ProgramHandle {
    /// Returns the number of bytes queued for the program.
    pub(super) fn queued(&self) -> usize {
        self.queued.bytes.load(Ordering::Relaxed)
    }

    /// Returns the gauge of queued bytes, for waiting.
    pub(super) fn gauge(&self) -> Arc<ByteGauge> {
        self.queued.clone()
    }

    /// Sends a message. Returns false if the program is gone or does not read.
    pub(super) fn send(&self, message: &FromPool) -> bool {
        let bytes = match encode(message) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::error!(%error, "cannot encode a message to a program");
                return true;
            }
        };
        let queued = self.queued.add(bytes.len());
        queued <= QUEUED_BYTES_MAX && self.messages.send(bytes).is_ok()
    }
}

impl ProgramQueue {
    /// Returns the next message to write; `None` if there will be no more.
    pub(super) async fn next(&mut self) -> Option<Vec<u8>> {
        let bytes = self.messages.recv().await?;
        self.queued.subtract(bytes.len());
        Some(bytes)
    }
}

/// Answers a request of the control API.
pub(super) fn send_reply<T>(reply: ReplySender<T>, answer: Result<T, ErrorBody>) {
    // A failure means that the caller has gone.
    let _ = reply.send(answer);
}
