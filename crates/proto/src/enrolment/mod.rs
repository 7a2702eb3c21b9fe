//! Admission of new hosts to a group: who gets a certificate for which join token.
//!
//! The operator makes a token at a node that has the group's authority, and carries it to the new host. The host proves
//! that it has the token and the key of its certificate request; the daemon verifies both proofs and gives the result to
//! this machine. A token serves one node, once: the use is on the disk before a certificate is signed. If the answer is
//! lost, the same node may repeat its request with the same key, for some minutes, unless a certificate of the token was
//! revoked or the name has another certificate.
//!
//! Wrong tokens are not counted: a token has 128 random bits, and a limit would let strangers keep out hosts with good
//! tokens.
//!
//! Times are wall-clock times since 1970, because tokens outlive the daemon.

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::collections::VecDeque;

use holdfast_wire::enrolment_state::{
    CertificateSerial, EnrolmentState, JoinTokenRecord, KeyDigest, TOKEN_CERTIFICATES_MAX,
    TOKENS_MAX, TokenId, TokenUse,
};
use holdfast_wire::membership_frames::{JoinRole, NodeName};

/// The settings of an [`Enrolment`]. [`EnrolmentConfig::default`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct EnrolmentConfig {
    /// Longest life of a token (24 h).
    pub lifetime_max: Duration,
    /// Time for which an ended token is remembered, so that its refusal says why (24 h).
    pub retention: Duration,
    /// Time after the first use of a token in which the same node may repeat its request (10 min).
    pub repetition_time: Duration,
}

impl Default for EnrolmentConfig {
    fn default() -> EnrolmentConfig {
        EnrolmentConfig {
            lifetime_max: Duration::from_secs(24 * 60 * 60),
            retention: Duration::from_secs(24 * 60 * 60),
            repetition_time: Duration::from_secs(10 * 60),
        }
    }
}

/// Identifies a request, chosen by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Identifies a save, unique during the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SaveToken(u64);

/// A host's request for a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The token that the host claims to have.
    pub token: TokenId,
    /// True if the host has proved that.
    pub is_proven: bool,
    /// Name that the host wants.
    pub name: NodeName,
    /// The records about the name; none if they cannot be read. Needed only if [`Enrolment::knows`] the token and the host
    /// has proved that it has the token.
    pub name_record: Option<NameRecord>,
    /// Key of the host's certificate request.
    pub key: KeyDigest,
    /// Serial number that the certificate gets if the host is admitted.
    pub serial: CertificateSerial,
}

/// The records of the group and of its authority about a name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NameRecord {
    /// True if a node of the group has the name.
    pub is_node: bool,
    /// Certificates with the name that have not ended. Empty if this node has no authority.
    pub certificates: Vec<IssuedCertificate>,
}

/// A certificate that the authority has issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IssuedCertificate {
    /// The serial number.
    pub serial: CertificateSerial,
    /// True if the certificate is revoked.
    pub is_revoked: bool,
}

impl NameRecord {
    /// Returns true if a node has the name, or a certificate is in force that is not one of `own`.
    fn is_taken(&self, own: &[CertificateSerial]) -> bool {
        let is_other = |certificate: &IssuedCertificate| {
            !certificate.is_revoked && !own.contains(&certificate.serial)
        };
        self.is_node || self.certificates.iter().any(is_other)
    }

    /// Returns true if one of `own` is revoked.
    fn is_any_revoked(&self, own: &[CertificateSerial]) -> bool {
        let is_own_revoked = |certificate: &IssuedCertificate| {
            certificate.is_revoked && own.contains(&certificate.serial)
        };
        self.certificates.iter().any(is_own_revoked)
    }
}

/// Reason for refusing a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// The token is unknown here, or the host does not have it.
    UnknownToken,
    /// The token's time is over.
    ExpiredToken,
    /// Another node has used the token, or the same one too long ago or too often.
    UsedToken,
    /// The operator has revoked the token, or a certificate that was signed for the token.
    RevokedToken,
    /// Another node of the group has the name.
    NameTaken,
    /// The records about the name cannot be read.
    NameUnknown,
    /// The use of the token cannot be saved.
    NotSaved,
}

/// Reason for not making or revoking a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum TokenError {
    /// There are [`TOKENS_MAX`] tokens that have not ended.
    #[error("there are {TOKENS_MAX} tokens, the maximum; wait until one ends")]
    Full,
    /// The life of the token is zero or too long.
    #[error("the life of a token is at least 1 s and at most {0} s; choose another one")]
    Lifetime(u64),
    /// The token exists already.
    #[error("the token exists already; make another one")]
    Repeated,
    /// There is no such token.
    #[error("there is no such token here; `holdfast group token --list` shows those there are")]
    Unknown,
}

/// An action that the enrolment machine asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Replace the state on the disk by this one, durably, and then call `handle_saved`. One save is open at a time.
    Save {
        /// Token of the save, for `handle_saved`.
        token: SaveToken,
        /// The whole state.
        state: EnrolmentState,
    },
    /// The token is on the disk (or revoked there) and may be shown.
    TokenSaved {
        /// Token that was made or revoked.
        id: TokenId,
    },
    /// The token could not be saved: a new one does not exist, a revoked one is not revoked.
    TokenNotSaved {
        /// Token that could not be made or revoked.
        id: TokenId,
    },
    /// Sign the certificate that the request asks for, and send it.
    Sign {
        /// Request with the name and key to certify.
        request: RequestId,
        /// The highest role that the certificate admits to, as the operator said of the token.
        role: JoinRole,
    },
    /// Refuse the request.
    Refuse {
        /// Request to refuse.
        request: RequestId,
        /// Reason for refusing the host.
        reason: Refusal,
    },
}

/// A step that waits for a save.
#[derive(Debug)]
struct PendingStep {
    /// Revision of the state that must be on the disk.
    revision: u64,
    token: TokenId,
    /// The token before the step; none if the step made the token.
    former: Option<JoinTokenRecord>,
    /// The request that waits, and the role of its token; none for a step of the operator.
    request: Option<(RequestId, JoinRole)>,
}

/// The machine that decides which hosts get a certificate for a join token.
#[derive(Debug)]
pub struct Enrolment {
    config: EnrolmentConfig,
    state: EnrolmentState,
    /// Number of changes of the state.
    revision: u64,
    /// Revision that is being saved.
    open_save: Option<u64>,
    pending: Vec<PendingStep>,
    outputs: VecDeque<Output>,
}

impl Enrolment {
    /// Returns a machine with the tokens of the disk.
    pub fn new(config: EnrolmentConfig, state: EnrolmentState) -> Enrolment {
        Enrolment {
            config,
            state,
            revision: 0,
            open_save: None,
            pending: Vec::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Adds a new token with this life, for a host that may have this role at most. [`Output::TokenSaved`] or [`Output::TokenNotSaved`] follows.
    ///
    /// # Errors
    /// See [`TokenError`].
    pub fn handle_new_token(
        &mut self,
        now: Duration,
        id: TokenId,
        lifetime: Duration,
        role: JoinRole,
    ) -> Result<(), TokenError> {
        if lifetime.as_secs() == 0 || lifetime > self.config.lifetime_max {
            return Err(TokenError::Lifetime(self.config.lifetime_max.as_secs()));
        }
        if self.position(&id).is_some() {
            return Err(TokenError::Repeated);
        }
        self.forget_ended(now);
        if self.state.tokens.len() >= TOKENS_MAX {
            return Err(TokenError::Full);
        }
        self.state.tokens.push(JoinTokenRecord {
            id,
            expires_at_s: (now + lifetime).as_secs(),
            usage: TokenUse::Fresh,
            role,
        });
        self.save_step(id, None, None);
        Ok(())
    }

    /// Revokes the token with this beginning of its number (as [`TokenId`] is displayed). [`Output::TokenSaved`] or
    /// [`Output::TokenNotSaved`] follows. Returns the token.
    ///
    /// # Errors
    /// [`TokenError::Unknown`].
    pub fn handle_revoke_token(&mut self, displayed_id: &str) -> Result<TokenId, TokenError> {
        let found = (self.state.tokens.iter_mut())
            .find(|token| token.id.to_string() == displayed_id)
            .ok_or(TokenError::Unknown)?;
        let former = found.clone();
        found.usage = TokenUse::Revoked;
        let id = found.id;
        self.save_step(id, Some(former), None);
        Ok(id)
    }

    /// Returns true if the token was made here, even if it has ended.
    pub fn knows(&self, token: &TokenId) -> bool {
        self.position(token).is_some()
    }

    /// Handles a host's request. [`Output::Sign`] or [`Output::Refuse`] follows.
    pub fn handle_attempt(&mut self, now: Duration, request: RequestId, attempt: &Attempt) {
        match self.judge(now, attempt) {
            Ok(position) => {
                let token = &mut self.state.tokens[position];
                let former = token.clone();
                match &mut token.usage {
                    TokenUse::Used { certificates, .. } => certificates.push(attempt.serial),
                    usage => {
                        *usage = TokenUse::Used {
                            name: attempt.name.clone(),
                            key: attempt.key,
                            first_used_at_s: now.as_secs(),
                            certificates: vec![attempt.serial],
                        };
                    }
                }
                let role = former.role;
                self.save_step(attempt.token, Some(former), Some((request, role)));
            }
            Err(reason) => self.outputs.push_back(Output::Refuse { request, reason }),
        }
    }

    /// Handles the end of a save.
    pub fn handle_saved(&mut self, token: SaveToken, is_saved: bool) {
        let SaveToken(revision) = token;
        if self.open_save.take_if(|open| *open == revision).is_none() {
            return;
        }
        if !is_saved {
            // Steps that came later build on the failed ones. In the reverse order each finds the state that it changed.
            for step in std::mem::take(&mut self.pending).iter().rev() {
                self.undo(step);
                self.report(step, false);
            }
            return;
        }
        let (done, waiting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|step| step.revision <= revision);
        self.pending = waiting;
        for step in &done {
            self.report(step, true);
        }
        if !self.pending.is_empty() {
            self.begin_save();
        }
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns all tokens that are remembered.
    pub fn tokens(&self) -> &[JoinTokenRecord] {
        &self.state.tokens
    }

    /// Returns the position of the token for which a certificate may be signed.
    fn judge(&self, now: Duration, attempt: &Attempt) -> Result<usize, Refusal> {
        let position = self.position(&attempt.token).filter(|_| attempt.is_proven);
        let position = position.ok_or(Refusal::UnknownToken)?;
        let token = &self.state.tokens[position];
        if now.as_secs() >= token.expires_at_s {
            return Err(Refusal::ExpiredToken);
        }
        let record = attempt.name_record.as_ref().ok_or(Refusal::NameUnknown);
        match &token.usage {
            TokenUse::Revoked => Err(Refusal::RevokedToken),
            TokenUse::Fresh => match record?.is_taken(&[]) {
                true => Err(Refusal::NameTaken),
                false => Ok(position),
            },
            TokenUse::Used {
                name,
                key,
                first_used_at_s,
                certificates,
            } => {
                let end_s = first_used_at_s.saturating_add(self.config.repetition_time.as_secs());
                let is_repetition = *name == attempt.name && *key == attempt.key;
                if !is_repetition
                    || now.as_secs() >= end_s
                    || certificates.len() >= TOKEN_CERTIFICATES_MAX
                {
                    return Err(Refusal::UsedToken);
                }
                let record = record?;
                match (
                    record.is_any_revoked(certificates),
                    record.is_taken(certificates),
                ) {
                    (true, _) => Err(Refusal::RevokedToken),
                    (false, true) => Err(Refusal::UsedToken),
                    (false, false) => Ok(position),
                }
            }
        }
    }

    fn position(&self, id: &TokenId) -> Option<usize> {
        self.state.tokens.iter().position(|token| token.id == *id)
    }

    /// Removes tokens whose end is `retention` ago.
    fn forget_ended(&mut self, now: Duration) {
        let retention_s = self.config.retention.as_secs();
        let is_kept = |token: &JoinTokenRecord| {
            token.expires_at_s.saturating_add(retention_s) > now.as_secs()
        };
        self.state.tokens.retain(is_kept);
    }

    fn save_step(
        &mut self,
        token: TokenId,
        former: Option<JoinTokenRecord>,
        request: Option<(RequestId, JoinRole)>,
    ) {
        self.revision += 1;
        self.pending.push(PendingStep {
            revision: self.revision,
            token,
            former,
            request,
        });
        if self.open_save.is_none() {
            self.begin_save();
        }
    }

    fn begin_save(&mut self) {
        self.open_save = Some(self.revision);
        self.outputs.push_back(Output::Save {
            token: SaveToken(self.revision),
            state: self.state.clone(),
        });
    }

    fn undo(&mut self, step: &PendingStep) {
        let Some(position) = self.position(&step.token) else {
            return;
        };
        match &step.former {
            Some(former) => self.state.tokens[position] = former.clone(),
            None => drop(self.state.tokens.remove(position)),
        }
    }

    fn report(&mut self, step: &PendingStep, is_saved: bool) {
        let id = step.token;
        self.outputs.push_back(match (step.request, is_saved) {
            (Some((request, role)), true) => Output::Sign { request, role },
            (Some((request, _)), false) => Output::Refuse {
                request,
                reason: Refusal::NotSaved,
            },
            (None, true) => Output::TokenSaved { id },
            (None, false) => Output::TokenNotSaved { id },
        });
    }
}
