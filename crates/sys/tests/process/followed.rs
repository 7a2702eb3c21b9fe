//! Post-copy: the remaining pages are sent after the process resumes at the acceptor.

use crate::moving::{self, Acceptor, Host, Step, Tree};
use crate::program::Program;
use holdfast_sys::process::donor::{Behind, StoppedTree, Tracker};
use holdfast_sys::process::error::Error;
use holdfast_sys::process::following::Following;
use holdfast_sys::process::image::{Missing, decode, encode};
use holdfast_sys::process::sockets::Sockets;
use holdfast_sys::tcp_repair::WindowProbe;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Number of bytes sent at a time in addition to requested pages.
const STEP: u64 = 64 << 10;

/// Bytes sent by post-copy.
#[derive(Debug, Default)]
struct Counts {
    missing: u64,
    /// Bytes of requested pages and their neighbours.
    on_demand: u64,
    pushed: u64,
}

/// Both ends of a post-copy transfer.
struct Link {
    behind: Behind,
    following: Option<Following>,
    stopped: StoppedTree,
    counts: Counts,
    never: OwnedFd,
}

impl Link {
    fn new(stopped: StoppedTree, missing: &Missing, following: Following) -> Result<Self, Error> {
        let missing: Missing = decode(&encode(missing)?)?;
        let counts = Counts {
            missing: missing.bytes(),
            ..Counts::default()
        };
        let behind = Behind::new(&stopped.process_ids(), &missing)?;
        let (never, other) = std::io::pipe().expect("a pipe");
        std::mem::forget(other);
        let following = Some(following);
        Ok(Self {
            behind,
            following,
            stopped,
            counts,
            never: never.into(),
        })
    }

    /// Sends requested pages, and with `push` other pages too; returns true if all pages have arrived.
    fn serve(&mut self, push: bool) -> Result<bool, Error> {
        let following = self.following.as_mut().expect("goes on");
        let limit = if push {
            Duration::ZERO
        } else {
            Duration::from_millis(1)
        };
        following.wait(self.never.as_fd(), limit);
        let wants = following.look()?;
        wants.into_iter().for_each(|want| self.behind.want(want));
        loop {
            let step = if push { STEP } else { 0 };
            let Some((pages, wanted)) = self.behind.next(step)? else {
                return Ok(following.is_complete());
            };
            if pages.runs.is_empty() {
                break;
            }
            let counts = &mut self.counts;
            let count = if wanted {
                &mut counts.on_demand
            } else {
                &mut counts.pushed
            };
            *count += pages.bytes.len() as u64;
            let (mut message, content) = pages.into_message()?;
            message.extend(content);
            following.fill(&message)?;
            if push {
                break;
            }
        }
        Ok(following.is_complete())
    }

    /// Completes the transfer: the original ends.
    fn complete(self) -> Result<Counts, Error> {
        self.following.expect("goes on").complete()?;
        self.stopped.release()?;
        Ok(self.counts)
    }

    /// Ends the process, since its memory cannot be completed.
    fn give_up(&mut self) {
        self.following.take().expect("goes on").give_up();
    }

    fn has_ended(&self) -> bool {
        self.following.as_ref().is_none_or(Following::has_ended)
    }

    /// Replaces the donor's side by a new one that only knows the acceptor's list of missing pages.
    fn begin_again(&mut self) {
        let lacks = self.following.as_ref().expect("goes on").missing();
        let known = Missing::default();
        self.behind = Behind::new(&self.stopped.process_ids(), &known).expect("they are there");
        self.behind.lacks(&Missing::of(&lacks));
    }
}

/// Moves a tree until it runs, with pages still missing. The restorer lives as long as the link.
fn migrate_ahead(tree: Tree, to: &Host) -> Result<(Tree, Link), Error> {
    let from = tree.host.clone();
    to.enter();
    let mut acceptor = Acceptor {
        host: to.clone(),
        restorer: moving::restorer(),
        sockets: Sockets::new(1024)?,
    };
    from.enter();
    let mut tracker = Tracker::start(tree.root)?;
    moving::copy(&mut tracker, &mut acceptor, &from, Step::Released)?;
    let (mut stopped, descriptors, states) = moving::stop(tracker, Step::Released)?;
    let state = stopped.state()?;
    let missing = stopped.leave_behind(&state);
    acceptor.restorer.tree(stopped.tree())?;
    while let Some(pages) = stopped.read(1 << 20)? {
        acceptor.restorer.pages(pages)?;
    }
    acceptor.restorer.missing(&missing)?;
    acceptor.descriptors(&from, &descriptors, true)?;
    acceptor.restore(&from, moving::decoded(&states))?;
    acceptor.restorer.frozen(&state)?;
    acceptor.sockets.activate(WindowProbe::Yes, 1)?;
    let following = acceptor.restorer.follow()?.expect("it lacks memory");
    acceptor.restorer.go()?;
    let link = Link::new(stopped, &missing, following)?;
    let moved = Tree {
        root: crate::pids::outer_pid(&acceptor.restorer, tree.root),
        host: to.clone(),
        restorer: Some(acceptor.restorer),
    };
    Ok((moved, link))
}

/// Sends requested pages until the program has written a file named `word`.
fn serve_until(link: &mut Link, program: &Program, word: &str) {
    while !program.said(word) {
        link.serve(false).expect("serves");
    }
}

/// Runs `work` on a thread of its own, since a tracer is a thread, and this thread changes namespaces.
fn alone<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().expect("a thread"))
}

/// Moves a program that checks all its memory, and uses it in every possible way while pages are missing.
#[test]
fn memory_follows_a_program() {
    follows(Program::start("heap"));
}

#[test]
fn memory_follows_a_program_without_privileges() {
    follows(Program::start_with("heap", &["nobody"]));
}

fn follows(program: Program) {
    let moved = alone(|| {
        let (moved, mut link) =
            migrate_ahead(program.tree(&Host::own()), &Host::new()).expect("moves");
        let missing = link.counts.missing;
        assert!(missing > 16 << 20, "{missing} bytes are missing");
        program.leave("moved");
        serve_until(&mut link, &program, "begins");
        // Only requested pages are sent from here on.
        program.leave("alone");
        serve_until(&mut link, &program, "did");
        while !link.serve(true).expect("serves") {}
        let counts = link.complete().expect("completes");
        eprintln!("{counts:?}");
        assert!(counts.on_demand > 1 << 20, "{counts:?}");
        moved
    });
    program.goes_on();
    assert!(!moved.has_traces());
    // A completed process moves like any other.
    let back = moving::migrate(moved, &Host::own()).expect("moves back");
    program.goes_on();
    program.ends_well(back);
}

/// Missing pages of stacks are not searched for return addresses in the code of another kernel's vDSO.
#[test]
fn memory_follows_a_program_to_another_kernel() {
    let program = Program::start_with("clock", &["another"]);
    let moved = alone(|| {
        let (moved, mut link) =
            migrate_ahead(program.tree(&Host::own()), &Host::new()).expect("moves");
        while !link.serve(true).expect("serves") {}
        let counts = link.complete().expect("completes");
        assert!(counts.missing > 0);
        moved
    });
    program.goes_on();
    program.ends_well(moved);
}

/// Runs a fault that ends the program at the acceptor while pages are missing.
fn ends(end: impl FnOnce(&Tree, &mut Link) + Send) {
    let program = Program::start("heap");
    alone(|| {
        let (moved, mut link) =
            migrate_ahead(program.tree(&Host::own()), &Host::new()).expect("moves");
        for _ in 0..100 {
            link.serve(true).expect("serves");
        }
        end(&moved, &mut link);
        crate::common::wait_for("the copy to end", || link.has_ended());
        assert!(!program.said("verdict"), "it went on with other memory");
        assert!(!std::path::Path::new(&format!("/proc/{}", moved.root)).exists());
        link.stopped.roll_back().expect("only a test may");
    });
    // The program at the acceptor wrote only to its memory, so the original can go on.
    program.goes_on();
    let tree = program.tree(&Host::own());
    program.ends_well(tree);
}

#[test]
fn a_program_dies_with_the_restorer_that_its_memory_follows_to() {
    ends(|moved, _| {
        let restorer = moved.restorer.as_ref().expect("there").pid();
        // SAFETY: no pointers are passed; the process is this test's own.
        unsafe { libc::kill(restorer, libc::SIGKILL) };
    });
}

#[test]
fn a_program_whose_memory_cannot_come_is_ended() {
    ends(|_, link| link.give_up());
}

/// A new daemon serves pages from the original that its predecessor left stopped, without the predecessor's state.
#[test]
fn another_serves_what_is_missing() {
    let program = Program::start("heap");
    let moved = alone(|| {
        let (moved, mut link) =
            migrate_ahead(program.tree(&Host::own()), &Host::new()).expect("moves");
        for _ in 0..50 {
            link.serve(true).expect("serves");
        }
        link.begin_again();
        while !link.serve(true).expect("serves") {}
        link.complete().expect("completes");
        moved
    });
    program.goes_on();
    program.ends_well(moved);
}
