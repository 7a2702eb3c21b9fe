//! How connections move from node to node: one machine per node, with the three roles of DESIGN.md ("Moving a
//! connection"): donor, acceptor, holder.
//!
//! The daemon feeds the machine (`handle_*`), then takes outputs until there are none and wakes it at `poll_timeout`.
//! Frames to a node without a channel are to be dropped: the machine asks again or gives up by itself, and learns of a
//! lost channel from `handle_peer_lost`. Frames of one channel are to be given in order; those of a channel that was
//! replaced are not to be given after those of the new one. (Were they, nothing would break but time.)
//!
//! What never happens, whatever is lost, late, repeated or killed: two nodes speaking for a flow. What always happens,
//! once nodes and holder reach each other: each flow has one owner, who speaks.
//!
//! `Hello`, `Ping` and `Pong` belong to the channel; the machine ignores them.

mod command;
mod config;
mod event;

pub use command::{
    Command, Completion, FlowEpoch, FrozenFlow, RestoreFlow, Results, SendQueueInfo, StaticFlow,
    Token,
};
pub use config::Config;
pub use event::{Event, Outcome, Phases, Reason, Step};

use core::time::Duration;
use holdfast_wire::{Change, Epoch, Flow, Frame, NodeId};
use std::collections::VecDeque;

/// Names a request of this node, unique in the life of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Whether to let send queues empty before the freeze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drain {
    /// Move what is queued.
    No,
    /// Wait, at most [`Config::drain_wait_max`].
    Yes,
    /// Wait, at most this long. A flow that is predicted to need longer is not waited for.
    Within(Duration),
}

/// Hand these flows to that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The flows, in the order in which they are to go.
    pub flows: Vec<Flow>,
    /// The acceptor.
    pub to: NodeId,
    /// Whether to drain first.
    pub drain: Drain,
}

/// Why a request as a whole is refused; nothing was touched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// To this very node.
    #[error("node {0} is this node; name another")]
    ToSelf(NodeId),
    /// To a node the configuration does not have.
    #[error("there is no node {0} in this group; `holdfast status` shows those there are")]
    UnknownNode(NodeId),
    /// No flows.
    #[error("the request names no flow; name at least one")]
    NoFlows,
}

/// What a restarted daemon finds a flow to be in its pinned map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecoveredRole {
    /// Owned, and read for a handoff (`Prepared` in the map); the epoch is that of the owner.
    DonorPrepared,
    /// "Transit out"; the epoch is that of the transit.
    Donor,
    /// "Transit in", or flushing its hold; the epoch is that of the transit (one less than the owner's, if flushing).
    Acceptor,
}

/// A flow in the middle of a handoff that a restarted daemon found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecoveredFlow {
    /// The flow.
    pub flow: Flow,
    /// See [`RecoveredRole`].
    pub epoch: Epoch,
    /// What it is.
    pub role: RecoveredRole,
    /// The other node of the handoff, from the map (where stragglers go, should it turn out to have moved).
    pub peer: NodeId,
}

/// Something for the daemon to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// Send this frame.
    Send {
        /// To this node, never this one.
        to: NodeId,
        /// The frame.
        frame: Frame,
    },
    /// Carry this out and answer with a [`Completion`].
    Do(Command),
    /// Tell whoever is interested.
    Event(Event),
}

/// The machine. See the module's text.
#[derive(Debug)]
pub struct Handoff {
    config: Config,
    outputs: VecDeque<Output>,
}

impl Handoff {
    /// A machine with nothing to do.
    pub fn new(config: Config) -> Handoff {
        Handoff {
            config,
            outputs: VecDeque::new(),
        }
    }

    /// Begins to hand flows off. Outcomes follow as [`Event::Outcome`], in the end [`Event::RequestFinished`].
    ///
    /// # Errors
    /// When no flow of the request could move; nothing was touched.
    pub fn handle_request(
        &mut self,
        _now: Duration,
        request: Request,
    ) -> Result<RequestId, RequestError> {
        if request.to == self.config.node {
            return Err(RequestError::ToSelf(request.to));
        }
        if !self.config.peers.contains(&request.to) {
            return Err(RequestError::UnknownNode(request.to));
        }
        Err(RequestError::NoFlows)
    }

    /// Takes a frame that `from` sent (as the channel's certificate says).
    pub fn handle_frame(&mut self, _now: Duration, _from: NodeId, _frame: Frame) {}

    /// Takes the end of a command.
    pub fn handle_done(&mut self, _now: Duration, _completion: Completion) {}

    /// Reports flows established or closed on this node to the holder, in this order and surely: asked again until
    /// answered, across lost channels. [`Event::Changed`] follows for each. A removal of a flow that is moving
    /// waits until it has moved (and is dropped) or stays (and is asked with its epoch then).
    ///
    /// Only [`holdfast_wire::ChangeKind::Establish`] and `Remove`; the machine makes the others itself.
    pub fn handle_changes(&mut self, _now: Duration, _changes: Vec<Change>) {}

    /// The channel to `peer` is gone, and with it frames on their way. Also to be told when it was replaced.
    pub fn handle_peer_lost(&mut self, _now: Duration, _peer: NodeId) {}

    /// There is a channel to `peer` again: what waits for the holder is asked at once.
    pub fn handle_peer_connected(&mut self, _now: Duration, _peer: NodeId) {}

    /// Flows found in the middle of a handoff when the daemon started: to be told before anything else. The machine
    /// asks the holder and then commands `Resume`, `Close`, `Activate` or `Discard`.
    pub fn handle_recovered(&mut self, _now: Duration, _flows: Vec<RecoveredFlow>) {}

    /// Time has passed.
    pub fn handle_timeout(&mut self, _now: Duration) {}

    /// The next thing to do, none when all is done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to call `handle_timeout`, none for never. May be past.
    pub fn poll_timeout(&self) -> Option<Duration> {
        None
    }

    /// Whether the flow takes part in a handoff on this node.
    pub fn is_moving(&self, _flow: &Flow) -> bool {
        false
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.outputs.is_empty()
    }
}
