//! An acceptor's thread: it puts a process together, by way of a restorer.

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

/// The word by which `holdfastd` knows that it is a restorer.
pub const RESTORER: &str = "restorer";

/// Threads that restore sockets.
const RESTORERS: usize = 2;

/// Most reasons why a process is not taken.
const REFUSALS_MAX: usize = 64;

/// This very program, also where its file has been replaced.
const PROGRAM: &str = "/proc/self/exe";

/// What an acceptor's thread is to do.
#[derive(Debug)]
pub(super) enum Job {
    Build(Token),
    /// Packets wait: it is about to come.
    Armed,
    Piece {
        kind: u8,
        more: bool,
        bytes: Bytes,
    },
    /// The donor does not keep to the rules.
    Refuse(String),
    Restore(Token, Entry),
    Go(Token),
    Discard(Token),
}

/// A move that this node takes, while its thread runs.
pub(super) struct Acceptor {
    jobs: Sender<Job>,
    /// Readable when there is a job.
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

    /// Starts a thread for the memory of a process that an earlier daemon had put together.
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

    /// Gives the thread something to do; false if it has ended.
    pub(super) fn job(&self, job: Job) -> bool {
        let sent = self.jobs.send(job).is_ok();
        // It fails only where it is readable already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        sent
    }
}

/// What the thread has.
struct Taking {
    id: MoveId,
    policy: Policy,
    record: Record,
    way_back: PathBuf,
    teller: Teller,
    incoming: Incoming,
    /// What has come so far.
    conversation: Conversation,
    came: Came,
    /// It is a copy; its original goes on.
    copies: bool,
    /// The control group that is made for it.
    group: Option<(Groups, Group)>,
    restorer: Option<Restorer>,
    /// The same, as it is written down.
    held: Option<Held>,
    sockets: Option<Sockets>,
    /// Who waits until the first shape of the tree was taken.
    building: Option<Token>,
    /// Locks that the donor has.
    handover: Handover,
    /// Why no more is taken.
    problem: Option<String>,
    /// Why the process is not taken, until the verdict on it.
    refusals: Vec<String>,
    is_judged: bool,
    /// Since the tree was about to stand still.
    steps: Steps,
    /// Ahead of ordinary threads since its packets wait.
    hurries: bool,
    /// Memory that follows.
    following: Option<Following>,
    wake: Arc<OwnedFd>,
}

impl Taking {
    /// Until the process runs or the move was given up. If the event loop ends first, a restorer that has everything
    /// waits for the next daemon; any other ends with its channel.
    fn run(mut self, inbox: &Receiver<Job>) {
        // The thread's own, and so not among what it was started with.
        let mut hurry = None;
        while let Some(job) = self.next_job(inbox) {
            match job {
                // Later is too late: others would run before what says that it stands still is seen.
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

    /// Takes a piece. After a problem only its bytes are counted.
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

    /// Takes no more, and removes what was made: nothing waits for a donor that sends what it may not.
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

    /// Ends the restorer with all its processes, and takes sockets, control group and the way back away.
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
            // The donor is told of all of them together.
            Kind::Tree | Kind::Descriptors if !self.is_judged => {
                taken.or_else(|why| self.object(why))?;
            }
            _ => taken?,
        }
        self.steps.done(kind.name());
        Ok(())
    }

    /// Notes why the process is not taken.
    fn object(&mut self, why: String) -> Result<(), String> {
        if self.refusals.len() >= REFUSALS_MAX {
            return Err("its donor does not ask whether it is taken".to_owned());
        }
        if !self.refusals.contains(&why) {
            self.refusals.push(why);
        }
        Ok(())
    }

    /// Looks at the state that the process will have, and says why the process is not taken, or that it is.
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
                // The process runs still.
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

    /// The first shape of the tree was taken, or cannot be.
    fn built(&mut self, result: Result<(), String>) {
        if let Some(token) = self.building.take() {
            self.done(token, Results::Built(result));
        }
    }

    fn there(&mut self) -> Result<&mut Restorer, String> {
        let missing = || "memory came before the shape of its tree".to_owned();
        self.restorer.as_mut().ok_or_else(missing)
    }

    /// The restorer, which is started for the first tree.
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
            // Its processes will be born there.
            if let Some((groups, group)) = &self.group {
                groups.make(group, restorer.pid())?;
            }
            self.restorer = Some(restorer);
        }
        self.there()
    }

    /// All of it is there, as far as that can be.
    fn restored(&mut self, token: Token, entry: &Entry) {
        let result = self.restore(entry);
        self.done(token, Results::Restored(result));
        self.settle();
    }

    /// All messages came before this job.
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

    /// What nothing waits for, while the holder decides: options of connections that could not be set before.
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

    /// Lets it run; since when it does.
    fn go(&mut self) -> Result<Instant, String> {
        self.steps.done("commit");
        if let Some(sockets) = &mut self.sockets {
            let activated = sockets.activate(WindowProbe::No, RESTORERS);
            activated.map_err(|error| error.to_string())?;
        }
        self.steps.done("activate");
        // Before it runs: what it closes is to be closed.
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
    /// It runs.
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

/// Whether this is a part of what is judged as a whole before any memory comes.
fn is_judged_whole(kind: Kind) -> bool {
    matches!(kind, Kind::Tree | Kind::Descriptors | Kind::Outlook)
}

/// Something that can be made readable.
fn alarm() -> std::io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

fn text(error: holdfast_sys::process::error::Error) -> String {
    error.to_string()
}
