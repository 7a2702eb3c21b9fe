//! A flow and its text form.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// The transport protocol of a flow, or another kind of record in the steering table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// RFC 9293.
    Tcp,
    /// RFC 768.
    Udp,
    /// A process that moves, see [`Flow::process_key`]: no packet has this protocol.
    Process,
}

impl Protocol {
    /// Returns the number in the IP header (6 or 17); for a process 255, which no packet may have.
    pub fn number(self) -> u8 {
        match self {
            Protocol::Tcp => 6,
            Protocol::Udp => 17,
            Protocol::Process => 255,
        }
    }

    /// Returns the protocol with that number, see [`Protocol::number`].
    pub fn from_number(number: u8) -> Option<Protocol> {
        match number {
            6 => Some(Protocol::Tcp),
            17 => Some(Protocol::Udp),
            255 => Some(Protocol::Process),
            _ => None,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Process => "process",
        })
    }
}

/// One connection or datagram association as a node sees it: `local` is the service's side.
///
/// Written `tcp:10.0.0.1:80-10.0.1.2:4242`, `udp:[fd00::1]:53-[fd00::2]:4242`. Both addresses are of one family; an
/// IPv4 address is stored as IPv4, never as a mapped IPv6 address; an IPv6 address has no flow label and no scope.
/// [`Flow::new`], the text form and the wire form ensure these rules; a struct literal must follow them itself.
///
/// Serialized as its text in a human-readable format (JSON), as a compact structure in others (postcard).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Flow {
    /// The transport protocol.
    pub protocol: Protocol,
    /// The service's address and port.
    pub local: SocketAddr,
    /// The client's address and port.
    pub remote: SocketAddr,
}

impl Hash for Flow {
    /// Hashes the whole flow as one slice: hashers take some time for each call.
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut bytes = [0; 40];
        for (half, address) in bytes.chunks_exact_mut(20).zip([self.local, self.remote]) {
            match address.ip() {
                IpAddr::V4(v4) => half[..4].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) => half[..16].copy_from_slice(&v6.octets()),
            }
            half[16..18].copy_from_slice(&address.port().to_ne_bytes());
            half[18] = self.protocol.number();
        }
        state.write(&bytes);
    }
}

/// A value or text that is not a flow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// The text has another form.
    #[error(
        "`{0}` is not a flow; write PROTOCOL:LOCAL:PORT-REMOTE:PORT, such as tcp:10.0.0.1:80-10.0.1.2:4242 or tcp:[fd00::1]:80-[fd00::2]:4242"
    )]
    Syntax(String),
    /// The protocol is unknown.
    #[error("`{0}` is not a protocol; use tcp or udp")]
    Protocol(String),
    /// The text begins like the record of a process but is malformed.
    #[error("`{0}` is not a move of a process; write DONOR.BOOT.SEQ, such as 2.5f3a.7")]
    Move(String),
    /// One address is IPv4, the other IPv6.
    #[error("{local} and {remote} are of two families; give both as IPv4 or both as IPv6")]
    Families {
        /// The service's side.
        local: SocketAddr,
        /// The client's side.
        remote: SocketAddr,
    },
}

impl Flow {
    /// Creates a flow in canonical form: mapped IPv6 addresses become IPv4, flow labels and scopes are dropped.
    ///
    /// # Errors
    /// [`FlowError::Families`] when one address is IPv4 and the other is not; [`FlowError::Move`] when the addresses of
    /// a process's record do not come from [`Flow::process_key`].
    pub fn new(
        protocol: Protocol,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<Flow, FlowError> {
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(FlowError::Families { local, remote });
        }
        let flow = Flow {
            protocol,
            local,
            remote,
        };
        if flow.is_process() && flow.move_id().is_none() {
            return Err(FlowError::Move(format!("{local}-{remote}")));
        }
        Ok(flow)
    }

    /// Returns true if the flow runs over IPv6.
    pub fn is_ipv6(&self) -> bool {
        self.local.is_ipv6()
    }
}

impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.move_id() {
            Some(id) => write!(f, "process:{id}"),
            None => write!(f, "{}:{}-{}", self.protocol, self.local, self.remote),
        }
    }
}

impl FromStr for Flow {
    type Err = FlowError;

    fn from_str(text: &str) -> Result<Flow, FlowError> {
        let syntax_error = || FlowError::Syntax(excerpt(text));
        let (protocol, addresses) = text.split_once(':').ok_or_else(syntax_error)?;
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            "process" => return addresses.parse().map(Flow::process_key),
            other => return Err(FlowError::Protocol(excerpt(other))),
        };
        let (local, remote) = addresses.split_once('-').ok_or_else(syntax_error)?;
        let local = local.parse().map_err(|_| syntax_error())?;
        let remote = remote.parse().map_err(|_| syntax_error())?;
        Flow::new(protocol, local, remote)
    }
}

/// Returns the part of a text that an error should repeat.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars()
        .take(120)
        .flat_map(char::escape_debug)
        .collect()
}

/// The compact form, a separate type so that decoding passes through [`Flow::new`].
#[derive(Serialize, Deserialize)]
struct CompactFlow(Protocol, SocketAddr, SocketAddr);

impl Serialize for Flow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return serializer.collect_str(self);
        }
        CompactFlow(self.protocol, self.local, self.remote).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Flow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Flow, D::Error> {
        if deserializer.is_human_readable() {
            let text = String::deserialize(deserializer)?;
            return text.parse().map_err(D::Error::custom);
        }
        let CompactFlow(protocol, local, remote) = CompactFlow::deserialize(deserializer)?;
        Flow::new(protocol, local, remote).map_err(D::Error::custom)
    }
}
