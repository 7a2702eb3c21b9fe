//! Checks of a service's servers, which each node makes of its own server.

use super::change::GroupChangeRefusal;
use super::service::ServiceProtocol;
use core::ops::RangeInclusive;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Maximum length of a check script's name, in bytes.
pub const SCRIPT_NAME_BYTES_MAX: usize = 64;
/// Times between two checks that are allowed, in milliseconds. A check is made by every node.
pub const CHECK_INTERVAL_MS: RangeInclusive<u32> = 100..=600_000;
/// Time limits of a check that are allowed, in milliseconds.
pub const CHECK_TIMEOUT_MS: RangeInclusive<u32> = 1..=600_000;
/// Numbers of consecutive results that are allowed for a change of the judgement.
pub const CHECK_RESULTS: RangeInclusive<u32> = 1..=100;
/// Longest time after which a server that takes no waiting client hangs, in milliseconds.
pub const STALL_MS_MAX: u32 = 600_000;

/// The file name of a check script: 1 to [`SCRIPT_NAME_BYTES_MAX`] letters, digits, hyphens, underscores and inner dots.
/// A name has no `/` and does not begin with a dot, so that it leads to no other directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct ScriptName(String);

/// A text that is not the name of a check script.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not the name of a check script; use the file name alone: 1 to {SCRIPT_NAME_BYTES_MAX} letters, digits, `-`, `_` and inner `.`"
)]
pub struct ScriptNameError(String);

impl ScriptName {
    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for ScriptName {
    type Error = ScriptNameError;

    fn try_from(text: String) -> Result<ScriptName, ScriptNameError> {
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_name = (1..=SCRIPT_NAME_BYTES_MAX).contains(&text.len())
            && text.chars().all(is_allowed)
            && !text.starts_with('.')
            && !text.ends_with('.');
        match is_name {
            true => Ok(ScriptName(text)),
            false => {
                let shown = text.chars().take(SCRIPT_NAME_BYTES_MAX);
                Err(ScriptNameError(shown.collect()))
            }
        }
    }
}

impl FromStr for ScriptName {
    type Err = ScriptNameError;

    /// Parses the name of a check script.
    ///
    /// # Errors
    /// The text is empty or too long, has other characters, or a dot at its begin or end.
    fn from_str(text: &str) -> Result<ScriptName, ScriptNameError> {
        ScriptName::try_from(text.to_owned())
    }
}

impl fmt::Display for ScriptName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// The checks of a service. Each node checks its own server, and a server whose checks fail gets no new clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceChecks {
    /// True if each node connects to its server regularly; for TCP only.
    pub connect: bool,
    /// The script that each node runs regularly, from its own directory of check scripts.
    pub script: Option<ScriptName>,
    /// Time between two checks in milliseconds, within [`CHECK_INTERVAL_MS`].
    pub interval_ms: u32,
    /// Time limit of a check in milliseconds, within [`CHECK_TIMEOUT_MS`].
    pub timeout_ms: u32,
    /// Number of consecutive failed checks after which a server fails, within [`CHECK_RESULTS`].
    pub fall: u32,
    /// Number of consecutive good checks after which a failed server is well again, within [`CHECK_RESULTS`].
    pub rise: u32,
    /// Time in milliseconds after which a server that takes no waiting client, or reads no request, hangs: at most
    /// [`STALL_MS_MAX`], and 0 for never.
    pub stall_ms: u32,
}

impl Default for ServiceChecks {
    /// Returns no connect check and no script, and the times and numbers that suit most services.
    fn default() -> ServiceChecks {
        ServiceChecks {
            connect: false,
            script: None,
            interval_ms: 1_000,
            timeout_ms: 500,
            fall: 2,
            rise: 2,
            stall_ms: 500,
        }
    }
}

impl ServiceChecks {
    /// Checks the rules for a service of this protocol.
    pub(super) fn check(&self, protocol: ServiceProtocol) -> Result<(), GroupChangeRefusal> {
        use GroupChangeRefusal as Refusal;
        if self.connect && protocol == ServiceProtocol::Udp {
            return Err(Refusal::ConnectCheckOfUdp);
        }
        if !CHECK_INTERVAL_MS.contains(&self.interval_ms) {
            return Err(Refusal::CheckInterval(self.interval_ms));
        }
        if !CHECK_TIMEOUT_MS.contains(&self.timeout_ms) {
            return Err(Refusal::CheckTimeout(self.timeout_ms));
        }
        let mut results = [self.fall, self.rise].into_iter();
        if let Some(results) = results.find(|results| !CHECK_RESULTS.contains(results)) {
            return Err(Refusal::CheckResults(results));
        }
        match self.stall_ms > STALL_MS_MAX {
            true => Err(Refusal::StallTooLong(self.stall_ms)),
            false => Ok(()),
        }
    }
}

/// The checks and what differs from the defaults, such as `connect script check-web interval 2000 ms`.
impl fmt::Display for ServiceChecks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = ServiceChecks::default();
        match (self.connect, &self.script) {
            (false, None) => f.write_str("none")?,
            (true, None) => f.write_str("connect")?,
            (false, Some(script)) => write!(f, "script {script}")?,
            (true, Some(script)) => write!(f, "connect script {script}")?,
        }
        for (name, value, default, unit) in [
            ("interval", self.interval_ms, default.interval_ms, " ms"),
            ("timeout", self.timeout_ms, default.timeout_ms, " ms"),
            ("fall", self.fall, default.fall, ""),
            ("rise", self.rise, default.rise, ""),
            ("stall", self.stall_ms, default.stall_ms, " ms"),
        ] {
            if value != default {
                write!(f, " {name} {value}{unit}")?;
            }
        }
        Ok(())
    }
}
