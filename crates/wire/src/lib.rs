//! Bytes in and out: what flows, nodes and the frames between nodes look like on the wire.
//!
//! Every parser here is total: any bytes give a value or an error that says what to do, never a panic, and never an
//! allocation that a length field alone asked for. No IO and no clock.
//!
//! - [`Flow`]: one connection or datagram association, written `tcp:10.0.0.1:80-10.0.1.2:4242`;
//! - [`NodeId`]: a node's number;
//! - [`frame`]: the messages between daemons, and the envelope they travel in; [`migration`]: those about a process;
//! - [`rserpool`]: the messages of Reliable Server Pooling, ASAP and ENRP.
#![forbid(unsafe_code)]

mod decode;
mod flow;
pub mod frame;
pub mod migration;
mod node_id;
mod packet;
mod record;
pub mod rserpool;

pub use decode::{Decoder, FrameError, LENGTH_MAX, VERSION, encode, encode_in_parts};
pub use flow::{Flow, FlowError, Protocol};
pub use frame::{BatchId, Frame};
pub use migration::MoveId;
pub use node_id::NodeId;
pub use packet::{Inbound, Segment};
pub use record::{Change, ChangeKind, Epoch, Record, RecordState, Refusal};
