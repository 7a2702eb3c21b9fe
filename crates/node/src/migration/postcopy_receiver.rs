//! Post-copy at the acceptor: receives the remaining pages of a process that already runs here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use holdfast_checkpoint::image::{MemorySpace, PAGE, PageRun};
use holdfast_checkpoint::postcopy::{LazyPages, PageFault};
use holdfast_wire::MoveId;
use holdfast_wire::failure::{Failure, NodeFault, PeerFault, ProgramFault, ProtocolViolation};
use holdfast_wire::move_frames::{PageRange, PageRequest};

use super::acceptor::AcceptorJob;
use super::image_messages::{MessageAssembler, MessageKind};
use super::worker_events::{EventSender, WorkerEvent};
use crate::failure_conversion::IntoFailure;

/// Silence of the donor after which the missing pages are requested, and the interval of further requests.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// Silence of the donor after which the process is given up.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Receiver of the remaining pages.
pub(super) struct PostcopyReceiver {
    id: MoveId,
    fault_handler: LazyPages,
    assembler: MessageAssembler,
    events: EventSender,
    /// Times of the last message from the donor and of the last request.
    last_message_at: Instant,
    last_request_at: Instant,
}

impl PostcopyReceiver {
    pub(super) fn new(
        id: MoveId,
        fault_handler: LazyPages,
        events: EventSender,
    ) -> PostcopyReceiver {
        let now = Instant::now();
        let assembler = MessageAssembler::default();
        PostcopyReceiver {
            id,
            fault_handler,
            assembler,
            events,
            last_message_at: now,
            last_request_at: now,
        }
    }

    /// Runs until all pages are there or the process has ended. `wake` is readable if there is a job.
    pub(super) fn run(mut self, inbox: &Receiver<AcceptorJob>, wake: &Arc<OwnedFd>) {
        let (id, events) = (self.id, self.events.clone());
        let started_at = Instant::now();
        let problem = loop {
            self.fault_handler.wait(wake.as_fd(), ASK_INTERVAL);
            let _ = rustix::io::read(wake, &mut [0; 8]);
            match self.handle_pending(inbox) {
                Ok(true) => {}
                Ok(false) if self.fault_handler.has_ended() => {
                    let is_complete = self.fault_handler.is_complete();
                    break (!is_complete).then(|| ProgramFault::EndedAtAcceptor.into());
                }
                Ok(false) => {
                    let PostcopyReceiver {
                        fault_handler: following,
                        ..
                    } = self;
                    if let Err(error) = following.finish() {
                        tracing::warn!(%id, %error, "cannot tell the restorer that post-copy is complete");
                    }
                    tracing::info!(%id, elapsed = ?started_at.elapsed(), "post-copy finished");
                    return report_end(id, &events, None);
                }
                Err(why) => break Some(why),
            }
        };
        if let Some(why) = &problem {
            tracing::error!(%id, %why, blame = %why.party(), "post-copy failed: a process ended before all its pages had arrived");
        }
        // Dropping `self` ends the rest of the tree.
        drop(self);
        report_end(id, &events, problem);
    }

    /// Handles the pending jobs and page faults. Returns true if pages are still missing.
    fn handle_pending(&mut self, inbox: &Receiver<AcceptorJob>) -> Result<bool, Failure> {
        loop {
            match inbox.try_recv() {
                Ok(AcceptorJob::Piece { kind, more, bytes }) => self.on_piece(kind, more, bytes)?,
                Ok(_) => {}
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(NodeFault::DaemonStopping.into()),
            }
            // Page faults are handled after each piece, so that a faulting thread does not wait for other pages.
            self.handle_faults()?;
        }
        self.handle_faults()?;
        if self.fault_handler.is_complete() || self.fault_handler.has_ended() {
            return Ok(false);
        }
        if self.last_message_at.elapsed() > SILENCE_MAX {
            let limit_s = SILENCE_MAX.as_secs() as u32;
            return Err(PeerFault::DonorSilent { limit_s }.into());
        }
        if self.last_message_at.elapsed() > ASK_INTERVAL
            && self.last_request_at.elapsed() > ASK_INTERVAL
        {
            self.request_all_missing();
        }
        Ok(true)
    }

    fn handle_faults(&mut self) -> Result<(), Failure> {
        let faults = self
            .fault_handler
            .handle_events()
            .map_err(IntoFailure::into_failure)?;
        self.request_pages(faults);
        Ok(())
    }

    fn request_pages(&self, faults: Vec<PageFault>) {
        if !faults.is_empty() {
            let ranges = faults.iter().map(page_range).collect();
            self.send_request(false, ranges);
        }
    }

    /// Requests all missing pages, and then the pages with waiting faults.
    fn request_all_missing(&mut self) {
        self.last_request_at = Instant::now();
        let missing = self.fault_handler.missing_runs();
        self.send_request(true, missing.iter().filter_map(process_range).collect());
        self.request_pages(self.fault_handler.requested_pages());
    }

    fn send_request(&self, is_complete: bool, ranges: Vec<PageRange>) {
        let (id, problem) = (self.id, None);
        let request = PageRequest {
            is_complete,
            ranges,
            problem,
        };
        self.events.send(WorkerEvent::RequestPages { id, request });
    }

    fn on_piece(&mut self, kind: u8, more: bool, bytes: bytes::Bytes) -> Result<(), Failure> {
        let (started_at, count) = (Instant::now(), bytes.len() as u64);
        self.last_message_at = started_at;
        let message = self.assembler.add_piece(kind, more, bytes)?;
        match message {
            Some((MessageKind::PostcopyPages, message)) => {
                let message = message.into_bytes();
                let filled = self.fault_handler.place_pages(&message);
                let is_question = filled.map_err(IntoFailure::into_failure)?;
                // Not repeated at once, because the asking donor may not be able to send yet.
                if is_question && self.last_request_at.elapsed() > ASK_INTERVAL {
                    self.request_all_missing();
                }
            }
            Some((MessageKind::PostcopyFailed, message)) => {
                return Err(Failure::decode(&message.into_bytes()).from_peer());
            }
            Some((other, _)) => {
                return Err(ProtocolViolation::LateMessage(other.name().into()).into());
            }
            None => {}
        }
        self.events.send(WorkerEvent::ReportTaken {
            id: self.id,
            bytes: count,
            busy_us: u64::try_from(started_at.elapsed().as_micros()).unwrap_or(u64::MAX),
            problem: None,
        });
        Ok(())
    }
}

/// Reports that no page is missing, or that no page is needed any more.
fn report_end(id: MoveId, events: &EventSender, problem: Option<Failure>) {
    let (is_complete, ranges) = (true, Vec::new());
    let request = PageRequest {
        is_complete,
        ranges,
        problem,
    };
    events.send(WorkerEvent::RequestPages { id, request });
    events.send(WorkerEvent::PostcopyEnded { id });
}

fn page_range(fault: &PageFault) -> PageRange {
    PageRange {
        process: fault.process,
        start: fault.address,
        end: fault.address + PAGE,
    }
}

fn process_range(run: &PageRun) -> Option<PageRange> {
    let MemorySpace::Process(process) = run.space else {
        return None;
    };
    let (start, end) = (run.start, run.start + run.length);
    Some(PageRange {
        process,
        start,
        end,
    })
}
