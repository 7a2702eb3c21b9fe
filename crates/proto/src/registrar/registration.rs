//! Registration and deregistration (RFC 5352 sections 3.1 and 3.2).

use super::distance::{distance_mut, has_distance};
use super::element_entry::{ElementEntry, copy_opaque_transport, transport_class};
use super::{AssociationId, Event, Registrar, RemovalReason};
use bytes::Bytes;
use holdfast_handlespace::{ElementKey, RegistrationData};
use holdfast_wire::rserpool::enrp::{EnrpBody, UpdateAction};
use holdfast_wire::rserpool::{
    Addresses, CauseCode, ElementId, ErrorCause, PoolElement, PoolHandle, SctpTransport, Transport,
    TransportUse, asap,
};
use std::net::{IpAddr, Ipv4Addr};
use std::slice::from_ref;
use std::time::Duration;

impl Registrar {
    /// Handles a registration and sends the response. "In all above cases, the ENRP server MUST reply".
    #[inline]
    pub(super) fn on_registration(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: PoolHandle,
        element: PoolElement,
        bytes: &Bytes,
    ) {
        if self.hold_registration(from, &handle, &element, bytes) {
            return;
        }
        let (id, length) = (element.id, bytes.len());
        let (cacheable, refusal) = match self.try_register(now, from, &handle, element, length) {
            Ok(again) => (again, None),
            Err(cause) => (None, Some(cause)),
        };
        if let Some(cause) = &refusal {
            self.counters.refusals += 1;
            let code = cause.code;
            self.counters.access_denied += u64::from(code == CauseCode::REJECTED_FOR_SECURITY);
            self.counters.limit_refusals += u64::from(code == CauseCode::LACK_OF_RESOURCES);
            self.outbox.push_event(Event::Refused {
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
        let sent = self.outbox.send_asap(from, &message);
        match (cacheable, sent) {
            (Some((key, update)), Ok(())) => {
                self.cache_registration(now, from, key, bytes, &update)
            }
            _ => self.associations.invalidate_registration_cache(from),
        }
    }

    /// Performs a registration. Returns the element and its announcement to peers, if a repetition may be answered from
    /// the cache.
    #[inline]
    fn try_register(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: &PoolHandle,
        mut element: PoolElement,
        length: usize,
    ) -> Result<Option<(ElementKey, Bytes)>, ErrorCause> {
        let known = self.elements.space().find(handle, element.id);
        self.check_registration(from, handle, &element, known, length)?;
        self.complete_description(from, &mut element);
        let id = element.id;
        let (element, update) = self.announce_registration(handle, element);
        let founds_pool = known.is_none() && self.elements.space().pool(handle).is_none();
        let policy = element.policy;
        let class = transport_class(&element.user_transport);
        let mut payload = ElementEntry::new_foreign(element, 0);
        payload.renew(now, &self.config.settings);
        let registration = RegistrationData {
            handle,
            id,
            home: self.config.id,
            policy: self.rounded(policy),
            class,
            payload,
        };
        // The registration fits: `check_registration` has checked it.
        let Ok(registered) = self.elements.register(registration) else {
            return Err(CauseCode::UNSPECIFIED.into());
        };
        let previous = registered.previous;
        let is_repeatable = previous.is_some() && !has_distance(policy);
        if !self.subscriptions.is_empty() {
            self.on_changed_element(handle, registered.key, previous.as_ref());
        }
        self.counters.registrations += u64::from(previous.is_none());
        self.counters.reregistrations += u64::from(previous.is_some());
        if let Some(previous) = previous
            && let Some(entry) = self.elements.entry_mut(registered.key)
        {
            entry.association = previous.association;
            entry.host = previous.host;
            self.elements.end_contest(registered.key);
        } else {
            self.on_new_element(from, registered.key, founds_pool);
        }
        self.link_if_needed(registered.key, from);
        self.elements.update_timer(registered.key);
        Ok(is_repeatable.then_some((registered.key, update)))
    }

    /// Links the element to the association, unless it is linked: most registrations arrive over the association of the
    /// previous one.
    #[inline]
    fn link_if_needed(&mut self, key: ElementKey, to: AssociationId) {
        if !self.elements.is_linked(to, key) {
            self.link_to_association(key, Some(to));
        }
    }

    fn on_new_element(&mut self, from: AssociationId, key: ElementKey, founds: bool) {
        let Some(view) = self.elements.space().get(key) else {
            return;
        };
        let (handle, id) = (view.handle().clone(), view.id());
        if founds && let Some(association) = self.associations.get(from) {
            let host = association.host;
            self.associations.hosts.add_pool(host, handle.clone());
        }
        self.outbox.push_event(Event::Registered { handle, id });
    }

    fn on_changed_element(
        &mut self,
        handle: &PoolHandle,
        key: ElementKey,
        before: Option<&ElementEntry>,
    ) {
        // Compare the element as users see it.
        let rounded_element = |element: &PoolElement| PoolElement {
            policy: self.rounded(element.policy),
            ..element.clone()
        };
        let view = self.elements.space().get(key);
        let after = view.map(|element| rounded_element(&element.payload().element));
        if before.map(|entry| rounded_element(&entry.element)) != after {
            self.subscriptions.mark_changed(handle);
        }
    }

    /// Adds the home registrar's knowledge to the element, and removes addresses that are not confirmed as the
    /// element's.
    #[inline]
    fn complete_description(&self, from: AssociationId, element: &mut PoolElement) {
        element.home = self.config.id;
        if let Some(association) = self.associations.get(from) {
            if let Transport::Sctp(service) = &mut element.user_transport
                && self.config.settings.check_addresses
            {
                let confirmed = &association.transport.addresses;
                service
                    .addresses
                    .retain(|address| confirmed.contains(address));
            }
            // "MUST also record the SCTP transport address from which it received the ASAP_REGISTRATION in the ASAP
            // Transport parameter".
            element.asap_transport = Some(association.transport.clone());
            if let Some(distance) = distance_mut(&mut element.policy) {
                *distance = association.delay_ms;
            }
        }
        copy_opaque_transport(element);
    }

    /// Announces an element to the peers; returns it, and the encoded announcement.
    #[inline]
    fn announce_registration(
        &mut self,
        handle: &PoolHandle,
        element: PoolElement,
    ) -> (PoolElement, Bytes) {
        self.counters.updates_sent += 1;
        if !self.outbox.has_peers() {
            return (element, Bytes::new());
        }
        let body = EnrpBody::HandleUpdate {
            takeover_suggested: false,
            action: UpdateAction::Add,
            handle: handle.clone(),
            element,
        };
        let EnrpBody::HandleUpdate { element, .. } = self.outbox.announce_to_peers(body) else {
            unreachable!("the body is a HandleUpdate");
        };
        (
            element,
            self.outbox.last_message().cloned().unwrap_or_default(),
        )
    }

    /// Checks a registration's consistency, the sender's permission, and the limits.
    #[inline]
    fn check_registration(
        &self,
        from: AssociationId,
        handle: &PoolHandle,
        element: &PoolElement,
        known: Option<ElementKey>,
        length: usize,
    ) -> Result<(), ErrorCause> {
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
        if settings.check_addresses && !association.has_service_address(&element.user_transport) {
            return Err(CauseCode::RSPLIB_NO_USABLE_USER_ADDRESSES.into());
        }
        let pool = self.elements.space().pool(handle);
        if let Some(pool) = pool {
            if pool.policy != element.policy.kind() {
                return Err(ErrorCause::inconsistent_policy(&pool.policy.zeroed()));
            }
            let class = transport_class(&element.user_transport);
            if pool.class != class {
                return Err(inconsistent_transport(pool.class, class));
            }
        }
        if let Some(known) = known {
            return match self.may_be_sender(from, known) {
                true => Ok(()),
                false => Err(CauseCode::NON_UNIQUE_ELEMENT_ID.into()),
            };
        }
        let (hosts, host) = (&self.associations.hosts, association.host);
        let has_room = hosts.admits_element(host, limits)
            && self.elements.space().elements() < limits.elements;
        let may_found =
            || hosts.admits_pool(host, limits) && self.elements.space().pools() < limits.pools;
        match has_room && (pool.is_some() || may_found()) {
            true => Ok(()),
            false => Err(CauseCode::LACK_OF_RESOURCES.into()),
        }
    }

    /// Returns true if a known element may be the sender on this association.
    #[inline]
    pub(super) fn may_be_sender(&self, from: AssociationId, key: ElementKey) -> bool {
        self.elements.is_linked(from, key) || self.matches_identity(from, key)
    }

    /// Returns true if an element registered over another association, or at another registrar, may be the sender
    /// on this one.
    fn matches_identity(&self, from: AssociationId, key: ElementKey) -> bool {
        let (Some(association), Some(view)) =
            (self.associations.get(from), self.elements.space().get(key))
        else {
            return false;
        };
        let entry = view.payload();
        // While the association of the registration is up, its certificate says more than an address.
        let previous_association = entry
            .association
            .and_then(|(linked, _)| self.associations.get(linked));
        if let Some(name) = previous_association.and_then(|holder| holder.certificate_name.as_ref())
        {
            return association.certificate_name.as_ref() == Some(name);
        }
        let element = &entry.element;
        // If a peer did not name the element's endpoint, the element must at least have an address of its service.
        let addresses = match &element.asap_transport {
            Some(transport) => &transport.addresses,
            None => service_addresses(&element.user_transport),
        };
        !self.config.settings.check_addresses || association.has_any_address(addresses)
    }

    /// Handles a deregistration. RFC 5352 section 3.2: an unknown element counts as deregistered.
    pub(super) fn on_deregistration(
        &mut self,
        from: AssociationId,
        handle: PoolHandle,
        id: ElementId,
    ) {
        let allowed = self.associations.get(from).is_some_and(|a| a.may_register);
        let key = self.elements.space().find(&handle, id);
        let refused = !allowed || key.is_some_and(|key| !self.may_be_sender(from, key));
        let refusal = refused.then(|| CauseCode::REJECTED_FOR_SECURITY.into());
        if refused {
            self.counters.refusals += 1;
            self.counters.access_denied += 1;
        } else if let Some(key) = key {
            self.counters.deregistrations += 1;
            self.remove_and_announce(key, RemovalReason::Deregistered);
        }
        let message = asap::Message::DeregistrationResponse {
            handle,
            id,
            causes: Vec::from_iter(refusal),
        };
        let _ = self.outbox.send_asap(from, &message);
    }
}

impl super::associations::Association {
    /// Returns true if a service has one of the association's addresses.
    #[inline]
    fn has_service_address(&self, service: &Transport) -> bool {
        matches!(service, Transport::Opaque(_)) || self.has_any_address(service_addresses(service))
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
fn inconsistent_transport(pool: u32, element: u32) -> ErrorCause {
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
    ErrorCause::inconsistent_transport(&match pool / 2 {
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
