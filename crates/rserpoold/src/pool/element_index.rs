//! Lookup of the elements that a registrar's message concerns.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_wire::rserpool::{ElementId, PoolHandle};

/// Numbers of elements, by pool handle and identifier.
#[derive(Debug, Default)]
pub(super) struct ElementIndex(BTreeMap<(PoolHandle, ElementId), BTreeSet<u64>>);

impl ElementIndex {
    /// Returns the elements with this identifier; without an identifier, all of the pool.
    pub(super) fn find(&self, handle: &PoolHandle, id: Option<ElementId>) -> Vec<u64> {
        let all_ids = (ElementId(0), ElementId(u32::MAX));
        let (first, last) = id.map_or(all_ids, |id| (id, id));
        let matching = (handle.clone(), first)..=(handle.clone(), last);
        let matching = self.0.range(matching).flat_map(|(_, numbers)| numbers);
        matching.copied().collect()
    }

    /// Lists an element under its pool and identifier.
    pub(super) fn insert(&mut self, number: u64, name: (PoolHandle, ElementId)) {
        self.0.entry(name).or_default().insert(number);
    }

    /// Removes an element that was listed under this pool and identifier.
    pub(super) fn remove(&mut self, number: u64, name: (PoolHandle, ElementId)) {
        if let Some(numbers) = self.0.get_mut(&name) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.0.remove(&name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_found_by_id_or_by_pool() {
        let mut names = ElementIndex::default();
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
