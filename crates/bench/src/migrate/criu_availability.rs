//! CRIU as a peer: checks if a usable one is installed.

use std::fmt;
use std::process::Command;

use serde::Serialize;

/// Report on the peer.
#[derive(Debug, Serialize)]
pub struct CriuAvailability {
    name: &'static str,
    version: Option<String>,
    /// Reason for the lack of measurements.
    missing: String,
}

/// Searches for CRIU, and runs `criu check` for the features that it needs of this kernel.
pub fn check_criu() -> CriuAvailability {
    let Ok(version) = Command::new("criu").arg("--version").output() else {
        return CriuAvailability::unavailable(None, "not installed");
    };
    let version = String::from_utf8_lossy(&version.stdout);
    let version = version
        .lines()
        .find_map(|line| line.strip_prefix("Version: "));
    let version = version.map(str::to_owned);
    match Command::new("criu").arg("check").output() {
        Err(error) => CriuAvailability::unavailable(version, &error.to_string()),
        Ok(check) if check.status.success() => CriuAvailability::unavailable(
            version,
            "usable here, but this release of Holdfast cannot measure it",
        ),
        Ok(check) => {
            let messages = String::from_utf8_lossy(&check.stderr);
            CriuAvailability::unavailable(
                version,
                &format!("not usable here: {}", first_error(&messages)),
            )
        }
    }
}

impl CriuAvailability {
    fn unavailable(version: Option<String>, why: &str) -> CriuAvailability {
        CriuAvailability {
            name: "criu",
            version,
            missing: why.to_owned(),
        }
    }
}

/// Returns the first error of `criu check`, which causes the others; exits of its helper processes do not count.
fn first_error(messages: &str) -> &str {
    let mut errors = messages.lines().filter(|line| line.starts_with("Error"));
    let cause = errors.find(|line| !line.contains("exited, status="));
    cause.unwrap_or_else(|| messages.lines().last().unwrap_or("it does not say why"))
}

impl fmt::Display for CriuAvailability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version.as_deref().unwrap_or("");
        let peer = format!("{} {version}", self.name);
        write!(f, "{}: not measured: {}", peer.trim_end(), self.missing)
    }
}

#[cfg(test)]
mod tests {
    use super::first_error;

    #[test]
    fn first_cause_is_reported_instead_of_consequences() {
        let said = "Error (criu/util.c:642): exited, status=1\n\
                    Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds\n\
                    Error (criu/crtools.c:260): Could not initialize kernel features detection.\n";
        let bounds = "Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds";
        assert_eq!(first_error(said), bounds);
        assert_eq!(first_error("Looks bad.\n"), "Looks bad.");
        assert_eq!(first_error(""), "it does not say why");
    }
}
