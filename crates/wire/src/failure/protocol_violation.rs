//! Frames and messages of another node that contradict the protocol.

use super::Text;
use serde::{Deserialize, Serialize};

/// A violation of the protocol between nodes, found by the receiver. The order of the variants is part of the format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ProtocolViolation {
    /// A handoff names the record of a process as a flow.
    #[error("the flow names a process, which cannot be handed off like a connection")]
    ProcessAsFlow,
    /// A flow has the highest epoch, after which no transit is possible.
    #[error("the flow's epoch cannot be incremented")]
    EpochOverflow,
    /// A committed flow has another epoch than its transit leads to.
    #[error("the committed epoch does not match the transit's")]
    EpochMismatch,
    /// The addresses of a socket differ from the addresses of its flow.
    #[error("the received state belongs to another flow")]
    StateOfOtherFlow,
    /// The state of a flow cannot be decoded.
    #[error(
        "state of another version of holdfastd, or damaged ({0}); run the same version on all nodes"
    )]
    FlowStateUnreadable(Text),
    /// A process arrives with flows that no earlier frame announced.
    #[error("the process has flows that were not announced")]
    UnannouncedFlows,
    /// The description of an offered process cannot be decoded.
    #[error("cannot decode the process's description ({0}): run the same release on both nodes")]
    DescriptionUnreadable(Text),
    /// A message of a process image has an unknown kind.
    #[error("received a message of an unknown kind: run the same release on both nodes")]
    UnknownMessageKind,
    /// A part of a message follows a part of another message.
    #[error("parts of two messages are mixed")]
    MixedMessages,
    /// A message exceeds the maximum length.
    #[error("a message is too long")]
    MessageTooLong,
    /// A message arrives at a point where the protocol has no such message.
    #[error("{0}")]
    MessageOrder(Text),
    /// A message of this name arrives after the process runs.
    #[error("received a late message about {0}")]
    LateMessage(Text),
    /// Memory arrives before the process tree.
    #[error("received memory before the process tree")]
    MemoryBeforeTree,
    /// Descriptors arrive before the process tree.
    #[error("received descriptors before the process tree")]
    DescriptorsBeforeTree,
    /// States of sockets arrive before the sockets.
    #[error("received socket states before the sockets")]
    SocketStatesBeforeSockets,
    /// Pages of post-copy arrive before the process runs.
    #[error("received post-copy pages before the process resumed")]
    EarlyPostCopyPages,
    /// The donor sends more and more refused state without a request for the verdict.
    #[error("the donor does not ask for the acceptor's verdict")]
    VerdictNotRequested,
    /// The donor has more bytes in transit than the window allows.
    #[error("the donor sends more than the window allows")]
    WindowExceeded,
    /// The donor reports the end of the image, and parts are missing.
    #[error("the process image is incomplete")]
    ImageIncomplete,
    /// A part of the image contradicts itself or exceeds a limit.
    #[error("malformed image: {0}")]
    MalformedImage(Text),
    /// The state of a socket contradicts itself.
    #[error("inconsistent state: {0}")]
    InconsistentSocket(Text),
    /// The state is for a socket that does not exist, or for another kind of socket.
    #[error("the state does not match the prepared socket")]
    SocketMismatch,
    /// States of sockets cannot be decoded.
    #[error("cannot decode socket states: {0}")]
    SocketStatesUnreadable(Text),
    /// Compressed memory cannot be decompressed.
    #[error("cannot decompress memory: {0}")]
    MemoryUnreadable(Text),
    /// The donor's answer about locks cannot be decoded.
    #[error("cannot parse the donor's answer about locks")]
    LockAnswerUnreadable,
    /// The donor answers about locks without a request.
    #[error("received an answer about locks that was not requested")]
    LockAnswerUnrequested,
    /// A connection at the address of the node that receives the process was not moved away from there before.
    #[error("connection {0} was not moved away from this node")]
    NotMovedAway(crate::Flow),
}
