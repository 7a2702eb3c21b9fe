//! Decoding: a total reader of received bytes, which treats unknown parts as RFC 5354 section 3 requires.

use super::error_cause::{CauseCode, ErrorCause};
use super::parameter::{Parameter, UnknownTreatment};
use bytes::Bytes;

/// A message, and the reports for its sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedMessage<M> {
    /// The message, without its skipped parts.
    pub message: M,
    /// Skipped parameters that must be reported in an error message (`ASAP_ERROR`, `ENRP_ERROR`). At most
    /// [`REPORTS_MAX`].
    pub reports: Vec<ErrorCause>,
}

/// The reason for discarding a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind}")]
pub struct DecodeError {
    /// The defect for which the message is discarded.
    pub kind: DecodeErrorKind,
    /// Reports for the sender, as in [`ParsedMessage::reports`]; none if empty. Never answer an error message with an error
    /// message.
    pub reports: Vec<ErrorCause>,
}

/// The defect of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeErrorKind {
    /// The message or a parameter in it is longer than the available bytes, or too short for its fixed fields.
    #[error("the message ends too early")]
    Truncated,
    /// More bytes than the length field and padding account for.
    #[error("{0} bytes follow the message")]
    Trailing(usize),
    /// The message type is unknown.
    #[error("unknown message type {0:#04x}")]
    UnknownMessage(u8),
    /// A parameter that is unknown, or that this message must not have, and that may not be skipped.
    #[error("parameter {0:#06x} is not expected here")]
    UnexpectedParameter(u16),
    /// A required parameter of the message is missing.
    #[error("parameter {0:#06x} is missing")]
    MissingParameter(u16),
    /// The action of a handle update is unknown (RFC 5353 section 2.4).
    #[error("unknown update action {0:#06x}")]
    UpdateAction(u16),
    /// A parameter's value is not allowed.
    #[error("parameter {0:#06x} has an invalid value")]
    InvalidParameter(u16),
}

/// Maximum number of reports per message. Further parameters are skipped without a report, so that a small message
/// cannot cause a large answer.
pub const REPORTS_MAX: usize = 16;

/// Maximum size of the data in all reports of one message, in bytes: the reports fit into one error message.
const REPORTS_BYTES_MAX: usize = 65_000;

/// Returns the length of the message that starts with `header`, in bytes including padding: for stream transports.
/// `None` until four bytes have arrived.
///
/// # Errors
/// [`DecodeErrorKind::Truncated`] when the length field does not cover the header: later message boundaries are then unknown.
pub fn message_length(header: &[u8]) -> Result<Option<usize>, DecodeErrorKind> {
    let Some(&[_, _, high, low]) = header.first_chunk() else {
        return Ok(None);
    };
    match usize::from(u16::from_be_bytes([high, low])) {
        0..4 => Err(DecodeErrorKind::Truncated),
        length => Ok(Some(length.next_multiple_of(4))),
    }
}

#[derive(Default)]
struct ErrorReports {
    causes: Vec<ErrorCause>,
    bytes: usize,
}

impl ErrorReports {
    fn push(&mut self, code: CauseCode, data: Bytes) {
        if self.causes.len() < REPORTS_MAX && self.bytes + data.len() <= REPORTS_BYTES_MAX {
            self.bytes += data.len();
            self.causes.push(ErrorCause { code, data });
        }
    }
}

/// Reads one message: `body` gets its type, its flags, and a reader of the rest, which `body` need not consume.
pub(super) fn parse_message<M>(
    bytes: &Bytes,
    body: impl FnOnce(u8, u8, &mut Reader<'_>) -> Result<M, DecodeErrorKind>,
) -> Result<ParsedMessage<M>, DecodeError> {
    let mut reports = ErrorReports::default();
    match parse_into(bytes, &mut reports, body) {
        Ok(message) => Ok(ParsedMessage {
            message,
            reports: reports.causes,
        }),
        Err(kind) => Err(DecodeError {
            kind,
            reports: reports.causes,
        }),
    }
}

fn parse_into<M>(
    bytes: &Bytes,
    reports: &mut ErrorReports,
    body: impl FnOnce(u8, u8, &mut Reader<'_>) -> Result<M, DecodeErrorKind>,
) -> Result<M, DecodeErrorKind> {
    let padded = message_length(bytes)?.ok_or(DecodeErrorKind::Truncated)?;
    let (kind, flags) = (bytes[0], bytes[1]);
    let end = usize::from(u16::from_be_bytes([bytes[2], bytes[3]]));
    if end > bytes.len() {
        return Err(DecodeErrorKind::Truncated);
    }
    if bytes.len() > padded {
        return Err(DecodeErrorKind::Trailing(bytes.len() - end));
    }
    let mut reader = Reader {
        bytes,
        reports,
        kind: None,
        start: 0,
        position: 4,
        end,
    };
    let message = body(kind, flags, &mut reader);
    // RFC 5354 section 4: 01 is to be reported; 10 and 11 are reserved.
    if let Err(DecodeErrorKind::UnknownMessage(0x40..0x80)) = message {
        let message_bytes = bytes.slice(..end);
        reader
            .reports
            .push(CauseCode::UNRECOGNIZED_MESSAGE, message_bytes);
    }
    let message = message?;
    reader.expect_only_skippable()?;
    Ok(message)
}

/// Reads one parameter outside a message.
pub(super) fn parse_parameter<P: Parameter>(bytes: &Bytes) -> Option<P> {
    let mut reader = Reader {
        bytes,
        reports: &mut ErrorReports::default(),
        kind: None,
        start: 0,
        position: 0,
        end: bytes.len(),
    };
    let parameter = reader.required().ok()?;
    reader.expect_only_skippable().ok()?;
    Some(parameter)
}

/// Reads a message's body, or a parameter's value within it.
pub(super) struct Reader<'a> {
    bytes: &'a Bytes,
    reports: &'a mut ErrorReports,
    /// The parameter's type; none for a message's body.
    kind: Option<u16>,
    /// Start of the parameter.
    start: usize,
    position: usize,
    end: usize,
}

/// Header of the next parameter.
struct ParameterHeader {
    kind: u16,
    start: usize,
    /// End of the value.
    end: usize,
}

impl Reader<'_> {
    /// Returns the type of the parameter being read; 0 for a message's body.
    pub(super) fn kind(&self) -> u16 {
        self.kind.unwrap_or(0)
    }

    pub(super) fn u16(&mut self) -> Result<u16, DecodeErrorKind> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, DecodeErrorKind> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeErrorKind> {
        match self.bytes[self.position..self.end].first_chunk() {
            Some(array) => {
                self.position += N;
                Ok(*array)
            }
            None => Err(self.invalid_value()),
        }
    }

    /// Returns all remaining bytes, without a copy.
    pub(super) fn remaining(&mut self) -> Bytes {
        let remaining = self.bytes.slice(self.position..self.end);
        self.position = self.end;
        remaining
    }

    /// Checks that no bytes remain.
    pub(super) fn expect_end(&mut self) -> Result<(), DecodeErrorKind> {
        if self.position == self.end {
            Ok(())
        } else {
            Err(self.invalid_value())
        }
    }

    /// Reports the whole parameter for its invalid value (RFC 5354 section 3.12.4).
    pub(super) fn invalid_value(&mut self) -> DecodeErrorKind {
        let Some(kind) = self.kind else {
            return DecodeErrorKind::Truncated;
        };
        let parameter_bytes = self.bytes.slice(self.start..self.end);
        self.reports
            .push(CauseCode::INVALID_VALUES, parameter_bytes);
        DecodeErrorKind::InvalidParameter(kind)
    }

    /// Reads the next parameter, which must be a `P`.
    pub(super) fn required<P: Parameter>(&mut self) -> Result<P, DecodeErrorKind> {
        match self.optional()? {
            Some(parameter) => Ok(parameter),
            None => match self.next_header()? {
                Some(header) => Err(self.unexpected(&header)),
                None => Err(DecodeErrorKind::MissingParameter(P::KINDS[0])),
            },
        }
    }

    /// Reads the next parameter if it is a `P`.
    pub(super) fn optional<P: Parameter>(&mut self) -> Result<Option<P>, DecodeErrorKind> {
        while let Some(header) = self.next_header()? {
            if P::KINDS.contains(&header.kind) {
                return self.read_value(&header, P::read).map(Some);
            }
            if !self.try_skip(&header) {
                break;
            }
        }
        Ok(None)
    }

    /// Reads as many `P` as follow.
    pub(super) fn list<P: Parameter>(&mut self) -> Result<Vec<P>, DecodeErrorKind> {
        let mut list = Vec::new();
        while let Some(parameter) = self.optional()? {
            list.push(parameter);
        }
        Ok(list)
    }

    /// Reads the next parameter of any type, because error causes have their own numbers.
    pub(super) fn any_parameter<T>(
        &mut self,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T, DecodeErrorKind>,
    ) -> Result<Option<T>, DecodeErrorKind> {
        match self.next_header()? {
            Some(header) => self.read_value(&header, read).map(Some),
            None => Ok(None),
        }
    }

    /// Checks that only parameters follow that may be skipped.
    pub(super) fn expect_only_skippable(&mut self) -> Result<(), DecodeErrorKind> {
        while let Some(header) = self.next_header()? {
            if !self.try_skip(&header) {
                return Err(self.unexpected(&header));
            }
        }
        Ok(())
    }

    fn next_header(&mut self) -> Result<Option<ParameterHeader>, DecodeErrorKind> {
        if self.position == self.end {
            return Ok(None);
        }
        let start = self.position;
        let kind = self.u16()?;
        let length = usize::from(self.u16()?);
        self.position = start;
        if length < 4 || length > self.end - start {
            return Err(self.invalid_value());
        }
        Ok(Some(ParameterHeader {
            kind,
            start,
            end: start + length,
        }))
    }

    fn read_value<T>(
        &mut self,
        header: &ParameterHeader,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T, DecodeErrorKind>,
    ) -> Result<T, DecodeErrorKind> {
        let value = read(&mut Reader {
            bytes: self.bytes,
            reports: self.reports,
            kind: Some(header.kind),
            start: header.start,
            position: header.start + 4,
            end: header.end,
        })?;
        self.advance_past(header);
        Ok(value)
    }

    /// Moves past a parameter and its padding, which may be missing after the last parameter of a value.
    fn advance_past(&mut self, header: &ParameterHeader) {
        let padded = header.start + (header.end - header.start).next_multiple_of(4);
        self.position = padded.min(self.end);
    }

    /// Skips a parameter that is unknown here, if its type allows skipping.
    fn try_skip(&mut self, header: &ParameterHeader) -> bool {
        let UnknownTreatment { skip, report } = UnknownTreatment::from_kind(header.kind);
        if skip {
            if report {
                self.report(header);
            }
            self.advance_past(header);
        }
        skip
    }

    fn unexpected(&mut self, header: &ParameterHeader) -> DecodeErrorKind {
        if UnknownTreatment::from_kind(header.kind).report {
            self.report(header);
        }
        DecodeErrorKind::UnexpectedParameter(header.kind)
    }

    fn report(&mut self, header: &ParameterHeader) {
        let parameter_bytes = self.bytes.slice(header.start..header.end);
        self.reports
            .push(CauseCode::UNRECOGNIZED_PARAMETER, parameter_bytes);
    }
}
