//! The saved membership on the disk, and the thread that writes it.
//!
//! A save is a new file, synchronised, renamed over the old one, and the directory synchronised: after a crash the file
//! has the old content or the new one. Writing to a disk may take long, so that a thread of its own does it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc as thread_channel;

use holdfast_daemon::private_files::private_options;
use holdfast_proto::membership::SaveToken;
use holdfast_sys::caps::keep_only_capabilities;
use holdfast_wire::membership_frames::{MembershipState, NodeName};
use holdfast_wire::saved_membership::{
    SAVED_MEMBERSHIP_BYTES_MAX, SavedMembership, SavedMembershipError,
};
use tokio::sync::mpsc;

/// Name of the file in the state directory.
const FILE_NAME: &str = "membership";
/// Name of the file during a save.
const NEW_FILE_NAME: &str = "membership.new";

/// Reason why the saved membership cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// The system refused an operation on the file.
    #[error("{}: {source}; make room, or set another node.state_dir", .path.display())]
    System {
        /// File of the saved membership.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The content cannot be used.
    #[error("{} {source}", .path.display())]
    Content {
        /// File of the saved membership.
        path: PathBuf,
        /// Reason why the saved membership cannot be used.
        source: SavedMembershipError,
    },
    /// The file is of another node or group.
    #[error(
        "{} is the saved membership of node {node} of group {group}; each node needs a node.state_dir of its own",
        .path.display()
    )]
    OtherNode {
        /// File with the saved membership of another node.
        path: PathBuf,
        /// Name of the node whose membership was saved in the file.
        node: NodeName,
        /// Name of that node's group.
        group: String,
    },
}

/// The file with a node's saved membership.
#[derive(Debug, Clone)]
pub struct StateFile {
    directory: PathBuf,
    path: PathBuf,
    group: String,
    node: NodeName,
}

impl StateFile {
    /// Returns the file of a node of a group, in an existing directory.
    pub fn new(directory: &Path, group: String, node: NodeName) -> StateFile {
        StateFile {
            directory: directory.to_owned(),
            path: directory.join(FILE_NAME),
            group,
            node,
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the saved membership; none if there is no file.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or belongs to another node, group or newer release.
    pub fn read(&self) -> Result<Option<MembershipState>, StateFileError> {
        let file = match private_options().read(true).open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(self.system_error(source)),
        };
        let mut bytes = Vec::new();
        let mut limited = file.take(SAVED_MEMBERSHIP_BYTES_MAX as u64 + 1);
        limited
            .read_to_end(&mut bytes)
            .map_err(|source| self.system_error(source))?;
        let path = self.path.clone();
        let saved = SavedMembership::decode(&bytes)
            .map_err(|source| StateFileError::Content { path, source })?;
        if saved.node != self.node || saved.group != self.group {
            return Err(StateFileError::OtherNode {
                path: self.path.clone(),
                node: saved.node,
                group: saved.group,
            });
        }
        Ok(Some(saved.state))
    }

    /// Replaces the saved membership, durably.
    ///
    /// # Errors
    /// The system refuses; the file then has the old content or the new one.
    pub fn write(&self, state: MembershipState) -> Result<(), StateFileError> {
        let saved = SavedMembership {
            group: self.group.clone(),
            node: self.node.clone(),
            state,
        };
        let path = self.path.clone();
        let bytes = saved
            .encode()
            .map_err(|source| StateFileError::Content { path, source })?;
        self.replace(&bytes)
            .map_err(|source| self.system_error(source))
    }

    fn replace(&self, bytes: &[u8]) -> io::Result<()> {
        let new = self.directory.join(NEW_FILE_NAME);
        let mut options = private_options();
        options.write(true).create(true).truncate(true);
        let mut file = options.open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        File::open(&self.directory)?.sync_all()
    }

    fn system_error(&self, source: io::Error) -> StateFileError {
        let path = self.path.clone();
        StateFileError::System { path, source }
    }
}

/// The end of a save.
pub(super) type SaveResult = (SaveToken, Result<(), String>);

/// The thread that writes the file. Dropping the value ends the thread after the save in progress.
#[derive(Debug)]
pub(super) struct DiskThread {
    saves: thread_channel::Sender<(SaveToken, Box<MembershipState>)>,
}

impl DiskThread {
    /// Starts the thread. Returns its results too.
    pub fn start(file: StateFile) -> io::Result<(DiskThread, mpsc::UnboundedReceiver<SaveResult>)> {
        let (saves, requests) = thread_channel::channel::<(SaveToken, Box<MembershipState>)>();
        let (sender, results) = mpsc::unbounded_channel();
        let write_all = move || {
            if let Err(error) = keep_only_capabilities(&[]) {
                tracing::warn!(%error, "the disk thread keeps its capabilities");
            }
            for (token, state) in requests {
                let result = file.write(*state).map_err(|error| error.to_string());
                if sender.send((token, result)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("membership-disk".to_owned())
            .spawn(write_all)?;
        Ok((DiskThread { saves }, results))
    }

    /// Begins a save. The machine has one open save at a time, so that none waits here.
    pub fn save(&self, token: SaveToken, state: Box<MembershipState>) {
        if self.saves.send((token, state)).is_err() {
            tracing::error!("the disk thread has ended: this node cannot save its membership");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use holdfast_wire::membership_frames::JoinNumber;

    use super::*;

    fn state(join: u64) -> MembershipState {
        MembershipState {
            join: Some(JoinNumber(join)),
            ..MembershipState::default()
        }
    }

    fn file_in(directory: &Path, group: &str, node: &str) -> StateFile {
        StateFile::new(directory, group.to_owned(), node.parse().unwrap())
    }

    #[test]
    fn newest_state_is_read_back_and_only_its_owner_can_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path(), "files", "n1");
        assert_eq!(file.read().unwrap(), None);
        for join in [1, 2] {
            file.write(state(join)).unwrap();
            assert_eq!(file.read().unwrap(), Some(state(join)));
        }
        let mode = fs::metadata(file.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn file_of_another_node_or_group_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path(), "files", "n1");
        file.write(state(1)).unwrap();
        for (group, node) in [("files", "n2"), ("mail", "n1")] {
            let error = file_in(directory.path(), group, node).read().unwrap_err();
            assert!(
                error.to_string().contains("node n1 of group files"),
                "{error}"
            );
        }
    }

    #[test]
    fn torn_foreign_or_newer_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = file_in(directory.path(), "files", "n1");
        file.write(state(1)).unwrap();
        let whole = fs::read(file.path()).unwrap();
        let mut newer = whole.clone();
        newer[8] = 9;
        let cases = [
            (&whole[..whole.len() - 1], "damaged"),
            (b"[node]\nname = \"n1\"\n", "not a saved membership"),
            (&newer, "version 9"),
            (b"", "not a saved membership"),
        ];
        for (bytes, words) in cases {
            fs::write(file.path(), bytes).unwrap();
            let error = file.read().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn failed_save_is_reported_and_a_later_one_succeeds() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("state");
        let (disk, mut results) = DiskThread::start(file_in(&below, "files", "n1")).unwrap();
        disk.save(SaveToken(1), Box::new(state(1)));
        let (token, result) = results.blocking_recv().unwrap();
        assert_eq!(token, SaveToken(1));
        assert!(result.unwrap_err().contains("state/membership"));
        fs::create_dir(&below).unwrap();
        disk.save(SaveToken(2), Box::new(state(1)));
        assert_eq!(results.blocking_recv().unwrap(), (SaveToken(2), Ok(())));
        assert_eq!(
            file_in(&below, "files", "n1").read().unwrap(),
            Some(state(1))
        );
    }
}
