//! Consistent views: updates, comparison of checksums, resynchronisation (RFC 5353 sections 3.3 and 3.6).
//!
//! To "mark" all elements of a peer, the registrar raises the peer's stamp: elements with an older stamp are marked,
//! and writing an element removes its mark.

use super::distance::{distance_mut, has_distance};
use super::element_entry::{ElementEntry, FormerClaim, copy_opaque_transport, transport_class};
use super::peers::PeerRegistrar;
use super::timer_queue::RegistrarTimer;
use super::{AssociationId, Event, PoolProtocol, Registrar, RemovalReason};
use holdfast_handlespace::{ElementCursor, ElementKey, RegistrationData};
use holdfast_wire::rserpool::enrp::{EnrpBody, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{PoolElement, PoolHandle, RegistrarId};
use std::time::Duration;

/// Progress in removing a peer's elements that were not in its handle table.
#[derive(Debug)]
pub(super) struct StaleElementSweep {
    cursor: ElementCursor,
    removed: usize,
}

impl Registrar {
    /// Compares a peer's announced checksum with the known one, and requests its table if they differ (RFC 5353 section
    /// 3.6.1).
    pub(super) fn compare_checksum(&mut self, now: Duration, id: RegistrarId, announced: u16) {
        let known = self.elements.space().checksum(id);
        let until = now + self.config.settings.no_response_max;
        let ready = self.is_ready();
        let Some(peer) = self.peers.get_mut(id) else {
            return;
        };
        let Some(to) = peer.association else { return };
        let agrees = known == announced;
        if agrees && !peer.has_hearsay_distances || peer.is_syncing || !ready {
            return;
        }
        peer.is_syncing = true;
        peer.sync_stamp = peer.sync_stamp.wrapping_add(1);
        self.schedule.set(RegistrarTimer::SyncTimeout(id), until);
        self.counters.resynchronisations += 1;
        if !agrees {
            self.outbox.push_event(Event::OutOfSync {
                peer: id,
                announced,
                known,
            });
        }
        let body = EnrpBody::HandleTableRequest { own_only: true };
        self.outbox.send_enrp(to, id, body);
    }

    /// Gives up a resynchronisation that the peer does not answer; its next presence starts another.
    pub(super) fn on_sync_timeout(&mut self, id: RegistrarId) {
        self.stop_sync(id);
    }

    pub(super) fn stop_sync(&mut self, id: RegistrarId) {
        self.schedule.stop(RegistrarTimer::SyncTimeout(id));
        self.schedule.stop(RegistrarTimer::Sweep(id));
        if let Some(peer) = self.peers.get_mut(id) {
            peer.is_syncing = false;
            peer.sweep = None;
        }
    }

    /// Handles a block of a handle table; none if the peer refuses.
    pub(super) fn on_sync_table(
        &mut self,
        now: Duration,
        from: AssociationId,
        id: RegistrarId,
        block: Option<(bool, Vec<PoolEntry>)>,
    ) {
        if self.startup.is_requesting_handlespace(from) {
            return self.on_mentor_table(now, from, id, block);
        }
        let is_requested = |peer: &PeerRegistrar| peer.is_syncing && peer.sweep.is_none();
        if !self.peers.get(id).is_some_and(is_requested) {
            return self.outbox.report_ignored(
                Some(from),
                PoolProtocol::Enrp,
                "unrequested handle table",
            );
        }
        let Some((more, entries)) = block else {
            return self.stop_sync(id);
        };
        self.store_table_elements(now, from, id, entries, Some(id));
        if more {
            let until = now + self.config.settings.no_response_max;
            self.schedule.set(RegistrarTimer::SyncTimeout(id), until);
            let body = EnrpBody::HandleTableRequest { own_only: true };
            self.outbox.send_enrp(from, id, body);
        } else {
            self.schedule.stop(RegistrarTimer::SyncTimeout(id));
            if let Some(peer) = self.peers.get_mut(id) {
                let cursor = ElementCursor::owned_by(id);
                peer.sweep = Some(StaleElementSweep { cursor, removed: 0 });
            }
            self.sweep_stale_elements(now, id);
        }
    }

    /// Removes some of the marked elements: "SHOULD silently remove those 'marked' entries". Elements and users are
    /// served before the rest.
    pub(super) fn sweep_stale_elements(&mut self, now: Duration, id: RegistrarId) {
        let max = self.config.settings.batch_elements_max.max(1);
        let Some(peer) = self.peers.get_mut(id) else {
            return;
        };
        let (stamp, running_sweep) = (peer.sync_stamp, peer.sweep.take());
        let Some(mut sweep) = running_sweep else {
            return;
        };
        let mut marked: Vec<ElementKey> = Vec::new();
        let visited = self
            .elements
            .space()
            .next_block(&mut sweep.cursor, max, |element| {
                if element.payload().sync_stamp != stamp {
                    marked.push(element.key());
                }
            });
        // An element that both registrars yielded to each other has no home, unless it is probed.
        let is_yielded = |key: &ElementKey| {
            let view = self.elements.space().get(*key);
            view.is_some_and(|view| view.payload().claim != FormerClaim::None)
        };
        let (disputed, marked): (Vec<_>, Vec<_>) = marked.into_iter().partition(is_yielded);
        sweep.removed += marked.len();
        if visited == max {
            peer.sweep = Some(sweep);
            // The rest follows in a later turn.
            let next = now + Duration::from_nanos(1);
            self.schedule.set(RegistrarTimer::Sweep(id), next);
        } else {
            peer.has_hearsay_distances = false;
            self.stop_sync(id);
            let removed = sweep.removed;
            self.outbox
                .push_event(Event::Resynchronised { peer: id, removed });
        }
        for key in marked {
            self.remove_local(key);
        }
        for key in disputed {
            self.become_home(now, key, now);
        }
    }

    /// Stores the elements of a table; their home is `home`, or else the one that each names.
    pub(super) fn store_table_elements(
        &mut self,
        now: Duration,
        from: AssociationId,
        sender: RegistrarId,
        entries: Vec<PoolEntry>,
        home: Option<RegistrarId>,
    ) {
        for PoolEntry { handle, elements } in entries {
            for element in elements {
                let named_home = Some(element.home).filter(|home| home.0 != 0);
                let home = home.or(named_home).unwrap_or(sender);
                self.store_foreign(now, from, home, &handle, element, false);
            }
        }
    }

    /// Handles an update (RFC 5353 section 3.3).
    #[expect(clippy::too_many_arguments, reason = "the message's fields")]
    #[inline]
    pub(super) fn on_handle_update(
        &mut self,
        now: Duration,
        from: AssociationId,
        sender: RegistrarId,
        action: UpdateAction,
        handle: &PoolHandle,
        element: PoolElement,
        suggested: bool,
    ) {
        self.counters.updates_received += 1;
        let named_home = Some(element.home).filter(|home| home.0 != 0);
        let home = named_home.unwrap_or(sender);
        match action {
            UpdateAction::Add => {
                let id = element.id;
                let home = if suggested { sender } else { home };
                self.store_foreign(now, from, home, handle, element, true);
                if suggested && let Some(key) = self.elements.space().find(handle, id) {
                    self.become_home(now, key, now);
                }
            }
            UpdateAction::Delete => self.on_deletion(sender, home, handle, &element),
        }
    }

    /// Handles a removal. Only the element's home, or a registrar that names the right home, can remove it: otherwise
    /// the element has moved meanwhile.
    fn on_deletion(
        &mut self,
        sender: RegistrarId,
        home: RegistrarId,
        handle: &PoolHandle,
        element: &PoolElement,
    ) {
        let Some(key) = self.elements.space().find(handle, element.id) else {
            return;
        };
        let known_home = self.elements.space().get(key).map(|element| element.home());
        if known_home != Some(sender) && known_home != Some(home) {
            return;
        }
        let is_own = self.elements.is_own(key);
        let kept = self
            .elements
            .space()
            .get(key)
            .map(|element| element.handle().clone());
        self.remove_local(key);
        if let (true, Some(handle)) = (is_own, kept) {
            let (id, why) = (element.id, RemovalReason::Deregistered);
            self.outbox.push_event(Event::Removed {
                handle,
                id,
                reason: why,
            });
        }
    }

    /// Writes an element as another registrar describes it. `is_update` is true for an update that the registrar sends
    /// unasked.
    fn store_foreign(
        &mut self,
        now: Duration,
        from: AssociationId,
        home: RegistrarId,
        handle: &PoolHandle,
        mut element: PoolElement,
        is_update: bool,
    ) {
        let own_id = self.config.id;
        let known = self.elements.space().find(handle, element.id);
        if home == own_id {
            // The element dates from an earlier run with the same number, or was taken over before the handlespace was
            // loaded: probe it.
            let id = element.id;
            if known.is_none() && !self.is_ready() {
                self.write_element(own_id, handle, element, 0);
                if let Some(key) = self.elements.space().find(handle, id) {
                    self.become_home(now, key, now);
                }
            }
            return;
        }
        if !self.add_peer(now, home) {
            return;
        }
        let mut claim = FormerClaim::None;
        if let Some(key) = known
            && let Some(view) = self.elements.space().get(key)
        {
            claim = view.payload().claim;
            if view.home() == own_id {
                if self.contests_claim(now, key, home, is_update) {
                    return;
                }
                claim = self.yield_to(key, home);
            }
        }
        let source = self.associations.get(from);
        let way_ms = source.map_or(0, |from| from.delay_ms);
        let is_from_home = source.is_some_and(|from| from.peer == Some(home));
        if let Some(distance) = distance_mut(&mut element.policy) {
            *distance = distance.saturating_add(way_ms);
            if !is_from_home && let Some(peer) = self.peers.get_mut(home) {
                peer.has_hearsay_distances = true;
            }
        }
        let id = element.id;
        self.write_element(home, handle, element, way_ms);
        if claim != FormerClaim::None
            && let Some(key) = self.elements.space().find(handle, id)
            && let Some(entry) = self.elements.entry_mut(key)
        {
            entry.claim = claim;
        }
    }

    #[inline]
    fn write_element(
        &mut self,
        home: RegistrarId,
        handle: &PoolHandle,
        mut element: PoolElement,
        way_ms: u32,
    ) {
        element.home = home;
        copy_opaque_transport(&mut element);
        let id = element.id;
        let limits = &self.config.settings.limits;
        if self.elements.space().elements() >= limits.elements
            && self.elements.space().find(handle, id).is_none()
        {
            return;
        }
        let policy = self.rounded(element.policy);
        let class = transport_class(&element.user_transport);
        let mut payload = ElementEntry::new_foreign(element, self.peers.sync_stamp_of(home));
        payload.delay_ms = way_ms;
        let registration = RegistrationData {
            handle,
            id,
            home,
            policy,
            class,
            payload,
        };
        match self.elements.register(registration) {
            Ok(_) => self.subscriptions.mark_changed(handle),
            Err(_) => {
                let handle = PoolHandle(bytes::Bytes::copy_from_slice(&handle.0));
                self.outbox
                    .push_event(Event::Inconsistent { handle, id, home });
            }
        }
    }

    /// Notes that an element's home was learned from another registrar: the home's own word on its distance is needed.
    pub(super) fn note_hearsay(&mut self, key: ElementKey, home: RegistrarId) {
        let distant = self
            .elements
            .space()
            .get(key)
            .is_some_and(|e| has_distance(*e.policy()));
        if let Some(peer) = self.peers.get_mut(home) {
            peer.has_hearsay_distances |= distant;
        }
    }

    /// Decides about an own element that another registrar claims, by the rules in the module documentation of the
    /// registrar. Returns true if the element stays with this registrar for the time being.
    fn contests_claim(
        &mut self,
        now: Duration,
        key: ElementKey,
        home: RegistrarId,
        is_update: bool,
    ) -> bool {
        let Some(view) = self.elements.space().get(key) else {
            return false;
        };
        let entry = view.payload();
        let window = self.config.settings.race_window;
        let is_simultaneous =
            entry.association.is_some() && now.saturating_sub(entry.registered) < window;
        if is_update && !is_simultaneous {
            return false;
        }
        if home < self.config.id {
            // The other registrar asks the element. An update that crossed is as good as the element's answer.
            return !is_update;
        }
        if !entry.adopting {
            self.elements.contest(key, home);
            self.become_home(now, key, now);
        }
        true
    }
}
