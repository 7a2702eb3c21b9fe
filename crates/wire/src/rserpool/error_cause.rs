//! Error causes with their data (RFC 5354 section 3.12).

use super::decoder::{self, DecodeErrorKind, Reader};
use super::encoder;
use super::encoder::Writer;
use super::parameter::{self, Parameter};
use super::policy::Policy;
use super::transport::Transport;
use bytes::Bytes;
use std::fmt;

/// Kind of error: a number of RFC 5354's table, or another one used by a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CauseCode(pub u16);

/// One error that a message reports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ErrorCause {
    /// The kind of error.
    pub code: CauseCode,
    /// Cause-specific information in wire format; empty for most kinds.
    pub data: Bytes,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        impl CauseCode {
            $($(#[$doc])* pub const $name: CauseCode = CauseCode($number);)*
        }

        /// The meaning of the number, in words.
        impl fmt::Display for CauseCode {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $(CauseCode::$name => f.pad($text),)*
                    CauseCode(number) => write!(f, "error cause {number:#06x}"),
                }
            }
        }
    };
}

codes! {
    /// Unspecified.
    UNSPECIFIED = 0x0, "unspecified error";
    /// Data: the parameter, whole.
    UNRECOGNIZED_PARAMETER = 0x1, "unrecognized parameter";
    /// Data: the message, whole.
    UNRECOGNIZED_MESSAGE = 0x2, "unrecognized message";
    /// Data: the offending parameter, whole.
    INVALID_VALUES = 0x3, "invalid values";
    /// Another element of the pool has this number.
    NON_UNIQUE_ELEMENT_ID = 0x4, "element identifier in use by another element";
    /// Data: the pool's policy, see [`ErrorCause::inconsistent_policy`].
    INCONSISTENT_POLICY = 0x5, "policy differs from the pool's";
    /// The sender lacks the resources for the request.
    LACK_OF_RESOURCES = 0x6, "lack of resources";
    /// Data: the pool's transport, see [`ErrorCause::inconsistent_transport`].
    INCONSISTENT_TRANSPORT = 0x7, "transport type differs from the pool's";
    /// The transport use differs from the pool's.
    INCONSISTENT_CONTROL = 0x8, "data and control channel configuration differs from the pool's";
    /// No such pool.
    UNKNOWN_POOL_HANDLE = 0x9, "unknown pool handle";
    /// Not allowed.
    REJECTED_FOR_SECURITY = 0xa, "rejected for security";
    /// rsplib's private: the message's framing is broken.
    RSPLIB_INVALID_MESSAGE = 0x10, "invalid message (rsplib)";
    /// rsplib's private: a value is impossible.
    RSPLIB_INVALID_VALUE = 0x11, "invalid value (rsplib)";
    /// rsplib's private: the policy is unknown to the sender.
    RSPLIB_UNSUPPORTED_POLICY = 0x100b, "policy not supported (rsplib)";
    /// rsplib's private: the element's number is in use.
    RSPLIB_DUPLICATE_ID = 0xf002, "element identifier in use by another element (rsplib)";
    /// rsplib's private: none of the element's addresses is one of the association.
    RSPLIB_NO_USABLE_ASAP_ADDRESSES = 0xf007, "no usable ASAP addresses (rsplib)";
    /// rsplib's private: none of the service's addresses is one of the association.
    RSPLIB_NO_USABLE_USER_ADDRESSES = 0xf008, "no usable addresses (rsplib)";
}

impl fmt::Debug for CauseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CauseCode({:#x}: {self})", self.0)
    }
}

/// A cause without data.
impl From<CauseCode> for ErrorCause {
    fn from(code: CauseCode) -> ErrorCause {
        ErrorCause {
            code,
            data: Bytes::new(),
        }
    }
}

impl fmt::Display for ErrorCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.code.fmt(f)
    }
}

impl ErrorCause {
    /// A registration's policy differs from `pool`, the pool's policy.
    pub fn inconsistent_policy(pool: &Policy) -> ErrorCause {
        ErrorCause {
            code: CauseCode::INCONSISTENT_POLICY,
            data: encoder::parameter_bytes(pool),
        }
    }

    /// A registration's transport differs from the pool's; `pool` is one of the pool's transports.
    pub fn inconsistent_transport(pool: &Transport) -> ErrorCause {
        ErrorCause {
            code: CauseCode::INCONSISTENT_TRANSPORT,
            data: encoder::parameter_bytes(pool),
        }
    }

    /// Returns the pool's policy from a [`CauseCode::INCONSISTENT_POLICY`] that carries it (rsplib's do not).
    pub fn policy(&self) -> Option<Policy> {
        (self.code == CauseCode::INCONSISTENT_POLICY)
            .then(|| decoder::parse_parameter(&self.data))?
    }

    /// Returns the pool's transport from a [`CauseCode::INCONSISTENT_TRANSPORT`] that carries it.
    pub fn transport(&self) -> Option<Transport> {
        (self.code == CauseCode::INCONSISTENT_TRANSPORT)
            .then(|| decoder::parse_parameter(&self.data))?
    }
}

/// An Operation Error parameter.
impl Parameter for Vec<ErrorCause> {
    const KINDS: &'static [u16] = &[parameter::OPERATION_ERROR];

    fn read(value: &mut Reader<'_>) -> Result<Vec<ErrorCause>, DecodeErrorKind> {
        let mut causes = Vec::new();
        while let Some(cause) = value.any_parameter(|value| {
            Ok(ErrorCause {
                code: CauseCode(value.kind()),
                data: value.remaining(),
            })
        })? {
            causes.push(cause);
        }
        Ok(causes)
    }

    fn write(&self, writer: &mut Writer<'_>) {
        for cause in self {
            writer.tlv(cause.code.0, |writer| writer.bytes(&cause.data));
        }
    }
}
