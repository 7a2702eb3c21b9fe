//! Processes of the benchmark: started in a role, pinned to a processor, controlled by lines of text.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use holdfast_sctp::SctpProvider;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

/// Processors of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct BenchProcessors {
    /// Processor of the measured registrar or echo server.
    pub measured: usize,
    /// Processor of all other processes.
    pub others: usize,
}

impl BenchProcessors {
    /// Returns the first and the last processor allowed for this process; one and the same if there is only one.
    ///
    /// # Errors
    /// The system does not tell the allowed processors.
    pub fn allowed() -> Result<Self> {
        let allowed =
            sched_getaffinity(Pid::from_raw(0)).context("query the allowed processors")?;
        let is_allowed = |&processor: &usize| allowed.is_set(processor) == Ok(true);
        let mut each = (0..CpuSet::count()).filter(is_allowed);
        let measured = each.next().context("no processor is allowed")?;
        let others = each.next_back().unwrap_or(measured);
        Ok(Self { measured, others })
    }
}

/// Binds this process to a processor.
pub(super) fn pin_to_processor(processor: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(processor)?;
    sched_setaffinity(Pid::from_raw(0), &set)
        .with_context(|| format!("pin to processor {processor}"))
}

/// Replaces this process by another program, pinned to one processor with all its threads. The program ends with the
/// process that started it.
///
/// # Errors
/// There is no such processor or program; otherwise the function does not return.
pub(super) fn exec_pinned(processor: usize, words: &[String]) -> Result<()> {
    pin_to_processor(processor)?;
    set_pdeathsig(Signal::SIGTERM)?;
    let (program, arguments) = words.split_first().context("no program to run")?;
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("run {program}"))
}

/// Returns the processor time that a process has used.
///
/// # Errors
/// There is no such process.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let pid = Pid::from_raw(i32::try_from(pid)?);
    let clock = clock_getcpuclockid(pid)
        .with_context(|| format!("find the CPU-time clock of process {pid}"))?;
    Ok(Duration::from(clock.now()?))
}

/// Returns the name of the SCTP implementation in use.
pub(super) fn transport_name() -> &'static str {
    match holdfast_sctp::provider() {
        SctpProvider::Kernel => "kernel",
        SctpProvider::Usrsctp => "usrsctp",
    }
}

/// A child process in a role. The child ends with its input, at the latest when this value is dropped.
#[derive(Debug)]
pub struct RoleProcess {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl RoleProcess {
    /// Starts a child process that is controlled by lines on its standard input.
    ///
    /// # Errors
    /// The program cannot be run.
    pub fn start(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .context("start a process of the benchmark")?;
        let output = child
            .stdout
            .take()
            .context("a process of the benchmark has no standard output")?;
        Ok(Self {
            child,
            output: BufReader::new(output),
        })
    }

    /// Returns the processor time that the child has used.
    ///
    /// # Errors
    /// The child has ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        cpu_time(self.child.id())
    }

    /// Reads the child's next line.
    ///
    /// # Errors
    /// The child has failed; the reason is on its standard error.
    pub fn read_line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a process of the benchmark failed");
        Ok(line)
    }

    /// Sends a line to the child, and returns the child's answer.
    ///
    /// # Errors
    /// As of [`read_line`](Self::read_line).
    pub fn send_line(&mut self, line: &str) -> Result<String> {
        let input = self
            .child
            .stdin
            .as_mut()
            .context("a process of the benchmark has no standard input")?;
        let written = writeln!(input, "{line}");
        written.context("a process of the benchmark has ended")?;
        self.read_line()
    }

    /// Closes the child's input, and waits for its end.
    ///
    /// # Errors
    /// wait(2) fails.
    pub fn end(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for RoleProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
