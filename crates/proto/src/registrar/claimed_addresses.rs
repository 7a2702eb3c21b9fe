//! Addresses that the other side of an association claims.
//!
//! RFC 9260 section 5.4: until a path was probed, its address may belong to any host. A claimed address therefore
//! grants no permission, proves no ownership of an element, and is not given to users. An element that registers right
//! after the start of its association would be refused for a claim that is confirmed a moment later: such a
//! registration waits.

use super::registration::service_addresses;
use super::timer_queue::RegistrarTimer;
use super::{AssociationId, Registrar};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{PoolElement, PoolHandle};
use std::net::SocketAddr;
use std::time::Duration;

/// Most waiting registrations of one association.
const PENDING_MAX: usize = 16;

impl Registrar {
    /// Handles the addresses of an association's other side: the ones that the transport has confirmed, and further
    /// ones that it `claims`.
    pub fn handle_addresses(
        &mut self,
        now: Duration,
        association: AssociationId,
        confirmed: &[SocketAddr],
        claimed: &[SocketAddr],
    ) {
        let Some(known_association) = self.associations.get(association) else {
            return;
        };
        let until = known_association.up_since + self.config.settings.limits.confirmation_timeout;
        let claims = if now < until { claimed } else { &[] };
        self.associations
            .set_addresses(association, confirmed, claims);
        if let Some(known_association) = self.associations.get_mut(association) {
            known_association.set_permissions(&self.config.settings, &self.config.mentors);
        }
        let timer = RegistrarTimer::AddressConfirmation(association);
        match claims {
            [] => self.schedule.stop(timer),
            _ => self.schedule.set(timer, until),
        }
        self.handle_pending_registrations(now, association);
    }

    /// Ends the wait for unconfirmed addresses, which may never be confirmed.
    pub(super) fn end_confirmation_wait(&mut self, now: Duration, association: AssociationId) {
        if let Some(known_association) = self.associations.get_mut(association) {
            known_association.claimed_addresses.clear();
            self.handle_pending_registrations(now, association);
        }
    }

    fn handle_pending_registrations(&mut self, now: Duration, association: AssociationId) {
        let Some(known_association) = self.associations.get_mut(association) else {
            return;
        };
        for bytes in std::mem::take(&mut known_association.pending_registrations) {
            if let Ok(parsed) = Message::parse(&bytes) {
                self.on_asap_message(now, association, parsed.message, &bytes);
            }
        }
    }

    /// Parks a registration if the confirmation of an address may change its response. Returns false if not.
    #[inline]
    pub(super) fn hold_registration(
        &mut self,
        from: AssociationId,
        handle: &PoolHandle,
        element: &PoolElement,
        bytes: &Bytes,
    ) -> bool {
        let must_wait = self.associations.get(from).is_some_and(|association| {
            !association.claimed_addresses.is_empty()
                && association.pending_registrations.len() < PENDING_MAX
        });
        let waits = must_wait && self.depends_on_claims(from, handle, element);
        if waits && let Some(association) = self.associations.get_mut(from) {
            association
                .pending_registrations
                .push(Bytes::copy_from_slice(bytes));
        }
        waits
    }

    fn depends_on_claims(
        &self,
        from: AssociationId,
        handle: &PoolHandle,
        element: &PoolElement,
    ) -> bool {
        let settings = &self.config.settings;
        let Some(association) = self.associations.get(from) else {
            return false;
        };
        let claimed = &association.claimed_addresses;
        let mut each = claimed.iter();
        if !association.may_register {
            return each.any(|address| settings.access.register.permits_address(*address));
        }
        if !settings.check_addresses {
            return false;
        }
        let service_addresses = service_addresses(&element.user_transport);
        if service_addresses
            .iter()
            .any(|address| claimed.contains(address))
        {
            return true;
        }
        let Some(key) = self.elements.space().find(handle, element.id) else {
            return false;
        };
        let entry = self
            .elements
            .space()
            .get(key)
            .map(|element| element.payload());
        let before = entry.and_then(|entry| entry.element.asap_transport.as_ref());
        let is_elements = |address| before.is_some_and(|before| before.addresses.contains(address));
        !self.may_be_sender(from, key) && each.any(is_elements)
    }
}
