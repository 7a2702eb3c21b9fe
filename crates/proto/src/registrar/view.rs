//! What an operator sees.

use super::{Counters, Registrar, Start};
use holdfast_handlespace::{Cursor, PoolRef};
use holdfast_wire::rserpool::{ElementId, PoolElement, PoolHandle, RegistrarId};

impl Registrar {
    /// Its number.
    pub fn id(&self) -> RegistrarId {
        self.config.id
    }

    /// What happened how often.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Whether elements and users are served.
    pub fn is_ready(&self) -> bool {
        matches!(self.start, Start::Done)
    }

    /// How many pools there are.
    pub fn pools(&self) -> usize {
        self.space.pools()
    }

    /// A pool.
    pub fn pool(&self, handle: &PoolHandle) -> Option<PoolRef<'_>> {
        self.space.pool(handle)
    }

    /// Shows some pools from a place on: see [`pools_from`](holdfast_handlespace::Handlespace::pools_from).
    pub fn pools_from(
        &self,
        place: usize,
        places: usize,
        visit: impl FnMut(PoolRef<'_>),
    ) -> Option<usize> {
        self.space.pools_from(place, places, visit)
    }

    /// Shows the elements of a pool, up to `items`, in no order.
    pub fn each_of(&self, handle: &PoolHandle, items: usize, mut visit: impl FnMut(&PoolElement)) {
        self.space
            .each_of(handle, items, |element| visit(&element.payload().element));
    }

    /// Shows all elements, in no order; those of one pool with the same home together.
    pub fn each_element(&self, mut visit: impl FnMut(&PoolHandle, &PoolElement)) {
        self.space
            .next_block(&mut Cursor::all(), usize::MAX, |element| {
                visit(element.handle(), &element.payload().element);
            });
    }

    /// An element.
    pub fn element(&self, handle: &PoolHandle, id: ElementId) -> Option<&PoolElement> {
        let key = self.space.find(handle, id)?;
        Some(&self.space.get(key)?.payload().element)
    }

    /// How many elements there are, whoever's they are.
    pub fn elements(&self) -> usize {
        self.space.elements()
    }

    /// How many elements have a registrar as their home.
    pub fn elements_owned_by(&self, home: RegistrarId) -> usize {
        self.space.elements_owned_by(home)
    }

    /// The checksum over the elements that have a registrar as their home (RFC 5353 section 3.6.2).
    pub fn checksum(&self, home: RegistrarId) -> u16 {
        self.space.checksum(home)
    }
}
