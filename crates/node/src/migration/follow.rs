//! Post-copy at the acceptor: receives the remaining pages of a process that already runs here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use holdfast_sys::process::following::{Following, Want};
use holdfast_sys::process::image::{PAGE, Run, Space};
use holdfast_wire::MoveId;
use holdfast_wire::migration::{Wanted, WantedRange};

use super::acceptor::Job;
use super::pieces::{Incoming, Kind};
use super::told::{Teller, Told};

/// Silence of the donor after which the missing pages are requested, and the interval of further requests.
const ASK: Duration = Duration::from_secs(1);
/// Silence of the donor after which the process is given up.
const LOST: Duration = Duration::from_secs(30);

/// Receiver of the remaining pages.
pub(super) struct Follower {
    id: MoveId,
    following: Following,
    incoming: Incoming,
    teller: Teller,
    /// Times of the last message from the donor and of the last request.
    heard: Instant,
    asked: Instant,
}

impl Follower {
    pub(super) fn new(id: MoveId, following: Following, teller: Teller) -> Follower {
        let now = Instant::now();
        let incoming = Incoming::default();
        Follower {
            id,
            following,
            incoming,
            teller,
            heard: now,
            asked: now,
        }
    }

    /// Runs until all pages are there or the process has ended. `wake` is readable if there is a job.
    pub(super) fn run(mut self, inbox: &Receiver<Job>, wake: &Arc<OwnedFd>) {
        let (id, teller) = (self.id, self.teller.clone());
        let began = Instant::now();
        let problem = loop {
            self.following.wait(wake.as_fd(), ASK);
            let _ = rustix::io::read(wake, &mut [0; 8]);
            match self.turn(inbox) {
                Ok(true) => {}
                Ok(false) if self.following.has_ended() => {
                    let complete = self.following.is_complete();
                    break (!complete).then(|| "it has ended there".to_owned());
                }
                Ok(false) => {
                    let Follower { following, .. } = self;
                    if let Err(error) = following.complete() {
                        tracing::warn!(%id, %error, "its restorer has not heard that all is there");
                    }
                    tracing::info!(%id, elapsed = ?began.elapsed(), "all its memory has come");
                    return over(id, &teller, None);
                }
                Err(why) => break Some(why),
            }
        };
        if let Some(why) = &problem {
            tracing::error!(%id, why, "a process has ended, or is ended, before all its memory had come");
        }
        // Dropping `self` ends the rest of the tree.
        drop(self);
        over(id, &teller, problem);
    }

    /// Handles the pending jobs and page faults. Returns true if pages are still missing.
    fn turn(&mut self, inbox: &Receiver<Job>) -> Result<bool, String> {
        loop {
            match inbox.try_recv() {
                Ok(Job::Piece { kind, more, bytes }) => self.piece(kind, more, bytes)?,
                Ok(_) => {}
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err("the daemon ends".to_owned()),
            }
            // Page faults are handled after each piece, so that a faulting thread does not wait for other pages.
            self.look()?;
        }
        self.look()?;
        if self.following.is_complete() || self.following.has_ended() {
            return Ok(false);
        }
        if self.heard.elapsed() > LOST {
            let limit = LOST.as_secs();
            return Err(format!("its donor was not heard for {limit} s"));
        }
        if self.heard.elapsed() > ASK && self.asked.elapsed() > ASK {
            self.ask_for_all();
        }
        Ok(true)
    }

    fn look(&mut self) -> Result<(), String> {
        let wants = self.following.look().map_err(|error| error.to_string())?;
        self.want(wants);
        Ok(())
    }

    fn want(&self, wants: Vec<Want>) {
        if !wants.is_empty() {
            let ranges = wants.iter().map(page).collect();
            self.tell(false, ranges);
        }
    }

    /// Requests all missing pages, and then the pages with waiting faults.
    fn ask_for_all(&mut self) {
        self.asked = Instant::now();
        let missing = self.following.missing();
        self.tell(true, missing.iter().filter_map(range).collect());
        self.want(self.following.wanted());
    }

    fn tell(&self, all: bool, ranges: Vec<WantedRange>) {
        let (id, problem) = (self.id, None);
        let wanted = Wanted {
            all,
            ranges,
            problem,
        };
        self.teller.tell(Told::Wanted { id, wanted });
    }

    fn piece(&mut self, kind: u8, more: bool, bytes: bytes::Bytes) -> Result<(), String> {
        let (began, count) = (Instant::now(), bytes.len() as u64);
        self.heard = began;
        let message = self.incoming.take(kind, more, bytes)?;
        match message {
            Some((Kind::Follows, message)) => {
                let message = message.whole();
                let filled = self.following.fill(&message);
                let asks = filled.map_err(|error| error.to_string())?;
                // Not repeated at once, because the asking donor may not be able to send yet.
                if asks && self.asked.elapsed() > ASK {
                    self.ask_for_all();
                }
            }
            Some((Kind::Lost, message)) => {
                return Err(String::from_utf8_lossy(&message.whole()).into_owned());
            }
            Some((other, _)) => return Err(format!("a message about {} came late", other.name())),
            None => {}
        }
        self.teller.tell(Told::Took {
            id: self.id,
            bytes: count,
            busy_us: u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX),
            problem: None,
        });
        Ok(())
    }
}

/// Reports that no page is missing, or that no page is needed any more.
fn over(id: MoveId, teller: &Teller, problem: Option<String>) {
    let (all, ranges) = (true, Vec::new());
    let wanted = Wanted {
        all,
        ranges,
        problem,
    };
    teller.tell(Told::Wanted { id, wanted });
    teller.tell(Told::Followed { id });
}

fn page(want: &Want) -> WantedRange {
    WantedRange {
        process: want.process,
        start: want.address,
        end: want.address + PAGE,
    }
}

fn range(run: &Run) -> Option<WantedRange> {
    let Space::Process(process) = run.space else {
        return None;
    };
    let (start, end) = (run.start, run.start + run.length);
    Some(WantedRange {
        process,
        start,
        end,
    })
}
