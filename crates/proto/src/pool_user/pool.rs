//! What is known of a pool: the last answer, and which of its elements were not reached.

use super::choose::Learnt;
use super::selection::Selection;
use crate::hunt::{Link, Random};
use holdfast_wire::rserpool::{ElementId, PolicyKind, PoolElement, SctpTransport};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// An element that was not reached.
#[derive(Debug)]
struct Missed {
    until: Duration,
    /// How often in a row.
    times: u32,
}

/// An entry of the cache.
#[derive(Debug)]
pub(super) struct Pool {
    /// When the registrar answered; none if there is no answer.
    pub(super) fetched: Option<Duration>,
    pub(super) policy: PolicyKind,
    pub(super) elements: Vec<PoolElement>,
    positions: BTreeMap<ElementId, usize>,
    /// How often each position was chosen since the answer.
    chosen: Vec<u64>,
    selection: Selection,
    missed: BTreeMap<ElementId, Missed>,
    /// When elements missed may be chosen again.
    back: BTreeSet<(Duration, ElementId)>,
    /// Elements that somebody was sent to.
    used: BTreeSet<ElementId>,
    /// What sessions that choose for themselves have seen of the elements.
    pub(super) learnt: Learnt,
    /// Some session chooses for itself: it wants to know all elements.
    pub(super) wide: bool,
    /// Sessions of this user with elements of the pool.
    pub(super) sessions: usize,
    /// Whether somebody wants to know of changes.
    pub(super) watched: bool,
    /// The registrar that tells of changes by itself.
    pub(super) updates: Option<Link>,
    /// When the entry is looked at again; as it is in the timers.
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
    /// Takes a registrar's answer. Whether the elements are others than before.
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
        // Who is not listed but was missed and may still be in a business card.
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

    /// The answer is no longer good, or was that there is no such pool.
    pub(super) fn clear(&mut self, now: Duration) -> bool {
        let changed = self.refill(now, self.policy, Vec::new());
        self.fetched = None;
        changed
    }

    /// Whom to use next, by the pool's policy.
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

    /// The elements that may be chosen, in the registrar's order.
    pub(super) fn candidates(&mut self, now: Duration) -> Vec<ElementId> {
        self.restore(now);
        let ids = self.elements.iter().map(|element| element.id);
        ids.filter(|id| !self.is_missed(now, *id)).collect()
    }

    /// Somebody is sent to this element.
    pub(super) fn take(&mut self, id: ElementId) -> Option<&PoolElement> {
        self.used.insert(id);
        self.elements.get(*self.positions.get(&id)?)
    }

    /// Where the element's registrar reaches it, if that is known.
    pub(super) fn asap_transport(&self, id: ElementId) -> Option<&SctpTransport> {
        let element = self.elements.get(*self.positions.get(&id)?)?;
        element.asap_transport.as_ref()
    }

    /// Somebody was sent to whichever of the elements they choose.
    pub(super) fn use_all(&mut self) {
        self.used.extend(self.positions.keys());
    }

    /// Whether somebody was sent to the element.
    pub(super) fn is_used(&self, id: ElementId) -> bool {
        self.used.contains(&id)
    }

    pub(super) fn is_missed(&self, now: Duration, id: ElementId) -> bool {
        self.missed
            .get(&id)
            .is_some_and(|missed| missed.until > now)
    }

    /// The element was not reached. `wait` has the first time it is not chosen, and the longest.
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

    /// The element was reached.
    pub(super) fn reached(&mut self, id: ElementId) {
        if let Some(missed) = self.missed.remove(&id)
            && self.back.remove(&(missed.until, id))
        {
            self.put_back(id);
        }
    }

    /// Elements missed long enough ago may be chosen again.
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
