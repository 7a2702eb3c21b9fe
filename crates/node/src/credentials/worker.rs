//! The thread that signs, verifies, and writes the files of certificates, revocation lists and tokens.

use std::io;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::sync::mpsc::Receiver;
use std::time::SystemTime;

use bytes::Bytes;
use holdfast_api::ca::{
    CaError, CertificateAuthority, CertificateRequest, CertificateTerms, NodeKey,
    SignedCertificate, certificate_to_pem, random_serial,
};
use holdfast_api::control::{ErrorBody, RevocationStatus};
use holdfast_api::enrolment::{
    EnrolmentAnswer, EnrolmentRefusal, JoinSettings, certificate_matches,
};
use holdfast_daemon::log_limit::LogLimit;
use holdfast_daemon::private_files::{private_directory, replace_file};
use holdfast_daemon::tls::{
    CertificateContent, RevocationLists, enrolment_server_config, read_certificates, read_content,
};
use holdfast_proto::credentials::{InstallError, LIFE_LEFT};
use holdfast_proto::enrolment::{IssuedCertificate, NameRecord};
use holdfast_sys::caps::keep_only_capabilities;
use holdfast_wire::credential_frames::{REVOCATION_LIST_BYTES_MAX, RenewalRefusal};
use holdfast_wire::enrolment_state::CertificateSerial;
use holdfast_wire::membership_frames::JoinRole;
use rustls::pki_types::CertificateDer;
use tokio::sync::mpsc::UnboundedSender;

use super::enrolment_port::{Applicant, SharedServerConfig};
use super::loaded::lists_path;
use super::tokens::{Decision, Tokens};
use super::{
    GroupKnowledge, ListSource, LoadedCredentials, TokenCommand, WorkerCommand, WorkerEvent,
    configured_group, list_entry, node_role,
};
use crate::config::{Config, JoiningConfig};
use crate::metrics::Metrics;

/// State of the thread that handles certificates, revocation lists and join tokens.
pub(super) struct Worker {
    config: Config,
    lists: RevocationLists,
    group: GroupKnowledge,
    metrics: Metrics,
    events: UnboundedSender<WorkerEvent>,
    enrolment: Option<EnrolmentDesk>,
    /// Limits lines about refused hosts.
    refusal_log: LogLimit,
}

/// State of enrolment, if this node has `[joining]`.
struct EnrolmentDesk {
    joining: JoiningConfig,
    tokens: Tokens,
    server_config: SharedServerConfig,
}

/// Drops all capabilities of the calling thread: hosts that nobody knows can talk to the thread.
pub(super) fn drop_all_capabilities() {
    if let Err(error) = keep_only_capabilities(&[]) {
        tracing::warn!(%error, "a thread of certificates keeps its capabilities");
    }
}

impl Worker {
    pub(super) fn new(
        config: &Config,
        loaded: &LoadedCredentials,
        metrics: Metrics,
        events: UnboundedSender<WorkerEvent>,
        server_config: Option<SharedServerConfig>,
    ) -> io::Result<Worker> {
        private_directory(&config.credentials_dir())?;
        let enrolment = match (&config.joining, server_config) {
            (Some(joining), Some(server_config)) => Some(EnrolmentDesk {
                joining: joining.clone(),
                tokens: Tokens::open(&config.credentials_dir().join("tokens"))?,
                server_config,
            }),
            _ => None,
        };
        Ok(Worker {
            config: config.clone(),
            lists: loaded.lists.clone(),
            group: configured_group(config),
            metrics,
            events,
            enrolment,
            refusal_log: LogLimit::default(),
        })
    }

    /// Carries out commands until their senders are gone.
    pub(super) fn run(mut self, commands: &Receiver<WorkerCommand>) {
        drop_all_capabilities();
        while let Ok(command) = commands.recv() {
            self.execute(command);
        }
    }

    fn execute(&mut self, command: WorkerCommand) {
        match command {
            WorkerCommand::ApplyList(source, list) => self.apply_list(source, &list),
            WorkerCommand::Reload => self.reload(),
            WorkerCommand::MakeRequest => {
                let request = self.make_request();
                self.report(WorkerEvent::RequestMade(request));
            }
            WorkerCommand::Sign {
                requester,
                name,
                certificate,
                request,
            } => {
                let result = self.sign_renewal(&name, certificate, &request);
                self.report(WorkerEvent::Signed { requester, result });
            }
            WorkerCommand::Install(certificate) => {
                let result = self.install(&certificate);
                self.report(WorkerEvent::Installed(result));
            }
            WorkerCommand::SetGroup(group) => self.group = group,
            WorkerCommand::Token(command) => self.on_token_command(command),
            WorkerCommand::Revocations(reply) => drop(reply.send(Ok(self.revocation_status()))),
            WorkerCommand::Enrol(applicant) => self.enrol(&applicant),
        }
    }

    fn report(&self, event: WorkerEvent) {
        // The event loop has ended if nobody receives.
        let _ = self.events.send(event);
    }

    fn apply_list(&mut self, source: ListSource, der: &[u8]) {
        let applied = self.put_list_in_force(der);
        match source {
            ListSource::Peer(from) => match applied {
                Ok(loaded) => self.report_change(loaded, Some(from)),
                Err(error) => self.report(WorkerEvent::ListRefused { from, error }),
            },
            ListSource::Operator(reply) => {
                let answer = match applied {
                    Ok(loaded) => {
                        self.report_change(loaded, None);
                        Ok(self.revocation_status())
                    }
                    Err(error) => Err(ErrorBody {
                        error,
                        what_to_do: "send the newest list that `holdfast ca revoke` made"
                            .to_owned(),
                    }),
                };
                let _ = reply.send(answer);
            }
        }
    }

    /// Verifies and saves a list. If that fails, the former lists stay in force.
    fn put_list_in_force(&mut self, der: &[u8]) -> Result<LoadedCredentials, String> {
        if der.len() > REVOCATION_LIST_BYTES_MAX {
            return Err(format!(
                "a revocation list of {} bytes is too long",
                der.len()
            ));
        }
        let mut lists = self.lists.clone();
        let added = lists.add(der).map_err(|error| error.to_string())?;
        let loaded = LoadedCredentials::with_lists(&self.config, lists)
            .map_err(|error| error.to_string())?;
        replace_file(&lists_path(&self.config), &loaded.lists.to_bytes())
            .map_err(|error| format!("the revocation list cannot be saved: {error}"))?;
        self.lists = loaded.lists.clone();
        tracing::info!(
            authority = %added.authority,
            number = added.number,
            revoked = added.revoked,
            "a new revocation list is in force"
        );
        Ok(loaded)
    }

    fn reload(&mut self) {
        match LoadedCredentials::load(&self.config) {
            Ok(loaded) => {
                self.lists = loaded.lists.clone();
                self.refresh_enrolment_port();
                self.report_change(loaded, None);
            }
            Err(error) => self.report(WorkerEvent::ReloadFailed {
                error: error.to_string(),
            }),
        }
    }

    fn report_change(&self, loaded: LoadedCredentials, list_source: Option<holdfast_wire::NodeId>) {
        self.report(WorkerEvent::Changed {
            loaded: Box::new(loaded),
            list_source,
        });
    }

    /// Gives the enrolment port the node's new certificate.
    fn refresh_enrolment_port(&self) {
        let Some(desk) = &self.enrolment else {
            return;
        };
        match enrolment_server_config(&self.config.tls) {
            Ok(config) => {
                *desk
                    .server_config
                    .write()
                    .unwrap_or_else(PoisonError::into_inner) = config;
            }
            Err(error) => {
                tracing::error!(%error, "the enrolment port keeps the former certificate");
            }
        }
    }

    fn make_request(&self) -> Result<Bytes, String> {
        let path = &self.config.tls.key;
        let pem = std::fs::read_to_string(path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        let request = NodeKey::from_pem(&pem).and_then(|key| key.request(&self.config.node.name));
        let request = request.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(request.der.into())
    }

    /// Signs a request for the name and key of the certificate that the requester has shown; without one, of the certificate
    /// of this node.
    fn sign_renewal(
        &self,
        name: &str,
        certificate: Option<CertificateDer<'static>>,
        request: &[u8],
    ) -> Result<Bytes, RenewalRefusal> {
        let (dir, days) = self.authority().ok_or(RenewalRefusal::NoAuthority)?;
        let present = match certificate {
            Some(certificate) => read_content(&certificate),
            None if name == self.config.node.name => self.present_certificate(),
            None => None,
        };
        let present = present.ok_or(RenewalRefusal::BadRequest)?;
        let request = CertificateRequest::from_der(request)
            .ok()
            .filter(|request| request.name() == name && request.public_key() == present.public_key)
            .ok_or(RenewalRefusal::BadRequest)?;
        let serial = serial_of(&present.serial);
        let terms = CertificateTerms {
            days,
            role: present.role,
        };
        match CertificateAuthority::open(&dir)
            .and_then(|authority| authority.renew(&request, terms, serial.0))
        {
            Ok(signed) => {
                tracing::info!(node = name, serial = signed.serial, "renewed a certificate");
                Ok(signed.der.into())
            }
            Err(error) => {
                tracing::error!(%error, node = name, "cannot renew a certificate");
                Err(RenewalRefusal::Failed)
            }
        }
    }

    /// Returns the certificate of this node, none if its file cannot be read.
    fn present_certificate(&self) -> Option<CertificateContent> {
        let certificates = read_certificates(&self.config.tls.cert).ok()?;
        read_content(certificates.first()?)
    }

    fn authority(&self) -> Option<(PathBuf, u32)> {
        let joining = &self.enrolment.as_ref()?.joining;
        Some((joining.authority.clone()?, joining.days))
    }

    /// Puts a renewed certificate in force, if it is better than the present one.
    fn install(&mut self, der: &[u8]) -> Result<(), InstallError> {
        let tls = &self.config.tls;
        let key = std::fs::read_to_string(&tls.key)
            .map_err(|error| InstallError::Host(format!("{}: {error}", tls.key.display())))?;
        let authorities =
            read_certificates(&tls.ca).map_err(|error| InstallError::Host(error.to_string()))?;
        let mut problem = "there is no authority".to_owned();
        let fits = authorities.iter().any(|authority| {
            certificate_matches(der, authority, &self.config.node.name, &key)
                .map_err(|error| problem = error.to_string())
                .is_ok()
        });
        if !fits {
            return Err(InstallError::Certificate(format!(
                "the new certificate is refused: {problem}"
            )));
        }
        let new = read_content(&CertificateDer::from(der));
        let present = self.present_certificate();
        if !new.is_some_and(|new| is_renewal(&new, present.as_ref(), SystemTime::now())) {
            return Err(InstallError::Certificate(
                "the new certificate is an old one".to_owned(),
            ));
        }
        let former = std::fs::read(&tls.cert).unwrap_or_default();
        replace_file(&tls.cert, certificate_to_pem(der).as_bytes()).map_err(|error| {
            InstallError::Host(format!(
                "{error}; let the daemon write there, or keep the files of [tls] in state_dir"
            ))
        })?;
        match LoadedCredentials::with_lists(&self.config, self.lists.clone()) {
            Ok(loaded) => {
                self.refresh_enrolment_port();
                self.report_change(loaded, None);
                Ok(())
            }
            Err(error) => {
                // The former certificate is still in use, and must be found at the next start.
                let restored = replace_file(&tls.cert, &former);
                let restored = restored.map_or_else(|error| error.to_string(), |()| String::new());
                Err(InstallError::Certificate(format!(
                    "the new certificate is refused: {error}; {restored}"
                )))
            }
        }
    }

    fn on_token_command(&mut self, command: TokenCommand) {
        let no_joining = || ErrorBody {
            error: "no host can join at this node".to_owned(),
            what_to_do: "add a section [joining] to the configuration, and restart the daemon"
                .to_owned(),
        };
        let authority = self.lists.authorities().next();
        let Some(desk) = &mut self.enrolment else {
            return match command {
                TokenCommand::New(_, _, reply) => drop(reply.send(Err(no_joining()))),
                TokenCommand::List(reply) => drop(reply.send(Err(no_joining()))),
                TokenCommand::Revoke(_, reply) => drop(reply.send(Err(no_joining()))),
            };
        };
        match command {
            TokenCommand::New(_, _, reply) if !self.group.is_member => {
                let _ = reply.send(Err(ErrorBody {
                    error: format!(
                        "node {} is not in group {}",
                        self.config.node.name, self.config.group.name
                    ),
                    what_to_do: "make the token at a node of the group".to_owned(),
                }));
            }
            TokenCommand::New(lifetime_s, role, reply) => {
                let port = desk.joining.port;
                let address = std::net::SocketAddr::new(self.config.node.address, port).to_string();
                let made = match authority {
                    Some(authority) => {
                        let list_number = self.lists.number_of(&authority);
                        (desk.tokens).make(authority, list_number, (lifetime_s, role), address)
                    }
                    None => Err(no_joining()),
                };
                let _ = reply.send(made);
            }
            TokenCommand::List(reply) => drop(reply.send(Ok(desk.tokens.list()))),
            TokenCommand::Revoke(id, reply) => drop(reply.send(desk.tokens.revoke(&id))),
        }
    }

    fn revocation_status(&self) -> RevocationStatus {
        RevocationStatus {
            lists: self.lists.lists().map(list_entry).collect(),
        }
    }

    fn enrol(&mut self, applicant: &Applicant) {
        let name = applicant.request.name();
        let answer = match random_serial() {
            Ok(serial) => self.answer(applicant, CertificateSerial(serial)),
            Err(error) => EnrolmentAnswer::Refused {
                reason: EnrolmentRefusal::Failed(error.to_string()),
            },
        };
        let source = applicant.source;
        let outcome = match &answer {
            EnrolmentAnswer::Signed { .. } => {
                tracing::info!(node = name, %source, "a new node has its certificate");
                "signed"
            }
            EnrolmentAnswer::SignOffline { .. } => {
                tracing::info!(node = name, %source, "a new node is admitted; sign its request with `holdfast ca sign`");
                "admitted"
            }
            EnrolmentAnswer::Refused { reason } => {
                if self.refusal_log.admits() {
                    tracing::warn!(node = name, %source, %reason, "refused a new node");
                }
                "refused"
            }
        };
        self.metrics.count_enrolment(outcome);
        // The host may have gone.
        let _ = applicant.reply.try_send(answer);
    }

    fn answer(&mut self, applicant: &Applicant, serial: CertificateSerial) -> EnrolmentAnswer {
        let is_known = (self.enrolment.as_ref()).is_some_and(|desk| desk.tokens.knows(applicant));
        let log_error = |error: &CaError| {
            if self.refusal_log.admits() {
                tracing::error!(%error, "cannot admit new nodes");
            }
        };
        let name_record = match is_known {
            true => (self.name_record(applicant.request.name()))
                .inspect_err(log_error)
                .ok(),
            false => None,
        };
        let decision = match &mut self.enrolment {
            Some(desk) if self.group.is_member => {
                desk.tokens.decide(applicant, name_record, serial)
            }
            // A token of a node outside the group stays unused.
            _ => Decision::Refuse(EnrolmentRefusal::NotInGroup),
        };
        match decision {
            Decision::Sign(role) => self.sign_for(applicant, role, serial),
            Decision::Refuse(reason) => EnrolmentAnswer::Refused { reason },
        }
    }

    /// Returns the records about a name. A certificate counts as revoked also by a list that was made elsewhere.
    fn name_record(&self, name: &str) -> Result<NameRecord, CaError> {
        let logged = match self.authority() {
            Some((dir, _)) => CertificateAuthority::open(&dir)?.certificates_of(name)?,
            None => Vec::new(),
        };
        let certificates = logged.iter().map(|logged| IssuedCertificate {
            serial: CertificateSerial(logged.serial),
            is_revoked: logged.is_revoked || self.lists.revokes(&logged.serial.to_be_bytes()),
        });
        Ok(NameRecord {
            is_node: self.group.node_names.contains(name),
            certificates: certificates.collect(),
        })
    }

    fn sign_for(
        &self,
        applicant: &Applicant,
        role: JoinRole,
        serial: CertificateSerial,
    ) -> EnrolmentAnswer {
        // A host trusts one authority at first: the one that its token names.
        let authority = self.lists.authorities().next();
        let mut lists = self.lists.lists();
        let list = lists.find(|list| Some(list.authority) == authority);
        let group = Box::new(JoinSettings {
            revocations: list.map(|list| list.der.clone()),
            ..self.group.settings.clone()
        });
        let Some((dir, days)) = self.authority() else {
            return EnrolmentAnswer::SignOffline { group };
        };
        let terms = CertificateTerms {
            days,
            role: Some(node_role(role)),
        };
        let signed = CertificateAuthority::open(&dir)
            .and_then(|authority| authority.sign_with_serial(&applicant.request, terms, serial.0));
        match signed {
            Ok(SignedCertificate { der, .. }) => EnrolmentAnswer::Signed {
                certificate: der,
                group,
            },
            Err(error) => {
                tracing::error!(%error, "cannot sign the certificate of a new node");
                let reason = EnrolmentRefusal::Failed("its authority has a problem".to_owned());
                EnrolmentAnswer::Refused { reason }
            }
        }
    }
}

/// Returns true if a certificate is newer than the present one, and not itself due for renewal: a node without the authority
/// could answer with a certificate that it has seen, and so withhold the renewal until the present one ends.
fn is_renewal(
    new: &CertificateContent,
    present: Option<&CertificateContent>,
    now: SystemTime,
) -> bool {
    let left = new.end.duration_since(now).unwrap_or_default();
    let life = new.end.duration_since(new.begin).unwrap_or_default();
    let is_newer =
        |present: &CertificateContent| new.serial != present.serial && new.begin >= present.begin;
    left > life / LIFE_LEFT && present.is_none_or(is_newer)
}

/// Returns a serial number that may have leading zeros. The numbers of this authority have 128 bits.
fn serial_of(bytes: &[u8]) -> CertificateSerial {
    let number = bytes
        .iter()
        .fold(0, |number, byte| number << 8 | u128::from(*byte));
    CertificateSerial(number)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn old_certificate_is_no_renewal() {
        let day = |days: u64| UNIX_EPOCH + Duration::from_secs(days * 86_400);
        let certificate = |serial: u8, begin: u64, end: u64| CertificateContent {
            serial: vec![serial],
            public_key: Vec::new(),
            begin: day(begin),
            end: day(end),
            role: None,
        };
        let present = certificate(1, 100, 190);
        let now = day(161);
        for (new, expected) in [
            (certificate(2, 161, 251), true),
            // Shorter than the life that is left, but new.
            (certificate(2, 160, 170), true),
            (present.clone(), false),
            (certificate(3, 10, 900), false),
            (certificate(4, 101, 191), false),
        ] {
            assert_eq!(is_renewal(&new, Some(&present), now), expected, "{new:?}");
        }
        assert!(is_renewal(&certificate(3, 10, 900), None, now));
    }
}
