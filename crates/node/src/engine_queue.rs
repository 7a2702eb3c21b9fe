//! Queue between the tasks that read sockets and the engine.
//!
//! All tasks are on one thread, so the queue needs neither locks nor atomics: waiting costs a waker, taking an item
//! costs a pop. The tasks stop reading while the queue is full, so that the remote senders have to wait.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

/// Number of queued items at which tasks stop reading. Items that are already read are still added.
const WAITING_MAX: usize = 1024;

/// The end from which the engine takes items.
pub struct EngineQueueReceiver<T> {
    queue: Rc<EngineQueue<T>>,
}

/// The end of the engine's queue into which tasks put items.
pub(crate) struct EngineQueue<T> {
    items: RefCell<VecDeque<T>>,
    reader: Cell<Option<Waker>>,
    room_available: Notify,
}

pub(crate) fn engine_queue<T>() -> (Rc<EngineQueue<T>>, EngineQueueReceiver<T>) {
    let queue = Rc::new(EngineQueue {
        items: RefCell::default(),
        reader: Cell::new(None),
        room_available: Notify::new(),
    });
    (queue.clone(), EngineQueueReceiver { queue })
}

impl<T> EngineQueueReceiver<T> {
    /// Returns the next item. Dropping the future loses nothing. Only one task at a time may wait.
    pub async fn recv(&self) -> T {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// Returns the next item, if one is queued.
    pub fn try_recv(&self) -> Option<T> {
        let (item, left) = {
            let mut waiting = self.queue.items.borrow_mut();
            (waiting.pop_front(), waiting.len())
        };
        if left < WAITING_MAX {
            self.queue.room_available.notify_waiters();
        }
        item
    }

    /// Returns the next item, or registers a wake-up for it.
    pub fn poll_recv(&self, context: &mut Context<'_>) -> Poll<T> {
        match self.try_recv() {
            Some(item) => Poll::Ready(item),
            None => {
                self.queue.reader.set(Some(context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl<T> EngineQueue<T> {
    pub(crate) fn push(&self, item: T) {
        self.items.borrow_mut().push_back(item);
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    /// Returns true if tasks may continue to read.
    pub(crate) fn has_room(&self) -> bool {
        self.items.borrow().len() < WAITING_MAX
    }

    /// Waits until tasks may continue to read.
    pub(crate) async fn wait_room(&self) {
        while !self.has_room() {
            self.room_available.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn items_keep_their_order_and_full_queue_has_no_room() {
        let (queue, receiver) = engine_queue();
        assert!(receiver.try_recv().is_none());
        for item in 0..WAITING_MAX {
            assert!(queue.has_room());
            queue.push(item);
        }
        assert!(!queue.has_room());
        let (taken, ()) = tokio::join!(
            async {
                tokio::task::yield_now().await;
                receiver.recv().await
            },
            queue.wait_room()
        );
        assert_eq!(taken, 0);
        for item in 1..WAITING_MAX {
            assert_eq!(receiver.recv().await, item);
        }
        let (late, ()) = tokio::join!(receiver.recv(), async { queue.push(7) });
        assert_eq!(late, 7);
    }
}
