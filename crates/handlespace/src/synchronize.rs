//! Synchronisation: walking through elements in blocks while the handlespace changes.

use crate::element::ElementRef;
use crate::space::Handlespace;
use holdfast_wire::rserpool::RegistrarId;

/// How far a walk has come. It costs the handlespace nothing, and may be forgotten at any time.
///
/// What is in the handlespace from the beginning of a walk to its end, with the same home, comes at least once, what joins
/// it or changes its home meanwhile perhaps not: other registrars are told of that by updates. Elements of one
/// pool with the same home come together.
///
/// Lists are walked from the end. When one of them leaves, the last takes its place, which has come already
/// or has its turn later.
#[derive(Debug, Clone)]
pub struct Cursor {
    home: Option<RegistrarId>,
    /// Groups not yet begun: the first ones of the list.
    groups: usize,
    /// The group begun: its number, its generation, and how many of its members are left.
    begun: Option<(u32, u32, usize)>,
}

impl Cursor {
    /// Begins a walk through all elements.
    pub fn all() -> Cursor {
        Cursor {
            home: None,
            groups: usize::MAX,
            begun: None,
        }
    }

    /// Begins a walk through the elements with this home registrar.
    pub fn owned_by(home: RegistrarId) -> Cursor {
        Cursor {
            home: Some(home),
            ..Cursor::all()
        }
    }
}

impl<T> Handlespace<T> {
    /// Shows the next elements of a walk, up to `items`. Returns how many; 0 at the end.
    pub fn next_block(
        &self,
        cursor: &mut Cursor,
        items: usize,
        mut visit: impl FnMut(ElementRef<'_, T>),
    ) -> usize {
        let list: &[u32] = match cursor.home {
            None => &self.ownership.all,
            Some(home) => self.ownership.owner(home).map_or(&[], |o| &o.groups),
        };
        let mut shown = 0;
        while shown < items {
            let Some((number, generation, left)) = cursor.begun else {
                cursor.groups = cursor.groups.min(list.len());
                if cursor.groups == 0 {
                    break;
                }
                cursor.groups -= 1;
                let number = list[cursor.groups];
                let generation = self.ownership.groups[number as usize].generation;
                cursor.begun = Some((number, generation, usize::MAX));
                continue;
            };
            let group = &self.ownership.groups[number as usize];
            let left = if group.generation == generation {
                left.min(group.members.len())
            } else {
                0
            };
            let end = left - left.min(items - shown);
            for &slot in group.members[end..left].iter().rev() {
                visit(self.view(slot));
            }
            shown += left - end;
            cursor.begun = (end > 0).then_some((number, generation, end));
        }
        shown
    }
}
