//! The file with the daemon's process id, locked as long as it lives: one daemon for a run directory.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::config::Config;
use crate::private_files::{self, run_directory};

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum PidFileError {
    /// Another daemon has it.
    #[error(
        "another holdfastd (process {pid}) runs with {path}; stop it, or set another node.run_dir"
    )]
    Taken {
        /// The file.
        path: PathBuf,
        /// What is written there.
        pid: String,
    },
    /// The directory cannot be written.
    #[error("{path} cannot be written: {error}; free space there, or set another node.run_dir")]
    Unwritable {
        /// The file or its directory.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// The file. The lock goes with the process, the file stays.
#[derive(Debug)]
pub struct PidFile {
    _file: File,
}

impl PidFile {
    /// Makes the run directory if need be, and writes the own process id into its file.
    ///
    /// # Errors
    /// See [`PidFileError`].
    pub fn take(config: &Config) -> Result<Self, PidFileError> {
        run_directory(&config.node.run_dir).map_err(unwritable(&config.node.run_dir))?;
        let path = config.pid_file();
        let mut file = private_files::options()
            .mode(0o644)
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(unwritable(&path))?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            let mut pid = String::new();
            // Only for the message.
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
