//! The operations on this project's handlespace, as a registrar uses it.

use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use holdfast_handlespace::{Coming, Cursor, Handlespace, Registration, TimerKind};
use holdfast_wire::rserpool::{ElementId, Policy, PoolHandle, RegistrarId};

use super::workload::Member;

const HOME: RegistrarId = RegistrarId(1);
/// Elements a block of synchronisation, as rsplib has it.
const BLOCK: usize = 1024;

/// What a registrar knows of an element: where it is reached, and on which association.
#[derive(Debug, Clone, Copy)]
struct Contact {
    address: SocketAddr,
    association: u32,
}

/// A handlespace and its pools' handles.
#[derive(Debug)]
pub struct Subject {
    space: Handlespace<Contact>,
    handles: Vec<PoolHandle>,
}

impl Subject {
    /// Empty.
    pub fn new(pools: u32) -> Subject {
        // One after the other, as rsplib's are: to find the caller's handle is no part of an operation.
        let names: String = (0..pools).map(|pool| format!("pool {pool:06}")).collect();
        let names = Bytes::from(names);
        let len = "pool 000000".len();
        let handle = |pool: usize| PoolHandle(names.slice(pool * len..(pool + 1) * len));
        Subject {
            space: Handlespace::new(1),
            handles: (0..pools as usize).map(handle).collect(),
        }
    }

    /// How many operations ahead they are announced.
    pub const AHEAD: usize = Handlespace::<Contact>::AHEAD;

    /// Announces an operation on an element.
    #[inline]
    pub fn expect(&mut self, member: Option<Member>) {
        let coming = member.map(|member| {
            let handle = &self.handles[member.pool as usize];
            Coming::Element(handle, ElementId(member.id))
        });
        self.space.expect(coming);
    }

    /// Announces a resolution.
    #[inline]
    pub fn expect_resolution(&mut self, pool: Option<u32>, items: usize) {
        let coming = pool.map(|pool| Coming::Resolution(&self.handles[pool as usize], items));
        self.space.expect(coming);
    }

    /// Registers an element, anew or again.
    #[inline]
    pub fn register(&mut self, member: Member, policy: Policy) -> holdfast_handlespace::ElementKey {
        let contact = Contact {
            address: SocketAddr::from((Ipv4Addr::from(member.id), 80)),
            association: member.id,
        };
        let registered = self.space.register(Registration {
            handle: &self.handles[member.pool as usize],
            id: ElementId(member.id),
            home: HOME,
            policy,
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
    pub fn register_with_timer(&mut self, member: Member, policy: Policy, at: Duration) {
        let key = self.register(member, policy);
        self.space.set_timer(key, TimerKind::RegistrationExpiry, at);
    }

    /// Removes an element.
    #[inline]
    pub fn deregister(&mut self, member: Member) {
        let handle = &self.handles[member.pool as usize];
        let removed = self.space.deregister(handle, ElementId(member.id));
        black_box(removed.map(|contact| (contact.association, contact.address)));
    }

    /// Finds an element and sets its timer anew; what the time has come for is attended to.
    #[inline]
    pub fn restart_timer(&mut self, member: Member, now: Duration, at: Duration) {
        let handle = &self.handles[member.pool as usize];
        if let Some(key) = self.space.find(handle, ElementId(member.id)) {
            self.space.set_timer(key, TimerKind::RegistrationExpiry, at);
        }
        assert_eq!(
            self.space.pop_expired(now),
            None,
            "timers are restarted in time"
        );
    }

    /// Takes the timer that expires first and sets it again, so much later.
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
    pub fn resolve(&mut self, pool: u32, buffer: &mut [u32; 3], items: usize) {
        let mut places = buffer.iter_mut();
        self.space
            .resolve(&self.handles[pool as usize], items, |element| {
                if let Some(place) = places.next() {
                    *place = element.id().0;
                }
            });
    }

    /// Walks through all elements in blocks. Returns how many there were.
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

    /// Bytes of memory for each element.
    pub fn bytes_per_element(&self) -> f64 {
        self.space.heap_bytes() as f64 / self.space.elements() as f64
    }
}
