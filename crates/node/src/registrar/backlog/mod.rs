//! Backlog of messages to other registrars.
//!
//! Every update has to be announced (RFC 5353 section 3.3.1), but not at once: updates within a few milliseconds are
//! sent together and share packets. Messages without room in an association's buffer wait here, in order; all
//! associations share each message. While the backlog is long, the registrar takes no requests, so that its peers can
//! catch up. A peer that takes too long loses its association, and the checksums over the next association reveal the
//! missed updates (section 3.6).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use holdfast_proto::registrar::AssociationId;
use holdfast_sys::transport::{AssocId, Message};

use super::links::of_number;

/// Number of updates that are sent without waiting for others.
const MANY: usize = 64;
/// Bytes that wait for a peer, above which no requests are taken.
const LONG: usize = 1 << 20;
/// Maximum time above that limit.
const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes above which a peer is given up at once, because data that the peer itself requests is not held back.
const TOO_LONG: usize = 8 << 20;
/// Interval for retrying to send without an event.
const AGAIN: Duration = Duration::from_millis(5);

/// Function that sends messages: [`send_bundles`](holdfast_sys::transport::Endpoint::send_bundles).
pub(super) type Send<'a> = &'a mut dyn FnMut(&[AssocId], &[Message], &mut Vec<usize>);

/// Messages to other registrars that are not sent yet.
#[derive(Debug)]
pub(super) struct Backlog {
    delay: Duration,
    one_send: bool,
    /// Messages for all of `to`, after the messages that wait for each.
    fresh: Vec<Message>,
    to: Arc<[AssociationId]>,
    /// Time at which the fresh messages are sent, if they are few.
    due: Duration,
    waiting: BTreeMap<AssocId, Waiting>,
    /// Buffers that are reused.
    receivers: Vec<AssocId>,
    taken: Vec<usize>,
}

/// Messages that wait for one association.
#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<Message>,
    bytes: usize,
    /// Time since which the queue is long.
    long_since: Option<Duration>,
}

impl Waiting {
    fn push(&mut self, message: Message) {
        self.bytes += message.data.len();
        self.messages.push_back(message);
    }

    fn took(&mut self, count: usize) {
        let gone = self.messages.drain(..count);
        self.bytes -= gone.map(|message| message.data.len()).sum::<usize>();
    }
}

impl Backlog {
    /// Creates a backlog in which updates wait at most `delay` for others. With `one_send`, a message to all peers is
    /// passed to the transport once.
    pub(super) fn new(delay: Duration, one_send: bool) -> Backlog {
        Backlog {
            delay,
            one_send,
            fresh: Vec::new(),
            to: Arc::new([]),
            due: Duration::ZERO,
            waiting: BTreeMap::new(),
            receivers: Vec::new(),
            taken: Vec::new(),
        }
    }

    /// Adds a message for all of these associations.
    pub(super) fn push_all(&mut self, to: &Arc<[AssociationId]>, message: Message) {
        if !Arc::ptr_eq(&self.to, to) {
            self.part();
            self.to = to.clone();
        }
        self.fresh.push(message);
    }

    /// Adds a message for one association, which does not wait for others.
    pub(super) fn push(&mut self, to: AssocId, message: Message) {
        self.part();
        self.waiting.entry(to).or_default().push(message);
    }

    /// Moves the fresh messages to each association's own queue.
    fn part(&mut self) {
        if self.fresh.is_empty() {
            return;
        }
        for id in self.to.iter() {
            let waiting = self.waiting.entry(of_number(*id).1).or_default();
            self.fresh
                .iter()
                .for_each(|each| waiting.push(each.clone()));
        }
        self.fresh.clear();
    }

    /// Removes an association with its waiting messages.
    pub(super) fn forget(&mut self, gone: AssocId) {
        if self.to.iter().any(|id| of_number(*id).1 == gone) {
            self.part();
            self.to = Arc::new([]);
        }
        self.waiting.remove(&gone);
    }

    /// Sends all messages that are due, as far as there is room.
    pub(super) fn hand_over(&mut self, now: Duration, send: Send<'_>) {
        if !self.waiting.is_empty() {
            self.hand_over_late(send);
        }
        if !self.fresh.is_empty() && (now >= self.due || self.fresh.len() >= MANY) {
            self.hand_over_fresh(send);
            self.due = now + self.delay;
        }
        for waiting in self.waiting.values_mut() {
            let since = waiting.long_since.unwrap_or(now);
            waiting.long_since = (waiting.bytes > LONG).then_some(since);
        }
    }

    /// Sends all messages as far as there is room, at the end of the daemon.
    pub(super) fn finish(&mut self, send: Send<'_>) {
        self.part();
        self.hand_over_late(send);
    }

    fn hand_over_late(&mut self, send: Send<'_>) {
        for (assoc, waiting) in &mut self.waiting {
            loop {
                let (first, _) = waiting.messages.as_slices();
                let offered = first.len();
                self.taken.clear();
                send(&[*assoc], first, &mut self.taken);
                let taken = self.taken.first().map_or(0, |taken| *taken);
                waiting.took(taken);
                if taken < offered || waiting.messages.is_empty() {
                    break;
                }
            }
        }
        self.waiting
            .retain(|_, waiting| !waiting.messages.is_empty());
    }

    fn hand_over_fresh(&mut self, send: Send<'_>) {
        self.receivers.clear();
        for id in self.to.iter() {
            let (_, assoc) = of_number(*id);
            match self.waiting.get_mut(&assoc) {
                Some(waiting) => self
                    .fresh
                    .iter()
                    .for_each(|each| waiting.push(each.clone())),
                None => self.receivers.push(assoc),
            }
        }
        self.taken.clear();
        let at_once = if self.one_send { usize::MAX } else { 1 };
        for receivers in self.receivers.chunks(at_once) {
            send(receivers, &self.fresh, &mut self.taken);
        }
        for (assoc, taken) in self.receivers.iter().zip(&self.taken) {
            for message in self.fresh.iter().skip(*taken) {
                let waiting = self.waiting.entry(*assoc).or_default();
                waiting.push(message.clone());
            }
        }
        self.fresh.clear();
    }

    /// Returns the time at which messages must be sent, regardless of events.
    pub(super) fn next(&self, now: Duration) -> Option<Duration> {
        let again = (!self.waiting.is_empty()).then_some(now + AGAIN);
        let due = (!self.fresh.is_empty()).then_some(self.due);
        again.into_iter().chain(due).min()
    }

    /// Returns true if the backlog is so long that nothing must be added.
    pub(super) fn is_long(&self) -> bool {
        self.waiting.values().any(|waiting| waiting.bytes > LONG)
    }

    /// Returns a peer that is too slow, after dropping its messages; the caller must end its association.
    pub(super) fn give_up(&mut self, now: Duration) -> Option<AssocId> {
        let is_stuck = |waiting: &Waiting| {
            let since = waiting.long_since.unwrap_or(now);
            waiting.bytes > TOO_LONG || now.saturating_sub(since) >= PATIENCE
        };
        let mut each = self.waiting.iter();
        let stuck = each.find_map(|(assoc, waiting)| is_stuck(waiting).then_some(*assoc))?;
        self.waiting.remove(&stuck);
        Some(stuck)
    }
}

#[cfg(test)]
mod tests;
