//! Error causes with their data (RFC 5354 section 3.12).

use super::parameter::{self, Parameter};
use super::policy::Policy;
use super::read::{self, ErrorKind, Reader};
use super::transport::Transport;
use super::write;
use super::write::Writer;
use bytes::Bytes;
use std::fmt;

/// What kind of error: a number of RFC 5354's table, or another that a peer uses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CauseCode(pub u16);

/// One error that a message reports.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cause {
    /// What kind.
    pub code: CauseCode,
    /// Cause-specific information, as it is on the wire; for most kinds there is none.
    pub data: Bytes,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        impl CauseCode {
            $($(#[$doc])* pub const $name: CauseCode = CauseCode($number);)*
        }

        /// What the number means, in words.
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
    /// The pool has another element with this number.
    NON_UNIQUE_ELEMENT_ID = 0x4, "element identifier in use by another element";
    /// Data: the pool's policy, see [`Cause::inconsistent_policy`].
    INCONSISTENT_POLICY = 0x5, "policy differs from the pool's";
    /// The sender cannot do what was asked.
    LACK_OF_RESOURCES = 0x6, "lack of resources";
    /// Data: the pool's transport, see [`Cause::inconsistent_transport`].
    INCONSISTENT_TRANSPORT = 0x7, "transport type differs from the pool's";
    /// The transport use differs from the pool's.
    INCONSISTENT_CONTROL = 0x8, "data and control channel configuration differs from the pool's";
    /// No such pool.
    UNKNOWN_POOL_HANDLE = 0x9, "unknown pool handle";
    /// Not allowed.
    REJECTED_FOR_SECURITY = 0xa, "rejected for security";
    /// rsplib's private: the message's framing is broken.
    RSPLIB_INVALID_MESSAGE = 0x10, "invalid message (rsplib)";
    /// rsplib's private: a value is none that is possible.
    RSPLIB_INVALID_VALUE = 0x11, "invalid value (rsplib)";
    /// rsplib's private: it does not know the policy.
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
impl From<CauseCode> for Cause {
    fn from(code: CauseCode) -> Cause {
        Cause {
            code,
            data: Bytes::new(),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.code.fmt(f)
    }
}

impl Cause {
    /// A registration's policy differs from the pool's, which is `pool`.
    pub fn inconsistent_policy(pool: &Policy) -> Cause {
        Cause {
            code: CauseCode::INCONSISTENT_POLICY,
            data: write::parameter(pool),
        }
    }

    /// A registration's transport differs from the pool's, of which `pool` is one.
    pub fn inconsistent_transport(pool: &Transport) -> Cause {
        Cause {
            code: CauseCode::INCONSISTENT_TRANSPORT,
            data: write::parameter(pool),
        }
    }

    /// The pool's policy, of a [`CauseCode::INCONSISTENT_POLICY`] that says it (rsplib's do not).
    pub fn policy(&self) -> Option<Policy> {
        (self.code == CauseCode::INCONSISTENT_POLICY).then(|| read::parameter(&self.data))?
    }

    /// The pool's transport, of a [`CauseCode::INCONSISTENT_TRANSPORT`] that says it.
    pub fn transport(&self) -> Option<Transport> {
        (self.code == CauseCode::INCONSISTENT_TRANSPORT).then(|| read::parameter(&self.data))?
    }
}

/// An Operation Error parameter.
impl Parameter for Vec<Cause> {
    const KINDS: &'static [u16] = &[parameter::OPERATION_ERROR];

    fn read(value: &mut Reader<'_>) -> Result<Vec<Cause>, ErrorKind> {
        let mut causes = Vec::new();
        while let Some(cause) = value.any(|value| {
            Ok(Cause {
                code: CauseCode(value.kind()),
                data: value.rest(),
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
