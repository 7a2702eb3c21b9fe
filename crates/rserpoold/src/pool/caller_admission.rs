//! Admission of callers of the daemon's own endpoint: registrars, and pool users that probe ([`super::probes`]).

use holdfast_proto::element_choice::ProbeVerdict;
use holdfast_wire::rserpool::{ElementId, PoolHandle};

use super::event_loop::PoolEventLoop;
use super::links::AssociationKey;

impl PoolEventLoop {
    /// Handles a new association with the daemon's own endpoint.
    pub(super) fn on_incoming_association(&mut self, assoc_key: AssociationKey) {
        self.pending_callers.add(self.now(), assoc_key);
        self.classify_caller(assoc_key);
    }

    /// Admits a registrar or a guest, keeps a caller waiting that may become a registrar, and refuses any other.
    fn classify_caller(&mut self, assoc_key: AssociationKey) {
        if self
            .config
            .admits_registrar(self.links.addresses(assoc_key))
        {
            for bytes in self.pending_callers.take_messages(assoc_key) {
                self.on_asap_message(assoc_key, &bytes);
            }
            return;
        }
        let now = self.now();
        let waits = self.pending_callers.may_wait(now, assoc_key);
        let claimed_addresses = self
            .endpoints
            .own()
            .remote_addresses(assoc_key.assoc)
            .unwrap_or_default();
        if waits && self.config.admits_registrar(&claimed_addresses) {
            return;
        }
        let held_messages = self.pending_callers.take_messages(assoc_key);
        if !self
            .probes
            .admit_guest(now, assoc_key, &self.links, &self.config)
        {
            tracing::debug!(
                ?claimed_addresses,
                "refused a caller that may neither be a registrar nor probe"
            );
            self.endpoints.abort(assoc_key);
            // Further messages of the caller, which may be the next event, must not reach any machine.
            self.links.remove(assoc_key);
            return;
        }
        for bytes in held_messages {
            self.on_asap_message(assoc_key, &bytes);
        }
    }

    /// Handles a change in an association's addresses.
    pub(super) fn on_addresses_changed(&mut self, assoc_key: AssociationKey) {
        // An association that is not up yet reports its addresses when it is.
        if !self.links.is_up(assoc_key) {
            return;
        }
        let Some(endpoint) = self.endpoints.get(assoc_key.endpoint) else {
            return;
        };
        if let Ok(confirmed) = endpoint.confirmed_addresses(assoc_key.assoc) {
            self.links.set_addresses(assoc_key, confirmed);
            if self.pending_callers.contains(assoc_key) {
                self.classify_caller(assoc_key);
            }
        }
    }

    /// Judges the callers whose deadline has passed.
    pub(super) fn expire_callers(&mut self) {
        for assoc_key in self.pending_callers.expired(self.now()) {
            self.classify_caller(assoc_key);
        }
    }

    /// Disconnects idle guests.
    pub(super) fn expire_guests(&mut self) {
        for assoc_key in self.probes.idle_guests(self.now(), &self.links) {
            self.endpoints.abort(assoc_key);
        }
    }

    /// Handles a probe for an element.
    pub(super) fn on_probe(
        &mut self,
        assoc_key: AssociationKey,
        handle: &PoolHandle,
        id: ElementId,
    ) {
        if !self.config.admits_prober(self.links.addresses(assoc_key)) {
            return;
        }
        match self.probes.count_probe(self.now(), assoc_key) {
            ProbeVerdict::Answered => {
                let answer = self.probes.answer(self.started, &self.elements, handle, id);
                if let Some(answer) = answer {
                    self.endpoints
                        .send_asap(&mut self.links, assoc_key, &answer);
                }
            }
            ProbeVerdict::Blocked if self.probes.is_guest(assoc_key) => {
                tracing::warn!(addresses = ?self.links.addresses(assoc_key), "a caller probes too often");
                self.endpoints.abort(assoc_key);
            }
            ProbeVerdict::Blocked | ProbeVerdict::Dropped => {}
        }
    }
}

#[cfg(test)]
#[path = "tests/callers.rs"]
mod tests;
