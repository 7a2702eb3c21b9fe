//! Conditions of a start, examined without changing anything. A daemon examines them before it starts, and with
//! `--check` instead of starting: both list all problems, and the same ones.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use crate::config::{LogConfig, TlsConfig};
use crate::exit_code::DaemonExitCode;
use crate::{logs, private_files, socket_path, tls};

/// A condition of a start that is not met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartProblem {
    text: String,
    code: DaemonExitCode,
    is_fatal: bool,
}

impl StartProblem {
    /// Returns true if the daemon cannot start; otherwise the daemon starts, and part of it does not work.
    pub fn is_fatal(&self) -> bool {
        self.is_fatal
    }
}

impl fmt::Display for StartProblem {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        text.write_str(&self.text)
    }
}

/// All problems of a start, at least one, each on a line of its own.
#[derive(Debug)]
pub struct StartProblems(Vec<StartProblem>);

impl StartProblems {
    /// Returns the exit code of a daemon with these problems: the first one by which another start cannot succeed.
    pub fn exit_code(&self) -> DaemonExitCode {
        let mut codes = self.0.iter().map(|problem| problem.code);
        codes
            .find(|code| *code != DaemonExitCode::Failure)
            .unwrap_or(DaemonExitCode::Failure)
    }
}

impl fmt::Display for StartProblems {
    fn fmt(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, problem) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { "\n" };
            write!(text, "{separator}{problem}")?;
        }
        Ok(())
    }
}

impl Error for StartProblems {}

/// Use of the addresses and sockets of the daemon at the time of the examination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressUse {
    /// Nothing may have them.
    Free,
    /// A running daemon with the same directory may have them.
    RunningDaemon,
}

/// An examination of the conditions of a daemon's start, with the problems found so far.
#[derive(Debug, Default)]
pub struct StartCheck {
    problems: Vec<StartProblem>,
}

impl StartCheck {
    /// Adds an error that prevents a start.
    pub fn add_error(&mut self, error: &(dyn Error + 'static)) {
        self.problems.push(StartProblem {
            text: error.to_string(),
            code: DaemonExitCode::of(error),
            is_fatal: true,
        });
    }

    /// Adds an error that prevents a start, with an exit code that the error does not tell.
    pub fn add_error_with_code(&mut self, error: impl fmt::Display, code: DaemonExitCode) {
        self.problems.push(StartProblem {
            text: error.to_string(),
            code,
            is_fatal: true,
        });
    }

    /// Adds a problem with which the daemon starts.
    pub fn add_warning(&mut self, problem: impl fmt::Display) {
        self.problems.push(StartProblem {
            text: problem.to_string(),
            code: DaemonExitCode::Configuration,
            is_fatal: false,
        });
    }

    /// Adds the error of a result, and returns its value.
    pub fn value_of<T, E: Error + 'static>(&mut self, result: Result<T, E>) -> Option<T> {
        result.inspect_err(|error| self.add_error(error)).ok()
    }

    /// Examines the log's filter.
    pub fn log(&mut self, config: &LogConfig) {
        self.value_of(logs::check(config));
    }

    /// Examines certificates and key: that they can be read, match, are valid at this time and in the revocation list,
    /// and that the certificate belongs to `owner`, if the owner is known.
    pub fn certificates(&mut self, config: &TlsConfig, owner: Option<&str>) {
        for error in tls::find_problems(config, owner) {
            match error.is_fatal() {
                true => self.add_error(&error),
                false => self.add_warning(error),
            }
        }
    }

    /// Examines a directory for files of the daemon, of a setting such as `node.run_dir`.
    pub fn directory(&mut self, setting: &str, path: &Path) {
        if let Err(error) = private_files::check_directory(path) {
            let code = DaemonExitCode::of(&error);
            self.add_error_with_code(format!("{setting}: {error}"), code);
        }
    }

    /// Examines the path of a Unix socket.
    pub fn socket(&mut self, path: &Path, address_use: AddressUse) {
        match socket_path::check_stale(path) {
            Err(error)
                if address_use == AddressUse::RunningDaemon
                    && error.kind() == io::ErrorKind::AddrInUse => {}
            outcome => {
                self.value_of(outcome);
            }
        }
    }

    /// Examines an address at which the daemon is to accept TCP connections, of a setting such as `node.port`.
    pub fn tcp_address(&mut self, setting: &str, address: SocketAddr, address_use: AddressUse) {
        self.bound_address(setting, address, SocketType::STREAM, address_use);
    }

    /// Examines an address at which the daemon is to receive datagrams, of a setting such as `dns.listen`.
    pub fn udp_address(&mut self, setting: &str, address: SocketAddr, address_use: AddressUse) {
        self.bound_address(setting, address, SocketType::DGRAM, address_use);
    }

    /// Examines an address of this host, of a setting such as `registrar.listen`.
    pub fn local_address(&mut self, setting: &str, address: IpAddr) {
        let any_port = SocketAddr::new(address, 0);
        self.bound_address(setting, any_port, SocketType::DGRAM, AddressUse::Free);
    }

    fn bound_address(
        &mut self,
        setting: &str,
        address: SocketAddr,
        kind: SocketType,
        address_use: AddressUse,
    ) {
        let Err(error) = try_bind(address, kind) else {
            return;
        };
        if address_use == AddressUse::RunningDaemon && error.kind() == io::ErrorKind::AddrInUse {
            return;
        }
        let remedy = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "stop the program that listens there, or change the setting"
            }
            io::ErrorKind::AddrNotAvailable => {
                "add the address to this host, or change the setting"
            }
            _ => "change the setting",
        };
        let code = DaemonExitCode::of(&error);
        let text = format!("{setting}: {address} cannot be used: {error}; {remedy}");
        self.add_error_with_code(text, code);
    }

    /// Returns all problems, if there are any.
    ///
    /// # Errors
    /// There are problems.
    pub fn finish(self) -> Result<(), StartProblems> {
        match self.problems.is_empty() {
            true => Ok(()),
            false => Err(StartProblems(self.problems)),
        }
    }

    /// Logs the problems with which the daemon starts.
    ///
    /// # Errors
    /// All problems that prevent a start, if there are any.
    pub fn finish_for_start(self) -> Result<(), StartProblems> {
        let (fatal, others): (Vec<_>, Vec<_>) =
            (self.problems.into_iter()).partition(StartProblem::is_fatal);
        for problem in others {
            tracing::warn!(%problem, "the daemon starts with a problem");
        }
        match fatal.is_empty() {
            true => Ok(()),
            false => Err(StartProblems(fatal)),
        }
    }
}

/// Binds a socket to the address and closes the socket. A TCP socket that does not listen takes no connection, and can
/// have the port of connections that are closing.
fn try_bind(address: SocketAddr, kind: SocketType) -> io::Result<()> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    Ok(bind(&socket, &address)?)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use holdfast_api::ca::CertificateAuthority;

    use super::*;

    fn texts(check: StartCheck) -> Vec<String> {
        let problems = check.finish().err().map(|problems| problems.0);
        let problems = problems.unwrap_or_default();
        problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_problem_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let taken = listener.local_addr().unwrap();
        let mut check = StartCheck::default();
        check.log(&LogConfig {
            filter: "info,=".into(),
            ..LogConfig::default()
        });
        check.certificates(
            &TlsConfig {
                ca: folder.path().join("ca.pem"),
                cert: folder.path().join("n1.pem"),
                key: folder.path().join("n1.key"),
                crl: None,
            },
            Some("n1"),
        );
        check.tcp_address("node.port", taken, AddressUse::Free);
        check.tcp_address("node.port", taken, AddressUse::RunningDaemon);
        check.local_address("node.address", "192.0.2.7".parse().unwrap());
        check.directory("node.run_dir", &folder.path().join("ca.pem/below"));
        let found = texts(check);
        let expected = [
            "log.filter `info,=`",
            "n1.pem: ",
            "n1.key: ",
            "ca.pem: ",
            "stop the program that listens there",
            "add the address to this host",
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (text, part) in found.iter().zip(expected) {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn usable_settings_have_no_problem_and_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run/holdfast");
        let mut check = StartCheck::default();
        check.log(&LogConfig::default());
        check.directory("node.run_dir", &path);
        check.socket(&path.join("control.sock"), AddressUse::Free);
        check.tcp_address(
            "node.port",
            (Ipv4Addr::LOCALHOST, 0).into(),
            AddressUse::Free,
        );
        assert_eq!(texts(check), [""; 0]);
        assert!(!folder.path().join("run").exists());
    }

    #[test]
    fn problems_of_certificates_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let authority = CertificateAuthority::init(folder.path(), "files").unwrap();
        let [first, second] = ["n1", "n2"].map(|name| authority.issue(name, &[], 2).unwrap());
        let foreign_folder = tempfile::tempdir().unwrap();
        CertificateAuthority::init(foreign_folder.path(), "files").unwrap();
        let valid = TlsConfig {
            ca: folder.path().join("ca.pem"),
            cert: first.cert.clone(),
            key: first.key.clone(),
            crl: None,
        };
        let found = |config: &TlsConfig, owner| {
            let mut check = StartCheck::default();
            check.certificates(config, Some(owner));
            texts(check)
        };
        assert_eq!(found(&valid, "n1"), [""; 0]);
        let other_name = found(&valid, "n2");
        assert!(other_name[0].contains("not of node `n2`"), "{other_name:?}");
        let other_key = TlsConfig {
            key: second.key,
            ..valid.clone()
        };
        let mismatch = found(&other_key, "n1");
        assert!(mismatch[0].contains("do not match"), "{mismatch:?}");
        let other_authority = TlsConfig {
            ca: foreign_folder.path().join("ca.pem"),
            ..valid.clone()
        };
        let refused = found(&other_authority, "n1");
        assert!(refused[0].contains("other members refuse"), "{refused:?}");
        private_files::tests::set_mode(&first.key, 0o644);
        let open = found(&valid, "n1");
        assert!(open[0].contains("chmod 600"), "{open:?}");
        let mut check = StartCheck::default();
        check.certificates(&valid, Some("n1"));
        assert!(check.finish_for_start().is_ok(), "only a warning");
    }

    #[test]
    fn exit_code_says_if_another_start_may_succeed() {
        let mut check = StartCheck::default();
        check.add_error(&io::Error::from(io::ErrorKind::AddrInUse));
        check.add_error(&io::Error::from(io::ErrorKind::PermissionDenied));
        let problems = check.finish().unwrap_err();
        assert_eq!(problems.exit_code(), DaemonExitCode::NoPermission);
        assert_eq!(problems.to_string().lines().count(), 2);
    }
}
