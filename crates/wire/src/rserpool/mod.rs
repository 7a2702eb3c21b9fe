//! Reliable Server Pooling (RFC 5351 to 5356): its identities and policies, its parameters, ASAP and ENRP.

mod id;
mod policy;

pub use id::{ElementId, PoolHandle, RegistrarId};
pub use policy::{Policy, PolicyKind};
