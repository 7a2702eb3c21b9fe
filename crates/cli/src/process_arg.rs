//! Process arguments of commands.

use std::str::FromStr;

use anyhow::Result;
use holdfast_api::control::BlockingControlClient;

use crate::daemon_client::DaemonArgs;

/// A process of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessArg {
    /// A process given by its PID.
    Pid(i32),
    /// The main process of a systemd unit.
    Unit(String),
}

impl ProcessArg {
    /// Returns the PID; asks the daemon for the process of a unit.
    ///
    /// # Errors
    /// The unit does not exist, or there is no daemon.
    pub fn pid(&self, daemon: &DaemonArgs, client: &BlockingControlClient) -> Result<i32> {
        match self {
            ProcessArg::Pid(pid) => Ok(*pid),
            ProcessArg::Unit(unit) => Ok(daemon.ask(client, |client| client.unit(unit))?.pid),
        }
    }
}

impl FromStr for ProcessArg {
    type Err = String;

    fn from_str(text: &str) -> Result<ProcessArg, String> {
        if let Ok(pid) = text.parse() {
            return Ok(ProcessArg::Pid(pid));
        }
        // Characters that systemd allows in a unit's name.
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.\\@".contains(&byte);
        if !text.bytes().all(fits) || !text.bytes().any(|byte| byte.is_ascii_alphabetic()) {
            return Err(format!(
                "`{text}` is neither a PID nor the name of a systemd unit, such as game.service"
            ));
        }
        Ok(ProcessArg::Unit(match text.contains('.') {
            true => text.to_owned(),
            false => format!("{text}.service"),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pids_and_other_names_units() {
        let unit = |name: &str| Ok(ProcessArg::Unit(name.to_owned()));
        assert_eq!("4242".parse(), Ok(ProcessArg::Pid(4242)));
        assert_eq!("game".parse(), unit("game.service"));
        assert_eq!("game@1.service".parse(), unit("game@1.service"));
        for wrong in ["", "../game", "a b", "42.5", "system.slice/game.service"] {
            assert!(wrong.parse::<ProcessArg>().is_err(), "{wrong}");
        }
    }
}
