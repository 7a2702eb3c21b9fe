//! Configuration of an SCTP endpoint.

use std::net::SocketAddr;
use std::time::Duration;

/// UDP port for encapsulated SCTP (RFC 6951, section 5).
pub const ENCAPSULATION_PORT: u16 = 9899;

/// Settings of an SCTP endpoint.
#[derive(Clone, Debug)]
pub struct TransportConfig {
    /// Local addresses, all of one family and with one port; port 0 lets the system choose. An unspecified address
    /// stands for all addresses of the host.
    pub local: Vec<SocketAddr>,
    /// True if the endpoint accepts associations.
    pub listen: bool,
    /// Local UDP port of encapsulated packets (RFC 6951); 0 lets the system choose, `None` disables encapsulation. The
    /// whole process (usrsctp) or network namespace (kernel) has one such port: the first endpoint determines it.
    pub encapsulation: Option<u16>,
    /// Use IP protocol 132 directly. usrsctp needs `CAP_NET_RAW` for that and continues without it if not permitted.
    /// The first endpoint of a process determines the setting; the kernel's SCTP always uses protocol 132.
    pub raw: bool,
    /// Most inbound streams of an association.
    pub inbound_streams_max: u16,
    /// Number of outbound streams requested. libusrsctp scans all of them whenever it sends.
    pub outbound_streams: u16,
    /// Most unsent or unacknowledged bytes of an association before [`send`](super::TransportEndpoint::send) refuses.
    pub send_buffer: u32,
    /// Receive window of an association, bytes.
    pub receive_buffer: u32,
    /// Length of the longest message accepted from a peer; a longer one ends the association.
    pub message_len_max: u32,
    /// Length of the largest SCTP packet with its IP header, bytes. Fixed, because neither stack sees too-big errors
    /// for packets inside UDP.
    pub path_mtu: u32,
    /// Send small messages at once, before earlier ones are acknowledged (`SCTP_NODELAY`).
    pub no_delay: bool,
    /// Limits after which a path or an association has failed.
    pub failure: FailureDetection,
}

/// Parameters for detecting a dead path or peer (RFC 9260, sections 6.3 and 8). The standard's defaults take half a
/// minute; these defaults suit registrars and elements that must be replaced within seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureDetection {
    /// First retransmission timeout of a path.
    pub rto_initial: Duration,
    /// Lower bound of the retransmission timeout.
    pub rto_min: Duration,
    /// Upper bound of the retransmission timeout.
    pub rto_max: Duration,
    /// Interval of probes on an idle path.
    pub heartbeat: Duration,
    /// Retransmissions after which a path has failed (`Path.Max.Retrans`).
    pub path_retransmissions: u16,
    /// Retransmissions after which the association has failed (`Association.Max.Retrans`).
    pub association_retransmissions: u16,
    /// Most retransmissions when establishing an association (`Max.Init.Retransmits`).
    pub init_retransmissions: u16,
}

impl Default for FailureDetection {
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

impl TransportConfig {
    /// Returns the configuration of an endpoint at `local`, with defaults for all other settings: listening, raw and
    /// encapsulated.
    #[must_use]
    pub fn new(local: Vec<SocketAddr>) -> Self {
        Self {
            local,
            listen: true,
            encapsulation: Some(ENCAPSULATION_PORT),
            raw: true,
            inbound_streams_max: 16,
            outbound_streams: 16,
            send_buffer: 1 << 20,
            receive_buffer: 1 << 20,
            message_len_max: 1 << 20,
            path_mtu: 1400,
            no_delay: true,
            failure: FailureDetection::default(),
        }
    }
}
