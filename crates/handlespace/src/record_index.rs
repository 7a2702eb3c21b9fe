//! A hash table from hashes to numbers of records, which are stored elsewhere.
//!
//! Open addressing with eight bytes per entry, in buckets of one cache line: a lookup reads one line here and then the
//! record, which tells if it is the right one. The whole line is compared at once, so no branch prediction determines
//! the length of the search. A table with separate control bytes would read one more line.

use prefetch_index::prefetch_index;

/// Maximum load, in eighths: half full on average, one lookup in a hundred continues past its own bucket.
const FULL_EIGHTHS: usize = 5;
const BUCKET_ENTRIES: usize = 8;
const BUCKETS_MIN: usize = 2;

/// Marks a free entry.
const FREE: u32 = u32::MAX;

/// The entries, packed from the first on: for each, the upper half of the hash and the record's number. An entry whose
/// own bucket is full is in one of the next buckets.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct IndexBucket {
    tags: [u32; BUCKET_ENTRIES],
    numbers: [u32; BUCKET_ENTRIES],
}

const EMPTY: IndexBucket = IndexBucket {
    tags: [0; BUCKET_ENTRIES],
    numbers: [FREE; BUCKET_ENTRIES],
};

/// Hash table that finds records by the hashes of their keys.
#[derive(Debug, Clone)]
pub(crate) struct RecordIndex {
    buckets: Vec<IndexBucket>,
    len: usize,
    /// The number by which a tag is shifted right to get its own bucket.
    shift: u32,
}

impl IndexBucket {
    #[inline]
    fn is_full(&self) -> bool {
        self.numbers[BUCKET_ENTRIES - 1] != FREE
    }

    fn used(&self) -> usize {
        self.numbers.iter().filter(|&&n| n != FREE).count()
    }

    /// Returns the number of the only entry with this tag; none unless exactly one matches. Computed from all entries
    /// without a branch or a second read that would depend on the position.
    #[inline]
    fn unique_match(&self, tag: u32) -> Option<u32> {
        let (mut alike, mut count) = (0, 0);
        for place in 0..BUCKET_ENTRIES {
            let mask = if self.tags[place] == tag { u32::MAX } else { 0 };
            alike |= self.numbers[place] & mask;
            count += mask & 1;
        }
        (count == 1).then_some(alike)
    }

    /// Removes an entry; the last one moves to its place.
    #[inline]
    fn remove(&mut self, entry: usize) {
        let last = self.used() - 1;
        self.tags[entry] = self.tags[last];
        self.numbers[entry] = self.numbers[last];
        self.tags[last] = 0;
        self.numbers[last] = FREE;
    }
}

impl RecordIndex {
    pub(crate) fn new() -> RecordIndex {
        RecordIndex {
            buckets: vec![EMPTY; BUCKETS_MIN],
            len: 0,
            shift: u32::BITS - BUCKETS_MIN.trailing_zeros(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns the record with this hash for which `is` returns true.
    #[inline]
    pub(crate) fn find(&self, hash: u64, is_match: impl Fn(u32) -> bool) -> Option<u32> {
        let tag = (hash >> 32) as u32;
        let bucket = &self.buckets[self.home_bucket(tag)];
        if let Some(number) = bucket.unique_match(tag)
            && number != FREE
            && is_match(number)
        {
            return Some(number);
        }
        let (bucket, place) = self.position(hash, is_match)?;
        Some(self.buckets[bucket].numbers[place])
    }

    /// Prefetches the bucket that [`find`](Self::find) reads first.
    #[inline]
    pub(crate) fn prefetch(&self, hash: u64) {
        prefetch_index(&self.buckets, self.home_bucket((hash >> 32) as u32));
    }

    /// Returns the record that most likely has this hash, if any.
    #[inline]
    pub(crate) fn guess(&self, hash: u64) -> Option<u32> {
        let tag = (hash >> 32) as u32;
        let number = self.buckets[self.home_bucket(tag)].unique_match(tag)?;
        (number != FREE).then_some(number)
    }

    /// Adds a record that is not in the table.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u64, number: u32) {
        if (self.len + 1) * 8 > self.buckets.len() * BUCKET_ENTRIES * FULL_EIGHTHS {
            self.grow();
        }
        self.insert_entry((hash >> 32) as u32, number);
        self.len += 1;
    }

    /// Removes the record with this hash and number, which must be in the table.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u64, number: u32) {
        let Some((bucket, place)) = self.position(hash, |other| other == number) else {
            unreachable!("the record is in the index");
        };
        let was_full = self.buckets[bucket].is_full();
        self.buckets[bucket].remove(place);
        self.len -= 1;
        if was_full {
            self.refill(bucket);
        }
    }

    /// Returns the bytes on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.buckets.capacity() * size_of::<IndexBucket>()
    }

    fn position(&self, hash: u64, is_match: impl Fn(u32) -> bool) -> Option<(usize, usize)> {
        let tag = (hash >> 32) as u32;
        let mut bucket = self.home_bucket(tag);
        loop {
            let entries = &self.buckets[bucket];
            for place in 0..BUCKET_ENTRIES {
                let number = entries.numbers[place];
                if number != FREE && entries.tags[place] == tag && is_match(number) {
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
    fn home_bucket(&self, tag: u32) -> usize {
        (tag >> self.shift) as usize
    }

    #[inline]
    fn insert_entry(&mut self, tag: u32, number: u32) {
        let mut bucket = self.home_bucket(tag);
        while self.buckets[bucket].is_full() {
            bucket = (bucket + 1) & (self.buckets.len() - 1);
        }
        let entries = &mut self.buckets[bucket];
        let place = entries.used();
        entries.tags[place] = tag;
        entries.numbers[place] = number;
    }

    /// Refills a bucket that is no longer full: a later entry that overflowed from it moves in, and so on along the
    /// chain.
    #[cold]
    fn refill(&mut self, mut free_bucket: usize) {
        let mask = self.buckets.len() - 1;
        let mut bucket = free_bucket;
        loop {
            bucket = (bucket + 1) & mask;
            let distance = bucket.wrapping_sub(free_bucket) & mask;
            let IndexBucket { tags, numbers } = self.buckets[bucket];
            let may_move = |&place: &usize| {
                let from = bucket.wrapping_sub(self.home_bucket(tags[place])) & mask;
                numbers[place] != FREE && from >= distance
            };
            let was_full = self.buckets[bucket].is_full();
            if let Some(place) = (0..BUCKET_ENTRIES).find(may_move) {
                let last = self.buckets[free_bucket].used();
                self.buckets[free_bucket].tags[last] = tags[place];
                self.buckets[free_bucket].numbers[last] = numbers[place];
                self.buckets[bucket].remove(place);
                free_bucket = bucket;
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
        assert!(self.shift > 0, "too many records: no hash bits are left");
        self.shift -= 1;
        for IndexBucket { tags, numbers } in old {
            for (tag, number) in tags.into_iter().zip(numbers) {
                if number != FREE {
                    self.insert_entry(tag, number);
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
        /// Compares the table with a map, using hashes that collide often and wrap at the end of the table.
        #[test]
        fn index_behaves_like_a_map(steps in prop::collection::vec((any::<bool>(), 0u32..60), 1..400)) {
            let hash = |number: u32| u64::from(number / 3).wrapping_neg() << 56 | 7 << 32;
            let mut index = RecordIndex::new();
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
