//! A compromised donor: its data reaches only the process's own memory, and the restored process has no more rights
//! than the original.

use crate::moving;
use holdfast_sys::process::donor::Tracker;
use holdfast_sys::process::image::{Content, PAGE, Pages, Run, Space, Tree};
use holdfast_sys::process::procfs;
use holdfast_sys::process::rights::{Identity, Rights};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// User and group ID of nobody.
const NOBODY: u32 = 65534;
/// `CAP_CHECKPOINT_RESTORE` as `/proc/PID/status` shows it.
const ONE_CAPABILITY: &str = "0000010000000000";
const NONE: &str = "0000000000000000";

/// A program of the user nobody.
struct Sleeper(Child);

const SLEEP: &[&str] = &["sleep", "1000"];
/// A shell with children, one of which is born late.
const FAMILY: &[&str] = &["sh", "-c", "sleep 1000 & sleep 0.5; sleep 1000 & wait"];

impl Sleeper {
    fn start(arguments: &[&str], program: &[&str]) -> Self {
        let who = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let mut command = Command::new("setsid");
        command
            .arg("setpriv")
            .args(who)
            .args(arguments)
            .args(program);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let close_others = || {
            let flags = libc::CLOSE_RANGE_CLOEXEC;
            // SAFETY: no pointers are passed.
            unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, flags) };
            Ok(())
        };
        // SAFETY: the closure makes one system call. Descriptors of the test must not reach the program.
        unsafe { command.pre_exec(close_others) };
        let child = command.spawn().expect("starts");
        let pid = child.id() as i32;
        let began = Instant::now();
        while !std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.trim_end() == program[0])
        {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "it does not sleep"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child)
    }

    /// Returns the tree as a donor reports it.
    fn tree(&self) -> Tree {
        let mut tracker = Tracker::start(self.0.id() as i32).expect("watched");
        tracker.round().expect("a round").tree
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn nobodys() -> Rights {
    let identity = Identity {
        user: NOBODY,
        group: NOBODY,
        groups: Vec::new(),
    };
    Rights::Of {
        whose: [identity].into(),
        files: Vec::new(),
    }
}

fn page(start: u64, content: Content) -> Pages {
    let run = Run {
        space: Space::Process(0),
        start,
        length: PAGE,
        content,
    };
    Pages {
        runs: vec![run],
        bytes: match content {
            Content::Bytes => vec![0xcc; PAGE as usize],
            Content::Fresh => Vec::new(),
        },
    }
}

#[test]
fn pages_go_nowhere_but_into_the_process_s_own_memory() {
    let tree = Sleeper::start(&[], SLEEP).tree();
    for rights in [Rights::All, nobodys()] {
        let mut restorer = moving::restorer();
        restorer.rights(&rights).expect("taken");
        restorer.tree(&tree).expect("made");
        let husk = restorer.root().expect("readable").expect("made");
        let memory = std::fs::File::open(format!("/proc/{husk}/mem")).expect("opens");
        let read = |at: u64| {
            let mut page = vec![0; PAGE as usize];
            memory.read_exact_at(&mut page, at).map(|()| page).ok()
        };
        let own = |at: u64| {
            let mut mappings = tree.processes[0].mappings.iter();
            let within = |name: &str| name.starts_with("[v");
            mappings.any(|mapping| {
                let kernels = matches!(
                    &mapping.backing,
                    holdfast_sys::process::image::Backing::Kernel(name) if within(name)
                );
                mapping.start <= at && at < mapping.end && !kernels
            })
        };
        let lines = procfs::mappings(husk).expect("mappings");
        let foreign: Vec<u64> = (lines.iter())
            .flat_map(|line| [line.start, line.end - PAGE])
            .filter(|at| !own(*at) && *at < 1 << 47)
            .collect();
        // The restorer's stub at least, and the vDSO.
        assert!(foreign.len() >= 4, "{foreign:x?}");
        for at in foreign.iter().copied().chain([0, 0x5000_0000_0000]) {
            let before = read(at);
            for content in [Content::Bytes, Content::Fresh] {
                assert!(restorer.pages(page(at, content)).is_err(), "{at:#x}");
            }
            assert!(read(at) == before, "{at:#x}");
        }
        let heap = (tree.processes[0].mappings.iter())
            .find(|mapping| mapping.protection == 3)
            .expect("a heap");
        restorer
            .pages(page(heap.start, Content::Bytes))
            .expect("its own");
        assert_eq!(read(heap.start), Some(vec![0xcc; PAGE as usize]));
        assert!(
            restorer
                .pages(page(heap.start - PAGE, Content::Bytes))
                .is_err()
                || own(heap.start - PAGE)
        );
    }
}

#[test]
fn a_husk_is_its_user_before_anything_of_the_image_is_in_it() {
    for (arguments, limited) in [
        (&[][..], false),
        (&["--no-new-privs", "--bounding-set=-all,+chown"], true),
    ] {
        let sleeper = Sleeper::start(arguments, SLEEP);
        let tree = sleeper.tree();
        let mut restorer = moving::restorer();
        restorer.rights(&nobodys()).expect("taken");
        restorer.tree(&tree).expect("made");
        let husk = restorer.root().expect("readable").expect("made");
        let line = |pid: i32, name: &str| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("readable");
            let found = status.lines().find_map(|line| line.strip_prefix(name));
            found
                .expect(name)
                .trim_start_matches(':')
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        };
        let nobody = ["65534"; 4].join(" ");
        assert_eq!(
            (line(husk, "Uid"), line(husk, "Gid")),
            (nobody.clone(), nobody)
        );
        assert_eq!(line(husk, "Groups"), "");
        for name in ["CapPrm", "CapEff"] {
            assert_eq!(line(husk, name), ONE_CAPABILITY);
        }
        for name in ["CapInh", "CapAmb"] {
            assert_eq!(line(husk, name), NONE);
        }
        let original = sleeper.0.id() as i32;
        assert_eq!(line(husk, "CapBnd"), line(original, "CapBnd"));
        assert_eq!(line(husk, "NoNewPrivs"), u8::from(limited).to_string());
        // The empty process has only one open descriptor: the socket through which descriptors are passed.
        let open: Vec<_> = (std::fs::read_dir(format!("/proc/{husk}/fd")).expect("readable"))
            .map(|entry| std::fs::read_link(entry.expect("an entry").path()).expect("a link"))
            .collect();
        assert!(
            matches!(&open[..], [one] if one.to_string_lossy().starts_with("socket:")),
            "{open:?}"
        );
    }
}

/// Returns one line of a process's status.
fn status(pid: i32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("readable");
    let found = status.lines().find_map(|line| line.strip_prefix(name));
    let words = found
        .expect(name)
        .trim_start_matches(':')
        .split_whitespace();
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn processes_of_an_ordinary_user_move_and_are_who_they_were() {
    const LIMITED: &[&str] = &["--no-new-privs", "--bounding-set=-all,+chown"];
    for (arguments, program) in [(&[][..], SLEEP), (LIMITED, SLEEP), (&[], FAMILY)] {
        let sleeper = Sleeper::start(arguments, program);
        let original = sleeper.0.id() as i32;
        let who = |pid| {
            [
                "Uid",
                "Gid",
                "Groups",
                "CapInh",
                "CapPrm",
                "CapEff",
                "CapBnd",
                "CapAmb",
                "NoNewPrivs",
            ]
            .map(|name| status(pid, name))
        };
        let before = who(original);
        let here = moving::Host::own();
        let there = here.clone().with_rights(nobodys());
        let moved =
            moving::migrate(moving::Tree::original(original, &here), &there).expect("moves");
        assert_eq!(who(moved.root), before);
        let open = std::fs::read_dir(format!("/proc/{}/fd", moved.root))
            .expect("readable")
            .count();
        assert_eq!(open, 3, "the socket for descriptors stays");
        // The restorer ends with its process.
        // SAFETY: no pointers are passed.
        unsafe { libc::kill(moved.root, libc::SIGKILL) };
    }
}

#[test]
fn who_becomes_somebody_else_meanwhile_is_refused() {
    let tree = Sleeper::start(&[], SLEEP).tree();
    let mut restorer = moving::restorer();
    restorer.rights(&nobodys()).expect("taken");
    restorer.tree(&tree).expect("made");
    restorer.tree(&tree).expect("the same again");
    let mut other = tree.clone();
    other.processes[0].credentials.uids = [0; 4];
    let refusal = restorer
        .tree(&other)
        .expect_err("somebody else")
        .to_string();
    assert!(refusal.contains("try again"), "{refusal}");
}
