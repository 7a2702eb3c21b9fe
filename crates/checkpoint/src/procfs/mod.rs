//! Parsers for a process's files in `/proc`. Parsers are total: malformed text gives an error or an absent value,
//! never a panic.

mod maps;
mod stat;
mod status;

pub(crate) use maps::smaps_to_maps;
pub use maps::{MapLine, VmFlags, parse_maps};
pub use stat::ProcStat;
pub use status::ProcStatus;

use super::error::{Context, Error, Result, unexpected_text};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Reads a file of a process.
pub(crate) fn read(pid: i32, name: &str) -> Result<String> {
    String::from_utf8(read_bytes(pid, name)?)
        .or_else(|error| Ok(String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// Reads a file of a process, any bytes allowed.
pub(crate) fn read_bytes(pid: i32, name: &str) -> Result<Vec<u8>> {
    let path = format!("/proc/{pid}/{name}");
    read_file(&path).map_err(|source| to_error(pid, path, source))
}

/// Reads a file of unknown length in few large pieces, as each piece costs a system call.
fn read_file(path: &str) -> io::Result<Vec<u8>> {
    const PIECE: usize = 16 << 10;
    let mut file = File::open(path)?;
    let (mut bytes, mut piece) = (Vec::new(), [0; PIECE]);
    loop {
        match file.read(&mut piece) {
            Ok(0) => return Ok(bytes),
            Ok(read) => bytes.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Suffix that the kernel appends to the name of a removed file. Names of existing files may end in it too.
pub(crate) const DELETED_SUFFIX: &[u8] = b" (deleted)";

/// Returns the target of a process's symbolic link, as text.
pub(crate) fn link_text(pid: i32, name: &str) -> Result<String> {
    let target = link_target(pid, name)?;
    Ok(target.to_string_lossy().into_owned())
}

/// Returns the target of a process's symbolic link.
pub(crate) fn link_target(pid: i32, name: &str) -> Result<PathBuf> {
    let path = format!("/proc/{pid}/{name}");
    fs::read_link(&path).map_err(|source| to_error(pid, path, source))
}

/// Returns true if `target`, as the kernel shows it for this link, names a file that was removed or replaced.
pub(crate) fn is_deleted(pid: i32, name: &str, target: &Path) -> bool {
    let device_and_inode = |found: fs::Metadata| (found.dev(), found.ino());
    target.as_os_str().as_bytes().ends_with(DELETED_SUFFIX)
        && fs::symlink_metadata(target).map(device_and_inode).ok()
            != fs::metadata(format!("/proc/{pid}/{name}"))
                .map(device_and_inode)
                .ok()
}

fn to_error(pid: i32, what: String, source: io::Error) -> Error {
    match source.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT) if !is_alive(pid) => Error::ProcessEnded(pid),
        _ => Error::Kernel {
            operation: what,
            source,
        },
    }
}

fn is_alive(pid: i32) -> bool {
    fs::metadata(format!("/proc/{pid}")).is_ok()
}

/// Returns the threads of a process, the first thread first.
///
/// # Errors
/// [`Error::ProcessEnded`] if the process does not exist.
pub fn threads(pid: i32) -> Result<Vec<i32>> {
    let folder = format!("/proc/{pid}/task");
    let mut found = list_all_threads(|| numeric_entries(&folder, pid), || thread_count(pid))?;
    found.sort_by_key(|tid| (*tid != pid, *tid));
    Ok(found)
}

/// Returns the kernel's count of a process's threads, ending threads included.
///
/// # Errors
/// [`Error::ProcessEnded`] if the process does not exist.
pub(crate) fn thread_count(pid: i32) -> Result<usize> {
    let folder = format!("/proc/{pid}/task");
    let metadata = fs::metadata(&folder).map_err(|source| to_error(pid, folder, source))?;
    // A folder has two links of its own.
    Ok(metadata.nlink().saturating_sub(2) as usize)
}

/// Returns the threads of a process by one listing, the first thread first. A thread that ends meanwhile ends the
/// kernel's walk, and the walk goes on behind a living thread: threads can be missing.
pub(crate) fn list_threads_once(pid: i32) -> Result<Vec<i32>> {
    let mut found = numeric_entries(&format!("/proc/{pid}/task"), pid)?;
    found.sort_by_key(|tid| (*tid != pid, *tid));
    Ok(found)
}

/// Lists threads until there are as many as the kernel counts before and after: none can be missing then, unless one
/// ended and another began in the same instant. If threads end all the time, returns all threads found so far.
fn list_all_threads(
    mut list: impl FnMut() -> Result<Vec<i32>>,
    mut count: impl FnMut() -> Result<usize>,
) -> Result<Vec<i32>> {
    /// Most listings of threads that end all the time.
    const LISTINGS_MAX: usize = 16;
    let mut found = BTreeSet::new();
    for _ in 0..LISTINGS_MAX {
        let counted = count()?;
        let listed = list()?;
        if listed.len() == counted && count()? == counted {
            return Ok(listed);
        }
        found.extend(listed);
    }
    Ok(found.into_iter().collect())
}

/// Returns the children of all threads of a process.
///
/// # Errors
/// [`Error::ProcessEnded`] if the process does not exist.
pub fn children(pid: i32) -> Result<Vec<i32>> {
    let mut found = Vec::new();
    for tid in threads(pid)? {
        let text = match read(pid, &format!("task/{tid}/children")) {
            Ok(text) => text,
            // The thread has ended, and its children have another parent.
            Err(_) if fs::metadata(format!("/proc/{pid}/task/{tid}")).is_err() => continue,
            Err(error) => return Err(error),
        };
        found.extend(
            text.split_whitespace()
                .filter_map(|word| word.parse::<i32>().ok()),
        );
    }
    found.sort_unstable();
    Ok(found)
}

/// Returns the entries of a folder that are numbers.
pub(crate) fn numeric_entries(folder: &str, pid: i32) -> Result<Vec<i32>> {
    let entries =
        fs::read_dir(folder).map_err(|source| to_error(pid, folder.to_owned(), source))?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.context(|| folder.to_owned())?;
        if let Some(number) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        {
            found.push(number);
        }
    }
    Ok(found)
}

/// Returns the mappings of a process with their advice (`smaps`). The kernel walks page tables for this file, so the
/// call is too slow for the freeze.
///
/// # Errors
/// [`Error::ProcessEnded`], or a line that does not parse.
pub fn mappings_with_vm_flags(pid: i32) -> Result<Vec<MapLine>> {
    Ok(read_mappings(pid, "smaps")?.1)
}

/// Returns the mappings of a process (`maps`), without their advice.
///
/// # Errors
/// [`Error::ProcessEnded`], or a line that does not parse.
pub fn mappings(pid: i32) -> Result<Vec<MapLine>> {
    Ok(read_mappings(pid, "maps")?.1)
}

/// Reads and parses `maps` or `smaps`, and returns the text and its mappings.
pub(crate) fn read_mappings(pid: i32, name: &str) -> Result<(Vec<u8>, Vec<MapLine>)> {
    parse_mappings(pid, name, read_bytes(pid, name)?)
}

/// Parses the text of `maps` or `smaps`, and returns both. The kernel gives these files in pieces, between which a
/// running process may change its mappings: if mappings overlap, the file is read again.
pub(crate) fn parse_mappings(
    pid: i32,
    name: &str,
    text: Vec<u8>,
) -> Result<(Vec<u8>, Vec<MapLine>)> {
    parse_until_ordered(text, || read_bytes(pid, name))
}

fn parse_until_ordered(
    mut text: Vec<u8>,
    mut read: impl FnMut() -> Result<Vec<u8>>,
) -> Result<(Vec<u8>, Vec<MapLine>)> {
    /// Most attempts to read mappings that change meanwhile.
    const ATTEMPTS_MAX: usize = 50;
    for _ in 0..ATTEMPTS_MAX {
        let lines = parse_maps(&text)
            .ok_or_else(|| unexpected_text("cannot parse a process's mappings"))?;
        if lines.is_sorted_by(|a, b| a.end <= b.start) {
            return Ok((text, lines));
        }
        text = read()?;
    }
    Err(unexpected_text(
        "a process's mappings change at each attempt to read them",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listing that an ending thread has cut short.
    #[test]
    fn listing_shorter_than_count_is_repeated() {
        let mut listings = [vec![1, 2], vec![1, 3, 4]].into_iter();
        let found = list_all_threads(|| Ok(listings.next().expect("two")), || Ok(3));
        assert_eq!(found.expect("listed"), [1, 3, 4]);
    }

    /// Thread 2 was listed and has ended, and thread 3 is missing: the number is right after the listing.
    #[test]
    fn listing_with_ended_thread_is_repeated() {
        let mut counts = [4, 3, 3, 3].into_iter();
        let mut listings = [vec![1, 2, 4], vec![1, 3, 4]].into_iter();
        let found = list_all_threads(
            || Ok(listings.next().expect("two")),
            || Ok(counts.next().expect("four")),
        );
        assert_eq!(found.expect("listed"), [1, 3, 4]);
    }

    #[test]
    fn listings_without_end_are_joined() {
        let mut ending = 10..;
        let list = || Ok(vec![1, ending.next().expect("endless")]);
        let found = list_all_threads(list, || Ok(3)).expect("listed");
        assert!(found.starts_with(&[1, 10, 11]), "{found:?}");
    }

    /// Between the two pieces of the first text, the process has joined two mappings.
    #[test]
    fn overlapping_mappings_are_read_again() {
        let line = |range| format!("{range} rw-p 00000000 00:00 0 \n");
        let torn = line("1000-2000") + &line("1000-3000");
        let whole = line("1000-3000");
        let torn = torn.into_bytes();
        let whole = whole.into_bytes();
        let found = parse_until_ordered(torn.clone(), || Ok(whole.clone()));
        let (text, lines) = found.expect("ordered");
        assert_eq!((text, lines.len()), (whole, 1));
        assert!(parse_until_ordered(torn.clone(), || Ok(torn.clone())).is_err());
    }

    #[test]
    fn own_threads_are_counted() {
        let own = std::process::id() as i32;
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || receiver.recv());
        assert!(thread_count(own).expect("alive") >= 2);
        drop(sender);
        let _ = thread.join();
    }
}
