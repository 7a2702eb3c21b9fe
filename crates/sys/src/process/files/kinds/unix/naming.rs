//! Binding Unix sockets to their names, and reaching sockets with files that wait on stage.

use super::address;
use super::stage::{self, Hidden, Stage, bound};
use crate::process::files::acceptor::Stock;
use crate::process::files::error::{At, FilesError, Refusal};
use crate::process::files::image::{FileId, UnixName, UnixSocket};
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
pub fn at_name<R: Send>(
    stock: &mut Stock,
    name: &UnixName,
    file: &Path,
    work: impl FnOnce(Option<&Stage>) -> io::Result<R> + Send,
) -> Result<R, FilesError> {
    let UnixName::Path { name, .. } = name else {
        return work(None).at("a socket's name");
    };
    if climbs(file) || climbs(&bound(name, file)) {
        return Err(Refusal::NotAllowed(file.display().to_string()).into());
    }
    let directory = directory(file);
    let at = match stock
        .stages
        .iter()
        .position(|stage| stage.is_for(directory))
    {
        Some(at) => at,
        None => {
            let stage = Stage::new(&mut stock.opener, directory)?;
            stock.stages.push(stage);
            stock.stages.len() - 1
        }
    };
    let stage = &stock.stages[at];
    stage.inside(name, file, || work(Some(stage))).at(name)
}

/// Returns true if a path leads above the root: the root of a stage does not confine processes that use the path from
/// outside.
fn climbs(file: &Path) -> bool {
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
pub fn at_socket<R: Send>(
    stock: &mut Stock,
    id: FileId,
    socket: &UnixName,
    work: impl FnOnce(&[u8]) -> io::Result<R> + Send,
) -> Result<R, FilesError> {
    at_bound(stock, &Hidden::Socket(id), socket, work)
}

/// Same as [`at_socket`], for a socket that was bound with a hidden file if its own file was removed.
pub fn at_bound<R: Send>(
    stock: &mut Stock,
    hidden: &Hidden,
    name: &UnixName,
    work: impl FnOnce(&[u8]) -> io::Result<R> + Send,
) -> Result<R, FilesError> {
    let file = final_path(name);
    if let UnixName::Path { file: None, .. } = name
        && let Some(stage) = stock
            .stages
            .iter()
            .find(|stage| stage.is_for(directory(&file)))
    {
        let path = stage.hidden(hidden);
        return work(path.as_os_str().as_bytes()).at("a socket whose file was removed");
    }
    let raw = raw_name(name);
    at_name(stock, name, &file, |_| work(&raw))
}

/// Binds a socket to its name, if it has one. If the file was removed at the donor, the socket's file stays on stage as
/// a hidden one.
pub fn bind(
    stock: &mut Stock,
    fd: BorrowedFd<'_>,
    socket: &UnixSocket,
    hidden: &Hidden,
) -> Result<(), FilesError> {
    let name = raw_name(&socket.name);
    if name.is_empty() {
        return Ok(());
    }
    let file = final_path(&socket.name);
    let outcome = at_name(stock, &socket.name, &file, |_| match &socket.name {
        UnixName::Path { name, .. } => stage::bind(fd, name, &file),
        _ => address::bind(fd, &name),
    });
    let directory = directory(&file);
    let stage = stock
        .stages
        .iter_mut()
        .find(|stage| stage.is_for(directory));
    match outcome {
        Err(FilesError::Kernel { source, .. }) if source.kind() == io::ErrorKind::AddrInUse => {
            let shown = String::from_utf8_lossy(&name).replace('\0', "@");
            return Err(Refusal::NameTaken(shown).into());
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
        ) => stage.add(&stock.opener, &file, *access),
        // The file was removed at the donor: the next socket may be bound to the same name.
        (UnixName::Path { .. }, Some(stage)) => stage.hide(&file, hidden).at("rename of a socket"),
        _ => Ok(()),
    }
}
