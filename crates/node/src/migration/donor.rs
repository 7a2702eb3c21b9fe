//! A donor's thread: it alone traces the process, from the first round until the move has ended.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use holdfast_proto::migration::{Completion, FreezeReport, Results, RoundReport, Token};
use holdfast_sys::process::donor::{Held, StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::image::{Descriptors, Tree, encode};
use holdfast_wire::{Flow, MoveId, NodeId};
use tokio::sync::oneshot;

use super::pieces::{Kind, Outgoing, Window};
use super::places::{Places, Services};
use super::records::{Entry, Record};
use super::told::{Teller, Told};

/// For how long it is tried to stop a tree where its descriptors can be saved, and between two times.
const STOP_MAX: Duration = Duration::from_millis(300);
const STOP_AGAIN: Duration = Duration::from_millis(1);

/// Threads that read the state of sockets.
const EXTRACTORS: usize = 1;

/// Bytes of memory in one message.
const PAGES_BYTES: u64 = 1 << 20;

/// What a donor's thread is to do.
#[derive(Debug)]
pub(super) enum Job {
    Round(Token),
    /// Packets of these flows wait for the acceptor.
    Freeze(Token, Vec<Flow>),
    Thaw(Token),
    Release(Token),
}

/// A move that this node gives, while its thread runs.
pub(super) struct Donor {
    jobs: Sender<Job>,
    window: Arc<Window>,
    pub(super) to: NodeId,
}

impl Donor {
    /// Starts the thread of a move.
    pub(super) fn start(
        id: MoveId,
        root: i32,
        to: NodeId,
        (record, services): (Record, Services),
        teller: Teller,
    ) -> std::io::Result<Donor> {
        let (jobs, inbox) = mpsc::channel();
        let (outgoing, window) = Outgoing::new(id, to, teller.clone());
        let giving = Giving {
            id,
            root,
            outgoing,
            record,
            services,
            places: Places::default(),
            fenced: BTreeSet::new(),
            teller,
        };
        std::thread::Builder::new()
            .name("give".to_owned())
            .spawn(move || giving.run(&inbox))?;
        Ok(Donor { jobs, window, to })
    }

    /// Gives the thread something to do; false if it has ended.
    pub(super) fn job(&self, job: Job) -> bool {
        if let Job::Thaw(_) = job {
            self.window.close("the move was given up");
        }
        self.jobs.send(job).is_ok()
    }

    /// The acceptor has taken so many bytes, or says why it takes no more.
    pub(super) fn took(&self, bytes: u64, problem: Option<&str>) {
        self.window.taken(bytes);
        if let Some(problem) = problem {
            self.window.close(problem);
        }
    }

    /// The acceptor cannot be reached.
    pub(super) fn lost(&self) {
        self.window.close("the channel to the acceptor was lost");
    }
}

/// What the thread has.
struct Giving {
    id: MoveId,
    root: i32,
    outgoing: Outgoing,
    record: Record,
    services: Services,
    places: Places,
    /// Flows whose packets wait for the acceptor.
    fenced: BTreeSet<Flow>,
    teller: Teller,
}

/// How far it is.
enum State {
    New,
    Watched(Box<Tracker>),
    Stopped(Box<StoppedTree>),
    Ended,
}

impl Giving {
    /// Until the move has ended, or the event loop. What is stopped then goes on, unless it is held.
    fn run(mut self, inbox: &Receiver<Job>) {
        let mut state = State::New;
        while let Ok(job) = inbox.recv() {
            let (next, token, results) = match job {
                Job::Round(token) => {
                    let (next, result) = self.round(state);
                    (next, token, Results::Copied(result))
                }
                Job::Freeze(token, flows) => {
                    self.fenced.extend(flows);
                    let (next, result) = self.freeze(state);
                    (next, token, Results::Frozen(result))
                }
                Job::Thaw(token) => (State::Ended, token, Results::Thawed(thaw(state))),
                Job::Release(token) => (State::Ended, token, Results::Released(release(state))),
            };
            state = next;
            self.teller
                .done(Some(self.id), Completion { token, results });
            if let State::Ended = state {
                return;
            }
        }
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
        let (began, before) = (Instant::now(), self.outgoing.sent);
        let mut round = tracker.round().map_err(text)?;
        self.send_tree(&round.tree)?;
        while let Some(pages) = tracker.read(&mut round, PAGES_BYTES).map_err(text)? {
            self.outgoing
                .send(Kind::Pages, encode(&pages).map_err(text)?)?;
        }
        let found = tracker.descriptors().map_err(text)?;
        self.services.check(&found)?;
        self.places.follow(&found);
        self.outgoing
            .send(Kind::Descriptors, encode(&found).map_err(text)?)?;
        self.outgoing.taken()?;
        self.tell_sockets();
        let duration = began.elapsed();
        let threads: usize = round.tree.processes.iter().map(|of| of.threads.len()).sum();
        Ok(RoundReport {
            copied: self.outgoing.sent - before,
            dirty: tracker.dirty_bytes().map_err(text)?,
            duration,
            threads: u32::try_from(threads).unwrap_or(u32::MAX),
            sockets: u32::try_from(self.places.list().len()).unwrap_or(u32::MAX),
            ..RoundReport::default()
        })
    }

    fn send_tree(&mut self, tree: &Tree) -> Result<(), String> {
        self.outgoing.send(Kind::Tree, encode(tree).map_err(text)?)
    }

    fn freeze(&mut self, state: State) -> (State, Result<FreezeReport, String>) {
        let tracker = match state {
            State::Watched(tracker) => tracker,
            // Flows that came late are diverted too.
            State::Stopped(_) => {
                let turned = self.turn_flows(true);
                return (state, turned.map(|()| FreezeReport::default()));
            }
            other => return (other, Err("nothing was copied".to_owned())),
        };
        let (mut stopped, last) = match self.stop(*tracker) {
            Ok(stopped) => stopped,
            Err(Unstopped { tracker, why }) => {
                return (tracker.map_or(State::Ended, State::Watched), Err(why));
            }
        };
        let result = self.send_rest(&mut stopped, &last);
        (State::Stopped(stopped), result)
    }

    /// All that is left. With the last message the acceptor could run it, so before that it is stopped for good.
    fn send_rest(
        &mut self,
        stopped: &mut StoppedTree,
        last: &Descriptors,
    ) -> Result<FreezeReport, String> {
        let sent_before = self.outgoing.sent;
        self.services.check(last)?;
        let before = self.services.connections(&self.places);
        self.places.follow(last);
        let after = self.services.connections(&self.places);
        let known = |flow: &&Flow| before.contains(*flow) || self.fenced.contains(*flow);
        if let Some(flow) = after.iter().find(|flow| !known(flow)) {
            return Err(format!("{flow} began just then: try again"));
        }
        let sockets = stopped.extract(EXTRACTORS).map_err(text)?;
        let sockets = postcard::to_stdvec(&sockets).map_err(|error| error.to_string())?;
        self.send_tree(stopped.tree())?;
        while let Some(pages) = stopped.read(PAGES_BYTES).map_err(text)? {
            self.outgoing
                .send(Kind::Pages, encode(&pages).map_err(text)?)?;
        }
        self.outgoing
            .send(Kind::LastDescriptors, encode(last).map_err(text)?)?;
        self.outgoing.send(Kind::Sockets, sockets)?;
        let state = encode(&stopped.state().map_err(text)?).map_err(text)?;
        // First written: what is stopped is never forgotten.
        self.record
            .write(&Entry::Held(stopped.to_hold().map_err(text)?))?;
        stopped.hold().map_err(text)?;
        self.outgoing.send(Kind::Frozen, state)?;
        self.tell_sockets();
        Ok(FreezeReport {
            bytes: self.outgoing.sent - sent_before,
            ..FreezeReport::default()
        })
    }
}

impl Giving {
    /// Stops the tree where its descriptors can be saved: some cannot for moments, as while something waits to be read that
    /// only the program can read. What it sent until then has left; from then on packets wait at the acceptor.
    fn stop(&self, mut tracker: Tracker) -> Result<(Box<StoppedTree>, Descriptors), Unstopped> {
        let began = Instant::now();
        loop {
            let mut stopped = match tracker.freeze() {
                Ok(stopped) => Box::new(stopped),
                Err(unfrozen) => {
                    return Err(Unstopped {
                        tracker: Some(Box::new(unfrozen.tracker)),
                        why: text(unfrozen.error),
                    });
                }
            };
            let turned = self.turn_flows(true);
            let look = turned.map_err(|why| (false, why)).and_then(|()| {
                let passing = |error: &Error| matches!(error, Error::Blocked(_) | Error::Socket(_));
                let found = stopped.descriptors();
                found.map_err(|error| (passing(&error), text(error)))
            });
            let (passing, why) = match look {
                Ok(last) => return Ok((stopped, last)),
                Err(failed) => failed,
            };
            // Before it runs: what it sends when it wakes must pass.
            let kept = self.turn_flows(false);
            tracker = stopped.thaw().map_err(|error| Unstopped {
                tracker: None,
                why: text(error),
            })?;
            if !passing || kept.is_err() || began.elapsed() > STOP_MAX {
                let tracker = Some(Box::new(tracker));
                return Err(Unstopped { tracker, why });
            }
            std::thread::sleep(STOP_AGAIN);
        }
    }

    /// Has the event loop divert packets of the process, or leave them here, and waits until it has.
    fn turn_flows(&self, stopped: bool) -> Result<(), String> {
        let (reply, answer) = oneshot::channel();
        let id = self.id;
        self.teller.tell(Told::Stops { id, stopped, reply });
        let answer = answer.blocking_recv();
        answer.unwrap_or_else(|_| Err("the daemon ends".to_owned()))
    }

    fn tell_sockets(&self) {
        let (id, sockets) = (self.id, self.places.list());
        self.teller.tell(Told::Sockets { id, sockets });
    }
}

/// A tree that was not stopped.
struct Unstopped {
    /// Watches it still, if anything does.
    tracker: Option<Box<Tracker>>,
    why: String,
}

fn thaw(state: State) -> Result<(), String> {
    let result = match state {
        State::New | State::Ended => Ok(()),
        State::Watched(tracker) => tracker.stop(),
        State::Stopped(stopped) => stopped.roll_back(),
    };
    unless_gone(result)
}

fn release(state: State) -> Result<(), String> {
    match state {
        State::Stopped(stopped) => unless_gone(stopped.release()),
        _ => Err("it was not stopped".to_owned()),
    }
}

/// What has ended meanwhile needs nothing.
fn unless_gone(result: Result<(), Error>) -> Result<(), String> {
    match result {
        Err(Error::Gone(_)) => Ok(()),
        other => other.map_err(text),
    }
}

fn text(error: Error) -> String {
    error.to_string()
}

/// Lets processes go on that an earlier daemon stopped.
pub(super) fn thaw_left(entries: &[Entry]) -> Result<(), String> {
    held(entries).try_for_each(|held| held.resume().map_err(text))
}

/// Ends processes that an earlier daemon stopped: they run elsewhere.
pub(super) fn release_left(entries: &[Entry]) -> Result<(), String> {
    held(entries).try_for_each(|held| held.end().map_err(text))
}

fn held(entries: &[Entry]) -> impl Iterator<Item = &Held> {
    let lists = entries.iter().filter_map(|entry| match entry {
        Entry::Held(list) => Some(list),
        _ => None,
    });
    lists.flatten()
}
