//! Identifiers within a scope: pools, pool elements, registrars.

use bytes::Bytes;
use std::fmt;

/// The name of a pool: an opaque string of bytes, without padding (RFC 5354 section 3.9).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolHandle(pub Bytes);

impl From<&str> for PoolHandle {
    fn from(name: &str) -> PoolHandle {
        PoolHandle(Bytes::copy_from_slice(name.as_bytes()))
    }
}

/// Text form, with all but printable ASCII escaped.
impl fmt::Display for PoolHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.escape_ascii().fmt(f)
    }
}

impl fmt::Debug for PoolHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PoolHandle({self})")
    }
}

/// A pool element's number, unique within its pool (RFC 5352 section 2.2.1). Written as eight hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ElementId(pub u32);

/// A registrar's number, unique within its scope; 0 means none or any (RFC 5353 section 2.1). Written as eight
/// hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegistrarId(pub u32);

macro_rules! hexadecimal {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:08x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:08x})"), self.0)
            }
        }
    )*};
}

hexadecimal!(ElementId, RegistrarId);
