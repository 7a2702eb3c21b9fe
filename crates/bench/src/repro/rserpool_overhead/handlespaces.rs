//! The handlespaces compared in figures 6 and 7: one of red-black trees, one of treaps, and Holdfast's.

use std::hint::black_box;
use std::time::Duration;

use bytes::Bytes;
use holdfast_handlespace::{ElementCursor, Handlespace, RegistrationData, TimerKind};
use holdfast_wire::rserpool::{ElementId, Policy, PoolHandle, RegistrarId};

use crate::balanced_trees::BalanceScheme;
use crate::balanced_trees::tree_handlespace::{FixedPoolHandle, PolicyOrder, TreeSpace};

const POOL_NAME: &[u8] = b"the pool of figures 6 and 7";
const HOME_REGISTRAR: u32 = 1;

/// Classes of policies (paper 001 section 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyClass {
    /// Round robin: deterministic, not adaptive.
    RoundRobin,
    /// Least used: deterministic, adaptive.
    LeastUsed,
    /// Random.
    Random,
}

/// A handlespace with one pool.
pub trait MeasuredHandlespace {
    /// Creates the handlespace without elements.
    fn new(kind: PolicyClass) -> Self;
    /// Registers an element, or registers it again with this load.
    fn register(&mut self, id: u32, load: u32);
    /// Removes an element and its timer.
    fn deregister(&mut self, id: u32);
    /// Finds an element and sets its timer again.
    fn set_timer(&mut self, id: u32, at_us: u64);
    /// Lets the first timer, a keep-alive's, expire. Replaces it by the timeout of the answer, cancels the timeout as
    /// if the answer had arrived, and schedules the next keep-alive `later_us` after this one. Returns the time of this
    /// one.
    fn expire_keep_alive(&mut self, later_us: u64) -> u64;
    /// Selects elements; returns their number.
    fn resolve(&mut self, items: usize) -> usize;
    /// Walks through the elements of the registrar; returns their number.
    fn synchronize(&mut self) -> usize;
}

/// Time for an element's answer, microseconds.
const ANSWER_TIMEOUT_US: u64 = 5_000_000;

/// A handlespace of trees.
pub struct TreeHandlespace<B> {
    space: TreeSpace<B>,
    handle: FixedPoolHandle,
}

impl<B: BalanceScheme> MeasuredHandlespace for TreeHandlespace<B> {
    fn new(kind: PolicyClass) -> Self {
        let mut handle = FixedPoolHandle::default();
        handle[..POOL_NAME.len()].copy_from_slice(POOL_NAME);
        let mut space = TreeSpace::new();
        let order = match kind {
            PolicyClass::RoundRobin => PolicyOrder::Sequence,
            PolicyClass::LeastUsed => PolicyOrder::Load,
            PolicyClass::Random => PolicyOrder::Weight,
        };
        space.add_pool(handle, order);
        TreeHandlespace { space, handle }
    }

    fn register(&mut self, id: u32, load: u32) {
        assert!(self.space.register(&self.handle, id, HOME_REGISTRAR, load));
    }

    fn deregister(&mut self, id: u32) {
        assert!(self.space.deregister(&self.handle, id));
    }

    fn set_timer(&mut self, id: u32, at_us: u64) {
        assert!(self.space.set_timer(&self.handle, id, at_us));
    }

    fn expire_keep_alive(&mut self, later_us: u64) -> u64 {
        let Some((at_us, element)) = self.space.pop_timer() else {
            unreachable!("every element has a timer");
        };
        self.space
            .set_timer_of_slot(element, at_us + ANSWER_TIMEOUT_US);
        self.space.set_timer_of_slot(element, at_us + later_us);
        at_us
    }

    fn resolve(&mut self, items: usize) -> usize {
        let mut shown = 0;
        self.space.resolve(&self.handle, items, |id| {
            black_box(id);
            shown += 1;
        });
        shown
    }

    fn synchronize(&mut self) -> usize {
        let mut shown = 0;
        self.space.synchronize(HOME_REGISTRAR, |id| {
            black_box(id);
            shown += 1;
        });
        shown
    }
}

/// Holdfast's handlespace.
pub struct HoldfastHandlespace {
    space: Handlespace<()>,
    handle: PoolHandle,
    kind: PolicyClass,
}

impl MeasuredHandlespace for HoldfastHandlespace {
    fn new(kind: PolicyClass) -> Self {
        HoldfastHandlespace {
            space: Handlespace::new(1),
            handle: PoolHandle(Bytes::from_static(POOL_NAME)),
            kind,
        }
    }

    fn register(&mut self, id: u32, load: u32) {
        let registration = RegistrationData {
            handle: &self.handle,
            id: ElementId(id),
            home: RegistrarId(HOME_REGISTRAR),
            policy: match self.kind {
                PolicyClass::RoundRobin => Policy::RoundRobin,
                PolicyClass::LeastUsed => Policy::LeastUsed { load },
                PolicyClass::Random => Policy::Random,
            },
            class: 0,
            payload: (),
        };
        assert!(self.space.register(registration).is_ok());
    }

    fn deregister(&mut self, id: u32) {
        let removed = self.space.deregister(&self.handle, ElementId(id));
        assert!(removed.is_some());
    }

    fn set_timer(&mut self, id: u32, at_us: u64) {
        let key = self.space.find(&self.handle, ElementId(id));
        let at = Duration::from_micros(at_us);
        let set =
            key.is_some_and(|key| self.space.set_timer(key, TimerKind::RegistrationExpiry, at));
        assert!(set);
    }

    fn expire_keep_alive(&mut self, later_us: u64) -> u64 {
        let Some(expired) = self.space.pop_expired(Duration::MAX) else {
            unreachable!("every element has a timer");
        };
        let timeout = expired.at + Duration::from_micros(ANSWER_TIMEOUT_US);
        self.space
            .set_timer(expired.key, TimerKind::KeepAliveTimeout, timeout);
        let next = expired.at + Duration::from_micros(later_us);
        self.space
            .set_timer(expired.key, TimerKind::KeepAliveTransmission, next);
        expired.at.as_micros() as u64
    }

    fn resolve(&mut self, items: usize) -> usize {
        let resolved = self.space.resolve(&self.handle, items, |element| {
            black_box(element.id());
        });
        resolved.unwrap_or(0)
    }

    fn synchronize(&mut self) -> usize {
        let mut cursor = ElementCursor::owned_by(RegistrarId(HOME_REGISTRAR));
        self.space.next_block(&mut cursor, usize::MAX, |element| {
            black_box(element.id());
        })
    }
}
