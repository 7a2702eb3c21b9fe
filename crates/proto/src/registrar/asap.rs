//! ASAP (RFC 5352): messages of elements and users, and resolution.

use super::hosts::Verdict;
use super::{AssociationId, Event, Protocol, Registrar};
use bytes::Bytes;
use holdfast_wire::rserpool::asap::{Message, ResolutionResponse};
use holdfast_wire::rserpool::{Cause, CauseCode, ErrorKind, PoolHandle};
use std::net::IpAddr;
use std::time::Duration;

const ERROR: u8 = 0x0e;

impl Registrar {
    /// Handles an ASAP message of an association.
    pub fn handle_asap(&mut self, now: Duration, from: AssociationId, bytes: &Bytes) {
        let Some(known) = self.associations.get(from) else {
            return;
        };
        let (host, spoke) = (known.host, known.spoke);
        let (again, asked) = (known.granted.is_again(bytes), known.asked.is_again(bytes));
        if !self.admits_message(now, from, host) {
            return;
        }
        if again && self.register_again(now, from) || asked && self.resolve_again(from) {
            return;
        }
        match Message::parse(bytes) {
            Ok(parsed) => {
                if !spoke {
                    self.spoke(from);
                }
                let is_error = matches!(parsed.message, Message::Error(_));
                self.asap_message(now, from, parsed.message, bytes);
                if !is_error && !parsed.reports.is_empty() {
                    self.forget_granted(from);
                    self.forget_asked(from);
                    self.asap_report(from, parsed.reports);
                }
            }
            Err(error) => {
                // An error is never answered with an error.
                if bytes.first() != Some(&ERROR) {
                    self.asap_report(from, error.reports);
                }
                self.malformed(from, Protocol::Asap, error.kind);
            }
        }
    }

    /// Handles a message that belongs to neither protocol.
    pub fn handle_stray(&mut self, now: Duration, from: AssociationId) {
        let host = self.associations.get(from).map(|from| from.host);
        if host.is_some_and(|host| self.admits_message(now, from, host)) {
            self.garbage(from);
        }
    }

    /// Counts a message; returns false if its host sends too many.
    #[inline]
    fn admits_message(&mut self, now: Duration, from: AssociationId, host: IpAddr) -> bool {
        let limits = &self.config.settings.limits;
        let verdict = self.associations.hosts.message(now, host, limits);
        if verdict == Verdict::Admitted {
            return true;
        }
        self.counters.limited += 1;
        if verdict == Verdict::Enough {
            self.abort(from, "its host sends too much");
        }
        false
    }

    // Inlined, because every message passes here once, by value: its other caller, for parked registrations, would
    // cause a copy.
    #[inline(always)]
    pub(super) fn asap_message(
        &mut self,
        now: Duration,
        from: AssociationId,
        message: Message,
        bytes: &Bytes,
    ) {
        if let Message::Error(causes) = message {
            return self.told_errors(from, Protocol::Asap, &causes);
        }
        if !self.is_ready() {
            return self.ignored(Some(from), Protocol::Asap, "the registrar is starting");
        }
        match message {
            Message::Registration { handle, element } => {
                self.register(now, from, handle, element, bytes);
            }
            Message::HandleResolution {
                updates,
                handle,
                items,
            } => self.resolve(from, handle, items, updates, bytes),
            Message::Deregistration { handle, id } => self.deregister(from, handle, id),
            Message::EndpointKeepAliveAck { handle, id } => self.alive(now, from, &handle, id),
            Message::EndpointUnreachable { handle, id } => {
                self.unreachable(now, from, &handle, id);
            }
            // Other messages are sent by registrars only, or belong to the session layer.
            other => self.ignored(Some(from), Protocol::Asap, other.name()),
        }
    }

    /// Reports unrecognised parameters to the sender in an error message (RFC 5354 section 3).
    fn asap_report(&mut self, to: AssociationId, causes: Vec<Cause>) {
        if !causes.is_empty() {
            // Causes too long for a message are dropped.
            let _ = self.out.asap(to, &Message::Error(causes));
        }
    }

    /// Counts a malformed message; a sender of many loses the association.
    pub(super) fn malformed(&mut self, from: AssociationId, protocol: Protocol, kind: ErrorKind) {
        // Well-formed but unknown messages may come from a newer version.
        if matches!(
            kind,
            ErrorKind::UnknownMessage(_) | ErrorKind::UnexpectedParameter(_)
        ) {
            self.counters.malformed += 1;
            return self.ignored(Some(from), protocol, "unknown message or parameter");
        }
        self.garbage(from);
    }

    fn garbage(&mut self, from: AssociationId) {
        self.counters.malformed += 1;
        let max = self.config.settings.limits.malformed;
        let Some(association) = self.associations.get_mut(from) else {
            return;
        };
        association.malformed += 1;
        if association.malformed == max {
            self.abort(from, "too many malformed messages");
        }
    }

    pub(super) fn told_errors(
        &mut self,
        from: AssociationId,
        protocol: Protocol,
        causes: &[Cause],
    ) {
        let causes = causes.iter().map(|cause| cause.code).collect();
        self.out.event(Event::ErrorReported {
            from,
            protocol,
            causes,
        });
    }

    /// Handles a resolution (RFC 5352 section 3.3).
    #[inline]
    fn resolve(
        &mut self,
        from: AssociationId,
        handle: PoolHandle,
        items: Option<u32>,
        updates: bool,
        bytes: &[u8],
    ) {
        let association = self.associations.get(from);
        let Some(association) = association.filter(|a| a.may_resolve) else {
            self.counters.denied += 1;
            self.counters.resolutions_refused += 1;
            return self.refuse(from, handle, CauseCode::REJECTED_FOR_SECURITY);
        };
        // A request without the update flag ends a subscription to the pool.
        let noted = (updates || !association.pools.is_empty())
            && self.space.pool(&handle).is_some()
            && self.subscribe(from, &handle, items, updates);
        match self.answer(from, &handle, items, noted) {
            Ok(head_len) => {
                self.counters.resolutions += 1;
                if !noted {
                    self.keep_asked(from, bytes, (&handle, items), head_len);
                }
            }
            Err(cause) => {
                self.counters.resolutions_refused += 1;
                self.refuse(from, handle, cause);
            }
        }
    }

    /// Sends elements of a pool, as its policy selects them. Returns the answer's length without elements.
    ///
    /// # Errors
    /// If nothing was sent: the pool does not exist, or one element alone is too long for a message. The caller must
    /// respond, RFC 5352 section 3.3: "MUST respond".
    #[inline]
    pub(super) fn answer(
        &mut self,
        to: AssociationId,
        handle: &PoolHandle,
        items: Option<u32>,
        updates: bool,
    ) -> Result<usize, CauseCode> {
        let mut items = self.items(items);
        let pool = self.space.pool(handle);
        let policy = pool.ok_or(CauseCode::UNKNOWN_POOL_HANDLE)?.policy.zeroed();
        let (space, step) = (&mut self.space, self.config.settings.distance_step);
        loop {
            let (mut found, mut head_len) = (0, 0);
            let sent = self.out.asap_with(to, |buffer| {
                let mut answer = ResolutionResponse::new(buffer, updates, handle, &policy);
                head_len = answer.length();
                space.resolve(handle, items, |element| {
                    found += 1;
                    element.payload().tell(step, &mut answer);
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

    /// Returns the highest number of elements in the answer to a resolution.
    #[inline]
    pub(super) fn items(&self, asked: Option<u32>) -> usize {
        let settings = &self.config.settings;
        let items = asked.map_or(settings.resolution_items, |items| items as usize);
        items.min(settings.resolution_items_max)
    }

    /// Answers a resolution with a cause.
    pub(super) fn refuse(&mut self, to: AssociationId, handle: PoolHandle, cause: CauseCode) {
        let message = Message::HandleResolutionResponse {
            updates: false,
            handle,
            policy: None,
            elements: Vec::new(),
            causes: vec![cause.into()],
        };
        let _ = self.out.asap(to, &message);
    }
}
