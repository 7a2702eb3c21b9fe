//! A pool's record.

use crate::checksum;
use crate::policy::Procedure;
use crate::selection::Selection;
use bytes::Bytes;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

/// A pool and its selection set.
#[derive(Debug, Clone)]
#[repr(align(64))]
pub(crate) struct Pool {
    pub(crate) hash: u64,
    /// The handle's length and first bytes: most handles need not be fetched to be compared.
    head: [u8; HEAD],
    handle_len: u32,
    pub(crate) handle: PoolHandle,
    pub(crate) selection: Selection,
    pub(crate) procedure: Procedure,
    pub(crate) kind: PolicyKind,
    pub(crate) class: u32,
    /// Elements.
    pub(crate) len: u32,
    /// What its handle adds to a checksum for each element.
    pub(crate) handle_block: u64,
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

const HEAD: usize = 20;

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
            handle_block: checksum::handle_block(&handle.0),
        }
    }

    /// Whether this is its handle.
    #[inline]
    pub(crate) fn is(&self, handle: &PoolHandle) -> bool {
        let len = handle.0.len();
        if self.handle_len as usize != len {
            return false;
        }
        match self.head.get(..len) {
            Some(head) => *head == handle.0[..],
            None => self.handle == *handle,
        }
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
