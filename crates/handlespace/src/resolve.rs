//! Handle resolution: selection of elements by a pool's policy.

use crate::element::ElementRef;
use crate::policy::Procedure;
use crate::selection::{Point, Selection};
use crate::space::Handlespace;
use holdfast_wire::rserpool::PoolHandle;
use prefetch_index::prefetch_index;

/// Number of points drawn at once, so that the memory they refer to is fetched in parallel.
const DRAWN: usize = 4;
/// Limits on vain draws, and on drawn elements that can still be drawn, beyond which the drawn elements are excluded.
const VAIN_MAX: usize = 16;
const AWAKE_MAX: usize = 16;

impl<T> Handlespace<T> {
    /// Selects up to `items` different elements of a pool by its policy and visits them in the policy's order. Returns
    /// their number, or none if there is no such pool.
    pub fn resolve(
        &mut self,
        handle: &PoolHandle,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> Option<usize> {
        let pool = self.find_pool(&handle.0)?;
        let procedure = self.pools[pool as usize].procedure;
        // Prefetch for the next selections: the line that the previous resolution requested has arrived by now.
        let cores = &self.elements.cores;
        self.blocks
            .upcoming(|slot| prefetch_index(cores, slot as usize));
        if procedure == Procedure::First {
            return Some(self.first(pool, items, visit));
        }
        self.choose(pool, procedure, items);
        for &slot in &self.chosen {
            visit(self.view(slot));
        }
        Some(self.chosen.len())
    }

    /// Visits a pool's first elements. RFC 5356 section 4.1.2: "Then the head SHOULD be advanced by one element."
    #[inline]
    fn first(
        &mut self,
        pool: u32,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let order = match &self.pools[pool as usize].selection {
            Selection::Ordered(order) => order,
            Selection::FewInOrder(_) => return self.first_of_few(pool, items, visit),
            _ => return 0,
        };
        let shown = order.first(&self.blocks, items, |slot| visit(self.view(slot)));
        if shown > 0
            && let Selection::Ordered(order) = &mut self.pools[pool as usize].selection
            && let Some((slot, spot)) = order.rotate(&mut self.blocks)
        {
            let cores = &mut self.elements.cores;
            cores[slot as usize].spot = spot;
        }
        shown
    }

    /// Visits the first elements of a small pool.
    #[inline]
    fn first_of_few(
        &mut self,
        pool: u32,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let mut shown = 0;
        if let Selection::FewInOrder(few) = &self.pools[pool as usize].selection {
            for slot in few.first(items) {
                visit(self.view(slot));
                shown += 1;
            }
        }
        if shown > 0
            && let Selection::FewInOrder(few) = &mut self.pools[pool as usize].selection
        {
            few.rotate();
        }
        shown
    }

    /// Selects elements, and updates their standing.
    #[inline(never)]
    fn choose(&mut self, pool: u32, procedure: Procedure, items: usize) {
        self.chosen.clear();
        let rested = match &mut self.pools[pool as usize].selection {
            Selection::FewInOrder(few) => {
                self.chosen.extend(few.first(items));
                0
            }
            Selection::FewByWeight(few) => {
                few.draw(items, &mut self.chosen);
                0
            }
            Selection::FewAlike(few) => {
                few.draw(items, &mut self.chosen);
                0
            }
            Selection::Ordered(order) => {
                order.first(&self.blocks, items, |slot| self.chosen.push(slot));
                0
            }
            Selection::Weighted(_) => self.draw(pool, items),
        };
        let changed = match procedure {
            Procedure::FirstInTurn => self.chosen.len().min(1),
            Procedure::ByWeight => rested,
            _ => self.chosen.len(),
        };
        let selection = &mut self.pools[pool as usize].selection;
        let cores = &mut self.elements.cores;
        for &slot in &self.chosen[..changed] {
            let mut standing = cores[slot as usize].standing;
            if procedure != Procedure::ByWeight {
                standing = standing.selected(procedure);
            }
            selection.update(&mut self.blocks, cores, slot, standing);
        }
    }

    /// Selects elements by weight. A draw of an element that was already drawn is vain; if vain draws may become
    /// frequent, the drawn elements are excluded from further draws. Returns the number of excluded elements.
    fn draw(&mut self, pool: u32, items: usize) -> usize {
        let selection = &mut self.pools[pool as usize].selection;
        let (mut rested, mut vain) = (0, 0);
        loop {
            let Selection::Weighted(weights) = &mut *selection else {
                return rested;
            };
            let awake = self.chosen.len() - rested;
            let wanted = (items - self.chosen.len()).min(weights.eligible() - awake);
            if wanted == 0 {
                return rested;
            }
            let mut points = [Point::default(); DRAWN];
            let points = &mut points[..wanted.min(DRAWN)];
            for point in &mut *points {
                *point = weights.draw();
                weights.fetch(point.position);
            }
            for &point in &*points {
                let slot = weights.at(point);
                match slot.filter(|slot| !self.chosen[rested..].contains(slot)) {
                    Some(slot) => {
                        prefetch_index(&self.elements.cores, slot as usize);
                        self.chosen.push(slot);
                    }
                    None => vain += 1,
                }
            }
            weights.look_ahead(points.len() as u32, |slot| {
                prefetch_index(&self.elements.cores, slot as usize);
            });
            if vain > VAIN_MAX || self.chosen.len() - rested > AWAKE_MAX {
                for &slot in &self.chosen[rested..] {
                    selection.rest(&mut self.elements.cores, slot);
                }
                rested = self.chosen.len();
                vain = 0;
            }
        }
    }
}
