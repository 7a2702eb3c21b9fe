//! Socket files before they may be seen. The kernel remembers the name by which a socket was bound, so it is bound by its
//! true name, but below a directory of our own that is the root for the moment; renaming the file publishes it.

use super::address;
use crate::process::files::acceptor::Stock;
use crate::process::files::error::{At, FilesError, Refusal};
use crate::process::files::image::FileId;
use crate::process::files::kinds::named::allowed;
use crate::process::rights::Opener;
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

/// What leads to an open directory.
fn link(directory: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

/// The directory that was made a moment ago, and no other that somebody has put in its place.
fn held(place: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = openat(place, name, flags, Mode::empty())?;
    let found = fstat(&root)?;
    if found.st_uid != rustix::process::geteuid().as_raw() || found.st_mode & 0o022 != 0 {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied));
    }
    Ok(root)
}

fn base(file: &Path) -> &Path {
    file.file_name().map_or(file, Path::new)
}

/// The file of a socket that has a name, but no file any more: the socket is reached by it, and nobody will see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// Of a socket of the tree.
    Socket(FileId),
    /// Of one that is there only while others are made.
    ForTheMoment,
}

/// A directory in which socket files wait. Both directories are held: whoever may rename them leads nobody elsewhere.
#[derive(Debug)]
pub struct Stage {
    /// The directory in which the files will be, as it is named.
    directory: PathBuf,
    /// What it is.
    place: OwnedFd,
    /// The name in it of the root for the moment, so that both are on one file system.
    name: String,
    /// That root.
    root: OwnedFd,
    /// Names of files that will be published.
    files: Vec<PathBuf>,
}

impl Stage {
    /// A stage for files in `directory`, which must exist, and where the tree must be allowed to make files.
    pub fn new(opener: &mut Opener, directory: &Path) -> Result<Self, FilesError> {
        let shown = directory.display().to_string();
        let place = opener.open_writable(directory);
        let place = allowed(opener, &shown, place)?;
        let place = Stock::lift_own(place)?;
        for attempt in 0..1000 {
            let name = format!(".holdfast-{}-{attempt}", std::process::id());
            match mkdirat(&place, name.as_str(), Mode::RWXU) {
                Ok(()) => {
                    let root = Stock::lift_own(held(&place, &name).at(&shown)?)?;
                    let stage = Self {
                        directory: directory.to_path_buf(),
                        place,
                        name,
                        root,
                        files: Vec::new(),
                    };
                    fs::create_dir_all(stage.staged(directory)).at(&shown)?;
                    return Ok(stage);
                }
                Err(Errno::EXIST) => {}
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
        let from = meant_from(name, file);
        let run = || {
            // SAFETY: only root and working directory become this thread's own, which nothing else uses.
            unsafe { unshare_unsafe(UnshareFlags::FS) }?;
            chroot(link(&self.root))?;
            chdir(from)?;
            work()
        };
        let outcome = std::thread::scope(|scope| scope.spawn(run).join());
        outcome.unwrap_or_else(|_| Err(io::Error::other("the thread that binds sockets ended")))
    }

    /// Where a file waits.
    pub fn staged(&self, file: &Path) -> PathBuf {
        link(&self.root).join(file.strip_prefix("/").unwrap_or(file))
    }

    /// Where a hidden file is.
    pub fn hidden(&self, hidden: &Hidden) -> PathBuf {
        let name = match hidden {
            Hidden::Socket(id) => format!(".removed-{id}"),
            Hidden::ForTheMoment => ".removed".to_string(),
        };
        link(&self.root).join(name)
    }

    /// Gives a file that waits another name, so that the next one may have its name.
    pub fn hide(&self, file: &Path, hidden: &Hidden) -> io::Result<()> {
        fs::rename(self.staged(file), self.hidden(hidden))
    }

    /// Gives a file that waits its owner and permissions; it will be published.
    pub fn add(
        &mut self,
        opener: &Opener,
        file: &Path,
        access: (u32, u32, u32),
    ) -> Result<(), FilesError> {
        self.check(opener, file, access.0)?;
        let staged = self.staged(file);
        let (uid, gid) = (Uid::from_raw(access.0), Gid::from_raw(access.1));
        chownat(
            CWD,
            &staged,
            Some(uid),
            Some(gid),
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .at("chown of a socket")?;
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

    /// Whether the tree may make this file, in place of one that is there.
    fn check(&self, opener: &Opener, file: &Path, user: u32) -> Result<(), FilesError> {
        let directory = fstat(&self.place).at("fstat")?;
        let sticky = directory.st_mode & libc::S_ISVTX != 0 && !opener.may_be(directory.st_uid);
        let there = statat(&self.place, base(file), AtFlags::SYMLINK_NOFOLLOW);
        let others = there.is_ok_and(|there| !opener.may_be(there.st_uid));
        if opener.rights().exempts(file) || opener.may_be(user) && !(sticky && others) {
            return Ok(());
        }
        Err(Refusal::NotAllowed(file.display().to_string()).into())
    }

    /// Puts the files where they belong, each in place of one that is there.
    pub fn publish(&mut self) -> Result<(), FilesError> {
        for file in std::mem::take(&mut self.files) {
            let there = link(&self.place).join(base(&file));
            fs::rename(self.staged(&file), there).at(file.display().to_string())?;
        }
        Ok(())
    }
}

/// Binds a socket whose file is to be `file`, inside a stage. Where the file was renamed since the socket was bound, it gets that
/// name too: the other one stays on stage.
pub fn bind(fd: BorrowedFd<'_>, name: &str, file: &Path) -> io::Result<()> {
    let bound = bound(name, file);
    if bound == file {
        return address::bind(fd, name.as_bytes());
    }
    fs::create_dir_all(bound.parent().unwrap_or(Path::new("/")))?;
    // An earlier socket may have been bound by the same name, and renamed as well.
    match fs::remove_file(&bound) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    address::bind(fd, name.as_bytes())?;
    fs::hard_link(&bound, file)
}

/// The directory from which a name is meant: of a relative one that which remains of its file without it.
fn meant_from(name: &str, file: &Path) -> PathBuf {
    let shown = file.to_string_lossy();
    match shown.strip_suffix(name) {
        Some(from) if from.ends_with('/') => PathBuf::from(from),
        _ => PathBuf::from("/"),
    }
}

/// The file that a socket makes which is bound by this name.
pub fn bound(name: &str, file: &Path) -> PathBuf {
    meant_from(name, file).join(name)
}

impl Drop for Stage {
    fn drop(&mut self) {
        // What is left is of no use to anybody; a directory that cannot be removed harms nobody.
        for entry in fs::read_dir(link(&self.root))
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
        let _ = unlinkat(&self.place, self.name.as_str(), AtFlags::REMOVEDIR);
    }
}
