//! A home registrar's duty: are its elements alive (RFC 5352 sections 3.4 and 3.5)?

use super::associations::endpoints;
use super::dial::Purpose;
use super::entry::{Claim, Entry, Probe};
use super::{AssociationId, Gone, Protocol, Registrar};
use holdfast_handlespace::{ElementKey, TimerKind};
use holdfast_wire::rserpool::{ElementId, PoolHandle, asap};
use rand::Rng;
use std::time::Duration;

/// Elements that one association remembers at first as having been asked.
const ASKED: usize = 16;

impl Registrar {
    /// The elements' timers that have expired.
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

    /// An own element that ended its association, and has not registered anywhere since as far as is known, may have another
    /// registrar for its home that does not know so: it is asked to be this one's.
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

    /// Sends an element a keep-alive. An element may have no association with this registrar: then one is made.
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
        // Without addresses it cannot be asked, and the time runs out.
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

    /// An element answered.
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
            // It follows, though another has said meanwhile that it is its home.
            self.adopt(now, key, now);
        }
        let own = self.is_own(key);
        let Some(entry) = self.space.payload_mut(key) else {
            return;
        };
        entry.reporters.clear();
        entry.heard = now;
        if entry.adopting && entry.courted != Some(from) && !follows {
            // It answers an earlier keep-alive, without the H flag.
            return;
        }
        entry.probe = if own { Probe::Due(next) } else { Probe::None };
        let adopted = std::mem::take(&mut entry.adopting);
        if adopted {
            // As good as a registration: what others said until then may have crossed it.
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
            // The element agrees: whoever thought otherwise is told.
            self.announce_element(key);
        }
    }

    /// RFC 5352 section 3.4: "varying the time between two ASAP_ENDPOINT_KEEP_ALIVE messages to the same PE randomly by
    /// plus/minus 50 percent".
    pub(super) fn spread_interval(&mut self) -> Duration {
        let interval = self.config.settings.keep_alive_interval;
        interval / 2 + interval.mul_f64(self.random.random::<f64>())
    }

    pub(super) fn is_own(&self, key: ElementKey) -> bool {
        let element = self.space.get(key);
        element.is_some_and(|element| element.home() == self.config.id)
    }

    /// An element that is silent, or cannot be reached, is none.
    pub(super) fn given_up(&mut self, key: ElementKey, why: Gone) {
        let Some(element) = self.space.get(key) else {
            return;
        };
        let entry: &Entry = element.payload();
        if element.home() != self.config.id {
            // Asked for a report. Its home asks too; should the element live after all, the next comparison of
            // checksums brings it back.
            self.forget(key);
        } else if let (true, Some(other)) = (entry.adopting, self.contested.remove(&key)) {
            self.heard_of(key, other);
            self.yield_to(key, other);
        } else {
            self.withdraw(key, why);
        }
    }

    /// RFC 5352 section 3.5. An element that answers is alive whatever a few say: each reporting host counts once, until the
    /// element answers or registers.
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
        // RFC 5355 section 2.14: "MUST limit the frequency of Keep-Alive messages to a given PE". Who has just answered is
        // asked in a moment.
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

    /// The association of elements is gone: perhaps they are, perhaps not.
    pub(super) fn association_lost(&mut self, now: Duration, keys: Vec<ElementKey>) {
        for key in keys {
            if let Some(entry) = self.space.payload_mut(key) {
                (entry.link, entry.agreed) = (None, false);
                self.ask(now, key);
            }
        }
    }

    /// A message could not be delivered: RFC 5352 section 3.5, "If this ASAP_ENDPOINT_KEEP_ALIVE fails (e.g., it results in
    /// an SCTP SEND.FAILURE notification), the ENRP server MUST consider the PE as truly unreachable".
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
            // Whichever of the pool's it meant: the others are where it did not arrive too.
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

    /// An element was asked without being named: should the message fail, the association says whom it meant.
    fn remember_asked(&mut self, association: AssociationId, key: ElementKey) {
        let Some(known) = self.associations.get_mut(association) else {
            return;
        };
        known.probed.push(key);
        // Those that have answered are forgotten whenever the list has doubled.
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

    /// Nobody answers at an element's addresses.
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
