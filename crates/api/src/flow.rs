//! The text form of a flow: `tcp:LOCAL:PORT-REMOTE:PORT`.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The transport protocol of a flow or a service. In JSON: `"tcp"` or `"udp"`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP (RFC 9293).
    Tcp,
    /// UDP (RFC 768).
    Udp,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        })
    }
}

/// One connection or datagram association as the serving node sees it; `local` is the service's side.
///
/// Written `tcp:10.0.0.1:80-10.0.1.2:4242`, IPv6 `udp:[fd00::1]:80-[fd00::2]:4242`, also in JSON and in the messages
/// between programs and the daemon. One flow has one value: IPv4 addresses mapped into IPv6 (RFC 4291, section 2.5.5.2)
/// become IPv4, and IPv6 scope and flow label are dropped.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowText {
    protocol: Protocol,
    local: SocketAddr,
    remote: SocketAddr,
}

impl FlowText {
    /// Returns the flow between `local` (the service's side) and `remote` (the client's side).
    ///
    /// # Errors
    /// [`FlowTextError::MixedFamilies`] when one address is IPv4 and the other IPv6.
    pub fn new(
        protocol: Protocol,
        local: SocketAddr,
        remote: SocketAddr,
    ) -> Result<Self, FlowTextError> {
        let (local, remote) = (canonical(local), canonical(remote));
        if local.is_ipv4() != remote.is_ipv4() {
            return Err(FlowTextError::MixedFamilies);
        }
        Ok(Self {
            protocol,
            local,
            remote,
        })
    }

    /// Returns the transport protocol.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Returns the service's address and port.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Returns the client's address and port.
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    // A new SocketAddr has neither scope nor flow label: two sockets of one flow may differ in both.
    SocketAddr::new(IpAddr::to_canonical(&address.ip()), address.port())
}

/// The reason that a text is not a flow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowTextError {
    /// The text does not begin with a known protocol.
    #[error("a flow begins with `tcp:` or `udp:`")]
    Protocol,
    /// There is no `-` between two addresses.
    #[error("a flow is written `tcp:LOCAL:PORT-REMOTE:PORT`")]
    Format,
    /// One of the addresses is not an address with a port.
    #[error("`{0}` is not ADDRESS:PORT (IPv6: [ADDRESS]:PORT)")]
    Address(String),
    /// One address is IPv4, the other IPv6.
    #[error("the two addresses are of different families")]
    MixedFamilies,
}

/// Maximum length of a flow's text, in bytes; a longer text is refused before parsing.
const TEXT_BYTES_MAX: usize = 160;

impl FromStr for FlowText {
    type Err = FlowTextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(FlowTextError::Format);
        }
        let (protocol, rest) = text.split_once(':').ok_or(FlowTextError::Protocol)?;
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return Err(FlowTextError::Protocol),
        };
        let (local, remote) = rest.split_once('-').ok_or(FlowTextError::Format)?;
        Self::new(protocol, parse_address(local)?, parse_address(remote)?)
    }
}

fn parse_address(text: &str) -> Result<SocketAddr, FlowTextError> {
    text.parse()
        .map_err(|_| FlowTextError::Address(text.to_owned()))
}

impl fmt::Display for FlowText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}-{}", self.protocol, self.local, self.remote)
    }
}

impl fmt::Debug for FlowText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for FlowText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for FlowText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

impl JsonSchema for FlowText {
    fn schema_name() -> Cow<'static, str> {
        "Flow".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "description": "A flow: protocol, local (service) address and port, remote (client) address and port.",
            "examples": ["tcp:10.0.0.1:80-10.0.1.2:4242", "udp:[fd00::1]:80-[fd00::2]:4242"]
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn documented_flow_text_is_parsed() {
        for text in [
            "tcp:10.0.0.1:80-10.0.1.2:4242",
            "udp:[fd00::1]:80-[fd00::2]:4242",
        ] {
            let flow: FlowText = text.parse().unwrap();
            assert_eq!(flow.to_string(), text);
            assert_eq!(serde_json::to_string(&flow).unwrap(), format!("\"{text}\""));
        }
    }

    #[test]
    fn equal_flows_have_equal_values() {
        let mapped: FlowText = "tcp:[::ffff:10.0.0.1]:80-[::ffff:10.0.1.2]:4242"
            .parse()
            .unwrap();
        assert_eq!(mapped, "tcp:10.0.0.1:80-10.0.1.2:4242".parse().unwrap());
        let scoped: FlowText = "tcp:[fe80::1%3]:80-[fe80::2%4]:1".parse().unwrap();
        assert_eq!(scoped.to_string(), "tcp:[fe80::1]:80-[fe80::2]:1");
    }

    #[test]
    fn malformed_flow_text_is_refused_by_name() {
        use FlowTextError::*;
        let refused = |text: &str| text.parse::<FlowText>().unwrap_err();
        assert_eq!(refused("sctp:1.2.3.4:1-1.2.3.4:2"), Protocol);
        assert_eq!(refused("tcp"), Protocol);
        assert_eq!(refused("tcp:1.2.3.4:1"), Format);
        assert_eq!(refused("tcp:1.2.3.4-1.2.3.4:2"), Address("1.2.3.4".into()));
        assert_eq!(refused("tcp:1.2.3.4:1-[::1]:2"), MixedFamilies);
        assert_eq!(refused(&"x".repeat(1000)), Format);
    }

    proptest! {
        #[test]
        fn every_flow_survives_its_text(udp: bool, local: [u8; 16], remote: [u8; 16], ports: (u16, u16), four: bool) {
            let address = |bytes: [u8; 16], port| -> SocketAddr {
                match four {
                    true => ([bytes[0], bytes[1], bytes[2], bytes[3]], port).into(),
                    false => (bytes, port).into(),
                }
            };
            let protocol = if udp { Protocol::Udp } else { Protocol::Tcp };
            if let Ok(flow) = FlowText::new(protocol, address(local, ports.0), address(remote, ports.1)) {
                prop_assert_eq!(flow.to_string().parse::<FlowText>().unwrap(), flow);
            }
        }

        #[test]
        fn parsing_never_panics(text in ".{0,200}") {
            let _ = text.parse::<FlowText>();
        }
    }
}
