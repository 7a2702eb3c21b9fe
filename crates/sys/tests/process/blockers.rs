//! Blockers of a move are found and named before the process is touched.

use crate::moving::Host;
use crate::program::Program;
use holdfast_sys::process::donor::Tracker;
use holdfast_sys::process::error::Error;
use holdfast_sys::process::inspect::{Obstacle, inspect};
use std::time::{Duration, Instant};

/// Time limit for any operation on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Number of inspections of short-lived processes, by default and with `HOLDFAST_WHOLE`.
const LOOKS: (usize, usize) = (40, 500);

/// Cases of the program `blocked`, each with a part of the expected blocker.
const CASES: [(&str, &str); 39] = [
    ("io_uring", "anon_inode:[io_uring]"),
    ("aio", "asynchronous IO"),
    ("deleted", "was deleted or replaced"),
    ("system_v", "a part of System V memory"),
    ("segment_outside", "which would stay behind"),
    ("traced", "it is traced by process"),
    ("strict", "strict seccomp"),
    ("shares_memory", "it uses the memory of process"),
    ("siblings", "it uses the memory of process"),
    ("thread_directory", "has a working directory of its own"),
    ("thread_descriptors", "has a descriptor table of its own"),
    ("directory_of_child", "its working directory in common"),
    ("directory_gone", "was deleted: let it change"),
    ("semaphores", "semaphores, id"),
    ("messages", "messages, id"),
    ("thread_clock", "a timer of a thread's own clock"),
    ("sealed", "cannot be made again (sealed"),
    ("huge", "huge pages of hugetlbfs"),
    ("dumped", "ended with a core dump"),
    ("network", "a net namespace of its own"),
    ("mounts", "a mnt namespace of its own"),
    ("names", "a uts namespace of its own"),
    ("root", "its root directory is"),
    ("private_memfd", "/memfd:private"),
    ("first_thread", "first thread has ended"),
    ("outsider", "which would stay behind"),
    ("segment_of_nobody", "memory, id"),
    ("users", "a user namespace of its own"),
    ("system_v_apart", "a ipc namespace of its own"),
    ("groups_apart", "a cgroup namespace of its own"),
    ("pids_apart", "a pid namespace of its own"),
    ("clock_apart", "a time namespace of its own"),
    ("key", "protects memory by keys"),
    ("speculation", "PR_SET_SPECULATION_CTRL"),
    ("secret", "secretmem"),
    ("packet_ring", "an object of this kernel"),
    ("device", "it maps the device"),
    ("faults", "handled by userfaultfd"),
    ("branch", "it is in session"),
];

/// A process that ends while it is inspected is no blocker, at whatever stage of its exit it is read.
#[test]
fn children_that_end_meanwhile_do_not_hide() {
    let forks = "while :; do (:); (:) & (:) & wait; done";
    let mut shell = std::process::Command::new("sh")
        .args(["-c", forks])
        .spawn()
        .expect("a shell");
    let root = shell.id() as i32;
    let looks = match std::env::var_os("HOLDFAST_WHOLE") {
        None => LOOKS.0,
        Some(_) => LOOKS.1,
    };
    let reports = (0..looks).map(|_| inspect(root).expect("looks"));
    let hides = |blocker: &holdfast_sys::process::inspect::Blocker| {
        matches!(blocker.obstacle, Obstacle::Hidden(_))
    };
    let hidden: Vec<_> = reports
        .flat_map(|report| report.blockers)
        .filter(hides)
        .collect();
    shell.kill().expect("killed");
    shell.wait().expect("ended");
    assert!(
        hidden.is_empty(),
        "{} of {looks}: {:?}",
        hidden.len(),
        hidden[0]
    );
}

/// An inspection causes no inotify event in a program that watches its own files.
#[test]
fn a_look_reads_no_file() {
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
    let looked = inspect(sleeper.id() as i32);
    let read = rustix::io::read(&events, &mut [0; 4096]);
    sleeper.kill().expect("killed");
    sleeper.wait().expect("ended");
    looked.expect("looks");
    assert_eq!(read, Err(rustix::io::Errno::AGAIN));
}

/// A control group for a process; thawed and removed when dropped.
struct Group(std::path::PathBuf);

impl Group {
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

    fn becomes(&self, word: &str) {
        let began = Instant::now();
        let is = || std::fs::read_to_string(self.0.join("cgroup.events")).expect("read");
        while !is().contains(word) {
            assert!(began.elapsed() < LIMIT, "exceeded time: {word}: {}", is());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("cgroup.freeze"), "0");
        let _ = std::fs::write(self.0.join("cgroup.kill"), "1");
        let began = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && began.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_frozen_group_is_named() {
    let mut sleeper = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .expect("starts");
    let pid = sleeper.id() as i32;
    let frozen = || {
        let report = inspect(pid).expect("looks");
        let mut blockers = report.blockers.into_iter();
        blockers.any(|blocker| matches!(blocker.obstacle, Obstacle::FrozenGroup(_)))
    };
    if let Some(group) = Group::new() {
        group.write("cgroup.procs", &pid.to_string());
        assert!(!frozen());
        group.write("cgroup.freeze", "1");
        group.becomes("frozen 1");
        assert!(frozen());
        match Tracker::start(pid) {
            Err(Error::Blocked(_)) => {}
            other => panic!("{other:?}"),
        }
        group.write("cgroup.freeze", "0");
        group.becomes("frozen 0");
        assert!(!frozen());
    } else {
        eprintln!("no control group can be made here");
    }
    sleeper.kill().expect("killed");
    sleeper.wait().expect("ended");
}

/// Cases of the program `blocked_sockets`, each with a part of the expected blocker.
const SOCKETS: [(&str, &str); 10] = [
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
fn sockets_that_cannot_move_are_named() {
    for (case, message) in SOCKETS {
        let program = Program::start_with("blocked_sockets", &[case]);
        if let Some(lacks) = program.skipped() {
            eprintln!("{case}: this machine has no {lacks}");
            continue;
        }
        let report = inspect(program.pid()).expect("looks");
        let texts: Vec<String> = report.blockers.iter().map(ToString::to_string).collect();
        assert!(!texts.is_empty(), "{case} is not named");
        let named = |text: &String| text.contains(message) && text.contains("socket:[");
        assert!(texts.iter().all(named), "{case}: {texts:?}");
        match Tracker::start(program.pid()) {
            Err(Error::Blocked(blockers)) => assert_eq!(blockers, report.blockers),
            other => panic!("{case}: {other:?}"),
        }
        assert!(!program.has_traces(program.pid()), "{case} was touched");
        let tree = program.tree(&Host::own());
        program.ends_well(tree);
    }
}

#[test]
fn what_cannot_move_is_named() {
    for (case, message) in CASES {
        let program = Program::start_with("blocked", &[case]);
        if let Some(lacks) = program.skipped() {
            eprintln!("{case}: this machine has no {lacks}");
            continue;
        }
        let root = program.number("child").unwrap_or(program.pid());
        let named = || {
            let report = inspect(root).expect("looks");
            let texts = report.blockers.iter().map(ToString::to_string);
            texts.into_iter().any(|text| text.contains(message))
        };
        let began = Instant::now();
        while !named() {
            assert!(
                began.elapsed() < LIMIT,
                "exceeded time: {case}: {:?}",
                inspect(root)
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let report = inspect(root).expect("looks");
        assert_eq!(report.blockers.len(), 1, "{case}: {:?}", report.blockers);
        match Tracker::start(root) {
            Err(Error::Blocked(blockers)) => assert_eq!(blockers, report.blockers),
            other => panic!("{case}: {other:?}"),
        }
        // A process with its page faults handled by another process (userfaultfd) shows the same traces as a tracked
        // one, so this case is left out.
        let touched = case != "faults" && program.has_traces(root);
        assert!(!touched, "{case} was touched");
    }
}

/// A loopback connection with one end outside the tree does not block a copy, but is reported, since it blocks a move.
#[test]
fn a_connection_over_loopback_with_an_end_outside_is_named() {
    for case in ["tcp4", "tcp6", "udp4", "udp6", "tcp4-waiting"] {
        let program = Program::start_with("halved", &[case]);
        let child = program.number("child").expect("a child");
        let began = Instant::now();
        let report = loop {
            let report = inspect(child).expect("looks");
            if !report.halved.is_empty() {
                break report;
            }
            assert!(began.elapsed() < LIMIT, "exceeded time: {case}: {report:?}");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!((report.blockers.len(), report.halved.len()), (0, 1));
        let text = report.halved[0].to_string();
        let wanted = match case {
            "tcp4-waiting" => "nobody has accepted it".to_owned(),
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
        let whole = inspect(program.pid()).expect("looks");
        assert_eq!(whole.halved, [], "{case}: both ends are in that tree");
    }
}

/// A blocker that only shows in a stopped process is found when tracking starts, and the process runs on.
#[test]
fn what_hides_is_named() {
    for (case, wanted) in [
        ("own_dispatch", Obstacle::CallDispatch),
        ("own_segments", Obstacle::Segments),
        ("asks_supervisor", Obstacle::Supervised),
    ] {
        let program = Program::start_with("blocked", &[case]);
        match Tracker::start(program.pid()) {
            Err(Error::Blocked(blockers)) => assert_eq!(blockers[0].obstacle, wanted),
            other => panic!("{case}: {other:?}"),
        }
        assert!(!program.has_traces(program.pid()), "{case} was touched");
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
        "terminal",
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
