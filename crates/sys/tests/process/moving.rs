//! Moving a tree between hosts, which here are network namespaces.

use holdfast_sys::process::acceptor::{ClockOffsets, Restorer};
use holdfast_sys::process::donor::Tracker;
use holdfast_sys::process::error::Error;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A network namespace.
#[derive(Clone)]
pub struct Host(Arc<File>);

impl Host {
    /// The test's own.
    pub fn own() -> Self {
        Self(Arc::new(
            File::open("/proc/thread-self/ns/net").expect("opens"),
        ))
    }

    /// A new one.
    pub fn new() -> Self {
        std::thread::spawn(|| {
            // SAFETY: no pointers are passed; only this thread moves.
            let outcome = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(outcome, 0, "needs root");
            Self::own()
        })
        .join()
        .expect("a namespace")
    }

    fn enter(&self) {
        // SAFETY: no pointers are passed; only this thread moves.
        let outcome = unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) };
        assert_eq!(outcome, 0);
    }
}

/// A running tree.
pub struct Tree {
    pub root: i32,
    host: Host,
    restorer: Option<Restorer>,
}

impl Tree {
    pub fn original(root: i32, host: &Host) -> Self {
        Self {
            root,
            host: host.clone(),
            restorer: None,
        }
    }

    /// Whether a tracer, a stub or a `userfaultfd` is left in the root.
    pub fn has_traces(&self) -> bool {
        let read = |name: &str| {
            std::fs::read_to_string(format!("/proc/{}/{name}", self.root)).expect("readable")
        };
        let watched = read("smaps")
            .lines()
            .any(|line| line.starts_with("VmFlags") && line.contains(" uw"));
        // The stub is the only mapping of that size.
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

    /// Waits for its root to end; gives the exit code.
    pub fn wait(mut self, child: &mut Child, limit: Duration) -> i32 {
        let Some(restorer) = &mut self.restorer else {
            return child.wait().expect("a child").code().unwrap_or(-1);
        };
        let status = restorer.ended(limit).expect("ends");
        if libc::WIFEXITED(status) {
            libc::WEXITSTATUS(status)
        } else {
            -libc::WTERMSIG(status)
        }
    }
}

pub fn restorer() -> Restorer {
    let program = Path::new(env!("CARGO_BIN_EXE_holdfast-restorer"));
    Restorer::start(program, &[], ClockOffsets::default()).expect("a restorer")
}

/// Moves a tree in three rounds and a freeze.
pub fn migrate(tree: Tree, to: &Host) -> Result<Tree, Error> {
    let to = to.clone();
    let moving = move || migrate_until(tree, &to, Step::Released).map(|(tree, _)| tree);
    std::thread::spawn(moving).join().expect("a thread")
}

/// How far a move goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    Watched,
    FirstShape,
    FirstPages,
    SecondRound,
    Stopped,
    LastShape,
    LastPages,
    State,
    Gone,
    Released,
}

impl Step {
    pub const BEFORE_COMMIT: [Self; 8] = [
        Self::Watched,
        Self::FirstShape,
        Self::FirstPages,
        Self::SecondRound,
        Self::Stopped,
        Self::LastShape,
        Self::LastPages,
        Self::State,
    ];
}

/// What is left of a move: the tree, wherever it is, and what was at work when it stopped.
pub type Left = (Tree, Option<Box<dyn std::any::Any>>);

/// Moves a tree from the calling thread, which is left in the tree's namespace, as far as a step.
pub fn migrate_until(tree: Tree, to: &Host, last: Step) -> Result<Left, Error> {
    to.enter();
    let mut restorer = restorer();
    tree.host.enter();
    let mut tracker = Tracker::start(tree.root)?;
    for step in [Step::FirstPages, Step::SecondRound, Step::SecondRound] {
        if last < step.min(Step::FirstShape) {
            return Ok((tree, Some(Box::new((tracker, restorer)))));
        }
        let mut round = tracker.round()?;
        restorer.tree(&round.tree)?;
        if last < step {
            return Ok((tree, Some(Box::new((tracker, restorer)))));
        }
        while let Some(pages) = tracker.read(&mut round, 1 << 20)? {
            restorer.pages(&pages)?;
        }
    }
    if last < Step::Stopped {
        return Ok((tree, Some(Box::new((tracker, restorer)))));
    }
    let began = Instant::now();
    let mut stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error)?;
    let halted = began.elapsed();
    if last >= Step::LastShape {
        restorer.tree(stopped.tree())?;
    }
    while last >= Step::LastPages
        && let Some(pages) = stopped.read(1 << 20)?
    {
        restorer.pages(&pages)?;
    }
    let memory = began.elapsed();
    if last >= Step::State {
        restorer.frozen(&stopped.state()?)?;
    }
    if last < Step::Gone {
        return Ok((tree, Some(Box::new((stopped, restorer)))));
    }
    let state = began.elapsed();
    restorer.go()?;
    let all = began.elapsed();
    eprintln!("freeze: stopped {halted:?}, memory {memory:?}, state {state:?}, running {all:?}");
    stopped.release()?;
    let moved = Tree {
        root: outer_pid(&restorer, tree.root),
        host: to.clone(),
        restorer: Some(restorer),
    };
    Ok((moved, None))
}

/// The root's PID as the test sees it: the restorer's child that had this PID before.
fn outer_pid(restorer: &Restorer, before: i32) -> i32 {
    let pid = restorer.pid();
    let children =
        std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("children");
    let children: Vec<i32> = children
        .split_whitespace()
        .map(|word| word.parse().expect("a PID"))
        .collect();
    assert_eq!(children.len(), 1, "{before} became {children:?}");
    children[0]
}
