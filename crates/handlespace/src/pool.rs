//! A pool's record.

use crate::policy::Procedure;
use crate::selection::Selection;
use holdfast_wire::rserpool::{PolicyKind, PoolHandle};

/// A pool and its selection set.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    pub(crate) handle: PoolHandle,
    pub(crate) hash: u64,
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

impl Pool {
    pub(crate) fn view(&self) -> PoolRef<'_> {
        PoolRef {
            handle: &self.handle,
            policy: self.kind,
            class: self.class,
            elements: self.len as usize,
        }
    }
}
