//! Elements in a policy's sorting order: a queue for each key, with the queue of the lowest key at hand.

use super::key_queues::KeyQueues;
use super::queue_blocks::{BlockQueue, QueueBlocks};

/// The queues of a pool, by key.
#[derive(Debug, Clone, Default)]
#[repr(C)]
pub(crate) struct OrderedSet {
    /// The queue of the lowest key: selections take from it, and it is the only one if all keys are the same.
    front: Option<(u64, BlockQueue)>,
    /// The queues of all other keys.
    others: KeyQueues,
}

impl OrderedSet {
    /// Returns the lowest key, 0 if there is no element.
    pub(crate) fn lowest(&self) -> u64 {
        self.front.map_or(0, |(key, _)| key)
    }

    /// Inserts an element after all elements with keys up to its own; returns its spot.
    #[inline]
    pub(crate) fn insert(&mut self, blocks: &mut QueueBlocks, key: u64, slot: u32) -> u32 {
        match &mut self.front {
            Some((front, queue)) if *front == key => blocks.push(queue, slot),
            Some((front, queue)) if *front > key => {
                self.others.insert(*front, *queue);
                let (queue, spot) = blocks.start(slot);
                self.front = Some((key, queue));
                spot
            }
            Some(_) => self.others.push(blocks, key, slot),
            None => {
                let (queue, spot) = blocks.start(slot);
                self.front = Some((key, queue));
                spot
            }
        }
    }

    /// Removes the element at `spot`, which has this key.
    #[inline]
    pub(crate) fn remove(&mut self, blocks: &mut QueueBlocks, key: u64, spot: u32) {
        match &mut self.front {
            Some((front, queue)) if *front == key => {
                if !blocks.remove(queue, spot) {
                    self.front = self.others.pop_first();
                    if let Some((_, queue)) = self.front {
                        blocks.switch_to(queue);
                    }
                }
            }
            _ => self.others.remove(blocks, key, spot),
        }
    }

    /// Returns true if the lowest key's queue probably has many elements.
    #[inline]
    pub(crate) fn is_first_queue_long(&self) -> bool {
        self.front
            .is_some_and(|(_, queue)| queue.has_several_blocks())
    }

    /// Prefetches the ends of the lowest key's queue.
    #[inline]
    pub(crate) fn prefetch_front(&self, blocks: &QueueBlocks) {
        if let Some((_, queue)) = &self.front {
            blocks.prefetch_ends(queue);
        }
    }

    /// Prefetches the ends of the lowest key's queue, and the array of the other queues.
    #[inline]
    pub(crate) fn prefetch(&self, blocks: &QueueBlocks) {
        self.prefetch_front(blocks);
        self.others.prefetch();
    }

    /// Prefetches the ends of up to `items` queues after the first one.
    #[inline]
    pub(crate) fn prefetch_next(&self, blocks: &QueueBlocks, mut items: usize) {
        self.others.visit(|queue| {
            items = items.saturating_sub(1);
            if items > 0 {
                blocks.prefetch_ends(&queue);
            }
            items > 0
        });
    }

    /// Prefetches the ends of all queues, if they are few.
    #[inline]
    pub(crate) fn prefetch_tails(&self, blocks: &QueueBlocks) {
        self.others
            .array()
            .iter()
            .for_each(|(_, queue)| blocks.prefetch_tail(queue));
    }

    /// Moves the first element after the others with the same key; returns its slot and its new spot.
    #[inline]
    pub(crate) fn rotate(&mut self, blocks: &mut QueueBlocks) -> Option<(u32, u32)> {
        let (_, queue) = self.front.as_mut()?;
        Some(blocks.rotate(queue))
    }

    /// Passes the first elements, up to `items` in order, to `show`. Returns their number.
    #[inline]
    pub(crate) fn visit_first(
        &self,
        blocks: &QueueBlocks,
        items: usize,
        mut show: impl FnMut(u32),
    ) -> usize {
        let Some((_, front)) = self.front else {
            return 0;
        };
        let mut left = blocks.visit_first(front, items, &mut show);
        if left > 0 {
            self.others.visit(|queue| {
                left = blocks.visit_first(queue, left, &mut show);
                left > 0
            });
        }
        items - left
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.others.heap_bytes()
    }
}
