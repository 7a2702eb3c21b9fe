//! The donor, the restorer or the process dies at some step before the commit: the original goes on, and nothing else
//! runs.

use crate::migration::{Host, MoveStep, migrate_until};
use crate::program::Program;
use holdfast_checkpoint::acceptor::Restorer;
use holdfast_checkpoint::donor::TreeTracker;
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::inspect::{Obstacle, inspect};
use holdfast_checkpoint::procfs;
use holdfast_lab::testing::wait_for;
use holdfast_sys::priority::RealtimeGuard;
use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Environment variable that makes this test, started as a separate program, act as a donor; its value is the step and
/// the PID.
const ROLE_VARIABLE: &str = "HOLDFAST_TEST_DONOR";
/// Value used in place of a step: the donor requests the state of the process all the time.
const REALTIME_ROLE: &str = "realtime";
const STEPS: [MoveStep; 11] = MoveStep::BEFORE_COMMIT;

#[test]
fn original_survives_donor_killed_at_each_step() {
    if let Ok(role) = std::env::var(ROLE_VARIABLE) {
        return run_as_donor(&role);
    }
    let sources = ["threads", "tree", "traps"].into_iter().cycle();
    for (step, source) in (0..STEPS.len()).zip(sources) {
        let program = Program::start(source);
        let mut donor = start_donor(&format!("{step} {}", program.pid()));
        let output = donor.stdout.take().expect("a pipe");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        assert!(
            lines.any(|line| line.contains("at the step")),
            "the donor did not reach step {:?}",
            STEPS[step]
        );
        donor.kill().expect("killed");
        donor.wait().expect("ends");
        program.assert_runs_on();
        // The restorer, which the test does not wait for, ends when it finds that its donor is gone.
        let single_run = format!("{source} to run once after {:?}", STEPS[step]);
        wait_for(&single_run, || program.count_copies() == 1);
        // The traces of the dead donor do not hinder another one.
        crate::end_at_acceptor(program);
    }
}

/// A donor is killed at arbitrary moments, also within a step.
#[test]
fn original_survives_donor_killed_at_any_moment() {
    for delay in 0..12 {
        let program = Program::start("threads");
        let mut donor = start_donor(&format!("{} {}", STEPS.len() - 1, program.pid()));
        std::thread::sleep(Duration::from_millis(60) + Duration::from_micros(9709 * delay));
        donor.kill().expect("killed");
        donor.wait().expect("ends");
        program.assert_runs_on();
        let tree = program.tree(&Host::local());
        program.assert_good_verdict(tree);
    }
}

/// Threads give back the priority that was lent for their system calls when the donor is killed.
#[test]
fn threads_lose_boosted_priority_when_donor_is_killed() {
    // The result is negative for an ended thread.
    // SAFETY: no memory is involved.
    let has_boosted_priority =
        |tid: i32| unsafe { libc::sched_getscheduler(tid) } > libc::SCHED_OTHER;
    for delay in 0..20 {
        let program = Program::start("threads");
        let mut donor = start_donor(&format!("{REALTIME_ROLE} {}", program.pid()));
        std::thread::sleep(Duration::from_millis(60) + Duration::from_micros(1709 * delay));
        donor.kill().expect("killed");
        donor.wait().expect("ends");
        program.assert_runs_on();
        for tid in procfs::threads(program.pid()).expect("threads") {
            let name = format!("thread {tid} to give its priority back");
            wait_for(&name, || !has_boosted_priority(tid));
        }
        let tree = program.tree(&Host::local());
        program.assert_good_verdict(tree);
    }
}

/// Requests the state of a process again and again, with lent priority.
fn request_state_with_realtime_priority(pid: i32) {
    let mut tracker = TreeTracker::start(pid).expect("starts");
    let _guard = RealtimeGuard::begin().expect("root may");
    loop {
        let stopped = tracker.freeze().map_err(|unfrozen| unfrozen.error);
        let stopped = stopped.expect("stops");
        for _ in 0..20 {
            stopped.read_state().expect("state");
        }
        tracker = stopped.thaw().expect("thaws");
    }
}

fn start_donor(role: &str) -> std::process::Child {
    Command::new(std::env::current_exe().expect("a path"))
        .args([
            "--exact",
            "fault_injection::original_survives_donor_killed_at_each_step",
            "--nocapture",
        ])
        .env(ROLE_VARIABLE, role)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("starts")
}

fn run_as_donor(role: &str) {
    let (step, pid) = role.split_once(' ').expect("a step and a process");
    if step == REALTIME_ROLE {
        return request_state_with_realtime_priority(pid.parse().expect("a PID"));
    }
    let host = Host::local();
    let tree = crate::migration::Tree::original(pid.parse().expect("a PID"), &host);
    let step = STEPS[step.parse::<usize>().expect("a step")];
    let partial_move = migrate_until(tree, &Host::new(), step)
        .map(|(_, incomplete_move)| incomplete_move)
        .expect("reaches the step");
    println!("at the step");
    std::thread::sleep(Duration::from_secs(600));
    drop(partial_move);
}

#[test]
fn original_survives_restorer_killed_at_each_step() {
    for step in STEPS {
        let program = Program::start("tree");
        let tree = program.tree(&Host::local());
        let moving = std::thread::spawn(move || {
            let (tree, incomplete_move) =
                migrate_until(tree, &Host::new(), step).expect("reaches the step");
            // The tracker rolls back when dropped, and the restorer is killed.
            drop(incomplete_move);
            tree
        });
        let tree = moving.join().expect("a thread");
        program.assert_runs_on();
        assert_eq!(
            program.count_copies(),
            1,
            "the program runs twice after {step:?}"
        );
        assert!(
            !tree.has_traces(),
            "traces of the move are left after {step:?}"
        );
        program.assert_good_verdict(tree);
    }
}

/// A library or program file that differs at the acceptor causes a refusal with its path, and the original goes on.
#[test]
fn differing_file_is_refused() {
    let program = Program::start("memory");
    let pid = program.pid();
    let path = std::fs::read_link(format!("/proc/{pid}/exe")).expect("a path");
    let refusal = std::thread::spawn(move || {
        let mut restorer = restorer_seeing("/bin/true", &path);
        let mut tracker = TreeTracker::start(pid).expect("starts");
        let round = tracker.next_round().expect("a round");
        let refusal = restorer.update_tree(&round.tree).expect_err("refused");
        (
            matches!(refusal, Error::Refused(_)),
            refusal.to_string(),
            path,
        )
    });
    let (refused, refusal, path) = refusal.join().expect("a thread");
    assert!(
        refused && refusal.contains(&*path.to_string_lossy()),
        "{refusal}"
    );
    program.assert_runs_on();
    let tree = program.tree(&Host::local());
    assert!(!tree.has_traces());
    program.assert_good_verdict(tree);
}

/// A child in the session of a terminal cannot get that terminal back, so the move is refused before anything is
/// touched.
#[test]
fn terminal_session_with_jobs_is_refused() {
    let program = Program::start_with("terminal", &["job"]);
    let report = inspect(program.pid()).expect("inspected");
    let wanted = Obstacle::SharesTerminal(program.number("leader").expect("a leader"));
    let found: Vec<_> = report.blockers.iter().map(|one| &one.obstacle).collect();
    assert_eq!(found, [&wanted]);
    match TreeTracker::start(program.pid()) {
        Err(Error::Blocked(blockers)) => assert_eq!(blockers, report.blockers),
        other => panic!("{other:?}"),
    }
    assert_runs_on_untouched(program);
}

/// A job that begins on the terminal while the tree is tracked causes a refusal before anything is frozen.
#[test]
fn late_terminal_job_is_refused() {
    let program = Program::start_with("terminal", &["quiet"]);
    let leader = program.number("leader").expect("a leader");
    let pid = program.pid();
    let reason = std::thread::scope(|scope| {
        let watching = || {
            let mut tracker = TreeTracker::start(pid).expect("starts");
            // SAFETY: no pointers are passed; the process is the test's own.
            unsafe { libc::kill(leader, libc::SIGUSR1) };
            wait_for("a job", || program.has_written("begun"));
            let mut restorer = crate::migration::restorer();
            let mut round = tracker.next_round().expect("a round");
            restorer.update_tree(&round.tree).expect("taken");
            while let Some(pages) = tracker.read_pages(&mut round, 1 << 20).expect("reads") {
                restorer.write_pages(pages).expect("taken");
            }
            let descriptors = tracker.read_descriptors().expect("inspected");
            let refusal = restorer.update_descriptors(&descriptors, &Default::default());
            refusal.expect_err("refused").to_string()
        };
        scope.spawn(watching).join().expect("a thread")
    });
    assert!(reason.contains("controlling terminal"), "{reason}");
    assert_runs_on_untouched(program);
}

fn assert_runs_on_untouched(program: Program) {
    program.assert_runs_on();
    let tree = program.tree(&Host::local());
    assert!(!tree.has_traces());
    program.assert_good_verdict(tree);
}

/// Returns a restorer that sees `other` under `path`.
fn restorer_seeing(other: &str, path: &Path) -> Restorer {
    let mounts = File::open("/proc/thread-self/ns/mnt").expect("opens");
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).expect("no NUL");
    let (other, path) = (text(Path::new(other)), text(path));
    let none = std::ptr::null();
    // SAFETY: all strings end with a NUL and outlive the calls; only this thread enters other mounts, and returns.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS), 0);
        let private = libc::MS_REC | libc::MS_PRIVATE;
        assert_eq!(
            libc::mount(c"none".as_ptr(), c"/".as_ptr(), none, private, none.cast()),
            0
        );
        assert_eq!(
            libc::mount(
                other.as_ptr(),
                path.as_ptr(),
                none,
                libc::MS_BIND,
                none.cast()
            ),
            0
        );
    }
    let restorer = crate::migration::restorer();
    // SAFETY: no pointers are passed.
    let back = unsafe { libc::setns(mounts.as_raw_fd(), libc::CLONE_NEWNS) };
    assert_eq!(back, 0);
    restorer
}
