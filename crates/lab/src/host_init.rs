//! The first process of a host: prepares its namespaces and reaps orphans; the host exists as long as this process.

use std::{
    fs, io,
    io::{BufRead, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::exit,
    sync::atomic::{AtomicBool, Ordering},
};

use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CloneFlags, unshare},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, sethostname},
};
use serde::{Deserialize, Serialize};

use crate::{
    enter_host_command,
    error::{ErrorContext, Result},
    link,
    processor_limit::{self, ProcessorGroup},
};

/// True if the running program has called [`run_hidden_role`].
pub(crate) static PLAYS_HIDDEN_ROLES: AtomicBool = AtomicBool::new(false);

/// Exit code of a hidden role that fails, distinct from the exit codes of the command it runs.
const EXIT_FAILED: i32 = 125;

/// Parameters of an init process.
#[derive(Serialize, Deserialize)]
pub(crate) struct InitTask {
    pub hostname: String,
    pub cgroup: PathBuf,
    /// The group of version 1 that limits the host's processors.
    pub processor_group: Option<ProcessorGroup>,
    /// Kernel settings, as paths below `/proc/sys`. Settings that this kernel lacks are omitted.
    pub settings: Vec<(String, String)>,
    /// Keep running after the owner has ended.
    pub keep: bool,
}

/// Runs a hidden role if the program was started for one, and then does not return. Must be called at the start of
/// `main`, before any thread is started.
pub fn run_hidden_role() {
    PLAYS_HIDDEN_ROLES.store(true, Ordering::Relaxed);
    let mut arguments = std::env::args_os().skip(1);
    let role = arguments.next().unwrap_or_default();
    let result = match role.to_str() {
        Some("lab-init") => run(),
        Some("lab-enter") => enter_host_command::run(arguments.collect()),
        Some("lab-inner") => enter_host_command::run_inner(arguments.collect()),
        Some("lab-link") => link::run(),
        _ => return,
    };
    let code = result.unwrap_or_else(|error| {
        eprintln!("holdfast lab: {error}");
        EXIT_FAILED
    });
    exit(code);
}

/// Reads the line with the parameters of a hidden role.
pub(crate) fn read_task<T: serde::de::DeserializeOwned>() -> Result<T> {
    let mut line = String::new();
    io::stdin()
        .lock()
        .read_line(&mut line)
        .context(|| "read the task from standard input".into())?;
    serde_json::from_str(&line)
        .map_err(io::Error::from)
        .context(|| "parse the task".into())
}

/// Tells the owner that the role has started.
pub(crate) fn report_ready() -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(b"ready\n")
        .and_then(|()| out.flush())
        .context(|| "report readiness".into())
}

/// Moves the calling process into a control group.
pub(crate) fn join_cgroup(group: &Path) -> Result<()> {
    fs::write(group.join("cgroup.procs"), "0")
        .context(|| format!("join control group {}", group.display()))
}

fn run() -> Result<i32> {
    let task: InitTask = read_task()?;
    join_cgroup(&task.cgroup)?;
    if let Some(group) = &task.processor_group {
        join_cgroup(&group.directory)?;
    }
    let signals = watch_children()?;
    unshare(CloneFlags::CLONE_NEWCGROUP).context(|| "create a control group namespace".into())?;
    mount_host_filesystems()?;
    if let Some(group) = &task.processor_group {
        processor_limit::mount_inside(group)?;
    }
    sethostname(&task.hostname).context(|| "set the host name".into())?;
    for (name, value) in &task.settings {
        write_sysctl(name, value)?;
    }
    report_ready()?;
    reap_until_owner_ends(&signals, task.keep)
}

fn watch_children() -> Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    set.thread_block().context(|| "block SIGCHLD".into())?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .context(|| "create a signal descriptor for SIGCHLD".into())
}

/// Mounts views of the kernel that show only this host. The machine's files stay visible.
fn mount_host_filesystems() -> Result<()> {
    let none: Option<&str> = None;
    // Unmounts on the machine propagate here, but nothing here propagates to the machine.
    mount(none, "/", none, MsFlags::MS_SLAVE | MsFlags::MS_REC, none)
        .context(|| "stop mount propagation to the machine".into())?;
    let restrictive = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    for (kind, path, options) in [
        ("proc", "/proc", None),
        ("sysfs", "/sys", None),
        ("bpf", "/sys/fs/bpf", Some("mode=0700")),
        ("cgroup2", enter_host_command::CGROUP_INSIDE, None),
        ("tmpfs", "/run", Some("mode=0755")),
    ] {
        mount(Some(kind), path, Some(kind), restrictive, options)
            .context(|| format!("mount {kind} on {path}"))?;
    }
    fs::create_dir_all("/run/holdfast").context(|| "create /run/holdfast".into())
}

fn write_sysctl(name: &str, value: &str) -> Result<()> {
    match fs::write(Path::new("/proc/sys").join(name), value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done.context(|| format!("set {name} to {value}")),
    }
}

/// Reaps children until the owner has ended, or forever.
fn reap_until_owner_ends(signals: &SignalFd, keep: bool) -> Result<i32> {
    let stdin = io::stdin();
    loop {
        let mut watched = vec![PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        if !keep {
            watched.push(PollFd::new(stdin.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut watched, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            polled => polled.context(|| "wait for children".into())?,
        };
        // The owner never writes again: any event means that its end of the pipe is closed.
        if watched.get(1).and_then(PollFd::any) == Some(true) {
            return Ok(0);
        }
        while matches!(signals.read_signal(), Ok(Some(_))) {}
        while !matches!(
            waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)),
            Err(_) | Ok(WaitStatus::StillAlive)
        ) {}
    }
}
