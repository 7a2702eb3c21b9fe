//! inotify instances.

use crate::file_rights::FileOpener;
use crate::files::donor::{FileBeingSaved, OpenFileSaver, SaveResult};
use crate::files::error::{BlockReason, FilesError, FilesRefusal, StepContext};
use crate::files::fdinfo::InotifyLine;
use crate::files::image::limits::WATCH_DESCRIPTOR_MAX;
use crate::files::image::{FilePath, InotifyWatch, OpenFileKind};
use crate::files::kinds::named_file::or_refusal;
use crate::files::syscalls;
use rustix::fs::inotify::{WatchFlags, add_watch, remove_watch};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::ioctl_fionread;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// Bits that a program can request: events (`IN_ALL_EVENTS`) and the modes `IN_EXCL_UNLINK` and `IN_ONESHOT`.
const REQUESTABLE_BITS: u32 = 0x0fff | 1 << 26 | 1 << 31;

/// Saves an instance; the watched files are found by the file handles that the kernel shows.
pub fn save(saver: &OpenFileSaver<'_>, source: &FileBeingSaved) -> SaveResult<OpenFileKind> {
    let unread = ioctl_fionread(&source.copy).with_step("FIONREAD")? > 0;
    if saver.frozen && unread {
        return Err(BlockReason::InotifyUnread.into());
    }
    let mut mounts: BTreeMap<u32, Option<OwnedFd>> = BTreeMap::new();
    let mut watches = BTreeMap::new();
    for line in source
        .info
        .inotify()
        .ok_or(BlockReason::InotifyFileNotFound)?
    {
        if !(1..=WATCH_DESCRIPTOR_MAX).contains(&line.id) {
            return Err(BlockReason::InotifyWatchTooHigh(line.id).into());
        }
        let mount = mounts
            .entry(line.device)
            .or_insert_with(|| open_mount(line.device));
        let path = mount.as_ref().and_then(|mount| watched_path(mount, &line));
        let path = path.ok_or(match unread {
            // The file was removed, and the program has not read the event yet that reports the end of its watch.
            true => BlockReason::InotifyUnread,
            false => BlockReason::InotifyFileNotFound,
        })?;
        let mask = line.mask & REQUESTABLE_BITS;
        watches.insert(line.id, InotifyWatch { path, mask });
    }
    Ok(OpenFileKind::Inotify { watches })
}

/// Opens the mount point of the file system with this device number.
fn open_mount(device: u32) -> Option<OwnedFd> {
    let (major, minor) = (device >> 20, device & 0xf_ffff);
    let wanted = format!("{major}:{minor}");
    let table = fs::read("/proc/self/mountinfo").ok()?;
    let mount_point = table.split(|byte| *byte == b'\n').find_map(|line| {
        let mut words = line.split(|byte| *byte == b' ');
        (words.nth(2)? == wanted.as_bytes()).then(|| words.nth(1))?
    })?;
    let mount_point = FilePath::from(unescape(mount_point));
    let found = open(
        &*mount_point,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .ok()?;
    Some(found)
}

/// Decodes spaces and the like, which are written as a backslash and three octal digits (`proc_pid_mountinfo(5)`).
fn unescape(mut text: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(text.len());
    while let [first, rest @ ..] = text {
        let digits = rest.get(..3).filter(|_| *first == b'\\');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let number = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        decoded.push(number.unwrap_or(*first));
        text = if number.is_some() { &rest[3..] } else { rest };
    }
    decoded
}

fn watched_path(mount: &OwnedFd, line: &InotifyLine) -> Option<FilePath> {
    let file = syscalls::open_handle(mount.as_fd(), line.handle.0, &line.handle.1).ok()?;
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = fs::read_link(&link).ok()?;
    let (named, opened) = (fs::metadata(&path).ok()?, fs::metadata(&link).ok()?);
    let is_same = (named.dev(), named.ino()) == (opened.dev(), opened.ino());
    is_same.then(|| path.into())
}

/// Adds the watches with their watch descriptors. The kernel counts up, so the numbers in between are used for a
/// moment.
pub fn add_watches(
    opener: &mut FileOpener,
    fd: &OwnedFd,
    watches: &BTreeMap<i32, InotifyWatch>,
) -> Result<(), FilesError> {
    let spare = tempfile_directory()?;
    let mut next = 1;
    let outcome = watches.iter().try_for_each(|(id, watch)| {
        while next < *id {
            let spent =
                add_watch(fd, spare.as_str(), WatchFlags::ATTRIB).with_step("inotify_add_watch")?;
            remove_watch(fd, spent).with_step("inotify_rm_watch")?;
            discard_removal_event(fd)?;
            next = spent + 1;
        }
        let outcome = opener.add_inotify_watch(fd.as_fd(), &watch.path, watch.mask);
        let watch_descriptor = or_refusal(opener, &watch.path, outcome)?;
        if watch_descriptor != *id {
            let path = watch.path.to_string();
            let what = "watched paths lead to the same file";
            return Err(FilesRefusal::Differs {
                path,
                property: what,
            }
            .into());
        }
        next = watch_descriptor + 1;
        Ok(())
    });
    // The directory is empty, and belongs to this process.
    let _ = fs::remove_dir(&spare);
    outcome
}

/// Creates a directory that nothing else watches or changes.
fn tempfile_directory() -> Result<String, FilesError> {
    let number = std::process::id();
    for attempt in 0..1000 {
        let path = format!("/tmp/.holdfast-inotify-{number}-{attempt}");
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_step(path),
        }
    }
    Err(FilesRefusal::NameTaken("/tmp/.holdfast-inotify".into()).into())
}

/// Reads the event that a removed watch leaves. Events of existing watches that are read with it are lost, as they
/// would be a moment later in `empty`: the tree does not run here yet.
fn discard_removal_event(fd: &OwnedFd) -> Result<(), FilesError> {
    let mut events = [0u8; 4096];
    if ioctl_fionread(fd).with_step("FIONREAD")? > 0 {
        rustix::io::read(fd, &mut events).with_step("inotify")?;
    }
    Ok(())
}

/// Discards the events reported since the watches were made: the original, which was stopped with nothing to read, has
/// read them already.
pub fn discard_events(fd: &OwnedFd) -> Result<(), FilesError> {
    while ioctl_fionread(fd).with_step("FIONREAD")? > 0 {
        discard_removal_event(fd)?;
    }
    Ok(())
}
