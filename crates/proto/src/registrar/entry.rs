//! Data of the registrar about an element, and changes of elements: the only place that writes the handlespace.

use super::associations::endpoints;
use super::distance::{is_distant, rounded};
use super::{AssociationId, Event, Gone, Protocol, Registrar, Settings};
use bytes::Bytes;
use holdfast_handlespace::{ElementKey, TimerKind};
use holdfast_wire::rserpool::asap::{self, ResolutionResponse};
use holdfast_wire::rserpool::enrp::{Body, UpdateAction};
use holdfast_wire::rserpool::{
    CauseCode, EncodedElement, PoolElement, PoolHandle, RegistrarId, Transport, TransportUse,
};
use std::cell::OnceCell;
use std::net::IpAddr;
use std::time::Duration;

/// The registrar's data about an element.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// The element as its home registrar describes it. The distance is this registrar's own, not rounded.
    pub(super) element: PoolElement,
    /// The element's encoding for users, once one was told of it.
    told: OnceCell<EncodedElement>,
    /// Part of the distance that is this registrar's delay to the peer that described the element. Only for elements of
    /// other homes.
    pub(super) way_ms: u32,
    /// Equal to the peer's own stamp if the element is in the peer's table: see `sync.rs`.
    pub(super) stamp: u32,
    pub(super) probe: Probe,
    /// Association of the element's registration, and the index in that association's list. Only for own elements.
    pub(super) link: Option<(AssociationId, usize)>,
    /// Host to which the element counts: the one of its last association here. Only for own elements.
    pub(super) host: Option<IpAddr>,
    /// Time of the last registration here.
    pub(super) registered: Duration,
    /// Time of the last registration or answer here.
    pub(super) heard: Duration,
    /// End of the registration's life.
    pub(super) expires: Duration,
    /// True if this registrar became the home without a registration: keep-alives have the H flag until the element
    /// answers.
    pub(super) adopting: bool,
    /// Association of the last keep-alive with the H flag: an answer from there accepts this registrar.
    pub(super) courted: Option<AssociationId>,
    /// True if the element registered here, or answered a keep-alive with the H flag, and that association is still up.
    /// Otherwise the element may have moved to another registrar, and an answer says only that it is alive. Only for
    /// own elements.
    pub(super) agreed: bool,
    /// This registrar's former claim to an element of another home.
    pub(super) claim: Claim,
    /// Hosts that reported the element since its last registration or answer.
    pub(super) reporters: Vec<IpAddr>,
}

/// Former claim of this registrar to an element, from before another registrar claimed it as home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// No former claim.
    None,
    /// Yielded; the other registrar may have yielded the element as well.
    Yielded,
    /// Yielded, while the element was asked over this association to follow this registrar: its answer is newer than
    /// the other registrar's word.
    Asked(AssociationId),
}

/// State of an element's keep-alives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    /// None are sent: the element has another home.
    None,
    /// Next keep-alive at this time.
    Due(Duration),
    /// Keep-alive sent; the answer is due at this time.
    Asked(Duration),
}

/// Shortest life of a registration: a shorter one would end before the response arrives.
const LIFE_MIN: Duration = Duration::from_millis(100);

/// A time that never comes.
pub(super) const NEVER: Duration = Duration::MAX;

impl Entry {
    /// Returns the entry of an element that has another registrar as home.
    pub(super) fn foreign(element: PoolElement, stamp: u32) -> Entry {
        Entry {
            element,
            told: OnceCell::new(),
            way_ms: 0,
            stamp,
            probe: Probe::None,
            link: None,
            host: None,
            registered: Duration::ZERO,
            heard: Duration::ZERO,
            expires: NEVER,
            adopting: false,
            courted: None,
            agreed: false,
            claim: Claim::None,
            reporters: Vec::new(),
        }
    }

    /// Updates the entry of an own element after a registration.
    #[inline]
    pub(super) fn renew(&mut self, now: Duration, settings: &Settings) {
        let expires = ends(now, self.element.registration_life, settings.life_unit);
        self.expires = expires.max(now + LIFE_MIN);
        self.probe = Probe::Due(now + settings.keep_alive_interval);
        (self.registered, self.heard) = (now, now);
        self.agreed = true;
        self.reporters.clear();
    }

    /// Returns the element for a change, and drops its encoding.
    pub(super) fn element_mut(&mut self) -> &mut PoolElement {
        self.told.take();
        &mut self.element
    }

    /// Adds the element to an answer to a user. Its distance is rounded to `step`.
    #[inline]
    pub(super) fn tell(&self, step: u32, answer: &mut ResolutionResponse<'_>) {
        let element = &self.element;
        match is_distant(element.policy) {
            true => answer.push(&PoolElement {
                policy: rounded(element.policy, step),
                ..element.clone()
            }),
            false => answer.push_encoded(self.told.get_or_init(|| element.encoded())),
        }
    }

    /// Returns the element's next timer.
    #[inline]
    pub(super) fn timer(&self) -> Option<(TimerKind, Duration)> {
        let (kind, at) = match self.probe {
            Probe::None => return None,
            Probe::Due(at) => (TimerKind::KeepAliveTransmission, at),
            Probe::Asked(until) => (TimerKind::KeepAliveTimeout, until),
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
pub(super) fn class(transport: &Transport) -> u32 {
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
pub(super) fn detach(element: &mut PoolElement) {
    if let Transport::Opaque(data) = &mut element.user_transport {
        *data = Bytes::copy_from_slice(data);
    }
}

impl Registrar {
    /// Sets the element's timer according to its entry.
    #[inline]
    pub(super) fn arm(&mut self, key: ElementKey) {
        let timer = self
            .space
            .get(key)
            .and_then(|element| element.payload().timer());
        match timer {
            Some((kind, at)) => self.space.set_timer(key, kind, at),
            None => self.space.stop_timer(key),
        };
    }

    /// Links the element to the association of its registration, instead of any earlier one; none if this registrar is
    /// not its home.
    pub(super) fn link(&mut self, key: ElementKey, to: Option<AssociationId>) {
        let host = to.and_then(|to| self.associations.get(to).map(|to| to.host));
        let Some(entry) = self.space.payload_mut(key) else {
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
        if entry.link.map(|(association, _)| association) == to {
            return;
        }
        let is_distant = is_distant(entry.element.policy);
        if let Some((association, place)) = entry.link.take() {
            self.unlink(association, place, is_distant);
        }
        let Some(to) = to else { return };
        let place = self.associations.link(to, key, is_distant);
        if let Some(entry) = self.space.payload_mut(key) {
            entry.link = place.map(|place| (to, place));
        }
        if is_distant {
            self.measure(to);
        }
    }

    fn unlink(&mut self, association: AssociationId, place: usize, is_distant: bool) {
        let moved = self.associations.unlink(association, place, is_distant);
        if let Some(moved) = moved
            && let Some(entry) = self.space.payload_mut(moved)
        {
            entry.link = Some((association, place));
        }
    }

    /// Removes an element from this registrar's view alone.
    pub(super) fn forget(&mut self, key: ElementKey) -> Option<Entry> {
        let handle = self.space.get(key)?.handle().clone();
        let entry = self.space.remove(key)?;
        self.subscriptions.changed(&handle);
        if self.space.pool(&handle).is_none() {
            self.associations.hosts.dissolved(&handle);
        }
        self.contested.remove(&key);
        if let Some(host) = entry.host {
            self.associations.hosts.remove_element(host);
        }
        if let Some((association, place)) = entry.link {
            self.unlink(association, place, is_distant(entry.element.policy));
        }
        self.count_distant(entry.element.policy, false);
        Some(entry)
    }

    /// Removes an element from the handlespace and informs the peers (RFC 5353 section 3.3.2).
    pub(super) fn withdraw(&mut self, key: ElementKey, why: Gone) {
        let Some(handle) = self.space.get(key).map(|element| element.handle().clone()) else {
            return;
        };
        let Some(entry) = self.forget(key) else {
            return;
        };
        let id = entry.element.id;
        let asked_for = why == Gone::Deregistered;
        if !asked_for
            && why != Gone::Reported
            && let Some(association) = self.way_to(&entry)
        {
            // RFC 5352 section 3.2: "an ASAP_DEREGISTRATION_RESPONSE message is sent to the PE's ASAP Endpoint". An
            // element with late or lost answers to keep-alives so learns too that it must register again. An
            // element that users cannot reach is not invited back.
            let forbidden = (why == Gone::Forbidden).then_some(CauseCode::REJECTED_FOR_SECURITY);
            let message = asap::Message::DeregistrationResponse {
                handle: handle.clone(),
                id,
                causes: forbidden.into_iter().map(Into::into).collect(),
            };
            let _ = self.out.asap(association, &message);
        }
        self.out.announce(Body::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Delete,
            handle: handle.clone(),
            element: entry.element,
        });
        self.counters.updates_sent += 1;
        self.out.event(Event::Removed { handle, id, why });
    }

    /// Returns the association over which the element registered, or was probed.
    fn way_to(&self, entry: &Entry) -> Option<AssociationId> {
        let linked = entry.link.map(|(association, _)| association);
        linked.or_else(|| {
            let transport = entry.element.asap_transport.as_ref()?;
            let addresses: Vec<_> = endpoints(transport).collect();
            self.associations.find(Protocol::Asap, &addresses)
        })
    }

    /// Sets the element's home, as claimed by that registrar or another one.
    pub(super) fn rehome(&mut self, key: ElementKey, home: RegistrarId) {
        let stamp = self.stamp_of(home);
        if let Some(entry) = self.space.payload_mut(key) {
            entry.element_mut().home = home;
            entry.stamp = stamp;
        }
        self.space.set_home(key, home);
    }

    /// Yields the element to another home, and stops its keep-alives. Returns the remaining claim of this registrar.
    pub(super) fn yield_to(&mut self, key: ElementKey, home: RegistrarId) -> Claim {
        self.link(key, None);
        self.contested.remove(&key);
        self.rehome(key, home);
        let mut claim = Claim::Yielded;
        if let Some(entry) = self.space.payload_mut(key) {
            let asked = entry.courted.filter(|_| entry.adopting);
            claim = asked.map_or(claim, Claim::Asked);
            entry.claim = claim;
            entry.probe = Probe::None;
            (entry.adopting, entry.agreed) = (false, false);
            entry.expires = NEVER;
        }
        self.arm(key);
        claim
    }

    /// Makes this registrar the element's home without a registration. A keep-alive at the time `at` informs the
    /// element and asks for an answer.
    pub(super) fn adopt(&mut self, now: Duration, key: ElementKey, at: Duration) {
        let id = self.config.id;
        self.rehome(key, id);
        let unit = self.config.settings.life_unit;
        if let Some(entry) = self.space.payload_mut(key) {
            (entry.adopting, entry.courted) = (true, None);
            entry.claim = Claim::None;
            entry.probe = Probe::Due(at);
            entry.expires = ends(now, entry.element.registration_life, unit);
        }
        self.arm(key);
    }

    /// Announces the element to the peers as it is here.
    pub(super) fn announce_element(&mut self, key: ElementKey) {
        let Some(view) = self.space.get(key) else {
            return;
        };
        let body = Body::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: view.handle().clone(),
            element: view.payload().element.clone(),
        };
        self.out.announce(body);
        self.counters.updates_sent += 1;
    }

    /// The key of an element.
    #[inline]
    pub(super) fn key(
        &self,
        handle: &PoolHandle,
        id: holdfast_wire::rserpool::ElementId,
    ) -> Option<ElementKey> {
        self.space.find(handle, id)
    }
}

/// Returns the end of a registration's life.
#[inline]
pub(super) fn ends(now: Duration, life: i32, unit: super::LifeUnit) -> Duration {
    unit.life(life).map_or(NEVER, |life| now + life)
}
