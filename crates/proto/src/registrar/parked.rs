//! Addresses that the other side of an association claims.
//!
//! RFC 9260 section 5.4: until a path was probed, its address may belong to any host. A claimed address therefore
//! grants no permission, proves no ownership of an element, and is not given to users. An element that registers right
//! after the start of its association would be refused for a claim that is confirmed a moment later: such a
//! registration waits.

use super::register::service_addresses;
use super::schedule::Timer;
use super::{AssociationId, Registrar};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{PoolElement, PoolHandle};
use std::net::SocketAddr;
use std::time::Duration;

/// Most waiting registrations of one association.
const PARKED_MAX: usize = 16;

impl Registrar {
    /// Handles the addresses of an association's other side: the ones that the transport has confirmed, and further
    /// ones that it `claims`.
    pub fn handle_addresses(
        &mut self,
        now: Duration,
        association: AssociationId,
        confirmed: &[SocketAddr],
        claims: &[SocketAddr],
    ) {
        let Some(known) = self.associations.get(association) else {
            return;
        };
        let until = known.begun + self.config.settings.limits.confirmation;
        let claims = if now < until { claims } else { &[] };
        self.associations.readdress(association, confirmed, claims);
        if let Some(known) = self.associations.get_mut(association) {
            known.admit(&self.config.settings, &self.config.mentors);
        }
        let timer = Timer::Claimed(association);
        match claims {
            [] => self.schedule.stop(timer),
            _ => self.schedule.set(timer, until),
        }
        self.unpark(now, association);
    }

    /// Ends the wait for unconfirmed addresses, which may never be confirmed.
    pub(super) fn claims_end(&mut self, now: Duration, association: AssociationId) {
        if let Some(known) = self.associations.get_mut(association) {
            known.claimed.clear();
            self.unpark(now, association);
        }
    }

    fn unpark(&mut self, now: Duration, association: AssociationId) {
        let Some(known) = self.associations.get_mut(association) else {
            return;
        };
        for bytes in std::mem::take(&mut known.parked) {
            if let Ok(parsed) = Message::parse(&bytes) {
                self.asap_message(now, association, parsed.message, &bytes);
            }
        }
    }

    /// Parks a registration if the confirmation of an address may change its response. Returns false if not.
    #[inline]
    pub(super) fn park(
        &mut self,
        from: AssociationId,
        handle: &PoolHandle,
        element: &PoolElement,
        bytes: &Bytes,
    ) -> bool {
        let waits = self.associations.get(from).is_some_and(|association| {
            !association.claimed.is_empty() && association.parked.len() < PARKED_MAX
        });
        let waits = waits && self.awaits(from, handle, element);
        if waits && let Some(association) = self.associations.get_mut(from) {
            association.parked.push(Bytes::copy_from_slice(bytes));
        }
        waits
    }

    fn awaits(&self, from: AssociationId, handle: &PoolHandle, element: &PoolElement) -> bool {
        let settings = &self.config.settings;
        let Some(association) = self.associations.get(from) else {
            return false;
        };
        let claimed = &association.claimed;
        let mut each = claimed.iter();
        if !association.may_register {
            return each.any(|address| settings.access.register.contains(*address));
        }
        if !settings.addresses_checked {
            return false;
        }
        let service = service_addresses(&element.user_transport);
        if service.iter().any(|address| claimed.contains(address)) {
            return true;
        }
        let Some(known) = self.space.find(handle, element.id) else {
            return false;
        };
        let entry = self.space.get(known).map(|element| element.payload());
        let before = entry.and_then(|entry| entry.element.asap_transport.as_ref());
        let theirs = |address| before.is_some_and(|before| before.addresses.contains(address));
        !self.is_of(from, known) && each.any(theirs)
    }
}
