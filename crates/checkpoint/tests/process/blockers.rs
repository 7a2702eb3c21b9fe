//! Blockers of a move are found and named before the process is touched.

use crate::migration::Host;
use crate::program::Program;
use holdfast_checkpoint::donor::TreeTracker;
use holdfast_checkpoint::error::Error;
use holdfast_checkpoint::inspect::{Obstacle, inspect};
use std::time::{Duration, Instant};

/// Time limit for any operation on a busy machine.
const WAIT_LIMIT: Duration = Duration::from_secs(30);

/// Number of inspections of short-lived processes, by default and with `HOLDFAST_WHOLE`.
const INSPECTIONS: (usize, usize) = (40, 500);

/// Cases of the program `blocked`, each with a part of the expected blocker.
const BLOCKED_CASES: [(&str, &str); 39] = [
    ("io_uring", "anon_inode:[io_uring]"),
    ("aio", "asynchronous I/O"),
    ("deleted", "was deleted or replaced"),
    ("system_v", "a part of System V memory"),
    ("segment_outside", "which is outside the tree"),
    ("traced", "it is traced by process"),
    ("strict", "strict seccomp"),
    ("shares_memory", "it shares its memory with process"),
    ("siblings", "it shares its memory with process"),
    ("thread_directory", "has a working directory separate"),
    ("thread_descriptors", "has a descriptor table of its own"),
    ("directory_of_child", "it shares its working directory"),
    ("directory_gone", "was deleted: change to another"),
    ("semaphores", "semaphores, id"),
    ("messages", "messages, id"),
    ("thread_clock", "a timer of CLOCK_THREAD_CPUTIME_ID"),
    ("sealed", "cannot be recreated (sealed"),
    ("huge", "huge pages of hugetlbfs"),
    ("dumped", "ended with a core dump"),
    ("network", "a net namespace of its own"),
    ("mounts", "a mnt namespace of its own"),
    ("names", "a uts namespace of its own"),
    ("root", "its root directory is"),
    ("private_memfd", "/memfd:private"),
    ("first_thread", "main thread has ended"),
    ("outsider", "which is outside the tree"),
    ("segment_of_nobody", "memory, id"),
    ("users", "a user namespace of its own"),
    ("system_v_apart", "a ipc namespace of its own"),
    ("groups_apart", "a cgroup namespace of its own"),
    ("pids_apart", "a pid namespace of its own"),
    ("clock_apart", "a time namespace of its own"),
    ("key", "memory protection keys"),
    ("speculation", "PR_SET_SPECULATION_CTRL"),
    ("secret", "secretmem"),
    ("packet_ring", "an object of this kernel"),
    ("device", "it maps the device"),
    ("faults", "handled by userfaultfd"),
    ("branch", "it is in session"),
];

/// A process that ends while it is inspected is no blocker, at whatever stage of its exit it is read.
#[test]
fn short_lived_children_are_no_blockers() {
    let forks = "while :; do (:); (:) & (:) & wait; done";
    let mut shell = std::process::Command::new("sh")
        .args(["-c", forks])
        .spawn()
        .expect("a shell");
    let root = shell.id() as i32;
    let inspections = match std::env::var_os("HOLDFAST_WHOLE") {
        None => INSPECTIONS.0,
        Some(_) => INSPECTIONS.1,
    };
    let reports = (0..inspections).map(|_| inspect(root).expect("inspected"));
    let is_hidden_process = |blocker: &holdfast_checkpoint::inspect::Blocker| {
        matches!(blocker.obstacle, Obstacle::NotInspectable(_))
    };
    let hidden: Vec<_> = reports
        .flat_map(|report| report.blockers)
        .filter(is_hidden_process)
        .collect();
    shell.kill().expect("killed");
    shell.wait().expect("ended");
    assert!(
        hidden.is_empty(),
        "{} of {inspections}: {:?}",
        hidden.len(),
        hidden[0]
    );
}

/// An inspection causes no inotify event in a program that watches its own files.
#[test]
fn inspection_causes_no_inotify_events() {
    use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("data");
    std::fs::write(&path, "hello").expect("written");
    let file = std::fs::File::open(&path).expect("opens");
    let mut sleeper = std::process::Command::new("sleep")
        .arg("1000")
        .stdin(file)
        .spawn()
        .expect("starts");
    let events = init(CreateFlags::NONBLOCK).expect("an instance");
    add_watch(&events, &path, WatchFlags::ALL_EVENTS).expect("watched");
    let report = inspect(sleeper.id() as i32);
    let read = rustix::io::read(&events, &mut [0; 4096]);
    sleeper.kill().expect("killed");
    sleeper.wait().expect("ended");
    report.expect("inspected");
    assert_eq!(read, Err(rustix::io::Errno::AGAIN));
}

/// A control group for a process; thawed and removed when dropped.
struct FrozenGroup(std::path::PathBuf);

impl FrozenGroup {
    /// Creates a group; none if the test may not create one.
    fn new() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
        let name = format!("holdfast-frozen-{}", std::process::id());
        let group = std::path::Path::new(mount.split(' ').nth(4)?).join(name);
        std::fs::create_dir(&group).ok()?;
        Some(Self(group))
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).expect("written");
    }

    fn wait_until_event(&self, word: &str) {
        let started = Instant::now();
        let is_reached = || std::fs::read_to_string(self.0.join("cgroup.events")).expect("read");
        while !is_reached().contains(word) {
            assert!(
                started.elapsed() < WAIT_LIMIT,
                "exceeded time: {word}: {}",
                is_reached()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for FrozenGroup {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("cgroup.freeze"), "0");
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        let started = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && started.elapsed() < WAIT_LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn frozen_group_is_reported() {
    let mut sleeper = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .expect("starts");
    let pid = sleeper.id() as i32;
    let is_reported_frozen = || {
        let report = inspect(pid).expect("inspected");
        let mut blockers = report.blockers.into_iter();
        blockers.any(|blocker| matches!(blocker.obstacle, Obstacle::FrozenGroup(_)))
    };
    if let Some(group) = FrozenGroup::new() {
        group.write("cgroup.procs", &pid.to_string());
        assert!(!is_reported_frozen());
        group.write("cgroup.freeze", "1");
        group.wait_until_event("frozen 1");
        assert!(is_reported_frozen());
        match TreeTracker::start(pid) {
            Err(Error::Blocked(_)) => {}
            other => panic!("{other:?}"),
        }
        group.write("cgroup.freeze", "0");
        group.wait_until_event("frozen 0");
        assert!(!is_reported_frozen());
    } else {
        eprintln!("no control group can be made here");
    }
    sleeper.kill().expect("killed");
    sleeper.wait().expect("ended");
}

/// Cases of the program `blocked_sockets`, each with a part of the expected blocker.
const BLOCKED_SOCKET_CASES: [(&str, &str); 10] = [
    ("keys", "TCP MD5 keys"),
    ("urgent", "urgent data is waiting: read it"),
    ("kernel_tls", "the kernel handles 'tls'"),
    (
        "connecting",
        "the handshake is not complete (state SynSent): try again",
    ),
    ("refused", "a connection was refused"),
    ("corked", "the socket is corked"),
    ("encapsulates", "decapsulates packets"),
    ("tcp_apart", "another network namespace"),
    ("udp_apart", "another network namespace"),
    ("out_of_band", "out-of-band data is waiting: read it"),
];

#[test]
fn immovable_sockets_are_reported() {
    for (case, message) in BLOCKED_SOCKET_CASES {
        let program = Program::start_with("blocked_sockets", &[case]);
        if let Some(missing_feature) = program.skipped() {
            eprintln!("{case}: this machine has no {missing_feature}");
            continue;
        }
        let report = inspect(program.pid()).expect("inspected");
        let texts: Vec<String> = report.blockers.iter().map(ToString::to_string).collect();
        assert!(!texts.is_empty(), "{case} is not reported");
        let is_named = |text: &String| text.contains(message) && text.contains("socket:[");
        assert!(texts.iter().all(is_named), "{case}: {texts:?}");
        match TreeTracker::start(program.pid()) {
            Err(Error::Blocked(blockers)) => assert_eq!(blockers, report.blockers),
            other => panic!("{case}: {other:?}"),
        }
        assert!(
            !program.has_traces(program.pid()),
            "{case}: traces of the freeze are left"
        );
        let tree = program.tree(&Host::local());
        program.assert_good_verdict(tree);
    }
}

#[test]
fn blockers_are_reported() {
    for (case, message) in BLOCKED_CASES {
        let program = Program::start_with("blocked", &[case]);
        if let Some(missing_feature) = program.skipped() {
            eprintln!("{case}: this machine has no {missing_feature}");
            continue;
        }
        let root = program.number("child").unwrap_or(program.pid());
        let is_reported = || {
            let report = inspect(root).expect("inspected");
            let texts = report.blockers.iter().map(ToString::to_string);
            texts.into_iter().any(|text| text.contains(message))
        };
        let started = Instant::now();
        while !is_reported() {
            assert!(
                started.elapsed() < WAIT_LIMIT,
                "exceeded time: {case}: {:?}",
                inspect(root)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let report = inspect(root).expect("inspected");
        assert_eq!(report.blockers.len(), 1, "{case}: {:?}", report.blockers);
        match TreeTracker::start(root) {
            Err(Error::Blocked(blockers)) => assert_eq!(blockers, report.blockers),
            other => panic!("{case}: {other:?}"),
        }
        // A process with its page faults handled by another process (userfaultfd) shows the same traces as a tracked
        // one, so this case is left out.
        let has_traces = case != "faults" && program.has_traces(root);
        assert!(!has_traces, "{case}: traces of the freeze are left");
    }
}

/// A loopback connection with one end outside the tree does not block a copy, but is reported, since it blocks a move.
#[test]
fn loopback_connection_leaving_the_tree_is_reported() {
    for case in ["tcp4", "tcp6", "udp4", "udp6", "tcp4-waiting"] {
        let program = Program::start_with("loopback_ends", &[case]);
        let child = program.number("child").expect("a child");
        let began = Instant::now();
        let report = loop {
            let report = inspect(child).expect("inspected");
            if !report.split_connections.is_empty() {
                break report;
            }
            assert!(
                began.elapsed() < WAIT_LIMIT,
                "exceeded time: {case}: {report:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(
            (report.blockers.len(), report.split_connections.len()),
            (0, 1)
        );
        let text = report.split_connections[0].to_string();
        let wanted = match case {
            "tcp4-waiting" => "no process has accepted it".to_owned(),
            _ => format!("process {} has the other end", program.pid()),
        };
        assert!(
            text.contains(&wanted) && text.contains("socket:["),
            "{text}"
        );
        let address = if case.contains('6') {
            "[::1]:"
        } else {
            "127.0.0.1:"
        };
        assert_eq!(text.matches(address).count(), 2, "{text}");
        let whole_tree = inspect(program.pid()).expect("inspected");
        assert_eq!(
            whole_tree.split_connections,
            [],
            "{case}: both ends are in that tree"
        );
    }
}

/// A blocker that only shows in a stopped process is found when tracking starts, and the process runs on.
#[test]
fn blockers_of_stopped_processes_are_reported() {
    for (case, wanted) in [
        ("own_dispatch", Obstacle::SyscallDispatch),
        ("own_segments", Obstacle::LdtSegments),
        ("asks_supervisor", Obstacle::SeccompSupervised),
    ] {
        let program = Program::start_with("blocked", &[case]);
        match TreeTracker::start(program.pid()) {
            Err(Error::Blocked(blockers)) => assert_eq!(blockers[0].obstacle, wanted),
            other => panic!("{case}: {other:?}"),
        }
        assert!(
            !program.has_traces(program.pid()),
            "{case}: traces of the freeze are left"
        );
    }
}

#[test]
fn movable_programs_have_no_blockers() {
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
        "terminal",
    ] {
        let program = Program::start(source);
        let report = inspect(program.pid()).expect("inspected");
        assert_eq!(report.blockers, [], "{source}");
        assert!(
            report.resident_bytes > 0 && report.threads > 0,
            "{report:?}"
        );
    }
}

#[test]
fn init_and_dead_processes_are_refused() {
    let report = inspect(1).expect("inspected");
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
    assert!(matches!(inspect(pid), Err(Error::ProcessEnded(gone)) if gone == pid));
}
