//! inotify instances.

use crate::process::files::donor::{Saved, Saver, Subject};
use crate::process::files::error::{At, FilesError, Reason, Refusal};
use crate::process::files::fdinfo::InotifyLine;
use crate::process::files::image::{InotifyWatch, Kind};
use crate::process::files::kinds::named::allowed;
use crate::process::files::raw;
use crate::process::rights::Opener;
use rustix::fs::inotify::{WatchFlags, add_watch, remove_watch};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::ioctl_fionread;
use std::collections::BTreeMap;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What a program can ask for: events (`IN_ALL_EVENTS`) and the modes `IN_EXCL_UNLINK` and `IN_ONESHOT`.
const ASKED: u32 = 0x0fff | 1 << 26 | 1 << 31;

/// Reads an instance: what it watches is found by the handles that the kernel shows.
pub fn save(saver: &Saver<'_>, subject: &Subject) -> Saved<Kind> {
    if saver.frozen && ioctl_fionread(&subject.copy).at("FIONREAD")? > 0 {
        return Err(Reason::InotifyUnread.into());
    }
    let mut mounts: BTreeMap<u32, Option<OwnedFd>> = BTreeMap::new();
    let mut watches = BTreeMap::new();
    for line in subject.info.inotify() {
        let mount = mounts
            .entry(line.device)
            .or_insert_with(|| mount(line.device));
        let path = mount.as_ref().and_then(|mount| path(mount, &line));
        let path = path.ok_or(Reason::InotifyUnread)?;
        let mask = line.mask & ASKED;
        watches.insert(line.id, InotifyWatch { path, mask });
    }
    Ok(Kind::Inotify { watches })
}

/// Something opened on the file system with this number.
fn mount(device: u32) -> Option<OwnedFd> {
    let (major, minor) = (device >> 20, device & 0xf_ffff);
    let wanted = format!("{major}:{minor}");
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let at = table.lines().find_map(|line| {
        let mut words = line.split(' ');
        (words.nth(2)? == wanted).then(|| words.nth(1))?
    })?;
    // Spaces and the like are written as octal numbers (`proc_pid_mountinfo(5)`).
    let at = at
        .replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\134", "\\");
    let found = open(at.as_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    Some(found)
}

fn path(mount: &OwnedFd, line: &InotifyLine) -> Option<String> {
    let file = raw::open_handle(mount.as_fd(), line.handle.0, &line.handle.1).ok()?;
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = fs::read_link(&link).ok()?;
    let (there, here) = (fs::metadata(&path).ok()?, fs::metadata(&link).ok()?);
    let same = (there.dev(), there.ino()) == (here.dev(), here.ino());
    same.then(|| path.into_os_string().into_string().ok())?
}

/// Adds the watches with their numbers. The kernel counts up, so numbers between are used for a moment.
pub fn fill(
    opener: &mut Opener,
    fd: &OwnedFd,
    watches: &BTreeMap<i32, InotifyWatch>,
) -> Result<(), FilesError> {
    let spare = tempfile_directory()?;
    let mut next = 1;
    let outcome = watches.iter().try_for_each(|(id, watch)| {
        while next < *id {
            let spent =
                add_watch(fd, spare.as_str(), WatchFlags::ATTRIB).at("inotify_add_watch")?;
            remove_watch(fd, spent).at("inotify_rm_watch")?;
            discard(fd)?;
            next = spent + 1;
        }
        let given = opener.watch(fd.as_fd(), Path::new(&watch.path), watch.mask);
        let given = allowed(opener, &watch.path, given)?;
        if given != *id {
            let path = watch.path.clone();
            let what = "two watched paths are one file";
            return Err(Refusal::Differs { path, what }.into());
        }
        next = given + 1;
        Ok(())
    });
    // The directory is empty and ours.
    let _ = fs::remove_dir(&spare);
    outcome
}

/// A directory of our own, which nothing else watches or changes.
fn tempfile_directory() -> Result<String, FilesError> {
    let number = std::process::id();
    for attempt in 0..1000 {
        let path = format!("/tmp/.holdfast-inotify-{number}-{attempt}");
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).at(path),
        }
    }
    Err(Refusal::NameTaken("/tmp/.holdfast-inotify".into()).into())
}

/// Reads what a removed watch leaves. Watches that are there already may tell of something meanwhile; that is lost, as it
/// would be a moment later: the tree does not run here yet.
fn discard(fd: &OwnedFd) -> Result<(), FilesError> {
    let mut events = [0u8; 4096];
    if ioctl_fionread(fd).at("FIONREAD")? > 0 {
        rustix::io::read(fd, &mut events).at("inotify")?;
    }
    Ok(())
}
