//! A pool's record.

use crate::checksum;
use crate::policy::Procedure;
use crate::selection::Selection;
use bytes::Bytes;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};
use prefetch_index::prefetch_index;

/// A pool and its selection set. Selections touch the first two lines, other operations the third too.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub(crate) struct Pool {
    handle_len: u32,
    /// Elements.
    pub(crate) len: u32,
    /// The handle's first bytes: most handles need not be fetched to be compared.
    head: [u8; HEAD],
    pub(crate) kind: PolicyKind,
    pub(crate) class: u32,
    pub(crate) selection: Selection,
    pub(crate) procedure: Procedure,
    /// The group of the element that came last.
    pub(crate) group: u32,
    pub(crate) hash: u64,
    /// What its handle adds to a checksum for each element.
    pub(crate) handle_block: u64,
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

impl Pool {
    /// A pool without elements. The handle's bytes are copied: it may be part of a message.
    pub(crate) fn new(handle: &PoolHandle, hash: u64, kind: PolicyKind, class: u32) -> Pool {
        let procedure = Procedure::of(kind);
        let mut head = [0; HEAD];
        for (to, from) in head.iter_mut().zip(&handle.0) {
            *to = *from;
        }
        Pool {
            hash,
            head,
            handle_len: handle.0.len() as u32,
            handle: PoolHandle(Bytes::copy_from_slice(&handle.0)),
            selection: Selection::new(procedure),
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
        if self.handle_len as usize != handle.len() {
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

/// Fetches so many lines of a pool's record.
#[inline]
pub(crate) fn fetch(pools: &[Pool], number: u32, lines: usize) {
    if let Some(pool) = pools.get(number as usize) {
        // The first field has four bytes.
        for line in 0..lines {
            prefetch_index(std::slice::from_ref(&pool.handle_len), line * 16);
        }
    }
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

    #[test]
    fn what_is_fetched_is_in_the_lines_fetched() {
        assert!(std::mem::offset_of!(Pool, procedure) < 2 * 64);
        assert!(std::mem::offset_of!(Pool, handle) <= 3 * 64);
    }
}
