//! The certificates of this node, the revocation lists of its group, and the enrolment of new hosts.
//!
//! The machines of `proto` decide: `credentials` on the event loop, `enrolment` on a thread of its own. That thread, the
//! `worker`, carries out everything that waits for a disk or signs, for both machines. A further thread accepts hosts
//! at the enrolment port (`enrolment_port`). Both have ordinary priority and no capabilities.

mod credential_driver;
mod enrolment_port;
mod loaded;
mod tokens;
mod worker;

#[cfg(test)]
mod group_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;

use bytes::Bytes;
use holdfast_api::ca::NodeRole;
use holdfast_api::control::{NewToken, RevocationStatus, TokenEntry, TokenList};
use holdfast_api::enrolment::JoinSettings;
use holdfast_daemon::tls::SignedList;
use holdfast_proto::credentials::InstallError;
use holdfast_wire::NodeId;
use holdfast_wire::credential_frames::RenewalRefusal;
use holdfast_wire::membership_frames::JoinRole;
use rustls::pki_types::CertificateDer;

use crate::config::Config;
use crate::control::ReplySender;
use crate::metrics::Metrics;

pub use credential_driver::CredentialDriver;
pub use loaded::LoadedCredentials;

/// A handle on the worker. Dropping the handle ends the worker after its last command.
pub struct CredentialWorker {
    commands: Sender<WorkerCommand>,
    /// Closed when the handle is dropped.
    _port: Option<enrolment_port::EnrolmentPort>,
}

/// Events of the worker for the event loop.
pub type WorkerEvents = tokio::sync::mpsc::UnboundedReceiver<WorkerEvent>;

/// A command to the credentials' worker thread.
#[derive(Debug)]
pub enum WorkerCommand {
    /// Check a revocation list in DER, save it and put it in force.
    ApplyList(ListSource, Bytes),
    /// Read all files of `[tls]` again.
    Reload,
    /// Make a certificate request for this node.
    MakeRequest,
    /// Sign a request of a node for the name and key that the node's certificate has.
    Sign {
        /// Number of the node, repeated in the answer.
        requester: NodeId,
        /// Name of the node.
        name: String,
        /// Certificate that the node shows on the channel; none for this node, and for a node whose connection is lost.
        certificate: Option<CertificateDer<'static>>,
        /// The request in DER.
        request: Bytes,
    },
    /// Check a new certificate of this node (DER), save it and put it in force.
    Install(Bytes),
    /// The nodes of the group, or what new nodes must know of the group, have changed.
    SetGroup(GroupKnowledge),
    /// A request about join tokens.
    Token(TokenCommand),
    /// Return the revocation lists in force.
    Revocations(ReplySender<RevocationStatus>),
    /// Answer a host at the enrolment port.
    Enrol(enrolment_port::Applicant),
}

/// A request about join tokens.
#[derive(Debug)]
pub enum TokenCommand {
    /// Make a token with this life, in seconds, for a host that may have this role at most.
    New(u64, JoinRole, ReplySender<NewToken>),
    /// List the tokens.
    List(ReplySender<TokenList>),
    /// Revoke the token with this number.
    Revoke(String, ReplySender<TokenEntry>),
}

/// Source of a revocation list.
#[derive(Debug)]
pub enum ListSource {
    /// Another node, which sent the list.
    Peer(NodeId),
    /// The operator, who waits for the lists in force.
    Operator(ReplySender<RevocationStatus>),
}

/// Knowledge about the group that enrolment needs. A membership that runs itself sets this anew with each view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupKnowledge {
    /// False if this node is outside the group: no host can join by a node that the group does not know.
    pub is_member: bool,
    /// Names of all nodes, which new nodes may not have.
    pub node_names: BTreeSet<String>,
    /// Settings for the configuration of a new node, without revocation list.
    pub settings: JoinSettings,
}

/// An event of the credentials' worker thread.
#[derive(Debug)]
pub enum WorkerEvent {
    /// Certificates or revocation lists have changed.
    Changed {
        /// The certificates and revocation lists that are in force after the change.
        loaded: Box<LoadedCredentials>,
        /// Node that sent a revocation list, if that is the change.
        list_source: Option<NodeId>,
    },
    /// The files cannot be read; the former ones stay in use.
    ReloadFailed {
        /// Reason why the files cannot be read.
        error: String,
    },
    /// A list of another node is not put in force.
    ListRefused {
        /// Node that sent the revocation list.
        from: NodeId,
        /// Reason for refusing the revocation list.
        error: String,
    },
    /// The certificate request of this node is made, or cannot be.
    RequestMade(Result<Bytes, String>),
    /// The request of a node is signed, or is not.
    Signed {
        /// Node that asked for the certificate.
        requester: NodeId,
        /// The node's new certificate in DER, or the reason for signing none.
        result: Result<Bytes, RenewalRefusal>,
    },
    /// The new certificate is in force, or cannot be.
    Installed(Result<(), InstallError>),
}

impl CredentialWorker {
    /// Starts the worker with the certificates of `config`, and opens the enrolment port if `config` has `[joining]`.
    /// Must be called before the calling thread gets real-time priority.
    ///
    /// # Errors
    /// The port cannot be listened on, saved tokens cannot be read, or no thread can be started.
    pub fn start(
        config: &Config,
        loaded: &LoadedCredentials,
        metrics: Metrics,
    ) -> io::Result<(CredentialWorker, WorkerEvents)> {
        let (commands, receiver) = std::sync::mpsc::channel();
        let (sender, events) = tokio::sync::mpsc::unbounded_channel();
        let address = config
            .joining
            .as_ref()
            .map(|joining| SocketAddr::new(config.node.address, joining.port));
        let port = match address {
            Some(address) => Some(enrolment_port::EnrolmentPort::open(
                address,
                &config.tls,
                commands.clone(),
            )?),
            None => None,
        };
        let server_config = port.as_ref().map(|port| port.server_config());
        let worker = worker::Worker::new(config, loaded, metrics, sender, server_config)?;
        std::thread::Builder::new()
            .name("credentials".to_owned())
            .spawn(move || worker.run(&receiver))?;
        let handle = CredentialWorker {
            commands,
            _port: port,
        };
        Ok((handle, events))
    }

    /// Gives the worker a command. A worker that has ended, which only a defect can cause, drops the command and with it
    /// the sender of the answer.
    pub fn send(&self, command: WorkerCommand) {
        if self.commands.send(command).is_err() {
            tracing::error!("the thread of certificates has ended; restart the daemon");
        }
    }
}

/// Returns the knowledge about a group at the start: all of it if files configure the group.
pub fn configured_group(config: &Config) -> GroupKnowledge {
    use holdfast_api::enrolment::{GroupReach, KnownNode};
    let own = SocketAddr::new(config.node.address, config.node.port);
    let peers = config.peers.iter();
    let nodes = std::iter::once((config.node.name.clone(), config.node.id, own))
        .chain(peers.map(|peer| (peer.name.clone(), peer.id, peer.address)));
    let nodes: Vec<KnownNode> = nodes
        .map(|(name, id, address)| KnownNode {
            name,
            id: id.0,
            address,
        })
        .collect();
    GroupKnowledge {
        is_member: config.group.self_running.is_none(),
        node_names: nodes.iter().map(|node| node.name.clone()).collect(),
        settings: JoinSettings {
            name: config.group.name.clone(),
            reach: match config.group.reach {
                crate::config::PacketRouting::Steer => GroupReach::Steer,
                crate::config::PacketRouting::Broadcast { shared_mac } => {
                    GroupReach::Broadcast { shared_mac }
                }
            },
            contact: (config.group.self_running.is_none())
                .then(|| config.name_of(config.group.contact).map(str::to_owned))
                .flatten(),
            nodes,
            revocations: None,
        },
    }
}

/// Returns a role as certificates name it.
pub fn node_role(role: JoinRole) -> NodeRole {
    match role {
        JoinRole::Backup => NodeRole::Backup,
        JoinRole::ServerNode => NodeRole::Server,
    }
}

/// Returns the role that a certificate names.
pub fn join_role(role: NodeRole) -> JoinRole {
    match role {
        NodeRole::Backup => JoinRole::Backup,
        NodeRole::Server => JoinRole::ServerNode,
    }
}

/// Returns a list as the operator sees it.
fn list_entry(list: &SignedList) -> holdfast_api::control::RevocationEntry {
    holdfast_api::control::RevocationEntry {
        authority: list.authority.to_string(),
        number: list.number,
        revoked: list.revoked as u64,
    }
}
