//! Path of a Unix socket, taken so that no other daemon loses its socket and no client finds an unfinished one.
//!
//! The owner of the path holds a lock on `PATH.lock`. The socket is made under another name, given its mode and group,
//! and then renamed to the path in one step, over a dead daemon's socket.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::exit_code::SocketInUse;
use crate::private_files::{self, run_directory};

/// A taken path. Dropping it removes the socket's file, if it is still the one made here.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    inode: u64,
    _lock: File,
}

/// Permissions to connect.
#[derive(Debug, Clone, Copy)]
pub struct SocketPermissions {
    /// Mode bits of the file.
    pub mode: u32,
    /// Owning group; `None`: the process's.
    pub group: Option<u32>,
}

/// Takes `path` with a listener that `bind` makes at the path passed to it. Creates the directory if necessary.
///
/// # Errors
/// `AddrInUse` if a running daemon has the path; `AlreadyExists` if the path is not a socket; else the system's error.
pub fn acquire<T>(
    path: &Path,
    access: SocketPermissions,
    bind: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<(T, SocketPath)> {
    if let Some(parent) = path.parent() {
        run_directory(parent)?;
    }
    let lock_path = with_suffix(path, ".lock");
    let mut options = private_files::private_options();
    options.write(true).create(true).truncate(false);
    let lock = options.open(&lock_path).map_err(with_path(&lock_path))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(in_use_error(path)),
        other => other.map_err(|error| with_path(&lock_path)(error.into()))?,
    }
    check_stale(path)?;
    let temporary_path = with_suffix(path, ".new");
    match fs::remove_file(&temporary_path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(with_path(&temporary_path)(error));
        }
        _ => {}
    }
    let listener = bind(&temporary_path).map_err(with_path(&temporary_path))?;
    if access.group.is_some() {
        chown(&temporary_path, None, access.group).map_err(with_path(&temporary_path))?;
    }
    let mode = fs::Permissions::from_mode(access.mode);
    fs::set_permissions(&temporary_path, mode).map_err(with_path(&temporary_path))?;
    let inode = fs::symlink_metadata(&temporary_path)
        .map_err(with_path(&temporary_path))?
        .ino();
    fs::rename(&temporary_path, path).map_err(with_path(path))?;
    let socket_path = SocketPath {
        path: path.to_owned(),
        inode,
        _lock: lock,
    };
    Ok((listener, socket_path))
}

/// Returns true if a running daemon listens at `path`.
pub fn is_in_use(path: &Path) -> bool {
    check_stale(path).is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

/// Checks that [`acquire`] may replace `path`: no file is there, or a socket without a listener.
///
/// # Errors
/// `AddrInUse` if a running daemon has the path; `AlreadyExists` if the path is not a socket; else the system's error.
pub fn check_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(with_path(path)(error)),
        Ok(found) if !found.file_type().is_socket() => {
            let error = io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it exists and is not a socket; remove it, or set another run_dir",
            );
            return Err(with_path(path)(error));
        }
        Ok(_) => {}
    }
    let address = SocketAddrUnix::new(path)?;
    let probe = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    match connect(&probe, &address) {
        Err(rustix::io::Errno::CONNREFUSED | rustix::io::Errno::NOENT) => Ok(()),
        // Connected, full, or of another type: a listener exists.
        _ => Err(in_use_error(path)),
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        // The lock is still held, so no daemon that honours the lock can have put its socket here.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn in_use_error(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::AddrInUse, SocketInUse(path.to_owned()))
}

fn with_path(path: &Path) -> impl Fn(io::Error) -> io::Error {
    let path = path.to_owned();
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    const ROOT_ONLY: SocketPermissions = SocketPermissions {
        mode: 0o600,
        group: None,
    };

    fn listen(path: &Path) -> io::Result<UnixListener> {
        UnixListener::bind(path)
    }

    #[test]
    fn path_has_one_owner_and_is_freed_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/control.sock");
        let (listener, taken) = acquire(&path, ROOT_ONLY, listen).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        UnixStream::connect(&path).unwrap();
        let second = acquire(&path, ROOT_ONLY, listen).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        UnixStream::connect(&path).unwrap();
        drop((listener, taken));
        assert!(!path.exists());
        acquire(&path, ROOT_ONLY, listen).unwrap();
    }

    #[test]
    fn stale_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        drop(listen(&path).unwrap());
        assert!(path.exists());
        let (_listener, taken) = acquire(&path, ROOT_ONLY, listen).unwrap();
        UnixStream::connect(&path).unwrap();
        // A successor that ignores the lock keeps its socket.
        fs::remove_file(&path).unwrap();
        let _other = listen(&path).unwrap();
        drop(taken);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn live_socket_and_other_files_are_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _living = listen(&path).unwrap();
        let refused = acquire(&path, ROOT_ONLY, listen).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        UnixStream::connect(&path).unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let refused = acquire(&file, ROOT_ONLY, listen).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
}
