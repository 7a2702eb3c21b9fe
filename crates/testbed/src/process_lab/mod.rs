//! Processes in the hosts of a lab: registrars, pool elements, pool users and other programs.

mod captures;

use std::fs::{self, File};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::control::BlockingControlClient;
use holdfast_lab::{Lab, LabSpec};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::cluster::find_program;
use captures::SctpCaptures;

/// Interval between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Lines of a log that an error shows.
const LOG_LINES_SHOWN: usize = 20;

/// A lab with its processes.
pub struct ProcessLab {
    // Declared before the lab, because the processes end with it.
    children: Vec<(String, Child)>,
    captures: SctpCaptures,
    lab: Option<Lab>,
    directory: TempDir,
}

impl ProcessLab {
    /// Creates a lab of `nodes` nodes and one client, without processes.
    ///
    /// # Errors
    /// The machine lacks a requirement.
    pub fn up(name: &str, nodes: u16) -> Result<ProcessLab> {
        let spec = LabSpec::new(name)
            .nodes(nodes)
            .clients(1)
            .program(find_program("holdfast")?);
        ProcessLab::from_spec(&spec)
    }

    /// Creates a lab as specified, without processes.
    ///
    /// # Errors
    /// The machine lacks a requirement.
    pub fn from_spec(spec: &LabSpec) -> Result<ProcessLab> {
        let directory = tempfile::Builder::new().prefix("holdfast-pools-").tempdir();
        let lab = Lab::up(spec)?;
        Ok(ProcessLab {
            children: Vec::new(),
            captures: SctpCaptures::start(&lab)?,
            directory: directory.context("create a directory for logs")?,
            lab: Some(lab),
        })
    }

    /// Returns the lab that the processes run in.
    ///
    /// # Panics
    /// Never: the lab exists until this value is dropped.
    pub fn lab(&self) -> &Lab {
        self.lab
            .as_ref()
            .expect("the lab exists until this value is dropped")
    }

    /// Returns the directory of logs and configurations.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Returns a host's address.
    ///
    /// # Errors
    /// There is no such host.
    pub fn address(&self, host: &str) -> Result<IpAddr> {
        Ok(self.lab().address(host)?.0.into())
    }

    /// Runs a program of this workspace or of the system in a host; its output goes to `HOST.NAME.log`.
    ///
    /// # Errors
    /// There is no such host or program.
    pub fn run(&mut self, host: &str, name: &str, program: &Path, words: &[String]) -> Result<()> {
        let log = File::create(self.log_path(host, name))?;
        let mut command = self.lab().command(host)?;
        command
            .arg(program)
            .args(words)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = command
            .spawn()
            .with_context(|| format!("start {name} on {host}"))?;
        self.children.push((format!("{host}.{name}"), child));
        Ok(())
    }

    /// Starts a registrar in `host` that trusts the hosts of the lab, with `peer` as its first peer, if given. The time
    /// limit for an element's answer to a keep-alive stays at the default: if a registrar restarts before its elements'
    /// SCTP has given the old association up, libusrsctp sends their answers only with the next heartbeat.
    ///
    /// # Errors
    /// There is no such host.
    pub fn start_registrar(&mut self, host: &str, peer: Option<&str>) -> Result<()> {
        let own = self.address(host)?;
        let text = format!(
            r#"[registrar]
listen = ["{own}"]
keep_alive_interval_ms = 2000
heartbeat_cycle_ms = 500
last_heard_max_ms = 2000
no_response_max_ms = 1000
[access]
registrar = ["10.0.0.0/8"]
[sctp]
association_retransmissions = 3
"#
        );
        let config = self.directory().join(format!("{host}.registrar.toml"));
        fs::write(&config, text)?;
        let mut words = command_words(["registrar", "--config"]);
        words.push(config.display().to_string());
        if let Some(peer) = peer {
            words.extend(["--peer".to_owned(), self.address(peer)?.to_string()]);
        }
        self.run(host, "registrar", &find_program("holdfast")?, &words)
    }

    /// Starts a pool daemon in `host` that knows the registrars of these hosts.
    ///
    /// # Errors
    /// There is no such host.
    pub fn start_pool_daemon(&mut self, host: &str, registrars: &[&str]) -> Result<()> {
        let mut words = command_words(["pool"]);
        words.extend(self.registrar_arguments(registrars)?);
        self.run(host, "pool", &find_program("rserpoold")?, &words)
    }

    /// Returns `--registrar ADDRESS` for each of these hosts.
    ///
    /// # Errors
    /// There is no such host.
    pub fn registrar_arguments(&self, hosts: &[&str]) -> Result<Vec<String>> {
        let mut words = Vec::new();
        for host in hosts {
            words.extend(["--registrar".to_owned(), self.address(host)?.to_string()]);
        }
        Ok(words)
    }

    /// Returns the path on the machine of a file in a host's `/run/holdfast`.
    ///
    /// # Errors
    /// There is no such host.
    pub fn run_path(&self, host: &str, name: &str) -> Result<PathBuf> {
        let init = self.lab().init_process(host)?;
        Ok(format!("/proc/{init}/root/run/holdfast/{name}").into())
    }

    /// Returns a client of the control API of a host's `registrar` or `pool` daemon.
    ///
    /// # Errors
    /// There is no such host.
    pub fn control_client(&self, host: &str, daemon: &str) -> Result<BlockingControlClient> {
        let socket = self.run_path(host, &format!("{daemon}.sock"))?;
        Ok(BlockingControlClient::new(socket)?)
    }

    /// Kills all processes in a host with SIGKILL, except for the host's init process; returns their number.
    ///
    /// # Errors
    /// There is no such host, or nothing runs in it.
    pub fn kill_all(&self, host: &str) -> Result<usize> {
        let init = self.lab().init_process(host)?;
        let mut processes = self.lab().processes(host)?;
        processes.retain(|process| *process != init);
        if processes.is_empty() {
            bail!("no process runs in {host}");
        }
        for process in &processes {
            // A process may already have ended together with another.
            let _ = kill(Pid::from_raw(*process), Signal::SIGKILL);
        }
        Ok(processes.len())
    }

    /// Kills the child started in a host under this name with SIGKILL, and waits for its end.
    ///
    /// # Errors
    /// No child has this name.
    pub fn kill_child(&mut self, host: &str, name: &str) -> Result<()> {
        let full = format!("{host}.{name}");
        let found = self.children.iter().position(|(child, _)| *child == full);
        let (_, mut child) = self.children.swap_remove(found.context(full)?);
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Kills processes of this name in a host with SIGKILL.
    ///
    /// # Errors
    /// There is no such host, or no such process in it.
    pub fn kill_by_name(&self, host: &str, name: &str) -> Result<()> {
        let is_it = |process: &i32| {
            let read = |file: &str| fs::read_to_string(format!("/proc/{process}/{file}"));
            let named = read("comm").is_ok_and(|comm| comm.trim_end() == name);
            // The lab's own processes have the same name as the program, but an argument `lab-...`.
            let of_lab = |words: String| {
                words
                    .split('\0')
                    .nth(1)
                    .is_some_and(|word| word.starts_with("lab-"))
            };
            named && !read("cmdline").is_ok_and(of_lab)
        };
        let processes = self.lab().processes(host)?;
        let found: Vec<i32> = processes.into_iter().filter(is_it).collect();
        if found.is_empty() {
            bail!("no {name} runs in {host}");
        }
        for process in found {
            kill(Pid::from_raw(process), Signal::SIGKILL)?;
        }
        Ok(())
    }

    /// Waits until `poll` returns a value.
    ///
    /// # Errors
    /// The wait takes longer than `limit`; the text contains the logs' ends.
    pub fn wait_for<T>(
        &self,
        what: &str,
        limit: Duration,
        mut poll: impl FnMut() -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(found) = poll() {
                return Ok(found);
            }
            if Instant::now() > deadline {
                bail!("exceeded time: waited for: {what}\n{}", self.log_tails());
            }
            sleep(POLL_INTERVAL);
        }
    }

    fn log_path(&self, host: &str, name: &str) -> PathBuf {
        self.directory().join(format!("{host}.{name}.log"))
    }

    /// Returns the ends of all logs.
    pub fn log_tails(&self) -> String {
        let one = |(name, _): &(String, Child)| {
            let text = fs::read_to_string(self.directory().join(format!("{name}.log")));
            let text = text.unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let end = lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n");
            format!("--- {name}:\n{end}\n")
        };
        self.children.iter().map(one).collect()
    }
}

impl Drop for ProcessLab {
    fn drop(&mut self) {
        drop(std::mem::take(&mut self.captures));
        // Dropping the lab kills every process in it.
        drop(self.lab.take());
        for (_, child) in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// Returns the words of a command.
pub fn command_words<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).into()
}

/// Finds a program of the system.
///
/// # Errors
/// The program is not in PATH; the text names its Debian package.
pub fn find_system_program(name: &str, package: &str) -> Result<PathBuf> {
    let found = Command::new("sh")
        .args(["-c", "command -v \"$0\"", name])
        .env("PATH", server_search_path())
        .output()?;
    let path = String::from_utf8_lossy(&found.stdout).trim().to_owned();
    if path.is_empty() {
        bail!("there is no {name}; install it with `apt-get install {package}`");
    }
    Ok(path.into())
}

/// Returns `PATH` with the directories of servers that only root starts.
fn server_search_path() -> String {
    let own = std::env::var("PATH").unwrap_or_default();
    format!("{own}:/usr/sbin:/sbin")
}

#[cfg(test)]
mod tests {
    use super::find_system_program;

    #[test]
    fn missing_program_is_reported_with_its_package() {
        assert!(find_system_program("sh", "dash").is_ok());
        let error = find_system_program("holdfast-has-no-such", "some-package").unwrap_err();
        let wanted =
            "there is no holdfast-has-no-such; install it with `apt-get install some-package`";
        assert_eq!(error.to_string(), wanted);
    }
}
