//! A pool's record.

use crate::checksum;
use crate::policy::Procedure;
use crate::selection::Selection;
use bytes::Bytes;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};
use prefetch_index::prefetch_index;
use std::ops::Range;

/// A pool and its selection set. In a small pool, operations touch the first four lines, some of them less; the handle's bytes
/// only where they are many.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(crate) struct Pool {
    begin: [u32; 0],
    /// The handle's first bytes: most handles need not be fetched to be compared.
    head: [u8; HEAD],
    pub(crate) hash: u64,
    /// Elements.
    pub(crate) len: u32,
    pub(crate) class: u32,
    pub(crate) kind: PolicyKind,
    /// The group of the element that came last.
    pub(crate) group: u32,
    /// What its handle adds to a checksum for each element.
    pub(crate) handle_block: u16,
    /// Of the handle: up to [`LONG`], which stands for more too.
    handle_len: u8,
    pub(crate) procedure: Procedure,
    pub(crate) selection: Selection,
    pub(crate) handle: PoolHandle,
}

/// A pool, as seen from outside.
#[derive(Debug, Clone, Copy)]
pub struct PoolRef<'a> {
    /// Its name.
    pub handle: &'a PoolHandle,
    /// The policy all its elements have.
    pub policy: PolicyKind,
    /// What else they have in common, as given at registration.
    pub class: u32,
    /// How many elements it has; at least one.
    pub elements: usize,
}

const HEAD: usize = 16;
const LONG: u8 = u8::MAX;

/// The line of a record that says what there is to know of a pool but for its elements.
pub(crate) const HEADER: Range<usize> = 0..1;
/// What is selected from the lowest key needs; the keys of a few in order, and the other parts of larger sets; all that
/// operations touch.
pub(crate) const CHOICE: Range<usize> = 0..2;
pub(crate) const KEYS: Range<usize> = 2..4;
pub(crate) const ALL: Range<usize> = 0..4;

impl Pool {
    /// A pool without elements. The handle's bytes are copied: it may be part of a message.
    pub(crate) fn new(handle: &PoolHandle, hash: u64, kind: PolicyKind, class: u32) -> Pool {
        let procedure = Procedure::of(kind);
        let mut head = [0; HEAD];
        for (to, from) in head.iter_mut().zip(&handle.0) {
            *to = *from;
        }
        Pool {
            begin: [],
            hash,
            head,
            handle_len: short_len(&handle.0),
            handle: PoolHandle(Bytes::copy_from_slice(&handle.0)),
            selection: Selection::new(kind),
            procedure,
            kind,
            class,
            len: 0,
            group: u32::MAX,
            handle_block: checksum::handle_block(&handle.0),
        }
    }

    /// Whether this is its handle.
    #[inline]
    pub(crate) fn is(&self, handle: &[u8]) -> bool {
        if self.handle_len != short_len(handle) {
            return false;
        }
        match self.head.get(..handle.len()) {
            Some(head) => alike(head, handle),
            None => self.handle.0 == handle,
        }
    }

    /// Whether its elements have no figure: registering again moves none.
    #[inline]
    pub(crate) fn is_alike(&self) -> bool {
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

/// Fetches lines of a pool's record.
#[inline]
pub(crate) fn fetch(pools: &[Pool], number: u32, lines: Range<usize>) {
    if let Some(pool) = pools.get(number as usize) {
        for line in lines {
            prefetch_index(pool.begin.as_slice(), line * 16);
        }
    }
}

#[inline]
fn short_len(handle: &[u8]) -> u8 {
    handle.len().min(LONG.into()) as u8
}

/// Whether two short slices of the same length are equal: most handles have eight to sixteen bytes, and a call costs more than
/// to compare these.
#[inline]
fn alike(a: &[u8], b: &[u8]) -> bool {
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

    /// Where each array of a few begins, by lines.
    #[test]
    fn what_is_fetched_is_in_the_lines_fetched() {
        assert_eq!(std::mem::offset_of!(Pool, selection) + 8, 56);
        assert_eq!(std::mem::offset_of!(Pool, handle), ALL.end * 64);
    }
}
