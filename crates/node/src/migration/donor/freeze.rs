//! The freeze of a process that moves away.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use holdfast_proto::migration::FreezeReport;
use holdfast_sys::priority::Hurry;
use holdfast_sys::process::donor::{Behind, StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::image::{Frozen, encode};
use holdfast_wire::Flow;
use holdfast_wire::migration::FlowAt;
use tokio::sync::oneshot;

use super::super::connections::{self, Connections, Reader, States};
use super::super::pieces::Kind;
use super::super::records::Entry;
use super::super::state::{Last, State};
use super::super::steps::Steps;
use super::super::told::Told;
use super::serve::Serving;
use super::{Giving, PAGES_BYTES, text};
use crate::engine::Turn;

/// Time limit for stopping a tree whose descriptors cannot be saved yet, and the pause between attempts.
const STOP_MAX: Duration = Duration::from_millis(300);
const STOP_AGAIN: Duration = Duration::from_millis(1);

/// Number of attempts to read blocked descriptors of a stopped tree, and the pause between attempts. Descriptors that
/// other processes hold open for a moment are closed by then.
const READS: usize = 3;
const READ_AGAIN: Duration = Duration::from_micros(300);

/// Number of changed connections below which reading them in the freeze costs less than another round.
const FEW: usize = 32;

/// Time limit for the acknowledgement of the data that the program sent last, and the polling interval.
const QUIET_MAX: Duration = Duration::from_millis(10);
const QUIET_AGAIN: Duration = Duration::from_millis(2);

impl Giving {
    pub(super) fn freeze(&mut self, state: State) -> (State, Result<FreezeReport, String>) {
        let mut before = self.outgoing.counts();
        let hurries = self.ways.hurries;
        let _hurry;
        let (mut stopped, last, newcomers) = match state {
            State::Watched(mut tracker) => {
                if let Err(why) = self.catch_up(&mut tracker) {
                    return (State::Watched(tracker), Err(why));
                }
                _hurry = hurries.then(Hurry::begin);
                before = self.outgoing.counts();
                self.steps = Steps::begin();
                match self.stop(*tracker) {
                    Ok(stopped) => stopped,
                    Err(Unstopped { tracker, why }) => {
                        return (tracker.map_or(State::Ended, State::Watched), Err(why));
                    }
                }
            }
            // Flows that began late are diverted in this freeze.
            State::Waiting(stopped, last) => {
                _hurry = hurries.then(Hurry::begin);
                match self.turn_flows(Turn::Stands) {
                    Ok(_) => (stopped, *last, Vec::new()),
                    Err(why) => return (State::Stopped(stopped), Err(why)),
                }
            }
            other => return (other, Err("nothing was copied".to_owned())),
        };
        let gone = self.places.closed_by(&last.descriptors);
        match self.late(&last, newcomers, &gone) {
            Ok(late) if late.is_empty() => {
                let sent = self.send_rest(&mut stopped, last);
                let report = sent.map(|()| FreezeReport {
                    steps: self.steps.list(),
                    gone,
                    ..self.report(before, late)
                });
                State::sent(stopped, (self.id, self.ways.copy), report)
            }
            Ok(late) => {
                let waiting = State::Waiting(stopped, Box::new(last));
                let report = FreezeReport {
                    gone,
                    ..self.report(before, late)
                };
                (waiting, Ok(report))
            }
            Err(why) => (State::Stopped(stopped), Err(why)),
        }
    }

    /// Returns the process's flows that are not diverted yet: connections among the changed descriptors, and new
    /// datagram flows of its sockets since the last round.
    fn late(
        &mut self,
        last: &Last,
        newcomers: Vec<Flow>,
        gone: &[Flow],
    ) -> Result<Vec<FlowAt>, String> {
        self.addresses.check(&last.descriptors)?;
        if self.places.follow(&last.descriptors) {
            self.tell_sockets();
        }
        if !self.ways.copy {
            self.places.are_whole()?;
        }
        let mut late = self.addresses.connections(&last.descriptors);
        if let Some(flow) = late.iter().find(|flow| gone.contains(flow)) {
            return Err(format!(
                "a client has come again from the port of a connection that was just closed ({flow}); try again"
            ));
        }
        late.extend(newcomers.into_iter().filter(|flow| self.places.has(flow)));
        late.retain(|flow| !self.fenced.contains(flow));
        if late.is_empty() {
            return Ok(Vec::new());
        }
        let (reply, answer) = oneshot::channel();
        self.teller.tell(Told::Late { flows: late, reply });
        answer
            .blocking_recv()
            .map_err(|_| "the daemon ends".to_owned())
    }

    /// Sends memory, even if the descriptors cannot be saved; the acceptor takes it as another round. Returns the state
    /// of the tree, which is sent last.
    fn send_memory(&mut self, stopped: &mut StoppedTree) -> Result<Frozen, String> {
        self.send_tree(stopped.tree())?;
        self.steps.done("tree");
        if self.may_follow {
            return self.send_some_memory(stopped);
        }
        while let Some(pages) = stopped.read(PAGES_BYTES).map_err(text)? {
            self.outgoing.send_pages(pages)?;
        }
        self.steps.done("memory");
        let state = stopped.state().map_err(text)?;
        self.steps.done("state");
        Ok(state)
    }

    /// Sends memory with post-copy: some pages, and a list of the remaining ones. Returns the state of the tree.
    fn send_some_memory(&mut self, stopped: &mut StoppedTree) -> Result<Frozen, String> {
        self.serving = None;
        let state = stopped.state().map_err(text)?;
        let missing = stopped.leave_behind(&state);
        self.steps.done("state");
        while let Some(pages) = stopped.read(PAGES_BYTES).map_err(text)? {
            self.outgoing.send_pages(pages)?;
        }
        self.steps.done("memory");
        if !missing.is_empty() {
            self.outgoing
                .send(Kind::Missing, encode(&missing).map_err(text)?)?;
            let behind = Behind::new(&stopped.process_ids(), &missing).map_err(text)?;
            self.serving = Some(Serving::new((self.id, self.to), behind));
            self.follows.store(true, Ordering::Relaxed);
        }
        self.steps.done("missing");
        Ok(state)
    }

    /// Sends all remaining messages. The tree is stopped for good before its connections enter repair mode, and before
    /// the message that lets the acceptor run the process.
    fn send_rest(&mut self, stopped: &mut StoppedTree, last: Last) -> Result<(), String> {
        let descriptors = encode(&last.descriptors).map_err(text)?;
        self.outgoing.send(Kind::LastDescriptors, descriptors)?;
        // The original of a copy continues in any case, so it is not held.
        if !self.ways.copy {
            // Written before holding, so that a held process is never forgotten.
            if self.serving.is_some() {
                self.record.write(&Entry::Follows(stopped.process_ids()))?;
            }
            self.record
                .write(&Entry::Held(stopped.to_hold().map_err(text)?))?;
            stopped.hold().map_err(text)?;
        }
        self.steps.done("hold");
        let connections = self.connections.as_mut();
        connections.ok_or("nothing was copied")?.send(
            stopped,
            self.fenced.iter(),
            &mut self.outgoing,
        )?;
        self.steps.done("sockets");
        let state = encode(&last.state).map_err(text)?;
        self.outgoing.send(Kind::Frozen, state)?;
        if self.ways.verify {
            let digest = stopped.digest(&last.state).map_err(text)?;
            self.outgoing
                .send(Kind::Digest, encode(&digest).map_err(text)?)?;
            self.steps.done("checksums");
        }
        tracing::debug!(id = %self.id, steps = %self.steps, "frozen");
        Ok(())
    }

    /// Brings the acceptor up to date while the process still runs, repeatedly as long as far fewer connections change
    /// each time. Then diverts new data, so that all received data is answered and acknowledged when the process is
    /// stopped. Without post-copy, finally copies the pages dirtied meanwhile.
    fn catch_up(&mut self, tracker: &mut Tracker) -> Result<(), String> {
        let mut before = usize::MAX;
        while let Some(seen) = self.connections.as_mut().and_then(Connections::catch_up) {
            let changed = seen.states.len();
            self.send_seen(&seen)?;
            if changed < FEW || changed > before / 2 {
                break;
            }
            before = changed;
        }
        let follows = self.connections.as_ref();
        if !follows.is_some_and(Connections::follows_some) {
            return self.outgoing.send(Kind::Freezing, Vec::new());
        }
        self.turn_flows(Turn::Leaves)?;
        self.wait_for_quiet();
        if let Some(seen) = self.connections.as_mut().and_then(Connections::untold) {
            self.send_seen(&seen)?;
        }
        // Waits until the acceptor's connections have left repair mode.
        self.outgoing.send(Kind::Freezing, Vec::new())?;
        self.outgoing.taken()?;
        if self.may_follow {
            return Ok(());
        }
        self.touch_up(tracker, Instant::now()).map(drop)
    }

    fn send_seen(&mut self, seen: &States) -> Result<(), String> {
        tracing::debug!(id = %self.id, changed = seen.states.len(), "caught up");
        self.outgoing.send(Kind::Seen, connections::encode(seen)?)?;
        self.outgoing.taken()
    }

    /// Waits until no connection needs extraction or their number stops falling: some programs acknowledge with their
    /// next data.
    fn wait_for_quiet(&mut self) {
        let (began, mut before) = (Instant::now(), usize::MAX);
        while let Some(unseen) = self.connections.as_mut().and_then(Connections::unseen) {
            if unseen == 0 || unseen >= before || began.elapsed() >= QUIET_MAX {
                tracing::debug!(id = %self.id, unseen, "quiet");
                return;
            }
            before = unseen;
            std::thread::sleep(QUIET_AGAIN);
        }
    }

    /// Returns a report of the bytes sent and saved since the counts in `before`.
    fn report(&self, before: (u64, u64), late: Vec<FlowAt>) -> FreezeReport {
        let (sent, saved) = self.outgoing.counts();
        FreezeReport {
            bytes: sent - before.0,
            saved: saved - before.1,
            follows: self.serving.as_ref().map_or(0, Serving::bytes),
            late,
            ..FreezeReport::default()
        }
    }
}

impl Giving {
    /// Stops the tree at a time when its descriptors can be saved. Some cannot for moments, for example while unread
    /// data is queued that only the program can read. Data sent until the stop has left; later packets are held at the
    /// acceptor. Sends memory, and returns the other state with the datagram flows that began here since the last
    /// round.
    fn stop(&mut self, mut tracker: Tracker) -> Result<Still, Unstopped> {
        let reader = (self.connections.as_ref()).ok_or_else(|| "nothing was copied".to_owned());
        let reader = match reader.and_then(Connections::reader) {
            Ok(reader) => reader,
            Err(why) => {
                let tracker = Some(Box::new(tracker));
                return Err(Unstopped { tracker, why });
            }
        };
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
            self.steps.done("halt");
            let look = self.look(&mut stopped, &reader);
            let (passing, why) = match look {
                Ok((last, newcomers)) => return Ok((stopped, last, newcomers)),
                Err(failed) => failed,
            };
            // Set before the process resumes, because packets that it then sends must pass.
            let kept = self.turn_flows(Turn::Leaves);
            tracker = stopped.thaw().map_err(|error| Unstopped {
                tracker: None,
                why: text(error),
            })?;
            if !passing || kept.is_err() || began.elapsed() > STOP_MAX {
                let tracker = Some(Box::new(tracker));
                return Err(Unstopped { tracker, why });
            }
            std::thread::sleep(STOP_AGAIN);
            // The process has run, so the freeze begins anew.
            self.steps = Steps::begin();
        }
    }

    /// Sends memory of a stopped tree, has its packets diverted, and reads the remaining state, with the descriptors in
    /// parallel. An error says whether it may be temporary.
    fn look(
        &mut self,
        stopped: &mut StoppedTree,
        reader: &Reader,
    ) -> Result<(Last, Vec<Flow>), (bool, String)> {
        let for_good = |why: String| (false, why);
        let mut connections =
            (self.connections.take()).ok_or_else(|| for_good("nothing was copied".to_owned()))?;
        let found = self.look_at(stopped, &mut connections, reader);
        self.connections = Some(connections);
        found
    }

    fn look_at(
        &mut self,
        stopped: &mut StoppedTree,
        connections: &mut Connections,
        reader: &Reader,
    ) -> Result<(Last, Vec<Flow>), (bool, String)> {
        let for_good = |why: String| (false, why);
        let failed = |error: Error| {
            let for_good = matches!(error, Error::Gone(_) | Error::WouldNotStop(_));
            (!for_good, text(error))
        };
        reader.begin(stopped.describer().map_err(failed)?);
        // The event loop diverts the packets during the copy.
        let turning = self.ask_to_turn(Turn::Stands);
        let state = self.send_memory(stopped);
        let turned = answer(turning);
        self.steps.done("divert");
        connections.see(stopped);
        self.steps.done("look");
        let mut described = reader.found();
        for _ in 1..READS {
            if !matches!(described, Err(Error::Blocked(_))) {
                break;
            }
            std::thread::sleep(READ_AGAIN);
            reader.begin(stopped.describer().map_err(failed)?);
            described = reader.found();
        }
        let (state, newcomers) = state
            .and_then(|state| Ok((state, turned?)))
            .map_err(for_good)?;
        let descriptors = described.and_then(|described| connections.stopped(stopped, described));
        let descriptors = descriptors.map_err(failed)?;
        if !self.ways.copy {
            let waiting = stopped.unaccepted().map_err(failed)?;
            let may_follow = self.addresses.may_follow(&waiting);
            may_follow.map_err(|why| (true, why))?;
        }
        self.steps.done("descriptors");
        Ok((Last { descriptors, state }, newcomers))
    }

    /// Has the event loop set the forwarding rule for the process's packets, and waits until it is set. Returns the
    /// datagram flows that began here since the last round.
    fn turn_flows(&self, turn: Turn) -> Result<Vec<Flow>, String> {
        answer(self.ask_to_turn(turn))
    }

    /// Asks the event loop to set the forwarding rule, without waiting; [`answer`] waits.
    fn ask_to_turn(&self, turn: Turn) -> Turning {
        let (reply, answer) = oneshot::channel();
        let id = self.id;
        self.teller.tell(Told::Turns { id, turn, reply });
        answer
    }

    pub(super) fn tell_sockets(&self) {
        let (id, sockets) = (self.id, self.places.list());
        self.teller.tell(Told::Sockets { id, sockets });
    }
}

/// Waits until the event loop has set the forwarding rule.
fn answer(turning: Turning) -> Result<Vec<Flow>, String> {
    let answer = turning.blocking_recv();
    answer.unwrap_or_else(|_| Err("the daemon ends".to_owned()))
}

type Turning = oneshot::Receiver<Result<Vec<Flow>, String>>;

/// A stopped tree; see [`Giving::stop`].
type Still = (Box<StoppedTree>, Last, Vec<Flow>);

/// Failure to stop a tree.
struct Unstopped {
    /// Tracker of the running tree; `None` if it is no longer tracked.
    tracker: Option<Box<Tracker>>,
    why: String,
}
