//! Processes that own a host's namespaces, and threads that enter these.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader, Write},
    os::unix::fs::MetadataExt,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
};

use nix::sched::{CloneFlags, setns, unshare};
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorContext, Result};

/// Identity of a process, which distinguishes it from a later process with the same PID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessRef {
    pub pid: i32,
    /// The start time, in clock ticks since boot.
    start_time: u64,
    /// The boot ID.
    boot_id: String,
    /// The PID namespace of `pid`, by its inode.
    pid_namespace: u64,
}

/// The inode of the initial PID namespace, in which the processes of all others are visible.
const INITIAL_PID_NAMESPACE: u64 = 0xefff_fffc;

impl ProcessRef {
    /// Returns the identity of the calling process.
    pub(crate) fn current() -> Result<ProcessRef> {
        ProcessRef::from_pid(std::process::id())
    }

    /// Returns the identity of a live process.
    pub(crate) fn from_pid(pid: u32) -> Result<ProcessRef> {
        let pid = pid as i32;
        let identify = || {
            Some(ProcessRef {
                pid,
                start_time: start_time(pid)?,
                boot_id: boot_id()?,
                pid_namespace: pid_namespace("self")?,
            })
        };
        identify().ok_or_else(|| Error::Machine(format!("process {pid} has ended")))
    }

    /// Returns true if the process runs (a zombie does not). A process of another PID namespace counts as running, as
    /// far as visible from here, while that namespace has any process.
    pub(crate) fn is_alive(&self) -> bool {
        boot_id().as_deref() == Some(&self.boot_id)
            && match pid_namespace("self") {
                Some(own) if own == self.pid_namespace => {
                    start_time(self.pid) == Some(self.start_time)
                }
                Some(INITIAL_PID_NAMESPACE) => has_processes(self.pid_namespace),
                _ => true,
            }
    }

    /// Returns true if the process runs, and its PID is valid in this PID namespace.
    fn is_in_this_namespace(&self) -> bool {
        pid_namespace("self") == Some(self.pid_namespace) && self.is_alive()
    }

    /// Opens one of the process's namespaces: `net`, `mnt`, `pid`, …. Checks the identity after opening, so that the
    /// namespace belongs to this very process.
    pub(crate) fn open_namespace(&self, kind: &str) -> Result<File> {
        let path = format!("/proc/{}/ns/{kind}", self.pid);
        let gone = || {
            let pid = self.pid;
            Error::Machine(format!(
                "process {pid} has ended, or belongs to another container"
            ))
        };
        let file = File::open(&path).map_err(|_| gone())?;
        if self.is_in_this_namespace() {
            Ok(file)
        } else {
            Err(gone())
        }
    }

    /// Moves the calling thread into the process's network namespace.
    pub(crate) fn enter_net_namespace(&self) -> Result<()> {
        setns(self.open_namespace("net")?, CloneFlags::CLONE_NEWNET)
            .context(|| "enter the network namespace".into())
    }

    /// Runs `work` on its own thread inside the process's network namespace.
    pub(crate) fn run_in_net_namespace<T: Send>(
        &self,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        run_on_thread(|| {
            self.enter_net_namespace()?;
            work()
        })
    }
}

/// Returns field 22 of `/proc/<pid>/stat`; none if the process has ended or is exiting, since a namespace's init
/// process waits for all others while exiting.
fn start_time(pid: i32) -> Option<u64> {
    /// `PF_EXITING` of field 9.
    const EXITING: u64 = 4;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field, the name, may contain any characters; it ends with the last parenthesis.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let flags: u64 = fields.nth(5)?.parse().ok()?;
    if flags & EXITING != 0 {
        return None;
    }
    fields.nth(12)?.parse().ok()
}

/// Returns the PID namespace of a process.
fn pid_namespace(process: &str) -> Option<u64> {
    let namespace = fs::metadata(format!("/proc/{process}/ns/pid"));
    Some(namespace.ok()?.ino())
}

/// Returns true if a process visible here belongs to this PID namespace.
fn has_processes(namespace: u64) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut names = processes.filter_map(|entry| entry.file_name().into_string().ok());
    names.any(|name| pid_namespace(&name) == Some(namespace))
}

fn boot_id() -> Option<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(text.trim().to_owned())
}

/// Runs `work` on a temporary thread, so that its namespace changes affect no other code.
pub(crate) fn run_on_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| match scope.spawn(work).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// The namespaces in which a process of a lab starts.
pub(crate) enum StartNamespaces<'a> {
    /// New namespaces. The network namespace takes its defaults from the given process's, if any.
    Unshared(Option<&'a ProcessRef>),
    /// The network namespace of this process.
    JoinNet(&'a ProcessRef),
}

/// Starts a process in a hidden role: sends its parameters as a line on its standard input, and waits for its answer
/// `ready`. The input stays open as long as the returned child is kept, which tells the process that its owner lives.
pub(crate) fn start_role<T: Serialize + Sync>(
    mut command: Command,
    task: &T,
    log: &Path,
    namespaces: &StartNamespaces<'_>,
) -> Result<Child> {
    let describe = || format!("start {:?}", command.get_program());
    let starting = describe();
    let log_file = File::create(log).context(|| format!("create {}", log.display()))?;
    let mut line = serde_json::to_vec(task)
        .map_err(io::Error::from)
        .context(describe)?;
    line.push(b'\n');
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log_file)
        .current_dir("/");
    let mut child = run_on_thread(move || {
        enter_namespaces(namespaces)?;
        command.spawn().context(|| starting)
    })?;
    let mut answer = String::new();
    let written = child.stdin.as_mut().map(|stdin| stdin.write_all(&line));
    let read = child
        .stdout
        .take()
        .map(|stdout| BufReader::new(stdout).read_line(&mut answer));
    if matches!((written, read), (Some(Ok(())), Some(Ok(_)))) && answer == "ready\n" {
        return Ok(child);
    }
    // Killing a process that has ended has no effect.
    let _ = child.kill();
    let status = child
        .wait()
        .context(|| "wait for a process of the lab".into())?;
    Err(Error::Program {
        program: "a process of the lab".into(),
        status,
        output: fs::read_to_string(log)
            .unwrap_or_default()
            .trim()
            .to_owned(),
    })
}

fn enter_namespaces(place: &StartNamespaces<'_>) -> Result<()> {
    match place {
        StartNamespaces::JoinNet(process) => process.enter_net_namespace(),
        StartNamespaces::Unshared(defaults) => {
            if let Some(process) = defaults {
                process.enter_net_namespace()?;
            }
            let all = CloneFlags::CLONE_NEWNS
                | CloneFlags::CLONE_NEWNET
                | CloneFlags::CLONE_NEWPID
                | CloneFlags::CLONE_NEWIPC
                | CloneFlags::CLONE_NEWUTS;
            unshare(all).context(|| "create namespaces".into())
        }
    }
}

/// Runs a helper program to completion with `input` on its standard input.
///
/// # Errors
/// [`Error::Program`] with the program's standard error output, when it fails.
pub(crate) fn run_program(program: &str, arguments: &[&str], input: &str) -> Result<()> {
    let describe = || format!("run {program} {}", arguments.join(" "));
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(describe)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that fails early closes its input; its exit code is checked below.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().context(describe)?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Program {
        program: format!("{program} {}", arguments.join(" ")),
        status: output.status,
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// A lab's owner in a container is not considered dead by a lab outside.
    #[test]
    fn process_in_other_pid_namespace_is_alive_while_namespace_has_processes() {
        let mut child = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "sleep", "infinity"])
            .spawn()
            .expect("unshare");
        let parent = format!("/proc/{0}/task/{0}/children", child.id());
        // Before it executes `sleep`, the child does not end with its parent.
        let children = || fs::read_to_string(&parent).expect("its children");
        let is_sleep = |pid: &str| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name.trim() == "sleep")
        };
        wait_until(|| is_sleep(children().trim()));
        let inside = children().trim().to_owned();
        let own = ProcessRef::current().expect("this process");
        let namespace = pid_namespace(&inside).expect("its namespace");
        assert_ne!(namespace, own.pid_namespace);
        let elsewhere = ProcessRef {
            pid: 1,
            pid_namespace: namespace,
            ..own.clone()
        };
        assert!(own.is_alive() && own.is_in_this_namespace());
        assert!(elsewhere.is_alive() && !elsewhere.is_in_this_namespace());
        assert!(elsewhere.open_namespace("net").is_err());
        child.kill().expect("it is ended");
        child.wait().expect("it has ended");
        // Only the initial namespace sees that the other is empty.
        wait_until(|| own.pid_namespace != INITIAL_PID_NAMESPACE || !elsewhere.is_alive());
    }

    fn wait_until(condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(
                Instant::now() < deadline,
                "exceeded time: the condition is still false"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }
}
