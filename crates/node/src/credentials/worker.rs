//! The thread that signs, verifies, and writes the files of certificates, revocation lists and tokens.

use std::io;
use std::path::PathBuf;
use std::sync::PoisonError;
use std::sync::mpsc::Receiver;

use bytes::Bytes;
use holdfast_api::ca::{
    CaError, CertificateAuthority, CertificateRequest, NodeKey, SignedCertificate,
    certificate_to_pem,
};
use holdfast_api::control::{ErrorBody, RevocationStatus};
use holdfast_api::enrolment::{
    EnrolmentAnswer, EnrolmentRefusal, GroupSettings, certificate_matches,
};
use holdfast_daemon::private_files::{private_directory, replace_file};
use holdfast_daemon::tls::{RevocationLists, enrolment_server_config, read_certificates};
use holdfast_sys::caps::keep_only_capabilities;
use holdfast_wire::credential_frames::{REVOCATION_LIST_BYTES_MAX, RenewalRefusal};
use tokio::sync::mpsc::UnboundedSender;

use super::enrolment_port::{Applicant, SharedServerConfig};
use super::loaded::lists_path;
use super::tokens::{Decision, Tokens};
use super::{
    GroupKnowledge, ListSource, LoadedCredentials, TokenCommand, WorkerCommand, WorkerEvent,
    configured_group, list_entry,
};
use crate::config::{Config, JoiningConfig};
use crate::metrics::Metrics;

/// The thread's state.
pub(super) struct Worker {
    config: Config,
    lists: RevocationLists,
    group: GroupKnowledge,
    metrics: Metrics,
    events: UnboundedSender<WorkerEvent>,
    enrolment: Option<EnrolmentDesk>,
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
                request,
            } => {
                let result = self.sign_renewal(&name, &request);
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

    fn sign_renewal(&self, name: &str, request: &[u8]) -> Result<Bytes, RenewalRefusal> {
        let (dir, days) = self.authority().ok_or(RenewalRefusal::NoAuthority)?;
        let request = CertificateRequest::from_der(request)
            .ok()
            .filter(|request| request.name() == name)
            .ok_or(RenewalRefusal::BadRequest)?;
        match CertificateAuthority::open(&dir).and_then(|authority| authority.sign(&request, days))
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

    fn authority(&self) -> Option<(PathBuf, u32)> {
        let joining = &self.enrolment.as_ref()?.joining;
        Some((joining.authority.clone()?, joining.days))
    }

    /// Puts a renewed certificate in force, if it is better than the present one.
    fn install(&mut self, der: &[u8]) -> Result<(), String> {
        let tls = &self.config.tls;
        let key = std::fs::read_to_string(&tls.key)
            .map_err(|error| format!("{}: {error}", tls.key.display()))?;
        let authorities = read_certificates(&tls.ca).map_err(|error| error.to_string())?;
        let mut problem = "there is no authority".to_owned();
        let fits = authorities.iter().any(|authority| {
            certificate_matches(der, authority, &self.config.node.name, &key)
                .map_err(|error| problem = error.to_string())
                .is_ok()
        });
        if !fits {
            return Err(format!("the new certificate is refused: {problem}"));
        }
        let former = std::fs::read(&tls.cert).unwrap_or_default();
        replace_file(&tls.cert, certificate_to_pem(der).as_bytes()).map_err(|error| {
            format!("{error}; let the daemon write there, or keep the files of [tls] in state_dir")
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
                Err(format!(
                    "the new certificate is refused: {error}; {restored}"
                ))
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
                TokenCommand::New(_, reply) => drop(reply.send(Err(no_joining()))),
                TokenCommand::List(reply) => drop(reply.send(Err(no_joining()))),
                TokenCommand::Revoke(_, reply) => drop(reply.send(Err(no_joining()))),
            };
        };
        match command {
            TokenCommand::New(lifetime_s, reply) => {
                let port = desk.joining.port;
                let address = std::net::SocketAddr::new(self.config.node.address, port).to_string();
                let made = match authority {
                    Some(authority) => desk.tokens.make(authority, lifetime_s, address),
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
        let name = applicant.request.name().to_owned();
        let is_name_taken = applicant.is_proven && self.is_name_taken(&name);
        let Some(desk) = &mut self.enrolment else {
            return;
        };
        let answer = match desk.tokens.decide(applicant, is_name_taken) {
            Decision::Sign => self.sign_for(applicant),
            Decision::Refuse(reason) => EnrolmentAnswer::Refused { reason },
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
                tracing::warn!(node = name, %source, %reason, "refused a new node");
                "refused"
            }
        };
        self.metrics.count_enrolment(outcome);
        // The host may have gone.
        let _ = applicant.reply.try_send(answer);
    }

    fn is_name_taken(&self, name: &str) -> bool {
        let has_certificate = || {
            let authority = self.authority();
            let authority = authority.and_then(|(dir, _)| CertificateAuthority::open(&dir).ok());
            let free = authority.map_or(Ok(()), |authority| authority.check_free(name));
            matches!(free, Err(CaError::InForce(_)))
        };
        self.group.node_names.contains(name) || has_certificate()
    }

    fn sign_for(&self, applicant: &Applicant) -> EnrolmentAnswer {
        let group = Box::new(GroupSettings {
            revocations: self.lists.lists().next().map(|list| list.der.clone()),
            ..self.group.settings.clone()
        });
        let Some((dir, days)) = self.authority() else {
            return EnrolmentAnswer::SignOffline { group };
        };
        let signed = CertificateAuthority::open(&dir)
            .and_then(|authority| authority.sign(&applicant.request, days));
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
