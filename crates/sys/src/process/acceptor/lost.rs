//! What became of a restorer that answers no more.

use super::remote::Restorer;
use crate::process::error::Error;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A restorer that hangs up ends soon.
const PATIENCE: Duration = Duration::from_secs(2);

impl Restorer {
    /// Why nothing comes from it: how it has ended, where it has.
    pub(super) fn lost(&self, error: io::Error) -> Error {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let hung_up = matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
        let ending = hung_up.then(|| self.ending()).flatten();
        match ending {
            Some(libc::SIGKILL) => Error::Refused(
                "its restorer was killed: this host has no memory left (see its kernel's log), or somebody ended it"
                    .to_owned(),
            ),
            Some(signal) if signal > 0 => {
                Error::Refused(format!("its restorer was ended by signal {signal}"))
            }
            Some(_) => Error::Refused("its restorer has ended; no memory is left, perhaps".to_owned()),
            None => Error::Kernel {
                what: format!("talking to restorer {}", self.pid()),
                source: error,
            },
        }
    }

    /// The signal by which it ended, 0 for none. It is left to be waited for.
    fn ending(&self) -> Option<i32> {
        let began = Instant::now();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        loop {
            match waitid(WaitId::PidFd(self.process.as_fd()), options) {
                Ok(Some(status)) => return Some(status.terminating_signal().unwrap_or(0)),
                Ok(None) if began.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // It is another daemon's child.
                _ => return None,
            }
        }
    }
}
