//! A hash table from hashes to the numbers of records that lie elsewhere.
//!
//! Open addressing with linear probing, eight bytes an entry: a lookup touches one cache line here and then the
//! record, which says whether it is the one meant. A table that tells its control bytes from its entries touches one line more.

/// How full the table may be, in eighths. Half full on average, most lookups end in the first cache line.
const FULL_EIGHTHS: usize = 5;
const SMALLEST: usize = 16;

/// The table. An entry is the hash's upper 32 bits and the record's number plus one; 0 is free.
#[derive(Debug, Clone)]
pub(crate) struct Index {
    entries: Vec<u64>,
    len: usize,
    /// An entry's home is its hash's upper bits: this shift of them.
    shift: u32,
}

impl Index {
    pub(crate) fn new() -> Index {
        Index {
            entries: vec![0; SMALLEST],
            len: 0,
            shift: 64 - SMALLEST.trailing_zeros(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The record with this hash for which `is` holds.
    #[inline]
    pub(crate) fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        self.position(hash, is)
            .map(|position| record(self.entries[position]))
    }

    /// Adds a record that is not there yet.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u64, number: u32) {
        if (self.len + 1) * 8 > self.entries.len() * FULL_EIGHTHS {
            self.grow();
        }
        self.place((hash >> 32 << 32) | (u64::from(number) + 1));
        self.len += 1;
    }

    /// Removes the record with this hash and number, which is there.
    #[inline]
    pub(crate) fn remove(&mut self, hash: u64, number: u32) {
        let Some(mut hole) = self.position(hash, |other| other == number) else {
            unreachable!("the record is in the index");
        };
        // What comes after the hole moves into it, unless it would come before its home.
        let mask = self.entries.len() - 1;
        let mut next = (hole + 1) & mask;
        while self.entries[next] != 0 {
            let home = self.home(self.entries[next]);
            if (next.wrapping_sub(home) & mask) >= (next.wrapping_sub(hole) & mask) {
                self.entries[hole] = self.entries[next];
                hole = next;
            }
            next = (next + 1) & mask;
        }
        self.entries[hole] = 0;
        self.len -= 1;
    }

    /// Bytes on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<u64>()
    }

    #[inline]
    fn position(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<usize> {
        let mask = self.entries.len() - 1;
        let mut position = self.home(hash);
        loop {
            let entry = self.entries[position & mask];
            if entry == 0 {
                return None;
            }
            if entry >> 32 == hash >> 32 && is(record(entry)) {
                return Some(position & mask);
            }
            position += 1;
        }
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        (hash >> self.shift) as usize
    }

    fn place(&mut self, entry: u64) {
        let mask = self.entries.len() - 1;
        let mut position = self.home(entry);
        while self.entries[position] != 0 {
            position = (position + 1) & mask;
        }
        self.entries[position] = entry;
    }

    #[cold]
    fn grow(&mut self) {
        let doubled = vec![0; self.entries.len() * 2];
        let old = std::mem::replace(&mut self.entries, doubled);
        self.shift -= 1;
        assert!(self.shift >= 32, "more records than hashes can tell apart");
        for entry in old.into_iter().filter(|&entry| entry != 0) {
            self.place(entry);
        }
    }
}

#[inline]
fn record(entry: u64) -> u32 {
    (entry as u32).wrapping_sub(1)
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
