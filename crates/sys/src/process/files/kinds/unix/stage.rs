//! Socket files before they may be seen. The kernel remembers the name by which a socket was bound, so it is bound by its
//! true name, but below a directory of our own that is the root for the moment; renaming the file publishes it.

use crate::process::files::error::{At, FilesError, Refusal};
use rustix::fs::{AtFlags, CWD, Gid, Mode, Uid, chmodat, chownat};
use rustix::process::{chdir, chroot};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A directory in which socket files wait.
#[derive(Debug)]
pub struct Stage {
    /// The directory in which the files will be.
    directory: PathBuf,
    /// The root for the moment; inside the directory, so that both are on one file system.
    root: PathBuf,
    /// Names of files that will be published.
    files: Vec<PathBuf>,
}

impl Stage {
    /// A stage for files in `directory`, which must exist.
    pub fn new(directory: &Path) -> Result<Self, FilesError> {
        let shown = directory.display().to_string();
        if !directory.is_dir() {
            return Err(Refusal::Missing(shown).into());
        }
        for attempt in 0..1000 {
            let root = directory.join(format!(".holdfast-{}-{attempt}", std::process::id()));
            match fs::create_dir(&root) {
                Ok(()) => {
                    let stage = Self {
                        directory: directory.to_path_buf(),
                        root,
                        files: Vec::new(),
                    };
                    fs::create_dir_all(stage.staged(directory)).at(&shown)?;
                    return Ok(stage);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).at(shown),
            }
        }
        Err(Refusal::NameTaken(shown).into())
    }

    /// Whether files of this directory wait here.
    pub fn is_for(&self, directory: &Path) -> bool {
        self.directory == directory
    }

    /// Calls `work` where `name` means `file`, which is of this stage's directory. Only the thread that calls it sees the
    /// other root.
    pub fn inside<R: Send>(
        &self,
        name: &str,
        file: &Path,
        work: impl FnOnce() -> io::Result<R> + Send,
    ) -> io::Result<R> {
        let shown = file.to_string_lossy();
        // A relative name was meant from the directory that remains without it.
        let from = shown.strip_suffix(name).unwrap_or("/");
        let from = if from.is_empty() { "/" } else { from };
        let run = || {
            // SAFETY: only root and working directory become this thread's own, which nothing else uses.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            chroot(&self.root)?;
            chdir(from)?;
            work()
        };
        let outcome = std::thread::scope(|scope| scope.spawn(run).join());
        outcome.unwrap_or_else(|_| Err(io::Error::other("the thread that binds sockets ended")))
    }

    /// Where a file waits.
    pub fn staged(&self, file: &Path) -> PathBuf {
        self.root.join(file.strip_prefix("/").unwrap_or(file))
    }

    /// Removes a file that waits.
    pub fn discard(&self, file: &Path) {
        // There may be none.
        let _ = fs::remove_file(self.staged(file));
    }

    /// Gives a file that waits its owner and permissions; it will be published.
    pub fn add(&mut self, file: &Path, access: (u32, u32, u32)) -> Result<(), FilesError> {
        let staged = self.staged(file);
        let (uid, gid) = (Uid::from_raw(access.0), Gid::from_raw(access.1));
        chownat(CWD, &staged, Some(uid), Some(gid), AtFlags::empty()).at("chown of a socket")?;
        chmodat(
            CWD,
            &staged,
            Mode::from_raw_mode(access.2),
            AtFlags::empty(),
        )
        .at("chmod of a socket")?;
        self.files.push(file.to_path_buf());
        Ok(())
    }

    /// Puts the files where they belong, each in place of one that is there.
    pub fn publish(&mut self) -> Result<(), FilesError> {
        for file in std::mem::take(&mut self.files) {
            fs::rename(self.staged(&file), &file).at(file.display().to_string())?;
        }
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // What is left is of no use to anybody; a directory that cannot be removed harms nobody.
        let _ = fs::remove_dir_all(&self.root);
    }
}
