//! A compromised donor: its data reaches only the process's own memory, and the restored process has no more rights
//! than the original.

use crate::migration;
use holdfast_checkpoint::donor::TreeTracker;
use holdfast_checkpoint::file_rights::{FileRights, UserIdentity};
use holdfast_checkpoint::image::{
    MemorySpace, PAGE, PageContent, PageRun, PagesMessage, TreeLayout,
};
use holdfast_checkpoint::procfs;
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
struct TestProgram(Child);

const SLEEP_COMMAND: &[&str] = &["sleep", "1000"];
/// A shell with children, one of which is born late.
const FORKING_COMMAND: &[&str] = &["sh", "-c", "sleep 1000 & sleep 0.5; sleep 1000 & wait"];

impl TestProgram {
    fn start(arguments: &[&str], program: &[&str]) -> Self {
        let identity_arguments = ["--reuid=65534", "--regid=65534", "--clear-groups"];
        let mut command = Command::new("setsid");
        command
            .arg("setpriv")
            .args(identity_arguments)
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
        let started = Instant::now();
        while !std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.trim_end() == program[0])
        {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "the program does not start"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child)
    }

    /// Returns the tree as a donor reports it.
    fn tree(&self) -> TreeLayout {
        let mut tracker = TreeTracker::start(self.0.id() as i32).expect("watched");
        tracker.next_round().expect("a round").tree
    }
}

impl Drop for TestProgram {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn nobody_rights() -> FileRights {
    let identity = UserIdentity {
        user: NOBODY,
        group: NOBODY,
        groups: Vec::new(),
    };
    FileRights::Limited {
        identities: [identity].into(),
        directories: Vec::new(),
    }
}

fn page(start: u64, content: PageContent) -> PagesMessage {
    let run = PageRun {
        space: MemorySpace::Process(0),
        start,
        length: PAGE,
        content,
    };
    PagesMessage {
        runs: vec![run],
        bytes: match content {
            PageContent::Bytes => vec![0xcc; PAGE as usize],
            PageContent::Initial => Vec::new(),
        },
    }
}

#[test]
fn pages_reach_only_memory_of_the_process() {
    let tree = TestProgram::start(&[], SLEEP_COMMAND).tree();
    for rights in [FileRights::Root, nobody_rights()] {
        let mut restorer = migration::restorer();
        restorer.set_rights(&rights).expect("taken");
        restorer.update_tree(&tree).expect("made");
        let stub_pid = restorer.root().expect("readable").expect("made");
        let memory = std::fs::File::open(format!("/proc/{stub_pid}/mem")).expect("opens");
        let read = |at: u64| {
            let mut page = vec![0; PAGE as usize];
            memory.read_exact_at(&mut page, at).map(|()| page).ok()
        };
        let is_mapped_by_tree = |at: u64| {
            let mut mappings = tree.processes[0].mappings.iter();
            let within = |name: &str| name.starts_with("[v");
            mappings.any(|mapping| {
                let is_kernel_mapping = matches!(
                    &mapping.backing,
                    holdfast_checkpoint::image::MappingBacking::Kernel(name) if within(name)
                );
                mapping.start <= at && at < mapping.end && !is_kernel_mapping
            })
        };
        let lines = procfs::mappings(stub_pid).expect("mappings");
        let foreign: Vec<u64> = (lines.iter())
            .flat_map(|line| [line.start, line.end - PAGE])
            .filter(|at| !is_mapped_by_tree(*at) && *at < 1 << 47)
            .collect();
        // The restorer's stub at least, and the vDSO.
        assert!(foreign.len() >= 4, "{foreign:x?}");
        for at in foreign.iter().copied().chain([0, 0x5000_0000_0000]) {
            let before = read(at);
            for content in [PageContent::Bytes, PageContent::Initial] {
                assert!(restorer.write_pages(page(at, content)).is_err(), "{at:#x}");
            }
            assert!(read(at) == before, "{at:#x}");
        }
        let heap = (tree.processes[0].mappings.iter())
            .find(|mapping| mapping.protection == 3)
            .expect("a heap");
        restorer
            .write_pages(page(heap.start, PageContent::Bytes))
            .expect("a page of its own memory");
        assert_eq!(read(heap.start), Some(vec![0xcc; PAGE as usize]));
        assert!(
            restorer
                .write_pages(page(heap.start - PAGE, PageContent::Bytes))
                .is_err()
                || is_mapped_by_tree(heap.start - PAGE)
        );
    }
}

#[test]
fn stub_process_has_dropped_privileges_before_loading_the_image() {
    for (arguments, limited) in [
        (&[][..], false),
        (&["--no-new-privs", "--bounding-set=-all,+chown"], true),
    ] {
        let program = TestProgram::start(arguments, SLEEP_COMMAND);
        let tree = program.tree();
        let mut restorer = migration::restorer();
        restorer.set_rights(&nobody_rights()).expect("taken");
        restorer.update_tree(&tree).expect("made");
        let stub_pid = restorer.root().expect("readable").expect("made");
        let status_line = |pid: i32, name: &str| {
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
            (status_line(stub_pid, "Uid"), status_line(stub_pid, "Gid")),
            (nobody.clone(), nobody)
        );
        assert_eq!(status_line(stub_pid, "Groups"), "");
        for name in ["CapPrm", "CapEff"] {
            assert_eq!(status_line(stub_pid, name), ONE_CAPABILITY);
        }
        for name in ["CapInh", "CapAmb"] {
            assert_eq!(status_line(stub_pid, name), NONE);
        }
        let original = program.0.id() as i32;
        assert_eq!(
            status_line(stub_pid, "CapBnd"),
            status_line(original, "CapBnd")
        );
        assert_eq!(
            status_line(stub_pid, "NoNewPrivs"),
            u8::from(limited).to_string()
        );
        // The stub process has only one open descriptor: the socket through which descriptors are passed.
        let open: Vec<_> = (std::fs::read_dir(format!("/proc/{stub_pid}/fd")).expect("readable"))
            .map(|entry| std::fs::read_link(entry.expect("an entry").path()).expect("a link"))
            .collect();
        assert!(
            matches!(&open[..], [one] if one.to_string_lossy().starts_with("socket:")),
            "{open:?}"
        );
    }
}

/// Returns one line of a process's status.
fn status_line(pid: i32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("readable");
    let found = status.lines().find_map(|line| line.strip_prefix(name));
    let words = found
        .expect(name)
        .trim_start_matches(':')
        .split_whitespace();
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn unprivileged_processes_keep_their_credentials() {
    const LIMITED: &[&str] = &["--no-new-privs", "--bounding-set=-all,+chown"];
    for (arguments, program) in [
        (&[][..], SLEEP_COMMAND),
        (LIMITED, SLEEP_COMMAND),
        (&[], FORKING_COMMAND),
    ] {
        let test_program = TestProgram::start(arguments, program);
        let original = test_program.0.id() as i32;
        let credentials = |pid| {
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
            .map(|name| status_line(pid, name))
        };
        let before = credentials(original);
        let here = migration::Host::local();
        let there = here.clone().with_rights(nobody_rights());
        let moved =
            migration::migrate(migration::Tree::original(original, &here), &there).expect("moves");
        assert_eq!(credentials(moved.root), before);
        let open = std::fs::read_dir(format!("/proc/{}/fd", moved.root))
            .expect("readable")
            .count();
        assert_eq!(open, 3, "only the standard descriptors are open");
        // The restorer ends with its process.
        // SAFETY: no pointers are passed.
        unsafe { libc::kill(moved.root, libc::SIGKILL) };
    }
}

#[test]
fn change_of_credentials_is_refused() {
    let tree = TestProgram::start(&[], SLEEP_COMMAND).tree();
    let mut restorer = migration::restorer();
    restorer.set_rights(&nobody_rights()).expect("taken");
    restorer.update_tree(&tree).expect("made");
    restorer.update_tree(&tree).expect("the same tree again");
    let mut other = tree.clone();
    other.processes[0].credentials.uids = [0; 4];
    let refusal = restorer
        .update_tree(&other)
        .expect_err("credentials of another user")
        .to_string();
    assert!(refusal.contains("try again"), "{refusal}");
}
