//! Moves away from this node: their threads, and the sockets of their processes.

use std::collections::BTreeMap;

use holdfast_wire::{MoveId, NodeId};

use super::donor::{DonorJob, DonorThread};
use super::socket_endpoints::SocketEndpoint;

/// All moves in which this node is the donor.
#[derive(Default)]
pub(super) struct DonorMoves {
    threads: BTreeMap<MoveId, DonorThread>,
    /// Sockets of the departing processes, as of the last round.
    endpoints: BTreeMap<MoveId, Vec<SocketEndpoint>>,
}

impl DonorMoves {
    /// Adds a move from this node, with its thread.
    pub(super) fn add(&mut self, id: MoveId, thread: DonorThread) {
        self.threads.insert(id, thread);
    }

    /// Removes a move from this node that has ended.
    pub(super) fn remove(&mut self, id: MoveId) {
        self.threads.remove(&id);
        self.endpoints.remove(&id);
    }

    /// Passes a job to the thread of a move. Returns false if there is no thread, or the thread has ended.
    pub(super) fn send_job(&self, id: MoveId, job: DonorJob) -> bool {
        self.threads
            .get(&id)
            .is_some_and(|thread| thread.send_job(job))
    }

    /// Returns true if the move has a thread here.
    pub(super) fn contains(&self, id: MoveId) -> bool {
        self.threads.contains_key(&id)
    }

    /// Returns the thread of a move, if the process moves to `acceptor`: no other node may steer the move.
    pub(super) fn thread_for(&self, id: MoveId, acceptor: NodeId) -> Option<&DonorThread> {
        let thread = self.threads.get(&id);
        thread.filter(|thread| thread.acceptor == acceptor)
    }

    /// Returns the node to which a process moves.
    pub(super) fn acceptor_of(&self, id: MoveId) -> Option<NodeId> {
        self.threads.get(&id).map(|thread| thread.acceptor)
    }

    /// Stops all moves to a peer whose channel was lost.
    pub(super) fn on_peer_lost(&self, peer: NodeId) {
        for thread in self
            .threads
            .values()
            .filter(|thread| thread.acceptor == peer)
        {
            thread.on_channel_lost();
        }
    }

    /// Records the sockets of a departing process.
    pub(super) fn set_endpoints(&mut self, id: MoveId, endpoints: Vec<SocketEndpoint>) {
        self.endpoints.insert(id, endpoints);
    }

    /// Returns the sockets of a departing process, as of the last round.
    pub(super) fn endpoints(&self, id: MoveId) -> &[SocketEndpoint] {
        self.endpoints.get(&id).map_or(&[], Vec::as_slice)
    }
}
