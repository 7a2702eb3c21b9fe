//! Lookup of the elements that a registrar's message concerns.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_wire::rserpool::{ElementId, PoolHandle};

use super::elements::Element;
use super::event_loop::Daemon;

/// Numbers of elements, by pool handle and identifier.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<(PoolHandle, ElementId), BTreeSet<u64>>);

impl Names {
    /// Returns the elements with this identifier; without an identifier, all of the pool.
    pub(super) fn find(&self, handle: &PoolHandle, id: Option<ElementId>) -> Vec<u64> {
        let all = (ElementId(0), ElementId(u32::MAX));
        let (first, last) = id.map_or(all, |id| (id, id));
        let meant = (handle.clone(), first)..=(handle.clone(), last);
        let meant = self.0.range(meant).flat_map(|(_, numbers)| numbers);
        meant.copied().collect()
    }

    fn insert(&mut self, number: u64, name: (PoolHandle, ElementId)) {
        self.0.entry(name).or_default().insert(number);
    }

    fn remove(&mut self, number: u64, name: (PoolHandle, ElementId)) {
        if let Some(numbers) = self.0.get_mut(&name) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.0.remove(&name);
            }
        }
    }
}

impl Daemon {
    /// Lists an element under its current identifier.
    pub(super) fn name_element(&mut self, number: u64) {
        let Some(element) = self.elements.get_mut(&number) else {
            return;
        };
        let id = element.machine.id();
        if element.named == Some(id) {
            return;
        }
        let before = element.named.replace(id);
        if let Some(before) = before {
            self.names.remove(number, (element.handle.clone(), before));
        }
        self.names.insert(number, (element.handle.clone(), id));
    }

    /// Removes an element.
    pub(super) fn forget_name(&mut self, number: u64, element: &Element) {
        if let Some(id) = element.named {
            self.names.remove(number, (element.handle.clone(), id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_by_name_or_by_pool() {
        let mut names = Names::default();
        let name = |pool: &str, id| (PoolHandle::from(pool), ElementId(id));
        for (number, pool, id) in [(1, "a", 7), (2, "b", 7), (3, "b", u32::MAX), (4, "b", 7)] {
            names.insert(number, name(pool, id));
        }
        let (a, b) = (PoolHandle::from("a"), PoolHandle::from("b"));
        assert_eq!(names.find(&b, Some(ElementId(7))), [2, 4]);
        assert_eq!(names.find(&b, None), [2, 4, 3]);
        assert_eq!(names.find(&a, None), [1]);
        names.remove(2, name("b", 7));
        names.remove(4, name("b", 7));
        assert_eq!(names.find(&b, None), [3]);
        assert_eq!(names.0.len(), 2);
    }
}
