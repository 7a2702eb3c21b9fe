//! Views that agree: updates, comparison of checksums, resynchronisation (RFC 5353 sections 3.3 and 3.6).
//!
//! To "mark" all elements of a peer is to raise the stamp that the peer's list gives: those with an older one
//! are marked, what is written removes the mark.

use super::distance::distance_mut;
use super::entry::{Entry, class, detach};
use super::schedule::Timer;
use super::start::Start;
use super::{AssociationId, Event, Gone, Protocol, Registrar};
use holdfast_handlespace::{Cursor, ElementKey, Registration};
use holdfast_wire::rserpool::enrp::{Body, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{PoolElement, PoolHandle, RegistrarId};
use std::time::Duration;

impl Registrar {
    /// RFC 5353 section 3.6.1.
    pub(super) fn compare(&mut self, now: Duration, id: RegistrarId, announced: u16) {
        let known = self.space.checksum(id);
        let until = now + self.config.settings.no_response_max;
        let ready = self.is_ready();
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let Some(to) = peer.association else { return };
        if known == announced || peer.syncing || !ready {
            return;
        }
        peer.syncing = true;
        peer.stamp = peer.stamp.wrapping_add(1);
        self.schedule.set(Timer::Sync(id), until);
        self.counters.resynchronisations += 1;
        self.out.event(Event::OutOfStep {
            peer: id,
            announced,
            known,
        });
        let body = Body::HandleTableRequest { own_only: true };
        self.out.enrp(to, id, body);
    }

    /// The peer does not answer: its next presence begins anew.
    pub(super) fn sync_timeout(&mut self, id: RegistrarId) {
        self.stop_sync(id);
    }

    pub(super) fn stop_sync(&mut self, id: RegistrarId) {
        self.schedule.stop(Timer::Sync(id));
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.syncing = false;
        }
    }

    /// A block of a handle table; none: the peer refuses.
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
        if !self.peers.get(&id).is_some_and(|peer| peer.syncing) {
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
            self.stop_sync(id);
            self.sweep(id);
        }
    }

    /// "SHOULD silently remove those 'marked' entries".
    fn sweep(&mut self, id: RegistrarId) {
        let stamp = self.stamp_of(id);
        let mut marked: Vec<ElementKey> = Vec::new();
        self.space
            .next_block(&mut Cursor::owned_by(id), usize::MAX, |element| {
                if element.payload().stamp != stamp {
                    marked.push(element.key());
                }
            });
        let removed = marked.len();
        for key in marked {
            self.forget(key);
        }
        self.out.event(Event::InStep { peer: id, removed });
    }

    /// Takes the elements of a table in; their home is `home`, or else what each says.
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

    /// RFC 5353 section 3.3.
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

    /// Only who is the element's home, or knows who is, removes it: else it has moved meanwhile.
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

    /// Writes an element as another registrar describes it. `fresh`: it says so of its own accord, now.
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
            // Of an earlier life with the same number, or taken over before all was loaded: is it there?
            let id = element.id;
            if known.is_none() && !self.is_ready() {
                self.write(own, handle, element);
                if let Some(key) = self.key(handle, id) {
                    self.adopt(now, key, now);
                }
            }
            return;
        }
        if !self.know(now, home) {
            return;
        }
        if let Some(key) = known
            && self.is_own(key)
        {
            if self.contests(now, key, home, fresh) {
                return;
            }
            self.yield_to(key, home);
        }
        let delay_ms = self.associations.get(from).map_or(0, |from| from.delay_ms);
        if let Some(own_distance) = distance_mut(&mut element.policy) {
            *own_distance = own_distance.saturating_add(delay_ms);
        }
        self.write(home, handle, element);
    }

    #[inline]
    fn write(&mut self, home: RegistrarId, handle: &PoolHandle, mut element: PoolElement) {
        element.home = home;
        detach(&mut element);
        let id = element.id;
        let limits = &self.config.settings.limits;
        if self.space.elements() >= limits.elements && self.space.find(handle, id).is_none() {
            return;
        }
        let registration = Registration {
            handle,
            id,
            home,
            policy: self.rounded(element.policy),
            class: class(&element.user_transport),
            payload: Entry::foreign(element, self.stamp_of(home)),
        };
        if self.space.register(registration).is_ok() {
            self.subscriptions.changed(handle);
        } else {
            let handle = PoolHandle(bytes::Bytes::copy_from_slice(&handle.0));
            self.out.event(Event::Inconsistent { handle, id, home });
        }
    }

    /// An own element is said to be another's. See the module's text: true, if it stays this registrar's for now.
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
            // The other asks the element. An update that crossed is as good as its answer.
            return !fresh;
        }
        if !entry.adopting {
            self.contested.insert(key, home);
            self.adopt(now, key, now);
        }
        true
    }
}
