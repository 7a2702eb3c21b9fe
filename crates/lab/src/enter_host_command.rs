//! Runs a command inside a host, from a process outside.
//!
//! Uses two processes. The outer one joins the host's control group and namespaces, starts the inner one (only a child
//! can be in another PID namespace), forwards signals and returns the exit code. The inner one requests to be killed
//! when the outer one dies, and then becomes the command. So a caller can treat the outer process as if it were the
//! command.

use std::{
    env,
    ffi::OsString,
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Child, Command, ExitStatus},
};

use nix::{
    libc::SI_KERNEL,
    sched::{CloneFlags, setns, unshare},
    sys::{
        prctl::set_pdeathsig,
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::{Pid, getppid},
};

use crate::{
    error::{Error, ErrorContext, Result},
    host_init::join_cgroup,
    lab_state::LabState,
    namespace::ProcessRef,
};

/// Path of a host's own control group inside the host.
pub(crate) const CGROUP_INSIDE: &str = "/sys/fs/cgroup";

/// A shell's exit codes for a command that cannot be run, and for one that is not found.
const CANNOT_RUN: i32 = 126;
const NOT_FOUND: i32 = 127;

const FORWARDED_SIGNALS: [Signal; 6] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
];

/// The outer process: `lab-enter LAB HOST -- COMMAND…`.
pub(crate) fn run(arguments: Vec<OsString>) -> Result<i32> {
    let usage = || Error::Invalid("usage: lab-enter LAB HOST -- COMMAND...".into());
    let [lab, host, dashes, command @ ..] = arguments.as_slice() else {
        return Err(usage());
    };
    let (lab, host) = (lab.to_string_lossy(), host.to_string_lossy());
    if dashes != "--" || command.is_empty() {
        return Err(usage());
    }
    let state = LabState::load(&lab)?;
    let own_program = env::current_exe().context(|| "find the path of this program".into())?;
    let signals = watch_signals()?;
    enter_host(&state, &host)?;
    let child = Command::new(own_program)
        .arg("lab-inner")
        .args(command)
        .env("HOLDFAST_LAB", &*lab)
        .env("HOLDFAST_HOST", &*host)
        .env("HOLDFAST_CGROUP", CGROUP_INSIDE)
        .spawn()
        .context(|| "start the process in the host".into())?;
    let status = wait_forwarding_signals(child, &signals)?;
    // Encode a death by signal as a shell does.
    Ok(status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

/// The inner process: `lab-inner COMMAND…`.
pub(crate) fn run_inner(command: Vec<OsString>) -> Result<i32> {
    set_pdeathsig(Signal::SIGKILL).context(|| "set the parent-death signal".into())?;
    // The outer process is in another PID namespace, so getppid() returns 0; after its death the parent is init.
    if getppid() != Pid::from_raw(0) {
        return Ok(128 + Signal::SIGKILL as i32);
    }
    // An executed program inherits blocked signals; the outer process has blocked these for its own use.
    watched_signals()
        .thread_unblock()
        .context(|| "unblock signals".into())?;
    let Some((program, arguments)) = command.split_first() else {
        return Err(Error::Invalid("no command to run in the host".into()));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    let error = command.exec();
    eprintln!("holdfast lab: {}: {error}", Path::new(program).display());
    let missing = error.kind() == io::ErrorKind::NotFound;
    Ok(if missing { NOT_FOUND } else { CANNOT_RUN })
}

fn watch_signals() -> Result<SignalFd> {
    let set = watched_signals();
    set.thread_block().context(|| "block signals".into())?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC)
        .context(|| "create a signal descriptor".into())
}

fn watched_signals() -> SigSet {
    FORWARDED_SIGNALS
        .into_iter()
        .chain([Signal::SIGCHLD])
        .collect()
}

/// Joins the host's control group and namespaces, and restores the working directory.
fn enter_host(state: &LabState, host: &str) -> Result<()> {
    let init: &ProcessRef = state.host_init(host)?;
    let host_gone = |_| Error::HostGone(host.into());
    let kinds = [
        ("cgroup", CloneFlags::CLONE_NEWCGROUP),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("uts", CloneFlags::CLONE_NEWUTS),
        ("net", CloneFlags::CLONE_NEWNET),
        ("pid", CloneFlags::CLONE_NEWPID),
        // Join the mount namespace last, because it changes the meaning of paths.
        ("mnt", CloneFlags::CLONE_NEWNS),
    ];
    let namespaces =
        kinds.map(|(kind, flag)| init.open_namespace(kind).map(|file| (kind, flag, file)));
    join_cgroup(&state.host_cgroup(host)).map_err(host_gone)?;
    if let Some(group) = state.processor_groups.get(host) {
        join_cgroup(&group.directory)?;
    }
    let directory = env::current_dir();
    // A process with threads that share a working directory may not change its mount namespace.
    unshare(CloneFlags::CLONE_FS).context(|| "unshare the working directory".into())?;
    for namespace in namespaces {
        let (kind, flag, file) = namespace.map_err(host_gone)?;
        setns(file, flag).context(|| format!("enter the {kind} namespace of {host}"))?;
    }
    if let Ok(directory) = directory {
        // The host's own mounts may hide the directory; then the command starts in the root directory.
        let _ = env::set_current_dir(directory);
    }
    Ok(())
}

fn wait_forwarding_signals(mut child: Child, signals: &SignalFd) -> Result<ExitStatus> {
    let describe = || "wait for the command".to_owned();
    loop {
        if let Some(status) = child.try_wait().context(describe)? {
            return Ok(status);
        }
        let Some(info) = signals.read_signal().context(describe)? else {
            continue;
        };
        // The command receives signals from the terminal directly.
        if info.ssi_code == SI_KERNEL {
            continue;
        }
        if let Some(signal) = FORWARDED_SIGNALS
            .into_iter()
            .find(|signal| *signal as u32 == info.ssi_signo)
        {
            // Fails only if the command has ended, as the next iteration detects.
            let _ = kill(Pid::from_raw(child.id() as i32), signal);
        }
    }
}
