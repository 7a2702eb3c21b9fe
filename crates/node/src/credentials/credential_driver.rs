//! Renewal and revocation in a running node: the machine of `proto::credentials`, fed by the channel between nodes, the
//! worker and the operator.

use std::rc::Rc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use holdfast_daemon::tls::{RevocationLists, SignedList, TlsError};
use holdfast_proto::credentials::{
    Command, Credentials, CredentialsConfig, Event, Output, RevocationList,
};
use holdfast_wire::credential_frames::{AuthorityId, RevocationNumber};
use holdfast_wire::{Frame, NodeId};

use super::{CredentialWorker, ListSource, LoadedCredentials, WorkerCommand, WorkerEvent};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::peer_channel::Peers;

/// Time between two looks at the clock for the certificate's age.
const AGE_INTERVAL: Duration = Duration::from_secs(3_600);

/// Remaining life of a certificate below which `status` warns, if its renewal has failed.
const WARNING_LIFE: Duration = Duration::from_secs(14 * 24 * 3_600);

/// Drives the machine of `proto::credentials` in the engine: renewal of this node's certificate, and revocation lists.
pub struct CredentialDriver {
    machine: Credentials,
    worker: Rc<CredentialWorker>,
    /// End of the node's certificate.
    certificate_end: SystemTime,
    /// Remaining and whole life of the certificate when it was last looked at.
    life: (Duration, Duration),
    /// The last failure of a renewal.
    renewal_problem: Option<String>,
    /// Machine time of the next look at the certificate's age.
    age_due: Duration,
}

impl CredentialDriver {
    /// Returns the credentials of a node whose engine starts, with the files that are in force.
    ///
    /// # Errors
    /// The files of `[tls]` cannot be used.
    pub fn new(
        config: &Config,
        boot: u64,
        worker: &Rc<CredentialWorker>,
        peers: &Peers,
    ) -> Result<CredentialDriver, TlsError> {
        let loaded = LoadedCredentials::load(config)?;
        let authorities = loaded.lists.authorities();
        let authorities = authorities
            .map(|authority| AuthorityId(authority.0))
            .collect();
        let mut machine_config = CredentialsConfig::new(config.node.id, authorities, boot);
        let joining = config.joining.as_ref();
        machine_config.has_authority = joining.is_some_and(|joining| joining.authority.is_some());
        let mut machine = Credentials::new(machine_config);
        machine.set_contact(Some(config.group.contact));
        machine.handle_lists(Duration::ZERO, None, machine_lists(&loaded.lists));
        let life = loaded.certificate_life();
        machine.handle_certificate(Duration::ZERO, life.0, life.1);
        // An engine that begins anew finds connected peers.
        for peer in peers.ids().filter(|peer| peers.is_up(*peer)) {
            machine.handle_peer_connected(Duration::ZERO, peer);
        }
        Ok(CredentialDriver {
            machine,
            worker: worker.clone(),
            certificate_end: loaded.tls.own_validity().1,
            life,
            renewal_problem: None,
            age_due: AGE_INTERVAL,
        })
    }

    /// Returns the machine that handles certificates and revocation lists.
    pub fn machine(&mut self) -> &mut Credentials {
        &mut self.machine
    }

    /// Returns the machine time of the next timer.
    pub fn next_wake(&self) -> Option<Duration> {
        self.machine.poll_timeout()
    }

    /// Returns the problem to show to the operator, if there is one.
    pub fn problem(&self) -> Option<String> {
        let left = self.certificate_end.duration_since(SystemTime::now());
        let left = left.unwrap_or_default();
        let problem = self.renewal_problem.as_ref()?;
        (left < WARNING_LIFE.min(self.life.1 / 3)).then(|| {
            format!(
                "the certificate of this node ends in {} h and could not be renewed: {problem}",
                left.as_secs() / 3_600
            )
        })
    }

    /// Gives the credentials' worker thread a command.
    pub fn send_to_worker(&self, command: WorkerCommand) {
        self.worker.send(command);
    }

    /// Handles an event of the credentials' worker thread.
    pub fn handle_event(
        &mut self,
        now: Duration,
        event: WorkerEvent,
        peers: &Peers,
        metrics: &Metrics,
    ) {
        match event {
            WorkerEvent::Changed {
                loaded,
                list_source,
            } => {
                loaded.record(metrics);
                // Connections of revoked certificates end here; all others go on.
                peers.set_tls(loaded.tls.clone());
                self.certificate_end = loaded.tls.own_validity().1;
                self.life = loaded.certificate_life();
                let lists = machine_lists(&loaded.lists);
                self.machine.handle_lists(now, list_source, lists);
                self.machine
                    .handle_certificate(now, self.life.0, self.life.1);
                tracing::info!("certificates and revocation lists are in force");
            }
            WorkerEvent::ReloadFailed { error } => {
                tracing::error!(%error, "cannot reload the certificates: the current ones stay in use");
            }
            WorkerEvent::ListRefused { from, error } => {
                self.machine.handle_list_refused(now, from, error);
            }
            WorkerEvent::RequestMade(request) => self.machine.handle_request(now, request),
            WorkerEvent::Signed { requester, result } => {
                self.machine.handle_signed(now, requester, result);
            }
            WorkerEvent::Installed(result) => {
                self.machine.handle_installed(now, result);
                self.machine
                    .handle_certificate(now, self.life.0, self.life.1);
            }
        }
    }

    /// Looks at the certificate's age from time to time.
    pub fn watch_age(&mut self, now: Duration) {
        if now >= self.age_due {
            self.age_due = now + AGE_INTERVAL;
            let left = self.certificate_end.duration_since(SystemTime::now());
            self.machine
                .handle_certificate(now, left.unwrap_or_default(), self.life.1);
        }
    }

    /// Carries out the machine's outputs. `name_of` returns the name of a node in its certificate.
    pub fn run(&mut self, peers: &Peers, metrics: &Metrics, name_of: impl Fn(NodeId) -> String) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                Output::Send { to, frame } => {
                    let frame = Frame::Credentials(frame);
                    if let Err(error) = peers.send(to, &frame) {
                        tracing::debug!(%to, frame = frame.name(), %error, "a frame was dropped");
                    }
                }
                Output::Execute(command) => self.worker.send(match command {
                    Command::ApplyList { from, list } => {
                        WorkerCommand::ApplyList(ListSource::Peer(from), list)
                    }
                    Command::MakeRequest => WorkerCommand::MakeRequest,
                    Command::Sign { requester, request } => WorkerCommand::Sign {
                        requester,
                        name: name_of(requester),
                        certificate: peers.certificate(requester),
                        request,
                    },
                    Command::Install { certificate } => WorkerCommand::Install(certificate),
                }),
                Output::Event(event) => self.on_event(event, metrics),
            }
        }
    }

    fn on_event(&mut self, event: Event, metrics: &Metrics) {
        match event {
            Event::ListRefused { from, error } => {
                tracing::warn!(%from, %error, "a node sent a revocation list that is refused");
            }
            Event::CertificateRefused { from, error } => {
                tracing::warn!(%from, %error, "a node sent a certificate that is refused; asking the next node");
            }
            Event::Renewed => {
                tracing::info!("the certificate of this node is renewed");
                metrics.count_renewal("renewed");
                self.renewal_problem = None;
            }
            Event::RenewalFailed { error } => {
                tracing::warn!(%error, "the certificate of this node is not renewed; trying again later");
                metrics.count_renewal("failed");
                self.renewal_problem = Some(error);
            }
            Event::RenewedPeer { peer } => tracing::info!(%peer, "sent a renewed certificate"),
            Event::RefusedPeer { peer, reason } => {
                tracing::warn!(%peer, %reason, "did not renew the certificate of a node");
            }
        }
    }
}

/// Returns the lists as the machine has them.
fn machine_lists(lists: &RevocationLists) -> Vec<RevocationList> {
    let list = |list: &SignedList| RevocationList {
        number: RevocationNumber {
            authority: AuthorityId(list.authority.0),
            number: list.number,
        },
        bytes: Bytes::from(list.der.clone()),
    };
    lists.lists().map(list).collect()
}
