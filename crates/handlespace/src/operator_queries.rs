//! Queries by operators: rare, and without cost for registrations and resolutions.

use crate::element::ElementRef;
use crate::handlespace::Handlespace;
use crate::pool::{PoolRecord, PoolRef};
use holdfast_wire::rserpool::PoolHandle;

impl<T> Handlespace<T> {
    /// Returns the pool with this handle.
    pub fn pool(&self, handle: &PoolHandle) -> Option<PoolRef<'_>> {
        let pool = self.find_pool(&handle.0)?;
        Some(self.pools[pool as usize].view())
    }

    /// Returns all pools, in no particular order.
    pub fn iter_pools(&self) -> impl Iterator<Item = PoolRef<'_>> {
        let pools = self.pools.iter().filter(|pool| pool.len > 0);
        pools.map(PoolRecord::view)
    }

    /// Visits pools from index `first_index` on, at most `index_count` indices (starting at 0), some of which may have no pool.
    /// Returns the next index, if there are more. A pool that exists throughout a walk is visited exactly once.
    pub fn visit_pools(
        &self,
        first_index: usize,
        index_count: usize,
        visit: impl FnMut(PoolRef<'_>),
    ) -> Option<usize> {
        let rest = self.pools.get(first_index..).unwrap_or_default();
        let looked = &rest[..index_count.min(rest.len())];
        let pools = looked.iter().filter(|pool| pool.len > 0);
        pools.map(PoolRecord::view).for_each(visit);
        (looked.len() < rest.len()).then_some(first_index + looked.len())
    }

    /// Visits up to `items` elements of a pool, in no particular order. The cost depends on `items` and on the number
    /// of registrars, not on other pools.
    pub fn visit_elements(
        &self,
        handle: &PoolHandle,
        items: usize,
        visit: impl FnMut(ElementRef<'_, T>),
    ) {
        let pool = self.find_pool(&handle.0);
        let groups = pool
            .into_iter()
            .flat_map(|pool| self.ownership.groups_of_pool(pool));
        let members = groups.flat_map(|group| group.members.iter());
        members
            .take(items)
            .map(|slot| self.element_ref(*slot))
            .for_each(visit);
    }
}
