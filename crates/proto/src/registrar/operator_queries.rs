//! Queries of an operator.

use super::{Counters, Registrar};
use holdfast_handlespace::{ElementCursor, PoolRef};
use holdfast_wire::rserpool::{ElementId, PoolElement, PoolHandle, RegistrarId};

impl Registrar {
    /// Returns the registrar's number.
    pub fn id(&self) -> RegistrarId {
        self.config.id
    }

    /// Returns the registrar's counters of events.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns true if elements and users are served.
    pub fn is_ready(&self) -> bool {
        self.startup.serves()
    }

    /// Returns the number of pools.
    pub fn pools(&self) -> usize {
        self.elements.space().pools()
    }

    /// Returns the pool with this handle.
    pub fn pool(&self, handle: &PoolHandle) -> Option<PoolRef<'_>> {
        self.elements.space().pool(handle)
    }

    /// Visits some pools, beginning at a place: see [`visit_pools`](holdfast_handlespace::Handlespace::visit_pools).
    pub fn pools_from(
        &self,
        position: usize,
        count: usize,
        visit: impl FnMut(PoolRef<'_>),
    ) -> Option<usize> {
        self.elements.space().visit_pools(position, count, visit)
    }

    /// Visits up to `items` elements of a pool, in no order.
    pub fn visit_elements_of(
        &self,
        handle: &PoolHandle,
        items: usize,
        mut visit: impl FnMut(&PoolElement),
    ) {
        self.elements
            .space()
            .visit_elements(handle, items, |element| visit(&element.payload().element));
    }

    /// Visits all elements, in no order; elements of one pool with the same home are visited together.
    pub fn visit_all_elements(&self, mut visit: impl FnMut(&PoolHandle, &PoolElement)) {
        self.elements
            .space()
            .next_block(&mut ElementCursor::all(), usize::MAX, |element| {
                visit(element.handle(), &element.payload().element);
            });
    }

    /// Returns the element of a pool by its identifier.
    pub fn element(&self, handle: &PoolHandle, id: ElementId) -> Option<&PoolElement> {
        let key = self.elements.space().find(handle, id)?;
        Some(&self.elements.space().get(key)?.payload().element)
    }

    /// Returns the number of elements of all homes.
    pub fn elements(&self) -> usize {
        self.elements.space().elements()
    }

    /// Returns the number of elements that have a registrar as their home.
    pub fn elements_owned_by(&self, home: RegistrarId) -> usize {
        self.elements.space().elements_owned_by(home)
    }

    /// Returns the checksum over the elements that have a registrar as their home (RFC 5353 section 3.6.2).
    pub fn checksum(&self, home: RegistrarId) -> u16 {
        self.elements.space().checksum(home)
    }
}
