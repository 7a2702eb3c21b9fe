//! What an endpoint is made of.

use std::net::SocketAddr;
use std::time::Duration;

/// The UDP port of RFC 6951, section 5.
pub const ENCAPSULATION_PORT: u16 = 9899;

/// Settings of an SCTP endpoint.
#[derive(Clone, Debug)]
pub struct Config {
    /// Local addresses, all of one family and with one port; port 0 lets the system choose. An unspecified address stands for all
    /// addresses of the host.
    pub local: Vec<SocketAddr>,
    /// Accept associations.
    pub listen: bool,
    /// Local UDP port of encapsulated packets (RFC 6951); 0 lets the system choose, `None` has no encapsulation. One for
    /// the whole process (usrsctp) or network namespace (kernel): the first endpoint decides.
    pub encapsulation: Option<u16>,
    /// Speak IP protocol 132 itself. usrsctp needs `CAP_NET_RAW` for it and takes part without it if it may not.
    /// Decided by the first endpoint of a process; the kernel's SCTP always does.
    pub raw: bool,
    /// Inbound streams allowed.
    pub streams: u16,
    /// Outbound streams asked for. libusrsctp looks at each of them whenever it sends something.
    pub outbound_streams: u16,
    /// Bytes an association may have unsent or unacknowledged before [`send`](super::Endpoint::send) refuses.
    pub send_buffer: u32,
    /// Bytes of receive window.
    pub receive_buffer: u32,
    /// Longest message taken from a peer; one that is longer ends the association.
    pub message_len_max: u32,
    /// Largest SCTP packet with its IP header, bytes. Fixed: neither stack hears of too-big packets inside UDP.
    pub path_mtu: u32,
    /// Send small messages at once rather than when the ones before are acknowledged (`SCTP_NODELAY`).
    pub no_delay: bool,
    /// When a path or an association has failed.
    pub failure: Failure,
}

/// How quickly a dead path or peer is noticed (RFC 9260, sections 6.3 and 8). The standard's defaults take half a minute; these are for
/// registrars and elements that shall be replaced within seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// First retransmission timeout of a path.
    pub rto_initial: Duration,
    /// Lower bound of the retransmission timeout.
    pub rto_min: Duration,
    /// Upper bound of the retransmission timeout.
    pub rto_max: Duration,
    /// How often an idle path is probed.
    pub heartbeat: Duration,
    /// Retransmissions after which a path is given up (`Path.Max.Retrans`).
    pub path_retransmissions: u16,
    /// Retransmissions after which the peer is (`Association.Max.Retrans`).
    pub association_retransmissions: u16,
    /// Attempts to set up an association (`Max.Init.Retransmits`).
    pub init_retransmissions: u16,
}

impl Default for Failure {
    fn default() -> Self {
        Self {
            rto_initial: Duration::from_millis(500),
            rto_min: Duration::from_millis(200),
            rto_max: Duration::from_millis(1000),
            heartbeat: Duration::from_millis(1000),
            path_retransmissions: 2,
            association_retransmissions: 5,
            init_retransmissions: 4,
        }
    }
}

impl Config {
    /// An endpoint at `local`, with defaults for everything else: listening, raw and encapsulated.
    #[must_use]
    pub fn new(local: Vec<SocketAddr>) -> Self {
        Self {
            local,
            listen: true,
            encapsulation: Some(ENCAPSULATION_PORT),
            raw: true,
            streams: 16,
            outbound_streams: 16,
            send_buffer: 1 << 20,
            receive_buffer: 1 << 20,
            message_len_max: 1 << 20,
            path_mtu: 1400,
            no_delay: true,
            failure: Failure::default(),
        }
    }
}
