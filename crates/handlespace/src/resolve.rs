//! Handle resolution: selection of elements by a pool's policy.

use crate::element::ElementRef;
use crate::handlespace::Handlespace;
use crate::policy::SelectionProcedure;
use crate::selection::{SelectionSet, WeightLinePoint};
use holdfast_wire::rserpool::PoolHandle;
use prefetch_index::prefetch_index;

/// Number of points drawn at once, so that the memory they refer to is fetched in parallel.
const DRAW_BATCH: usize = 4;
/// Limits on vain draws, and on drawn elements that can still be drawn, beyond which the drawn elements are excluded.
const WASTED_DRAWS_MAX: usize = 16;
const DRAWABLE_MAX: usize = 16;

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
            .prefetch_upcoming(|slot| prefetch_index(cores, slot as usize));
        if procedure == SelectionProcedure::First {
            return Some(self.visit_first(pool, items, visit));
        }
        self.select(pool, procedure, items);
        for &slot in &self.chosen {
            visit(self.element_ref(slot));
        }
        Some(self.chosen.len())
    }

    /// Visits a pool's first elements. RFC 5356 section 4.1.2: "Then the head SHOULD be advanced by one element."
    #[inline]
    fn visit_first(
        &mut self,
        pool: u32,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let order = match &self.pools[pool as usize].selection {
            SelectionSet::Ordered(order) => order,
            SelectionSet::SmallOrdered(_) => return self.visit_first_of_small(pool, items, visit),
            _ => return 0,
        };
        let shown = order.visit_first(&self.blocks, items, |slot| visit(self.element_ref(slot)));
        if shown > 0
            && let SelectionSet::Ordered(order) = &mut self.pools[pool as usize].selection
            && let Some((slot, spot)) = order.rotate(&mut self.blocks)
        {
            let cores = &mut self.elements.cores;
            cores[slot as usize].position = spot;
        }
        shown
    }

    /// Visits the first elements of a small pool.
    #[inline]
    fn visit_first_of_small(
        &mut self,
        pool: u32,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let mut shown = 0;
        if let SelectionSet::SmallOrdered(few) = &self.pools[pool as usize].selection {
            for slot in few.first(items) {
                visit(self.element_ref(slot));
                shown += 1;
            }
        }
        if shown > 0
            && let SelectionSet::SmallOrdered(few) = &mut self.pools[pool as usize].selection
        {
            few.rotate();
        }
        shown
    }

    /// Selects elements, and updates their standing.
    #[inline(never)]
    fn select(&mut self, pool: u32, procedure: SelectionProcedure, items: usize) {
        self.chosen.clear();
        let excluded = match &mut self.pools[pool as usize].selection {
            SelectionSet::SmallOrdered(few) => {
                self.chosen.extend(few.first(items));
                0
            }
            SelectionSet::SmallWeighted(few) => {
                few.draw(items, &mut self.chosen);
                0
            }
            SelectionSet::SmallUniform(few) => {
                few.draw(items, &mut self.chosen);
                0
            }
            SelectionSet::Ordered(order) => {
                order.visit_first(&self.blocks, items, |slot| self.chosen.push(slot));
                0
            }
            SelectionSet::Weighted(_) => self.draw_weighted(pool, items),
        };
        let changed = match procedure {
            SelectionProcedure::FirstInTurn => self.chosen.len().min(1),
            SelectionProcedure::ByWeight => excluded,
            _ => self.chosen.len(),
        };
        let selection = &mut self.pools[pool as usize].selection;
        let cores = &mut self.elements.cores;
        for &slot in &self.chosen[..changed] {
            let mut standing = cores[slot as usize].selection_state;
            if procedure != SelectionProcedure::ByWeight {
                standing = standing.after_selection(procedure);
            }
            selection.update(&mut self.blocks, cores, slot, standing);
        }
    }

    /// Selects elements by weight. A draw of an element that was already drawn is vain; if vain draws may become
    /// frequent, the drawn elements are excluded from further draws. Returns the number of excluded elements.
    fn draw_weighted(&mut self, pool: u32, items: usize) -> usize {
        let selection = &mut self.pools[pool as usize].selection;
        let (mut excluded, mut wasted) = (0, 0);
        loop {
            let SelectionSet::Weighted(weights) = &mut *selection else {
                return excluded;
            };
            let drawable = self.chosen.len() - excluded;
            let wanted = (items - self.chosen.len()).min(weights.eligible() - drawable);
            if wanted == 0 {
                return excluded;
            }
            let mut points = [WeightLinePoint::default(); DRAW_BATCH];
            let points = &mut points[..wanted.min(DRAW_BATCH)];
            for point in &mut *points {
                *point = weights.draw();
                weights.prefetch(point.position);
            }
            for &point in &*points {
                let slot = weights.slot_at(point);
                match slot.filter(|slot| !self.chosen[excluded..].contains(slot)) {
                    Some(slot) => {
                        prefetch_index(&self.elements.cores, slot as usize);
                        self.chosen.push(slot);
                    }
                    None => wasted += 1,
                }
            }
            weights.prefetch_draws(points.len() as u32, |slot| {
                prefetch_index(&self.elements.cores, slot as usize);
            });
            if wasted > WASTED_DRAWS_MAX || self.chosen.len() - excluded > DRAWABLE_MAX {
                for &slot in &self.chosen[excluded..] {
                    selection.exclude(&mut self.elements.cores, slot);
                }
                excluded = self.chosen.len();
                wasted = 0;
            }
        }
    }
}
