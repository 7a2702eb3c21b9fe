//! A hierarchical timer wheel (Varghese and Lauck), in which an entry waits until its time is near.
//!
//! Four levels of 256 buckets cover a span of 2^32 us (71 minutes) that begins at a multiple of 2^32 us; later entries
//! are in one list per span. An entry is at the level of the highest byte in which its time differs from the time
//! reached. When its bucket's time is reached, the bucket is returned if it is small; otherwise its entries move to a
//! lower level. So an entry is moved two or three times, for any number of entries. All entries of a span share the
//! upper half of their times: the lower half and the slot form one 64-bit number, by which they are sorted.

use prefetch_index::prefetch_index;
use std::collections::BTreeMap;

const DIGIT_BITS: u32 = 8;
const BUCKETS: usize = 1 << DIGIT_BITS;
const LEVELS: usize = 4;
const SPAN_BITS: u32 = DIGIT_BITS * LEVELS as u32;
/// A bucket with at most this many entries is returned as a whole.
pub(super) const SMALL_BUCKET_MAX: usize = 256;
/// Several buckets are returned at once if they have at most this many entries together.
const COMBINED_BUCKETS_MAX: usize = 64;
const CHUNK_ENTRIES: usize = 15;
const NO_CHUNK: u32 = u32::MAX;

/// The lower half of the time, then the slot.
pub(super) type WheelEntry = u64;

/// Packs a time and a slot into an entry.
#[inline]
fn pack(time: u64, slot: u32) -> WheelEntry {
    time << 32 | u64::from(slot)
}

/// Returns the slot of an entry.
#[inline]
pub(super) fn slot_of(entry: WheelEntry) -> u32 {
    entry as u32
}

/// Two cache lines of a bucket's entries.
#[derive(Debug, Clone)]
#[repr(align(128))]
struct WheelChunk {
    entries: [WheelEntry; CHUNK_ENTRIES],
    /// The bucket's next chunk, which is full; or the next free chunk.
    next: u32,
    /// The chunk after `after`, for prefetching while this one is read.
    next_but_one: u32,
}

/// Unordered entries. All chunks but the first are full.
#[derive(Debug, Clone, Copy)]
struct WheelBucket {
    chunk: u32,
    len: u32,
}

const EMPTY: WheelBucket = WheelBucket {
    chunk: NO_CHUNK,
    len: 0,
};

/// The entries after the time reached.
#[derive(Debug, Clone)]
pub(super) struct Wheel {
    reached: u64,
    /// Bitmap of buckets with entries.
    occupied: [[u64; BUCKETS / 64]; LEVELS],
    /// The buckets, level by level.
    buckets: Vec<WheelBucket>,
    chunks: Vec<WheelChunk>,
    free_chunk: u32,
    /// Entries of later spans, by the upper half of their times.
    overflow: BTreeMap<u32, Vec<WheelEntry>>,
}

impl Wheel {
    pub(super) fn new() -> Wheel {
        Wheel {
            reached: 0,
            occupied: [[0; BUCKETS / 64]; LEVELS],
            buckets: vec![EMPTY; LEVELS * BUCKETS],
            chunks: Vec::new(),
            free_chunk: NO_CHUNK,
            overflow: BTreeMap::new(),
        }
    }

    /// Returns the time up to which all entries have been taken.
    #[inline]
    pub(super) fn reached(&self) -> u64 {
        self.reached
    }

    /// Returns to an earlier time within the entries last taken; the caller must push the later ones again.
    pub(super) fn rewind(&mut self, to: u64) {
        debug_assert!(to >> SPAN_BITS == self.reached >> SPAN_BITS && to <= self.reached);
        self.reached = to;
    }

    /// Returns an entry for a time in the current span.
    #[inline]
    pub(super) fn entry(&self, time: u64, slot: u32) -> WheelEntry {
        debug_assert_eq!(time >> SPAN_BITS, self.reached >> SPAN_BITS);
        pack(time, slot)
    }

    /// Returns the time of an entry that was taken.
    #[inline]
    pub(super) fn time(&self, entry: WheelEntry) -> u64 {
        self.reached >> SPAN_BITS << SPAN_BITS | entry >> 32
    }

    /// Adds an entry for a time after the time reached.
    #[inline]
    pub(super) fn push(&mut self, time: u64, slot: u32) {
        let differs = time ^ self.reached;
        let entry = pack(time, slot);
        if differs >> SPAN_BITS == 0 {
            self.insert(entry, differs as u32);
        } else {
            let upper = (time >> SPAN_BITS) as u32;
            self.overflow.entry(upper).or_default().push(entry);
        }
    }

    /// Returns the start time of the first nonempty bucket.
    pub(super) fn next(&self) -> Option<u64> {
        self.first_bucket().map(|(_, start)| start)
    }

    /// Takes the earliest entries, unless they are after `now`, and advances the time reached past them. Returns the
    /// time at which they start; none if there are none.
    pub(super) fn take(&mut self, now: u64, due: &mut Vec<WheelEntry>) -> Option<u64> {
        loop {
            let (first, start) = self.first_bucket().filter(|&(_, start)| start <= now)?;
            let Some(bucket) = first else {
                self.reached = start;
                let (_, span) = self.overflow.pop_first()?;
                for entry in span {
                    self.cascade(entry, due);
                }
                if due.is_empty() {
                    continue;
                }
                return Some(start);
            };
            let level = bucket / BUCKETS;
            if level == 0 || self.buckets[bucket].len as usize <= SMALL_BUCKET_MAX {
                self.take_bucket(bucket, start, due);
                self.take_neighbours(level, now, due);
                return Some(start);
            }
            self.reached = start;
            let WheelBucket { chunk, len } = self.clear_bucket(bucket);
            self.drain_chunks(chunk, len, |wheel, entries| {
                for &entry in entries {
                    wheel.cascade(entry, due);
                }
            });
            if !due.is_empty() {
                return Some(start);
            }
        }
    }

    /// Takes all entries of a bucket, which covers all lower levels.
    fn take_bucket(&mut self, bucket: usize, start: u64, due: &mut Vec<WheelEntry>) {
        let level = (bucket / BUCKETS) as u32;
        self.reached = start | ((1 << (DIGIT_BITS * level)) - 1);
        let WheelBucket { chunk, len } = self.clear_bucket(bucket);
        self.drain_chunks(chunk, len, |_, entries| due.extend_from_slice(entries));
    }

    /// Takes the next buckets of a level too, as long as the total is small: a call for each costs more than sorting
    /// more entries.
    fn take_neighbours(&mut self, level: usize, now: u64, due: &mut Vec<WheelEntry>) {
        while let Some((Some(bucket), start)) = self.first_bucket()
            && bucket / BUCKETS == level
            && start <= now
            && due.len() + self.buckets[bucket].len as usize <= COMBINED_BUCKETS_MAX
        {
            self.take_bucket(bucket, start, due);
        }
    }

    /// Keeps the entries for which `valid` returns true. Returns their number.
    pub(super) fn retain(&mut self, valid: impl Fn(u64, u32) -> bool) -> usize {
        let span = self.reached >> SPAN_BITS << SPAN_BITS;
        let mut left = 0;
        let mut entries = Vec::new();
        for number in 0..self.buckets.len() {
            let WheelBucket { chunk, len } = self.clear_bucket(number);
            entries.clear();
            self.drain_chunks(chunk, len, |_, some| entries.extend_from_slice(some));
            entries.retain(|&entry| valid(span | entry >> 32, slot_of(entry)));
            for &entry in &entries {
                self.add_to_bucket(number, entry);
            }
            left += entries.len();
        }
        for (&upper, entries) in &mut self.overflow {
            let span = u64::from(upper) << SPAN_BITS;
            entries.retain(|&entry| valid(span | entry >> 32, slot_of(entry)));
            left += entries.len();
        }
        self.overflow.retain(|_, entries| !entries.is_empty());
        left
    }

    pub(super) fn heap_bytes(&self) -> usize {
        let later: usize = self.overflow.values().map(Vec::capacity).sum();
        self.buckets.capacity() * size_of::<WheelBucket>()
            + self.chunks.capacity() * size_of::<WheelChunk>()
            + later * size_of::<WheelEntry>()
    }

    /// Returns the first nonempty bucket, none if it is a later span; and its start time. Buckets of a lower level are
    /// earlier.
    #[inline]
    fn first_bucket(&self) -> Option<(Option<usize>, u64)> {
        for (level, words) in self.occupied.iter().enumerate() {
            let Some(word) = words.iter().position(|&word| word != 0) else {
                continue;
            };
            let bucket = word * 64 + words[word].trailing_zeros() as usize;
            let shift = DIGIT_BITS * level as u32;
            let above = self.reached >> (shift + DIGIT_BITS) << DIGIT_BITS;
            let start = (above | bucket as u64) << shift;
            return Some((Some(level * BUCKETS + bucket), start));
        }
        let (&upper, _) = self.overflow.first_key_value()?;
        Some((None, u64::from(upper) << SPAN_BITS))
    }

    /// Moves an entry of a bucket with a start time that has been reached.
    #[inline]
    fn cascade(&mut self, entry: WheelEntry, due: &mut Vec<WheelEntry>) {
        match (entry >> 32) as u32 ^ self.reached as u32 {
            0 => due.push(entry),
            differs => self.insert(entry, differs),
        }
    }

    #[inline]
    fn insert(&mut self, entry: WheelEntry, differs: u32) {
        let level = (31 - differs.leading_zeros()) / DIGIT_BITS;
        let bucket = (entry >> (32 + DIGIT_BITS * level)) as usize % BUCKETS;
        self.add_to_bucket(level as usize * BUCKETS + bucket, entry);
    }

    #[inline]
    fn add_to_bucket(&mut self, number: usize, entry: WheelEntry) {
        let WheelBucket { mut chunk, len } = self.buckets[number];
        let place = len as usize % CHUNK_ENTRIES;
        if place == 0 {
            chunk = self.allocate(chunk);
            let bucket = number % BUCKETS;
            self.occupied[number / BUCKETS][bucket / 64] |= 1 << (bucket % 64);
        }
        self.chunks[chunk as usize].entries[place] = entry;
        let len = len + 1;
        self.buckets[number] = WheelBucket { chunk, len };
    }

    fn clear_bucket(&mut self, number: usize) -> WheelBucket {
        let bucket = number % BUCKETS;
        self.occupied[number / BUCKETS][bucket / 64] &= !(1 << (bucket % 64));
        std::mem::replace(&mut self.buckets[number], EMPTY)
    }

    /// Frees the chunks of a bucket and passes their entries to `take`. The chunk read last is reused first, because it
    /// is in a cache.
    #[inline]
    fn drain_chunks(
        &mut self,
        mut chunk: u32,
        len: u32,
        mut take: impl FnMut(&mut Wheel, &[WheelEntry]),
    ) {
        let mut places = match len as usize % CHUNK_ENTRIES {
            0 => CHUNK_ENTRIES,
            rest => rest,
        };
        while chunk != NO_CHUNK {
            let WheelChunk {
                entries,
                next: after,
                next_but_one: beyond,
            } = self.chunks[chunk as usize].clone();
            self.prefetch(beyond);
            self.chunks[chunk as usize].next = self.free_chunk;
            self.free_chunk = chunk;
            take(self, &entries[..places]);
            places = CHUNK_ENTRIES;
            chunk = after;
        }
    }

    /// Prefetches both lines of a chunk.
    #[inline]
    fn prefetch(&self, chunk: u32) {
        if let Some(chunk) = self.chunks.get(chunk as usize) {
            prefetch_index(chunk.entries.as_slice(), 0);
            prefetch_index(chunk.entries.as_slice(), 8);
        }
    }

    fn allocate(&mut self, after: u32) -> u32 {
        let beyond = self.chunks.get(after as usize);
        let beyond = beyond.map_or(NO_CHUNK, |chunk| chunk.next);
        if let Some(chunk) = self.chunks.get_mut(self.free_chunk as usize) {
            let number = self.free_chunk;
            self.free_chunk = chunk.next;
            (chunk.next, chunk.next_but_one) = (after, beyond);
            return number;
        }
        let number = u32::try_from(self.chunks.len()).ok();
        let number = number.filter(|&number| number < NO_CHUNK);
        self.chunks.push(WheelChunk {
            entries: [0; CHUNK_ENTRIES],
            next: after,
            next_but_one: beyond,
        });
        number.expect("the number of timers exceeds 32 bits")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_fits_two_cache_lines() {
        assert_eq!(size_of::<WheelChunk>(), 128);
    }
}
