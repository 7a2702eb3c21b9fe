//! Moves of a tree between hosts. Each host is a network namespace.

use crate::pids::{outer_pid, wait_for_end};
use holdfast_sys::priority::Hurry;
use holdfast_sys::process::acceptor::{ClockOffsets, Restorer};
use holdfast_sys::process::donor::{StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::files::image::FileId;
use holdfast_sys::process::files::{LockStep, WantedLock};
use holdfast_sys::process::image::{Descriptors, decode, encode};
use holdfast_sys::process::rights::Rights;
use holdfast_sys::process::sockets::{SocketState, Sockets};
use holdfast_sys::tcp_repair::WindowProbe;
use holdfast_sys::tun::{Tun, VnetHeader};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for which a tracer's traces may remain in a process after it was left.
const TRACES_MAX: Duration = Duration::from_secs(20);
/// Longest time for which a temporary blocker may delay the stop of a tree.
const BLOCKED_MAX: Duration = Duration::from_secs(60);

/// A host, represented by a network namespace.
#[derive(Clone)]
pub struct Host {
    namespace: Arc<File>,
    reach: Arc<dyn Fn(bool) + Send + Sync>,
    hurries: bool,
    rights: Rights,
    /// True if the host has its own `/dev/shm`, as another machine has.
    has_memory: bool,
}

impl Host {
    /// Returns the host of the test itself.
    pub fn own() -> Self {
        let namespace = File::open("/proc/thread-self/ns/net").expect("opens");
        Self {
            namespace: Arc::new(namespace),
            reach: Arc::new(|_| {}),
            hurries: false,
            rights: Rights::All,
            has_memory: false,
        }
    }

    /// Gives the host an empty `/dev/shm` of its own.
    pub fn with_memory(self) -> Self {
        Self {
            has_memory: true,
            ..self
        }
    }

    /// Limits trees that move to this host to these rights.
    pub fn with_rights(self, rights: Rights) -> Self {
        Self { rights, ..self }
    }

    /// Makes moves to this host run ahead of ordinary threads.
    pub fn in_a_hurry(self) -> Self {
        Self {
            hurries: true,
            ..self
        }
    }

    /// Sets a function that directs packets to this host, or drops them.
    pub fn reached_by(self, reach: impl Fn(bool) + Send + Sync + 'static) -> Self {
        Self {
            reach: Arc::new(reach),
            ..self
        }
    }

    /// Creates a host with a loopback device.
    pub fn new() -> Self {
        crate::common::Namespace::new().run(Self::own)
    }

    pub fn enter(&self) {
        // SAFETY: no pointers are passed; only this thread moves.
        let outcome = unsafe { libc::setns(self.namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(outcome, 0);
    }
}

/// A running tree.
pub struct Tree {
    pub root: i32,
    pub host: Host,
    pub restorer: Option<Restorer>,
}

impl Tree {
    pub fn original(root: i32, host: &Host) -> Self {
        Self {
            root,
            host: host.clone(),
            restorer: None,
        }
    }

    /// Returns true if traces of a tracer remain in the root. A program that another test is about to start holds a
    /// copy of each descriptor of this process, including a `userfaultfd`, until its exec, so traces may last for a
    /// moment.
    pub fn has_traces(&self) -> bool {
        let began = Instant::now();
        while self.shows_traces() {
            if began.elapsed() > TRACES_MAX {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// Returns true if the root has a tracer, a stub or a `userfaultfd`.
    fn shows_traces(&self) -> bool {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", self.root)).expect("readable")
        };
        let watched = read("smaps")
            .lines()
            .any(|line| line.starts_with("VmFlags") && line.contains(" u"));
        // The stub is the only mapping of this size.
        let stub = read("maps").lines().any(|line| {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let number = |text| u64::from_str_radix(text, 16).expect("an address");
            range.is_some_and(|(start, end)| {
                line.contains("r-xp 00000000 00:00 0") && number(end) - number(start) == 4096
            }) && !line.contains("[v")
        });
        watched || stub || !read("status").contains("TracerPid:\t0")
    }

    /// Waits until the root has ended, and returns its exit code.
    pub fn wait(mut self, child: &mut Child, limit: Duration) -> i32 {
        let Some(restorer) = &mut self.restorer else {
            let began = Instant::now();
            loop {
                if let Some(status) = child.try_wait().expect("a child") {
                    return status.code().unwrap_or(-1);
                }
                assert!(began.elapsed() < limit, "exceeded time: it does not end");
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let status = restorer.ended(limit).expect("ends");
        if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status)
        } else {
            -libc::WTERMSIG(status)
        }
    }
}

impl Host {
    /// Starts a restorer on this host.
    fn restorer(&self) -> Restorer {
        if !self.has_memory {
            return restorer();
        }
        let apart = || {
            let nothing = std::ptr::null::<libc::c_void>();
            let private = libc::MS_REC | libc::MS_PRIVATE;
            // SAFETY: all texts end with a NUL; only this thread has other mounts afterwards.
            unsafe {
                assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
                let root = c"/".as_ptr();
                let mounted = libc::mount(
                    c"none".as_ptr(),
                    root,
                    std::ptr::null(),
                    private,
                    nothing.cast(),
                );
                assert_eq!(mounted, 0);
                let memory = c"tmpfs".as_ptr();
                let mounted = libc::mount(memory, c"/dev/shm".as_ptr(), memory, 0, nothing.cast());
                assert_eq!(mounted, 0);
            }
            restorer()
        };
        std::thread::scope(|scope| {
            let to = self.clone();
            let started = scope.spawn(move || {
                to.enter();
                apart()
            });
            started.join().expect("a thread")
        })
    }
}

pub fn restorer() -> Restorer {
    let program = Path::new(env!("CARGO_BIN_EXE_holdfast-restorer"));
    Restorer::start(program, &[], ClockOffsets::default()).expect("a restorer")
}

/// Moves a tree with three pre-copy rounds and a freeze.
pub fn migrate(tree: Tree, to: &Host) -> Result<Tree, Error> {
    let to = to.clone();
    let moving = move || migrate_until(tree, &to, Step::Released).map(|(tree, _)| tree);
    std::thread::spawn(moving).join().expect("a thread")
}

/// Step of a move, up to which a test lets a move run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    Watched,
    FirstShape,
    FirstPages,
    FirstDescriptors,
    SecondRound,
    Stopped,
    LastShape,
    LastPages,
    LastDescriptors,
    Sockets,
    State,
    Gone,
    Released,
}

impl Step {
    pub const BEFORE_COMMIT: [Self; 11] = [
        Self::Watched,
        Self::FirstShape,
        Self::FirstPages,
        Self::FirstDescriptors,
        Self::SecondRound,
        Self::Stopped,
        Self::LastShape,
        Self::LastPages,
        Self::LastDescriptors,
        Self::Sockets,
        Self::State,
    ];
}

/// The state after a partial move: the tree, at either host, and the objects in use when the move stopped.
pub type Left = (Tree, Option<Box<dyn std::any::Any>>);

/// Moves a tree up to a step. The calling thread is left in the tree's namespace.
pub fn migrate_until(tree: Tree, to: &Host, last: Step) -> Result<Left, Error> {
    let from = tree.host.clone();
    to.enter();
    let mut acceptor = Acceptor {
        host: to.clone(),
        restorer: to.restorer(),
        sockets: Sockets::new(1024)?,
    };
    acceptor.restorer.rights(&to.rights)?;
    from.enter();
    let mut tracker = Tracker::start(tree.root)?;
    let left = |tree, more: Box<dyn std::any::Any>| Ok((tree, Some(more)));
    let copied = copy(&mut tracker, &mut acceptor, &from, last)?;
    if !copied || last < Step::Stopped {
        return left(tree, Box::new((tracker, acceptor)));
    }
    let began = Instant::now();
    let _hurry = acceptor.hurry()?;
    if last >= Step::Sockets {
        (to.reach)(false);
    }
    let (mut stopped, descriptors, states) = stop(tracker, last)?;
    let halted = began.elapsed();
    if last >= Step::LastShape {
        acceptor.restorer.tree(stopped.tree())?;
    }
    while last >= Step::LastPages
        && let Some(pages) = stopped.read(1 << 20)?
    {
        acceptor.restorer.pages(pages)?;
    }
    let memory = began.elapsed();
    if last >= Step::LastDescriptors {
        acceptor.descriptors(&from, &descriptors, true)?;
    }
    if last >= Step::Sockets {
        acceptor.restore(&from, decoded(&states))?;
    }
    let sockets = began.elapsed();
    let mut contended = Vec::new();
    if last >= Step::State {
        let state = stopped.state()?;
        contended = acceptor.restorer.frozen(&state)?;
        let digest = decode(&encode(&stopped.digest(&state)?)?)?;
        acceptor.restorer.compare(&digest)?;
    }
    if last < Step::Gone {
        return left(tree, Box::new((stopped, acceptor)));
    }
    let state = began.elapsed();
    commit(stopped, &mut acceptor, &contended)?;
    let all = began.elapsed();
    eprintln!(
        "freeze: stopped {halted:?}, memory {memory:?}, descriptors {sockets:?}, state {state:?}, running {all:?}"
    );
    let moved = Tree {
        root: outer_pid(&acceptor.restorer, tree.root),
        host: to.clone(),
        restorer: Some(acceptor.restorer),
    };
    Ok((moved, None))
}

/// Runs three pre-copy rounds while the tree runs, up to the step `last`; returns true if all rounds were complete.
pub fn copy(
    tracker: &mut Tracker,
    acceptor: &mut Acceptor,
    from: &Host,
    last: Step,
) -> Result<bool, Error> {
    for round in 0..3 {
        let step = |step| if round == 0 { step } else { Step::SecondRound };
        if last < step(Step::FirstShape) {
            return Ok(false);
        }
        let mut round = tracker.round()?;
        acceptor.restorer.tree(&round.tree)?;
        if last < step(Step::FirstPages) {
            return Ok(false);
        }
        while let Some(pages) = tracker.read(&mut round, 1 << 20)? {
            acceptor.restorer.pages(pages)?;
        }
        if last < step(Step::FirstDescriptors) {
            return Ok(false);
        }
        acceptor.descriptors(from, &tracker.descriptors()?, false)?;
        for _ in 0..2 {
            let mut changed = tracker.touch_up();
            while let Some(pages) = tracker.read(&mut changed, 1 << 20)? {
                acceptor.restorer.pages(pages)?;
            }
        }
    }
    Ok(true)
}

/// Commits the move: the original gives its locks up and ends, and the copy runs.
fn commit(
    mut stopped: StoppedTree,
    acceptor: &mut Acceptor,
    contended: &[WantedLock],
) -> Result<(), Error> {
    // Both hosts share one file system here, and so one set of locks.
    let given = stopped.find_locks(contended)?;
    stopped.share_locks(given.clone())?;
    assert_eq!(acceptor.restorer.advance_locks(LockStep::Share)?, []);
    // The original cannot regain its locks while the acceptor shares them.
    assert_eq!(stopped.regain_locks()?, contended.is_empty());
    stopped.share_locks(given)?;
    for step in [LockStep::Rest, LockStep::First, LockStep::Last] {
        stopped.release_locks(step)?;
        assert_eq!(acceptor.restorer.advance_locks(step)?, [], "{step:?}");
    }
    let originals = stopped.pids();
    stopped.release()?;
    originals.into_iter().for_each(wait_for_end);
    (acceptor.host.reach)(true);
    // Packets sent meanwhile are lost.
    acceptor.sockets.activate(WindowProbe::Yes, 1)?;
    let unlocked = acceptor.restorer.go()?;
    assert!(
        unlocked.is_empty(),
        "locks that nobody else can have: {unlocked:?}"
    );
    Ok(())
}

pub type Stopped = (StoppedTree, Descriptors, BTreeMap<FileId, SocketState>);

/// Stops a tree, with further attempts while there are temporary blockers.
pub fn stop(mut tracker: Tracker, last: Step) -> Result<Stopped, Error> {
    let look = |stopped: &mut StoppedTree| {
        let found = stopped.descriptors()?;
        let states = if last >= Step::Sockets {
            stopped.extract(1, |_| false)?
        } else {
            BTreeMap::new()
        };
        Ok((found, states))
    };
    let deadline = Instant::now() + BLOCKED_MAX;
    let mut pause = Duration::from_millis(1);
    loop {
        let mut stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error)?;
        match look(&mut stopped) {
            Ok((found, states)) => return Ok((stopped, found, states)),
            Err(Error::Blocked(_) | Error::Socket(_)) if Instant::now() < deadline => {
                tracker = stopped.thaw()?;
            }
            Err(error) => return Err(error),
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// The receiving side of a move.
pub struct Acceptor {
    pub host: Host,
    pub restorer: Restorer,
    pub sockets: Sockets,
}

impl Acceptor {
    /// Lends both sides priority over ordinary threads, if this host asks for it.
    fn hurry(&mut self) -> Result<Option<Hurry>, Error> {
        if !self.host.hurries {
            return Ok(None);
        }
        self.restorer.hurry()?;
        Ok(Some(Hurry::begin().expect("root may")))
    }

    /// Restores descriptors; the calling thread returns to `from` afterwards.
    pub fn descriptors(
        &mut self,
        from: &Host,
        found: &Descriptors,
        last: bool,
    ) -> Result<(), Error> {
        let found: Descriptors = decode(&encode(found)?)?;
        self.host.enter();
        let prepared = self.sockets.prepare(&found.sockets, &found.gone);
        from.enter();
        prepared?;
        let fresh = self.sockets.fresh();
        if last {
            self.restorer.last_descriptors(&found, &fresh)?;
        } else {
            self.restorer.descriptors(&found, &fresh)?;
        }
        self.sockets.handed_over();
        Ok(())
    }

    /// Restores the state of sockets, and injects the packets that belong to it.
    pub fn restore(
        &mut self,
        from: &Host,
        states: BTreeMap<FileId, SocketState>,
    ) -> Result<(), Error> {
        self.host.enter();
        let packets = self.sockets.restore(states, 1);
        let packets = packets.inspect(|packets| {
            if !packets.is_empty() {
                let tun = Tun::open("hold").expect("a TUN device");
                for packet in packets {
                    tun.write(VnetHeader::default(), packet).expect("injected");
                }
            }
        });
        from.enter();
        packets?;
        Ok(())
    }
}

/// Encodes and decodes a value, as a transfer between hosts does.
pub fn decoded<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    postcard::from_bytes(&postcard::to_stdvec(value).expect("coded")).expect("decoded")
}
