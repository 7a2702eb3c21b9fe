//! Cached data of a pool: the last answer, and its unreachable elements.

use super::choice_method::PoolObservations;
use super::position_selector::PositionSelector;
use crate::server_hunt::{LinkId, SecretSeedRng};
use holdfast_wire::rserpool::{ElementId, PolicyKind, PoolElement, SctpTransport};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// An element that could not be reached.
#[derive(Debug)]
struct UnreachableElement {
    until: Duration,
    /// Number of failures in a row.
    failures: u32,
}

/// A pool in the user's cache.
#[derive(Debug)]
pub(super) struct CachedPool {
    /// Time of the registrar's answer; none if there is no valid answer.
    pub(super) fetched: Option<Duration>,
    pub(super) policy: PolicyKind,
    pub(super) elements: Vec<PoolElement>,
    position_by_id: BTreeMap<ElementId, usize>,
    /// Number of selections of each element since the answer, by position.
    selection_counts: Vec<u64>,
    selection: PositionSelector,
    unreachable: BTreeMap<ElementId, UnreachableElement>,
    /// Times at which unreachable elements may be selected again.
    selectable_again: BTreeSet<(Duration, ElementId)>,
    /// Elements that were selected for a client program.
    selected: BTreeSet<ElementId>,
    /// Observations of the elements by sessions that choose for themselves.
    pub(super) observations: PoolObservations,
    /// True if a session chooses for itself, and needs all elements.
    pub(super) needs_all_elements: bool,
    /// Number of this user's sessions with elements of the pool.
    pub(super) sessions: usize,
    /// True if changes of the pool are to be reported.
    pub(super) watched: bool,
    /// Link to the registrar that sends updates by itself.
    pub(super) update_link: Option<LinkId>,
    /// Time of the next check of the entry, as set in the timers.
    pub(super) due: Option<Duration>,
}

impl Default for CachedPool {
    fn default() -> CachedPool {
        let policy = PolicyKind::RoundRobin;
        CachedPool {
            fetched: None,
            policy,
            elements: Vec::new(),
            position_by_id: BTreeMap::new(),
            selection_counts: Vec::new(),
            selection: PositionSelector::new(policy),
            unreachable: BTreeMap::new(),
            selectable_again: BTreeSet::new(),
            selected: BTreeSet::new(),
            observations: PoolObservations::default(),
            needs_all_elements: false,
            sessions: 0,
            watched: false,
            update_link: None,
            due: None,
        }
    }
}

impl CachedPool {
    /// Stores a registrar's answer. Returns true if the elements have changed.
    pub(super) fn store_answer(
        &mut self,
        now: Duration,
        policy: PolicyKind,
        elements: Vec<PoolElement>,
    ) -> bool {
        let changed = self.elements != elements || self.fetched.is_none();
        self.fetched = Some(now);
        self.policy = policy;
        self.elements = elements;
        self.selection_counts = vec![0; self.elements.len()];
        self.selection = PositionSelector::new(policy);
        self.position_by_id.clear();
        for (position, element) in self.elements.iter().enumerate() {
            self.position_by_id.entry(element.id).or_insert(position);
        }
        self.selected
            .retain(|id| self.position_by_id.contains_key(id));
        self.forget_removed_elements();
        // Keep elements that are not listed but still avoided: a business card may name them.
        self.unreachable
            .retain(|id, missed| self.position_by_id.contains_key(id) || missed.until > now);
        self.selectable_again = self
            .unreachable
            .iter()
            .filter(|(_, missed)| missed.until > now)
            .map(|(id, missed)| (missed.until, *id))
            .collect();
        for (id, position) in &self.position_by_id {
            if self
                .unreachable
                .get(id)
                .is_none_or(|missed| missed.until <= now)
            {
                let policy = &self.elements[*position].policy;
                self.selection.insert(*position, policy, 0);
            }
        }
        changed
    }

    /// Drops the elements, since the answer is invalid, or the pool does not exist.
    pub(super) fn clear(&mut self, now: Duration) -> bool {
        let changed = self.store_answer(now, self.policy, Vec::new());
        self.fetched = None;
        changed
    }

    /// Selects the next element, by the pool's policy.
    pub(super) fn select(
        &mut self,
        now: Duration,
        random: &mut SecretSeedRng,
    ) -> Option<&PoolElement> {
        self.restore_selectable(now);
        let position = self.selection.next_position(random)?;
        let element = &self.elements[position];
        let chosen = &mut self.selection_counts[position];
        if let PositionSelector::Ranked(_) = self.selection {
            self.selection.remove(position, &element.policy, *chosen);
            self.selection
                .insert(position, &element.policy, *chosen + 1);
        }
        *chosen += 1;
        self.selected.insert(element.id);
        Some(element)
    }

    /// Returns the elements that may be selected, in the registrar's order.
    pub(super) fn candidates(&mut self, now: Duration) -> Vec<ElementId> {
        self.restore_selectable(now);
        let ids = self.elements.iter().map(|element| element.id);
        ids.filter(|id| !self.is_unreachable(now, *id)).collect()
    }

    /// Marks an element as selected, and returns it.
    pub(super) fn mark_selected(&mut self, id: ElementId) -> Option<&PoolElement> {
        self.selected.insert(id);
        self.elements.get(*self.position_by_id.get(&id)?)
    }

    /// Returns the address at which the element's registrar reaches it, if known.
    pub(super) fn asap_transport(&self, id: ElementId) -> Option<&SctpTransport> {
        let element = self.elements.get(*self.position_by_id.get(&id)?)?;
        element.asap_transport.as_ref()
    }

    /// Marks all elements as selected, since the client program has got all of them.
    pub(super) fn mark_all_selected(&mut self) {
        self.selected.extend(self.position_by_id.keys());
    }

    /// Returns true if the element was selected before.
    pub(super) fn was_selected(&self, id: ElementId) -> bool {
        self.selected.contains(&id)
    }

    pub(super) fn is_unreachable(&self, now: Duration, id: ElementId) -> bool {
        self.unreachable
            .get(&id)
            .is_some_and(|missed| missed.until > now)
    }

    /// Records that an element could not be reached. `wait` has the first and the longest time for which it is not
    /// selected.
    pub(super) fn mark_unreachable(
        &mut self,
        now: Duration,
        id: ElementId,
        wait: (Duration, Duration),
    ) {
        self.restore_selectable(now);
        let times = self
            .unreachable
            .get(&id)
            .map_or(0, |missed| missed.failures);
        let until = now + (wait.0 * (1 << times.min(16))).min(wait.1);
        let times = times + 1;
        if let Some(before) = self.unreachable.insert(
            id,
            UnreachableElement {
                until,
                failures: times,
            },
        ) {
            self.selectable_again.remove(&(before.until, id));
        }
        self.selectable_again.insert((until, id));
        if let Some(&position) = self.position_by_id.get(&id) {
            let policy = &self.elements[position].policy;
            self.selection
                .remove(position, policy, self.selection_counts[position]);
        }
    }

    /// Records that an element was reached.
    pub(super) fn mark_reached(&mut self, id: ElementId) {
        if let Some(missed) = self.unreachable.remove(&id)
            && self.selectable_again.remove(&(missed.until, id))
        {
            self.insert_into_selection(id);
        }
    }

    /// Makes elements selectable again once their time is over.
    fn restore_selectable(&mut self, now: Duration) {
        while let Some(&(until, id)) = self.selectable_again.first()
            && until <= now
        {
            self.selectable_again.pop_first();
            self.insert_into_selection(id);
        }
    }

    fn insert_into_selection(&mut self, id: ElementId) {
        if let Some(&position) = self.position_by_id.get(&id) {
            let policy = &self.elements[position].policy;
            self.selection
                .insert(position, policy, self.selection_counts[position]);
        }
    }
}
