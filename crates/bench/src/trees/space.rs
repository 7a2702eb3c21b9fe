//! The six operations of paper 001 section 3.1 on sets that are trees (its figure 4).

use super::{Balance, Tree};

/// A pool handle, stored inside the pool (section 5.1.6).
pub type Handle = [u8; 32];

/// A policy: a sorting order and a selection procedure (section 3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// By sequence number: round robin.
    Turn,
    /// By load, then by sequence number: least used.
    Load,
    /// By equal weights: random.
    Weight,
}

/// Position of an element in a selection set: its value, and its sequence number.
type Rank = (u64, u64);
/// Home registrar, pool, and id of an element.
type Owned = (u32, u32, u32);

/// A set of pools, and the sets over all elements.
#[derive(Debug)]
pub struct Space<B> {
    elements: Vec<Element>,
    free: Vec<u32>,
    pools: Vec<Pool<B>>,
    pools_by_handle: Tree<Handle, B>,
    timers: Tree<(u64, u32), B>,
    owned: Tree<Owned, B>,
    chosen: Vec<u32>,
    random: u64,
}

#[derive(Debug, Clone, Default)]
struct Element {
    id: u32,
    pool: u32,
    /// Nodes of the element in the sets.
    in_index: u32,
    in_selection: u32,
    in_owned: u32,
    in_timers: Option<u32>,
}

#[derive(Debug)]
struct Pool<B> {
    order: Order,
    sequence: u64,
    index: Tree<u32, B>,
    selection: Tree<Rank, B>,
}

impl<B: Balance> Space<B> {
    /// Creates an empty handlespace.
    pub fn new() -> Space<B> {
        Space {
            elements: Vec::new(),
            free: Vec::new(),
            pools: Vec::new(),
            pools_by_handle: Tree::new(),
            timers: Tree::new(),
            owned: Tree::new(),
            chosen: Vec::new(),
            random: 42,
        }
    }

    /// Adds a pool, which is never removed.
    pub fn add_pool(&mut self, handle: Handle, order: Order) {
        let number = self.pools.len() as u32;
        self.pools_by_handle.insert(handle, number, 1);
        self.pools.push(Pool {
            order,
            sequence: 0,
            index: Tree::new(),
            selection: Tree::new(),
        });
    }

    /// Registers an element, or registers it again with another load. Returns false if the pool does not exist.
    pub fn register(&mut self, handle: &Handle, id: u32, home: u32, load: u32) -> bool {
        let Some(number) = self.pool(handle) else {
            return false;
        };
        let pool = &mut self.pools[number as usize];
        let rank = pool.rank(load);
        if let Some(slot) = pool.index.find(&id).map(|node| pool.index.value(node)) {
            let element = &mut self.elements[slot as usize];
            pool.selection.remove(element.in_selection);
            element.in_selection = pool.selection.insert(rank, slot, 1);
            return true;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.elements.push(Element::default());
            self.elements.len() as u32 - 1
        });
        self.elements[slot as usize] = Element {
            id,
            pool: number,
            in_index: pool.index.insert(id, slot, 1),
            in_selection: pool.selection.insert(rank, slot, 1),
            in_owned: self.owned.insert((home, number, id), slot, 1),
            in_timers: None,
        };
        true
    }

    /// Removes an element. Returns false if it does not exist.
    pub fn deregister(&mut self, handle: &Handle, id: u32) -> bool {
        let Some(slot) = self.element(handle, id) else {
            return false;
        };
        self.stop_timer(slot);
        let element = &self.elements[slot as usize];
        let pool = &mut self.pools[element.pool as usize];
        pool.index.remove(element.in_index);
        pool.selection.remove(element.in_selection);
        self.owned.remove(element.in_owned);
        self.free.push(slot);
        true
    }

    /// Sets an element's only timer. Returns false if the element does not exist.
    pub fn set_timer(&mut self, handle: &Handle, id: u32, at_us: u64) -> bool {
        let Some(slot) = self.element(handle, id) else {
            return false;
        };
        self.set_timer_of(slot, at_us);
        true
    }

    /// Sets the timer of an element by its slot.
    pub fn set_timer_of(&mut self, slot: u32, at_us: u64) {
        self.stop_timer(slot);
        self.elements[slot as usize].in_timers = Some(self.timers.insert((at_us, slot), slot, 1));
    }

    /// Removes the first timer; returns its expiry time and its element's slot.
    pub fn pop_timer(&mut self) -> Option<(u64, u32)> {
        let (at_us, slot) = self.timers.key(self.timers.first()?);
        self.stop_timer(slot);
        Some((at_us, slot))
    }

    /// Passes the ids of up to `items` elements to `visit`, by the pool's policy.
    pub fn resolve(&mut self, handle: &Handle, items: usize, mut visit: impl FnMut(u32)) {
        let Some(number) = self.pool(handle) else {
            return;
        };
        let pool = &mut self.pools[number as usize];
        self.chosen.clear();
        if pool.order == Order::Weight {
            self.draw(number, items);
        } else {
            let mut next = pool.selection.first();
            while let Some(node) = next.filter(|_| self.chosen.len() < items) {
                self.chosen.push(pool.selection.value(node));
                next = pool.selection.next(node);
            }
        }
        for &slot in &self.chosen {
            visit(self.elements[slot as usize].id);
        }
        let pool = &mut self.pools[number as usize];
        if pool.order != Order::Weight
            && let Some(&slot) = self.chosen.first()
        {
            let element = &mut self.elements[slot as usize];
            let (load, _) = pool.selection.key(element.in_selection);
            pool.selection.remove(element.in_selection);
            let rank = pool.rank(load as u32);
            element.in_selection = pool.selection.insert(rank, slot, 1);
        }
    }

    /// Passes the ids of a registrar's elements to `visit`.
    pub fn synchronize(&self, home: u32, mut visit: impl FnMut(u32)) {
        let mut next = self.owned.first();
        while let Some(node) = next {
            let (owner, _, id) = self.owned.key(node);
            if owner == home {
                visit(id);
            }
            next = self.owned.next(node);
        }
    }

    /// Draws elements without repetition: a drawn element has weight 0 until all are drawn.
    fn draw(&mut self, pool: u32, items: usize) {
        let pool = &mut self.pools[pool as usize];
        while self.chosen.len() < items && pool.selection.total() > 0 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let node = pool.selection.at(self.random % pool.selection.total());
            pool.selection.set_weight(node, 0);
            self.chosen.push(pool.selection.value(node));
        }
        for &slot in &self.chosen {
            let node = self.elements[slot as usize].in_selection;
            pool.selection.set_weight(node, 1);
        }
    }

    fn pool(&self, handle: &Handle) -> Option<u32> {
        let node = self.pools_by_handle.find(handle)?;
        Some(self.pools_by_handle.value(node))
    }

    fn element(&self, handle: &Handle, id: u32) -> Option<u32> {
        let pool = &self.pools[self.pool(handle)? as usize];
        Some(pool.index.value(pool.index.find(&id)?))
    }

    fn stop_timer(&mut self, slot: u32) {
        if let Some(node) = self.elements[slot as usize].in_timers.take() {
            self.timers.remove(node);
        }
    }
}

impl<B> Pool<B> {
    /// Returns the position of an element that registers or was selected (equation 1).
    fn rank(&mut self, load: u32) -> Rank {
        self.sequence += 1;
        match self.order {
            Order::Load => (u64::from(load), self.sequence),
            Order::Turn | Order::Weight => (0, self.sequence),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RedBlack, Treap};
    use super::*;
    use proptest::prelude::*;

    const HANDLE: Handle = [7; 32];

    #[derive(Debug, Clone)]
    enum Step {
        Register(u32, u32),
        Deregister(u32),
        SetTimer(u32, u64),
        PopTimer,
        Resolve(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u32..30, 0u32..4).prop_map(|(id, load)| Step::Register(id, load)),
            1 => (0u32..30).prop_map(Step::Deregister),
            2 => (0u32..30, 0u64..50).prop_map(|(id, at)| Step::SetTimer(id, at)),
            1 => Just(Step::PopTimer),
            2 => (0usize..5).prop_map(Step::Resolve),
        ]
    }

    /// An element of the model: id, load, sequence number, timer.
    #[derive(Clone, Copy)]
    struct Plain(u32, u32, u64, Option<u64>);

    fn key(order: Order, e: &Plain) -> (u32, u64) {
        match order {
            Order::Load => (e.1, e.2),
            Order::Turn | Order::Weight => (0, e.2),
        }
    }

    fn resolve<B: Balance>(
        space: &mut Space<B>,
        order: Order,
        plain: &mut [Plain],
        items: usize,
        sequence: u64,
    ) -> Result<(), TestCaseError> {
        let mut got = Vec::new();
        space.resolve(&HANDLE, items, |id| got.push(id));
        let mut expected = plain.to_vec();
        expected.sort_by_key(|e| key(order, e));
        expected.truncate(items);
        if order == Order::Weight {
            prop_assert_eq!(got.len(), expected.len());
            got.sort_unstable();
            got.dedup();
            prop_assert_eq!(got.len(), expected.len(), "none twice");
            return Ok(());
        }
        prop_assert_eq!(&got, &expected.iter().map(|e| e.0).collect::<Vec<_>>());
        if let Some(e) = plain.iter_mut().find(|e| Some(&e.0) == got.first()) {
            e.2 = sequence;
        }
        Ok(())
    }

    fn does_what_a_vector_does<B: Balance>(
        order: Order,
        steps: &[Step],
    ) -> Result<(), TestCaseError> {
        let mut space = Space::<B>::new();
        space.add_pool(HANDLE, order);
        let mut plain: Vec<Plain> = Vec::new();
        for (sequence, step) in (0u64..).zip(steps) {
            match *step {
                Step::Register(id, load) => {
                    prop_assert!(space.register(&HANDLE, id, 1, load));
                    match plain.iter_mut().find(|e| e.0 == id) {
                        Some(e) => (e.1, e.2) = (load, sequence),
                        None => plain.push(Plain(id, load, sequence, None)),
                    }
                }
                Step::Deregister(id) => {
                    let known = plain.iter().any(|e| e.0 == id);
                    plain.retain(|e| e.0 != id);
                    prop_assert_eq!(space.deregister(&HANDLE, id), known);
                }
                Step::SetTimer(id, at_us) => {
                    let known = plain.iter_mut().find(|e| e.0 == id);
                    prop_assert_eq!(space.set_timer(&HANDLE, id, at_us), known.is_some());
                    if let Some(e) = known {
                        e.3 = Some(at_us);
                    }
                }
                Step::PopTimer => {
                    let popped = space.pop_timer();
                    let first = plain.iter().filter_map(|e| e.3).min();
                    prop_assert_eq!(popped.map(|(at_us, _)| at_us), first);
                    if let Some((_, slot)) = popped {
                        let id = space.elements[slot as usize].id;
                        let known = plain.iter_mut().find(|e| e.0 == id && e.3 == first);
                        known.expect("it has that timer").3 = None;
                    }
                }
                Step::Resolve(items) => resolve(&mut space, order, &mut plain, items, sequence)?,
            }
        }
        let mut got = Vec::new();
        space.synchronize(1, |id| got.push(id));
        let mut expected: Vec<u32> = plain.iter().map(|e| e.0).collect();
        expected.sort_unstable();
        prop_assert_eq!(got, expected);
        Ok(())
    }

    proptest! {
        #[test]
        fn both_do_what_vectors_do(steps in prop::collection::vec(step(), 1..200)) {
            for order in [Order::Turn, Order::Load, Order::Weight] {
                does_what_a_vector_does::<RedBlack>(order, &steps)?;
                does_what_a_vector_does::<Treap>(order, &steps)?;
            }
        }
    }
}
