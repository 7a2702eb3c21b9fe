//! Moves of a tree between hosts. Each host is a network namespace.

use crate::pids::{outer_pid, wait_for_end};
use holdfast_checkpoint::acceptor::{ClockOffsets, Restorer};
use holdfast_checkpoint::donor::{StoppedTree, TreeTracker};
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::file_rights::FileRights;
use holdfast_checkpoint::files::image::FileId;
use holdfast_checkpoint::files::{ContendedLock, LockHandoverStep};
use holdfast_checkpoint::image::{DescriptorUpdate, TreeLayout, decode, encode};
use holdfast_checkpoint::sockets::{RestoredSockets, SocketState};
use holdfast_sys::priority::RealtimeGuard;
use holdfast_sys::tun::{Tun, VnetHeader};
use holdfast_tcp_repair::WindowProbe;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time for which a tracer's traces may remain in a process after it was left.
const TRACES_WAIT_MAX: Duration = Duration::from_secs(20);
/// Longest time for which a temporary blocker may delay the stop of a tree.
const BLOCKED_WAIT_MAX: Duration = Duration::from_secs(60);

/// A host, represented by a network namespace.
#[derive(Clone)]
pub struct Host {
    namespace: Arc<File>,
    direct_packets: Arc<dyn Fn(bool) + Send + Sync>,
    is_realtime: bool,
    rights: FileRights,
    /// True if the host has its own `/dev/shm`, as another machine has.
    has_own_shm: bool,
}

impl Host {
    /// Returns the host of the test itself.
    pub fn local() -> Self {
        let namespace = File::open("/proc/thread-self/ns/net").expect("opens");
        Self {
            namespace: Arc::new(namespace),
            direct_packets: Arc::new(|_| {}),
            is_realtime: false,
            rights: FileRights::Root,
            has_own_shm: false,
        }
    }

    /// Gives the host an empty `/dev/shm` of its own.
    pub fn with_own_shm(self) -> Self {
        Self {
            has_own_shm: true,
            ..self
        }
    }

    /// Limits trees that move to this host to these rights.
    pub fn with_rights(self, rights: FileRights) -> Self {
        Self { rights, ..self }
    }

    /// Makes moves to this host run ahead of ordinary threads.
    pub fn with_realtime(self) -> Self {
        Self {
            is_realtime: true,
            ..self
        }
    }

    /// Sets a function that directs packets to this host, or drops them.
    pub fn with_packet_director(self, reach: impl Fn(bool) + Send + Sync + 'static) -> Self {
        Self {
            direct_packets: Arc::new(reach),
            ..self
        }
    }

    /// Creates a host with a loopback device.
    pub fn new() -> Self {
        holdfast_lab::testing::TestNamespace::new().run(Self::local)
    }

    pub fn enter(&self) {
        // SAFETY: no pointers are passed; only this thread moves.
        let outcome = unsafe { libc::setns(self.namespace.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(outcome, 0);
    }
}

/// A process tree that runs at a host, original or restored.
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
        let started = Instant::now();
        while self.has_traces_at_once() {
            if started.elapsed() > TRACES_WAIT_MAX {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// Returns true if the root has a tracer, a stub or a `userfaultfd`.
    fn has_traces_at_once(&self) -> bool {
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
            let started = Instant::now();
            loop {
                if let Some(status) = child.try_wait().expect("a child") {
                    return status.code().unwrap_or(-1);
                }
                assert!(
                    started.elapsed() < limit,
                    "exceeded time: the program does not end"
                );
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let status = restorer.wait_for_end(limit).expect("ends");
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
        if !self.has_own_shm {
            return restorer();
        }
        let separate_namespaces = || {
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
                let shm_mounted =
                    libc::mount(memory, c"/dev/shm".as_ptr(), memory, 0, nothing.cast());
                assert_eq!(shm_mounted, 0);
            }
            restorer()
        };
        std::thread::scope(|scope| {
            let to = self.clone();
            let started = scope.spawn(move || {
                to.enter();
                separate_namespaces()
            });
            started.join().expect("a thread")
        })
    }
}

pub fn restorer() -> Restorer {
    let restorer_path = Path::new(env!("CARGO_BIN_EXE_holdfast-restorer"));
    Restorer::start(restorer_path, &[], ClockOffsets::default()).expect("a restorer")
}

/// Moves a tree with three pre-copy rounds and a freeze.
pub fn migrate(tree: Tree, to: &Host) -> Result<Tree, Error> {
    let to = to.clone();
    let moving = move || migrate_until(tree, &to, MoveStep::Released).map(|(tree, _)| tree);
    std::thread::spawn(moving).join().expect("a thread")
}

/// Step of a move, up to which a test lets a move run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MoveStep {
    TrackerStarted,
    FirstMappings,
    FirstPages,
    FirstDescriptors,
    SecondRound,
    Stopped,
    LastMappings,
    LastPages,
    LastDescriptors,
    Sockets,
    State,
    OriginalEnded,
    Released,
}

impl MoveStep {
    pub const BEFORE_COMMIT: [Self; 11] = [
        Self::TrackerStarted,
        Self::FirstMappings,
        Self::FirstPages,
        Self::FirstDescriptors,
        Self::SecondRound,
        Self::Stopped,
        Self::LastMappings,
        Self::LastPages,
        Self::LastDescriptors,
        Self::Sockets,
        Self::State,
    ];
}

/// The state after a partial move: the tree, at either host, and the objects in use when the move stopped.
pub type PartialMove = (Tree, Option<Box<dyn std::any::Any>>);

/// Moves a tree up to a step. The calling thread is left in the tree's namespace.
pub fn migrate_until(tree: Tree, to: &Host, last_step: MoveStep) -> Result<PartialMove, Error> {
    let from = tree.host.clone();
    to.enter();
    let mut acceptor = AcceptorSide {
        host: to.clone(),
        restorer: to.restorer(),
        sockets: RestoredSockets::new(1024)?,
    };
    acceptor.restorer.set_rights(&to.rights)?;
    from.enter();
    let mut tracker = TreeTracker::start(tree.root)?;
    let partial = |tree, more: Box<dyn std::any::Any>| Ok((tree, Some(more)));
    let copied = precopy(&mut tracker, &mut acceptor, &from, last_step)?;
    if !copied || last_step < MoveStep::Stopped {
        return partial(tree, Box::new((tracker, acceptor)));
    }
    let started = Instant::now();
    let _guard = acceptor.raise_priority()?;
    if last_step >= MoveStep::Sockets {
        (to.direct_packets)(false);
    }
    let (mut stopped, descriptors, states) = stop(tracker, last_step)?;
    let stop_time = started.elapsed();
    if last_step >= MoveStep::LastMappings {
        acceptor.restorer.update_tree(stopped.tree())?;
    }
    while last_step >= MoveStep::LastPages
        && let Some(pages) = stopped.read_pages(1 << 20)?
    {
        acceptor.restorer.write_pages(pages)?;
    }
    let memory_time = started.elapsed();
    if last_step >= MoveStep::LastDescriptors {
        acceptor.descriptors(&from, &descriptors, true)?;
    }
    if last_step >= MoveStep::Sockets {
        acceptor.restore(&from, round_trip_encoded(&states))?;
    }
    let socket_time = started.elapsed();
    let mut contended = Vec::new();
    if last_step >= MoveStep::State {
        let state = stopped.read_state()?;
        contended = acceptor.restorer.restore_state(&state)?;
        let digest = decode(&encode(&stopped.digest(&state)?)?)?;
        let compared = acceptor.restorer.compare_digest(&digest);
        if compared.is_err() {
            let copy = outer_pid(&acceptor.restorer, tree.root);
            print_memory_differences((tree.root, copy), stopped.tree());
        }
        compared?;
    }
    if last_step < MoveStep::OriginalEnded {
        return partial(tree, Box::new((stopped, acceptor)));
    }
    let state_time = started.elapsed();
    commit(stopped, &mut acceptor, &contended)?;
    let total_time = started.elapsed();
    eprintln!(
        "freeze: stopped {stop_time:?}, memory {memory_time:?}, descriptors {socket_time:?}, state {state_time:?}, running {total_time:?}"
    );
    let moved = Tree {
        root: outer_pid(&acceptor.restorer, tree.root),
        host: to.clone(),
        restorer: Some(acceptor.restorer),
    };
    Ok((moved, None))
}

/// Prints where the memory of a stopped root differs from its copy's.
fn print_memory_differences((original, copy): (i32, i32), tree: &TreeLayout) {
    let open = |pid| File::open(format!("/proc/{pid}/mem")).expect("opens");
    let (original, copy) = (open(original), open(copy));
    let page = |memory: &File, at: u64| {
        let mut page = vec![0; 4096];
        memory.read_exact_at(&mut page, at).map(|()| page)
    };
    for at in (tree.processes[0].mappings.iter())
        .flat_map(|mapping| (mapping.start..mapping.end).step_by(4096))
    {
        let (Ok(original), Ok(copy)) = (page(&original, at), page(&copy, at)) else {
            continue;
        };
        let pairs = original.iter().zip(&copy).zip(at..);
        let differing: Vec<_> = pairs.filter(|((one, other), _)| one != other).collect();
        if !differing.is_empty() {
            eprintln!(
                "{} bytes of page {at:x} differ: {:x?}",
                differing.len(),
                &differing[..differing.len().min(64)]
            );
        }
    }
}

/// Runs three pre-copy rounds while the tree runs, up to the step `last`; returns true if all rounds were complete.
pub fn precopy(
    tracker: &mut TreeTracker,
    acceptor: &mut AcceptorSide,
    from: &Host,
    last_step: MoveStep,
) -> Result<bool, Error> {
    for round in 0..3 {
        let step = |step| {
            if round == 0 {
                step
            } else {
                MoveStep::SecondRound
            }
        };
        if last_step < step(MoveStep::FirstMappings) {
            return Ok(false);
        }
        let mut round = tracker.next_round()?;
        acceptor.restorer.update_tree(&round.tree)?;
        if last_step < step(MoveStep::FirstPages) {
            return Ok(false);
        }
        while let Some(pages) = tracker.read_pages(&mut round, 1 << 20)? {
            acceptor.restorer.write_pages(pages)?;
        }
        if last_step < step(MoveStep::FirstDescriptors) {
            return Ok(false);
        }
        acceptor.descriptors(from, &tracker.read_descriptors()?, false)?;
        for _ in 0..2 {
            let mut changed = tracker.scan_delivered_pages();
            while let Some(pages) = tracker.read_pages(&mut changed, 1 << 20)? {
                acceptor.restorer.write_pages(pages)?;
            }
        }
    }
    Ok(true)
}

/// Commits the move: the original gives its locks up and ends, and the copy runs.
fn commit(
    mut stopped: StoppedTree,
    acceptor: &mut AcceptorSide,
    contended: &[ContendedLock],
) -> Result<(), Error> {
    // Both hosts share one file system here, and so one set of locks.
    let given_locks = stopped.find_locks(contended)?;
    stopped.begin_handover(given_locks.clone())?;
    assert_eq!(
        acceptor
            .restorer
            .advance_locks(LockHandoverStep::ShareRemainder)?,
        []
    );
    // The original cannot regain its locks while the acceptor shares them.
    assert_eq!(stopped.regain_locks()?, contended.is_empty());
    stopped.begin_handover(given_locks)?;
    for step in [
        LockHandoverStep::MoveRemainder,
        LockHandoverStep::ShareFirstByte,
        LockHandoverStep::MoveFirstByte,
    ] {
        stopped.advance_handover(step)?;
        assert_eq!(acceptor.restorer.advance_locks(step)?, [], "{step:?}");
    }
    let originals = stopped.pids();
    stopped.release()?;
    originals.into_iter().for_each(wait_for_end);
    (acceptor.host.direct_packets)(true);
    // Packets sent meanwhile are lost.
    acceptor.sockets.activate(WindowProbe::Always, 1)?;
    let unlocked = acceptor.restorer.resume()?;
    assert!(unlocked.is_empty(), "file locks were lost: {unlocked:?}");
    Ok(())
}

pub type StoppedState = (StoppedTree, DescriptorUpdate, BTreeMap<FileId, SocketState>);

/// Stops a tree, with further attempts while there are temporary blockers.
pub fn stop(mut tracker: TreeTracker, last_step: MoveStep) -> Result<StoppedState, Error> {
    let read_state = |stopped: &mut StoppedTree| {
        let descriptors = stopped.read_descriptors()?;
        let states = if last_step >= MoveStep::Sockets {
            stopped.extract_sockets(1, |_| false)?
        } else {
            BTreeMap::new()
        };
        Ok((descriptors, states))
    };
    let deadline = Instant::now() + BLOCKED_WAIT_MAX;
    let mut pause = Duration::from_millis(1);
    loop {
        let mut stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error)?;
        match read_state(&mut stopped) {
            Ok((descriptors, states)) => return Ok((stopped, descriptors, states)),
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
pub struct AcceptorSide {
    pub host: Host,
    pub restorer: Restorer,
    pub sockets: RestoredSockets,
}

impl AcceptorSide {
    /// Lends both sides priority over ordinary threads, if this host asks for it.
    fn raise_priority(&mut self) -> Result<Option<RealtimeGuard>, Error> {
        if !self.host.is_realtime {
            return Ok(None);
        }
        self.restorer.raise_priority()?;
        Ok(Some(RealtimeGuard::begin().expect("root may")))
    }

    /// Restores descriptors; the calling thread returns to `from` afterwards.
    pub fn descriptors(
        &mut self,
        from: &Host,
        sent: &DescriptorUpdate,
        last: bool,
    ) -> Result<(), Error> {
        let received: DescriptorUpdate = decode(&encode(sent)?)?;
        self.host.enter();
        let prepared = self.sockets.prepare(&received.sockets, &received.removed);
        from.enter();
        prepared?;
        let new_sockets = self.sockets.new_sockets();
        if last {
            self.restorer.finish_descriptors(&received, &new_sockets)?;
        } else {
            self.restorer.update_descriptors(&received, &new_sockets)?;
        }
        self.sockets.mark_handed_over();
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
pub fn round_trip_encoded<T: serde::Serialize + serde::de::DeserializeOwned>(value: &T) -> T {
    postcard::from_bytes(&postcard::to_stdvec(value).expect("coded")).expect("decoded")
}
