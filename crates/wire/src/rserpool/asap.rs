//! ASAP (RFC 5352): between pool elements or pool users and registrars, and, in the session layer, among the former.

use super::decoder::{self, DecodeError, DecodeErrorKind, ParsedMessage, Reader};
use super::element::PoolElement;
use super::encoder::{self, EncodeError, Writer};
use super::error_cause::ErrorCause;
use super::identifiers::{ElementId, PoolHandle, RegistrarId};
use super::parameter;
use super::policy::Policy;
use super::transport::Transport;
use bytes::{Bytes, BytesMut};

mod parameters;
mod resolution;

pub use resolution::ResolutionResponseEncoder;

use parameters::{Cookie, ItemCount, LoadFigures};

/// The payload protocol identifier in SCTP.
pub const PPID: u32 = 11;

/// The registrars' port.
pub const PORT: u16 = 3863;

const HANDLE_RESOLUTION_RESPONSE: u8 = 0x06;
/// A number that the RFC leaves unassigned. Its two top bits mean "00 Stop processing this message and discard it" (RFC
/// 5354 section 4), without a report. rsplib drops any type that it does not know.
const PROBE: u8 = 0x3d;
const PROBE_ANSWER: u8 = 0x3e;

/// An ASAP message (RFC 5352 section 2.2).
///
/// Byte fields are slices of the parsed buffer: copy a field to keep it without the buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields that say no more than their type")]
pub enum Message {
    /// A pool element registers or re-registers.
    Registration {
        handle: PoolHandle,
        element: PoolElement,
    },
    /// A pool element deregisters from its pool.
    Deregistration { handle: PoolHandle, id: ElementId },
    /// The answer to a registration.
    RegistrationResponse {
        /// The R flag. If not set, causes are warnings.
        rejected: bool,
        handle: PoolHandle,
        id: ElementId,
        /// Empty: no Operation Error.
        causes: Vec<ErrorCause>,
    },
    /// The answer to a deregistration, or notice that a registration's lifetime ended.
    DeregistrationResponse {
        handle: PoolHandle,
        id: ElementId,
        /// Empty: no Operation Error.
        causes: Vec<ErrorCause>,
    },
    /// A pool user asks for elements of a pool.
    HandleResolution {
        /// The S flag: request notifications of changes.
        updates: bool,
        handle: PoolHandle,
        /// Maximum number of elements in the answer, `u32::MAX` for no limit: rsplib's private parameter `0x803f`,
        /// which other implementations skip.
        items_max: Option<u32>,
    },
    /// The answer to a handle resolution: negative exactly if it has causes; then policy and elements are absent.
    HandleResolutionResponse {
        /// The A flag: changes will be notified.
        updates: bool,
        handle: PoolHandle,
        /// The pool's policy; round robin if absent. rsplib requires the policy.
        policy: Option<Policy>,
        elements: Vec<PoolElement>,
        /// Empty: no Operation Error.
        causes: Vec<ErrorCause>,
    },
    /// A registrar checks that a pool element is alive.
    EndpointKeepAlive {
        /// The H flag: the registrar becomes the element's home.
        home: bool,
        registrar: RegistrarId,
        handle: PoolHandle,
        /// The element of the endpoint that is meant; rsplib's addition, for which a receiver that follows the RFC
        /// discards the message.
        id: Option<ElementId>,
    },
    /// The answer to a keep-alive.
    EndpointKeepAliveAck { handle: PoolHandle, id: ElementId },
    /// A pool user did not reach a pool element.
    EndpointUnreachable { handle: PoolHandle, id: ElementId },
    /// A registrar announces itself by multicast.
    ServerAnnounce {
        registrar: RegistrarId,
        /// SCTP or TCP. rsplib sends none, and then the datagram's source address and port are meant; of several,
        /// rsplib understands the first ones up to an SCTP one, which must be the last.
        transports: Vec<Transport>,
    },
    /// State of a pool element, stored by its user.
    Cookie(Bytes),
    /// The stored state, sent by the pool user to the next pool element.
    CookieEcho(Bytes),
    /// The sender's pool, and elements to fail over to, in that order.
    BusinessCard {
        handle: PoolHandle,
        /// The pool's policy; rsplib's addition and requirement.
        policy: Option<Policy>,
        elements: Vec<PoolElement>,
    },
    /// Reports errors in a message.
    Error(Vec<ErrorCause>),
    /// A pool user asks a pool element for its load. Not in the RFC.
    Probe { handle: PoolHandle, id: ElementId },
    /// The pool element's answer to `Probe`: its load. Not in the RFC.
    ProbeAnswer {
        handle: PoolHandle,
        id: ElementId,
        /// Number of requests in progress.
        in_flight: u32,
        /// Expected latency of a request that arrives at the present load, in microseconds; none if unknown.
        latency_us: Option<u32>,
    },
}

impl Message {
    /// Reads a message, with or without the padding behind it.
    ///
    /// # Errors
    /// The reason for discarding the message, and the reports for its sender.
    pub fn parse(bytes: &Bytes) -> Result<ParsedMessage<Message>, DecodeError> {
        decoder::parse_message(bytes, parse)
    }

    /// Appends the ASAP message to `buffer`.
    ///
    /// # Errors
    /// A message without an encoding; then nothing is appended.
    pub fn encode(&self, buffer: &mut BytesMut) -> Result<(), EncodeError> {
        encoder::encode_message(buffer, self.number(), self.flags(), |writer| {
            self.write(writer);
        })
    }

    /// The message type's name in the RFC, without the prefix.
    pub fn name(&self) -> &'static str {
        match self {
            Message::Registration { .. } => "REGISTRATION",
            Message::Deregistration { .. } => "DEREGISTRATION",
            Message::RegistrationResponse { .. } => "REGISTRATION_RESPONSE",
            Message::DeregistrationResponse { .. } => "DEREGISTRATION_RESPONSE",
            Message::HandleResolution { .. } => "HANDLE_RESOLUTION",
            Message::HandleResolutionResponse { .. } => "HANDLE_RESOLUTION_RESPONSE",
            Message::EndpointKeepAlive { .. } => "ENDPOINT_KEEP_ALIVE",
            Message::EndpointKeepAliveAck { .. } => "ENDPOINT_KEEP_ALIVE_ACK",
            Message::EndpointUnreachable { .. } => "ENDPOINT_UNREACHABLE",
            Message::ServerAnnounce { .. } => "SERVER_ANNOUNCE",
            Message::Cookie(_) => "COOKIE",
            Message::CookieEcho(_) => "COOKIE_ECHO",
            Message::BusinessCard { .. } => "BUSINESS_CARD",
            Message::Error(_) => "ERROR",
            Message::Probe { .. } => "PROBE",
            Message::ProbeAnswer { .. } => "PROBE_ANSWER",
        }
    }

    fn number(&self) -> u8 {
        match self {
            Message::Registration { .. } => 0x01,
            Message::Deregistration { .. } => 0x02,
            Message::RegistrationResponse { .. } => 0x03,
            Message::DeregistrationResponse { .. } => 0x04,
            Message::HandleResolution { .. } => 0x05,
            Message::HandleResolutionResponse { .. } => HANDLE_RESOLUTION_RESPONSE,
            Message::EndpointKeepAlive { .. } => 0x07,
            Message::EndpointKeepAliveAck { .. } => 0x08,
            Message::EndpointUnreachable { .. } => 0x09,
            Message::ServerAnnounce { .. } => 0x0a,
            Message::Cookie(_) => 0x0b,
            Message::CookieEcho(_) => 0x0c,
            Message::BusinessCard { .. } => 0x0d,
            Message::Error(_) => 0x0e,
            Message::Probe { .. } => PROBE,
            Message::ProbeAnswer { .. } => PROBE_ANSWER,
        }
    }

    /// In every message with a flag, the flag is the lowest bit.
    fn flags(&self) -> u8 {
        u8::from(match self {
            Message::RegistrationResponse { rejected, .. } => *rejected,
            Message::HandleResolution { updates, .. }
            | Message::HandleResolutionResponse { updates, .. } => *updates,
            Message::EndpointKeepAlive { home, .. } => *home,
            _ => false,
        })
    }

    /// Returns the causes that the message reports; empty without an Operation Error.
    pub fn causes(&self) -> &[ErrorCause] {
        self.operation_error().map_or(&[], Vec::as_slice)
    }

    /// Returns the Operation Error parameter; only an error message's may be empty.
    fn operation_error(&self) -> Option<&Vec<ErrorCause>> {
        match self {
            Message::RegistrationResponse { causes, .. }
            | Message::DeregistrationResponse { causes, .. }
            | Message::HandleResolutionResponse { causes, .. } => {
                (!causes.is_empty()).then_some(causes)
            }
            Message::Error(causes) => Some(causes),
            _ => None,
        }
    }

    /// Returns the load figures of a probe's answer.
    fn load_figures(&self) -> Option<LoadFigures> {
        match self {
            Message::ProbeAnswer {
                in_flight,
                latency_us,
                ..
            } => Some(LoadFigures(*in_flight, *latency_us)),
            _ => None,
        }
    }

    fn write(&self, writer: &mut Writer<'_>) {
        match self {
            Message::Registration { handle, element } => {
                writer.put(handle);
                writer.put(element);
            }
            Message::Deregistration { handle, id }
            | Message::RegistrationResponse { handle, id, .. }
            | Message::DeregistrationResponse { handle, id, .. }
            | Message::EndpointKeepAliveAck { handle, id }
            | Message::EndpointUnreachable { handle, id }
            | Message::Probe { handle, id }
            | Message::ProbeAnswer { handle, id, .. } => {
                writer.put(handle);
                writer.put(id);
            }
            Message::HandleResolution {
                handle,
                items_max: items,
                ..
            } => {
                writer.put(handle);
                writer.put_all(&items.map(ItemCount));
            }
            Message::HandleResolutionResponse {
                handle,
                policy,
                elements,
                ..
            }
            | Message::BusinessCard {
                handle,
                policy,
                elements,
            } => {
                writer.put(handle);
                writer.put_all(policy);
                writer.put_all(elements);
            }
            Message::EndpointKeepAlive {
                registrar,
                handle,
                id,
                ..
            } => {
                writer.u32(registrar.0);
                writer.put(handle);
                writer.put_all(id);
            }
            Message::ServerAnnounce {
                registrar,
                transports,
            } => {
                writer.u32(registrar.0);
                writer.put_all(transports);
            }
            Message::Cookie(cookie) | Message::CookieEcho(cookie) => {
                writer.tlv(parameter::COOKIE, |writer| writer.bytes(cookie));
            }
            Message::Error(_) => {}
        }
        writer.put_all(&self.load_figures());
        writer.put_all(self.operation_error());
    }
}

fn parse(number: u8, flags: u8, body: &mut Reader<'_>) -> Result<Message, DecodeErrorKind> {
    let flag = flags & 1 != 0;
    Ok(match number {
        0x01 => Message::Registration {
            handle: body.required()?,
            element: body.required()?,
        },
        0x02 => Message::Deregistration {
            handle: body.required()?,
            id: body.required()?,
        },
        0x03 | 0x04 | 0x06 => parse_response(number, flag, body)?,
        0x05 => Message::HandleResolution {
            updates: flag,
            handle: body.required()?,
            items_max: body.optional::<ItemCount>()?.map(|items| items.0),
        },
        0x07 => Message::EndpointKeepAlive {
            home: flag,
            registrar: RegistrarId(body.u32()?),
            handle: body.required()?,
            id: body.optional()?,
        },
        0x08 => Message::EndpointKeepAliveAck {
            handle: body.required()?,
            id: body.required()?,
        },
        0x09 => Message::EndpointUnreachable {
            handle: body.required()?,
            id: body.required()?,
        },
        0x0a => Message::ServerAnnounce {
            registrar: RegistrarId(body.u32()?),
            transports: body.list()?,
        },
        0x0b => Message::Cookie(body.required::<Cookie>()?.0),
        0x0c => Message::CookieEcho(body.required::<Cookie>()?.0),
        0x0d => Message::BusinessCard {
            handle: body.required()?,
            policy: body.optional()?,
            elements: body.list()?,
        },
        0x0e => Message::Error(body.required()?),
        PROBE => Message::Probe {
            handle: body.required()?,
            id: body.required()?,
        },
        PROBE_ANSWER => {
            let (handle, id) = (body.required()?, body.required()?);
            let LoadFigures(in_flight, latency_us) = body.required()?;
            Message::ProbeAnswer {
                handle,
                id,
                in_flight,
                latency_us,
            }
        }
        _ => return Err(DecodeErrorKind::UnknownMessage(number)),
    })
}

fn parse_response(
    number: u8,
    flag: bool,
    body: &mut Reader<'_>,
) -> Result<Message, DecodeErrorKind> {
    let handle = body.required()?;
    Ok(match number {
        0x03 => Message::RegistrationResponse {
            rejected: flag,
            handle,
            id: body.required()?,
            causes: body.optional()?.unwrap_or_default(),
        },
        0x04 => Message::DeregistrationResponse {
            handle,
            id: body.required()?,
            causes: body.optional()?.unwrap_or_default(),
        },
        _ => Message::HandleResolutionResponse {
            updates: flag,
            handle,
            policy: body.optional()?,
            elements: body.list()?,
            causes: body.optional()?.unwrap_or_default(),
        },
    })
}
