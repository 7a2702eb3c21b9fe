//! Moves to this node: their threads, and the data that the event loop keeps for the threads.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use holdfast_wire::MoveId;
use holdfast_wire::failure::ProtocolViolation;
use holdfast_wire::move_frames::DonorFlowEpoch;

use super::acceptor::{AcceptorJob, AcceptorThread};
use super::image_messages::WINDOW_BYTES;
use super::socket_endpoints::SocketEndpoint;

/// All moves in which this node is the acceptor.
#[derive(Default)]
pub(super) struct AcceptorMoves {
    threads: BTreeMap<MoveId, AcceptorThread>,
    /// Flows whose packets are held for processes being moved here, sorted.
    armed_flows: BTreeMap<MoveId, Vec<DonorFlowEpoch>>,
    /// Processes that run here while their remaining pages are still being sent (post-copy).
    in_postcopy: BTreeSet<MoveId>,
    /// Bytes of pieces that the threads have not consumed yet.
    unconsumed_bytes: BTreeMap<MoveId, usize>,
    /// Sockets of restored processes that are not connections.
    listeners: BTreeMap<MoveId, Vec<SocketEndpoint>>,
    /// Packets to give to this node's stack before the sockets of a restored process become active.
    packets: BTreeMap<MoveId, Vec<Vec<u8>>>,
}

impl AcceptorMoves {
    /// Adds a move to this node, with its thread.
    pub(super) fn add(&mut self, id: MoveId, thread: AcceptorThread) {
        self.threads.insert(id, thread);
    }

    /// Removes a move that has ended, except for the process's listeners.
    pub(super) fn remove(&mut self, id: MoveId) {
        self.threads.remove(&id);
        self.unconsumed_bytes.remove(&id);
        self.armed_flows.remove(&id);
        self.packets.remove(&id);
    }

    /// Passes a job to the thread of a move. Returns false if there is no thread, or the thread has ended.
    pub(super) fn send_job(&self, id: MoveId, job: AcceptorJob) -> bool {
        self.threads
            .get(&id)
            .is_some_and(|thread| thread.send_job(job))
    }

    /// Passes a piece of an image message to the thread of its move. Returns false if there is no thread.
    pub(super) fn on_piece(&mut self, id: MoveId, kind: u8, more: bool, bytes: Bytes) -> bool {
        let Some(thread) = self.threads.get(&id) else {
            return false;
        };
        let unconsumed = self.unconsumed_bytes.entry(id).or_default();
        *unconsumed += bytes.len();
        // A donor that observes the window never has more in transit.
        let before = *unconsumed - bytes.len();
        if *unconsumed > 2 * WINDOW_BYTES {
            // The problem is reported once; further pieces are ignored.
            if before <= 2 * WINDOW_BYTES {
                let why = ProtocolViolation::WindowExceeded.into();
                thread.send_job(AcceptorJob::Refuse(why));
            }
            return true;
        }
        thread.send_job(AcceptorJob::Piece { kind, more, bytes });
        true
    }

    /// Records that the thread has consumed bytes of pieces.
    pub(super) fn on_consumed(&mut self, id: MoveId, bytes: u64) {
        if let Some(unconsumed) = self.unconsumed_bytes.get_mut(&id) {
            *unconsumed = unconsumed.saturating_sub(usize::try_from(bytes).unwrap_or(0));
        }
    }

    /// Records flows whose packets are held, and notifies the thread.
    pub(super) fn add_armed_flows(&mut self, id: MoveId, flows: &[DonorFlowEpoch]) {
        let armed = self.armed_flows.entry(id).or_default();
        armed.extend(flows);
        armed.sort_unstable();
        self.send_job(id, AcceptorJob::Armed);
    }

    /// Returns true if packets are held for exactly these flows, which are sorted.
    pub(super) fn are_armed(&self, id: MoveId, flows: &[DonorFlowEpoch]) -> bool {
        let armed = self.armed_flows.get(&id);
        armed.is_some_and(|armed| armed == flows)
    }

    /// Records that a process runs here, or will in a moment, while its remaining pages are being sent.
    pub(super) fn begin_postcopy(&mut self, id: MoveId) {
        self.in_postcopy.insert(id);
    }

    /// Records that no more pages of a process are being sent.
    pub(super) fn end_postcopy(&mut self, id: MoveId) {
        self.in_postcopy.remove(&id);
    }

    /// Returns true if the remaining pages of a process are still being sent.
    pub(super) fn is_in_postcopy(&self, id: MoveId) -> bool {
        self.in_postcopy.contains(&id)
    }

    /// Records the sockets of a restored process that are not connections.
    pub(super) fn set_listeners(&mut self, id: MoveId, listeners: Vec<SocketEndpoint>) {
        self.listeners.insert(id, listeners);
    }

    /// Takes the sockets of a restored process that are not connections.
    pub(super) fn take_listeners(&mut self, id: MoveId) -> Vec<SocketEndpoint> {
        self.listeners.remove(&id).unwrap_or_default()
    }

    /// Adds packets to give to the stack before the sockets of a restored process become active.
    pub(super) fn add_packets(&mut self, id: MoveId, packets: Vec<Vec<u8>>) {
        self.packets.entry(id).or_default().extend(packets);
    }

    /// Takes these packets, in the order in which they were added.
    pub(super) fn take_packets(&mut self, id: MoveId) -> Vec<Vec<u8>> {
        self.packets.remove(&id).unwrap_or_default()
    }
}
