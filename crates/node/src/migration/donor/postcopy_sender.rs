//! Post-copy at the donor: sends the remaining pages of a process that runs elsewhere, pages with a waiting fault
//! first.
//!
//! Only the acceptor knows the missing pages. It lists them whenever it has received nothing for a while, and each list
//! supersedes everything sent before. So a broken channel or a restarted daemon loses nothing.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use holdfast_api::control::PostCopyMemory;
use holdfast_checkpoint::donor::PageSource;
use holdfast_checkpoint::image::{MissingPages, PAGE, PagesMessage, ProcessMissingPages, Validate};
use holdfast_checkpoint::postcopy::PageFault;
use holdfast_wire::failure::{Context, Failure, PeerFault};
use holdfast_wire::move_frames::{PageRange, PageRequest};
use holdfast_wire::{MoveId, NodeId};

use super::super::image_messages::{ImageSender, MessageKind};
use super::super::worker_events::{EventSender, WorkerEvent};
use super::DonorJob;
use crate::failure_conversion::{IntoFailure, blame_of};

/// Bytes of a message; fits in one piece.
const MESSAGE_BYTES: u64 = 128 << 10;
/// Maximum number of pages of a requested range.
const RANGE_PAGES_MAX: usize = 64;
/// Data in transit delays requested pages. So at most the bytes that the link carries in this time are in transit,
/// within these bounds.
const IN_TRANSIT_TIME: Duration = Duration::from_millis(8);
const IN_TRANSIT_BYTES: (usize, usize) = (256 << 10, 2 << 20);
/// Interval of questions to a silent acceptor for its missing pages, and of progress reports.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_millis(200);
/// Silence of the acceptor, which gives up sooner, after which it needs no memory.
const SILENCE_MAX: Duration = Duration::from_secs(90);

/// Sender of the remaining pages.
pub(super) struct PostcopySender {
    id: MoveId,
    to: NodeId,
    source: PageSource,
    progress: PostCopyMemory,
    /// True if all pages are there, or no more are needed.
    is_over: bool,
}

/// Error: the event loop has ended while pages are still missing.
pub(super) struct LoopEnded;

impl PostcopySender {
    /// Returns a sender for the pages of `source`.
    pub(super) fn new((id, to): (MoveId, NodeId), source: PageSource) -> PostcopySender {
        let progress = PostCopyMemory {
            bytes: source.remaining_bytes(),
            ..PostCopyMemory::default()
        };
        PostcopySender {
            id,
            to,
            source,
            progress,
            is_over: false,
        }
    }

    /// Returns the number of bytes left for post-copy.
    pub(super) fn total_bytes(&self) -> u64 {
        self.progress.bytes
    }

    /// Sends until the acceptor reports that all pages are there or no longer needed.
    pub(super) fn run(
        mut self,
        outgoing: &mut ImageSender,
        inbox: &Receiver<DonorJob>,
        events: &EventSender,
    ) -> Result<(), LoopEnded> {
        let started_at = Instant::now();
        let (mut heard_at, mut asked_at, mut reported_at) = (started_at, started_at, started_at);
        while !self.is_over {
            let has_sent = self.send_if_room(outgoing);
            let pause = if has_sent {
                Duration::ZERO
            } else {
                REPORT_INTERVAL
            };
            match inbox.recv_timeout(pause) {
                Ok(job) => {
                    heard_at = Instant::now();
                    self.handle_job(job, outgoing);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(LoopEnded),
            }
            if heard_at.elapsed() > ASK_INTERVAL && asked_at.elapsed() > ASK_INTERVAL {
                asked_at = Instant::now();
                ask_for_missing(outgoing);
            }
            if heard_at.elapsed() > SILENCE_MAX {
                self.fail(&PeerFault::AcceptorSilent(self.to).into());
            }
            self.progress.duration_us = started_at.elapsed().as_secs_f64() * 1e6;
            if reported_at.elapsed() > REPORT_INTERVAL || self.is_over {
                reported_at = Instant::now();
                let (id, memory) = (self.id, self.progress.clone());
                events.send(WorkerEvent::PostcopyProgress { id, memory });
            }
        }
        let PostCopyMemory {
            sent_bytes,
            page_faults,
            ..
        } = self.progress;
        tracing::info!(id = %self.id, sent_bytes, page_faults, "post-copy finished");
        Ok(())
    }

    /// Handles a message from the acceptor.
    fn handle_job(&mut self, job: DonorJob, outgoing: &mut ImageSender) {
        let DonorJob::PagesRequested(PageRequest {
            is_complete,
            ranges,
            problem,
        }) = job
        else {
            return;
        };
        if let Some(why) = problem {
            return self.fail(&why.from_peer());
        }
        if !is_complete {
            let pages = |range: PageRange| {
                let pages = (range.start..range.end).step_by(PAGE as usize);
                pages.take(RANGE_PAGES_MAX).map(move |address| PageFault {
                    process: range.process,
                    address,
                })
            };
            let faults = ranges.into_iter().flat_map(pages);
            return faults.for_each(|fault| self.source.request_page(fault));
        }
        let missing = to_missing(&ranges);
        match missing.check() {
            _ if missing.is_empty() => self.is_over = true,
            Ok(()) => {
                self.source.set_missing(&missing);
                outgoing.reopen_window();
            }
            Err(error) => {
                tracing::warn!(id = %self.id, %error, "received an invalid list of missing pages")
            }
        }
    }

    /// Sends the next pages, if there are any and the window allows. Returns true if pages were sent.
    fn send_if_room(&mut self, outgoing: &mut ImageSender) -> bool {
        let (min_bytes, max_bytes) = IN_TRANSIT_BYTES;
        let link_bytes = outgoing.bytes_in(IN_TRANSIT_TIME).unwrap_or(min_bytes);
        outgoing.has_room(link_bytes.clamp(min_bytes, max_bytes))
            && self.send_next(outgoing, MESSAGE_BYTES)
    }

    /// Handles a request that precedes the news of the commit: sends only the requested pages, and shows that there is
    /// a donor.
    pub(super) fn handle_early_request(
        &mut self,
        request: PageRequest,
        outgoing: &mut ImageSender,
    ) {
        let is_complete = request.is_complete;
        self.handle_job(DonorJob::PagesRequested(request), outgoing);
        while self.send_next(outgoing, 0) {}
        if is_complete {
            ask_for_missing(outgoing);
        }
    }

    fn send_next(&mut self, outgoing: &mut ImageSender, limit: u64) -> bool {
        match self.source.next(limit) {
            Ok(Some((pages, is_on_demand))) if !pages.runs.is_empty() => {
                self.progress.page_faults += u64::from(is_on_demand);
                self.progress.sent_bytes += pages.bytes.len() as u64;
                self.progress.sent_pages += pages.bytes.len() as u64 / PAGE;
                self.send_pages(outgoing, pages);
                true
            }
            // None of the pages could be read, because none of them is mapped.
            Ok(Some(_)) => limit > 0,
            Ok(None) => false,
            Err(error) => {
                let why = error.into_own_failure();
                outgoing.send_unwindowed(MessageKind::PostcopyFailed, why.encode());
                self.fail(&why.within(Context::OriginalUnreadable));
                false
            }
        }
    }

    /// Sends pages. Pages that cannot be sent are requested again.
    fn send_pages(&self, outgoing: &mut ImageSender, pages: PagesMessage) {
        let message = pages.into_message().map_err(IntoFailure::into_own_failure);
        let result = message.and_then(|(mut header, content)| {
            header.extend(content);
            outgoing.send(MessageKind::PostcopyPages, header)
        });
        if let Err(why) = result {
            tracing::debug!(id = %self.id, %why, "cannot send pages");
        }
    }

    fn fail(&mut self, why: &Failure) {
        tracing::error!(id = %self.id, %why, blame = %why.party(), "post-copy failed: a process ended before all its pages had arrived");
        self.progress.problem = Some(why.to_string());
        self.progress.blame = Some(blame_of(why));
        self.is_over = true;
    }
}

/// Asks for the missing pages, by a message without pages.
fn ask_for_missing(outgoing: &ImageSender) {
    outgoing.send_unwindowed(MessageKind::PostcopyPages, missing_pages_question());
}

/// Returns the message of [`ask_for_missing`].
pub(in super::super) fn missing_pages_question() -> Vec<u8> {
    (PagesMessage::default().into_message()).map_or(Vec::new(), |(message, _)| message)
}

/// Converts ranges, keeping their order.
fn to_missing(ranges: &[PageRange]) -> MissingPages {
    let mut missing = MissingPages::default();
    for range in ranges {
        let last_process = missing
            .processes
            .last_mut()
            .filter(|last_process| last_process.process == range.process);
        match last_process {
            Some(last_process) => last_process.ranges.push((range.start, range.end)),
            None => missing.processes.push(ProcessMissingPages {
                process: range.process,
                ranges: vec![(range.start, range.end)],
            }),
        }
    }
    missing
}
