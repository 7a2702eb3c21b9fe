//! A home registrar's supervision of its elements (RFC 5352 sections 3.4 and 3.5).

use super::associations::endpoints;
use super::dial::Purpose;
use super::entry::{Claim, Entry, Probe};
use super::{AssociationId, Gone, Protocol, Registrar};
use holdfast_handlespace::{ElementKey, TimerKind};
use holdfast_wire::rserpool::{ElementId, PoolHandle, asap};
use rand::Rng;
use std::time::Duration;

/// Size at which an association's list of probed elements is first cleaned.
const ASKED: usize = 16;

impl Registrar {
    /// Handles the elements' expired timers.
    pub(super) fn element_timers(&mut self, now: Duration) {
        while let Some(expired) = self.space.pop_expired(now) {
            let key = expired.key;
            match expired.kind {
                TimerKind::RegistrationExpiry => self.withdraw(key, Gone::Expired),
                TimerKind::KeepAliveTransmission => self.ask_again(now, key),
                TimerKind::KeepAliveTimeout => self.given_up(key, Gone::Silent),
            }
        }
    }

    /// Sends the next keep-alive, and sets the H flag for an own element that may have moved.
    ///
    /// An element that ended its association, without a known registration since, may have a new home that this
    /// registrar does not know; it is asked to follow this one.
    fn ask_again(&mut self, now: Duration, key: ElementKey) {
        let own = self.is_own(key);
        if let Some(entry) = self.space.payload_mut(key)
            && own
            && !entry.agreed
            && !entry.adopting
        {
            (entry.adopting, entry.courted) = (true, None);
        }
        self.ask(now, key);
    }

    /// Sends an element a keep-alive, over a new association if it has none with this registrar.
    pub(super) fn ask(&mut self, now: Duration, key: ElementKey) {
        let until = now + self.config.settings.keep_alive_timeout;
        let Some(entry) = self.space.payload_mut(key) else {
            return;
        };
        entry.probe = Probe::Asked(until);
        let linked = entry.link.map(|(association, _)| association);
        self.arm(key);
        if let Some(to) = linked {
            return self.send_keep_alive(to, key);
        }
        let transport = self.space.get(key).and_then(|element| {
            let transport = &element.payload().element.asap_transport;
            transport.clone()
        });
        // An element without addresses cannot be asked, and its timer expires.
        let Some(transport) = transport else { return };
        let addresses: Vec<_> = endpoints(&transport).collect();
        match self.associations.find(Protocol::Asap, &addresses) {
            Some(to) => self.send_keep_alive(to, key),
            None => self.dial_element(addresses, key),
        }
    }

    pub(super) fn send_keep_alive(&mut self, to: AssociationId, key: ElementKey) {
        let Some(element) = self.space.get(key) else {
            return;
        };
        let named = self.config.settings.keep_alive_names_element;
        let adopting = element.payload().adopting;
        let message = asap::Message::EndpointKeepAlive {
            home: adopting,
            registrar: self.config.id,
            handle: element.handle().clone(),
            id: named.then(|| element.id()),
        };
        self.counters.keep_alives += 1;
        if !named {
            self.remember_asked(to, key);
        }
        let _ = self.out.asap(to, &message);
        if adopting && let Some(entry) = self.space.payload_mut(key) {
            entry.courted = Some(to);
        }
    }

    /// Handles an element's answer to a keep-alive.
    pub(super) fn alive(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: &PoolHandle,
        id: ElementId,
    ) {
        let Some(key) = self.key(handle, id) else {
            return;
        };
        if !self.is_of(from, key) {
            return self.ignored(Some(from), Protocol::Asap, "another element's keep-alive");
        }
        let next = now + self.spread_interval();
        let claim = self.space.get(key).map(|view| view.payload().claim);
        let follows = claim == Some(Claim::Asked(from));
        if follows {
            // The element follows this registrar, although another one has claimed to be its home meanwhile.
            self.adopt(now, key, now);
        }
        let own = self.is_own(key);
        let Some(entry) = self.space.payload_mut(key) else {
            return;
        };
        entry.reporters.clear();
        entry.heard = now;
        if entry.adopting && entry.courted != Some(from) && !follows {
            // The answer belongs to an earlier keep-alive, without the H flag.
            return;
        }
        entry.probe = if own { Probe::Due(next) } else { Probe::None };
        let adopted = std::mem::take(&mut entry.adopting);
        if adopted {
            // The answer is as good as a registration: earlier claims of other registrars may have crossed it.
            entry.registered = now;
            entry.agreed = true;
        }
        let agreed = entry.agreed;
        let came = entry.link.map(|(linked, _)| linked) != Some(from);
        self.arm(key);
        let mut moved = false;
        if own && agreed {
            self.link(key, Some(from));
            let delay = self.associations.get(from).map(|from| from.delay_ms);
            moved = came && delay.is_some_and(|delay| self.set_way(key, None, delay));
        }
        if adopted {
            self.contested.remove(&key);
        }
        if adopted || moved {
            // The element agrees: registrars with another view are informed.
            self.announce_element(key);
        }
    }

    /// Returns a random interval. RFC 5352 section 3.4: "varying the time between two ASAP_ENDPOINT_KEEP_ALIVE messages
    /// to the same PE randomly by plus/minus 50 percent".
    pub(super) fn spread_interval(&mut self) -> Duration {
        let interval = self.config.settings.keep_alive_interval;
        interval / 2 + interval.mul_f64(self.random.random::<f64>())
    }

    pub(super) fn is_own(&self, key: ElementKey) -> bool {
        let element = self.space.get(key);
        element.is_some_and(|element| element.home() == self.config.id)
    }

    /// Removes an element that is silent or cannot be reached.
    pub(super) fn given_up(&mut self, key: ElementKey, why: Gone) {
        let Some(element) = self.space.get(key) else {
            return;
        };
        let entry: &Entry = element.payload();
        if element.home() != self.config.id {
            // The element was probed because of a report. Its home probes it too; should the element live after all,
            // the next comparison of checksums restores it.
            self.forget(key);
        } else if let (true, Some(other)) = (entry.adopting, self.contested.remove(&key)) {
            self.heard_of(key, other);
            self.yield_to(key, other);
        } else {
            self.withdraw(key, why);
        }
    }

    /// Handles a report of an unreachable element (RFC 5352 section 3.5). An element that answers is alive, even if a
    /// few hosts report it: each reporting host counts once, until the element answers or registers.
    pub(super) fn unreachable(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: &PoolHandle,
        id: ElementId,
    ) {
        let Some(association) = self.associations.get(from).filter(|a| a.may_resolve) else {
            self.counters.denied += 1;
            return self.ignored(Some(from), Protocol::Asap, "report not allowed");
        };
        self.counters.unreachable_reports += 1;
        let host = association.host;
        let Some(key) = self.key(handle, id) else {
            return;
        };
        let own = self.is_own(key);
        let settings = &self.config.settings;
        let max = settings.bad_reports_max;
        let Some(entry) = self.space.payload_mut(key) else {
            return;
        };
        // RFC 5355 section 2.14: "MUST limit the frequency of Keep-Alive messages to a given PE". An element that has
        // just answered is probed a little later.
        let at = entry.heard + settings.report_interval;
        if entry.heard > Duration::ZERO && now < at {
            self.counters.reports_unheeded += 1;
            let sooner = match entry.probe {
                Probe::None => true,
                Probe::Due(due) => at < due,
                Probe::Asked(_) => false,
            };
            if sooner {
                entry.probe = Probe::Due(at);
                self.arm(key);
            }
            return;
        }
        let known = entry.reporters.contains(&host);
        if !known && entry.reporters.len() <= max {
            entry.reporters.push(host);
        }
        let reported = entry.reporters.len() > max;
        let asked = matches!(entry.probe, Probe::Asked(_));
        self.counters.reports_unheeded += u64::from(known && asked);
        if own && reported {
            self.withdraw(key, Gone::Reported);
        } else if !asked {
            // "MUST immediately send a point-to-point ASAP_ENDPOINT_KEEP_ALIVE": one is enough for all reports.
            self.ask(now, key);
        }
    }

    /// Probes the elements of a lost association, since they may be alive.
    pub(super) fn association_lost(&mut self, now: Duration, keys: Vec<ElementKey>) {
        for key in keys {
            if let Some(entry) = self.space.payload_mut(key) {
                (entry.link, entry.agreed) = (None, false);
                self.ask(now, key);
            }
        }
    }

    /// Handles an undeliverable message. RFC 5352 section 3.5: "If this ASAP_ENDPOINT_KEEP_ALIVE fails (e.g., it
    /// results in an SCTP SEND.FAILURE notification), the ENRP server MUST consider the PE as truly unreachable".
    pub fn handle_send_failed(
        &mut self,
        association: AssociationId,
        protocol: Protocol,
        bytes: &bytes::Bytes,
    ) {
        if protocol != Protocol::Asap {
            return;
        }
        let Ok(parsed) = asap::Message::parse(bytes) else {
            return;
        };
        let asap::Message::EndpointKeepAlive { handle, id, .. } = parsed.message else {
            return;
        };
        let keys = match (id, self.associations.get_mut(association)) {
            (Some(id), _) => Vec::from_iter(self.key(&handle, id)),
            // The message may have meant any probed element of the pool; its failure applies to the others there as
            // well.
            (None, Some(known)) => std::mem::take(&mut known.probed),
            (None, None) => Vec::new(),
        };
        for key in keys {
            let Some(view) = self.space.get(key) else {
                continue;
            };
            if *view.handle() != handle {
                self.remember_asked(association, key);
            } else if matches!(view.payload().probe, Probe::Asked(_)) {
                self.given_up(key, Gone::Unreachable);
            }
        }
    }

    /// Remembers a probe that does not name its element: should the message fail, the association tells the element.
    fn remember_asked(&mut self, association: AssociationId, key: ElementKey) {
        let Some(known) = self.associations.get_mut(association) else {
            return;
        };
        known.probed.push(key);
        // Answered elements are removed whenever the list has doubled.
        if known.probed.len() > ASKED && known.probed.len().is_power_of_two() {
            let mut asked = std::mem::take(&mut known.probed);
            asked.sort_unstable();
            asked.dedup();
            asked.retain(|key| {
                let probe = self.space.get(*key).map(|view| view.payload().probe);
                matches!(probe, Some(Probe::Asked(_)))
            });
            if let Some(known) = self.associations.get_mut(association) {
                known.probed = asked;
            }
        }
    }

    /// Removes elements that no host answers for at their addresses.
    pub(super) fn elements_unreached(&mut self, keys: Vec<ElementKey>) {
        for key in keys {
            let waits = self.space.get(key).is_some_and(|element| {
                let entry = element.payload();
                entry.link.is_none() && matches!(entry.probe, Probe::Asked(_))
            });
            if waits {
                self.given_up(key, Gone::Unreachable);
            }
        }
    }

    fn dial_element(&mut self, addresses: Vec<std::net::SocketAddr>, key: ElementKey) {
        let Some(&first) = addresses.first() else {
            return;
        };
        if let Some(dial) = self.dials.to_elements.get(&first)
            && let Some(Purpose::Elements(_, keys)) = self.dials.open.get_mut(dial)
        {
            return keys.push(key);
        }
        let dial = self.dial(
            Protocol::Asap,
            addresses,
            Purpose::Elements(first, vec![key]),
        );
        self.dials.to_elements.insert(first, dial);
    }
}
