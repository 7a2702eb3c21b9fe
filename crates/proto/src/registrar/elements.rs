//! The elements of all homes: the handlespace, and this registrar's part in it.
//!
//! Reading goes through [`RegistrarElements::space`]; each change has a method here, so that counts, claims and timers
//! stay consistent with the elements.

use super::distance::has_distance;
use super::element_entry::{ElementEntry, FormerClaim, KeepAliveState, NEVER, life_end};
use super::{AssociationId, LifeUnit};
use holdfast_handlespace::{
    AnnouncedOperation, ElementCursor, ElementKey, ElementRef, ExpiredTimer, Handlespace,
    RegisterError, RegistrationData, RegistrationOutcome,
};
use holdfast_wire::rserpool::{Policy, PoolHandle, RegistrarId};
use std::collections::HashMap;
use std::time::Duration;

/// The elements of all homes, with this registrar's data about each.
#[derive(Debug)]
pub(super) struct RegistrarElements {
    own_id: RegistrarId,
    handlespace: Handlespace<ElementEntry>,
    /// Own elements that a peer claims as well, while this registrar probes them.
    contested: HashMap<ElementKey, RegistrarId>,
    /// Number of elements that have a distance.
    distant: usize,
}

impl RegistrarElements {
    /// Starts without elements. `seed` is the seed of the selections.
    pub(super) fn new(own_id: RegistrarId, seed: u64) -> RegistrarElements {
        RegistrarElements {
            own_id,
            handlespace: Handlespace::new(seed),
            contested: HashMap::new(),
            distant: 0,
        }
    }

    /// Returns the handlespace, for reading.
    #[inline]
    pub(super) fn space(&self) -> &Handlespace<ElementEntry> {
        &self.handlespace
    }

    /// Returns an element's entry, for changes. A change of a time of the entry's needs
    /// [`update_timer`](Self::update_timer).
    #[inline]
    pub(super) fn entry_mut(&mut self, key: ElementKey) -> Option<&mut ElementEntry> {
        self.handlespace.payload_mut(key)
    }

    /// Returns true if this registrar is the element's home.
    pub(super) fn is_own(&self, key: ElementKey) -> bool {
        let element = self.handlespace.get(key);
        element.is_some_and(|element| element.home() == self.own_id)
    }

    /// Returns true if the element registered last over this association.
    #[inline]
    pub(super) fn is_linked(&self, to: AssociationId, key: ElementKey) -> bool {
        let link = self
            .handlespace
            .get(key)
            .and_then(|view| view.payload().association);
        link.is_some_and(|(linked, _)| linked == to)
    }

    /// Returns true if the element's last registration came over this association, and this registrar is its home
    /// since.
    #[inline]
    pub(super) fn is_registered_over(&self, from: AssociationId, key: ElementKey) -> bool {
        let entry = self.handlespace.get(key).map(|element| element.payload());
        entry.is_some_and(|entry| {
            entry.association.is_some_and(|(linked, _)| linked == from) && !entry.adopting
        })
    }

    /// Returns true if elements have a distance.
    pub(super) fn has_distant(&self) -> bool {
        self.distant > 0
    }

    /// Returns up to `max` elements of a home.
    pub(super) fn some_owned_by(&self, home: RegistrarId, max: usize) -> Vec<ElementKey> {
        let mut keys = Vec::with_capacity(self.handlespace.elements_owned_by(home).min(max));
        self.handlespace
            .next_block(&mut ElementCursor::owned_by(home), max, |element| {
                keys.push(element.key());
            });
        keys
    }

    /// Announces a later operation, so that the memory it will touch is prefetched: see
    /// [`Handlespace::announce_operation`].
    #[inline]
    pub(super) fn announce_operation(&mut self, operation: Option<AnnouncedOperation<'_>>) {
        self.handlespace.announce_operation(operation);
    }

    /// Selects and visits up to `items` elements of a pool: see [`Handlespace::resolve`].
    #[inline]
    pub(super) fn resolve(
        &mut self,
        handle: &PoolHandle,
        items: usize,
        visit: impl FnMut(ElementRef<'_, ElementEntry>),
    ) {
        self.handlespace.resolve(handle, items, visit);
    }

    /// Registers an element, or updates its registration: see [`Handlespace::register`].
    // Inlined, because the registration is large and passed by value.
    #[inline(always)]
    pub(super) fn register(
        &mut self,
        registration: RegistrationData<'_, ElementEntry>,
    ) -> Result<RegistrationOutcome<ElementEntry>, RegisterError> {
        let policy = registration.policy;
        let registered = self.handlespace.register(registration)?;
        if registered.previous.is_none() {
            self.distant += usize::from(has_distance(policy));
        }
        Ok(registered)
    }

    /// Repeats an element's registration with unchanged data: see [`Handlespace::register_again`].
    #[inline]
    pub(super) fn register_again(&mut self, key: ElementKey) -> Option<&mut ElementEntry> {
        self.handlespace.register_again(key)
    }

    /// Removes an element. Returns its pool and entry.
    pub(super) fn remove(&mut self, key: ElementKey) -> Option<(PoolHandle, ElementEntry)> {
        let handle = self.handlespace.get(key)?.handle().clone();
        let entry = self.handlespace.remove(key)?;
        self.contested.remove(&key);
        self.distant -= usize::from(has_distance(entry.element.policy));
        Some((handle, entry))
    }

    /// Replaces the policy of an element that is not registered anew, since its distance has changed.
    pub(super) fn adjust_policy(&mut self, key: ElementKey, policy: Policy) {
        self.handlespace.adjust_policy(key, policy);
    }

    /// Sets the element's timer according to its entry.
    #[inline]
    pub(super) fn update_timer(&mut self, key: ElementKey) {
        let timer = self
            .handlespace
            .get(key)
            .and_then(|element| element.payload().next_timer());
        match timer {
            Some((kind, at)) => self.handlespace.set_timer(key, kind, at),
            None => self.handlespace.stop_timer(key),
        };
    }

    /// Removes and returns the first expired timer.
    pub(super) fn pop_expired(&mut self, now: Duration) -> Option<ExpiredTimer> {
        self.handlespace.pop_expired(now)
    }

    /// Sets the element's home. `stamp` is the home's current stamp: see `resynchronisation.rs`.
    pub(super) fn set_home(&mut self, key: ElementKey, home: RegistrarId, stamp: u32) {
        if let Some(entry) = self.handlespace.payload_mut(key) {
            entry.element_mut().home = home;
            entry.sync_stamp = stamp;
        }
        self.handlespace.set_home(key, home);
    }

    /// Begins the supervision of an element whose home this registrar has become without a registration: a keep-alive
    /// at the time `at` informs the element and asks for an answer.
    pub(super) fn adopt(&mut self, now: Duration, key: ElementKey, at: Duration, unit: LifeUnit) {
        if let Some(entry) = self.handlespace.payload_mut(key) {
            (entry.adopting, entry.home_flag_association) = (true, None);
            entry.claim = FormerClaim::None;
            entry.keep_alive = KeepAliveState::Due(at);
            entry.expires = life_end(now, entry.element.registration_life, unit);
        }
        self.update_timer(key);
    }

    /// Ends the supervision of an element that has another home. Returns the remaining claim of this registrar.
    pub(super) fn give_up(&mut self, key: ElementKey) -> FormerClaim {
        let mut claim = FormerClaim::Yielded;
        if let Some(entry) = self.handlespace.payload_mut(key) {
            let answer_association = entry.home_flag_association.filter(|_| entry.adopting);
            claim = answer_association.map_or(claim, FormerClaim::AwaitingAnswer);
            entry.claim = claim;
            entry.keep_alive = KeepAliveState::Off;
            (entry.adopting, entry.has_accepted_home) = (false, false);
            entry.expires = NEVER;
        }
        self.update_timer(key);
        claim
    }

    /// Records that a peer claims an own element as well, which this registrar is about to probe.
    pub(super) fn contest(&mut self, key: ElementKey, claimant: RegistrarId) {
        self.contested.insert(key, claimant);
    }

    /// Ends a contest for an element. Returns the peer that claims the element as well.
    #[inline]
    pub(super) fn end_contest(&mut self, key: ElementKey) -> Option<RegistrarId> {
        if self.contested.is_empty() {
            return None;
        }
        self.contested.remove(&key)
    }
}
