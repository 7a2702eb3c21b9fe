//! What an operator sees.

use super::Registrar;
use holdfast_handlespace::{Cursor, PoolRef};
use holdfast_wire::rserpool::{ElementId, PoolElement, PoolHandle, RegistrarId};

impl Registrar {
    /// All pools, in no order.
    pub fn pools(&self) -> impl Iterator<Item = PoolRef<'_>> {
        self.space.each_pool()
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
