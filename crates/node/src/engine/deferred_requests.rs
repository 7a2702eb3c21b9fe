//! Requests that the holder cannot decide yet: it has no lease, or reports of other nodes are missing.

use std::collections::VecDeque;

use holdfast_proto::{handoff, migration};
use holdfast_wire::{Flow, Frame, NodeId, OwnershipChange};

/// Maximum number of frames of other nodes that wait. A further one is dropped, and its sender repeats it.
const FRAMES_MAX: usize = 1024;

/// A request of this node.
#[derive(Debug)]
pub enum OwnRequest {
    /// Changes for the handoff machine.
    Handoff(handoff::CommandToken, Vec<OwnershipChange>),
    /// Changes for the migration machine.
    MigrationChanges(migration::CommandToken, Vec<OwnershipChange>),
    /// A query of the migration machine.
    MigrationQuery(migration::CommandToken, Vec<Flow>),
}

/// Requests that wait.
#[derive(Default)]
pub struct DeferredRequests {
    frames: VecDeque<(NodeId, Frame)>,
    /// As many as the machines have open.
    own: Vec<OwnRequest>,
}

impl DeferredRequests {
    /// Returns true if nothing waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty() && self.own.is_empty()
    }

    /// Returns true if a request of this node waits. Later ones wait behind it.
    pub fn has_own(&self) -> bool {
        !self.own.is_empty()
    }

    /// Returns true if a frame of another node waits. Later frames of that node wait behind it: a request must not
    /// overtake an earlier one that the node has given up.
    pub fn has_frame_of(&self, node: NodeId) -> bool {
        self.frames.iter().any(|(sender, _)| *sender == node)
    }

    /// Lets a frame of another node wait. A repetition replaces nothing: the first one waits already.
    pub fn add_frame(&mut self, from: NodeId, frame: Frame) {
        let number = request_number(&frame);
        let mut waiting = self.frames.iter();
        let is_known = waiting.any(|(sender, other)| {
            *sender == from && request_number(other) == number && other.name() == frame.name()
        });
        if !is_known && self.frames.len() < FRAMES_MAX {
            self.frames.push_back((from, frame));
        }
    }

    /// Lets a request of this node wait.
    pub fn add_own(&mut self, request: OwnRequest) {
        self.own.push(request);
    }

    /// Takes all frames, in their order of arrival.
    pub fn take_frames(&mut self) -> VecDeque<(NodeId, Frame)> {
        std::mem::take(&mut self.frames)
    }

    /// Takes all requests of this node, in order.
    pub fn take_own(&mut self) -> Vec<OwnRequest> {
        std::mem::take(&mut self.own)
    }
}

fn request_number(frame: &Frame) -> Option<u64> {
    match frame {
        Frame::ChangeRequest { request, .. } | Frame::Query { request, .. } => Some(*request),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_and_excess_frames_are_dropped() {
        let mut deferred = DeferredRequests::default();
        let query = |request| Frame::Query {
            request,
            flows: Vec::new(),
        };
        for request in 0..=FRAMES_MAX as u64 {
            deferred.add_frame(NodeId(1), query(request));
            deferred.add_frame(NodeId(1), query(0));
        }
        assert_eq!(deferred.take_frames().len(), FRAMES_MAX);
        assert!(deferred.is_empty());
    }
}
