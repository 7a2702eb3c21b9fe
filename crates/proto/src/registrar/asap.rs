//! ASAP (RFC 5352): messages of elements and users, and resolution.

use super::host_quotas::MessageVerdict;
use super::{AssociationId, PoolProtocol, Registrar};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::{Message, ResolutionResponseEncoder};
use holdfast_wire::rserpool::{CauseCode, DecodeErrorKind, PoolHandle};
use std::net::IpAddr;
use std::time::Duration;

const ERROR: u8 = 0x0e;

impl Registrar {
    /// Handles an ASAP message of an association.
    pub fn handle_asap(&mut self, now: Duration, from: AssociationId, bytes: &Bytes) {
        let Some(known_association) = self.associations.get(from) else {
            return;
        };
        let (host, has_spoken) = (known_association.host, known_association.has_spoken);
        let (repeats_registration, repeats_resolution) = (
            known_association.registration_cache.is_repeated(bytes),
            known_association.resolution_cache.is_repeated(bytes),
        );
        if !self.count_message(now, from, host) {
            return;
        }
        if repeats_registration && self.register_from_cache(now, from)
            || repeats_resolution && self.resolve_from_cache(from)
        {
            return;
        }
        match Message::parse(bytes) {
            Ok(parsed) => {
                if !has_spoken {
                    self.on_first_message(from);
                }
                let is_error = matches!(parsed.message, Message::Error(_));
                self.on_asap_message(now, from, parsed.message, bytes);
                if !is_error && !parsed.reports.is_empty() {
                    self.associations.invalidate_registration_cache(from);
                    self.associations.clear_resolution_cache(from);
                    self.outbox.send_asap_errors(from, parsed.reports);
                }
            }
            Err(error) => {
                // An error is never answered with an error.
                if bytes.first() != Some(&ERROR) {
                    self.outbox.send_asap_errors(from, error.reports);
                }
                self.on_malformed(from, PoolProtocol::Asap, error.kind);
            }
        }
    }

    /// Handles a message that belongs to neither protocol.
    pub fn handle_unknown_protocol(&mut self, now: Duration, from: AssociationId) {
        let host = self.associations.get(from).map(|from| from.host);
        if host.is_some_and(|host| self.count_message(now, from, host)) {
            self.count_malformed(from);
        }
    }

    /// Counts a message; returns false if its host sends too many.
    #[inline]
    fn count_message(&mut self, now: Duration, from: AssociationId, host: IpAddr) -> bool {
        let limits = &self.config.settings.limits;
        let verdict = self.associations.hosts.count_message(now, host, limits);
        if verdict == MessageVerdict::Admitted {
            return true;
        }
        self.counters.rate_limited += 1;
        if verdict == MessageVerdict::Aborted {
            self.abort(from, "the host exceeds its message rate");
        }
        false
    }

    // Inlined, because every message passes here once, by value: its other caller, for parked registrations, would
    // cause a copy.
    #[inline(always)]
    pub(super) fn on_asap_message(
        &mut self,
        now: Duration,
        from: AssociationId,
        message: Message,
        bytes: &Bytes,
    ) {
        if let Message::Error(causes) = message {
            return self.outbox.report_errors(from, PoolProtocol::Asap, &causes);
        }
        if !self.is_ready() {
            return self.outbox.report_ignored(
                Some(from),
                PoolProtocol::Asap,
                "the registrar is starting",
            );
        }
        match message {
            Message::Registration { handle, element } => {
                self.on_registration(now, from, handle, element, bytes);
            }
            Message::HandleResolution {
                updates,
                handle,
                items_max: items,
            } => self.on_resolution(from, handle, items, updates, bytes),
            Message::Deregistration { handle, id } => self.on_deregistration(from, handle, id),
            Message::EndpointKeepAliveAck { handle, id } => {
                self.on_keep_alive_ack(now, from, &handle, id)
            }
            Message::EndpointUnreachable { handle, id } => {
                self.on_unreachable_report(now, from, &handle, id);
            }
            // Other messages are sent by registrars only, or belong to the session layer.
            other => self
                .outbox
                .report_ignored(Some(from), PoolProtocol::Asap, other.name()),
        }
    }

    /// Counts a malformed message; a sender of many loses the association.
    pub(super) fn on_malformed(
        &mut self,
        from: AssociationId,
        protocol: PoolProtocol,
        kind: DecodeErrorKind,
    ) {
        // Well-formed but unknown messages may come from a newer version.
        if matches!(
            kind,
            DecodeErrorKind::UnknownMessage(_) | DecodeErrorKind::UnexpectedParameter(_)
        ) {
            self.counters.malformed += 1;
            return self.outbox.report_ignored(
                Some(from),
                protocol,
                "unknown message or parameter",
            );
        }
        self.count_malformed(from);
    }

    fn count_malformed(&mut self, from: AssociationId) {
        self.counters.malformed += 1;
        let max = self.config.settings.limits.malformed_max;
        let Some(association) = self.associations.get_mut(from) else {
            return;
        };
        association.malformed_count += 1;
        if association.malformed_count == max {
            self.abort(from, "too many malformed messages");
        }
    }

    /// Handles a resolution (RFC 5352 section 3.3).
    #[inline]
    fn on_resolution(
        &mut self,
        from: AssociationId,
        handle: PoolHandle,
        items: Option<u32>,
        updates: bool,
        bytes: &[u8],
    ) {
        let association = self.associations.get(from);
        let Some(association) = association.filter(|a| a.may_resolve) else {
            self.counters.access_denied += 1;
            self.counters.resolutions_refused += 1;
            return self
                .outbox
                .refuse_resolution(from, handle, CauseCode::REJECTED_FOR_SECURITY);
        };
        // A request without the update flag ends a subscription to the pool.
        let noted = (updates || !association.pools.is_empty())
            && self.elements.space().pool(&handle).is_some()
            && self.subscribe(from, &handle, items, updates);
        match self.send_resolution(from, &handle, items, noted) {
            Ok(head_len) => {
                self.counters.resolutions += 1;
                if !noted {
                    self.cache_resolution(from, bytes, (&handle, items), head_len);
                }
            }
            Err(cause) => {
                self.counters.resolutions_refused += 1;
                self.outbox.refuse_resolution(from, handle, cause);
            }
        }
    }

    /// Sends elements of a pool, as its policy selects them. Returns the answer's length without elements.
    ///
    /// # Errors
    /// If nothing was sent: the pool does not exist, or one element alone is too long for a message. The caller must
    /// respond, RFC 5352 section 3.3: "MUST respond".
    #[inline]
    pub(super) fn send_resolution(
        &mut self,
        to: AssociationId,
        handle: &PoolHandle,
        items: Option<u32>,
        updates: bool,
    ) -> Result<usize, CauseCode> {
        let mut items = self.config.settings.answer_elements_max(items);
        let pool = self.elements.space().pool(handle);
        let policy = pool.ok_or(CauseCode::UNKNOWN_POOL_HANDLE)?.policy.zeroed();
        let (space, step) = (&mut self.elements, self.config.settings.distance_step);
        loop {
            let (mut found, mut head_len) = (0, 0);
            let sent = self.outbox.send_asap_with(to, |buffer| {
                let mut answer = ResolutionResponseEncoder::new(buffer, updates, handle, &policy);
                head_len = answer.length();
                space.resolve(handle, items, |element| {
                    found += 1;
                    element.payload().add_to_answer(step, &mut answer);
                });
                answer.finish()
            });
            match sent {
                Ok(()) => return Ok(head_len),
                // Elements have long descriptions: send fewer of them.
                Err(_) if found > 1 => items = found / 2,
                Err(_) => return Err(CauseCode::LACK_OF_RESOURCES),
            }
        }
    }
}
