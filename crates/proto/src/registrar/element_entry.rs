//! Data of the registrar about an element, and changes of elements that concern its association, its host or the peers.

use super::associations::{Associations, endpoints};
use super::distance::{has_distance, rounded};
use super::{AssociationId, Event, PoolProtocol, Registrar, RegistrarSettings, RemovalReason};
use bytes::Bytes;
use holdfast_handlespace::{ElementKey, TimerKind};
use holdfast_wire::rserpool::asap::{self, ResolutionResponseEncoder};
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{
    CauseCode, EncodedElement, PoolElement, RegistrarId, Transport, TransportUse,
};
use std::cell::OnceCell;
use std::net::IpAddr;
use std::time::Duration;

/// The registrar's data about an element.
#[derive(Debug, Clone)]
pub(super) struct ElementEntry {
    /// The element as its home registrar describes it. The distance is this registrar's own, not rounded.
    pub(super) element: PoolElement,
    /// The element's encoding for users, once one was told of it.
    encoded_element: OnceCell<EncodedElement>,
    /// Part of the distance that is this registrar's delay to the peer that described the element. Only for elements of
    /// other homes.
    pub(super) delay_ms: u32,
    /// Equal to the peer's own stamp if the element is in the peer's table: see `resynchronisation.rs`.
    pub(super) sync_stamp: u32,
    pub(super) keep_alive: KeepAliveState,
    /// Association of the element's registration, and the index in that association's list. Only for own elements.
    pub(super) association: Option<(AssociationId, usize)>,
    /// Host to which the element counts: the one of its last association here. Only for own elements.
    pub(super) host: Option<IpAddr>,
    /// Time of the last registration here.
    pub(super) registered: Duration,
    /// Time of the last registration or answer here.
    pub(super) last_heard: Duration,
    /// End of the registration's life.
    pub(super) expires: Duration,
    /// True if this registrar became the home without a registration: keep-alives have the H flag until the element
    /// answers.
    pub(super) adopting: bool,
    /// Association of the last keep-alive with the H flag: an answer from there accepts this registrar.
    pub(super) home_flag_association: Option<AssociationId>,
    /// True if the element registered here, or answered a keep-alive with the H flag, and that association is still up.
    /// Otherwise the element may have moved to another registrar, and an answer says only that it is alive. Only for
    /// own elements.
    pub(super) has_accepted_home: bool,
    /// This registrar's former claim to an element of another home.
    pub(super) claim: FormerClaim,
    /// Hosts that reported the element since its last registration or answer.
    pub(super) reporters: Vec<IpAddr>,
}

/// Former claim of this registrar to an element, from before another registrar claimed it as home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FormerClaim {
    /// No former claim of this registrar to the element.
    None,
    /// Yielded; the other registrar may have yielded the element as well.
    Yielded,
    /// Yielded, while the element was asked over this association to follow this registrar: its answer is newer than
    /// the other registrar's word.
    AwaitingAnswer(AssociationId),
}

/// State of an element's keep-alives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeepAliveState {
    /// None are sent: the element has another home.
    Off,
    /// The next keep-alive is due at this time.
    Due(Duration),
    /// Keep-alive sent; the answer is due at this time.
    AwaitingAck(Duration),
}

/// Shortest life of a registration: a shorter one would end before the response arrives.
const LIFE_MIN: Duration = Duration::from_millis(100);

/// A time that never comes.
pub(super) const NEVER: Duration = Duration::MAX;

impl ElementEntry {
    /// Returns the entry of an element that has another registrar as home.
    pub(super) fn new_foreign(element: PoolElement, stamp: u32) -> ElementEntry {
        ElementEntry {
            element,
            encoded_element: OnceCell::new(),
            delay_ms: 0,
            sync_stamp: stamp,
            keep_alive: KeepAliveState::Off,
            association: None,
            host: None,
            registered: Duration::ZERO,
            last_heard: Duration::ZERO,
            expires: NEVER,
            adopting: false,
            home_flag_association: None,
            has_accepted_home: false,
            claim: FormerClaim::None,
            reporters: Vec::new(),
        }
    }

    /// Updates the entry of an own element after a registration.
    #[inline]
    pub(super) fn renew(&mut self, now: Duration, settings: &RegistrarSettings) {
        let expires = life_end(now, self.element.registration_life, settings.life_unit);
        self.expires = expires.max(now + LIFE_MIN);
        self.keep_alive = KeepAliveState::Due(now + settings.keep_alive_interval);
        (self.registered, self.last_heard) = (now, now);
        self.has_accepted_home = true;
        self.reporters.clear();
    }

    /// Returns the element for a change, and drops its encoding.
    pub(super) fn element_mut(&mut self) -> &mut PoolElement {
        self.encoded_element.take();
        &mut self.element
    }

    /// Adds the element to an answer to a user. Its distance is rounded to `step`.
    #[inline]
    pub(super) fn add_to_answer(&self, step: u32, answer: &mut ResolutionResponseEncoder<'_>) {
        let element = &self.element;
        match has_distance(element.policy) {
            true => answer.push(&PoolElement {
                policy: rounded(element.policy, step),
                ..element.clone()
            }),
            false => answer.push_encoded(self.encoded_element.get_or_init(|| element.to_encoded())),
        }
    }

    /// Returns the element's next timer.
    #[inline]
    pub(super) fn next_timer(&self) -> Option<(TimerKind, Duration)> {
        let (kind, at) = match self.keep_alive {
            KeepAliveState::Off => return None,
            KeepAliveState::Due(at) => (TimerKind::KeepAliveTransmission, at),
            KeepAliveState::AwaitingAck(until) => (TimerKind::KeepAliveTimeout, until),
        };
        Some(if self.expires < at {
            (TimerKind::RegistrationExpiry, self.expires)
        } else {
            (kind, at)
        })
    }
}

/// Returns the properties that the elements of a pool must share besides the policy, as the handlespace's class: the
/// transport's type and its use (RFC 5352 section 3.1).
#[inline]
pub(super) fn transport_class(transport: &Transport) -> u32 {
    let (kind, usage) = match transport {
        Transport::Dccp { .. } => (0, TransportUse::DataOnly),
        Transport::Sctp(transport) => (1, transport.usage),
        Transport::Tcp { usage, .. } => (2, *usage),
        Transport::Udp { .. } => (3, TransportUse::DataOnly),
        Transport::UdpLite { .. } => (4, TransportUse::DataOnly),
        Transport::Opaque(_) => (5, TransportUse::DataOnly),
    };
    kind * 2 + u32::from(usage == TransportUse::DataAndControl)
}

/// Copies an opaque transport, so that the element does not keep the whole message in memory.
pub(super) fn copy_opaque_transport(element: &mut PoolElement) {
    if let Transport::Opaque(data) = &mut element.user_transport {
        *data = Bytes::copy_from_slice(data);
    }
}

impl Associations {
    /// Returns the association over which the element registered, or was probed.
    fn reachable_from(&self, entry: &ElementEntry) -> Option<AssociationId> {
        let linked = entry.association.map(|(association, _)| association);
        linked.or_else(|| {
            let transport = entry.element.asap_transport.as_ref()?;
            let addresses: Vec<_> = endpoints(transport).collect();
            self.find(PoolProtocol::Asap, &addresses)
        })
    }
}

impl Registrar {
    /// Links the element to the association of its registration, instead of any earlier one; none if this registrar is
    /// not its home.
    pub(super) fn link_to_association(&mut self, key: ElementKey, to: Option<AssociationId>) {
        let host = to.and_then(|to| self.associations.get(to).map(|to| to.host));
        let Some(entry) = self.elements.entry_mut(key) else {
            return;
        };
        if entry.host != host {
            let before = std::mem::replace(&mut entry.host, host);
            let hosts = &mut self.associations.hosts;
            host.into_iter().for_each(|host| hosts.add_element(host));
            before
                .into_iter()
                .for_each(|host| hosts.remove_element(host));
        }
        if entry.association.map(|(association, _)| association) == to {
            return;
        }
        let is_distant = has_distance(entry.element.policy);
        if let Some((association, place)) = entry.association.take() {
            self.unlink_from_association(association, place, is_distant);
        }
        let Some(to) = to else { return };
        let place = self.associations.link_element(to, key, is_distant);
        if let Some(entry) = self.elements.entry_mut(key) {
            entry.association = place.map(|place| (to, place));
        }
        if is_distant {
            self.request_measurement(to);
        }
    }

    fn unlink_from_association(
        &mut self,
        association: AssociationId,
        place: usize,
        is_distant: bool,
    ) {
        let moved = self
            .associations
            .unlink_element(association, place, is_distant);
        if let Some(moved) = moved
            && let Some(entry) = self.elements.entry_mut(moved)
        {
            entry.association = Some((association, place));
        }
    }

    /// Removes an element from this registrar's view alone.
    pub(super) fn remove_local(&mut self, key: ElementKey) -> Option<ElementEntry> {
        let (handle, entry) = self.elements.remove(key)?;
        self.subscriptions.mark_changed(&handle);
        if self.elements.space().pool(&handle).is_none() {
            self.associations.hosts.remove_pool(&handle);
        }
        if let Some(host) = entry.host {
            self.associations.hosts.remove_element(host);
        }
        if let Some((association, place)) = entry.association {
            self.unlink_from_association(association, place, has_distance(entry.element.policy));
        }
        Some(entry)
    }

    /// Removes an element from the handlespace and informs the peers (RFC 5353 section 3.3.2).
    pub(super) fn remove_and_announce(&mut self, key: ElementKey, reason: RemovalReason) {
        let Some(handle) = self
            .elements
            .space()
            .get(key)
            .map(|element| element.handle().clone())
        else {
            return;
        };
        let Some(entry) = self.remove_local(key) else {
            return;
        };
        let id = entry.element.id;
        let is_requested = reason == RemovalReason::Deregistered;
        if !is_requested
            && reason != RemovalReason::Reported
            && let Some(association) = self.associations.reachable_from(&entry)
        {
            // RFC 5352 section 3.2: "an ASAP_DEREGISTRATION_RESPONSE message is sent to the PE's ASAP Endpoint". An
            // element with late or lost answers to keep-alives so learns too that it must register again. An
            // element that users cannot reach is not invited back.
            let forbidden =
                (reason == RemovalReason::Forbidden).then_some(CauseCode::REJECTED_FOR_SECURITY);
            let message = asap::Message::DeregistrationResponse {
                handle: handle.clone(),
                id,
                causes: forbidden.into_iter().map(Into::into).collect(),
            };
            let _ = self.outbox.send_asap(association, &message);
        }
        self.outbox.announce_to_peers(EnrpBody::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Delete,
            handle: handle.clone(),
            element: entry.element,
        });
        self.counters.updates_sent += 1;
        self.outbox
            .push_event(Event::Removed { handle, id, reason });
    }

    /// Sets the element's home, as claimed by that registrar or another one.
    pub(super) fn set_home(&mut self, key: ElementKey, home: RegistrarId) {
        let stamp = self.peers.sync_stamp_of(home);
        self.elements.set_home(key, home, stamp);
    }

    /// Yields the element to another home, and stops its keep-alives. Returns the remaining claim of this registrar.
    pub(super) fn yield_to(&mut self, key: ElementKey, home: RegistrarId) -> FormerClaim {
        self.link_to_association(key, None);
        self.elements.end_contest(key);
        self.set_home(key, home);
        self.elements.give_up(key)
    }

    /// Makes this registrar the element's home without a registration. A keep-alive at the time `at` informs the
    /// element and asks for an answer.
    pub(super) fn become_home(&mut self, now: Duration, key: ElementKey, at: Duration) {
        let id = self.config.id;
        self.set_home(key, id);
        let unit = self.config.settings.life_unit;
        self.elements.adopt(now, key, at, unit);
    }

    /// Announces the element to the peers as it is here.
    pub(super) fn announce_element(&mut self, key: ElementKey) {
        let Some(view) = self.elements.space().get(key) else {
            return;
        };
        let body = EnrpBody::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: view.handle().clone(),
            element: view.payload().element.clone(),
        };
        self.outbox.announce_to_peers(body);
        self.counters.updates_sent += 1;
    }
}

/// Returns the end of a registration's life.
#[inline]
pub(super) fn life_end(now: Duration, life: i32, unit: super::LifeUnit) -> Duration {
    unit.decode(life).map_or(NEVER, |life| now + life)
}
