//! The way from other threads to an event loop that waits on descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use holdfast_api::control::ErrorBody;
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

/// Requests that may wait for the loop; who has further ones waits.
const WAITING_MAX: usize = 64;

/// Where the loop puts an answer.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, ErrorBody>>;

/// The way to the loop.
pub(crate) struct Mailbox<R> {
    requests: mpsc::Sender<R>,
    wake: Arc<EventFd>,
}

/// The loop's end.
pub(crate) struct Inbox<R> {
    requests: mpsc::Receiver<R>,
    wake: Arc<EventFd>,
}

/// Both ends.
///
/// # Errors
/// The system gives no descriptor.
pub(crate) fn mailbox<R>() -> io::Result<(Mailbox<R>, Inbox<R>)> {
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let wake = Arc::new(EventFd::from_value_and_flags(0, flags)?);
    let to = Mailbox {
        requests: sender,
        wake: wake.clone(),
    };
    let inbox = Inbox {
        requests: receiver,
        wake,
    };
    Ok((to, inbox))
}

impl<R> Clone for Mailbox<R> {
    fn clone(&self) -> Mailbox<R> {
        Mailbox {
            requests: self.requests.clone(),
            wake: self.wake.clone(),
        }
    }
}

impl<R> Mailbox<R> {
    /// Hands a request over as soon as there is room. False: the loop is gone.
    pub(crate) async fn send(&self, request: R) -> bool {
        let sent = self.requests.send(request).await.is_ok();
        if sent {
            // It fails only where the loop is to wake up already.
            let _ = self.wake.write(1);
        }
        sent
    }

    /// The same, from a thread that may wait.
    pub(crate) fn send_blocking(&self, request: R) {
        if self.requests.blocking_send(request).is_ok() {
            let _ = self.wake.write(1);
        }
    }

    /// Asks, and waits for the answer; none if the loop is gone.
    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(Reply<T>) -> R,
    ) -> Option<Result<T, ErrorBody>> {
        let (reply, answer) = oneshot::channel();
        self.send(request(reply)).await;
        answer.await.ok()
    }
}

impl<R> Inbox<R> {
    /// Readable when there are requests.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// To be called before requests are taken.
    pub(crate) fn clear(&self) {
        let _ = self.wake.read();
    }

    /// The next request, if one waits.
    pub(crate) fn take(&mut self) -> Option<R> {
        self.requests.try_recv().ok()
    }
}

/// Waits for SIGTERM or SIGINT.
pub(crate) async fn asked_to_stop() {
    let both = signal(SignalKind::terminate())
        .and_then(|terminate| Ok((terminate, signal(SignalKind::interrupt())?)));
    match both {
        Ok((mut terminate, mut interrupt)) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        Err(error) => {
            tracing::error!(%error, "signals: this process ends by SIGKILL only");
            std::future::pending::<()>().await;
        }
    }
}
