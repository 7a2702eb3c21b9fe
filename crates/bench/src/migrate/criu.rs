//! CRIU as a peer: checks if a usable one is installed.

use std::fmt;
use std::process::Command;

use serde::Serialize;

/// Report on the peer.
#[derive(Debug, Serialize)]
pub struct Peer {
    name: &'static str,
    version: Option<String>,
    /// Reason for the lack of measurements.
    missing: String,
}

/// Searches for CRIU, and runs `criu check` for the features that it needs of this kernel.
pub fn look() -> Peer {
    let Ok(version) = Command::new("criu").arg("--version").output() else {
        return Peer::missing(None, "it is not installed");
    };
    let version = String::from_utf8_lossy(&version.stdout);
    let version = version
        .lines()
        .find_map(|line| line.strip_prefix("Version: "));
    let version = version.map(str::to_owned);
    match Command::new("criu").arg("check").output() {
        Err(error) => Peer::missing(version, &error.to_string()),
        Ok(check) if check.status.success() => {
            Peer::missing(version, "it works here, and this release cannot drive it")
        }
        Ok(check) => {
            let said = String::from_utf8_lossy(&check.stderr);
            Peer::missing(version, &format!("it does not work here: {}", cause(&said)))
        }
    }
}

impl Peer {
    fn missing(version: Option<String>, why: &str) -> Peer {
        Peer {
            name: "criu",
            version,
            missing: why.to_owned(),
        }
    }
}

/// Returns the first error of `criu check`, which causes the others; exits of its helper processes do not count.
fn cause(said: &str) -> &str {
    let mut errors = said.lines().filter(|line| line.starts_with("Error"));
    let cause = errors.find(|line| !line.contains("exited, status="));
    cause.unwrap_or_else(|| said.lines().last().unwrap_or("it does not say why"))
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version.as_deref().unwrap_or("");
        let peer = format!("{} {version}", self.name);
        write!(f, "{}: no figures: {}", peer.trim_end(), self.missing)
    }
}

#[cfg(test)]
mod tests {
    use super::cause;

    #[test]
    fn the_cause_is_told_and_not_what_comes_of_it() {
        let said = "Error (criu/util.c:642): exited, status=1\n\
                    Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds\n\
                    Error (criu/crtools.c:260): Could not initialize kernel features detection.\n";
        let bounds = "Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds";
        assert_eq!(cause(said), bounds);
        assert_eq!(cause("Looks bad.\n"), "Looks bad.");
        assert_eq!(cause(""), "it does not say why");
    }
}
