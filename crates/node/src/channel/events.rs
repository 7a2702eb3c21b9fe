//! The queue between the connections' tasks and the engine.
//!
//! All on one thread, so no lock and no atomics: waiting costs a waker, taking an event costs a pop.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use holdfast_wire::{Frame, NodeId};
use tokio::sync::Notify;

use super::LinkError;

/// Events that may wait before connections stop reading (each may be a little over: what was decoded is put in).
const WAITING_MAX: usize = 1024;

/// What happened on the channel. For one peer: `Up`, any number of `Frame`, `Lost`, and again.
#[derive(Debug)]
pub enum PeerEvent {
    /// Both directions work.
    Up {
        /// The peer.
        peer: NodeId,
        /// Its daemon's start; another than before if it was restarted.
        boot: u64,
    },
    /// The peer sent a frame (never `Hello`, `Ping` or `Pong`).
    Frame {
        /// The peer.
        from: NodeId,
        /// The frame.
        frame: Frame,
    },
    /// The peer cannot be reached. Frames sent before may or may not have arrived.
    Lost {
        /// The peer.
        peer: NodeId,
        /// Why.
        why: LinkError,
    },
}

/// The channel's events, in order.
pub struct PeerEvents {
    queue: Rc<Queue>,
}

/// The end that the channel's tasks put events into.
pub(super) struct Queue {
    waiting: RefCell<VecDeque<PeerEvent>>,
    reader: Cell<Option<Waker>>,
    room: Notify,
}

pub(super) fn queue() -> (Rc<Queue>, PeerEvents) {
    let queue = Rc::new(Queue {
        waiting: RefCell::default(),
        reader: Cell::new(None),
        room: Notify::new(),
    });
    (queue.clone(), PeerEvents { queue })
}

impl PeerEvents {
    /// The next event. Dropping the future loses nothing.
    pub async fn recv(&mut self) -> PeerEvent {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// The next event, if one waits.
    pub fn try_recv(&mut self) -> Option<PeerEvent> {
        let (event, left) = {
            let mut waiting = self.queue.waiting.borrow_mut();
            (waiting.pop_front(), waiting.len())
        };
        if left < WAITING_MAX {
            self.queue.room.notify_waiters();
        }
        event
    }

    /// The next event, or a wake-up when there is one.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<PeerEvent> {
        match self.try_recv() {
            Some(event) => Poll::Ready(event),
            None => {
                self.queue.reader.set(Some(context.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Queue {
    pub(super) fn put(&self, event: PeerEvent) {
        self.waiting.borrow_mut().push_back(event);
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    /// Whether connections may read on.
    pub(super) fn has_room(&self) -> bool {
        self.waiting.borrow().len() < WAITING_MAX
    }

    /// Waits until connections may read on.
    pub(super) async fn room(&self) {
        while !self.has_room() {
            self.room.notified().await;
        }
    }
}
