//! Messages that the kernel has not accepted yet.
//!
//! A message without buffer space in its association is set aside: it waits, with all later messages of the same
//! association, while other associations continue.

use super::send::{BATCH, Queued};
use crate::transport::{AssocId, Message};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

/// Shortest and longest pause before messages set aside are tried again; the pause doubles each time that none was
/// sent.
const SOON: Duration = Duration::from_millis(1);
const LATE: Duration = Duration::from_millis(32);

/// Queued messages of an endpoint.
pub struct Outbox {
    /// Messages in order of arrival, without the ones set aside.
    waiting: VecDeque<Queued>,
    /// Messages set aside, by association; no queue is empty.
    aside: HashMap<AssocId, VecDeque<Queued>>,
    /// Associations in `aside` to try again.
    again: Vec<AssocId>,
    /// Number of queued bytes of each association.
    bytes: HashMap<AssocId, usize>,
    /// Most queued bytes of an association.
    max: usize,
    pause: Duration,
}

/// The first messages of one queue, which can be sent in one call: same socket, same `more` flag.
pub struct Next {
    /// Association of the messages, if they are set aside.
    aside: Option<AssocId>,
    /// Port number of their socket.
    pub port: u32,
    /// Number of messages.
    pub count: usize,
}

impl Next {
    fn of(
        aside: Option<AssocId>,
        queue: &VecDeque<Queued>,
        is_full: impl Fn(AssocId) -> bool,
    ) -> Option<Self> {
        let first = queue.front()?;
        let (port, more) = (first.assoc.port(), first.more);
        let alike = |queued: &&Queued| {
            queued.assoc.port() == port && queued.more == more && !is_full(queued.assoc)
        };
        let count = queue.iter().take(BATCH).take_while(alike).count();
        Some(Self { aside, port, count })
    }
}

impl Outbox {
    pub fn new(max: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            aside: HashMap::new(),
            again: Vec::new(),
            bytes: HashMap::new(),
            max,
            pause: SOON,
        }
    }

    /// Queues a message.
    ///
    /// # Errors
    /// `WouldBlock`: too many bytes are queued for this association.
    pub fn push(
        &mut self,
        assoc: AssocId,
        flags: u16,
        message: &Message,
        more: bool,
    ) -> io::Result<()> {
        let length = message.data.len();
        let before = self.bytes.get(&assoc).copied().unwrap_or(0);
        if before + length > self.max {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if length > 0 {
            self.bytes.insert(assoc, before + length);
        }
        let queued = Queued {
            assoc,
            flags,
            message: message.clone(),
            more,
        };
        self.put(queued);
        Ok(())
    }

    fn put(&mut self, queued: Queued) {
        match self.aside.get_mut(&queued.assoc) {
            Some(aside) => aside.push_back(queued),
            None => self.waiting.push_back(queued),
        }
    }

    /// Returns the messages to send next: first messages set aside that are due for another try, then the rest. Returns
    /// `None` if there is nothing to send until a message is queued or [`try_again`](Self::try_again) is called.
    pub fn next(&mut self) -> Option<Next> {
        while let Some(&assoc) = self.again.last() {
            if let Some(aside) = self.aside.get(&assoc) {
                return Next::of(Some(assoc), aside, |_| false);
            }
            self.again.pop();
        }
        while let Some(first) = self.waiting.front()
            && self.aside.contains_key(&first.assoc)
        {
            let late = self.waiting.pop_front()?;
            self.put(late);
        }
        Next::of(None, &self.waiting, |assoc| self.aside.contains_key(&assoc))
    }

    /// Returns the queue that begins with the messages of `next`.
    pub fn queue(&self, next: &Next) -> &VecDeque<Queued> {
        let aside = next.aside.and_then(|assoc| self.aside.get(&assoc));
        aside.unwrap_or(&self.waiting)
    }

    /// Removes the first `count` messages, which were sent.
    pub fn sent(&mut self, next: &Next, count: usize) {
        for _ in 0..count {
            self.take(next);
        }
        if count > 0 {
            self.pause = SOON;
        }
    }

    /// Removes the first message.
    pub fn take(&mut self, next: &Next) -> Option<Queued> {
        let first = match next.aside {
            None => self.waiting.pop_front()?,
            Some(assoc) => {
                let aside = self.aside.get_mut(&assoc)?;
                let first = aside.pop_front()?;
                if aside.is_empty() {
                    self.aside.remove(&assoc);
                }
                first
            }
        };
        let length = first.message.data.len();
        if let Some(bytes) = self.bytes.get_mut(&first.assoc) {
            *bytes -= length;
            if *bytes == 0 {
                self.bytes.remove(&first.assoc);
            }
        }
        Some(first)
    }

    /// Sets the first message aside, because its association has no buffer space.
    pub fn full(&mut self, next: &Next) {
        if next.aside.is_some() {
            self.again.pop();
        } else if let Some(first) = self.waiting.pop_front() {
            self.aside.insert(first.assoc, VecDeque::from([first]));
        }
    }

    /// Returns the pause before messages set aside are tried again; `None` if there are none.
    pub fn retry(&self) -> Option<Duration> {
        (!self.aside.is_empty()).then_some(self.pause)
    }

    /// Marks all associations with messages set aside for another try.
    pub fn try_again(&mut self) {
        self.pause = (self.pause * 2).min(LATE);
        self.again = self.aside.keys().copied().collect();
    }

    /// Removes an association that has ended; returns its queued messages.
    pub fn forget(&mut self, gone: AssocId) -> Vec<Queued> {
        let mut left = Vec::from(self.aside.remove(&gone).unwrap_or_default());
        if self.bytes.remove(&gone).is_some() {
            let (of_it, others) = std::mem::take(&mut self.waiting)
                .into_iter()
                .partition(|queued| queued.assoc == gone);
            self.waiting = others;
            left.extend::<VecDeque<_>>(of_it);
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    const DEAF: AssocId = AssocId(1);
    const OTHER: AssocId = AssocId(2);
    const APART: AssocId = AssocId(1 << 32 | 3);

    fn message(number: u8) -> Message {
        Message::new(0, Bytes::from(vec![number; 10]))
    }

    fn outbox() -> Outbox {
        let mut outbox = Outbox::new(30);
        for (assoc, number) in [(DEAF, 1), (OTHER, 2), (DEAF, 3), (APART, 4)] {
            let message = message(number);
            outbox.push(assoc, 0, &message, false).expect("room");
        }
        outbox
    }

    /// Sends all messages that can be sent while association `full` has no buffer space.
    fn gone(outbox: &mut Outbox, full: Option<AssocId>) -> Vec<u8> {
        let mut gone = Vec::new();
        while let Some(next) = outbox.next() {
            let first: Vec<_> = outbox.queue(&next).iter().take(next.count).collect();
            let room = |queued: &&&Queued| Some(queued.assoc) != full;
            let sent: Vec<_> = first.iter().take_while(room).collect();
            gone.extend(sent.iter().map(|queued| queued.message.data[0]));
            match sent.len() {
                0 => outbox.full(&next),
                count => outbox.sent(&next, count),
            }
        }
        gone
    }

    #[test]
    fn who_has_no_room_holds_up_nobody_else() {
        let mut outbox = outbox();
        assert_eq!(gone(&mut outbox, Some(DEAF)), [2, 4]);
        // The association has a bound of its own, and its own order.
        outbox.push(DEAF, 0, &message(5), false).expect("room");
        let full = outbox.push(DEAF, 0, &message(6), false);
        assert_eq!(full.expect_err("full").kind(), io::ErrorKind::WouldBlock);
        outbox.push(OTHER, 0, &message(7), false).expect("room");
        assert_eq!(gone(&mut outbox, Some(DEAF)), [7]);
        outbox.try_again();
        assert_eq!(gone(&mut outbox, Some(DEAF)), []);
        outbox.try_again();
        assert_eq!(gone(&mut outbox, None), [1, 3, 5]);
        assert_eq!(outbox.retry(), None);
        assert!(outbox.bytes.is_empty());
    }

    #[test]
    fn it_is_tried_later_and_later_until_something_goes() {
        let mut outbox = outbox();
        let mut pauses = Vec::new();
        for _ in 0..7 {
            gone(&mut outbox, Some(DEAF));
            pauses.extend(outbox.retry().map(|pause| pause.as_millis()));
            outbox.try_again();
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 32]);
        gone(&mut outbox, Some(OTHER));
        outbox.push(OTHER, 0, &message(8), false).expect("room");
        gone(&mut outbox, Some(OTHER));
        assert_eq!(outbox.retry(), Some(SOON));
    }

    #[test]
    fn what_waits_for_who_is_gone_is_given_back() {
        let numbers = |left: Vec<Queued>| -> Vec<u8> {
            left.iter().map(|queued| queued.message.data[0]).collect()
        };
        let mut outbox = outbox();
        assert_eq!(numbers(outbox.forget(DEAF)), [1, 3]);
        assert_eq!(gone(&mut outbox, Some(OTHER)), [4]);
        assert_eq!(numbers(outbox.forget(OTHER)), [2]);
        assert_eq!((outbox.retry(), outbox.bytes.len()), (None, 0));
        assert_eq!(outbox.forget(OTHER).len(), 0);
    }
}
