//! Diagnosis of a restorer that does not answer.

use super::restorer::Restorer;
use crate::error::Error;
use rustix::process::{WaitId, WaitIdOptions, waitid};
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// Time within which a restorer that has closed its channel ends.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

impl Restorer {
    /// Returns the error for a restorer that does not answer, with the manner of its end if it has ended.
    pub(super) fn failure(&self, error: io::Error) -> Error {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let hung_up = matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
        let ending = hung_up.then(|| self.exit_signal()).flatten();
        match ending {
            Some(libc::SIGKILL) => Error::Refused(
                "its restorer was killed, probably for lack of memory: see the kernel's log there"
                    .to_owned(),
            ),
            Some(signal) if signal > 0 => {
                Error::Refused(format!("its restorer was terminated by signal {signal}"))
            }
            Some(_) => Error::Refused(
                "its restorer exited unexpectedly, perhaps for lack of memory".to_owned(),
            ),
            None => Error::Kernel {
                operation: format!("communicating with restorer {}", self.pid()),
                source: error,
            },
        }
    }

    /// Returns the signal by which the restorer ended, 0 for none. The status stays to be collected.
    fn exit_signal(&self) -> Option<i32> {
        let began = Instant::now();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        loop {
            match waitid(WaitId::PidFd(self.process.as_fd()), options) {
                Ok(Some(status)) => return Some(status.terminating_signal().unwrap_or(0)),
                Ok(None) if began.elapsed() < EXIT_TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // The restorer is another daemon's child.
                _ => return None,
            }
        }
    }
}
