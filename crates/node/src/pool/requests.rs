//! What other threads ask and tell the event loop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use holdfast_api::app::encode;
use holdfast_api::control::{
    OwnElementList, PoolDaemonStatus, Reported, Resolution, ResolveQuery, UnreachableReport,
};
use holdfast_api::pool::{FromPool, ToPool};
use holdfast_sys::transport::Security;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};

use crate::mailbox::Reply;

/// Bytes that may wait for a program to read them. More, and its channel is closed; streams stop long before.
const QUEUED_BYTES_MAX: usize = 16 << 20;

/// Something for the event loop.
pub(super) enum Request {
    /// A program has opened a channel, named by this number.
    Came(u64, ProgramHandle),
    /// A program said something; what it used of its room for data.
    Said(u64, ToPool, Option<OwnedSemaphorePermit>),
    /// A program's channel has ended.
    Gone(u64),
    /// A session's stream, by its number.
    Stream(u64, StreamEvent),
    /// What is this daemon, and what does it do?
    Status(Reply<PoolDaemonStatus>),
    /// Which elements are there of this host's programs?
    Elements(Reply<OwnElementList>),
    /// Elements of a pool.
    Resolve(String, ResolveQuery, Reply<Resolution>),
    /// One, by the pool's policy.
    Select(String, Reply<Resolution>),
    /// An element was not reached.
    Unreachable(UnreachableReport, Reply<Reported>),
    /// The certificates were read anew.
    Secure(Arc<dyn Security>),
    /// End, in order.
    Stop,
}

/// What happens to a session's stream or UDP socket.
pub(super) enum StreamEvent {
    /// It is connected.
    Up,
    /// Something came.
    Data(Vec<u8>),
    /// It could not be connected, or has ended.
    Down {
        /// The other side has ended it.
        in_order: bool,
    },
}

/// Bytes that wait for a program to read them.
#[derive(Default)]
pub(super) struct Gauge {
    bytes: AtomicUsize,
    less: Notify,
}

impl Gauge {
    /// Waits until no more than these wait.
    pub(super) async fn at_most(&self, bytes: usize) {
        loop {
            // Before the look: what is read in between is not missed.
            let less = self.less.notified();
            if self.bytes.load(Ordering::Relaxed) <= bytes {
                return;
            }
            less.await;
        }
    }

    /// How many there were before.
    fn add(&self, bytes: usize) -> usize {
        self.bytes.fetch_add(bytes, Ordering::Relaxed)
    }

    fn subtract(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.less.notify_waiters();
    }
}

/// The way to a program. Dropping it closes the channel, once what was said is written.
pub(super) struct ProgramHandle {
    said: mpsc::UnboundedSender<Vec<u8>>,
    queued: Arc<Gauge>,
}

/// The writer's end of a [`ProgramHandle`].
pub(super) struct ProgramQueue {
    said: mpsc::UnboundedReceiver<Vec<u8>>,
    queued: Arc<Gauge>,
}

/// Both ends.
pub(super) fn program_queue() -> (ProgramHandle, ProgramQueue) {
    let (sender, said) = mpsc::unbounded_channel();
    let queued = Arc::new(Gauge::default());
    let handle = ProgramHandle {
        said: sender,
        queued: queued.clone(),
    };
    (handle, ProgramQueue { said, queued })
}

impl ProgramHandle {
    /// Bytes that wait for the program to read them.
    pub(super) fn queued(&self) -> usize {
        self.queued.bytes.load(Ordering::Relaxed)
    }

    /// The same, for who waits for it.
    pub(super) fn gauge(&self) -> Arc<Gauge> {
        self.queued.clone()
    }

    /// Says something. False: the program is gone, or does not read.
    pub(super) fn tell(&self, message: &FromPool) -> bool {
        let bytes = match encode(message) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::error!(%error, "a message for a program");
                return true;
            }
        };
        let queued = self.queued.add(bytes.len());
        queued <= QUEUED_BYTES_MAX && self.said.send(bytes).is_ok()
    }
}

impl ProgramQueue {
    /// The next message to write; none when there will be no more.
    pub(super) async fn next(&mut self) -> Option<Vec<u8>> {
        let bytes = self.said.recv().await?;
        self.queued.subtract(bytes.len());
        Some(bytes)
    }
}
