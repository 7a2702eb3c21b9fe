//! Active checks of a server: connections from this node, and programs of the operator. Each service with checks has a
//! thread, since a check may take its whole time limit.
//!
//! A script that the group's settings name is one that operators of other nodes can choose. They choose among the scripts
//! that root of this host has put into one directory, and cannot give arguments.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use holdfast_proto::health::CheckKind;
use holdfast_wire::health_frames::{ServerProblem, ServiceEndpoint};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{Observation, ObservationSender};
use crate::config::{CheckConfig, CheckScript, ServiceConfig};

/// Time between two looks at a running script.
const SCRIPT_POLL: Duration = Duration::from_millis(5);

/// The running checks of a service. Dropping the value ends them: one that is under way still has its result.
#[derive(Debug)]
pub(crate) struct RunningChecks {
    check: CheckConfig,
    pool: String,
    /// Closes with this value. Nothing is sent.
    _running: SyncSender<()>,
}

impl RunningChecks {
    /// Starts the checks of a service, in a thread with the privileges of the calling one. None if the service has no
    /// checks.
    ///
    /// # Errors
    /// There is no memory for a thread.
    pub fn start(
        service: &ServiceConfig,
        observations: &ObservationSender,
    ) -> io::Result<Option<RunningChecks>> {
        if service.check.kinds().is_empty() {
            return Ok(None);
        }
        let (running, ended) = sync_channel(0);
        let checks = RunningChecks {
            check: service.check.clone(),
            pool: service.pool.clone(),
            _running: running,
        };
        let (check, pool, endpoint) = (
            service.check.clone(),
            service.pool.clone(),
            service.endpoint(),
        );
        let observations = observations.clone();
        std::thread::Builder::new()
            .name("server-check".to_owned())
            .spawn(move || run(&check, &pool, endpoint, (&observations, &ended)))?;
        Ok(Some(checks))
    }

    /// Returns true if these are the checks that the service has now.
    pub fn are_those_of(&self, service: &ServiceConfig) -> bool {
        (&self.check, &self.pool) == (&service.check, &service.pool)
    }
}

fn run(
    check: &CheckConfig,
    pool: &str,
    service: ServiceEndpoint,
    (observations, ended): (&ObservationSender, &Receiver<()>),
) {
    loop {
        let begin = Instant::now();
        let send = |kind, result| {
            let observation = Observation::Check {
                service,
                kind,
                result,
            };
            let _ = observations.try_send(observation);
        };
        if check.connect {
            let result = check_connect(service.address, check.timeout);
            send(CheckKind::Connect, result);
        }
        if let Some(script) = &check.script {
            let result = check_script(script, pool, service, check.timeout);
            send(CheckKind::Script, result);
        }
        let rest = check.interval.saturating_sub(begin.elapsed());
        if ended.recv_timeout(rest) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

/// Connects to the service address from the loopback address, and closes the connection at once.
fn check_connect(service: SocketAddr, timeout: Duration) -> Result<(), ServerProblem> {
    let failed = |error: rustix::io::Errno| ServerProblem::ConnectFailed {
        os_error: error.raw_os_error(),
    };
    let (family, loopback) = match service {
        SocketAddr::V4(_) => (AddressFamily::INET, IpAddr::from(Ipv4Addr::LOCALHOST)),
        SocketAddr::V6(_) => (AddressFamily::INET6, IpAddr::from(Ipv6Addr::LOCALHOST)),
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?;
    rustix::net::bind(&socket, &SocketAddr::new(loopback, 0)).map_err(failed)?;
    match rustix::net::connect(&socket, &service) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::INPROGRESS) => {}
        Err(error) => return Err(failed(error)),
    }
    let limit = Timespec::try_from(timeout).map_err(|_| ServerProblem::ConnectTimedOut)?;
    let mut events = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)];
    if poll(&mut events, Some(&limit)).map_err(failed)? == 0 {
        return Err(ServerProblem::ConnectTimedOut);
    }
    match rustix::net::sockopt::socket_error(&socket).map_err(failed)? {
        Ok(()) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Checks that only root can have written the script.
fn check_trust(script: &Path) -> Result<(), ServerProblem> {
    let metadata = |path: &Path| {
        // A link could lead to a place that other users can change.
        path.symlink_metadata()
            .map_err(|error| ServerProblem::ScriptNotStarted {
                os_error: error.raw_os_error().unwrap_or(0),
            })
    };
    let directory = metadata(script.parent().unwrap_or(script))?;
    let file = metadata(script)?;
    let is_of_root = |uid: u32, mode: u32| uid == 0 && mode & 0o022 == 0;
    let is_trusted = directory.is_dir()
        && file.is_file()
        && is_of_root(directory.uid(), directory.mode())
        && is_of_root(file.uid(), file.mode());
    match is_trusted {
        true => Ok(()),
        false => Err(ServerProblem::ScriptUntrusted),
    }
}

/// Runs the operator's program. Exit code 0 means that the server is well.
fn check_script(
    script: &CheckScript,
    pool: &str,
    service: ServiceEndpoint,
    timeout: Duration,
) -> Result<(), ServerProblem> {
    if script.is_named_by_group {
        check_trust(&script.path)?;
    }
    let mut command = Command::new(&script.path);
    command
        .env("HOLDFAST_SERVICE", pool)
        .env("HOLDFAST_PROTOCOL", service.protocol.to_string())
        .env("HOLDFAST_ADDRESS", service.address.ip().to_string())
        .env("HOLDFAST_PORT", service.address.port().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    let mut child = command
        .spawn()
        .map_err(|error| ServerProblem::ScriptNotStarted {
            os_error: error.raw_os_error().unwrap_or(0),
        })?;
    let result = wait_for_script(&mut child, timeout);
    if result == Err(ServerProblem::ScriptTimedOut) {
        // The script still has its number, which is that of the group of all processes that it has started.
        let group = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
        let _ = killpg(group, Signal::SIGKILL);
        let _ = child.wait();
    }
    result
}

fn wait_for_script(child: &mut Child, timeout: Duration) -> Result<(), ServerProblem> {
    let deadline = Instant::now() + timeout;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                return match (status.code(), status.signal()) {
                    (Some(0), _) => Ok(()),
                    (Some(exit_code), _) => Err(ServerProblem::ScriptFailed { exit_code }),
                    (None, signal) => Err(ServerProblem::ScriptKilled {
                        signal: signal.unwrap_or(0),
                    }),
                };
            }
            Ok(None) if Instant::now() < deadline => std::thread::sleep(SCRIPT_POLL),
            Ok(None) => return Err(ServerProblem::ScriptTimedOut),
            Err(error) => {
                return Err(ServerProblem::ScriptNotStarted {
                    os_error: error.raw_os_error().unwrap_or(0),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use holdfast_wire::Protocol;
    use std::net::TcpListener;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::path::PathBuf;

    const LIMIT: Duration = Duration::from_secs(10);

    fn endpoint(port: u16) -> ServiceEndpoint {
        ServiceEndpoint {
            protocol: Protocol::Tcp,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
        }
    }

    #[test]
    fn connect_check_tells_listener_from_none() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(check_connect(address, LIMIT), Ok(()));
        drop(listener);
        let os_error = rustix::io::Errno::CONNREFUSED.raw_os_error();
        let refused = Err(ServerProblem::ConnectFailed { os_error });
        assert_eq!(check_connect(address, LIMIT), refused);
    }

    fn of_file(path: PathBuf) -> CheckScript {
        CheckScript {
            path,
            is_named_by_group: false,
        }
    }

    #[test]
    fn result_of_a_script_is_its_exit_code_signal_or_time() {
        let directory = tempfile::tempdir().unwrap();
        let run = |name: &str, body: &str, limit| {
            let path = directory.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
            check_script(&of_file(path), "web", endpoint(80), limit)
        };
        let environment = "test $HOLDFAST_SERVICE-$HOLDFAST_PROTOCOL-$HOLDFAST_ADDRESS-\
                           $HOLDFAST_PORT = web-tcp-127.0.0.1-80";
        assert_eq!(run("well", environment, LIMIT), Ok(()));
        let failed = Err(ServerProblem::ScriptFailed { exit_code: 3 });
        assert_eq!(run("failed", "exit 3", LIMIT), failed);
        let killed = Err(ServerProblem::ScriptKilled { signal: 15 });
        assert_eq!(run("killed", "kill -TERM $$", LIMIT), killed);
        let late = run("late", "sleep 60", Duration::from_millis(50));
        assert_eq!(late, Err(ServerProblem::ScriptTimedOut));
        let missing = directory.path().join("missing");
        let started = check_script(&of_file(missing), "web", endpoint(80), LIMIT);
        assert_eq!(
            started,
            Err(ServerProblem::ScriptNotStarted { os_error: 2 })
        );
    }

    #[test]
    fn script_of_the_group_runs_only_if_nobody_else_can_write_it() {
        let directory = tempfile::tempdir().unwrap();
        let set_mode = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        };
        let (script, link) = (directory.path().join("well"), directory.path().join("link"));
        std::fs::write(&script, "#!/bin/sh\nexit 0\n").unwrap();
        symlink(&script, &link).unwrap();
        let run = |path: &Path| {
            let named = CheckScript {
                path: path.to_owned(),
                is_named_by_group: true,
            };
            check_script(&named, "web", endpoint(80), LIMIT)
        };
        let untrusted = Err(ServerProblem::ScriptUntrusted);
        set_mode(&script, 0o755);
        // The directory belongs to the user of this test.
        let is_root = directory.path().symlink_metadata().unwrap().uid() == 0;
        assert_eq!(run(&script), if is_root { Ok(()) } else { untrusted });
        assert_eq!(run(&link), untrusted);
        set_mode(&script, 0o775);
        assert_eq!(run(&script), untrusted);
        set_mode(&script, 0o755);
        set_mode(directory.path(), 0o777);
        assert_eq!(run(&script), untrusted);
        let missing = Err(ServerProblem::ScriptNotStarted { os_error: 2 });
        assert_eq!(run(&directory.path().join("missing")), missing);
    }

    #[test]
    fn checks_end_when_they_are_dropped() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let service = ServiceConfig {
            pool: "web".to_owned(),
            address: listener.local_addr().unwrap(),
            protocol: Protocol::Tcp,
            placement: crate::config::PlacementRule::Hash,
            weights: std::collections::BTreeMap::new(),
            check: CheckConfig {
                connect: true,
                interval: Duration::from_millis(10),
                ..CheckConfig::default()
            },
            drain: None,
            policy: holdfast_wire::group_data::ServicePolicy::default(),
            row: 0,
            is_ending: false,
            replication: None,
        };
        let (sender, mut observations) = super::super::observation_channel();
        let checks = RunningChecks::start(&service, &sender).unwrap().unwrap();
        drop(sender);
        assert!(checks.are_those_of(&service));
        for _ in 0..3 {
            assert!(observations.blocking_recv().is_some());
        }
        drop(checks);
        // The thread drops its sender when it ends.
        while observations.blocking_recv().is_some() {}
        let without = ServiceConfig {
            check: CheckConfig::default(),
            ..service
        };
        let (sender, _receiver) = super::super::observation_channel();
        assert!(RunningChecks::start(&without, &sender).unwrap().is_none());
    }
}
