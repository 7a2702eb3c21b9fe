//! The queue between the tasks that read sockets and the engine.
//!
//! All on one thread, so no lock and no atomics: waiting costs a waker, taking an item costs a pop. The tasks stop
//! reading while the queue is full, so that it is the senders who wait.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

/// Items that may wait before tasks stop reading (there may be a few more: what was read already is put in).
const WAITING_MAX: usize = 1024;

/// The end that the engine takes items from.
pub struct Receiver<T> {
    queue: Rc<Queue<T>>,
}

/// The end that tasks put items into.
pub(crate) struct Queue<T> {
    waiting: RefCell<VecDeque<T>>,
    reader: Cell<Option<Waker>>,
    room: Notify,
}

pub(crate) fn queue<T>() -> (Rc<Queue<T>>, Receiver<T>) {
    let queue = Rc::new(Queue {
        waiting: RefCell::default(),
        reader: Cell::new(None),
        room: Notify::new(),
    });
    (queue.clone(), Receiver { queue })
}

impl<T> Receiver<T> {
    /// The next item. Dropping the future loses nothing. One task at a time may wait.
    pub async fn recv(&self) -> T {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// The next item, if one waits.
    pub fn try_recv(&self) -> Option<T> {
        let (item, left) = {
            let mut waiting = self.queue.waiting.borrow_mut();
            (waiting.pop_front(), waiting.len())
        };
        if left < WAITING_MAX {
            self.queue.room.notify_waiters();
        }
        item
    }

    /// The next item, or a wake-up when there is one.
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

impl<T> Queue<T> {
    pub(crate) fn put(&self, item: T) {
        self.waiting.borrow_mut().push_back(item);
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    /// Whether tasks may read on.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.borrow().len() < WAITING_MAX
    }

    /// Waits until tasks may read on.
    pub(crate) async fn room(&self) {
        while !self.has_room() {
            self.room.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn items_come_in_order_and_a_full_queue_has_no_room() {
        let (queue, receiver) = queue();
        assert!(receiver.try_recv().is_none());
        for item in 0..WAITING_MAX {
            assert!(queue.has_room());
            queue.put(item);
        }
        assert!(!queue.has_room());
        let (taken, ()) = tokio::join!(
            async {
                tokio::task::yield_now().await;
                receiver.recv().await
            },
            queue.room()
        );
        assert_eq!(taken, 0);
        for item in 1..WAITING_MAX {
            assert_eq!(receiver.recv().await, item);
        }
        let (late, ()) = tokio::join!(receiver.recv(), async { queue.put(7) });
        assert_eq!(late, 7);
    }
}
