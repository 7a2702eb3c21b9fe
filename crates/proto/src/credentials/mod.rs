//! The certificate of a node, and the revocation lists of its group.
//!
//! **Revocation lists.** Each node tells its peers the numbers of the lists that it has in force, when they connect and
//! after each change. A node with an older list asks one of them for the newer, has the daemon check its signature, and
//! tells its peers in turn. Every node thus has a new list after a few round trips, from any node that got it first.
//!
//! **Renewal.** At two thirds of the certificate's life, and a random time later, the node asks a node that has the
//! authority for a new certificate with the same name and key. The channel's own certificates authenticate the request.
//! If a node has no authority, or sends a certificate that is none or no newer one, the next peer is asked.

mod renewal;
mod revocation;
#[cfg(test)]
mod tests;

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use holdfast_wire::NodeId;
use holdfast_wire::credential_frames::{
    AuthorityId, CredentialFrame, RenewalRefusal, RevocationNumber,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;

pub use renewal::LIFE_LEFT;
use renewal::{PeerRenewals, Renewal};
use revocation::Revocations;

/// The settings of a [`Credentials`]. [`CredentialsConfig::new`] has the defaults; each is documented at its field.
#[derive(Debug, Clone)]
pub struct CredentialsConfig {
    /// Number of this node.
    pub node: NodeId,
    /// True if this node has the authority, and signs for itself and others (false).
    pub has_authority: bool,
    /// Authorities whose revocation lists count.
    pub authorities: Vec<AuthorityId>,
    /// Seed of random waits, different for each daemon start.
    pub random_seed: u64,
    /// Time to wait for a revocation list before another node is asked (300 ms).
    pub list_timeout: Duration,
    /// Time to wait for a new certificate before another node is asked (10 s).
    pub renewal_timeout: Duration,
    /// Time after which a failed renewal is tried again (10 min).
    pub renewal_retry: Duration,
    /// Shortest time between two renewals for the same node (5 min). Shorter than `renewal_retry`.
    pub renewal_interval_min: Duration,
}

impl CredentialsConfig {
    /// Returns the defaults for `node`.
    pub fn new(node: NodeId, authorities: Vec<AuthorityId>, random_seed: u64) -> CredentialsConfig {
        CredentialsConfig {
            node,
            has_authority: false,
            authorities,
            random_seed,
            list_timeout: Duration::from_millis(300),
            renewal_timeout: Duration::from_secs(10),
            renewal_retry: Duration::from_secs(600),
            renewal_interval_min: Duration::from_secs(300),
        }
    }
}

/// An action that the credentials machine asks of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send a frame.
    Send {
        /// Node that receives the frame.
        to: NodeId,
        /// Frame about a revocation list or a certificate.
        frame: CredentialFrame,
    },
    /// Carry out a command.
    Execute(Command),
    /// Report an event.
    Event(Event),
}

/// A command for the daemon. Each is answered by the named function, possibly much later.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Check the signature of a list, and if the list is newer, save it and put it in force.
    /// [`Credentials::handle_lists`] or [`Credentials::handle_list_refused`] follows.
    ApplyList {
        /// Node that sent the revocation list.
        from: NodeId,
        /// The revocation list in DER.
        list: Bytes,
    },
    /// Make a certificate request with the name and key of this node. [`Credentials::handle_request`] follows.
    MakeRequest,
    /// Check that a request is for name and key in the certificate of node `requester`, and sign the request.
    /// [`Credentials::handle_signed`] follows.
    Sign {
        /// The node that asked; may be this node.
        requester: NodeId,
        /// The certificate request in DER.
        request: Bytes,
    },
    /// Check that a certificate of this node is valid and newer than the present one, save it and put it in force.
    /// [`Credentials::handle_installed`] follows.
    Install {
        /// The certificate in DER.
        certificate: Bytes,
    },
}

/// An event for logs and operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A peer sent a list that the authority has not signed, or that is none.
    ListRefused {
        /// Peer that sent the revocation list.
        from: NodeId,
        /// The daemon's reason for refusing the revocation list.
        error: String,
    },
    /// A node sent a certificate that this node cannot use.
    CertificateRefused {
        /// The sender; may be this node.
        from: NodeId,
        /// The daemon's reason for refusing the certificate.
        error: String,
    },
    /// This node has a new certificate.
    Renewed,
    /// This node has no new certificate, and tries again.
    RenewalFailed {
        /// Reason why there is no new certificate.
        error: String,
    },
    /// This node signed a new certificate for a peer.
    RenewedPeer {
        /// Peer that gets the certificate.
        peer: NodeId,
    },
    /// This node signed no certificate for a peer.
    RefusedPeer {
        /// Peer that asked for a certificate.
        peer: NodeId,
        /// Reason why this node signed none.
        reason: RenewalRefusal,
    },
}

/// Reason for not putting a new certificate in force.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstallError {
    /// The certificate is to blame: another node may send a better one.
    #[error("{0}")]
    Certificate(String),
    /// The host is to blame, for example for a full disk.
    #[error("{0}")]
    Host(String),
}

/// A revocation list in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevocationList {
    /// Authority and CRL number.
    pub number: RevocationNumber,
    /// The revocation list in DER.
    pub bytes: Bytes,
}

/// The machine for the node's certificate and the group's revocation lists.
#[derive(Debug)]
pub struct Credentials {
    config: CredentialsConfig,
    random: SmallRng,
    contact: Option<NodeId>,
    /// Connected peers, each with the numbers that the peer has in force.
    peers: BTreeMap<NodeId, BTreeMap<AuthorityId, u64>>,
    revocations: Revocations,
    renewal: Renewal,
    peer_renewals: PeerRenewals,
    outputs: VecDeque<Output>,
}

impl Credentials {
    /// Returns a machine without peers, lists and certificate.
    pub fn new(config: CredentialsConfig) -> Credentials {
        Credentials {
            random: SmallRng::seed_from_u64(config.random_seed),
            config,
            contact: None,
            peers: BTreeMap::new(),
            revocations: Revocations::default(),
            renewal: Renewal::default(),
            peer_renewals: PeerRenewals::default(),
            outputs: VecDeque::new(),
        }
    }

    /// Sets the contact node, which is asked first for a new certificate.
    pub fn set_contact(&mut self, contact: Option<NodeId>) {
        self.contact = contact;
    }

    /// Handles a connection to a peer.
    pub fn handle_peer_connected(&mut self, now: Duration, peer: NodeId) {
        self.peers.insert(peer, BTreeMap::new());
        self.send_numbers(peer);
        self.on_signer_connected(now);
    }

    /// Handles the loss of a peer.
    pub fn handle_peer_lost(&mut self, now: Duration, peer: NodeId) {
        self.peers.remove(&peer);
        self.on_list_source_lost(now, peer);
        self.on_signer_lost(now, peer);
    }

    /// Handles a frame of a connected peer.
    pub fn handle_frame(&mut self, now: Duration, from: NodeId, frame: CredentialFrame) {
        if !self.peers.contains_key(&from) {
            return;
        }
        match frame {
            CredentialFrame::RevocationNumbers { numbers } => {
                self.on_numbers(now, from, &numbers);
            }
            CredentialFrame::RevocationListRequest { authority } => {
                self.on_list_request(from, authority);
            }
            CredentialFrame::RevocationList { list } => self.on_list(from, list),
            CredentialFrame::RenewalRequest { request } => {
                self.on_renewal_request(now, from, request);
            }
            CredentialFrame::Renewed { certificate } => self.on_renewed(now, from, certificate),
            CredentialFrame::RenewalRefused { reason } => {
                self.on_renewal_refused(now, from, reason);
            }
        }
    }

    /// Handles all timers due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.on_list_timeout(now);
        self.on_renewal_timeout(now);
    }

    /// Returns the time at which to call `handle_timeout`, none for never. The time may be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let due = [self.revocations.next_timeout(), self.renewal.next_timeout()];
        due.into_iter().flatten().min()
    }

    /// Returns the next output, none if there is none left.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    fn send(&mut self, to: NodeId, frame: CredentialFrame) {
        self.outputs.push_back(Output::Send { to, frame });
    }

    fn execute(&mut self, command: Command) {
        self.outputs.push_back(Output::Execute(command));
    }

    fn report(&mut self, event: Event) {
        self.outputs.push_back(Output::Event(event));
    }
}
