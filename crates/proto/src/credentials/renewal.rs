//! Renewal of this node's certificate, and of peers' certificates by a node that has the authority.

use core::time::Duration;
use std::collections::BTreeMap;

use bytes::Bytes;
use holdfast_wire::NodeId;
use holdfast_wire::credential_frames::{
    CERTIFICATE_BYTES_MAX, CERTIFICATE_REQUEST_BYTES_MAX, CredentialFrame, RenewalRefusal,
};
use rand::Rng;

use super::{Command, Credentials, Event, InstallError};

/// Part of a certificate's life that remains when its renewal begins: a third.
pub const LIFE_LEFT: u32 = 3;
/// Part of a certificate's life over which the renewals of a group are spread.
const SPREAD: u32 = 20;

/// Renewal of this node's certificate.
#[derive(Debug, Default)]
pub(super) struct Renewal {
    /// Random position in the spread, constant while the daemon runs.
    position: Option<f64>,
    due: Option<Duration>,
    attempt: Option<Attempt>,
    /// True if the last attempt failed.
    has_failed: bool,
    /// True if the last attempt found nobody to ask.
    waits_for_peer: bool,
}

/// An attempt to get a new certificate.
#[derive(Debug)]
struct Attempt {
    state: AttemptState,
    /// The request; empty until the daemon has made it.
    request: Bytes,
    /// Nodes that were asked and gave no certificate.
    excluded: Vec<NodeId>,
    /// Reason why the node that was asked last gave no certificate.
    problem: String,
}

#[derive(Debug)]
enum AttemptState {
    /// The daemon makes the certificate request.
    MakesRequest,
    /// A node was asked for the certificate.
    Asked { signer: NodeId, timeout: Duration },
    /// The daemon checks and saves the certificate of `signer`.
    Installs { signer: NodeId },
}

impl Renewal {
    pub(super) fn next_timeout(&self) -> Option<Duration> {
        match &self.attempt {
            None => self.due,
            Some(attempt) => match attempt.state {
                AttemptState::Asked { timeout, .. } => Some(timeout),
                _ => None,
            },
        }
    }
}

/// Renewals of peers' certificates that this node signs.
#[derive(Debug, Default)]
pub(super) struct PeerRenewals {
    /// Time of the last renewal of each peer.
    last: BTreeMap<NodeId, Duration>,
    /// Peers whose certificates are being signed.
    open: Vec<NodeId>,
}

impl Credentials {
    /// Sets the remaining and the whole life of this node's certificate. The daemon calls this function at its start, after
    /// each new certificate, and from time to time, because the clock of the machine may stand while the host sleeps.
    pub fn handle_certificate(&mut self, now: Duration, left: Duration, life: Duration) {
        let random = &mut self.random;
        let position = *(self.renewal.position).get_or_insert_with(|| random.random::<f64>());
        let begins = left.saturating_sub(life / LIFE_LEFT);
        let spread = (life / SPREAD).min((left - begins) / 2);
        let due = now + begins + spread.mul_f64(position);
        self.renewal.due = Some(match self.renewal.due {
            // A failed attempt has set the time.
            Some(set) if begins.is_zero() && self.renewal.has_failed => set,
            // Once the renewal may begin, its time comes closer with each call.
            Some(set) if begins.is_zero() => set.min(due),
            _ => due,
        });
    }

    pub(super) fn on_renewal_timeout(&mut self, now: Duration) {
        match &self.renewal.attempt {
            None if self.renewal.due.is_some_and(|due| due <= now) => {
                self.renewal.attempt = Some(Attempt {
                    state: AttemptState::MakesRequest,
                    request: Bytes::new(),
                    excluded: Vec::new(),
                    problem: "no node is connected".to_owned(),
                });
                self.execute(Command::MakeRequest);
            }
            Some(Attempt {
                state: AttemptState::Asked { timeout, .. },
                ..
            }) if *timeout <= now => self.ask_next_signer(now, "no answer came in time".to_owned()),
            _ => {}
        }
    }

    /// Handles the request that the daemon made, or the reason why there is none.
    pub fn handle_request(&mut self, now: Duration, request: Result<Bytes, String>) {
        let Some(attempt) = &mut self.renewal.attempt else {
            return;
        };
        match request {
            Ok(request) => {
                attempt.request = request;
                match self.config.has_authority {
                    true => self.ask_signer(now, self.config.node),
                    false => self.ask_next_signer(now, String::new()),
                }
            }
            Err(error) => self.end_attempt(now, Some(error)),
        }
    }

    /// Handles the end of [`Command::Install`].
    pub fn handle_installed(&mut self, now: Duration, result: Result<(), InstallError>) {
        let Some(Attempt {
            state: AttemptState::Installs { signer },
            ..
        }) = self.renewal.attempt
        else {
            return;
        };
        match result {
            Ok(()) => self.end_attempt(now, None),
            Err(InstallError::Certificate(error)) => {
                let problem = format!("node {signer}: {error}");
                self.report(Event::CertificateRefused {
                    from: signer,
                    error,
                });
                self.ask_next_signer(now, problem);
            }
            Err(InstallError::Host(error)) => self.end_attempt(now, Some(error)),
        }
    }

    /// Handles the end of [`Command::Sign`].
    pub fn handle_signed(
        &mut self,
        now: Duration,
        requester: NodeId,
        result: Result<Bytes, RenewalRefusal>,
    ) {
        if requester == self.config.node {
            match result {
                Ok(certificate) => self.on_renewed(now, requester, certificate),
                Err(reason) => self.on_renewal_refused(now, requester, reason),
            }
            return;
        }
        self.peer_renewals.open.retain(|open| *open != requester);
        match result {
            Ok(certificate) => {
                self.peer_renewals.last.insert(requester, now);
                self.send(requester, CredentialFrame::Renewed { certificate });
                self.report(Event::RenewedPeer { peer: requester });
            }
            Err(reason) => self.refuse_renewal(requester, reason),
        }
    }

    pub(super) fn on_renewal_request(&mut self, now: Duration, from: NodeId, request: Bytes) {
        let interval_min = self.config.renewal_interval_min;
        self.peer_renewals
            .last
            .retain(|_, last| *last + interval_min > now);
        let is_open = self.peer_renewals.open.contains(&from);
        if !self.config.has_authority {
            self.send(
                from,
                CredentialFrame::RenewalRefused {
                    reason: RenewalRefusal::NoAuthority,
                },
            );
        } else if request.len() > CERTIFICATE_REQUEST_BYTES_MAX {
            self.refuse_renewal(from, RenewalRefusal::BadRequest);
        } else if is_open || self.peer_renewals.last.contains_key(&from) {
            self.refuse_renewal(from, RenewalRefusal::TooSoon);
        } else {
            self.peer_renewals.open.push(from);
            self.execute(Command::Sign {
                requester: from,
                request,
            });
        }
    }

    fn refuse_renewal(&mut self, peer: NodeId, reason: RenewalRefusal) {
        self.send(peer, CredentialFrame::RenewalRefused { reason });
        self.report(Event::RefusedPeer { peer, reason });
    }

    pub(super) fn on_renewed(&mut self, now: Duration, from: NodeId, certificate: Bytes) {
        if !self.is_asked(from) {
            return;
        }
        if certificate.len() > CERTIFICATE_BYTES_MAX {
            return self.ask_next_signer(now, format!("node {from} sent too long a certificate"));
        }
        if let Some(attempt) = &mut self.renewal.attempt {
            attempt.state = AttemptState::Installs { signer: from };
            self.execute(Command::Install { certificate });
        }
    }

    pub(super) fn on_renewal_refused(
        &mut self,
        now: Duration,
        from: NodeId,
        reason: RenewalRefusal,
    ) {
        if self.is_asked(from) {
            self.ask_next_signer(now, format!("node {from}: {reason}"));
        }
    }

    /// Begins at once if the last attempt found nobody to ask.
    pub(super) fn on_signer_connected(&mut self, now: Duration) {
        if std::mem::take(&mut self.renewal.waits_for_peer) {
            self.renewal.due = Some(now);
        }
    }

    pub(super) fn on_signer_lost(&mut self, now: Duration, peer: NodeId) {
        if self.is_asked(peer) {
            self.ask_next_signer(now, format!("the connection to node {peer} was lost"));
        }
    }

    fn is_asked(&self, node: NodeId) -> bool {
        let attempt = self.renewal.attempt.as_ref();
        attempt.is_some_and(
            |attempt| matches!(attempt.state, AttemptState::Asked { signer, .. } if signer == node),
        )
    }

    /// Gives up the node that was asked, for `problem`, and asks the next one.
    fn ask_next_signer(&mut self, now: Duration, problem: String) {
        let Some(attempt) = &mut self.renewal.attempt else {
            return;
        };
        match attempt.state {
            AttemptState::MakesRequest => attempt.excluded.push(self.config.node),
            AttemptState::Asked { signer, .. } | AttemptState::Installs { signer } => {
                attempt.excluded.push(signer);
            }
        }
        if !problem.is_empty() {
            attempt.problem = problem;
        }
        let contact = self
            .contact
            .filter(|contact| self.peers.contains_key(contact));
        let mut candidates = contact.into_iter().chain(self.peers.keys().copied());
        let next = candidates.find(|candidate| !attempt.excluded.contains(candidate));
        match next {
            Some(signer) => self.ask_signer(now, signer),
            None => {
                let problem = attempt.problem.clone();
                self.renewal.waits_for_peer = self.peers.is_empty();
                self.end_attempt(now, Some(problem));
            }
        }
    }

    /// Asks a node to sign this node's renewed certificate.
    fn ask_signer(&mut self, now: Duration, signer: NodeId) {
        let Some(attempt) = &mut self.renewal.attempt else {
            return;
        };
        attempt.state = AttemptState::Asked {
            signer,
            timeout: now + self.config.renewal_timeout,
        };
        let request = attempt.request.clone();
        match signer == self.config.node {
            true => self.execute(Command::Sign {
                requester: signer,
                request,
            }),
            false => self.send(signer, CredentialFrame::RenewalRequest { request }),
        }
    }

    /// Ends the attempt. After a success the daemon sets the times of the new certificate.
    fn end_attempt(&mut self, now: Duration, problem: Option<String>) {
        self.renewal.attempt = None;
        self.renewal.has_failed = problem.is_some();
        match problem {
            None => {
                self.renewal.due = None;
                self.report(Event::Renewed);
            }
            Some(error) => {
                self.renewal.due = Some(now + self.config.renewal_retry);
                self.report(Event::RenewalFailed { error });
            }
        }
    }
}
