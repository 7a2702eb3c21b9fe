//! Join tokens: the machine of `proto::enrolment` with its file, and the requests that wait for it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use holdfast_api::control::{ErrorBody, NewToken, TokenEntry, TokenList, TokenState};
use holdfast_api::enrolment::{AuthorityId, EnrolmentRefusal, JoinToken, TokenKey, digest};
use holdfast_daemon::private_files::replace_file;
use holdfast_proto::enrolment::{
    Attempt, Enrolment, EnrolmentConfig, NameRecord, Output, Refusal, RequestId, TokenError,
};
use holdfast_wire::enrolment_state::{
    CertificateSerial, EnrolmentState, JoinTokenRecord, KeyDigest, TokenId, TokenUse,
};
use holdfast_wire::membership_frames::JoinRole;

use super::enrolment_port::Applicant;
use super::node_role;

/// The join tokens of this node.
pub(super) struct Tokens {
    machine: Enrolment,
    path: PathBuf,
    requests: u64,
}

/// Decision about a host that asks for a certificate.
pub(super) enum Decision {
    /// Sign the host's certificate request, for this role.
    Sign(JoinRole),
    /// Refuse to sign the host's request, for this reason.
    Refuse(EnrolmentRefusal),
}

impl Tokens {
    /// Reads the tokens in the file `path`, which may be missing.
    pub(super) fn open(path: &Path) -> io::Result<Tokens> {
        let state = match std::fs::read(path) {
            Ok(bytes) => EnrolmentState::decode(&bytes).map_err(|error| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {error}", path.display()),
                )
            })?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => EnrolmentState::default(),
            Err(error) => return Err(error),
        };
        Ok(Tokens {
            machine: Enrolment::new(EnrolmentConfig::default(), state),
            path: path.to_owned(),
            requests: 0,
        })
    }

    /// Makes a token of this authority, whose revocation list has the number `list_number`, for `lifetime_s` seconds,
    /// for a host that may have `role` at most. `address` is that of the enrolment port.
    pub(super) fn make(
        &mut self,
        authority: AuthorityId,
        list_number: Option<u64>,
        (lifetime_s, role): (u64, JoinRole),
        address: String,
    ) -> Result<NewToken, ErrorBody> {
        let token = JoinToken::generate(authority).map_err(|error| ErrorBody {
            error: format!("no random numbers: {error}"),
            what_to_do: "check /dev/urandom".to_owned(),
        })?;
        let token = token.require_list(list_number.unwrap_or(0));
        let id = TokenId(TokenKey::new(&token).id());
        let lifetime = Duration::from_secs(lifetime_s);
        self.machine
            .handle_new_token(since_epoch(), id, lifetime, role)
            .map_err(refusal)?;
        self.settle(RequestId(0));
        let record = self.record(&id).ok_or_else(|| self.not_saved())?;
        tracing::info!(token = %id, lifetime_s, ?role, "made a join token");
        Ok(NewToken {
            token: token.to_string(),
            id: id.to_string(),
            expires_at_s: record.expires_at_s,
            address,
        })
    }

    /// Revokes the token with this number.
    pub(super) fn revoke(&mut self, displayed_id: &str) -> Result<TokenEntry, ErrorBody> {
        let id = self
            .machine
            .handle_revoke_token(displayed_id)
            .map_err(refusal)?;
        self.settle(RequestId(0));
        let record = self.record(&id);
        let revoked = record.filter(|record| record.usage == TokenUse::Revoked);
        let entry = revoked.map(entry).ok_or_else(|| self.not_saved())?;
        tracing::info!(token = %id, "revoked a join token");
        Ok(entry)
    }

    /// Returns all tokens that are remembered.
    pub(super) fn list(&self) -> TokenList {
        TokenList {
            tokens: self.machine.tokens().iter().map(entry).collect(),
        }
    }

    /// Returns true if the applicant has proved that it has a token of this node.
    pub(super) fn knows(&self, applicant: &Applicant) -> bool {
        applicant.is_proven && self.machine.knows(&TokenId(applicant.token))
    }

    /// Decides about an applicant. The decision to sign is on the disk. `name_record` has the records about the applicant's
    /// name, and is needed only if the node [knows](Tokens::knows) the applicant; `serial` is for the certificate to sign.
    pub(super) fn decide(
        &mut self,
        applicant: &Applicant,
        name_record: Option<NameRecord>,
        serial: CertificateSerial,
    ) -> Decision {
        let Ok(name) = applicant.request.name().parse() else {
            return Decision::Refuse(EnrolmentRefusal::Request("it names no node".to_owned()));
        };
        self.requests += 1;
        let request = RequestId(self.requests);
        let attempt = Attempt {
            token: TokenId(applicant.token),
            is_proven: applicant.is_proven,
            name,
            name_record,
            key: KeyDigest(digest(applicant.request.public_key())),
            serial,
        };
        self.machine
            .handle_attempt(since_epoch(), request, &attempt);
        self.settle(request)
            .unwrap_or_else(|| Decision::Refuse(refusal_of(Refusal::NotSaved)))
    }

    /// Carries out the machine's outputs. Returns the decision about `request`.
    fn settle(&mut self, request: RequestId) -> Option<Decision> {
        let mut decision = None;
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Save { token, state } => {
                    let saved = self.save(&state);
                    if let Err(error) = &saved {
                        tracing::error!(%error, "cannot save the join tokens");
                    }
                    self.machine.handle_saved(token, saved.is_ok());
                }
                Output::Sign {
                    request: decided,
                    role,
                } if decided == request => decision = Some(Decision::Sign(role)),
                Output::Refuse {
                    request: decided,
                    reason,
                } if decided == request => decision = Some(Decision::Refuse(refusal_of(reason))),
                // Saves are carried out at once, so that no other request waits.
                Output::Sign { .. } | Output::Refuse { .. } => {}
                // The state of the token tells the same.
                Output::TokenSaved { .. } | Output::TokenNotSaved { .. } => {}
            }
        }
        decision
    }

    fn save(&self, state: &EnrolmentState) -> io::Result<()> {
        let bytes = state.encode().map_err(io::Error::other)?;
        replace_file(&self.path, &bytes)
    }

    fn record(&self, id: &TokenId) -> Option<&JoinTokenRecord> {
        self.machine.tokens().iter().find(|token| token.id == *id)
    }

    fn not_saved(&self) -> ErrorBody {
        ErrorBody {
            error: format!("the token cannot be saved in {}", self.path.display()),
            what_to_do: "see the daemon's log".to_owned(),
        }
    }
}

fn entry(record: &JoinTokenRecord) -> TokenEntry {
    let is_expired = since_epoch().as_secs() >= record.expires_at_s;
    let (state, node) = match &record.usage {
        TokenUse::Used { name, .. } => (TokenState::Used, Some(name.to_string())),
        TokenUse::Revoked => (TokenState::Revoked, None),
        TokenUse::Fresh if is_expired => (TokenState::Expired, None),
        TokenUse::Fresh => (TokenState::Fresh, None),
    };
    TokenEntry {
        id: record.id.to_string(),
        expires_at_s: record.expires_at_s,
        state,
        node,
        role: node_role(record.role),
    }
}

fn refusal(error: TokenError) -> ErrorBody {
    let text = error.to_string();
    let (error, what_to_do) = text
        .split_once("; ")
        .unwrap_or((&text, "see `holdfast group token --list`"));
    ErrorBody {
        error: error.to_owned(),
        what_to_do: what_to_do.to_owned(),
    }
}

fn refusal_of(reason: Refusal) -> EnrolmentRefusal {
    match reason {
        Refusal::UnknownToken => EnrolmentRefusal::UnknownToken,
        Refusal::ExpiredToken => EnrolmentRefusal::ExpiredToken,
        Refusal::UsedToken => EnrolmentRefusal::UsedToken,
        Refusal::RevokedToken => EnrolmentRefusal::RevokedToken,
        Refusal::NameTaken => EnrolmentRefusal::NameTaken,
        Refusal::NameUnknown => {
            EnrolmentRefusal::Failed("the records about the name cannot be read".to_owned())
        }
        Refusal::NotSaved => {
            EnrolmentRefusal::Failed("the use of the token cannot be saved".to_owned())
        }
    }
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}
