//! Exit codes of the daemons, taken from `sysexits.h` where that file has a fitting one. A service manager starts a daemon
//! again unless the exit code says that another start cannot succeed.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::config::ConfigError;
use crate::logs::LogError;
use crate::start_check::StartProblems;
use crate::tls::TlsError;

/// Reason for which a daemon ended, as its exit code. clap ends a daemon with invalid arguments with code 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DaemonExitCode {
    /// Any failure that another start may not meet.
    Failure = 1,
    /// The kernel lacks a required feature (`EX_UNAVAILABLE`).
    UnsupportedKernel = 69,
    /// Another daemon runs with the same directory (`EX_TEMPFAIL`).
    AlreadyRunning = 75,
    /// The daemon lacks a capability, or may not use a file (`EX_NOPERM`).
    NoPermission = 77,
    /// The configuration or a file that it names is missing or invalid (`EX_CONFIG`).
    Configuration = 78,
}

impl DaemonExitCode {
    /// Every exit code of a daemon.
    pub const ALL: [DaemonExitCode; 5] = [
        DaemonExitCode::Failure,
        DaemonExitCode::UnsupportedKernel,
        DaemonExitCode::AlreadyRunning,
        DaemonExitCode::NoPermission,
        DaemonExitCode::Configuration,
    ];

    /// Returns the code for an error, judged by the first of its causes that has a code other than
    /// [`Failure`](DaemonExitCode::Failure).
    pub fn of(error: &(dyn Error + 'static)) -> DaemonExitCode {
        let mut next_cause = Some(error);
        while let Some(cause) = next_cause {
            if let Some(code) = Self::of_cause(cause) {
                return code;
            }
            next_cause = cause.source();
        }
        DaemonExitCode::Failure
    }

    fn of_cause(cause: &(dyn Error + 'static)) -> Option<DaemonExitCode> {
        if let Some(problems) = cause.downcast_ref::<StartProblems>() {
            return Some(problems.exit_code());
        }
        if cause.is::<ConfigError>() || cause.is::<LogError>() || cause.is::<TlsError>() {
            Some(DaemonExitCode::Configuration)
        } else if cause.is::<SocketInUse>() {
            Some(DaemonExitCode::AlreadyRunning)
        } else {
            cause.downcast_ref().and_then(Self::of_io_error)
        }
    }

    fn of_io_error(error: &io::Error) -> Option<DaemonExitCode> {
        match error.get_ref() {
            // An error of this crate within the system's error type has no other causes.
            Some(inner) if inner.is::<SocketInUse>() => Some(DaemonExitCode::AlreadyRunning),
            Some(inner) if inner.is::<TlsError>() => Some(DaemonExitCode::Configuration),
            _ if error.kind() == io::ErrorKind::PermissionDenied => {
                Some(DaemonExitCode::NoPermission)
            }
            _ => None,
        }
    }
}

impl From<DaemonExitCode> for ExitCode {
    fn from(code: DaemonExitCode) -> ExitCode {
        ExitCode::from(code as u8)
    }
}

/// A Unix socket that a running daemon has.
#[derive(Debug)]
pub struct SocketInUse(pub PathBuf);

impl fmt::Display for SocketInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: another daemon listens there; stop it, or set another run_dir",
            self.0.display()
        )
    }
}

impl Error for SocketInUse {}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{operation}: {source}")]
    struct Outer {
        operation: &'static str,
        source: io::Error,
    }

    fn code_of(source: io::Error) -> DaemonExitCode {
        let operation = "the control socket";
        DaemonExitCode::of(&Outer { operation, source })
    }

    #[test]
    fn cause_decides_code() {
        let config =
            ConfigError::for_file(Path::new("a.toml"), "cannot be read".to_owned(), "make it");
        assert_eq!(DaemonExitCode::of(&config), DaemonExitCode::Configuration);
        let refused = io::Error::from(io::ErrorKind::PermissionDenied);
        assert_eq!(code_of(refused), DaemonExitCode::NoPermission);
        let in_use = io::Error::new(io::ErrorKind::AddrInUse, SocketInUse("a.sock".into()));
        assert_eq!(code_of(in_use), DaemonExitCode::AlreadyRunning);
        // A port may become free: its owner is no daemon with the same directory.
        let port = io::Error::from(io::ErrorKind::AddrInUse);
        assert_eq!(code_of(port), DaemonExitCode::Failure);
    }

    #[test]
    fn every_code_is_documented() {
        let pages = [
            include_str!("../../../docs/configuration.md"),
            include_str!("../../../packaging/man/holdfastd.8"),
            include_str!("../../../packaging/man/rserpoold.8"),
        ];
        for code in DaemonExitCode::ALL.map(|code| (code as u8).to_string()) {
            let [table_row, list_item] = [format!("| {code} |"), format!("\n.B {code}\n")];
            for page in pages {
                let is_named = page.contains(&table_row) || page.contains(&list_item);
                assert!(is_named, "{code} is missing in a page");
            }
        }
    }

    #[test]
    fn units_are_not_restarted_in_vain() {
        let units = [
            include_str!("../../../packaging/systemd/holdfastd.service"),
            include_str!("../../../packaging/systemd/rserpoold-registrar.service"),
            include_str!("../../../packaging/systemd/rserpoold-pool.service"),
        ];
        let codes = DaemonExitCode::ALL.iter();
        let final_codes: Vec<String> = codes
            .filter(|code| **code != DaemonExitCode::Failure)
            .map(|code| (*code as u8).to_string())
            .collect();
        // 2: invalid arguments.
        let line = format!("RestartPreventExitStatus=2 {}", final_codes.join(" "));
        for unit in units {
            assert!(unit.lines().any(|found| found == line), "{line}");
        }
    }
}
