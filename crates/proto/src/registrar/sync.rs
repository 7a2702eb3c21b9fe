//! Consistent views: updates, comparison of checksums, resynchronisation (RFC 5353 sections 3.3 and 3.6).
//!
//! To "mark" all elements of a peer, the registrar raises the peer's stamp: elements with an older stamp are marked,
//! and writing an element removes its mark.

use super::distance::{distance_mut, is_distant};
use super::entry::{Claim, Entry, class, detach};
use super::peers::Peer;
use super::schedule::Timer;
use super::start::Start;
use super::{AssociationId, Event, Gone, Protocol, Registrar};
use holdfast_handlespace::{Cursor, ElementKey, Registration};
use holdfast_wire::rserpool::enrp::{Body, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{PoolElement, PoolHandle, RegistrarId};
use std::time::Duration;

/// Progress in removing a peer's elements that were not in its handle table.
#[derive(Debug)]
pub(super) struct Sweep {
    cursor: Cursor,
    removed: usize,
}

impl Registrar {
    /// Compares a peer's announced checksum with the known one, and requests its table if they differ (RFC 5353 section
    /// 3.6.1).
    pub(super) fn compare(&mut self, now: Duration, id: RegistrarId, announced: u16) {
        let known = self.space.checksum(id);
        let until = now + self.config.settings.no_response_max;
        let ready = self.is_ready();
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let Some(to) = peer.association else { return };
        let agrees = known == announced;
        if agrees && !peer.hearsay || peer.syncing || !ready {
            return;
        }
        peer.syncing = true;
        peer.stamp = peer.stamp.wrapping_add(1);
        self.schedule.set(Timer::Sync(id), until);
        self.counters.resynchronisations += 1;
        if !agrees {
            self.out.event(Event::OutOfStep {
                peer: id,
                announced,
                known,
            });
        }
        let body = Body::HandleTableRequest { own_only: true };
        self.out.enrp(to, id, body);
    }

    /// Gives up a resynchronisation that the peer does not answer; its next presence starts another.
    pub(super) fn sync_timeout(&mut self, id: RegistrarId) {
        self.stop_sync(id);
    }

    pub(super) fn stop_sync(&mut self, id: RegistrarId) {
        self.schedule.stop(Timer::Sync(id));
        self.schedule.stop(Timer::Sweep(id));
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.syncing = false;
            peer.sweep = None;
        }
    }

    /// Handles a block of a handle table; none if the peer refuses.
    pub(super) fn table_came(
        &mut self,
        now: Duration,
        from: AssociationId,
        id: RegistrarId,
        block: Option<(bool, Vec<PoolEntry>)>,
    ) {
        if self.start == Start::Loading(from) {
            return self.mentor_table(now, from, id, block);
        }
        let asked = |peer: &Peer| peer.syncing && peer.sweep.is_none();
        if !self.peers.get(&id).is_some_and(asked) {
            return self.ignored(Some(from), Protocol::Enrp, "a handle table not asked for");
        }
        let Some((more, entries)) = block else {
            return self.stop_sync(id);
        };
        self.store_all(now, from, id, entries, Some(id));
        if more {
            let until = now + self.config.settings.no_response_max;
            self.schedule.set(Timer::Sync(id), until);
            let body = Body::HandleTableRequest { own_only: true };
            self.out.enrp(from, id, body);
        } else {
            self.schedule.stop(Timer::Sync(id));
            if let Some(peer) = self.peers.get_mut(&id) {
                let cursor = Cursor::owned_by(id);
                peer.sweep = Some(Sweep { cursor, removed: 0 });
            }
            self.sweep_some(now, id);
        }
    }

    /// Removes some of the marked elements: "SHOULD silently remove those 'marked' entries". Elements and users are
    /// served before the rest.
    pub(super) fn sweep_some(&mut self, now: Duration, id: RegistrarId) {
        let max = self.config.settings.turn_elements_max.max(1);
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let (stamp, begun) = (peer.stamp, peer.sweep.take());
        let Some(mut sweep) = begun else { return };
        let mut marked: Vec<ElementKey> = Vec::new();
        let shown = self.space.next_block(&mut sweep.cursor, max, |element| {
            if element.payload().stamp != stamp {
                marked.push(element.key());
            }
        });
        // An element that both registrars yielded to each other has no home, unless it is probed.
        let yielded = |key: &ElementKey| {
            let view = self.space.get(*key);
            view.is_some_and(|view| view.payload().claim != Claim::None)
        };
        let (disputed, marked): (Vec<_>, Vec<_>) = marked.into_iter().partition(yielded);
        sweep.removed += marked.len();
        if shown == max {
            peer.sweep = Some(sweep);
            // The rest follows in a later turn.
            let next = now + Duration::from_nanos(1);
            self.schedule.set(Timer::Sweep(id), next);
        } else {
            peer.hearsay = false;
            self.stop_sync(id);
            let removed = sweep.removed;
            self.out.event(Event::InStep { peer: id, removed });
        }
        for key in marked {
            self.forget(key);
        }
        for key in disputed {
            self.adopt(now, key, now);
        }
    }

    /// Stores the elements of a table; their home is `home`, or else the one that each names.
    pub(super) fn store_all(
        &mut self,
        now: Duration,
        from: AssociationId,
        sender: RegistrarId,
        entries: Vec<PoolEntry>,
        home: Option<RegistrarId>,
    ) {
        for PoolEntry { handle, elements } in entries {
            for element in elements {
                let said = Some(element.home).filter(|home| home.0 != 0);
                let home = home.or(said).unwrap_or(sender);
                self.store(now, from, home, &handle, element, false);
            }
        }
    }

    /// Handles an update (RFC 5353 section 3.3).
    #[expect(clippy::too_many_arguments, reason = "the message's fields")]
    #[inline]
    pub(super) fn update(
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
        let said = Some(element.home).filter(|home| home.0 != 0);
        let home = said.unwrap_or(sender);
        match action {
            UpdateAction::Add => {
                let id = element.id;
                let home = if suggested { sender } else { home };
                self.store(now, from, home, handle, element, true);
                if suggested && let Some(key) = self.key(handle, id) {
                    self.adopt(now, key, now);
                }
            }
            UpdateAction::Delete => self.deleted(sender, home, handle, &element),
        }
    }

    /// Handles a removal. Only the element's home, or a registrar that names the right home, can remove it: otherwise
    /// the element has moved meanwhile.
    fn deleted(
        &mut self,
        sender: RegistrarId,
        home: RegistrarId,
        handle: &PoolHandle,
        element: &PoolElement,
    ) {
        let Some(key) = self.key(handle, element.id) else {
            return;
        };
        let here = self.space.get(key).map(|element| element.home());
        if here != Some(sender) && here != Some(home) {
            return;
        }
        let own = self.is_own(key);
        let kept = self.space.get(key).map(|element| element.handle().clone());
        self.forget(key);
        if let (true, Some(handle)) = (own, kept) {
            let (id, why) = (element.id, Gone::Deregistered);
            self.out.event(Event::Removed { handle, id, why });
        }
    }

    /// Writes an element as another registrar describes it. `fresh` is true for an update that the registrar sends
    /// unasked.
    fn store(
        &mut self,
        now: Duration,
        from: AssociationId,
        home: RegistrarId,
        handle: &PoolHandle,
        mut element: PoolElement,
        fresh: bool,
    ) {
        let own = self.config.id;
        let known = self.space.find(handle, element.id);
        if home == own {
            // The element dates from an earlier run with the same number, or was taken over before the handlespace was
            // loaded: probe it.
            let id = element.id;
            if known.is_none() && !self.is_ready() {
                self.write(own, handle, element, 0);
                if let Some(key) = self.key(handle, id) {
                    self.adopt(now, key, now);
                }
            }
            return;
        }
        if !self.know(now, home) {
            return;
        }
        let mut claim = Claim::None;
        if let Some(key) = known
            && let Some(view) = self.space.get(key)
        {
            claim = view.payload().claim;
            if view.home() == own {
                if self.contests(now, key, home, fresh) {
                    return;
                }
                claim = self.yield_to(key, home);
            }
        }
        let teller = self.associations.get(from);
        let way_ms = teller.map_or(0, |from| from.delay_ms);
        let own_word = teller.is_some_and(|from| from.peer == Some(home));
        if let Some(distance) = distance_mut(&mut element.policy) {
            *distance = distance.saturating_add(way_ms);
            if !own_word && let Some(peer) = self.peers.get_mut(&home) {
                peer.hearsay = true;
            }
        }
        let id = element.id;
        self.write(home, handle, element, way_ms);
        if claim != Claim::None
            && let Some(key) = self.key(handle, id)
            && let Some(entry) = self.space.payload_mut(key)
        {
            entry.claim = claim;
        }
    }

    #[inline]
    fn write(
        &mut self,
        home: RegistrarId,
        handle: &PoolHandle,
        mut element: PoolElement,
        way_ms: u32,
    ) {
        element.home = home;
        detach(&mut element);
        let id = element.id;
        let limits = &self.config.settings.limits;
        if self.space.elements() >= limits.elements && self.space.find(handle, id).is_none() {
            return;
        }
        let policy = self.rounded(element.policy);
        let class = class(&element.user_transport);
        let mut payload = Entry::foreign(element, self.stamp_of(home));
        payload.way_ms = way_ms;
        let registration = Registration {
            handle,
            id,
            home,
            policy,
            class,
            payload,
        };
        match self.space.register(registration) {
            Ok(registered) => {
                if registered.previous.is_none() {
                    self.count_distant(policy, true);
                }
                self.subscriptions.changed(handle);
            }
            Err(_) => {
                let handle = PoolHandle(bytes::Bytes::copy_from_slice(&handle.0));
                self.out.event(Event::Inconsistent { handle, id, home });
            }
        }
    }

    /// Notes that an element's home was learned from another registrar: the home's own word on its distance is needed.
    pub(super) fn heard_of(&mut self, key: ElementKey, home: RegistrarId) {
        let distant = self.space.get(key).is_some_and(|e| is_distant(*e.policy()));
        if let Some(peer) = self.peers.get_mut(&home) {
            peer.hearsay |= distant;
        }
    }

    /// Decides about an own element that another registrar claims, by the rules in the module documentation of the
    /// registrar. Returns true if the element stays with this registrar for the time being.
    fn contests(&mut self, now: Duration, key: ElementKey, home: RegistrarId, fresh: bool) -> bool {
        let Some(view) = self.space.get(key) else {
            return false;
        };
        let entry = view.payload();
        let window = self.config.settings.race_window;
        let crossed = entry.link.is_some() && now.saturating_sub(entry.registered) < window;
        if fresh && !crossed {
            return false;
        }
        if home < self.config.id {
            // The other registrar asks the element. An update that crossed is as good as the element's answer.
            return !fresh;
        }
        if !entry.adopting {
            self.contested.insert(key, home);
            self.adopt(now, key, now);
        }
        true
    }
}
