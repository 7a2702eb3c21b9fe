//! Probes of users: who may ask elements of this host how busy they are, and what these answer.
//!
//! A user's daemon calls the daemon's own endpoint, as a registrar does, and asks. Over an association nobody speaks for another address,
//! and an answer is about as long as its question, so there is nothing to be amplified. Who is no registrar is a *guest*: it may probe and
//! answer probes, as often as [`Allowance`] lets it, and no more.
//!
//! How busy an element is that takes its sessions through this daemon is known from those. Of another server only its TCP connections can be
//! seen, whoever has them: each counts as a request in flight, and what requests take is not known.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_proto::choice::{Allowance, Verdict};
use holdfast_sys::sock_diag;
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle, Transport};

use super::event_loop::Daemon;
use super::links::Place;

/// Guests at once, and of one address.
const GUESTS_MAX: usize = 1024;
const GUESTS_PER_ADDRESS_MAX: usize = 64;
/// A guest that does not ask for so long is sent away: later than it would go by itself.
const IDLE: Duration = Duration::from_secs(60);
/// How long what was seen of a server is good, at least.
const SEEN_FOR: Duration = Duration::from_millis(20);
/// The same in multiples of what the look took: looks take a twentieth of the daemon's time at most.
const LOOK_SHARE: u32 = 20;

/// Who probes, and what was seen.
#[derive(Default)]
pub(super) struct Probes {
    probers: BTreeMap<Place, Prober>,
    /// When to look for idle ones.
    look: Option<Duration>,
    seen: HashMap<u64, Seen>,
}

struct Prober {
    is_guest: bool,
    asked: Duration,
    allowance: Allowance,
}

/// A server's connections.
struct Seen {
    until: Duration,
    count: Option<u32>,
}

impl Probes {
    /// Whether the association is a guest's.
    pub(super) fn is_guest(&self, place: Place) -> bool {
        let prober = self.probers.get(&place);
        prober.is_some_and(|prober| prober.is_guest)
    }

    /// It is gone.
    pub(super) fn forget(&mut self, place: Place) {
        self.probers.remove(&place);
    }

    /// When idle ones are to be looked for.
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
    /// Lets somebody in who may probe. Whether there is room, and it may.
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
            // The number may have been another's.
            self.probes.forget(place);
            self.probes.add(self.now(), place, true);
        }
        admitted
    }

    /// Sends guests away that do not ask any more. One that this host's users ask stays.
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
                // Until it is gone it stays a guest.
                true if self.links.owners(place).is_empty() => self.abort(place),
                true => {}
                false => self.probes.forget(place),
            }
        }
        let are_left = !self.probes.probers.is_empty();
        self.probes.look = are_left.then_some(now + IDLE);
    }

    /// Somebody asks how busy an element is.
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

    /// Whether the daemon's own endpoint is there.
    pub(super) fn is_own(&self, addresses: &[SocketAddr]) -> bool {
        let own = self.own.local_addresses().unwrap_or_default();
        addresses.iter().any(|address| own.contains(address))
    }

    /// How busy an element is; nothing, if it is none of this host's or cannot be told.
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

    /// The connections of a server at this address, as of late; none if it is not seen from here.
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
