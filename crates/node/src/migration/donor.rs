//! The donor's thread, which alone traces the process, from the first round until the move has ended.

mod freeze;
mod locks;
pub(super) mod serve;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use bytes::Bytes;
use holdfast_proto::migration::{Completion, Results, RoundReport, Shape, Token};
use holdfast_sys::process::donor::{Behind, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::image::{Descriptors, Missing, Process, Tree, encode};
use holdfast_wire::migration::Wanted;
use holdfast_wire::{Flow, MoveId, NodeId};

use self::serve::{Interrupted, Serving};
use super::check;
use super::connections::{self, Connections, Ways};
use super::left;
use super::leftovers::Leftovers;
use super::pieces::{Kind, Outgoing, Window};
use super::places::{Addresses, Places};
use super::records::Record;
use super::state::State;
use super::steps::Steps;
use super::told::Teller;

/// Bytes of memory in one message.
const PAGES_BYTES: u64 = 1 << 20;

/// Maximum number of touch-ups (short copies of dirty pages) in a round.
const TOUCHES_MAX: u32 = 16;
/// Another touch-up is worthwhile if the last one found less than this fraction of the previous one.
const SHRINKS: f64 = 0.8;
/// Number of dirty bytes below which another touch-up is not worthwhile.
const FEW_BYTES: u64 = 128 << 10;

/// Job of a donor's thread.
#[derive(Debug)]
pub(super) enum Job {
    Round(Token),
    /// Freeze: packets of these flows are held at the acceptor. If the flag is set, remaining pages may be sent later
    /// (post-copy).
    Freeze(Token, Vec<Flow>, bool),
    Thaw(Token),
    Release(Token),
    /// The acceptor asks for remaining pages.
    Wanted(Wanted),
    /// The acceptor has taken some of the remaining pages.
    Taken,
    /// The acceptor asks for the next step of the hand-over of locks.
    Locks(Bytes),
}

/// A move from this node, with its running thread.
pub(super) struct Donor {
    jobs: Sender<Job>,
    window: Arc<Window>,
    /// True if post-copy is in progress and the thread must be told of taken bytes.
    follows: Arc<AtomicBool>,
    pub(super) to: NodeId,
}

impl Donor {
    /// Starts the thread of a move.
    pub(super) fn start(
        id: MoveId,
        root: i32,
        to: NodeId,
        (record, addresses): (Record, Addresses),
        ways: Ways,
        teller: Teller,
    ) -> std::io::Result<Donor> {
        let (jobs, inbox) = mpsc::channel();
        let (outgoing, window) = Outgoing::new(id, to, teller.clone());
        let follows = Arc::new(AtomicBool::new(false));
        let giving = Giving {
            id,
            root,
            to,
            outgoing,
            record,
            addresses,
            places: Places::default(),
            ways,
            connections: None,
            fenced: BTreeSet::new(),
            teller,
            steps: Steps::begin(),
            follows: follows.clone(),
            may_follow: false,
            serving: None,
        };
        std::thread::Builder::new()
            .name("give".to_owned())
            .spawn(move || giving.run(&inbox))?;
        Ok(Donor {
            jobs,
            window,
            follows,
            to,
        })
    }

    /// Starts a thread that sends the remaining pages of a process which an earlier daemon left stopped, and then
    /// ends that process.
    pub(super) fn resume(
        (id, to): (MoveId, NodeId),
        pids: Vec<Option<i32>>,
        record: Record,
        token: Token,
        teller: Teller,
    ) -> std::io::Result<Donor> {
        let (jobs, inbox) = mpsc::channel();
        let (mut outgoing, window) = Outgoing::new(id, to, teller.clone());
        let run = move || {
            // Only the acceptor knows the missing pages.
            if let Ok(behind) = Behind::new(&pids, &Missing::default()) {
                let serving = Serving::new((id, to), behind);
                if serving.run(&mut outgoing, &inbox, &teller).is_err() {
                    return;
                }
            }
            let results = Results::Released(left::release(&record.read()));
            teller.done(Some(id), Completion { token, results });
        };
        std::thread::Builder::new()
            .name("give".to_owned())
            .spawn(run)?;
        let follows = Arc::new(AtomicBool::new(true));
        Ok(Donor {
            jobs,
            window,
            follows,
            to,
        })
    }

    /// Passes a job to the thread. Returns false if the thread has ended.
    pub(super) fn job(&self, job: Job) -> bool {
        if let Job::Thaw(_) = job {
            self.window.close("the move was given up");
        }
        self.jobs.send(job).is_ok()
    }

    /// Records that the acceptor has taken bytes, after `busy_us` microseconds of work, or the reason why it takes no
    /// more.
    pub(super) fn took(&self, (bytes, busy_us): (u64, u64), problem: Option<&str>) {
        self.window.taken(bytes, Duration::from_micros(busy_us));
        if self.follows.load(Ordering::Relaxed) {
            let _ = self.jobs.send(Job::Taken);
        }
        if let Some(problem) = problem {
            self.window.close(problem);
        }
    }

    /// Records the acceptor's verdict; without refusals it takes the process.
    pub(super) fn judged(&self, refusals: Vec<String>) {
        self.window.judged(refusals);
    }

    /// Stops sending, because the acceptor cannot be reached.
    pub(super) fn lost(&self) {
        self.window.close("the channel to the acceptor was lost");
    }
}

/// State of the thread.
struct Giving {
    id: MoveId,
    root: i32,
    to: NodeId,
    outgoing: Outgoing,
    record: Record,
    addresses: Addresses,
    places: Places,
    /// Options of the move.
    ways: Ways,
    /// Followed sockets; set in the first round.
    connections: Option<Connections>,
    /// Flows whose packets are held at the acceptor.
    fenced: BTreeSet<Flow>,
    teller: Teller,
    /// Durations of the steps of the freeze.
    steps: Steps,
    follows: Arc<AtomicBool>,
    /// True if pages that are dirty in the freeze may be sent later (post-copy).
    may_follow: bool,
    /// Sender of the remaining pages.
    serving: Option<Serving>,
}

impl Giving {
    /// Runs until the move or the event loop has ended. If the loop ends first, the kernel resumes a stopped tree when
    /// its tracer exits, unless the tree is held.
    fn run(mut self, inbox: &Receiver<Job>) {
        let mut state = State::New;
        while let Ok(job) = inbox.recv() {
            let mut since = None;
            let (next, token, results) = match job {
                Job::Round(token) => {
                    let (next, result) = self.round(state);
                    (next, token, Results::Copied(result))
                }
                Job::Freeze(token, flows, may_follow) => {
                    self.fenced.extend(flows);
                    self.may_follow = may_follow;
                    let (next, result) = self.freeze(state);
                    since = Some(self.steps.began());
                    (next, token, Results::Frozen(result))
                }
                Job::Thaw(token) => (State::Ended, token, Results::Thawed(state.thaw(self.id))),
                Job::Release(token) => {
                    let Ok(released) = self.release(state, inbox) else {
                        return;
                    };
                    (State::Ended, token, Results::Released(released))
                }
                // The process may already run at the acceptor before this node knows of the commit.
                Job::Wanted(wanted) => {
                    if let Some(serving) = &mut self.serving {
                        serving.hear_early(wanted, &mut self.outgoing);
                    }
                    continue;
                }
                Job::Taken => continue,
                Job::Locks(bytes) => {
                    if let State::Stopped(stopped) = &mut state {
                        self.give_locks(stopped, &bytes);
                    }
                    continue;
                }
            };
            state = next;
            let completion = Completion { token, results };
            let since = since.unwrap_or_else(Instant::now);
            self.teller.done_since(Some(self.id), completion, since);
            if let State::Ended = state {
                return;
            }
        }
        state.abandon();
    }

    /// Ends the process here, once all its memory is at the acceptor.
    fn release(
        &mut self,
        state: State,
        inbox: &Receiver<Job>,
    ) -> Result<Result<(), String>, Interrupted> {
        let mut leftovers = state.leftovers();
        if let Some(serving) = self.serving.take() {
            // Waiting clients are handed off first, since sending the remaining pages takes longer.
            leftovers
                .take()
                .into_iter()
                .for_each(|leftovers| self.leave(leftovers));
            if let Err(interrupted) = serving.run(&mut self.outgoing, inbox, &self.teller) {
                state.abandon();
                return Err(interrupted);
            }
        }
        let released = state.release();
        if released.is_ok() {
            leftovers
                .into_iter()
                .for_each(|leftovers| self.leave(leftovers));
        }
        Ok(released)
    }

    /// Hands unaccepted connections off after the process.
    fn leave(&self, leftovers: Leftovers) {
        let with = (self.addresses.clone(), self.teller.clone());
        leftovers.follow(self.id, self.to, with);
    }

    fn round(&mut self, state: State) -> (State, Result<RoundReport, String>) {
        let tracker = match state {
            State::New => Tracker::start(self.root).map(Box::new).map_err(text),
            State::Watched(tracker) => Ok(tracker),
            other => return (other, Err("it is stopped already".to_owned())),
        };
        let mut tracker = match tracker {
            Ok(tracker) => tracker,
            Err(why) => return (State::New, Err(why)),
        };
        let result = self.copy(&mut tracker);
        (State::Watched(tracker), result)
    }

    fn copy(&mut self, tracker: &mut Tracker) -> Result<RoundReport, String> {
        let (began, before) = (Instant::now(), self.outgoing.counts());
        let is_first = self.connections.is_none();
        let mut connections = match self.connections.take() {
            Some(connections) => connections,
            None => Connections::new(self.ways),
        };
        let mut round = tracker.round().map_err(text)?;
        self.send_tree(&round.tree)?;
        let mut found = None;
        if is_first {
            found = Some(self.send_descriptors(tracker, &mut connections)?);
            self.outgoing.send(
                Kind::Outlook,
                encode(&tracker.outlook().map_err(text)?).map_err(text)?,
            )?;
            let refusals = self.outgoing.verdict()?;
            if self.ways.rehearsal || !refusals.is_empty() {
                return Ok(RoundReport {
                    refusals,
                    ..RoundReport::default()
                });
            }
        }
        while let Some(pages) = tracker.read(&mut round, PAGES_BYTES).map_err(text)? {
            self.outgoing.send_pages(pages)?;
        }
        check::refuse_hidden_state(self.root)?;
        let found = match found {
            Some(found) => found,
            None => self.send_descriptors(tracker, &mut connections)?,
        };
        let seen = connections.look(tracker, &found);
        if let Some(seen) = seen.map_err(|error| error.to_string())? {
            self.outgoing
                .send(Kind::Seen, connections::encode(&seen)?)?;
        }
        connections.expect(tracker);
        self.connections = Some(connections);
        self.outgoing.taken()?;
        self.tell_sockets();
        let (dirty, dirtied_in) = self.touch_up(tracker, began)?;
        let duration = began.elapsed();
        Ok(RoundReport {
            copied: self.outgoing.sent - before.0,
            saved: self.outgoing.saved - before.1,
            dirty,
            dirtied_in,
            duration,
            shape: shape(&round.tree, tracker),
            sockets: u32::try_from(self.places.list().len()).unwrap_or(u32::MAX),
            ..RoundReport::default()
        })
    }

    /// Sends the changed descriptors, or in the first round all of them.
    fn send_descriptors(
        &mut self,
        tracker: &mut Tracker,
        connections: &mut Connections,
    ) -> Result<Descriptors, String> {
        connections.options_are_read();
        let found = connections.there(tracker.descriptors().map_err(text)?);
        self.addresses.check(&found)?;
        self.places.follow(&found);
        self.outgoing
            .send(Kind::Descriptors, encode(&found).map_err(text)?)?;
        Ok(found)
    }

    /// Copies pages dirtied since the round `began`, and repeats this as long as each pass finds less: passes get
    /// shorter, whereas a whole round stays long. Returns an estimate of the bytes dirtied since the last pass, and the
    /// time since then.
    fn touch_up(
        &mut self,
        tracker: &mut Tracker,
        began: Instant,
    ) -> Result<(u64, Duration), String> {
        let (mut before, mut last) = (began, u64::MAX);
        for _ in 0..TOUCHES_MAX {
            let looked = Instant::now();
            let mut round = tracker.touch_up();
            let changed = round.bytes();
            while let Some(pages) = tracker.read(&mut round, PAGES_BYTES).map_err(text)? {
                self.outgoing.send_pages(pages)?;
            }
            self.outgoing.taken()?;
            let rate = changed as f64 / (looked - before).as_secs_f64().max(1e-6);
            let less = (changed as f64) < last as f64 * SHRINKS;
            (before, last) = (looked, changed);
            let since = looked.elapsed();
            if !less || changed < FEW_BYTES {
                return Ok(((rate * since.as_secs_f64()) as u64, since));
            }
        }
        Ok((last, before.elapsed()))
    }

    fn send_tree(&mut self, tree: &Tree) -> Result<(), String> {
        self.outgoing.send(Kind::Tree, encode(tree).map_err(text)?)
    }
}

/// Returns the counts that determine the duration of a freeze.
fn shape(tree: &Tree, tracker: &Tracker) -> Shape {
    let count = |of: usize| u32::try_from(of).unwrap_or(u32::MAX);
    let sum = |of: fn(&Process) -> usize| count(tree.processes.iter().map(of).sum());
    Shape {
        processes: count(tree.processes.len()),
        threads: sum(|process| process.threads.len()),
        mappings: sum(|process| process.mappings.len()),
        shared: tracker.shared_bytes(),
    }
}

fn text(error: Error) -> String {
    error.to_string()
}
