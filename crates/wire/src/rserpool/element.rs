//! Pool elements and registrars in messages (RFC 5354 sections 3.9 to 3.11 and 3.14).

use super::decoder::{DecodeErrorKind, Reader};
use super::encoder::{self, EncodeError, Writer};
use super::identifiers::{ElementId, PoolHandle, RegistrarId};
use super::parameter::{self, Parameter};
use super::policy::Policy;
use super::transport::{SctpTransport, Transport};

/// A pool element (RFC 5354 section 3.10).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoolElement {
    /// The element's number within the pool.
    pub id: ElementId,
    /// The element's home registrar; 0 if none.
    pub home: RegistrarId,
    /// Lifetime of the registration, as on the wire; -1 means unlimited. RFC 5354 counts seconds, rsplib milliseconds,
    /// and the message does not tell which unit applies.
    pub registration_life: i32,
    /// Transport address for pool users.
    pub user_transport: Transport,
    /// The element's figures for the pool's policy.
    pub policy: Policy,
    /// Transport address for registrars. The RFC always requires it. rsplib requires it between registrars, and
    /// omits it elsewhere; for a registration rsplib uses the association's addresses.
    pub asap_transport: Option<SctpTransport>,
}

/// A registrar (RFC 5354 section 3.11).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServerInformation {
    /// The registrar's number.
    pub id: RegistrarId,
    /// Transport address for peers.
    pub transport: SctpTransport,
}

/// A pool element in encoded form, for elements that are sent repeatedly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedElement(pub(super) Result<Box<[u8]>, EncodeError>);

impl PoolElement {
    /// Encodes the element. An element without an encoding makes every message fail that contains it.
    pub fn to_encoded(&self) -> EncodedElement {
        EncodedElement(encoder::checked_parameter_bytes(self).map(|bytes| Box::from(&bytes[..])))
    }
}

impl Parameter for PoolHandle {
    const KINDS: &'static [u16] = &[parameter::POOL_HANDLE];

    fn read(value: &mut Reader<'_>) -> Result<PoolHandle, DecodeErrorKind> {
        Ok(PoolHandle(value.remaining()))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.bytes(&self.0);
    }
}

impl Parameter for ElementId {
    const KINDS: &'static [u16] = &[parameter::ELEMENT_ID];

    fn read(value: &mut Reader<'_>) -> Result<ElementId, DecodeErrorKind> {
        let id = value.u32()?;
        value.expect_end()?;
        Ok(ElementId(id))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.0);
    }
}

impl Parameter for PoolElement {
    const KINDS: &'static [u16] = &[parameter::POOL_ELEMENT];

    fn read(value: &mut Reader<'_>) -> Result<PoolElement, DecodeErrorKind> {
        let element = PoolElement {
            id: ElementId(value.u32()?),
            home: RegistrarId(value.u32()?),
            registration_life: value.u32()?.cast_signed(),
            user_transport: value.required()?,
            policy: value.required()?,
            asap_transport: value.optional()?,
        };
        value.expect_only_skippable()?;
        Ok(element)
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.id.0);
        writer.u32(self.home.0);
        writer.u32(self.registration_life.cast_unsigned());
        writer.put(&self.user_transport);
        writer.put(&self.policy);
        writer.put_all(&self.asap_transport);
    }
}

impl Parameter for ServerInformation {
    const KINDS: &'static [u16] = &[parameter::SERVER_INFORMATION];

    fn read(value: &mut Reader<'_>) -> Result<ServerInformation, DecodeErrorKind> {
        let server = ServerInformation {
            id: RegistrarId(value.u32()?),
            transport: value.required()?,
        };
        value.expect_only_skippable()?;
        Ok(server)
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.id.0);
        writer.put(&self.transport);
    }
}
