//! Places in queues: arrays of thirteen, one cache line each, linked both ways.
//!
//! A linked list of elements would make each selection wait for the memory of the one before, which says where the next
//! one is. Here the places of the next elements are read ahead, so their records are fetched at the same time. A queue
//! has no more lines than elements, however sparse they become; as elements leave at random, two of three lines are saved.

/// No block.
pub(crate) const NONE: u32 = u32::MAX;

const PLACES: usize = 13;
/// How far ahead elements are fetched: what a fetch from memory takes, in selections.
const AHEAD: usize = 8;

/// A line of a queue, in order. The places before `used` have been taken, those in `live` still are.
#[derive(Debug, Clone)]
#[repr(align(64))]
struct Block {
    places: [u32; PLACES],
    before: u32,
    after: u32,
    used: u16,
    live: u16,
}

/// The ends of a queue. A queue that exists is not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Queue {
    head: u32,
    tail: u32,
}

/// The lines of all queues.
#[derive(Debug, Clone, Default)]
pub(crate) struct Blocks {
    blocks: Vec<Block>,
    free: Vec<u32>,
}

/// Where an element stands: the block's number and the place in it.
fn spot(block: u32, place: u32) -> u32 {
    block << 4 | place
}

impl Blocks {
    /// A queue of one; returns it and the element's spot.
    pub(crate) fn start(&mut self, slot: u32) -> (Queue, u32) {
        let block = self.allocate(slot, NONE);
        let queue = Queue {
            head: block,
            tail: block,
        };
        (queue, spot(block, 0))
    }

    /// Puts an element at the end; returns its spot.
    #[inline]
    pub(crate) fn push(&mut self, queue: &mut Queue, slot: u32) -> u32 {
        let tail = &mut self.blocks[queue.tail as usize];
        if usize::from(tail.used) < PLACES {
            let place = tail.used;
            tail.places[usize::from(place)] = slot;
            tail.live |= 1 << place;
            tail.used += 1;
            return spot(queue.tail, u32::from(place));
        }
        let block = self.allocate(slot, queue.tail);
        self.blocks[queue.tail as usize].after = block;
        queue.tail = block;
        spot(block, 0)
    }

    /// Takes an element out of the queue it stands in; whether the queue still exists.
    #[inline]
    pub(crate) fn remove(&mut self, queue: &mut Queue, spot: u32) -> bool {
        let number = spot >> 4;
        let block = &mut self.blocks[number as usize];
        block.live &= !(1 << (spot & 15));
        if block.live != 0 {
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

    /// The element at the head, and its spot.
    #[inline]
    pub(crate) fn first(&self, queue: Queue) -> (u32, u32) {
        let block = &self.blocks[queue.head as usize];
        let place = block.live.trailing_zeros();
        (block.places[place as usize], spot(queue.head, place))
    }

    /// Moves the element at the head to the end; returns its slot and its new spot.
    #[inline]
    pub(crate) fn rotate(&mut self, queue: &mut Queue) -> (u32, u32) {
        let (slot, old) = self.first(*queue);
        let new = self.push(queue, slot);
        let exists = self.remove(queue, old);
        debug_assert!(exists, "it has just grown");
        (slot, new)
    }

    /// The slot of an element some places behind the head, if there still is one: what to fetch in good time.
    #[inline]
    pub(crate) fn ahead(&self, queue: Queue) -> u32 {
        let head = &self.blocks[queue.head as usize];
        let place = head.live.trailing_zeros() as usize + AHEAD;
        match self.blocks.get(head.after as usize) {
            Some(after) if place >= PLACES => after.places[(place - PLACES) % PLACES],
            _ => head.places[place % PLACES],
        }
    }

    /// Shows up to `items` elements from the head on. Returns how many of these there were not.
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
                show(block.places[live.trailing_zeros() as usize]);
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
            used: 1,
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
            NONE => queue.head = after,
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
