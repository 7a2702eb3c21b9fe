//! ENRP (RFC 5353): between registrars.

use super::checksum::ChecksumValue;
use super::decoder::{self, DecodeError, DecodeErrorKind, ParsedMessage, Reader};
use super::element::{PoolElement, ServerInformation};
use super::encoder::{self, EncodeError, LENGTH_MAX, Writer};
use super::error_cause::ErrorCause;
use super::identifiers::{PoolHandle, RegistrarId};
use bytes::{Bytes, BytesMut};

/// The payload protocol identifier in SCTP.
pub const PPID: u32 = 12;

/// The registrars' port.
pub const PORT: u16 = 9901;

/// An ENRP message (RFC 5353 section 2).
///
/// Byte fields are slices of the parsed buffer: copy a field to keep it without the buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// The sending registrar.
    pub sender: RegistrarId,
    /// The receiving registrar; 0 for all.
    pub receiver: RegistrarId,
    /// Type-dependent content of the ENRP message.
    pub body: EnrpBody,
}

/// The content of an ENRP message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields that say no more than their type")]
pub enum EnrpBody {
    /// The sender is alive.
    Presence {
        /// The R flag: request a presence with server information.
        reply_required: bool,
        /// Checksum of the elements that the sender owns, see [`PeChecksum`](super::PeChecksum). rsplib requires it.
        checksum: Option<u16>,
        /// The sender's information; the RFC requires it in a requested reply, rsplib always.
        server: Option<ServerInformation>,
    },
    /// Asks for the handlespace.
    HandleTableRequest {
        /// The W flag: only the elements that the receiver owns.
        own_only: bool,
    },
    /// A block of the handlespace; large blocks are encoded with [`HandleTableEncoder`].
    HandleTableResponse {
        /// The R flag: the request is rejected for the present.
        rejected: bool,
        /// The M flag: request the next block.
        more: bool,
        entries: Vec<PoolEntry>,
    },
    /// An element of the sender was added, changed or removed.
    HandleUpdate {
        /// rsplib's flag: the receiver should take the element over.
        takeover_suggested: bool,
        action: UpdateAction,
        handle: PoolHandle,
        element: PoolElement,
    },
    /// Requests the registrars known to the receiver.
    ListRequest,
    /// The registrars known to the sender.
    ListResponse {
        /// The R flag: the request is rejected for the present.
        rejected: bool,
        servers: Vec<ServerInformation>,
    },
    /// The sender wants to take over the elements of `target`.
    InitTakeover { target: RegistrarId },
    /// The sender does not object to the takeover.
    InitTakeoverAck { target: RegistrarId },
    /// The sender has taken over the elements of `target`.
    TakeoverServer { target: RegistrarId },
    /// Reports errors in a message.
    Error(Vec<ErrorCause>),
}

/// A pool in a handle table, or the part of the pool in this block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolEntry {
    /// Handle of the pool.
    pub handle: PoolHandle,
    /// The pool's elements in this block.
    pub elements: Vec<PoolElement>,
}

/// Effect of a handle update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UpdateAction {
    /// Add the element, or replace it.
    Add,
    /// Delete the element.
    Delete,
}

impl Message {
    /// Reads a message, with or without the padding behind it.
    ///
    /// # Errors
    /// The reason for discarding the message, and the reports for its sender.
    pub fn parse(bytes: &Bytes) -> Result<ParsedMessage<Message>, DecodeError> {
        decoder::parse_message(bytes, |number, flags, reader| {
            if !(PRESENCE..=ERROR).contains(&number) {
                return Err(DecodeErrorKind::UnknownMessage(number));
            }
            Ok(Message {
                sender: RegistrarId(reader.u32()?),
                receiver: RegistrarId(reader.u32()?),
                body: parse(number, flags, reader)?,
            })
        })
    }

    /// Appends the ENRP message to `buffer`.
    ///
    /// # Errors
    /// A message without an encoding; then nothing is appended.
    pub fn encode(&self, buffer: &mut BytesMut) -> Result<(), EncodeError> {
        encoder::encode_message(buffer, self.body.number(), self.body.flags(), |writer| {
            writer.u32(self.sender.0);
            writer.u32(self.receiver.0);
            self.body.write(writer);
        })
    }
}

const PRESENCE: u8 = 0x01;
const HANDLE_TABLE_RESPONSE: u8 = 0x03;
const ERROR: u8 = 0x0a;
/// The lowest flag bit, with a meaning per message type.
const LOW_FLAG: u8 = 1;
const MORE_FLAG: u8 = 2;

impl EnrpBody {
    /// The message type's name in the RFC, without the prefix.
    pub fn name(&self) -> &'static str {
        match self {
            EnrpBody::Presence { .. } => "PRESENCE",
            EnrpBody::HandleTableRequest { .. } => "HANDLE_TABLE_REQUEST",
            EnrpBody::HandleTableResponse { .. } => "HANDLE_TABLE_RESPONSE",
            EnrpBody::HandleUpdate { .. } => "HANDLE_UPDATE",
            EnrpBody::ListRequest => "LIST_REQUEST",
            EnrpBody::ListResponse { .. } => "LIST_RESPONSE",
            EnrpBody::InitTakeover { .. } => "INIT_TAKEOVER",
            EnrpBody::InitTakeoverAck { .. } => "INIT_TAKEOVER_ACK",
            EnrpBody::TakeoverServer { .. } => "TAKEOVER_SERVER",
            EnrpBody::Error(_) => "ERROR",
        }
    }

    fn number(&self) -> u8 {
        match self {
            EnrpBody::Presence { .. } => PRESENCE,
            EnrpBody::HandleTableRequest { .. } => 0x02,
            EnrpBody::HandleTableResponse { .. } => HANDLE_TABLE_RESPONSE,
            EnrpBody::HandleUpdate { .. } => 0x04,
            EnrpBody::ListRequest => 0x05,
            EnrpBody::ListResponse { .. } => 0x06,
            EnrpBody::InitTakeover { .. } => 0x07,
            EnrpBody::InitTakeoverAck { .. } => 0x08,
            EnrpBody::TakeoverServer { .. } => 0x09,
            EnrpBody::Error(_) => ERROR,
        }
    }

    fn flags(&self) -> u8 {
        let (low_flag, more) = match self {
            EnrpBody::Presence { reply_required, .. } => (*reply_required, false),
            EnrpBody::HandleTableRequest { own_only } => (*own_only, false),
            EnrpBody::HandleTableResponse { rejected, more, .. } => (*rejected, *more),
            EnrpBody::HandleUpdate {
                takeover_suggested, ..
            } => (*takeover_suggested, false),
            EnrpBody::ListResponse { rejected, .. } => (*rejected, false),
            _ => (false, false),
        };
        (u8::from(low_flag) * LOW_FLAG) | (u8::from(more) * MORE_FLAG)
    }

    fn write(&self, writer: &mut Writer<'_>) {
        match self {
            EnrpBody::Presence {
                checksum, server, ..
            } => {
                writer.put_all(&checksum.map(ChecksumValue));
                writer.put_all(server);
            }
            EnrpBody::HandleTableRequest { .. } | EnrpBody::ListRequest => {}
            EnrpBody::HandleTableResponse { entries, .. } => {
                for entry in entries {
                    writer.put(&entry.handle);
                    writer.put_all(&entry.elements);
                }
            }
            EnrpBody::HandleUpdate {
                action,
                handle,
                element,
                ..
            } => {
                writer.u16(action.number());
                writer.u16(0);
                writer.put(handle);
                writer.put(element);
            }
            EnrpBody::ListResponse { servers, .. } => writer.put_all(servers),
            EnrpBody::InitTakeover { target }
            | EnrpBody::InitTakeoverAck { target }
            | EnrpBody::TakeoverServer { target } => writer.u32(target.0),
            EnrpBody::Error(causes) => writer.put(causes),
        }
    }
}

fn parse(number: u8, flags: u8, body: &mut Reader<'_>) -> Result<EnrpBody, DecodeErrorKind> {
    let low_flag = flags & LOW_FLAG != 0;
    Ok(match number {
        PRESENCE => EnrpBody::Presence {
            reply_required: low_flag,
            checksum: body.optional::<ChecksumValue>()?.map(|value| value.0),
            server: body.optional()?,
        },
        0x02 => EnrpBody::HandleTableRequest { own_only: low_flag },
        HANDLE_TABLE_RESPONSE => EnrpBody::HandleTableResponse {
            rejected: low_flag,
            more: flags & MORE_FLAG != 0,
            entries: parse_entries(body)?,
        },
        0x04 => EnrpBody::HandleUpdate {
            takeover_suggested: low_flag,
            action: UpdateAction::parse(body)?,
            handle: body.required()?,
            element: body.required()?,
        },
        0x05 => EnrpBody::ListRequest,
        0x06 => EnrpBody::ListResponse {
            rejected: low_flag,
            servers: body.list()?,
        },
        0x07 => EnrpBody::InitTakeover {
            target: RegistrarId(body.u32()?),
        },
        0x08 => EnrpBody::InitTakeoverAck {
            target: RegistrarId(body.u32()?),
        },
        0x09 => EnrpBody::TakeoverServer {
            target: RegistrarId(body.u32()?),
        },
        ERROR => EnrpBody::Error(body.required()?),
        _ => return Err(DecodeErrorKind::UnknownMessage(number)),
    })
}

fn parse_entries(body: &mut Reader<'_>) -> Result<Vec<PoolEntry>, DecodeErrorKind> {
    let mut entries = Vec::new();
    while let Some(handle) = body.optional()? {
        entries.push(PoolEntry {
            handle,
            elements: body.list()?,
        });
    }
    Ok(entries)
}

impl UpdateAction {
    fn number(self) -> u16 {
        match self {
            UpdateAction::Add => 0,
            UpdateAction::Delete => 1,
        }
    }

    fn parse(body: &mut Reader<'_>) -> Result<UpdateAction, DecodeErrorKind> {
        let number = body.u16()?;
        let _reserved = body.u16()?;
        match number {
            0 => Ok(UpdateAction::Add),
            1 => Ok(UpdateAction::Delete),
            _ => Err(DecodeErrorKind::UpdateAction(number)),
        }
    }
}

/// Encoder of a handle table response, which appends elements to one block of the handlespace until it is full.
pub struct HandleTableEncoder<'a> {
    writer: Writer<'a>,
    handle: Option<PoolHandle>,
    length_max: usize,
}

impl<'a> HandleTableEncoder<'a> {
    /// Starts a block of at most `length_max` bytes.
    pub fn new(
        buffer: &'a mut BytesMut,
        sender: RegistrarId,
        receiver: RegistrarId,
        length_max: usize,
    ) -> HandleTableEncoder<'a> {
        let mut writer = Writer::begin(buffer, HANDLE_TABLE_RESPONSE, 0);
        writer.u32(sender.0);
        writer.u32(receiver.0);
        HandleTableEncoder {
            writer,
            handle: None,
            length_max: length_max.min(LENGTH_MAX),
        }
    }

    /// Appends an element, under its pool's handle if that differs from the last one's. Returns false if the element
    /// did not fit; the block is then unchanged. An element that an empty block refuses fits into none: limit the
    /// length of handles at registration.
    pub fn push(&mut self, handle: &PoolHandle, element: &PoolElement) -> bool {
        let before = self.writer.length();
        let same_pool = self.handle.as_ref() == Some(handle);
        if !same_pool {
            self.writer.put(handle);
        }
        self.writer.put(element);
        if self.writer.length().next_multiple_of(4) > self.length_max {
            self.writer.truncate(before);
            return false;
        }
        if !same_pool {
            self.handle = Some(handle.clone());
        }
        true
    }

    /// Completes the block; `more` says that another follows.
    ///
    /// # Errors
    /// An element without an encoding; the buffer is then as before the block.
    pub fn finish(mut self, more: bool) -> Result<(), EncodeError> {
        if more {
            self.writer.set_flags(MORE_FLAG);
        }
        self.writer.finish()
    }
}
