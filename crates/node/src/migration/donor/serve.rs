//! Post-copy at the donor: sends the remaining pages of a process that runs elsewhere, pages with a waiting fault
//! first.
//!
//! Only the acceptor knows the missing pages. It lists them whenever it has received nothing for a while, and each list
//! supersedes everything sent before. So a broken channel or a restarted daemon loses nothing.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use holdfast_api::control::FollowedMemory;
use holdfast_sys::process::donor::Behind;
use holdfast_sys::process::following::Want;
use holdfast_sys::process::image::{Checked, Missing, MissingOf, PAGE, Pages};
use holdfast_wire::migration::{Wanted, WantedRange};
use holdfast_wire::{MoveId, NodeId};

use super::super::pieces::{Kind, Outgoing};
use super::super::told::{Teller, Told};
use super::Job;

/// Bytes of a message; fits in one piece.
const STEP_BYTES: u64 = 128 << 10;
/// Maximum number of pages of a requested range.
const PAGES_MAX: usize = 64;
/// Data in transit delays requested pages. So at most the bytes that the link carries in this time are in transit,
/// within these bounds.
const ON_ITS_WAY: Duration = Duration::from_millis(8);
const ON_ITS_WAY_BYTES: (usize, usize) = (256 << 10, 2 << 20);
/// Interval of questions to a silent acceptor for its missing pages, and of progress reports.
const ASK: Duration = Duration::from_secs(1);
const TELL: Duration = Duration::from_millis(200);
/// Silence of the acceptor, which gives up sooner, after which it needs no memory.
const LOST: Duration = Duration::from_secs(90);

/// Sender of the remaining pages.
pub(super) struct Serving {
    id: MoveId,
    to: NodeId,
    behind: Behind,
    sent: FollowedMemory,
    /// True if all pages are there, or no more are needed.
    over: bool,
}

/// Error: the event loop has ended while pages are still missing.
pub(super) struct Interrupted;

impl Serving {
    /// Returns a sender for the pages of `behind`.
    pub(super) fn new((id, to): (MoveId, NodeId), behind: Behind) -> Serving {
        let sent = FollowedMemory {
            bytes: behind.bytes(),
            ..FollowedMemory::default()
        };
        Serving {
            id,
            to,
            behind,
            sent,
            over: false,
        }
    }

    /// Returns the number of bytes left for post-copy.
    pub(super) fn bytes(&self) -> u64 {
        self.sent.bytes
    }

    /// Sends until the acceptor reports that all pages are there or no longer needed.
    pub(super) fn run(
        mut self,
        outgoing: &mut Outgoing,
        inbox: &Receiver<Job>,
        teller: &Teller,
    ) -> Result<(), Interrupted> {
        let began = Instant::now();
        let (mut heard, mut asked, mut told) = (began, began, began);
        while !self.over {
            let sends = self.step(outgoing);
            let pause = if sends { Duration::ZERO } else { TELL };
            match inbox.recv_timeout(pause) {
                Ok(job) => {
                    heard = Instant::now();
                    self.hear(job, outgoing);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Interrupted),
            }
            if heard.elapsed() > ASK && asked.elapsed() > ASK {
                asked = Instant::now();
                ask(outgoing);
            }
            if heard.elapsed() > LOST {
                self.end(format!("node {} was not heard of any more", self.to));
            }
            self.sent.us = began.elapsed().as_secs_f64() * 1e6;
            if told.elapsed() > TELL || self.over {
                told = Instant::now();
                let (id, memory) = (self.id, self.sent.clone());
                teller.tell(Told::Memory { id, memory });
            }
        }
        let FollowedMemory {
            sent_bytes,
            on_demand,
            ..
        } = self.sent;
        tracing::info!(id = %self.id, sent_bytes, on_demand, "memory has followed");
        Ok(())
    }

    /// Handles a message from the acceptor.
    fn hear(&mut self, job: Job, outgoing: &mut Outgoing) {
        let Job::Wanted(Wanted {
            all,
            ranges,
            problem,
        }) = job
        else {
            return;
        };
        if let Some(why) = problem {
            return self.end(why);
        }
        if !all {
            let pages = |range: WantedRange| {
                let pages = (range.start..range.end).step_by(PAGE as usize);
                pages.take(PAGES_MAX).map(move |address| Want {
                    process: range.process,
                    address,
                })
            };
            let wants = ranges.into_iter().flat_map(pages);
            return wants.for_each(|want| self.behind.want(want));
        }
        let missing = missing(&ranges);
        match missing.check() {
            _ if missing.is_empty() => self.over = true,
            Ok(()) => {
                self.behind.lacks(&missing);
                outgoing.begin_again();
            }
            Err(error) => tracing::warn!(id = %self.id, %error, "what is missing makes no sense"),
        }
    }

    /// Sends the next pages, if there are any and the window allows. Returns true if pages were sent.
    fn step(&mut self, outgoing: &mut Outgoing) -> bool {
        let (least, most) = ON_ITS_WAY_BYTES;
        let known = outgoing.bytes_in(ON_ITS_WAY).unwrap_or(least);
        outgoing.has_room(known.clamp(least, most)) && self.send_next(outgoing, STEP_BYTES)
    }

    /// Handles a request that precedes the news of the commit: sends only the requested pages, and shows that there is
    /// a donor.
    pub(super) fn hear_early(&mut self, wanted: Wanted, outgoing: &mut Outgoing) {
        let all = wanted.all;
        self.hear(Job::Wanted(wanted), outgoing);
        while self.send_next(outgoing, 0) {}
        if all {
            ask(outgoing);
        }
    }

    fn send_next(&mut self, outgoing: &mut Outgoing, limit: u64) -> bool {
        match self.behind.next(limit) {
            Ok(Some((pages, wanted))) if !pages.runs.is_empty() => {
                self.sent.on_demand += u64::from(wanted);
                self.sent.sent_bytes += pages.bytes.len() as u64;
                self.sent.sent_pages += pages.bytes.len() as u64 / PAGE;
                self.send(outgoing, pages);
                true
            }
            // None of the pages could be read, because none of them is mapped.
            Ok(Some(_)) => limit > 0,
            Ok(None) => false,
            Err(error) => {
                let why = error.to_string();
                outgoing.send_anyway(Kind::Lost, why.clone().into_bytes());
                self.end(format!("the original cannot be read any more: {why}"));
                false
            }
        }
    }

    /// Sends pages. Pages that cannot be sent are requested again.
    fn send(&self, outgoing: &mut Outgoing, pages: Pages) {
        let message = pages.into_message().map_err(|error| error.to_string());
        let sent = message.and_then(|(mut front, content)| {
            front.extend(content);
            outgoing.send(Kind::Follows, front)
        });
        if let Err(why) = sent {
            tracing::debug!(id = %self.id, why, "memory was not sent");
        }
    }

    fn end(&mut self, why: String) {
        tracing::error!(id = %self.id, why, "a process has ended before all its memory had come");
        self.sent.problem = Some(why);
        self.over = true;
    }
}

/// Asks for the missing pages, by a message without pages.
fn ask(outgoing: &Outgoing) {
    outgoing.send_anyway(Kind::Follows, question());
}

/// Returns the message of [`ask`].
pub(in super::super) fn question() -> Vec<u8> {
    (Pages::default().into_message()).map_or(Vec::new(), |(message, _)| message)
}

/// Converts ranges, keeping their order.
fn missing(ranges: &[WantedRange]) -> Missing {
    let mut missing = Missing::default();
    for range in ranges {
        let of = missing
            .processes
            .last_mut()
            .filter(|of| of.process == range.process);
        match of {
            Some(of) => of.ranges.push((range.start, range.end)),
            None => missing.processes.push(MissingOf {
                process: range.process,
                ranges: vec![(range.start, range.end)],
            }),
        }
    }
    missing
}
