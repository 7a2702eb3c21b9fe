//! Probes of pool users: admission, and answers about the load of elements of this host.
//!
//! A user's daemon connects to this daemon's own endpoint, like a registrar, and probes. An association prevents
//! spoofed addresses, and an answer is about as long as its question, so probes cannot amplify traffic. A caller that
//! is not a registrar is a *guest*: it may send probes and answers to probes, as often as [`ProbeAllowance`] permits, and
//! nothing else.
//!
//! For an element whose sessions run through this daemon, the load is known from the sessions. For any other server
//! only its TCP connections are visible: each counts as a request in flight, and the latency of requests is unknown.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use holdfast_proto::element_choice::{ProbeAllowance, ProbeVerdict};
use holdfast_sys::sock_diag;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, Transport};

use super::hosted_elements::HostedElements;
use super::links::{AssociationKey, LinkTable};
use crate::config::pool::PoolConfig;

/// Maximum number of guests, in total and from one address.
const GUESTS_MAX: usize = 1024;
const GUESTS_PER_ADDRESS_MAX: usize = 64;
/// Idle time after which a guest is disconnected; longer than a user's own idle time.
const GUEST_IDLE_MAX: Duration = Duration::from_secs(60);
/// Minimum time for which a count of a server's connections is reused.
const COUNT_REUSE_MIN: Duration = Duration::from_millis(20);
/// Reuse time in multiples of the counting time, so that counting takes at most 1/20 of the daemon's time.
const COUNT_REUSE_FACTOR: u32 = 20;

/// Hosts that probe this host's elements, and the counted connections of the elements' servers.
#[derive(Default)]
pub(super) struct Probes {
    probers: BTreeMap<AssociationKey, Prober>,
    /// Time of the next check for idle guests.
    next_idle_check: Option<Duration>,
    connection_counts: HashMap<u64, ConnectionCount>,
}

struct Prober {
    is_guest: bool,
    last_probe: Duration,
    allowance: ProbeAllowance,
}

/// Number of a server's connections.
struct ConnectionCount {
    valid_until: Duration,
    count: Option<u32>,
}

impl Probes {
    /// Returns true if the association belongs to a guest.
    pub(super) fn is_guest(&self, assoc_key: AssociationKey) -> bool {
        let prober = self.probers.get(&assoc_key);
        prober.is_some_and(|prober| prober.is_guest)
    }

    /// Forgets the prober whose association has ended.
    pub(super) fn forget(&mut self, assoc_key: AssociationKey) {
        self.probers.remove(&assoc_key);
    }

    /// Returns the time of the next check for idle guests.
    pub(super) fn next_check(&self) -> Option<Duration> {
        self.next_idle_check
    }

    fn add(&mut self, now: Duration, assoc_key: AssociationKey, is_guest: bool) -> &mut Prober {
        self.next_idle_check.get_or_insert(now + GUEST_IDLE_MAX);
        self.probers.entry(assoc_key).or_insert(Prober {
            is_guest,
            last_probe: now,
            allowance: ProbeAllowance::default(),
        })
    }

    /// Admits another host's pool daemon that only probes. Returns false if a limit is reached or its address may not probe.
    pub(super) fn admit_guest(
        &mut self,
        now: Duration,
        assoc_key: AssociationKey,
        links: &LinkTable,
        config: &PoolConfig,
    ) -> bool {
        let addresses = links.addresses(assoc_key);
        let Some(first) = addresses.first().map(SocketAddr::ip) else {
            return false;
        };
        let guests = || self.probers.iter().filter(|(_, one)| one.is_guest);
        let is_same_address = |(assoc_key, _): &(&AssociationKey, &Prober)| {
            let addresses = links.addresses(**assoc_key);
            addresses.iter().any(|address| address.ip() == first)
        };
        let admitted = config.admits_prober(addresses)
            && guests().count() < GUESTS_MAX
            && guests().filter(is_same_address).count() < GUESTS_PER_ADDRESS_MAX;
        if admitted {
            // The number may have belonged to an earlier association.
            self.forget(assoc_key);
            self.add(now, assoc_key, true);
        }
        admitted
    }

    /// Returns the idle guests, which must be disconnected, except those that this host's own users probe.
    pub(super) fn idle_guests(&mut self, now: Duration, links: &LinkTable) -> Vec<AssociationKey> {
        if self.next_idle_check.is_none_or(|due| due > now) {
            return Vec::new();
        }
        let probers = self.probers.iter();
        let idle = probers.filter(|(_, prober)| prober.last_probe + GUEST_IDLE_MAX <= now);
        let mut idle: Vec<AssociationKey> = idle.map(|(assoc_key, _)| *assoc_key).collect();
        idle.retain(|assoc_key| match self.is_guest(*assoc_key) {
            // A guest remains a guest until its association has ended.
            true => links.owners(*assoc_key).is_empty(),
            false => {
                self.forget(*assoc_key);
                false
            }
        });
        let has_probers = !self.probers.is_empty();
        self.next_idle_check = has_probers.then_some(now + GUEST_IDLE_MAX);
        idle
    }

    /// Counts a probe. Returns the verdict about it.
    pub(super) fn count_probe(&mut self, now: Duration, assoc_key: AssociationKey) -> ProbeVerdict {
        let prober = self.add(now, assoc_key, false);
        prober.last_probe = now;
        prober.allowance.count_probe(now)
    }

    /// Returns the answer to a probe; `None` if the element is not on this host or its load is unknown. `started` is
    /// the daemon's start, from which times are counted.
    pub(super) fn answer(
        &mut self,
        started: Instant,
        elements: &HostedElements,
        handle: &PoolHandle,
        id: ElementId,
    ) -> Option<Message> {
        let number = *elements.find(handle, Some(id)).first()?;
        let element = elements.get(number)?;
        let (in_flight, latency) = match (&element.service, &element.transport) {
            (Some(service), _) => service.sessions.probe_report(),
            (None, Transport::Tcp { port, address, .. }) => {
                let address = SocketAddr::new(*address, *port);
                (
                    self.connections_of(started, elements, number, address)?,
                    None,
                )
            }
            _ => return None,
        };
        let in_us = |latency: Duration| u32::try_from(latency.as_micros()).unwrap_or(u32::MAX);
        Some(Message::ProbeAnswer {
            handle: handle.clone(),
            id,
            in_flight,
            latency_us: latency.map(in_us),
        })
    }

    /// Returns the recent number of connections of the server at this address; `None` if it cannot be seen from here.
    fn connections_of(
        &mut self,
        started: Instant,
        elements: &HostedElements,
        number: u64,
        address: SocketAddr,
    ) -> Option<u32> {
        let start = started.elapsed();
        if let Some(last_count) = self.connection_counts.get(&number)
            && start < last_count.valid_until
        {
            return last_count.count;
        }
        let count = sock_diag::tcp_service_connections(address).unwrap_or_else(|error| {
            tracing::debug!(%address, %error, "cannot count a server's connections");
            None
        });
        let end = started.elapsed();
        let until = end + COUNT_REUSE_MIN.max((end - start) * COUNT_REUSE_FACTOR);
        let counts = &mut self.connection_counts;
        counts.retain(|number, _| elements.get(*number).is_some());
        counts.insert(
            number,
            ConnectionCount {
                valid_until: until,
                count,
            },
        );
        count
    }
}
