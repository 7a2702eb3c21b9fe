//! A peer with its two connections, whose state decides whether the peer is up.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use holdfast_wire::{Frame, NodeId};
use tokio::sync::Notify;

use super::connection::{EncodedFrame, PeerConnection};
use super::events::{EventQueue, PeerEvent};
use super::stats::{PeerStats, SmoothedValue};
use super::{PeerConnectionError, SendError};
use crate::config;
use crate::metrics::Metrics;

/// Maximum number of frames received on one connection while the other is still in its greeting.
const EARLY_FRAMES_MAX: usize = 1024;

/// Direction of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// Dialled: carries this node's frames.
    Outgoing,
    /// Accepted: carries the peer's frames.
    Incoming,
}

pub(super) struct Peer {
    pub(super) config: config::PeerConfig,
    events: Rc<EventQueue>,
    metrics: Metrics,
    outgoing: RefCell<Option<GreetedConnection>>,
    incoming: RefCell<Option<GreetedConnection>>,
    up: Cell<bool>,
    up_count: Cell<u64>,
    early_frames: RefCell<Vec<Frame>>,
    /// Wakes the dialling task without a delay, because the peer has connected.
    pub(super) dial_now: Notify,
    problem: RefCell<Option<String>>,
    round_trip: SmoothedValue<8>,
    round_trip_last: Cell<Option<Duration>>,
    /// Byte counts of connections that have ended.
    closed_sent_bytes: Cell<u64>,
    closed_received_bytes: Cell<u64>,
}

struct GreetedConnection {
    link: Rc<PeerConnection>,
    boot: u64,
}

impl Peer {
    pub(super) fn new(
        config: config::PeerConfig,
        events: Rc<EventQueue>,
        metrics: Metrics,
    ) -> Peer {
        metrics.set_connected(&config.name, false);
        Peer {
            config,
            events,
            metrics,
            outgoing: RefCell::default(),
            incoming: RefCell::default(),
            up: Cell::new(false),
            up_count: Cell::new(0),
            early_frames: RefCell::default(),
            dial_now: Notify::new(),
            problem: RefCell::default(),
            round_trip: SmoothedValue::default(),
            round_trip_last: Cell::default(),
            closed_sent_bytes: Cell::default(),
            closed_received_bytes: Cell::default(),
        }
    }

    fn id(&self) -> NodeId {
        self.config.id
    }

    fn slot(&self, direction: Direction) -> &RefCell<Option<GreetedConnection>> {
        match direction {
            Direction::Outgoing => &self.outgoing,
            Direction::Incoming => &self.incoming,
        }
    }

    pub(super) fn is_up(&self) -> bool {
        self.up.get()
    }

    /// Returns how often the peer has come up.
    pub(super) fn up_count(&self) -> u64 {
        self.up_count.get()
    }

    /// Sends a frame on the dialled connection.
    pub(super) fn send(&self, frame: EncodedFrame, queue_bytes: usize) -> Result<(), SendError> {
        let peer = self.id();
        let outgoing = self.outgoing.borrow();
        let Some(GreetedConnection { link, .. }) = outgoing.as_ref().filter(|_| self.up.get())
        else {
            return Err(SendError::NotConnected(peer));
        };
        let queued_bytes = link.queued_bytes();
        if queued_bytes > 0 && queued_bytes + frame.len() > queue_bytes {
            return Err(SendError::QueueFull { peer, queued_bytes });
        }
        link.send_encoded(frame).map_err(|reason| {
            // The connection's task reports the loss, because the event must not be raised from within the caller's
            // call.
            link.close(reason);
            SendError::NotConnected(peer)
        })
    }

    /// Adds a greeted connection. With the second one the peer is up.
    pub(super) fn attach(&self, direction: Direction, link: Rc<PeerConnection>, boot: u64) {
        let old = self
            .slot(direction)
            .replace(Some(GreetedConnection { link, boot }));
        if let Some(old) = old {
            self.close_link(old, PeerConnectionError::Replaced);
            self.mark_lost(PeerConnectionError::Replaced);
        }
        let other = match direction {
            Direction::Outgoing => &self.incoming,
            Direction::Incoming => &self.outgoing,
        };
        let partner_boot = other.borrow().as_ref().map(|greeted| greeted.boot);
        if partner_boot.is_some_and(|partner| partner != boot) {
            // The newer connection is right: the older one leads to a daemon that has ended.
            if let Some(stale) = other.take() {
                self.close_link(stale, PeerConnectionError::Restarted);
                self.mark_lost(PeerConnectionError::Restarted);
            }
        }
        if other.borrow().is_some() {
            self.mark_up(boot);
        } else if direction == Direction::Incoming {
            self.dial_now.notify_one();
        }
    }

    /// Removes a connection whose task has ended. A peer that was up is lost, and its other connection closed.
    pub(super) fn detach(
        &self,
        direction: Direction,
        link: &Rc<PeerConnection>,
        reason: PeerConnectionError,
    ) {
        let current = self
            .slot(direction)
            .borrow_mut()
            .take_if(|greeted| Rc::ptr_eq(&greeted.link, link));
        let Some(current) = current else {
            return;
        };
        self.add_closed_bytes(&current.link);
        if self.up.get() {
            for slot in [&self.outgoing, &self.incoming] {
                if let Some(partner) = slot.take() {
                    self.close_link(partner, PeerConnectionError::OtherDirectionEnded);
                }
            }
            self.mark_lost(reason);
        } else if direction == Direction::Incoming {
            self.early_frames.take();
        }
    }

    /// Delivers a received frame.
    pub(super) fn deliver(&self, frame: Frame) -> Result<(), PeerConnectionError> {
        if self.up.get() {
            let from = self.id();
            self.events.push(PeerEvent::Frame { from, frame });
            return Ok(());
        }
        // The peer has seen both greetings, this node only one.
        let mut early = self.early_frames.borrow_mut();
        if early.len() == EARLY_FRAMES_MAX {
            return Err(PeerConnectionError::UnexpectedFrame(frame.name()));
        }
        early.push(frame);
        Ok(())
    }

    fn mark_up(&self, boot: u64) {
        let peer = self.id();
        self.up.set(true);
        self.up_count.set(self.up_count.get() + 1);
        self.problem.take();
        self.metrics.set_connected(&self.config.name, true);
        tracing::info!(peer = self.config.name, boot, "peer is up");
        self.events.push(PeerEvent::Up { peer, boot });
        for frame in self.early_frames.take() {
            self.events.push(PeerEvent::Frame { from: peer, frame });
        }
    }

    fn mark_lost(&self, reason: PeerConnectionError) {
        self.early_frames.take();
        if self.up.replace(false) {
            self.metrics.set_connected(&self.config.name, false);
            tracing::warn!(peer = self.config.name, %reason, "peer is lost");
            self.problem.replace(Some(reason.to_string()));
            let peer = self.id();
            self.events.push(PeerEvent::Lost { peer, reason });
        }
    }

    fn close_link(&self, greeted: GreetedConnection, reason: PeerConnectionError) {
        self.add_closed_bytes(&greeted.link);
        greeted.link.close(reason);
    }

    fn add_closed_bytes(&self, link: &PeerConnection) {
        let sent = self.closed_sent_bytes.get() + link.sent_bytes.get();
        self.closed_sent_bytes.set(sent);
        let received = self.closed_received_bytes.get() + link.received_bytes.get();
        self.closed_received_bytes.set(received);
    }

    /// Records the round trip of a ping.
    pub(super) fn record_round_trip(&self, round_trip: Duration) {
        self.round_trip.sample(round_trip.as_secs_f64());
        self.round_trip_last.set(Some(round_trip));
        if let Some(smoothed) = self.round_trip.get() {
            let smoothed = Duration::from_secs_f64(smoothed);
            self.metrics.set_round_trip(&self.config.name, smoothed);
        }
    }

    /// Records a failed attempt to connect, or a refusal of the peer. Each reason is logged once.
    pub(super) fn record_problem(&self, reason: &PeerConnectionError) {
        if self.up.get() {
            return;
        }
        let text = reason.to_string();
        let mut problem = self.problem.borrow_mut();
        if problem.as_ref() == Some(&text) {
            tracing::debug!(peer = self.config.name, %reason, "peer is still not connected");
        } else {
            tracing::warn!(peer = self.config.name, %reason, "peer is not connected");
            *problem = Some(text);
        }
    }

    pub(super) fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Closes the connections whose certificates `admits` refuses.
    pub(super) fn recheck_certificates(
        &self,
        admits: impl Fn(&PeerConnection) -> Result<(), rustls::Error>,
    ) {
        for slot in [&self.outgoing, &self.incoming] {
            if let Some(greeted) = slot.borrow().as_ref()
                && let Err(error) = admits(&greeted.link)
            {
                greeted.link.close(PeerConnectionError::Revoked(error));
            }
        }
    }

    pub(super) fn stats(&self) -> PeerStats {
        let mut stats = PeerStats {
            up: self.up.get(),
            round_trip: self.round_trip.get().map(Duration::from_secs_f64),
            round_trip_last: self.round_trip_last.get(),
            sent_bytes: self.closed_sent_bytes.get(),
            received_bytes: self.closed_received_bytes.get(),
            ..PeerStats::default()
        };
        for slot in [&self.outgoing, &self.incoming] {
            if let Some(GreetedConnection { link, .. }) = slot.borrow().as_ref() {
                stats.sent_bytes += link.sent_bytes.get();
                stats.received_bytes += link.received_bytes.get();
            }
        }
        if let Some(GreetedConnection { link, .. }) = self.outgoing.borrow().as_ref() {
            stats.queued_bytes = link.queued_bytes();
            stats.bytes_per_second = link.rate.bytes_per_second();
        }
        stats
    }

    /// Closes both connections; a peer that was up is lost.
    pub(super) fn close(&self) {
        for slot in [&self.outgoing, &self.incoming] {
            if let Some(greeted) = slot.take() {
                self.close_link(greeted, PeerConnectionError::Shutdown);
            }
        }
        self.mark_lost(PeerConnectionError::Shutdown);
    }
}
