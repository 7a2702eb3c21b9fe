//! Registration and deregistration (RFC 5352 sections 3.1 and 3.2).

use super::distance::{distance_mut, is_distant};
use super::entry::{Entry, class, detach};
use super::{AssociationId, Event, Gone, Registrar};
use bytes::Bytes;
use holdfast_handlespace::{ElementKey, Registration};
use holdfast_wire::rserpool::enrp::{Body, UpdateAction};
use holdfast_wire::rserpool::{
    Addresses, Cause, CauseCode, ElementId, PoolElement, PoolHandle, SctpTransport, Transport,
    TransportUse, asap,
};
use std::net::{IpAddr, Ipv4Addr};
use std::slice::from_ref;
use std::time::Duration;

impl Registrar {
    /// Handles a registration and sends the response. "In all above cases, the ENRP server MUST reply".
    #[inline]
    pub(super) fn register(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: PoolHandle,
        element: PoolElement,
        bytes: &Bytes,
    ) {
        if self.park(from, &handle, &element, bytes) {
            return;
        }
        let (id, length) = (element.id, bytes.len());
        let (again, refusal) = match self.registered(now, from, &handle, element, length) {
            Ok(again) => (again, None),
            Err(cause) => (None, Some(cause)),
        };
        if let Some(cause) = &refusal {
            self.counters.refusals += 1;
            let code = cause.code;
            self.counters.denied += u64::from(code == CauseCode::REJECTED_FOR_SECURITY);
            self.counters.over_limit += u64::from(code == CauseCode::LACK_OF_RESOURCES);
            self.out.event(Event::Refused {
                handle: PoolHandle(handle.0.slice(..handle.0.len().min(64))),
                id,
                cause: cause.code,
            });
        }
        let message = asap::Message::RegistrationResponse {
            rejected: refusal.is_some(),
            handle,
            id,
            causes: Vec::from_iter(refusal),
        };
        let sent = self.out.asap(from, &message);
        match (again, sent) {
            (Some((key, update)), Ok(())) => self.keep_granted(now, from, key, bytes, &update),
            _ => self.forget_granted(from),
        }
    }

    /// Performs a registration. Returns the element and its announcement to peers, if a repetition may be answered from
    /// the cache.
    #[inline]
    fn registered(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: &PoolHandle,
        mut element: PoolElement,
        length: usize,
    ) -> Result<Option<(ElementKey, Bytes)>, Cause> {
        let known = self.space.find(handle, element.id);
        self.admits(from, handle, &element, known, length)?;
        self.describe(from, &mut element);
        let id = element.id;
        let (element, update) = self.tell(handle, element);
        let founds = known.is_none() && self.space.pool(handle).is_none();
        let policy = element.policy;
        let class = class(&element.user_transport);
        let mut payload = Entry::foreign(element, 0);
        payload.renew(now, &self.config.settings);
        let registration = Registration {
            handle,
            id,
            home: self.config.id,
            policy: self.rounded(policy),
            class,
            payload,
        };
        // The registration fits: `admits` has checked it.
        let Ok(registered) = self.space.register(registration) else {
            return Err(CauseCode::UNSPECIFIED.into());
        };
        let previous = registered.previous;
        let again = previous.is_some() && !is_distant(policy);
        if !self.subscriptions.is_empty() {
            self.notice_change(handle, registered.key, previous.as_ref());
        }
        self.counters.registrations += u64::from(previous.is_none());
        self.counters.reregistrations += u64::from(previous.is_some());
        if let Some(previous) = previous
            && let Some(entry) = self.space.payload_mut(registered.key)
        {
            entry.link = previous.link;
            entry.host = previous.host;
            if !self.contested.is_empty() {
                self.contested.remove(&registered.key);
            }
        } else {
            self.notice_new(from, registered.key, founds);
        }
        self.link_once(registered.key, from);
        self.arm(registered.key);
        Ok(again.then_some((registered.key, update)))
    }

    /// Links the element to the association, unless it is linked: most registrations arrive over the association of the
    /// previous one.
    #[inline]
    fn link_once(&mut self, key: ElementKey, to: AssociationId) {
        if !self.is_linked(to, key) {
            self.link(key, Some(to));
        }
    }

    fn notice_new(&mut self, from: AssociationId, key: ElementKey, founds: bool) {
        let Some(view) = self.space.get(key) else {
            return;
        };
        let (handle, id, policy) = (view.handle().clone(), view.id(), *view.policy());
        self.count_distant(policy, true);
        if founds && let Some(association) = self.associations.get(from) {
            let host = association.host;
            self.associations.hosts.founded(host, handle.clone());
        }
        self.out.event(Event::Registered { handle, id });
    }

    fn notice_change(&mut self, handle: &PoolHandle, key: ElementKey, before: Option<&Entry>) {
        // Compare the element as users see it.
        let seen = |element: &PoolElement| PoolElement {
            policy: self.rounded(element.policy),
            ..element.clone()
        };
        let view = self.space.get(key);
        let now = view.map(|element| seen(&element.payload().element));
        if before.map(|entry| seen(&entry.element)) != now {
            self.subscriptions.changed(handle);
        }
    }

    /// Adds the home registrar's knowledge to the element, and removes addresses that are not confirmed as the
    /// element's.
    #[inline]
    fn describe(&self, from: AssociationId, element: &mut PoolElement) {
        element.home = self.config.id;
        if let Some(association) = self.associations.get(from) {
            if let Transport::Sctp(service) = &mut element.user_transport
                && self.config.settings.addresses_checked
            {
                let own = &association.transport.addresses;
                service.addresses.retain(|address| own.contains(address));
            }
            // "MUST also record the SCTP transport address from which it received the ASAP_REGISTRATION in the ASAP
            // Transport parameter".
            element.asap_transport = Some(association.transport.clone());
            if let Some(distance) = distance_mut(&mut element.policy) {
                *distance = association.delay_ms;
            }
        }
        detach(element);
    }

    /// Announces an element to the peers; returns it, and the encoded announcement.
    #[inline]
    fn tell(&mut self, handle: &PoolHandle, element: PoolElement) -> (PoolElement, Bytes) {
        self.counters.updates_sent += 1;
        if self.out.everybody.is_empty() {
            return (element, Bytes::new());
        }
        let body = Body::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle.clone(),
            element,
        };
        let Body::HandleUpdate { element, .. } = self.out.announce(body) else {
            unreachable!("it was made so");
        };
        (element, self.out.newest().cloned().unwrap_or_default())
    }

    /// Checks a registration's consistency, the sender's permission, and the limits.
    #[inline]
    fn admits(
        &self,
        from: AssociationId,
        handle: &PoolHandle,
        element: &PoolElement,
        known: Option<ElementKey>,
        length: usize,
    ) -> Result<(), Cause> {
        let settings = &self.config.settings;
        let limits = &settings.limits;
        let association = self.associations.get(from);
        let association = association.ok_or(CauseCode::UNSPECIFIED)?;
        if !association.may_register {
            return Err(CauseCode::REJECTED_FOR_SECURITY.into());
        }
        if length > limits.registration_bytes {
            return Err(CauseCode::LACK_OF_RESOURCES.into());
        }
        // RFC 5352 section 6.1: "MUST be a bound IP address in the SCTP endpoint used to communicate".
        if settings.addresses_checked && !association.shares_service(&element.user_transport) {
            return Err(CauseCode::RSPLIB_NO_USABLE_USER_ADDRESSES.into());
        }
        let pool = self.space.pool(handle);
        if let Some(pool) = pool {
            if pool.policy != element.policy.kind() {
                return Err(Cause::inconsistent_policy(&pool.policy.zeroed()));
            }
            let class = class(&element.user_transport);
            if pool.class != class {
                return Err(inconsistent(pool.class, class));
            }
        }
        if let Some(known) = known {
            return match self.is_of(from, known) {
                true => Ok(()),
                false => Err(CauseCode::NON_UNIQUE_ELEMENT_ID.into()),
            };
        }
        let (hosts, host) = (&self.associations.hosts, association.host);
        let room = hosts.admits_element(host, limits) && self.space.elements() < limits.elements;
        let may_begin = || hosts.admits_pool(host, limits) && self.space.pools() < limits.pools;
        match room && (pool.is_some() || may_begin()) {
            true => Ok(()),
            false => Err(CauseCode::LACK_OF_RESOURCES.into()),
        }
    }

    /// Returns true if the element registered last over this association.
    #[inline]
    fn is_linked(&self, to: AssociationId, key: ElementKey) -> bool {
        let link = self.space.get(key).and_then(|view| view.payload().link);
        link.is_some_and(|(linked, _)| linked == to)
    }

    /// Returns true if a known element may be the sender on this association.
    #[inline]
    pub(super) fn is_of(&self, from: AssociationId, key: ElementKey) -> bool {
        self.is_linked(from, key) || self.is_like(from, key)
    }

    /// Returns true if an element registered over another association, or at another registrar, may be the sender
    /// on this one.
    fn is_like(&self, from: AssociationId, key: ElementKey) -> bool {
        let (Some(association), Some(view)) = (self.associations.get(from), self.space.get(key))
        else {
            return false;
        };
        let entry = view.payload();
        // While the association of the registration is up, its certificate says more than an address.
        let holder = entry
            .link
            .and_then(|(linked, _)| self.associations.get(linked));
        if let Some(name) = holder.and_then(|holder| holder.name.as_ref()) {
            return association.name.as_ref() == Some(name);
        }
        let element = &entry.element;
        // If a peer did not name the element's endpoint, the element must at least have an address of its service.
        let addresses = match &element.asap_transport {
            Some(transport) => &transport.addresses,
            None => service_addresses(&element.user_transport),
        };
        !self.config.settings.addresses_checked || association.shares(addresses)
    }

    /// Handles a deregistration. RFC 5352 section 3.2: an unknown element counts as deregistered.
    pub(super) fn deregister(&mut self, from: AssociationId, handle: PoolHandle, id: ElementId) {
        let allowed = self.associations.get(from).is_some_and(|a| a.may_register);
        let key = self.key(&handle, id);
        let refused = !allowed || key.is_some_and(|key| !self.is_of(from, key));
        let refusal = refused.then(|| CauseCode::REJECTED_FOR_SECURITY.into());
        if refused {
            self.counters.refusals += 1;
            self.counters.denied += 1;
        } else if let Some(key) = key {
            self.counters.deregistrations += 1;
            self.withdraw(key, Gone::Deregistered);
        }
        let message = asap::Message::DeregistrationResponse {
            handle,
            id,
            causes: Vec::from_iter(refusal),
        };
        let _ = self.out.asap(from, &message);
    }
}

impl super::associations::Association {
    /// Returns true if a service has one of the association's addresses.
    #[inline]
    fn shares_service(&self, service: &Transport) -> bool {
        matches!(service, Transport::Opaque(_)) || self.shares(service_addresses(service))
    }
}

/// Returns a service's addresses, none for an opaque transport.
#[inline]
pub(super) fn service_addresses(service: &Transport) -> &[IpAddr] {
    match service {
        Transport::Sctp(service) => &service.addresses,
        Transport::Dccp { address, .. }
        | Transport::Tcp { address, .. }
        | Transport::Udp { address, .. }
        | Transport::UdpLite { address, .. } => from_ref(address),
        Transport::Opaque(_) => &[],
    }
}

/// Returns the cause for a registration with a transport that differs from the pool's.
fn inconsistent(pool: u32, element: u32) -> Cause {
    if pool / 2 == element / 2 {
        return CauseCode::INCONSISTENT_CONTROL.into();
    }
    let address = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    let usage = match pool % 2 {
        0 => TransportUse::DataOnly,
        _ => TransportUse::DataAndControl,
    };
    // Only the type matters: the pool has no address.
    let port = 0;
    Cause::inconsistent_transport(&match pool / 2 {
        0 => Transport::Dccp {
            port,
            service_code: 0,
            address,
        },
        1 => Transport::Sctp(SctpTransport {
            port,
            usage,
            addresses: Addresses::from_iter([address]),
        }),
        2 => Transport::Tcp {
            port,
            usage,
            address,
        },
        3 => Transport::Udp { port, address },
        4 => Transport::UdpLite { port, address },
        _ => Transport::Opaque(bytes::Bytes::new()),
    })
}
