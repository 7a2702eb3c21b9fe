//! Tests that a tree opens the files that its users could open, and no others.

use super::opener::FileOpener;
use super::{FileRights, UserIdentity};
use rustix::fs::OFlags;
use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

/// IDs that no user and no group has.
const USER: u32 = 61_234;
const OTHER: u32 = 61_235;
const GROUP: u32 = 61_236;

/// A directory that all users may enter, with one file each for root, the user, the group, and all users.
struct TestFolder {
    folder: tempfile::TempDir,
}

impl TestFolder {
    /// Creates the directory; `None` if the test does not run as root.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: other users need root");
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("opened");
        let place = Self { folder };
        for (name, user, group, mode) in [
            ("roots", 0, 0, 0o600),
            ("users", USER, 0, 0o600),
            ("groups", 0, GROUP, 0o660),
            ("all", 0, 0, 0o644),
        ] {
            let path = place.path(name);
            fs::write(&path, name).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
            chown(&path, Some(user), Some(group)).expect("an owner");
        }
        Some(place)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn limited_opener(users: &[(u32, &[u32])], files: &[&Path]) -> FileOpener {
    let identity = |(user, groups): &(u32, &[u32])| UserIdentity {
        user: *user,
        group: OTHER,
        groups: groups.to_vec(),
    };
    FileOpener::new(FileRights::Limited {
        identities: users.iter().map(identity).collect(),
        directories: files.iter().map(|path| path.to_path_buf()).collect(),
    })
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(outcome: std::io::Result<T>) {
    let kind = outcome.map_err(|error| error.kind());
    assert!(matches!(kind, Err(ErrorKind::PermissionDenied)), "{kind:?}");
}

#[test]
fn file_is_opened_by_permitted_identity() {
    let Some(place) = TestFolder::new() else {
        return;
    };
    let mut one = limited_opener(&[(USER, &[])], &[]);
    one.open(&place.path("users"), OFlags::RDWR)
        .expect("its own");
    one.open(&place.path("all"), OFlags::RDONLY)
        .expect("anybody's");
    assert_refused(one.open(&place.path("all"), OFlags::RDWR));
    assert_refused(one.open(&place.path("roots"), OFlags::RDONLY));
    assert_refused(one.open(&place.path("groups"), OFlags::RDONLY));
    let mut both = limited_opener(&[(OTHER, &[GROUP]), (USER, &[])], &[]);
    both.open(&place.path("users"), OFlags::RDWR)
        .expect("the second's");
    both.open(&place.path("groups"), OFlags::RDWR)
        .expect("the group's");
    assert_refused(both.open(&place.path("roots"), OFlags::RDONLY));
    assert_refused(limited_opener(&[], &[]).open(&place.path("all"), OFlags::RDONLY));
    FileOpener::default()
        .open(&place.path("roots"), OFlags::RDWR)
        .expect("root may all");
}

#[test]
fn policy_directory_is_open_to_all_identities() {
    let Some(place) = TestFolder::new() else {
        return;
    };
    let directory = place.path("logs");
    fs::create_dir(&directory).expect("made");
    let log = directory.join("log");
    fs::write(&log, "").expect("written");
    fs::set_permissions(&log, fs::Permissions::from_mode(0o600)).expect("a mode");
    symlink(place.path("roots"), directory.join("link")).expect("a link");
    let mut opener = limited_opener(&[(USER, &[])], &[&directory]);
    opener.open(&log, OFlags::RDWR).expect("below it");
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).expect("a mode");
    let opened = opener.open(&log, OFlags::PATH | OFlags::APPEND);
    opened.expect("not even to be seen otherwise");
    assert_refused(opener.open(&place.path("roots"), OFlags::RDWR));
    assert_refused(opener.open(&directory.join("../roots"), OFlags::RDWR));
    // With links, a user with write access to the directory could reach all of root's files.
    let linked = opener.open(&directory.join("link"), OFlags::RDWR);
    let error = linked.expect_err("a link").raw_os_error();
    assert_eq!(error, Some(libc::ELOOP));
}

#[test]
fn restorer_memory_is_refused() {
    if TestFolder::new().is_none() {
        return;
    }
    let mut opener = limited_opener(&[(USER, &[])], &[]);
    let own = std::process::id();
    assert_refused(opener.open(Path::new(&format!("/proc/{own}/mem")), OFlags::RDWR));
    assert_refused(opener.open(Path::new(&format!("/proc/{own}/environ")), OFlags::RDONLY));
    opener
        .open(Path::new(&format!("/proc/{own}/status")), OFlags::RDONLY)
        .expect("anybody may");
}

#[test]
fn nameless_files_belong_to_permitted_users() {
    let Some(place) = TestFolder::new() else {
        return;
    };
    let mut opener = limited_opener(&[(USER, &[])], &[]);
    let path = place.path("gone");
    assert_refused(opener.create_nameless(&path, true, (USER, OTHER, 0o600)));
    chown(place.folder.path(), Some(USER), None).expect("an owner");
    for (path, name_is_known) in [(path.as_path(), true), (place.folder.path(), false)] {
        let fd = opener.create_nameless(path, name_is_known, (USER, OTHER, 0o640));
        let found = rustix::fs::fstat(fd.expect("its own")).expect("is there");
        assert_eq!(
            (found.st_uid, found.st_gid, found.st_nlink),
            (USER, OTHER, 0)
        );
        assert_eq!(found.st_mode & 0o7777, 0o640);
        assert_refused(opener.create_nameless(path, name_is_known, (0, 0, 0o4755)));
    }
    assert!(!path.exists());
}

#[test]
fn connect_and_watch_use_limited_identity() {
    let Some(place) = TestFolder::new() else {
        return;
    };
    let path = place.path("socket");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
    let client = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .expect("a socket");
    let mut address = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
    address.extend(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()));
    address.push(0);
    let mut opener = limited_opener(&[(USER, &[])], &[]);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
    assert_refused(opener.connect(client.as_fd(), &address));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("a mode");
    opener.connect(client.as_fd(), &address).expect("all may");
    let (accepted, _) = listener.accept().expect("it came");
    let peer = rustix::net::sockopt::socket_peercred(&accepted).expect("somebody");
    assert_eq!((peer.uid.as_raw(), peer.gid.as_raw()), (USER, OTHER));

    let flags = rustix::fs::inotify::CreateFlags::CLOEXEC;
    let watcher = rustix::fs::inotify::init(flags).expect("inotify");
    let mask = libc::IN_MODIFY;
    opener
        .add_inotify_watch(watcher.as_fd(), &place.path("all"), mask)
        .expect("anybody's");
    assert_refused(opener.add_inotify_watch(watcher.as_fd(), &place.path("roots"), mask));
}

#[test]
fn unwritable_directory_is_refused() {
    let Some(place) = TestFolder::new() else {
        return;
    };
    let mut opener = limited_opener(&[(USER, &[])], &[]);
    assert_refused(opener.open_writable(place.folder.path()));
    chown(place.folder.path(), Some(USER), None).expect("an owner");
    opener.open_writable(place.folder.path()).expect("its own");
}

#[test]
fn deputies_end_on_request() {
    let Some(place) = TestFolder::new() else {
        return;
    };
    let mut opener = limited_opener(&[(USER, &[])], &[]);
    let fd = opener
        .open(&place.path("all"), OFlags::RDONLY)
        .expect("opened");
    opener.end_deputies();
    let tasks =
        fs::read_to_string(format!("/proc/self/task/{}/children", current_tid())).expect("read");
    assert_eq!(tasks.trim(), "");
    let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("stays");
    assert_eq!(link, place.path("all"));
}

fn current_tid() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}
