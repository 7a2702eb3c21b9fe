//! Opening the files that a tree names, with no more rights than the tree has.

use super::deputy::{DeputyCall, PAYLOAD_MAX, UserIdentityDeputy};
use super::{FileRights, UserIdentity};
use crate::files::FilesRefusal;
use rustix::fs::inotify::{WatchFlags, add_watch};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `AT_EACCESS` and `AT_EMPTY_PATH`: check the file of a descriptor, with the effective identity.
const DESCRIPTOR_ACCESS: u64 = (libc::AT_EACCESS | libc::AT_EMPTY_PATH) as u64;
const WORKING_DIRECTORY: u64 = libc::AT_FDCWD as u64;

/// Opener of files by path. With limited rights, the opener has a deputy for each identity, from the first need until
/// [`Self::end_deputies`].
#[derive(Debug, Default)]
pub(crate) struct FileOpener {
    rights: FileRights,
    deputies: Vec<(UserIdentity, UserIdentityDeputy)>,
}

/// Owner and mode of a new file: user, group, mode.
pub(crate) type FileOwnerAndMode = (u32, u32, u32);

impl FileOpener {
    pub fn new(rights: FileRights) -> Self {
        Self {
            rights,
            deputies: Vec::new(),
        }
    }

    pub fn rights(&self) -> &FileRights {
        &self.rights
    }

    /// Returns true if the rights are limited.
    pub fn is_limited(&self) -> bool {
        self.rights != FileRights::Root
    }

    /// Returns true if a restored file may belong to this user.
    pub fn may_own(&self, user: u32) -> bool {
        !self.is_limited() || self.rights.identities().any(|one| one.user == user)
    }

    /// Returns the reason why a named file was not opened.
    pub fn failure_reason(&self, path: &Path, error: &io::Error) -> String {
        let shown = path.display().to_string();
        match self.is_limited() && is_refusal(error) {
            true => FilesRefusal::NotAllowed(shown).to_string(),
            false => format!("{shown}: {error}"),
        }
    }

    /// Ends the deputies: the tree may need their PIDs.
    pub fn end_deputies(&mut self) {
        self.deputies.clear();
    }

    /// Opens a file (`open(2)`).
    pub fn open(&mut self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY;
        if !self.is_limited() {
            return Ok(open(path, flags, Mode::empty())?);
        }
        let name = c_path(path)?;
        let opened = self.try_deputies(|deputy| open_as_deputy(deputy, &name, flags, 0));
        match opened {
            Err(error) if self.is_exempt_refusal(&error, path) => {
                open_without_links(path, flags, Mode::empty())
            }
            opened => opened,
        }
    }

    /// Creates a file with this name.
    pub fn create(&mut self, path: &Path, access: FileOwnerAndMode) -> io::Result<OwnedFd> {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
        if !self.is_limited() {
            let fd = open(path, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?;
            let (user, group, mode) = access;
            std::os::unix::fs::fchown(&fd, Some(user), Some(group))?;
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode))?;
            return Ok(fd);
        }
        let name = c_path(path)?;
        self.try_deputies(|deputy| {
            let fd = open_as_deputy(deputy, &name, flags, 0o600)?;
            set_access(deputy, &fd, access)?;
            Ok(fd)
        })
    }

    /// Creates a file without a name in a directory; or, if `name_is_known`, a file that had this path for a moment.
    pub fn create_nameless(
        &mut self,
        path: &Path,
        name_is_known: bool,
        access: FileOwnerAndMode,
    ) -> io::Result<OwnedFd> {
        let directory = match name_is_known {
            true => path.parent().unwrap_or(path),
            false => path,
        };
        let made = self.try_deputies(|deputy| {
            let fd = match name_is_known {
                true => create_removed(deputy, path)?,
                false => open_as_deputy(
                    deputy,
                    &c_path(path)?,
                    OFlags::TMPFILE | OFlags::RDWR,
                    0o600,
                )?,
            };
            set_access(deputy, &fd, access)?;
            Ok(fd)
        });
        match made {
            Err(error) if self.is_exempt_refusal(&error, path) => {
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
                let fd = open_without_links(directory, flags, Mode::RUSR | Mode::WUSR)?;
                let (user, group, mode) = access;
                std::os::unix::fs::fchown(&fd, Some(user), Some(group))?;
                // Set-user-ID and set-group-ID bits are left out.
                rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode & 0o1777))?;
                Ok(fd)
            }
            made => made,
        }
    }

    /// Connects a socket to an address of these bytes (`connect(2)`). The listener sees the identity that was used.
    pub fn connect(&mut self, fd: BorrowedFd<'_>, address: &[u8]) -> io::Result<()> {
        let length = address.len() as u64;
        let number = fd.as_raw_fd() as u64;
        let connected = self.try_deputies(|deputy| {
            deputy.call(&DeputyCall {
                number: libc::SYS_connect,
                arguments: [number, 0, length, 0, 0],
                payload: Some((1, address)),
            })
        });
        connected.map(drop)
    }

    /// Adds a watch (`inotify_add_watch(2)`).
    pub fn add_inotify_watch(
        &mut self,
        fd: BorrowedFd<'_>,
        path: &Path,
        mask: u32,
    ) -> io::Result<i32> {
        let name = c_path(path)?;
        let number = fd.as_raw_fd() as u64;
        let watched = self.try_deputies(|deputy| {
            deputy.call(&DeputyCall {
                number: libc::SYS_inotify_add_watch,
                arguments: [number, 0, u64::from(mask), 0, 0],
                payload: Some((1, &name)),
            })
        });
        match watched {
            Err(error) if self.is_exempt_refusal(&error, path) => {
                let opened =
                    open_without_links(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
                let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
                let mask = WatchFlags::from_bits_retain(mask);
                Ok(add_watch(fd, link.as_str(), mask)?)
            }
            watched => watched.map(|watch| watch as i32),
        }
    }

    /// Opens a directory in which the tree may create and replace files.
    pub fn open_writable(&mut self, directory: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = self.open(directory, flags)?;
        if !self.is_limited() {
            return Ok(fd);
        }
        let number = fd.as_raw_fd() as u64;
        let wanted = (libc::W_OK | libc::X_OK) as u64;
        let allowed = self.try_deputies(|deputy| {
            deputy.call(&DeputyCall {
                number: libc::SYS_faccessat2,
                arguments: [number, 0, wanted, DESCRIPTOR_ACCESS, 0],
                payload: Some((1, b"\0")),
            })
        });
        match allowed {
            Err(error) if self.is_exempt_refusal(&error, directory) => {
                open_without_links(directory, flags, Mode::empty())
            }
            may => may.map(|_| fd),
        }
    }

    /// Returns true if an operation that all identities are refused is done with the opener's own rights.
    fn is_exempt_refusal(&self, error: &io::Error, path: &Path) -> bool {
        is_refusal(error) && self.rights.is_exempt(path)
    }

    /// Returns the answer of the first deputy that is not refused, or the refusal if all are refused.
    fn try_deputies<T>(
        &mut self,
        operation: impl Fn(&UserIdentityDeputy) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut refusal = io::Error::from_raw_os_error(libc::EACCES);
        for at in 0..self.rights.identities().count() {
            if at == self.deputies.len()
                && let Some(identity) = self.rights.identities().nth(at).cloned()
            {
                let deputy = UserIdentityDeputy::start(&identity)?;
                self.deputies.push((identity, deputy));
            }
            match operation(&self.deputies[at].1) {
                Err(error) if is_refusal(&error) => refusal = error,
                outcome => return outcome,
            }
        }
        Err(refusal)
    }
}

/// Returns true if the caller's identity is the reason of the error.
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM))
}

/// Opens a file with all rights, and follows no links: another user's link cannot lead elsewhere.
fn open_without_links(path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    // Other calls ignore flags that have no meaning with `O_PATH`; `openat2(2)` refuses them.
    let with_path = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let flags = match flags.contains(OFlags::PATH) {
        true => flags & with_path,
        false => flags,
    };
    Ok(openat2(CWD, path, flags, mode, resolve)?)
}

fn c_path(path: &Path) -> io::Result<Vec<u8>> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.contains(&0) || bytes.len() >= PAYLOAD_MAX {
        return Err(io::Error::from(io::ErrorKind::InvalidFilename));
    }
    Ok([bytes, b"\0"].concat())
}

fn open_as_deputy(
    deputy: &UserIdentityDeputy,
    name: &[u8],
    flags: OFlags,
    mode: u32,
) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    let number = deputy.call(&DeputyCall {
        number: libc::SYS_openat,
        arguments: [
            WORKING_DIRECTORY,
            0,
            u64::from(flags.bits()),
            u64::from(mode),
            0,
        ],
        payload: Some((1, name)),
    })?;
    // SAFETY: the deputy has opened the file in the table that it shares with this process, and nothing else owns the
    // descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(number as i32) })
}

/// Creates a file under its former name, or under a similar one if that is in use, and unlinks it.
fn create_removed(deputy: &UserIdentityDeputy, path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
    for attempt in 0..1000 {
        let mut wanted = path.as_os_str().to_owned();
        if attempt > 0 {
            wanted.push(format!(".{attempt}"));
        }
        let name = c_path(Path::new(&wanted))?;
        match open_as_deputy(deputy, &name, flags, 0o600) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => {
                let fd = opened?;
                deputy.call(&DeputyCall {
                    number: libc::SYS_unlinkat,
                    arguments: [WORKING_DIRECTORY, 0, 0, 0, 0],
                    payload: Some((1, &name)),
                })?;
                return Ok(fd);
            }
        }
    }
    Err(io::Error::from(io::ErrorKind::AlreadyExists))
}

/// Sets owner and mode, as far as the deputy may.
fn set_access(
    deputy: &UserIdentityDeputy,
    fd: &OwnedFd,
    (user, group, mode): FileOwnerAndMode,
) -> io::Result<()> {
    let number = fd.as_raw_fd() as u64;
    let call = |number, arguments| {
        deputy.call(&DeputyCall {
            number,
            arguments,
            payload: None,
        })
    };
    call(
        libc::SYS_fchown,
        [number, u64::from(user), u64::from(group), 0, 0],
    )?;
    call(libc::SYS_fchmod, [number, u64::from(mode), 0, 0, 0]).map(drop)
}
