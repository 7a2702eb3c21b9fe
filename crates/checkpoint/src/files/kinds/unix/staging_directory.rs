//! Stages, on which socket files are made before they become visible. The kernel remembers the name by which a socket
//! was bound, so the socket is bound by its true name, but below a private directory that is the root during the call;
//! a rename publishes the file.

use super::address;
use crate::file_rights::FileOpener;
use crate::files::acceptor::FdStore;
use crate::files::error::{FilesError, FilesRefusal, StepContext};
use crate::files::image::FileId;
use crate::files::kinds::named_file::or_refusal;
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, Uid, chmodat, chownat, fstat, mkdirat, openat, statat,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::{chdir, chroot};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Returns a path that leads to an open directory.
fn fd_path(directory: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

/// Opens the directory that was made a moment ago, and refuses one that another process has put in its place.
fn open_new_directory(parent: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = openat(parent, name, flags, Mode::empty())?;
    let found = fstat(&root)?;
    if found.st_uid != rustix::process::geteuid().as_raw() || found.st_mode & 0o022 != 0 {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied));
    }
    Ok(root)
}

fn file_name(file: &Path) -> &Path {
    file.file_name().map_or(file, Path::new)
}

/// File of a socket that has a name, but had no file at the donor: other sockets reach the socket by this file, which
/// is never published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HiddenSocketFile {
    /// File of a socket of the tree.
    Socket(FileId),
    /// File of a socket that exists only while others are made.
    Temporary,
}

/// A directory in which socket files wait. Both directories are held open: a process that may rename them cannot
/// redirect the files.
#[derive(Debug)]
pub struct StagingDirectory {
    /// Path of the directory in which the files will be.
    directory: PathBuf,
    /// The directory, held open.
    directory_fd: OwnedFd,
    /// Name of the temporary root in that directory, so that both are on one file system.
    root_name: String,
    /// The temporary root, held open.
    root_fd: OwnedFd,
    /// Paths of the files that will be published.
    files: Vec<PathBuf>,
}

impl StagingDirectory {
    /// Creates a stage for files in `directory`, which must exist, and in which the tree must be allowed to create
    /// files.
    pub fn new(opener: &mut FileOpener, directory: &Path) -> Result<Self, FilesError> {
        let shown = directory.display().to_string();
        let outcome = opener.open_writable(directory);
        let directory_fd = or_refusal(opener, &shown, outcome)?;
        let directory_fd = FdStore::move_caller_fd_up(directory_fd)?;
        for attempt in 0..1000 {
            let name = format!(".holdfast-{}-{attempt}", std::process::id());
            match mkdirat(&directory_fd, name.as_str(), Mode::RWXU) {
                Ok(()) => {
                    let root = FdStore::move_caller_fd_up(
                        open_new_directory(&directory_fd, &name).with_step(&shown)?,
                    )?;
                    let stage = Self {
                        directory: directory.to_path_buf(),
                        directory_fd,
                        root_name: name,
                        root_fd: root,
                        files: Vec::new(),
                    };
                    fs::create_dir_all(stage.staged_path(directory)).with_step(&shown)?;
                    return Ok(stage);
                }
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error).with_step(shown),
            }
        }
        Err(FilesRefusal::NameTaken(shown).into())
    }

    /// Returns true if files of this directory wait here.
    pub fn is_for(&self, directory: &Path) -> bool {
        self.directory == directory
    }

    /// Calls `work` in an environment where `name` leads to `file`, a file of this stage's directory. Only the
    /// thread that runs `work` sees the other root.
    pub fn run_inside<R: Send>(
        &self,
        name: &str,
        file: &Path,
        work: impl FnOnce() -> io::Result<R> + Send,
    ) -> io::Result<R> {
        let from = base_directory(name, file);
        let run = || {
            // SAFETY: only root and working directory become this thread's own, and nothing else uses the thread.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            chroot(fd_path(&self.root_fd))?;
            chdir(from)?;
            work()
        };
        let outcome = std::thread::scope(|scope| scope.spawn(run).join());
        outcome.unwrap_or_else(|_| Err(io::Error::other("the thread that binds sockets panicked")))
    }

    /// Returns the path at which a file waits.
    pub fn staged_path(&self, file: &Path) -> PathBuf {
        fd_path(&self.root_fd).join(file.strip_prefix("/").unwrap_or(file))
    }

    /// Returns the path of a hidden file.
    pub fn hidden_path(&self, hidden: &HiddenSocketFile) -> PathBuf {
        let name = match hidden {
            HiddenSocketFile::Socket(id) => format!(".removed-{id}"),
            HiddenSocketFile::Temporary => ".removed".to_string(),
        };
        fd_path(&self.root_fd).join(name)
    }

    /// Renames a waiting file to its hidden name, so that the next file may have its name.
    pub fn hide(&self, file: &Path, hidden: &HiddenSocketFile) -> io::Result<()> {
        fs::rename(self.staged_path(file), self.hidden_path(hidden))
    }

    /// Sets owner and permissions of a waiting file, and marks the file for publication.
    pub fn add(
        &mut self,
        opener: &FileOpener,
        file: &Path,
        access: (u32, u32, u32),
    ) -> Result<(), FilesError> {
        self.check(opener, file, access.0)?;
        let staged = self.staged_path(file);
        let (uid, gid) = (Uid::from_raw(access.0), Gid::from_raw(access.1));
        chownat(
            CWD,
            &staged,
            Some(uid),
            Some(gid),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .with_step("chown of a socket")?;
        chmodat(
            CWD,
            &staged,
            Mode::from_raw_mode(access.2),
            AtFlags::empty(),
        )
        .with_step("chmod of a socket")?;
        self.files.push(file.to_path_buf());
        Ok(())
    }

    /// Checks that the tree may create this file, in place of an existing one if there is one.
    fn check(&self, opener: &FileOpener, file: &Path, user: u32) -> Result<(), FilesError> {
        let directory = fstat(&self.directory_fd).with_step("fstat")?;
        let sticky = directory.st_mode & libc::S_ISVTX != 0 && !opener.may_own(directory.st_uid);
        let existing = statat(
            &self.directory_fd,
            file_name(file),
            AtFlags::SYMLINK_NOFOLLOW,
        );
        let belongs_to_others = existing.is_ok_and(|there| !opener.may_own(there.st_uid));
        if opener.rights().is_exempt(file) || opener.may_own(user) && !(sticky && belongs_to_others)
        {
            return Ok(());
        }
        Err(FilesRefusal::NotAllowed(file.display().to_string()).into())
    }

    /// Moves the files to their final paths, each in place of an existing file.
    pub fn publish(&mut self) -> Result<(), FilesError> {
        for file in std::mem::take(&mut self.files) {
            let final_path = fd_path(&self.directory_fd).join(file_name(&file));
            fs::rename(self.staged_path(&file), final_path)
                .with_step(file.display().to_string())?;
        }
        Ok(())
    }
}

/// Binds a socket with the final path `file`, inside a stage. If the file was renamed after the original was bound, the
/// file gets its final path as a second name, and the bound name stays on stage.
pub fn bind(fd: BorrowedFd<'_>, name: &str, file: &Path) -> io::Result<()> {
    let bound = bound_path(name, file);
    if bound == file {
        return address::bind(fd, name.as_bytes());
    }
    fs::create_dir_all(bound.parent().unwrap_or(Path::new("/")))?;
    // An earlier socket may have been bound to the same name, and renamed as well.
    match fs::remove_file(&bound) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    address::bind(fd, name.as_bytes())?;
    fs::hard_link(&bound, file)
}

/// Returns the directory that a name is relative to: the path of its file without the name.
fn base_directory(name: &str, file: &Path) -> PathBuf {
    let shown = file.to_string_lossy();
    match shown.strip_suffix(name) {
        Some(from) if from.ends_with('/') => PathBuf::from(from),
        _ => PathBuf::from("/"),
    }
}

/// Returns the path of the file that a socket bound to this name creates.
pub fn bound_path(name: &str, file: &Path) -> PathBuf {
    base_directory(name, file).join(name)
}

impl Drop for StagingDirectory {
    fn drop(&mut self) {
        // Remaining files are useless, and a directory that cannot be removed does no harm.
        for entry in fs::read_dir(fd_path(&self.root_fd))
            .into_iter()
            .flatten()
            .flatten()
        {
            let path = entry.path();
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let _ = match is_directory {
                true => fs::remove_dir_all(path),
                false => fs::remove_file(path),
            };
        }
        let _ = unlinkat(
            &self.directory_fd,
            self.root_name.as_str(),
            AtFlags::REMOVEDIR,
        );
    }
}
