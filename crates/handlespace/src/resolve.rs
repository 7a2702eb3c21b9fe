//! Handle resolution: a pool's policy chooses elements.

use crate::element::ElementRef;
use crate::policy::Procedure;
use crate::selection::Selection;
use crate::space::Handlespace;
use holdfast_wire::rserpool::PoolHandle;
use prefetch_index::prefetch_index;
use rand::Rng;

impl<T> Handlespace<T> {
    /// Selects up to `items` different elements of a pool by its policy and shows them in the policy's order. Returns how many,
    /// or none if there is no such pool.
    pub fn resolve(
        &mut self,
        handle: &PoolHandle,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> Option<usize> {
        let pool = self.find_pool(self.hash(handle), handle)?;
        let procedure = self.pools[pool as usize].procedure;
        if procedure == Procedure::First {
            return Some(self.first(pool, items, visit));
        }
        self.choose(pool, items);
        for &slot in &self.chosen {
            visit(self.view(slot));
        }
        self.advance(pool, procedure);
        Some(self.chosen.len())
    }

    /// Shows a pool's first elements. RFC 5356 section 4.1.2: "Then the head SHOULD be advanced by one element."
    #[inline]
    fn first(
        &mut self,
        pool: u32,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let Selection::Ordered(order) = &self.pools[pool as usize].selection else {
            return 0;
        };
        if let Some(slot) = order.ahead(&self.blocks) {
            prefetch_index(&self.elements.cores, slot as usize);
        }
        let shown = order.first(&self.blocks, items, |slot| {
            visit(self.view(slot));
        });
        if shown > 0
            && let Selection::Ordered(order) = &mut self.pools[pool as usize].selection
            && let Some((slot, spot)) = order.rotate(&mut self.blocks)
        {
            self.elements.cores[slot as usize].spot = spot;
        }
        shown
    }

    /// Chooses elements; the weights of the chosen are 0 until [`advance`](Self::advance).
    fn choose(&mut self, pool: u32, items: usize) {
        self.chosen.clear();
        match &mut self.pools[pool as usize].selection {
            Selection::Ordered(order) => {
                order.first(&self.blocks, items, |slot| self.chosen.push(slot));
            }
            Selection::Weighted(weights) => {
                while self.chosen.len() < items && weights.total() > 0 {
                    let slot = weights.at(self.random.random_range(0..weights.total()));
                    weights.set(self.elements.cores[slot as usize].spot, 0);
                    self.chosen.push(slot);
                }
            }
        }
    }

    /// What selection does to the chosen.
    fn advance(&mut self, pool: u32, procedure: Procedure) {
        let selection = &mut self.pools[pool as usize].selection;
        let counted = match procedure {
            Procedure::FirstInTurn => self.chosen.len().min(1),
            _ => self.chosen.len(),
        };
        for &slot in &self.chosen[..counted] {
            let mut standing = self.elements.cores[slot as usize].standing;
            if procedure != Procedure::ByWeight {
                standing = standing.selected(&self.elements.rests[slot as usize].policy);
            }
            let cores = &mut self.elements.cores;
            selection.update(&mut self.blocks, cores, slot, standing);
        }
    }
}
