//! Queues of elements in arrays of thirteen places, one cache line each, doubly linked.
//!
//! With a linked list of elements, each selection would wait for the memory of the previous one, which holds the link
//! to the next. Here the slots of the next elements are known ahead, so their records are fetched in parallel. A queue
//! has at most as many lines as elements, however sparse they become; when elements leave at random, two lines of three
//! are saved.

use prefetch_index::prefetch_index;

/// Marks a missing block.
const NO_BLOCK: u32 = u32::MAX;

const BLOCK_ENTRIES: usize = 13;

/// A line of a queue: a ring of places. The first place is taken, later ones may be empty.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct QueueBlock {
    entries: [u32; BLOCK_ENTRIES],
    previous: u32,
    next: u32,
    /// Place of the first element.
    start: u16,
    /// Bitmap of taken places, counted from `start`.
    occupied: u16,
}

impl QueueBlock {
    /// Returns the place at this distance from the first element's.
    #[inline]
    fn index_at(&self, offset: usize) -> usize {
        let place = usize::from(self.start) + offset;
        if place < BLOCK_ENTRIES {
            place
        } else {
            place - BLOCK_ENTRIES
        }
    }

    /// Returns the number of places from the first element to the last.
    #[inline]
    fn span(&self) -> usize {
        (u16::BITS - self.occupied.leading_zeros()) as usize
    }

    /// Appends an element to a line that is not full; returns its place.
    #[inline]
    fn push(&mut self, slot: u32) -> usize {
        let span = self.span();
        let place = self.index_at(span);
        self.entries[place] = slot;
        self.occupied |= 1 << span;
        place
    }

    /// Advances `start` to the first taken place.
    #[inline]
    fn skip_free(&mut self) {
        let skipped = self.occupied.trailing_zeros();
        self.start = self.index_at(skipped as usize) as u16;
        self.occupied >>= skipped;
    }
}

/// The ends of a queue. An existing queue is not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockQueue {
    head: u32,
    tail: u32,
}

impl BlockQueue {
    /// Returns true if the queue has more than one block.
    #[inline]
    pub(super) fn has_several_blocks(self) -> bool {
        self.head != self.tail
    }
}

/// The blocks of all queues.
#[derive(Debug, Clone)]
pub(crate) struct QueueBlocks {
    blocks: Vec<QueueBlock>,
    free: Vec<u32>,
    /// Block to prefetch at the next selection, see [`prefetch_upcoming`](QueueBlocks::prefetch_upcoming).
    prefetch_block: u32,
}

/// Returns an element's position: the block's number and the place in the block.
#[inline]
fn pack_position(block: u32, place: usize) -> u32 {
    block << 4 | place as u32
}

impl QueueBlocks {
    pub(crate) fn new() -> QueueBlocks {
        QueueBlocks {
            blocks: Vec::new(),
            free: Vec::new(),
            prefetch_block: NO_BLOCK,
        }
    }

    /// Creates a queue with one element; returns the queue and the element's spot.
    pub(crate) fn start(&mut self, slot: u32) -> (BlockQueue, u32) {
        let block = self.allocate(slot, NO_BLOCK);
        let queue = BlockQueue {
            head: block,
            tail: block,
        };
        (queue, pack_position(block, 0))
    }

    /// Appends an element; returns its spot.
    #[inline]
    pub(crate) fn push(&mut self, queue: &mut BlockQueue, slot: u32) -> u32 {
        let tail = &mut self.blocks[queue.tail as usize];
        if tail.span() < BLOCK_ENTRIES {
            return pack_position(queue.tail, tail.push(slot));
        }
        let block = self.allocate(slot, queue.tail);
        self.blocks[queue.tail as usize].next = block;
        queue.tail = block;
        pack_position(block, 0)
    }

    /// Prefetches the line of a spot.
    #[inline]
    pub(crate) fn prefetch(&self, spot: u32) {
        prefetch_index(&self.blocks, (spot >> 4) as usize);
    }

    /// Prefetches the lines at both ends.
    #[inline]
    pub(crate) fn prefetch_ends(&self, queue: &BlockQueue) {
        prefetch_index(&self.blocks, queue.head as usize);
        prefetch_index(&self.blocks, queue.tail as usize);
    }

    /// Prefetches the last line.
    #[inline]
    pub(crate) fn prefetch_tail(&self, queue: &BlockQueue) {
        prefetch_index(&self.blocks, queue.tail as usize);
    }

    /// Removes an element from its queue; returns true if the queue still exists.
    #[inline]
    pub(crate) fn remove(&mut self, queue: &mut BlockQueue, spot: u32) -> bool {
        let number = spot >> 4;
        let block = &mut self.blocks[number as usize];
        let place = spot as usize & 15;
        let start = usize::from(block.start);
        let offset = if place < start {
            place + BLOCK_ENTRIES - start
        } else {
            place - start
        };
        block.occupied &= !(1 << offset);
        if block.occupied != 0 {
            block.skip_free();
            return true;
        }
        let (before, after) = (block.previous, block.next);
        if before == NO_BLOCK && after == NO_BLOCK {
            self.free.push(number);
            return false;
        }
        self.unlink(queue, number, before, after);
        true
    }

    /// Moves the head element to the end; returns its slot and its new spot.
    #[inline]
    pub(crate) fn rotate(&mut self, queue: &mut BlockQueue) -> (u32, u32) {
        let block = &mut self.blocks[queue.head as usize];
        let place = usize::from(block.start);
        let slot = block.entries[place];
        let (head, after) = (queue.head, block.next);
        block.occupied &= !1;
        if block.occupied != 0 {
            block.skip_free();
            if head == queue.tail {
                return (slot, pack_position(head, block.push(slot)));
            }
        } else if head == queue.tail {
            block.occupied = 1;
            return (slot, pack_position(head, place));
        } else {
            self.unlink(queue, head, NO_BLOCK, after);
        }
        (slot, self.push(queue, slot))
    }

    /// Passes the slots of the next line to select from to `fetch`, if a line has been used up, or the queue has
    /// changed, since the last call.
    #[inline]
    pub(crate) fn prefetch_upcoming(&mut self, mut fetch: impl FnMut(u32)) {
        if self.prefetch_block == NO_BLOCK {
            return;
        }
        let upcoming = std::mem::replace(&mut self.prefetch_block, NO_BLOCK);
        if let Some(block) = self.blocks.get(upcoming as usize) {
            prefetch_index(&self.blocks, block.next as usize);
            let mut live = block.occupied;
            while live != 0 {
                fetch(block.entries[block.index_at(live.trailing_zeros() as usize)]);
                live &= live - 1;
            }
        }
    }

    /// Prepares for selections from another queue.
    pub(crate) fn switch_to(&mut self, queue: BlockQueue) {
        // Prefetching for a short queue is not worthwhile: with many such pools, the next selection is from another
        // one.
        if queue.has_several_blocks() {
            prefetch_index(&self.blocks, queue.head as usize);
            self.prefetch_block = queue.head;
        }
    }

    /// Passes up to `items` elements from the head on to `show`. Returns the number of elements that were missing.
    #[inline]
    pub(crate) fn visit_first(
        &self,
        queue: BlockQueue,
        mut items: usize,
        mut show: impl FnMut(u32),
    ) -> usize {
        let mut number = queue.head;
        while let Some(block) = self.blocks.get(number as usize) {
            let mut live = block.occupied;
            while live != 0 {
                if items == 0 {
                    return 0;
                }
                let place = block.index_at(live.trailing_zeros() as usize);
                show(block.entries[place]);
                live &= live - 1;
                items -= 1;
            }
            number = block.next;
        }
        items
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<QueueBlock>() + self.free.capacity() * size_of::<u32>()
    }

    fn allocate(&mut self, slot: u32, before: u32) -> u32 {
        let mut places = [0; BLOCK_ENTRIES];
        places[0] = slot;
        let block = QueueBlock {
            entries: places,
            previous: before,
            next: NO_BLOCK,
            start: 0,
            occupied: 1,
        };
        if let Some(number) = self.free.pop() {
            self.blocks[number as usize] = block;
            return number;
        }
        let number = u32::try_from(self.blocks.len()).ok();
        let number = number.filter(|&number| number < NO_BLOCK >> 4);
        self.blocks.push(block);
        number.expect("the number of entries exceeds 32 bits")
    }

    fn unlink(&mut self, queue: &mut BlockQueue, number: u32, before: u32, after: u32) {
        match before {
            NO_BLOCK => {
                queue.head = after;
                self.prefetch_block = self.blocks[after as usize].next;
            }
            before => self.blocks[before as usize].next = after,
        }
        match after {
            NO_BLOCK => queue.tail = before,
            after => self.blocks[after as usize].previous = before,
        }
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_fits_one_cache_line() {
        assert_eq!(size_of::<QueueBlock>(), 64);
    }
}
