//! The six operations of paper 001 section 3.1 on sets that are trees (its figure 4).

use super::{BalanceScheme, BalancedTree};

/// A pool handle, stored inside the pool (section 5.1.6).
pub type FixedPoolHandle = [u8; 32];

/// A policy: a sorting order and a selection procedure (section 3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyOrder {
    /// By sequence number: round robin.
    Sequence,
    /// By load, then by sequence number: least used.
    Load,
    /// By equal weights: random.
    Weight,
}

/// Position of an element in a selection set: its value, and its sequence number.
type SelectionRank = (u64, u64);
/// Home registrar, pool, and id of an element.
type OwnershipKey = (u32, u32, u32);

/// A set of pools, and the sets over all elements.
#[derive(Debug)]
pub struct TreeSpace<B> {
    elements: Vec<TreeElement>,
    free: Vec<u32>,
    pools: Vec<TreePool<B>>,
    pools_by_handle: BalancedTree<FixedPoolHandle, B>,
    timers: BalancedTree<(u64, u32), B>,
    by_owner: BalancedTree<OwnershipKey, B>,
    chosen: Vec<u32>,
    random: u64,
}

#[derive(Debug, Clone, Default)]
struct TreeElement {
    id: u32,
    pool: u32,
    /// Nodes of the element in the sets.
    index_node: u32,
    selection_node: u32,
    owner_node: u32,
    timer_node: Option<u32>,
}

#[derive(Debug)]
struct TreePool<B> {
    order: PolicyOrder,
    sequence: u64,
    index: BalancedTree<u32, B>,
    selection: BalancedTree<SelectionRank, B>,
}

impl<B: BalanceScheme> TreeSpace<B> {
    /// Creates an empty handlespace.
    pub fn new() -> TreeSpace<B> {
        TreeSpace {
            elements: Vec::new(),
            free: Vec::new(),
            pools: Vec::new(),
            pools_by_handle: BalancedTree::new(),
            timers: BalancedTree::new(),
            by_owner: BalancedTree::new(),
            chosen: Vec::new(),
            random: 42,
        }
    }

    /// Adds a pool, which is never removed.
    pub fn add_pool(&mut self, handle: FixedPoolHandle, order: PolicyOrder) {
        let number = self.pools.len() as u32;
        self.pools_by_handle.insert(handle, number, 1);
        self.pools.push(TreePool {
            order,
            sequence: 0,
            index: BalancedTree::new(),
            selection: BalancedTree::new(),
        });
    }

    /// Registers an element, or registers it again with another load. Returns false if the pool does not exist.
    pub fn register(&mut self, handle: &FixedPoolHandle, id: u32, home: u32, load: u32) -> bool {
        let Some(number) = self.find_pool(handle) else {
            return false;
        };
        let pool = &mut self.pools[number as usize];
        let rank = pool.rank(load);
        if let Some(slot) = pool.index.find(&id).map(|node| pool.index.value(node)) {
            let element = &mut self.elements[slot as usize];
            pool.selection.remove(element.selection_node);
            element.selection_node = pool.selection.insert(rank, slot, 1);
            return true;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.elements.push(TreeElement::default());
            self.elements.len() as u32 - 1
        });
        self.elements[slot as usize] = TreeElement {
            id,
            pool: number,
            index_node: pool.index.insert(id, slot, 1),
            selection_node: pool.selection.insert(rank, slot, 1),
            owner_node: self.by_owner.insert((home, number, id), slot, 1),
            timer_node: None,
        };
        true
    }

    /// Removes an element. Returns false if it does not exist.
    pub fn deregister(&mut self, handle: &FixedPoolHandle, id: u32) -> bool {
        let Some(slot) = self.find_element(handle, id) else {
            return false;
        };
        self.stop_timer(slot);
        let element = &self.elements[slot as usize];
        let pool = &mut self.pools[element.pool as usize];
        pool.index.remove(element.index_node);
        pool.selection.remove(element.selection_node);
        self.by_owner.remove(element.owner_node);
        self.free.push(slot);
        true
    }

    /// Sets an element's only timer. Returns false if the element does not exist.
    pub fn set_timer(&mut self, handle: &FixedPoolHandle, id: u32, at_us: u64) -> bool {
        let Some(slot) = self.find_element(handle, id) else {
            return false;
        };
        self.set_timer_of_slot(slot, at_us);
        true
    }

    /// Sets the timer of an element by its slot.
    pub fn set_timer_of_slot(&mut self, slot: u32, at_us: u64) {
        self.stop_timer(slot);
        self.elements[slot as usize].timer_node = Some(self.timers.insert((at_us, slot), slot, 1));
    }

    /// Removes the first timer; returns its expiry time and its element's slot.
    pub fn pop_timer(&mut self) -> Option<(u64, u32)> {
        let (at_us, slot) = self.timers.key(self.timers.first()?);
        self.stop_timer(slot);
        Some((at_us, slot))
    }

    /// Passes the ids of up to `items` elements to `visit`, by the pool's policy.
    pub fn resolve(&mut self, handle: &FixedPoolHandle, items: usize, mut visit: impl FnMut(u32)) {
        let Some(number) = self.find_pool(handle) else {
            return;
        };
        let pool = &mut self.pools[number as usize];
        self.chosen.clear();
        if pool.order == PolicyOrder::Weight {
            self.draw_by_weight(number, items);
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
        if pool.order != PolicyOrder::Weight
            && let Some(&slot) = self.chosen.first()
        {
            let element = &mut self.elements[slot as usize];
            let (load, _) = pool.selection.key(element.selection_node);
            pool.selection.remove(element.selection_node);
            let rank = pool.rank(load as u32);
            element.selection_node = pool.selection.insert(rank, slot, 1);
        }
    }

    /// Passes the ids of a registrar's elements to `visit`.
    pub fn synchronize(&self, home: u32, mut visit: impl FnMut(u32)) {
        let mut next = self.by_owner.first();
        while let Some(node) = next {
            let (owner, _, id) = self.by_owner.key(node);
            if owner == home {
                visit(id);
            }
            next = self.by_owner.next(node);
        }
    }

    /// Draws elements without repetition: a drawn element has weight 0 until all are drawn.
    fn draw_by_weight(&mut self, pool: u32, items: usize) {
        let pool = &mut self.pools[pool as usize];
        while self.chosen.len() < items && pool.selection.total_weight() > 0 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            let node = pool
                .selection
                .node_at_weight(self.random % pool.selection.total_weight());
            pool.selection.set_weight(node, 0);
            self.chosen.push(pool.selection.value(node));
        }
        for &slot in &self.chosen {
            let node = self.elements[slot as usize].selection_node;
            pool.selection.set_weight(node, 1);
        }
    }

    fn find_pool(&self, handle: &FixedPoolHandle) -> Option<u32> {
        let node = self.pools_by_handle.find(handle)?;
        Some(self.pools_by_handle.value(node))
    }

    fn find_element(&self, handle: &FixedPoolHandle, id: u32) -> Option<u32> {
        let pool = &self.pools[self.find_pool(handle)? as usize];
        Some(pool.index.value(pool.index.find(&id)?))
    }

    fn stop_timer(&mut self, slot: u32) {
        if let Some(node) = self.elements[slot as usize].timer_node.take() {
            self.timers.remove(node);
        }
    }
}

impl<B> TreePool<B> {
    /// Returns the position of an element that registers or was selected (equation 1).
    fn rank(&mut self, load: u32) -> SelectionRank {
        self.sequence += 1;
        match self.order {
            PolicyOrder::Load => (u64::from(load), self.sequence),
            PolicyOrder::Sequence | PolicyOrder::Weight => (0, self.sequence),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RedBlack, Treap};
    use super::*;
    use proptest::prelude::*;

    const HANDLE: FixedPoolHandle = [7; 32];

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
    struct ModelElement(u32, u32, u64, Option<u64>);

    fn key(order: PolicyOrder, e: &ModelElement) -> (u32, u64) {
        match order {
            PolicyOrder::Load => (e.1, e.2),
            PolicyOrder::Sequence | PolicyOrder::Weight => (0, e.2),
        }
    }

    fn check_resolve<B: BalanceScheme>(
        space: &mut TreeSpace<B>,
        order: PolicyOrder,
        plain: &mut [ModelElement],
        items: usize,
        sequence: u64,
    ) -> Result<(), TestCaseError> {
        let mut got = Vec::new();
        space.resolve(&HANDLE, items, |id| got.push(id));
        let mut expected = plain.to_vec();
        expected.sort_by_key(|e| key(order, e));
        expected.truncate(items);
        if order == PolicyOrder::Weight {
            prop_assert_eq!(got.len(), expected.len());
            got.sort_unstable();
            got.dedup();
            prop_assert_eq!(
                got.len(),
                expected.len(),
                "no element may be selected twice"
            );
            return Ok(());
        }
        prop_assert_eq!(&got, &expected.iter().map(|e| e.0).collect::<Vec<_>>());
        if let Some(e) = plain.iter_mut().find(|e| Some(&e.0) == got.first()) {
            e.2 = sequence;
        }
        Ok(())
    }

    fn check_against_vector<B: BalanceScheme>(
        order: PolicyOrder,
        steps: &[Step],
    ) -> Result<(), TestCaseError> {
        let mut space = TreeSpace::<B>::new();
        space.add_pool(HANDLE, order);
        let mut plain: Vec<ModelElement> = Vec::new();
        for (sequence, step) in (0u64..).zip(steps) {
            match *step {
                Step::Register(id, load) => {
                    prop_assert!(space.register(&HANDLE, id, 1, load));
                    match plain.iter_mut().find(|e| e.0 == id) {
                        Some(e) => (e.1, e.2) = (load, sequence),
                        None => plain.push(ModelElement(id, load, sequence, None)),
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
                        known.expect("an element has that timer").3 = None;
                    }
                }
                Step::Resolve(items) => {
                    check_resolve(&mut space, order, &mut plain, items, sequence)?
                }
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
        fn both_trees_agree_with_vector_model(steps in prop::collection::vec(step(), 1..200)) {
            for order in [PolicyOrder::Sequence, PolicyOrder::Load, PolicyOrder::Weight] {
                check_against_vector::<RedBlack>(order, &steps)?;
                check_against_vector::<Treap>(order, &steps)?;
            }
        }
    }
}
