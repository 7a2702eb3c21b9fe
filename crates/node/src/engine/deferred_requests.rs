//! Requests that the holder cannot decide yet: it has no lease, or reports of other nodes are missing.

use std::collections::BTreeMap;

use holdfast_proto::{handoff, migration};
use holdfast_wire::{Flow, Frame, NodeId, OwnershipChange};

/// Maximum number of frames of one node that wait. A further one is dropped, and its sender repeats it.
const FRAMES_PER_NODE_MAX: usize = 64;

/// Maximum number of flows that one node's waiting frames name; the first frame may name any number.
const FLOWS_PER_NODE_MAX: usize = 1 << 17;

/// A request of this node's machines to this node as holder.
#[derive(Debug)]
pub enum LocalHolderRequest {
    /// Changes that the handoff machine requests.
    Handoff(handoff::CommandToken, Vec<OwnershipChange>),
    /// Changes that the migration machine requests.
    MigrationChanges(migration::CommandToken, Vec<OwnershipChange>),
    /// A query of records by the migration machine.
    MigrationQuery(migration::CommandToken, Vec<Flow>),
}

/// Requests to the holder that wait until they can be decided.
#[derive(Default)]
pub struct DeferredRequests {
    /// The frames of each other node, in their order of arrival; none without frames.
    nodes: BTreeMap<NodeId, Vec<Frame>>,
    /// Requests of this node's machines to this node as holder.
    local_requests: Vec<LocalHolderRequest>,
}

impl DeferredRequests {
    /// Returns true if nothing waits.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.local_requests.is_empty()
    }

    /// Returns true if a local request waits. Later ones wait behind it.
    pub fn has_local_request(&self) -> bool {
        !self.local_requests.is_empty()
    }

    /// Returns true if a frame of another node waits. Later frames of that node wait behind it: a request must not
    /// overtake an earlier one that the node has given up.
    pub fn has_frame_of(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Lets a frame of another node wait. A repetition replaces nothing: the first one waits already.
    pub fn add_frame(&mut self, from: NodeId, frame: Frame) {
        let waiting = self.nodes.entry(from).or_default();
        let number = request_number(&frame);
        let is_known = waiting
            .iter()
            .any(|other| request_number(other) == number && other.name() == frame.name());
        let flows = waiting
            .iter()
            .chain([&frame])
            .map(flow_count)
            .sum::<usize>();
        let has_room = waiting.len() < FRAMES_PER_NODE_MAX && flows <= FLOWS_PER_NODE_MAX;
        if waiting.is_empty() || (!is_known && has_room) {
            waiting.push(frame);
        }
    }

    /// Lets a request of this node to itself as holder wait.
    pub fn add_local_request(&mut self, request: LocalHolderRequest) {
        self.local_requests.push(request);
    }

    /// Takes all frames with their senders; the frames of each node are in their order of arrival.
    pub fn take_frames(&mut self) -> Vec<(NodeId, Frame)> {
        let nodes = std::mem::take(&mut self.nodes).into_iter();
        let frames =
            nodes.flat_map(|(node, frames)| frames.into_iter().map(move |frame| (node, frame)));
        frames.collect()
    }

    /// Takes all local requests, in order.
    pub fn take_local_requests(&mut self) -> Vec<LocalHolderRequest> {
        std::mem::take(&mut self.local_requests)
    }
}

fn request_number(frame: &Frame) -> Option<u64> {
    match frame {
        Frame::ChangeRequest { request, .. } | Frame::Query { request, .. } => Some(*request),
        _ => None,
    }
}

fn flow_count(frame: &Frame) -> usize {
    match frame {
        Frame::ChangeRequest { changes, .. } => changes.len(),
        Frame::Query { flows, .. } => flows.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(request: u64, flows: usize) -> Frame {
        let flow = "tcp:10.0.0.1:80-10.0.0.2:5000".parse().expect("a flow");
        let flows = vec![flow; flows];
        Frame::Query { request, flows }
    }

    #[test]
    fn repeated_and_excess_frames_are_dropped() {
        let mut deferred = DeferredRequests::default();
        for request in 0..=FRAMES_PER_NODE_MAX as u64 {
            deferred.add_frame(NodeId(1), query(request, 0));
            deferred.add_frame(NodeId(1), query(0, 0));
        }
        assert_eq!(deferred.take_frames().len(), FRAMES_PER_NODE_MAX);
        assert!(deferred.is_empty());
    }

    #[test]
    fn frames_of_one_node_leave_room_for_those_of_another() {
        let mut deferred = DeferredRequests::default();
        for request in 0..2_000 {
            deferred.add_frame(NodeId(1), query(request, 0));
        }
        deferred.add_frame(NodeId(2), query(1, 1));
        assert!(deferred.has_frame_of(NodeId(2)));
    }

    #[test]
    fn frames_of_one_node_name_a_bounded_number_of_flows() {
        let mut deferred = DeferredRequests::default();
        for request in 0..4 {
            deferred.add_frame(NodeId(1), query(request, FLOWS_PER_NODE_MAX / 2));
        }
        assert_eq!(deferred.take_frames().len(), 2);
    }
}
