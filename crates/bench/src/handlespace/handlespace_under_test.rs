//! The operations on this project's handlespace, as a registrar uses it.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use holdfast_handlespace::{
    AnnouncedOperation, ElementCursor, Handlespace, RegistrationData, TimerKind,
};
use holdfast_wire::rserpool::{ElementId, Policy, PoolHandle, RegistrarId};

use super::workload::WorkloadElement;

const HOME_REGISTRAR: RegistrarId = RegistrarId(1);
/// Elements per block of a synchronisation, as in rsplib.
const SYNCHRONIZE_BLOCK: usize = 1024;

/// A registrar's data of an element: its address and its association.
#[derive(Debug, Clone, Copy)]
struct ElementContact {
    address: SocketAddr,
    association: u32,
}

/// Element that an operation concerns. The input owns its handle, as a message from the network does.
#[derive(Debug, Clone)]
pub struct OperationInput {
    handle: PoolHandle,
    id: ElementId,
    policy: Policy,
}

/// A handlespace and the handles of its pools.
#[derive(Debug)]
pub struct HandlespaceUnderTest {
    space: Handlespace<ElementContact>,
    names: Vec<[u8; NAME_BYTES]>,
}

const NAME_BYTES: usize = "pool 000000".len();

impl OperationInput {
    /// Returns the announcement of an operation of this kind.
    #[inline]
    pub fn announcement<'a>(
        &'a self,
        kind: fn(&'a [u8], ElementId) -> AnnouncedOperation<'a>,
    ) -> AnnouncedOperation<'a> {
        kind(&self.handle.0, self.id)
    }
}

impl HandlespaceUnderTest {
    /// Creates an empty handlespace.
    pub fn new(pools: u32) -> HandlespaceUnderTest {
        let name = |pool: u32| {
            let mut name = [0; NAME_BYTES];
            name.copy_from_slice(format!("pool {pool:06}").as_bytes());
            name
        };
        HandlespaceUnderTest {
            space: Handlespace::new(1),
            names: (0..pools).map(name).collect(),
        }
    }

    /// Returns inputs of operations on these elements, contiguous in memory.
    pub fn inputs(&self, batch: &[(WorkloadElement, Policy)]) -> Vec<OperationInput> {
        let handles = self.handles(batch.iter().map(|(member, _)| member.pool));
        let input = |(handle, &(member, policy)): (PoolHandle, &(WorkloadElement, Policy))| {
            OperationInput {
                handle,
                id: ElementId(member.id),
                policy,
            }
        };
        handles.into_iter().zip(batch).map(input).collect()
    }

    /// Returns the handles of pools, contiguous in memory.
    pub fn handles(&self, pools: impl Iterator<Item = u32>) -> Vec<PoolHandle> {
        let names: Vec<u8> = pools.flat_map(|pool| self.names[pool as usize]).collect();
        let names = Bytes::from(names);
        let handle = |start| PoolHandle(names.slice(start..start + NAME_BYTES));
        (0..names.len()).step_by(NAME_BYTES).map(handle).collect()
    }

    /// Number of operations by which an announcement is ahead.
    pub const ANNOUNCE_DISTANCE: usize = Handlespace::<ElementContact>::ANNOUNCE_DISTANCE;

    /// Announces the operation that comes [`ANNOUNCE_DISTANCE`](Self::ANNOUNCE_DISTANCE) operations after the next one.
    #[inline]
    pub fn announce(&mut self, operation: Option<AnnouncedOperation<'_>>) {
        self.space.announce_operation(operation);
    }

    /// Registers an element for the first time or again.
    #[inline]
    pub fn register(&mut self, input: &OperationInput) -> holdfast_handlespace::ElementKey {
        let id = input.id;
        let contact = ElementContact {
            address: SocketAddr::from((Ipv4Addr::from(id.0), 80)),
            association: id.0,
        };
        let registered = self.space.register(RegistrationData {
            handle: &input.handle,
            id,
            home: HOME_REGISTRAR,
            policy: input.policy,
            class: 0,
            payload: contact,
        });
        let Ok(registered) = registered else {
            unreachable!("all elements are alike");
        };
        registered.key
    }

    /// Registers an element and sets its timer.
    #[inline]
    pub fn register_with_timer(&mut self, input: &OperationInput, at: Duration) {
        let key = self.register(input);
        self.space.set_timer(key, TimerKind::RegistrationExpiry, at);
    }

    /// Deregisters an element from its pool.
    #[inline]
    pub fn deregister(&mut self, input: &OperationInput) {
        let removed = self.space.deregister(&input.handle, input.id);
        black_box(removed.map(|contact| (contact.association, contact.address)));
    }

    /// Finds an element and sets its timer again; then handles expired timers.
    #[inline]
    pub fn restart_timer(&mut self, input: &OperationInput, now: Duration, at: Duration) {
        if let Some(key) = self.space.find(&input.handle, input.id) {
            self.space.set_timer(key, TimerKind::RegistrationExpiry, at);
        }
        assert_eq!(
            self.space.pop_expired(now),
            None,
            "timers are restarted in time"
        );
    }

    /// Takes the timer that expires first and sets it again, `life` later.
    #[inline]
    pub fn expire_timer(&mut self, life: Duration) -> Duration {
        let Some(expired) = self.space.pop_expired(Duration::MAX) else {
            unreachable!("every element has a timer");
        };
        self.space
            .set_timer(expired.key, expired.kind, expired.at + life);
        expired.at
    }

    /// Resolves a pool's handle into the caller's buffer.
    #[inline]
    pub fn resolve(&mut self, handle: &PoolHandle, buffer: &mut [u32; 3], items: usize) {
        let mut free_entries = buffer.iter_mut();
        self.space.resolve(handle, items, |element| {
            if let Some(place) = free_entries.next() {
                *place = element.id().0;
            }
        });
    }

    /// Walks through all elements in blocks; returns their number.
    pub fn synchronize(&self) -> usize {
        let mut cursor = ElementCursor::all();
        let mut digest = 0;
        let mut elements = 0;
        loop {
            let shown = self
                .space
                .next_block(&mut cursor, SYNCHRONIZE_BLOCK, |element| {
                    digest ^= element.id().0 ^ element.home().0 ^ element.payload().association;
                });
            if shown == 0 {
                black_box(digest);
                return elements;
            }
            elements += shown;
        }
    }

    /// Returns the bytes of memory per element.
    pub fn bytes_per_element(&self) -> f64 {
        self.space.heap_bytes() as f64 / self.space.elements() as f64
    }
}
