//! Post-copy: the remaining pages are sent after the process resumes at the acceptor.

use crate::migration::{self, AcceptorSide, Host, MoveStep, Tree};
use crate::program::Program;
use holdfast_checkpoint::donor::{PageSource, StoppedTree, TreeTracker};
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::image::{MissingPages, decode, encode};
use holdfast_checkpoint::postcopy::LazyPages;
use holdfast_checkpoint::sockets::RestoredSockets;
use holdfast_tcp_repair::WindowProbe;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Number of bytes sent at a time in addition to requested pages.
const PUSH_BYTES: u64 = 64 << 10;

/// Bytes sent by post-copy.
#[derive(Debug, Default)]
struct TransferCounts {
    missing: u64,
    /// Bytes of requested pages and their neighbours.
    on_demand: u64,
    pushed: u64,
}

/// Both ends of a post-copy transfer.
struct PostcopyLink {
    page_source: PageSource,
    lazy_pages: Option<LazyPages>,
    stopped: StoppedTree,
    counts: TransferCounts,
    never_readable: OwnedFd,
}

impl PostcopyLink {
    fn new(
        stopped: StoppedTree,
        missing: &MissingPages,
        lazy_pages: LazyPages,
    ) -> Result<Self, Error> {
        let missing: MissingPages = decode(&encode(missing)?)?;
        let counts = TransferCounts {
            missing: missing.bytes(),
            ..TransferCounts::default()
        };
        let page_source = PageSource::new(&stopped.process_ids(), &missing)?;
        let (never_readable, writer) = std::io::pipe().expect("a pipe");
        std::mem::forget(writer);
        let lazy_pages = Some(lazy_pages);
        Ok(Self {
            page_source,
            lazy_pages,
            stopped,
            counts,
            never_readable: never_readable.into(),
        })
    }

    /// Sends requested pages, and with `push` other pages too; returns true if all pages have arrived.
    fn serve(&mut self, push: bool) -> Result<bool, Error> {
        let lazy_pages = self.lazy_pages.as_mut().expect("goes on");
        let limit = if push {
            Duration::ZERO
        } else {
            Duration::from_millis(1)
        };
        lazy_pages.wait(self.never_readable.as_fd(), limit);
        let requests = lazy_pages.handle_events()?;
        requests
            .into_iter()
            .for_each(|fault| self.page_source.request_page(fault));
        loop {
            let push_bytes = if push { PUSH_BYTES } else { 0 };
            let Some((pages, is_requested)) = self.page_source.next(push_bytes)? else {
                return Ok(lazy_pages.is_complete());
            };
            if pages.runs.is_empty() {
                break;
            }
            let counts = &mut self.counts;
            let count = if is_requested {
                &mut counts.on_demand
            } else {
                &mut counts.pushed
            };
            *count += pages.bytes.len() as u64;
            let (mut message, content) = pages.into_message()?;
            message.extend(content);
            lazy_pages.place_pages(&message)?;
            if push {
                break;
            }
        }
        Ok(lazy_pages.is_complete())
    }

    /// Completes the transfer: the original ends.
    fn complete(self) -> Result<TransferCounts, Error> {
        self.lazy_pages.expect("goes on").finish()?;
        self.stopped.release()?;
        Ok(self.counts)
    }

    /// Ends the process, since its memory cannot be completed.
    fn end_process(&mut self) {
        self.lazy_pages.take().expect("goes on").abort();
    }

    fn has_ended(&self) -> bool {
        self.lazy_pages.as_ref().is_none_or(LazyPages::has_ended)
    }

    /// Replaces the donor's side by a new one that only knows the acceptor's list of missing pages.
    fn replace_donor(&mut self) {
        let missing = self.lazy_pages.as_ref().expect("goes on").missing_runs();
        let known = MissingPages::default();
        self.page_source = PageSource::new(&self.stopped.process_ids(), &known)
            .expect("the donor's processes exist");
        self.page_source
            .set_missing(&MissingPages::from_runs(&missing));
    }
}

/// Moves a tree until it runs, with pages still missing. The restorer lives as long as the link.
fn migrate_with_missing_pages(tree: Tree, to: &Host) -> Result<(Tree, PostcopyLink), Error> {
    let from = tree.host.clone();
    to.enter();
    let mut acceptor = AcceptorSide {
        host: to.clone(),
        restorer: migration::restorer(),
        sockets: RestoredSockets::new(1024)?,
    };
    from.enter();
    let mut tracker = TreeTracker::start(tree.root)?;
    migration::precopy(&mut tracker, &mut acceptor, &from, MoveStep::Released)?;
    let (mut stopped, descriptors, states) = migration::stop(tracker, MoveStep::Released)?;
    let state = stopped.read_state()?;
    let missing = stopped.defer_to_postcopy(&state);
    acceptor.restorer.update_tree(stopped.tree())?;
    while let Some(pages) = stopped.read_pages(1 << 20)? {
        acceptor.restorer.write_pages(pages)?;
    }
    acceptor.restorer.announce_missing(&missing)?;
    acceptor.descriptors(&from, &descriptors, true)?;
    acceptor.restore(&from, migration::round_trip_encoded(&states))?;
    acceptor.restorer.restore_state(&state)?;
    acceptor.sockets.activate(WindowProbe::Always, 1)?;
    let lazy_pages = acceptor
        .restorer
        .open_lazy_pages()?
        .expect("a process with missing pages");
    acceptor.restorer.resume()?;
    let link = PostcopyLink::new(stopped, &missing, lazy_pages)?;
    let moved = Tree {
        root: crate::pids::outer_pid(&acceptor.restorer, tree.root),
        host: to.clone(),
        restorer: Some(acceptor.restorer),
    };
    Ok((moved, link))
}

/// Sends requested pages until the program has written a file named `word`.
fn serve_until(link: &mut PostcopyLink, program: &Program, word: &str) {
    while !program.has_written(word) {
        link.serve(false).expect("serves");
    }
}

/// Runs `work` on a thread of its own, since a tracer is a thread, and this thread changes namespaces.
fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(work).join().expect("a thread"))
}

/// Moves a program that checks all its memory, and uses it in every possible way while pages are missing.
#[test]
fn postcopy_completes_memory() {
    assert_postcopy_completes(Program::start("heap"));
}

#[test]
fn postcopy_completes_memory_of_unprivileged_program() {
    assert_postcopy_completes(Program::start_with("heap", &["nobody"]));
}

fn assert_postcopy_completes(program: Program) {
    let moved = on_own_thread(|| {
        let (moved, mut link) =
            migrate_with_missing_pages(program.tree(&Host::local()), &Host::new()).expect("moves");
        let missing = link.counts.missing;
        assert!(missing > 16 << 20, "{missing} bytes are missing");
        program.create_file("moved");
        serve_until(&mut link, &program, "begins");
        // Only requested pages are sent from here on.
        program.create_file("alone");
        serve_until(&mut link, &program, "did");
        while !link.serve(true).expect("serves") {}
        let counts = link.complete().expect("completes");
        eprintln!("{counts:?}");
        assert!(counts.on_demand > 1 << 20, "{counts:?}");
        moved
    });
    program.assert_runs_on();
    assert!(!moved.has_traces());
    // A completed process moves like any other.
    let back = migration::migrate(moved, &Host::local()).expect("moves back");
    program.assert_runs_on();
    program.assert_good_verdict(back);
}

/// Missing pages of stacks are not searched for return addresses in the code of another kernel's vDSO.
#[test]
fn postcopy_completes_memory_on_another_kernel() {
    let program = Program::start_with("clock", &["another"]);
    let moved = on_own_thread(|| {
        let (moved, mut link) =
            migrate_with_missing_pages(program.tree(&Host::local()), &Host::new()).expect("moves");
        while !link.serve(true).expect("serves") {}
        let counts = link.complete().expect("completes");
        assert!(counts.missing > 0);
        moved
    });
    program.assert_runs_on();
    program.assert_good_verdict(moved);
}

/// Runs a fault that ends the program at the acceptor while pages are missing.
fn assert_fault_ends_program(end: impl FnOnce(&Tree, &mut PostcopyLink) + Send) {
    let program = Program::start("heap");
    on_own_thread(|| {
        let (moved, mut link) =
            migrate_with_missing_pages(program.tree(&Host::local()), &Host::new()).expect("moves");
        for _ in 0..100 {
            link.serve(true).expect("serves");
        }
        end(&moved, &mut link);
        holdfast_lab::testing::wait_for("the copy to end", || link.has_ended());
        assert!(
            !program.has_written("verdict"),
            "the copy ran on with wrong memory"
        );
        assert!(!std::path::Path::new(&format!("/proc/{}", moved.root)).exists());
        link.stopped.roll_back().expect("the original resumes");
    });
    // The program at the acceptor wrote only to its memory, so the original can go on.
    program.assert_runs_on();
    let tree = program.tree(&Host::local());
    program.assert_good_verdict(tree);
}

#[test]
fn program_dies_with_its_postcopy_restorer() {
    assert_fault_ends_program(|moved, _| {
        let restorer = moved.restorer.as_ref().expect("there").pid();
        // SAFETY: no pointers are passed; the process is this test's own.
        unsafe { libc::kill(restorer, libc::SIGKILL) };
    });
}

#[test]
fn program_with_unobtainable_memory_is_ended() {
    assert_fault_ends_program(|_, link| link.end_process());
}

/// A new daemon serves pages from the original that its predecessor left stopped, without the predecessor's state.
#[test]
fn new_daemon_serves_missing_pages() {
    let program = Program::start("heap");
    let moved = on_own_thread(|| {
        let (moved, mut link) =
            migrate_with_missing_pages(program.tree(&Host::local()), &Host::new()).expect("moves");
        for _ in 0..50 {
            link.serve(true).expect("serves");
        }
        link.replace_donor();
        while !link.serve(true).expect("serves") {}
        link.complete().expect("completes");
        moved
    });
    program.assert_runs_on();
    program.assert_good_verdict(moved);
}
