//! Channel from other threads to an event loop that waits on descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use holdfast_api::control::ErrorBody;
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

/// Maximum number of requests that wait for the loop; further senders wait.
const WAITING_MAX: usize = 64;

/// Channel for the loop's answer.
pub(crate) type ReplySender<T> = oneshot::Sender<Result<T, ErrorBody>>;

/// The senders' end of an event loop's mailbox.
pub(crate) struct Mailbox<R> {
    requests: mpsc::Sender<R>,
    wake: Arc<EventFd>,
}

/// The event loop's end of its mailbox.
pub(crate) struct Inbox<R> {
    requests: mpsc::Receiver<R>,
    wake: Arc<EventFd>,
}

/// Creates both ends of an event loop's mailbox.
///
/// # Errors
/// The system has no free descriptor.
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
    /// Sends a request once there is room. Returns false if the loop has ended.
    pub(crate) async fn send(&self, request: R) -> bool {
        let sent = self.requests.send(request).await.is_ok();
        if sent {
            // A write fails only if a wake-up is already pending.
            let _ = self.wake.write(1);
        }
        sent
    }

    /// Sends a request from a thread that may block.
    pub(crate) fn send_blocking(&self, request: R) {
        if self.requests.blocking_send(request).is_ok() {
            let _ = self.wake.write(1);
        }
    }

    /// Sends a request and waits for the answer; `None` if the loop has ended.
    pub(crate) async fn ask<T>(
        &self,
        request: impl FnOnce(ReplySender<T>) -> R,
    ) -> Option<Result<T, ErrorBody>> {
        let (reply, answer) = oneshot::channel();
        self.send(request(reply)).await;
        answer.await.ok()
    }
}

impl<R> Inbox<R> {
    /// Returns the descriptor, which is readable if there are requests.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Clears the wake-up. Must be called before requests are taken.
    pub(crate) fn clear_wakeup(&self) {
        let _ = self.wake.read();
    }

    /// Returns the next request, if one is queued.
    pub(crate) fn pop(&mut self) -> Option<R> {
        self.requests.try_recv().ok()
    }
}

/// Waits for SIGTERM or SIGINT.
pub(crate) async fn wait_stop_signal() {
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
            tracing::error!(%error, "cannot install signal handlers: only SIGKILL ends this process");
            std::future::pending::<()>().await;
        }
    }
}
