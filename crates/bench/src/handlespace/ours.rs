//! The operations on this project's handlespace, as a registrar uses it.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use holdfast_handlespace::{Coming, Cursor, Handlespace, Registration, TimerKind};
use holdfast_wire::rserpool::{ElementId, Policy, PoolHandle, RegistrarId};

use super::workload::Member;

const HOME: RegistrarId = RegistrarId(1);
/// Elements per block of a synchronisation, as in rsplib.
const BLOCK: usize = 1024;

/// A registrar's data of an element: its address and its association.
#[derive(Debug, Clone, Copy)]
struct Contact {
    address: SocketAddr,
    association: u32,
}

/// A registrar's view of a message: the request owns its handle, as a message from the network does.
#[derive(Debug, Clone)]
pub struct Request {
    handle: PoolHandle,
    id: ElementId,
    policy: Policy,
}

/// A handlespace and the handles of its pools.
#[derive(Debug)]
pub struct Subject {
    space: Handlespace<Contact>,
    names: Vec<[u8; NAME]>,
}

const NAME: usize = "pool 000000".len();

impl Request {
    /// Returns the request as an announcement of this kind.
    #[inline]
    pub fn coming<'a>(&'a self, kind: fn(&'a [u8], ElementId) -> Coming<'a>) -> Coming<'a> {
        kind(&self.handle.0, self.id)
    }
}

impl Subject {
    /// Creates an empty handlespace.
    pub fn new(pools: u32) -> Subject {
        let name = |pool: u32| {
            let mut name = [0; NAME];
            name.copy_from_slice(format!("pool {pool:06}").as_bytes());
            name
        };
        Subject {
            space: Handlespace::new(1),
            names: (0..pools).map(name).collect(),
        }
    }

    /// Returns requests for these elements, contiguous in memory.
    pub fn requests(&self, batch: &[(Member, Policy)]) -> Vec<Request> {
        let handles = self.handles(batch.iter().map(|(member, _)| member.pool));
        let request = |(handle, &(member, policy)): (PoolHandle, &(Member, Policy))| Request {
            handle,
            id: ElementId(member.id),
            policy,
        };
        handles.into_iter().zip(batch).map(request).collect()
    }

    /// Returns the handles of pools, contiguous in memory.
    pub fn handles(&self, pools: impl Iterator<Item = u32>) -> Vec<PoolHandle> {
        let names: Vec<u8> = pools.flat_map(|pool| self.names[pool as usize]).collect();
        let names = Bytes::from(names);
        let handle = |start| PoolHandle(names.slice(start..start + NAME));
        (0..names.len()).step_by(NAME).map(handle).collect()
    }

    /// Number of operations by which an announcement is ahead.
    pub const AHEAD: usize = Handlespace::<Contact>::AHEAD;

    /// Announces an operation.
    #[inline]
    pub fn expect(&mut self, coming: Option<Coming<'_>>) {
        self.space.expect(coming);
    }

    /// Registers an element for the first time or again.
    #[inline]
    pub fn register(&mut self, request: &Request) -> holdfast_handlespace::ElementKey {
        let id = request.id;
        let contact = Contact {
            address: SocketAddr::from((Ipv4Addr::from(id.0), 80)),
            association: id.0,
        };
        let registered = self.space.register(Registration {
            handle: &request.handle,
            id,
            home: HOME,
            policy: request.policy,
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
    pub fn register_with_timer(&mut self, request: &Request, at: Duration) {
        let key = self.register(request);
        self.space.set_timer(key, TimerKind::RegistrationExpiry, at);
    }

    /// Removes an element.
    #[inline]
    pub fn deregister(&mut self, request: &Request) {
        let removed = self.space.deregister(&request.handle, request.id);
        black_box(removed.map(|contact| (contact.association, contact.address)));
    }

    /// Finds an element and sets its timer again; then handles expired timers.
    #[inline]
    pub fn restart_timer(&mut self, request: &Request, now: Duration, at: Duration) {
        if let Some(key) = self.space.find(&request.handle, request.id) {
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
        let mut places = buffer.iter_mut();
        self.space.resolve(handle, items, |element| {
            if let Some(place) = places.next() {
                *place = element.id().0;
            }
        });
    }

    /// Walks through all elements in blocks; returns their number.
    pub fn synchronize(&self) -> usize {
        let mut cursor = Cursor::all();
        let mut digest = 0;
        let mut elements = 0;
        loop {
            let shown = self.space.next_block(&mut cursor, BLOCK, |element| {
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
