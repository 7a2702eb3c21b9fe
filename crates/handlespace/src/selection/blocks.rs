//! Queues of elements in arrays of thirteen places, one cache line each, doubly linked.
//!
//! With a linked list of elements, each selection would wait for the memory of the previous one, which holds the link
//! to the next. Here the slots of the next elements are known ahead, so their records are fetched in parallel. A queue
//! has at most as many lines as elements, however sparse they become; when elements leave at random, two lines of three
//! are saved.

use prefetch_index::prefetch_index;

/// Marks a missing block.
const NONE: u32 = u32::MAX;

const PLACES: usize = 13;

/// A line of a queue: a ring of places. The first place is taken, later ones may be empty.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Block {
    places: [u32; PLACES],
    before: u32,
    after: u32,
    /// Place of the first element.
    start: u16,
    /// Bitmap of taken places, counted from `start`.
    live: u16,
}

impl Block {
    /// Returns the place at this distance from the first element's.
    #[inline]
    fn place(&self, behind: usize) -> usize {
        let place = usize::from(self.start) + behind;
        if place < PLACES {
            place
        } else {
            place - PLACES
        }
    }

    /// Returns the number of places from the first element to the last.
    #[inline]
    fn span(&self) -> usize {
        (u16::BITS - self.live.leading_zeros()) as usize
    }

    /// Appends an element to a line that is not full; returns its place.
    #[inline]
    fn push(&mut self, slot: u32) -> usize {
        let span = self.span();
        let place = self.place(span);
        self.places[place] = slot;
        self.live |= 1 << span;
        place
    }

    /// Advances `start` to the first taken place.
    #[inline]
    fn settle(&mut self) {
        let gone = self.live.trailing_zeros();
        self.start = self.place(gone as usize) as u16;
        self.live >>= gone;
    }
}

/// The ends of a queue. An existing queue is not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Queue {
    head: u32,
    tail: u32,
}

impl Queue {
    /// Returns true if the queue has more than one line.
    #[inline]
    pub(super) fn is_long(self) -> bool {
        self.head != self.tail
    }
}

/// The lines of all queues.
#[derive(Debug, Clone)]
pub(crate) struct Blocks {
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// Line to prefetch at the next selection, see [`upcoming`](Blocks::upcoming).
    upcoming: u32,
}

/// Returns an element's position: the block's number and the place in the block.
#[inline]
fn spot(block: u32, place: usize) -> u32 {
    block << 4 | place as u32
}

impl Blocks {
    pub(crate) fn new() -> Blocks {
        Blocks {
            blocks: Vec::new(),
            free: Vec::new(),
            upcoming: NONE,
        }
    }

    /// Creates a queue with one element; returns the queue and the element's spot.
    pub(crate) fn start(&mut self, slot: u32) -> (Queue, u32) {
        let block = self.allocate(slot, NONE);
        let queue = Queue {
            head: block,
            tail: block,
        };
        (queue, spot(block, 0))
    }

    /// Appends an element; returns its spot.
    #[inline]
    pub(crate) fn push(&mut self, queue: &mut Queue, slot: u32) -> u32 {
        let tail = &mut self.blocks[queue.tail as usize];
        if tail.span() < PLACES {
            return spot(queue.tail, tail.push(slot));
        }
        let block = self.allocate(slot, queue.tail);
        self.blocks[queue.tail as usize].after = block;
        queue.tail = block;
        spot(block, 0)
    }

    /// Prefetches the line of a spot.
    #[inline]
    pub(crate) fn fetch(&self, spot: u32) {
        prefetch_index(&self.blocks, (spot >> 4) as usize);
    }

    /// Prefetches the lines at both ends.
    #[inline]
    pub(crate) fn fetch_ends(&self, queue: &Queue) {
        prefetch_index(&self.blocks, queue.head as usize);
        prefetch_index(&self.blocks, queue.tail as usize);
    }

    /// Prefetches the last line.
    #[inline]
    pub(crate) fn fetch_tail(&self, queue: &Queue) {
        prefetch_index(&self.blocks, queue.tail as usize);
    }

    /// Removes an element from its queue; returns true if the queue still exists.
    #[inline]
    pub(crate) fn remove(&mut self, queue: &mut Queue, spot: u32) -> bool {
        let number = spot >> 4;
        let block = &mut self.blocks[number as usize];
        let place = spot as usize & 15;
        let start = usize::from(block.start);
        let behind = if place < start {
            place + PLACES - start
        } else {
            place - start
        };
        block.live &= !(1 << behind);
        if block.live != 0 {
            block.settle();
            return true;
        }
        let (before, after) = (block.before, block.after);
        if before == NONE && after == NONE {
            self.free.push(number);
            return false;
        }
        self.unlink(queue, number, before, after);
        true
    }

    /// Moves the head element to the end; returns its slot and its new spot.
    #[inline]
    pub(crate) fn rotate(&mut self, queue: &mut Queue) -> (u32, u32) {
        let block = &mut self.blocks[queue.head as usize];
        let place = usize::from(block.start);
        let slot = block.places[place];
        let (head, after) = (queue.head, block.after);
        block.live &= !1;
        if block.live != 0 {
            block.settle();
            if head == queue.tail {
                return (slot, spot(head, block.push(slot)));
            }
        } else if head == queue.tail {
            block.live = 1;
            return (slot, spot(head, place));
        } else {
            self.unlink(queue, head, NONE, after);
        }
        (slot, self.push(queue, slot))
    }

    /// Passes the slots of the next line to select from to `fetch`, if a line has been used up, or the queue has
    /// changed, since the last call.
    #[inline]
    pub(crate) fn upcoming(&mut self, mut fetch: impl FnMut(u32)) {
        if self.upcoming == NONE {
            return;
        }
        let upcoming = std::mem::replace(&mut self.upcoming, NONE);
        if let Some(block) = self.blocks.get(upcoming as usize) {
            prefetch_index(&self.blocks, block.after as usize);
            let mut live = block.live;
            while live != 0 {
                fetch(block.places[block.place(live.trailing_zeros() as usize)]);
                live &= live - 1;
            }
        }
    }

    /// Prepares for selections from another queue.
    pub(crate) fn turn_to(&mut self, queue: Queue) {
        // Prefetching for a short queue is not worthwhile: with many such pools, the next selection is from another
        // one.
        if queue.is_long() {
            prefetch_index(&self.blocks, queue.head as usize);
            self.upcoming = queue.head;
        }
    }

    /// Passes up to `items` elements from the head on to `show`. Returns the number of elements that were missing.
    #[inline]
    pub(crate) fn first_of(
        &self,
        queue: Queue,
        mut items: usize,
        mut show: impl FnMut(u32),
    ) -> usize {
        let mut number = queue.head;
        while let Some(block) = self.blocks.get(number as usize) {
            let mut live = block.live;
            while live != 0 {
                if items == 0 {
                    return 0;
                }
                let place = block.place(live.trailing_zeros() as usize);
                show(block.places[place]);
                live &= live - 1;
                items -= 1;
            }
            number = block.after;
        }
        items
    }

    pub(crate) fn heap_bytes(&self) -> usize {
        self.blocks.capacity() * size_of::<Block>() + self.free.capacity() * size_of::<u32>()
    }

    fn allocate(&mut self, slot: u32, before: u32) -> u32 {
        let mut places = [0; PLACES];
        places[0] = slot;
        let block = Block {
            places,
            before,
            after: NONE,
            start: 0,
            live: 1,
        };
        if let Some(number) = self.free.pop() {
            self.blocks[number as usize] = block;
            return number;
        }
        let number = u32::try_from(self.blocks.len()).ok();
        let number = number.filter(|&number| number < NONE >> 4);
        self.blocks.push(block);
        number.expect("more places than there are numbers for")
    }

    fn unlink(&mut self, queue: &mut Queue, number: u32, before: u32, after: u32) {
        match before {
            NONE => {
                queue.head = after;
                self.upcoming = self.blocks[after as usize].after;
            }
            before => self.blocks[before as usize].after = after,
        }
        match after {
            NONE => queue.tail = before,
            after => self.blocks[after as usize].before = before,
        }
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_one_cache_line() {
        assert_eq!(size_of::<Block>(), 64);
    }
}
