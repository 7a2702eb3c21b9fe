//! Address of a registrar, with the transport.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use holdfast_sctp::StreamProtocol;
use holdfast_wire::rserpool::asap;

use crate::asap_over_tcp::TLS_PORT;

/// A registrar's address, written as `[sctp://]ADDRESS[:PORT]`, `tcp://ADDRESS[:PORT]` or
/// `tls://[NAME@]ADDRESS[:PORT]`. `NAME` is the name in its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrarAddress {
    /// Address and port.
    pub address: SocketAddr,
    /// Transport of the connection; `None`: SCTP.
    pub transport: Option<StreamProtocol>,
}

/// Error: the text is not a registrar's address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a registrar's address; write ADDRESS[:PORT], tcp://ADDRESS[:PORT] or tls://[NAME@]ADDRESS[:PORT]"
)]
pub struct RegistrarAddressError(String);

impl FromStr for RegistrarAddress {
    type Err = RegistrarAddressError;

    fn from_str(text: &str) -> Result<RegistrarAddress, RegistrarAddressError> {
        let invalid = || RegistrarAddressError(text.chars().take(100).collect());
        let (scheme, rest) = text.split_once("://").unwrap_or(("sctp", text));
        let (name, rest) = match rest.split_once('@') {
            Some(("", _)) => return Err(invalid()),
            Some((name, rest)) => (Some(name.to_owned()), rest),
            None => (None, rest),
        };
        let (over, port) = match (scheme, name) {
            ("sctp", None) => (None, asap::PORT),
            ("tcp", None) => (Some(StreamProtocol::Tcp), asap::PORT),
            ("tls", name) => (Some(StreamProtocol::Tls(name)), TLS_PORT),
            _ => return Err(invalid()),
        };
        let bare = rest
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        let address = match bare.unwrap_or(rest).parse::<IpAddr>() {
            Ok(address) => SocketAddr::new(address, port),
            Err(_) => rest.parse().map_err(|_| invalid())?,
        };
        Ok(RegistrarAddress {
            address,
            transport: over,
        })
    }
}

impl fmt::Display for RegistrarAddress {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address;
        match &self.transport {
            None => write!(text, "{address}"),
            Some(StreamProtocol::Tcp) => write!(text, "tcp://{address}"),
            Some(StreamProtocol::Tls(None)) => write!(text, "tls://{address}"),
            Some(StreamProtocol::Tls(Some(name))) => write!(text, "tls://{name}@{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrar_address_survives_its_text() {
        for (written, shown) in [
            ("10.0.0.1", "10.0.0.1:3863"),
            ("sctp://10.0.0.1:7", "10.0.0.1:7"),
            ("tcp://10.0.0.1", "tcp://10.0.0.1:3863"),
            ("tls://10.0.0.1", "tls://10.0.0.1:3864"),
            ("tls://r1@[fd00::1]:9", "tls://r1@[fd00::1]:9"),
            ("tls://[fd00::1]", "tls://[fd00::1]:3864"),
            ("fd00::1", "[fd00::1]:3863"),
        ] {
            let read: RegistrarAddress = written.parse().expect(written);
            assert_eq!(read.to_string(), shown);
            assert_eq!(shown.parse(), Ok(read));
        }
        for wrong in [
            "",
            "tls://",
            "tls://@10.0.0.1",
            "tcp://a@10.0.0.1",
            "http://10.0.0.1",
            "10.0.0",
        ] {
            assert!(wrong.parse::<RegistrarAddress>().is_err(), "{wrong}");
        }
    }
}
