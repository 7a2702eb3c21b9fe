//! Notification of waiting programs by the session's thread: one cell for each flow, one mailbox for each service.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use rustix::event::{EventfdFlags, eventfd};

use crate::{Destination, FlowText, Moved};

/// Locks a mutex, even after a panic: a panic with the lock held leaves no inconsistent state here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A descriptor that is readable from [`Notifier::notify`] until [`Notifier::reset`], for programs that wait in poll(2).
#[derive(Debug)]
pub(crate) struct Notifier {
    eventfd: OwnedFd,
}

impl Notifier {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub(crate) fn notify(&self) {
        // Fails only when the counter is full: then the descriptor is readable already.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }

    pub(crate) fn reset(&self) {
        let _ = rustix::io::read(&self.eventfd, &mut [0u8; 8]);
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}

/// Result of a handoff: the node that took the flow, or the reason that it stayed.
pub(crate) type HandoffResult = Result<String, String>;

/// The state of one flow, as reported by the session.
#[derive(Debug, Default)]
pub(crate) struct FlowNotifications {
    inner: Mutex<FlowNotificationsInner>,
}

#[derive(Debug, Default)]
struct FlowNotificationsInner {
    handoff_request: Option<Destination>,
    handoff_request_waker: Option<Waker>,
    notifier: Option<Arc<Notifier>>,
    outcome: Option<HandoffResult>,
    outcome_waker: Option<Waker>,
}

impl FlowNotifications {
    /// Returns the requested destination, if any; the request stands until a handoff is tried or declined.
    pub(crate) fn handoff_request(&self) -> Option<Destination> {
        lock(&self.inner).handoff_request.clone()
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn poll_handoff_request(&self, context: &mut Context<'_>) -> Poll<Destination> {
        let mut inner = lock(&self.inner);
        match &inner.handoff_request {
            Some(destination) => Poll::Ready(destination.clone()),
            None => {
                inner.handoff_request_waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Returns a bell that is readable while a request stands.
    pub(crate) fn notifier(&self) -> io::Result<Arc<Notifier>> {
        let mut inner = lock(&self.inner);
        if let Some(bell) = &inner.notifier {
            return Ok(Arc::clone(bell));
        }
        let bell = Arc::new(Notifier::new()?);
        if inner.handoff_request.is_some() {
            bell.notify();
        }
        inner.notifier = Some(Arc::clone(&bell));
        Ok(bell)
    }

    pub(crate) fn request_handoff(&self, destination: Destination) {
        let mut inner = lock(&self.inner);
        inner.handoff_request = Some(destination);
        if let Some(bell) = &inner.notifier {
            bell.notify();
        }
        let waker = inner.handoff_request_waker.take();
        drop(inner);
        waker.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn clear_request(&self) {
        let mut inner = lock(&self.inner);
        inner.handoff_request = None;
        if let Some(bell) = &inner.notifier {
            bell.reset();
        }
    }

    pub(crate) fn set_outcome(&self, outcome: HandoffResult) {
        let mut inner = lock(&self.inner);
        inner.outcome = Some(outcome);
        let waker = inner.outcome_waker.take();
        drop(inner);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Waits for the result of a handoff; returns at once the reason of one that could not start.
    pub(crate) async fn outcome(&self, started: Result<(), String>) -> Result<Moved, String> {
        started?;
        let to = poll_fn(|context| self.poll_outcome(context)).await?;
        Ok(Moved { to })
    }

    fn poll_outcome(&self, context: &mut Context<'_>) -> Poll<HandoffResult> {
        let mut inner = lock(&self.inner);
        match inner.outcome.take() {
            Some(outcome) => Poll::Ready(outcome),
            None => {
                inner.outcome_waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// A handed-over TCP connection that waits for `accept`.
pub(crate) struct HandedOffConnection {
    pub(crate) flow: FlowText,
    pub(crate) signals: Arc<FlowNotifications>,
    pub(crate) descriptor: Arc<OwnedFd>,
    pub(crate) state: Vec<u8>,
}

/// Queue from the session's thread to one service of the program: connections handed off to it, or datagram events.
pub(crate) struct ServiceInbox<T> {
    inner: Mutex<(VecDeque<T>, Vec<Waker>)>,
    notifier: Notifier,
}

impl<T> ServiceInbox<T> {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            inner: Mutex::default(),
            notifier: Notifier::new()?,
        })
    }

    /// Returns a bell that is readable while the queue has an item.
    pub(crate) fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    pub(crate) fn push(&self, items: impl IntoIterator<Item = T>) {
        let mut inner = lock(&self.inner);
        inner.0.extend(items);
        if inner.0.is_empty() {
            return;
        }
        self.notifier.notify();
        let wakers = std::mem::take(&mut inner.1);
        drop(inner);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        let mut inner = lock(&self.inner);
        let item = inner.0.pop_front()?;
        if inner.0.is_empty() {
            self.notifier.reset();
        }
        Some(item)
    }

    /// Removes the items for which `select` returns `Ok`, in order; the other items stay in the queue.
    pub(crate) fn extract<R>(&self, mut select: impl FnMut(T) -> Result<R, T>) -> Vec<R> {
        let mut inner = lock(&self.inner);
        let mut selected = Vec::new();
        for item in std::mem::take(&mut inner.0) {
            match select(item) {
                Ok(result) => selected.push(result),
                Err(item) => inner.0.push_back(item),
            }
        }
        if inner.0.is_empty() {
            self.notifier.reset();
        }
        selected
    }

    /// Returns the next item, or arranges that the context is woken when one arrives.
    #[cfg(feature = "tokio")]
    pub(crate) fn poll_pop(&self, context: &mut Context<'_>) -> Poll<T> {
        if let Some(item) = self.pop() {
            return Poll::Ready(item);
        }
        let mut inner = lock(&self.inner);
        if !inner.1.iter().any(|waker| waker.will_wake(context.waker())) {
            inner.1.push(context.waker().clone());
        }
        drop(inner);
        // An item may have arrived between the check and the registration of the waker.
        self.pop().map_or(Poll::Pending, Poll::Ready)
    }
}

struct UnparkWaker(Thread);

impl Wake for UnparkWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Blocks this thread until another thread of the library completes `future`.
pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(UnparkWaker(thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        thread::park();
    }
}
