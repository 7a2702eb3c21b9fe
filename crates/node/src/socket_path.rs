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

use crate::private_files::{self, run_directory};

/// A taken path. Dropping it removes the socket's file, if it is still the one made here.
#[derive(Debug)]
pub(crate) struct SocketPath {
    path: PathBuf,
    inode: u64,
    _lock: File,
}

/// Permissions to connect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) mode: u32,
    pub(crate) group: Option<u32>,
}

/// Takes `path` with a listener that `bind` makes at the path passed to it. Creates the directory if necessary.
///
/// # Errors
/// `AddrInUse` if a running daemon has the path; `AlreadyExists` if the path is not a socket; else the system's error.
pub(crate) fn take<T>(
    path: &Path,
    access: Access,
    bind: impl FnOnce(&Path) -> io::Result<T>,
) -> io::Result<(T, SocketPath)> {
    if let Some(parent) = path.parent() {
        run_directory(parent)?;
    }
    let lock_path = with_suffix(path, ".lock");
    let mut options = private_files::options();
    options.write(true).create(true).truncate(false);
    let lock = options.open(&lock_path).map_err(at(&lock_path))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(in_use(path)),
        other => other.map_err(|error| at(&lock_path)(error.into()))?,
    }
    check_stale(path)?;
    let fresh = with_suffix(path, ".new");
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&fresh)(error)),
        _ => {}
    }
    let listener = bind(&fresh).map_err(at(&fresh))?;
    if access.group.is_some() {
        chown(&fresh, None, access.group).map_err(at(&fresh))?;
    }
    let mode = fs::Permissions::from_mode(access.mode);
    fs::set_permissions(&fresh, mode).map_err(at(&fresh))?;
    let inode = fs::symlink_metadata(&fresh).map_err(at(&fresh))?.ino();
    fs::rename(&fresh, path).map_err(at(path))?;
    let taken = SocketPath {
        path: path.to_owned(),
        inode,
        _lock: lock,
    };
    Ok((listener, taken))
}

/// Checks that `path` may be replaced: it does not exist, or is a socket without a listener.
fn check_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(at(path)(error)),
        Ok(found) if !found.file_type().is_socket() => {
            let error = io::Error::new(
                io::ErrorKind::AlreadyExists,
                "it exists and is not a socket; remove it, or set another run_dir",
            );
            return Err(at(path)(error));
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
        _ => Err(in_use(path)),
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

fn in_use(path: &Path) -> io::Error {
    let text = format!(
        "{}: another holdfastd listens there; stop it, or set another run_dir",
        path.display()
    );
    io::Error::new(io::ErrorKind::AddrInUse, text)
}

fn at(path: &Path) -> impl Fn(io::Error) -> io::Error {
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

    const ROOT_ONLY: Access = Access {
        mode: 0o600,
        group: None,
    };

    fn listen(path: &Path) -> io::Result<UnixListener> {
        UnixListener::bind(path)
    }

    #[test]
    fn a_path_has_one_owner_and_is_free_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/control.sock");
        let (listener, taken) = take(&path, ROOT_ONLY, listen).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);
        UnixStream::connect(&path).unwrap();
        let second = take(&path, ROOT_ONLY, listen).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse);
        UnixStream::connect(&path).unwrap();
        drop((listener, taken));
        assert!(!path.exists());
        take(&path, ROOT_ONLY, listen).unwrap();
    }

    #[test]
    fn a_dead_daemons_socket_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        drop(listen(&path).unwrap());
        assert!(path.exists());
        let (_listener, taken) = take(&path, ROOT_ONLY, listen).unwrap();
        UnixStream::connect(&path).unwrap();
        // A successor that ignores the lock keeps its socket.
        fs::remove_file(&path).unwrap();
        let _other = listen(&path).unwrap();
        drop(taken);
        UnixStream::connect(&path).unwrap();
    }

    #[test]
    fn what_lives_or_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        let _living = listen(&path).unwrap();
        let refused = take(&path, ROOT_ONLY, listen).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        UnixStream::connect(&path).unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "precious").unwrap();
        let refused = take(&file, ROOT_ONLY, listen).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }
}
