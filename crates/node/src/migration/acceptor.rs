//! The acceptor's thread, which restores a process by means of a restorer process.

mod locks;
mod sockets;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use bytes::Bytes;
use holdfast_proto::migration::{Completion, Results, Token, Went};
use holdfast_sys::cgroup::{Group, Groups};
use holdfast_sys::priority::Hurry;
use holdfast_sys::process::acceptor::Restorer;
use holdfast_sys::process::digest::Digest;
use holdfast_sys::process::donor::Held;
use holdfast_sys::process::following::Following;
use holdfast_sys::process::image::{Clocks, Frozen, Missing, Tree, decode};
use holdfast_sys::process::judge::Conversation;
use holdfast_sys::process::sockets::Sockets;
use holdfast_sys::tcp_repair::WindowProbe;
use holdfast_wire::MoveId;
use rustix::event::EventfdFlags;

use self::locks::Handover;
use super::beginnings::{listen, offsets};
use super::connections;
use super::follow::Follower;
use super::pack::unpack;
use super::pieces::{Incoming, Kind, Message};
use super::places::servers;
use super::policy::Policy;
use super::records::{Entry, Record};
use super::residents::Came;
use super::steps::Steps;
use super::told::{Teller, Told};
use crate::dataplane::timeouts;

/// Command-line argument that starts `holdfastd` as a restorer.
pub const RESTORER: &str = "restorer";

/// Number of threads that restore sockets.
const RESTORERS: usize = 2;

/// Maximum number of reasons for a refusal.
const REFUSALS_MAX: usize = 64;

/// Path of this program, valid even if its file has been replaced.
const PROGRAM: &str = "/proc/self/exe";

/// Job of an acceptor's thread.
#[derive(Debug)]
pub(super) enum Job {
    Build(Token),
    /// Packets are held, so the process will soon be committed.
    Armed,
    Piece {
        kind: u8,
        more: bool,
        bytes: Bytes,
    },
    /// The donor violates the protocol.
    Refuse(String),
    Restore(Token, Entry),
    Go(Token),
    Discard(Token),
}

/// A move to this node, with its running thread.
pub(super) struct Acceptor {
    jobs: Sender<Job>,
    /// Event descriptor, readable if there is a job.
    wake: Arc<OwnedFd>,
}

impl Acceptor {
    /// Starts the thread of a move.
    pub(super) fn start(
        id: MoveId,
        policy: Policy,
        (record, way_back): (Record, PathBuf),
        (came, copies, group, hurries): (Came, bool, Option<(Groups, Group)>, bool),
        teller: Teller,
    ) -> std::io::Result<Acceptor> {
        let (jobs, inbox) = mpsc::channel();
        let wake = Arc::new(alarm()?);
        let taking = Taking {
            id,
            policy,
            record,
            way_back,
            teller,
            incoming: Incoming::default(),
            conversation: Conversation::default(),
            came,
            copies,
            group,
            restorer: None,
            held: None,
            sockets: None,
            building: None,
            handover: Handover::default(),
            problem: None,
            refusals: Vec::new(),
            is_judged: false,
            steps: Steps::begin(),
            hurries,
            following: None,
            wake: wake.clone(),
        };
        std::thread::Builder::new()
            .name("take".to_owned())
            .spawn(move || taking.run(&inbox))?;
        Ok(Acceptor { jobs, wake })
    }

    /// Starts a thread that receives the remaining pages of a process which an earlier daemon restored.
    pub(super) fn follow(follower: Follower) -> std::io::Result<Acceptor> {
        let (jobs, inbox) = mpsc::channel();
        let wake = Arc::new(alarm()?);
        let acceptor = Acceptor {
            jobs,
            wake: wake.clone(),
        };
        std::thread::Builder::new()
            .name("take".to_owned())
            .spawn(move || follower.run(&inbox, &wake))?;
        Ok(acceptor)
    }

    /// Passes a job to the thread. Returns false if the thread has ended.
    pub(super) fn job(&self, job: Job) -> bool {
        let sent = self.jobs.send(job).is_ok();
        // A write fails only if the descriptor is already readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        sent
    }
}

/// State of the thread.
struct Taking {
    id: MoveId,
    policy: Policy,
    record: Record,
    way_back: PathBuf,
    teller: Teller,
    incoming: Incoming,
    /// Messages received so far.
    conversation: Conversation,
    came: Came,
    /// True if the process is a copy whose original continues.
    copies: bool,
    /// Control group made for the process.
    group: Option<(Groups, Group)>,
    restorer: Option<Restorer>,
    /// Reference to the restorer, as written in the record.
    held: Option<Held>,
    sockets: Option<Sockets>,
    /// Token of the `Build` command, until the first tree image is restored.
    building: Option<Token>,
    /// Hand-over of locks that the donor has.
    handover: Handover,
    /// Reason for taking no more messages.
    problem: Option<String>,
    /// Reasons for refusing the process, until the verdict is sent.
    refusals: Vec<String>,
    is_judged: bool,
    /// Durations of the steps since the freeze was announced.
    steps: Steps,
    /// True if the thread is to run at real-time priority once packets are held.
    hurries: bool,
    /// Receiver of the remaining pages (post-copy).
    following: Option<Following>,
    wake: Arc<OwnedFd>,
}

impl Taking {
    /// Runs until the process runs or the move is given up. If the event loop ends first, a restorer that has the
    /// complete process waits for the next daemon; any other restorer ends with its channel.
    fn run(mut self, inbox: &Receiver<Job>) {
        // Set for this thread only, so processes that it starts do not inherit the priority.
        let mut hurry = None;
        while let Some(job) = self.next_job(inbox) {
            match job {
                // Raised before the freeze: later, other threads could run before this one sees the message that the
                // tree is stopped.
                Job::Armed => hurry = hurry.or_else(|| self.hurries.then(Hurry::begin)?),
                Job::Build(token) => self.building = Some(token),
                Job::Piece { kind, more, bytes } => self.piece(kind, more, bytes),
                Job::Restore(token, entry) if self.handover.is_awaited() => {
                    self.handover.restoring = Some((token, entry));
                }
                Job::Restore(token, entry) => self.restored(token, &entry),
                Job::Go(token) => {
                    let locked = self.take_locks(inbox);
                    let result = locked.and_then(|()| self.go());
                    let runs = result.is_ok();
                    let since = *result.as_ref().unwrap_or(&Instant::now());
                    let results = Results::Gone(result.map(|_| Went {
                        steps: self.steps.list(),
                        ..Went::default()
                    }));
                    let completion = Completion { token, results };
                    self.teller.done_since(Some(self.id), completion, since);
                    if runs {
                        drop(hurry);
                        return self.after(inbox);
                    }
                }
                Job::Refuse(why) => {
                    self.refuse(why.clone());
                    self.teller.tell(Told::Took {
                        id: self.id,
                        bytes: 0,
                        busy_us: 0,
                        problem: Some(why),
                    });
                }
                Job::Discard(token) => {
                    self.remove_made();
                    self.built(Err("it was given up".to_owned()));
                    self.record.remove();
                    return self.done(token, Results::Discarded);
                }
            }
        }
    }

    fn done(&self, token: Token, results: Results) {
        self.teller
            .done(Some(self.id), Completion { token, results });
    }

    /// Handles a piece. After a problem only its bytes are counted.
    fn piece(&mut self, kind: u8, more: bool, bytes: Bytes) {
        let (began, mut problem) = (Instant::now(), None);
        let count = bytes.len() as u64;
        if self.problem.is_none()
            && let Err(why) = self.take(kind, more, bytes)
        {
            problem = Some(why.clone());
            self.refuse(why);
        }
        self.teller.tell(Told::Took {
            id: self.id,
            bytes: count,
            busy_us: u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX),
            problem,
        });
    }

    /// Stops taking messages and removes the partial process at once, even if the donor continues to send.
    fn refuse(&mut self, why: String) {
        if self.problem.is_some() {
            return;
        }
        self.remove_made();
        self.built(Err(why.clone()));
        if let Some(token) = self.handover.give_up() {
            self.done(token, Results::Restored(Err(why.clone())));
        }
        self.problem = Some(why);
    }

    /// Ends the restorer with all its processes, and removes sockets, control group and the adoption socket.
    fn remove_made(&mut self) {
        (self.restorer, self.sockets) = (None, None);
        if let Some((groups, group)) = &self.group {
            groups.remove(group.path());
        }
        let _ = std::fs::remove_file(&self.way_back);
    }

    fn take(&mut self, kind: u8, more: bool, bytes: Bytes) -> Result<(), String> {
        let Some((kind, message)) = self.incoming.take(kind, more, bytes)? else {
            return Ok(());
        };
        self.conversation.take(kind.message())?;
        if !(self.refusals.is_empty() || is_judged_whole(kind)) {
            return Err(self.refusals.join("; "));
        }
        match kind {
            Kind::Freezing => self.steps = Steps::begin(),
            _ => self.steps.done("wait"),
        }
        let taken = self.take_message(kind, message);
        match kind {
            // The donor gets all refusals together, in the verdict.
            Kind::Tree | Kind::Descriptors if !self.is_judged => {
                taken.or_else(|why| self.object(why))?;
            }
            _ => taken?,
        }
        self.steps.done(kind.name());
        Ok(())
    }

    /// Adds a reason for refusing the process.
    fn object(&mut self, why: String) -> Result<(), String> {
        if self.refusals.len() >= REFUSALS_MAX {
            return Err("its donor does not ask whether it is taken".to_owned());
        }
        if !self.refusals.contains(&why) {
            self.refusals.push(why);
        }
        Ok(())
    }

    /// Judges the preview of the process's state, and sends the verdict to the donor.
    fn judge(&mut self, message: &[u8]) -> Result<(), String> {
        let outlook: Frozen = decode(message).map_err(text)?;
        if let Err(why) = self.policy.judge().frozen(&outlook) {
            self.object(why)?;
        } else if self.refusals.is_empty()
            && let Err(error) = self.there()?.outlook(&outlook)
        {
            self.object(text(error))?;
        }
        self.is_judged = true;
        let refusals = self.refusals.clone();
        self.teller.tell(Told::Judged {
            id: self.id,
            refusals,
        });
        if !self.refusals.is_empty() {
            self.remove_made();
            self.problem = Some(self.refusals.join("; "));
        }
        Ok(())
    }

    fn take_message(&mut self, kind: Kind, message: Message) -> Result<(), String> {
        if kind == Kind::Pages {
            return self.there()?.pages_message(&message.0).map_err(text);
        }
        let message = &message.whole();
        match kind {
            Kind::Tree => {
                let tree: Tree = decode(message).map_err(text)?;
                self.policy.judge().tree(&tree)?;
                if !self.refusals.is_empty() {
                    return Ok(());
                }
                self.restorer(tree.clocks)?.tree(&tree).map_err(text)?;
                self.built(Ok(()));
            }
            Kind::Pages | Kind::PackedPages => {
                let pages = unpack(message)?;
                self.there()?.pages_message(&[pages]).map_err(text)?;
            }
            Kind::Descriptors | Kind::LastDescriptors => self.descriptors(kind, message)?,
            Kind::Seen | Kind::Sockets | Kind::LastSockets => {
                self.give_states(kind, connections::decode(message)?)?;
            }
            Kind::Freezing => {
                if self.hurries {
                    self.there()?.hurry().map_err(text)?;
                }
                // The process still runs at the donor.
                if let Some(sockets) = &mut self.sockets {
                    let awake = sockets.awaken(1);
                    awake.map_err(|error| error.to_string())?;
                }
            }
            Kind::Frozen => {
                let frozen: Frozen = decode(message).map_err(text)?;
                self.policy.judge().frozen(&frozen)?;
                let contended = self.there()?.frozen(&frozen).map_err(text)?;
                self.contended(contended)?;
            }
            Kind::Outlook => self.judge(message)?,
            Kind::Locks => self.shared(message)?,
            Kind::Missing => {
                let missing: Missing = decode(message).map_err(text)?;
                self.there()?.missing(&missing).map_err(text)?;
            }
            Kind::Follows | Kind::Lost => return Err("memory followed too soon".to_owned()),
            Kind::Digest => {
                let original: Digest = decode(message).map_err(text)?;
                self.there()?.compare(&original).map_err(text)?;
            }
        }
        Ok(())
    }

    /// Completes the `Build` command with the result of the first tree image.
    fn built(&mut self, result: Result<(), String>) {
        if let Some(token) = self.building.take() {
            self.done(token, Results::Built(result));
        }
    }

    fn there(&mut self) -> Result<&mut Restorer, String> {
        let missing = || "memory came before the shape of its tree".to_owned();
        self.restorer.as_mut().ok_or_else(missing)
    }

    /// Returns the restorer; starts it for the first tree image.
    fn restorer(&mut self, clocks: Clocks) -> Result<&mut Restorer, String> {
        if self.restorer.is_none() {
            let back = listen(&self.way_back).map_err(|error| {
                let path = self.way_back.display();
                format!("{path}: {error}")
            })?;
            let offsets = offsets(clocks);
            let program = Path::new(PROGRAM);
            let restorer = Restorer::start_adoptable(program, &[RESTORER], offsets, &back);
            let mut restorer = restorer.map_err(text)?;
            restorer.rights(self.policy.rights()).map_err(text)?;
            let held = Held::of(restorer.pid()).map_err(text)?;
            self.record.write(&Entry::Restorer(held))?;
            self.held = Some(held);
            // The restored processes inherit the group from the restorer.
            if let Some((groups, group)) = &self.group {
                groups.make(group, restorer.pid())?;
            }
            self.restorer = Some(restorer);
        }
        self.there()
    }

    /// Completes the `Restore` command.
    fn restored(&mut self, token: Token, entry: &Entry) {
        let result = self.restore(entry);
        self.done(token, Results::Restored(result));
        self.settle();
    }

    /// Checks that the process is complete, and writes the record. The donor's messages all precede this job.
    fn restore(&mut self, entry: &Entry) -> Result<(), String> {
        if let Some(problem) = &self.problem {
            return Err(problem.clone());
        }
        if !self.conversation.is_complete() {
            return Err("not all of it came".to_owned());
        }
        let unfinished = self.sockets.as_ref().map(Sockets::unfinished);
        if let Some(unfinished) = unfinished.filter(|some| !some.is_empty()) {
            self.record.write(&Entry::Unfinished(unfinished))?;
        }
        self.steps.done("wait");
        self.record.write(entry)?;
        self.steps.done("record");
        Ok(())
    }

    /// Sets the deferred options of connections while the holder decides about the commit.
    fn settle(&mut self) {
        if let Some(sockets) = &mut self.sockets {
            sockets.settle_awake();
            let order = |(socket, longest_ms)| timeouts::order(socket, longest_ms);
            let ordered = sockets.capped().all(order);
            if !ordered {
                sockets.uncap();
            }
        }
    }

    /// Resumes the process. Returns the time from which it runs.
    fn go(&mut self) -> Result<Instant, String> {
        self.steps.done("commit");
        if let Some(sockets) = &mut self.sockets {
            let activated = sockets.activate(WindowProbe::No, RESTORERS);
            activated.map_err(|error| error.to_string())?;
        }
        self.steps.done("activate");
        // Closed before the process runs, because a descriptor that stays open here would keep a socket open that the
        // process closes.
        let servers = servers(self.sockets.as_ref());
        self.sockets.take().into_iter().for_each(Sockets::close);
        self.steps.done("close");
        self.following = self.there()?.follow().map_err(text)?;
        if self.following.is_some() {
            self.teller.tell(Told::Follows { id: self.id });
        }
        for lock in self.there()?.go().map_err(text)? {
            tracing::warn!(id = %self.id, lock, "a lock of a process that came is somebody else's here");
        }
        let runs = Instant::now();
        self.steps.done("go");
        let _ = std::fs::remove_file(&self.way_back);
        self.record.write(&Entry::Runs)?;
        self.steps.done("record");
        tracing::debug!(id = %self.id, steps = %self.steps, "it runs");
        if let (Some(restorer), Some(held)) = (self.restorer.take(), self.held) {
            self.teller.tell(Told::Runs {
                id: self.id,
                restorer,
                held,
                came: std::mem::take(&mut self.came),
                servers,
            });
        }
        Ok(runs)
    }
}

impl Taking {
    /// Continues after the process runs: restores timeouts and receives the remaining pages.
    fn after(mut self, inbox: &Receiver<Job>) {
        let give_back = || {
            std::thread::sleep(timeouts::AFTER);
            timeouts::give_back();
        };
        let Some(following) = self.following.take() else {
            return give_back();
        };
        std::thread::spawn(give_back);
        Follower::new(self.id, following, self.teller).run(inbox, &self.wake);
    }
}

/// Returns true if a message is part of the image that is judged as a whole before any memory is sent.
fn is_judged_whole(kind: Kind) -> bool {
    matches!(kind, Kind::Tree | Kind::Descriptors | Kind::Outlook)
}

/// Returns an event descriptor.
fn alarm() -> std::io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

fn text(error: holdfast_sys::process::error::Error) -> String {
    error.to_string()
}
