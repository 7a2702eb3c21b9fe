//! Why a connection ended, and why a frame was not taken.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use holdfast_wire::{FrameError, NodeId};
use rustls::AlertDescription;

/// Why a connection between two nodes was not made or has ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// There is no daemon, or no way to it.
    #[error(
        "connecting to {address} failed: {source}; is its holdfastd running, is the address right?"
    )]
    Connect {
        /// The peer's address.
        address: SocketAddr,
        /// What the system said.
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
    /// What came is not TLS as spoken here.
    #[error("TLS: {0}; check that address and port are those of a holdfastd")]
    Tls(rustls::Error),
    /// What came is not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A node of another group.
    #[error(
        "it is of group `{theirs}`, this node of `{ours}`; correct [group] name or the address"
    )]
    Group {
        /// This node's group.
        ours: String,
        /// The other's.
        theirs: String,
    },
    /// The certificate is not that of the node it claims to be.
    #[error(
        "it claims to be node {claimed} with the certificate of {certificate}; make [[peer]] the same on all nodes"
    )]
    Node {
        /// What the greeting says.
        claimed: NodeId,
        /// Whose certificate it is, in words.
        certificate: String,
    },
    /// A frame that has no place there.
    #[error("a {0} frame has no place there; run the same release on both nodes")]
    Unexpected(&'static str),
    /// No greeting in time.
    #[error("no greeting within {0:?}; is it a holdfastd, is it overloaded?")]
    Late(Duration),
    /// Too many connections from its address are greeting.
    #[error("too many connections from its address have not ended their greeting")]
    Crowded,
    /// The other side closed.
    #[error("the other side closed the connection; its log says why")]
    Closed,
    /// Nothing came for too long.
    #[error("nothing heard for {0:?}; is the node down or cut off?")]
    Silent(Duration),
    /// The connection in the other direction ended.
    #[error("the connection in the other direction ended")]
    Partner,
    /// The peer opened another connection in its place.
    #[error("the peer opened a new connection")]
    Replaced,
    /// The peer's daemon is another than before.
    #[error("the peer's daemon has been restarted")]
    Restarted,
    /// The peer's certificate is not admitted any more.
    #[error("its certificate is not admitted any more: {0}; issue a new one")]
    Revoked(rustls::Error),
    /// This daemon ends.
    #[error("this daemon ends")]
    Shutdown,
}

impl LinkError {
    /// The reason under which it is counted, if the other side is to blame for what it sent.
    pub fn rejection(&self) -> Option<&'static str> {
        Some(match self {
            LinkError::Certificate(_) | LinkError::Revoked(_) => "certificate",
            LinkError::Tls(_) => "tls",
            LinkError::Frame(FrameError::Version(_)) => "version",
            LinkError::Frame(FrameError::TooLong(_)) => "oversized",
            LinkError::Frame(FrameError::Malformed { .. }) => "malformed",
            LinkError::Frame(FrameError::Truncated { .. }) => "truncated",
            LinkError::Group { .. } => "group",
            LinkError::Node { .. } => "node",
            LinkError::Unexpected(_) => "unexpected",
            LinkError::Late(_) => "late",
            LinkError::Crowded => "crowded",
            _ => return None,
        })
    }
}

impl From<rustls::Error> for LinkError {
    fn from(error: rustls::Error) -> LinkError {
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
                // A certificate's signature that does not verify (RFC 8446, section 6.2).
                | Alert::DecryptError
                | Alert::AccessDenied,
            ) => LinkError::Certificate(error),
            _ => LinkError::Tls(error),
        }
    }
}

/// Why [`Peers::send`](super::Peers::send) did not take a frame. Nothing of it was sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The peer is not up, or not a peer.
    #[error("node {0} is not connected")]
    NotConnected(NodeId),
    /// The peer's queue is full.
    #[error("{queued_bytes} bytes wait for node {peer} already; wait until it has room")]
    Full {
        /// The peer.
        peer: NodeId,
        /// What waits.
        queued_bytes: usize,
    },
    /// The frame cannot be sent to anyone.
    #[error(transparent)]
    Frame(#[from] FrameError),
}
