//! Encoding and decoding: flows, node numbers, and the frames between nodes as they are on the wire.
//!
//! Every parser in this crate is total: any bytes give a value or an error that names a remedy, never a panic, and
//! never an allocation sized by a length field alone. The crate does no IO and reads no clock.
//!
//! - [`Flow`]: one connection or datagram association, written `tcp:10.0.0.1:80-10.0.1.2:4242`;
//! - [`NodeId`]: a node's number;
//! - [`failure`]: failed steps, with the party to blame and the words for people;
//! - [`frame`]: the messages between daemons, and their envelope; [`move_frames`]: the messages about moving a process;
//!   [`membership_frames`]: the messages by which a group runs itself;
//! - [`rserpool`]: the messages of Reliable Server Pooling, ASAP and ENRP.
#![forbid(unsafe_code)]

pub mod failure;
mod flow;
pub mod frame;
mod frame_codec;
mod inbound_packet;
pub mod membership_frames;
pub mod move_frames;
mod node_id;
mod ownership_record;
pub mod rserpool;

pub use flow::{Flow, FlowError, Protocol};
pub use frame::{BatchId, Frame};
pub use frame_codec::{FrameDecoder, FrameError, LENGTH_MAX, VERSION, encode, encode_in_parts};
pub use inbound_packet::{InboundPacket, SegmentPosition};
pub use move_frames::MoveId;
pub use node_id::NodeId;
pub use ownership_record::{
    ChangeKind, ChangeRefusal, Epoch, OwnershipChange, OwnershipRecord, RecordState,
};
