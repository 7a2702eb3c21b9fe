//! A peer with its two connections, whose state decides whether the peer is up.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use holdfast_wire::membership_frames::MembershipFrame;
use holdfast_wire::{Frame, FrameDecoder, NodeId, encode};
use rustls::pki_types::CertificateDer;
use tokio::sync::Notify;

use super::connection::{EncodedFrame, PeerConnection};
use super::events::{EventQueue, PeerEvent};
use super::stats::{PeerStats, SmoothedValue};
use super::{PeerConnectionError, SendError};
use crate::metrics::Metrics;

/// Maximum number of frames received on one connection while the other is still in its greeting.
const EARLY_FRAMES_MAX: usize = 1024;

/// Maximum number of frames received from a node before the group has told its number, and of their bytes.
const GUEST_EARLY_FRAMES_MAX: usize = 128;
const GUEST_EARLY_BYTES_MAX: usize = 1 << 20;

/// Maximum number of membership frames that wait for a connection. The oldest is dropped first: its sender repeats what
/// still matters.
const PENDING_FRAMES_MAX: usize = 8;

/// Number of waiting bytes in front of a membership frame at which the frame is dropped.
const MEMBERSHIP_QUEUE_BYTES_MAX: usize = 64 << 20;

/// Direction of a connection between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// A connection that this node dialled, and on which this node sends.
    Outgoing,
    /// A connection that the peer dialled, and on which the peer sends.
    Incoming,
}

pub(super) struct Peer {
    /// Name in the peer's certificate.
    pub(super) name: String,
    /// The peer's number in the group; none for a guest.
    number: Cell<Option<NodeId>>,
    address: Cell<Option<SocketAddr>>,
    /// True while a task dials the peer.
    pub(super) dialling: Cell<bool>,
    /// Membership frames that wait for a connection.
    pending: RefCell<Vec<EncodedFrame>>,
    outgoing_ended: Notify,
    events: Rc<EventQueue>,
    metrics: Metrics,
    outgoing: RefCell<Option<GreetedConnection>>,
    incoming: RefCell<Option<GreetedConnection>>,
    up: Cell<bool>,
    up_count: Cell<u64>,
    early_frames: RefCell<EarlyFrames>,
    /// Wakes the dialling task without a delay, because the peer has connected.
    pub(super) dial_now: Notify,
    problem: RefCell<Option<String>>,
    /// Differences from this node that do not keep the nodes apart, as the last greeting showed.
    disagreements: RefCell<Vec<String>>,
    /// Boot id of the peer's daemon, and that of the daemon before.
    boot: Cell<Option<u64>>,
    former_boot: Cell<Option<u64>>,
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

/// Frames received before the peer is up, in their encoded form: a decoded frame may hold far more memory.
#[derive(Default)]
struct EarlyFrames {
    bytes: Vec<u8>,
    count: usize,
}

impl Peer {
    /// Returns a peer that is not connected and has no number in the group (a guest).
    pub(super) fn new(name: String, events: Rc<EventQueue>, metrics: Metrics) -> Peer {
        Peer {
            name,
            number: Cell::default(),
            address: Cell::default(),
            dialling: Cell::default(),
            pending: RefCell::default(),
            outgoing_ended: Notify::new(),
            events,
            metrics,
            outgoing: RefCell::default(),
            incoming: RefCell::default(),
            up: Cell::new(false),
            up_count: Cell::new(0),
            early_frames: RefCell::default(),
            dial_now: Notify::new(),
            problem: RefCell::default(),
            disagreements: RefCell::default(),
            boot: Cell::default(),
            former_boot: Cell::default(),
            round_trip: SmoothedValue::default(),
            round_trip_last: Cell::default(),
            closed_sent_bytes: Cell::default(),
            closed_received_bytes: Cell::default(),
        }
    }

    /// Returns the peer's number in the group; none for a guest.
    pub(super) fn number(&self) -> Option<NodeId> {
        self.number.get()
    }

    pub(super) fn is_member(&self) -> bool {
        self.number.get().is_some()
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.address.get()
    }

    pub(super) fn set_address_if_unknown(&self, address: SocketAddr) {
        if self.address.get().is_none() {
            self.address.set(Some(address));
        }
    }

    /// Sets the address of a guest.
    pub(super) fn set_guest_address(&self, address: SocketAddr) {
        self.address.set(Some(address));
    }

    /// Makes the peer a member with this number and address.
    pub(super) fn set_member(&self, number: NodeId, address: SocketAddr) {
        if self.address.replace(Some(address)) != Some(address)
            && let Some(GreetedConnection { link, .. }) = self.outgoing.borrow().as_ref()
        {
            link.close(PeerConnectionError::Replaced);
        }
        if self.number.get() == Some(number) {
            return;
        }
        if self.is_member() {
            self.clear_number();
        }
        self.number.set(Some(number));
        self.metrics.set_connected(&self.name, false);
        let boot = self.incoming.borrow().as_ref().map(|greeted| greeted.boot);
        if let (Some(boot), true) = (boot, self.has_outgoing()) {
            self.mark_up(boot);
        }
    }

    /// Makes the peer a guest: the group does not contain it.
    pub(super) fn clear_number(&self) {
        self.mark_lost(PeerConnectionError::NotMember);
        if self.number.take().is_some() {
            self.metrics.forget_peer(&self.name);
        }
    }

    /// Returns true if a connection shall be made: the peer is a member, or frames wait for it.
    pub(super) fn wants_connection(&self) -> bool {
        self.is_member() || !self.pending.borrow().is_empty()
    }

    /// Returns true if nothing is connected, and nothing shall be.
    pub(super) fn is_idle(&self) -> bool {
        !self.wants_connection() && !self.has_outgoing() && !self.has_incoming()
    }

    pub(super) fn has_outgoing(&self) -> bool {
        self.outgoing.borrow().is_some()
    }

    /// Returns the address at which this node has dialled the peer; none without such a connection. The peer's present address
    /// may be another one, which is only the peer's word if the peer is a guest.
    pub(super) fn dialled_address(&self) -> Option<SocketAddr> {
        let outgoing = self.outgoing.borrow();
        outgoing.as_ref()?.link.dialled_address()
    }

    pub(super) fn has_incoming(&self) -> bool {
        self.incoming.borrow().is_some()
    }

    /// Waits until there is no dialled connection.
    pub(super) async fn wait_outgoing_ended(&self) {
        while self.has_outgoing() {
            self.outgoing_ended.notified().await;
        }
    }

    /// Sends a frame of the membership, or keeps it until there is a connection. A frame that cannot be sent is dropped,
    /// as the network might do.
    pub(super) fn send_membership(&self, frame: &MembershipFrame) {
        let encoded = match EncodedFrame::new(&Frame::Membership(frame.clone())) {
            Ok(encoded) => encoded,
            Err(error) => return tracing::error!(%error, "cannot encode a membership frame"),
        };
        // The accepted connection carries little else; on the dialled one, handoffs may be queued.
        let link = [&self.incoming, &self.outgoing]
            .into_iter()
            .find_map(|slot| Some(slot.borrow().as_ref()?.link.clone()));
        match link {
            Some(link) => self.send_on(&link, encoded),
            None => {
                let mut pending = self.pending.borrow_mut();
                if pending.len() == PENDING_FRAMES_MAX {
                    pending.remove(0);
                }
                pending.push(encoded);
            }
        }
    }

    fn send_on(&self, link: &PeerConnection, frame: EncodedFrame) {
        if link.queued_bytes() > MEMBERSHIP_QUEUE_BYTES_MAX {
            tracing::debug!(
                peer = self.name,
                "a membership frame was dropped: the path is full"
            );
        } else if let Err(reason) = link.send_encoded(frame) {
            link.close(reason);
        }
    }

    /// Drops the frames that wait for a connection which could not be made.
    pub(super) fn drop_pending_frames(&self) {
        self.pending.take();
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
        let peer = self.number.get().unwrap_or(NodeId(0));
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

    /// Returns true if a daemon with this boot id at this address is another one than the connected daemon, which lives: two
    /// hosts have the peer's certificate.
    pub(super) fn is_other_host(&self, boot: u64, address: Option<IpAddr>) -> bool {
        // A daemon that was replaced does not come back, unless it has never ended.
        if self.former_boot.get() == Some(boot) {
            return true;
        }
        let incoming = self.incoming.borrow();
        let connected = incoming.as_ref().filter(|_| self.up.get());
        connected.is_some_and(|greeted| {
            let known = greeted.link.remote_ip();
            greeted.boot != boot && known.is_some() && known != address
        })
    }

    /// Notes the differences that a greeting has shown. New ones are logged.
    pub(super) fn note_disagreements(&self, disagreements: Vec<String>) {
        let former = self.disagreements.replace(disagreements.clone());
        // A difference of clocks varies from greeting to greeting.
        if former.len() != disagreements.len() {
            for disagreement in disagreements {
                tracing::warn!(peer = self.name, %disagreement, "a peer disagrees");
            }
        }
    }

    /// Returns the differences that the last greeting has shown.
    pub(super) fn disagreements(&self) -> Vec<String> {
        self.disagreements.borrow().clone()
    }

    /// Adds a greeted connection. With the second one a member is up.
    pub(super) fn attach(&self, direction: Direction, link: Rc<PeerConnection>, boot: u64) {
        if let Some(former) = self
            .boot
            .replace(Some(boot))
            .filter(|former| *former != boot)
        {
            self.former_boot.set(Some(former));
        }
        for frame in self.pending.take() {
            self.send_on(&link, frame);
        }
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
        self.outgoing_ended.notify_one();
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

    /// Delivers a received frame, or keeps it until the peer is up: `queue_bytes` of a member at most.
    pub(super) fn deliver(
        &self,
        frame: Frame,
        queue_bytes: usize,
    ) -> Result<(), PeerConnectionError> {
        if let Some(from) = self.number.get().filter(|_| self.up.get()) {
            self.events.push(PeerEvent::Frame { from, frame });
            return Ok(());
        }
        // The peer has seen both greetings and knows its number, this node only a part of that.
        let mut early = self.early_frames.borrow_mut();
        let (count_max, bytes_max) = match self.is_member() {
            true => (EARLY_FRAMES_MAX, queue_bytes),
            false => (GUEST_EARLY_FRAMES_MAX, GUEST_EARLY_BYTES_MAX),
        };
        encode(&frame, &mut early.bytes)?;
        early.count += 1;
        if early.count > count_max || early.bytes.len() > bytes_max {
            *early = EarlyFrames::default();
            return Err(PeerConnectionError::UnexpectedFrame(frame.name()));
        }
        Ok(())
    }

    /// Reports a member whose directions both work.
    fn mark_up(&self, boot: u64) {
        let Some(peer) = self.number.get() else {
            return;
        };
        self.up.set(true);
        self.up_count.set(self.up_count.get() + 1);
        self.problem.take();
        self.metrics.set_connected(&self.name, true);
        tracing::info!(peer = self.name, boot, "peer is up");
        self.events.push(PeerEvent::Up { peer, boot });
        let mut early = FrameDecoder::new();
        early.feed(&self.early_frames.take().bytes);
        // The frames decode as they did when they arrived.
        while let Ok(Some(frame)) = early.next_frame() {
            self.events.push(PeerEvent::Frame { from: peer, frame });
        }
    }

    fn mark_lost(&self, reason: PeerConnectionError) {
        self.early_frames.take();
        if self.up.replace(false) {
            self.metrics.set_connected(&self.name, false);
            tracing::warn!(peer = self.name, %reason, "peer is lost");
            self.problem.replace(Some(reason.to_string()));
            let peer = self.number.get().unwrap_or(NodeId(0));
            self.events.push(PeerEvent::Lost { peer, reason });
        }
    }

    fn close_link(&self, greeted: GreetedConnection, reason: PeerConnectionError) {
        self.outgoing_ended.notify_one();
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
            self.metrics.set_round_trip(&self.name, smoothed);
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
            tracing::debug!(peer = self.name, %reason, "peer is still not connected");
        } else {
            tracing::warn!(peer = self.name, %reason, "peer is not connected");
            *problem = Some(text);
        }
    }

    pub(super) fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Returns the certificate of the accepted connection, which carries the peer's frames.
    pub(super) fn incoming_certificate(&self) -> Option<CertificateDer<'static>> {
        let incoming = self.incoming.borrow();
        let certificates = incoming.as_ref()?.link.certificates();
        certificates.into_iter().next()
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
