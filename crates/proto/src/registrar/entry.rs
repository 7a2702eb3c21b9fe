//! What the registrar keeps with an element, and how elements change: the one place where the handlespace is written.

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

/// What the registrar keeps with an element.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// As its home registrar describes it, the distance being this registrar's own: not rounded.
    pub(super) element: PoolElement,
    /// The element as users are told of it, once one was.
    told: OnceCell<EncodedElement>,
    /// What of its distance is this registrar's way to who told of it. Only of others' elements.
    pub(super) way_ms: u32,
    /// In the peer's list when this equals the peer's own: see `sync.rs`.
    pub(super) stamp: u32,
    pub(super) probe: Probe,
    /// Where it registered, and its place in that association's list. Only of own elements.
    pub(super) link: Option<(AssociationId, usize)>,
    /// The host that it counts for: the one of its last association here. Only of own elements.
    pub(super) host: Option<IpAddr>,
    /// When the last registration came here.
    pub(super) registered: Duration,
    /// When it last registered or answered here.
    pub(super) heard: Duration,
    /// When the registration ends.
    pub(super) expires: Duration,
    /// This registrar became its home without being asked: keep-alives have the H flag until it answers.
    pub(super) adopting: bool,
    /// Where the last of those keep-alives was sent: an answer from there is meant.
    pub(super) courted: Option<AssociationId>,
    /// It registered here, or answered a keep-alive with the H flag, and that association is there. Else it may have gone to another
    /// registrar: an answer says only that it is alive. Only of own elements.
    pub(super) agreed: bool,
    /// What is left of it, where it is another's.
    pub(super) claim: Claim,
    /// Who reported it since it last registered or answered.
    pub(super) reporters: Vec<IpAddr>,
}

/// What is left of an element's having been this registrar's until its home said that it is the home's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// Nothing.
    None,
    /// Both may have yielded to each other.
    Yielded,
    /// The same, and it was asked there to be this registrar's: its answer is newer than what its home said.
    Asked(AssociationId),
}

/// Is it alive?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Probe {
    /// Nobody asks: it is another registrar's.
    None,
    /// To be asked then.
    Due(Duration),
    /// Asked; to answer until then.
    Asked(Duration),
}

/// Shorter lives than this would be over before the answer arrives.
const LIFE_MIN: Duration = Duration::from_millis(100);

/// The end of time.
pub(super) const NEVER: Duration = Duration::MAX;

impl Entry {
    /// Of an element whose home is another registrar.
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

    /// Of an own element that has just registered.
    #[inline]
    pub(super) fn renew(&mut self, now: Duration, settings: &Settings) {
        let expires = ends(now, self.element.registration_life, settings.life_unit);
        self.expires = expires.max(now + LIFE_MIN);
        self.probe = Probe::Due(now + settings.keep_alive_interval);
        (self.registered, self.heard) = (now, now);
        self.agreed = true;
        self.reporters.clear();
    }

    /// The element, to be changed.
    pub(super) fn element_mut(&mut self) -> &mut PoolElement {
        self.told.take();
        &mut self.element
    }

    /// Puts the element into an answer to a user. Its distance is told in steps.
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

    /// What its timer is to be set for.
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

/// What the elements of a pool must have in common besides the policy: the transport's type and its use (RFC 5352 section
/// 3.1), as the handlespace's class.
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

/// An element keeps no message in memory.
pub(super) fn detach(element: &mut PoolElement) {
    if let Transport::Opaque(data) = &mut element.user_transport {
        *data = Bytes::copy_from_slice(data);
    }
}

impl Registrar {
    /// Sets the element's timer to what its entry says.
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

    /// The element registered over this association, and no longer over another; none: it is no longer this registrar's.
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

    /// Removes an element from the handlespace and tells the peers (RFC 5353 section 3.3.2).
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
            // RFC 5352 section 3.2: "an ASAP_DEREGISTRATION_RESPONSE message is sent to the PE's ASAP Endpoint". One whose answers
            // to keep-alives were late or lost learns so too that it is to register again; one that users cannot reach is not
            // asked back.
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

    /// The association of an element that registered here, or was asked over it.
    fn way_to(&self, entry: &Entry) -> Option<AssociationId> {
        let linked = entry.link.map(|(association, _)| association);
        linked.or_else(|| {
            let transport = entry.element.asap_transport.as_ref()?;
            let addresses: Vec<_> = endpoints(transport).collect();
            self.associations.find(Protocol::Asap, &addresses)
        })
    }

    /// Makes a registrar the element's home, as its own word or another's has it.
    pub(super) fn rehome(&mut self, key: ElementKey, home: RegistrarId) {
        let stamp = self.stamp_of(home);
        if let Some(entry) = self.space.payload_mut(key) {
            entry.element_mut().home = home;
            entry.stamp = stamp;
        }
        self.space.set_home(key, home);
    }

    /// Another registrar is the element's home: it is no longer this one's to watch. Returns what is left of its having been.
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

    /// This registrar is the element's home, without the element's having asked: it is told so, and asked for an answer, at
    /// that time.
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

    /// Tells the peers of an element as it is here.
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

/// When a registration's life ends.
#[inline]
pub(super) fn ends(now: Duration, life: i32, unit: super::LifeUnit) -> Duration {
    unit.life(life).map_or(NEVER, |life| now + life)
}
