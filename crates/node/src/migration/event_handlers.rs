//! Events of the migration threads, and frames about post-copy.

use std::time::Duration;

use holdfast_checkpoint::postcopy::LazyPages;
use holdfast_proto::migration::{Completion, Results};
use holdfast_wire::failure::{Failure, NodeFault, ProgramFault};
use holdfast_wire::move_frames::{MoveFrame, PageRequest};
use holdfast_wire::{Frame, MoveId, NodeId};

use super::acceptor::AcceptorThread;
use super::donor::DonorJob;
use super::donor::postcopy_sender::missing_pages_question;
use super::image_messages::MessageKind;
use super::move_records::{MoveRole, RecordEntry};
use super::postcopy_receiver::PostcopyReceiver;
use super::worker_events::WorkerEvent;
use super::{Migrations, crash_recovery};
use crate::failure_conversion::thread_failure;

impl Migrations {
    /// Handles an event of a thread. Returns the frame to send, if any.
    pub(crate) fn handle_worker_event(
        &mut self,
        now: Duration,
        event: WorkerEvent,
    ) -> Option<(NodeId, Frame)> {
        match event {
            WorkerEvent::SendPiece {
                id,
                to,
                kind,
                more,
                bytes,
            } => {
                let frame = MoveFrame::Piece { kind, more, bytes };
                return Some((to, Frame::Move { id, frame }));
            }
            WorkerEvent::ReportTaken {
                id,
                bytes,
                busy_us,
                problem,
            } => {
                self.acceptor_moves.on_consumed(id, bytes);
                let frame = MoveFrame::PiecesProcessed {
                    bytes,
                    busy_us,
                    problem,
                };
                return Some((id.donor, Frame::Move { id, frame }));
            }
            WorkerEvent::SendVerdict { id, refusals } => {
                let frame = MoveFrame::CheckResult { refusals };
                return Some((id.donor, Frame::Move { id, frame }));
            }
            WorkerEvent::RequestPages { id, request } => {
                let frame = MoveFrame::PageRequest(request);
                return Some((id.donor, Frame::Move { id, frame }));
            }
            WorkerEvent::CheckDone { check, inquiry, .. } => {
                self.continue_inquiry(now, *check, inquiry)
            }
            WorkerEvent::RequestLocks { id, bytes } => {
                let frame = MoveFrame::LockHandover { bytes };
                return Some((id.donor, Frame::Move { id, frame }));
            }
            WorkerEvent::LocksAcquired {
                id,
                token,
                restorer,
            } => {
                // Reported by way of the owner, as if the thread had completed the whole command.
                let results = Results::Resumed(self.resume_adopted(id, Some(restorer)));
                self.events
                    .command_done(Some(id), Completion { token, results });
            }
            WorkerEvent::CommandDone { id, completion, .. } => {
                if let Some(id) = id {
                    self.on_command_end(id, &completion.results);
                }
                self.on_completion(now, completion);
            }
            other => self.handle_local_event(other),
        }
        None
    }

    /// Handles an event that concerns this node alone.
    fn handle_local_event(&mut self, event: WorkerEvent) {
        match event {
            WorkerEvent::ProcessRuns {
                id,
                restorer,
                restorer_ref: held,
                info: came,
                listeners: servers,
            } => {
                self.acceptor_moves.set_listeners(id, servers);
                self.register_arrived_process(id, held, Some(restorer), came);
            }
            WorkerEvent::PostcopyStarted { id } => self.acceptor_moves.begin_postcopy(id),
            WorkerEvent::PostcopyEnded { id } => {
                self.acceptor_moves.end_postcopy(id);
                self.acceptor_moves.remove(id);
                self.arrived_processes.remove_ended();
            }
            WorkerEvent::PostcopyProgress { id, memory } => {
                self.operations.update_postcopy(id, memory)
            }
            WorkerEvent::SocketsFound { id, sockets } => {
                self.donor_moves.set_endpoints(id, sockets);
            }
            WorkerEvent::PacketsToInject { id, packets } => {
                self.acceptor_moves.add_packets(id, packets);
            }
            // The owner handles all other events. If one gets here, its reply channel closes, which the thread treats
            // as a refusal.
            _ => {}
        }
    }

    /// Handles an acceptor's request for remaining pages of a process that moved away.
    pub(super) fn on_pages_requested(&mut self, from: NodeId, id: MoveId, request: PageRequest) {
        if self.donor_moves.contains(id) {
            if let Some(donor) = self.donor_moves.thread_for(id, from) {
                donor.send_job(DonorJob::PagesRequested(request));
            }
            return;
        }
        if request.ranges.is_empty() {
            return;
        }
        // After a restart, the daemon may not know yet that it has to send the pages.
        let is_known = !self
            .records
            .record_of(id, MoveRole::Donor)
            .read()
            .is_empty();
        let lost = || Failure::from(NodeFault::OriginalGone).encode();
        let (kind, bytes) = match is_known {
            true => (MessageKind::PostcopyPages, missing_pages_question().into()),
            false => (MessageKind::PostcopyFailed, lost().into()),
        };
        self.events.send(WorkerEvent::SendPiece {
            id,
            to: from,
            kind: kind as u8,
            more: false,
            bytes,
        });
    }

    /// Handles a piece for a process without a thread here. A donor with remaining pages is told whether they are still
    /// needed.
    pub(super) fn on_unknown_piece(&self, id: MoveId, kind: u8) {
        tracing::debug!(%id, kind, "received part of an unknown move");
        let entries = self.records.record_of(id, MoveRole::Acceptor).read();
        let is_running = entries
            .iter()
            .any(|entry| matches!(entry, RecordEntry::Running));
        if kind != MessageKind::PostcopyPages as u8 || !(entries.is_empty() || is_running) {
            return;
        }
        let is_alive =
            crash_recovery::restorer_of(&entries).is_some_and(|restorer| restorer.exists());
        let request = PageRequest {
            is_complete: true,
            ranges: Vec::new(),
            problem: (!is_alive).then(|| ProgramFault::EndedBeforeAllPages.into()),
        };
        self.events.send(WorkerEvent::RequestPages { id, request });
    }

    /// Starts receiving the remaining pages of a process that an earlier daemon restored.
    pub(super) fn start_postcopy_receiver(
        &mut self,
        id: MoveId,
        following: LazyPages,
    ) -> Result<(), Failure> {
        let receiver = PostcopyReceiver::new(id, following, self.events.clone());
        let acceptor = AcceptorThread::start_postcopy_receiver(receiver);
        let acceptor = acceptor.map_err(|error| thread_failure(&error))?;
        self.acceptor_moves.begin_postcopy(id);
        self.acceptor_moves.add(id, acceptor);
        Ok(())
    }
}
