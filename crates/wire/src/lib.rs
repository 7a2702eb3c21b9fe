//! Encoding and decoding: flows, node numbers, and the frames between nodes as they are on the wire.
//!
//! Every parser in this crate is total: any bytes give a value or an error that names a remedy, never a panic, and
//! never an allocation sized by a length field alone. The crate does no IO and reads no clock.
//!
//! - [`Flow`]: one connection or datagram association, written `tcp:10.0.0.1:80-10.0.1.2:4242`;
//! - [`NodeId`]: a node's number;
//! - [`failure`]: failed steps, with the party to blame and the words for people;
//! - [`frame`]: the messages between daemons, and their envelope; [`move_frames`]: the messages about moving a process;
//!   [`membership_frames`]: the messages by which a group runs itself, of which [`authenticated_datagram`] carries the
//!   smallest; [`group_data`]: the group's services; [`saved_membership`]: the membership on a node's disk;
//!   [`flow_report_frames`]: the flows of each node, for a new holder; [`credential_frames`]: the messages about
//!   certificates; [`health_frames`]: the health of servers; [`conductor_frames`]: the balance of loads;
//!   [`drain_frames`]: orders to drain a node; [`replication_frames`]: the connections of a replicated service;
//! - [`greeting`]: facts about a node, and reasons for which nodes do not talk to each other;
//! - [`enrolment_state`]: tokens with which hosts join a group;
//! - [`rserpool`]: the messages of Reliable Server Pooling, ASAP and ENRP.
#![forbid(unsafe_code)]

pub mod authenticated_datagram;
pub mod conductor_frames;
pub mod credential_frames;
pub mod drain_frames;
pub mod enrolment_state;
pub mod failure;
mod flow;
pub mod flow_report_frames;
pub mod frame;
mod frame_codec;
pub mod greeting;
pub mod group_data;
pub mod health_frames;
mod inbound_packet;
pub mod membership_frames;
pub mod move_frames;
mod node_id;
mod ownership_record;
pub mod replication_frames;
pub mod rserpool;
pub mod saved_membership;

pub use flow::{Flow, FlowError, Protocol};
pub use frame::{BatchId, Frame};
pub use frame_codec::{FrameDecoder, FrameError, LENGTH_MAX, VERSION, encode, encode_in_parts};
pub use inbound_packet::{InboundPacket, SegmentPosition};
pub use move_frames::MoveId;
pub use node_id::NodeId;
pub use ownership_record::{
    ChangeKind, ChangeRefusal, Epoch, OwnershipChange, OwnershipRecord, RecordState,
};
