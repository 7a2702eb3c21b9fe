//! A home registrar's supervision of its elements (RFC 5352 sections 3.4 and 3.5).

use super::associations::endpoints;
use super::dials::DialPurpose;
use super::element_entry::{ElementEntry, FormerClaim, KeepAliveState};
use super::{AssociationId, PoolProtocol, Registrar, RemovalReason};
use holdfast_handlespace::{ElementKey, TimerKind};
use holdfast_wire::rserpool::{ElementId, PoolHandle, asap};
use rand::Rng;
use std::time::Duration;

/// Size at which an association's list of probed elements is first cleaned.
const PROBED_CAPACITY: usize = 16;

impl Registrar {
    /// Handles the elements' expired timers.
    pub(super) fn handle_element_timers(&mut self, now: Duration) {
        while let Some(expired) = self.elements.pop_expired(now) {
            let key = expired.key;
            match expired.kind {
                TimerKind::RegistrationExpiry => {
                    self.remove_and_announce(key, RemovalReason::Expired)
                }
                TimerKind::KeepAliveTransmission => self.send_next_keep_alive(now, key),
                TimerKind::KeepAliveTimeout => self.remove_dead(key, RemovalReason::Silent),
            }
        }
    }

    /// Sends the next keep-alive, and sets the H flag for an own element that may have moved.
    ///
    /// An element that ended its association, without a known registration since, may have a new home that this
    /// registrar does not know; it is asked to follow this one.
    fn send_next_keep_alive(&mut self, now: Duration, key: ElementKey) {
        let is_own = self.elements.is_own(key);
        if let Some(entry) = self.elements.entry_mut(key)
            && is_own
            && !entry.has_accepted_home
            && !entry.adopting
        {
            (entry.adopting, entry.home_flag_association) = (true, None);
        }
        self.probe_element(now, key);
    }

    /// Sends an element a keep-alive, over a new association if it has none with this registrar.
    pub(super) fn probe_element(&mut self, now: Duration, key: ElementKey) {
        let until = now + self.config.settings.keep_alive_timeout;
        let Some(entry) = self.elements.entry_mut(key) else {
            return;
        };
        entry.keep_alive = KeepAliveState::AwaitingAck(until);
        let linked = entry.association.map(|(association, _)| association);
        self.elements.update_timer(key);
        if let Some(to) = linked {
            return self.send_keep_alive(to, key);
        }
        let transport = self.elements.space().get(key).and_then(|element| {
            let transport = &element.payload().element.asap_transport;
            transport.clone()
        });
        // An element without addresses cannot be asked, and its timer expires.
        let Some(transport) = transport else { return };
        let addresses: Vec<_> = endpoints(&transport).collect();
        match self.associations.find(PoolProtocol::Asap, &addresses) {
            Some(to) => self.send_keep_alive(to, key),
            None => self.dial_element(addresses, key),
        }
    }

    pub(super) fn send_keep_alive(&mut self, to: AssociationId, key: ElementKey) {
        let Some(element) = self.elements.space().get(key) else {
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
            self.remember_probe(to, key);
        }
        let _ = self.outbox.send_asap(to, &message);
        if adopting && let Some(entry) = self.elements.entry_mut(key) {
            entry.home_flag_association = Some(to);
        }
    }

    /// Handles an element's answer to a keep-alive.
    pub(super) fn on_keep_alive_ack(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: &PoolHandle,
        id: ElementId,
    ) {
        let Some(key) = self.elements.space().find(handle, id) else {
            return;
        };
        if !self.may_be_sender(from, key) {
            return self.outbox.report_ignored(
                Some(from),
                PoolProtocol::Asap,
                "keep-alive answer from another element's association",
            );
        }
        let next = now + self.spread_interval();
        let claim = self
            .elements
            .space()
            .get(key)
            .map(|view| view.payload().claim);
        let accepts_home = claim == Some(FormerClaim::AwaitingAnswer(from));
        if accepts_home {
            // The element follows this registrar, although another one has claimed to be its home meanwhile.
            self.become_home(now, key, now);
        }
        let is_own = self.elements.is_own(key);
        let Some(entry) = self.elements.entry_mut(key) else {
            return;
        };
        entry.reporters.clear();
        entry.last_heard = now;
        if entry.adopting && entry.home_flag_association != Some(from) && !accepts_home {
            // The answer belongs to an earlier keep-alive, without the H flag.
            return;
        }
        entry.keep_alive = if is_own {
            KeepAliveState::Due(next)
        } else {
            KeepAliveState::Off
        };
        let adopted = std::mem::take(&mut entry.adopting);
        if adopted {
            // The answer is as good as a registration: earlier claims of other registrars may have crossed it.
            entry.registered = now;
            entry.has_accepted_home = true;
        }
        let agreed = entry.has_accepted_home;
        let changed_association = entry.association.map(|(linked, _)| linked) != Some(from);
        self.elements.update_timer(key);
        let mut moved = false;
        if is_own && agreed {
            self.link_to_association(key, Some(from));
            let delay = self.associations.get(from).map(|from| from.delay_ms);
            moved =
                changed_association && delay.is_some_and(|delay| self.set_delay(key, None, delay));
        }
        if adopted {
            self.elements.end_contest(key);
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

    /// Removes an element that is silent or cannot be reached.
    pub(super) fn remove_dead(&mut self, key: ElementKey, reason: RemovalReason) {
        let Some(element) = self.elements.space().get(key) else {
            return;
        };
        let entry: &ElementEntry = element.payload();
        if element.home() != self.config.id {
            // The element was probed because of a report. Its home probes it too; should the element live after all,
            // the next comparison of checksums restores it.
            self.remove_local(key);
        } else if let (true, Some(other)) = (entry.adopting, self.elements.end_contest(key)) {
            self.note_hearsay(key, other);
            self.yield_to(key, other);
        } else {
            self.remove_and_announce(key, reason);
        }
    }

    /// Handles a report of an unreachable element (RFC 5352 section 3.5). An element that answers is alive, even if a
    /// few hosts report it: each reporting host counts once, until the element answers or registers.
    pub(super) fn on_unreachable_report(
        &mut self,
        now: Duration,
        from: AssociationId,
        handle: &PoolHandle,
        id: ElementId,
    ) {
        let Some(association) = self.associations.get(from).filter(|a| a.may_resolve) else {
            self.counters.access_denied += 1;
            return self.outbox.report_ignored(
                Some(from),
                PoolProtocol::Asap,
                "report not allowed",
            );
        };
        self.counters.unreachable_reports += 1;
        let host = association.host;
        let Some(key) = self.elements.space().find(handle, id) else {
            return;
        };
        let is_own = self.elements.is_own(key);
        let settings = &self.config.settings;
        let max = settings.bad_reports_max;
        let Some(entry) = self.elements.entry_mut(key) else {
            return;
        };
        // RFC 5355 section 2.14: "MUST limit the frequency of Keep-Alive messages to a given PE". An element that has
        // just answered is probed a little later.
        let at = entry.last_heard + settings.report_probe_interval;
        if entry.last_heard > Duration::ZERO && now < at {
            self.counters.reports_ignored += 1;
            let is_sooner = match entry.keep_alive {
                KeepAliveState::Off => true,
                KeepAliveState::Due(due) => at < due,
                KeepAliveState::AwaitingAck(_) => false,
            };
            if is_sooner {
                entry.keep_alive = KeepAliveState::Due(at);
                self.elements.update_timer(key);
            }
            return;
        }
        let already_reported = entry.reporters.contains(&host);
        if !already_reported && entry.reporters.len() <= max {
            entry.reporters.push(host);
        }
        let reported = entry.reporters.len() > max;
        let awaits_ack = matches!(entry.keep_alive, KeepAliveState::AwaitingAck(_));
        self.counters.reports_ignored += u64::from(already_reported && awaits_ack);
        if is_own && reported {
            self.remove_and_announce(key, RemovalReason::Reported);
        } else if !awaits_ack {
            // "MUST immediately send a point-to-point ASAP_ENDPOINT_KEEP_ALIVE": one is enough for all reports.
            self.probe_element(now, key);
        }
    }

    /// Probes the elements of a lost association, since they may be alive.
    pub(super) fn on_association_lost(&mut self, now: Duration, keys: Vec<ElementKey>) {
        for key in keys {
            if let Some(entry) = self.elements.entry_mut(key) {
                (entry.association, entry.has_accepted_home) = (None, false);
                self.probe_element(now, key);
            }
        }
    }

    /// Handles an undeliverable message. RFC 5352 section 3.5: "If this ASAP_ENDPOINT_KEEP_ALIVE fails (e.g., it
    /// results in an SCTP SEND.FAILURE notification), the ENRP server MUST consider the PE as truly unreachable".
    pub fn handle_send_failed(
        &mut self,
        association: AssociationId,
        protocol: PoolProtocol,
        bytes: &bytes::Bytes,
    ) {
        if protocol != PoolProtocol::Asap {
            return;
        }
        let Ok(parsed) = asap::Message::parse(bytes) else {
            return;
        };
        let asap::Message::EndpointKeepAlive { handle, id, .. } = parsed.message else {
            return;
        };
        let keys = match (id, self.associations.get_mut(association)) {
            (Some(id), _) => Vec::from_iter(self.elements.space().find(&handle, id)),
            // The message may have meant any probed element of the pool; its failure applies to the others there as
            // well.
            (None, Some(known_association)) => std::mem::take(&mut known_association.probed),
            (None, None) => Vec::new(),
        };
        for key in keys {
            let Some(view) = self.elements.space().get(key) else {
                continue;
            };
            if *view.handle() != handle {
                self.remember_probe(association, key);
            } else if matches!(view.payload().keep_alive, KeepAliveState::AwaitingAck(_)) {
                self.remove_dead(key, RemovalReason::Unreachable);
            }
        }
    }

    /// Remembers a probe that does not name its element: should the message fail, the association tells the element.
    fn remember_probe(&mut self, association: AssociationId, key: ElementKey) {
        let Some(known_association) = self.associations.get_mut(association) else {
            return;
        };
        known_association.probed.push(key);
        // Answered elements are removed whenever the list has doubled.
        if known_association.probed.len() > PROBED_CAPACITY
            && known_association.probed.len().is_power_of_two()
        {
            let mut probed = std::mem::take(&mut known_association.probed);
            probed.sort_unstable();
            probed.dedup();
            probed.retain(|key| {
                let probe = self
                    .elements
                    .space()
                    .get(*key)
                    .map(|view| view.payload().keep_alive);
                matches!(probe, Some(KeepAliveState::AwaitingAck(_)))
            });
            if let Some(known_association) = self.associations.get_mut(association) {
                known_association.probed = probed;
            }
        }
    }

    /// Removes elements that no host answers for at their addresses.
    pub(super) fn on_elements_unreached(&mut self, keys: Vec<ElementKey>) {
        for key in keys {
            let is_probed = self.elements.space().get(key).is_some_and(|element| {
                let entry = element.payload();
                entry.association.is_none()
                    && matches!(entry.keep_alive, KeepAliveState::AwaitingAck(_))
            });
            if is_probed {
                self.remove_dead(key, RemovalReason::Unreachable);
            }
        }
    }

    fn dial_element(&mut self, addresses: Vec<std::net::SocketAddr>, key: ElementKey) {
        let Some(&first) = addresses.first() else {
            return;
        };
        if !self.dials.join_element(first, key) {
            let purpose = DialPurpose::Elements(first, vec![key]);
            self.dial(PoolProtocol::Asap, addresses, purpose);
        }
    }
}
