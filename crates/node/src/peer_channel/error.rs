//! Reasons for the end of a connection and for the refusal of a frame.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_wire::greeting::GreetingRefusal;
use holdfast_wire::{FrameError, NodeId};
use rustls::AlertDescription;

/// Reason why a connection between two nodes was not made or has ended.
#[derive(Debug, thiserror::Error)]
pub enum PeerConnectionError {
    /// The peer's daemon does not run, or cannot be reached.
    #[error(
        "connecting to {address} failed: {source}; check that its holdfastd runs and the address is right"
    )]
    Connect {
        /// Address of the peer.
        address: SocketAddr,
        /// Error from the system.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(io::Error),
    /// A certificate was refused, on this side or the other.
    #[error(
        "certificate refused: {0}; check [tls] on both nodes, `holdfast ca issue` makes new ones"
    )]
    Certificate(rustls::Error),
    /// The received data is not TLS, or not the expected version.
    #[error("TLS: {0}; check that address and port are those of a holdfastd")]
    Tls(rustls::Error),
    /// The received data is not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The peer belongs to another group.
    #[error(
        "the peer belongs to group `{theirs}`, this node to `{ours}`; correct [group] name or the address"
    )]
    WrongGroup {
        /// Group of this node.
        ours: String,
        /// Group of the peer.
        theirs: String,
    },
    /// The certificate belongs to another node than the greeting claims.
    #[error(
        "the peer claims to be node {claimed} with the certificate of {certificate}; use the same [[peer]] on all nodes"
    )]
    WrongNode {
        /// Node id in the greeting.
        claimed: NodeId,
        /// Owner of the certificate, in words.
        certificate: String,
    },
    /// The connection leads to this node itself, or to another node with this node's certificate.
    #[error(
        "the other side has the certificate of this node, `{0}`; issue each node a certificate of its own"
    )]
    OwnName(String),
    /// Another host than the connected one has the certificate of the same node.
    #[error(
        "two hosts have the certificate of node `{0}`; stop one of them, and let it join under a name of its own"
    )]
    TwoHosts(String),
    /// The nodes disagree about the group.
    #[error(transparent)]
    Disagreement(GreetingRefusal),
    /// The other side refuses this node.
    #[error("the peer refuses the connection: {0}")]
    RefusedByPeer(GreetingRefusal),
    /// The certificate names no node.
    #[error("the peer's certificate names no node; `holdfast ca issue` makes one that does")]
    NoName,
    /// Too many nodes without a number are connected.
    #[error("too many nodes that are not in the group are connected; wait until they have joined")]
    TooManyGuests,
    /// The peer has left the group, or has another number.
    #[error("the group does not contain the peer by its former number")]
    NotMember,
    /// A frame of this kind is not allowed at this point.
    #[error("received an unexpected {0} frame; run the same release on both nodes")]
    UnexpectedFrame(&'static str),
    /// The greeting did not arrive in time.
    #[error("no greeting within {0:?}; check that the peer is a holdfastd and not overloaded")]
    GreetingTimeout(Duration),
    /// Too many connections from the same address are in their greeting.
    #[error("too many connections from the peer's address have not completed their greeting")]
    TooManyGreetings,
    /// The other side closed the connection.
    #[error("the other side closed the connection; its log says why")]
    Closed,
    /// No data arrived for too long.
    #[error("received nothing for {0:?}; check that the peer runs and is reachable")]
    IdleTimeout(Duration),
    /// The connection in the other direction ended.
    #[error("the connection in the other direction ended")]
    OtherDirectionEnded,
    /// The peer replaced the connection by another one.
    #[error("the peer opened a new connection")]
    Replaced,
    /// The peer's daemon was restarted.
    #[error("the peer's daemon has been restarted")]
    Restarted,
    /// The peer's certificate has been revoked or is otherwise refused.
    #[error("the peer's certificate is no longer accepted: {0}; issue a new one")]
    Revoked(rustls::Error),
    /// This daemon is ending.
    #[error("this daemon is stopping")]
    Shutdown,
}

impl PeerConnectionError {
    /// Returns the reason as a node that was refused can read it; none if that node learns the reason otherwise, or must
    /// not.
    pub(super) fn refusal(&self) -> Option<GreetingRefusal> {
        Some(match self {
            PeerConnectionError::WrongGroup { ours, theirs } => GreetingRefusal::Group {
                listener: ours.clone(),
                dialler: theirs.clone(),
            },
            PeerConnectionError::WrongNode {
                claimed,
                certificate,
            } => GreetingRefusal::Number {
                claimed: *claimed,
                certificate: certificate.clone(),
            },
            PeerConnectionError::OwnName(name) | PeerConnectionError::TwoHosts(name) => {
                GreetingRefusal::SameCertificate { name: name.clone() }
            }
            PeerConnectionError::Disagreement(reason) => reason.clone(),
            _ => return None,
        })
    }

    /// Returns the reason for the counter of rejections; `None` if the other side's data is not to blame.
    pub fn rejection_reason(&self) -> Option<&'static str> {
        Some(match self {
            PeerConnectionError::Certificate(_) | PeerConnectionError::Revoked(_) => "certificate",
            PeerConnectionError::Tls(_) => "tls",
            PeerConnectionError::Frame(FrameError::Version(_)) => "version",
            PeerConnectionError::Frame(FrameError::TooLong(_)) => "oversized",
            PeerConnectionError::Frame(FrameError::Malformed { .. }) => "malformed",
            PeerConnectionError::Frame(FrameError::Truncated { .. }) => "truncated",
            PeerConnectionError::WrongGroup { .. } => "group",
            PeerConnectionError::WrongNode { .. }
            | PeerConnectionError::OwnName(_)
            | PeerConnectionError::TwoHosts(_)
            | PeerConnectionError::NoName => "node",
            PeerConnectionError::Disagreement(_) => "disagreement",
            PeerConnectionError::UnexpectedFrame(_) => "unexpected",
            PeerConnectionError::GreetingTimeout(_) => "late",
            PeerConnectionError::TooManyGreetings | PeerConnectionError::TooManyGuests => "crowded",
            _ => return None,
        })
    }
}

impl From<rustls::Error> for PeerConnectionError {
    fn from(error: rustls::Error) -> PeerConnectionError {
        use AlertDescription as Alert;
        match &error {
            rustls::Error::InvalidCertificate(_)
            | rustls::Error::InvalidCertRevocationList(_)
            | rustls::Error::NoCertificatesPresented
            | rustls::Error::AlertReceived(
                Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::CertificateRequired
                | Alert::UnknownCA
                // The signature of a certificate does not verify (RFC 8446, section 6.2).
                | Alert::DecryptError
                | Alert::AccessDenied,
            ) => PeerConnectionError::Certificate(error),
            _ => PeerConnectionError::Tls(error),
        }
    }
}

/// Reason why [`Peers::send`](super::Peers::send) refused a frame. No part of the frame was sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The peer is not up, or not a peer.
    #[error("node {0} is not connected")]
    NotConnected(NodeId),
    /// The peer's queue is full.
    #[error("the send queue to node {peer} is full ({queued_bytes} bytes); wait until it has room")]
    QueueFull {
        /// Peer with the full send queue.
        peer: NodeId,
        /// Number of bytes in the send queue.
        queued_bytes: usize,
    },
    /// The frame cannot be sent to any node.
    #[error(transparent)]
    Frame(#[from] FrameError),
}
