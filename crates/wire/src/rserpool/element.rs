//! Pool elements and registrars as messages describe them (RFC 5354 sections 3.9 to 3.11 and 3.14).

use super::id::{ElementId, PoolHandle, RegistrarId};
use super::parameter::{self, Parameter};
use super::policy::Policy;
use super::read::{ErrorKind, Reader};
use super::transport::{SctpTransport, Transport};
use super::write::{self, EncodeError, Writer};

/// A pool element (RFC 5354 section 3.10).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoolElement {
    /// Its number within the pool.
    pub id: ElementId,
    /// Its home registrar; 0 if it has none.
    pub home: RegistrarId,
    /// How long the registration holds; -1 means for ever. As it is on the wire: RFC 5354 counts seconds, rsplib
    /// milliseconds, and nothing in the message tells which.
    pub registration_life: i32,
    /// Where its users reach it.
    pub user_transport: Transport,
    /// What it says of itself for the pool's policy.
    pub policy: Policy,
    /// Where registrars reach it. The RFC wants it always. rsplib sends it between registrars only, where it insists on it,
    /// and takes the association's addresses in a registration.
    pub asap_transport: Option<SctpTransport>,
}

/// A registrar (RFC 5354 section 3.11).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ServerInformation {
    /// Its number.
    pub id: RegistrarId,
    /// Where its peers reach it.
    pub transport: SctpTransport,
}

/// A pool element as messages have it, for those that are told again and again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedElement(pub(super) Result<Box<[u8]>, EncodeError>);

impl PoolElement {
    /// As it is written. One that has no encoding makes the message fail that it is put into.
    pub fn encoded(&self) -> EncodedElement {
        EncodedElement(write::parameter_of(self).map(|bytes| Box::from(&bytes[..])))
    }
}

impl Parameter for PoolHandle {
    const KINDS: &'static [u16] = &[parameter::POOL_HANDLE];

    fn read(value: &mut Reader<'_>) -> Result<PoolHandle, ErrorKind> {
        Ok(PoolHandle(value.rest()))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.bytes(&self.0);
    }
}

impl Parameter for ElementId {
    const KINDS: &'static [u16] = &[parameter::ELEMENT_ID];

    fn read(value: &mut Reader<'_>) -> Result<ElementId, ErrorKind> {
        let id = value.u32()?;
        value.end()?;
        Ok(ElementId(id))
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.0);
    }
}

impl Parameter for PoolElement {
    const KINDS: &'static [u16] = &[parameter::POOL_ELEMENT];

    fn read(value: &mut Reader<'_>) -> Result<PoolElement, ErrorKind> {
        let element = PoolElement {
            id: ElementId(value.u32()?),
            home: RegistrarId(value.u32()?),
            registration_life: value.u32()?.cast_signed(),
            user_transport: value.expect()?,
            policy: value.expect()?,
            asap_transport: value.optional()?,
        };
        value.finish()?;
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

    fn read(value: &mut Reader<'_>) -> Result<ServerInformation, ErrorKind> {
        let server = ServerInformation {
            id: RegistrarId(value.u32()?),
            transport: value.expect()?,
        };
        value.finish()?;
        Ok(server)
    }

    fn write(&self, writer: &mut Writer<'_>) {
        writer.u32(self.id.0);
        writer.put(&self.transport);
    }
}
