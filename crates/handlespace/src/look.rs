//! Queries by operators: rare, and without cost for registrations and resolutions.

use crate::element::ElementRef;
use crate::pool::{Pool, PoolRef};
use crate::space::Handlespace;
use holdfast_wire::rserpool::PoolHandle;

impl<T> Handlespace<T> {
    /// Returns the pool with this handle.
    pub fn pool(&self, handle: &PoolHandle) -> Option<PoolRef<'_>> {
        let pool = self.find_pool(&handle.0)?;
        Some(self.pools[pool as usize].view())
    }

    /// Returns all pools, in no particular order.
    pub fn each_pool(&self) -> impl Iterator<Item = PoolRef<'_>> {
        let pools = self.pools.iter().filter(|pool| pool.len > 0);
        pools.map(Pool::view)
    }

    /// Visits pools from index `place` on, at most `places` indices (starting at 0), some of which may have no pool.
    /// Returns the next index, if there are more. A pool that exists throughout a walk is visited exactly once.
    pub fn pools_from(
        &self,
        place: usize,
        places: usize,
        visit: impl FnMut(PoolRef<'_>),
    ) -> Option<usize> {
        let rest = self.pools.get(place..).unwrap_or_default();
        let looked = &rest[..places.min(rest.len())];
        let pools = looked.iter().filter(|pool| pool.len > 0);
        pools.map(Pool::view).for_each(visit);
        (looked.len() < rest.len()).then_some(place + looked.len())
    }

    /// Visits up to `items` elements of a pool, in no particular order. The cost depends on `items` and on the number
    /// of registrars, not on other pools.
    pub fn each_of(&self, handle: &PoolHandle, items: usize, visit: impl FnMut(ElementRef<'_, T>)) {
        let pool = self.find_pool(&handle.0);
        let groups = pool
            .into_iter()
            .flat_map(|pool| self.ownership.of_pool(pool));
        let members = groups.flat_map(|group| group.members.iter());
        members
            .take(items)
            .map(|slot| self.view(*slot))
            .for_each(visit);
    }
}
