//! Binding Unix sockets to their names, and reaching sockets with files that wait on stage.

use super::address;
use super::staging_directory::{self, HiddenSocketFile, StagingDirectory, bound_path};
use crate::files::acceptor::FdStore;
use crate::files::error::{FilesError, FilesRefusal, StepContext};
use crate::files::image::{FileId, UnixName, UnixSocket};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Returns a name in the kernel's format.
pub fn raw_name(name: &UnixName) -> Vec<u8> {
    match name {
        UnixName::None => Vec::new(),
        UnixName::Abstract(name) => name.0.clone(),
        UnixName::Path { name, .. } => name.as_bytes().to_vec(),
    }
}

/// Returns the path where the file of a name is, or would be.
pub fn final_path(name: &UnixName) -> PathBuf {
    match name {
        UnixName::Path {
            file: Some(file), ..
        } => PathBuf::from(file),
        UnixName::Path { name, .. } => Path::new("/tmp").join(name),
        _ => PathBuf::from("/"),
    }
}

/// Calls `work` in an environment where the socket's name leads to its file on stage; a name without a file needs no
/// environment.
pub fn with_name<R: Send>(
    store: &mut FdStore,
    name: &UnixName,
    file: &Path,
    work: impl FnOnce(Option<&StagingDirectory>) -> io::Result<R> + Send,
) -> Result<R, FilesError> {
    let UnixName::Path { name, .. } = name else {
        return work(None).with_step("binding a socket's name");
    };
    if leads_above_root(file) || leads_above_root(&bound_path(name, file)) {
        return Err(FilesRefusal::NotAllowed(file.display().to_string()).into());
    }
    let directory = directory(file);
    let at = match store
        .staging_directories
        .iter()
        .position(|stage| stage.is_for(directory))
    {
        Some(at) => at,
        None => {
            let stage = StagingDirectory::new(&mut store.opener, directory)?;
            store.staging_directories.push(stage);
            store.staging_directories.len() - 1
        }
    };
    let stage = &store.staging_directories[at];
    stage
        .run_inside(name, file, || work(Some(stage)))
        .with_step(name)
}

/// Returns true if a path leads above the root: the root of a stage does not confine processes that use the path from
/// outside.
fn leads_above_root(file: &Path) -> bool {
    let depths = file.components().scan(0, |depth, part| {
        *depth += match part {
            Component::ParentDir => -1,
            Component::Normal(_) => 1,
            _ => 0,
        };
        Some(*depth)
    });
    depths.into_iter().any(|depth: i32| depth < 0)
}

/// Returns the directory of a file.
pub fn directory(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new("/"))
}

/// Calls `work` with a name of this socket of the tree, in an environment where the name leads to the socket.
pub fn with_socket_name<R: Send>(
    store: &mut FdStore,
    id: FileId,
    socket: &UnixName,
    work: impl FnOnce(&[u8]) -> io::Result<R> + Send,
) -> Result<R, FilesError> {
    with_bound_name(store, &HiddenSocketFile::Socket(id), socket, work)
}

/// Same as [`with_socket_name`], for a socket that was bound with a hidden file if its own file was removed.
pub fn with_bound_name<R: Send>(
    store: &mut FdStore,
    hidden: &HiddenSocketFile,
    name: &UnixName,
    work: impl FnOnce(&[u8]) -> io::Result<R> + Send,
) -> Result<R, FilesError> {
    let file = final_path(name);
    if let UnixName::Path { file: None, .. } = name
        && let Some(stage) = store
            .staging_directories
            .iter()
            .find(|stage| stage.is_for(directory(&file)))
    {
        let path = stage.hidden_path(hidden);
        return work(path.as_os_str().as_bytes())
            .with_step("binding a socket whose file was removed");
    }
    let raw = raw_name(name);
    with_name(store, name, &file, |_| work(&raw))
}

/// Binds a socket to its name, if it has one. If the file was removed at the donor, the socket's file stays on stage as
/// a hidden one.
pub fn bind(
    store: &mut FdStore,
    fd: BorrowedFd<'_>,
    socket: &UnixSocket,
    hidden: &HiddenSocketFile,
) -> Result<(), FilesError> {
    let name = raw_name(&socket.name);
    if name.is_empty() {
        return Ok(());
    }
    let file = final_path(&socket.name);
    let outcome = with_name(store, &socket.name, &file, |_| match &socket.name {
        UnixName::Path { name, .. } => staging_directory::bind(fd, name, &file),
        _ => address::bind(fd, &name),
    });
    let directory = directory(&file);
    let stage = store
        .staging_directories
        .iter_mut()
        .find(|stage| stage.is_for(directory));
    match outcome {
        Err(FilesError::Kernel { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {
            let shown = String::from_utf8_lossy(&name).replace('\0', "@");
            return Err(FilesRefusal::NameTaken(shown).into());
        }
        outcome => outcome?,
    }
    match (&socket.name, stage) {
        (
            UnixName::Path {
                file: Some(_),
                access,
                ..
            },
            Some(stage),
        ) => stage.add(&store.opener, &file, *access),
        // The file was removed at the donor: the next socket may be bound to the same name.
        (UnixName::Path { .. }, Some(stage)) => {
            stage.hide(&file, hidden).with_step("renaming a socket")
        }
        _ => Ok(()),
    }
}
