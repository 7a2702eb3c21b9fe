//! Synchronisation: walking through the elements in blocks while the handlespace changes.

use crate::element::ElementRef;
use crate::handlespace::Handlespace;
use holdfast_wire::rserpool::RegistrarId;
use prefetch_index::prefetch_index;

/// Number of slots by which elements are prefetched ahead.
const PREFETCH_DISTANCE: usize = 64;

/// Position of a walk. A cursor costs the handlespace nothing, and may be dropped at any time.
///
/// An element that is registered throughout a walk, with the same home, is visited at least once. An element that
/// registers or changes its home during the walk may be missed: other registrars learn of it by updates.
///
/// The elements of all homes are visited in the order of memory, which is an order of magnitude faster than any other
/// order if they do not fit a cache. The elements of one home are visited pool by pool.
#[derive(Debug, Clone)]
pub struct ElementCursor(WalkScope);

#[derive(Debug, Clone)]
enum WalkScope {
    /// Slot of the element that the walk visits next.
    AllElements(u32),
    /// Lists are walked from the end: a removed entry is replaced by the last one, which has been visited already or is
    /// visited later.
    OwnedBy {
        home: RegistrarId,
        /// Number of groups not yet started: the first ones of the list.
        groups: usize,
        /// The started group: its number, its generation, and the number of its members left.
        current_group: Option<(u32, u32, usize)>,
    },
}

impl ElementCursor {
    /// Starts a walk through all elements.
    pub fn all() -> ElementCursor {
        ElementCursor(WalkScope::AllElements(0))
    }

    /// Starts a walk through the elements with this home registrar.
    pub fn owned_by(home: RegistrarId) -> ElementCursor {
        ElementCursor(WalkScope::OwnedBy {
            home,
            groups: usize::MAX,
            current_group: None,
        })
    }
}

impl<T> Handlespace<T> {
    /// Visits the next elements of a walk, up to `items`. Returns their number; 0 at the end.
    pub fn next_block(
        &self,
        cursor: &mut ElementCursor,
        items: usize,
        visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        match &mut cursor.0 {
            WalkScope::AllElements(next) => self.next_slots(next, items, visit),
            WalkScope::OwnedBy {
                home,
                groups,
                current_group: begun,
            } => {
                let owner = self.ownership.owner(*home);
                let list = owner.map_or(&[][..], |owner| &owner.groups);
                self.next_members(list, groups, begun, items, visit)
            }
        }
    }

    fn next_slots(
        &self,
        next: &mut u32,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let end = self.elements.cores.len() as u32;
        let mut shown = 0;
        while shown < items && *next < end {
            let ahead = *next as usize + PREFETCH_DISTANCE;
            prefetch_index(&self.elements.cores, ahead);
            prefetch_index(&self.elements.cold_parts, ahead);
            if self.elements.is_used(*next) {
                visit(self.element_ref(*next));
                shown += 1;
            }
            *next += 1;
        }
        shown
    }

    fn next_members(
        &self,
        group_list: &[u32],
        groups: &mut usize,
        current_group: &mut Option<(u32, u32, usize)>,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let mut shown = 0;
        while shown < items {
            let Some((number, generation, left)) = *current_group else {
                *groups = (*groups).min(group_list.len());
                if *groups == 0 {
                    break;
                }
                *groups -= 1;
                let number = group_list[*groups];
                let generation = self.ownership.groups[number as usize].generation;
                *current_group = Some((number, generation, usize::MAX));
                continue;
            };
            let group = &self.ownership.groups[number as usize];
            let left = if group.generation == generation {
                left.min(group.members.len())
            } else {
                0
            };
            let end = left - left.min(items - shown);
            let members = &group.members[..left];
            for index in (end..left).rev() {
                if let Some(&ahead) = members.get(index.wrapping_sub(PREFETCH_DISTANCE)) {
                    prefetch_index(&self.elements.cores, ahead as usize);
                    prefetch_index(&self.elements.cold_parts, ahead as usize);
                }
                visit(self.element_ref(members[index]));
            }
            shown += left - end;
            *current_group = (end > 0).then_some((number, generation, end));
        }
        shown
    }
}
