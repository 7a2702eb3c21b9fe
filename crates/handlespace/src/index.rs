//! A hash table from hashes to the numbers of records that lie elsewhere.
//!
//! Open addressing with eight bytes an entry, by buckets of one cache line: a lookup touches one line here and then the record, which
//! says whether it is the one meant. All of a line is compared at once, so nothing waits for a guess at how far to
//! look. A table that tells its control bytes from its entries touches one line more.

use prefetch_index::prefetch_index;

/// How full the table may be, in eighths: half full on average, one lookup in a hundred goes beyond its bucket.
const FULL_EIGHTHS: usize = 5;
const ENTRIES: usize = 8;
const SMALLEST: usize = 2;

/// No record.
const FREE: u32 = u32::MAX;

/// Entries, without gaps from the first one on: of each the hash's upper half, and the record's number. Who finds its own
/// bucket full is in one of the next.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Bucket {
    tags: [u32; ENTRIES],
    numbers: [u32; ENTRIES],
}

const EMPTY: Bucket = Bucket {
    tags: [0; ENTRIES],
    numbers: [FREE; ENTRIES],
};

/// The table.
#[derive(Debug, Clone)]
pub(crate) struct Index {
    buckets: Vec<Bucket>,
    len: usize,
    /// An entry's own bucket is its tag's upper bits: this shift of them.
    shift: u32,
}

impl Bucket {
    #[inline]
    fn is_full(&self) -> bool {
        self.numbers[ENTRIES - 1] != FREE
    }

    fn used(&self) -> usize {
        self.numbers.iter().filter(|&&n| n != FREE).count()
    }

    /// The number of the one entry with this tag, if it is one. It is put together of all, without a branch or a second
    /// read that would wait for where it is.
    #[inline]
    fn only(&self, tag: u32) -> Option<u32> {
        let (mut alike, mut count) = (0, 0);
        for place in 0..ENTRIES {
            let mask = if self.tags[place] == tag { u32::MAX } else { 0 };
            alike |= self.numbers[place] & mask;
            count += mask & 1;
        }
        (count == 1).then_some(alike)
    }

    /// Takes an entry out; the last one gets its place.
    #[inline]
    fn take(&mut self, place: usize) {
        let last = self.used() - 1;
        self.tags[place] = self.tags[last];
        self.numbers[place] = self.numbers[last];
        self.tags[last] = 0;
        self.numbers[last] = FREE;
    }
}

impl Index {
    pub(crate) fn new() -> Index {
        Index {
            buckets: vec![EMPTY; SMALLEST],
            len: 0,
            shift: u32::BITS - SMALLEST.trailing_zeros(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The record with this hash for which `is` holds.
    #[inline]
    pub(crate) fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = (hash >> 32) as u32;
        let bucket = &self.buckets[self.home(tag)];
        if let Some(number) = bucket.only(tag)
            && number != FREE
            && is(number)
        {
            return Some(number);
        }
        let (bucket, place) = self.position(hash, is)?;
        Some(self.buckets[bucket].numbers[place])
    }

    /// Fetches what [`find`](Self::find) will look at.
    #[inline]
    pub(crate) fn fetch(&self, hash: u64) {
        prefetch_index(&self.buckets, self.home((hash >> 32) as u32));
    }

    /// The record that most likely has this hash, if there is one.
    #[inline]
    pub(crate) fn guess(&self, hash: u64) -> Option<u32> {
        let tag = (hash >> 32) as u32;
        let number = self.buckets[self.home(tag)].only(tag)?;
        (number != FREE).then_some(number)
    }

    /// Adds a record that is not there yet.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u64, number: u32) {
        if (self.len + 1) * 8 > self.buckets.len() * ENTRIES * FULL_EIGHTHS {
            self.grow();
        }
        self.place((hash >> 32) as u32, number);
        self.len += 1;
    }

    /// Removes the record with this hash and number, which is there.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u64, number: u32) {
        let Some((bucket, place)) = self.position(hash, |other| other == number) else {
            unreachable!("the record is in the index");
        };
        let was_full = self.buckets[bucket].is_full();
        self.buckets[bucket].take(place);
        self.len -= 1;
        if was_full {
            self.bring_back(bucket);
        }
    }

    /// Bytes on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<Bucket>()
    }

    fn position(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<(usize, usize)> {
        let tag = (hash >> 32) as u32;
        let mut bucket = self.home(tag);
        loop {
            let entries = &self.buckets[bucket];
            for place in 0..ENTRIES {
                let number = entries.numbers[place];
                if number != FREE && entries.tags[place] == tag && is(number) {
                    return Some((bucket, place));
                }
            }
            if !entries.is_full() {
                return None;
            }
            bucket = (bucket + 1) & (self.buckets.len() - 1);
        }
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        (tag >> self.shift) as usize
    }

    #[inline]
    fn place(&mut self, tag: u32, number: u32) {
        let mut bucket = self.home(tag);
        while self.buckets[bucket].is_full() {
            bucket = (bucket + 1) & (self.buckets.len() - 1);
        }
        let entries = &mut self.buckets[bucket];
        let place = entries.used();
        entries.tags[place] = tag;
        entries.numbers[place] = number;
    }

    /// A bucket that was full has room: an entry behind it that found it full moves in, and so on.
    #[cold]
    fn bring_back(&mut self, mut room: usize) {
        let mask = self.buckets.len() - 1;
        let mut bucket = room;
        loop {
            bucket = (bucket + 1) & mask;
            let distance = bucket.wrapping_sub(room) & mask;
            let Bucket { tags, numbers } = self.buckets[bucket];
            let passed = |&place: &usize| {
                let from = bucket.wrapping_sub(self.home(tags[place])) & mask;
                numbers[place] != FREE && from >= distance
            };
            let was_full = self.buckets[bucket].is_full();
            if let Some(place) = (0..ENTRIES).find(passed) {
                let last = self.buckets[room].used();
                self.buckets[room].tags[last] = tags[place];
                self.buckets[room].numbers[last] = numbers[place];
                self.buckets[bucket].take(place);
                room = bucket;
            }
            if !was_full {
                return;
            }
        }
    }

    #[cold]
    fn grow(&mut self) {
        let doubled = vec![EMPTY; self.buckets.len() * 2];
        let old = std::mem::replace(&mut self.buckets, doubled);
        assert!(self.shift > 0, "more records than hashes can tell apart");
        self.shift -= 1;
        for Bucket { tags, numbers } in old {
            for (tag, number) in tags.into_iter().zip(numbers) {
                if number != FREE {
                    self.place(tag, number);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Against a map, with hashes that collide often and wrap at the end of the table.
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((any::<bool>(), 0u32..60), 1..400)) {
            let hash = |number: u32| u64::from(number / 3).wrapping_neg() << 56 | 7 << 32;
            let mut index = Index::new();
            let mut model = HashMap::new();
            for (insert, number) in steps {
                match (insert, model.contains_key(&number)) {
                    (true, false) => {
                        index.insert(hash(number), number);
                        model.insert(number, ());
                    }
                    (false, true) => {
                        index.remove(hash(number), number);
                        model.remove(&number);
                    }
                    _ => {}
                }
                prop_assert_eq!(index.len(), model.len());
                for number in 0..60 {
                    let found = index.find(hash(number), |other| other == number);
                    prop_assert_eq!(found, model.contains_key(&number).then_some(number));
                }
            }
        }
    }
}
