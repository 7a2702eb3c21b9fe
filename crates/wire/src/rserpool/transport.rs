//! Addresses of elements and registrars: the transport parameters (RFC 5354 sections 3.1 to 3.7 and 3.16).

use super::decoder::{DecodeErrorKind, Reader};
use super::encoder::{EncodeError, Writer};
use super::parameter::{self, Parameter};
use bytes::Bytes;
use smallvec::SmallVec;
use std::net::IpAddr;

/// The addresses of an SCTP endpoint; up to two without an allocation.
pub type Addresses = SmallVec<[IpAddr; 2]>;

/// The purpose of a transport address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum TransportUse {
    /// Data channel only.
    #[default]
    DataOnly,
    /// Both the data channel and the control channel of the session layer.
    DataAndControl,
}

/// An SCTP endpoint. At least one address is required for encoding.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SctpTransport {
    /// Port.
    pub port: u16,
    /// Purpose of the endpoint.
    pub usage: TransportUse,
    /// All addresses of the endpoint.
    pub addresses: Addresses,
}

/// The transport protocol and address of a service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// RFC 4340.
    Dccp {
        /// Port.
        port: u16,
        /// Service code.
        service_code: u32,
        /// Address.
        address: IpAddr,
    },
    /// RFC 9260.
    Sctp(SctpTransport),
    /// RFC 9293.
    Tcp {
        /// Port.
        port: u16,
        /// Purpose of the endpoint. RFC 5354 reserves the field (send [`TransportUse::DataOnly`], which is 0); rsplib
        /// uses it.
        usage: TransportUse,
        /// Address.
        address: IpAddr,
    },
    /// RFC 768.
    Udp {
        /// Port.
        port: u16,
        /// Address.
        address: IpAddr,
    },
    /// RFC 3828.
    UdpLite {
        /// Port.
        port: u16,
        /// Address.
        address: IpAddr,
    },
    /// Bytes that only the pool's users understand.
    Opaque(Bytes),
}

/// An IPv4 address is encoded and decoded as IPv4, never as a mapped IPv6 address.
impl Parameter for IpAddr {
    const KINDS: &'static [u16] = &[parameter::IPV4_ADDRESS, parameter::IPV6_ADDRESS];

    fn kind(&self) -> u16 {
        match self.to_canonical() {
            IpAddr::V4(_) => parameter::IPV4_ADDRESS,
            IpAddr::V6(_) => parameter::IPV6_ADDRESS,
        }
    }

    fn read(value: &mut Reader<'_>) -> Result<IpAddr, DecodeErrorKind> {
        let address = match value.kind() {
            parameter::IPV4_ADDRESS => IpAddr::from(value.array::<4>()?),
            _ => IpAddr::from(value.array::<16>()?).to_canonical(),
        };
        value.expect_end()?;
        Ok(address)
    }

    fn write(&self, writer: &mut Writer<'_>) {
        match self.to_canonical() {
            IpAddr::V4(address) => writer.bytes(&address.octets()),
            IpAddr::V6(address) => writer.bytes(&address.octets()),
        }
    }
}

impl TransportUse {
    fn number(self) -> u16 {
        match self {
            TransportUse::DataOnly => 0,
            TransportUse::DataAndControl => 1,
        }
    }

    fn from_number(number: u16) -> Option<TransportUse> {
        match number {
            0 => Some(TransportUse::DataOnly),
            1 => Some(TransportUse::DataAndControl),
            _ => None,
        }
    }
}

impl Parameter for SctpTransport {
    const KINDS: &'static [u16] = &[parameter::SCTP_TRANSPORT];

    fn read(value: &mut Reader<'_>) -> Result<SctpTransport, DecodeErrorKind> {
        let port = value.u16()?;
        let usage = TransportUse::from_number(value.u16()?).ok_or_else(|| value.invalid_value())?;
        let mut addresses = Addresses::new();
        addresses.push(value.required()?);
        while let Some(address) = value.optional()? {
            addresses.push(address);
        }
        value.expect_only_skippable()?;
        Ok(SctpTransport {
            port,
            usage,
            addresses,
        })
    }

    fn write(&self, writer: &mut Writer<'_>) {
        if self.addresses.is_empty() {
            writer.set_error(EncodeError::NoAddress);
        }
        writer.u16(self.port);
        writer.u16(self.usage.number());
        writer.put_all(&self.addresses);
    }
}

impl Parameter for Transport {
    const KINDS: &'static [u16] = &[
        parameter::DCCP_TRANSPORT,
        parameter::SCTP_TRANSPORT,
        parameter::TCP_TRANSPORT,
        parameter::UDP_TRANSPORT,
        parameter::UDP_LITE_TRANSPORT,
        parameter::OPAQUE_TRANSPORT,
    ];

    fn kind(&self) -> u16 {
        match self {
            Transport::Dccp { .. } => parameter::DCCP_TRANSPORT,
            Transport::Sctp(_) => parameter::SCTP_TRANSPORT,
            Transport::Tcp { .. } => parameter::TCP_TRANSPORT,
            Transport::Udp { .. } => parameter::UDP_TRANSPORT,
            Transport::UdpLite { .. } => parameter::UDP_LITE_TRANSPORT,
            Transport::Opaque(_) => parameter::OPAQUE_TRANSPORT,
        }
    }

    fn read(value: &mut Reader<'_>) -> Result<Transport, DecodeErrorKind> {
        match value.kind() {
            parameter::SCTP_TRANSPORT => return SctpTransport::read(value).map(Transport::Sctp),
            parameter::OPAQUE_TRANSPORT => return Ok(Transport::Opaque(value.remaining())),
            _ => {}
        }
        let port = value.u16()?;
        let reserved = value.u16()?;
        let transport = match value.kind() {
            parameter::DCCP_TRANSPORT => Transport::Dccp {
                port,
                service_code: value.u32()?,
                address: value.required()?,
            },
            parameter::TCP_TRANSPORT => Transport::Tcp {
                port,
                usage: TransportUse::from_number(reserved).unwrap_or_default(),
                address: value.required()?,
            },
            parameter::UDP_TRANSPORT => Transport::Udp {
                port,
                address: value.required()?,
            },
            _ => Transport::UdpLite {
                port,
                address: value.required()?,
            },
        };
        value.expect_only_skippable()?;
        Ok(transport)
    }

    fn write(&self, writer: &mut Writer<'_>) {
        let (port, reserved, address) = match self {
            Transport::Sctp(transport) => return transport.write(writer),
            Transport::Opaque(data) => return writer.bytes(data),
            Transport::Tcp {
                port,
                usage,
                address,
            } => (port, usage.number(), address),
            Transport::Dccp { port, address, .. }
            | Transport::Udp { port, address }
            | Transport::UdpLite { port, address } => (port, 0, address),
        };
        writer.u16(*port);
        writer.u16(reserved);
        if let Transport::Dccp { service_code, .. } = self {
            writer.u32(*service_code);
        }
        writer.put(address);
    }
}
