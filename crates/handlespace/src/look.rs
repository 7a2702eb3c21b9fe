//! What is asked by people: seldom, and never at the cost of who registers or resolves.

use crate::element::ElementRef;
use crate::pool::{Pool, PoolRef};
use crate::space::Handlespace;
use holdfast_wire::rserpool::PoolHandle;

impl<T> Handlespace<T> {
    /// A pool.
    pub fn pool(&self, handle: &PoolHandle) -> Option<PoolRef<'_>> {
        let pool = self.find_pool(&handle.0)?;
        Some(self.pools[pool as usize].view())
    }

    /// All pools, in no order.
    pub fn each_pool(&self) -> impl Iterator<Item = PoolRef<'_>> {
        let pools = self.pools.iter().filter(|pool| pool.len > 0);
        pools.map(Pool::view)
    }

    /// Shows pools from a place on, the first being 0, and says where to go on, if there are more. Looks at so many places at most: some
    /// may have no pool. What is there from the first call to the last comes once.
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

    /// Shows the elements of a pool, up to `items`, in no order. What it costs depends on how many that are and on how many registrars there
    /// are, not on other pools.
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
