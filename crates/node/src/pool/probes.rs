//! Probes of pool users: admission, and answers about the load of elements of this host.
//!
//! A user's daemon connects to this daemon's own endpoint, like a registrar, and probes. An association prevents
//! spoofed addresses, and an answer is about as long as its question, so probes cannot amplify traffic. A caller that
//! is not a registrar is a *guest*: it may send probes and answers to probes, as often as [`Allowance`] permits, and
//! nothing else.
//!
//! For an element whose sessions run through this daemon, the load is known from the sessions. For any other server
//! only its TCP connections are visible: each counts as a request in flight, and the latency of requests is unknown.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_proto::choice::{Allowance, Verdict};
use holdfast_sys::sock_diag;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, Transport};

use super::event_loop::Daemon;
use super::links::Place;

/// Maximum number of guests, in total and from one address.
const GUESTS_MAX: usize = 1024;
const GUESTS_PER_ADDRESS_MAX: usize = 64;
/// Idle time after which a guest is disconnected; longer than a user's own idle time.
const IDLE: Duration = Duration::from_secs(60);
/// Minimum time for which a count of a server's connections is reused.
const SEEN_FOR: Duration = Duration::from_millis(20);
/// Reuse time in multiples of the counting time, so that counting takes at most 1/20 of the daemon's time.
const LOOK_SHARE: u32 = 20;

/// Probing hosts, and counted connections.
#[derive(Default)]
pub(super) struct Probes {
    probers: BTreeMap<Place, Prober>,
    /// Time of the next check for idle guests.
    look: Option<Duration>,
    seen: HashMap<u64, Seen>,
}

struct Prober {
    is_guest: bool,
    asked: Duration,
    allowance: Allowance,
}

/// Number of a server's connections.
struct Seen {
    until: Duration,
    count: Option<u32>,
}

impl Probes {
    /// Returns true if the association belongs to a guest.
    pub(super) fn is_guest(&self, place: Place) -> bool {
        let prober = self.probers.get(&place);
        prober.is_some_and(|prober| prober.is_guest)
    }

    /// Removes an association that has ended.
    pub(super) fn forget(&mut self, place: Place) {
        self.probers.remove(&place);
    }

    /// Returns the time of the next check for idle guests.
    pub(super) fn next(&self) -> Option<Duration> {
        self.look
    }

    fn add(&mut self, now: Duration, place: Place, is_guest: bool) -> &mut Prober {
        self.look.get_or_insert(now + IDLE);
        self.probers.entry(place).or_insert(Prober {
            is_guest,
            asked: now,
            allowance: Allowance::default(),
        })
    }
}

impl Daemon {
    /// Admits a guest. Returns false if a limit is reached or its address may not probe.
    pub(super) fn admit_guest(&mut self, place: Place) -> bool {
        let addresses = self.links.addresses(place);
        let Some(first) = addresses.first().map(SocketAddr::ip) else {
            return false;
        };
        let guests = || self.probes.probers.iter().filter(|(_, one)| one.is_guest);
        let is_there = |(place, _): &(&Place, &Prober)| {
            let addresses = self.links.addresses(**place);
            addresses.iter().any(|address| address.ip() == first)
        };
        let admitted = self.config.admits_prober(addresses)
            && guests().count() < GUESTS_MAX
            && guests().filter(is_there).count() < GUESTS_PER_ADDRESS_MAX;
        if admitted {
            // The number may have belonged to an earlier association.
            self.probes.forget(place);
            self.probes.add(self.now(), place, true);
        }
        admitted
    }

    /// Disconnects idle guests, except those that this host's own users probe.
    pub(super) fn end_guests(&mut self) {
        let now = self.now();
        if self.probes.look.is_none_or(|look| look > now) {
            return;
        }
        let probers = self.probes.probers.iter();
        let idle = probers.filter(|(_, prober)| prober.asked + IDLE <= now);
        let idle: Vec<Place> = idle.map(|(place, _)| *place).collect();
        for place in idle {
            match self.probes.is_guest(place) {
                // A guest remains a guest until its association has ended.
                true if self.links.owners(place).is_empty() => self.abort(place),
                true => {}
                false => self.probes.forget(place),
            }
        }
        let are_left = !self.probes.probers.is_empty();
        self.probes.look = are_left.then_some(now + IDLE);
    }

    /// Handles a probe for an element.
    pub(super) fn probed(&mut self, place: Place, handle: &PoolHandle, id: ElementId) {
        if !self.config.admits_prober(self.links.addresses(place)) {
            return;
        }
        let now = self.now();
        let prober = self.probes.add(now, place, false);
        prober.asked = now;
        match prober.allowance.ask(now) {
            Verdict::Answered => {
                if let Some(answer) = self.answer_to_probe(handle, id) {
                    self.say(place, &answer);
                }
            }
            Verdict::Enough if prober.is_guest => {
                tracing::warn!(addresses = ?self.links.addresses(place), "probes too much");
                self.abort(place);
            }
            Verdict::Enough | Verdict::Dropped => {}
        }
    }

    /// Returns true if one of these addresses is the daemon's own endpoint.
    pub(super) fn is_own(&self, addresses: &[SocketAddr]) -> bool {
        let own = self.own.local_addresses().unwrap_or_default();
        addresses.iter().any(|address| own.contains(address))
    }

    /// Returns the answer to a probe; `None` if the element is not on this host or its load is unknown.
    pub(super) fn answer_to_probe(
        &mut self,
        handle: &PoolHandle,
        id: ElementId,
    ) -> Option<Message> {
        let number = *self.names.find(handle, Some(id)).first()?;
        let element = self.elements.get(&number)?;
        let (in_flight, latency) = match (&element.service, &element.at) {
            (Some(service), _) => service.sessions.report(),
            (None, Transport::Tcp { port, address, .. }) => {
                let at = SocketAddr::new(*address, *port);
                (self.connections_of(number, at)?, None)
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
    fn connections_of(&mut self, number: u64, at: SocketAddr) -> Option<u32> {
        let begun = self.now();
        if let Some(seen) = self.probes.seen.get(&number)
            && begun < seen.until
        {
            return seen.count;
        }
        let count = sock_diag::tcp_service(at).unwrap_or_else(|error| {
            tracing::debug!(%at, %error, "looking at a server's connections");
            None
        });
        let ended = self.now();
        let until = ended + SEEN_FOR.max((ended - begun) * LOOK_SHARE);
        let elements = &self.elements;
        let seen = &mut self.probes.seen;
        seen.retain(|number, _| elements.contains_key(number));
        seen.insert(number, Seen { until, count });
        count
    }
}
