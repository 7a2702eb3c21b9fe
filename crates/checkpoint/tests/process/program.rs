//! A small C program under test.

use crate::migration::{Host, Tree};
use crate::process_cleanup;
use rustix::process::{WaitId, WaitIdOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time limit for any operation on a busy machine.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A running C program under test.
pub struct Program {
    folder: PathBuf,
    child: Child,
    pid: i32,
}

/// Makes a command's process close the test's descriptors: one that is open elsewhere too keeps a program from moving.
pub fn close_inherited_descriptors(command: &mut Command) {
    let close_others = || {
        let flags = libc::CLOSE_RANGE_CLOEXEC;
        // SAFETY: no pointers are passed.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, flags) };
        Ok(())
    };
    // SAFETY: the closure makes one system call.
    unsafe { command.pre_exec(close_others) };
}

impl Program {
    /// Compiles and starts a program, and waits until it reports that it is ready.
    pub fn start(source: &str) -> Self {
        Self::start_with(source, &[])
    }

    /// Starts a program that tests one feature, which the machine may lack.
    pub fn start_feature(name: &str) -> Self {
        Self::run(&["setsid"], &compile("features", name), name, &[])
    }

    /// Starts a program with arguments after its folder.
    pub fn start_with(source: &str, arguments: &[&str]) -> Self {
        // In a session of its own, whatever session the tests run in.
        Self::start_under(&["setsid"], source, arguments)
    }

    /// Starts a program through another command, which executes it or waits for it; the program is the command's last
    /// words.
    pub fn start_under(command: &[&str], source: &str, arguments: &[&str]) -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock();
        let program = compile("programs", source);
        drop(guard);
        Self::run(command, &program, source, arguments)
    }

    fn run(command: &[&str], program: &Path, source: &str, arguments: &[&str]) -> Self {
        let folder = scratch_folder(source);
        let mut starter = Command::new(command[0]);
        starter
            .args(&command[1..])
            .arg(program)
            .arg(&folder)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        process_cleanup::mark_command(&mut starter, &folder);
        close_inherited_descriptors(&mut starter);
        let child = starter.spawn().expect("starts");
        let pid = child.id() as i32;
        let mut started = Self { folder, child, pid };
        started.wait_for(|started| started.read("ready").is_some());
        // The program may run in a PID namespace below the command.
        started.pid = find_running(pid, program).unwrap_or(pid);
        started
    }

    /// Returns the feature that this machine lacks for the program.
    pub fn skipped(&self) -> Option<String> {
        self.read("skipped")
    }

    /// Returns the tree at the host where the program was started.
    pub fn tree(&self, host: &Host) -> Tree {
        Tree::original(self.pid, host)
    }

    /// Returns the program's PID before it moves.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Counts the processes that run this program with this folder, without their children.
    pub fn count_copies(&self) -> usize {
        let arguments =
            |pid: &str| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let own_arguments = arguments(&self.pid().to_string());
        let entries = std::fs::read_dir("/proc").expect("readable").flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let parent = |pid: &str| {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let line = status.lines().find_map(|line| {
                line.strip_prefix("PPid:")
                    .map(|text| text.trim().to_owned())
            });
            line.unwrap_or_default()
        };
        names
            .filter(|pid| {
                pid.parse::<i32>().is_ok()
                    && arguments(pid) == own_arguments
                    && arguments(&parent(pid)) != own_arguments
            })
            .count()
    }

    /// Creates a file for the program to find.
    pub fn create_file(&self, name: &str) {
        std::fs::write(self.folder.join(name), "").expect("writes");
    }

    /// Returns true if the program has written this file.
    pub fn has_written(&self, name: &str) -> bool {
        self.read(name).is_some()
    }

    /// Returns a number that the program has written.
    pub fn number(&self, name: &str) -> Option<i32> {
        self.read(name)?.parse().ok()
    }

    /// Returns true if a tracer, a stub or a `userfaultfd` is left in a process.
    pub fn has_traces(&self, pid: i32) -> bool {
        Tree::original(pid, &Host::local()).has_traces()
    }

    /// Waits until the program has checked itself a few more times.
    pub fn assert_runs_on(&self) {
        let heartbeat = |program: &Self| {
            program
                .read("beats")
                .and_then(|text| text.parse::<u64>().ok())
                .unwrap_or(0)
        };
        // Changes are counted, not the difference: a rolled-back program counts from an earlier value.
        let (mut last, mut changes) = (heartbeat(self), 0);
        self.wait_for(|program| {
            let now = heartbeat(program);
            changes += u32::from(now != last);
            last = now;
            changes >= 5
        });
    }

    /// Tells the program to end, and asserts that its verdict is good.
    pub fn assert_good_verdict(mut self, tree: Tree) {
        self.create_file("end");
        let status = tree.wait(&mut self.child, WAIT_LIMIT);
        let verdict = self
            .read("verdict")
            .unwrap_or_else(|| "no verdict".to_owned());
        assert_eq!((verdict.as_str(), status), ("passed", 0));
    }

    fn wait_for(&self, mut condition: impl FnMut(&Self) -> bool) {
        let started = Instant::now();
        while !condition(self) {
            if let Some(verdict) = self.read("verdict") {
                panic!("the program says: {verdict}");
            }
            if started.elapsed() >= WAIT_LIMIT {
                panic!(
                    "exceeded time: the program does not go on: {}",
                    self.describe_original()
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Describes the process that was started, which also ends once it has moved.
    fn describe_original(&self) -> String {
        let child = WaitId::Pid(rustix::process::Pid::from_child(&self.child));
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match rustix::process::waitid(child, ended) {
            Ok(Some(status)) => format!("{}: ended, {:?}", self.pid, status.exit_status()),
            other => format!("{}: {other:?}", self.pid),
        }
    }

    fn read(&self, name: &str) -> Option<String> {
        let link = std::fs::read_link(self.folder.join(name)).ok()?;
        link.into_os_string().into_string().ok()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:?} says: {:?}", self.folder, self.read("verdict"));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        process_cleanup::kill_marked(&self.folder);
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Returns the process that runs a program: this process, or the first one below it.
fn find_running(pid: i32, program: &Path) -> Option<i32> {
    if std::fs::read_link(format!("/proc/{pid}/exe")).ok()? == program {
        return Some(pid);
    }
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
    let mut children = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    children.find_map(|child| find_running(child, program))
}

/// Compiles a program once for all test runs: its name contains a hash of its source. The first line of the source may
/// have compiler flags.
fn compile(folder: &str, source: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/process");
    let path = sources.join(folder).join(source).with_extension("c");
    let read = |path: &Path| std::fs::read_to_string(path).expect("a source");
    let text = read(&path);
    let headers = ["programs/self.h", "features/feature.h"].map(|name| read(&sources.join(name)));
    let mut digest = DefaultHasher::new();
    (&text, headers).hash(&mut digest);
    let name = format!("{folder}-{source}-{:016x}", digest.finish());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    if !program.exists() {
        let first_line = text.lines().next().unwrap_or_default();
        let flags = first_line
            .strip_prefix("/* flags: ")
            .and_then(|line| line.strip_suffix(" */"));
        let temporary = program.with_extension(std::process::id().to_string());
        let status = Command::new("gcc")
            .args(["-O1", "-g", "-Wall", "-Wno-unused-function"])
            .args(["-D_GNU_SOURCE", "-pthread"])
            .args(flags.unwrap_or_default().split_whitespace())
            .arg("-o")
            .arg(&temporary)
            .arg(&path)
            .args(["-lrt", "-lm"])
            .status()
            .expect("gcc");
        assert!(status.success(), "{source}.c does not compile");
        // A file that another process has compiled meanwhile is not replaced, since it may run already.
        if let Err(error) = std::fs::hard_link(&temporary, &program) {
            assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists, "{error}");
        }
        std::fs::remove_file(&temporary).expect("removed");
    }
    program
}

/// Creates a folder that programs without privileges can reach.
fn scratch_folder(name: &str) -> PathBuf {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("holdfast-{name}-{}-{number}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}
