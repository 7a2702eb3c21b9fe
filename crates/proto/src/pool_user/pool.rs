//! Cached data of a pool: the last answer, and its unreachable elements.

use super::choose::Learnt;
use super::selection::Selection;
use crate::hunt::{Link, Random};
use holdfast_wire::rserpool::{ElementId, PolicyKind, PoolElement, SctpTransport};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// An unreachable element.
#[derive(Debug)]
struct Missed {
    until: Duration,
    /// Number of failures in a row.
    times: u32,
}

/// An entry of the cache.
#[derive(Debug)]
pub(super) struct Pool {
    /// Time of the registrar's answer; none if there is no valid answer.
    pub(super) fetched: Option<Duration>,
    pub(super) policy: PolicyKind,
    pub(super) elements: Vec<PoolElement>,
    positions: BTreeMap<ElementId, usize>,
    /// Number of selections of each element since the answer, by position.
    chosen: Vec<u64>,
    selection: Selection,
    missed: BTreeMap<ElementId, Missed>,
    /// Times at which unreachable elements may be selected again.
    back: BTreeSet<(Duration, ElementId)>,
    /// Elements that were selected for a client program.
    used: BTreeSet<ElementId>,
    /// Observations of the elements by sessions that choose for themselves.
    pub(super) learnt: Learnt,
    /// True if a session chooses for itself, and needs all elements.
    pub(super) wide: bool,
    /// Number of this user's sessions with elements of the pool.
    pub(super) sessions: usize,
    /// True if changes of the pool are to be reported.
    pub(super) watched: bool,
    /// Link to the registrar that sends updates by itself.
    pub(super) updates: Option<Link>,
    /// Time of the next check of the entry, as set in the timers.
    pub(super) due: Option<Duration>,
}

impl Default for Pool {
    fn default() -> Pool {
        let policy = PolicyKind::RoundRobin;
        Pool {
            fetched: None,
            policy,
            elements: Vec::new(),
            positions: BTreeMap::new(),
            chosen: Vec::new(),
            selection: Selection::new(policy),
            missed: BTreeMap::new(),
            back: BTreeSet::new(),
            used: BTreeSet::new(),
            learnt: Learnt::default(),
            wide: false,
            sessions: 0,
            watched: false,
            updates: None,
            due: None,
        }
    }
}

impl Pool {
    /// Stores a registrar's answer. Returns true if the elements have changed.
    pub(super) fn refill(
        &mut self,
        now: Duration,
        policy: PolicyKind,
        elements: Vec<PoolElement>,
    ) -> bool {
        let changed = self.elements != elements || self.fetched.is_none();
        self.fetched = Some(now);
        self.policy = policy;
        self.elements = elements;
        self.chosen = vec![0; self.elements.len()];
        self.selection = Selection::new(policy);
        self.positions.clear();
        for (position, element) in self.elements.iter().enumerate() {
            self.positions.entry(element.id).or_insert(position);
        }
        self.used.retain(|id| self.positions.contains_key(id));
        self.forget_others();
        // Keep elements that are not listed but still avoided: a business card may name them.
        self.missed
            .retain(|id, missed| self.positions.contains_key(id) || missed.until > now);
        self.back = self
            .missed
            .iter()
            .filter(|(_, missed)| missed.until > now)
            .map(|(id, missed)| (missed.until, *id))
            .collect();
        for (id, position) in &self.positions {
            if self.missed.get(id).is_none_or(|missed| missed.until <= now) {
                let policy = &self.elements[*position].policy;
                self.selection.insert(*position, policy, 0);
            }
        }
        changed
    }

    /// Drops the elements, since the answer is invalid, or the pool does not exist.
    pub(super) fn clear(&mut self, now: Duration) -> bool {
        let changed = self.refill(now, self.policy, Vec::new());
        self.fetched = None;
        changed
    }

    /// Selects the next element, by the pool's policy.
    pub(super) fn select(&mut self, now: Duration, random: &mut Random) -> Option<&PoolElement> {
        self.restore(now);
        let position = self.selection.next(random)?;
        let element = &self.elements[position];
        let chosen = &mut self.chosen[position];
        if let Selection::Ranked(_) = self.selection {
            self.selection.remove(position, &element.policy, *chosen);
            self.selection
                .insert(position, &element.policy, *chosen + 1);
        }
        *chosen += 1;
        self.used.insert(element.id);
        Some(element)
    }

    /// Returns the elements that may be selected, in the registrar's order.
    pub(super) fn candidates(&mut self, now: Duration) -> Vec<ElementId> {
        self.restore(now);
        let ids = self.elements.iter().map(|element| element.id);
        ids.filter(|id| !self.is_missed(now, *id)).collect()
    }

    /// Marks an element as selected, and returns it.
    pub(super) fn take(&mut self, id: ElementId) -> Option<&PoolElement> {
        self.used.insert(id);
        self.elements.get(*self.positions.get(&id)?)
    }

    /// Returns the address at which the element's registrar reaches it, if known.
    pub(super) fn asap_transport(&self, id: ElementId) -> Option<&SctpTransport> {
        let element = self.elements.get(*self.positions.get(&id)?)?;
        element.asap_transport.as_ref()
    }

    /// Marks all elements as selected, since the client program has got all of them.
    pub(super) fn use_all(&mut self) {
        self.used.extend(self.positions.keys());
    }

    /// Returns true if the element was selected before.
    pub(super) fn is_used(&self, id: ElementId) -> bool {
        self.used.contains(&id)
    }

    pub(super) fn is_missed(&self, now: Duration, id: ElementId) -> bool {
        self.missed
            .get(&id)
            .is_some_and(|missed| missed.until > now)
    }

    /// Records that an element could not be reached. `wait` has the first and the longest time for which it is not
    /// selected.
    pub(super) fn miss(&mut self, now: Duration, id: ElementId, wait: (Duration, Duration)) {
        self.restore(now);
        let times = self.missed.get(&id).map_or(0, |missed| missed.times);
        let until = now + (wait.0 * (1 << times.min(16))).min(wait.1);
        let times = times + 1;
        if let Some(before) = self.missed.insert(id, Missed { until, times }) {
            self.back.remove(&(before.until, id));
        }
        self.back.insert((until, id));
        if let Some(&position) = self.positions.get(&id) {
            let policy = &self.elements[position].policy;
            self.selection
                .remove(position, policy, self.chosen[position]);
        }
    }

    /// Records that an element was reached.
    pub(super) fn reached(&mut self, id: ElementId) {
        if let Some(missed) = self.missed.remove(&id)
            && self.back.remove(&(missed.until, id))
        {
            self.put_back(id);
        }
    }

    /// Makes elements selectable again once their time is over.
    fn restore(&mut self, now: Duration) {
        while let Some(&(until, id)) = self.back.first()
            && until <= now
        {
            self.back.pop_first();
            self.put_back(id);
        }
    }

    fn put_back(&mut self, id: ElementId) {
        if let Some(&position) = self.positions.get(&id) {
            let policy = &self.elements[position].policy;
            self.selection
                .insert(position, policy, self.chosen[position]);
        }
    }
}
