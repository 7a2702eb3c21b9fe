//! Messages that the kernel has not accepted yet.
//!
//! A message without buffer space in its association is set aside: it waits, with all later messages of the same
//! association, while other associations continue.

use super::send::{BATCH_MAX, QueuedMessage};
use crate::{AssocId, MessageToSend};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

/// Shortest and longest pause before messages set aside are tried again; the pause doubles each time that none was
/// sent.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(1);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(32);

/// Queued messages of an endpoint.
pub struct MessageSendQueue {
    /// Messages in order of arrival, without the ones set aside.
    unblocked: VecDeque<QueuedMessage>,
    /// Messages set aside, by association; no queue is empty.
    blocked: HashMap<AssocId, VecDeque<QueuedMessage>>,
    /// Associations in `aside` to try again.
    to_retry: Vec<AssocId>,
    /// Number of queued bytes of each association.
    bytes: HashMap<AssocId, usize>,
    /// Most queued bytes of an association.
    bytes_max: usize,
    pause: Duration,
}

/// The first messages of one queue, which can be sent in one call: same socket, same `more` flag.
pub struct SendBatch {
    /// Association of the messages, if they are set aside.
    blocked_assoc: Option<AssocId>,
    /// Port number of their socket.
    pub port: u32,
    /// Number of messages.
    pub count: usize,
}

impl SendBatch {
    fn first_of(
        blocked_assoc: Option<AssocId>,
        queue: &VecDeque<QueuedMessage>,
        is_full: impl Fn(AssocId) -> bool,
    ) -> Option<Self> {
        let first = queue.front()?;
        let (port, more) = (first.assoc.port(), first.more_follows);
        let is_compatible = |queued: &&QueuedMessage| {
            queued.assoc.port() == port && queued.more_follows == more && !is_full(queued.assoc)
        };
        let count = queue
            .iter()
            .take(BATCH_MAX)
            .take_while(is_compatible)
            .count();
        Some(Self {
            blocked_assoc,
            port,
            count,
        })
    }
}

impl MessageSendQueue {
    pub fn new(bytes_max: usize) -> Self {
        Self {
            unblocked: VecDeque::new(),
            blocked: HashMap::new(),
            to_retry: Vec::new(),
            bytes: HashMap::new(),
            bytes_max,
            pause: RETRY_PAUSE_MIN,
        }
    }

    /// Queues a message to send on an association.
    ///
    /// # Errors
    /// `WouldBlock`: too many bytes are queued for this association.
    pub fn push(
        &mut self,
        assoc: AssocId,
        flags: u16,
        message: &MessageToSend,
        more: bool,
    ) -> io::Result<()> {
        let length = message.data.len();
        let before = self.bytes.get(&assoc).copied().unwrap_or(0);
        if before + length > self.bytes_max {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if length > 0 {
            self.bytes.insert(assoc, before + length);
        }
        let queued = QueuedMessage {
            assoc,
            flags,
            message: message.clone(),
            more_follows: more,
        };
        self.enqueue(queued);
        Ok(())
    }

    fn enqueue(&mut self, queued: QueuedMessage) {
        match self.blocked.get_mut(&queued.assoc) {
            Some(queue) => queue.push_back(queued),
            None => self.unblocked.push_back(queued),
        }
    }

    /// Returns the messages to send next: first messages set aside that are due for another try, then the rest. Returns
    /// `None` if there is nothing to send until a message is queued or [`retry_all`](Self::retry_all) is called.
    pub fn next_batch(&mut self) -> Option<SendBatch> {
        while let Some(&assoc) = self.to_retry.last() {
            if let Some(queue) = self.blocked.get(&assoc) {
                return SendBatch::first_of(Some(assoc), queue, |_| false);
            }
            self.to_retry.pop();
        }
        while let Some(first) = self.unblocked.front()
            && self.blocked.contains_key(&first.assoc)
        {
            let blocked = self.unblocked.pop_front()?;
            self.enqueue(blocked);
        }
        SendBatch::first_of(None, &self.unblocked, |assoc| {
            self.blocked.contains_key(&assoc)
        })
    }

    /// Returns the queue that begins with the messages of `next_batch`.
    pub fn queue_of(&self, batch: &SendBatch) -> &VecDeque<QueuedMessage> {
        let blocked = batch
            .blocked_assoc
            .and_then(|assoc| self.blocked.get(&assoc));
        blocked.unwrap_or(&self.unblocked)
    }

    /// Removes the first `count` messages, which were sent.
    pub fn remove_sent(&mut self, batch: &SendBatch, count: usize) {
        for _ in 0..count {
            self.take_first(batch);
        }
        if count > 0 {
            self.pause = RETRY_PAUSE_MIN;
        }
    }

    /// Removes the first message.
    pub fn take_first(&mut self, batch: &SendBatch) -> Option<QueuedMessage> {
        let first = match batch.blocked_assoc {
            None => self.unblocked.pop_front()?,
            Some(assoc) => {
                let aside = self.blocked.get_mut(&assoc)?;
                let first = aside.pop_front()?;
                if aside.is_empty() {
                    self.blocked.remove(&assoc);
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
    pub fn block_first(&mut self, batch: &SendBatch) {
        if batch.blocked_assoc.is_some() {
            self.to_retry.pop();
        } else if let Some(first) = self.unblocked.pop_front() {
            self.blocked.insert(first.assoc, VecDeque::from([first]));
        }
    }

    /// Returns the pause before messages set aside are tried again; `None` if there are none.
    pub fn retry_pause(&self) -> Option<Duration> {
        (!self.blocked.is_empty()).then_some(self.pause)
    }

    /// Marks all associations with messages set aside for another try.
    pub fn retry_all(&mut self) {
        self.pause = (self.pause * 2).min(RETRY_PAUSE_MAX);
        self.to_retry = self.blocked.keys().copied().collect();
    }

    /// Removes an association that has ended; returns its queued messages.
    pub fn remove_association(&mut self, ended: AssocId) -> Vec<QueuedMessage> {
        let mut removed = Vec::from(self.blocked.remove(&ended).unwrap_or_default());
        if self.bytes.remove(&ended).is_some() {
            let (own, others) = std::mem::take(&mut self.unblocked)
                .into_iter()
                .partition(|queued| queued.assoc == ended);
            self.unblocked = others;
            removed.extend::<VecDeque<_>>(own);
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    const FULL: AssocId = AssocId(1);
    const OTHER: AssocId = AssocId(2);
    const OTHER_PORT: AssocId = AssocId(1 << 32 | 3);

    fn message(number: u8) -> MessageToSend {
        MessageToSend::new(0, Bytes::from(vec![number; 10]))
    }

    fn outbox() -> MessageSendQueue {
        let mut outbox = MessageSendQueue::new(30);
        for (assoc, number) in [(FULL, 1), (OTHER, 2), (FULL, 3), (OTHER_PORT, 4)] {
            let message = message(number);
            outbox.push(assoc, 0, &message, false).expect("room");
        }
        outbox
    }

    /// Sends all messages that can be sent while association `full` has no buffer space.
    fn send_all(outbox: &mut MessageSendQueue, full: Option<AssocId>) -> Vec<u8> {
        let mut numbers = Vec::new();
        while let Some(batch) = outbox.next_batch() {
            let first: Vec<_> = outbox.queue_of(&batch).iter().take(batch.count).collect();
            let has_space = |queued: &&&QueuedMessage| Some(queued.assoc) != full;
            let sent: Vec<_> = first.iter().take_while(has_space).collect();
            numbers.extend(sent.iter().map(|queued| queued.message.data[0]));
            match sent.len() {
                0 => outbox.block_first(&batch),
                count => outbox.remove_sent(&batch, count),
            }
        }
        numbers
    }

    #[test]
    fn full_peer_does_not_block_others() {
        let mut outbox = outbox();
        assert_eq!(send_all(&mut outbox, Some(FULL)), [2, 4]);
        // The association has a bound of its own, and its own order.
        outbox.push(FULL, 0, &message(5), false).expect("room");
        let full = outbox.push(FULL, 0, &message(6), false);
        assert_eq!(full.expect_err("full").kind(), io::ErrorKind::WouldBlock);
        outbox.push(OTHER, 0, &message(7), false).expect("room");
        assert_eq!(send_all(&mut outbox, Some(FULL)), [7]);
        outbox.retry_all();
        assert_eq!(send_all(&mut outbox, Some(FULL)), []);
        outbox.retry_all();
        assert_eq!(send_all(&mut outbox, None), [1, 3, 5]);
        assert_eq!(outbox.retry_pause(), None);
        assert!(outbox.bytes.is_empty());
    }

    #[test]
    fn retry_pause_grows_until_a_message_is_sent() {
        let mut outbox = outbox();
        let mut pauses = Vec::new();
        for _ in 0..7 {
            send_all(&mut outbox, Some(FULL));
            pauses.extend(outbox.retry_pause().map(|pause| pause.as_millis()));
            outbox.retry_all();
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 32]);
        send_all(&mut outbox, Some(OTHER));
        outbox.push(OTHER, 0, &message(8), false).expect("room");
        send_all(&mut outbox, Some(OTHER));
        assert_eq!(outbox.retry_pause(), Some(RETRY_PAUSE_MIN));
    }

    #[test]
    fn messages_of_ended_association_are_returned() {
        let numbers = |messages: Vec<QueuedMessage>| -> Vec<u8> {
            messages
                .iter()
                .map(|queued| queued.message.data[0])
                .collect()
        };
        let mut outbox = outbox();
        assert_eq!(numbers(outbox.remove_association(FULL)), [1, 3]);
        assert_eq!(send_all(&mut outbox, Some(OTHER)), [4]);
        assert_eq!(numbers(outbox.remove_association(OTHER)), [2]);
        assert_eq!((outbox.retry_pause(), outbox.bytes.len()), (None, 0));
        assert_eq!(outbox.remove_association(OTHER).len(), 0);
    }
}
