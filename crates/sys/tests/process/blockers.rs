//! What cannot move is found and named before anything is touched.

use crate::program::Program;
use holdfast_sys::process::donor::Tracker;
use holdfast_sys::process::error::Error;
use holdfast_sys::process::inspect::{Obstacle, inspect};

/// What the program `blocked` does, and what must be said.
const CASES: [(&str, &str); 14] = [
    ("io_uring", "anon_inode:[io_uring]"),
    ("aio", "asynchronous IO"),
    ("deleted", "was deleted or replaced"),
    ("system_v", "System V shared memory"),
    ("traced", "it is traced by process"),
    ("strict", "strict seccomp"),
    ("shares_memory", "the memory of its parent"),
    ("network", "a net namespace of its own"),
    ("mounts", "a mnt namespace of its own"),
    ("names", "a uts namespace of its own"),
    ("root", "its root directory is"),
    ("private_memfd", "/memfd:private"),
    ("first_thread", "first thread has ended"),
    ("outsider", "which would stay behind"),
];

#[test]
fn what_cannot_move_is_named() {
    for (case, message) in CASES {
        let program = Program::start_with("blocked", &[case]);
        let root = program.number("child").unwrap_or(program.pid());
        program.wait_until(|| {
            let report = inspect(root).expect("looks");
            report
                .blockers
                .iter()
                .any(|blocker| blocker.to_string().contains(message))
        });
        let report = inspect(root).expect("looks");
        assert_eq!(report.blockers.len(), 1, "{case}: {:?}", report.blockers);
        match Tracker::start(root) {
            Err(Error::Blocked(blockers)) => assert_eq!(blockers, report.blockers),
            other => panic!("{case}: {other:?}"),
        }
        assert!(!program.has_traces(root), "{case} was touched");
    }
}

#[test]
fn what_can_move_has_no_blockers() {
    for source in [
        "memory",
        "threads",
        "signals",
        "timers",
        "identity",
        "seccomp",
        "tree",
        "files",
        "pipes",
        "events",
        "unix_sockets",
        "tables",
        "memory_files",
    ] {
        let program = Program::start(source);
        let report = inspect(program.pid()).expect("looks");
        assert_eq!(report.blockers, [], "{source}");
        assert!(
            report.resident_bytes > 0 && report.threads > 0,
            "{report:?}"
        );
    }
}

#[test]
fn init_and_the_dead_are_refused() {
    let report = inspect(1).expect("looks");
    assert!(
        report
            .blockers
            .iter()
            .any(|blocker| blocker.obstacle == Obstacle::Init)
    );
    let child = std::process::Command::new("true").spawn().expect("starts");
    let pid = child.id() as i32;
    let mut child = child;
    child.wait().expect("ends");
    assert!(matches!(inspect(pid), Err(Error::Gone(gone)) if gone == pid));
}
