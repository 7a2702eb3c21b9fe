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
use holdfast_sctp::{AssocId, MessageToSend};

use super::associations::endpoint_of;

/// Number of updates that are sent without waiting for others.
const FRESH_MAX: usize = 64;
/// Bytes that wait for a peer, above which no requests are taken.
const LONG_BYTES: usize = 1 << 20;
/// Maximum time for which more than [`LONG_BYTES`] may wait for a peer.
const LONG_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes above which a peer is given up at once, because data that the peer itself requests is not held back.
const BYTES_MAX: usize = 8 << 20;
/// Interval for retrying to send without an event.
const RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Function that sends messages: [`send_bundles`](holdfast_sctp::TransportEndpoint::send_bundles).
pub(super) type SendBundles<'a> = &'a mut dyn FnMut(&[AssocId], &[MessageToSend], &mut Vec<usize>);

/// Messages to other registrars that are not sent yet.
#[derive(Debug)]
pub(super) struct Backlog {
    delay: Duration,
    send_to_all_at_once: bool,
    /// Messages for all of `to`, after the messages that wait for each.
    fresh: Vec<MessageToSend>,
    receivers_of_fresh: Arc<[AssociationId]>,
    /// Time at which the fresh messages are sent, if they are few.
    due: Duration,
    queues: BTreeMap<AssocId, PeerQueue>,
    /// Buffers that are reused.
    receiver_buffer: Vec<AssocId>,
    taken_counts: Vec<usize>,
}

/// Messages that wait for room in the buffer of one association.
#[derive(Debug, Default)]
struct PeerQueue {
    messages: VecDeque<MessageToSend>,
    bytes: usize,
    /// Time since which more than [`LONG_BYTES`] wait.
    long_since: Option<Duration>,
}

impl PeerQueue {
    fn push(&mut self, message: MessageToSend) {
        self.bytes += message.data.len();
        self.messages.push_back(message);
    }

    fn remove_front(&mut self, count: usize) {
        let removed = self.messages.drain(..count);
        self.bytes -= removed.map(|message| message.data.len()).sum::<usize>();
    }
}

impl Backlog {
    /// Creates a backlog in which updates wait at most `delay` for others. With `one_send`, a message to all peers is
    /// passed to the transport once.
    pub(super) fn new(delay: Duration, one_send: bool) -> Backlog {
        Backlog {
            delay,
            send_to_all_at_once: one_send,
            fresh: Vec::new(),
            receivers_of_fresh: Arc::new([]),
            due: Duration::ZERO,
            queues: BTreeMap::new(),
            receiver_buffer: Vec::new(),
            taken_counts: Vec::new(),
        }
    }

    /// Adds a message for all of these associations.
    pub(super) fn push_all(&mut self, to: &Arc<[AssociationId]>, message: MessageToSend) {
        if !Arc::ptr_eq(&self.receivers_of_fresh, to) {
            self.distribute_fresh();
            self.receivers_of_fresh = to.clone();
        }
        self.fresh.push(message);
    }

    /// Adds a message for one association, which does not wait for others.
    pub(super) fn push(&mut self, to: AssocId, message: MessageToSend) {
        self.distribute_fresh();
        self.queues.entry(to).or_default().push(message);
    }

    /// Moves the fresh messages to each association's own queue.
    fn distribute_fresh(&mut self) {
        if self.fresh.is_empty() {
            return;
        }
        for id in self.receivers_of_fresh.iter() {
            let waiting = self.queues.entry(endpoint_of(*id).1).or_default();
            self.fresh
                .iter()
                .for_each(|each| waiting.push(each.clone()));
        }
        self.fresh.clear();
    }

    /// Removes an association with its waiting messages.
    pub(super) fn forget(&mut self, assoc: AssocId) {
        if self
            .receivers_of_fresh
            .iter()
            .any(|id| endpoint_of(*id).1 == assoc)
        {
            self.distribute_fresh();
            self.receivers_of_fresh = Arc::new([]);
        }
        self.queues.remove(&assoc);
    }

    /// Sends all messages that are due, as far as there is room.
    pub(super) fn send_due(&mut self, now: Duration, send: SendBundles<'_>) {
        if !self.queues.is_empty() {
            self.send_queued(send);
        }
        if !self.fresh.is_empty() && (now >= self.due || self.fresh.len() >= FRESH_MAX) {
            self.send_fresh(send);
            self.due = now + self.delay;
        }
        for waiting in self.queues.values_mut() {
            let since = waiting.long_since.unwrap_or(now);
            waiting.long_since = (waiting.bytes > LONG_BYTES).then_some(since);
        }
    }

    /// Sends all messages as far as there is room, at the end of the daemon.
    pub(super) fn send_all(&mut self, send: SendBundles<'_>) {
        self.distribute_fresh();
        self.send_queued(send);
    }

    fn send_queued(&mut self, send: SendBundles<'_>) {
        for (assoc, waiting) in &mut self.queues {
            loop {
                let (first, _) = waiting.messages.as_slices();
                let offered = first.len();
                self.taken_counts.clear();
                send(&[*assoc], first, &mut self.taken_counts);
                let sent = self.taken_counts.first().map_or(0, |taken| *taken);
                waiting.remove_front(sent);
                if sent < offered || waiting.messages.is_empty() {
                    break;
                }
            }
        }
        self.queues
            .retain(|_, waiting| !waiting.messages.is_empty());
    }

    fn send_fresh(&mut self, send: SendBundles<'_>) {
        self.receiver_buffer.clear();
        for id in self.receivers_of_fresh.iter() {
            let (_, assoc) = endpoint_of(*id);
            match self.queues.get_mut(&assoc) {
                Some(waiting) => self
                    .fresh
                    .iter()
                    .for_each(|each| waiting.push(each.clone())),
                None => self.receiver_buffer.push(assoc),
            }
        }
        self.taken_counts.clear();
        let chunk_len = if self.send_to_all_at_once {
            usize::MAX
        } else {
            1
        };
        for receivers in self.receiver_buffer.chunks(chunk_len) {
            send(receivers, &self.fresh, &mut self.taken_counts);
        }
        for (assoc, taken) in self.receiver_buffer.iter().zip(&self.taken_counts) {
            for message in self.fresh.iter().skip(*taken) {
                let waiting = self.queues.entry(*assoc).or_default();
                waiting.push(message.clone());
            }
        }
        self.fresh.clear();
    }

    /// Returns the time at which messages must be sent, regardless of events.
    pub(super) fn next_send(&self, now: Duration) -> Option<Duration> {
        let retry_at = (!self.queues.is_empty()).then_some(now + RETRY_INTERVAL);
        let due = (!self.fresh.is_empty()).then_some(self.due);
        retry_at.into_iter().chain(due).min()
    }

    /// Returns true if the backlog is so long that nothing must be added.
    pub(super) fn is_long(&self) -> bool {
        self.queues
            .values()
            .any(|waiting| waiting.bytes > LONG_BYTES)
    }

    /// Returns a peer that is too slow, after dropping its messages; the caller must end its association.
    pub(super) fn pop_stuck_peer(&mut self, now: Duration) -> Option<AssocId> {
        let is_stuck = |waiting: &PeerQueue| {
            let since = waiting.long_since.unwrap_or(now);
            waiting.bytes > BYTES_MAX || now.saturating_sub(since) >= LONG_TIMEOUT
        };
        let mut queues = self.queues.iter();
        let stuck_peer = queues.find_map(|(assoc, waiting)| is_stuck(waiting).then_some(*assoc))?;
        self.queues.remove(&stuck_peer);
        Some(stuck_peer)
    }
}

#[cfg(test)]
mod tests;
