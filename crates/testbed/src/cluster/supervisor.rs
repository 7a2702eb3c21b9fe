//! Supervision of a program in a lab, with restarts as by systemd's `Restart=always`.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::Duration;

use anyhow::{Context, Result};

/// Interval at which a supervisor without permission to restart checks for it.
const RESTART_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// A program to run, and its host.
pub struct LaunchSpec {
    host: String,
    name: String,
    program: OsString,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    log: PathBuf,
    restart: bool,
    restart_delay: Duration,
}

impl LaunchSpec {
    /// Keeps `command` (of [`holdfast_lab::Lab::command`]) as text, so that it can be run many times.
    pub fn new(host: &str, name: &str, command: &Command, logs: &Path, restart: bool) -> Self {
        let environment = command.get_envs();
        Self {
            host: host.into(),
            name: name.into(),
            program: command.get_program().into(),
            arguments: command.get_args().map(Into::into).collect(),
            environment: environment
                .filter_map(|(key, value)| Some((key.into(), value?.into())))
                .collect(),
            log: logs.join(format!("{host}.{name}.log")),
            restart,
            restart_delay: Duration::ZERO,
        }
    }

    /// Sets the pause before a restart.
    pub fn restart_delay(mut self, delay: Duration) -> Self {
        self.restart_delay = delay;
        self
    }

    fn spawn(&self) -> Result<Child> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.log)?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .envs(self.environment.iter().map(|(key, value)| (key, value)));
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        command
            .spawn()
            .with_context(|| format!("start {} on {}", self.name, self.host))
    }
}

/// A supervised program. If dropped, supervision stops, but the program only ends with its lab.
pub struct SupervisedProgram {
    launch: Arc<LaunchSpec>,
    shared: Arc<SupervisionState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct SupervisionState {
    restart: AtomicBool,
    stop: AtomicBool,
    ended: AtomicBool,
    starts: AtomicU32,
}

impl SupervisedProgram {
    /// Starts the program, and a thread that restarts it when it ends.
    pub fn start(order: LaunchSpec) -> Result<Self> {
        let order = Arc::new(order);
        let shared = Arc::new(SupervisionState::default());
        shared.restart.store(order.restart, Ordering::Relaxed);
        let child = order.spawn()?;
        shared.starts.store(1, Ordering::Relaxed);
        let thread = {
            let (order, shared) = (Arc::clone(&order), Arc::clone(&shared));
            std::thread::spawn(move || supervise(&order, &shared, child))
        };
        Ok(Self {
            launch: order,
            shared,
            thread: Some(thread),
        })
    }

    pub fn host(&self) -> &str {
        &self.launch.host
    }

    pub fn name(&self) -> &str {
        &self.launch.name
    }

    /// Sets if the program is restarted when it ends.
    pub fn set_restart(&self, restart: bool) {
        self.shared.restart.store(restart, Ordering::Relaxed);
    }

    pub fn is_restarted(&self) -> bool {
        self.shared.restart.load(Ordering::Relaxed)
    }

    pub fn starts(&self) -> u32 {
        self.shared.starts.load(Ordering::Relaxed)
    }

    /// Returns true if the program has ended and is not restarted.
    pub fn has_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Relaxed)
    }

    /// Restarts the program no more; a running one goes on.
    pub fn stop_restarting(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }

    /// Returns the last lines of the program's log, under a heading.
    pub fn log_tail(&self, lines: usize) -> String {
        let mut last = VecDeque::new();
        if let Ok(log) = File::open(&self.launch.log) {
            for line in BufReader::new(log).lines().map_while(Result::ok) {
                if last.len() == lines {
                    last.pop_front();
                }
                last.push_back(line);
            }
        }
        let heading = format!(
            "--- {} on {}, started {} times:",
            self.name(),
            self.host(),
            self.starts()
        );
        std::iter::once(heading)
            .chain(last)
            .map(|line| line + "\n")
            .collect()
    }
}

impl Drop for SupervisedProgram {
    fn drop(&mut self) {
        self.stop_restarting();
        if let Some(thread) = self.thread.take() {
            // The thread ends with its child, which ends with the lab. A panic in the thread has nothing to add.
            let _ = thread.join();
        }
    }
}

fn supervise(order: &LaunchSpec, shared: &SupervisionState, mut child: Child) {
    let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
    loop {
        // Waiting for one's own child does not fail.
        let _ = child.wait();
        while !is_set(&shared.restart) && !is_set(&shared.stop) {
            shared.ended.store(true, Ordering::Relaxed);
            sleep(RESTART_CHECK_INTERVAL);
        }
        if !is_set(&shared.stop) {
            sleep(order.restart_delay);
        }
        if is_set(&shared.stop) {
            return;
        }
        match order.spawn() {
            Ok(next) => child = next,
            Err(error) => {
                eprintln!("{error:#}");
                return shared.ended.store(true, Ordering::Relaxed);
            }
        }
        shared.ended.store(false, Ordering::Relaxed);
        shared.starts.fetch_add(1, Ordering::Relaxed);
    }
}
