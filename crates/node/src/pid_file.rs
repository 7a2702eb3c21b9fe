//! File with the daemon's process id, locked as long as the daemon lives: one daemon for a run directory.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use holdfast_daemon::private_files::{self, run_directory};
use rustix::fs::{FlockOperation, flock};

use crate::config::Config;

/// Reason why the pid file could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum PidFileError {
    /// Another daemon has the pid file.
    #[error(
        "another holdfastd (process {pid}) runs with {path}; stop it, or set another node.run_dir"
    )]
    Taken {
        /// Path of the file.
        path: PathBuf,
        /// Process id in the file.
        pid: String,
    },
    /// The directory of the pid file cannot be written.
    #[error("{path} cannot be written: {error}; free space there, or set another node.run_dir")]
    Unwritable {
        /// The pid file or its directory.
        path: PathBuf,
        /// Error from the system.
        #[source]
        error: io::Error,
    },
}

/// The pid file. The lock ends with the process; the file stays.
#[derive(Debug)]
pub struct PidFile {
    _file: File,
}

impl PidFile {
    /// Creates the run directory if necessary, and writes this process's id into its file.
    ///
    /// # Errors
    /// See [`PidFileError`].
    pub fn acquire(config: &Config) -> Result<Self, PidFileError> {
        run_directory(&config.node.run_dir).map_err(unwritable(&config.node.run_dir))?;
        let path = config.pid_file();
        let mut file = private_files::private_options()
            .mode(0o644)
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(unwritable(&path))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut pid = String::new();
            // The id is only for the message.
            let _ = file.read_to_string(&mut pid);
            return Err(PidFileError::Taken { path, pid });
        }
        file.set_len(0)
            .and_then(|()| file.write_all(std::process::id().to_string().as_bytes()))
            .map_err(unwritable(&path))?;
        Ok(Self { _file: file })
    }
}

fn unwritable(path: &Path) -> impl FnOnce(io::Error) -> PidFileError {
    let path = path.to_owned();
    move |error| PidFileError::Unwritable { path, error }
}
