//! A pool's record.

use crate::checksum;
use crate::policy::SelectionProcedure;
use crate::selection::SelectionSet;
use bytes::Bytes;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};
use prefetch_index::prefetch_index;
use std::ops::Range;

/// A pool and its selection set. In a small pool, operations use the first four cache lines or fewer; the handle's
/// bytes only if the handle is long.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(crate) struct PoolRecord {
    begin: [u32; 0],
    /// The handle's first bytes: most handles can be compared without reading their bytes elsewhere.
    head: [u8; HEAD_BYTES],
    pub(crate) hash: u64,
    /// Number of elements.
    pub(crate) len: u32,
    pub(crate) class: u32,
    pub(crate) kind: PolicyKind,
    /// The group of the element that registered last.
    pub(crate) group: u32,
    /// The handle's part in the checksum block of each element.
    pub(crate) handle_block: u16,
    /// Length of the handle in bytes; [`LONG_HANDLE`] stands for that length and more.
    handle_len: u8,
    pub(crate) procedure: SelectionProcedure,
    pub(crate) selection: SelectionSet,
    pub(crate) handle: PoolHandle,
}

/// Public view of a pool.
#[derive(Debug, Clone, Copy)]
pub struct PoolRef<'a> {
    /// The pool's handle.
    pub handle: &'a PoolHandle,
    /// The policy all its elements have.
    pub policy: PolicyKind,
    /// Class of the elements: further common properties, as given at registration.
    pub class: u32,
    /// Number of elements; at least one.
    pub elements: usize,
}

const HEAD_BYTES: usize = 16;
const LONG_HANDLE: u8 = u8::MAX;

/// The line of a record with all data of a pool except for its elements.
pub(crate) const HEADER_LINES: Range<usize> = 0..1;
/// The lines needed for a selection from the lowest key; for the keys of a small pool, or the other parts of a larger
/// set; and for all operations.
pub(crate) const SELECTION_LINES: Range<usize> = 0..2;
pub(crate) const KEY_LINES: Range<usize> = 2..4;
pub(crate) const ALL_LINES: Range<usize> = 0..4;

impl PoolRecord {
    /// Creates a pool without elements. The handle's bytes are copied, because they may be part of a message.
    pub(crate) fn new(handle: &PoolHandle, hash: u64, kind: PolicyKind, class: u32) -> PoolRecord {
        let procedure = SelectionProcedure::of(kind);
        let mut head = [0; HEAD_BYTES];
        for (to, from) in head.iter_mut().zip(&handle.0) {
            *to = *from;
        }
        PoolRecord {
            begin: [],
            hash,
            head,
            handle_len: short_len(&handle.0),
            handle: PoolHandle(Bytes::copy_from_slice(&handle.0)),
            selection: SelectionSet::new(kind),
            procedure,
            kind,
            class,
            len: 0,
            group: u32::MAX,
            handle_block: checksum::handle_block(&handle.0),
        }
    }

    /// Returns true if the pool has this handle.
    #[inline]
    pub(crate) fn has_handle(&self, handle: &[u8]) -> bool {
        if self.handle_len != short_len(handle) {
            return false;
        }
        match self.head.get(..handle.len()) {
            Some(head) => bytes_equal(head, handle),
            None => self.handle.0 == handle,
        }
    }

    /// Returns true if the policy has no figures: re-registration then moves no element.
    #[inline]
    pub(crate) fn has_no_figures(&self) -> bool {
        matches!(self.kind, PolicyKind::RoundRobin | PolicyKind::Random)
    }

    pub(crate) fn view(&self) -> PoolRef<'_> {
        PoolRef {
            handle: &self.handle,
            policy: self.kind,
            class: self.class,
            elements: self.len as usize,
        }
    }
}

/// Prefetches lines of a pool's record.
#[inline]
pub(crate) fn prefetch(pools: &[PoolRecord], number: u32, lines: Range<usize>) {
    if let Some(pool) = pools.get(number as usize) {
        for line in lines {
            prefetch_index(pool.begin.as_slice(), line * 16);
        }
    }
}

#[inline]
fn short_len(handle: &[u8]) -> u8 {
    handle.len().min(LONG_HANDLE.into()) as u8
}

/// Returns true if two slices of the same length are equal. Most handles have 8 to 16 bytes, and a call of `memcmp`
/// costs more than comparing these inline.
#[inline]
fn bytes_equal(a: &[u8], b: &[u8]) -> bool {
    if let (Some((a_first, _)), Some((b_first, _))) = (a.split_first_chunk(), b.split_first_chunk())
        && let (Some((_, a_last)), Some((_, b_last))) = (a.split_last_chunk(), b.split_last_chunk())
        && a.len() <= 16
    {
        let a = [u64::from_ne_bytes(*a_first), u64::from_ne_bytes(*a_last)];
        return a == [u64::from_ne_bytes(*b_first), u64::from_ne_bytes(*b_last)];
    }
    a == b
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Position of each array of a small selection set, in cache lines.
    #[test]
    fn prefetched_lines_contain_the_fields_read() {
        assert_eq!(std::mem::offset_of!(PoolRecord, selection) + 8, 56);
        assert_eq!(std::mem::offset_of!(PoolRecord, handle), ALL_LINES.end * 64);
    }
}
